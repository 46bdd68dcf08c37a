"""Streams tensors between hosts, encrypted and verified. A version is received completely or not at all.

    import tensor_relay

    # The producer:
    with tensor_relay.serve("0.0.0.0:4747") as relay:
        print(relay.ticket)
        relay.publish("policy", model.state_dict())

    # Each consumer:
    with tensor_relay.connect(ticket) as client:
        for snapshot in client.subscribe("policy"):
            model.load_state_dict(snapshot.torch())

Times are in seconds, sizes in bytes. Every blocking call releases the GIL, and Ctrl-C interrupts it. Log messages go to
the logger `tensor_relay`.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from . import _native, _released, tree
from . import _client, _snapshot, _stream, _subscription, _tensor  # noqa: F401  They add methods.
from ._boxes import Box, slice_columns, slice_rows
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
    unpack_engine_caches,
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
    "Box",
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
    "slice_columns",
    "slice_rows",
    "unpack_engine_caches",
]

__version__: str = _native.__version__


def __dir__() -> list[str]:
    return [*__all__, "__version__", "errors", "integrations", "tree"]


Mapping.register(Snapshot)


def serve(
    listen: str = "[::]:4747",
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
    socket: str | os.PathLike[str] | None = None,
    socket_mode: int = 0o660,
    share_gpu: bool = False,
) -> Relay:
    """Starts a server in this process, on threads of its own. Use it as a context manager, or `close()` it.

    listen: the address, `IP:PORT` or `HOST:PORT`, over UDP and TCP. Port 0 selects a free port: see `Relay.address`.
    advertise: one or several hosts, or `HOST:PORT`, for the ticket. By default the address in `listen`; if that is the
        wildcard address, the address of this machine's default route.
    state_dir: the folder that keeps the server's key and the secrets of its tickets, so that tickets stay valid over
        restarts. By default `$XDG_STATE_HOME/tensor-relay` or `~/.local/state/tensor-relay`, as for the command line.
    codec: how versions are encoded: "auto" chooses for each chunk the codec that should deliver it soonest, and sends
        deltas to clients that hold an earlier version; "raw", "bitplanes", "planes", "zstd" and "sparse" force one
        codec. Clients that cannot decode a codec receive raw chunks.
    chunk_bytes: the unit of sending and checking, a multiple of 256, up to 64 MiB.
    staged_bytes: the most memory for staged versions. By default the machine's memory.
    base_bytes: the part of `staged_bytes` for replaced versions that are kept as bases of deltas while subscribers hold
        copies of them. With 0, only versions that a topic still retains serve as bases.
    sessions_max: how many clients may be connected.
    stall_timeout: a subscriber that accepts no byte for this long during a transfer is evicted.
    reader_linger: how long the place of a named reader in mode "every" is kept after its connection was lost.
    transport: the transports for clients: "auto" is QUIC over UDP and TLS over TCP, on the same port number;
        "quic" or "tcp" is one of them.
    open: whether every client is admitted, to every topic. By default a client needs a ticket of this relay, or one
        that `tensor-relay tickets create` made with the same state_dir, or a key that `tensor-relay keys trust` trusts
        there.
    ephemeral: whether no state is kept, so that key and tickets end with the relay: for programs that distribute a new
        ticket at each start.
    device: where staged versions are held: "cpu" is this machine's memory, "cuda:N" the memory of GPU N. Tensors of any
        GPU can be published in either case.
    gpu_memory_bytes: the most memory of each GPU for versions. By default the GPU's memory.
    pinned_bytes: how much page-locked host memory chunks pass through, for each GPU. It is allocated when the first
        tensor of that GPU is published. Up to half of it caches chunks for further subscribers.
    admin: the address, `IP:PORT`, of an HTTP port for status, health and metrics, as for `tensor-relay serve --admin`,
        until the relay is closed. Port 0 selects a free port; `Relay.admin` returns it.
    admin_token_file: the file with the token of that port; required unless the address is a loopback address.
    socket: the path of a Unix socket through which processes of this host share the memory of staged versions instead
        of receiving them, with the ticket `unix:PATH`: `tensor-relay serve --socket`.
    socket_mode: the permissions of the socket's file.
    share_gpu: whether processes of this user that connect with share_gpu=True have a version on the GPU in common, and use
        it there. By default each copies it; any of them could write to what they have in common.

    Raises TensorRelayError when the port, the key or the device cannot be used, RequestError for an invalid address or
    codec and for a value out of its range, and ForkError in a process that was forked from one that uses tensor_relay.
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
        socket=socket,
        socket_mode=socket_mode,
        share_gpu=share_gpu,
    )
    _open_objects.add(relay)
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
    consumer: str = "process",
    sources: Sequence[str | os.PathLike[str]] = (),
    share: bool | Literal["take"] = False,
    share_listen: str = "[::]:0",
    share_rate: int | None = None,
    share_mem: int | None = None,
    site: str = "",
    share_host: str | os.PathLike[str] | None = None,
    share_uids: Sequence[int] = (),
    share_mode: int = 0o660,
    share_gpu: bool = False,
) -> Client:
    """Connects to a server. Use it as a context manager, or `close()` it.

    ticket: the text from `Relay.ticket` or `tensor-relay serve`, or the path of a file that holds it; or `unix:PATH`, a
        socket of this host, whose server shares memory with its clients. By default the value of the environment variable
        TENSOR_RELAY_TICKET.
    timeout: how long connecting is retried until the server answers.
    memory_bytes: the most memory for snapshots: incoming, held, or kept for reuse. By default the machine's memory.
    base_bytes: the most memory for base versions, to which deltas are applied: one base for each subscription, from the
        second version on. A version without a base is sent in full; 0 disables deltas.
    lanes: how many connections the session uses, 1 to 16. By default lanes are added while they make transfers faster.
    topic_timeout: how long a subscription waits for a topic that does not exist yet.
    stall_timeout: a version of which no byte arrives for this long is given up.
    reconnect_timeout: how long reconnecting is retried after a connection was lost.
    versions_held_max: how many snapshots of a subscription may be held at a time. A snapshot is held while any object,
        such as an array made from it, refers to its memory. A `for` loop needs 2: its variable holds the previous
        snapshot while the next one is received.
    hold_timeout: how long a subscription that holds `versions_held_max` snapshots waits for the program to drop one.
    transport: what the session runs over: "auto" begins with TLS over TCP at short round-trip times, with QUIC at long
        ones, and with TCP where UDP is blocked, and may change to the other when it measures that one as faster; "quic"
        or "tcp" forces one. `Receipt.transport` reports the choice. A socket of this host is "unix".
    identity: the file with this client's private key, which the server trusts by `tensor-relay keys trust`. By default
        the client has no key and is admitted by the ticket's token.
    certificate: the file with the certificate of that key and its chain up to the authority that the server trusts.
    device: where snapshots are received: "cpu" is this machine's memory, "cuda:N" the memory of GPU N. Tensors of `out`
        may be on any device in either case.
    gpu_memory_bytes: the most memory of each GPU for snapshots. By default the GPU's memory.
    pinned_bytes: how much page-locked host memory chunks pass through, for each GPU that is used.
    admin: the address, `IP:PORT`, of an HTTP port for status, health and metrics, as for `tensor-relay subscribe
        --admin`, open from before connecting until the client is closed. Port 0 selects a free port; `Client.admin`
        returns it. `/readyz` succeeds while a version of every subscribed topic has been received.
    admin_token_file: the file with the token of that port; required unless the address is a loopback address.
    ready_within: `/readyz` fails when a topic's newest version arrived more than this many seconds ago. By default its
        age does not matter.
    consumer: what a publisher counts in `Publication.wait_committed`: "process", this process once with all its
        clients, or "client", this client by itself.
    sources: the tickets, or the paths of files that hold them, of other servers with the same content: the same bytes
        under the same epochs and versions, as of one folder that several servers serve. Large versions are received from
        all of them at once, and from the others when one is lost.
    share: True takes chunks of large versions from other subscribers that share, too, and sends them those that are
        verified here, while a version arrives and until the next one; "take" sends them nothing. What they send is
        compared with hashes of the server before it is used.
    share_listen: with share=True, the address at which other subscribers take chunks; port 0 is a free one.
    share_rate: the most bytes a second that are sent to other subscribers. By default no limit.
    share_mem: the most memory for each version's encoded chunks that are kept to be sent again; others are not offered.
        By default a quarter of the version, at most 1 GiB.
    site: a label of the place where this host is, such as its rack or data centre. With `share`, chunks are taken from
        subscribers with the same label if one of them has them, so that few pass between places.
    share_host: the path of a Unix socket to create, through which other processes of this host take the versions that
        `next`, or iteration, returns here, with the ticket `unix:PATH`: they share their memory. This process' tensors
        remain writable: what it writes is copied first, and nobody else sees it. Parts of versions, and those received
        into `out` with `atomic=False` or onto a GPU, are not offered.
    share_uids: the IDs of further users whose processes may take versions there, besides the own user and root.
    share_mode: the permissions of that socket's file.
    share_gpu: whether versions on a GPU of a server of this host that was started with share_gpu, too, are used where they
        are, in memory that other processes of this user have as well: nothing is copied, and nobody may write to the
        tensors. It needs `device`, whole versions, and no `out`. By default they are copied within the GPU.

    Raises TicketError for an invalid ticket, RequestError for a value out of its range, ServerUnreachableError,
    ServerRefusedError when a server other than the ticket's answers or the server refuses this client, TensorRelayError
    when the device cannot be used, and ForkError.
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
        consumer=consumer,
        sources=[_read_ticket(source) for source in sources],
        share=share,
        share_listen=share_listen,
        share_rate=share_rate,
        share_mem=share_mem,
        site=site,
        share_host=share_host,
        share_uids=list(share_uids),
        share_mode=share_mode,
        share_gpu=share_gpu,
    )
    _open_objects.add(client)
    return client


def publish_to(path: str | os.PathLike[str], *, timeout: float = 10.0, server_uid: int | None = None) -> Producer:
    """Connects to a sidecar: a `tensor-relay serve --publish-socket PATH` on this machine, in this container or in
    another container of the pod. The sidecar sends the versions that this process publishes, with CPU and memory of its
    own. Use the `Producer` as a context manager, or `close()` it.

    path: the server's socket, in a folder that both containers mount. Server and this process must run as the same
        user, or the server must be started with `--publish-uid`.
    timeout: how long connecting is retried: the server may start later than this process.
    server_uid: the numeric user ID that the server must run as; None accepts any. Use it for a socket in a folder that
        other users can write to, since one of them could listen in the server's place.

    Raises ServerUnreachableError when no server listens, ServerRefusedError when this user may not publish there or
    when the server's user is not `server_uid`, and ForkError.
    """
    producer = _native.publish_to(path, timeout=timeout, server_uid=server_uid)
    _open_objects.add(producer)
    return producer


def _read_ticket(ticket: str | os.PathLike[str] | None) -> str:
    """The text of a ticket: `ticket` itself, the first ticket in the file `ticket`, or the environment variable.
    Further tickets in a file are for other topics of the same server."""
    if ticket is None:
        ticket = os.environ.get("TENSOR_RELAY_TICKET", "")
        if not ticket.strip():
            raise TicketError("there is no ticket: pass one, or the path of a file with it, or set TENSOR_RELAY_TICKET")
    if not isinstance(ticket, (str, os.PathLike)):  # `open` would read and close an integer as a file descriptor.
        raise TypeError(f"a ticket is text, or the path of a file with it (str or os.PathLike), and not {type(ticket).__name__}")
    if isinstance(ticket, str) and ticket.strip().startswith(("relay://", "unix:")):
        return ticket
    if isinstance(ticket, str) and not ticket.strip():
        raise TicketError("the ticket is an empty text")
    try:
        with open(ticket, encoding="utf-8") as file:
            first = next((line for line in file if line.strip()), None)
    except (OSError, UnicodeDecodeError) as error:
        # `ticket` may be a truncated ticket: neither this message nor a chained error may reveal its token.
        shown = re.sub(r"[A-Za-z0-9_-]{12,}", "(hidden)", str(os.fspath(ticket)))
        reason = getattr(error, "strerror", None) or "it is not text"
        raise TicketError(f"{shown!r} is neither a ticket (relay://… or unix:…) nor a file that holds one: {reason}") from None
    if first is None:
        raise TicketError(f"the file {os.fspath(ticket)!r} holds no ticket: it is empty")
    return first


# How long the callbacks of `Publication.on_released` may take at interpreter exit.
_CALLBACKS_TIMEOUT_S = 1.0

_open_objects: weakref.WeakSet[Relay | Client | Producer] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Closes, at interpreter exit, the objects that the program left open. Topics do not end, because the program may
    have failed."""
    _native.prepare_exit()
    # Clients first: a client whose server is in this process then logs no lost connection.
    for opened in sorted(_open_objects, key=lambda opened: isinstance(opened, Relay)):
        try:
            opened.close(0, end=False) if isinstance(opened, Relay) else opened.close()
        except ForkError:
            pass  # It belongs to the parent process.
    _released.finish(_CALLBACKS_TIMEOUT_S)
    if not _native.finish():
        logging.getLogger("tensor_relay").error("The interpreter exits while code that returns lent memory still runs.")
