"""`out` with tensors on a GPU, such as a model's parameters."""

import contextlib
import gc
import sys
import types

import numpy as np
import pytest
from conftest import TIMEOUT_S, InThread, noise, open_gpu, wait_until
from cuda_by_hand import Array, Imported, lent_tensors

import tensor_relay

ATOMIC = pytest.mark.parametrize("atomic", [True, False])
WHERE = pytest.mark.parametrize("where", ["client", "gpu_client"])


@ATOMIC
@WHERE
def test_versions_are_received_into_tensors(relay, gpu, request, atomic, where):
    client = request.getfixturevalue(where)
    out = {"x": gpu.array(bytes(9 << 20)), "b": gpu.array(bytes(14), "bf16"), "none": gpu.array(b"", "f32"), "step": 3}
    subscription = client.subscribe("t", out=out, atomic=atomic, strict=False, timeout=TIMEOUT_S)
    for number in range(1, 4):
        sent = {"x": gpu.array(noise(9 << 20, number)), "b": gpu.array(noise(14, number), "bf16")}
        extra = {"none": gpu.array(b"", "f32"), "other": np.zeros(9)}
        relay.publish("t", {**sent, **extra}, metadata={"step": number})
        snapshot = next(subscription)
        assert (snapshot.version, len(snapshot), snapshot.metadata) == (number, 0, {"step": number})
        assert out["x"].bytes() == noise(9 << 20, number) and out["b"].bytes() == noise(14, number)
    wait_until("the tensors are returned", lambda: not lent_tensors)
    relay.end("t")
    assert list(subscription) == []


@WHERE
def test_prefetch_and_activate_install_versions(relay, gpu, request, where):
    client = request.getfixturevalue(where)
    out = {"x": gpu.array(bytes(9 << 20))}
    with client.subscribe("t", out=out) as subscription:
        for number in range(1, 4):
            relay.publish("t", {"x": gpu.array(noise(9 << 20, number))})
            snapshot = subscription.prefetch(TIMEOUT_S)
            assert out["x"].bytes() == (noise(9 << 20, number - 1) if number > 1 else bytes(9 << 20))
            subscription.activate(snapshot)
            assert out["x"].bytes() == noise(9 << 20, number)
            del snapshot
    wait_until("the tensors are returned", lambda: not lent_tensors)


@ATOMIC
def test_tied_tensors_are_received(relay, client, gpu, atomic):
    weight, tied = gpu.array(noise(400), "f32"), gpu.array(bytes(400), "f32")
    relay.publish("t", {"embed": weight, "head": weight})
    client.subscribe("t", out={"embed": tied, "head": tied}, atomic=atomic).next(TIMEOUT_S)
    assert tied.bytes() == noise(400)
    if atomic:
        untied = {"embed": gpu.array(bytes(400), "f32"), "head": gpu.array(bytes(400), "f32")}
        client.subscribe("t", out=untied).next(TIMEOUT_S)
        assert untied["embed"].bytes() == untied["head"].bytes() == noise(400)


@WHERE
def test_out_may_be_on_several_devices(relay, gpu, fake, request, where):
    client = request.getfixturevalue(where)
    relay.publish("t", {name: np.frombuffer(noise(5000, seed), np.uint8) for seed, name in enumerate("abc")})
    with open_gpu(fake, 1) as other:
        out = {"a": gpu.array(bytes(5000)), "b": np.zeros(5000, np.uint8), "c": other.array(bytes(5000))}
        client.subscribe("t", out=out).next(TIMEOUT_S)
        assert (out["a"].bytes(), out["b"].tobytes(), out["c"].bytes()) == (noise(5000), noise(5000, 1), noise(5000, 2))
        for wrong, words in [("b", "b of `out` lies on the host, and a on cuda:0"), ("c", "device")]:
            with pytest.raises(tensor_relay.TargetError, match=words):
                two = {"a": out["a"], wrong: out[wrong]}
                client.subscribe("t", out=two, atomic=False, strict=False).next(TIMEOUT_S)
        del out
        gc.collect()


@ATOMIC
@WHERE
def test_writing_waits_for_the_users_stream(relay, gpu, fake, request, atomic, where):
    """Goal: a new version is written to `out` only after the user's stream has read the old content.

    Method: the user's read is a copy that the driver delays.
    """
    client = request.getfixturevalue(where)
    out, read = {"w": gpu.array(noise(1 << 20))}, gpu.array(bytes(1 << 20))
    subscription = client.subscribe("t", out=out, atomic=atomic)
    with gpu.on(gpu.stream()), fake.delayed_copies("@dtod"):
        gpu.copy(read.address, out["w"].address, 1 << 20)
        relay.publish("t", {"w": np.frombuffer(noise(1 << 20, 1), np.uint8)})
        receiving = InThread(lambda: subscription.next(TIMEOUT_S))
        assert receiving.is_blocked()
    assert receiving.result().version == 1
    assert read.bytes() == noise(1 << 20) and out["w"].bytes() == noise(1 << 20, 1)


def test_a_framework_copies_within_its_gpu(relay, gpu_client, gpu, fake, monkeypatch):
    """With a stub of CuPy: no bytes of a version return to the host, strided tensors are supported, and the copy runs
    on the current stream, after its queued work."""

    class Ndarray(Array):
        device = contextlib.nullcontext()

        def __setitem__(self, _, source):
            (rows, columns), (stride, _) = self.shape, self.strides
            for row in range(rows):
                gpu.copy(self.address + row * stride, source.address + row * columns, columns)

    cupy = types.ModuleType("cupy")
    cupy.ndarray, cupy.from_dlpack = Ndarray, lambda tensor: Imported(gpu, tensor)
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: types.SimpleNamespace(ptr=gpu.current))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    base, read = gpu.array(noise(100 * 300)), gpu.array(bytes(100 * 300))
    out = {"w": Ndarray(gpu, 100 * 200, "u8", (100, 200), base=base, strides=(300, 1), offset=50)}
    subscription = gpu_client.subscribe("t", out=out)
    before = fake.copies_ended("@dtoh")
    with gpu.on(gpu.stream()):
        with fake.delayed_copies("@dtod"):
            gpu.copy(read.address, base.address, 100 * 300)
            for number in (1, 2):  # The first version's memory is still being read while the second is received.
                relay.publish("t", {"w": np.frombuffer(noise(100 * 200, number), np.uint8).reshape(100, 200)})
                assert subscription.next(TIMEOUT_S).version == number
        gpu.synchronize()
        assert fake.copies_ended("@dtoh") == before
        expected = np.frombuffer(noise(100 * 300), np.uint8).reshape(100, 300).copy()
        assert read.bytes() == expected.tobytes()
        expected[:, 50:250] = np.frombuffer(noise(100 * 200, 2), np.uint8).reshape(100, 200)
        assert base.bytes() == expected.tobytes()


def cupy_that_copies(gpu, monkeypatch, copy):
    """Installs a stub of CuPy that copies with `copy`. Returns its array class."""

    class Ndarray(Array):
        device = contextlib.nullcontext()

        def __setitem__(self, _, source):
            copy(self, source)

    cupy = types.ModuleType("cupy")
    cupy.ndarray, cupy.from_dlpack = Ndarray, lambda tensor: Imported(gpu, tensor)
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: types.SimpleNamespace(ptr=gpu.current))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return Ndarray


def test_a_framework_that_fails_midway_raises_torn_error(relay, gpu_client, gpu, monkeypatch):
    copied = []

    def copy(target, source):
        if copied:
            raise RuntimeError("out of something")
        copied.append(gpu.copy(target.address, source.address, target.nbytes))

    ndarray = cupy_that_copies(gpu, monkeypatch, copy)
    relay.publish("t", {name: np.frombuffer(noise(1000), np.uint8) for name in "ab"})
    out = {name: ndarray(gpu, 1000, "u8", (1000,)) for name in "ab"}
    with pytest.raises(tensor_relay.TornError, match="out of something.*torn") as torn:
        gpu_client.subscribe("t", out=out).next(TIMEOUT_S)
    assert torn.value.version == 1 and isinstance(torn.value.__cause__, RuntimeError) and len(copied) == 1


def test_ctrl_c_is_raised_after_all_copies(relay, gpu_client, gpu, monkeypatch):
    """Goal: all tensors are written, and then Ctrl-C is raised. It arrives midway through the second tensor."""
    begun = []

    def copy(target, source):
        begun.append(target)
        gpu.copy(target.address, source.address, target.nbytes // 2)
        if len(begun) == 2:
            raise KeyboardInterrupt
        gpu.copy(target.address + target.nbytes // 2, source.address + target.nbytes // 2, target.nbytes // 2)

    ndarray = cupy_that_copies(gpu, monkeypatch, copy)
    tensors = {name: np.frombuffer(noise(1000, seed), np.uint8) for seed, name in enumerate("abcd")}
    relay.publish("t", tensors)
    out = {name: ndarray(gpu, 1000, "u8", (1000,)) for name in "abc"} | {"d": np.zeros(1000, np.uint8)}
    with pytest.raises(KeyboardInterrupt):
        gpu_client.subscribe("t", out=out).next(TIMEOUT_S)
    assert {name: target.bytes() if name != "d" else target.tobytes() for name, target in out.items()} == {
        name: tensor.tobytes() for name, tensor in tensors.items()
    }


def test_tensors_with_overlapping_elements_are_refused(relay, gpu_client, gpu, monkeypatch):
    ndarray = cupy_that_copies(gpu, monkeypatch, lambda target, source: pytest.fail("it was refused before"))
    relay.publish("t", {"w": np.ones((10, 100), np.uint8)})
    row = gpu.array(noise(100))
    host = np.lib.stride_tricks.as_strided(np.zeros(100, np.uint8), (10, 100), (0, 1), writeable=True)
    for repeated in (ndarray(gpu, 1000, "u8", (10, 100), base=row, strides=(0, 1)), host):
        with pytest.raises(tensor_relay.TargetError, match="w in `out` share memory"):
            gpu_client.subscribe("t", out={"w": repeated}).next(TIMEOUT_S)
    assert row.bytes() == noise(100) and not host.any()


@ATOMIC
def test_mismatched_tensors_are_refused_before_anything_is_written(relay, client, gpu, atomic):
    relay.publish("t", {"x": np.ones((2, 3), np.float32), "y": np.ones(4, np.float32)})
    base = gpu.array(noise(96), "f32", (4, 6))
    cases = [
        ({"x": gpu.array(bytes(24), "i32", (2, 3))}, "x"), ({"x": gpu.array(bytes(24), "f32", (3, 2))}, "x"),
        ({"z": gpu.array(bytes(24), "f32", (2, 3))}, "z"), ({"x": base.view((2, 3), strides=(6, 2))}, "x.*side by side"),
    ]  # fmt: skip
    for wrong, words in cases:
        y = gpu.array(noise(16), "f32")
        with pytest.raises(tensor_relay.TargetError, match=words):
            client.subscribe("t", out={"y": y, **wrong}, atomic=atomic, select=["*"]).next(TIMEOUT_S)
        assert y.bytes() == noise(16)
    assert base.bytes() == noise(96)


@ATOMIC
def test_a_gpu_that_fails_midway_raises_torn_error(relay, client, gpu, fake, atomic):
    out = {"w": gpu.array(noise(16 << 20))}
    subscription = client.subscribe("t", out=out, atomic=atomic)
    fake.break_at("@htod:2")
    relay.publish("t", {"w": np.zeros(16 << 20, np.uint8)})
    with pytest.raises(tensor_relay.TornError) as torn:
        subscription.next(TIMEOUT_S)
    assert torn.value.version == 1 and torn.value.__cause__ is not None


def test_the_next_call_continues_after_a_timeout(relay, client, gpu):
    out = {"w": gpu.array(bytes(1000))}
    with client.subscribe("t", out=out, atomic=False) as subscription:
        for _ in range(2):
            with pytest.raises(tensor_relay.RelayTimeoutError):
                subscription.next(0.01)
        relay.publish("t", {"w": np.frombuffer(noise(1000), np.uint8)})
        assert subscription.next(TIMEOUT_S).version == 1 and out["w"].bytes() == noise(1000)
        with pytest.raises(tensor_relay.RelayTimeoutError):
            subscription.next(0.01)
        assert not lent_tensors, "they are returned before the call is over"
