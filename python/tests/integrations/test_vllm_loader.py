"""vLLM's model loader, against a stand-in of vLLM's default loader, with the signatures of the released one."""

import importlib
import sys
from dataclasses import dataclass, field

import hosts
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import tensor_relay  # noqa: E402

TOLD = hosts.written_down("vllm_loader")
LOADERS = "vllm.model_executor.model_loader"


@dataclass
class LoadConfig:
    """Of vLLM's, what loaders are given here."""

    load_format: str = "tensor_relay"
    model_loader_extra_config: dict = field(default_factory=dict)


class BaseModelLoader:
    pass


class DefaultModelLoader(BaseModelLoader):
    """What vLLM's default loader does with the weights that it iterates over, and with options that it does not know."""

    def __init__(self, load_config):
        assert not load_config.model_loader_extra_config, "vLLM refuses what it does not know"
        self.load_config = load_config

    def load_weights(self, model, model_config):
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        if missing := model.names - loaded:
            raise ValueError(f"Following weights were not initialized from checkpoint: {missing}")


class Model:
    def __init__(self, *names):
        self.names, self.loaded = set(names), {}

    def load_weights(self, weights):
        self.loaded = {name: tensor.clone() for name, tensor in weights}
        return set(self.loaded)


@pytest.fixture
def loaders(monkeypatch):
    """vLLM's loaders by their formats, after its plugins were called."""
    monkeypatch.setattr("importlib.metadata.version", lambda package: {"vllm": TOLD["version"]}[package])
    formats = {}

    def register_model_loader(name):
        def register(loader):
            assert name not in formats and issubclass(loader, BaseModelLoader)
            formats[name] = loader

        return register

    hosts.stand_in(
        monkeypatch,
        LOADERS,
        BaseModelLoader=BaseModelLoader,
        register_model_loader=register_model_loader,
        _LOAD_FORMAT_TO_MODEL_LOADER=formats,
    )
    hosts.stand_in(monkeypatch, f"{LOADERS}.default_loader", DefaultModelLoader=DefaultModelLoader)
    hosts.stand_in(monkeypatch, "vllm.distributed.weight_transfer.factory", WeightTransferEngineFactory=None, WeightTransferTrainerFactory=None)
    plugin = importlib.import_module("tensor_relay.integrations._vllm_plugin")
    plugin.register()
    plugin.register()
    yield formats
    sys.modules.pop("tensor_relay.integrations.vllm_loader", None)


@pytest.fixture
def relay():
    with tensor_relay.serve("127.0.0.1:0", ephemeral=True) as relay:
        yield relay


def loader(loaders, relay, tmp_path, **options):
    ticket = tmp_path / "ticket"
    ticket.write_text(relay.ticket)
    ticket.chmod(0o600)
    return loaders["tensor_relay"](LoadConfig(model_loader_extra_config={"ticket": str(ticket), "topic": "policy"} | options))


def test_it_has_what_vllm_calls(loaders):
    module = importlib.import_module("tensor_relay.integrations.vllm_loader")
    told = TOLD["classes"]["DefaultModelLoader"]
    assert list(hosts.differences(module.TensorRelayModelLoader, {name: told[name] for name in ("download_model", "get_all_weights")})) == []
    if source := hosts.source_of("vllm"):
        assert hosts.signatures_in(source, "vllm_loader") == TOLD["classes"], "what was written down is no longer so"


def test_a_model_gets_its_weights_from_a_topic(loaders, relay, tmp_path):
    weights = {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "b": torch.ones(3)}
    relay.publish("policy", weights)
    model = Model(*weights)
    loader(loaders, relay, tmp_path).load_weights(model, None)
    assert model.loaded.keys() == weights.keys()
    assert all(torch.equal(model.loaded[name], weights[name]) for name in weights)


def test_files_beside_the_weights_are_no_weights(loaders, relay, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").save_file
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    relay.publish_files("policy", folder)
    model = Model("w")
    loader(loaders, relay, tmp_path).load_weights(model, None)
    assert list(model.loaded) == ["w"]


def test_what_was_downloaded_is_what_is_loaded(loaders, relay, tmp_path):
    relay.publish("policy", {"w": torch.zeros(3)})
    chosen = loader(loaders, relay, tmp_path)
    chosen.download_model(None)
    relay.publish("policy", {"w": torch.ones(3)})
    first, second = Model("w"), Model("w")
    chosen.load_weights(first, None)
    chosen.load_weights(second, None)
    assert (first.loaded["w"][0], second.loaded["w"][0]) == (0, 1), "and a reload takes the newest"


def test_weights_of_another_model_are_an_error(loaders, relay, tmp_path):
    relay.publish("policy", {"other": torch.zeros(3)})
    with pytest.raises(ValueError, match="not initialized"):
        loader(loaders, relay, tmp_path).load_weights(Model("w"), None)


def test_what_cannot_be_received_is_an_error_in_time(loaders, relay, tmp_path):
    model = Model("w")
    with pytest.raises(tensor_relay.TensorRelayError, match="policy"):
        loader(loaders, relay, tmp_path, timeout=0.3).load_weights(model, None)
    relay.publish("policy", {"w": torch.zeros(3)})
    with pytest.raises(tensor_relay.TensorRelayError, match="7"):
        loader(loaders, relay, tmp_path, version=7, timeout=0.3).load_weights(model, None)
    assert not model.loaded


@pytest.mark.parametrize(("options", "told"), [({"tickets": "x"}, "'tickets'"), ({"ticket": ""}, "names no ticket")])
def test_options_that_are_wrong_are_named(loaders, relay, tmp_path, options, told):
    with pytest.raises(tensor_relay.RequestError, match=told):
        loader(loaders, relay, tmp_path, **options)
