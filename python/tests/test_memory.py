"""Memory is used again: 500 versions take no more than a few. What nobody needs goes back to the system, and what is needed
is counted."""

import gc
import json
import os

import numpy as np
import pytest
from conftest import HERE, PATIENCE_S, python
from following import BESIDE_BYTES, is_settled

import tensor_relay

VERSION_BYTES = 512 << 10
# What an allocator keeps here and there, and what the levels of effort that a server tries in turn take each. A leak of one
# version in twelve would be more.
SLACK_BYTES = 32 * VERSION_BYTES


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


TENSORS, TENSOR_BYTES = 6, 32 << 20
PAYLOAD_BYTES = TENSORS * TENSOR_BYTES


def told(program, word, payloads):
    program.stdin.write(f"{word} {payloads * PAYLOAD_BYTES}\n")
    program.stdin.flush()


def check(program, payloads):
    """No more than so many payloads are resident, and what is resident is what is counted."""
    line = program.stdout.readline()
    assert line, program.stderr.read()
    report = json.loads(line)
    assert is_settled(report, payloads * PAYLOAD_BYTES), report
    return report["peak_bytes"]


@pytest.mark.parametrize("how, landing", [("snapshot", 1), ("atomic", 1), ("phases", 1), ("torn", 0)])
def test_versions_take_what_the_readme_says(how, landing, tmp_path):
    """One version alone costs no copy for deltas, and when all is over nothing is left at either end."""
    size = (TENSORS, TENSOR_BYTES)
    with python(HERE / "leading.py", tmp_path / "state", *size) as producer:
        ticket = producer.stdout.readline().strip()
        with python(HERE / "following.py", ticket, how, *size) as consumer:
            for version in range(1, 4):
                more = min(version - 1, 1)  # A copy for deltas; and memory for the next version.
                told(consumer, "next", landing + more)
                assert consumer.stdout.readline() == "waiting\n", consumer.stderr.read()
                told(producer, "publish", 2 + more)
                check(producer, 2 + more)
                peak_bytes = check(consumer, landing + more)
                assert version > 1 or peak_bytes < landing * PAYLOAD_BYTES + BESIDE_BYTES
            told(consumer, "leave", 0)
            check(consumer, 0)
        told(producer, "withdraw", 0)
        check(producer, 0)


def test_who_keeps_no_copies_takes_one_version(tmp_path):
    """`base_bytes=0` of either end: versions come whole."""
    weights = np.zeros(1 << 20, np.uint8)
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path / "state", base_bytes=0) as relay:
        with tensor_relay.connect(relay.ticket, base_bytes=0) as none, tensor_relay.connect(relay.ticket) as client:
            subscriptions = [none.subscribe("t"), client.subscribe("t")]
            for _ in range(3):
                relay.publish("t", {"w": weights})
                codecs = [subscription.next(PATIENCE_S).receipt.codecs for subscription in subscriptions]
                assert not any("sparse" in codec for codec in codecs)
            assert none.stats()["base_bytes"] == client.stats()["base_bytes"] == relay.stats()["base_bytes"] == 0
