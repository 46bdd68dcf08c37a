"""iperf3: what TCP can do on this path when nobody looks at the bytes: the line for all others.

Nothing is verified, and there are no small messages. It is no Source and no Sink, since it keeps its own
time: `serve` runs its server, `receive` asks that one to send (`-R`), and both translate what it reports.
"""

import json
import subprocess
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

import contender
import host


def serve(options: Namespace, out: TextIO) -> None:
    ip, port = contender.address(options.listen)
    port = port or host.free_port(ip)
    command = host.with_us(["iperf3", "-s", "-B", ip, "-p", str(port), "--json", "--forceflush"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        contender.wait_until(lambda: host.is_listening(port))
        contender.emit(out, ready=True, port=port)
        for report in _reports(server.stdout or ()):
            contender.emit(out, bytes=options.bytes, cpu_s=_cpu_s(report, options.bytes))


def receive(options: Namespace, out: TextIO) -> None:
    if options.small:
        raise SystemExit("iperf3 sends no messages: leave out --small")
    ip, port = contender.address(options.connect)
    command = [
        "iperf3",
        "-c",
        ip,
        "-p",
        str(port),
        "-R",
        "-n",
        str(options.bytes),
        "-l",
        "1M",
        "-C",
        "cubic",
        "-J",
    ]
    for number in range(options.rounds):
        report = _run(command)
        rate = report["end"]["sum_received"]["bits_per_second"] / 8
        contender.emit(
            out,
            round=number,
            bytes=options.bytes,
            seconds=options.bytes / rate,
            gb_per_s=rate / 1e9,
            cpu_s=_cpu_s(report, options.bytes),
        )


def _run(command: list[str]) -> dict[str, Any]:
    """One transfer. When it fails, iperf3 says why in its report."""
    done = subprocess.run(
        host.with_us(command), check=False, stdout=subprocess.PIPE, timeout=contender.DEADLINE_S
    )
    report: dict[str, Any] = json.loads(done.stdout)
    if "error" in report:
        raise ConnectionError(f"iperf3: {report['error']}")
    return report


def _reports(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The server's reports, each of which ends with a bracket at the beginning of a line."""
    text = ""
    for line in lines:
        text += line
        if line.rstrip() == "}":
            yield json.loads(text)
            text = ""


def _cpu_s(report: dict[str, Any], size: int) -> float:
    """CPU seconds of this side for `size` bytes: it always moves a little more, or stops a little late."""
    end = report["end"]
    moved = end["sum_sent"] if end["sum_sent"]["bytes"] else end["sum_received"]
    used: float = end["cpu_utilization_percent"]["host_total"] / 100 * moved["seconds"]
    return used * size / float(moved["bytes"])


if __name__ == "__main__":
    contender.run(serve, receive)
