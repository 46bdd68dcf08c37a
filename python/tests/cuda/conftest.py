"""Fixtures of the GPU tests: the fake CUDA driver (tests/fake-cuda), its control, and a small framework on top of it.

TENSOR_RELAY_FAKE_CUDA_LIBRARY is the library's path, which python/tests/run sets. Without it these tests are skipped.
"""

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent)]

from cuda_by_hand import Driver, Gpu, lent_tensors  # noqa: E402

import tensor_relay  # noqa: E402

TIMEOUT_S = 60.0
# How long a test waits for an event that must not happen.
BLOCKED_MIN_S = 0.3


class FakeCuda:
    """The fake driver's control function, which receives commands and returns results as text."""

    def __init__(self, path):
        # Later loads of libcuda.so return this library, since its soname is the same.
        self._control = ctypes.CDLL(path).fake_cuda_control
        self._control.restype = ctypes.c_size_t
        self._control.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
        self.path = path
        # Whether a test has broken a GPU. The driver then cannot be cleaned up; the next test resets it.
        self.is_broken = False

    def control(self, command):
        result = ctypes.create_string_buffer(1 << 16)
        length = self._control(command.encode(), len(command.encode()), result, len(result))
        text = result.raw[:length].decode()
        assert text.startswith("+"), text
        return text[1:]

    def numbers(self, command):
        return {name: int(number) for name, number in (pair.split("=") for pair in self.control(command).split())}

    def reset(self, devices=1, memory_bytes=1 << 30):
        for command in (f"option devices {devices}", f"option memory_bytes {memory_bytes}", "clear-faults", "release", "reset"):
            self.control(command)

    def copies_ended(self, direction, device=0):
        """The number of ended copies in this direction."""
        return self.numbers(f"engine {device} {direction}")["ended"]

    def break_at(self, execution):
        """Breaks a GPU at a future copy: `@DIRECTION:N` is the Nth copy in this direction from now on."""
        self.is_broken = True
        self.control(f"fault {execution}:700")

    @contextlib.contextmanager
    def delayed_copies(self, direction, device=0):
        """Delays all copies in this direction that have not begun, until the end of the block."""
        self.control(f"hold {device} {direction}")
        try:
            yield
        finally:
            self.control(f"open {device} {direction}")


def wait_until(description, condition):
    """Polls until the condition is true."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"timeout before: {description}"
        time.sleep(0.002)


@pytest.fixture(scope="session")
def driver_library():
    path = os.environ.get("TENSOR_RELAY_FAKE_CUDA_LIBRARY")
    if not path:
        pytest.skip("TENSOR_RELAY_FAKE_CUDA_LIBRARY, the path of the fake CUDA driver, is not set")
    return FakeCuda(path)


@pytest.fixture
def fake(driver_library):
    """The fake driver, reset, with two GPUs. After the test it must hold no resources and report no violations, unless
    the test has broken a GPU."""
    driver_library.reset(devices=2)
    driver_library.control("allow")
    driver_library.is_broken = False
    yield driver_library
    gc.collect()
    if driver_library.is_broken:
        return
    wait_until("all lent arrays are returned", lambda: not lent_tensors)
    wait_until("no context is left", lambda: driver_library.numbers("live")["contexts"] == 0)
    live = driver_library.numbers("live")
    resources = ("device_blocks", "host_blocks", "streams", "events", "in_flight", "reclaimed")
    assert not any(live[name] for name in resources), live
    assert not driver_library.control("violations")


@pytest.fixture
def gpu(fake):
    with open_gpu(fake, 0) as gpu:
        yield gpu


@contextlib.contextmanager
def open_gpu(fake, ordinal):
    """Opens a GPU of the fake driver. At the end of the block, no array of it may still be lent."""
    gpu = Gpu(Driver(fake.path), ordinal)
    yield gpu
    gc.collect()
    if fake.is_broken:
        lent_tensors.clear()
        return
    wait_until("all lent arrays are returned", lambda: not lent_tensors)
    gpu.close()


@pytest.fixture
def relay(gpu, tmp_path):
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path / "state", pinned_bytes=16 << 20) as relay:
        yield relay


@pytest.fixture
def client(relay):
    with tensor_relay.connect(relay.ticket, pinned_bytes=16 << 20) as client:
        yield client


@pytest.fixture
def gpu_client(relay):
    with tensor_relay.connect(relay.ticket, device="cuda:0", pinned_bytes=16 << 20) as client:
        yield client


class InThread(threading.Thread):
    """Runs a function in a thread, and keeps its result or exception."""

    def __init__(self, function):
        super().__init__(daemon=True)
        self._function, self.outcome = function, None
        self.start()

    def run(self):
        try:
            self.outcome = self._function()
        except BaseException as error:
            self.outcome = error

    def is_blocked(self):
        """Whether the function is still blocked after `BLOCKED_MIN_S`."""
        self.join(BLOCKED_MIN_S)
        return self.is_alive()

    def result(self):
        self.join(TIMEOUT_S)
        assert not self.is_alive(), "the function still blocks"
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def noise(nbytes, seed=0):
    """Random bytes that depend only on the seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def received(client, topic="t", **options):
    """Subscribes, and returns the first snapshot."""
    return client.subscribe(topic, **options).next(timeout=TIMEOUT_S)
