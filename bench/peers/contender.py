"""The protocol of bench/src/contender.rs for peers: two commands, and the JSON lines that they print.

`serve` holds noise and sends it on request; `receive` requests it for several rounds and checks every byte.
A peer implements a `Source` and a `Sink`. Requests, timing, CPU accounting, verification and output are here,
and therefore the same for all peers.

Both sides use one plain TCP connection, to the port of `serve`, for control messages. Further ports, paths or
certificates that a peer needs are chosen by its source and sent in `hello`. The payload uses the peer's own
transport.
"""

import argparse
import faulthandler
import json
import os
import socket
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

import content
import host
from content import SMALL_BYTES, Bytes

TIMEOUT_S = 120
"""The longest time between two control messages: enough for 1 GiB at a hundredth of the usual rate."""


@dataclass(frozen=True)
class Setting:
    """The addresses, options and memory of one side."""

    options: argparse.Namespace
    """The peer's own options and those of the protocol."""
    local_ip: str
    """The address of this side."""
    peer_ip: str
    """The address of the other side; for the source, which does not know it yet, the source's own."""
    memory: Bytes
    """The memory of the payload and, after it, of a small message. All its pages are resident."""


class Source(ABC):
    """The serving side of a peer."""

    hello: dict[str, Any]
    """The JSON that the sink needs to connect."""

    def accept(self) -> None:
        """Accepts the sink's connection, if the peer has one."""

    def on_answer(self, answer: dict[str, Any]) -> None:
        """Handles the connected sink's `answer`."""

    @abstractmethod
    def send(self, data: Bytes) -> None:
        """Sends `data`, which does not change before the sink has received it."""

    def release(self) -> None:
        """Frees what `send` still holds. The sink has received the data."""


class Sink(ABC):
    """The receiving side of a peer."""

    def answer(self) -> dict[str, Any]:
        """The JSON that the source needs about the sink."""
        return {}

    def request(self) -> None:
        """Requests the next data, if the peer has requests. For small messages, before the clock starts."""

    @abstractmethod
    def receive(self, into: Bytes) -> Bytes:
        """Waits for the data, and returns it: in a part of `into`, or in an array of its own."""


def main(
    source: Callable[[Setting], Source],
    sink: Callable[[Setting, dict[str, Any]], Sink],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """Runs the side of a peer that the command line names."""
    run(
        lambda options, out: _serve(options, source, out),
        lambda options, out: _receive(options, sink, out),
        add_options,
    )


def run(
    serve: Callable[[argparse.Namespace, TextIO], None],
    receive: Callable[[argparse.Namespace, TextIO], None],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """Runs one of the two commands with its options and the output for protocol lines."""
    sys.excepthook = _fail
    out = _claim_stdout()
    options = _parse(add_options)
    if options.end_with_stdin:
        host.end_with_stdin()
    command = serve if options.role == "serve" else receive
    command(options, out)


def wait_until(condition: Callable[[], bool]) -> None:
    """Polls a condition every millisecond. Use it only outside of timed sections."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other side was not ready within {TIMEOUT_S} s")
        time.sleep(0.001)


def address(text: str) -> tuple[str, int]:
    """Parses IP:PORT."""
    ip, _, port = text.rpartition(":")
    return ip.strip("[]"), int(port)


def emit(out: TextIO, **line: object) -> None:
    """Prints a line of the protocol."""
    print(json.dumps(line), file=out, flush=True)


class Control:
    """The control connection between both sides: JSON lines, each a command and its value."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._lines = connection.makefile("rb")
        self._restart_watchdog()

    def send(self, command: str, value: object = None) -> None:
        self.socket.sendall(json.dumps([command, value]).encode() + b"\n")

    def receive(self, *expected: str) -> tuple[str, Any]:
        """Waits for a command, which must be one of `expected`. A closed connection counts as "end"."""
        line = self._lines.readline()
        self._restart_watchdog()
        command, value = json.loads(line) if line else ("end", None)
        if command not in expected:
            raise ConnectionError(f"the other side sent {command!r} instead of {' or '.join(expected)}")
        return command, value

    def _restart_watchdog(self) -> None:
        """Restarts the deadline of the next message; when it passes, the process exits with a traceback.

        This also covers hangs in a library, so peers need no deadlines of their own, which would cost some of
        them a system call for each piece.
        """
        faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)


class Stopwatch:
    """Measures wall-clock time and CPU time since its creation."""

    def __init__(self) -> None:
        self._cpu_s = host.cpu_seconds()
        self._clock_s = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._clock_s

    def cpu_s(self) -> float:
        return host.cpu_seconds() - self._cpu_s


def _serve(options: argparse.Namespace, make: Callable[[Setting], Source], out: TextIO) -> None:
    ip, port = address(options.listen)
    memory = content.allocate_resident(options.bytes + SMALL_BYTES)
    data, small = memory[: options.bytes], memory[options.bytes :]
    content.fill(data)
    with socket.create_server((ip, port)) as listener:
        source = make(Setting(options, local_ip=ip, peer_ip=ip, memory=memory))
        emit(out, ready=True, port=listener.getsockname()[1])
        control = Control(listener.accept()[0])
    control.send("hello", source.hello)
    source.accept()
    source.on_answer(control.receive("answer")[1])
    while (message := control.receive("small", "prepare", "end"))[0] != "end":
        command, value = message
        if command == "small":
            _send_small(control, source, small, message_number=value)
        else:
            content.mark(data, round_number=value)
            emit(out, bytes=options.bytes, cpu_s=_send(control, source, data))
        source.release()
    _exit()


def _send(control: Control, source: Source, data: Bytes) -> float:
    """Sends one round. Returns the CPU seconds from the request until the sink has received the data."""
    host.use_cubic()
    control.send("prepared")
    control.receive("go")
    begun = Stopwatch()
    source.send(data)
    control.receive("done")
    return begun.cpu_s()


def _send_small(control: Control, source: Source, message: Bytes, message_number: int) -> None:
    host.use_cubic()
    message[:] = content.small(message_number)
    control.send("prepared")
    control.receive("go")
    message[:8].view(TIME)[0] = time.monotonic_ns()
    source.send(message)
    control.receive("done")


def _receive(
    options: argparse.Namespace, make: Callable[[Setting, dict[str, Any]], Sink], out: TextIO
) -> None:
    control = Control(socket.create_connection(address(options.connect)))
    local_ip, peer_ip = control.socket.getsockname()[0], control.socket.getpeername()[0]
    memory = content.allocate_resident(options.bytes + SMALL_BYTES)
    into, small = memory[: options.bytes], memory[options.bytes :]
    sink = make(Setting(options, local_ip, peer_ip, memory), control.receive("hello")[1])
    control.send("answer", sink.answer())
    if options.small:
        emit(out, small=options.small, **_latencies(control, sink, small, options.small))
    for round_number in range(options.rounds):
        emit(out, round=round_number, **_round(control, sink, into, options.bytes, round_number))
    _exit()


def _round(control: Control, sink: Sink, into: Bytes, size: int, round_number: int) -> dict[str, Any]:
    """Receives and verifies one round. The clock runs from the request until the last byte is in place."""
    control.send("prepare", round_number)
    control.receive("prepared")
    host.use_cubic()
    begun = Stopwatch()
    control.send("go")
    sink.request()
    received = sink.receive(into)
    seconds, cpu_s = begun.seconds(), begun.cpu_s()
    control.send("done")
    content.verify(received, size, round_number)
    return {"bytes": size, "seconds": seconds, "gb_per_s": size / seconds / 1e9, "cpu_s": cpu_s}


def _latencies(control: Control, sink: Sink, into: Bytes, count: int) -> dict[str, float]:
    """Receives small messages one by one: a tenth of `count` to warm up, then `count`.

    Returns percentiles of the latency of the latter.
    """
    warm_up = -(-count // 10)
    took_us = [_small(control, sink, into, message_number) for message_number in range(warm_up + count)]
    took_us = sorted(took_us[warm_up:])

    def percentile(percent: int) -> float:
        """The nearest rank, as in bench/src/latency.rs."""
        return took_us[-(-count * percent // 100) - 1]

    return {
        "p50_us": percentile(50),
        "p99_us": percentile(99),
        "min_us": took_us[0],
        "max_us": took_us[-1],
    }


def _small(control: Control, sink: Sink, into: Bytes, message_number: int) -> float:
    """The microseconds from just before the source sends until the sink has the message in an array.

    Processes of one machine share CLOCK_MONOTONIC, so the message carries the source's time stamp.
    """
    control.send("small", message_number)
    control.receive("prepared")
    sink.request()
    control.send("go")
    received = sink.receive(into)
    arrived = time.monotonic_ns()
    control.send("done")
    content.verify_small(received, message_number)
    return (arrived - int(received.reshape(-1)[:8].view(TIME)[0])) / 1e3


TIME = "<u8"
"""The format of the time stamp in a small message: nanoseconds, in its first word."""


def _parse(add_options: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input closes")
    add_options(parser)
    load = argparse.ArgumentParser(add_help=False)
    load.add_argument("--bytes", type=int, required=True, help="the payload of each round")
    load.add_argument("--mtu", type=int, default=65_000, help="the UDP payload of a full packet of the path")
    roles = parser.add_subparsers(dest="role", required=True)
    serve = roles.add_parser("serve", parents=[load], help="hold bytes and send them")
    serve.add_argument("--listen", default="127.0.0.1:0", metavar="IP:PORT", help="port 0: any")
    receive = roles.add_parser("receive", parents=[load], help="receive them, several times")
    receive.add_argument("--connect", required=True, metavar="IP:PORT")
    receive.add_argument("--rounds", type=int, default=5)
    small_help = "the number of 4 KiB messages to receive before the rounds"
    receive.add_argument("--small", type=int, default=0, metavar="COUNT", help=small_help)
    return parser.parse_args()


def _claim_stdout() -> TextIO:
    """Reserves standard output for the protocol. Output of libraries is redirected to standard error."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


def _fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Exits with a traceback, without waiting for a library's threads."""
    traceback.print_exception(kind, error, trace)
    os._exit(1)


def _exit() -> None:
    """Exits at once, without the library's cleanup."""
    os._exit(0)
