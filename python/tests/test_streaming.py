"""`Client.stream`: a version in buckets, in order and in bounded memory. An incomplete version ends with an error."""

import asyncio
import contextlib
import itertools
import json

import numpy as np
import pytest
from conftest import HERE, TIMEOUT_S, python

import tensor_relay


@pytest.fixture
def relay(tmp_path):
    """A relay with small chunks, each with one of the `layers`."""
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path / "state", chunk_bytes=4096) as relay:
        yield relay


def layers(number, count=10, size=1000):
    """Tensors that are not sorted by name."""
    return {f"layer.{count - each}": np.full(size, number * 100 + each, "f4") for each in range(count)}


def check(got, number, count=10, size=1000):
    sent = layers(number, count, size)
    assert list(got) == list(sent)
    assert all(np.array_equal(got[name], sent[name]) for name in sent)


def collected(stream):
    """Copies of all tensors of a stream, by name."""
    return {name: tensor.numpy().copy() for name, tensor in stream}


@pytest.mark.parametrize("bucket_bytes", [1, 4000, 10_000, 1 << 30])
def test_each_tensor_comes_once_and_in_order(relay, client, bucket_bytes):
    relay.publish("t", layers(1) | {"step": 3, "tied": layers(1)["layer.1"]})
    got = collected(client.stream("t", bucket_bytes=bucket_bytes))
    assert got.pop("tied").shape == (1000,)
    check(got, 1)


def test_stream_accepts_select(relay, client):
    relay.publish("t", layers(1))
    names = list(collected(client.stream("t", select="layer.?", bucket_bytes=8000)))
    assert names == [f"layer.{number}" for number in range(9, 0, -1)]
    for select in ("nothing", []):
        with pytest.raises(tensor_relay.RequestError):
            client.stream("t", select=select)
    with pytest.raises(tensor_relay.RequestError, match="bucket_bytes"):
        client.stream("t", bucket_bytes=0)
    relay.publish("empty", {}, allow_empty=True)
    assert list(client.stream("empty")) == []


def test_many_small_tensors_are_streamed(relay, client):
    sent = {f"{'x' * 200}.{number}": np.full(2, number, "u1") for number in range(150)}
    relay.publish("t", sent)
    got = collected(client.stream("t"))
    assert list(got) == list(sent) and all(np.array_equal(got[name], sent[name]) for name in sent)


@pytest.mark.parametrize("chunk_bytes", [4096, 64 << 10, 4 << 20])
@pytest.mark.parametrize("bucket_bytes", [1, 100_000, 128 << 20])
def test_no_chunk_is_sent_twice(tmp_path, chunk_bytes, bucket_bytes):
    random = np.random.default_rng(1)
    sizes = itertools.cycle([4096, 10, 0, 300_000, 64 << 10, 4096, 4096])
    sent = {f"t{each}": random.integers(0, 256, next(sizes), np.uint8) for each in range(700)}
    sent |= {f"f{each}": random.random(100, np.float32) for each in range(300)}
    sent["tied"] = sent["t3"]
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path, codec="raw", chunk_bytes=chunk_bytes) as relay:
        relay.publish("t", sent)
        with tensor_relay.connect(relay.ticket) as client:
            payload_bytes = client.describe("t").payload_bytes
            for select in (None, ["t*"]):
                before = relay.stats()["sent_bytes"]
                got = collected(client.stream("t", bucket_bytes=bucket_bytes, select=select))
                expected = {name: array for name, array in sent.items() if select is None or name.startswith("t")}
                assert got.keys() == expected.keys()
                assert all(np.array_equal(got[name], array) for name, array in expected.items())
                assert relay.stats()["sent_bytes"] - before < 1.05 * payload_bytes + (1 << 20)


def test_stream_returns_a_version_by_number(relay, client):
    relay.open("t", keep_versions=2)
    for number in (1, 2, 3):
        published = relay.publish("t", layers(number))
    check(collected(client.stream("t", 2, epoch=published.epoch, bucket_bytes=4000)), 2)
    with pytest.raises(tensor_relay.VersionNotFoundError):
        client.stream("t", 1)
    with pytest.raises(tensor_relay.RelayTimeoutError):
        client.stream("t", 4, timeout=0.2)


def test_a_stream_mixes_no_versions(tmp_path, client, relay):
    """The publisher waits for a stream as for a reader in mode "every", so that the stream is of one version."""
    relay.publish("t", layers(1))
    stream = client.stream("t", bucket_bytes=4000)
    got = dict([next(stream)])
    with pytest.raises(tensor_relay.RelayTimeoutError):
        relay.publish("t", layers(2), timeout=0.3)
    got |= dict(stream)
    check({name: tensor.numpy() for name, tensor in got.items()}, 1)
    relay.publish("t", layers(2), timeout=TIMEOUT_S)
    check(collected(client.stream("t", bucket_bytes=4000)), 2)


def until_torn(stream):
    """The names of the tensors that a stream returned before its TornError."""
    got = []
    with pytest.raises(tensor_relay.TornError, match="incomplete version") as torn:
        for name, _ in stream:
            got.append(name)
    assert torn.value.version == 1 and isinstance(torn.value.__cause__, tensor_relay.TensorRelayError)
    return got


def test_losing_the_version_midway_raises(relay, client):
    relay.open("t", publish_timeout=0.2)
    relay.publish("t", layers(1))
    stream = client.stream("t", bucket_bytes=4000)
    next(stream)
    for number in (2, 3):
        relay.publish("t", layers(number))  # After `publish_timeout`, readers of the previous version are evicted.
    assert "layer.1" not in until_torn(stream)


def test_a_new_epoch_midway_raises(relay, client):
    relay.publish("t", layers(1))
    stream = client.stream("t", bucket_bytes=4000)
    next(stream)
    relay.withdraw("t")
    relay.publish("t", layers(2))  # Version 1 again, of another epoch.
    assert "layer.1" not in until_torn(stream)


def test_closing_the_server_midway_raises(tmp_path):
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path, chunk_bytes=4096) as relay:
        with tensor_relay.connect(relay.ticket, reconnect_timeout=0.2) as client:
            relay.publish("t", layers(1))
            stream = client.stream("t", bucket_bytes=4000, timeout=TIMEOUT_S)
            next(stream)
            relay.close(0, end=False)
            assert "layer.1" not in until_torn(stream)


def test_closing_the_client_midway_raises(relay, client):
    relay.publish("t", layers(1))
    stream = client.stream("t", bucket_bytes=4000)
    next(stream)
    client.close()
    until_torn(stream)


def test_an_abandoned_stream_delays_no_publish(relay, client):
    relay.publish("t", layers(1))
    for name, _ in client.stream("t", bucket_bytes=4000):
        break
    del _
    relay.publish("t", layers(2), timeout=TIMEOUT_S)
    assert client.topics()[0].version == 2


TENSORS, BUCKET_BYTES = 24, 8 << 20


def test_a_stream_needs_memory_for_three_buckets(tmp_path):
    """The version is several times as large as three buckets, and its buckets have unequal sizes."""
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path) as relay:
        sizes = itertools.cycle([BUCKET_BYTES, BUCKET_BYTES - (1 << 20), BUCKET_BYTES // 2, BUCKET_BYTES // 2])
        relay.publish("t", {f"w{each}": np.full(next(sizes), each, "u1") for each in range(TENSORS)})
        with python(HERE / "stream_consumer.py", relay.ticket, BUCKET_BYTES) as consumer:
            out, errors = consumer.communicate(timeout=TIMEOUT_S)
    report = json.loads(out or errors)
    assert report["tensors"] == TENSORS
    assert report["counted_bytes"] <= 3 * (BUCKET_BYTES + (4 << 20)), report


async def collected_async(stream):
    return {name: tensor.numpy().copy() async for name, tensor in stream}


@pytest.mark.parametrize("bucket_bytes", [1, 4000, 1 << 30])
def test_stream_async_yields_the_same(relay, client, bucket_bytes):
    published = relay.publish("t", layers(1))
    relay.publish("empty", {}, allow_empty=True)

    async def both():
        described = await client.describe_async("t")
        assert described.version == published.version
        check(await collected_async(client.stream_async("t", bucket_bytes=bucket_bytes)), 1)
        assert await collected_async(client.stream_async("empty")) == {}

    asyncio.run(both())


def test_stream_async_raises_the_same(relay, client):
    relay.publish("t", layers(1))

    async def check_errors():
        cases = (({"version": 7}, tensor_relay.RelayTimeoutError), ({"select": "nothing"}, tensor_relay.RequestError))
        for options, error in cases:
            with pytest.raises(error):
                await collected_async(client.stream_async("t", timeout=0.3, **options))
        with pytest.raises(tensor_relay.RelayTimeoutError):
            await client.describe_async("t", 7, timeout=0.2)
        with pytest.raises(tensor_relay.RequestError, match="bucket_bytes"):
            client.stream_async("t", bucket_bytes=0)

    asyncio.run(check_errors())


def test_an_abandoned_or_cancelled_stream_holds_no_version(relay, client):
    """An abandoned stream does not delay the next version. The event loop is not blocked while a stream waits."""
    relay.publish("t", layers(1))

    async def leave():
        async with contextlib.aclosing(client.stream_async("t", bucket_bytes=4000)) as stream:
            assert (await anext(stream))[0] == "layer.10"

    async def cancel():
        waiting = asyncio.create_task(collected_async(client.stream_async("t", 9, timeout=TIMEOUT_S)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, 1)

    for number, ends_early in ((2, leave), (3, cancel)):
        asyncio.run(ends_early())
        relay.publish("t", layers(number), timeout=TIMEOUT_S)
    check(collected(client.stream("t", bucket_bytes=4000)), 3)
