"""`out=` with DTensors: each process receives its own part of each tensor. The processes are simulated one after the other,
with PyTorch's fake process group."""

import contextlib
import math

import numpy as np
import pytest
from draws import DTYPES, SHAPES, array
from hypothesis import given, settings
from hypothesis import strategies as st

import tensor_relay

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
dtensor = pytest.importorskip("torch.distributed.tensor", reason="PyTorch has no DTensor")
fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
dist, Shard, Replicate = torch.distributed, dtensor.Shard, dtensor.Replicate

ATOMIC = pytest.mark.parametrize("atomic", [True, False])


@contextlib.contextmanager
def mesh_of(rank, mesh_shape):
    """The mesh as the process of this rank sees it."""
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=math.prod(mesh_shape))
    try:
        yield dist.device_mesh.init_device_mesh("cpu", mesh_shape)
    finally:
        dist.destroy_process_group()


def part_of(whole, mesh_shape, rank, placements):
    """The part of an array that a rank holds, by slicing alone: each axis of the mesh cuts what those before it left."""
    coordinate = np.unravel_index(rank, mesh_shape)
    for at, world, placement in zip(coordinate, mesh_shape, placements, strict=True):
        if placement.is_shard():
            length, dimension = whole.shape[placement.dim], placement.dim
            each = -(-length // world)
            whole = whole[(slice(None),) * dimension + (slice(at * each, (at + 1) * each),)]
    return whole


def dtensor_of(part, whole_shape, mesh, placements, dtype):
    """A DTensor that holds zeros in the place of this part."""
    local = torch.zeros(part.shape, dtype=dtype)
    shape = torch.Size(whole_shape)
    stride = torch.empty(shape, device="meta").stride()
    return dtensor.DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


@st.composite
def sharded(draw):
    """The shape of a mesh, and the placements of a tensor with this number of dimensions on it."""
    mesh_shape = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (3, 2), (2, 4), (2, 1, 3)]))
    shape = draw(SHAPES)
    placement = st.sampled_from([Replicate(), *map(Shard, range(len(shape)))])
    return mesh_shape, shape, tuple(draw(placement) for _ in mesh_shape)


TORCH_DTYPES = {dtype: torch.from_numpy(np.zeros(1, dtype)).dtype for dtype in DTYPES if np.dtype(dtype).isbuiltin == 1}


@ATOMIC
@settings(max_examples=150)
@given(layout=sharded(), dtype=st.sampled_from(list(TORCH_DTYPES)), seed=st.integers(0, 1 << 32))
def test_each_rank_receives_its_part(relay, client, atomic, layout, dtype, seed):
    mesh_shape, shape, placements = layout
    whole, plain = array(shape, dtype, seed), array((3,), dtype, seed + 1)
    relay.publish("t", {"w": whole, "plain": plain})
    rank = seed % math.prod(mesh_shape)
    with mesh_of(rank, mesh_shape) as mesh:
        part = part_of(whole, mesh_shape, rank, placements)
        target = dtensor_of(part, shape, mesh, placements, TORCH_DTYPES[dtype])
        out = {"w": target, "plain": torch.zeros(3, dtype=TORCH_DTYPES[dtype])}
        receipt = client.get("t", out=out, atomic=atomic).receipt
        assert target.to_local().numpy().tobytes() == part.tobytes()
        assert out["plain"].numpy().tobytes() == plain.tobytes()
        assert receipt.wanted_bytes == part.nbytes + plain.nbytes


@ATOMIC
def test_sharded_parameters_follow_a_model(relay, client, atomic):
    """Parameters in uneven and empty shards are received by each rank in turn, and together they are the trained model.
    Autograd learns that they have changed."""
    trained = torch.nn.Sequential(torch.nn.Linear(16, 7), torch.nn.Linear(7, 5)).state_dict()
    relay.publish("t", trained)
    parts = {name: [] for name in trained}
    for rank in range(4):
        with mesh_of(rank, (4,)) as mesh:
            parameters = {
                name: dtensor.distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
                for name, tensor in trained.items()
            }
            versions = {name: (each._version, each._local_tensor._version) for name, each in parameters.items()}
            client.get("t", out=parameters, atomic=atomic)
            for name, each in parameters.items():
                parts[name].append(each._local_tensor.clone())
                assert each._version > versions[name][0] and each._local_tensor._version > versions[name][1]
    for name, tensor in trained.items():
        assert torch.equal(torch.cat(parts[name]), tensor), name


@ATOMIC
def test_tied_parameters_have_one_part(relay, client, atomic):
    whole = np.arange(32.0).reshape(8, 4)
    relay.publish("t", {"embed": whole, "head": whole})
    with mesh_of(1, (2,)) as mesh:
        tied = dtensor_of(whole[4:], (8, 4), mesh, (Shard(0),), torch.float64)
        client.get("t", out={"embed": tied, "head": tied}, atomic=atomic)
        np.testing.assert_array_equal(tied._local_tensor.numpy(), whole[4:])


def test_strided_shards_that_are_one_box_are_received(relay, client):
    """As FSDP2 makes them on top of tensor parallelism: rank (1, 0) holds the second half of the first half."""
    strided = dtensor.placement_types._StridedShard
    whole = np.arange(32.0).reshape(8, 4)
    relay.publish("t", {"w": whole})
    for rank, first in enumerate([0, 4, 2, 6]):
        with mesh_of(rank, (2, 2)) as mesh:
            out = dtensor_of(whole[:2], (8, 4), mesh, (strided(0, split_factor=2), Shard(0)), torch.float64)
            client.get("t", out={"w": out})
            np.testing.assert_array_equal(out._local_tensor.numpy(), whole[first : first + 2])


def test_what_is_no_box_is_refused_by_name(relay, client):
    strided = dtensor.placement_types._StridedShard
    relay.publish("t", {"w": np.zeros((8, 4))})
    for placement, words in [
        (dtensor.Partial(), "layer.w of `out`.*Partial.*summand"),
        (strided(0, split_factor=2), "layer.w of `out`.*2 separate ranges of dimension 0"),
    ]:
        with mesh_of(1, (2,)) as mesh:
            part = np.zeros((8, 4) if placement.is_partial() else (4, 4))
            out = dtensor_of(part, (8, 4), mesh, (placement,), torch.float64)
            with pytest.raises(tensor_relay.TargetError, match=words):
                client.get("t", out={"layer.w": out})
            assert not out._local_tensor.any()


def test_another_shape_is_refused_before_anything_is_written(relay, client):
    relay.publish("t", {"w": np.ones((16, 4))})
    with mesh_of(1, (2,)) as mesh:
        out = dtensor_of(np.zeros((4, 4)), (8, 4), mesh, (Shard(0),), torch.float64)
        with pytest.raises(tensor_relay.TargetError, match=r"tensor w is .*f64 \[16, 4\].*f64 \[8, 4\]"):
            client.get("t", out={"w": out})
        with pytest.raises(tensor_relay.RequestError, match="leave `boxes` out"):
            client.get("t", out={"w": out}, boxes=tensor_relay.slice_rows(0, 2))
        assert not out._local_tensor.any()


def test_a_part_can_be_prefetched_and_activated(relay, client):
    relay.publish("t", {"w": np.arange(32.0).reshape(8, 4)})
    with mesh_of(1, (2,)) as mesh:
        out = dtensor_of(np.zeros((8, 2)), (8, 4), mesh, (Shard(1),), torch.float64)
        with client.subscribe("t", out={"w": out}) as subscription:
            snapshot = subscription.prefetch(60)
            assert snapshot["w"].box == tensor_relay.Box((0, 2), (8, 2)) and not out._local_tensor.any()
            subscription.activate(snapshot)
        np.testing.assert_array_equal(out._local_tensor.numpy(), np.arange(32.0).reshape(8, 4)[:, 2:])
