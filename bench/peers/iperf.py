"""iperf3: the TCP rate of this path without any processing of the bytes: the reference for all other peers.

Nothing is verified, and there are no small messages. It has no Source and Sink, since iperf3 measures time
itself: `serve` runs its server, `receive` its client in reverse mode (`-R`), and both translate its reports.
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
    command = host.bound_to_parent(["iperf3", "-s", "-B", ip, "-p", str(port), "--json", "--forceflush"])
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
    """Runs one transfer. After a failure, iperf3's report contains the reason."""
    result = subprocess.run(
        host.bound_to_parent(command), check=False, stdout=subprocess.PIPE, timeout=contender.TIMEOUT_S
    )
    report: dict[str, Any] = json.loads(result.stdout)
    if "error" in report:
        raise ConnectionError(f"iperf3: {report['error']}")
    return report


def _reports(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The server's reports. A closing brace at the beginning of a line ends each."""
    text = ""
    for line in lines:
        text += line
        if line.rstrip() == "}":
            yield json.loads(text)
            text = ""


def _cpu_s(report: dict[str, Any], size: int) -> float:
    """CPU seconds of this side, scaled to `size` bytes, since iperf3 transfers a little more."""
    end = report["end"]
    total = end["sum_sent"] if end["sum_sent"]["bytes"] else end["sum_received"]
    used: float = end["cpu_utilization_percent"]["host_total"] / 100 * total["seconds"]
    return used * size / float(total["bytes"])


if __name__ == "__main__":
    contender.run(serve, receive)
