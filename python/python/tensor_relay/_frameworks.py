"""Code specific to PyTorch, NumPy, JAX and CuPy. A framework is imported only when the program asks for its tensors."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from ._dtensor import is_dtensor
from ._versions import numbers
from .errors import UnsupportedTensorError

# The dtypes of tensor_relay that NumPy itself lacks, by their names in ml_dtypes. Sub-byte dtypes are missing:
# ml_dtypes stores each element in a byte, and versions contain them packed.
_ML_DTYPES = {
    "bfloat16": "bf16",
    "float8_e3m4": "f8_e3m4",
    "float8_e4m3": "f8_e4m3",
    "float8_e4m3b11fnuz": "f8_e4m3b11fnuz",
    "float8_e4m3fn": "f8_e4m3fn",
    "float8_e4m3fnuz": "f8_e4m3fnuz",
    "float8_e5m2": "f8_e5m2",
    "float8_e5m2fnuz": "f8_e5m2fnuz",
    "float8_e8m0fnu": "f8_e8m0fnu",
}
_ML_NAMES = {dtype: name for name, dtype in _ML_DTYPES.items()}

# The dtypes of tensor_relay, by the names that NumPy, ml_dtypes, PyTorch and JAX share.
_DTYPES = _ML_DTYPES | {
    f"{kind}{bits}": f"{letter}{bits}"
    for kind, letter in {"int": "i", "uint": "u", "float": "f", "complex": "c"}.items()
    for bits in (8, 16, 32, 64, 128)
}
# The dtypes of tensor_relay by their names in safetensors, where these are not the same names in upper case.
_SAFETENSORS_DTYPES = {"F8_E4M3": "f8_e4m3fn", "F8_E8M0": "f8_e8m0fnu"}
# The dtypes of PyTorch that are published unchanged.
_TORCH_DTYPES = frozenset(
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex32 complex64 complex128 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2".split()
)

# The dtypes of NumPy itself that are published unchanged.
_NUMPY_DTYPES = frozenset(
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 complex128".split()
)

TORCH_AT_LEAST = "2.1"
"""The oldest PyTorch: the tests were run with it."""

# The dtypes that `dtype=` may cast to, with the names that NumPy, ml_dtypes, PyTorch and JAX share.
_CAST_DTYPES = {"f16": "float16", "f32": "float32", "f64": "float64"} | {
    dtype: name for dtype, name in _ML_NAMES.items() if dtype != "f8_e8m0fnu"
}

# The largest number of f8_e4m3fn.
_E4M3FN_MAX = 448.0


class _Refusal(TypeError):
    """Why the memory of a tensor cannot be lent, with what to publish instead."""

    def __init__(self, reason: str, instead: str) -> None:
        super().__init__(f"{reason}: {instead}")
        self.reason = reason


def exporter(tensor: Any) -> tuple[Any, str | None, bool]:
    """Returns the object that exports the tensor's memory, the dtype of the elements if that object cannot name it, and
    whether the memory is a copy."""
    torch, numpy, jax, cupy = (sys.modules.get(name) for name in ("torch", "numpy", "jax", "cupy"))
    if torch is not None and isinstance(tensor, torch.Tensor):
        _check_torch(torch, tensor)
        resolved = tensor.detach().resolve_conj().resolve_neg()
        if resolved.is_cuda:
            return _torch_exporter(resolved.contiguous(), tensor)
        return resolved, None, tensor.is_conj() or tensor.is_neg()
    if numpy is not None and isinstance(tensor, numpy.generic):
        array, dtype, _ = _numpy_exporter(numpy.asarray(tensor))
        return array, dtype, True
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return _numpy_exporter(tensor)
    if jax is not None and isinstance(tensor, jax.Array):
        return tensor.block_until_ready(), None, False
    if cupy is not None and isinstance(tensor, cupy.ndarray):
        if tensor.flags.c_contiguous:
            return _GpuExporter(tensor, tensor.device, "cupy"), None, False
        with tensor.device:
            return _GpuExporter(cupy.ascontiguousarray(tensor), tensor.device, "cupy"), None, True
    return tensor, None, False


def writable_exporter(tensor: Any) -> tuple[Any, str | None, bool]:
    """As `exporter`, for a tensor that will be written to. Raises TypeError for a tensor that cannot be written through
    its exporter: what to publish instead would be a copy, which nothing reads back."""
    try:
        return _writable_exporter(tensor)
    except _Refusal as refusal:
        raise TypeError(f"{refusal.reason}: receive into a plain tensor, and copy from that") from None


def _writable_exporter(tensor: Any) -> tuple[Any, str | None, bool]:
    torch, numpy, jax, cupy = (sys.modules.get(name) for name in ("torch", "numpy", "jax", "cupy"))
    if torch is not None and isinstance(tensor, torch.Tensor):
        _check_torch(torch, tensor)
        if tensor.is_conj() or tensor.is_neg():
            raise TypeError("it is a lazy view (conjugated or negated) of another tensor: pass that tensor")
        detached = tensor.detach()
        return (detached, None, False) if not detached.is_cuda else _torch_exporter(detached, tensor)
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        if not tensor.dtype.isnative:
            raise TypeError(
                "it has another machine's byte order: receive into an array of this machine's, and copy from that"
            )
        array, dtype, is_copy = _numpy_exporter(tensor)
        if is_copy:
            raise TypeError("its elements are not aligned: receive into an aligned array")
        return array, dtype, False
    if jax is not None and isinstance(tensor, jax.Array):
        raise TypeError("JAX arrays are immutable: use `snapshot.jax()` instead")
    if cupy is not None and isinstance(tensor, cupy.ndarray):
        return _GpuExporter(tensor, tensor.device, "cupy"), None, False
    return tensor, None, False


def guard(exporter: Any) -> tuple[Any, Callable[[], bool] | None]:
    """What keeps the memory of an object from `exporter` in place while it is lent: an object to hold and, where none
    can, a function that returns whether the memory is still there."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    tensor = exporter._tensor if isinstance(exporter, _GpuExporter) else exporter
    if torch is not None and isinstance(tensor, torch.Tensor):
        storage = tensor.untyped_storage()  # Its `resize_` frees the memory, whoever refers to it.
        place = storage.data_ptr(), storage.nbytes()
        return None, lambda: (storage.data_ptr(), storage.nbytes()) == place
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        while isinstance(tensor.base, numpy.ndarray):
            tensor = tensor.base
        return weakref.ref(tensor), None  # NumPy does not resize an array that has a weak reference.
    return None, None


def extra_state_setter(out: Any, name: str) -> Callable[[Any], None] | None:
    """The function that sets the extra state called `name` in the state dict of `out`. None if `out` is no module."""
    if not hasattr(out, "get_submodule"):
        return None
    setter: Callable[[Any], None] = out.get_submodule(name.rpartition(".")[0]).set_extra_state
    return setter


def mark_written(targets: Iterable[Any]) -> None:
    """Increments the version counters of PyTorch tensors that were written without PyTorch. A backward pass that saved
    the old values then raises an error, as after any in-place change, instead of computing wrong gradients."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for target in targets:
        if isinstance(target, torch.Tensor) and not target.is_inference():  # Those have no version counters.
            torch.autograd.graph.increment_version(target)


def _check_torch(torch: Any, tensor: Any) -> None:
    """Refuses a tensor that is not dense, has no memory of its own, or has a dtype that tensor_relay lacks. The dtype
    is checked here, because DLPack exports PyTorch's sub-byte integers as bytes."""
    _check_torch_version(torch)
    _check_memory(torch, tensor)
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TORCH_DTYPES:
        raise TypeError(f"tensor_relay has no dtype for PyTorch's {name}: pass its bits, `.view(torch.uint8)`")


_accepted_torch = ""
"""The version of PyTorch that was checked last: to parse it for each tensor takes longer than all other checks."""


def _check_torch_version(torch: Any) -> None:
    global _accepted_torch
    version = str(torch.__version__)
    if version == _accepted_torch:
        return
    if numbers(version) < numbers(TORCH_AT_LEAST):
        raise TypeError(
            f"PyTorch {torch.__version__} is installed, and tensor_relay needs {TORCH_AT_LEAST} or later: pip install"
            f" 'torch>={TORCH_AT_LEAST}', or use NumPy arrays (`.numpy()`)"
        )
    _accepted_torch = version


def _check_memory(torch: Any, tensor: Any) -> None:
    kind = type(tensor).__name__
    if is_dtensor(tensor):
        raise TypeError(
            "it is sharded over several processes. To publish it, call `.full_tensor()` in all of them, and publish the"
            " result in one; or publish each `.to_local()` as a topic of its own, since in one topic the parts replace each"
            " other (docs/python-fsdp.md)"
        )
    if kind == "MaskedTensor":
        raise _Refusal(
            "it is a MaskedTensor, and masks are not published",
            "pass its `.to_tensor(…)`, or its `.get_data()` and `.get_mask()` as two tensors",
        )
    # An internal function: without it, PyTorch's own error is quoted.
    is_wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)
    if is_wrapped is not None and is_wrapped(tensor):
        raise TypeError("it is a tensor within a transform (`vmap`, `grad`, …) of torch.func: pass the transform's result")
    if kind == "FakeTensor":
        raise TypeError("it is a FakeTensor, which has a shape and no values: pass one made outside of FakeTensorMode")
    if tensor.is_quantized:
        raise _Refusal("it is quantized", "pass its `.int_repr()`, and its scale and zero point as further tensors")
    if tensor.is_nested:
        raise TypeError("it is nested: pass the tensors of its `.unbind()`, each under its own name")
    if tensor.layout != torch.strided:
        raise _Refusal(f"it is not dense ({tensor.layout})", "pass its `.to_dense()`, or its indices and values")
    if tensor.is_meta:
        raise TypeError("it is on the device `meta`, where tensors have no values: load or initialise it first")
    if hasattr(tensor, "__tensor_flatten__"):
        raise _Refusal(f"it is a {kind}, which is made of other tensors", "pass those, or a plain tensor made from it")
    if tensor.numel() and not tensor.untyped_storage().size():
        raise TypeError(
            "its storage is empty, as FSDP leaves sharded parameters (`untyped_storage().resize_(0)`): gather it first, or"
            " pass the shards"
        )


class _GpuExporter:
    """A PyTorch or CuPy tensor that is exported with its own GPU as the current one. With another current GPU, PyTorch
    refuses the export, and CuPy makes the consumer wait for a stream of the wrong GPU.

    `_tensor_relay_ordered_by` names the framework, which orders the export of each tensor after its current stream: so tensor_relay
    exports them without an order, and asks once for all of them."""

    def __init__(self, tensor: Any, gpu: Any, ordered_by: str) -> None:
        self._tensor, self._gpu, self._tensor_relay_ordered_by = tensor, gpu, ordered_by

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        with self._gpu:
            return self._tensor.__dlpack__(**options)


def _torch_exporter(exported: Any, tensor: Any) -> tuple[Any, None, bool]:
    gpu = sys.modules["torch"].cuda.device(exported.device)
    return _GpuExporter(exported, gpu, "torch"), None, exported.data_ptr() != tensor.data_ptr()


def _numpy_exporter(array: Any) -> tuple[Any, str | None, bool]:
    """As `exporter`, for a NumPy array. NumPy cannot export the dtypes of ml_dtypes, so their bits are exported."""
    if (masked := sys.modules.get("numpy.ma")) is not None and isinstance(array, masked.MaskedArray):
        raise _Refusal("it is a masked array, and masks are not published", "pass `.filled(…)`, or `.data` and `.mask` as two arrays")
    name = array.dtype.name
    if name in _ML_DTYPES:
        return array.view(f"u{array.dtype.itemsize}"), _ML_DTYPES[name], False
    if array.dtype.hasobject:
        raise TypeError("its elements are Python objects, which are not published: pass an array of numbers")
    if not array.dtype.isnative:
        raise TypeError("it has another machine's byte order: pass `array.astype(array.dtype.newbyteorder('='))`")
    if name not in _NUMPY_DTYPES:
        raise TypeError(f"tensor_relay has no dtype for NumPy's {name}: pass its bits as integers, by `.view(…)`")
    if not array.flags.aligned or any(stride % (array.itemsize or 1) for stride in array.strides):
        return array.copy(), None, True
    return array, None, False


def dtype_name(dtype: Any) -> str:
    """The name in tensor_relay of a dtype that the user passes as a framework's name or dtype object. Unknown names are
    returned unchanged."""
    name = dtype if isinstance(dtype, str) else _framework_dtype_name(dtype)
    name = name.removeprefix("torch.")
    if name.isupper():
        return _SAFETENSORS_DTYPES.get(name, name.lower())
    return _DTYPES.get(name, name)


def _framework_dtype_name(dtype: Any) -> str:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if numpy is None or (torch is not None and isinstance(dtype, torch.dtype)):
        return str(dtype)
    try:
        return str(numpy.dtype(dtype).name)  # Covers the dtypes of JAX and ml_dtypes, and scalar types.
    except TypeError:
        return str(dtype)


def to_python_number(value: Any) -> Any:
    """A framework's scalar as a Python number, for the JSON encoder. Raises TypeError for other values."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is not a JSON value")


def cast(tensor: Any, dtype: str) -> Any:
    """The tensor cast to another floating-point dtype by its own framework."""
    if dtype == "f8_e8m0fnu":
        raise TypeError("f8_e8m0fnu has no sign, so a cast to it would lose signs: publish scales in that dtype already")
    if dtype not in _CAST_DTYPES:
        raise TypeError(f"floating-point tensors cannot be cast to {dtype}: dtype is one of {', '.join(_CAST_DTYPES)}")
    name = _CAST_DTYPES[dtype]
    if dtype == "f8_e4m3fn" and getattr(tensor.dtype, "itemsize", 4) > 1:
        # It has no infinity, and frameworks differ: some saturate, and some make NaN.
        tensor = tensor.clip(-_E4M3FN_MAX, _E4M3FN_MAX)
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if not hasattr(torch, name):
            raise TypeError(f"PyTorch has no {name}")
        return tensor.detach().to(getattr(torch, name))
    if jax is not None and isinstance(tensor, jax.Array):
        return tensor.astype(name)
    if hasattr(tensor, "astype"):
        return tensor.astype(_numpy_dtype(name))
    raise TypeError(f"{type(tensor).__name__} has no method that casts it to {name}: cast it before")


def _numpy_dtype(name: str) -> Any:
    import numpy

    if name in _ML_DTYPES:
        return numpy.dtype(getattr(_ml_dtypes(_ML_DTYPES[name]), name))
    return numpy.dtype(name)


def _ml_dtypes(dtype: str) -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise UnsupportedTensorError(f"NumPy lacks {dtype}: `pip install ml_dtypes`, or use `bits` or `raw`") from error
    return ml_dtypes


def to_array(tensor: Any, dtype: Any, copy: bool | None) -> Any:
    """Implements `Tensor.__array__`."""
    import numpy

    array = to_numpy(tensor)
    if dtype is not None and dtype != array.dtype:
        if copy is False:
            raise ValueError(f"another dtype needs a copy of its {array.dtype}")
        return array.astype(dtype)
    return numpy.array(array) if copy else array


def to_numpy(tensor: Any) -> Any:
    """A NumPy array that shares the tensor's memory."""
    import numpy

    if tensor.__dlpack_device__()[0] != 1:
        raise UnsupportedTensorError("it is on a GPU, and NumPy needs host memory: `to_host()` copies it there")
    if (name := _ML_NAMES.get(tensor.dtype)) is not None:
        return numpy.from_dlpack(tensor.bits).view(getattr(_ml_dtypes(tensor.dtype), name))
    return _import_tensor("NumPy", numpy.from_dlpack, tensor)


def to_torch(tensor: Any) -> Any:
    """A PyTorch tensor that shares the tensor's memory."""
    import torch

    try:
        _check_torch_version(torch)
    except TypeError as error:
        raise UnsupportedTensorError(str(error)) from None
    return _import_tensor("PyTorch", torch.from_dlpack, tensor)


def to_jax(tensor: Any) -> Any:
    """A JAX array: in the tensor's memory where JAX accepts that memory, and on a GPU a copy in JAX's own memory.

    JAX does not say on which stream it reads an array, so its kernels may still run when the array is freed and the
    version's memory is reused. JAX tracks the use of its own memory itself."""
    import jax.dlpack

    array = _import_tensor("JAX", jax.dlpack.from_dlpack, tensor)
    return array if tensor.__dlpack_device__()[0] == 1 else array.copy().block_until_ready()


def stream_number(stream: Any) -> int:
    """The handle of a stream of PyTorch, CuPy or Numba, or of an object with `__cuda_stream__`; 0 is the default stream."""
    if hasattr(stream, "__cuda_stream__"):
        _version, handle = stream.__cuda_stream__()
        return int(handle)
    for name in ("cuda_stream", "ptr", "handle"):
        if hasattr(stream, name):
            handle = getattr(stream, name)
            return int(getattr(handle, "value", handle) or 0)  # Numba's is a ctypes object with the number as its value.
    kind = f"{type(stream).__module__}.{type(stream).__qualname__}".removeprefix("builtins.")
    raise TypeError(f"{kind} is no stream: pass the number of one, or a stream of PyTorch, CuPy or Numba")


def stream_device(stream: Any) -> int | None:
    """The number of the GPU that a stream of PyTorch or CuPy names, if it names one."""
    devices = (getattr(stream, name, None) for name in ("device_index", "device_id"))
    # CuPy's number is -1 if the stream does not know its GPU.
    return next((device for device in devices if isinstance(device, int) and device >= 0), None)


def stream_object(handle: int) -> Any:
    """CuPy's object for the CUDA stream with this handle, if it is CuPy's current stream; otherwise None. CuPy destroys
    a stream with its last reference; PyTorch and JAX never destroy theirs."""
    cupy = sys.modules.get("cupy") if handle > 2 else None  # Handles up to 2 are default streams, which always exist.
    try:
        current = cupy.cuda.get_current_stream() if cupy is not None else None
        return current if current is not None and current.ptr == handle else None
    except Exception:
        return None  # CuPy does not work on this machine, so the stream is not CuPy's.


def copier(target: Any, tensor: Any) -> Callable[[], None] | None:
    """A function that copies the tensor to the target on the current stream of the target's framework, after the
    stream's queued work. None unless both are on one GPU and the framework can copy there."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    try:
        if torch is not None and isinstance(target, torch.Tensor) and _are_on_one_device(target, tensor):
            return _torch_copier(target, to_torch(tensor))
        if cupy is not None and isinstance(target, cupy.ndarray) and _are_on_one_device(target, tensor):
            return _cupy_copier(target, _import_tensor("CuPy", cupy.from_dlpack, tensor))
    except UnsupportedTensorError:
        pass  # The framework lacks the dtype, so the target has another one for its bits: the caller copies the bytes.
    return None


def _are_on_one_device(target: Any, tensor: Any) -> bool:
    return bool(tuple(map(int, target.__dlpack_device__())) == tensor.__dlpack_device__())


def _torch_copier(target: Any, source: Any) -> Callable[[], None]:
    def copy() -> None:
        torch = sys.modules["torch"]
        with torch.no_grad(), torch.cuda.device(target.device):
            target.copy_(source, non_blocking=True)

    return copy


def _cupy_copier(target: Any, source: Any) -> Callable[[], None]:
    def copy() -> None:
        with target.device:
            target[...] = source

    return copy


def _import_tensor(framework: str, make: Callable[[Any], Any], tensor: Any) -> Any:
    """Imports the tensor into a framework with its function `make`."""
    try:
        return make(tensor)
    # AssertionError: raised by PyTorch without CUDA.
    except (AssertionError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedTensorError(f"{framework} refuses {tensor.dtype}: {error}; use `bits` or `raw`") from error
