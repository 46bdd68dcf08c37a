"""The package's command line: the script that `pip install` puts on PATH, and `python -m tensor_relay`."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from conftest import TIMEOUT_S
from safetensors.numpy import save_file

import tensor_relay

COMMAND = Path(sysconfig.get_path("scripts")) / "tensor-relay"
MODULE = [sys.executable, "-P", "-m", "tensor_relay"]


@pytest.fixture(params=["command", "module"])
def words(request):
    """The two ways to start the command."""
    return [COMMAND] if request.param == "command" else MODULE


@pytest.fixture
def home(tmp_path):
    """Environment variables that point the command to this test's folder only."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TENSOR_RELAY_")}
    folders = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    return env | {"HOME": str(tmp_path)} | folders


def run(words, home):
    return subprocess.run([*map(str, words)], env=home, capture_output=True, text=True, timeout=TIMEOUT_S)


@contextlib.contextmanager
def running(words, home, **options):
    """Runs the command in a child process, which is killed at the end of the block."""
    program = subprocess.Popen(
        [*map(str, words)], env=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    try:
        yield program
    finally:
        program.kill()
        program.communicate()


def end_by(program, signal_number):
    """Sends a signal, and returns the exit code and the output on stderr."""
    program.send_signal(signal_number)
    _, errors = program.communicate(timeout=TIMEOUT_S)
    return program.returncode, errors


@contextlib.contextmanager
def serving(words, home, tmp_path):
    """Runs `serve` with one file. Yields the process and the ticket."""
    save_file({"w": np.arange(100_000.0)}, tmp_path / "policy.safetensors")
    topic = f"policy={tmp_path / 'policy.safetensors'}"
    with running([*words, "serve", "--json", "--listen=127.0.0.1:0", "--topic", topic], home) as server:
        started = json.loads(server.stdout.readline())
        yield server, Path(started["ticket_file"]).read_text().strip()


def test_the_commands_version_is_the_packages(words, home):
    result = run([*words, "--version"], home)
    assert (result.returncode, result.stdout.strip()) == (0, f"tensor-relay {tensor_relay.__version__}")


def test_help_succeeds_and_wrong_arguments_fail(words, home):
    result = run([*words, "--help"], home)
    assert result.returncode == 0 and result.stdout.rstrip().endswith("ended by a signal")
    for wrong in ([], ["bogus"], ["subscribe", "no-such-ticket"]):
        result = run([*words, *wrong], home)
        assert (result.returncode, result.stdout) == (2, "") and result.stderr


def test_one_process_serves_and_another_receives(words, home, tmp_path):
    with serving(words, home, tmp_path) as (server, ticket):
        out = tmp_path / "out"
        received = run([*words, "subscribe", ticket, "--once", "--out", out, "--json"], home)
        assert received.returncode == 0, received.stderr
        assert (out / "policy.safetensors").read_bytes() == (tmp_path / "policy.safetensors").read_bytes()
        with tensor_relay.connect(ticket) as client:  # The package and its command use the same protocol.
            assert client.get("policy").version == 1
        wrong = ticket.replace("key=sha256:", "key=sha256:00", 1)
        assert run([*words, "list", wrong], home).returncode == 2
        subscribe = [*words, "subscribe", ticket, "--once", "--out", out]
        assert run([*subscribe, "--select", "no.such.tensor"], home).returncode == 5
        assert run([*subscribe, "--topic", "other"], home).returncode == 4  # The ticket is for another topic.
        assert end_by(server, signal.SIGTERM)[0] == 0
    unreachable = run([*words, "list", ticket, "--connect-timeout=1"], home)
    assert unreachable.returncode == 3, unreachable.stderr


def test_ctrl_c_ends_the_command_with_its_exit_code(words, home, tmp_path):
    with serving(words, home, tmp_path) as (server, ticket):
        follow = [*words, "subscribe", ticket, "--json", "--out", tmp_path / "out"]
        with running(follow, home) as subscriber:
            assert json.loads(subscriber.stdout.readline())["version"] == 1
            code, errors = end_by(subscriber, signal.SIGINT)
            assert code == 130 and "Traceback" not in errors, errors
        code, errors = end_by(server, signal.SIGINT)
        assert code == 0 and "Traceback" not in errors, errors


def test_ctrl_c_ends_a_command_without_a_handler(words, home, tmp_path):
    fifo = tmp_path / "ticket"
    os.mkfifo(fifo)
    with running([*words, "list", fifo], home) as program:
        with open(fifo, "w"):  # Returns once the command has opened the other end to read.
            code, errors = end_by(program, signal.SIGINT)
    assert code == -signal.SIGINT and not errors, errors


def test_an_ignored_ctrl_c_stays_ignored(words, home, tmp_path):
    fifo = tmp_path / "ticket"
    os.mkfifo(fifo)
    ignore = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    with running([*words, "list", fifo], home, preexec_fn=ignore) as program:
        with open(fifo, "w"):
            program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=TIMEOUT_S)
    assert program.returncode == 2 and "holds no ticket" in errors, errors


def test_the_demo_starts_child_processes(words, home):
    result = run([*words, "demo", "--json", "--size=1MiB", "--versions=2", "--small=2"], home)
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["versions"]) == 2


def test_a_closed_output_pipe_prints_no_error(words, home):
    with running([*words, "completions", "bash"], home, bufsize=0) as program:
        program.stdout.close()
        program.wait(TIMEOUT_S)
        assert program.stderr.read() == ""
        assert program.returncode in (0, 1)
