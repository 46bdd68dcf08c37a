"""Boxes without a relay: what `boxes=` takes of a tensor is what slicing the tensor takes, and a DTensor's part is the part
that PyTorch gives its process."""

import math
import pickle

import draws  # noqa: F401  It has the settings of `hypothesis`.
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor_relay import Box, RequestError, _boxes, _dtensor, slice_columns, slice_rows

LENGTHS = st.integers(0, 9)
SHAPES = st.lists(LENGTHS, min_size=1, max_size=4).map(tuple)


def whole_of(shape):
    return np.arange(math.prod(shape)).reshape(shape)


def taken(place, shape):
    """What `place` takes of the tensor of this shape whose elements are numbered."""
    box = _boxes.box_of(place, "w", shape, "f32")
    return whole_of(shape)[Box(*box).slices] if box else whole_of(shape)


@st.composite
def slices_of(draw, length):
    """A slice that fits a dimension of this length, with absolute ends, open ones, or ends that count from the end."""
    start, stop = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
    starts = [start, *([None] if start == 0 else []), *([start - length] if start < length else [])]
    stops = [stop, *([None] if stop == length else []), *([stop - length] if stop < length else [])]
    return slice(draw(st.sampled_from(starts)), draw(st.sampled_from(stops)))


@st.composite
def numpy_slices(draw):
    """A shape, and slices that fit it: of its first dimensions, or of its first and last ones around an ellipsis."""
    shape = draw(SHAPES)
    first = draw(st.integers(0, len(shape)))
    slices = tuple(draw(slices_of(length)) for length in shape[:first])
    if draw(st.booleans()):
        last = draw(st.integers(first, len(shape)))
        slices += (Ellipsis, *(draw(slices_of(length)) for length in shape[last:]))
    return shape, slices


@given(numpy_slices())
def test_slices_take_what_numpy_takes(case):
    shape, slices = case
    np.testing.assert_array_equal(taken(slices, shape), whole_of(shape)[slices])
    np.testing.assert_array_equal(taken(lambda *_: slices, shape), whole_of(shape)[slices])
    if len(slices) == 1 and slices[0] is not Ellipsis:
        np.testing.assert_array_equal(taken(slices[0], shape), whole_of(shape)[slices])


@given(numpy_slices())
def test_slices_that_need_no_shape_are_boxes_of_it(case):
    """What is told without the tensor takes the same as what is told with it."""
    shape, slices = case
    found = _boxes.slices_of(slices, "w")
    if found is not None:
        box = np.s_[:] if not found else tuple(
            next((slice(first, first + second) for at, _, first, second in found if at == dimension), slice(None))
            for dimension in range(len(shape))
        )  # fmt: skip
        np.testing.assert_array_equal(whole_of(shape)[box], whole_of(shape)[slices])
    else:
        assert any(each is Ellipsis or each.stop is None or min(each.start or 0, each.stop) < 0 for each in slices)


@given(SHAPES, st.integers(1, 12))
def test_the_parts_of_all_ranks_are_the_tensor(shape, world):
    for cut, axis in ((slice_rows, 0), (slice_columns, 1)):
        parts = [taken(cut(rank, world), shape) for rank in range(world)]
        if axis < len(shape):
            np.testing.assert_array_equal(np.concatenate(parts, axis), whole_of(shape))
            longest = max(part.shape[axis] for part in parts)
            assert [part.shape[axis] for part in parts] == sorted((part.shape[axis] for part in parts), reverse=True)
            assert longest == -(-shape[axis] // world)
        else:
            assert all(part.shape == shape for part in parts)


@pytest.mark.parametrize("place, words", [
    (3, "3 would drop a dimension of w.*write 3:4"), (np.s_[0:2, 1], "write 1:2"), (np.s_[::2], "step 2"),
    (np.s_[4:2], "ends before it begins: 4:2"), (np.s_[2:9], r"w does not fit its shape \[8, 4\]"),
    (np.s_[-9:], "begins before its dimension of length 8"), (np.s_[:, :, 0:1], "3 slices"), ("rows", "is a str"),
    (np.s_[..., ...], "2 slices"), (Box((0, 3), (8, 2)), "does not fit"), (Box((0, 0, 0), (1, 1, 1)), "does not fit"),
    (lambda *_: lambda *_: None, "is a function: let the function"), (lambda *_: [1, 2], "is a list"),
])  # fmt: skip
def test_what_is_no_box_of_a_tensor_is_refused_by_name(place, words):
    with pytest.raises(RequestError, match=words):
        _boxes.box_of(place, "w", (8, 4), "f32")


def test_a_box_has_a_start_and_a_length_for_each_dimension():
    box = Box([np.int64(2), 0], (2, 16))
    assert box == Box((2, 0), (2, 16)) == pickle.loads(pickle.dumps(box)) and hash(box)
    assert box.slices == np.s_[2:4, 0:16]
    for start, shape in [((1,), (1, 2)), ((-1,), (2,)), ((0,), (-2,))]:
        with pytest.raises(RequestError, match="is no box"):
            Box(start, shape)
    with pytest.raises(TypeError):
        Box((1.5,), (2,))
    for rank, world in [(-1, 2), (2, 2), (0, 0)]:
        with pytest.raises(RequestError, match="ranks of a world"):
            slice_rows(rank, world)


def test_rules_are_those_of_a_mapping_or_for_every_tensor():
    assert _boxes.rules({"a.*": np.s_[0:1], "b": None}) == [("a.*", np.s_[0:1]), ("b", None)]
    assert _boxes.rules(slice_rows(1, 2)) == [("**", slice_rows(1, 2))]
    with pytest.raises(RequestError, match="has no box"):
        _boxes.rules({})


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3), st.data())
def test_strided_parts_are_those_of_pytorch(length, axes, data):
    """The ranges of a rank are the indices that PyTorch's own splitting gives it."""
    torch = pytest.importorskip("torch")
    strided = pytest.importorskip("torch.distributed.tensor.placement_types")._StridedShard
    indices, ranges = torch.arange(length), [(0, length)]
    for world, split_factor in axes:
        rank = data.draw(st.integers(0, world - 1))
        shards, _ = strided(0, split_factor=split_factor)._split_tensor(indices, world, with_padding=False)
        indices, ranges = shards[rank], _dtensor._strided_part(ranges, rank, world, split_factor)
        assert [index for start, end in ranges for index in range(start, end)] == indices.tolist()
        assert all(end < start for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False)), "they are joined"
