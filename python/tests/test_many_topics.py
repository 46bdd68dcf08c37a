"""Thousands of short-lived topics: published, read once and withdrawn."""

import json

import numpy as np
import pytest
from conftest import HERE, python, wait_for_exit

import tensor_relay

WITHDRAWN_NAMES_MAX = 4_096


def test_withdrawn_topics_leave_nothing_behind(relay, client):
    tensors = {"x": np.ones(10, "f4")}
    relay.publish("stays", tensors)
    for number in range(WITHDRAWN_NAMES_MAX + 10):
        relay.publish(f"many/{number}", tensors, hold="borrow")
        if number % 200 == 0:
            assert client.get(f"many/{number}").version == 1
        relay.withdraw(f"many/{number}")
    assert [info.topic for info in client.topics()] == ["stays"]
    assert relay.stats()["staged_bytes"] < 1 << 20
    relay.withdraw(f"many/{WITHDRAWN_NAMES_MAX + 9}")  # A repeated withdrawal does nothing.
    with pytest.raises(tensor_relay.PublishError, match="never published"):
        relay.withdraw("many/0")  # The relay remembers only the last names that were withdrawn.
    assert client.get("stays").version == 1


@pytest.mark.parametrize("readers", [1, 3])
def test_the_many_topics_example_works(readers):
    with python(HERE.parent / "examples" / "many_topics.py", "--topics", 100, "--readers", readers) as program:
        report = json.loads(wait_for_exit(program))
    assert (report["topics"], report["readers"], report["left_bytes"]) == (100, readers, 0)
    medians = [report[call]["median_ms"] for call in ("publish", "get", "withdraw")]
    assert all(0 < median <= report["life"]["median_ms"] for median in medians) and report["topics_per_s"] > 0
