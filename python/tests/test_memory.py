"""Memory is reused: 500 versions need no more than a few. Unused memory is freed, and used memory is counted."""

import gc
import json
import os

import numpy as np
import pytest
from conftest import HERE, TIMEOUT_S, python
from memory_consumer import OVERHEAD_BYTES, is_settled

import tensor_relay

VERSION_BYTES = 512 << 10
# Freed memory that allocators keep. A leak of one version in twelve would exceed it within 200 versions.
SLACK_BYTES = 16 * VERSION_BYTES


def resident_bytes():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("hold, how", [("stage", "out"), ("borrow", "numpy")])
def test_five_hundred_versions_reuse_memory(relay, client, hold, how):
    out = {"w": np.zeros(VERSION_BYTES, np.uint8)} if how == "out" else None
    subscription = client.subscribe("t", out=out, strict=False, timeout=TIMEOUT_S)
    resident = []
    for number in range(501):
        tensor = np.full(VERSION_BYTES, number % 251, np.uint8)  # A new tensor each time, so that a leak shows.
        published = relay.publish("t", {"w": tensor, "transposed": tensor.reshape(2, -1).T}, hold=hold)
        if number < 3:
            published.wait_committed()
        snapshot = next(subscription)
        got = out["w"] if out else snapshot.numpy()["w"]
        assert got[0] == got[-1] == number % 251
        del snapshot, got, tensor
        if number in (100, 300, 500):
            resident.append(resident_bytes())
    # Allocators and other libraries' threads in this process may grow once; a leak grows each time.
    assert min(resident[1] - resident[0], resident[2] - resident[1]) < SLACK_BYTES, resident


def test_small_objects_do_not_leak(relay, client):
    """Checks DLPack capsules, exceptions and publications: a leak of 7 KiB in each call of `once` would exceed the bound."""
    array = np.zeros(10)

    def once():
        relay.publish("t", {f"x{number}": array[number:] for number in range(10)}, hold="borrow")
        for tensor in client.subscribe("t").next(TIMEOUT_S).values():
            tensor.__dlpack__()
            tensor.__dlpack__(max_version=(1, 0), copy=True)
            tensor.numpy()
        with pytest.raises(tensor_relay.UnsupportedTensorError):
            relay.publish("t", {"x": array, "bad": object()})

    for _ in range(200):
        once()
    growths = []
    # Allocators and other libraries' threads in this process may grow once; a leak grows each time.
    while len(growths) < 5 and (not growths or growths[-1] >= 4 << 20):
        baseline = resident_bytes()
        for _ in range(600):
            once()
        growths.append(resident_bytes() - baseline)
    assert growths[-1] < 4 << 20, growths


TENSORS, TENSOR_BYTES = 6, 32 << 20
PAYLOAD_BYTES = TENSORS * TENSOR_BYTES


def send(program, command, payloads):
    """Sends a command, with the number of payloads that the program may hold afterwards."""
    program.stdin.write(f"{command} {payloads * PAYLOAD_BYTES}\n")
    program.stdin.flush()


def check(program, payloads):
    """Checks that the program's resident memory is about this many payloads at most, and agrees with the counted memory.
    Returns the peak of resident memory."""
    line = program.stdout.readline()
    assert line, program.stderr.read()
    report = json.loads(line)
    assert is_settled(report, payloads * PAYLOAD_BYTES), report
    return report["peak_bytes"]


@pytest.mark.parametrize("how, payloads_received", [("snapshot", 1), ("atomic", 1), ("phases", 1), ("torn", 0)])
def test_memory_of_both_processes_is_as_documented(how, payloads_received, tmp_path):
    """A single version costs no base, and after everything has ended neither process holds memory."""
    size = (TENSORS, TENSOR_BYTES)
    with python(HERE / "memory_producer.py", tmp_path / "state", *size) as producer:
        ticket = producer.stdout.readline().strip()
        with python(HERE / "memory_consumer.py", ticket, how, *size) as consumer:
            for version in range(1, 4):
                # From the second version on: the base of the consumer, the memory of the producer for the next version.
                extra = min(version - 1, 1)
                send(consumer, "next", payloads_received + extra)
                assert consumer.stdout.readline() == "waiting\n", consumer.stderr.read()
                send(producer, "publish", 2 + extra)
                check(producer, 2 + extra)
                peak_bytes = check(consumer, payloads_received + extra)
                assert version > 1 or peak_bytes < payloads_received * PAYLOAD_BYTES + OVERHEAD_BYTES
            send(consumer, "leave", 0)
            check(consumer, 0)
        send(producer, "withdraw", 0)
        check(producer, 0)


def test_without_bases_versions_are_sent_in_full(tmp_path):
    """With `base_bytes=0` at either end, versions are sent in full."""
    weights = np.zeros(1 << 20, np.uint8)
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path / "state", base_bytes=0) as relay:
        with tensor_relay.connect(relay.ticket, base_bytes=0) as baseless, tensor_relay.connect(relay.ticket) as client:
            subscriptions = [baseless.subscribe("t"), client.subscribe("t")]
            for _ in range(3):
                relay.publish("t", {"w": weights})
                codecs = [subscription.next(TIMEOUT_S).receipt.codecs for subscription in subscriptions]
                assert not any("sparse" in codec for codec in codecs)
            assert baseless.stats()["base_bytes"] == client.stats()["base_bytes"] == relay.stats()["base_bytes"] == 0
