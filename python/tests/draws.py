"""Random tensors and parts of them, for the tests of boxes with `hypothesis`."""

import math

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tensor_relay import Box, slice_columns, slice_rows

# The fixtures of a test are made once for all of its examples. A busy machine is no failure.
settings.register_profile(
    "relay", deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
settings.load_profile("relay")

DTYPES = [np.bool_, np.uint8, np.int16, np.float16, ml_dtypes.bfloat16, np.float32, np.int64, np.complex128]
DTYPES += [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13]), max_size=4).map(tuple)


def array(shape, dtype, seed):
    """An array of random bytes that depend only on the seed."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    content = np.random.default_rng(seed).integers(0, 2 if dtype is np.bool_ else 256, nbytes, np.uint8)
    return content.view(dtype).reshape(shape)


ARRAYS = st.builds(array, SHAPES, st.sampled_from(DTYPES), st.integers(0, 1 << 32))


@st.composite
def boxes_in(draw, shape):
    """A box of a tensor of this shape."""
    ends = [sorted((draw(st.integers(0, length)), draw(st.integers(0, length)))) for length in shape]
    return Box([start for start, _ in ends], [end - start for start, end in ends])


def box_in(shape, seed):
    """A box of a tensor of this shape that depends only on the seed."""
    random = np.random.default_rng(seed)
    ends = [sorted(random.integers(0, length + 1, 2)) for length in shape]
    return Box([start for start, _ in ends], [end - start for start, end in ends])


def part_of(shape, dimension, rank, world):
    """The slices of a rank's part of a dimension, computed otherwise than by the package."""
    if dimension >= len(shape):
        return ()
    parts = np.split(np.arange(shape[dimension]), np.minimum(-(-shape[dimension] // world) * np.arange(1, world), shape[dimension]))
    return (slice(None),) * dimension + (parts[rank],)


@st.composite
def places_in(draw, shape):
    """A value of `boxes=` for a tensor of this shape, and the index with which NumPy takes the same."""
    world = draw(st.integers(1, 5))
    rank = draw(st.integers(0, world - 1))
    box = draw(boxes_in(shape))
    from_end = tuple(
        slice(each.start - (length if each.start < length else 0), each.stop)
        for each, length in zip(box.slices, shape, strict=True)
    )
    return draw(st.sampled_from([
        (box, box.slices), (box.slices, box.slices), (None, ()), (from_end, box.slices),
        (slice_rows(rank, world), part_of(shape, 0, rank, world)), (lambda *_: box, box.slices),
        (slice_columns(rank, world), part_of(shape, 1, rank, world)),
    ]))  # fmt: skip


@st.composite
def cut_arrays(draw):
    """Arrays by name, each with a value of `boxes=` and the array that it takes."""
    names = draw(st.lists(st.sampled_from(["a", "b.0", "b.1", "b.0.c", "d/e"]), min_size=1, max_size=3, unique=True))
    arrays = {name: draw(ARRAYS) for name in names}
    cut = {name: draw(places_in(array.shape)) for name, array in arrays.items()}
    return {name: (array, cut[name][0], array[cut[name][1]]) for name, array in arrays.items()}
