"""Clients that the parts of a process share, one for each server."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from typing import Any

from ._native import Client, server_of

KEPT_MAX = 32
"""How many clients are kept that nobody uses: the servers that a process asks again and again. Others go when they are let
go, and connect anew, in a few milliseconds on a network of one site."""


class Shared:
    """The clients of this process by server. A process that was forked begins with none."""

    def __init__(self, **options: Any) -> None:
        """Connects with these options of `connect`."""
        self._options = options
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._alive: weakref.WeakValueDictionary[str, Client] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[str, Client] = OrderedDict()
        # Connecting takes time, and keeps nobody from the clients of other servers.
        self._connecting: weakref.WeakValueDictionary[str, _Turn] = weakref.WeakValueDictionary()

    def get(self, ticket: str, timeout: float) -> Client:
        """The client of the ticket's server, with the ticket's rights."""
        from . import connect

        server = server_of(ticket)
        self._forget_after_fork()
        with self._lock:
            if (client := self._open(server)) is not None:
                return client
            turn = self._connecting.setdefault(server, _Turn())
        with turn.lock:
            with self._lock:
                if (client := self._open(server)) is not None:
                    return client
            client = connect(server, timeout=timeout, **self._options)
            with self._lock:
                self._keep(server, client)
            return client

    def _open(self, server: str) -> Client | None:
        client = self._alive.get(server)
        if client is None or client.closed:
            return None
        self._keep(server, client)
        return client

    def _keep(self, server: str, client: Client) -> None:
        self._alive[server] = client
        self._kept[server] = client
        self._kept.move_to_end(server)
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)

    def _forget_after_fork(self) -> None:
        if os.getpid() != self._pid:
            self._begin()


class _Turn:
    """Whose turn it is to connect to a server. It lives as long as anybody waits."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_shared = Shared()


def shared_client(ticket: str | os.PathLike[str] | None = None, *, timeout: float = 10.0) -> Client:
    """The client of a server that this process shares: it is connected when it is first asked for, with the options that
    `connect` has by default, and every part of the program that asks for the same server gets the same one. May be called
    from several threads.

    ticket: as for `connect`. Its topic does not matter: name topics in the calls. Tickets with other tokens have other rights, so
        each has a client of its own.
    timeout: how long the server is tried to be reached, where it is not connected yet.

    Do not `close()` it, since others use it; who does ends it for them, and the next call connects anew. The last 32 are
    kept until the process ends. A ticket is text, so what goes to other processes is that: each connects once for itself.

    Raises what `connect` does.
    """
    from . import _read_ticket

    return _shared.get(_read_ticket(ticket), timeout)
