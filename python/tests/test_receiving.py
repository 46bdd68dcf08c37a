"""Subscriptions and snapshots: modes, selections, snapshots as mappings, and the ownership of memory."""

import asyncio
import collections.abc
import gc
import time

import numpy as np
import pytest
from conftest import TIMEOUT_S, received

import tensor_relay


def test_a_snapshot_is_a_mapping(relay, client):
    relay.publish("a/b", {"x": np.zeros(3), "y": np.ones(2)}, metadata={"k": "v"})
    snapshot = received(client, "a/b")
    assert isinstance(snapshot, collections.abc.Mapping)
    assert list(snapshot) == list(snapshot.keys()) == ["x", "y"] and len(snapshot) == 2
    assert [tensor.nbytes for tensor in snapshot.values()] == [24, 16]
    assert dict(snapshot.items()).keys() == {"x", "y"}
    assert "x" in snapshot and "z" not in snapshot and 1 not in snapshot
    assert snapshot.get("z") is None and snapshot.get("z", 5) == 5 and snapshot.get("x").shape == (3,)
    with pytest.raises(KeyError, match="z"):
        snapshot["z"]
    assert (snapshot.topic, snapshot.version, snapshot.skipped, snapshot.gap) == ("a/b", 1, 0, None)
    assert len(snapshot.epoch) == 16 and snapshot.metadata == {"k": "v"} and snapshot.manifest_metadata == {}
    assert snapshot.receipt.chunks >= 1 and snapshot.receipt.wire_bytes >= 40 and snapshot.receipt.duration_s > 0
    assert snapshot.wait() is None
    assert "a/b version 1" in repr(snapshot) and "f64" in repr(snapshot["x"])


def test_mode_latest_counts_skipped_versions(relay, client):
    subscription = client.subscribe("t")
    relay.publish("t", {"x": np.full(3, 1)})
    assert subscription.next(10).version == 1
    for number in range(2, 6):
        relay.publish("t", {"x": np.full(3, number)}).wait_committed()
    snapshot = subscription.next(10)
    assert (snapshot.version, snapshot.skipped) == (5, 3)
    assert snapshot["x"].numpy().tolist() == [5, 5, 5]


def test_mode_every_returns_each_version_in_order(relay, client):
    relay.open("t", keep_versions=3)
    subscription = client.subscribe("t", mode="every", timeout=TIMEOUT_S)
    relay.publish("t", {"x": np.full(3, 0)})
    versions = []
    for snapshot in subscription:
        versions.append(snapshot.version)
        if len(versions) < 20:
            relay.publish("t", {"x": np.full(3, len(versions))})
        else:
            relay.end("t")
    assert versions == list(range(1, 21))


def test_gaps_are_reported(relay, client):
    relay.open("t", keep_versions=2)
    for number in range(5):
        relay.publish("t", {"x": np.full(3, number)})
    subscription = client.subscribe("t", mode="every", start=1)
    with pytest.raises(tensor_relay.VersionsMissedError, match="versions are missing") as missed:
        subscription.next(10)
    assert missed.value.missing == 3
    assert subscription.next(10).version == 4
    continuing = client.subscribe("t", mode="every", start=2, on_gap="continue")
    snapshot = continuing.next(10)
    assert snapshot.version == 4 and "2 versions are missing" in snapshot.gap
    assert continuing.next(10).gap is None


def test_only_selected_tensors_are_received(relay, client):
    relay.publish("t", {"layers.0.w": np.zeros(3), "layers.1.w": np.ones(3), "head": np.ones(2)})
    snapshot = received(client, select=["layers.1.*", "head"])
    assert list(snapshot) == ["layers.1.w", "head"] and "layers.0.w" not in snapshot
    assert list(received(client, select="layers.*")) == ["layers.0.w", "layers.1.w"]
    assert list(received(client, select={"head"})) == ["head"]
    with pytest.raises(tensor_relay.RequestError):
        client.subscribe("t", select=[f"layer.{number}" for number in range(100)])


def test_empty_selections_are_refused(relay, client, caplog):
    with pytest.raises(tensor_relay.RequestError, match=r"select=\[\] selects no tensor"):
        client.subscribe("t", select=[])
    relay.publish("t", {"layers.0.w": np.zeros(3), "head": np.ones(2)})
    typo = client.subscribe("t", select=["typo*", "layer.*"])
    with pytest.raises(tensor_relay.RequestError, match=r'"typo\*", "layer.\*".* none of the 2 tensors of t .* layers.0.w, head'):
        typo.next(10)
    # The subscription continues with the next version, which may match. A version without tensors is no error.
    relay.publish("t", {"typos": np.ones(1)})
    assert list(typo.next(10)) == ["typos"]
    relay.publish("t", {"step": 3}, allow_empty=True)
    assert typo.next(10).entries == {"step": 3}
    with caplog.at_level("WARNING", "tensor_relay"):
        relay.publish("t", {"head": np.ones(2)})
        assert list(received(client, select=["head", "tail"])) == ["head"]
        deadline = time.monotonic() + 10
        while not (warnings := [record.getMessage() for record in caplog.records if "tail" in record.getMessage()]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert '"tail" of select matches no tensor of t version 4' in warnings[0]


def test_holding_too_many_names_the_versions(relay):
    with tensor_relay.connect(relay.ticket, versions_held_max=2, hold_timeout=0.05) as client:
        subscription, held = client.subscribe("t"), []
        for number in range(2):
            relay.publish("t", {"x": np.full(3, number)})
            held.append(subscription.next(10)["x"].numpy())  # An array holds its version.
        relay.publish("t", {"x": np.full(3, 9)})
        with pytest.raises(tensor_relay.HoldingTooManyError, match="versions_held_max") as refused:
            subscription.next(10)
        assert refused.value.held == [1, 2] and not isinstance(refused.value, TimeoutError)
        del held[0]
        gc.collect()
        assert subscription.next(10)["x"].numpy()[0] == 9
        assert held[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_polling_while_holding_too_many_names_the_versions(relay, timeout):
    """A call with a timeout below `hold_timeout` reports that held snapshots block the newest version."""
    with tensor_relay.connect(relay.ticket, versions_held_max=2, hold_timeout=600) as client:
        subscription, held = client.subscribe("t"), []
        for number in range(2):
            relay.publish("t", {"x": np.full(3, number)})
            held.append(subscription.next(TIMEOUT_S))
        with pytest.raises(tensor_relay.RelayTimeoutError):
            subscription.next(timeout)  # There is no further version.
        relay.publish("t", {"x": np.full(3, 9)}).wait_committed(timeout=TIMEOUT_S)
        while True:  # A version is committed shortly before the subscription can return it.
            try:
                subscription.next(timeout)
            except tensor_relay.RelayTimeoutError:
                continue
            except tensor_relay.HoldingTooManyError as refused:
                assert refused.held == [1, 2]
                break
        held.clear()
        assert subscription.next(TIMEOUT_S)["x"].numpy()[0] == 9


@pytest.mark.parametrize("start", [1, 2, "oldest"])
def test_mode_latest_refuses_a_start_version(relay, client, start):
    relay.publish("t", {"x": np.zeros(3)})
    with pytest.raises(tensor_relay.RequestError, match="use mode every"):
        client.subscribe("t", start=start)
    assert client.subscribe("t", mode="every", start=1).next(TIMEOUT_S).version == 1


def test_a_modified_snapshot_is_saved_as_modified(relay, client, tmp_path):
    """A snapshot's memory belongs to the program, which may write to it; `save` writes the current content."""
    load_file = pytest.importorskip("safetensors.numpy").load_file
    relay.publish("t", {"x": np.zeros(1 << 20), "y": np.ones(3)})
    snapshot = received(client)
    before = np.from_dlpack(snapshot["x"], copy=True) if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else None
    array = snapshot["x"].numpy()
    array[[0, 99_999, -1]] = 7
    snapshot.save(tmp_path / "t.safetensors")
    saved = load_file(tmp_path / "t.safetensors")
    np.testing.assert_array_equal(saved["x"], array)
    np.testing.assert_array_equal(saved["y"], np.ones(3))
    assert before is None or not before.any(), "a copy is unchanged"


def test_save_writes_a_complete_file(relay, client, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    relay.publish("t", {"x": np.arange(5), "y": np.ones((2, 2), np.float32)})
    received(client).save(tmp_path / "new" / "t.safetensors")
    loaded = safetensors.load_file(tmp_path / "new" / "t.safetensors")
    assert loaded["x"].tolist() == [0, 1, 2, 3, 4] and loaded["y"].shape == (2, 2)
    with pytest.raises(tensor_relay.TensorRelayError, match="cannot write"):
        received(client).save(tmp_path / "new")


def test_the_ticket_may_name_the_topic(relay, tmp_path, monkeypatch):
    relay.publish("policy", {"x": np.arange(5)})
    path = tmp_path / "ticket"
    path.write_text("\n" + relay.ticket_for("policy") + "\n")
    for ticket in (relay.ticket_for("policy"), path, str(path)):
        with tensor_relay.connect(ticket) as client:
            assert client.subscribe().next(10).topic == "policy"
    monkeypatch.setenv("TENSOR_RELAY_TICKET", relay.ticket)
    with tensor_relay.connect() as client, pytest.raises(tensor_relay.RequestError, match="names no topic"):
        client.subscribe()


def test_async_iteration_returns_versions(relay, client):
    async def follow():
        versions = []
        async for snapshot in client.subscribe("t", timeout=TIMEOUT_S):
            versions.append((snapshot.version, snapshot["x"].numpy()[0]))
            if len(versions) < 5:
                relay.publish("t", {"x": np.full(3, len(versions))})
            else:
                relay.end("t")
        return versions

    relay.publish("t", {"x": np.full(3, 0)})
    assert asyncio.run(follow()) == [(number + 1, number) for number in range(5)]


def test_a_subscription_ends_with_its_block(relay, client):
    async def follow():
        async with client.subscribe("t") as subscription:
            version = (await subscription.next_async(timeout=TIMEOUT_S)).version
        with pytest.raises(tensor_relay.ClosedError):
            await subscription.next_async(timeout=TIMEOUT_S)
        return version

    relay.publish("t", {"x": np.zeros(3)})
    assert asyncio.run(follow()) == 1
    with client.subscribe("t") as subscription:
        subscription.next(TIMEOUT_S)
    with pytest.raises(tensor_relay.ClosedError):
        subscription.next(TIMEOUT_S)


def test_reprs_describe_their_objects(relay, client):
    subscription = client.subscribe("a/b")
    assert repr(subscription) == "Subscription(a/b, no version yet)"
    relay.publish("a/b", {"x": np.zeros(3)})
    receipt = subscription.next(TIMEOUT_S).receipt
    assert repr(subscription) == "Subscription(a/b, at version 1)"
    assert repr(subscription.progress()).startswith("Progress(version 1: 256 of 256 bytes")
    (codec,) = receipt.codecs
    over = f"received in 1 chunks, {receipt.wire_bytes} on the wire over {receipt.transport}, {codec})"
    assert repr(receipt).startswith("Receipt(") and over in repr(receipt)
    assert repr(receipt.codecs[codec]).startswith("CodecCount(1 chunks, ")


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_coroutine_begins_only_when_awaited(relay, client):
    async def follow():
        subscription = client.subscribe("t", mode="every")
        for forget in (subscription.next_async, subscription.__anext__):
            forgotten = forget()
            assert asyncio.iscoroutine(forgotten)
            await asyncio.sleep(0.05)  # If the coroutine had begun, it would consume the first version.
            del forgotten
        tasks = [asyncio.create_task(subscription.next_async(TIMEOUT_S)), asyncio.create_task(anext(subscription))]
        return sorted([(await task).version for task in tasks])

    relay.open("t", keep_versions=2)
    for number in range(2):
        relay.publish("t", {"x": np.full(3, number)})
    assert asyncio.run(follow()) == [1, 2]


def test_a_cancelled_coroutine_loses_no_version(relay, client):
    async def cancel_repeatedly():
        subscription = client.subscribe("t", mode="every")
        with pytest.raises(tensor_relay.RelayTimeoutError):
            await subscription.next_async(timeout=0.01)
        waiting = asyncio.ensure_future(subscription.next_async())
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        versions = []
        relay.open("t", keep_versions=100)
        for number in range(30):
            relay.publish("t", {"x": np.full(3, number)})
        while len(versions) < 30:
            # Cancelled at different moments: before the version arrives, while it is handed over, and afterwards.
            waiting = asyncio.ensure_future(subscription.next_async())
            for _ in range(len(versions) % 4):
                await asyncio.sleep(0)
            if len(versions) % 3:
                time.sleep(0.002)  # The version arrives while the event loop is blocked.
            waiting.cancel()
            try:
                versions.append((await waiting).version)
            except asyncio.CancelledError:
                versions.append((await subscription.next_async(timeout=TIMEOUT_S)).version)
        return versions

    assert asyncio.run(cancel_repeatedly()) == list(range(1, 31))


def test_the_progress_of_a_received_version_is_complete(relay, client):
    subscription = client.subscribe("t")
    relay.publish("t", {"x": np.zeros(1 << 20, np.uint8)})
    subscription.next(10)
    progress = subscription.progress()
    assert (progress.version, progress.payload_bytes, progress.verified_bytes) == (1, 1 << 20, 1 << 20)


def test_closed_objects_stay_closed(relay, client):
    relay.publish("t", {"x": np.zeros(3)})
    with client.subscribe("t") as subscription:
        snapshot = subscription.next(10)
    subscription.close()
    with pytest.raises(tensor_relay.ClosedError):
        subscription.next()
    assert list(subscription) == []
    cut_off = client.subscribe("t")
    cut_off.next(10)
    client.close()
    client.close()
    with pytest.raises(tensor_relay.ClosedError):
        cut_off.next(10)
    with pytest.raises(tensor_relay.ClosedError):
        client.topics()
    assert relay.close() and relay.close()
    with pytest.raises(tensor_relay.ClosedError):
        relay.publish("t", {"x": np.ones(3)})
    assert snapshot["x"].numpy().tolist() == [0, 0, 0]


def test_tied_weights_are_selected_by_their_own_names(relay, client):
    tied = np.arange(3.0)
    relay.publish("t", {"embed": tied, "head": tied, "other": np.ones(2)})
    for name in ("embed", "head"):
        snapshot = client.get("t", select=name)
        assert list(snapshot) == [name] and list(snapshot.numpy()) == [name]
        np.testing.assert_array_equal(snapshot[name].numpy(), tied)
    assert list(client.get("t", select=["head", "embed"])) == ["embed", "head"]
    assert [name for name, _ in client.stream("t", select="head")] == ["head"]
