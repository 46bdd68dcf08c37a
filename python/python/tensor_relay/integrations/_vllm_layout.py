"""The weights that a vLLM worker receives as its tensor-parallel part.

vLLM resolves, for its NCCL M2N engine, which weights of a checkpoint are parameters of the model as they are, and along
which dimension the worker holds its part of them. This module asks the same function. For fused parameters, quantised
models and pipeline stages it names no place: these weights are received whole, and vLLM's loader takes its part."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from .. import _frameworks, _native
from .._boxes import Part

logger = logging.getLogger("tensor_relay")

Weight = tuple[str, str, Sequence[int]]
"""A weight's name, PyTorch's name of its dtype, and its shape."""


@dataclass
class Layout:
    """What a worker does with each weight."""

    parts: dict[str, Part] = field(default_factory=dict)
    """The weights of which the worker holds a part."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """The memory of parameters that a weight, or the part of it, is copied to. Other weights are for vLLM's loader."""

    def boxes(self, weights: Sequence[Weight]) -> _native.Boxes | None:
        """The parts, for `subscribe`."""
        if not self.parts:
            return None
        tensors = [(name, _frameworks.dtype_name(dtype), tuple(shape)) for name, dtype, shape in weights]
        return _native.boxes_of(lambda name, *_: self.parts.get(name), tensors, None)


def layout_of(engine: Any, weights: Sequence[Weight]) -> Layout:
    """The layout of the engine's model, for weights that the trainer declares."""
    world = engine.parallel_config.tensor_parallel_size
    if world == 1 or not weights:
        return Layout()
    layout = _resolved(engine, weights, world)
    elements = {name: prod(shape) for name, _, shape in weights}
    cut = sum(elements[name] for name in layout.parts)
    logger.info(
        "This worker receives its tensor-parallel part, 1/%d, of %d of %d weights, which have %.0f %% of all elements. The "
        "others are received whole: vLLM declares no layout for them.",
        world, len(layout.parts), len(weights), 100 * cut / max(1, sum(elements.values())),
    )  # fmt: skip
    return layout


def _resolved(engine: Any, weights: Sequence[Weight], world: int) -> Layout:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
    from vllm.distributed.weight_transfer.m2n_common import DESTINATION_SHARD_AXIS, REPLICATE
    from vllm.distributed.weight_transfer.m2n_layout import resolve_parameter_destinations

    rank, layout = get_tensor_model_parallel_rank(), Layout()
    destinations = resolve_parameter_destinations(
        engine.model,
        [name for name, _, _ in weights],
        [getattr(torch, dtype) for _, dtype, _ in weights],
        [tuple(shape) for *_, shape in weights],
        num_workers=world,
        shard_axis_size=world,
        # The conditions of vLLM's own engine.
        allow_direct=not getattr(engine.model_config, "quantization", None) and engine.parallel_config.pipeline_parallel_size == 1,
    )
    for destination in destinations:
        if destination.tensor is None:
            continue
        layout.parameters[destination.name] = destination.tensor
        placements = destination.placements
        if placements is not None and placements[DESTINATION_SHARD_AXIS] != REPLICATE:
            layout.parts[destination.name] = Part(placements[DESTINATION_SHARD_AXIS], rank, world)
    return layout
