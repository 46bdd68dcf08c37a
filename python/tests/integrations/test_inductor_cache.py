"""The cache of `torch.compile` (Inductor, on the processor), filled by one process and used by another one."""

import json
import os
import shutil
import subprocess
import sys

import numpy
import pytest
from safetensors.numpy import save_file

import tensor_relay
from conftest import TIMEOUT_S

pytest.importorskip("torch", reason="PyTorch is not installed")

PROGRAM = """if True:
    import json, torch
    from torch._dynamo.utils import counters

    @torch.compile
    def function(x, y):
        return torch.nn.functional.gelu(x @ y).softmax(-1) + y.sum()

    torch.manual_seed(1)
    result = function(torch.randn(64, 64), torch.randn(64, 64)).sum().item()
    found = counters["inductor"]
    print(json.dumps([found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], result]))"""


def test_a_second_host_compiles_nothing(relay, tmp_path):
    """Goal: a process with an empty home finds in Inductor's cache what another one compiled. Method: PyTorch's own
    counters, without a cache, and after the cache has come with a model."""
    if shutil.which("g++") is None:
        pytest.skip("a C++ compiler cannot be fetched here, and Inductor needs one")
    cache = tmp_path / "cache"

    def compiled(home):
        (tmp_path / home).mkdir()
        environment = {"HOME": str(tmp_path / home), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        words, limit_s = [sys.executable, "-c", PROGRAM], 10 * TIMEOUT_S
        ran = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, timeout=limit_s)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout.splitlines()[-1])

    hits, misses, expected = compiled("producer")
    assert hits == 0 and misses > 0
    (tmp_path / "model").mkdir()
    save_file({"w": numpy.zeros(3)}, tmp_path / "model" / "model.safetensors")
    relay.publish_files("m", tmp_path / "model", engine_caches=[f"inductor={cache}"])
    shutil.rmtree(cache)
    tensor_relay.pull(relay.ticket_for("m"), tmp_path / "out", engine_caches=[f"inductor={cache}"])
    hits, misses, result = compiled("consumer")
    assert hits > 0 and misses == 0 and result == expected
