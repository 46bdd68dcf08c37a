"""The counters of copies, and the receipts of transfers."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import HERE, TIMEOUT_S, python, received, wait_for_exit

import tensor_relay

MIB = 1 << 20
CHUNK_BYTES = 4 * MIB
# `bench/results` was measured with TENSOR_RELAY_TEST_BORROW_MIB=1024, and written by TENSOR_RELAY_TEST_REPORT=FILE.
SIZE_MIB = int(os.environ.get("TENSOR_RELAY_TEST_BORROW_MIB", 256))

PRODUCER = HERE / "state_dict_producer.py"


@pytest.mark.parametrize("hold", ["borrow", "stage"])
def test_a_borrowed_state_dict_is_not_staged(hold, tmp_path):
    """Checks the counters and the producer's peak memory. The case "stage" shows that both reveal a copy."""
    with python(PRODUCER, tmp_path / "state", SIZE_MIB, hold) as producer:
        with tensor_relay.connect(producer.stdout.readline().strip()) as client:
            snapshot = client.subscribe("policy").next(TIMEOUT_S)
            assert len(snapshot) == 2 * SIZE_MIB // 16
            first = snapshot["layers.0.weight"].numpy().copy()
        report = json.loads(wait_for_exit(producer))
    assert (first.view(np.uint32)[0, :2] == report.pop("first_words")).all()
    payload, copied, grown = report["payload_bytes"], report["copied_bytes"], report["grown_bytes"]
    assert payload >= SIZE_MIB * MIB and report["read_bytes"] >= payload
    if hold == "borrow":
        assert report["publication_copied_bytes"] == report["staged_bytes"] == 0
        # Each chunk is copied when it is sent, and released afterwards.
        assert copied == report["read_bytes"] and grown < payload / 2
    else:
        assert report["publication_copied_bytes"] == report["staged_bytes"] == copied == payload <= grown
    if path := os.environ.get("TENSOR_RELAY_TEST_REPORT"):
        file = Path(path)
        reports = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(reports | {hold: report}, indent=2) + "\n")


def test_copies_are_counted_byte_by_byte(relay, client):
    large, small = np.ones(2 * CHUNK_BYTES, np.uint8), np.ones(1000, np.uint8)
    relay.publish("t", {"large": large}, hold="borrow")
    received(client)
    stats = relay.stats()
    assert stats["copied_bytes"] == stats["read_bytes"] == large.nbytes, "each chunk when it is sent"
    published = relay.publish("t", {"small": small, "transposed": large.reshape(2, -1).T}, hold="borrow")
    assert published.copied_bytes == large.nbytes, "its elements are not contiguous"
    assert relay.stats()["copied_bytes"] == 2 * large.nbytes
    received(client)
    assert relay.stats()["copied_bytes"] == 2 * large.nbytes + 1024, "the small tensor was padded to be sent"
    relay.publish("t", {"large": large})
    assert relay.stats()["copied_bytes"] == 3 * large.nbytes + 1024


def test_receipts_count_codecs(relay):
    weights = np.random.default_rng(1).normal(size=CHUNK_BYTES // 2).astype(np.float32)
    relay.publish("t", {"w": weights})
    with tensor_relay.connect(relay.ticket, transport="quic") as client:  # Over TCP, a first version is not encoded.
        receipt = received(client).receipt
    count = receipt.codecs["bitplanes"]
    assert sum(count.chunks for count in receipt.codecs.values()) == receipt.chunks == 2
    assert sum(count.raw_bytes for count in receipt.codecs.values()) == weights.nbytes
    assert sum(count.wire_bytes for count in receipt.codecs.values()) == receipt.wire_bytes < weights.nbytes
    assert count.wire_bytes < count.raw_bytes and count.decode_s > 0


def test_receipts_count_deltas(relay, client):
    relay.open("t", keep_versions=2)
    weights = np.random.default_rng(1).normal(size=CHUNK_BYTES // 4).astype(np.float32)
    subscription = client.subscribe("t")
    for _ in range(2):  # The client keeps a base from the second version on.
        relay.publish("t", {"w": weights})
        assert "sparse" not in subscription.next(TIMEOUT_S).receipt.codecs
        weights[::1000] += 1
    relay.publish("t", {"w": weights})
    receipt = subscription.next(TIMEOUT_S).receipt
    assert list(receipt.codecs) == ["sparse"] and receipt.codecs["sparse"].raw_bytes == weights.nbytes
