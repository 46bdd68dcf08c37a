"""What the tests share: a relay on loopback, a client of it, and programs in processes of their own."""

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
PATIENCE_S = 60.0


@pytest.fixture
def relay(tmp_path):
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path / "state") as relay:
        yield relay


@pytest.fixture
def client(relay):
    with tensor_relay.connect(relay.ticket) as client:
        yield client


@contextlib.contextmanager
def python(*words, **environment):
    """A program in Python, in a process of its own. It ends with the block, or when patience does."""
    program = subprocess.Popen(
        [sys.executable, "-u", *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    late = threading.Timer(2 * PATIENCE_S, program.kill)
    late.start()
    try:
        yield program
    finally:
        late.cancel()
        program.kill()
        program.communicate()


def ended(program, returncode=0):
    """What a program has said until it ended by itself."""
    out, errors = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == returncode, f"{program.args} ended with {program.returncode}:\n{out}\n{errors}"
    return out


def served_again(address, state_dir):
    """A relay at an address whose last one was closed just now, which lets go of its port a moment later."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return tensor_relay.serve(address, state_dir=state_dir)
        except tensor_relay.TensorRelayError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def received(client, topic="t", **options):
    """The newest version."""
    return client.subscribe(topic, **options).next(timeout=PATIENCE_S)
