"""Parts of tensors on a GPU: received there as if the whole had been received and sliced."""

import numpy as np
import pytest
from conftest import TIMEOUT_S, wait_until
from cuda_by_hand import Imported, lent_tensors
from draws import cut_arrays
from hypothesis import given, settings

import tensor_relay
from tensor_relay import _dtensor, slice_columns, slice_rows

ATOMIC = pytest.mark.parametrize("atomic", [True, False])
WHERE = pytest.mark.parametrize("where", ["client", "gpu_client"])


@settings(max_examples=100)
@given(cut=cut_arrays())
def test_boxes_are_slices_of_the_whole(relay, gpu_client, gpu, cut):
    relay.publish("t", {name: whole for name, (whole, _, _) in cut.items()})
    snapshot = gpu_client.get("t", boxes={name: place for name, (_, place, _) in cut.items()})
    for name, (whole, _, part) in cut.items():
        tensor = snapshot[name]
        assert tensor.shape == part.shape and tensor.global_shape == whole.shape, name
        assert Imported(gpu, tensor.raw).bytes() == part.tobytes(), name


@WHERE
@ATOMIC
@settings(max_examples=25)
@given(cut=cut_arrays())
def test_boxes_are_received_into_tensors(relay, gpu, request, where, atomic, cut):
    """Into tensors on the GPU, of the boxes' shapes; the tensors are published from there too."""
    client = request.getfixturevalue(where)
    relay.publish("t", {name: gpu.array(whole.tobytes(), "u8") for name, (whole, _, _) in cut.items()})
    bytes_of = {name: np.frombuffer(whole.tobytes(), np.uint8) for name, (whole, _, _) in cut.items()}
    slices = {name: slice(len(each) // 3, len(each) // 3 + len(each) // 2) for name, each in bytes_of.items()}
    out = {name: gpu.array(bytes(len(bytes_of[name][slices[name]])), "u8") for name in cut}
    client.get("t", boxes=slices, out=out, atomic=atomic)
    for name, array in out.items():
        assert array.bytes() == bytes_of[name][slices[name]].tobytes(), name
    wait_until("the tensors are returned", lambda: not lent_tensors)


@WHERE
@ATOMIC
@pytest.mark.parametrize("cut", [slice_rows, slice_columns])
def test_boxes_follow_versions(relay, gpu, request, where, atomic, cut):
    """Many chunks, and later versions as deltas to the base of the boxes."""
    client, random = request.getfixturevalue(where), np.random.default_rng(1)
    whole = random.integers(0, 256, (3000, 4000), np.uint8)
    part = np.s_[1000:2000] if cut is slice_rows else np.s_[:, 1334:2668]
    out = {"w": gpu.array(bytes(whole[part].nbytes), "u8", whole[part].shape)}
    with client.subscribe("t", boxes={"w": cut(1, 3)}, out=out, atomic=atomic) as subscription:
        for _ in range(3):
            whole.flat[random.integers(0, whole.size, 100)] ^= 1
            relay.publish("t", {"w": whole})
            receipt = subscription.next(TIMEOUT_S).receipt
            assert out["w"].bytes() == whole[part].tobytes() and receipt.wanted_bytes == whole[part].nbytes


@ATOMIC
def test_the_part_of_a_dtensor_may_be_on_a_gpu(relay, client, gpu, monkeypatch, atomic):
    class Sharded:
        """In the place of a DTensor of PyTorch, which the fake driver cannot run."""

        local = gpu.array(bytes(16), "f32", (4, 1))

    place = (8, 3), (4, 2), (4, 1)
    monkeypatch.setattr(_dtensor, "local_part", lambda tensor: (tensor.local, *place) if isinstance(tensor, Sharded) else None)
    whole = np.arange(24, dtype=np.float32).reshape(8, 3)
    relay.publish("t", {"w": whole, "b": np.arange(4, dtype=np.float32)})
    out = {"w": Sharded(), "b": gpu.array(bytes(16), "f32")}
    receipt = client.get("t", out=out, atomic=atomic).receipt
    assert out["w"].local.bytes() == whole[4:, 2:].tobytes() and out["b"].bytes() == np.arange(4, dtype=np.float32).tobytes()
    assert receipt.wanted_bytes == 32
    del Sharded.local


def test_a_box_on_a_gpu_tells_its_place(relay, gpu_client, gpu):
    relay.publish("t", {"w": np.arange(32, dtype=np.float32).reshape(8, 4)})
    tensor = gpu_client.get("t", boxes=slice_columns(1, 2))["w"]
    assert tensor.box == tensor.to_host().box == tensor_relay.Box((0, 2), (8, 2)) and tensor.global_shape == (8, 4)
    assert tensor.to_host().numpy().tolist() == [[4 * row + 2, 4 * row + 3] for row in range(8)]
