#!/usr/bin/env python3
"""Moves tensors of real frameworks between GPUs and compares every byte: bench/gpu/frameworks says how it is run.

Whatever of PyTorch, CuPy and JAX is installed is asked for tensors; a framework of two hundred lines (cuda_by_hand.py) is
there in any case. What is not there is told, and no failure. Nobody has to watch: each part runs in a process of its own
with a deadline. Writes `DATE-gpu-frameworks.json` and prints the same as a table.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "bin"), str(HERE.parent.parent / "python" / "tests" / "cuda")]

PART_S = 150
# All of them together: a little less than bench/gpu/frameworks gives them.
ALL_S = 550
MIB = 1 << 20


class Skipped(Exception):
    """A part that cannot run here, and why."""


def needs(name):
    try:
        return __import__(name)
    except ImportError as error:
        raise Skipped(f"{name} is not here: {error}") from error


def torch_with_gpu():
    torch = needs("torch")
    if not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} sees no GPU")
    return torch


def pair(state, **options):
    import tensor_relay

    relay = tensor_relay.serve("127.0.0.1:0", state_dir=state)
    return relay, tensor_relay.connect(relay.ticket, **options)


def next_of(subscription):
    return subscription.next(timeout=60)


def gbps(nbytes, seconds):
    return round(nbytes / seconds / 1e9, 2)


# Each part takes a folder for the server's key and gives what it found.


def by_hand(state):
    """The framework of two hundred lines: both holds, both landings, out=, a stream that is behind."""
    from cuda_by_hand import Driver, Gpu, Imported

    try:
        gpu = Gpu(Driver())
    except Exception as error:
        raise Skipped(f"there is no CUDA: {error}") from error
    found = {"device": gpu.name()}
    content = os.urandom(32 * MIB)
    relay, client = pair(state / "a", device="cuda:0")
    for hold in ("stage", "borrow"):
        published = relay.publish("t", {"w": gpu.array(content), "x": gpu.array(content[:100], "f32")}, hold=hold)
        snapshot = next_of(client.subscribe("t"))
        for options in ({}, {"max_version": (1, 0)}):
            assert Imported(gpu, snapshot["w"], gpu.stream(), **options).bytes() == content
        assert bytes(memoryview(snapshot.to_host()["x"].raw)) == content[:100]
        found[f"{hold}_copied_bytes"] = published.copied_bytes
    for atomic in (True, False):
        out = {"w": gpu.array(bytes(len(content)))}
        next_of(client.subscribe("t", out=out, atomic=atomic, select=["w"]))
        assert out["w"].bytes() == content
    # What is behind on a stream of its own is published as it will be.
    new, weights = gpu.array(content[::-1]), gpu.array(content)
    with gpu.on(gpu.stream()):
        for _ in range(200):
            gpu.copy(weights.address, new.address, len(content))
        relay.publish("t", {"w": weights})
    assert Imported(gpu, next_of(client.subscribe("t"))["w"]).bytes() == content[::-1]
    return found


def torch_dtypes(state):
    """Every dtype of PyTorch's, from GPU to GPU, and what PyTorch's current stream has to do with it."""
    torch = torch_with_gpu()
    relay, client = pair(state, device="cuda:0")
    names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn float8_e5m2".split()
    sent = {}
    for name in filter(lambda name: hasattr(torch, name), names):
        raw = torch.randint(0, 2 if name == "bool" else 256, (4096,), dtype=torch.uint8, device="cuda")
        sent[name] = raw.view(getattr(torch, name))
    sent["turned"] = torch.randn(64, 96, device="cuda").T
    sent["empty"] = torch.empty(0, 3, device="cuda")
    sent["tied"] = sent["float32"]
    for hold in ("stage", "borrow"):
        relay.publish("t", sent, hold=hold)
        got = next_of(client.subscribe("t")).torch()
        for name, tensor in sent.items():
            assert got[name].device == tensor.device and got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
            assert torch.equal(got[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
    return {"dtypes": len(sent)}


def torch_streams(state):
    """Goal: no stream sees a tensor too early, in either direction, and memory is not used again under a reader."""
    torch = torch_with_gpu()
    relay, client = pair(state, device="cuda:0")
    side, size = torch.cuda.Stream(), 64 * MIB
    subscription = client.subscribe("t")
    for number in range(10):
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)  # A tenth of a second of the GPU's time.
            weights = torch.full((size,), number, dtype=torch.uint8, device="cuda")
            relay.publish("t", {"w": weights}, hold="borrow" if number % 2 else "stage")
        reader = torch.cuda.Stream()
        with torch.cuda.stream(reader):
            snapshot = next_of(subscription)
            torch.cuda._sleep(200_000_000)
            seen = snapshot["w"].torch().clone()
            del snapshot
        relay.publish("t", {"w": torch.full((size,), 255, dtype=torch.uint8, device="cuda")})
        next_of(subscription)
        reader.synchronize()
        assert bool((seen == number).all()), f"version {number} was torn"
    return {"versions": 10}


def torch_model(state):
    """A model follows another, in place: parameters keep their addresses, and a reader on the GPU sees whole versions."""
    torch = torch_with_gpu()
    relay, client = pair(state, device="cuda:0")

    def model():
        return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)]).to("cuda", torch.bfloat16)

    trained, found = model(), {}
    for atomic in (True, False):
        follower, topic = model(), f"policy/{atomic}"
        addresses = [parameter.data_ptr() for parameter in follower.parameters()]
        subscription = client.subscribe(topic, out=follower.state_dict(), atomic=atomic)
        begun = time.perf_counter()
        for _ in range(5):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(torch.randn_like(parameter))
            relay.publish(topic, trained.state_dict())
            next_of(subscription)
            for name, tensor in trained.state_dict().items():
                assert torch.equal(tensor, follower.state_dict()[name]), name
        assert addresses == [parameter.data_ptr() for parameter in follower.parameters()]
        found[f"atomic_{atomic}_s"] = round((time.perf_counter() - begun) / 5, 3)
        subscription.close()
    return found


def torch_rates(state):
    """How fast 1 GiB goes from one GPU tensor to another over QUIC on loopback: both ends share this machine's cores."""
    torch = torch_with_gpu()
    size, found = 1024 * MIB, {}
    weights = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    for name, options, hold in [("gpu_to_gpu_stage", {"device": "cuda:0"}, "stage"), ("gpu_to_gpu_borrow", {"device": "cuda:0"}, "borrow"), ("gpu_to_host", {}, "borrow")]:
        relay, client = pair(state / name, **options)
        subscription, rates = client.subscribe("t"), []
        for _ in range(4):
            begun = time.perf_counter()
            relay.publish("t", {"w": weights}, hold=hold)
            snapshot = next_of(subscription)
            rates.append(gbps(size, time.perf_counter() - begun))
            assert options == {} or torch.equal(snapshot["w"].torch(), weights)
            del snapshot
        found[f"{name}_gb_per_s"] = rates[1:]  # The first one takes memory.
        client.close()
        relay.close(0)
    out = {"w": torch.empty_like(weights)}
    relay, client = pair(state / "out")
    for atomic in (True, False):
        rates, topic = [], f"t/{atomic}"
        subscription = client.subscribe(topic, out=out, atomic=atomic)
        for number in range(4):
            relay.publish(topic, {"w": weights + number}, hold="borrow")
            begun = time.perf_counter()
            next_of(subscription)
            rates.append(gbps(size, time.perf_counter() - begun))
            assert torch.equal(out["w"], weights + number)
        subscription.close()
        found[f"out_atomic_{atomic}_gb_per_s"] = rates[1:]
    return found


def torch_memory(state):
    """300 versions of 16 MiB leave the GPU's memory where it was."""
    torch = torch_with_gpu()
    relay, client = pair(state, device="cuda:0")
    subscription, early = client.subscribe("t"), None
    for number in range(300):
        relay.publish("t", {"w": torch.full((16 * MIB,), number % 251, dtype=torch.uint8, device="cuda")}, hold="borrow")
        got = next_of(subscription).torch()["w"]
        assert int(got[0]) == int(got[-1]) == number % 251
        del got
        torch.cuda.synchronize()
        if number == 50:
            early = torch.cuda.mem_get_info()[0]
    lost = early - torch.cuda.mem_get_info()[0]
    assert lost < 128 * MIB, f"{lost} bytes of the GPU's memory are gone"
    return {"lost_bytes": lost}


def cupy(state):
    """CuPy's arrays, in both directions, on a stream of its own."""
    cupy = needs("cupy")
    relay, client = pair(state, device="cuda:0")
    with cupy.cuda.Stream():
        sent = {"w": cupy.arange(1 << 20, dtype=cupy.float32), "turned": cupy.arange(600.0).reshape(20, 30).T}
        for hold in ("stage", "borrow"):
            relay.publish("t", sent, hold=hold)
            snapshot = next_of(client.subscribe("t"))
            for name, array in sent.items():
                assert bool((cupy.from_dlpack(snapshot[name]) == array).all()), name
        out = {"w": cupy.zeros(1 << 20, cupy.float32)}
        next_of(client.subscribe("t", out=out))
        assert bool((out["w"] == sent["w"]).all())
        cupy.cuda.get_current_stream().synchronize()
        snapshot.wait(cupy.cuda.get_current_stream())
    return {"cupy": cupy.__version__}


def jax(state):
    """JAX's arrays, in both directions."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax = needs("jax")
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        raise Skipped(f"jax {jax.__version__} sees no GPU: {error}") from error
    relay, client = pair(state, device="cuda:0")
    sent = {"w": jax.numpy.arange(1 << 20, dtype="float32"), "b": jax.numpy.ones((30, 50), "bfloat16")}
    for hold in ("stage", "borrow"):
        relay.publish("t", sent, hold=hold)
        got = next_of(client.subscribe("t")).jax()
        for name, array in sent.items():
            assert got[name].dtype == array.dtype and bool((got[name] == array).all()), name
            assert "cuda" in str(got[name].device).lower(), got[name].device
    return {"jax": jax.__version__}


PARTS = [by_hand, torch_dtypes, torch_streams, torch_model, torch_rates, torch_memory, cupy, jax]


def run_part(name):
    """Runs one part in this process, and prints what came of it as the last line."""
    part = next(part for part in PARTS if part.__name__ == name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = {"outcome": "passed", **part(Path(folder))}
        except Skipped as why:
            outcome = {"outcome": "skipped", "why": str(why)}
    print(json.dumps(outcome), flush=True)


def outcome_of(name, limit_s):
    begun = time.perf_counter()
    if limit_s < 1:
        return {"outcome": "failed", "why": "no time was left for it", "seconds": 0}
    try:
        ended = subprocess.run([sys.executable, __file__, "--part", name], capture_output=True, text=True, timeout=limit_s)
        last = ended.stdout.strip().splitlines()[-1:] or [""]
        outcome = json.loads(last[0]) if ended.returncode == 0 else {"outcome": "failed", "why": ended.stderr[-2000:]}
    except subprocess.TimeoutExpired:
        outcome = {"outcome": "failed", "why": f"it had not ended after {limit_s:.0f} s"}
    except json.JSONDecodeError:
        outcome = {"outcome": "failed", "why": "it ended without saying what it found"}
    return {**outcome, "seconds": round(time.perf_counter() - begun, 1)}


def place():
    """What the findings depend on."""
    found = {"machine": platform.platform(), "python": platform.python_version(), "processors": os.cpu_count()}
    with_gpu = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found["gpus"] = subprocess.run(with_gpu, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        found["gpus"] = f"unknown: {error}"
    return found


def written(document, folder):
    is_fake = any(found.get("device", "").startswith("Fake") for found in document["parts"].values())
    path = folder / f"{document['date']}-gpu-{'FAKE-' if is_fake else ''}frameworks.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def main():
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--parts", default=",".join(part.__name__ for part in PARTS))
    words.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    words.add_argument("--part", help=argparse.SUPPRESS)
    asked = words.parse_args()
    if asked.part:
        run_part(asked.part)
        return 0
    document = {"date": datetime.date.today().isoformat(), **place(), "parts": {}}
    print(json.dumps({key: value for key, value in document.items() if key != "parts"}))
    failed, ends = False, time.monotonic() + ALL_S
    for name in asked.parts.split(","):
        found = document["parts"][name] = outcome_of(name, min(PART_S, ends - time.monotonic()))
        failed |= found["outcome"] == "failed"
        print(f"{name:14} {found['outcome']:8} {({key: value for key, value in found.items() if key != 'outcome'})}", flush=True)
        path = written(document, asked.out)  # After each: who is ended in the middle has what is there.
    print(f"written: {path}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
