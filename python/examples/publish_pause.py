"""How long a trainer stands still for `publish(hold="stage")`, beside a plain copy of the same tensors.

In each round the tensors are copied into memory that exists, with as many threads as there are processors, and then
published, in turn. The report has the first version alone, whose memory is new, and the medians of the later ones.
Nothing receives the versions, unless `--subscribe` is given: then this process does, before the next round.

    python python/examples/publish_pause.py --bytes 1073741824 --tensors 256 --framework torch
"""

import argparse
import concurrent.futures
import json
import os
import statistics
import time

import numpy

import tensor_relay

parser = argparse.ArgumentParser()
parser.add_argument("--bytes", type=int, default=1 << 30, help="the size of all tensors together")
parser.add_argument("--tensors", type=int, default=1)
parser.add_argument("--rounds", type=int, default=20)
parser.add_argument("--framework", choices=["numpy", "torch"], default="numpy")
parser.add_argument("--subscribe", action="store_true")
parser.add_argument("--pause", type=float, default=0.5, help="seconds between rounds, in which a trainer would compute")
options = parser.parse_args()

processors = len(os.sched_getaffinity(0))
each = options.bytes // options.tensors
arrays = [numpy.full(each, number % 251, numpy.uint8) for number in range(options.tensors)]
copies = [numpy.zeros_like(array) for array in arrays]
if options.framework == "torch":
    import torch

    tensors = {f"layer.{number}": torch.from_numpy(array) for number, array in enumerate(arrays)}
else:
    tensors = {f"layer.{number}": array for number, array in enumerate(arrays)}

# Each thread copies one part in `processors` of all tensors: a few large pieces.
bounds = [options.bytes * number // processors for number in range(processors + 1)]


def copy_part(thread):
    for number, (source, target) in enumerate(zip(arrays, copies)):
        first, last = (min(max(bound - number * each, 0), each) for bound in bounds[thread:thread + 2])
        if first < last:
            target[first:last] = source[first:last]


def seconds(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


with (
    tensor_relay.serve("127.0.0.1:0") as relay,
    tensor_relay.connect(relay.ticket) as client,
    concurrent.futures.ThreadPoolExecutor(processors) as threads,
):
    subscription = client.subscribe("policy") if options.subscribe else None
    times = []
    for step in range(options.rounds + 1):
        arrays[0][:8] = step % 251
        copied = seconds(lambda: list(threads.map(copy_part, range(processors))))
        published = seconds(lambda: relay.publish("policy", tensors, metadata={"step": step}))
        times.append((copied, published))
        if subscription:
            subscription.next()
        time.sleep(options.pause)

later = times[1:]
ratios = sorted(published / copied for copied, published in later)
copied, published = (statistics.median(column) * 1e3 for column in zip(*later))
print(json.dumps({
    "framework": options.framework, "tensors": options.tensors, "bytes": options.bytes, "processors": processors,
    "first_publish_ms": times[0][1] * 1e3, "copy_ms": copied, "publish_ms": published,
    "ratio": statistics.median(ratios), "ratio_quartiles": [ratios[len(ratios) // 4], ratios[len(ratios) * 3 // 4]],
    "ratios": [published / copied for copied, published in later],
}))  # fmt: skip
