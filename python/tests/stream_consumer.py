"""A consumer process that receives a version by `Client.stream`: `stream_consumer.py TICKET BUCKET_BYTES`. Prints as
JSON the number of tensors, the peak of the client's memory counters, and the growth of the process' peak memory."""

import json
import sys

from memory_consumer import resident_bytes

import tensor_relay


def main():
    ticket, bucket_bytes = sys.argv[1], int(sys.argv[2])
    with tensor_relay.connect(ticket) as client:
        counted_bytes = tensors = 0
        client.describe("t")
        baseline = resident_bytes()
        for _, tensor in client.stream("t", bucket_bytes=bucket_bytes):
            tensors += 1
            tensor.numpy().sum()
            stats = client.stats()
            counted_bytes = max(counted_bytes, stats["snapshot_bytes"] + stats["reusable_bytes"] + stats["base_bytes"])
        grown_bytes = resident_bytes(peak=True) - baseline
    print(json.dumps({"tensors": tensors, "counted_bytes": counted_bytes, "grown_bytes": grown_bytes}))


if __name__ == "__main__":
    main()
