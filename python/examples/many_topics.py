"""How long a topic lives that is made, read once and dropped: as activations and other tensors do that one process has for
another. Thousands of them, each by a client in a process of its own.

    python many_topics.py --topics 5000 --bytes 4096 --readers 8

Prints, as one JSON object, milliseconds from `publish` until `withdraw` has returned (median, and 99 of 100), the parts of
that, how many topics a second that makes with so many readers at a time, and what is left in memory when all are gone.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

import tensor_relay


def read(ticket: str, names: Connection) -> None:
    """Reads each topic that it is told of, and says that it has."""
    with tensor_relay.connect(ticket) as client:
        while (name := names.recv()) is not None:
            snapshot = client.get(name)
            names.send(len(snapshot))


def live(relay: tensor_relay.Relay, reader: Connection, topic: str, tensors: dict) -> list[float]:
    """One life. Gives when each part of it was over."""
    times = [time.perf_counter()]
    relay.publish(topic, tensors)
    times.append(time.perf_counter())
    reader.send(topic)
    assert reader.recv() == len(tensors)
    times.append(time.perf_counter())
    relay.withdraw(topic)
    return [*times, time.perf_counter()]


def lives(relay: tensor_relay.Relay, reader: Connection, topics: list[str], tensors: dict) -> list[list[float]]:
    measured = [live(relay, reader, topic, tensors) for topic in topics]
    reader.send(None)
    return measured


def told(measured: list[list[float]], begin: int, end: int) -> dict[str, float]:
    ms = [1e3 * (times[end] - times[begin]) for times in measured]
    return {"median_ms": round(statistics.median(ms), 3), "p99_ms": round(statistics.quantiles(ms, n=100)[98], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=5000)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--readers", type=int, default=1, help="how many processes read at a time, each topic by one")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")  # A fork of a process that uses tensor_relay cannot use it.
    tensors = {"x": np.zeros(options.bytes, "u1")}
    with tensor_relay.serve("127.0.0.1:0", ephemeral=True) as relay:
        pipes = [spawn.Pipe() for _ in range(options.readers)]
        readers = [spawn.Process(target=read, args=(relay.ticket, theirs), daemon=True) for _, theirs in pipes]
        for reader in readers:
            reader.start()
        for number, (ours, _) in enumerate(pipes):
            live(relay, ours, f"first/{number}", tensors)  # It has connected.
        names = [f"many/{number}" for number in range(options.topics)]
        shares = [names[number :: options.readers] for number in range(options.readers)]
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(options.readers) as pool:
            done = [pool.submit(lives, relay, ours, share, tensors) for (ours, _), share in zip(pipes, shares, strict=True)]
            measured = [times for each in done for times in each.result()]
        seconds = time.perf_counter() - began
        for reader in readers:
            reader.join(60)
        stats = relay.stats()
    print(
        json.dumps(
            {
                "topics": len(measured),
                "bytes": options.bytes,
                "readers": options.readers,
                "topics_per_s": round(len(measured) / seconds),
                "life": told(measured, 0, 3),
                "publish": told(measured, 0, 1),
                "get": told(measured, 1, 2),
                "withdraw": told(measured, 2, 3),
                "left_bytes": stats["staged_bytes"] + stats["encoded_bytes"],
            }
        )
    )


if __name__ == "__main__":
    main()
