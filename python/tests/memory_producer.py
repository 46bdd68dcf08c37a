"""A producer process that reports its memory use: `memory_producer.py STATE_DIR TENSORS TENSOR_BYTES`.

Prints its ticket. On "publish BYTES" from stdin it publishes a version and waits until a consumer has it; on "withdraw
BYTES" it withdraws the topic. After each command it prints its memory use as JSON, as `memory_consumer.py` does.
"""

import sys

import numpy as np
from memory_consumer import memory_report, resident_bytes

import tensor_relay


def main():
    state_dir, tensors, tensor_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    weights = np.random.default_rng(1).normal(size=tensor_bytes // 4).astype(np.float32)
    published = {f"w{number}": weights + number for number in range(tensors)}
    with tensor_relay.serve("127.0.0.1:0", state_dir=state_dir) as relay:

        def counted_bytes():
            stats = relay.stats()
            return stats["staged_bytes"] + stats["reusable_bytes"] + stats["encoded_bytes"]

        print(relay.ticket, flush=True)
        baseline = resident_bytes()
        for line in sys.stdin:
            command, expected_bytes = line.split()
            if command == "publish":
                for tensor in published.values():
                    tensor[::1000] += 1
                relay.publish("t", published).wait_committed(timeout=60)
            else:
                relay.withdraw("t")
            print(memory_report(baseline, counted_bytes, expected_bytes), flush=True)


if __name__ == "__main__":
    main()
