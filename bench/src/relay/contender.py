"""tensor-relay's Python package as a contender: bench/src/relay.rs in Python.

The harness runs it as `PYTHON -c …`, in an interpreter that has tensor_relay and NumPy. Each side also works with the
Rust version of the other side: the protocol (bench/src/contender.rs) and the topics are the same.
"""

import argparse
import json
import os
import resource
import tempfile
import threading
import time
from typing import Any

import numpy as np

import tensor_relay

TIMEOUT_S = 600.0
"""The time limit of a round, and of the commit of a small tensor."""

MESSAGE_BYTES = 4096
"""The size of a small tensor, which begins with the time stamp of its publication."""


def main() -> None:
    options = _parse()
    if options.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    _serve(options) if options.side == "serve" else _receive(options)


def _serve(options: argparse.Namespace) -> None:
    tensor = _content(options.bytes, options.data)
    with tempfile.TemporaryDirectory() as state, tensor_relay.serve(options.listen, state_dir=state) as relay:
        threading.Thread(target=_publish_small, args=(relay,), daemon=True).start()
        current = relay.publish("bulk/0", {"data": tensor}, hold="borrow")
        _emit(ready=True, port=int(relay.address.rpartition(":")[2]), ticket=relay.ticket)
        round_number = 0
        while True:
            # The next round's version is published before it can be requested.
            following = relay.publish(f"bulk/{round_number + 1}", {"data": tensor}, hold="borrow")
            begun_cpu_s = _cpu_s()
            current.wait_committed(timeout=TIMEOUT_S)
            _emit(bytes=options.bytes, cpu_s=_cpu_s() - begun_cpu_s)
            relay.withdraw(f"bulk/{round_number}")
            current, round_number = following, round_number + 1


def _receive(options: argparse.Namespace) -> None:
    with tensor_relay.connect(options.ticket, lanes=options.lanes or None) as client:
        if options.small:
            _emit(small=options.small, **_small(client, options.small))
        for round_number in range(options.rounds):
            begun, begun_cpu_s = time.perf_counter(), _cpu_s()
            snapshot = client.subscribe(f"bulk/{round_number}").next(timeout=TIMEOUT_S)
            arrays = snapshot.numpy()
            seconds, cpu_s = time.perf_counter() - begun, _cpu_s() - begun_cpu_s
            size = sum(array.nbytes for array in arrays.values())
            if size != options.bytes:
                raise ValueError(f"{size} bytes were received where {options.bytes} were requested")
            gb_per_s = size / seconds / 1e9
            _emit(round=round_number, bytes=size, seconds=seconds, gb_per_s=gb_per_s, cpu_s=cpu_s)
            del snapshot, arrays  # Frees their memory for the next round.


def _publish_small(relay: tensor_relay.Relay) -> None:
    """Publishes a small tensor whenever the one before was committed, as in small.rs."""
    message = np.full(MESSAGE_BYTES, 0x5A, np.uint8)
    while True:
        message[:8].view("<u8")[0] = time.monotonic_ns()
        publication = relay.publish("small", {"message": message})
        while not _is_committed(publication):
            pass


def _is_committed(publication: Any) -> bool:
    """Waits for a commit. The first one takes until a receiver asks for small tensors."""
    try:
        publication.wait_committed(timeout=TIMEOUT_S)
    except TimeoutError:
        return False
    return True


def _small(client: tensor_relay.Client, count: int) -> dict[str, float]:
    """Receives small tensors one by one: a tenth of `count` to warm up, then `count`. Returns percentiles of their
    latency."""
    took_us = []
    with client.subscribe("small") as subscription:
        for _ in range(count + -(-count // 10)):
            message = subscription.next(timeout=10)["message"].numpy()
            took_us.append((time.monotonic_ns() - int(message[:8].view("<u8")[0])) / 1e3)
    took_us = sorted(took_us[-count:])

    def percentile(percent: int) -> float:
        return took_us[-(-count * percent // 100) - 1]

    return {"p50_us": percentile(50), "p99_us": percentile(99), "min_us": took_us[0], "max_us": took_us[-1]}


def _content(size: int, data: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Random bytes, or normally distributed weights in bf16 or f32."""
    if data == "noise":
        return np.random.SFC64(1).random_raw(-(-size // 8)).view(np.uint8)[:size]
    import ml_dtypes

    dtype = np.dtype(np.float32 if data == "weights-f32" else ml_dtypes.bfloat16)
    weights = np.empty(size // dtype.itemsize, dtype)
    random = np.random.Generator(np.random.SFC64(1))
    for part in np.array_split(weights, -(-size // (64 << 20))):
        part[:] = random.standard_normal(len(part), np.float32) * np.float32(0.02)
    return weights


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _emit(**line: object) -> None:
    print(json.dumps(line), flush=True)


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="contender.py", allow_abbrev=False)
    parser.add_argument("--end-with-stdin", action="store_true")
    sides = parser.add_subparsers(dest="side", required=True)
    serve, receive = sides.add_parser("serve"), sides.add_parser("receive")
    for side in (serve, receive):
        side.add_argument("--bytes", type=int, required=True)
        side.add_argument("--mtu", type=int)  # Ignored: the package probes the path's MTU.
    serve.add_argument("--listen", default="127.0.0.1:0")
    serve.add_argument("--data", choices=["noise", "weights", "weights-f32"], default="noise")
    receive.add_argument("--ticket", required=True)
    receive.add_argument("--rounds", type=int, default=5)
    receive.add_argument("--small", type=int, default=0)
    receive.add_argument("--lanes", type=int, default=1, help="the number of lanes, or 0 for an automatic one")
    return parser.parse_args()


main()
