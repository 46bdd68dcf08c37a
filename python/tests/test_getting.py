"""`Client.get` receives one version: the newest or by number, into new or given tensors, blocking or as a coroutine.
`Client.describe` receives only its description."""

import asyncio

import numpy as np
import pytest

import tensor_relay
from conftest import TIMEOUT_S


def publish(relay, count, topic="t"):
    return [relay.publish(topic, {"x": np.full(3, number, "f4")}, metadata={"step": number}) for number in range(1, count + 1)]


def test_get_returns_the_newest_version(relay, client):
    publish(relay, 3)
    snapshot = client.get("t")
    assert (snapshot.version, snapshot["x"].numpy().tolist()) == (3, [3, 3, 3])
    assert client.get("t", select="x").version == 3, "`get` may be repeated"


def test_get_returns_a_version_by_number_or_raises(relay, client):
    relay.open("t", keep_versions=2)
    published = publish(relay, 3)
    assert client.get("t", 2)["x"].numpy().tolist() == [2, 2, 2]
    assert client.get("t", 3, epoch=published[0].epoch).version == 3
    out = {"x": np.zeros(3, "f4")}
    for options in ({}, {"out": out}, {"out": out, "atomic": False}):
        with pytest.raises(tensor_relay.VersionNotFoundError, match="version 1 .*is not kept"):
            client.get("t", 1, **options)
    with pytest.raises(tensor_relay.VersionNotFoundError, match="version 1 "):
        client.describe("t", 1)
    assert not out["x"].any(), "no other version was received in its place"


def test_a_version_of_another_epoch_is_refused(relay, client):
    old = publish(relay, 1)[0]
    relay.withdraw("t")
    new = publish(relay, 1)[0]
    assert old.epoch != new.epoch
    for call in (client.get, client.describe):
        with pytest.raises(tensor_relay.VersionNotFoundError):
            call("t", 1, epoch=old.epoch)
        assert call("t", 1, epoch=new.epoch).epoch == new.epoch
    with pytest.raises(tensor_relay.RequestError, match="16 hexadecimal digits"):
        client.get("t", 1, epoch="newest")


def test_get_waits_for_a_future_version(relay, client):
    publish(relay, 1)
    with pytest.raises(tensor_relay.RelayTimeoutError):
        client.get("t", 2, timeout=0.2)

    async def both():
        getting = asyncio.create_task(client.get_async("t", 2, timeout=TIMEOUT_S))
        await asyncio.sleep(0)
        publish(relay, 1)
        return await getting

    assert asyncio.run(both()).version == 2


def test_get_receives_into_tensors(relay, client):
    publish(relay, 1)
    for atomic in (True, False):
        out = {"x": np.zeros(3, "f4")}
        assert client.get("t", out=out, atomic=atomic).version == 1
        assert out["x"].tolist() == [1, 1, 1]
    with pytest.raises(tensor_relay.TargetError):
        client.get("t", out={"x": np.zeros(4, "f4")})


CALLS = {
    "get": lambda client, **options: client.get("t", **options),
    "get_async": lambda client, **options: asyncio.run(awaited(client.get_async, options)),
    "describe": lambda client, **options: client.describe("t", **options),
    "describe_async": lambda client, **options: asyncio.run(awaited(client.describe_async, options)),
    "stream": lambda client, **options: client.stream("t", **options),
    "stream_async": lambda client, **options: client.stream_async("t", **options),
}


async def awaited(call, options):
    return await call("t", **options)


@pytest.mark.parametrize("name", CALLS)
def test_an_epoch_needs_a_version(relay, client, name):
    epoch = publish(relay, 1)[0].epoch
    with pytest.raises(tensor_relay.RequestError, match="epoch.*give the version's number"):
        CALLS[name](client, epoch=epoch)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("timeout", [float("nan"), -1])
def test_an_invalid_timeout_is_a_value_error(relay, client, name, timeout):
    publish(relay, 1)
    with pytest.raises(ValueError, match="timeout is .* must be in seconds"):
        CALLS[name](client, timeout=timeout)


def test_coroutines_run_concurrently(relay, client):
    publish(relay, 1)

    async def many():
        return await asyncio.gather(*(client.get_async("t") for _ in range(20)))

    snapshots = asyncio.run(many())
    assert [snapshot.version for snapshot in snapshots] == [1] * 20


def test_get_ends_its_subscription(relay, client):
    publish(relay, 1)
    for _ in range(50):
        client.get("t")
    assert client.topics()[0].subscribers <= 1, "the last subscription may still be ending"


def test_a_missing_topic_raises_in_time(relay):
    with tensor_relay.connect(relay.ticket, topic_timeout=0.2) as client:
        for call in (client.get, client.describe):
            with pytest.raises(tensor_relay.TopicNotFoundError):
                call("missing")
            with pytest.raises(tensor_relay.RequestError, match="names no topic"):
                call()
    with pytest.raises(tensor_relay.ClosedError):
        client.get("t")


def test_get_uses_the_tickets_topic(relay):
    publish(relay, 1)
    with tensor_relay.connect(relay.ticket_for("t")) as client:
        assert client.get().version == client.describe().version == 1
        assert client.ticket == relay.ticket_for("t")


def test_a_description_moves_no_payload(relay, client):
    big, step = np.zeros(16 << 20, "u1"), {"step": 7, "tags": ["a"]}
    relay.publish("t", {"big": big, "layer.0/w": np.ones((2, 3), "f2"), "lr": 0.5}, metadata=step)
    before = relay.stats()["sent_bytes"]
    described = client.describe("t")
    assert relay.stats()["sent_bytes"] - before < 1 << 20
    assert {name: (each.dtype, each.shape, each.nbytes) for name, each in described.tensors.items()} == {
        "big": ("u8", (16 << 20,), 16 << 20),
        "layer.0/w": ("f16", (2, 3), 12),
    }
    assert (described.topic, described.version, described.metadata, described.entries) == ("t", 1, step, {"lr": 0.5})
    assert described.payload_bytes >= 16 << 20
    assert "2 tensors" in repr(described) and "f16" in repr(described.tensors["layer.0/w"])


def test_a_received_version_can_be_installed_later(relay, client):
    publish(relay, 1)
    snapshot = client.get("t")
    out = {"x": np.zeros(3, "f4")}
    installed = client.install(snapshot, out)
    assert (installed.version, installed.metadata, out["x"].tolist()) == (1, {"step": 1}, [1, 1, 1])
    with pytest.raises(tensor_relay.TargetError, match="more"):
        client.install(snapshot, out | {"more": np.zeros(1)})
    assert client.install(snapshot, out | {"more": np.zeros(1)}, strict=False).version == 1
    with pytest.raises(tensor_relay.TensorRelayError, match="received into `out`"):
        client.install(installed, out)
    assert client.get("t", 1, out=out).version == 1


def test_a_coroutine_cannot_receive_in_place(relay, client):
    publish(relay, 1)
    out = {"x": np.zeros(3, "f4")}
    with pytest.raises(tensor_relay.RequestError, match="atomic=False"):
        asyncio.run(client.get_async("t", out=out, atomic=False))
    assert asyncio.run(client.get_async("t", 1, out=out)).version == 1 and out["x"].tolist() == [1, 1, 1]
