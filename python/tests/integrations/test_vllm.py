"""vLLM's weight transfer engine: a trainer and two workers, driven as by vLLM. Uses stubs of vLLM, or its released base
classes if TENSOR_RELAY_VLLM_SOURCE names the source."""

import importlib
import sys
import types
from abc import ABC
from dataclasses import dataclass, field
from functools import cached_property

import hosts
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import tensor_relay  # noqa: E402

RECORDED = hosts.recorded("vllm")
BASE = "vllm.distributed.weight_transfer.base"


def stubs():
    """vLLM's base classes, reduced to the members that the integration and these tests use."""

    @dataclass
    class TrainerInitInfo:
        rank: int = field(kw_only=True)

        @property
        def is_sender(self):
            return self.rank == 0

    class WeightTransferEngine(ABC):
        def __init__(self, config, vllm_config, device, model):
            self.config, self.device, self.model = config, device, model
            self.model_config, self.parallel_config = vllm_config.model_config, vllm_config.parallel_config

        def parse_update_info(self, update):
            return self.update_info_cls(**update)

        def parse_init_info(self, init):
            return self.init_info_cls(**init)

        def update_weights(self, update):
            self.receive_weights(self.parse_update_info(update))

    class TrainerWeightTransferEngine(ABC):
        def __init__(self, *, client, source=None, is_sender=True, rank=0):
            self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    empty = {name: dataclass(type(name, (), {})) for name in ("WeightTransferInitInfo", "WeightTransferUpdateInfo")}
    return empty | {"TrainerInitInfo": TrainerInitInfo, "WeightTransferEngine": WeightTransferEngine,
                    "TrainerWeightTransferEngine": TrainerWeightTransferEngine, "WeightSource": object}


@pytest.fixture
def vllm(monkeypatch):
    """The integration's module, imported with stubs of vLLM."""
    monkeypatch.setattr("importlib.metadata.version", lambda package: {"vllm": RECORDED["version"]}[package])
    reloads = []
    hosts.install_stub(
        monkeypatch,
        "vllm.model_executor.model_loader.reload",
        initialize_layerwise_reload=lambda model: reloads.append("begun"),
        finalize_layerwise_reload=lambda model, config: reloads.append("finished"),
    )
    factories = {name: type(name, (), {"_registry": {}, "register_engine": classmethod(registered)})
                 for name in ("WeightTransferEngineFactory", "WeightTransferTrainerFactory")}
    hosts.install_stub(monkeypatch, "vllm.distributed.weight_transfer.factory", **factories)
    if source := hosts.source_of("vllm"):
        for name in ("vllm.config.parallel", "vllm.config.weight_transfer"):
            hosts.install_stub(monkeypatch, name)
        hosts.import_released(monkeypatch, BASE, f"{source}/{hosts.INTERFACES['vllm'][0]}")
    else:
        hosts.install_stub(monkeypatch, BASE, **stubs())
    monkeypatch.delitem(sys.modules, "tensor_relay.integrations.vllm", raising=False)
    module = importlib.import_module("tensor_relay.integrations.vllm")
    module.reloads = reloads
    yield module
    sys.modules.pop("tensor_relay.integrations.vllm", None)


def registered(factory, name, module, class_name):
    assert name not in factory._registry
    factory._registry[name] = getattr(importlib.import_module(module), class_name)


class Model:
    """A model that records the loaded weights."""

    def __init__(self):
        self.loaded = {}

    def load_weights(self, weights):
        self.loaded = {name: tensor.clone() for name, tensor in weights}


@dataclass
class Meta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None


def described(value):
    return (torch.bfloat16, (1_000,)) if isinstance(value, float) else (value.dtype, tuple(value.shape))


def source_of(weights):
    base = getattr(sys.modules[BASE], "WeightSource")

    class Source(base):
        @cached_property
        def metadata(self):
            return [Meta(name, *described(value)) for name, value in weights.items()]

        def implements_iter_full(self):
            return True

        def iter_full(self):
            buffer = torch.empty(1_000, dtype=torch.bfloat16)
            for name, value in weights.items():
                yield name, buffer.fill_(value) if isinstance(value, float) else value

    return Source()


class Workers:
    """A stub of the client that vLLM passes to a trainer, connected to two workers."""

    def __init__(self, vllm, tensor_parallel_size=1):
        parallel = types.SimpleNamespace(tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=1)
        config = types.SimpleNamespace(model_config=types.SimpleNamespace(quantization=None), parallel_config=parallel)
        self.engines = [vllm.TensorRelayWorkerEngine(None, config, torch.device("cpu"), Model()) for _ in range(2)]
        self.versions, self.overrides = [], None  # `overrides` replaces fields of the trainer's description.

    def init_weight_transfer_engine(self, init_info):
        for each in self.engines:
            each.init_transfer_engine(each.parse_init_info(init_info))

    def start_weight_update(self):
        for each in self.engines:
            each.start_weight_update()

    def update_weights(self, update_info):
        for each in self.engines:
            each.receive_weights(each.parse_update_info(update_info | (self.overrides or {})))

    def finish_weight_update(self, weight_version=None):
        for each in self.engines:
            each.finish_weight_update()
        self.versions.append(weight_version)

    def close(self):
        for each in self.engines:
            each.shutdown()


@pytest.fixture
def workers(vllm):
    workers = Workers(vllm)
    yield workers
    workers.close()


@pytest.fixture
def trainer(vllm, workers):
    weights = {"layers.0.w": 1.0, "norm": 2.0, "bias": torch.arange(6).reshape(2, 3)}
    info = vllm.TensorRelayTrainerInitInfo(listen="127.0.0.1:0", timeout=20, workers=2, rank=0)
    trainer = vllm.TensorRelayTrainerEngine.trainer_init(info, client=workers, source=source_of(weights))
    trainer.weights = weights
    yield trainer
    trainer.shutdown()


def test_the_interface_matches_vllms(vllm):
    classes = RECORDED["classes"]
    assert list(hosts.differences(vllm.TensorRelayWorkerEngine, only_abstract(classes["WeightTransferEngine"]))) == []
    assert list(hosts.differences(vllm.TensorRelayTrainerEngine, only_abstract(classes["TrainerWeightTransferEngine"]))) == []
    assert hosts.unimplemented_methods(vllm.TensorRelayWorkerEngine) == []
    assert hosts.unimplemented_methods(vllm.TensorRelayTrainerEngine) == []
    assert list(hosts.differences(Workers, classes["VLLMWeightSyncClient"])) == [], "the stub has the methods of vLLM's client"
    if hosts.source_of("vllm"):
        assert hosts.signatures_in(hosts.source_of("vllm"), "vllm") == classes, "the recorded signatures are outdated"


def only_abstract(methods):
    return {name: signature for name, signature in methods.items() if signature["abstract"]}


def test_registration_is_idempotent(vllm):
    vllm.register()
    vllm.register()
    factory = sys.modules["vllm.distributed.weight_transfer.factory"]
    assert factory.WeightTransferEngineFactory._registry == {"tensor_relay": vllm.TensorRelayWorkerEngine}
    assert factory.WeightTransferTrainerFactory._registry == {"tensor_relay": vllm.TensorRelayTrainerEngine}


def test_vllms_version_is_checked_when_the_backend_is_chosen(vllm, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.34.0")
    monkeypatch.delitem(sys.modules, "tensor_relay.integrations.vllm")
    factory = sys.modules["vllm.distributed.weight_transfer.factory"]
    lazily = classmethod(lambda factory, name, module, class_name: factory._registry.update({name: module}))
    for each in (factory.WeightTransferEngineFactory, factory.WeightTransferTrainerFactory):
        monkeypatch.setattr(each, "register_engine", lazily)
    importlib.import_module("tensor_relay.integrations._vllm_plugin").register()
    assert "tensor_relay.integrations.vllm" not in sys.modules
    with pytest.raises(tensor_relay.IntegrationError, match="0.34.0 is installed"):
        importlib.import_module(factory.WeightTransferEngineFactory._registry["tensor_relay"])


def test_every_worker_receives_every_update(vllm, workers, trainer):
    for step in (1.0, 2.0, 3.0):
        trainer.weights["norm"] = step
        trainer.send_weights()
        for each in workers.engines:
            assert list(each.model.loaded) == list(trainer.weights)
            assert set(each.model.loaded["norm"].tolist()) == {step}
            assert set(each.model.loaded["layers.0.w"].tolist()) == {1.0}
            assert torch.equal(each.model.loaded["bias"], trainer.weights["bias"])
    assert len(set(workers.versions)) == 3 and workers.versions[0].endswith("-1")
    assert vllm.reloads == ["begun", "begun", "finished", "finished"] * 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"names": ["layers.0.w", "norm"]}, "other weights than the trainer described; weights of one side only: 1, the first is bias"),
        ({"dtype_names": ["bfloat16", "bfloat16", "int32"]}, "bias of version 1 is torch.int64"),
        ({"shapes": [[1_000], [1_000], [3, 2]]}, r"bias of version 1 is torch.int64 \[2, 3\]"),
        ({"version": 0}, "version 0 was due"),
    ],
)
def test_weights_that_differ_from_the_description_are_not_loaded(workers, trainer, overrides, message):
    workers.overrides = overrides
    with pytest.raises(tensor_relay.DamagedError, match=message):
        trainer.send_weights()
    assert not workers.engines[0].model.loaded and not workers.versions


def test_a_missing_version_raises_in_time(workers, trainer):
    workers.engines[0]._timeout = 0.3
    workers.overrides = {"version": 2}
    with pytest.raises(tensor_relay.RelayTimeoutError):
        trainer.send_weights()


def test_a_dead_worker_fails_the_update_before_the_pause(vllm, workers, trainer):
    workers.engines[1].shutdown()
    trainer._info.timeout = 0.5
    with pytest.raises(tensor_relay.RelayTimeoutError):
        trainer.send_weights()
    assert vllm.reloads == [], "vLLM was not paused"
    with pytest.raises(tensor_relay.ClosedError, match="no handshake"):
        workers.engines[1].receive_weights(vllm.RelayUpdateInfo(version=1, epoch=""))


def test_other_ranks_iterate_and_send_nothing(vllm):
    names = []
    source = source_of({"a": 1.0})
    iterate = source.iter_full
    source.iter_full = lambda: (names.append(name) or (name, tensor) for name, tensor in iterate())
    info = vllm.TensorRelayTrainerInitInfo(rank=1)
    other = vllm.TensorRelayTrainerEngine.trainer_init(info, client=None, source=source)
    other.send_weights()
    assert names == ["a"]
    with pytest.raises(tensor_relay.RequestError, match="iter_full"):
        vllm.TensorRelayTrainerEngine.trainer_init(info, client=None)


@dataclass
class Destination:
    """vLLM's answer for one weight: its memory, and the dimension that each axis of the inference mesh cuts."""

    name: str
    placements: tuple[int, int] | None
    tensor: torch.Tensor | None


@pytest.fixture
def tensor_parallel(vllm, monkeypatch):
    """Two workers of one tensor-parallel group, whose models hold rows of `up`, columns of `down`, and all of `norm`, and
    fuse `q`."""
    package, ranks = "vllm.distributed.weight_transfer", iter((0, 1))

    def resolve(model, names, dtypes, shapes, *, num_workers, shard_axis_size, allow_direct):
        assert (num_workers, shard_axis_size, allow_direct) == (2, 2, True)
        assert dtypes == [torch.float32] * 4 and shapes == [(8, 4), (4, 8), (4,), (4, 4)]
        cut = {"up": (-1, 0), "down": (-1, 1), "norm": None, "q": None}
        return [Destination(name, cut[name], model.parameters.get(name)) for name in names]

    hosts.install_stub(monkeypatch, f"{package}.m2n_layout", resolve_parameter_destinations=resolve)
    hosts.install_stub(monkeypatch, f"{package}.m2n_common", DESTINATION_SHARD_AXIS=1, REPLICATE=-1)
    hosts.install_stub(monkeypatch, "vllm.distributed.parallel_state", get_tensor_model_parallel_rank=lambda: next(ranks))
    workers = Workers(vllm, tensor_parallel_size=2)
    for each in workers.engines:
        each.model.parameters = {"up": torch.zeros(4, 4), "down": torch.zeros(4, 4), "norm": torch.zeros(4)}
    yield workers
    workers.close()


def test_a_worker_receives_its_part_where_vllm_declares_it(vllm, tensor_parallel, caplog):
    caplog.set_level("INFO", "tensor_relay")
    weights = {"up": torch.rand(8, 4), "down": torch.rand(4, 8), "norm": torch.rand(4), "q": torch.rand(4, 4)}
    info = vllm.TensorRelayTrainerInitInfo(listen="127.0.0.1:0", timeout=20, workers=2, rank=0)
    trainer = vllm.TensorRelayTrainerEngine.trainer_init(info, client=tensor_parallel, source=source_of(weights))
    for step in range(2):
        weights["norm"] += step
        trainer.send_weights()
        for rank, each in enumerate(tensor_parallel.engines):
            held = each.model.parameters
            assert torch.equal(held["up"], weights["up"].chunk(2)[rank])
            assert torch.equal(held["down"], weights["down"].chunk(2, dim=1)[rank])
            assert torch.equal(held["norm"], weights["norm"])
            assert list(each.model.loaded) == ["q"] and torch.equal(each.model.loaded["q"], weights["q"])
            assert not each.supports_draft_weight_update
    assert "part, 1/2, of 2 of 4 weights, which have 76 % of all elements. The others are received whole" in caplog.text
    trainer.shutdown()
