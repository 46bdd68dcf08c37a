"""The producer of `test_counters.py`: publishes a state dict once, and reports copies and memory.

`state_dict_producer.py STATE_DIR MIB stage|borrow`: the state dict has layers of 16 MiB of noise, each with a bias of
8 KiB.
Prints a ticket. After a consumer has received the version, prints as JSON the counters, and by how much the peak memory
of the process exceeds its memory before the publish.
"""

import json
import sys

import numpy as np

import tensor_relay

WIDTH = 2048


def memory_bytes(name: str) -> int:
    """A value from /proc/self/status: VmRSS is the resident memory now, VmHWM its peak."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith(name))
    return int(line.split()[1]) << 10


def layer(number: int) -> dict[str, np.ndarray]:
    words = np.random.SFC64(number).random_raw(WIDTH * WIDTH // 2).view(np.float32).reshape(WIDTH, WIDTH)
    return {f"layers.{number}.weight": words, f"layers.{number}.bias": np.zeros(WIDTH, np.float32)}


def main() -> None:
    state_dir, size_mib, hold = sys.argv[1:]
    state_dict = {name: tensor for number in range(int(size_mib) // 16) for name, tensor in layer(number).items()}
    with tensor_relay.serve("127.0.0.1:0", state_dir=state_dir) as relay:
        before = memory_bytes("VmRSS")
        published = relay.publish("policy", state_dict, hold=hold)
        print(relay.ticket)
        published.wait_committed(timeout=120)
        grown, stats = memory_bytes("VmHWM") - before, relay.stats()
        first_words = state_dict["layers.0.weight"].view(np.uint32)[0, :2].tolist()
    report = {
        "payload_bytes": published.payload_bytes,
        "publication_copied_bytes": published.copied_bytes,
        "staged_bytes": stats["staged_bytes"],
        "read_bytes": stats["read_bytes"],
        "copied_bytes": stats["copied_bytes"],
        "grown_bytes": grown,
        "first_words": first_words,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
