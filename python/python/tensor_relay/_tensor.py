"""The conversions of `Tensor` to tensors of frameworks."""

from __future__ import annotations

from typing import Any

from . import _frameworks
from ._methods import add_to
from ._native import Tensor


def numpy(self: Tensor) -> Any:
    """As a NumPy array in the same memory. Types that NumPy lacks (bf16, fp8) need the package ml_dtypes.

    Raises UnsupportedTensorError if NumPy has no such type, and for tensors on a GPU: copy these with `to_host()`
    first."""
    return _frameworks.to_numpy(self)


def __array__(self: Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
    """For `numpy.asarray`, which uses this for dtypes that the buffer protocol lacks: as `numpy`, with a copy if `dtype`
    differs or `copy` is True."""
    return _frameworks.to_array(self, dtype, copy)


def torch(self: Tensor) -> Any:
    """As a PyTorch tensor in the same memory, on the CPU or the GPU. On a GPU it may be read at once. Its memory is
    reused only after the work that PyTorch's current stream has queued by then; if other streams read it, pass them
    to `Snapshot.wait`.

    Raises UnsupportedTensorError if PyTorch has no such type."""
    return _frameworks.to_torch(self)


def jax(self: Tensor) -> Any:
    """As a JAX array on the same device: on the CPU in the same memory if JAX supports that; on a GPU as a copy,
    complete when this returns, because JAX does not tell on which stream it reads. 64-bit types become 32-bit ones
    unless JAX is configured otherwise (`jax_enable_x64`).

    Raises UnsupportedTensorError if JAX has no such type."""
    return _frameworks.to_jax(self)


add_to(Tensor, methods=(numpy, __array__, torch, jax))
