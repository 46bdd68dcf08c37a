"""PyTorch models and their extra state are restored as published; tensors without memory are refused with a remedy."""

import numpy as np
import pytest
from conftest import TIMEOUT_S, logged, received

import tensor_relay

torch = pytest.importorskip("torch")


class Extra(torch.nn.Module):
    """A module with extra state, as in Transformer Engine."""

    def __init__(self, extra):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.got = extra


def test_a_model_is_published_as_its_state_dict(relay, client):
    model, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    relay.publish("t", model)
    other.load_state_dict(received(client).torch())
    assert torch.equal(model.weight, other.weight)
    receiving = torch.nn.Linear(3, 4)
    assert client.subscribe("t", out=receiving).next(TIMEOUT_S).version == 1
    assert torch.equal(model.weight, receiving.weight)
    parameters = torch.nn.ParameterDict({"a": torch.ones(2)})
    relay.publish("t", parameters)
    assert list(received(client)) == ["a"]


@pytest.mark.parametrize("tensors", [np.zeros(3), torch.zeros(3), "abc", None], ids=str)
def test_tensors_without_names_are_refused(relay, tensors):
    message = "give a mapping of names to tensors, a list of tensors, or a model"
    with pytest.raises(tensor_relay.UnsupportedTensorError, match=message):
        relay.publish("t", tensors)


@pytest.mark.parametrize("extra", [None, "fp8", 3, True], ids=str)
def test_extra_state_is_restored(relay, client, extra):
    model = torch.nn.Sequential(Extra(extra))
    relay.publish("t", model.state_dict() | {"step": 3})
    other = torch.nn.Sequential(Extra("another"))
    snapshot = received(client)
    other.load_state_dict(snapshot.torch())
    assert other[0].got == extra and torch.equal(model[0].linear.weight, other[0].linear.weight)
    assert "step" not in snapshot.torch() and "step" in snapshot.entries


def test_extra_state_of_tensors_is_restored(relay, client):
    relay.publish("t", Extra(torch.arange(3)))
    other = Extra(None)
    other.load_state_dict(received(client).torch())
    assert torch.equal(other.got, torch.arange(3))


ATOMIC = pytest.mark.parametrize("atomic", [True, False])
INTO = pytest.mark.parametrize("into", [
    lambda client, out, **options: client.subscribe("t", out=out, **options).next(TIMEOUT_S),
    lambda client, out, **options: client.get("t", out=out, **options),
    lambda client, out, **options: client.get("t", 1, out=out, **options),
    lambda client, out, **options: client.install(client.get("t"), out, **options),
    lambda client, out, **options: (subscription := client.subscribe("t", out=out, **options)).activate(subscription.prefetch()),
], ids=["subscribe", "get", "get of a version", "install", "activate"])  # fmt: skip


@INTO
@pytest.mark.parametrize("extra", [None, "fp8", 3, torch.arange(3)], ids=str)
def test_extra_state_is_set_in_a_module(relay, client, into, extra):
    published, receiving = torch.nn.Sequential(Extra(extra)), torch.nn.Sequential(Extra(torch.ones(7)))
    relay.publish("t", published)
    into(client, receiving)
    assert torch.equal(receiving[0].linear.weight, published[0].linear.weight)
    assert torch.equal(receiving[0].got, extra) if torch.is_tensor(extra) else receiving[0].got == extra
    if torch.is_tensor(extra):
        assert client.stats()["snapshot_bytes"] == 0, "the module's tensor is its own"


@pytest.mark.parametrize("extra, present", [("fp8", "old"), (torch.arange(3), torch.zeros(3, dtype=torch.int64))], ids=str)
def test_extra_state_is_set_in_place(relay, client, extra, present):
    published, receiving = torch.nn.Sequential(Extra(extra)), torch.nn.Sequential(Extra(present))
    relay.publish("t", published)
    client.subscribe("t", out=receiving, atomic=False).next(TIMEOUT_S)
    assert torch.equal(receiving[0].linear.weight, published[0].linear.weight)
    assert torch.equal(receiving[0].got, extra) if torch.is_tensor(extra) else receiving[0].got == extra


@ATOMIC
@pytest.mark.parametrize("extra", ["fp8", torch.arange(3)], ids=str)
def test_extra_state_is_not_lost_in_a_dictionary(relay, client, atomic, extra, caplog):
    """A state dict has copies of extra state, which nothing would set in the model."""
    published, receiving = torch.nn.Sequential(Extra(extra)), torch.nn.Sequential(Extra(extra))
    relay.publish("t", published)
    with pytest.raises(tensor_relay.TargetError, match="0._extra_state of `out` is the extra state.* give the module itself"):
        client.subscribe("t", out=receiving.state_dict(), atomic=atomic)
    # With atomic=False the tensors were already written when the metadata is looked at.
    error = tensor_relay.TargetError if atomic or torch.is_tensor(extra) else tensor_relay.TornError
    with pytest.raises(error, match="0._extra_state"):
        client.subscribe("t", out=dict(receiving.named_parameters()), atomic=atomic).next(TIMEOUT_S)
    with caplog.at_level("WARNING", "tensor_relay"):
        client.subscribe("t", out=receiving.state_dict(), atomic=atomic, strict=False).next(TIMEOUT_S)
        assert "0._extra_state" in logged(caplog, "strict=False")
    assert torch.equal(receiving[0].linear.weight, published[0].linear.weight) and not hasattr(receiving[0], "got")
    weights = ["0.linear.*"]  # Extra state that is not selected is not missed.
    client.subscribe("t", out=dict(receiving.named_parameters()), atomic=atomic, select=weights).next(TIMEOUT_S)


@ATOMIC
def test_a_version_without_the_extra_state_of_a_module_is_refused(relay, client, atomic):
    receiving = torch.nn.Sequential(Extra("fp8"))
    before = receiving[0].linear.weight.clone()
    relay.publish("t", dict(torch.nn.Sequential(Extra(None)).named_parameters()))
    # With atomic=False the tensors were already written when the metadata is looked at.
    error = tensor_relay.TargetError if atomic else tensor_relay.TornError
    with pytest.raises(error, match="0._extra_state"):
        client.subscribe("t", out=receiving, atomic=atomic).next(TIMEOUT_S)
    assert torch.equal(receiving[0].linear.weight, before) == atomic
    client.subscribe("t", out=receiving, atomic=atomic, strict=False).next(TIMEOUT_S)
    assert not hasattr(receiving[0], "got") and not torch.equal(receiving[0].linear.weight, before)


@ATOMIC
def test_a_module_that_refuses_its_extra_state_is_torn(relay, client, atomic):
    class Refusing(Extra):
        def set_extra_state(self, extra):
            raise ValueError(f"unknown recipe {extra}")

    relay.publish("t", Refusing("fp8"))
    with pytest.raises(tensor_relay.TornError, match="unknown recipe fp8") as torn:
        client.subscribe("t", out=Refusing("bf16"), atomic=atomic).next(TIMEOUT_S)
    assert torn.value.version == 1 and isinstance(torn.value.__cause__, ValueError)


class Compiled(torch.nn.Module):
    """A module that wraps another, as `torch.compile` and DistributedDataParallel do."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model


@ATOMIC
def test_prefixes_of_wrappers_are_renamed(relay, client, atomic):
    def plain(name):
        return name.removeprefix("_orig_mod.")

    published, receiving = Compiled(Extra("fp8")), Compiled(Extra("bf16"))
    relay.publish("t", published, rename=plain)
    assert list(client.get("t")) == ["linear.weight", "linear.bias"] and client.get("t").entries == {"_extra_state": "fp8"}
    client.subscribe("t", out=receiving, atomic=atomic, rename=plain).next(TIMEOUT_S)
    assert torch.equal(receiving._orig_mod.linear.weight, published._orig_mod.linear.weight)
    assert receiving._orig_mod.got == "fp8"
    client.get("t", out=Compiled(Extra("bf16")), atomic=atomic, rename=plain)
    client.get("t", 1, out=Compiled(Extra("bf16")), rename=plain)
    client.install(client.get("t"), Compiled(Extra("bf16")), rename=plain)
    client.subscribe("t").activate(client.get("t"), Compiled(Extra("bf16")), rename=plain)


def test_two_tensors_of_one_name_are_refused(relay, client):
    with pytest.raises(tensor_relay.RequestError, match="rename gives weight and bias the same name, x"):
        relay.publish("t", torch.nn.Linear(1, 1), rename=lambda name: "x")
    with pytest.raises(tensor_relay.RequestError, match="rename gives weight and bias the same name, x"):
        client.subscribe("t", out=torch.nn.Linear(1, 1), rename=lambda name: "x")
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="is not text"):
        relay.publish("t", torch.nn.Linear(1, 1), rename=len)
    with pytest.raises(ZeroDivisionError):
        relay.publish("t", torch.nn.Linear(1, 1), rename=lambda name: 1 / 0)


def test_extra_state_that_would_be_pickled_is_refused(relay):
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="0._extra_state .*get_extra_state.*leave it out"):
        relay.publish("t", torch.nn.Sequential(Extra({"scale": 1})))


def assert_refused(relay, client, tensor, words, words_of_out=None):
    """Checks that both `publish` and `out` refuse the tensor with an error that names it."""
    with pytest.raises(tensor_relay.UnsupportedTensorError, match=f"weight .*{words}"):
        relay.publish("t", {"weight": tensor})
    with pytest.raises(tensor_relay.TargetError, match=f"weight .*{words_of_out or words}"):
        client.subscribe("t", out={"weight": tensor})


def test_sharded_tensors_are_not_published(relay, client, tmp_path):
    distributed = pytest.importorskip("torch.distributed.tensor")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        sharded = distributed.distribute_tensor(torch.ones(4, 2), mesh, [distributed.Shard(0)])
        words = r"weight .*sharded over several processes.*full_tensor.*publish the result in one.*to_local"
        with pytest.raises(tensor_relay.UnsupportedTensorError, match=words):
            relay.publish("t", {"weight": sharded})
        relay.publish("t", {"weight": sharded.full_tensor()})
        assert received(client)["weight"].shape == (4, 2)
    finally:
        torch.distributed.destroy_process_group()


def test_tensors_without_values_are_refused(relay, client):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    assert_refused(relay, client, fake, "FakeTensor, which has a shape and no values")
    assert_refused(relay, client, torch.ones(3, device="meta"), "on the device `meta`")
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    assert_refused(relay, client, freed, "storage is empty, as FSDP leaves")
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert_refused(relay, client, ragged, "it is nested")
    from torch.testing._internal.two_tensor import TwoTensor

    assert_refused(relay, client, TwoTensor(torch.ones(3), torch.ones(3)), "made of other tensors")
    relay.publish("t", {"empty": torch.ones(0)})
    assert received(client)["empty"].shape == (0,)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_tensors_of_other_kinds_are_refused_in_own_words(relay, client):
    masked = torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    words = "MaskedTensor, and masks are not published: "
    assert_refused(relay, client, masked, f"{words}.*get_mask", f"{words}receive into a plain tensor")

    def within(tensor):
        assert_refused(relay, client, tensor, "within a transform .* of torch.func")
        return tensor.sum()

    torch.func.vmap(within)(torch.ones(2, 3))
    torch.func.grad(within)(torch.ones(3))


def test_the_words_of_other_libraries_are_quoted(relay, client):
    class Strange:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            raise RuntimeError("no storage")

    words = r"its library does not give access to its memory \(RuntimeError: no storage\)"
    assert_refused(relay, client, Strange(), words)
    lazy = torch.nn.LazyLinear(3).weight
    assert_refused(relay, client, lazy, r"its library does not give access to its memory \(\w+: ")


def test_an_old_pytorch_is_refused(relay, client, monkeypatch):
    from tensor_relay._frameworks import TORCH_AT_LEAST

    relay.publish("t", {"x": np.ones(3)})
    snapshot = received(client)
    monkeypatch.setattr(torch, "__version__", "1.13.1+cu117")
    words = f"PyTorch 1.13.1.cu117 is installed, and tensor_relay needs {TORCH_AT_LEAST} or later"
    assert_refused(relay, client, torch.ones(3), words)
    with pytest.raises(tensor_relay.UnsupportedTensorError, match=words):
        snapshot.torch()
    relay.publish("t", {"x": np.ones(3)})  # Programs without PyTorch's tensors are not affected.
