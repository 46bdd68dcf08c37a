"""Measures short-lived topics: each is published, read once and withdrawn, as for activations that one process passes
to another. One or several reader processes share thousands of topics.

    python many_topics.py --topics 5000 --bytes 4096 --readers 8

Prints one JSON object: the milliseconds from `publish` to the return of `withdraw` (median and 99th percentile) and of
each call, the topics per second of all readers together, and the server's memory in use after the last topic.
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


def read_topics(ticket: str, names: Connection) -> None:
    """Runs a reader process: reads each topic whose name it receives, and replies with the number of tensors."""
    with tensor_relay.connect(ticket) as client:
        while (name := names.recv()) is not None:
            snapshot = client.get(name)
            names.send(len(snapshot))


def run_topic(relay: tensor_relay.Relay, reader: Connection, topic: str, tensors: dict) -> list[float]:
    """Publishes, reads and withdraws a topic. Returns the start time and the end time of each call."""
    times = [time.perf_counter()]
    relay.publish(topic, tensors)
    times.append(time.perf_counter())
    reader.send(topic)
    assert reader.recv() == len(tensors)
    times.append(time.perf_counter())
    relay.withdraw(topic)
    return [*times, time.perf_counter()]


def run_topics(relay: tensor_relay.Relay, reader: Connection, topics: list[str], tensors: dict) -> list[list[float]]:
    measured = [run_topic(relay, reader, topic, tensors) for topic in topics]
    reader.send(None)
    return measured


def percentiles(measured: list[list[float]], begin: int, end: int) -> dict[str, float]:
    """The percentiles of the times between two indices of the times of `run_topic`."""
    ms = [1e3 * (times[end] - times[begin]) for times in measured]
    return {"median_ms": round(statistics.median(ms), 3), "p99_ms": round(statistics.quantiles(ms, n=100)[98], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=5000)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--readers", type=int, default=1, help="reader processes; each topic is read by one of them")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")  # A process that was forked from a user of tensor_relay cannot use it.
    tensors = {"x": np.zeros(options.bytes, "u1")}
    with tensor_relay.serve("127.0.0.1:0", ephemeral=True) as relay:
        pipes = [spawn.Pipe() for _ in range(options.readers)]
        readers = [spawn.Process(target=read_topics, args=(relay.ticket, theirs), daemon=True) for _, theirs in pipes]
        for reader in readers:
            reader.start()
        for number, (ours, _) in enumerate(pipes):
            run_topic(relay, ours, f"first/{number}", tensors)  # Makes the reader connect before the measurement.
        names = [f"many/{number}" for number in range(options.topics)]
        shares = [names[number :: options.readers] for number in range(options.readers)]
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(options.readers) as pool:
            futures = [
                pool.submit(run_topics, relay, ours, share, tensors)
                for (ours, _), share in zip(pipes, shares, strict=True)
            ]
            measured = [times for future in futures for times in future.result()]
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
                "life": percentiles(measured, 0, 3),
                "publish": percentiles(measured, 0, 1),
                "get": percentiles(measured, 1, 2),
                "withdraw": percentiles(measured, 2, 3),
                "left_bytes": stats["staged_bytes"] + stats["encoded_bytes"],
            }
        )
    )


if __name__ == "__main__":
    main()
