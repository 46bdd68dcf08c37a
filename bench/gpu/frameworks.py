#!/usr/bin/env python3
"""Transfers tensors of real frameworks between GPUs and compares every byte. Run it by `bench/gpu/run frameworks`.

Tests PyTorch, CuPy and JAX where they are installed, and always a minimal framework over the CUDA driver API
(cuda_by_hand.py). A missing framework is reported as skipped, and is no failure. Each part runs unattended in a process
of its own, with a deadline.
Writes `DATE-gpu-frameworks.json` and prints the same as a table.
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

PART_TIMEOUT_S = 150
# The limit for all parts together: a little less than the limit in bench/gpu/frameworks.
TOTAL_TIMEOUT_S = 550
MIB = 1 << 20


class Skipped(Exception):
    """The error of a part that cannot run on this machine. Its message is the reason."""


def import_or_skip(name):
    try:
        return __import__(name)
    except ImportError as error:
        raise Skipped(f"{name} is not installed: {error}") from error


def torch_with_gpu():
    torch = import_or_skip("torch")
    if not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} sees no GPU")
    return torch


def serve_and_connect(state, **options):
    import tensor_relay

    relay = tensor_relay.serve("127.0.0.1:0", state_dir=state)
    return relay, tensor_relay.connect(relay.ticket, **options)


def next_of(subscription):
    return subscription.next(timeout=60)


def gb_per_s(nbytes, seconds):
    return round(nbytes / seconds / 1e9, 2)


# The parts. Each accepts a folder for the server's key, and returns its results.


def ctypes_arrays(state):
    """The ctypes framework: both values of `hold`; receiving on the GPU, on the host and into `out`; a busy producer stream."""
    from cuda_by_hand import Driver, Gpu, Imported

    try:
        gpu = Gpu(Driver())
    except Exception as error:
        raise Skipped(f"CUDA is not available: {error}") from error
    results = {"device": gpu.name()}
    content = os.urandom(32 * MIB)
    relay, client = serve_and_connect(state / "a", device="cuda:0")
    for hold in ("stage", "borrow"):
        published = relay.publish("t", {"w": gpu.array(content), "x": gpu.array(content[:100], "f32")}, hold=hold)
        snapshot = next_of(client.subscribe("t"))
        for options in ({}, {"max_version": (1, 0)}):
            assert Imported(gpu, snapshot["w"], gpu.stream(), **options).bytes() == content
        assert bytes(memoryview(snapshot.to_host()["x"].raw)) == content[:100]
        results[f"{hold}_copied_bytes"] = published.copied_bytes
    for atomic in (True, False):
        out = {"w": gpu.array(bytes(len(content)))}
        next_of(client.subscribe("t", out=out, atomic=atomic, select=["w"]))
        assert out["w"].bytes() == content
    # A tensor that a stream is still writing is published with its final content.
    new, weights = gpu.array(content[::-1]), gpu.array(content)
    with gpu.on(gpu.stream()):
        for _ in range(200):
            gpu.copy(weights.address, new.address, len(content))
        relay.publish("t", {"w": weights})
    assert Imported(gpu, next_of(client.subscribe("t"))["w"]).bytes() == content[::-1]
    return results


def torch_dtypes(state):
    """Every dtype of PyTorch, from GPU to GPU, on PyTorch's current stream."""
    torch = torch_with_gpu()
    relay, client = serve_and_connect(state, device="cuda:0")
    names = (
        "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 "
        "float8_e4m3fn float8_e5m2"
    ).split()
    sent = {}
    for name in filter(lambda name: hasattr(torch, name), names):
        raw = torch.randint(0, 2 if name == "bool" else 256, (4096,), dtype=torch.uint8, device="cuda")
        sent[name] = raw.view(getattr(torch, name))
    sent["transposed"] = torch.randn(64, 96, device="cuda").T
    sent["empty"] = torch.empty(0, 3, device="cuda")
    sent["tied"] = sent["float32"]
    for hold in ("stage", "borrow"):
        relay.publish("t", sent, hold=hold)
        got = next_of(client.subscribe("t")).torch()
        for name, tensor in sent.items():
            received = got[name]
            assert (received.device, received.dtype, received.shape) == (tensor.device, tensor.dtype, tensor.shape), name
            assert torch.equal(received.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
    return {"dtypes": len(sent)}


def torch_streams(state):
    """No stream reads a tensor before it is complete, and memory is not reused while it is read."""
    torch = torch_with_gpu()
    relay, client = serve_and_connect(state, device="cuda:0")
    side, size = torch.cuda.Stream(), 64 * MIB
    subscription = client.subscribe("t")
    for number in range(10):
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)  # Keeps the stream busy for a tenth of a second.
            weights = torch.full((size,), number, dtype=torch.uint8, device="cuda")
            relay.publish("t", {"w": weights}, hold="borrow" if number % 2 else "stage")
        reader = torch.cuda.Stream()
        with torch.cuda.stream(reader):
            snapshot = next_of(subscription)
            torch.cuda._sleep(200_000_000)
            copy = snapshot["w"].torch().clone()
            del snapshot
        relay.publish("t", {"w": torch.full((size,), 255, dtype=torch.uint8, device="cuda")})
        next_of(subscription)
        reader.synchronize()
        assert bool((copy == number).all()), f"version {number} has bytes of another version"
    return {"versions": 10}


def torch_model(state):
    """A model receives another's weights in place: parameters keep their addresses, and get one version's values."""
    torch = torch_with_gpu()
    relay, client = serve_and_connect(state, device="cuda:0")

    def model():
        return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)]).to("cuda", torch.bfloat16)

    trained, results = model(), {}
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
        results[f"atomic_{atomic}_s"] = round((time.perf_counter() - begun) / 5, 3)
        subscription.close()
    return results


def torch_rates(state):
    """The rate of 1 GiB from a GPU tensor over loopback to the GPU or the host. Both ends share the machine's cores."""
    torch = torch_with_gpu()
    size, results = 1024 * MIB, {}
    weights = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    cases = [
        ("gpu_to_gpu_stage", {"device": "cuda:0"}, "stage"),
        ("gpu_to_gpu_borrow", {"device": "cuda:0"}, "borrow"),
        ("gpu_to_host", {}, "borrow"),
    ]
    for name, options, hold in cases:
        relay, client = serve_and_connect(state / name, **options)
        subscription, rates = client.subscribe("t"), []
        for _ in range(4):
            begun = time.perf_counter()
            relay.publish("t", {"w": weights}, hold=hold)
            snapshot = next_of(subscription)
            rates.append(gb_per_s(size, time.perf_counter() - begun))
            assert options == {} or torch.equal(snapshot["w"].torch(), weights)
            del snapshot
        results[f"{name}_gb_per_s"] = rates[1:]  # The first transfer also allocates memory.
        client.close()
        relay.close(0)
    out = {"w": torch.empty_like(weights)}
    relay, client = serve_and_connect(state / "out")
    for atomic in (True, False):
        rates, topic = [], f"t/{atomic}"
        subscription = client.subscribe(topic, out=out, atomic=atomic)
        for number in range(4):
            relay.publish(topic, {"w": weights + number}, hold="borrow")
            begun = time.perf_counter()
            next_of(subscription)
            rates.append(gb_per_s(size, time.perf_counter() - begun))
            assert torch.equal(out["w"], weights + number)
        subscription.close()
        results[f"out_atomic_{atomic}_gb_per_s"] = rates[1:]
    return results


def torch_lanes(state):
    """The rate of 1 GiB from GPU to GPU over loopback, by the number of lanes; `auto` is the client's own choice."""
    import tensor_relay

    torch = torch_with_gpu()
    size, results = 1024 * MIB, {}
    weights = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    out = {"w": torch.empty_like(weights)}
    relay = tensor_relay.serve("127.0.0.1:0", state_dir=state)
    for lanes in (1, 2, 4, 8, None):
        topic = f"t/{lanes}"
        with tensor_relay.connect(relay.ticket, lanes=lanes) as client:
            subscription, rates = client.subscribe(topic, out=out), []
            for number in range(12 if lanes is None else 5):
                relay.publish(topic, {"w": weights + number}, hold="borrow")
                begun = time.perf_counter()
                next_of(subscription)
                rates.append(gb_per_s(size, time.perf_counter() - begun))
            assert torch.equal(out["w"], weights + number)
            subscription.close()
        results[f"{lanes or 'auto'}_lanes_gb_per_s"] = rates
    return results


def torch_publish(state):
    """The milliseconds for which `publish` of 1 GiB blocks its caller: the first, and the median of later ones."""
    import tensor_relay

    torch = torch_with_gpu()
    weights = torch.randn(512 * MIB, device="cuda").to(torch.bfloat16)
    layouts = {"1": {"w": weights}, "256": {f"l{at}": part for at, part in enumerate(weights.split(2 * MIB))}}
    results = {}
    for device in ("cuda:0", "cpu"):
        options = {"gpu_memory_bytes": 8192 * MIB} if device != "cpu" else {}
        for count, tensors in layouts.items():
            for hold in ("stage", "borrow"):
                folder = state / f"{device[:4]}-{count}-{hold}"
                relay = tensor_relay.serve("127.0.0.1:0", state_dir=folder, device=device, **options)
                times_ms = []
                for _ in range(6):
                    # A borrowed version needs memory of its own: the one before is still lent.
                    new = {name: tensor.clone() for name, tensor in tensors.items()} if hold == "borrow" else tensors
                    torch.cuda.synchronize()
                    begun = time.perf_counter()
                    relay.publish("t", new, hold=hold)
                    times_ms.append(1e3 * (time.perf_counter() - begun))
                relay.close(0)
                later = sorted(times_ms[1:])[len(times_ms) // 2 - 1]
                results[f"server_on_{device}_{count}_tensors_{hold}_ms"] = [round(times_ms[0], 2), round(later, 2)]
    return results


def training_loop(state):
    """A bf16 transformer of 0.5 G parameters in training (AdamW, 1e-6); a second one on the GPU follows each step."""
    torch = torch_with_gpu()
    torch.manual_seed(0)

    def model():
        layer = torch.nn.TransformerEncoderLayer(1536, 12, 6144, dropout=0.0, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 18, enable_nested_tensor=False).to("cuda", torch.bfloat16)

    trained, follower = model(), model()
    optimiser = torch.optim.AdamW(trained.parameters(), lr=1e-6, fused=True)
    relay, client = serve_and_connect(state, device="cuda:0", gpu_memory_bytes=8192 * MIB)
    relay.open("policy", keep_versions=2)
    subscription = client.subscribe("policy", out=follower.state_dict(), atomic=False)
    steps = []
    for _ in range(10):
        inputs = torch.randn(4, 128, 1536, device="cuda", dtype=torch.bfloat16)
        (trained(inputs) - inputs).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        relay.publish("policy", trained.state_dict())
        published = time.perf_counter()
        receipt = next_of(subscription).receipt
        torch.cuda.synchronize()
        installed = time.perf_counter()
        for name, tensor in trained.state_dict().items():
            assert torch.equal(tensor, follower.state_dict()[name]), name
        times_ms = [round(1e3 * (until - begun)) for until in (published, installed)]
        steps.append((*times_ms, round(receipt.wire_bytes / 1e6, 1)))
    size = sum(tensor.numel() * tensor.element_size() for tensor in trained.state_dict().values())
    return {"bytes": size, "publish_ms_installed_ms_wire_mb": steps}


def torch_memory(state):
    """The last 249 of 300 versions of 16 MiB increase the used GPU memory by less than 128 MiB."""
    torch = torch_with_gpu()
    relay, client = serve_and_connect(state, device="cuda:0")
    subscription, free_before = client.subscribe("t"), None
    for number in range(300):
        relay.publish("t", {"w": torch.full((16 * MIB,), number % 251, dtype=torch.uint8, device="cuda")}, hold="borrow")
        got = next_of(subscription).torch()["w"]
        assert int(got[0]) == int(got[-1]) == number % 251
        del got
        torch.cuda.synchronize()
        if number == 50:
            free_before = torch.cuda.mem_get_info()[0]
    lost = free_before - torch.cuda.mem_get_info()[0]
    assert lost < 128 * MIB, f"{lost} bytes of GPU memory were leaked"
    return {"lost_bytes": lost}


def cupy(state):
    """CuPy arrays, published and received on a stream other than the default one."""
    cupy = import_or_skip("cupy")
    relay, client = serve_and_connect(state, device="cuda:0")
    with cupy.cuda.Stream():
        sent = {"w": cupy.arange(1 << 20, dtype=cupy.float32), "transposed": cupy.arange(600.0).reshape(20, 30).T}
        for hold in ("stage", "borrow"):
            relay.publish("t", sent, hold=hold)
            snapshot = next_of(client.subscribe("t"))
            for name, array in sent.items():
                assert bool((cupy.from_dlpack(snapshot[name]) == array).all()), name
        out = {"w": cupy.zeros(1 << 20, cupy.float32)}
        next_of(client.subscribe("t", out=out, select=["w"]))
        assert bool((out["w"] == sent["w"]).all())
        cupy.cuda.get_current_stream().synchronize()
        snapshot.wait(cupy.cuda.get_current_stream())
    return {"cupy": cupy.__version__}


def jax(state):
    """JAX arrays, published and received."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax = import_or_skip("jax")
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        raise Skipped(f"jax {jax.__version__} sees no GPU: {error}") from error
    relay, client = serve_and_connect(state, device="cuda:0")
    sent = {"w": jax.numpy.arange(1 << 20, dtype="float32"), "b": jax.numpy.ones((30, 50), "bfloat16")}
    for hold in ("stage", "borrow"):
        relay.publish("t", sent, hold=hold)
        got = next_of(client.subscribe("t")).jax()
        for name, array in sent.items():
            assert got[name].dtype == array.dtype and bool((got[name] == array).all()), name
            assert "cuda" in str(got[name].device).lower(), got[name].device
    return {"jax": jax.__version__}


PARTS = [
    ctypes_arrays,
    torch_dtypes,
    torch_streams,
    torch_model,
    torch_rates,
    torch_lanes,
    torch_publish,
    training_loop,
    torch_memory,
    cupy,
    jax,
]


def run_part(name):
    """Runs one part in this process, and prints its outcome as the last line."""
    part = next(part for part in PARTS if part.__name__ == name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = {"outcome": "passed", **part(Path(folder))}
        except Skipped as reason:
            outcome = {"outcome": "skipped", "why": str(reason)}
    print(json.dumps(outcome), flush=True)


def outcome_of(name, limit_s):
    begun = time.perf_counter()
    if limit_s < 1:
        return {"outcome": "failed", "why": "the time for all parts was used up", "seconds": 0}
    command = [sys.executable, __file__, "--part", name]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        last = result.stdout.strip().splitlines()[-1:] or [""]
        outcome = json.loads(last[0]) if result.returncode == 0 else {"outcome": "failed", "why": result.stderr[-2000:]}
    except subprocess.TimeoutExpired:
        outcome = {"outcome": "failed", "why": f"it had not ended after {limit_s:.0f} s"}
    except json.JSONDecodeError:
        outcome = {"outcome": "failed", "why": "it ended without printing an outcome"}
    return {**outcome, "seconds": round(time.perf_counter() - begun, 1)}


def machine_info():
    """The machine, Python and GPUs that the results depend on."""
    info = {"machine": platform.platform(), "python": platform.python_version(), "processors": os.cpu_count()}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        info["gpus"] = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        info["gpus"] = f"unknown: {error}"
    return info


def write(document, folder):
    is_fake = any(outcome.get("device", "").startswith("Fake") for outcome in document["parts"].values())
    path = folder / f"{document['date']}-gpu-{'FAKE-' if is_fake else ''}frameworks.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(part.__name__ for part in PARTS))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run_part(options.part)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    document = {"date": datetime.date.today().isoformat(), **machine_info(), "parts": {}}
    print(json.dumps({key: value for key, value in document.items() if key != "parts"}))
    failed, deadline = False, time.monotonic() + TOTAL_TIMEOUT_S
    for name in options.parts.split(","):
        outcome = document["parts"][name] = outcome_of(name, min(PART_TIMEOUT_S, deadline - time.monotonic()))
        failed |= outcome["outcome"] == "failed"
        details = {key: value for key, value in outcome.items() if key != "outcome"}
        print(f"{name:14} {outcome['outcome']:8} {details}", flush=True)
        path = write(document, options.out)  # After each part, so that an interrupted run leaves its results.
    print(f"written: {path}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
