"""Measures how long a worker's weights are unusable while a new policy is installed: with `prefetch` and `activate` of
tensor-relay, with `torch.save` to a shared folder, and with a Gloo broadcast.

    python policy_pause.py [--mib 200] [--steps 12]

A trainer process makes a policy of bf16 tensors and slightly changes its weights in each step, as an optimizer does.
The worker installs each version in the tensors that it computes with. The pause is the time in which these tensors are
written; "step to installed" also includes the transfer. The lower bound of the pause is one copy: the time to copy the
same bytes within the worker's memory.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed

import tensor_relay

LAYERS = 32
TIMEOUT_S = 60


def policy(mib, seed=0):
    generator = torch.Generator().manual_seed(seed)
    elements = (mib << 20) // 2 // LAYERS
    tensors = ((torch.randn(elements, generator=generator) * 0.02).bfloat16() for _ in range(LAYERS))
    return {f"layers.{layer}.weight": tensor for layer, tensor in enumerate(tensors)}


def change(weights, step):
    """Adds noise of about 1e-5 to every weight. Most weights stay the same, because they are rounded to bf16."""
    generator = torch.Generator().manual_seed(step)
    for tensor in weights.values():
        tensor.add_((torch.randn(tensor.shape, generator=generator) * 1e-5).bfloat16())


def relay_trainer(mib, steps, pipe, folder):
    weights = policy(mib)
    with tensor_relay.serve("127.0.0.1:0", ephemeral=True) as relay:
        pipe.send(relay.ticket)
        for step in range(steps):
            pipe.recv()
            change(weights, step)
            pipe.send(time.monotonic())
            relay.publish("policy", weights)
        pipe.recv()


def relay_worker(mib, steps, pipe, folder):
    weights = policy(mib, seed=1)
    with tensor_relay.connect(pipe.recv()) as client, client.subscribe("policy", out=weights) as subscription:
        for _ in range(steps):
            pipe.send("go")
            begun = pipe.recv()
            snapshot = subscription.prefetch(TIMEOUT_S)
            paused = time.monotonic()
            subscription.activate(snapshot)
            now = time.monotonic()
            yield now - paused, now - begun, weights
    pipe.send("done")


def file_trainer(mib, steps, pipe, folder):
    weights = policy(mib)
    pipe.send("ready")
    for step in range(steps):
        pipe.recv()
        change(weights, step)
        pipe.send(time.monotonic())
        torch.save(weights, folder / "part")
        (folder / "part").rename(folder / f"{step}.pt")
        pipe.send("saved")
    pipe.recv()


def file_worker(mib, steps, pipe, folder):
    weights = policy(mib, seed=1)
    pipe.recv()
    for step in range(steps):
        pipe.send("go")
        begun = pipe.recv()
        pipe.recv()
        loaded = torch.load(folder / f"{step}.pt")
        paused = time.monotonic()
        for name, tensor in weights.items():
            tensor.copy_(loaded[name])
        now = time.monotonic()
        (folder / f"{step}.pt").unlink()
        yield now - paused, now - begun, weights
    pipe.send("done")


def gloo_trainer(mib, steps, pipe, folder):
    weights = policy(mib)
    join_group(0, folder)
    for step in range(steps):
        pipe.recv()
        change(weights, step)
        pipe.send(time.monotonic())
        for tensor in weights.values():
            torch.distributed.broadcast(tensor, 0)
    pipe.recv()


def gloo_worker(mib, steps, pipe, folder):
    """Receives in place, so the worker is paused for the whole transfer."""
    weights = policy(mib, seed=1)
    join_group(1, folder)
    for _ in range(steps):
        pipe.send("go")
        begun = pipe.recv()
        paused = time.monotonic()
        for tensor in weights.values():
            torch.distributed.broadcast(tensor, 0)
        now = time.monotonic()
        yield now - paused, now - begun, weights
    pipe.send("done")
    torch.distributed.destroy_process_group()


def join_group(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=2)


METHODS = {
    "tensor-relay, prefetch and activate": (relay_trainer, relay_worker),
    "torch.save to a shared folder": (file_trainer, file_worker),
    "Gloo broadcast": (gloo_trainer, gloo_worker),
}


def copy_duration(mib):
    """The median time, in seconds, of one copy of the policy within this process."""
    source, target = policy(mib), policy(mib, seed=1)
    durations = []
    for _ in range(9):
        begun = time.monotonic()
        for name, tensor in target.items():
            tensor.copy_(source[name])
        durations.append(time.monotonic() - begun)
    return statistics.median(durations[1:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=200)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    expected = policy(args.mib)
    for step in range(args.steps):
        change(expected, step)
    print(f"{args.mib} MiB of bf16, {args.steps} steps; medians without the first step")
    spawned = multiprocessing.get_context("spawn")
    for name, (trainer, worker) in METHODS.items():
        copy = copy_duration(args.mib)
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = spawned.Pipe()
            process = spawned.Process(target=trainer, args=(args.mib, args.steps, theirs, Path(folder)))
            process.start()
            times = [(pause, took, weights) for pause, took, weights in worker(args.mib, args.steps, ours, Path(folder))]
            process.join(TIMEOUT_S)
        weights = times[-1][2]
        assert all(torch.equal(weights[key], expected[key]) for key in expected), f"{name}: other weights arrived"
        pause = statistics.median(pause for pause, _, _ in times[1:])
        took = statistics.median(took for _, took, _ in times[1:])
        print(
            f"{name:36}  pause {pause * 1e3:6.1f} ms, {pause / copy:5.2f} of one copy ({copy * 1e3:.1f} ms); "
            f"step to installed {took * 1e3:7.1f} ms"
        )


if __name__ == "__main__":
    main()
