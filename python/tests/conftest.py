"""Fixtures and helpers of the tests: a relay on loopback, its client, and Python programs in child processes."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tensor_relay

HERE = Path(__file__).parent
TIMEOUT_S = 60.0


def count_skip(report):
    """Appends a skipped test, or a module that is skipped, to the file of tests/run. A test that fails as it is
    expected to counts as skipped for pytest too, with a traceback in place of a reason; it did run."""
    path = os.environ.get("TENSOR_RELAY_TEST_SKIPS")
    if path and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ").replace("\n", " ")
        with open(path, "a") as file:
            file.write(f"{reason}\t{report.nodeid}\n")


pytest_runtest_logreport = count_skip
pytest_collectreport = count_skip


@pytest.fixture
def relay(tmp_path):
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path / "state") as relay:
        yield relay


@pytest.fixture
def client(relay):
    with tensor_relay.connect(relay.ticket) as client:
        yield client


@pytest.fixture
def program():
    """The path of the program `tensor-relay`, which `python/tests/run` sets in TENSOR_RELAY_PROGRAM; by default the
    program that `cargo build` makes."""
    path = Path(os.environ.get("TENSOR_RELAY_PROGRAM", HERE.parents[1] / "target" / "debug" / "tensor-relay"))
    if not path.exists():
        pytest.skip(f"{path} is missing: `cargo build` builds it")
    return path


@contextlib.contextmanager
def python(*words, **environment):
    """Runs a Python program in a child process, which is killed at the end of the block or after a timeout."""
    program = subprocess.Popen(
        [sys.executable, "-u", *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    killer = threading.Timer(2 * TIMEOUT_S, program.kill)
    killer.start()
    try:
        yield program
    finally:
        killer.cancel()
        program.kill()
        program.communicate()


def wait_for_exit(program, returncode=0):
    """Waits for a program to exit, checks its exit code, and returns its remaining output."""
    out, errors = program.communicate(timeout=TIMEOUT_S)
    assert program.returncode == returncode, f"{program.args} ended with {program.returncode}:\n{out}\n{errors}"
    return out


def serve_again(address, state_dir):
    """Starts a relay at the address of a relay that was just closed. Retries until the port is released."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return tensor_relay.serve(address, state_dir=state_dir)
        except tensor_relay.TensorRelayError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


class Gate:
    """A TCP path to a relay, which passes no byte to the client from `close_after` until `open`."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_open, self._left, self._lock = threading.Event(), None, threading.Lock()
        self._ends = []
        self._is_open.set()

    def serve(self, relay):
        host, port = relay.address.rsplit(":", 1)

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    client, server = self._listener.accept()[0], socket.create_connection((host, int(port)))
                    self._ends += client, server
                    for words in ((client, server, False), (server, client, True)):
                        threading.Thread(target=self._pass, args=words, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    def close_after(self, size):
        """Passes about `size` bytes more to the client, and then none."""
        with self._lock:
            self._left = size

    def is_closed(self):
        return not self._is_open.is_set()

    def open(self):
        with self._lock:
            self._left = None
        self._is_open.set()

    def cut(self):
        """Ends all connections; those made afterwards pass everything."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.open()

    def _pass(self, source, target, is_counted):
        with contextlib.suppress(OSError):
            while piece := source.recv(64 << 10):
                target.sendall(piece)
                if is_counted:
                    self._count(len(piece))
        for end in (source, target):
            end.close()

    def _count(self, size):
        with self._lock:
            if self._left is not None:
                self._left -= size
                if self._left <= 0:
                    self._is_open.clear()
        self._is_open.wait()


@contextlib.contextmanager
def gated(state_dir, **options):
    """A relay, and a client whose path to it is a `Gate`."""
    gate = Gate()
    with tensor_relay.serve("127.0.0.1:0", advertise=gate.address, state_dir=state_dir) as relay:
        gate.serve(relay)
        try:
            with tensor_relay.connect(relay.ticket, transport="tcp", lanes=1, **options) as client:
                yield relay, client, gate
        finally:
            gate.open()


def received(client, topic="t", **options):
    """Subscribes, and returns the first snapshot."""
    return client.subscribe(topic, **options).next(timeout=TIMEOUT_S)


def logged(caplog, words):
    """Waits for a log message that contains these words, and returns it. Messages come from another thread."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := [record.getMessage() for record in caplog.records if words in record.getMessage()]):
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.01)
    return found[0]
