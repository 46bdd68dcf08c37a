"""Nested trees of tensors as flat mappings, which is what is published, and back.

    relay.publish("optimizer", tensor_relay.tree.flatten(optimizer.state_dict()))
    ...
    optimizer.load_state_dict(tensor_relay.tree.unflatten(snapshot.torch()))

A tree is made of dictionaries, lists and tuples; its leaves are tensors, text, numbers, truth values and None. Tensors are
named by their way through the tree (`state.0.exp_avg`), so that `select` finds them. One tensor more, `STRUCTURE`, holds
the rest as JSON: the shape of the tree, and the leaves that are no tensors.

What has a class of its own (named tuples, dataclasses, nodes that JAX has registered) would come back as something else,
so it is refused by name: publish what it is made of.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from .errors import DamagedError, UnsupportedTensorError

__all__ = ["STRUCTURE", "flatten", "unflatten"]

STRUCTURE = "tensor_relay.tree"
"""The name of the tensor that holds the structure."""

DEPTH_MAX = 100
"""How deep a tree may be. Deeper than any state of an optimizer, and far from what Python's stack can hold."""


def flatten(tree: Any) -> dict[str, Any]:
    """The tensors of a tree by name, with its structure. Copies none of them.

    Raises UnsupportedTensorError, which names the place, for keys and nodes that would not come back as they were.
    """
    tensors: dict[str, Any] = {}
    structure = _Flattening(tensors).node(tree, (), 0)
    tensors[STRUCTURE] = bytearray(json.dumps(structure, ensure_ascii=False).encode())
    return tensors


def unflatten(tensors: Mapping[str, Any]) -> Any:
    """The tree that `flatten` was given, of what came in place of its tensors: those of `Snapshot.torch()`, `.numpy()`,
    `.jax()`, or a snapshot itself.

    Raises DamagedError where the structure is missing or none, or a tensor of it is missing, as after `select`.
    """
    if STRUCTURE not in tensors:
        raise DamagedError(f"there is no {STRUCTURE!r} among these tensors: were they published by `tensor_relay.tree.flatten`?")
    try:
        structure = json.loads(_bytes_of(tensors[STRUCTURE]))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"the structure in {STRUCTURE!r} cannot be read: {error}") from error
    return _built(structure, tensors, 0)


class _Flattening:
    """The tensors found so far, each under a name of its own."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors
        # One tensor in two places of a tree is two tensors of a version, which sends it once.
        self._taken = {STRUCTURE}

    def node(self, value: Any, way: tuple[str, ...], depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise UnsupportedTensorError(f"{_place(way)} lies deeper than {DEPTH_MAX}: does the tree contain itself?")
        if value is None or type(value) in (str, bool, int, float):
            return {"value": value}
        if type(value) in (dict, OrderedDict):
            kind = "dict" if type(value) is dict else "ordered"
            return {kind: [[_key(key, way), self.node(each, (*way, str(key)), depth + 1)] for key, each in value.items()]}
        if type(value) in (list, tuple):
            kind = type(value).__name__
            return {kind: [self.node(each, (*way, str(index)), depth + 1) for index, each in enumerate(value)]}
        if not _is_tensor(value):
            raise UnsupportedTensorError(
                f"{_place(way)} is a {type(value).__name__}, which would not come back as one: a tree is made of dict, list, "
                "tuple, tensors, text, numbers, truth values and None; give what it is made of"
            )
        name = self._name(way)
        self._tensors[name] = value
        return {"tensor": name}

    def _name(self, way: tuple[str, ...]) -> str:
        """Its way through the tree; keys with dots may make the same of two ways, and then a number tells them apart."""
        name = plain = ".".join(way) or "tensor"
        number = 1
        while name in self._taken:
            number += 1
            name = f"{plain}~{number}"
        self._taken.add(name)
        return name


def _is_tensor(value: Any) -> bool:
    """Whether this lends its memory. Bytes and such are tensors of one dimension, as in `publish`."""
    if hasattr(type(value), "__dlpack__") or isinstance(value, (bytes, bytearray, memoryview)):
        return True
    return hasattr(type(value), "__array_interface__")  # Scalars of NumPy.


def _key(key: Any, way: tuple[str, ...]) -> Any:
    if type(key) in (str, bool, int) or key is None or (type(key) is float and math.isfinite(key)):
        return key
    raise UnsupportedTensorError(f"{_place(way)} has the key {key!r}, which would not come back as it is: use text or a number")


def _place(way: tuple[str, ...]) -> str:
    return f"the tree at {'.'.join(way)!r}" if way else "the tree itself"


def _built(node: Any, tensors: Mapping[str, Any], depth: int) -> Any:
    """What a node of the structure stands for. The structure comes from elsewhere: nothing of it is believed."""
    if depth > DEPTH_MAX or not isinstance(node, dict) or len(node) != 1:
        raise DamagedError(f"the structure in {STRUCTURE!r} is none")
    (kind, content), *_ = node.items()
    try:
        match kind:
            case "value":
                return content
            case "tensor":
                return tensors[content]
            case "dict":
                return {key: _built(each, tensors, depth + 1) for key, each in content}
            case "ordered":
                return OrderedDict((key, _built(each, tensors, depth + 1)) for key, each in content)
            case "list":
                return [_built(each, tensors, depth + 1) for each in content]
            case "tuple":
                return tuple(_built(each, tensors, depth + 1) for each in content)
    except KeyError as error:
        raise DamagedError(f"the tensor {error} of the tree is not here: was it left out by `select`?") from error
    except (TypeError, ValueError) as error:
        raise DamagedError(f"the structure in {STRUCTURE!r} is none: {error}") from error
    raise DamagedError(f"the structure in {STRUCTURE!r} has a {kind!r}, which this version does not know: update tensor-relay")


def _bytes_of(tensor: Any) -> bytes:
    """The bytes of a tensor of `u8`, whatever framework it is of."""
    if hasattr(tensor, "to_host"):
        tensor = tensor.to_host()
    elif hasattr(tensor, "cpu"):  # PyTorch's.
        tensor = tensor.cpu().numpy()
    elif type(tensor).__module__.startswith("jax"):
        import numpy

        tensor = numpy.asarray(tensor)
    return bytes(memoryview(tensor))
