"""A tensor transport for Ray: what actors return and `ray.put` holds stays where it is, and whoever needs it receives it from
there, encrypted and verified, without the object store.

    tensor_relay.integrations.ray.register()         # in the driver, before the classes that name it

    @ray.remote
    class Trainer:
        @ray.method(tensor_transport="TENSOR_RELAY")
        def weights(self): ...

Each process that has such tensors serves them, on a port of its own, with a key of its own; the ticket travels with Ray's
metadata. Tensors are borrowed until Ray collects the object: who writes to them before may tear what others receive, as
with Ray's own one-sided transports.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import tensor_relay

from .._shared import Shared
from ..errors import DamagedError, RelayTimeoutError
from . import check_host

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
"""What `tensor_transport=` calls it."""

TIMEOUT_S = float(os.environ.get("TENSOR_RELAY_RAY_TIMEOUT", "30"))
"""How long an object may take to arrive. Below Ray's own 60 s, so that the error is ours and says why."""

RECONNECT_S = 5.0
"""How long a process that does not answer is tried again: it is on one network with us, and mostly dead."""

log = logging.getLogger("tensor_relay.integrations.ray")


def register() -> None:
    """Lets Ray know the transport. Call it in the process that creates the actors, before their classes are defined; Ray tells
    the actors. Calling it again does nothing.

    An actor that only receives is created with `@ray.remote(enable_tensor_transport=True)`.
    """
    from ray.experimental.rdt.util import transport_manager_info

    if NAME not in transport_manager_info:
        register_tensor_transport(NAME, ["cpu", "cuda"], RelayTransport, torch.Tensor)


@dataclass
class RelayMetadata(TensorTransportMetadata):  # type: ignore[misc]
    """Where an object's tensors are."""

    ticket: str = ""
    topic: str = ""
    version: int = 0
    epoch: str = ""


class RelayFetch(FetchRequest):  # type: ignore[misc]
    """An object on its way. Letting go of it ends that."""

    tensors: list[Any]

    def __init__(self, obj_id: str, tensors: list[Any], metadata: RelayMetadata, timeout: float) -> None:
        super().__init__(obj_id, tensors)
        self.metadata, self.into = metadata, bool(tensors)
        self.deadline = time.monotonic() + timeout
        self.subscription: tensor_relay.Subscription | None = None

    def close(self) -> None:
        """Ends it. Never waits."""
        if self.subscription is not None:
            self.subscription.close()

    __del__ = close


class RelayTransport(TensorTransportManager):  # type: ignore[misc]
    """What Ray asks to move tensors. One in each process, used by several of Ray's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._relay: tensor_relay.Relay | None = None
        self._published: set[str] = set()
        self._clients = Shared(reconnect_timeout=RECONNECT_S, topic_timeout=RECONNECT_S, base_bytes=0)
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
        return True  # Ray installs what the driver has, and an actor without the package cannot load it: Ray says so.

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> RelayMetadata:
        """Offers an object's tensors, where they are."""
        if not rdt_object:
            return RelayMetadata(tensor_meta=[], tensor_device=None)
        relay, topic = self._serving(), f"ray/{obj_id}"
        published = relay.publish(topic, _named(rdt_object), hold="borrow")
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
        """Receives an object, whole or not at all, within `TIMEOUT_S`."""
        fetch = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        return self.wait_fetch_complete(fetch)

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: RelayMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> RelayFetch:
        """Begins to receive an object. What costs time is the first connection to its process."""
        metadata = tensor_transport_metadata
        into = list(target_buffers or _on_gpu(metadata))
        fetch = RelayFetch(obj_id, into, metadata, TIMEOUT_S)
        if metadata.tensor_meta:
            client = self._clients.get(metadata.ticket, TIMEOUT_S)
            # In place: a failure is an error of the object, whose buffers nobody gets.
            out: dict[str, Any] = {"out": _named(into), "atomic": False} if into else {}
            fetch.subscription = client.subscribe(
                metadata.topic, mode="every", start=(metadata.epoch, metadata.version), window=1, **out
            )
            with self._lock:
                self._fetching[obj_id] = fetch
        return fetch

    def wait_fetch_complete(self, fetch_request: RelayFetch, timeout: float = -1) -> list[Any]:
        """Waits for an object that is on its way. Raises TimeoutError, after which it may be waited for again; after
        `TIMEOUT_S` it is given up."""
        fetch, subscription = fetch_request, fetch_request.subscription
        if subscription is None:
            return fetch.tensors
        rest = max(0.0, fetch.deadline - time.monotonic())
        try:
            snapshot = subscription.next(rest if timeout < 0 else min(timeout, rest))
        except RelayTimeoutError as error:
            if time.monotonic() < fetch.deadline:
                raise
            self._done(fetch)
            raise RelayTimeoutError(
                f"{fetch.metadata.topic} did not arrive within {TIMEOUT_S} s (TENSOR_RELAY_RAY_TIMEOUT): {error}"
            ) from error
        except BaseException:
            self._done(fetch)
            raise
        if not fetch.into:
            fetch.tensors = [snapshot[str(index)].torch() for index in range(len(snapshot))]
        _check(fetch, snapshot)
        self._done(fetch)
        return fetch.tensors

    def send_multiple_tensors(self, *_: Any) -> None:
        raise NotImplementedError("who needs tensors receives them, and nobody sends them")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: RelayMetadata, tensors: list[Any]) -> None:
        """Takes an object back. Never waits: who reads it now gets an error, as Ray lets nobody read it any more."""
        with self._lock:
            if tensor_transport_meta.topic not in self._published:
                return
            self._published.discard(tensor_transport_meta.topic)
            relay = self._relay
        if relay is not None:
            relay.withdraw(tensor_transport_meta.topic)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Gives up an object that is on its way: whoever waits for it gets ClosedError."""
        with self._lock:
            fetch = self._fetching.pop(obj_id, None)
        if fetch is not None:
            log.warning("Ray gave up %s, which was on its way here.", fetch.metadata.topic)
            fetch.close()

    def _serving(self) -> tensor_relay.Relay:
        """This process' server: started with its first object, and closed with the process."""
        with self._lock:
            if self._relay is None:
                address = ray.util.get_node_ip_address()
                host = f"[{address}]" if ":" in address else address
                self._relay = tensor_relay.serve(f"{host}:0", advertise=host, ephemeral=True)
            return self._relay

    def _done(self, fetch: RelayFetch) -> None:
        fetch.close()
        fetch.subscription = None
        with self._lock:
            if self._fetching.get(fetch.obj_id) is fetch:
                del self._fetching[fetch.obj_id]


def _named(tensors: list[Any]) -> dict[str, Any]:
    """Ray's tensors have a place, and ours a name."""
    return {str(index): tensor for index, tensor in enumerate(tensors)}


def _on_gpu(metadata: RelayMetadata) -> list[Any]:
    """Where tensors of a GPU land: on this process' current one."""
    if metadata.tensor_device != "cuda":
        return []
    return [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in metadata.tensor_meta]


def _check(fetch: RelayFetch, snapshot: tensor_relay.Snapshot) -> None:
    """What came is what Ray was told of."""
    came = [(tuple(tensor.shape), tensor.dtype) for tensor in fetch.tensors]
    told = [(tuple(shape), dtype) for shape, dtype in fetch.metadata.tensor_meta]
    expected = (fetch.metadata.version, fetch.metadata.epoch)
    if came != told or (snapshot.version, snapshot.epoch) != expected:
        raise DamagedError(f"{fetch.metadata.topic} is {came} of version {snapshot.version}, and Ray was told of {told} of {expected[0]}")
