"""Publishing GPU tensors: the received bytes, the order with the producer's stream, and the release of memory."""

import contextlib
import gc
import threading

import numpy as np
import pytest
from conftest import TIMEOUT_S, InThread, noise, open_gpu, received, wait_until
from cuda_by_hand import CUDA, DTYPES, LEGACY, Array, lent_tensors

import tensor_relay
from tensor_relay import _frameworks

HOLDS = pytest.mark.parametrize("hold", ["stage", "borrow"])


@HOLDS
@pytest.mark.parametrize("supports_dlpack_versions", [True, False])
def test_every_dtype_arrives(relay, client, gpu, hold, supports_dlpack_versions):
    contents = {dtype: noise(6 * bits // 8 * 1000, seed) for seed, (dtype, (_, bits)) in enumerate(DTYPES.items())}
    arrays = {dtype: gpu.array(content, dtype, (2, 3, 1000)) for dtype, content in contents.items()}
    arrays["none"] = gpu.array(b"", "f32", (0, 5))
    arrays["number"] = gpu.array(noise(8), "f64", ())
    for array in arrays.values():
        array.supports_dlpack_versions = supports_dlpack_versions
    published = relay.publish("t", {**arrays, "step": 3}, hold=hold)
    assert published.copied_bytes == (published.payload_bytes if hold == "stage" else 0)
    snapshot = received(client)
    assert snapshot.entries == {"step": 3} and snapshot.device == "cpu"
    for dtype, content in contents.items():
        assert (snapshot[dtype].dtype, snapshot[dtype].shape) == (dtype, (2, 3, 1000))
        assert snapshot[dtype].raw.numpy().tobytes() == content, dtype
    assert snapshot["none"].shape == (0, 5) and snapshot["number"].raw.numpy().tobytes() == arrays["number"].bytes()


@HOLDS
def test_large_views_are_published(relay, client, gpu, hold):
    content = noise(11 << 20)
    base = gpu.array(content)
    relay.publish("t", {"part": base.view((10 << 20,), offset=777)}, hold=hold)
    assert received(client)["part"].numpy().tobytes() == content[777 : 777 + (10 << 20)]


def test_a_staged_version_is_a_copy(relay, client, gpu):
    array, other = gpu.array(noise(1000)), gpu.array(noise(1000, 1))
    expected = array.bytes()
    published = relay.publish("t", {"w": array})
    assert published.released
    gpu.copy(array.address, other.address, 1000)
    gpu.synchronize()
    assert received(client)["w"].numpy().tobytes() == expected
    wait_until("the tensors are returned", lambda: not lent_tensors)


def test_a_borrowed_version_is_read_where_it_is(relay, client, gpu, fake):
    array = gpu.array(noise(5 << 20))
    expected, before = array.bytes(), fake.copies_ended("@dtoh")
    published = relay.publish("t", {"w": array, "tied": array}, hold="borrow")
    assert (published.copied_bytes, fake.copies_ended("@dtoh")) == (0, before)
    snapshot = received(client)
    assert snapshot["w"].numpy().tobytes() == snapshot["tied"].numpy().tobytes() == expected
    with pytest.raises(tensor_relay.RelayTimeoutError):
        published.wait_released(0.01)
    assert lent_tensors
    published.withdraw()
    published.wait_released()
    wait_until("the tensors are returned", lambda: not lent_tensors)


def test_freed_memory_is_not_read(relay, client, gpu, monkeypatch):
    """Goal: memory that its framework has freed is not read, since that would end the GPU's context. Method: a
    framework that answers for its tensors as PyTorch's storages do."""
    is_in_place = True
    monkeypatch.setattr("tensor_relay._frameworks.guard", lambda exporter: (None, lambda: is_in_place))
    published = relay.publish("t", {"w": gpu.array(noise(9 << 20))}, hold="borrow")
    with client.subscribe("t") as subscription:
        assert subscription.next(TIMEOUT_S)["w"].numpy().tobytes() == noise(9 << 20)
    is_in_place = False
    published = relay.publish("t", {"w": gpu.array(noise(9 << 20, 1))}, hold="borrow")
    with client.subscribe("t"), pytest.raises(tensor_relay.PublishError, match="freed, moved or cut off.* is w"):
        published.wait_committed(timeout=TIMEOUT_S)
    relay.publish("t", {"w": np.ones(3)})
    assert received(client)["w"].numpy().tolist() == [1, 1, 1]


@HOLDS
def test_tied_weights_of_one_shape_are_sent_once(relay, client, gpu, hold):
    weight = gpu.array(noise(40_000), "f32", (100, 100))
    tied = {"embed": weight, "head": weight.view((100, 100)), "flat": weight.view((10_000,))}
    tensors = {**tied, "other": gpu.array(noise(4))}
    # `flat` has another shape, so it is sent separately.
    assert relay.publish("t", tensors, hold=hold).payload_bytes == pytest.approx(80_004, abs=4 * 256)
    snapshot = received(client)
    for name, array in tensors.items():
        assert snapshot[name].raw.numpy().tobytes() == array.bytes(), name


@HOLDS
def test_reading_waits_for_the_producers_stream(relay, client, gpu, fake, hold):
    """Goal: weights are read after the producer's stream has computed them, and other streams are not delayed.

    Method: the weights are written by a copy that the driver delays, on a stream of its own.
    """
    weights, new = gpu.array(noise(1 << 20)), gpu.array(noise(1 << 20, 1))
    expected = new.bytes()
    with fake.delayed_copies("@dtod"), gpu.on(gpu.stream()):
        gpu.copy(weights.address, new.address, 1 << 20)
        work = InThread(lambda: relay.publish("t", {"w": weights}, hold=hold))
        if hold == "borrow":
            work.result()
            work = InThread(lambda: received(client))
        assert work.is_blocked()
        with gpu.on(LEGACY):
            gpu.synchronize()  # Returns at once: the default stream is not delayed.
    work.result()
    assert received(client)["w"].numpy().tobytes() == expected


@HOLDS
def test_many_tensors_are_ordered_once(relay, client, gpu, fake, monkeypatch, hold):
    """Goal: PyTorch and CuPy, which order every tensor after their current stream, are asked for that once, whatever the
    number of tensors, and after all of them: also after the copies that they make for this.

    Method: arrays that are exported as theirs are. The export of each queues a copy to it on a stream, which the driver
    delays. The events of the driver are counted.
    """
    arrays = {str(n): gpu.array(noise(64, n)) for n in range(256)}
    new = gpu.array(noise(64, 999))

    def exporter(array):
        gpu.copy(array.address, new.address, 64)
        return _frameworks._GpuExporter(array, contextlib.nullcontext(), "by hand"), None, False

    monkeypatch.setattr("tensor_relay._frameworks.exporter", exporter)
    relay.publish("warm", {"w": gpu.array(noise(64))}, hold=hold)
    before = fake.numbers("calls")["cuEventRecord"]
    with fake.delayed_copies("@dtod"), gpu.on(gpu.stream()):
        work = InThread(lambda: relay.publish("t", arrays, hold=hold))
        if hold == "borrow":
            work.result()
            assert fake.numbers("calls")["cuEventRecord"] - before == 2, "that of the stream, and the engine's"
            work = InThread(lambda: received(client))
        assert work.is_blocked()
    work.result()
    assert fake.numbers("calls")["cuEventRecord"] - before <= 4, "and those of the copies of a chunk"
    snapshot = received(client)
    assert all(snapshot[name].numpy().tobytes() == noise(64, 999) for name in arrays)
    relay.withdraw("warm")
    relay.withdraw("t")


def test_tensors_of_several_devices_are_staged(relay, client, gpu, fake):
    with open_gpu(fake, 1) as other:
        host = np.frombuffer(noise(5000, 1), np.uint8)
        tensors = {"a": gpu.array(noise(9 << 20)), "host": host, "b": other.array(noise(77, 2))}
        expected = {"a": noise(9 << 20), "host": noise(5000, 1), "b": noise(77, 2)}
        relay.publish("t", tensors)
        snapshot = received(client)
        assert {name: tensor.numpy().tobytes() for name, tensor in snapshot.items()} == expected
        with pytest.raises(tensor_relay.UnsupportedTensorError, match='host lies on the host, and others .* cuda:0: .*"stage"'):
            relay.publish("t", tensors, hold="borrow")
        del tensors["host"]
        with pytest.raises(tensor_relay.UnsupportedTensorError, match="b lies on cuda:1, and others of its version on cuda:0"):
            relay.publish("t", tensors, hold="borrow")
        # A version can be borrowed if all its tensors are on one GPU, which may be the second.
        relay.publish("u", {"b": tensors["b"]}, hold="borrow")
        assert received(client, "u")["b"].numpy().tobytes() == expected["b"]
        relay.withdraw("u")
        del tensors
        gc.collect()


def test_the_error_for_an_unsupported_value_names_the_tensor(relay, gpu):
    square = gpu.array(noise(64), "f32", (4, 4))
    transposed = square.view((4, 4), strides=(1, 4))
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="transposed.*side by side on cuda:0.*contiguous"):
        relay.publish("t", {"square": square, "transposed": transposed})
    for kind, words in [(8, "Metal"), (10, "ROCm"), (99, "unknown kind")]:
        square.kind = kind
        with pytest.raises(tensor_relay.UnsupportedTensorError, match=f"tensor weights .*{words}"):
            relay.publish("t", {"weights": square})
    square.kind = CUDA
    square.gpu = type("Gpu", (), {"ordinal": 7})
    message = "weights .*no device cuda:7. This process sees 2, cuda:0 to cuda:1"
    with pytest.raises(tensor_relay.UnsupportedTensorError, match=message):
        relay.publish("t", {"weights": square})
    square.gpu = gpu


def test_managed_memory_is_read_as_gpu_memory(relay, client, gpu):
    array = gpu.array(noise(1000))
    array.kind = 13
    relay.publish("t", {"w": array})
    assert received(client)["w"].numpy().tobytes() == noise(1000)


def test_versions_are_staged_on_a_gpu(tmp_path, fake, gpu):
    """Goal: versions are staged on the server's GPU, those of its tensors by copies within it, as long as it has room;
    then in host memory. Method: a version that does not fit beside the retained one; copies to the host are counted."""
    options = {"device": "cuda:0", "gpu_memory_bytes": 16 << 20, "pinned_bytes": 16 << 20}
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path, **options) as relay:
        with tensor_relay.connect(relay.ticket) as client:
            for content in (gpu.array(noise(8 << 20)), np.frombuffer(noise(8 << 20), np.uint8)):
                before = fake.copies_ended("@dtoh")
                relay.publish("t", {"w": content})
                assert fake.copies_ended("@dtoh") == before, "no byte went to the host"
                assert relay.stats()["staged_bytes"] == 0, "it is held on the GPU"
                assert received(client)["w"].numpy().tobytes() == noise(8 << 20)
            relay.publish("t", {"w": gpu.array(noise(12 << 20))})
            assert relay.stats()["staged_bytes"] >= 12 << 20, "it is held on the host"
            assert received(client)["w"].numpy().tobytes() == noise(12 << 20)
            with pytest.raises(tensor_relay.NoRoomError, match="cuda:0"):
                relay.publish("t", {"w": np.zeros(32 << 20, np.uint8)})


def test_invalid_devices_and_sizes_are_refused(tmp_path, fake):
    for word in ("cuda", "cuda:x", "gpu"):
        with pytest.raises(tensor_relay.RequestError, match="cuda:N"):
            tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path, device=word)
    with pytest.raises(tensor_relay.RequestError, match="two chunks of 4194304 bytes"):
        tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path, pinned_bytes=1 << 20)
    with pytest.raises(tensor_relay.TensorRelayError, match="no device cuda:7"):
        tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path, device="cuda:7")


def test_a_gpu_failure_is_reported(relay, gpu, fake):
    array = gpu.array(noise(1 << 20))
    fake.break_at("@dtoh:1")
    with pytest.raises(tensor_relay.PublishError, match="cuda:0.*restart the process"):
        relay.publish("t", {"w": array})


def test_copied_memory_is_released_before_the_call_returns(relay, client, gpu):
    """Goal: whatever other threads do, a call that copied tensors releases them before it returns. Then the owner may
    free them, or JAX donate them.

    Method: the thread that releases tensors in the background is blocked in an array's destructor.
    """
    entered, unblock = threading.Event(), threading.Event()

    class Slow(Array):
        def __del__(self):
            entered.set()
            assert unblock.wait(TIMEOUT_S)
            super().__del__()

    relay.publish("slow", {"w": Slow(gpu, 1000, "u8", (1000,))}, hold="borrow")
    relay.withdraw("slow")
    assert entered.wait(TIMEOUT_S)
    try:
        lent_before = set(lent_tensors)
        for tensors in ({"w": gpu.array(noise(1000))}, {"w": gpu.array(noise(1000)), "host": np.zeros(9)}):
            relay.publish("t", {**tensors, "none": gpu.array(b"", "f32")})
            assert set(lent_tensors) == lent_before
        for atomic in (True, False):
            out = gpu.array(bytes(1000))
            client.subscribe("t", out={"w": out}, atomic=atomic, strict=False).next(TIMEOUT_S)
            assert set(lent_tensors) == lent_before and out.bytes() == noise(1000)
    finally:
        unblock.set()
