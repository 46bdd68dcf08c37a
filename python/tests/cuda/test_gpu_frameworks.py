"""What is peculiar to frameworks on GPUs, with stand-ins for them: real ones are tried by bench/gpu/run frameworks."""

import contextlib
import gc
import sys
import types

import numpy as np
import pytest
from conftest import gpu_called, received
from cuda_by_hand import Array

import tensor_relay


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


class OfCupy(Array):
    """An array of CuPy's, as far as publishing goes."""

    device = contextlib.nullcontext()

    @property
    def flags(self):
        return types.SimpleNamespace(c_contiguous=self.strides is None)


def side_by_side(array):
    """A copy without gaps, made on the current stream."""
    (rows, columns), (stride, _one), gpu = array.shape, array.strides, array.gpu
    copy = OfCupy(gpu, array.nbytes, array.dtype, array.shape)
    for row in range(rows):
        gpu.copy(copy.address + row * columns, array.address + row * stride, columns)
    return copy


def test_what_has_gaps_is_brought_together_by_its_framework(relay, client, gpu, monkeypatch):
    cupy = types.ModuleType("cupy")
    cupy.ndarray, cupy.ascontiguousarray = OfCupy, side_by_side
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    whole = gpu.array(noise(100 * 300))
    gaps = OfCupy(gpu, 100 * 200, "u8", (100, 200), base=whole, strides=(300, 1), offset=50)
    number = OfCupy(gpu, 8, "f64", ())
    expected = np.frombuffer(noise(100 * 300), np.uint8).reshape(100, 300)[:, 50:250]
    for hold in ("stage", "borrow"):
        with gpu.on(gpu.stream()):
            published = relay.publish("t", {"gaps": gaps, "number": number}, hold=hold)
        assert published.copied_bytes == (100 * 200 if hold == "borrow" else published.payload_bytes)
        snapshot = received(client)
        np.testing.assert_array_equal(snapshot["gaps"].numpy(), expected)
        assert snapshot["number"].shape == ()


class OfTorch:
    """A tensor of PyTorch's, which hands it over only where its GPU is the current one."""

    is_cuda = True
    current = 0

    def __init__(self, array):
        self.array, self.device = array, array.gpu.ordinal

    def detach(self):
        return self

    resolve_conj = resolve_neg = contiguous = detach

    def is_conj(self):
        return False

    is_neg = is_conj

    def data_ptr(self):
        return self.array.address

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if OfTorch.current != self.device:
            raise BufferError("Can't export tensors on a different CUDA device index.")
        return self.array.__dlpack__(**options)


@contextlib.contextmanager
def current_device(ordinal):
    before, OfTorch.current = OfTorch.current, ordinal
    yield
    OfTorch.current = before


def test_tensors_of_another_gpu_than_the_current_one(relay, client, gpu, fake, monkeypatch):
    torch = types.ModuleType("torch")
    torch.Tensor, torch.cuda = OfTorch, types.SimpleNamespace(device=current_device)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with gpu_called(fake, 1) as other:
        sent, out = OfTorch(other.array(noise(5000))), OfTorch(other.array(bytes(5000)))
        with pytest.raises(BufferError):
            sent.__dlpack__()
        relay.publish("t", {"w": sent})
        client.subscribe("t", out={"w": out}, atomic=False).next(60)
        assert out.array.bytes() == received(client)["w"].raw.numpy().tobytes() == noise(5000)
        del sent, out
        gc.collect()


def test_a_cast_is_the_frameworks_own(relay, client, gpu):
    array = gpu.array(np.arange(6, dtype=np.float32), "f32")
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="Array has no way to become bfloat16"):
        relay.publish("t", {"w": array}, dtype="bf16")
    array.astype = lambda dtype: gpu.array(np.arange(6, dtype=dtype), "f16")
    relay.publish("t", {"w": array, "tied": array}, dtype="f16")
    snapshot = received(client)
    assert snapshot["w"].dtype == snapshot["tied"].dtype == "f16" and snapshot["tied"].numpy().tolist() == [0, 1, 2, 3, 4, 5]
