"""Flattens nested trees of tensors into the flat mappings that `publish` accepts, and restores them.

    relay.publish("optimizer", tensor_relay.tree.flatten(optimizer.state_dict()))
    ...
    optimizer.load_state_dict(tensor_relay.tree.unflatten(snapshot.torch()))

A tree consists of dictionaries, lists and tuples; its leaves are tensors, text, numbers, booleans and None. A tensor's
name is its path in the tree (`state.0.exp_avg`), which `select` can match. An additional tensor, `STRUCTURE`, holds the
shape of the tree and the other leaves as JSON.

Named tuples, dataclasses, JAX's registered nodes and other classes would be restored as another type, so `flatten`
refuses them: publish their fields as a dictionary.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from .errors import DamagedError, UnsupportedTensorError

__all__ = ["STRUCTURE", "flatten", "unflatten"]


def __dir__() -> list[str]:
    return __all__


STRUCTURE = "tensor_relay.tree"
"""The name of the tensor that holds the tree's structure."""

DEPTH_MAX = 100
"""The greatest depth of a tree: more than any optimizer state needs, and far below Python's recursion limit."""


def flatten(tree: Any) -> dict[str, Any]:
    """The tensors of a tree by name, and its structure. Copies no tensor.

    Raises UnsupportedTensorError for keys and nodes that cannot be restored exactly. The message names their path.
    """
    tensors: dict[str, Any] = {}
    structure = _Flattener(tensors).node(tree, (), 0)
    tensors[STRUCTURE] = bytearray(json.dumps(structure, ensure_ascii=False).encode())
    return tensors


def unflatten(tensors: Mapping[str, Any]) -> Any:
    """The tree that `flatten` received, with the tensors of this mapping as leaves: the result of `Snapshot.torch()`,
    `.numpy()` or `.jax()`, or a snapshot itself.

    Raises DamagedError when the structure is missing or invalid, or a tensor is missing, such as after `select`.
    """
    if STRUCTURE not in tensors:
        raise DamagedError(f"these tensors have no {STRUCTURE!r}: were they published by `tensor_relay.tree.flatten`?")
    try:
        structure = json.loads(_bytes_of(tensors[STRUCTURE]))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"the structure in {STRUCTURE!r} cannot be read: {error}") from error
    return _build(structure, tensors, 0)


class _Flattener:
    """Collects a tree's tensors under unique names, and builds its structure."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors
        # A tensor in two places of a tree becomes two tensors of a version, whose bytes are sent once.
        self._names = {STRUCTURE}

    def node(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise UnsupportedTensorError(f"{_location(path)} is deeper than {DEPTH_MAX}: does the tree contain itself?")
        if value is None or type(value) in (str, bool, int, float):
            return {"value": value}
        if type(value) in (dict, OrderedDict):
            kind = "dict" if type(value) is dict else "ordered"
            items = value.items()
            return {
                kind: [[_checked_key(key, path), self.node(each, (*path, str(key)), depth + 1)] for key, each in items]
            }
        if type(value) in (list, tuple):
            kind = type(value).__name__
            return {kind: [self.node(each, (*path, str(index)), depth + 1) for index, each in enumerate(value)]}
        if not _is_tensor(value):
            raise UnsupportedTensorError(
                f"{_location(path)} is a {type(value).__name__}, which would not be restored as one: a tree is made of dict, "
                "list, tuple, tensors, text, numbers, booleans and None; publish its fields as a dict"
            )
        name = self._name(path)
        self._tensors[name] = value
        return {"tensor": name}

    def _name(self, path: tuple[str, ...]) -> str:
        """The tensor's path in the tree, joined with dots. Keys with dots may make two joined paths equal; the
        second name then gets a number."""
        name = joined = ".".join(path) or "tensor"
        number = 1
        while name in self._names:
            number += 1
            name = f"{joined}~{number}"
        self._names.add(name)
        return name


def _is_tensor(value: Any) -> bool:
    """Whether `publish` accepts the value as a tensor. Bytes are one-dimensional tensors, as in `publish`."""
    if hasattr(type(value), "__dlpack__") or isinstance(value, (bytes, bytearray, memoryview)):
        return True
    return hasattr(type(value), "__array_interface__")  # NumPy scalars.


def _checked_key(key: Any, path: tuple[str, ...]) -> Any:
    if type(key) in (str, bool, int) or key is None or (type(key) is float and math.isfinite(key)):
        return key
    raise UnsupportedTensorError(
        f"{_location(path)} has the key {key!r}, which would not be restored as it is: use text or a number"
    )


def _location(path: tuple[str, ...]) -> str:
    return f"the tree at {'.'.join(path)!r}" if path else "the tree itself"


def _build(node: Any, tensors: Mapping[str, Any], depth: int) -> Any:
    """The value of a node of the structure. The structure comes from a peer, so every node is checked."""
    if depth > DEPTH_MAX or not isinstance(node, dict) or len(node) != 1:
        raise DamagedError(f"the structure in {STRUCTURE!r} is invalid")
    (kind, content), *_ = node.items()
    try:
        match kind:
            case "value":
                return content
            case "tensor":
                return tensors[content]
            case "dict":
                return {key: _build(each, tensors, depth + 1) for key, each in content}
            case "ordered":
                return OrderedDict((key, _build(each, tensors, depth + 1)) for key, each in content)
            case "list":
                return [_build(each, tensors, depth + 1) for each in content]
            case "tuple":
                return tuple(_build(each, tensors, depth + 1) for each in content)
    except KeyError as error:
        raise DamagedError(f"the tensor {error} of the tree is missing: was it left out by `select`?") from error
    except (TypeError, ValueError) as error:
        raise DamagedError(f"the structure in {STRUCTURE!r} is invalid: {error}") from error
    raise DamagedError(f"the structure in {STRUCTURE!r} has the unknown node {kind!r}: update tensor-relay")


def _bytes_of(tensor: Any) -> bytes:
    """The bytes of a `u8` tensor of any framework."""
    if hasattr(tensor, "to_host"):
        tensor = tensor.to_host()
    elif hasattr(tensor, "cpu"):  # A PyTorch tensor.
        tensor = tensor.cpu().numpy()
    elif type(tensor).__module__.startswith("jax"):
        import numpy

        tensor = numpy.asarray(tensor)
    return bytes(memoryview(tensor))
