#!/usr/bin/env python3
"""Transfers tensors of real frameworks between GPUs and compares every byte. Run it by `bench/gpu/run frameworks`.

Tests PyTorch, CuPy and JAX where they are installed, and always a minimal framework over the CUDA driver API
(cuda_by_hand.py), with which it also measures tensor-relay beside its rivals (contenders.py). A missing framework is
reported as skipped, and is no failure. Each part runs unattended in a process of its own, and is ended with all that it
started if it exceeds its limit.
Writes `DATE-gpu-frameworks.json` and prints the same as a table.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from contenders import MIB, Skipped, measure, noise, open_gpu  # noqa: E402

PART_TIMEOUT_S = 150
# The limit for all parts together: a little less than the limit in bench/gpu/frameworks.
TOTAL_TIMEOUT_S = 510
# Set by --device and --quick.
DEVICE, SIZE_BYTES = "cuda:0", 1024 * MIB


def import_or_skip(name):
    try:
        return __import__(name)
    except ImportError as error:
        raise Skipped(f"{name} is not installed: {error}") from error


def on_gpu(why):
    if DEVICE == "cpu":
        raise Skipped(f"it needs a GPU: {why}")


def torch_for_device():
    torch = import_or_skip("torch")
    if DEVICE != "cpu" and not torch.cuda.is_available():
        raise Skipped(f"it needs a GPU: torch {torch.__version__} sees none")
    return torch


def synchronize(torch):
    if DEVICE != "cpu":
        torch.cuda.synchronize()


def serve_and_connect(state, **options):
    import tensor_relay

    relay = tensor_relay.serve("127.0.0.1:0", state_dir=state)
    return relay, tensor_relay.connect(relay.ticket, **options)


def gpu_memory(device):
    return {"device": device} | ({"gpu_memory_bytes": 8 * SIZE_BYTES} if device != "cpu" else {})


def next_of(subscription):
    return subscription.next(timeout=60)


def gb_per_s(nbytes, seconds):
    return round(nbytes / seconds / 1e9, 2)


# The parts. Each accepts a folder for the server's key, and returns its results.


def ctypes_arrays(state):
    """The ctypes framework: both values of `hold`; receiving on the GPU, on the host and into `out`; a busy producer stream."""
    from cuda_by_hand import Imported

    gpu = open_gpu()
    results = {"device": gpu.name()}
    content = os.urandom(min(32 * MIB, SIZE_BYTES))
    relay, client = serve_and_connect(state / "a", device=DEVICE)
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
    torch = torch_for_device()
    relay, client = serve_and_connect(state, device=DEVICE)
    names = (
        "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 "
        "float8_e4m3fn float8_e5m2"
    ).split()
    sent = {}
    for name in filter(lambda name: hasattr(torch, name), names):
        raw = torch.randint(0, 2 if name == "bool" else 256, (4096,), dtype=torch.uint8, device=DEVICE)
        sent[name] = raw.view(getattr(torch, name))
    sent["transposed"] = torch.randn(64, 96, device=DEVICE).T
    sent["empty"] = torch.empty(0, 3, device=DEVICE)
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
    on_gpu("streams")
    torch = torch_for_device()
    relay, client = serve_and_connect(state, device=DEVICE)
    side, size = torch.cuda.Stream(), 64 * MIB
    subscription = client.subscribe("t")
    for number in range(10):
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)  # Keeps the stream busy for a tenth of a second.
            weights = torch.full((size,), number, dtype=torch.uint8, device=DEVICE)
            relay.publish("t", {"w": weights}, hold="borrow" if number % 2 else "stage")
        reader = torch.cuda.Stream()
        with torch.cuda.stream(reader):
            snapshot = next_of(subscription)
            torch.cuda._sleep(200_000_000)
            copy = snapshot["w"].torch().clone()
            del snapshot
        relay.publish("t", {"w": torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)})
        next_of(subscription)
        reader.synchronize()
        assert bool((copy == number).all()), f"version {number} has bytes of another version"
    return {"versions": 10}


def torch_model(state):
    """A model receives another's weights in place: parameters keep their addresses, and get one version's values."""
    torch = torch_for_device()
    relay, client = serve_and_connect(state, device=DEVICE)

    def model():
        return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)]).to(DEVICE, torch.bfloat16)

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
    """The rate of 1 GiB of noise from a tensor over loopback, within one process: the server and the client share an
    interpreter and its threads. `lanes` measures two processes."""
    torch = torch_for_device()
    results = {}

    def new():
        return torch.randint(0, 256, (SIZE_BYTES,), dtype=torch.uint8, device=DEVICE)

    def rates_of(folder, hold, device="cpu", **subscribe):
        """The rates, of new bytes each, and a check of the last version's tensor."""
        relay, client = serve_and_connect(state / folder, device=device)
        subscription, rates = client.subscribe("t", **subscribe), []
        for _ in range(4):
            sent = new()
            synchronize(torch)
            begun = time.perf_counter()
            relay.publish("t", {"w": sent}, hold=hold)
            snapshot = next_of(subscription)
            rates.append(gb_per_s(SIZE_BYTES, time.perf_counter() - begun))
            assert snapshot.receipt.wire_bytes >= SIZE_BYTES, "not every byte was sent"
            got = subscribe["out"]["w"] if subscribe else snapshot["w"].torch()
            assert torch.equal(got.cpu(), sent.cpu())
            del snapshot, got
        client.close()
        relay.close(0)
        results[f"{folder}_gb_per_s"] = rates[1:]  # The first transfer also allocates memory.

    rates_of("to_device_stage", "stage", DEVICE)
    rates_of("to_device_borrow", "borrow", DEVICE)
    rates_of("to_host_borrow", "borrow")
    for atomic in (True, False):
        rates_of(f"out_atomic_{atomic}", "borrow", DEVICE, out={"w": new()}, atomic=atomic)
    return results


def lanes(state):
    """tensor-relay between two processes: with 1, 2, 4 and 8 lanes into `out`; and with the client's own choice,
    version by version: into `out`, into new memory, staged, and over QUIC alone."""
    gpu = open_gpu()
    arrays = [noise(gpu, SIZE_BYTES) for _ in range(2)]
    results = {f"{count}_lanes": measure("relay", arrays, gpu, 5, lanes=count) for count in (1, 2, 4, 8)}
    results["auto_lanes"] = measure("relay", arrays, gpu, 16)
    results["auto_lanes_snapshots"] = measure("relay", arrays, gpu, 5, snapshots=True)
    results["auto_lanes_stage"] = measure("relay", arrays, gpu, 5, hold="stage")
    results["quic"] = measure("relay", arrays, gpu, 5, transport="quic")
    return results


def rival(name):
    def part(state):
        gpu = open_gpu()
        return measure(name, [noise(gpu, SIZE_BYTES) for _ in range(2)], gpu, 5)

    part.__name__ = name
    return part


def torch_publish(state):
    """The milliseconds for which `publish` of 1 GiB blocks its caller: the first, and the median of later ones."""
    import tensor_relay

    torch = torch_for_device()
    weights = torch.randn(SIZE_BYTES // 2, device=DEVICE).to(torch.bfloat16)
    parts = weights.split(SIZE_BYTES // 2 // 256)
    layouts = {"1": {"w": weights}, "256": {f"l{at}": part for at, part in enumerate(parts)}}
    copy, results = torch.empty_like(weights), {}
    for _ in range(2):  # The first one is slower.
        synchronize(torch)
        begun = time.perf_counter()
        copy.copy_(weights)
        synchronize(torch)
        results["a_copy_within_the_device_ms"] = round(1e3 * (time.perf_counter() - begun), 2)
    del copy
    for device in dict.fromkeys((DEVICE, "cpu")):
        for count, tensors in layouts.items():
            for hold in ("stage", "borrow"):
                folder = state / f"{device[:4]}-{count}-{hold}"
                relay = tensor_relay.serve("127.0.0.1:0", state_dir=folder, **gpu_memory(device))
                times_ms = []
                for _ in range(6):
                    # A borrowed version needs memory of its own: the one before is still lent.
                    new = {name: tensor.clone() for name, tensor in tensors.items()} if hold == "borrow" else tensors
                    weights.neg_()  # Other bytes than those of the version before.
                    synchronize(torch)
                    begun = time.perf_counter()
                    relay.publish("t", new, hold=hold)
                    times_ms.append(1e3 * (time.perf_counter() - begun))
                relay.close(0)
                later = sorted(times_ms[1:])[len(times_ms) // 2 - 1]
                results[f"server_on_{device}_{count}_tensors_{hold}_ms"] = [round(times_ms[0], 2), round(later, 2)]
    return results


def training_loop(state):
    """A bf16 transformer of 0.5 G parameters in training (AdamW, 1e-6); a second one on the GPU follows each step, from
    a server that stages on the GPU, and from one that stages on the host."""
    torch = torch_for_device()
    is_small = SIZE_BYTES < 1024 * MIB
    width, layers, steps = (64, 2, 3) if is_small else (1536, 18, 10)

    def model():
        layer = torch.nn.TransformerEncoderLayer(width, width // 32, 4 * width, dropout=0.0, batch_first=True)
        return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(DEVICE, torch.bfloat16)

    def follow(server_device):
        """For each step, in milliseconds: publish, publish to installed; and the megabytes on the wire."""
        import tensor_relay

        torch.manual_seed(0)
        trained, follower = model(), model()
        optimiser = torch.optim.AdamW(trained.parameters(), lr=1e-6, fused=True)
        relay = tensor_relay.serve("127.0.0.1:0", state_dir=state / server_device, **gpu_memory(server_device))
        client = tensor_relay.connect(relay.ticket, **gpu_memory(DEVICE))
        relay.open("policy", keep_versions=2)
        subscription, done = client.subscribe("policy", out=follower.state_dict(), atomic=False), []
        for _ in range(steps):
            inputs = torch.randn(4, 128, width, dtype=torch.bfloat16, device=DEVICE)
            (trained(inputs) - inputs).square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()
            synchronize(torch)
            begun = time.perf_counter()
            relay.publish("policy", trained.state_dict())
            published = time.perf_counter()
            receipt = next_of(subscription).receipt
            synchronize(torch)
            installed = time.perf_counter()
            for name, tensor in trained.state_dict().items():
                assert torch.equal(tensor, follower.state_dict()[name]), name
            times_ms = [round(1e3 * (until - begun)) for until in (published, installed)]
            done.append((*times_ms, round(receipt.wire_bytes / 1e6, 1)))
        client.close()
        relay.close(0)
        return done, sum(tensor.numel() * tensor.element_size() for tensor in trained.state_dict().values())

    results = {}
    for server_device in dict.fromkeys((DEVICE, "cpu")):
        results[f"server_on_{server_device}"], results["bytes"] = follow(server_device)
    return results


def torch_memory(state):
    """The last 249 of 300 versions of 16 MiB increase the used GPU memory by less than 128 MiB."""
    on_gpu("its free memory")
    torch = torch_for_device()
    relay, client = serve_and_connect(state, device=DEVICE)
    subscription, free_before = client.subscribe("t"), None
    for number in range(300):
        relay.publish("t", {"w": torch.full((16 * MIB,), number % 251, dtype=torch.uint8, device=DEVICE)}, hold="borrow")
        got = next_of(subscription).torch()["w"]
        assert int(got[0]) == int(got[-1]) == number % 251
        del got
        synchronize(torch)
        if number == 50:
            free_before = torch.cuda.mem_get_info()[0]
    lost = free_before - torch.cuda.mem_get_info()[0]
    assert lost < 128 * MIB, f"{lost} bytes of GPU memory were leaked"
    return {"lost_bytes": lost}


def cupy(state):
    """CuPy arrays, published and received on a stream other than the default one."""
    on_gpu("CuPy has no arrays on the host")
    cupy = import_or_skip("cupy")
    relay, client = serve_and_connect(state, device=DEVICE)
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
    if DEVICE != "cpu" and jax.default_backend() != "gpu":
        raise Skipped(f"it needs a GPU: jax {jax.__version__} sees none")
    relay, client = serve_and_connect(state, device=DEVICE)
    sent = {"w": jax.numpy.arange(1 << 20, dtype="float32"), "b": jax.numpy.ones((30, 50), "bfloat16")}
    for hold in ("stage", "borrow"):
        relay.publish("t", sent, hold=hold)
        got = next_of(client.subscribe("t")).jax()
        for name, array in sent.items():
            assert got[name].dtype == array.dtype and bool((got[name] == array).all()), name
            assert DEVICE.split(":")[0] in str(got[name].device).lower(), got[name].device
    return {"jax": jax.__version__}


PARTS = [
    ctypes_arrays,
    torch_dtypes,
    torch_streams,
    torch_model,
    cupy,
    jax,
    torch_publish,
    training_loop,
    lanes,
    *map(rival, ("socket", "ssl", "gloo", "nixl")),
    torch_rates,
    torch_memory,
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


def outcome_of(name, limit_s, options):
    begun = time.perf_counter()
    if limit_s < 1:
        return {"outcome": "failed", "why": "the time for all parts was used up", "seconds": 0}
    command = [sys.executable, __file__, "--part", name, f"--device={options.device}", *["--quick"] * options.quick]
    # In a session of its own, so that the processes that it started end with it.
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
        printed = [line for line in stdout.splitlines() if line.startswith('{"outcome"')] or [""]
        outcome = json.loads(printed[-1]) if process.returncode == 0 else {"outcome": "failed", "why": stderr[-2000:]}
    except subprocess.TimeoutExpired:
        outcome = {"outcome": "failed", "why": f"it had not ended after {limit_s:.0f} s, and was killed"}
    except json.JSONDecodeError:
        outcome = {"outcome": "failed", "why": "it ended without printing an outcome"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {**outcome, "seconds": round(time.perf_counter() - begun, 1)}


def machine_info():
    """The machine, Python and GPUs that the results depend on."""
    info = {"machine": platform.platform(), "python": platform.python_version(), "processors": os.cpu_count()}
    info["commit"] = os.environ.get("TENSOR_RELAY_COMMIT", "unknown")
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        info["gpus"] = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        info["gpus"] = f"unknown: {error}"
    return info


def write(document, folder):
    # Only measurements of a GPU are results, and only they have a name without these words.
    is_fake = DEVICE != "cpu" and "TENSOR_RELAY_FAKE_CUDA" in os.environ
    words = {"FAKE": is_fake, "HOST": DEVICE == "cpu", "quick": SIZE_BYTES < 1024 * MIB}
    stem = "-".join(word for word, applies in (words | {"frameworks": True}).items() if applies)
    path = folder / f"{document['date']}-gpu-{stem}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def main():
    global DEVICE, SIZE_BYTES
    names = [part.__name__ for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(names), help="only these, separated by commas")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="a folder, which is made")
    parser.add_argument("--device", choices=["cuda:0", "cpu"], default=DEVICE, help="cpu only shows that the parts run")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: the numbers mean nothing")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    DEVICE, SIZE_BYTES = options.device, 4 * MIB if options.quick else SIZE_BYTES
    if options.part:
        run_part(options.part)
        return 0
    if unknown := set(options.parts.split(",")) - set(names):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    # So that a part in progress is ended, too, when `timeout` ends this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    document = {"date": datetime.date.today().isoformat(), **machine_info(), "parts": {}}
    print(json.dumps({key: value for key, value in document.items() if key != "parts"}))
    failed, deadline = False, time.monotonic() + TOTAL_TIMEOUT_S
    for name in options.parts.split(","):
        limit_s = min(PART_TIMEOUT_S, deadline - time.monotonic())
        outcome = document["parts"][name] = outcome_of(name, limit_s, options)
        failed |= outcome["outcome"] == "failed"
        details = {key: value for key, value in outcome.items() if key != "outcome"}
        print(f"{name:14} {outcome['outcome']:8} {details}", flush=True)
        path = write(document, options.out)  # After each part, so that an interrupted run leaves its results.
    print(f"written: {path}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
