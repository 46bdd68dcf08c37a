"""`Snapshot` as a mapping, and its tensors as those of frameworks."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, KeysView, ValuesView
from typing import Any

from ._methods import add_to
from ._native import Snapshot, Tensor
from ._state_dict import is_extra_state
from .errors import UnsupportedTensorError


def numpy(self: Snapshot) -> dict[str, Any]:
    """All tensors as NumPy arrays in the snapshot's memory, which must be on the host. See `Tensor.numpy`."""
    return _converted(self, Tensor.numpy)


def torch(self: Snapshot) -> dict[str, Any]:
    """All tensors as PyTorch tensors in the snapshot's memory, and the entries from modules' `get_extra_state`: a
    state dict for `load_state_dict`. See `Tensor.torch`."""
    state_dict = _converted(self, Tensor.torch)
    if self._has_tensors:
        state_dict.update((name, value) for name, value in self.entries.items() if is_extra_state(name))
    return state_dict


def jax(self: Snapshot) -> dict[str, Any]:
    """All tensors as JAX arrays. See `Tensor.jax`."""
    return _converted(self, Tensor.jax)


def _converted(snapshot: Snapshot, convert: Callable[[Tensor], Any]) -> dict[str, Any]:
    """All tensors by name, each converted."""
    converted = {}
    for name, tensor in snapshot.items():
        try:
            converted[name] = convert(tensor)
        except MemoryError:
            raise
        except Exception as error:
            raise UnsupportedTensorError(f"tensor {name}: {error}") from error
    return converted


def keys(self: Snapshot) -> KeysView[str]:
    """The names of the tensors, in published order."""
    return KeysView(self)


def values(self: Snapshot) -> ValuesView[Tensor]:
    """The tensors, in published order."""
    return ValuesView(self)


def items(self: Snapshot) -> ItemsView[str, Tensor]:
    """The pairs of name and tensor, in published order."""
    return ItemsView(self)


def get(self: Snapshot, key: str, default: Any = None, /) -> Any:
    """The tensor of this name, or `default`."""
    return self[key] if key in self else default


add_to(Snapshot, methods=(numpy, torch, jax, keys, values, items, get))
