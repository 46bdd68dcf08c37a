"""`tensor_relay.tree`: trees are restored exactly, and values that cannot be restored are refused by their path."""

import json
from collections import OrderedDict, namedtuple

import numpy as np
import pytest

import tensor_relay
from tensor_relay import tree

LEAVES = {"w": np.arange(6, dtype="f4").reshape(2, 3), "b": np.ones(2, "i8")}


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other) and [type(key) for key in one] == [type(key) for key in other]
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            assert_same(each, its)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    else:
        assert one == other or (one != one and other != other)


@pytest.mark.parametrize(
    "given",
    [
        {"state": {0: {"step": LEAVES["b"], "exp_avg": LEAVES["w"]}, 1: {}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        [LEAVES["w"], (LEAVES["b"], None, True, "text", 3, float("inf"), float("nan"))],
        OrderedDict(a=[[]], b=()),
        {"a.b": LEAVES["w"], "a": {"b": LEAVES["b"], "b~2": LEAVES["w"]}, None: 1, True: 2, 2.5: 3},
        LEAVES["w"],
        {},
        7,
    ],
)
def test_a_tree_is_restored(relay, client, given):
    relay.publish("t", tree.flatten(given), metadata={"step": 1})
    snapshot = client.get("t")
    assert_same(tree.unflatten(snapshot.numpy()), given)
    assert snapshot.metadata == {"step": 1}


def test_tensors_are_named_by_their_path():
    flat = tree.flatten({"state": {0: {"exp_avg": LEAVES["w"]}}, "groups": [{"params": [LEAVES["b"]]}]})
    assert list(flat) == ["state.0.exp_avg", "groups.0.params.0", tree.STRUCTURE]
    assert flat["state.0.exp_avg"] is LEAVES["w"], "nothing is copied"


def test_unflatten_accepts_a_snapshot(relay, client):
    relay.publish("t", tree.flatten({"a": [LEAVES["w"]]}))
    assert tree.unflatten(client.get("t"))["a"][0].shape == (2, 3)


def test_an_optimizer_is_restored(relay, client):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(4, 4)

    def stepped():
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        return optimizer

    given = stepped().state_dict()
    relay.publish("t", tree.flatten(given))
    got = tree.unflatten(client.get("t").torch())
    assert got["param_groups"] == given["param_groups"]
    for index, state in given["state"].items():
        assert all(torch.equal(got["state"][index][name], value) for name, value in state.items())
    torch.optim.AdamW(model.parameters()).load_state_dict(got)


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"a": [{1, 2}]}, "'a.0' is a set"),
        ({"a": Pair(1, 2)}, "'a' is a Pair"),
        ({"a": {(1, 2): 3}}, r"'a' has the key \(1, 2\)"),
        ({float("nan"): 3}, "the tree itself has the key nan"),
        (object(), "the tree itself is a object"),
    ],
)
def test_values_that_cannot_be_restored_are_refused(given, place):
    with pytest.raises(tensor_relay.UnsupportedTensorError, match=place):
        tree.flatten(given)


def test_a_tree_that_contains_itself_is_refused():
    endless = {}
    endless["a"] = endless
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="contain itself"):
        tree.flatten(endless)


def test_publish_names_flatten(relay):
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="tensor_relay.tree.flatten"):
        relay.publish("t", {"a": {"b": LEAVES["w"]}})


@pytest.mark.parametrize(
    "structure",
    [b"", b"{", b"[]", b"3", b'{"list": 3}', b'{"list": [1]}', b'{"dict": [[1]]}', b'{"dict": [[[], {"value": 1}]]}', b'{"set": []}',
     b'{"tensor": 3}', b'{"tensor": []}', b'{"a": 1, "b": 2}', b'{"list":[' * 5_000, b"\xff"],
)
def test_a_damaged_structure_is_an_error(structure):
    with pytest.raises(tensor_relay.DamagedError):
        tree.unflatten({tree.STRUCTURE: structure})
    deep = {"value": 1}
    for _ in range(150):
        deep = {"list": [deep]}
    with pytest.raises(tensor_relay.DamagedError):
        tree.unflatten({tree.STRUCTURE: json.dumps(deep).encode()})


def test_an_incomplete_tree_is_refused(relay, client):
    relay.publish("t", tree.flatten({"a": LEAVES["w"], "b": LEAVES["b"]}))
    with pytest.raises(tensor_relay.DamagedError, match="select"):
        tree.unflatten(client.get("t", select=["a", tree.STRUCTURE]).numpy())
    with pytest.raises(tensor_relay.DamagedError, match="flatten"):
        tree.unflatten({"a": LEAVES["w"]})
