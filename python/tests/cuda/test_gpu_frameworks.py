"""Framework-specific code for GPUs, with stubs of the frameworks. `bench/gpu/run frameworks` tests the real ones."""

import gc
import sys
import types

import numpy as np
import pytest
from conftest import noise, open_gpu, received
from cuda_by_hand import Array, Imported

import tensor_relay


class CupyStub(Array):
    """A stub of `cupy.ndarray` with the members that publishing uses."""

    current = 0

    @property
    def device(self):
        return current_device(CupyStub, self.gpu.ordinal)

    @property
    def flags(self):
        return types.SimpleNamespace(c_contiguous=self.strides is None)


def contiguous_copy(array):
    """A contiguous copy, made on the current stream."""
    (rows, columns), (stride, _), gpu = array.shape, array.strides, array.gpu
    copy = CupyStub(gpu, array.nbytes, array.dtype, array.shape)
    for row in range(rows):
        gpu.copy(copy.address + row * columns, array.address + row * stride, columns)
    return copy


def test_strided_tensors_are_gathered_by_their_framework(relay, client, gpu, monkeypatch):
    cupy = types.ModuleType("cupy")
    cupy.ndarray, cupy.ascontiguousarray = CupyStub, contiguous_copy
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    base = gpu.array(noise(100 * 300))
    strided = CupyStub(gpu, 100 * 200, "u8", (100, 200), base=base, strides=(300, 1), offset=50)
    number = CupyStub(gpu, 8, "f64", ())
    expected = np.frombuffer(noise(100 * 300), np.uint8).reshape(100, 300)[:, 50:250]
    for hold in ("stage", "borrow"):
        with gpu.on(gpu.stream()):
            published = relay.publish("t", {"strided": strided, "number": number}, hold=hold)
        assert published.copied_bytes == 100 * 200 + (0 if hold == "borrow" else published.payload_bytes)
        snapshot = received(client)
        np.testing.assert_array_equal(snapshot["strided"].numpy(), expected)
        assert snapshot["number"].shape == ()


class TorchStub:
    """A stub of `torch.Tensor`. As in PyTorch, it can be exported only while its GPU is the current one."""

    is_cuda = True
    is_quantized = is_nested = is_meta = False
    layout, dtype = "strided", "torch.uint8"
    current = 0

    def __init__(self, array):
        self.array, self.device = array, types.SimpleNamespace(index=array.gpu.ordinal)

    def numel(self):
        return len(self.array.bytes())

    def untyped_storage(self):
        return types.SimpleNamespace(size=self.numel)

    def detach(self):
        return self

    resolve_conj = resolve_neg = contiguous = detach

    def is_conj(self):
        return False

    is_neg = is_inference = is_conj

    def data_ptr(self):
        return self.array.address

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if TorchStub.current != self.device.index:
            raise BufferError("Can't export tensors on a different CUDA device index.")
        return self.array.__dlpack__(**options)


class current_device:  # noqa: N801
    """Makes a GPU a framework's current one. As in PyTorch and CuPy, it can be used any number of times."""

    def __init__(self, framework, ordinal):
        self.framework, self.ordinal = framework, ordinal

    def __enter__(self):
        self.before, self.framework.current = self.framework.current, self.ordinal

    def __exit__(self, *_):
        self.framework.current = self.before


def test_torch_exports_with_its_gpu_as_the_current_one(relay, client, gpu, fake, monkeypatch):
    torch = types.ModuleType("torch")
    torch.Tensor, torch.strided = TorchStub, TorchStub.layout
    torch.__version__, torch._C = "2.1", types.SimpleNamespace()
    written = []
    torch.autograd = types.SimpleNamespace(graph=types.SimpleNamespace(increment_version=written.append))
    torch.cuda = types.SimpleNamespace(device=lambda device: current_device(TorchStub, device.index))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with open_gpu(fake, 1) as other:
        sent, out = TorchStub(other.array(noise(5000))), TorchStub(other.array(bytes(5000)))
        with pytest.raises(BufferError):
            sent.__dlpack__()
        relay.publish("t", {"w": sent})
        client.subscribe("t", out={"w": out}, atomic=False).next(60)
        assert written == [out]
        assert out.array.bytes() == received(client)["w"].raw.numpy().tobytes() == noise(5000)
        del sent, out
        written.clear()
        gc.collect()


def test_casts_are_made_by_the_framework(relay, client, gpu):
    array = gpu.array(np.arange(6, dtype=np.float32), "f32")
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="Array has no method that casts it to bfloat16"):
        relay.publish("t", {"w": array}, dtype="bf16")
    array.astype = lambda dtype: gpu.array(np.arange(6, dtype=dtype), "f16")
    relay.publish("t", {"w": array, "tied": array}, dtype="f16")
    snapshot = received(client)
    assert snapshot["w"].dtype == snapshot["tied"].dtype == "f16"
    assert snapshot["tied"].numpy().tolist() == [0, 1, 2, 3, 4, 5]


def test_cupy_exports_with_its_gpu_as_the_current_one(relay, client, gpu, fake, monkeypatch):
    """CuPy exports an array with the current GPU's stream, even if the array is on another GPU."""
    exported = []

    class Ndarray(CupyStub):
        def __dlpack__(self, **options):
            exported.append((CupyStub.current, self.gpu.ordinal))
            return super().__dlpack__(**options)

    cupy = types.ModuleType("cupy")
    cupy.ndarray = Ndarray
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with open_gpu(fake, 1) as other:
        contents = (noise(5000), bytes(5000))
        sent, out = (Ndarray(other, 5000, "u8", (5000,), base=other.array(content)) for content in contents)
        relay.publish("t", {"w": sent})
        client.subscribe("t", out={"w": out}, atomic=False).next(60)
        assert out.bytes() == noise(5000)
        del sent, out
        gc.collect()
    assert len(exported) > 1 and set(exported) == {(1, 1)}


def test_jax_gets_a_copy(relay, gpu_client, gpu, monkeypatch):
    """JAX does not say on which stream it reads, so it gets a copy, complete before the tensor may be freed."""
    done = []

    class JaxArray:
        def __init__(self, imported, is_copy=False):
            self.imported, self.is_copy = imported, is_copy

        def copy(self):
            return JaxArray(self.imported, is_copy=True)

        def block_until_ready(self):
            done.append(self.is_copy)
            return self

    jax = types.ModuleType("jax")
    jax.Array, jax.dlpack = JaxArray, types.ModuleType("jax.dlpack")
    jax.dlpack.from_dlpack = lambda tensor: JaxArray(Imported(gpu, tensor))
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax.dlpack", jax.dlpack)
    relay.publish("t", {"w": gpu.array(noise(1000))})
    got = received(gpu_client)["w"].jax()
    assert got.is_copy and done == [True]


def test_a_broken_cupy_is_ignored(relay, gpu_client, gpu, monkeypatch):
    def broken():
        raise RuntimeError("cudaErrorInsufficientDriver")

    cupy = types.ModuleType("cupy")
    cupy.ndarray, cupy.cuda = type("Ndarray", (), {}), types.SimpleNamespace(get_current_stream=broken)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    relay.publish("t", {"w": gpu.array(noise(1000))})
    tensor = received(gpu_client)["w"]
    for stream in (1, gpu.stream()):
        assert Imported(gpu, tensor, stream).bytes() == noise(1000)


def test_an_export_from_another_device_is_refused(relay, gpu):
    array = gpu.array(noise(1000))
    for claimed in ((1, 0), (2, 1)):
        export = lambda self, stream=None, **options: Array.__dlpack__(self, stream=-1, **options)  # noqa: E731
        methods = {"__dlpack_device__": lambda self: claimed, "__dlpack__": export}
        array.__class__ = type("WrongDevice", (Array,), methods)
        with pytest.raises(tensor_relay.UnsupportedTensorError, match="tensor w .*DLPack's device 2:0"):
            relay.publish("t", {"w": array})
