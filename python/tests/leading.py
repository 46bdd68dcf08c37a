"""A producer in a process of its own, and what memory it takes: `leading.py STATE_DIR TENSORS TENSOR_BYTES`.

Prints its ticket. For "publish BYTES" on stdin it publishes a version and waits until somebody has it, for "withdraw BYTES"
it takes the topic back; then it says as JSON what it takes, once that is what it counts, and no more than BYTES.
"""

import sys

import numpy as np
from following import resident_bytes, taken

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
        early = resident_bytes()
        for line in sys.stdin:
            word, expected_bytes = line.split()
            if word == "publish":
                for tensor in published.values():
                    tensor[::1000] += 1
                relay.publish("t", published).wait_committed(timeout=60)
            else:
                relay.withdraw("t")
            print(taken(early, counted_bytes, expected_bytes), flush=True)


if __name__ == "__main__":
    main()
