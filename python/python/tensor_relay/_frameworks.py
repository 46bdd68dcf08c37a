"""What is peculiar to each framework. None is imported before its tensors are here, or are asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .errors import UnsupportedTensorError

# Our dtypes by the names that ml_dtypes has for them: those that NumPy itself lacks. Elements of less than a byte are
# missing: ml_dtypes gives each a byte of its own, and they travel packed.
_OF_ML_DTYPES = {
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
_TO_ML_DTYPES = {ours: theirs for theirs, ours in _OF_ML_DTYPES.items()}

# What `dtype=` may cast to, by the names that NumPy, ml_dtypes, PyTorch and JAX share.
_CASTS = {"f16": "float16", "f32": "float32", "f64": "float64"} | {
    ours: theirs for ours, theirs in _TO_ML_DTYPES.items()
}


def lender(tensor: Any) -> tuple[Any, str | None]:
    """Who lends the tensor's memory, and the dtype of its elements where that one cannot say it. May copy."""
    torch, numpy, jax = (sys.modules.get(name) for name in ("torch", "numpy", "jax"))
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.detach().resolve_conj().resolve_neg(), None
    if numpy is not None and isinstance(tensor, numpy.generic):
        tensor = numpy.asarray(tensor)
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return _of_numpy(tensor)
    if jax is not None and isinstance(tensor, jax.Array):
        return tensor.block_until_ready(), None
    return tensor, None


def lender_to_write(tensor: Any) -> tuple[Any, str | None]:
    """The same for a tensor that is to be written: never that of a copy."""
    torch, numpy, jax = (sys.modules.get(name) for name in ("torch", "numpy", "jax"))
    if torch is not None and isinstance(tensor, torch.Tensor):
        if tensor.is_conj() or tensor.is_neg():
            raise TypeError("it is a lazy view of another tensor: give that one")
        return tensor.detach(), None
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return _of_numpy(tensor)
    if jax is not None and isinstance(tensor, jax.Array):
        raise TypeError("JAX's arrays never change: take `snapshot.jax()` instead")
    return tensor, None


def _of_numpy(array: Any) -> tuple[Any, str | None]:
    """NumPy hands over no types that it lacks, so their bits are handed over as integers."""
    name = array.dtype.name
    if name in _OF_ML_DTYPES:
        return array.view(f"u{array.dtype.itemsize}"), _OF_ML_DTYPES[name]
    if not array.dtype.isbuiltin:
        raise TypeError(f"no dtype here stands for NumPy's {name}: publish its bits as integers")
    if not array.dtype.isnative:
        raise TypeError("its bytes are in the order of another machine: `.astype(array.dtype.newbyteorder('='))`")
    if not array.flags.aligned or any(stride % (array.itemsize or 1) for stride in array.strides):
        return array.copy(), None
    return array, None


def cast(tensor: Any, dtype: str) -> Any:
    """The tensor in another floating-point type, by its own framework."""
    if dtype not in _CASTS:
        raise TypeError(f"floating-point tensors cannot become {dtype}: dtype is one of {', '.join(_CASTS)}")
    name = _CASTS[dtype]
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if not hasattr(torch, name):
            raise TypeError(f"PyTorch has no {name}")
        return tensor.detach().to(getattr(torch, name))
    if jax is not None and isinstance(tensor, jax.Array):
        return tensor.astype(name)
    if hasattr(tensor, "astype"):
        return tensor.astype(_numpy_dtype(name))
    raise TypeError(f"{type(tensor).__name__} has no way to become {name}: cast it first")


def _numpy_dtype(name: str) -> Any:
    import numpy

    if name in _OF_ML_DTYPES:
        return numpy.dtype(getattr(_ml_dtypes(_OF_ML_DTYPES[name]), name))
    return numpy.dtype(name)


def _ml_dtypes(dtype: str) -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise UnsupportedTensorError(f"NumPy lacks {dtype}: `pip install ml_dtypes`, or take `bits` or `raw`") from error
    return ml_dtypes


def to_numpy(tensor: Any) -> Any:
    """An array in the tensor's memory."""
    import numpy

    if (theirs := _TO_ML_DTYPES.get(tensor.dtype)) is not None:
        return numpy.from_dlpack(tensor.bits).view(getattr(_ml_dtypes(tensor.dtype), theirs))
    return _made_by("NumPy", numpy.from_dlpack, tensor)


def to_torch(tensor: Any) -> Any:
    """A tensor in the tensor's memory."""
    import torch

    return _made_by("PyTorch", torch.from_dlpack, tensor)


def to_jax(tensor: Any) -> Any:
    """An array in the tensor's memory, where that suits JAX."""
    import jax.dlpack

    return _made_by("JAX", jax.dlpack.from_dlpack, tensor)


def _made_by(framework: str, make: Callable[[Any], Any], tensor: Any) -> Any:
    try:
        return make(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedTensorError(f"{framework} does not take {tensor.dtype}: {error}; take `bits` or `raw`") from error
