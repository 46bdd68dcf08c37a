"""The names and values of a user's tensors: of a mapping, a model or a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import RequestError, UnsupportedTensorError

# The maximum number of nested keys in an example of a flat name.
_EXAMPLE_DEPTH = 3


def items(tensors: Any, rename: Callable[[str], str] | None) -> list[tuple[str, str, Any]]:
    """The values of a mapping, or of a model's `state_dict`; those of a list or tuple are named by their indices. Each
    with its name in a version, which `rename` makes of its own name, and its own name.

    Raises UnsupportedTensorError for any other value, and for names that are not text; RequestError if `rename` gives
    two values one name."""
    named: list[tuple[str, str, Any]] = []
    own_names: dict[str, str] = {}
    for key, value in _mapping_of(tensors).items():
        own_name = _text(key)
        name = own_name if rename is None else _text(rename(key))
        if rename is not None and name in own_names:
            raise RequestError(f"rename gives {own_names[name]} and {own_name} the same name, {name}")
        own_names[name] = own_name
        named.append((name, own_name, value))
    return named


def _mapping_of(tensors: Any) -> Any:
    """The mapping that `tensors` is or stands for. Named tuples are none: the names of their fields would be lost."""
    if hasattr(tensors, "state_dict"):
        tensors = tensors.state_dict()
    elif isinstance(tensors, (list, tuple)) and not hasattr(tensors, "_fields"):
        tensors = {str(index): value for index, value in enumerate(tensors)}
    if not hasattr(tensors, "items"):
        raise UnsupportedTensorError(
            f"tensors are sent by name, and this is a {type_name(tensors)}: give a mapping of names to tensors, a list of "
            "tensors, or a model with `state_dict()`"
        )
    return tensors


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise UnsupportedTensorError(f"tensors have names, and {name!r} is not text: use text for the keys")
    return name


def why_unsupported(name: str, value: Any, error: BaseException) -> tuple[str, BaseException]:
    """The value's name and type, and why it cannot be published: its framework's `error`, or what says more."""
    return f"{name} ({type_name(value)})", _reason(name, value, error)


def _reason(name: str, value: Any, error: BaseException) -> BaseException:
    if isinstance(error, TypeError) and is_extra_state(name):
        return TypeError(
            "a module's `get_extra_state` returned it, and only tensors, text, numbers, truth values and None can be sent: "
            f"leave it out, or let `get_extra_state` return one of these ({error})"
        )
    if isinstance(value, dict):
        return TypeError(
            "it is a dictionary, and tensors are sent by one name each: flatten it, to names like "
            f"`{name}{_keys_below(value)}`, or let `tensor_relay.tree.flatten` do so for the whole tree"
        )
    return error


def is_extra_state(name: str) -> bool:
    """Whether this is the result of a PyTorch module's `get_extra_state`, which `load_state_dict` requires."""
    return name.split(".")[-1] == "_extra_state"


def _keys_below(value: Any) -> str:
    """The first keys of nested dictionaries, as the end of a flat name."""
    names = ""
    for _ in range(_EXAMPLE_DEPTH):
        if not isinstance(value, dict) or not value:
            break
        key, value = next(iter(value.items()))
        names += f".{key}"
    return names


def type_name(value: Any) -> str:
    """The name of a value's type, for messages."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
