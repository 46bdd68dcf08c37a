"""Fixtures and helpers of the tests: a relay on loopback, its client, and Python programs in child processes."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tensor_relay

HERE = Path(__file__).parent
TIMEOUT_S = 60.0


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
