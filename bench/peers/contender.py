"""The protocol of bench/src/contender.rs for peers: two commands, and the lines that they print.

`serve` holds noise and sends it to whoever asks; `receive` asks, several rounds, and checks every byte. A
peer is a `Source` and a `Sink`; all else is here, and so is the same for all: asking, timing, counting,
verifying, printing.

The two sides talk over one plain TCP connection to the port that `serve` was given. What a peer needs beyond
it, such as ports, paths or certificates, its source chooses and names in its `hello`. The payload takes the
peer's own way.
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

DEADLINE_S = 120
"""How long anything may take between two words of the other side: 1 GiB at a hundredth of the usual speed."""


@dataclass(frozen=True)
class Setting:
    """Where a side runs, and what it was told."""

    options: argparse.Namespace
    """The peer's own options and those of the protocol."""
    local_ip: str
    """The address of this side."""
    peer_ip: str
    """The address of the other side; for the source, which does not know it yet, its own."""
    memory: Bytes
    """Where all lies that is sent or received, touched: the payload and, behind it, a small message."""


class Source(ABC):
    """The serving side of a peer."""

    hello: dict[str, Any]
    """What the sink must know to connect."""

    def accept(self) -> None:
        """Waits for the sink, which was told `hello`, where that needs anything."""

    def meet(self, answer: dict[str, Any]) -> None:
        """Is told what the sink, once connected, answered to `hello`."""

    @abstractmethod
    def send(self, data: Bytes) -> None:
        """Sends `data`, which keeps until the sink says that it has it."""

    def release(self) -> None:
        """Is told that the sink has it: what `send` left behind may go."""


class Sink(ABC):
    """The receiving side of a peer."""

    def answer(self) -> dict[str, Any]:
        """What the source must know of the sink, where it must."""
        return {}

    def request(self) -> None:
        """Asks for what comes next, where the peer's way is to ask; for small messages, in advance."""

    @abstractmethod
    def receive(self, into: Bytes) -> Bytes:
        """Waits for what was sent, and gives it: as a part of `into`, or as an array of its own."""


def main(
    source: Callable[[Setting], Source],
    sink: Callable[[Setting, dict[str, Any]], Sink],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """Runs the side of a peer that the command line asks for."""
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
    """Runs one of the two commands, with the options and the place for the lines of the protocol."""
    sys.excepthook = _fail
    out = _claim_stdout()
    options = _parse(add_options)
    if options.end_with_stdin:
        host.end_with_stdin()
    command = serve if options.role == "serve" else receive
    command(options, out)


def wait_until(met: Callable[[], bool]) -> None:
    """Looks again and again, a thousand times a second, before anything is timed."""
    deadline = time.monotonic() + DEADLINE_S
    while not met():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other side was not there within {DEADLINE_S} s")
        time.sleep(0.001)


def address(text: str) -> tuple[str, int]:
    """Reads IP:PORT."""
    ip, _, port = text.rpartition(":")
    return ip.strip("[]"), int(port)


def emit(out: TextIO, **line: object) -> None:
    """Prints a line of the protocol."""
    print(json.dumps(line), file=out, flush=True)


class Control:
    """The connection over which the sides talk: JSON lines, each a command and what belongs to it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._lines = connection.makefile("rb")
        self._feed_watchdog()

    def say(self, command: str, value: object = None) -> None:
        self.socket.sendall(json.dumps([command, value]).encode() + b"\n")

    def hear(self, *expected: str) -> tuple[str, Any]:
        """Waits for a command, which must be one of `expected`. "end" is what a closed connection says."""
        line = self._lines.readline()
        self._feed_watchdog()
        command, value = json.loads(line) if line else ("end", None)
        if command not in expected:
            raise ConnectionError(f"the other side said {command!r} instead of {' or '.join(expected)}")
        return command, value

    def _feed_watchdog(self) -> None:
        """Lets this side end, and show where it was, if the other one then says nothing until the deadline.

        Wherever it hangs, be it in a library: so no peer needs deadlines of its own, which would cost some of
        them a system call for each piece.
        """
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True)


class Begun:
    """The moment at which a round began, by both clocks."""

    def __init__(self) -> None:
        self._cpu_s = host.cpu_seconds()
        self._clock_s = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._clock_s

    def cpu_s(self) -> float:
        return host.cpu_seconds() - self._cpu_s


def _serve(options: argparse.Namespace, make: Callable[[Setting], Source], out: TextIO) -> None:
    ip, port = address(options.listen)
    memory = content.touched(options.bytes + SMALL_BYTES)
    data, small = memory[: options.bytes], memory[options.bytes :]
    content.fill(data)
    with socket.create_server((ip, port)) as listener:
        source = make(Setting(options, local_ip=ip, peer_ip=ip, memory=memory))
        emit(out, ready=True, port=listener.getsockname()[1])
        control = Control(listener.accept()[0])
    control.say("hello", source.hello)
    source.accept()
    source.meet(control.hear("answer")[1])
    while (heard := control.hear("small", "prepare", "end"))[0] != "end":
        command, number = heard
        if command == "small":
            _send_small(control, source, small, number)
        else:
            content.mark(data, number)
            emit(out, bytes=options.bytes, cpu_s=_send(control, source, data))
        source.release()
    _leave()


def _send(control: Control, source: Source, data: Bytes) -> float:
    """Sends one round; gives the CPU seconds that it took, from the request until the sink had it."""
    host.use_cubic()
    control.say("prepared")
    control.hear("go")
    begun = Begun()
    source.send(data)
    control.hear("done")
    return begun.cpu_s()


def _send_small(control: Control, source: Source, message: Bytes, number: int) -> None:
    host.use_cubic()
    message[:] = content.small(number)
    control.say("prepared")
    control.hear("go")
    message[:8].view(TIME)[0] = time.monotonic_ns()
    source.send(message)
    control.hear("done")


def _receive(
    options: argparse.Namespace, make: Callable[[Setting, dict[str, Any]], Sink], out: TextIO
) -> None:
    control = Control(socket.create_connection(address(options.connect)))
    local_ip, peer_ip = control.socket.getsockname()[0], control.socket.getpeername()[0]
    memory = content.touched(options.bytes + SMALL_BYTES)
    into, small = memory[: options.bytes], memory[options.bytes :]
    sink = make(Setting(options, local_ip, peer_ip, memory), control.hear("hello")[1])
    control.say("answer", sink.answer())
    if options.small:
        emit(out, small=options.small, **_latencies(control, sink, small, options.small))
    for number in range(options.rounds):
        emit(out, round=number, **_round(control, sink, into, options.bytes, number))
    _leave()


def _round(control: Control, sink: Sink, into: Bytes, size: int, number: int) -> dict[str, Any]:
    """Receives and verifies one round. The clock runs from the request until the last byte is in place."""
    control.say("prepare", number)
    control.hear("prepared")
    host.use_cubic()
    begun = Begun()
    control.say("go")
    sink.request()
    received = sink.receive(into)
    seconds, cpu_s = begun.seconds(), begun.cpu_s()
    control.say("done")
    content.verify(received, size, number)
    return {"bytes": size, "seconds": seconds, "gb_per_s": size / seconds / 1e9, "cpu_s": cpu_s}


def _latencies(control: Control, sink: Sink, into: Bytes, count: int) -> dict[str, float]:
    """Receives `count` small messages, one by one, after a tenth as many that warm up and are not counted."""
    warm_up = -(-count // 10)
    took_us = [_small(control, sink, into, number) for number in range(warm_up + count)][warm_up:]
    took_us.sort()

    def at_most(percent: int) -> float:
        """The nearest rank, as in bench/src/latency.rs: the smallest value that so many are not above."""
        return took_us[-(-count * percent // 100) - 1]

    return {
        "p50_us": at_most(50),
        "p99_us": at_most(99),
        "min_us": took_us[0],
        "max_us": took_us[-1],
    }


def _small(control: Control, sink: Sink, into: Bytes, number: int) -> float:
    """Microseconds from before the source began to send until the sink has the message in an array.

    Both processes of one machine share CLOCK_MONOTONIC, so the time stamp travels in the message itself.
    """
    control.say("small", number)
    control.hear("prepared")
    sink.request()
    control.say("go")
    received = sink.receive(into)
    arrived = time.monotonic_ns()
    control.say("done")
    content.verify_small(received, number)
    return (arrived - int(received.reshape(-1)[:8].view(TIME)[0])) / 1e3


TIME = "<u8"
"""How a small message carries the time: nanoseconds, in its first word."""


def _parse(add_options: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input closes")
    add_options(parser)
    load = argparse.ArgumentParser(add_help=False)
    load.add_argument("--bytes", type=int, required=True, help="how much each round moves")
    load.add_argument("--mtu", type=int, default=65_000, help="the UDP payload of a full packet of the path")
    roles = parser.add_subparsers(dest="role", required=True)
    serve = roles.add_parser("serve", parents=[load], help="hold bytes and send them")
    serve.add_argument("--listen", default="127.0.0.1:0", metavar="IP:PORT", help="port 0: any")
    receive = roles.add_parser("receive", parents=[load], help="receive them, several times")
    receive.add_argument("--connect", required=True, metavar="IP:PORT")
    receive.add_argument("--rounds", type=int, default=5)
    receive.add_argument("--small", type=int, default=0, metavar="COUNT", help="first, messages of 4 KiB")
    return parser.parse_args()


def _claim_stdout() -> TextIO:
    """Keeps standard output for the protocol; what libraries print there goes to standard error."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


def _fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ends the process with a message, whatever threads a library has."""
    traceback.print_exception(kind, error, trace)
    os._exit(1)


def _leave() -> None:
    """Ends the process while the peer still lives: what its library would tear down keeps nobody waiting."""
    os._exit(0)
