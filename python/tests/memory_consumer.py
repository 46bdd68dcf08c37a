"""A consumer process that reports its memory use: `memory_consumer.py TICKET HOW TENSORS TENSOR_BYTES`.

HOW is "snapshot" (without `out`), "atomic" or "torn" (`out` with atomic=True or False), or "phases" (`prefetch` and
`activate`). On "next BYTES" from stdin it prints "waiting" and receives a version; on "leave BYTES" it ends its
subscription. After each command it prints its memory use as JSON, as soon as resident and counted memory agree and are
about BYTES at most, or after a timeout.
"""

import gc
import json
import sys
import time
from pathlib import Path

import numpy as np

import tensor_relay

# Data in transfer (up to 64 MiB at the receiver), and freed memory that allocators keep.
OVERHEAD_BYTES = 88 << 20
# How long memory may take to return to the system.
SETTLE_TIMEOUT_S = 20.0


def resident_bytes(peak=False):
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def is_settled(report, expected_bytes):
    grown, counted = report["grown_bytes"], report["counted_bytes"]
    return max(grown, counted) < expected_bytes + OVERHEAD_BYTES and abs(grown - counted) < OVERHEAD_BYTES


def memory_report(baseline, counted_bytes, expected_bytes):
    """This process' memory beyond `baseline`, as JSON. Waits until it is as expected, or for a timeout."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        gc.collect()
        report = {
            "grown_bytes": resident_bytes() - baseline,
            "peak_bytes": resident_bytes(peak=True) - baseline,
            "counted_bytes": counted_bytes(),
        }
        if is_settled(report, int(expected_bytes)) or time.monotonic() > deadline:
            return json.dumps(report)
        time.sleep(0.05)


def main():
    ticket, how, tensors, tensor_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    out = None
    if how != "snapshot":
        out = {f"w{number}": np.ones(tensor_bytes // 4, np.float32) for number in range(tensors)}
    with tensor_relay.connect(ticket) as client:

        def counted_bytes():
            stats = client.stats()
            return stats["snapshot_bytes"] + stats["reusable_bytes"] + stats["base_bytes"]

        baseline = resident_bytes()
        subscription = client.subscribe("t", out=out, atomic=how != "torn")
        snapshot = None
        for line in sys.stdin:
            command, expected_bytes = line.split()
            snapshot = None
            if command == "next":
                # A version that arrives before `next` lends `out` would be received into other memory, so the test
                # publishes only after this line.
                print("waiting", flush=True)
                snapshot = subscription.prefetch(60.0) if how == "phases" else subscription.next(60.0)
                if how == "phases":
                    subscription.activate(snapshot)
            else:
                subscription.close()
            print(memory_report(baseline, counted_bytes, expected_bytes), flush=True)
        del snapshot


if __name__ == "__main__":
    main()
