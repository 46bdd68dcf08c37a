"""Versions received on a GPU: their export by DLPack, and the lifetime and reuse of their memory."""

import gc
import os
import sys
import types
import weakref
from ctypes import c_void_p

import numpy as np
import pytest
from conftest import TIMEOUT_S, noise, open_gpu, received, wait_until
from cuda_by_hand import DTYPES, Imported

import tensor_relay


@pytest.mark.parametrize("options", [{}, {"max_version": (1, 0)}])
def test_every_dtype_is_exported(relay, gpu_client, gpu, options):
    contents = {dtype: noise(6 * bits // 8 * 10, seed) for seed, (dtype, (_, bits)) in enumerate(DTYPES.items())}
    arrays = {dtype: gpu.array(content, dtype, (2, 3, 10)) for dtype, content in contents.items()}
    arrays["none"] = gpu.array(b"", "f32", (0, 5))
    relay.publish("t", arrays)
    snapshot = received(gpu_client)
    assert snapshot.device == "cuda:0" and list(snapshot) == list(arrays) and len(snapshot) == len(arrays)
    for dtype, content in contents.items():
        tensor = snapshot[dtype]
        assert (tensor.dtype, tensor.shape, tensor.__dlpack_device__()) == (dtype, (2, 3, 10), (2, 0))
        imported = Imported(gpu, tensor, **options)
        assert (imported.is_versioned, imported.device) == (bool(options), (2, 0))
        assert (imported.shape, imported.code) == ((2, 3, 10), DTYPES[dtype])
        assert imported.bytes() == content, dtype
        assert imported.address % 256 == 0
        assert Imported(gpu, tensor.raw).bytes() == Imported(gpu, tensor.bits).bytes() == content if DTYPES[dtype][1] < 128 else True
    assert Imported(gpu, snapshot["none"]).shape == (0, 5)


def test_a_version_moves_from_the_host_to_a_gpu_and_back(relay, gpu_client, gpu, tmp_path):
    relay.publish("t", {"w": np.frombuffer(noise(9 << 20), np.uint8), "n": np.float32(7)}, metadata={"k": "v"})
    snapshot = received(gpu_client)
    assert Imported(gpu, snapshot["w"]).bytes() == noise(9 << 20)
    host = snapshot.to_host()
    assert (host.device, host.version, host.metadata, host.entries) == ("cpu", snapshot.version, {"k": "v"}, {})
    assert host.to_host() is host
    assert host["w"].numpy().tobytes() == noise(9 << 20) and host["n"].numpy() == 7
    assert snapshot["w"].to_host().numpy().tobytes() == noise(9 << 20)
    snapshot.save(tmp_path / "w.safetensors")
    assert noise(9 << 20) in (tmp_path / "w.safetensors").read_bytes()


def test_dlpack_options_are_respected(relay, gpu_client, gpu):
    relay.publish("t", {"w": gpu.array(noise(1000))})
    tensor = received(gpu_client)["w"]
    same, copy = Imported(gpu, tensor, copy=False), Imported(gpu, tensor, copy=True)
    assert same.address == Imported(gpu, tensor, dl_device=(2, 0)).address != copy.address
    host = Imported(gpu, tensor, dl_device=(1, 0), max_version=(1, 0))
    assert host.device == (1, 0)
    assert same.bytes() == copy.bytes() == host.bytes() == noise(1000)
    assert np.from_dlpack(tensor, device="cpu").tobytes() == noise(1000)
    for stream in (None, 1, 2, -1, gpu.stream()):
        assert tensor.__dlpack__(stream=stream)
    for options, words in [
        ({"stream": 0}, "DLPack forbids"), ({"stream": -7}, "no stream"), ({"dl_device": (2, 1)}, "cuda:0"),
        ({"dl_device": (1, 0), "copy": False}, "only as a copy"),
    ]:  # fmt: skip
        with pytest.raises(BufferError, match=words):
            tensor.__dlpack__(**options)
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="to_host"):
        tensor.numpy()
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="tensor w: .*to_host"):
        received(gpu_client).numpy()
    with pytest.raises(BufferError, match="to_host"):
        memoryview(tensor)


def test_memory_lives_as_long_as_its_references(relay, gpu_client, gpu):
    relay.publish("t", {"w": gpu.array(noise(1 << 20)), "x": gpu.array(noise(50, 1))})
    imported = Imported(gpu, received(gpu_client)["x"])
    capsule = received(gpu_client)["w"].__dlpack__()
    gc.collect()
    for seed in range(2, 12):
        relay.publish("t", {"w": gpu.array(noise(1 << 20, seed)), "x": gpu.array(noise(50, seed))})
        assert Imported(gpu, received(gpu_client)["x"]).bytes() == noise(50, seed)
        assert imported.bytes() == noise(50, 1)
    del capsule


def test_stream_needs_memory_for_three_buckets(relay, gpu_client, gpu, fake):
    sent = {f"w{number}": noise(1 << 20, number) for number in range(24)}
    relay.publish("t", {name: gpu.array(content) for name, content in sent.items()})
    gc.collect()
    baseline, peak, names = fake.numbers("live")["device_bytes"], 0, []
    for name, tensor in gpu_client.stream("t", bucket_bytes=2 << 20, timeout=TIMEOUT_S):
        assert Imported(gpu, tensor).bytes() == sent[name]
        names.append(name)
        peak = max(peak, fake.numbers("live")["device_bytes"] - baseline)
    assert names == list(sent)
    assert peak <= 3 * (4 << 20), "three buckets of one chunk each, and not the version's 24 MiB"


def test_a_hundred_versions_reuse_memory(relay, gpu_client, gpu, fake):
    subscription = gpu_client.subscribe("t")
    for number in range(100):
        relay.publish("t", {"w": gpu.array(noise(1 << 20, number))})
        snapshot = subscription.next(TIMEOUT_S)
        assert Imported(gpu, snapshot["w"]).bytes() == noise(1 << 20, number)
        if number == 20:
            baseline = fake.numbers("live")["device_bytes"]
    # The memory in use varies by a few versions; a leak would be eighty versions.
    assert fake.numbers("live")["device_bytes"] < baseline + (20 << 20)


@pytest.mark.parametrize("how", ["capsule", "number", "object", "protocol"])
def test_memory_is_used_again_when_its_readers_are_done(relay, gpu_client, gpu, fake, how):
    """Goal: the memory of a dropped tensor is not reused while a stream still reads it.

    Method: the read is a copy that the driver delays, and later versions would be received into that memory.
    """
    relay.publish("t", {"w": gpu.array(noise(1 << 20))})
    stream, read = gpu.stream(), gpu.array(bytes(1 << 20))
    snapshot = received(gpu_client)
    with gpu.on(stream):
        imported = Imported(gpu, snapshot["w"], stream if how == "capsule" else -1)
        address = imported.address
        if how == "number":
            snapshot.wait(stream)
        elif how == "object":
            snapshot.wait(type("Stream", (), {"cuda_stream": stream})())
        elif how == "protocol":
            snapshot.wait(type("Stream", (), {"__cuda_stream__": lambda self: (0, stream)})())
        with fake.delayed_copies("@dtod"):
            gpu.copy(read.address, address, 1 << 20)
            del snapshot, imported
            gc.collect()
            addresses = []
            for number in range(1, 4):
                relay.publish("t", {"w": np.frombuffer(noise(1 << 20, number), np.uint8)})
                later = received(gpu_client)
                addresses.append(Imported(gpu, later["w"], -1).address)
                del later
            assert address not in addresses
        assert read.bytes() == noise(1 << 20)

    # After the read, the memory is reused.
    def is_reused():
        relay.publish("t", {"w": np.frombuffer(noise(1 << 20), np.uint8)})
        snapshots.append(received(gpu_client))
        return address in [Imported(gpu, snapshot["w"], -1).address for snapshot in snapshots]

    snapshots = []
    wait_until("the memory is reused", is_reused)


@pytest.mark.parametrize("how", ["wait", "capsule"])
def test_a_stream_object_is_kept_while_needed(relay, gpu_client, gpu, fake, monkeypatch, how):
    class Stream:
        def __init__(self):
            self.ptr = gpu.stream()

        def __del__(self):
            gpu("cuStreamDestroy_v2", c_void_p(self.ptr))
            gpu.streams.remove(self.ptr)

    relay.publish("t", {"w": gpu.array(noise(1000))})
    snapshot, stream = received(gpu_client), Stream()
    stream_ref = weakref.ref(stream)
    if how == "wait":
        snapshot.wait(stream)
    else:  # CuPy passes the stream's handle; the package gets the stream object from CuPy.
        cupy = types.ModuleType("cupy")
        cupy.ndarray, cupy.cuda = Stream, types.SimpleNamespace(get_current_stream=lambda: stream_ref())
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        Imported(gpu, snapshot["w"], stream.ptr)
    del stream
    gc.collect()
    assert stream_ref() is not None
    del snapshot
    wait_until("the stream is released", lambda: stream_ref() is None)


def test_a_bare_stream_may_be_destroyed_after_its_last_tensor(relay, gpu_client, gpu, fake):
    """Goal: no stream is used after the last tensor that it reads was dropped, so that the user may destroy the stream.

    Method: checks that the event on the stream has been recorded when dropping the tensor returns.
    """

    def events_recorded():
        return int(dict(line.split("=") for line in fake.control("calls").splitlines())["cuEventRecord"])

    relay.publish("t", {"w": gpu.array(noise(1000))})
    for _ in range(20):
        snapshot, stream = received(gpu_client), gpu.stream()
        imported = Imported(gpu, snapshot["w"], stream)
        del snapshot
        before = events_recorded()
        imported.close()
        assert events_recorded() > before
        gpu.streams.remove(stream)
        gpu("cuStreamDestroy_v2", c_void_p(stream))


def test_a_stream_of_another_gpu_is_refused(relay, gpu_client, gpu, fake):
    relay.publish("t", {"w": gpu.array(noise(1000))})
    snapshot = received(gpu_client)
    with open_gpu(fake, 1) as other:
        stream = other.stream()
        for where in ("device_index", "device_id"):
            with pytest.raises(ValueError, match="stream of cuda:1, and the tensors lie on cuda:0"):
                snapshot.wait(type("Stream", (), {"cuda_stream": 0, where: 1})())
        with pytest.raises(BufferError, match="cannot be waited for on cuda:0"):
            snapshot.wait(stream)
        snapshot.wait(type("Stream", (), {"ptr": 0, "device_id": -1})())
        snapshot.wait(type("Stream", (), {"cuda_stream": 0, "device_index": 0})())


def test_invalid_streams_are_refused(relay, gpu_client, gpu):
    relay.publish("t", {"w": gpu.array(noise(1000))})
    snapshot = received(gpu_client)
    assert snapshot.wait() is None and snapshot.wait(2) is None
    with pytest.raises(TypeError, match="no stream"):
        snapshot.wait("yes")
    with pytest.raises(BufferError, match="two streams"):
        snapshot.wait(0)


def test_a_fork_is_refused(relay, gpu_client, gpu):
    relay.publish("t", {"w": gpu.array(noise(1000))})
    tensor = received(gpu_client)["w"]
    child = os.fork()
    if child == 0:
        try:
            tensor.__dlpack__()
            os._exit(1)
        except tensor_relay.ForkError:
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_version_that_exceeds_gpu_memory_is_refused(relay, fake):
    relay.publish("t", {"w": np.zeros(32 << 20, np.uint8)})
    with tensor_relay.connect(relay.ticket, device="cuda:1", gpu_memory_bytes=16 << 20, pinned_bytes=16 << 20) as client:
        with pytest.raises(tensor_relay.NoRoomError, match="cuda:1"):
            received(client)
    with pytest.raises(tensor_relay.TensorRelayError, match="no device cuda:2"):
        tensor_relay.connect(relay.ticket, device="cuda:2")
