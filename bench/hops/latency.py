"""Small versions, one by one: when each was published, and how long later a consumer has it, by the clock of both.

    latency.py publish ADDRESS BYTES     publishes every 20 ms until it is ended
    latency.py receive TICKET VERSIONS   prints the milliseconds of as many versions
"""

import json
import pathlib
import sys
import time

import numpy

import tensor_relay

INTERVAL_S = 0.02
# What a session's beginning costs is not measured.
SKIPPED = 50


def publish(address, size):
    with tensor_relay.serve(f"{address}:4747") as relay:
        content = numpy.random.default_rng(1).integers(0, 256, int(size), numpy.uint8)
        pathlib.Path("latency.ticket").write_text(relay.ticket)
        print(json.dumps({"event": "serving", "ticket_file": "latency.ticket"}), flush=True)
        while True:
            relay.publish("small", {"w": content}, metadata={"at": time.monotonic()})
            time.sleep(INTERVAL_S)


def receive(ticket, count):
    ms = []
    with tensor_relay.connect(ticket) as client:
        for snapshot in client.subscribe("small"):
            ms.append(1000 * (time.monotonic() - snapshot.metadata["at"]))
            if len(ms) == int(count) + SKIPPED:
                break
    print(json.dumps({"event": "latencies", "ms": ms[SKIPPED:]}), flush=True)


{"publish": publish, "receive": receive}[sys.argv[1]](*sys.argv[2:])
