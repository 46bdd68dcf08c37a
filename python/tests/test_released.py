"""`Publication.on_released`: callbacks run once the publisher may reuse its memory, on a thread of their own."""

import asyncio
import gc
import logging
import queue
import threading
import weakref

import numpy as np
import pytest
from conftest import TIMEOUT_S, python, wait_for_exit

import tensor_relay


def publish_borrowed(relay, number, topic="t"):
    return relay.publish(topic, {"x": np.full(100_000, number, "f4")}, hold="borrow")


def test_a_callback_runs_when_borrowed_memory_is_released(relay, client):
    called = queue.SimpleQueue()
    first = publish_borrowed(relay, 1)
    assert client.get("t").version == 1
    first.on_released(lambda publication: called.put((publication, publication.released)))
    with pytest.raises(queue.Empty):
        called.get(timeout=0.3)  # The newest version stays borrowed.
    publish_borrowed(relay, 2)
    publication, released = called.get(timeout=TIMEOUT_S)
    assert publication is first and released
    assert called.empty()


def test_a_callback_of_a_staged_version_runs_at_once(relay):
    called = queue.SimpleQueue()
    published = relay.publish("t", {"x": np.zeros(3)})
    published.on_released(called.put)
    assert called.get(timeout=TIMEOUT_S) is published
    published.on_released(called.put)
    published.on_released(called.put)  # Each registration is called.
    assert [called.get(timeout=TIMEOUT_S) for _ in range(2)] == [published] * 2


def test_withdrawing_and_closing_release(tmp_path):
    called = queue.SimpleQueue()
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path) as relay:
        for topic in ("a", "b"):
            publish_borrowed(relay, 1, topic).on_released(lambda publication: called.put(publication.topic))
        relay.withdraw("a")
        assert called.get(timeout=TIMEOUT_S) == "a"
    assert called.get(timeout=TIMEOUT_S) == "b"


def test_a_blocking_callback_blocks_nothing_else(relay, client):
    begun, unblock, threads = threading.Event(), threading.Event(), []

    def block(publication):
        threads.append(threading.current_thread())
        begun.set()
        assert unblock.wait(TIMEOUT_S)

    relay.publish("t", {"x": np.zeros(3)}).on_released(block)
    assert begun.wait(TIMEOUT_S)
    # Transfers, the release of memory, and coroutines continue.
    first = publish_borrowed(relay, 1, "other")
    publish_borrowed(relay, 2, "other")
    first.wait_released(TIMEOUT_S)
    assert asyncio.run(asyncio.wait_for(client.get_async("other"), TIMEOUT_S)).version == 2
    called = queue.SimpleQueue()
    first.on_released(called.put)
    assert called.empty(), "callbacks run one after the other"
    unblock.set()
    assert called.get(timeout=TIMEOUT_S) is first
    assert threads[0] is not threading.main_thread() and threads[0].daemon


def test_an_exception_is_logged_and_later_callbacks_run(relay, caplog):
    called = queue.SimpleQueue()
    published = relay.publish("t", {"x": np.zeros(3)})

    def fail(publication):
        raise ValueError("that was wrong")

    with caplog.at_level(logging.ERROR, logger="tensor_relay"):
        published.on_released(fail)
        published.on_released(lambda publication: exit(3))
        published.on_released(called.put)
        assert called.get(timeout=TIMEOUT_S) is published
    (record,) = caplog.records
    assert "fail" in record.getMessage() and record.exc_info[0] is ValueError
    with pytest.raises(TypeError, match="callable"):
        published.on_released(3)


def test_finished_callbacks_are_freed(relay):
    class Callback:
        done = threading.Event()

        def __call__(self, publication):
            self.done.set()

    callback = Callback()
    callback_ref = weakref.ref(callback)
    publish_borrowed(relay, 1).on_released(callback)  # The publication is dropped; the callback stays registered.
    del callback
    gc.collect()
    assert callback_ref() is not None
    publish_borrowed(relay, 2)
    assert Callback.done.wait(TIMEOUT_S)
    relay.publish("t", {"x": np.zeros(3)}).on_released(lambda publication: Callback.done.clear())
    for _ in range(int(TIMEOUT_S * 100)):
        if not Callback.done.wait(0) and callback_ref() is None:
            break
        threading.Event().wait(0.01)
    assert callback_ref() is None


PROGRAM = """
import faulthandler, sys, threading, time
import numpy, tensor_relay

faulthandler.dump_traceback_later(50, exit=True)
relay = tensor_relay.serve("127.0.0.1:0", state_dir=sys.argv[1])
published = relay.publish("t", {"x": numpy.zeros(100_000)}, hold="borrow")
"""


def output_of(tmp_path, lines):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + lines)
    with python(program, tmp_path / "state") as ending:
        return wait_for_exit(ending)


def test_interpreter_exit_runs_callbacks(tmp_path):
    line = "published.on_released(lambda publication: print('released', publication.released))\n"
    assert output_of(tmp_path, line) == "released True\n"


def test_a_blocking_callback_does_not_delay_exit(tmp_path):
    lines = (
        "published.on_released(lambda publication: (print('called', flush=True), threading.Event().wait()))\n"
        "published.on_released(lambda publication: print('never'))\n"
    )
    assert output_of(tmp_path, lines) == "called\n"
