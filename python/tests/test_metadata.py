"""A version's metadata: Python receives the published values, other consumers receive text."""

import types

import numpy as np
import pytest
from conftest import received

import tensor_relay


def test_metadata_values_keep_their_types(relay, client):
    sent = {
        "run": "größe", "digits": "1", "step": 1, "loss": 0.5, "done": False, "best": None, "big": 1 << 80,
        "shape": [1, [2.5, "a"]], "parts": {"lr": 1e-3, "names": ["a"]},
    }  # fmt: skip
    relay.publish("t", {}, allow_empty=True, metadata=sent)
    got = received(client).metadata
    assert got == sent and {name: type(value) for name, value in got.items()} == {name: type(value) for name, value in sent.items()}
    assert got["digits"] == "1" and got["done"] is False


def test_scalars_of_frameworks_are_numbers(relay, client):
    torch = pytest.importorskip("torch")
    sent = {"loss": np.float32(0.5), "step": np.int64(3), "done": np.bool_(True), "array": np.array(7), "torch": torch.tensor(1.5)}
    relay.publish("t", {}, allow_empty=True, metadata=sent | {"all": [np.float32(0.25), torch.tensor(2)]})
    got = received(client).metadata
    assert got == {"loss": 0.5, "step": 3, "done": True, "array": 7, "torch": 1.5, "all": [0.25, 2]}
    assert type(got["step"]) is int and type(got["loss"]) is float and got["done"] is True


def test_metadata_may_be_any_mapping(relay, client):
    relay.publish("t", {}, allow_empty=True, metadata=types.MappingProxyType({"step": 1}))
    assert received(client).metadata == {"step": 1}


@pytest.mark.parametrize("value", [b"abc", object(), np.zeros(3), {1, 2}, [object()], lambda: 1])
def test_the_error_for_an_unsupported_value_names_its_key(relay, client, value):
    with pytest.raises(TypeError, match=r"metadata \"odd\" \(.*\) cannot be sent: .*Supported are text, numbers"):
        relay.publish("t", {}, metadata={"fine": 1, "odd": value})
    with pytest.raises(TypeError, match="the keys of metadata are text, and 1 is not"):
        relay.publish("t", {}, metadata={1: "a"})
    assert client.topics() == [], "nothing was published"


@pytest.mark.parametrize("metadata", [{"odd": "a\udcff"}, {"odd": ["a\udcff"]}, {"odd\udcff": 1}])
def test_text_that_the_system_could_not_decode_is_refused(relay, client, metadata):
    with pytest.raises(TypeError, match=r"metadata 'odd.*' cannot be sent: it has surrogates"):
        relay.publish("t", {}, metadata=metadata)
    assert client.topics() == [], "nothing was published"


@pytest.mark.parametrize("value", [{1: "int", "1": "str"}, {"deep": [({None: "n"},)]}, [{True: 1}]])
def test_keys_that_json_would_change_are_refused(relay, client, value):
    with pytest.raises(TypeError, match=r"metadata \"odd\" has a dictionary with the key (1|None|True), which .* make it text"):
        relay.publish("t", {}, metadata={"odd": value})
    endless = []
    endless.append(endless)
    with pytest.raises(TypeError, match="cannot be sent"):
        relay.publish("t", {}, metadata={"odd": endless})
    assert client.topics() == [], "nothing was published"


def test_the_packages_keys_are_reserved(relay):
    with pytest.raises(tensor_relay.RequestError, match="call it something else"):
        relay.publish("t", {}, metadata={"tensor_relay.json": "[]"})
