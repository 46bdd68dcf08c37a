"""`Relay.publish`: staged and borrowed tensors, tied weights, entries and metadata, and the end of topics."""

import collections
import gc
import json
import weakref

import numpy as np
import pytest
from conftest import HERE, TIMEOUT_S, python, received, wait_for_exit

import tensor_relay


class Exporter:
    """A tensor of an unknown framework: exports an array by DLPack, and claims to be on any device."""

    def __init__(self, array, device=(1, 0), supports_dlpack_versions=True):
        self.array, self.device, self.supports_dlpack_versions = array, device, supports_dlpack_versions

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if options and not self.supports_dlpack_versions:
            raise TypeError("unexpected keyword argument")
        return self.array.__dlpack__(**options)


def test_strided_tensors_are_gathered(relay, client):
    base = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)
    views = {
        "transposed": base.T, "stepped": base[::2, 1::3], "backwards": base[:, ::-1], "last": base[..., -1],
        "broadcast": np.broadcast_to(np.float32(3), (2, 5)), "swapped": base.transpose(1, 0, 2),
    }  # fmt: skip
    for hold in ("stage", "borrow"):
        published = relay.publish("t", views, hold=hold)
        got = received(client).numpy()
        for name, view in views.items():
            np.testing.assert_array_equal(got[name], view, err_msg=name)
        if hold == "borrow":
            assert published.copied_bytes == sum(view.nbytes for view in views.values())


def test_large_tensors_are_copied_in_pieces(relay, client):
    """Goal: threads that copy pieces of a tensor copy each byte once, wherever its rows begin and end."""
    base = np.arange(2100 * 2100, dtype=np.float32).reshape(2100, 2100)
    views = {"dense": base, "transposed": base.T, "rows": base[:, 1:], "columns": base[:, ::2], "small": base[:1, :1]}
    relay.publish("t", views)
    base[:] = 0  # The publish has ended, so no thread reads it any more.
    got = received(client).numpy()
    base[:] = np.arange(base.size, dtype=np.float32).reshape(base.shape)
    for name, view in views.items():
        np.testing.assert_array_equal(got[name], view, err_msg=name)


@pytest.mark.parametrize("hold", ["stage", "borrow"])
def test_split_tensors_arrive_whole(relay, client, hold):
    """Goal: tensors that are cut into pieces arrive as they were, also tied, strided and unfitting ones."""
    weight = np.arange(300 * 500, dtype=np.float32).reshape(300, 500)
    tensors = {
        "layers.0.o_proj.weight": weight, "tied": weight, "layers.1.o_proj.weight": weight.T,
        "layers.0.o_proj.bias": weight[0], "short": weight[:, :3], "norm": np.float32(7),
    }  # fmt: skip
    for split in [{"**.weight": (1, 8), "**": (0, 7)}, "tensor-parallel", "**=1/4"]:
        relay.publish("t", tensors, hold=hold, split=split)
        got = received(client).numpy()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(got[name], tensor, err_msg=f"{name}, {split}")


def test_a_split_that_does_not_fit_is_refused_by_name(relay):
    weight = {"w": np.zeros((4, 6), np.float32)}
    for split, message in [
        ({"w": (2, 2)}, "tensor w of shape .4, 6. cannot be split into 2 parts of dimension 2"),
        ({"w": (1, 7)}, "tensor w"),
        ({"v": (0, 2)}, "no tensor v"),
    ]:
        with pytest.raises(tensor_relay.PublishError, match=message):
            relay.publish("t", weight, split=split)
    for split in [{"w": (1, 0)}, {"w": (-1, 2)}, {"w": 2}, {"w": (1, 2, 3)}, 5, "w=1", [("w", (1, 2))]]:
        with pytest.raises(tensor_relay.RequestError, match="split"):
            relay.publish("t", weight, split=split)


def test_the_publish_pause_example_works():
    path = HERE.parent / "examples" / "publish_pause.py"
    with python(path, "--bytes", 1 << 20, "--tensors", 3, "--rounds", 4, "--subscribe", "--pause", 0) as program:
        report = json.loads(wait_for_exit(program))
    assert (report["tensors"], len(report["ratios"])) == (3, 4) and min(report["ratios"]) > 0


def test_tied_weights_are_sent_once(relay, client):
    weight = np.random.default_rng(1).normal(size=(100, 100)).astype(np.float32)
    tensors = {"embed": weight, "head": weight, "transposed": weight.T, "part": weight[:50], "other": weight.copy()}
    published = relay.publish("t", tensors)
    got = received(client)
    # The transposed and the partial view are not tied to the whole one: they are sent separately, as the copy is.
    assert published.payload_bytes == pytest.approx(40_000 * 3 + 20_000, abs=4 * 256)
    arrays = got.numpy()
    address = {name: array.ctypes.data for name, array in arrays.items()}
    assert address["embed"] == address["head"]
    assert len(set(address.values())) == 4
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(arrays[name], tensor)
    # Tied weights stay tied after a cast.
    relay.publish("t", {"embed": weight, "head": weight}, dtype="bf16")
    got = received(client)
    assert got.payload_bytes < 21_000 and got["embed"].dtype == got["head"].dtype == "bf16"


def test_a_staged_version_is_a_copy(relay, client):
    weight = np.ones(1000)
    published = relay.publish("t", {"w": weight})
    weight[:] = 7
    assert published.released
    published.wait_released(0)
    np.testing.assert_array_equal(received(client)["w"].numpy(), np.ones(1000))


def test_a_borrowed_version_is_not_copied(relay, client):
    weight = np.ones(10 << 20, np.uint8)
    weight_ref = weakref.ref(weight)
    published = relay.publish("t", {"w": weight, "tied": weight}, hold="borrow")
    assert (published.copied_bytes, relay.stats()["staged_bytes"]) == (0, 0)
    np.testing.assert_array_equal(received(client)["w"].numpy(), weight)
    assert not published.released
    with pytest.raises(tensor_relay.RelayTimeoutError, match="until another is published or it is withdrawn"):
        published.wait_released(0.01)
    del weight
    gc.collect()
    assert weight_ref() is not None, "the relay keeps borrowed tensors"
    relay.publish("t", {"w": np.zeros(3)})
    published.wait_released()
    assert published.released
    relay.publish("t", {"w": np.zeros(4)})  # Lets the interpreter run the deferred release.
    for _ in range(100):
        if weight_ref() is None:
            break
        received(client)
    assert weight_ref() is None, "the relay releases borrowed tensors"


def test_entries_and_metadata_are_received(relay, client):
    entries = {"step": 12, "lr": 1e-3, "name": "größe", "done": False, "best": None, "big": 1 << 80}
    relay.publish("t", {"w": np.zeros(3), **entries}, metadata={"run": "a", "epoch": 4, "loss": 0.5})
    got = received(client)
    assert got.entries == entries and type(got.entries["done"]) is bool
    assert got.metadata == {"run": "a", "epoch": 4, "loss": 0.5}
    assert list(got) == ["w"] and "step" not in got
    with pytest.raises(tensor_relay.RequestError, match="call it something else"):
        relay.publish("t", {}, metadata={"tensor_relay.entry:a": "1"})
    with pytest.raises(tensor_relay.PublishError, match="publish it as a tensor"):
        relay.publish("t", {"w": np.zeros(3), "note": "x" * 100_000})
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="tensors have names"):
        relay.publish("t", {1: np.zeros(3)})


def test_pytorch_modules_are_published(relay, client):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    relay.publish("t", dict(model.named_parameters()))  # These require grad.
    assert received(client)["0.weight"].shape == (7, 5)
    relay.publish("t", model.state_dict())
    other = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    other.load_state_dict(received(client).torch())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    lazy = torch.complex(torch.ones(3), torch.ones(3)).conj()
    relay.publish("t", {"lazy": lazy})
    assert torch.equal(received(client)["lazy"].torch(), lazy.resolve_conj())
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="sparse"):
        relay.publish("t", {"sparse": torch.eye(3).to_sparse()})


def test_tensors_of_unknown_frameworks_are_published(relay, client):
    array = np.arange(5)
    relay.publish("t", {"new": Exporter(array), "old": Exporter(array + 1, supports_dlpack_versions=False)})
    got = received(client).numpy()
    assert got["new"].tolist() == [0, 1, 2, 3, 4] and got["old"].tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(tensor_relay.UnsupportedTensorError, match=r"weights.*Metal.*a copy on the host"):
        relay.publish("t", {"weights": Exporter(array, device=(8, 0))})


def test_elements_behind_pointers_are_refused(relay):
    testbuffer = pytest.importorskip("_testbuffer", reason="CPython's tests are not installed")
    rows = testbuffer.ndarray(list(range(6)), shape=[2, 3], flags=testbuffer.ND_PIL)
    assert memoryview(rows).suboffsets
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="suboffsets"):
        relay.publish("t", {"x": rows})


def test_read_only_arrays_are_published(relay, client):
    array = np.arange(5)
    array.flags.writeable = False
    relay.publish("t", {"x": array}, hold="borrow")
    assert received(client)["x"].numpy().tolist() == [0, 1, 2, 3, 4]


def test_from_dlpack_with_copy_is_independent(relay, client):
    relay.publish("t", {"x": np.arange(5)})
    tensor = received(client)["x"]
    shared, copied = np.from_dlpack(tensor), np.from_dlpack(tensor, copy=True)
    copied[:] = 9
    assert shared.tolist() == [0, 1, 2, 3, 4]
    shared[0] = 7
    assert tensor.numpy()[0] == 7
    with pytest.raises(BufferError, match="host"):
        tensor.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="stream"):
        tensor.__dlpack__(stream=1)


GETS = """
import sys, tensor_relay
for _ in range(2):
    with tensor_relay.connect(sys.argv[1]) as client:
        for _ in range(2):
            client.get("t")
        client.get("t", 1)
"""


def test_clients_may_count_alone(relay):
    published = relay.publish("t", {"x": np.zeros(3)})
    for expected, consumer in [(1, "process"), (1, "process"), (2, "client"), (3, "client")]:
        with tensor_relay.connect(relay.ticket, consumer=consumer) as client:
            client.get("t")
        published.wait_committed(expected, timeout=TIMEOUT_S)
        assert published.committed == expected
    with pytest.raises(tensor_relay.RequestError, match='consumer is "thread"'):
        tensor_relay.connect(relay.ticket, consumer="thread")


def test_consumers_are_counted_once(tmp_path, relay):
    """However often a process receives a version, it is one consumer; so is a named reader, whatever its process. A
    description is none, and a stream is one when it is complete."""
    published = relay.publish("t", {f"x{each}": np.zeros(3 << 20, np.uint8) for each in range(3)})
    for processes in (1, 2):
        program = tmp_path / "gets.py"
        program.write_text(GETS)
        with python(program, relay.ticket) as consumer:
            wait_for_exit(consumer)
        published.wait_committed(processes, timeout=TIMEOUT_S)
        with pytest.raises(tensor_relay.RelayTimeoutError):
            published.wait_committed(processes + 1, timeout=0.1)
    with tensor_relay.connect(relay.ticket) as client, tensor_relay.connect(relay.ticket) as other:
        for each in (client, other):
            for _ in range(2):
                with each.subscribe("t", mode="every", reader="evaluation") as subscription:
                    subscription.next(TIMEOUT_S)
        published.wait_committed(3, timeout=TIMEOUT_S)
        client.describe("t")
        stream = client.stream("t", bucket_bytes=1)
        next(stream)
        client.topics()  # The server has handled what came before.
        assert published.committed == 3
        list(stream)
        published.wait_committed(4, timeout=TIMEOUT_S)
        received(client), received(other)
        client.topics(), other.topics()
        assert published.committed == 4


def test_topics_are_ended_and_withdrawn(relay, client):
    first = relay.publish("t", {"x": np.zeros(3)})
    second = relay.publish("t", {"x": np.ones(3)})
    assert (first.version, second.version, first.epoch) == (1, 2, second.epoch)
    (topic,) = client.topics()
    assert (topic.topic, topic.version, topic.tensors) == ("t", 2, 1)
    subscription = client.subscribe("t")
    assert [snapshot.version for snapshot in [subscription.next(10)]] == [2]
    second.wait_committed()
    assert second.committed == 1
    with pytest.raises(tensor_relay.PublishError, match="no more can"):
        first.wait_committed(timeout=10)
    relay.end("t")
    assert list(subscription) == []
    with pytest.raises(tensor_relay.TopicEndedError):
        subscription.next(10)
    relay.end("t")  # Ending an ended topic does nothing.
    assert [topic.version for topic in client.topics()] == [2]
    third = relay.publish("t", {"x": np.ones(3)})
    assert third.epoch != first.epoch
    relay.withdraw("t")
    assert client.topics() == []
    relay.end("t")
    relay.withdraw("t")
    for end_or_withdraw in (relay.end, relay.withdraw):
        with pytest.raises(tensor_relay.PublishError, match="never published"):
            end_or_withdraw("never")


def test_an_ended_topic_can_be_withdrawn(relay, client):
    relay.publish("t", {"x": np.zeros(3)})
    relay.end("t")
    assert len(client.topics()) == 1, "it stays on offer"
    relay.withdraw("t")
    assert client.topics() == []


def test_a_topic_can_be_opened_once(relay):
    with pytest.raises(tensor_relay.PublishError, match="already has a publisher"):
        relay.open("u")
        relay.open("u")


def test_exceeding_staged_bytes_raises(tmp_path):
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path, staged_bytes=1 << 20) as relay:
        with pytest.raises(tensor_relay.NoRoomError) as refused:
            relay.publish("t", {"x": np.zeros(1 << 20)})
        assert isinstance(refused.value, MemoryError)
        relay.publish("t", {"x": np.zeros(1 << 20)}, hold="borrow")


def test_tensors_at_a_reused_address_are_not_tied(relay, client):
    """Goal: a cast frees the memory that it read, so the allocator may reuse its address for the next tensor. Both
    tensors must not be taken for tied.

    Method: scalars and unaligned arrays cannot lend memory, so each is copied, one at a time. Objects that allocate
    their memory during the export behave the same.
    """

    class LazilyAllocated:
        def __init__(self, value):
            self.value = value

        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **options):
            return np.full(1000, self.value).__dlpack__(**options)

        def astype(self, dtype):
            return np.full(1000, self.value, dtype)

    def unaligned(value):
        return np.frombuffer(b"." + np.float64(value).tobytes() * 9, np.uint8)[1:].view(np.float64)

    for make in (np.float64, LazilyAllocated, unaligned):
        tensors = {str(value): make(value) for value in range(20)}
        relay.publish("t", tensors, dtype="f32")
        got = received(client)
        values = {name: float(tensor.numpy().flat[0]) for name, tensor in got.items()}
        assert values == {name: float(name) for name in tensors}
    weight = np.ones(1000)
    assert relay.publish("t", {"a": weight, "tied": weight}, dtype="f32").payload_bytes < 2 * 4000


def test_a_list_is_named_by_its_indices(relay, client):
    sent = [np.full(3 + i, i, "f4") for i in range(12)]
    sent[4] = sent[1]  # Tied, as in a mapping.
    for tensors in (sent, tuple(sent)):
        relay.publish("t", tensors)
        snapshot = client.get("t")
        assert list(snapshot) == [str(i) for i in range(12)], "in list order, and not sorted by name"
        assert all(np.array_equal(*each) for each in zip(snapshot.numpy().values(), sent, strict=True))
    relay.publish("t", [sent[0], "text", 7])
    assert (list(client.get("t")), client.get("t").entries) == (["0"], {"1": "text", "2": 7})


@pytest.mark.parametrize("atomic", [True, False])
def test_a_list_is_received_into_a_list(relay, client, atomic):
    relay.publish("t", [np.arange(5.0), np.ones((2, 2), "i4")])
    out = [np.zeros(5), np.zeros((2, 2), "i4")]
    assert client.get("t", out=out, atomic=atomic).version == 1
    assert np.array_equal(out[0], np.arange(5.0)) and np.array_equal(out[1], np.ones((2, 2)))
    client.install(client.get("t"), {"0": out[0], "1": out[1]})  # A mapping with the same names works, too.
    with pytest.raises(tensor_relay.TargetError, match="1 of `out`|shape"):
        client.get("t", out=out[::-1], atomic=atomic)
    with pytest.raises(tensor_relay.TargetError):
        client.get("t", out=out[:1], atomic=atomic)


def test_other_sequences_are_refused(relay):
    state = collections.namedtuple("State", "mean var")
    generator = (each for each in [np.ones(1)])
    for value in (state(np.ones(1), np.ones(1)), {np.float32(1)}, generator, np.ones(3), b"bytes", "text"):
        with pytest.raises(tensor_relay.UnsupportedTensorError, match="a list of tensors"):
            relay.publish("t", value)
    with pytest.raises(tensor_relay.UnsupportedTensorError, match=r"tensor 1 \(list\)"):
        relay.publish("t", [np.ones(1), [np.ones(1)]])
    relay.publish("t", [], allow_empty=True)  # Equals an empty mapping.


def test_a_nested_dictionary_is_refused_with_a_remedy(relay):
    nested = {"state": {0: {"exp_avg": np.zeros(3)}}}
    message = r"state \(dict\): .*flatten it, to names like `state\.0\.exp_avg`"
    with pytest.raises(tensor_relay.UnsupportedTensorError, match=message):
        relay.publish("t", nested)
    endless = {}
    endless["again"] = endless
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="flatten it"):
        relay.publish("t", endless)


def test_a_version_without_tensors_must_be_asked_for(relay, client):
    """Where PyTorch gathers a sharded model, all ranks but one have an empty dictionary."""
    relay.publish("t", {"x": np.ones(3)})
    for empty in ({}, [], {"step": 3}):
        with pytest.raises(tensor_relay.PublishError, match="no tensors.*publish from rank 0 alone; allow_empty=True"):
            relay.publish("t", empty, metadata={"step": 3})
    with pytest.raises(tensor_relay.PublishError, match="no tensors"):
        relay.publish("other", {})
    assert [topic.topic for topic in client.topics()] == ["t"] and client.get("t").version == 1
    relay.publish("t", {"step": 3}, allow_empty=True)
    assert (len(client.get("t")), client.get("t").entries) == (0, {"step": 3})


def test_publishers_wait_until_a_version_is_loaded(relay):
    """Each consumer says once that it uses a version, in its own memory or in `out`, also after its subscription."""
    published = relay.publish("t", {"x": np.ones(3)})
    with (
        tensor_relay.connect(relay.ticket) as one,
        tensor_relay.connect(relay.ticket, consumer="client") as two,
    ):
        got = one.get("t")
        with two.subscribe("t", out={"x": np.zeros(3)}) as subscription:
            filled = subscription.next(TIMEOUT_S)
        published.wait_committed(2, timeout=TIMEOUT_S)
        with pytest.raises(tensor_relay.RelayTimeoutError, match="0 of 1 consumers loaded"):
            published.wait_loaded(timeout=0.1)
        got.loaded(), got.loaded()
        published.wait_loaded(timeout=TIMEOUT_S)
        filled.loaded()
        published.wait_loaded(2, timeout=TIMEOUT_S)
        assert published.loaded == 2
        for _ in range(16):
            relay.publish("t", {"x": np.ones(3)})
        with pytest.raises(tensor_relay.PublishError, match="later versions only"):
            published.wait_loaded(3, timeout=TIMEOUT_S)
