"""Topics that are made, read once and dropped, without end."""

import json

import numpy as np
import pytest
from conftest import HERE, ended, python

import tensor_relay

REMEMBERED_MAX = 4_096


def test_withdrawn_topics_leave_nothing_behind(relay, client):
    tensors = {"x": np.ones(10, "f4")}
    relay.publish("stays", tensors)
    for number in range(REMEMBERED_MAX + 10):
        relay.publish(f"many/{number}", tensors, hold="borrow")
        if number % 200 == 0:
            assert client.get(f"many/{number}").version == 1
        relay.withdraw(f"many/{number}")
    assert [info.topic for info in client.topics()] == ["stays"]
    assert relay.stats()["staged_bytes"] < 1 << 20
    relay.withdraw(f"many/{REMEMBERED_MAX + 9}")  # Again, which does nothing.
    with pytest.raises(tensor_relay.PublishError, match="never published"):
        relay.withdraw("many/0")  # Its name was forgotten with thousands of others.
    assert client.get("stays").version == 1


@pytest.mark.parametrize("readers", [1, 3])
def test_the_example_that_measures_a_topics_life(readers):
    with python(HERE.parent / "examples" / "many_topics.py", "--topics", 100, "--readers", readers) as program:
        told = json.loads(ended(program))
    assert (told["topics"], told["readers"], told["left_bytes"]) == (100, readers, 0)
    parts = [told[part]["median_ms"] for part in ("publish", "get", "withdraw")]
    assert all(0 < part <= told["life"]["median_ms"] for part in parts) and told["topics_per_s"] > 0
