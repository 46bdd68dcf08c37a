"""`hold="borrow"`: memory that its owner writes, frees or moves although it is lent."""

import textwrap

import numpy as np
import pytest
from conftest import TIMEOUT_S, python

import tensor_relay

LARGE = 9 << 20  # Three chunks.


@pytest.fixture
def relay(tmp_path):
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path / "state", codec="raw") as relay:
        yield relay


def connect(relay):
    return tensor_relay.connect(relay.ticket, topic_timeout=1)


def noise(seed):
    return np.random.default_rng(seed).integers(0, 256, LARGE, np.uint8)


def assert_ended(relay, published, failure):
    """A subscriber hears that the publisher is the cause, and so does the publisher; the next version arrives."""
    with connect(relay) as client, pytest.raises(tensor_relay.TopicNotFoundError, match="publisher wrote to or freed"):
        client.get("t")
    with pytest.raises(tensor_relay.PublishError, match=failure):
        published.wait_committed(9, timeout=TIMEOUT_S)
    assert "first tensor there is w" in published.failure
    relay.publish("t", {"w": np.ones(3)})
    with connect(relay) as client:
        assert client.get("t")["w"].numpy().tolist() == [1, 1, 1]


def test_an_overwritten_version_ends_and_names_the_publisher(relay):
    """Goal: of a version that was received by one subscriber and overwritten then, another one receives nothing, and
    nobody blames the transfer."""
    weight = noise(1)
    published = relay.publish("t", {"w": weight}, hold="borrow")
    with connect(relay) as client:
        np.testing.assert_array_equal(client.get("t")["w"].numpy(), weight)
    assert published.failure is None
    weight[5 << 20] ^= 1
    assert_ended(relay, published, "wrote to memory that it had lent")


def test_memory_of_a_version_that_stays_on_offer_is_not_lent_again(relay):
    weight, other = noise(1), noise(2)
    relay.open("t", keep_versions=2)
    first = relay.publish("t", {"w": weight}, hold="borrow")
    for tensors in ({"again": weight}, {"x": other, "part": weight[1000:2000]}):
        with pytest.raises(tensor_relay.PublishError, match=r"tensor (again|part) lies in memory that t version 1 .* borrows"):
            relay.publish("t", tensors, hold="borrow")
    relay.publish("t", {"w": weight}, hold="stage")
    relay.publish("t", {"w": weight}, hold="borrow")  # `first` leaves retention for it.
    second = relay.publish("t", {"w": other}, hold="borrow")
    first.wait_released(TIMEOUT_S)
    with pytest.raises(tensor_relay.PublishError, match="tensor w lies in memory"):
        relay.publish("t", {"w": other[::1]}, hold="borrow")
    second.withdraw()
    relay.publish("t", {"w": other}, hold="borrow")
    relay.publish("alone", {"w": weight}, hold="borrow")
    relay.publish("alone", {"w": weight}, hold="borrow")
    other.flags.writeable = False  # As JAX's arrays, which versions may share.
    relay.open("constant", keep_versions=2)
    for _ in range(3):
        relay.publish("constant", {"w": other}, hold="borrow")


def test_borrowed_arrays_are_not_resized(relay):
    weight, base = np.ones(1000), np.ones(1000)
    published = relay.publish("t", {"w": weight, "part": base[10:20]}, hold="borrow")
    for array in (weight, base):
        with pytest.raises(ValueError, match="cannot resize"):
            array.resize(10, refcheck=False)
    relay.publish("t", {"w": np.ones(3)})
    published.wait_released(TIMEOUT_S)
    relay.publish("t", {"w": np.ones(4)})  # Lets the interpreter run the deferred release.
    for _ in range(100):
        try:
            weight.resize(10, refcheck=False)
            break
        except ValueError:
            with connect(relay) as client:
                client.get("t")
    assert weight.size == 10


FREED = """
    import sys, numpy as np, torch, tensor_relay

    def noise(length):
        return np.random.default_rng(1).integers(0, 256, length, np.uint8)

    {body}

    with tensor_relay.serve("127.0.0.1:0", state_dir=sys.argv[1], codec="raw") as relay:
        published = relay.publish("t", {{"w": tensor}}, hold="borrow")
        free()
        with tensor_relay.connect(relay.ticket, topic_timeout=1) as client:
            try:
                client.get("t")
            except tensor_relay.TopicNotFoundError as error:
                assert "publisher wrote to or freed" in str(error), error
            else:
                print("received")
        print(published.failure)
        relay.publish("t", {{"w": np.ones(3)}})
        with tensor_relay.connect(relay.ticket) as client:
            print(client.get("t")["w"].numpy().tolist())
"""


@pytest.mark.parametrize(
    "body",
    [
        # FSDP's resharding; small memory stays in the allocator, where other objects soon lie.
        "tensor = torch.from_numpy(noise(9 << 20)).clone(); free = lambda: tensor.untyped_storage().resize_(0)",
        "tensor = torch.from_numpy(noise(5000)).clone(); free = lambda: tensor.untyped_storage().resize_(0)",
        "tensor = torch.from_numpy(noise(5000)).clone(); free = lambda: tensor.resize_(9 << 20)",
        # Mapped files that become shorter.
        "path = sys.argv[1] + '.bin'; noise(9 << 20).tofile(path); tensor = np.memmap(path, np.uint8, 'r');"
        " free = lambda: open(path, 'wb').close()",
        "path = sys.argv[1] + '.bin'; noise(9 << 20).tofile(path);"
        " tensor = torch.from_file(path, shared=True, size=9 << 20, dtype=torch.uint8);"
        " free = lambda: open(path, 'wb').close()",
    ],
    ids=["resized", "resized-small", "grown", "memmap", "from-file"],
)
def test_freed_memory_ends_its_version_and_not_the_process(tmp_path, body):
    pytest.importorskip("torch")
    with python("-c", textwrap.dedent(FREED.format(body=body)), tmp_path / "state") as publisher:
        out, errors = publisher.communicate(timeout=2 * TIMEOUT_S)
        assert publisher.returncode == 0, (publisher.returncode, errors)
    failure, received = out.splitlines()
    assert "freed, moved or cut off memory that it had lent" in failure and "first tensor there is w" in failure
    assert received == "[1.0, 1.0, 1.0]"
