"""Compares Ray's own tensor transports between actors with that of tensor-relay, in turn, on one machine.

    python compare.py [--rounds 20] [--only large list objects killed]

A source actor holds the tensors. A sink actor is called with the source's result, and returns the sum of one element
for each 4 KiB and of the last element, which changes with each transfer. The time runs from the call of the source
until the driver has the sum. CPU time is that of the driver and all its descendants, which include all of Ray. In each
round every contender has a turn; the order is reversed from round to round.

Three contenders share two actors. "Zero-copy" is Ray's object store with RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1; since
this is a setting of a process, that contender has two actors of its own.
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

TIMEOUT_S = 120
"""More than the 60 s after which Ray gives up a transfer."""
STRIDE = 1024
"""The distance of the float32 elements that the sink reads: one in each page of 4 KiB."""


@dataclass(frozen=True)
class Workload:
    title: str
    tensors: int
    elements: int
    """The number of float32 elements of each tensor."""
    transfers: int = 1
    """The number of transfers in a turn; the turn's time is their median. More than one if a single transfer is too short
    for the CPU clock, which advances by 10 ms."""
    is_split: bool = False
    """Whether each tensor is a Ray object of its own."""

    @property
    def gib(self):
        return self.tensors * self.elements * 4 / 2**30


WORKLOADS = {
    "large": Workload("one tensor of 100 MB", 1, 25_000_000, transfers=5),
    "list": Workload("one list of 10,000 tensors of 4 kB", 10_000, 1_000),
    "objects": Workload("10,000 objects, each a tensor of 4 kB", 10_000, 1_000, is_split=True),
}
KILLED = Workload("one tensor of 1 GB", 1, 250_000_000)


def sampled_sum(value):
    tensors = [value] if isinstance(value, torch.Tensor) else value
    return math.fsum(tensor[::STRIDE].sum(dtype=torch.float64).item() + tensor[-1].item() for tensor in tensors)


@ray.remote(num_cpus=0.5, enable_tensor_transport=True)
class Source:
    def prepare(self, workload):
        """Makes the tensors. Returns the sum that the sink has to return when each tensor's last element, its mark, is 0."""
        generator = torch.Generator().manual_seed(0)
        self.tensors = [torch.randn(workload.elements, generator=generator) for _ in range(workload.tensors)]
        return sampled_sum(self.all(0))

    def one(self, mark, index):
        self.tensors[index][-1] = mark
        return self.tensors[index]

    def all(self, mark):
        return [self.one(mark, index) for index in range(len(self.tensors))]


@ray.remote(num_cpus=0.5, enable_tensor_transport=True)
class Sink:
    def sampled_sum(self, value):
        return sampled_sum(value)


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
        """Begins a transfer. Returns the expected sum, and the references to the sink's results."""
        self.mark += 1
        is_list = self.workload.tensors > 1 and not self.workload.is_split
        method = self.source.all if is_list else self.source.one
        if transport is not None:
            method = method.options(tensor_transport=transport)
        arguments = [()] if is_list else [(index,) for index in range(self.workload.tensors)]
        expected = self.unmarked + self.mark * self.workload.tensors
        return expected, [self.sink.sampled_sum.remote(method.remote(self.mark, *each)) for each in arguments]

    def close(self):
        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # Ray may have destroyed the group already.
            if self.group is not None:
                destroy_collective_group(self.group)
        ray.kill(self.source)
        ray.kill(self.sink)


def get(references):
    return ray.get(references, timeout=TIMEOUT_S)


def cpu_s():
    """The CPU seconds of this process and its descendants, by process. Processes that have ended are left out."""
    used = {}
    current = psutil.Process()
    for process in [current, *current.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used[process.pid] = times.user + times.system
    return used


def machine_busy_s():
    """The CPU seconds of all processes of the machine."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait


@dataclass
class Turn:
    seconds: float
    cpu_s_per_gib: float
    others: float
    """The average number of processors that programs other than Ray kept busy."""


def transfer(actors, transport):
    begun = time.monotonic()
    check(*actors.start(transport))
    return time.monotonic() - begun


def check(expected, references):
    total = math.fsum(get(references))
    if not math.isclose(total, expected, rel_tol=1e-9):
        raise AssertionError(f"the sink returned {total} instead of {expected}")


def turn(actors, transport):
    workload = actors.workload
    before, begun, busy = cpu_s(), time.monotonic(), machine_busy_s()
    seconds = [transfer(actors, transport) for _ in range(workload.transfers)]
    after, busy, took = cpu_s(), machine_busy_s() - busy, time.monotonic() - begun
    used = sum(each - before.get(pid, 0.0) for pid, each in after.items())
    return Turn(statistics.median(seconds), used / workload.gib / workload.transfers, max(0.0, busy - used) / took)


@dataclass
class Comparison:
    """The turns of all contenders with one workload."""

    workload: Workload
    turns: dict = field(default_factory=lambda: {name: [] for name in TRANSPORTS})
    failures: dict = field(default_factory=dict)

    def run(self, rounds):
        self.open()
        for round_number in range(-1, rounds):  # The first round is the warm-up.
            for name in list(TRANSPORTS)[:: 1 if round_number % 2 == 0 else -1]:
                if name not in self.failures:
                    self.attempt(name, warm_up=round_number < 0)
        self.close()

    def open(self):
        shared = Actors(self.workload)
        self.actors = dict.fromkeys(TRANSPORTS, shared) | {ZERO_COPY: Actors(self.workload, zero_copy=True)}

    def close(self):
        for actors in set(self.actors.values()):
            actors.close()

    def attempt(self, name, warm_up=False):
        """Runs one turn. A contender that fails is left out from then on, and all get new actors."""
        try:
            result = turn(self.actors[name], TRANSPORTS[name])
        except Exception as error:
            self.failures[name] = one_line(error)
            self.close()
            self.open()
            for other in TRANSPORTS.keys() - self.failures.keys():
                self.attempt(other, warm_up=True)
            return
        if not warm_up:
            self.turns[name].append(result)

    def rows(self):
        for name, turns in self.turns.items():
            if name in self.failures:
                yield f"| {self.workload.title} | {name} | {len(turns)} | fails: {self.failures[name]} | | |"
            else:
                seconds = spread([each.seconds * 1e3 for each in turns], 0)
                cpu = spread([each.cpu_s_per_gib for each in turns], 2)
                yield f"| {self.workload.title} | {name} | {len(turns)} | {seconds} | {cpu} | {self.ratios_to_ours(turns)} |"

    def ratios_to_ours(self, turns):
        pairs = list(zip(turns, self.turns[OURS], strict=False))
        if not pairs or turns is self.turns[OURS]:
            return ""
        time_ratio = statistics.median(theirs.seconds / ours.seconds for theirs, ours in pairs)
        cpu_ratio = statistics.median(theirs.cpu_s_per_gib / ours.cpu_s_per_gib for theirs, ours in pairs)
        return f"{time_ratio:.2f}; {cpu_ratio:.2f}"

    def busiest_others(self):
        """The largest number of processors that programs other than Ray kept busy in a turn."""
        return max(each.others for turns in self.turns.values() for each in turns)


def spread(values, digits):
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def one_line(error):
    """An error's last line, shortened for a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or ['-'])[-1][:200]}".replace("|", "/")


def kill_during_transfer(name, role, share):
    """Kills the source or the sink after a share of a full transfer's time. Returns a table row."""
    actors = Actors(KILLED, zero_copy=name == ZERO_COPY)
    full_s = [transfer(actors, TRANSPORTS[name]) for _ in range(2)][-1]
    victim, survivor = (actors.source, actors.sink) if role == "source" else (actors.sink, actors.source)
    expected, references = actors.start(TRANSPORTS[name])
    time.sleep(full_s * share)
    ray.kill(victim)
    begun = time.monotonic()
    try:
        check(expected, references)
        outcome = "arrived"
    except Exception as error:
        outcome = one_line(error)
    took = time.monotonic() - begun
    row = f"| {name} | {role} | {full_s:.2f} s | {share:.0%} | {took:.1f} s | {outcome} | {still_works(survivor)} |"
    actors.close()
    return row


def still_works(actor):
    time.sleep(3)  # Ray kills an actor a second after the transfer has failed.
    try:
        get(actor.__ray_call__.remote(lambda self: None))
        return "yes"
    except ray.exceptions.RayError as error:
        return f"no: {type(error).__name__}"


def print_killed():
    print("\n| contender | killed actor | full transfer | killed after | time to outcome | outcome | the other actor still works |")
    print("|---|---|---:|---:|---:|---|---|")
    for name in TRANSPORTS:
        for role, share in [("source", 0.25), ("source", 0.5), ("source", 0.75), ("sink", 0.5)]:
            print(kill_during_transfer(name, role, share), flush=True)


def print_comparisons(names, rounds):
    comparisons = []
    for name in names:
        comparisons.append(Comparison(WORKLOADS[name]))
        comparisons[-1].run(rounds)
    print("\n| workload | contender | turns | ms, median (min–max) | CPU s/GiB | divided by TENSOR_RELAY: time; CPU |")
    print("|---|---|---:|---|---|---|")
    for comparison in comparisons:
        print(*comparison.rows(), sep="\n")
    others = max(comparison.busiest_others() for comparison in comparisons)
    print(f"\nOther programs kept at most {others:.2f} of {os.cpu_count()} processors busy in a turn.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=[*WORKLOADS, "killed"], default=[*WORKLOADS, "killed"])
    args = parser.parse_args()
    versions = {"tensor_relay": tensor_relay.__version__, "Ray": ray.__version__, "PyTorch": torch.__version__}
    print(f"Python {platform.python_version()}, " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    tensor_relay.integrations.ray.register(stage=False)
    ray.init("local", num_cpus=4, object_store_memory=2 << 30, include_dashboard=False, log_to_driver=False)
    if names := [name for name in WORKLOADS if name in args.only]:
        print_comparisons(names, args.rounds)
    if "killed" in args.only:
        print_killed()
    ray.shutdown()


if __name__ == "__main__":
    main()
