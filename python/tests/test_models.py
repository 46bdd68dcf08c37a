"""PyTorch models and their extra state are restored as published; tensors without memory are refused with a remedy."""

import numpy as np
import pytest
from conftest import TIMEOUT_S, received

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


def test_extra_state_that_would_be_pickled_is_refused(relay):
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="0._extra_state .*get_extra_state.*leave it out"):
        relay.publish("t", torch.nn.Sequential(Extra({"scale": 1})))


def assert_refused(relay, client, tensor, words):
    """Checks that both `publish` and `out` refuse the tensor with an error that names it."""
    with pytest.raises(tensor_relay.UnsupportedTensorError, match=f"weight .*{words}"):
        relay.publish("t", {"weight": tensor})
    with pytest.raises(tensor_relay.TargetError, match=f"weight .*{words}"):
        client.subscribe("t", out={"weight": tensor})


def test_sharded_tensors_are_refused(relay, client, tmp_path):
    distributed = pytest.importorskip("torch.distributed.tensor")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        sharded = distributed.distribute_tensor(torch.ones(4, 2), mesh, [distributed.Shard(0)])
        assert_refused(relay, client, sharded, r"sharded over several processes.*to_local.*full_tensor")
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
