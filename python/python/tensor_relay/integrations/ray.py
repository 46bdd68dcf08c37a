"""A tensor transport for Ray: tensors that actors return or `ray.put` stores stay in the process that made them.
Consumers receive them from there, encrypted and verified, without the object store.

    tensor_relay.integrations.ray.register()         # in the driver, before the actors' classes are defined

    @ray.remote
    class Trainer:
        @ray.method(tensor_transport="TENSOR_RELAY")
        def weights(self): ...

Each process with such tensors runs a server, with a port and a key of its own; Ray's metadata carries the ticket.
Tensors are copied when they are returned, unless `register(stage=False)` was called.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import tensor_relay

from .._shared import SharedClients
from ..errors import DamagedError, RelayTimeoutError, RequestError, TornError
from . import check_host, check_timeout

check_host("ray", "2.55", "3")

import ray  # noqa: E402
import torch  # noqa: E402
from ray.experimental.rdt import (  # noqa: E402
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
)
from ray.experimental.rdt.tensor_transport_manager import FetchRequest  # noqa: E402

__all__ = ["NAME", "RelayTransport", "register"]

NAME = "TENSOR_RELAY"
"""The transport's name in `tensor_transport=`."""

TIMEOUT_S = check_timeout("TENSOR_RELAY_RAY_TIMEOUT", float(os.environ.get("TENSOR_RELAY_RAY_TIMEOUT", "30")))
"""How long an object may take to arrive. The default is shorter than Ray's 60 s, so that the error of this module, which
names the cause, comes first."""

RECONNECT_TIMEOUT_S = 5.0
"""How long reconnecting is retried. The peer is on the same network: when it does not answer, it has probably died."""

log = logging.getLogger("tensor_relay.integrations.ray")


def register(*, stage: bool = True) -> None:
    """Registers the transport with Ray. Call it in the process that creates the actors, before their classes are
    defined; Ray registers it in the actors. A second call does nothing.

    stage: whether tensors are copied to host memory when they are returned, so that the actor may write to them at
        once. With False they are read in place until Ray collects the object: writing to them earlier changes or
        corrupts what others receive, as with Ray's own one-sided transports.

    Create actors that only receive with `@ray.remote(enable_tensor_transport=True)`.

    Raises RequestError if the transport was registered with another `stage`.
    """
    from ray.experimental.rdt.util import transport_manager_info

    transport = RelayTransport if stage else BorrowingRelayTransport
    registered = transport_manager_info.get(NAME)
    if registered is None:
        register_tensor_transport(NAME, ["cpu", "cuda"], transport, torch.Tensor)
    elif registered.transport_manager_class is not transport:
        raise RequestError(f"{NAME} was registered before with stage={not stage}, which cannot be changed")


@dataclass
class RelayMetadata(TensorTransportMetadata):  # type: ignore[misc]
    """The server and version that hold an object's tensors."""

    ticket: str = ""
    topic: str = ""
    version: int = 0
    epoch: str = ""


class RelayFetch(FetchRequest):  # type: ignore[misc]
    """An object that is being received. Dropping it cancels the transfer."""

    tensors: list[Any]

    def __init__(self, obj_id: str, tensors: list[Any], metadata: RelayMetadata, timeout: float) -> None:
        super().__init__(obj_id, tensors)
        self.metadata, self.is_in_place = metadata, bool(tensors)
        self.deadline = time.monotonic() + timeout
        self.subscription: tensor_relay.Subscription | None = None

    def close(self) -> None:
        """Cancels the transfer. Never blocks."""
        if self.subscription is not None:
            self.subscription.close()

    __del__ = close


class RelayTransport(TensorTransportManager):  # type: ignore[misc]
    """The transport that Ray calls to move tensors: one for each process, used by several of Ray's threads."""

    _hold: ClassVar[Literal["stage", "borrow"]] = "stage"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._relay: tensor_relay.Relay | None = None
        self._published: set[str] = set()
        timeout = RECONNECT_TIMEOUT_S
        self._clients = SharedClients(reconnect_timeout=timeout, topic_timeout=timeout, base_bytes=0)
        self._fetching: dict[str, RelayFetch] = {}

    def tensor_transport_backend(self) -> str:
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True  # Ray registers the driver's transports in the actor, and reports when the actor lacks the package.

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> RelayMetadata:
        """Publishes an object's tensors."""
        if not rdt_object:
            return RelayMetadata(tensor_meta=[], tensor_device=None)
        relay, topic = self._server(), f"ray/{obj_id}"
        published = relay.publish(topic, _by_index(rdt_object), hold=self._hold)
        with self._lock:
            self._published.add(topic)
        return RelayMetadata(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device=rdt_object[0].device.type,
            ticket=relay.ticket,
            topic=topic,
            version=published.version,
            epoch=published.epoch,
        )

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: RelayMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Receives an object completely within `TIMEOUT_S`, or raises."""
        fetch = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        return self.wait_fetch_complete(fetch)

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: RelayMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> RelayFetch:
        """Starts to receive an object. Blocks only to connect to the object's process for the first time."""
        metadata = tensor_transport_metadata
        buffers = list(target_buffers or _gpu_buffers(metadata))
        fetch = RelayFetch(obj_id, buffers, metadata, TIMEOUT_S)
        if metadata.tensor_meta:
            client = self._clients.get(metadata.ticket, TIMEOUT_S)
            # In place, because when receiving fails, Ray fails the object and passes its buffers to no caller.
            out: dict[str, Any] = {"out": _by_index(buffers), "atomic": False} if buffers else {}
            fetch.subscription = client.subscribe(
                metadata.topic, mode="every", start=(metadata.epoch, metadata.version), window=1, **out
            )
            with self._lock:
                self._fetching[obj_id] = fetch
        return fetch

    def wait_fetch_complete(self, fetch_request: RelayFetch, timeout: float = -1) -> list[Any]:
        """Waits for an object that is being received. After TimeoutError the caller may wait again; after `TIMEOUT_S`
        the transfer is cancelled."""
        fetch, subscription = fetch_request, fetch_request.subscription
        if subscription is None:
            return fetch.tensors
        remaining = max(0.0, fetch.deadline - time.monotonic())
        try:
            snapshot = subscription.next(remaining if timeout < 0 else min(timeout, remaining))
        except (RelayTimeoutError, TornError) as error:
            late = error.__cause__ if isinstance(error, TornError) else error
            if isinstance(late, RelayTimeoutError) and time.monotonic() < fetch.deadline:
                raise late  # Torn buffers are whole when a later call returns, and no caller has them before.
            self._finish(fetch)
            if not isinstance(late, RelayTimeoutError):
                raise
            raise RelayTimeoutError(
                f"{fetch.metadata.topic} did not arrive within {TIMEOUT_S} s (TENSOR_RELAY_RAY_TIMEOUT): {error}"
            ) from error
        except BaseException:
            self._finish(fetch)
            raise
        if not fetch.is_in_place:
            fetch.tensors = [snapshot[str(index)].torch() for index in range(len(snapshot))]
        _check(fetch, snapshot)
        self._finish(fetch)
        return fetch.tensors

    def send_multiple_tensors(self, *_: Any) -> None:
        raise NotImplementedError("this transport is one-sided: consumers fetch tensors, and producers do not send them")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: RelayMetadata, tensors: list[Any]) -> None:
        """Withdraws an object. Never blocks: a transfer in progress fails. Ray collects only unreferenced objects."""
        with self._lock:
            if tensor_transport_meta.topic not in self._published:
                return
            self._published.discard(tensor_transport_meta.topic)
            relay = self._relay
        if relay is not None:
            relay.withdraw(tensor_transport_meta.topic)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Cancels the transfer of an object: a waiting caller gets ClosedError."""
        with self._lock:
            fetch = self._fetching.pop(obj_id, None)
        if fetch is not None:
            log.warning("Ray cancelled the transfer of %s to this process.", fetch.metadata.topic)
            fetch.close()

    def _server(self) -> tensor_relay.Relay:
        """This process' server, started for its first object and closed at the end of the process."""
        with self._lock:
            if self._relay is None:
                address = ray.util.get_node_ip_address()
                host = f"[{address}]" if ":" in address else address
                self._relay = tensor_relay.serve(f"{host}:0", advertise=host, ephemeral=True)
            return self._relay

    def _finish(self, fetch: RelayFetch) -> None:
        fetch.close()
        fetch.subscription = None
        with self._lock:
            if self._fetching.get(fetch.obj_id) is fetch:
                del self._fetching[fetch.obj_id]


class BorrowingRelayTransport(RelayTransport):
    """The transport that reads tensors in place."""

    _hold = "borrow"


def _by_index(tensors: list[Any]) -> dict[str, Any]:
    """Ray identifies an object's tensors by index; a version names them, so the index becomes the name."""
    return {str(index): tensor for index, tensor in enumerate(tensors)}


def _gpu_buffers(metadata: RelayMetadata) -> list[Any]:
    """Buffers on this process' current GPU for tensors from a GPU; an empty list for tensors from the host."""
    if metadata.tensor_device != "cuda":
        return []
    return [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in metadata.tensor_meta]


def _check(fetch: RelayFetch, snapshot: tensor_relay.Snapshot) -> None:
    """Checks the received shapes, dtypes and version against the metadata that Ray carried."""
    received = [(tuple(tensor.shape), tensor.dtype) for tensor in fetch.tensors]
    announced = [(tuple(shape), dtype) for shape, dtype in fetch.metadata.tensor_meta]
    version = (fetch.metadata.version, fetch.metadata.epoch)
    if received != announced or (snapshot.version, snapshot.epoch) != version:
        raise DamagedError(
            f"{fetch.metadata.topic} version {snapshot.version} has {received}, and Ray's metadata says version {version[0]} "
            f"with {announced}"
        )
