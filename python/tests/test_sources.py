"""`connect(sources=)`: one client of several servers with the same content."""

import contextlib
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import TIMEOUT_S
from safetensors.numpy import load_file, save_file

import tensor_relay

SIZE = 32 << 20  # Of 64 chunks: more than one server sends at once.


@pytest.fixture
def serving(program, tmp_path):
    """Starts a process that serves one file; returns the process and its ticket's file."""
    save_file({"w": np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)}, tmp_path / "w.safetensors")
    with contextlib.ExitStack() as processes:

        def start(name):
            words = ["serve", "--json", "--listen=127.0.0.1:0", "--chunk-size=512KiB"]
            words += ["--topic", f"t={tmp_path}/w.safetensors"]
            process = subprocess.Popen(
                [program, *words, f"--state-dir={tmp_path / name}"], stdout=subprocess.PIPE, text=True
            )
            processes.callback(process.communicate)
            processes.callback(process.kill)
            return process, Path(json.loads(process.stdout.readline())["ticket_file"])

        yield start


def test_a_client_continues_with_another_server(serving, tmp_path):
    """A version arrives while both servers run, and after the first was killed."""
    (origin, ticket), (_, other) = serving("first"), serving("second")
    expected = load_file(tmp_path / "w.safetensors")["w"]
    with tensor_relay.connect(ticket, sources=[other]) as client:
        for _ in range(2):
            (received,) = client.get("t", timeout=TIMEOUT_S).values()
            assert np.array_equal(np.asarray(received), expected)
            origin.kill()
            origin.wait(TIMEOUT_S)


def test_invalid_tickets_of_sources_are_refused(relay):
    for wrong in ("relay://h:1", "/no/such/file", ""):
        with pytest.raises(tensor_relay.TicketError):
            tensor_relay.connect(relay.ticket, sources=[wrong])
    with pytest.raises(TypeError, match="a ticket is text, or the path of a file"):
        tensor_relay.connect(relay.ticket, sources=[3])
