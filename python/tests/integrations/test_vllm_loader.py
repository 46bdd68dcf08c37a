"""vLLM's model loader, with a stub of vLLM's default loader, whose signatures are those of the release."""

import importlib
import sys
from dataclasses import dataclass, field

import hosts
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import tensor_relay  # noqa: E402

RECORDED = hosts.recorded("vllm_loader")
LOADERS = "vllm.model_executor.model_loader"


@dataclass
class LoadConfig:
    """The fields of vLLM's class that the loader uses."""

    load_format: str = "tensor_relay"
    model_loader_extra_config: dict = field(default_factory=dict)


class BaseModelLoader:
    pass


class DefaultModelLoader(BaseModelLoader):
    """A stub of vLLM's default loader: loads weights, reports missing ones, and refuses unknown options."""

    def __init__(self, load_config):
        assert not load_config.model_loader_extra_config, "vLLM refuses unknown options"
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
    """vLLM's loaders by format, after the plugin has registered ours."""
    monkeypatch.setattr("importlib.metadata.version", lambda package: {"vllm": RECORDED["version"]}[package])
    formats = {}

    def register_model_loader(name):
        def register(loader):
            assert name not in formats and issubclass(loader, BaseModelLoader)
            formats[name] = loader

        return register

    hosts.install_stub(
        monkeypatch,
        LOADERS,
        BaseModelLoader=BaseModelLoader,
        register_model_loader=register_model_loader,
        _LOAD_FORMAT_TO_MODEL_LOADER=formats,
    )
    hosts.install_stub(monkeypatch, f"{LOADERS}.default_loader", DefaultModelLoader=DefaultModelLoader)
    factories = {"WeightTransferEngineFactory": None, "WeightTransferTrainerFactory": None}
    hosts.install_stub(monkeypatch, "vllm.distributed.weight_transfer.factory", **factories)
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
    options = {"ticket": str(ticket), "topic": "policy"} | options
    return loaders["tensor_relay"](LoadConfig(model_loader_extra_config=options))


def test_the_interface_matches_vllms(loaders):
    module = importlib.import_module("tensor_relay.integrations.vllm_loader")
    recorded = RECORDED["classes"]["DefaultModelLoader"]
    overridden = {name: recorded[name] for name in ("download_model", "get_all_weights")}
    assert list(hosts.differences(module.TensorRelayModelLoader, overridden)) == []
    if source := hosts.source_of("vllm"):
        assert hosts.signatures_in(source, "vllm_loader") == RECORDED["classes"], "the recorded signatures are outdated"


def test_a_model_is_loaded_from_a_topic(loaders, relay, tmp_path):
    weights = {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "b": torch.ones(3)}
    relay.publish("policy", weights)
    model = Model(*weights)
    loader(loaders, relay, tmp_path).load_weights(model, None)
    assert model.loaded.keys() == weights.keys()
    assert all(torch.equal(model.loaded[name], weights[name]) for name in weights)


def test_files_beside_the_weights_are_not_loaded(loaders, relay, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").save_file
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    relay.publish_files("policy", folder)
    model = Model("w")
    loader(loaders, relay, tmp_path).load_weights(model, None)
    assert list(model.loaded) == ["w"]


def test_the_downloaded_version_is_loaded(loaders, relay, tmp_path):
    relay.publish("policy", {"w": torch.zeros(3)})
    model_loader = loader(loaders, relay, tmp_path)
    model_loader.download_model(None)
    relay.publish("policy", {"w": torch.ones(3)})
    first, second = Model("w"), Model("w")
    model_loader.load_weights(first, None)
    model_loader.load_weights(second, None)
    assert (first.loaded["w"][0], second.loaded["w"][0]) == (0, 1), "a reload receives the newest version"


def test_weights_of_another_model_raise(loaders, relay, tmp_path):
    relay.publish("policy", {"other": torch.zeros(3)})
    with pytest.raises(ValueError, match="not initialized"):
        loader(loaders, relay, tmp_path).load_weights(Model("w"), None)


def test_versions_that_cannot_be_received_raise_in_time(loaders, relay, tmp_path):
    model = Model("w")
    with pytest.raises(tensor_relay.TensorRelayError, match="policy"):
        loader(loaders, relay, tmp_path, timeout=0.3).load_weights(model, None)
    relay.publish("policy", {"w": torch.zeros(3)})
    with pytest.raises(tensor_relay.TensorRelayError, match="7"):
        loader(loaders, relay, tmp_path, version=7, timeout=0.3).load_weights(model, None)
    assert not model.loaded


@pytest.mark.parametrize(("options", "message"), [({"tickets": "x"}, "'tickets'"), ({"ticket": ""}, "names no ticket")])
def test_wrong_options_are_named(loaders, relay, tmp_path, options, message):
    with pytest.raises(tensor_relay.RequestError, match=message):
        loader(loaders, relay, tmp_path, **options)
