"""DTensors of PyTorch as targets of `out=`: the part that this process holds, and its place in the whole."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

LocalPart: TypeAlias = tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The tensor that this process holds, the shape of the whole, and the start and shape of the part."""

_Range: TypeAlias = tuple[int, int]
"""The first index and the end."""


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "to_local")


def local_part(tensor: Any) -> LocalPart | None:
    """The part of a DTensor that this process holds; None for every other tensor.

    Raises TypeError if that part is not one box, or has other values than the whole."""
    if not is_dtensor(tensor):
        return None
    shape, mesh, placements = tuple(tensor.shape), tensor.device_mesh, tensor.placements
    _check_placements(placements)
    if (coordinate := mesh.get_coordinate()) is None:
        raise TypeError("it is sharded over a mesh without this process: receive it in the processes of the mesh")
    _check_strided(shape, tuple(mesh.shape), coordinate, placements)
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:
        raise TypeError("this version of PyTorch does not tell where the part of a DTensor lies: update it to 2.5") from None
    lengths, start = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    with sys.modules["torch"].no_grad():  # Else `to_local` makes a view of which autograd keeps a record.
        local = tensor.to_local()
    if tuple(local.shape) != tuple(lengths):
        raise TypeError(
            f"its part in this process has the shape {list(local.shape)}, and its placements {list(placements)} say "
            f"{list(lengths)}: make it by `distribute_tensor` or `from_local(…, shape=…)`"
        )
    return local, shape, tuple(start), tuple(lengths)


def _check_placements(placements: Iterable[Any]) -> None:
    for placement in placements:
        if placement.is_partial():
            raise TypeError(
                f"its placement is {placement!r}, so each process holds a summand of it, and not a part: "
                "`redistribute` it to Replicate or Shard, and receive into that"
            )
        if not placement.is_replicate() and not hasattr(placement, "dim"):
            raise TypeError(f"its placement is {placement!r}, and only Shard and Replicate can be received into")


def _check_strided(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> None:
    """Refuses a part that is several boxes, as `_StridedShard` may make it: PyTorch names the first of them alone."""
    for dimension in {placement.dim for placement in placements if hasattr(placement, "split_factor")}:
        ranges = [(0, shape[dimension])]
        for placement, rank, world in zip(placements, coordinate, mesh_shape, strict=True):
            if not placement.is_replicate() and placement.dim == dimension:
                ranges = _strided_part(ranges, rank, world, getattr(placement, "split_factor", 1))
        if len(ranges) > 1:
            raise TypeError(
                f"its part in this process is {len(ranges)} separate ranges of dimension {dimension}, because of the "
                f"placements {list(placements)}: `redistribute` it to Shard, and receive into that"
            )


def _strided_part(ranges: list[_Range], rank: int, world: int, split_factor: int) -> list[_Range]:
    """The indices of a rank when indices are divided into `split_factor` parts, and each of these over `world` ranks."""
    split = (_part(ranges, piece, split_factor) for piece in range(split_factor))
    return _joined(each for piece in split for each in _part(piece, rank, world))


def _part(ranges: list[_Range], part: int, parts: int) -> list[_Range]:
    """One of `parts` equal parts of these indices, as `torch.chunk` makes them."""
    each = -(-sum(end - start for start, end in ranges) // parts)
    first, found = part * each, []
    for start, end in ranges:
        begin, stop = start + max(first, 0), min(start + first + each, end)
        if begin < stop:
            found.append((begin, stop))
        first -= end - start
    return found


def _joined(ranges: Iterable[_Range]) -> list[_Range]:
    """Adjacent ranges as one."""
    found: list[_Range] = []
    for start, end in ranges:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return found
