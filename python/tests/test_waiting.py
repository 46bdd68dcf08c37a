"""Blocking calls: they release the GIL, and end with Ctrl-C, a fork, or the end of the interpreter."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from conftest import TIMEOUT_S, python, received, wait_for_exit

import tensor_relay
from tensor_relay import _shared


def test_other_threads_run_during_a_transfer(relay, client):
    """Goal: a transfer does not hold the GIL.

    Method: a thread records the time each millisecond while versions are staged, sent and received.
    """
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    weights = np.ones(64 << 20, np.uint8)
    subscription = client.subscribe("t")
    thread.start()
    try:
        begun = time.monotonic()
        for _ in range(3):
            relay.publish("t", {"x": weights})
            subscription.next(TIMEOUT_S)
        took = time.monotonic() - begun
    finally:
        stop.set()
        thread.join()
    during = [recorded for recorded in ticks if begun <= recorded <= begun + took]
    assert len(during) > 10
    longest = max(later - earlier for earlier, later in zip(during, during[1:]))
    # If a transfer held the GIL, the longest pause would be as long as a transfer. A busy machine has shorter ones.
    assert longest < max(0.25, took / 4), f"no other thread ran for {longest:.3f} of {took:.3f} s"


@pytest.mark.parametrize("wait", [
    "subscription.next()", "next(iter(subscription))", "client.subscribe('t', out={}, atomic=False).next()",
    "relay.publish('u', {'x': b'abc'}).wait_committed(timeout=None)", "asyncio.run(wait_async())",
    "tensor_relay.connect('relay://192.0.2.1:9?key=sha256:' + 'ab' * 32, timeout=600)",
])  # fmt: skip
def test_ctrl_c_ends_any_blocking_call(tmp_path, wait):
    program = tmp_path / "waits.py"
    program.write_text(
        "import asyncio, signal, sys, tensor_relay\n"
        # Tests that run in the background inherit SIG_IGN.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "relay = tensor_relay.serve('127.0.0.1:0', state_dir=sys.argv[1])\n"
        "client = tensor_relay.connect(relay.ticket, topic_timeout=600)\n"
        "subscription = client.subscribe('t')\n"
        "async def wait_async():\n"
        "    await subscription.next_async()\n"
        "print('waiting')\n"
        f"try:\n    {wait}\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
        # The relay and the client still work.
        "relay.publish('t', {'x': b'abc'})\n"
        "print(client.subscribe('t').next(60)['x'].nbytes)\n"
    )
    with python(program, tmp_path / "state") as waiting:
        assert waiting.stdout.readline() == "waiting\n"
        time.sleep(0.3)  # Until the call blocks. An earlier interrupt would prove less, but not fail.
        begun = time.monotonic()
        waiting.send_signal(signal.SIGINT)
        assert waiting.stdout.readline() == "interrupted\n"
        assert time.monotonic() - begun < 5
        assert waiting.stdout.readline() == "3\n"
        wait_for_exit(waiting)


def test_results_do_not_wait_for_the_signal_check(relay, client):
    """Signals are checked every 50 ms; results must not wait for that."""
    subscription = client.subscribe("t")
    times = []
    for number in range(40):
        begun = time.monotonic()
        relay.publish("t", {"x": np.full(3, number)})
        subscription.next(10)
        times.append(time.monotonic() - begun)
    assert sorted(times)[len(times) // 2] < 0.03


def test_timeouts_are_not_negative_or_nan(relay, client):
    subscription = client.subscribe("t")
    for timeout in (-1, float("nan")):
        with pytest.raises(ValueError, match="in seconds"):
            subscription.next(timeout)
    with pytest.raises(tensor_relay.RelayTimeoutError):
        subscription.next(0)
    relay.publish("t", {"x": b"abc"})
    assert subscription.next(1e20).version == 1, "a timeout beyond the clock's range is accepted"


@pytest.mark.parametrize("opened", [
    "relay", "tensor_relay.connect(relay.ticket)", "tensor_relay.connect(relay.ticket).subscribe('t')",
])  # fmt: skip
@pytest.mark.parametrize("leave, code", [("sys.exit(5)", 5), ("raise KeyError('mine')", 1)])
def test_a_forked_child_can_leave_a_with_block(tmp_path, opened, leave, code):
    program = tmp_path / "forks.py"
    program.write_text(
        "import os, sys, tensor_relay\n"
        "relay = tensor_relay.serve('127.0.0.1:0', state_dir=sys.argv[1])\n"
        f"with {opened}:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        f"        {leave}\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    with python(program, tmp_path / "state") as forking:
        output, errors = forking.communicate(timeout=TIMEOUT_S)
        assert output == f"{code}\n" and "ForkError" not in errors, errors
        assert ("KeyError: 'mine'" in errors) == (code == 1)


def test_calls_in_a_forked_child_are_refused(relay, client, tmp_path):
    """Every call in the child raises ForkError, and the parent continues to work."""
    relay.publish("t", {"x": np.arange(3)})
    subscription = client.subscribe("t")
    publication = relay.publish("t", {"x": np.arange(3)})
    snapshot = subscription.next(10)
    calls = {
        "publish": lambda: relay.publish("t", {"x": np.arange(3)}),
        "stats": relay.stats,
        "close": relay.close,
        "topics": client.topics,
        "close the client": client.close,
        "next": subscription.next,
        "wait": publication.wait_committed,
        "serve": lambda: tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path),
        "connect": lambda: tensor_relay.connect(relay.ticket),
        "shared_client": lambda: tensor_relay.shared_client(relay.ticket),
        "pull": lambda: tensor_relay.pull(relay.ticket, tmp_path, "t"),
    }
    shared = tensor_relay.shared_client(relay.ticket)
    reading, writing = os.pipe()
    _shared._shared._lock.acquire()  # As if another thread held it.
    child = os.fork()
    if child == 0:
        for name, call in calls.items():
            try:
                call()
                os.write(writing, f"{name} worked\n".encode())
            except tensor_relay.ForkError as error:
                if "was forked from" not in str(error) or 'multiprocessing_context="spawn"' not in str(error):
                    os.write(writing, f"{name} said {error}\n".encode())
            except BaseException as error:
                os.write(writing, f"{name} raised {error!r}\n".encode())
        if snapshot["x"].numpy().tolist() != [0, 1, 2]:
            os.write(writing, b"what was received cannot be read\n")
        os._exit(0)
    _shared._shared._lock.release()
    shared.close()
    os.close(writing)
    deadline = time.monotonic() + TIMEOUT_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    with open(reading) as failures:
        assert failures.read() == ""
    relay.publish("t", {"x": np.arange(4)})
    assert received(client)["x"].shape == (4,)


@pytest.mark.parametrize("last_line", ["pass", "relay.close()", "del relay, client, subscription", "sys.exit(0)"])
def test_the_interpreter_exits_with_open_objects(tmp_path, last_line):
    program = tmp_path / "ends.py"
    program.write_text(
        "import sys, tensor_relay\n"
        "relay = tensor_relay.serve('127.0.0.1:0', state_dir=sys.argv[1])\n"
        "relay.publish('t', {'x': bytearray(1000)}, hold='borrow')\n"
        "client = tensor_relay.connect(relay.ticket)\n"
        "subscription = client.subscribe('t')\n"
        "snapshot = subscription.next(60)\n"
        "view = memoryview(snapshot['x'])\n"
        f"{last_line}\n"
    )
    with python(program, tmp_path / "state") as running:
        wait_for_exit(running)


@pytest.mark.parametrize("work", [
    "for snapshot in client.subscribe('t'): started.set()",
    "while True: relay.publish('t', {'x': b'abc'}); started.set()",
    "asyncio.run(follow())",
])  # fmt: skip
def test_daemon_threads_end_silently(tmp_path, work):
    """Interpreter exit closes the objects that daemon threads use. The threads must end without a traceback."""
    program = tmp_path / "daemon.py"
    program.write_text(
        "import asyncio, atexit, sys, threading, time, tensor_relay\n"
        "relay = tensor_relay.serve('127.0.0.1:0', state_dir=sys.argv[1])\n"
        "relay.publish('t', {'x': b'abc'})\n"
        "client = tensor_relay.connect(relay.ticket)\n"
        "started = threading.Event()\n"
        "async def follow():\n"
        "    async for snapshot in client.subscribe('t'): started.set()\n"
        "def run():\n"
        f"    {work}\n"
        "    print('the work returned normally')\n"
        "thread = threading.Thread(target=run, daemon=True)\n"
        "thread.start()\n"
        "assert started.wait(60)\n"
        # The function registered last runs first: the join runs after `_end`, and gives the thread time to print an error.
        "atexit.unregister(tensor_relay._end)\n"
        "atexit.register(thread.join, 60)\n"
        "atexit.register(tensor_relay._end)\n"
    )
    with python(program, tmp_path / "state") as running:
        out, errors = running.communicate(timeout=TIMEOUT_S)
        assert (running.returncode, out, errors) == (0, "", "")


def test_the_interpreter_exits_while_memory_returns_slowly(tmp_path):
    """Interpreter exit waits for code that is returning lent memory."""
    program = tmp_path / "ends.py"
    program.write_text(
        "import sys, tensor_relay, threading, time\n"
        "returning = threading.Event()\n"
        "class Slow(bytearray):\n"
        "    def __del__(self):\n"
        "        returning.set()\n"
        "        time.sleep(1.5)\n"
        "        print('returned')\n"
        "relay = tensor_relay.serve('127.0.0.1:0', state_dir=sys.argv[1])\n"
        "relay.publish('t', {'x': Slow(1000)}, hold='borrow')\n"
        "relay.close()\n"
        "assert returning.wait(60)\n"
    )
    with python(program, tmp_path / "state") as running:
        out, errors = running.communicate(timeout=TIMEOUT_S)
        assert (running.returncode, out, errors) == (0, "returned\n", "")


def test_interpreter_exit_informs_clients(tmp_path):
    """Clients are informed at once, and do not wait for a timeout."""
    program = tmp_path / "ends.py"
    program.write_text(
        "import sys, tensor_relay\n"
        "relay = tensor_relay.serve('127.0.0.1:0', state_dir=sys.argv[1])\n"
        "relay.publish('t', {'x': b'abc'})\n"
        "print(relay.ticket)\n"
        "sys.stdin.readline()\n"
    )
    with python(program, tmp_path / "state") as producer:
        with tensor_relay.connect(producer.stdout.readline(), reconnect_timeout=0) as client:
            subscription = client.subscribe("t")
            subscription.next(10)
            producer.stdin.write("\n")
            producer.stdin.flush()
            begun = time.monotonic()
            with pytest.raises(tensor_relay.ServerUnreachableError):
                subscription.next(TIMEOUT_S)
            assert time.monotonic() - begun < 5
        wait_for_exit(producer)


def test_messages_go_to_logging(tmp_path):
    program = tmp_path / "logs.py"
    program.write_text(
        "import logging, sys, tensor_relay\n"
        "logging.basicConfig(level=getattr(logging, sys.argv[2]), format='%(name)s %(levelname)s %(message)s')\n"
        "with tensor_relay.serve('127.0.0.1:0', state_dir=sys.argv[1]) as relay:\n"
        "    with tensor_relay.connect(relay.ticket) as client:\n"
        "        client.topics()\n"
    )
    for level, expected in [("DEBUG", True), ("INFO", False)]:
        with python(program, tmp_path / "state", level) as program_run:
            _, errors = program_run.communicate(timeout=TIMEOUT_S)
            assert program_run.returncode == 0, errors
            assert ("tensor_relay DEBUG The session ended." in errors) == expected, errors
