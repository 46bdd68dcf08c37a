"""`out`: versions received into existing tensors, such as a model's parameters."""

import re
import signal
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from conftest import TIMEOUT_S, gated, logged, python

import tensor_relay

ATOMIC = pytest.mark.parametrize("atomic", [True, False])


@ATOMIC
def test_versions_are_received_into_tensors(relay, client, atomic):
    out = {"x": np.zeros(1000), "b": np.zeros(7, ml_dtypes.bfloat16), "step": 3}
    addresses = {name: out[name].ctypes.data for name in ("x", "b")}
    subscription = client.subscribe("t", out=out, atomic=atomic, strict=False, timeout=TIMEOUT_S)
    for number in range(1, 4):
        sent = {"x": np.full(1000, number, float), "b": np.full(7, number, ml_dtypes.bfloat16), "other": np.zeros(9)}
        relay.publish("t", sent, metadata={"step": number})
        snapshot = next(subscription)
        assert (snapshot.version, len(snapshot), snapshot.metadata) == (number, 0, {"step": number})
        np.testing.assert_array_equal(out["x"], sent["x"])
        np.testing.assert_array_equal(out["b"], sent["b"])
    assert addresses == {name: out[name].ctypes.data for name in ("x", "b")}
    relay.end("t")
    assert list(subscription) == []


@ATOMIC
def test_a_model_follows_another(relay, client, atomic):
    torch = pytest.importorskip("torch")

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(50, 8)
            self.head = torch.nn.Linear(8, 50)
            self.head.weight = self.embed.weight

    trained, follower = Tied(), Tied()
    subscription = client.subscribe("t", out=follower.state_dict(), atomic=atomic)
    for _ in range(3):
        with torch.no_grad():
            trained.embed.weight.normal_()
        relay.publish("t", trained.state_dict())
        subscription.next(10)
        for name, tensor in trained.state_dict().items():
            assert torch.equal(tensor, follower.state_dict()[name]), name


@ATOMIC
@pytest.mark.parametrize("wrong, words", [
    ({"x": np.zeros((3, 2))}, "x"), ({"x": np.zeros((2, 3), np.int64)}, "x"), ({"x": np.zeros(5)}, "x"),
    ({"missing": np.zeros(3)}, "missing"),
])  # fmt: skip
def test_mismatched_tensors_are_refused_before_anything_is_written(relay, client, atomic, wrong, words):
    out = {"y": np.full(4, 5.0), **wrong}
    before = {name: array.copy() for name, array in out.items()}
    subscription = client.subscribe("t", out=out, atomic=atomic, select=["*"])
    relay.publish("t", {"x": np.ones((2, 3)), "y": np.ones(4)})
    with pytest.raises(tensor_relay.TargetError, match=words):
        subscription.next(10)
    for name, array in out.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    # The mismatched version is skipped. The next call uses the tensors that `out` has at that time.
    for name in wrong:
        del out[name]
    out["x"] = np.zeros((2, 3))
    relay.publish("t", {"x": np.ones((2, 3)), "y": np.ones(4)})
    assert subscription.next(10).version == 2
    assert out["x"].sum() == 6 and out["y"].sum() == 4


@ATOMIC
@pytest.mark.parametrize("mode", ["latest", "every"])
def test_the_version_after_a_mismatched_one_is_received(relay, client, atomic, mode):
    out = {"x": np.zeros(2)}
    relay.open("t", keep_versions=5)
    with client.subscribe("t", mode=mode, out=out, atomic=atomic) as subscription:
        for version, length in enumerate([2, 5, 2, 7, 2], 1):
            relay.publish("t", {"x": np.full(length, float(version))})
            if length == 2:
                assert (subscription.next(10).version, out["x"].tolist()) == (version, [version, version])
            else:
                message = f"t version {version} .* a subscription goes on with the next version"
                with pytest.raises(tensor_relay.TargetError, match=message):
                    subscription.next(10)
                assert out["x"].tolist() == [version - 1, version - 1]


@ATOMIC
def test_mismatches_name_dtype_and_shape(relay, client, atomic):
    relay.publish("t", {"bias": np.ones(3, ml_dtypes.bfloat16)})
    with pytest.raises(tensor_relay.TargetError, match=r"tensor bias is bf16 \[3\], and its buffer is for f32 \[3\]"):
        client.subscribe("t", out={"bias": np.zeros(3, np.float32)}, atomic=atomic).next(10)


@ATOMIC
@pytest.mark.parametrize("count", [1, 100])
def test_disjoint_names_are_refused(relay, client, atomic, count):
    relay.publish("t", {"module.weight": np.ones(3), "module.bias": np.ones(2)})
    out = {f"weight{index}": np.zeros(3) for index in range(count)}  # A request selects at most 64 names.
    subscription = client.subscribe("t", out=out, atomic=atomic, strict=False)
    message = r"has module\.weight, module\.bias, and the buffers are for weight0"
    with pytest.raises(tensor_relay.TargetError, match=message) as refused:
        subscription.next(10)
    assert "correct the names" in str(refused.value)


@ATOMIC
@pytest.mark.parametrize("out, words", [
    ({}, "no buffer for the version's tensors p, q;"), ({"p": np.zeros(3)}, "no buffer for the version's tensors q;"),
    ({"p": np.zeros(3), "q": 3.5}, "version's tensors q; q of `out` is no tensor"),
    ({"p": np.zeros(3), "q": np.zeros(2), "r": np.zeros(1)}, "no tensors, .* for the buffers r"),
    ({"p": np.zeros(3), "s": np.zeros(1)}, "version's tensors q; .* for the buffers s"),
])  # fmt: skip
def test_out_must_have_exactly_the_versions_tensors(relay, client, atomic, out, words):
    out = {name: np.zeros_like(value) if isinstance(value, np.ndarray) else value for name, value in out.items()}
    relay.publish("t", {"p": np.ones(3), "q": np.ones(2), "step": 7})
    subscription = client.subscribe("t", out=out, atomic=atomic)
    with pytest.raises(tensor_relay.TargetError, match=words):
        subscription.next(10)
    arrays = {name: value for name, value in out.items() if isinstance(value, np.ndarray)}
    assert not any(array.any() for array in arrays.values()), "nothing was written"
    client.subscribe("t", out=out, atomic=atomic, strict=False).next(10)
    assert {name for name, array in arrays.items() if array.all()} == arrays.keys() & {"p", "q"}


@ATOMIC
def test_what_strict_false_leaves_out_is_logged_once(relay, client, atomic, caplog):
    tied = np.ones(3)
    sent = {"p": np.ones(3), "q": np.ones(2), "embed": tied, "head": tied}
    out = {"p": np.zeros(3), "r": np.zeros(1), "head": np.zeros(3)}
    whole = {"p": np.zeros(3), "head": np.zeros(3)}
    with caplog.at_level("WARNING", "tensor_relay"):
        subscription = client.subscribe("t", out=out, atomic=atomic, strict=False)
        for version in range(1, 4):
            relay.publish("t", sent if version < 3 else sent | {"s": tied.copy()})
            subscription.next(TIMEOUT_S)
        first, last = logged(caplog, "part of t version 1"), logged(caplog, "part of t version 3")
        # Nothing is left out of the selected tensors, and `embed` is `head`.
        client.get("t", out=whole, atomic=atomic, select=["p", "head", "embed"], strict=False)
        relay.publish("end", sent)
        client.get("end", out=out, atomic=atomic, strict=False)
        logged(caplog, "part of end version 1")  # Messages arrive in order.
    assert sum("strict=False" in record.getMessage() for record in caplog.records) == 3
    assert "no buffer for the version's tensors q;" in first and "for the buffers r" in first
    assert "no buffer for the version's tensors q, s;" in last


@ATOMIC
def test_out_must_have_exactly_the_selected_tensors(relay, client, atomic):
    relay.publish("t", {"p": np.ones(3), "q": np.ones(2)})
    out = {"p": np.zeros(3)}
    client.subscribe("t", out=out, atomic=atomic, select=["p"]).next(10)
    assert out["p"].all()
    with pytest.raises(tensor_relay.TargetError, match="none that are selected, for the buffers p"):
        client.subscribe("t", out=out, atomic=atomic, select=["q"]).next(10)
    with pytest.raises(tensor_relay.RequestError, match="matches none"):
        client.subscribe("t", out=out, atomic=atomic, select=["typo*"], strict=False).next(10)


def test_tensors_that_share_memory_are_refused(client):
    base = np.zeros(24)
    overlapping = [
        {"a": base, "b": base[:3]}, {"a": base[:5], "b": base[4:]}, {"a": base, "b": base.reshape(4, 6)},
        {"a": base[::-1], "b": base[8:9]}, {"a": base.reshape(4, 6).T, "b": base[20:]},
        {"a": base[::2], "b": base[2::4]}, {"a": base, "b": base.view(np.int64)},
        {"a": base.reshape(4, 6)[:, :3], "b": base.reshape(4, 6)[:, 2:]},
    ]  # fmt: skip
    for out in overlapping:
        for ordered in (out, dict(reversed(out.items()))):
            with pytest.raises(tensor_relay.TargetError, match="of `out` share some of their memory"):
                client.subscribe("t", out=ordered)
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(10), 3, writeable=True)
    with pytest.raises(tensor_relay.TargetError, match="elements of a in `out` share memory.*receive into a contiguous"):
        client.subscribe("t", out={"a": windows})


def test_versions_are_received_into_disjoint_views_of_one_array(relay, client):
    columns, rows, every = np.zeros((4, 6)), np.zeros((4, 6)), np.zeros(9)
    out = {
        "left": columns[:, :2], "right": columns[:, 2:], "top": rows[:1], "transposed": rows[3:0:-1].T,
        "even": every[::2], "odd": every[1::2],
    }  # fmt: skip
    sent = {name: np.random.default_rng(1).normal(size=array.shape) for name, array in out.items()}
    relay.publish("t", sent)
    client.subscribe("t", out=out).next(10)
    for name, array in out.items():
        np.testing.assert_array_equal(array, sent[name], err_msg=name)


@ATOMIC
def test_a_tensor_under_two_names_needs_tied_weights(relay, client, atomic):
    one, tied = np.zeros(4), np.ones(4)
    out = {"embed": one, "head": one}
    relay.publish("t", {"embed": np.full(4, 2.0), "head": np.full(4, 3.0)})
    subscription = client.subscribe("t", out=out, atomic=atomic)
    with pytest.raises(tensor_relay.TargetError, match="head and embed have one buffer"):
        subscription.next(10)
    assert not one.any()
    relay.publish("u", {"embed": tied, "head": tied})
    client.subscribe("u", out=out, atomic=atomic).next(10)
    assert one.all()
    # Both names of the version are one tensor, so `out` needs only one of them.
    one[:] = 0
    client.subscribe("u", out={"head": one}, atomic=atomic).next(10)
    assert one.all()


@ATOMIC
def test_gradients_of_overwritten_values_are_refused(relay, client, atomic):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1, bias=False)
    frozen = torch.nn.Parameter(torch.ones(2))
    relay.publish("t", {"weight": np.full((1, 2), 10.0, np.float32), "frozen": np.ones(2, np.float32)})
    used = (model.weight * model.weight).sum()
    with torch.inference_mode():
        inference = torch.zeros(2)
    out = {**model.state_dict(), "frozen": frozen}
    subscription = client.subscribe("t", out=out, atomic=atomic)
    subscription.next(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.backward()
    (model.weight * model.weight).sum().backward()
    assert model.weight.grad.tolist() == [[20, 20]]
    relay.publish("u", {"weight": np.ones(2, np.float32)})
    client.subscribe("u", out={"weight": inference}, atomic=atomic).next(10)
    assert inference.tolist() == [1, 1]


def test_a_timeout_without_a_version_keeps_gradients(relay, client):
    torch = pytest.importorskip("torch")
    p = torch.nn.Parameter(torch.ones(2))
    used = (p * p).sum()
    with client.subscribe("t", out={"p": p}, atomic=False) as subscription:
        with pytest.raises(tensor_relay.RelayTimeoutError):
            subscription.next(0.01)
        used.backward()
    assert p.grad.tolist() == [2, 2]


@ATOMIC
def test_a_refused_version_keeps_gradients(relay, client, atomic):
    torch = pytest.importorskip("torch")
    p = torch.nn.Parameter(torch.ones(2))
    used = (p * p).sum()
    relay.publish("t", {"p": np.ones(3, np.float32)})
    with pytest.raises(tensor_relay.TargetError):
        client.subscribe("t", out={"p": p}, atomic=atomic).next(10)
    used.backward()
    assert p.grad.tolist() == [2, 2]


def test_the_error_for_an_unwritable_tensor_names_it(relay, client):
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    unaligned = np.zeros(25, np.uint8)[1:].view(np.float64)
    for value, words in [(frozen, "read-only"), (b"abc", "read-only"), ([1], "no tensor"), (unaligned, "aligned")]:
        with pytest.raises(tensor_relay.TargetError, match=f"weights.*{words}"):
            client.subscribe("t", out={"weights": value})
    jax = pytest.importorskip("jax")
    with pytest.raises(tensor_relay.TargetError, match="immutable"):
        client.subscribe("t", out={"weights": jax.numpy.zeros(3)})


def test_versions_are_received_into_strided_tensors(relay, client):
    base = np.zeros((4, 6))
    relay.publish("t", {"x": np.arange(12.0).reshape(6, 2)})
    client.subscribe("t", out={"x": base[::2].T}).next(10)
    np.testing.assert_array_equal(base[::2].T, np.arange(12.0).reshape(6, 2))
    assert base[1::2].sum() == 0
    with pytest.raises(tensor_relay.TargetError, match="use atomic=True, or receive into a contiguous tensor, and copy"):
        client.subscribe("t", out={"x": base[::2].T}, atomic=False).next(10)


def test_the_next_call_continues_after_a_timeout(relay, client):
    out = {"x": np.zeros(3)}
    with client.subscribe("t", out=out, atomic=False) as subscription:
        for _ in range(2):
            with pytest.raises(tensor_relay.RelayTimeoutError):
                subscription.next(0.01)
        subscription.acknowledge()
        relay.publish("t", {"x": np.ones(3)})
        assert subscription.next(10).version == 1 and out["x"].tolist() == [1, 1, 1]
        with pytest.raises(tensor_relay.RelayTimeoutError):
            subscription.next(0.01)


SIZE, GATE_BYTES = 32 << 20, 8 << 20


class Watched(dict):
    """A mapping that tells when its tensors are taken from it, right before they are lent."""

    def __init__(self, **tensors):
        super().__init__(tensors)
        self._takes = threading.Semaphore(0)

    def items(self):
        self._takes.release()
        return super().items()

    def wait_until_lent(self, calls):
        """Waits for this number of calls that receive or subscribe."""
        for _ in range(calls):
            assert self._takes.acquire(timeout=TIMEOUT_S)


def publish_once_lent(relay, out):
    """Publishes once the subscription, and then its first call, have taken the tensors."""

    def publish():
        out.wait_until_lent(2)
        relay.publish("t", {"x": np.ones(SIZE, np.uint8)})

    publisher = threading.Thread(target=publish)
    publisher.start()
    return publisher


def interrupt_main_thread():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.parametrize("how, error", [
    ("timeout", tensor_relay.RelayTimeoutError), ("interrupt", KeyboardInterrupt), ("close", tensor_relay.ClosedError),
    ("get", tensor_relay.RelayTimeoutError), ("iterate", tensor_relay.RelayTimeoutError),
    ("close client", tensor_relay.TensorRelayError),
])  # fmt: skip
@pytest.mark.parametrize("mode", ["latest", "every"])
def test_nothing_writes_after_a_call_that_ended_early(request, tmp_path, how, error, mode):
    """Goal: a call that ends during a transfer into the tensors says that they are torn, and nothing writes to them after
    it. The version is not lost: the next call returns it whole.

    Method: the path stops in the middle of the version. After the call, it opens again, and the tensors are compared
    once the client has received the version.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # It may have been inherited as ignored.
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, previous))
    with gated(tmp_path) as (relay, client, gate):
        sent = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
        out = Watched(x=np.zeros(SIZE, np.uint8))
        options = {} if how == "get" else {"mode": mode}
        end_call = {"close": lambda: subscription.close(), "close client": client.close}.get(how)

        def receive():
            if how == "get":
                return client.get("t", out=out, atomic=False, timeout=3)
            return next(subscription) if how == "iterate" else subscription.next(3 if how == "timeout" else TIMEOUT_S)

        if how != "get":
            subscription = client.subscribe("t", out=out, atomic=False, timeout=3, **options)
        references = sys.getrefcount(out["x"])
        gate.close_after(GATE_BYTES)

        def publish():
            nonlocal publication
            out.wait_until_lent(2)
            publication = relay.publish("t", {"x": sent})
            wait_until(gate.is_closed)
            if how == "interrupt":
                interrupt_main_thread()
            elif end_call is not None:
                end_call()

        publication = None
        publisher = threading.Thread(target=publish)
        publisher.start()
        expected = KeyboardInterrupt if how == "interrupt" else tensor_relay.TornError
        with pytest.raises(expected) as ended:
            receive()
        publisher.join()
        torn = ended.value.__cause__ if how == "interrupt" else ended.value
        assert isinstance(torn, tensor_relay.TornError) and torn.version == 1
        if how != "interrupt":
            assert isinstance(torn.__cause__, error)
        references_after = sys.getrefcount(out["x"])  # Not in an assertion, which would hold a reference.
        assert references_after == references, "the memory was returned"
        after = out["x"].copy()
        assert after.any() and not np.array_equal(after, sent)
        if how.startswith("close"):
            gate.open()
            return
        if how != "get":
            with pytest.raises(tensor_relay.TornError, match="t version 1") as again:
                subscription.next(0)
            assert isinstance(again.value.__cause__, tensor_relay.RelayTimeoutError)
            gate.open()
            publication.wait_committed(timeout=TIMEOUT_S)
            assert np.array_equal(out["x"], after), "received, and not written"
            assert subscription.next(TIMEOUT_S).version == 1
        else:
            gate.open()
            client.get("t", out=out, atomic=False)
        assert np.array_equal(out["x"], sent)


@pytest.mark.parametrize("mode", ["latest", "every"])
def test_a_version_that_is_whole_when_its_call_is_interrupted_is_returned_by_the_next_call(request, tmp_path, mode):
    """Method: the path stops in the middle of the version; the signal handler lets the rest pass, and raises once the
    client has received it."""

    def interrupted(*_):
        gate.open()
        publications[0].wait_committed(timeout=TIMEOUT_S)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupted)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, previous))
    with gated(tmp_path) as (relay, client, gate):
        out, publications = Watched(x=np.zeros(SIZE, np.uint8)), []
        with client.subscribe("t", out=out, atomic=False, mode=mode) as subscription:
            gate.close_after(GATE_BYTES)

            def publish():
                out.wait_until_lent(2)
                publications.append(relay.publish("t", {"x": np.ones(SIZE, np.uint8)}))
                wait_until(gate.is_closed)
                interrupt_main_thread()

            publisher = threading.Thread(target=publish)
            publisher.start()
            with pytest.raises(KeyboardInterrupt) as interrupt:
                subscription.next(TIMEOUT_S)
            publisher.join()
            assert interrupt.value.__cause__ is None and out["x"].all()
            assert re.search("`out` has t version 1 .*, whole", "".join(interrupt.value.__notes__))
            subscription.acknowledge()  # Not of the version that was not returned.
            assert subscription.next(0).version == 1
            subscription.acknowledge()
            relay.publish("t", {"x": np.zeros(SIZE, np.uint8)})
            assert subscription.next(TIMEOUT_S).version == 2 and not out["x"].any()


def test_get_that_is_interrupted_says_which_version_out_has(request, tmp_path):
    """Method: as above, for a call whose subscription ends with it."""

    def interrupted(*_):
        gate.open()
        publication.wait_committed(timeout=TIMEOUT_S)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupted)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, previous))
    with gated(tmp_path) as (relay, client, gate):
        out, publication = {"x": np.zeros(SIZE, np.uint8)}, relay.publish("t", {"x": np.ones(SIZE, np.uint8)})
        gate.close_after(GATE_BYTES)

        def interrupt_midway():
            wait_until(gate.is_closed)
            interrupt_main_thread()

        threading.Thread(target=interrupt_midway).start()
        with pytest.raises(KeyboardInterrupt) as interrupt:
            client.get("t", out=out, atomic=False)
        assert out["x"].all() and re.search("`out` has t version 1 .*, whole", "".join(interrupt.value.__notes__))


@ATOMIC
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_is_not_a_tensors_fault_is_raised_as_it_is(relay, client, atomic, error):
    """Method: the signal arrives while the tensors of `out` are lent."""

    class Interrupted:
        def __dlpack__(self, **_):
            raise error

        def __dlpack_device__(self):
            return 1, 0

    with pytest.raises(error):
        client.subscribe("t", out={"x": Interrupted()}, atomic=atomic)


def test_memory_may_be_freed_after_a_timeout(tmp_path):
    torch = pytest.importorskip("torch")
    with gated(tmp_path) as (relay, client, gate):
        out = Watched(x=torch.zeros(SIZE, dtype=torch.uint8))
        with client.subscribe("t", out=out, atomic=False) as subscription:
            gate.close_after(GATE_BYTES)
            publisher = publish_once_lent(relay, out)
            with pytest.raises(tensor_relay.TornError):
                subscription.next(2)
            out["x"].untyped_storage().resize_(0)
            gate.open()
            publisher.join()
            wait_until(lambda: subscription.progress().verified_bytes == SIZE)
            out["x"] = torch.zeros(SIZE, dtype=torch.uint8)
            assert subscription.next(TIMEOUT_S).version == 1 and out["x"].all()
            relay.end("t")
            assert list(subscription) == []


def test_the_end_of_a_topic_does_not_hide_torn_tensors(tmp_path):
    with gated(tmp_path) as (relay, client, gate):
        out = Watched(x=np.zeros(SIZE, np.uint8))
        with client.subscribe("t", out=out, atomic=False) as subscription:
            gate.close_after(GATE_BYTES)
            publisher = publish_once_lent(relay, out)
            with pytest.raises(tensor_relay.TornError):
                subscription.next(2)
            publisher.join()
            subscription.close()
            with pytest.raises(tensor_relay.TornError, match="t version 1") as torn:
                list(subscription)
            assert isinstance(torn.value.__cause__, tensor_relay.ClosedError)


def test_a_version_that_is_withdrawn_after_a_timeout_is_not_waited_for(tmp_path):
    with gated(tmp_path, topic_timeout=1) as (relay, client, gate):
        out = Watched(x=np.zeros(SIZE, np.uint8))
        with client.subscribe("t", out=out, atomic=False) as subscription:
            gate.close_after(GATE_BYTES)
            publisher = publish_once_lent(relay, out)
            with pytest.raises(tensor_relay.TornError):
                subscription.next(2)
            publisher.join()
            relay.withdraw("t")
            gate.open()
            # The server may have begun to send the version again before it was withdrawn; then it arrives.
            with pytest.raises((tensor_relay.TornError, StopIteration)) as ended:
                while True:
                    next(subscription)
            assert isinstance(ended.value, tensor_relay.TornError) != out["x"].all()


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return True


def test_a_failed_transfer_reports_torn_tensors(tmp_path):
    """Goal: when a producer stalls during a transfer, tensors are unchanged with atomic=True, and TornError reports
    incomplete ones with atomic=False.

    Method: the producer publishes after the tensors were lent. Its process is stopped after the first bytes have
    arrived, and the client gives the transfer up after a second.
    """
    program = tmp_path / "producer.py"
    program.write_text(
        "import sys, tensor_relay, numpy\n"
        "relay = tensor_relay.serve('127.0.0.1:0', state_dir=sys.argv[1])\n"
        "print(relay.ticket)\n"
        "sys.stdin.readline()\n"
        "relay.publish('t', {'x': numpy.ones(256 << 20, numpy.uint8)}, hold='borrow')\n"
        "sys.stdin.read()\n"
    )
    outcomes = set()
    for atomic in (True, False):
        with python(program, tmp_path / "state") as producer:
            ticket = producer.stdout.readline().strip()
            out = Watched(x=np.zeros(256 << 20, np.uint8))
            with tensor_relay.connect(ticket, stall_timeout=1) as client:
                subscription = client.subscribe("t", out=out, atomic=atomic)

                def stop_midway():
                    out.wait_until_lent(1 if atomic else 2)
                    producer.stdin.write("\n")
                    producer.stdin.flush()
                    wait_until(lambda: subscription.progress().verified_bytes > 0)
                    producer.send_signal(signal.SIGSTOP)

                threading.Thread(target=stop_midway).start()
                with pytest.raises(tensor_relay.TensorRelayError) as failed:
                    subscription.next(TIMEOUT_S)
            outcomes.add(type(failed.value))
            if atomic:
                assert isinstance(failed.value, ConnectionError) and not out["x"].any()
            else:
                assert failed.value.version == 1 and isinstance(failed.value.__cause__, ConnectionError)
                assert out["x"].any() and not out["x"].all()
    assert outcomes == {tensor_relay.ServerUnreachableError, tensor_relay.TornError}


def test_a_coroutine_copies_without_holding_the_event_loop(relay, client):
    """Method: the event loop takes turns between the moment when the tensors of `out` are taken, and the end of the copy.
    A coroutine that is cancelled in between ends with whole tensors, and loses no version."""
    import asyncio

    async def run(begin, takes):
        turns, taken_at = 0, []

        class Observed(dict):
            def items(self):
                taken_at.append(turns)
                if cancels and len(taken_at) == takes:
                    asyncio.get_running_loop().call_soon(task.cancel)
                return super().items()

        async def count():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        out, cancels = Observed(x=np.zeros(1 << 20, np.uint8)), False
        counting = asyncio.create_task(count())
        receive = begin(out)
        taken_at.clear()
        cancels = True
        task = asyncio.create_task(receive())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert out["x"].all(), "nothing writes after the end of a coroutine"
        out["x"][:], cancels = 0, False
        assert (await receive()).version == 1 and out["x"].all()
        assert turns > taken_at[-1]
        counting.cancel()

    def subscribed(out):
        return client.subscribe("t", out=out).next_async

    def getting(out):
        return lambda: client.get_async("t", version, out=out)

    relay.publish("t", {"x": np.ones(1 << 20, np.uint8)})
    for begin, version, takes in [(subscribed, None, 1), (getting, None, 2), (getting, 1, 2)]:
        asyncio.run(run(begin, takes))


def test_coroutines_cannot_receive_in_place(client):
    import asyncio

    async def wait():
        await client.subscribe("t", out={"x": np.zeros(3)}, atomic=False).next_async()

    with pytest.raises(tensor_relay.RequestError, match="to_thread"):
        asyncio.run(wait())
