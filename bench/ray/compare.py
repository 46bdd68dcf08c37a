"""Ray's own ways to move tensors from actor to actor, and tensor-relay's, in turn, on one machine.

    python compare.py [--pairs 20] [--only large list objects killed]

A source actor has the tensors, a sink actor is called with what the source returns, and answers with a sum over an element of each
4 KiB and the last one, which is another in each transfer. The time is from the call of the source until the driver has the answer. CPU
time is that of the driver and all processes below it, so of all of Ray. In each pair every contender has a turn; the order is reversed
from pair to pair.

Three contenders share two actors. "Zero-copy" is Ray's object store with RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1, which is a setting of a
process, and has two of its own.
"""

import argparse
import contextlib
import math
import os
import platform
import statistics
import time
from dataclasses import dataclass, field

import psutil
import ray
import torch
from ray.experimental.collective import create_collective_group, destroy_collective_group

import tensor_relay
import tensor_relay.integrations.ray

STORE = "object store"
ZERO_COPY = "object store, zero-copy"
OURS = "TENSOR_RELAY"
TRANSPORTS = {STORE: None, ZERO_COPY: None, "GLOO": "GLOO", OURS: OURS}

PATIENCE_S = 120
"""More than the 60 s after which Ray gives up a transfer."""
STRIDE = 1024
"""Elements of float32 from one that the sink reads to the next: one of each page."""


@dataclass(frozen=True)
class Workload:
    title: str
    tensors: int
    elements: int
    transfers: int = 1
    """So many are one turn, whose time is their median: a single one's CPU time is too short for the system's clock of 10 ms."""
    apart: bool = False
    """Each tensor is an object of its own."""

    @property
    def gib(self):
        return self.tensors * self.elements * 4 / 2**30


WORKLOADS = {
    "large": Workload("one tensor of 100 MB", 1, 25_000_000, transfers=5),
    "list": Workload("one list of 10,000 tensors of 4 kB", 10_000, 1_000),
    "objects": Workload("10,000 objects, each a tensor of 4 kB", 10_000, 1_000, apart=True),
}
KILLED = Workload("one tensor of 1 GB", 1, 250_000_000)


def look(value):
    tensors = [value] if isinstance(value, torch.Tensor) else value
    return math.fsum(tensor[::STRIDE].sum(dtype=torch.float64).item() + tensor[-1].item() for tensor in tensors)


@ray.remote(num_cpus=0.5, enable_tensor_transport=True)
class Source:
    def prepare(self, workload):
        """Says what the sink has to answer if all marks are 0."""
        generator = torch.Generator().manual_seed(0)
        self.tensors = [torch.randn(workload.elements, generator=generator) for _ in range(workload.tensors)]
        return look(self.all(0))

    def one(self, mark, index):
        self.tensors[index][-1] = mark
        return self.tensors[index]

    def all(self, mark):
        return [self.one(mark, index) for index in range(len(self.tensors))]


@ray.remote(num_cpus=0.5, enable_tensor_transport=True)
class Sink:
    def look(self, value):
        return look(value)


class Actors:
    """A source and a sink, for one workload."""

    def __init__(self, workload, zero_copy=False):
        environment = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"} if zero_copy else {}
        options = {"runtime_env": {"env_vars": environment}} if environment else {}
        self.workload, self.mark = workload, 0
        self.source, self.sink = Source.options(**options).remote(), Sink.options(**options).remote()
        self.unmarked = get(self.source.prepare.remote(workload))
        self.group = None if zero_copy else create_collective_group([self.source, self.sink], backend="GLOO")

    def start(self, transport):
        """Begins a transfer. Returns the sum that the sink has to answer, and the answers to come."""
        self.mark += 1
        whole = self.workload.tensors > 1 and not self.workload.apart
        method = self.source.all if whole else self.source.one
        if transport is not None:
            method = method.options(tensor_transport=transport)
        arguments = [()] if whole else [(index,) for index in range(self.workload.tensors)]
        expected = self.unmarked + self.mark * self.workload.tensors
        return expected, [self.sink.look.remote(method.remote(self.mark, *each)) for each in arguments]

    def close(self):
        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # Ray may have ended it with the actors.
            if self.group is not None:
                destroy_collective_group(self.group)
        ray.kill(self.source)
        ray.kill(self.sink)


def get(what):
    return ray.get(what, timeout=PATIENCE_S)


def cpu_s():
    """What this process and all below it have used, by process: those that end in between are left out."""
    used = {}
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used[process.pid] = times.user + times.system
    return used


def busy_s():
    """What all processes of the machine have used."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait


@dataclass
class Turn:
    seconds: float
    cpu_s_per_gib: float
    others: float
    """Processors that programs other than Ray kept busy."""


def transfer(actors, transport):
    begun = time.monotonic()
    check(*actors.start(transport))
    return time.monotonic() - begun


def check(expected, answers):
    came = math.fsum(get(answers))
    if not math.isclose(came, expected, rel_tol=1e-9):
        raise AssertionError(f"the sink answered {came} instead of {expected}")


def turn(actors, transport):
    workload = actors.workload
    before, begun, busy = cpu_s(), time.monotonic(), busy_s()
    seconds = [transfer(actors, transport) for _ in range(workload.transfers)]
    after, busy, took = cpu_s(), busy_s() - busy, time.monotonic() - begun
    used = sum(each - before.get(pid, 0.0) for pid, each in after.items())
    return Turn(statistics.median(seconds), used / workload.gib / workload.transfers, max(0.0, busy - used) / took)


@dataclass
class Scene:
    """All contenders with one workload."""

    workload: Workload
    turns: dict = field(default_factory=lambda: {name: [] for name in TRANSPORTS})
    failures: dict = field(default_factory=dict)

    def run(self, pairs):
        self.open()
        for pair in range(-1, pairs):  # The first warms up.
            for name in list(TRANSPORTS)[:: 1 if pair % 2 == 0 else -1]:
                if name not in self.failures:
                    self.attempt(name, warm_up=pair < 0)
        self.close()

    def open(self):
        shared = Actors(self.workload)
        self.actors = dict.fromkeys(TRANSPORTS, shared) | {ZERO_COPY: Actors(self.workload, zero_copy=True)}

    def close(self):
        for actors in set(self.actors.values()):
            actors.close()

    def attempt(self, name, warm_up=False):
        """Who fails is left out from then on. Its actors may be dead, so the others get new ones."""
        try:
            done = turn(self.actors[name], TRANSPORTS[name])
        except Exception as error:
            self.failures[name] = said(error)
            self.close()
            self.open()
            for other in TRANSPORTS.keys() - self.failures.keys():
                self.attempt(other, warm_up=True)
            return
        if not warm_up:
            self.turns[name].append(done)

    def rows(self):
        for name, turns in self.turns.items():
            if name in self.failures:
                yield f"| {self.workload.title} | {name} | {len(turns)} | fails: {self.failures[name]} | | |"
            else:
                seconds = spread([each.seconds * 1e3 for each in turns], 0)
                cpu = spread([each.cpu_s_per_gib for each in turns], 2)
                yield f"| {self.workload.title} | {name} | {len(turns)} | {seconds} | {cpu} | {self.of_ours(turns)} |"

    def of_ours(self, turns):
        pairs = list(zip(turns, self.turns[OURS], strict=False))
        if not pairs or turns is self.turns[OURS]:
            return ""
        times = statistics.median(its.seconds / ours.seconds for its, ours in pairs)
        cpu = statistics.median(its.cpu_s_per_gib / ours.cpu_s_per_gib for its, ours in pairs)
        return f"{times:.2f}; {cpu:.2f}"

    def others(self):
        return max(each.others for turns in self.turns.values() for each in turns)


def spread(values, digits):
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def said(error):
    """An error in one line that fits into a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or ['-'])[-1][:200]}".replace("|", "/")


def kill(name, who, share):
    """Kills one of two actors when a share of the time has passed that a whole transfer takes. Returns a row."""
    actors = Actors(KILLED, zero_copy=name == ZERO_COPY)
    whole = [transfer(actors, TRANSPORTS[name]) for _ in range(2)][-1]
    victim, other = (actors.source, actors.sink) if who == "source" else (actors.sink, actors.source)
    expected, answers = actors.start(TRANSPORTS[name])
    time.sleep(whole * share)
    ray.kill(victim)
    begun = time.monotonic()
    try:
        check(expected, answers)
        outcome = "arrived"
    except Exception as error:
        outcome = said(error)
    took = time.monotonic() - begun
    row = f"| {name} | {who} | {whole:.2f} s | {share:.0%} | {took:.1f} s | {outcome} | {works(other)} |"
    actors.close()
    return row


def works(actor):
    time.sleep(3)  # Ray kills an actor a second after the transfer has failed.
    try:
        get(actor.__ray_call__.remote(lambda self: None))
        return "yes"
    except ray.exceptions.RayError as error:
        return f"no: {type(error).__name__}"


def print_killed():
    print("\n| contender | killed | a whole transfer | killed after | then | outcome of the call | the other one works on |")
    print("|---|---|---:|---:|---:|---|---|")
    for name in TRANSPORTS:
        for who, share in [("source", 0.25), ("source", 0.5), ("source", 0.75), ("sink", 0.5)]:
            print(kill(name, who, share), flush=True)


def print_scenes(names, pairs):
    scenes = []
    for name in names:
        scenes.append(Scene(WORKLOADS[name]))
        scenes[-1].run(pairs)
    print("\n| workload | contender | turns | ms, median (least–most) | CPU s/GiB | of ours: time; CPU |")
    print("|---|---|---:|---|---|---|")
    for scene in scenes:
        print(*scene.rows(), sep="\n")
    print(f"\nOther programs kept at most {max(scene.others() for scene in scenes):.2f} of {os.cpu_count()} processors busy in a turn.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=[*WORKLOADS, "killed"], default=[*WORKLOADS, "killed"])
    args = parser.parse_args()
    versions = {"tensor_relay": tensor_relay.__version__, "Ray": ray.__version__, "PyTorch": torch.__version__}
    print(f"Python {platform.python_version()}, " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    tensor_relay.integrations.ray.register()
    ray.init(num_cpus=4, object_store_memory=2 << 30, include_dashboard=False, log_to_driver=False)
    if names := [name for name in WORKLOADS if name in args.only]:
        print_scenes(names, args.pairs)
    if "killed" in args.only:
        print_killed()
    ray.shutdown()


if __name__ == "__main__":
    main()
