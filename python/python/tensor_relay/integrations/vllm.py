"""A weight transfer engine for vLLM: the trainer publishes weights as versions of a topic, and workers subscribe.

    vllm serve MODEL --weight-transfer-config '{"backend": "tensor_relay"}'

    engine = WeightTransferTrainerFactory.trainer_init(
        TensorRelayTrainerInitInfo(listen="0.0.0.0:4747", rank=rank), client=client, source=ModuleSource(model))
    engine.send_weights()

vLLM finds the engine by its entry point (`vllm.general_plugins`); a trainer calls `register()`. A worker loads a
version only after receiving all of it and checking its names, dtypes, shapes and number against the trainer's. Of the
weights whose layout vLLM declares (`_vllm_layout`), a tensor-parallel worker receives its own part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import tensor_relay

from ..errors import ClosedError, DamagedError, RequestError
from . import check_host
from ._vllm_plugin import NAME, register

check_host("vllm", "0.33", "0.34")

import torch  # noqa: E402
from ._vllm_layout import Layout, layout_of  # noqa: E402
from vllm.distributed.weight_transfer.base import (  # noqa: E402
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

__all__ = [
    "NAME",
    "TensorRelayTrainerEngine",
    "TensorRelayTrainerInitInfo",
    "TensorRelayWorkerEngine",
    "register",
]

TOPIC = "vllm/weights"


@dataclass
class RelayInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The trainer's handshake with a worker, with the names, dtypes and shapes of the weights that it declares."""

    ticket: str
    topic: str = TOPIC
    timeout: float = 300.0
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


@dataclass
class RelayUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version that a worker is to load, with its tensors' names, dtypes and shapes."""

    version: int
    epoch: str
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class TensorRelayWorkerEngine(WeightTransferEngine):  # type: ignore[misc]
    """The worker's end. It subscribes at the handshake: usually a version has arrived before vLLM requests it."""

    init_info_cls = RelayInitInfo
    update_info_cls = RelayUpdateInfo

    _client: tensor_relay.Client | None = None
    _subscription: tensor_relay.Subscription | None = None
    _layout = Layout()
    _has_weights_to_load = True
    _timeout = 0.0

    def init_transfer_engine(self, init_info: RelayInitInfo) -> None:
        """Connects. A second handshake replaces the first."""
        self.shutdown()
        self._timeout = init_info.timeout
        # Each worker counts, also if several share a process.
        self._client = tensor_relay.connect(init_info.ticket, topic_timeout=init_info.timeout, consumer="client")
        weights = list(zip(init_info.names, init_info.dtype_names, init_info.shapes, strict=True))
        self._layout = layout_of(self, weights)
        self._has_weights_to_load = len(self._layout.parameters) < len(weights) or not weights
        self.supports_draft_weight_update = not self._layout.parameters  # They are those of this model.
        self._subscription = self._client.subscribe(init_info.topic, boxes=self._layout.boxes(weights))

    def start_weight_update(self) -> None:
        """Prepares vLLM's own layer-by-layer reload of weights in checkpoint format, if there are such."""
        if not self._has_weights_to_load:
            return
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: RelayUpdateInfo) -> None:
        """Loads the version that the trainer named. The model does not change before all of the version has arrived.

        Raises DamagedError when the version is not as the trainer described, and the errors of `Subscription.next`.
        """
        snapshot = self._receive_version(update_info)
        weights = snapshot.torch()
        _check(update_info, snapshot, weights)
        parameters = self._layout.parameters
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        others = [name for name in update_info.names if name not in parameters]
        if others:
            self.model.load_weights((name, weights[name].to(self.device)) for name in others)

    def finish_weight_update(self) -> None:
        """Lets vLLM finish its reload."""
        if not self._has_weights_to_load:
            return
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Ends the connection."""
        if self._client is not None:
            self._client.close()
        self._client = self._subscription = None

    def _receive_version(self, wanted: RelayUpdateInfo) -> tensor_relay.Snapshot:
        if self._subscription is None:
            raise ClosedError("there was no handshake yet: call `init_weight_transfer_engine` first")
        while True:
            snapshot = self._subscription.next(self._timeout)
            if (snapshot.version, snapshot.epoch) == (wanted.version, wanted.epoch):
                return snapshot
            if snapshot.epoch == wanted.epoch and snapshot.version > wanted.version:
                raise DamagedError(f"version {wanted.version} was due, and version {snapshot.version} took its place")
            del snapshot  # An older version, whose update was cancelled.


@dataclass
class TensorRelayTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The trainer's options. Rank 0 runs the server; the other ranks only take part in gathering the weights.

    listen, advertise, state_dir: as for `tensor_relay.serve`. Without `state_dir` each start makes a new key.
    timeout: how long publishing a version may take, and how long workers wait for it, in seconds.
    workers: the number of all workers: vLLM is then paused only when each of them has the complete version in host
        memory. With 0, the default, vLLM is paused while the workers receive it.
    """

    backend: ClassVar[str] = NAME

    listen: str = "[::]:0"
    advertise: str | None = None
    state_dir: str | None = None
    topic: str = TOPIC
    timeout: float = 300.0
    workers: int = 0


class TensorRelayTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's end."""

    init_info_cls = TensorRelayTrainerInitInfo

    _relay: tensor_relay.Relay | None = None
    _info: TensorRelayTrainerInitInfo

    @classmethod
    def trainer_init(
        cls, init_info: TensorRelayTrainerInitInfo, *, client: Any, source: Any = None
    ) -> TensorRelayTrainerEngine:
        """Starts the server on rank 0, and sends its ticket to all workers."""
        if source is None or not source.implements_iter_full():
            raise RequestError("full tensors are published: pass a WeightSource that implements iter_full, as ModuleSource does")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        engine._info = init_info
        if engine.is_sender:
            engine._relay = _serve(init_info)
            declared = source.metadata
            info = RelayInitInfo(
                ticket=engine._relay.ticket,
                topic=init_info.topic,
                timeout=init_info.timeout,
                names=[meta.name for meta in declared],
                dtype_names=[_name(meta.dtype) for meta in declared],
                shapes=[list(meta.shape) for meta in declared],
            )
            client.init_weight_transfer_engine(vars(info))
        return engine

    def send_weights(self) -> None:
        """Publishes all weights as one version, and makes the workers load it.

        Raises the errors of `Relay.publish` and of the workers, and RelayTimeoutError when a worker does not receive
        the version in time.
        """
        if not self.is_sender:
            for _ in self.source.iter_full():
                pass
            return
        if self._relay is None:
            raise ClosedError("this engine was shut down: make another with `trainer_init`")
        # A source may reuse its memory for the next tensor, so each tensor is copied at once.
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.source.iter_full()}
        missing = {meta.name for meta in self.source.metadata} - tensors.keys()
        if missing:
            raise RequestError(f"rank 0 lacks {len(missing)} weights, the first is {sorted(missing)[0]}: it must own every weight")
        published = self._relay.publish(self._info.topic, tensors, timeout=self._info.timeout)
        update = RelayUpdateInfo(
            version=published.version,
            epoch=published.epoch,
            names=list(tensors),
            dtype_names=[_name(tensor.dtype) for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
        )
        if self._info.workers:
            published.wait_committed(self._info.workers, self._info.timeout)
        self.client.start_weight_update()
        self.client.update_weights(vars(update))
        self.client.finish_weight_update(weight_version=f"{published.epoch}-{published.version}")

    def shutdown(self) -> None:
        """Stops serving."""
        if self._relay is not None:
            self._relay.close()
        self._relay = None


def _serve(info: TensorRelayTrainerInitInfo) -> tensor_relay.Relay:
    advertise = info.advertise or ()
    return tensor_relay.serve(info.listen, advertise=advertise, state_dir=info.state_dir, ephemeral=info.state_dir is None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(update: RelayUpdateInfo, snapshot: tensor_relay.Snapshot, weights: dict[str, torch.Tensor]) -> None:
    """Checks the received weights against the trainer's description, tensor by tensor."""
    if set(weights) != set(update.names):
        differing = sorted(set(weights) ^ set(update.names))
        raise DamagedError(
            f"version {update.version} has other weights than the trainer described; weights of one side only: "
            f"{len(differing)}, the first is {differing[0]}"
        )
    for name, dtype, shape in zip(update.names, update.dtype_names, update.shapes, strict=True):
        weight, tensor = weights[name], snapshot[name]
        found = list(weight.shape if tensor.box is None else tensor.global_shape)
        if (_name(weight.dtype), found) != (dtype, list(shape)):
            raise DamagedError(
                f"{name} of version {update.version} is {weight.dtype} {found}, and the trainer said "
                f"{dtype} {list(shape)}"
            )
