"""A consumer in a process of its own, and what memory it takes: `following.py TICKET HOW TENSORS TENSOR_BYTES`.

HOW is "snapshot", or "atomic" or "torn" for the two ways of `out`, or "phases" for `prefetch` and `activate`. For "next BYTES" on stdin it says that it waits and takes a
version, for "leave BYTES" it ends its subscription; then it says as JSON what it takes, once that is what it counts, and no
more than BYTES.
"""

import gc
import json
import sys
import time
from pathlib import Path

import numpy as np

import tensor_relay

# What is on its way (up to 64 MiB at the receiver), and what allocators keep.
BESIDE_BYTES = 88 << 20
# What is given back is given back soon, but not at once.
SETTLED_S = 20.0


def resident_bytes(peak=False):
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def is_settled(report, expected_bytes):
    grown, counted = report["grown_bytes"], report["counted_bytes"]
    return max(grown, counted) < expected_bytes + BESIDE_BYTES and abs(grown - counted) < BESIDE_BYTES


def taken(early, counted_bytes, expected_bytes):
    """What this process takes beside what it took `early`, once it is what is expected or has been otherwise for too long."""
    late = time.monotonic() + SETTLED_S
    while True:
        gc.collect()
        report = {
            "grown_bytes": resident_bytes() - early,
            "peak_bytes": resident_bytes(peak=True) - early,
            "counted_bytes": counted_bytes(),
        }
        if is_settled(report, int(expected_bytes)) or time.monotonic() > late:
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

        early = resident_bytes()
        subscription = client.subscribe("t", out=out, atomic=how != "torn")
        snapshot = None
        for line in sys.stdin:
            word, expected_bytes = line.split()
            snapshot = None
            if word == "next":
                # A version that comes before `out` is lent for it lands beside `out`.
                print("waiting", flush=True)
                snapshot = subscription.prefetch(60.0) if how == "phases" else subscription.next(60.0)
                if how == "phases":
                    subscription.activate(snapshot)
            else:
                subscription.close()
            print(taken(early, counted_bytes, expected_bytes), flush=True)
        del snapshot


if __name__ == "__main__":
    main()
