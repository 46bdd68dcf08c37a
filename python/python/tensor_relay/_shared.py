"""`shared_client`: one client for each server, shared by all modules of a process."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from typing import Any

from ._native import Client, server_of

RECENT_MAX = 32
"""How many clients stay connected without a reference from the program: those used last. Other clients are closed with
their last reference."""


class SharedClients:
    """The clients of this process by server."""

    def __init__(self, **options: Any) -> None:
        """options: arguments of `connect`."""
        self._options = options
        self._lock = threading.Lock()
        self._clients: weakref.WeakValueDictionary[str, Client] = weakref.WeakValueDictionary()
        self._recent: OrderedDict[str, Client] = OrderedDict()
        # A lock for each server, so that a slow connect does not block callers of other servers.
        self._connecting: weakref.WeakValueDictionary[str, _ConnectLock] = weakref.WeakValueDictionary()

    def get(self, ticket: str, timeout: float) -> Client:
        """The client of the ticket's server, with the ticket's rights; connects if there is none."""
        from . import connect

        server = server_of(ticket)  # Raises ForkError in a forked process, where another thread may hold the lock.
        with self._lock:
            if (client := self._open_client(server)) is not None:
                return client
            connect_lock = self._connecting.setdefault(server, _ConnectLock())
        with connect_lock.lock:
            with self._lock:
                if (client := self._open_client(server)) is not None:
                    return client
            client = connect(server, timeout=timeout, **self._options)
            with self._lock:
                self._remember(server, client)
            return client

    def _open_client(self, server: str) -> Client | None:
        client = self._clients.get(server)
        if client is None or client.closed:
            return None
        self._remember(server, client)
        return client

    def _remember(self, server: str, client: Client) -> None:
        self._clients[server] = client
        self._recent[server] = client
        self._recent.move_to_end(server)
        while len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)


class _ConnectLock:
    """The lock that lets one caller at a time connect to a server. It lives while a caller uses it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_shared = SharedClients()


def shared_client(ticket: str | os.PathLike[str] | None = None, *, timeout: float = 10.0) -> Client:
    """This process' shared client of a server. The first call connects with the default options of `connect`; later
    calls for the same server return the same client. Thread-safe.

    ticket: as for `connect`. Its topic is ignored: pass topics to the client's methods. Tickets with different tokens
        have different rights, so each token has a client of its own.
    timeout: how long connecting is retried if the client is not connected yet.

    Do not `close()` the client: that closes it for its other users too, and the next call connects again. The 32
    clients used last stay connected until the process ends. Pass tickets, not clients, to other processes.

    Raises the errors of `connect`. ForkError in a process that was forked after tensor_relay had started in its parent:
    start processes by `spawn`, e.g. by `multiprocessing_context="spawn"` of a PyTorch DataLoader.
    """
    from . import _read_ticket

    return _shared.get(_read_ticket(ticket), timeout)
