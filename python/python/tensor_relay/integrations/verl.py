"""A checkpoint engine for verl: the actor publishes its weights as versions of a topic, and rollouts subscribe to it.

    rollout:
      checkpoint_engine:
        backend: tensor_relay
        custom_backend_module: tensor_relay.integrations.verl
        engine_kwargs:
          tensor_relay: {timeout: 600}

The actor's first rank runs the server, on its node's address. Versions carry verl's `global_steps`; a rollout that
receives another step than it requested raises an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import tensor_relay

from ..errors import DamagedError, PublishError, RequestError
from . import check_host, check_timeout

check_host("verl", "0.9", "0.10")

import ray  # noqa: E402
import torch  # noqa: E402
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry  # noqa: E402

__all__ = ["NAME", "TensorRelayCheckpointEngine"]

NAME = "tensor_relay"
"""The engine's name in `checkpoint_engine.backend`."""

TOPIC = "verl/weights"

logger = logging.getLogger("tensor_relay")


@CheckpointEngineRegistry.register(NAME)
class TensorRelayCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One end of the transfer: the actor's first rank (`is_master`), another rank of the actor, or a rollout.

    bucket_size: an argument of verl's interface; unused, since chunks stream without buckets.
    timeout: how long a rollout waits for a step's weights, and the actor for their arrival, in seconds.
    listen: the port of the server on the actor's first rank; 0 selects a free port.
    """

    wire_format = "named_tensors"

    def __init__(self, bucket_size: int, is_master: bool = False, timeout: float = 600.0, listen: int = 0) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self._timeout, self._port = check_timeout("timeout", timeout), listen
        # On the actor's first rank.
        self._relay: tensor_relay.Relay | None = None
        self._published = 0
        # The topology of this step.
        self._ticket, self._wanted, self._readers = "", 0, 0
        # On a rollout, kept while the server is the same, so that later steps arrive as deltas.
        self._client: tensor_relay.Client | None = None
        self._subscription: tensor_relay.Subscription | None = None

    def prepare(self) -> dict[str, Any]:
        """Starts the server on the actor's first rank, and returns its ticket and the number of the next version."""
        if not self.is_master:
            return {}
        if self._relay is None:
            address = ray.util.get_node_ip_address().strip("[]")
            host = f"[{address}]" if ":" in address else address
            self._relay = tensor_relay.serve(f"{host}:{self._port}", advertise=host, ephemeral=True)
        return {"ticket": self._relay.ticket, "wanted": self._published + 1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The arguments of `init_process_group` for each rank and rollout."""
        masters = [each for each in metadata if each]
        if len(masters) != 1:
            raise RequestError(f"one rank of the actor serves the weights (is_master), and here {len(masters)} do")
        common = masters[0] | {"readers": rollout_world_size}
        actor = {key: [value] * actor_wg_world_size for key, value in common.items()}
        rollout = {key: [value] * rollout_world_size for key, value in common.items()}
        return actor, rollout

    def init_process_group(self, ticket: str, wanted: int, readers: int) -> None:
        """Receives the result of `build_topology`. A rollout keeps its connection when other rollouts join or leave."""
        if ticket != self._ticket:
            self._disconnect()
        self._ticket, self._wanted, self._readers = ticket, wanted, readers

    def finalize(self) -> None:
        """Ends a step. Server and subscriptions stay open, so that the next step can be sent as deltas."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float] | None:
        """Publishes all weights as one version, and waits until every rollout has it. The actor's other ranks only
        consume the generator, whose collectives need them, and send nothing.

        Raises RelayTimeoutError after `timeout`: the step has failed then.
        """
        if not self.is_master:
            async for _ in _iterate(weights):
                pass
            return None
        if self._relay is None:
            raise RequestError("`prepare` comes before `send_weights`")
        # The generator may reuse its memory for the next tensor, so each tensor is copied at once.
        tensors: dict[str, torch.Tensor] = {}
        async for name, tensor in _iterate(weights):
            if name in tensors:
                raise PublishError(f"the actor has two weights called {name}")
            tensors[name] = _copy_to_host(tensor)
        metadata = {"global_steps": global_steps}
        published = await asyncio.to_thread(self._relay.publish, TOPIC, tensors, metadata=metadata, timeout=self._timeout)
        self._published = published.version
        await asyncio.to_thread(published.wait_committed, self._readers, self._timeout)
        return {
            "tensor_relay/version": float(published.version),
            "tensor_relay/payload_bytes": float(published.payload_bytes),
        }

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yields the weights of this step, in host memory, after all of them were received and verified.

        Raises DamagedError for another step's weights, RelayTimeoutError, and the errors of `Subscription.next`.
        """
        deadline = time.monotonic() + self._timeout
        try:
            snapshot = await asyncio.to_thread(self._receive, deadline)
        except BaseException:
            self._disconnect()  # The next step connects again.
            raise
        step = snapshot.metadata.get("global_steps")
        if global_steps is not None and step != global_steps:
            raise DamagedError(f"version {snapshot.version} has weights of step {step}, and step {global_steps} was expected")
        for name, tensor in snapshot.torch().items():
            yield name, tensor

    def _receive(self, deadline: float) -> tensor_relay.Snapshot:
        """The version of this step."""
        if self._subscription is None:
            # Each rollout counts, also if several share a process.
            self._client = tensor_relay.connect(self._ticket, topic_timeout=self._timeout, consumer="client")
            self._subscription = self._client.subscribe(TOPIC)
            logger.info("This rollout receives all weights whole: verl declares no layout of its rollouts.")
        while True:
            snapshot = self._subscription.next(max(0.0, deadline - time.monotonic()))
            if snapshot.version == self._wanted:
                return snapshot
            if snapshot.version > self._wanted:
                raise DamagedError(f"version {self._wanted} was due, and version {snapshot.version} took its place")
            del snapshot  # The version of the previous step, which a new rollout receives first.

    def _disconnect(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
        if self._client is not None:
            self._client.close()
        self._subscription = self._client = None


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


async def _iterate(weights: Any) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
    """Iterates over verl's weights, which may be a synchronous or an asynchronous generator."""
    if hasattr(weights, "__aiter__"):
        async for each in weights:
            yield each
    else:
        for each in weights:
            yield each
