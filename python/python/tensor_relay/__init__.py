"""Moves tensors between processes on different hosts: encrypted, verified, whole or not at all.

    import tensor_relay

    # The producer:
    with tensor_relay.serve("0.0.0.0:4747") as relay:
        print(relay.ticket)
        relay.publish("policy", model.state_dict())

    # Each consumer:
    with tensor_relay.connect(ticket) as client:
        for snapshot in client.subscribe("policy"):
            model.load_state_dict(snapshot.torch())

Times are in seconds, sizes in bytes. Every wait gives the GIL away and ends with Ctrl-C. Messages go to the logger
`tensor_relay`.
"""

from __future__ import annotations

import atexit
import os
import re
import weakref
from collections.abc import Iterable, Mapping

from . import _native, _released, tree
from ._native import (
    Client,
    CodecCount,
    Description,
    Producer,
    Progress,
    Publication,
    Receipt,
    Relay,
    Snapshot,
    Subscription,
    Tensor,
    TensorInfo,
    TopicInfo,
)
from ._pull import pull
from ._shared import shared_client
from .errors import (
    ClosedError,
    DamagedError,
    ForkError,
    HoldingTooManyError,
    IntegrationError,
    NoRoomError,
    PublishError,
    RelayConnectionError,
    RelayTimeoutError,
    RequestError,
    ServerRefusedError,
    ServerUnreachableError,
    TargetError,
    TensorRelayError,
    TicketError,
    TopicEndedError,
    TopicNotFoundError,
    TornError,
    UnsupportedTensorError,
    VersionNotFoundError,
    VersionsMissedError,
)

__all__ = [
    "Client",
    "ClosedError",
    "CodecCount",
    "DamagedError",
    "Description",
    "ForkError",
    "HoldingTooManyError",
    "IntegrationError",
    "NoRoomError",
    "Producer",
    "Progress",
    "Publication",
    "PublishError",
    "Receipt",
    "Relay",
    "RelayConnectionError",
    "RelayTimeoutError",
    "RequestError",
    "ServerRefusedError",
    "ServerUnreachableError",
    "Snapshot",
    "Subscription",
    "TargetError",
    "Tensor",
    "TensorInfo",
    "TensorRelayError",
    "TicketError",
    "TopicEndedError",
    "TopicInfo",
    "TopicNotFoundError",
    "TornError",
    "UnsupportedTensorError",
    "VersionNotFoundError",
    "VersionsMissedError",
    "connect",
    "publish_to",
    "pull",
    "serve",
    "shared_client",
]

__version__: str = _native.__version__

Mapping.register(Snapshot)


def serve(
    listen: str = "0.0.0.0:4747",
    *,
    advertise: str | Iterable[str] = (),
    state_dir: str | os.PathLike[str] | None = None,
    codec: str = "auto",
    chunk_bytes: int = 4 << 20,
    staged_bytes: int | None = None,
    base_bytes: int = 4 << 30,
    sessions_max: int = 1_024,
    stall_timeout: float = 30.0,
    reader_linger: float = 30.0,
    transport: str = "auto",
    open: bool = False,
    ephemeral: bool = False,
    device: str = "cpu",
    gpu_memory_bytes: int | None = None,
    pinned_bytes: int = 256 << 20,
    admin: str | None = None,
    admin_token_file: str | os.PathLike[str] | None = None,
) -> Relay:
    """Starts a server in this process, on threads of its own. Use it as a context manager, or `close()` it.

    listen: the address, `IP:PORT` or `HOST:PORT`, over UDP and TCP. Port 0 takes a free one, which `Relay.address` names.
    advertise: the host, or `HOST:PORT`, that the ticket names, or several. By default what is listened on; where that is
        every address, this machine's own on its default route.
    state_dir: where the server's key and the secrets of its tickets are kept, so that they stay valid. By default `$XDG_STATE_HOME/tensor-relay` or
        `~/.local/state/tensor-relay`, as for the command line.
    codec: how versions are encoded for those who can decode it: "auto" chooses for each chunk what should arrive first,
        and sends deltas to those who hold an earlier version; "raw", "bitplanes", "planes", "zstd" and "sparse" force one.
    chunk_bytes: the unit of sending and checking, a multiple of 256, up to 64 MiB.
    staged_bytes: how much memory staged versions may take. By default what the machine has.
    base_bytes: how much of it versions may take that were replaced and are kept to make deltas against, while subscribers
        hold copies of them. With 0 there are none, and deltas only against versions that a topic still keeps.
    sessions_max: how many clients may be connected.
    stall_timeout: after how long without a byte taken a subscriber in mid-transfer is evicted.
    reader_linger: how long the place of a named reader in mode "every" is kept when its connection is lost.
    transport: what clients may connect over: "auto" listens on UDP for QUIC and on TCP with TLS, on ports of one number;
        "quic" or "tcp" on one of them.
    open: whether everybody is let in who reaches the server, to every topic. By default only holders of its tickets are, or of
        those that `tensor-relay tickets create` makes with the same state_dir.
    ephemeral: whether nothing is kept, so that key and tickets end with the relay: for programs that hand the ticket on
        themselves at each start.
    device: where staged versions are held: "cpu" is this machine's memory, "cuda:N" the memory of GPU N. Tensors of any GPU
        can be published in either case.
    gpu_memory_bytes: how much memory of each GPU versions may take. By default what it has.
    pinned_bytes: how much page-locked memory of this machine chunks pass through, for each GPU: taken when the first tensor
        of it is published. Half of it keeps chunks for further subscribers.
    admin: the address, `IP:PORT`, of an HTTP port for status, health and metrics, as `tensor-relay serve --admin` opens it, for
        as long as the relay is open; port 0 takes a free one, which `Relay.admin` names.
    admin_token_file: the file with its token, which it needs on any address but this machine's own.

    Raises TensorRelayError when the port, the key or the device cannot be used, RequestError for what is no address
    or codec and for a value out of its range, and ForkError in a process that was forked from one that uses
    tensor_relay.
    """
    relay = _native.serve(
        listen,
        advertise=[advertise] if isinstance(advertise, str) else list(advertise),
        state_dir=state_dir,
        codec=codec,
        chunk_bytes=chunk_bytes,
        staged_bytes=staged_bytes,
        base_bytes=base_bytes,
        sessions_max=sessions_max,
        stall_timeout=stall_timeout,
        reader_linger=reader_linger,
        transport=transport,
        open=open,
        ephemeral=ephemeral,
        device=str(device),
        gpu_memory_bytes=gpu_memory_bytes,
        pinned_bytes=pinned_bytes,
        admin=admin,
        admin_token_file=admin_token_file,
    )
    _open.add(relay)
    return relay


def connect(
    ticket: str | os.PathLike[str] | None = None,
    *,
    timeout: float = 10.0,
    memory_bytes: int | None = None,
    base_bytes: int = 4 << 30,
    lanes: int | None = None,
    topic_timeout: float = 10.0,
    stall_timeout: float = 30.0,
    reconnect_timeout: float = 60.0,
    versions_held_max: int = 4,
    hold_timeout: float = 10.0,
    transport: str = "auto",
    identity: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    gpu_memory_bytes: int | None = None,
    pinned_bytes: int = 256 << 20,
    admin: str | None = None,
    admin_token_file: str | os.PathLike[str] | None = None,
    ready_within: float | None = None,
) -> Client:
    """Connects to a server. Use it as a context manager, or `close()` it.

    ticket: what `Relay.ticket` and `tensor-relay serve` print, or the path of a file with it. By default what the
        environment variable TENSOR_RELAY_TICKET holds.
    timeout: how long the server is tried to be reached.
    memory_bytes: how much memory snapshots may take: received, held, and kept for reuse. By default what the machine has.
    base_bytes: how much memory copies of versions may take to which deltas are applied: one version for each subscription,
        from the second version on. What does not fit comes whole; with 0 everything does.
    lanes: how many connections the session uses, 1 to 16. By default as many as make large versions faster.
    topic_timeout: how long a subscription waits for a topic that does not exist yet.
    stall_timeout: after how long without a byte a version under way is given up.
    reconnect_timeout: how long a lost connection is tried to be made again.
    versions_held_max: how many snapshots of a subscription may be held at a time. A snapshot is held as long as anything
        refers to its memory, an array made of it among them. A `for` loop needs 2: its variable keeps the one before while
        the next one comes.
    hold_timeout: how long a subscription waits, when so many are held, for one to be let go.
    transport: what the session runs over: "auto" takes TCP with TLS on short ways, QUIC on long ones, and TCP where UDP gets
        no answer; "quic" or "tcp" takes nothing else. `Receipt.transport` says which it was.
    identity: the file with the private key of this client, where the server knows it by `tensor-relay keys trust`. By default
        none, and the ticket's token lets it in.
    certificate: the file with the certificate of that key, and those that lead to the authority that the server trusts.
    device: where snapshots land: "cpu" is this machine's memory, "cuda:N" the memory of GPU N. Tensors of `out` may lie
        anywhere in either case.
    gpu_memory_bytes: how much memory of each GPU snapshots may take. By default what it has.
    pinned_bytes: how much page-locked memory of this machine chunks pass through, for each GPU that is used.
    admin: the address, `IP:PORT`, of an HTTP port for status, health and metrics, as `tensor-relay subscribe --admin` opens it,
        from before it connects until the client is closed; port 0 takes a free one, which `Client.admin` names. `/readyz`
        says yes while every topic that is subscribed to has a version here.
    admin_token_file: the file with its token, which it needs on any address but this machine's own.
    ready_within: `/readyz` says no when a version came longer ago than this, in seconds. By default however old it is.

    Raises TicketError for what is no ticket, RequestError for a value out of its range, ServerUnreachableError,
    ServerRefusedError when another server answers than the ticket names, TensorRelayError when the device cannot be
    used, and ForkError.
    """
    client = _native.connect(
        _read_ticket(ticket),
        timeout=timeout,
        memory_bytes=memory_bytes,
        base_bytes=base_bytes,
        lanes=lanes,
        topic_timeout=topic_timeout,
        stall_timeout=stall_timeout,
        reconnect_timeout=reconnect_timeout,
        versions_held_max=versions_held_max,
        hold_timeout=hold_timeout,
        transport=transport,
        identity=identity,
        certificate=certificate,
        device=str(device),
        gpu_memory_bytes=gpu_memory_bytes,
        pinned_bytes=pinned_bytes,
        admin=admin,
        admin_token_file=admin_token_file,
        ready_within=ready_within,
    )
    _open.add(client)
    return client


def publish_to(path: str | os.PathLike[str], *, timeout: float = 10.0, server_uid: int | None = None) -> Producer:
    """Connects to a `tensor-relay serve --publish-socket PATH` that runs on this machine, in this container or beside it in
    a pod: it sends what is published here, with processors and memory of its own. Use it as a context manager, or
    `close()` it.

    path: the server's socket, on a path that both share. The server's user and this process' must be the same, or the
        server be started with `--publish-uid`.
    timeout: how long the server is tried to be reached, which may start later.
    server_uid: the user that the server must run as, by number; None is anybody. For a socket in a folder where others may
        make files, who could listen there in its place.

    Raises ServerUnreachableError where nobody listens, ServerRefusedError when this user may not publish there or another
    than `server_uid` listens, and ForkError.
    """
    producer = _native.publish_to(path, timeout=timeout, server_uid=server_uid)
    _open.add(producer)
    return producer


def _read_ticket(ticket: str | os.PathLike[str] | None) -> str:
    """The ticket itself, wherever it is. Of a file with several, one for each topic, the first: they are of one server."""
    if ticket is None:
        ticket = os.environ.get("TENSOR_RELAY_TICKET", "")
    if not isinstance(ticket, (str, os.PathLike)):  # `open` takes a number for a descriptor, reads it, and closes it.
        raise TypeError(f"a ticket is text, or the path of a file with it (str or os.PathLike), and not {type(ticket).__name__}")
    if isinstance(ticket, str) and (ticket.strip().startswith("relay://") or not ticket):
        return ticket
    try:
        with open(ticket, encoding="utf-8") as file:
            return next((line for line in file if line.strip()), "")
    except (OSError, UnicodeDecodeError) as error:
        # A ticket that was cut comes here as well: nothing of its token is told, not by the error behind this one either.
        shown = re.sub(r"[A-Za-z0-9_-]{12,}", "(hidden)", str(os.fspath(ticket)))
        why = getattr(error, "strerror", None) or "it is not text"
        raise TicketError(f"{shown!r} is neither a ticket (relay://…) nor a file that holds one: {why}") from None


# How long callbacks may take at the end of the interpreter.
_LAST_CALLBACKS_S = 1.0

_open: weakref.WeakSet[Relay | Client | Producer] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Tells the other ends that this process goes, where nobody has. Topics do not end: it may have failed."""
    _native.begin_finish()
    # Clients first: where their server is in this process too, they lose no connection.
    for opened in sorted(_open, key=lambda opened: isinstance(opened, Relay)):
        try:
            opened.close(0, end=False) if isinstance(opened, Relay) else opened.close()
        except ForkError:
            pass  # It is another process's to close.
    _released.finish(_LAST_CALLBACKS_S)
    _native.finish()
