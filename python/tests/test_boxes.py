"""`boxes=`: parts of tensors are received as if the whole had been received and sliced."""

import asyncio
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import HERE, TIMEOUT_S, gated, serve_again
from draws import DTYPES, array, box_in, cut_arrays
from hypothesis import given, settings
from hypothesis import strategies as st

import tensor_relay
from tensor_relay import Box, RequestError, slice_columns, slice_rows

ATOMIC = pytest.mark.parametrize("atomic", [True, False])
CHUNK_BYTES = pytest.mark.parametrize("chunk_bytes", [256, 1024, 4 << 20])


@pytest.fixture
def chunked_relay(tmp_path, chunk_bytes):
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path / "state", chunk_bytes=chunk_bytes) as relay:
        yield relay


@pytest.fixture
def chunked_client(chunked_relay):
    with tensor_relay.connect(chunked_relay.ticket) as client:
        yield client


def same(tensor, expected):
    """Whether a received tensor has the bytes and the shape of an array."""
    return tensor.shape == expected.shape and bytes(memoryview(tensor.raw)) == expected.tobytes()


@CHUNK_BYTES
@settings(max_examples=200)
@given(cut=cut_arrays())
def test_boxes_are_slices_of_the_whole(chunked_relay, chunked_client, cut):
    chunked_relay.publish("t", {name: whole for name, (whole, _, _) in cut.items()})
    snapshot = chunked_client.get("t", boxes={name: place for name, (_, place, _) in cut.items()})
    assert list(snapshot) == list(cut)
    for name, (whole, _, part) in cut.items():
        tensor = snapshot[name]
        assert same(tensor, part), name
        assert tensor.global_shape == whole.shape
        assert tensor.box is None if part.shape == whole.shape else whole[tensor.box.slices].tobytes() == part.tobytes()
    receipt = snapshot.receipt
    assert receipt.wanted_bytes == sum(part.nbytes for _, _, part in cut.values()) <= receipt.received_bytes


@CHUNK_BYTES
@ATOMIC
@settings(max_examples=50)
@given(cut=cut_arrays())
def test_boxes_are_received_into_arrays(chunked_relay, chunked_client, atomic, cut):
    chunked_relay.publish("t", {name: whole for name, (whole, _, _) in cut.items()})
    out = {name: np.zeros(part.shape, part.dtype) for name, (_, _, part) in cut.items()}
    boxes = {name: place for name, (_, place, _) in cut.items()}
    assert len(chunked_client.get("t", boxes=boxes, out=out, atomic=atomic)) == 0
    for name, (_, _, part) in cut.items():
        assert out[name].tobytes() == part.tobytes(), name


@pytest.fixture
def matrices(relay):
    """Three published tensors: a matrix of 8 x 4, a vector of 8, and a scalar."""
    sent = {"layers.0.w": np.arange(32.0).reshape(8, 4), "layers.0.b": np.arange(8.0), "scale": np.array(3.0)}
    relay.publish("t", sent)
    return sent


def test_a_whole_model_is_cut_by_rank(client, matrices):
    ranks = [client.get("t", boxes=slice_rows(rank, 3)).numpy() for rank in range(3)]
    for name, whole in matrices.items():
        parts = [rank[name] for rank in ranks]
        np.testing.assert_array_equal(np.concatenate(parts) if whole.ndim else parts[0], whole)
    assert [rank["layers.0.w"].shape for rank in ranks] == [(3, 4), (3, 4), (2, 4)]
    columns = client.get("t", boxes=slice_columns(1, 4)).numpy()
    np.testing.assert_array_equal(columns["layers.0.w"], matrices["layers.0.w"][:, 1:2])
    np.testing.assert_array_equal(columns["layers.0.b"], matrices["layers.0.b"])


def test_the_first_pattern_that_matches_counts(client, matrices):
    boxes = {"layers.*.b": None, "layers.*": np.s_[2:5]}
    snapshot = client.get("t", boxes=boxes)
    assert [snapshot[name].shape for name in matrices] == [(3, 4), (8,), ()]
    assert snapshot["layers.0.w"].box == Box((2, 0), (3, 4)) and snapshot["layers.0.w"].global_shape == (8, 4)
    assert snapshot["layers.0.w"].bits.box == snapshot["layers.0.w"].to_host().box == Box((2, 0), (3, 4))
    assert snapshot["layers.0.b"].box is None and snapshot["layers.0.w"].raw.box is None
    only = client.get("t", select="*.w", boxes=boxes)
    assert list(only) == ["layers.0.w"] and only["layers.0.w"].shape == (3, 4)


def test_a_function_says_the_box_of_each_tensor(client, matrices):
    asked = []

    def box(name, shape, dtype):
        asked.append((name, shape, dtype))
        return slice_columns(1, 2) if name.endswith(".w") else np.s_[-2:] if shape else None

    snapshot = client.get("t", boxes=box)
    assert sorted(asked) == [("layers.0.b", (8,), "f64"), ("layers.0.w", (8, 4), "f64"), ("scale", (), "f64")]
    for name, expected in {"layers.0.w": np.s_[:, 2:], "layers.0.b": np.s_[6:], "scale": ()}.items():
        np.testing.assert_array_equal(snapshot[name].numpy(), matrices[name][expected])
    asked.clear()
    assert asyncio.run(client.get_async("t", boxes=box))["layers.0.b"].shape == (2,)
    with client.subscribe("t", select="*.b", boxes=box) as subscription:
        assert subscription.next(TIMEOUT_S)["layers.0.b"].numpy().tolist() == [6, 7]
    assert [name for name, *_ in asked[3:]] == ["layers.0.b"], "it is asked about selected tensors"


def test_side_files_of_a_folder_have_no_boxes(relay, client, tmp_path):
    from safetensors.numpy import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": np.arange(32.0).reshape(8, 4)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    relay.publish_files("t", folder)
    asked = []
    with client.subscribe("t", boxes=lambda name, *_: asked.append(name) or np.s_[:2]) as subscription:
        assert subscription.next(TIMEOUT_S)["w"].shape == (2, 4) and asked == ["w"]
        (folder / "config.json").write_text('{"changed": true}')
        relay.publish_files("t", folder)
        assert subscription.next(TIMEOUT_S)["w"].shape == (2, 4)


def test_a_function_is_asked_about_the_first_version(relay):
    """A subscription waits for the topic, at most for the client's `topic_timeout`."""
    with tensor_relay.connect(relay.ticket, topic_timeout=0.1) as client:
        with pytest.raises(tensor_relay.TopicNotFoundError):
            client.subscribe("none", boxes=lambda *_: None)
    with tensor_relay.connect(relay.ticket) as client:
        with pytest.raises(ZeroDivisionError):
            relay.publish("t", {"w": np.zeros(3)})
            client.subscribe("t", boxes=lambda *_: 1 / 0)


def test_another_layout_needs_another_subscription(relay, client):
    relay.publish("t", {"w": np.zeros((8, 4)), "b": np.zeros(2)})
    with client.subscribe("t", boxes={"w": np.s_[-2:]}) as subscription:
        assert subscription.next(TIMEOUT_S)["w"].shape == (2, 4)
        for changed in [{"w": np.zeros((16, 4)), "b": np.zeros(2)}, {"w": np.zeros((8, 4)), "c": np.zeros(2)}]:
            relay.publish("t", changed)
            with pytest.raises(RequestError, match="tensor [wc] of t version . .* is f64 .* computed for .*: subscribe again"):
                subscription.next(TIMEOUT_S)
        relay.publish("t", {"w": np.ones((8, 4)), "b": np.zeros(2)})
        assert subscription.next(TIMEOUT_S)["w"].numpy().all()


@pytest.mark.parametrize("boxes, words", [
    ({"w": Box((7, 0), (2, 4))}, r"w.*does not fit.*\[8, 4\]|box.*does not fit tensor .*w"), ({"w": np.s_[:, :, 0:1]}, "w"),
    ({"missing": np.s_[0:1]}, "missing"), ({"missing": np.s_[-1:]}, "missing"), ({"w": np.s_[-9:]}, "w begins before"),
    ({}, "has no box"), ({"w": 3}, "write 3:4"), ({"": np.s_[0:1]}, "pattern|glob|name|empty"),
])  # fmt: skip
def test_a_box_that_does_not_fit_is_refused_by_name(relay, client, boxes, words):
    relay.publish("t", {"w": np.zeros((8, 4))})
    with pytest.raises(RequestError, match=words):
        client.get("t", boxes=boxes)


def test_boxes_may_be_many(relay, client):
    """Ten thousand tensors that are cut alike are a few patterns; boxes that cannot be joined are at most 256."""
    relay.publish("t", {f"layers.{layer}.{name}": np.arange(4) + layer for layer in range(5_000) for name in ("q", "k")})
    snapshot = client.get("t", boxes=lambda name, *_: np.s_[0:1] if name.endswith("q") else np.s_[2:4])
    assert snapshot["layers.4321.q"].numpy().tolist() == [4321] and len(snapshot) == 10_000
    assert snapshot["layers.4321.k"].numpy().tolist() == [4323, 4324]
    with pytest.raises(RequestError, match="more than 256 of them"):
        client.get("t", boxes={f"layers.{layer}.q": np.s_[0:1] for layer in range(257)})


def test_boxes_of_four_bits_are_whole_bytes(relay, client):
    torch = pytest.importorskip("torch")
    whole = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
    relay.publish("t", {"w": whole.view(torch.float4_e2m1fn_x2)})

    @settings(max_examples=100)
    @given(seed=st.integers(0, 1 << 32))
    def check(seed):
        box = box_in((4, 12), seed)
        is_whole = all(number % 2 == 0 for number in (box.start[1], box.shape[1]))
        if is_whole or 0 in box.shape:
            tensor = client.get("t", boxes={"w": box})["w"]
            rows, columns = box.slices
            expected = whole.numpy()[rows, columns.start // 2 : columns.stop // 2] if 0 not in box.shape else np.zeros(0)
            assert tensor.shape == box.shape and bytes(memoryview(tensor.raw)) == expected.tobytes()
        else:
            with pytest.raises(RequestError, match="w.*whole bytes: widen it"):
                client.get("t", boxes={"w": box})

    check()


def test_a_version_of_boxes_is_saved(client, matrices, tmp_path):
    from safetensors.numpy import load_file

    client.get("t", boxes=slice_rows(1, 2)).save(tmp_path / "rank-1.safetensors")
    saved = load_file(tmp_path / "rank-1.safetensors")
    np.testing.assert_array_equal(saved["layers.0.w"], matrices["layers.0.w"][4:])


@ATOMIC
def test_boxes_follow_versions_as_deltas(relay, client, atomic):
    """Subscriptions keep their boxes: later versions are deltas to the box of the base."""
    random, whole = np.random.default_rng(1), np.zeros((512, 512), np.float32)
    out = {"w": np.zeros((64, 512), np.float32), "b": np.zeros(3)}
    with client.subscribe("t", boxes={"w": slice_rows(3, 8)}, out=out, atomic=atomic) as subscription:
        for version in range(1, 5):
            whole.flat[random.integers(0, whole.size, 100)] += 1
            relay.publish("t", {"w": whole, "b": np.full(3, float(version))})
            receipt = subscription.next(TIMEOUT_S).receipt
            np.testing.assert_array_equal(out["w"], whole[192:256])
            assert receipt.wanted_bytes == 64 * 512 * 4 + 24


def test_prefetch_and_activate_install_boxes(relay, client, matrices):
    out = {"layers.0.w": np.zeros((4, 4)), "layers.0.b": np.zeros(4), "scale": np.zeros(())}
    with client.subscribe("t", boxes=slice_rows(1, 2), out=out) as subscription:
        snapshot = subscription.prefetch(TIMEOUT_S)
        assert not out["layers.0.w"].any()
        subscription.activate(snapshot)
        np.testing.assert_array_equal(out["layers.0.w"], matrices["layers.0.w"][4:])
        snapshot = asyncio.run(client.get_async("t", boxes=slice_rows(0, 2)))
        client.install(snapshot, out)
        np.testing.assert_array_equal(out["layers.0.b"], matrices["layers.0.b"][:4])
        with pytest.raises(tensor_relay.TargetError, match="layers.0"):
            client.install(client.get("t"), out)


@pytest.mark.parametrize("cut", [slice_rows, slice_columns])
def test_memory_holds_the_boxes_alone(relay, client, cut):
    """Of a version that is held, and of one that is staged to be copied to `out`."""
    relay.publish("t", {"w": np.zeros((4096, 4096), np.uint8)})
    out = {"w": np.zeros((512, 4096) if cut is slice_rows else (4096, 512), np.uint8)}
    with client.subscribe("t", boxes=cut(1, 8), out=out) as subscription:
        snapshot = subscription.prefetch(TIMEOUT_S)
        assert snapshot["w"].nbytes <= client.stats()["snapshot_bytes"] < 3 << 20
        subscription.activate(snapshot)


def test_tied_tensors_are_cut_alike(relay, client):
    tied = np.arange(32.0).reshape(8, 4)
    relay.publish("t", {"embed": tied, "head": tied})
    snapshot = client.get("t", boxes=slice_rows(1, 4))
    np.testing.assert_array_equal(snapshot["embed"].numpy(), tied[2:4])
    np.testing.assert_array_equal(snapshot["head"].numpy(), tied[2:4])
    out = np.zeros((2, 4))
    client.get("t", boxes=slice_rows(1, 4), out={"embed": out, "head": out})
    np.testing.assert_array_equal(out, tied[2:4])


def test_chunks_without_a_byte_of_a_box_do_not_travel(relay, client):
    """One of eight ranks receives about an eighth of the bytes of rows, and is told what columns cost."""
    relay.publish("t", {"w": np.random.default_rng(1).integers(0, 256, (8192, 4096), np.uint8)})
    rows, columns = (client.get("t", boxes=cut(3, 8)).receipt for cut in (slice_rows, slice_columns))
    assert rows.wanted_bytes == columns.wanted_bytes == 4 << 20
    assert rows.received_bytes == 4 << 20 and rows.wire_bytes <= 0.135 * (32 << 20)
    assert columns.received_bytes == 32 << 20 and "4194304 bytes wanted of 33554432 received" in repr(columns)


@pytest.mark.parametrize("seed", range(6))
def test_boxes_survive_a_restart(tmp_path, seed):
    """Goal: after a lost connection and a restart of the relay, boxes arrive as if nothing had happened."""
    relay = tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path, chunk_bytes=1024)
    address = relay.address
    with tensor_relay.connect(relay.ticket) as client:
        whole = {f"t{index}": array((40, 33), dtype, seed + index) for index, dtype in enumerate(DTYPES)}
        boxes = {name: box_in((40, 33), seed + index) for index, name in enumerate(whole)}
        out = {name: np.zeros(box.shape, whole[name].dtype) for name, box in boxes.items()}
        subscription = client.subscribe("t", boxes=boxes, out=out, atomic=seed % 2 == 0)
        for round in range(3):
            whole = {name: array((40, 33), DTYPES[index], 100 * round + index) for index, name in enumerate(whole)}
            relay.publish("t", whole)
            subscription.next(TIMEOUT_S)
            for name, box in boxes.items():
                assert out[name].tobytes() == whole[name][box.slices].tobytes(), name
            relay.close(end=False)
            relay = serve_again(address, tmp_path)
    relay.close()


@pytest.mark.parametrize("seed", range(6))
def test_boxes_are_resumed_after_a_cut(tmp_path, seed):
    """Goal: a transfer that was cut in its midst goes on, and what arrives is the box.

    Method: the connection passes a part of the version, and is then closed."""
    whole = {name: np.random.default_rng(seed).integers(0, 256, (1024, 4096), np.uint8) for name in "ab"}
    with gated(tmp_path, stall_timeout=5.0) as (relay, client, gate):
        subscription = client.subscribe("t", boxes={"*": box_in((1024, 4096), seed + 7)})
        gate.close_after(200_000 * (seed + 1))
        relay.publish("t", whole)
        with pytest.raises(tensor_relay.RelayTimeoutError):
            subscription.next(0.5)
        gate.cut()
        snapshot = subscription.next(TIMEOUT_S)
        for name in whole:
            box = box_in((1024, 4096), seed + 7)
            assert same(snapshot[name], whole[name][box.slices]), name


def test_the_example_of_the_page_runs():
    page = (HERE.parents[1] / "docs" / "boxes.md").read_text()
    program = re.search(r"```python\n(# boxes.py.*?)```", page, re.DOTALL)[1]
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.returncode == 0, ran.stderr
    shown, total = ran.stdout.splitlines()
    assert f"# {shown}" in program and total == "288 bytes of 768"
