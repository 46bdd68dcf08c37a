"""`prefetch` and `activate`: a version is received while the previous one is in use, and installed in a short pause."""

import asyncio

import numpy as np
import pytest
from conftest import TIMEOUT_S

import tensor_relay

SIZE = 1 << 20


@pytest.fixture
def out():
    return {"w": np.zeros(SIZE, "f4"), "b": np.zeros(3, "i8")}


def publish(relay, number):
    """Publishes weights that change little from version to version, so that deltas are sent."""
    weights = np.random.default_rng(1).normal(size=SIZE).astype("f4")
    weights[: number * 100] = number
    return relay.publish("t", {"w": weights, "b": np.full(3, number)}, metadata={"step": number})


def holds(out, number):
    """Whether `out` holds the weights that `publish` publishes with this number."""
    changed, unchanged = out["w"][: number * 100], out["w"][number * 100]
    return (changed == number).all() and unchanged not in (0, number) and (out["b"] == number).all()


def test_nothing_changes_before_activate(tmp_path, out):
    serving = tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path, codec="sparse")
    with serving as relay, tensor_relay.connect(relay.ticket) as client, client.subscribe("t", out=out) as subscription:
        for number in range(1, 5):
            publish(relay, number)
            snapshot = subscription.prefetch(TIMEOUT_S)
            assert (snapshot.version, len(snapshot), holds(out, number)) == (number, 2, False)
            assert number == 1 or holds(out, number - 1), "the previous version is in use"
            activated = subscription.activate(snapshot)
            assert (activated.version, activated.metadata, len(activated)) == (number, {"step": number}, 0)
            assert holds(out, number)
            assert number < 3 or "sparse" in snapshot.receipt.codecs, snapshot.receipt


def test_a_version_arrives_while_no_call_waits(relay, client, out):
    with client.subscribe("t", out=out) as subscription:
        with pytest.raises(tensor_relay.RelayTimeoutError):
            subscription.prefetch(0)
        publish(relay, 1).wait_committed(timeout=TIMEOUT_S)
        assert subscription.prefetch(0).version == 1
        assert not out["b"].any()


def test_a_prefetched_version_can_be_skipped(relay, client, out):
    with client.subscribe("t", out=out) as subscription:
        publish(relay, 1)
        stale = subscription.prefetch(TIMEOUT_S)
        publish(relay, 2)
        subscription.activate(subscription.prefetch(TIMEOUT_S))
        assert stale.version == 1 and holds(out, 2)
        publish(relay, 3)
        assert subscription.next(TIMEOUT_S).version == 3 and holds(out, 3), "`next` does both"


def test_activate_accepts_out(relay, client, out):
    with client.subscribe("t") as subscription:
        publish(relay, 1)
        snapshot = subscription.prefetch(TIMEOUT_S)
        with pytest.raises(tensor_relay.RequestError, match="no `out`"):
            subscription.activate(snapshot)
        with pytest.raises(tensor_relay.TargetError, match="tensors b"):
            subscription.activate(snapshot, {"w": out["w"]})
        assert not out["w"].any(), "no tensor was written"
        subscription.activate(snapshot, {"b": out["b"]}, strict=False)
        assert (out["b"] == 1).all()
        subscription.activate(snapshot, out)
        assert holds(out, 1)


def test_in_place_subscriptions_cannot_prefetch(relay, client, out):
    with client.subscribe("t", out=out, atomic=False) as subscription:
        publish(relay, 1)
        with pytest.raises(tensor_relay.RequestError, match="atomic=True"):
            subscription.prefetch(TIMEOUT_S)
        with pytest.raises(tensor_relay.RequestError, match="atomic=True"):
            subscription.prefetch_async()
        assert subscription.next(TIMEOUT_S).version == 1 and holds(out, 1)


def test_prefetch_async_returns_versions(relay, client, out):
    async def follow():
        async with client.subscribe("t", out=out) as subscription:
            coming = asyncio.create_task(subscription.prefetch_async(TIMEOUT_S))
            await asyncio.sleep(0)
            publish(relay, 1)
            snapshot = await coming
            assert not out["b"].any()
            subscription.activate(snapshot)
            assert holds(out, 1)
            forgotten = asyncio.create_task(subscription.prefetch_async(TIMEOUT_S))
            await asyncio.sleep(0)
            forgotten.cancel()
            publish(relay, 2)
            subscription.activate(await subscription.prefetch_async(TIMEOUT_S))
            assert holds(out, 2), "no version is lost"

    asyncio.run(follow())
