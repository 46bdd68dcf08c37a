"""Sends a tensor from one process to another, without any framework: `python/wheel` runs this in each Python version.

Without an argument the process publishes, and starts itself again with the ticket as argument to receive.
"""

import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

import tensor_relay

SENT = array("f", range(100_000))


def publish() -> None:
    with tempfile.TemporaryDirectory() as state, tensor_relay.serve("127.0.0.1:0", state_dir=state) as relay:
        published = relay.publish("t", {"x": SENT, "step": 7}, hold="borrow", metadata={"run": "a"})
        subprocess.run([sys.executable, "-P", __file__, relay.ticket], check=True, timeout=60)
        published.wait_committed(timeout=10)
    loaded = {Path(line.split()[-1]).name for line in Path("/proc/self/maps").read_text().splitlines()}
    assert not any("cuda" in name for name in loaded), f"CUDA was loaded: {loaded}"
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"Python {version}: {SENT.itemsize * len(SENT)} bytes from one process to another, without CUDA")


def receive(ticket: str) -> None:
    with tensor_relay.connect(ticket) as client:
        snapshot = client.subscribe("t").next(timeout=30)
        assert (snapshot.version, snapshot.entries, snapshot.metadata) == (1, {"step": 7}, {"run": "a"})
        assert snapshot["x"].shape == (len(SENT),) and snapshot["x"].dtype == "f32"
        assert memoryview(snapshot["x"]).tolist() == SENT.tolist()


if __name__ == "__main__":
    receive(sys.argv[1]) if len(sys.argv) > 1 else publish()
