"""Memory is used again: 500 versions take no more than a few."""

import gc
import os

import numpy as np
import pytest
from conftest import PATIENCE_S

import tensor_relay

VERSION_BYTES = 512 << 10
# What an allocator keeps here and there. A leak of one version in twenty-five would be more.
SLACK_BYTES = 16 * VERSION_BYTES


def resident_bytes():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("hold, how", [("stage", "out"), ("borrow", "numpy")])
def test_five_hundred_versions(relay, client, hold, how):
    out = {"w": np.zeros(VERSION_BYTES, np.uint8)} if how == "out" else None
    subscription = client.subscribe("t", out=out, strict=False, timeout=PATIENCE_S)
    for number in range(500):
        tensor = np.full(VERSION_BYTES, number % 251, np.uint8)  # A new one, so that one that is kept shows.
        published = relay.publish("t", {"w": tensor, "turned": tensor.reshape(2, -1).T}, hold=hold)
        if number < 3:
            published.wait_committed()
        snapshot = next(subscription)
        got = out["w"] if out else snapshot.numpy()["w"]
        assert got[0] == got[-1] == number % 251
        del snapshot, got, tensor
        if number == 100:
            early = resident_bytes()
    assert resident_bytes() - early < SLACK_BYTES


def test_small_ones_leak_nothing_either(relay, client):
    """Capsules, errors, coroutines: a hundred bytes each would show after so many."""
    array = np.zeros(10)

    def once():
        relay.publish("t", {f"x{number}": array[number:] for number in range(10)}, hold="borrow")
        for tensor in client.subscribe("t").next(PATIENCE_S).values():
            tensor.__dlpack__()
            tensor.__dlpack__(max_version=(1, 0), copy=True)
            tensor.numpy()
        with pytest.raises(tensor_relay.UnsupportedTensorError):
            relay.publish("t", {"x": array, "bad": object()})

    for _ in range(200):
        once()
    early = resident_bytes()
    for _ in range(600):
        once()
    assert resident_bytes() - early < 4 << 20
