"""Boxes: parts of tensors, and the ways to say which part of which tensor a subscription receives (`boxes=`).

A box is a range of indices of each dimension. `_native` asks this module for the rules of a `boxes=` in order, and for
the part that each of them takes: as *slices*, where these can be told without the tensor, else as the box of one tensor
of a described version."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias

from . import _native
from .errors import RequestError

EVERY_TENSOR = "**"
"""The pattern that every name matches."""


@dataclass(frozen=True)
class Box:
    """A part of a tensor: `shape[i]` indices of dimension `i`, from `start[i]` on. Dimensions that it leaves out, the
    last ones, are whole. A box may be empty, but not end beyond its tensor.

        Box(start=(2, 0), shape=(2, 16))    # rows 2 and 3 of a tensor with 16 columns
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __init__(self, start: Sequence[SupportsIndex], shape: Sequence[SupportsIndex]) -> None:
        object.__setattr__(self, "start", tuple(map(operator.index, start)))
        object.__setattr__(self, "shape", tuple(map(operator.index, shape)))
        if len(self.start) != len(self.shape) or any(number < 0 for number in self.start + self.shape):
            raise RequestError(f"{self} is no box: give a start and a length, from 0 on, for each dimension")

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that cut it out of the whole: `whole[box.slices]`."""
        return tuple(slice(start, start + length) for start, length in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True)
class Part:
    """One of `world` parts of a dimension, as `torch.chunk` and `Shard` of DTensors cut it: all of one length, except
    that the last ones may be shorter or empty. A tensor that lacks the dimension is not cut."""

    dimension: int
    rank: int
    world: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise RequestError(f"rank {self.rank} is not within 0 to {self.world - 1}, the ranks of a world of {self.world}")


def slice_rows(rank: SupportsIndex, world: SupportsIndex) -> Part:
    """The rows of a rank of `world` ranks, for `boxes=`: its part of the first dimension. Tensors without dimensions are
    received whole. Ranks that divide the rows unequally get parts as from `torch.chunk`."""
    return Part(0, operator.index(rank), operator.index(world))


def slice_columns(rank: SupportsIndex, world: SupportsIndex) -> Part:
    """The columns of a rank of `world` ranks, for `boxes=`: as `slice_rows`, of the second dimension. Vectors, such as
    biases, are received whole."""
    return Part(1, operator.index(rank), operator.index(world))


Slices: TypeAlias = slice | tuple[Any, ...]
"""A slice, or a tuple of slices that may have an ellipsis, as NumPy's `s_` makes them."""

Place: TypeAlias = Box | Part | Slices | None
"""The part of a tensor that is received; None is the whole."""

PlaceOf: TypeAlias = Callable[[str, tuple[int, ...], str], Place]
"""A function of a tensor's name, shape and dtype."""

Boxes: TypeAlias = Place | PlaceOf | Mapping[str, Place | PlaceOf] | _native.Boxes
"""The argument `boxes=`."""

Slice: TypeAlias = tuple[int, bool, int, int]
"""A dimension; whether one of several equal parts of it is taken; and either that part and the number of parts, or the
first index and the number of indices."""


def rules(boxes: Boxes) -> list[tuple[str, Any]]:
    """The patterns of names in `boxes`, each with what is taken of the tensors that it matches: the first match counts."""
    if not isinstance(boxes, Mapping):
        return [(EVERY_TENSOR, boxes)]
    if not boxes:
        raise RequestError("boxes={} has no box: give boxes by the names of their tensors, or leave it out")
    return list(boxes.items())


def depend_on_tensors(boxes: Boxes) -> bool:
    """Whether the tensors of a version have to be known first."""
    if boxes is None or isinstance(boxes, _native.Boxes):
        return False
    return any(slices_of(place, pattern) is None for pattern, place in rules(boxes))


def slices_of(place: Any, name: str) -> list[Slice] | None:
    """The slices that `place` takes of tensors of any shape. None if it depends on the tensor: functions, and slices
    that count from the end."""
    if callable(place):
        return None
    if place is None:
        return []
    if isinstance(place, Part):
        return [(place.dimension, True, place.rank, place.world)]
    if isinstance(place, Box):
        return [(dimension, False, *range) for dimension, range in enumerate(zip(place.start, place.shape, strict=True))]
    return _absolute(list(_checked(place, name)), name)


def box_of(place: Any, name: str, shape: tuple[int, ...], dtype: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Start and shape of the box that `place` takes of this tensor; None for the whole.

    Raises RequestError if it does not fit."""
    if callable(place):
        place = place(name, shape, dtype)
    if isinstance(place, (slice, tuple)):
        place = _box_of_slices(_expanded(list(_checked(place, name)), shape, name), shape, name)
    slices = slices_of(place, name)
    if slices is None:
        raise RequestError(f"the box of {name} is a function: let the function of `boxes` return a box")
    start, lengths = [0] * len(shape), list(shape)
    for dimension, is_part, first, second in slices:
        if is_part and dimension >= len(shape):
            continue
        begin, length = _chunk(shape[dimension], first, second) if is_part else (first, second)
        if dimension >= len(shape) or begin + length > shape[dimension]:
            raise RequestError(f"the box {place} of {name} does not fit its shape {list(shape)}")
        start[dimension], lengths[dimension] = begin, length
    return None if tuple(lengths) == shape else (tuple(start), tuple(lengths))


def _chunk(length: int, rank: int, world: int) -> tuple[int, int]:
    """The first index and the length of a part of a dimension."""
    each = -(-length // world)
    begin = min(rank * each, length)
    return begin, min(each, length - begin)


def _checked(place: Any, name: str) -> Iterator[Any]:
    """The slices of a tuple, or one slice."""
    for each in place if isinstance(place, tuple) else (place,):
        if isinstance(each, slice) and each.step not in (None, 1):
            raise RequestError(f"the box of {name} has the step {each.step}, and a box has all indices of a range")
        if hasattr(each, "__index__"):
            index = operator.index(each)
            raise RequestError(f"{index} would drop a dimension of {name}, and a box keeps it: write {index}:{index + 1}")
        if not isinstance(each, slice) and each is not Ellipsis:
            kind = type(each).__name__
            raise RequestError(f"the box of {name} is a {kind}: give a Box, slices as of numpy.s_, slice_rows or None")
        yield each


def _absolute(slices: list[Any], name: str) -> list[Slice] | None:
    """Slices without an ellipsis and without ends that depend on the tensor's shape; None if there are such."""
    found: list[Slice] = []
    for dimension, each in enumerate(slices):
        if each == slice(None):
            continue
        if each is Ellipsis or each.stop is None or (each.start or 0) < 0 or each.stop < 0:
            return None
        found.append((dimension, False, *_length(each.start or 0, each.stop, name)))
    return found


def _expanded(slices: list[Any], shape: tuple[int, ...], name: str) -> list[slice]:
    """The slices with as many `:` for their ellipsis as the tensor has further dimensions."""
    at = slices.index(Ellipsis) if Ellipsis in slices else len(slices)
    given = [each for each in slices if each is not Ellipsis]
    if len(given) > len(shape) or len(slices) - len(given) > 1:
        raise RequestError(f"the box of {name} has {len(slices)} slices, which do not fit its shape {list(shape)}")
    return given[:at] + [slice(None)] * (len(shape) - len(given)) + given[at:]


def _box_of_slices(slices: list[slice], shape: tuple[int, ...], name: str) -> Box:
    """The box of one slice for each dimension."""
    ranges = [_range(each, length, name) for each, length in zip(slices, shape, strict=True)]
    return Box([start for start, _ in ranges], [length for _, length in ranges])


def _range(each: slice, length: int, name: str) -> tuple[int, int]:
    """The first index and the number of indices of a slice that may count from the end."""
    start = 0 if each.start is None else operator.index(each.start)
    stop = length if each.stop is None else operator.index(each.stop)
    start, stop = (end + length if end < 0 else end for end in (start, stop))
    if start < 0:
        raise RequestError(f"the box of {name} begins before its dimension of length {length}: {each.start}:{each.stop}")
    return _length(start, stop, name)


def _length(start: int, stop: int, name: str) -> tuple[int, int]:
    if stop < start:
        raise RequestError(f"the box of {name} ends before it begins: {start}:{stop}")
    return start, stop - start
