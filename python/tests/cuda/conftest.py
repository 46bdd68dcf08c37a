"""What tests with GPUs share: the fake CUDA driver (tests/fake-cuda), told what to do, and a framework on it.

The library's path is in TENSOR_RELAY_FAKE_CUDA_LIBRARY. Without it these tests are skipped, and the runner sees to it that
they run (python/tests/run).
"""

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent)]

from cuda_by_hand import Driver, Gpu, lent  # noqa: E402

import tensor_relay  # noqa: E402

PATIENCE_S = 60.0
# How long something that must not happen is given to happen. A test that fails may take longer; none passes by it.
HELD_S = 0.3


class FakeCuda:
    """The control function of the fake driver: it takes words, and answers with words."""

    def __init__(self, path):
        # Whoever asks for libcuda.so afterwards gets this one: it has that name inside.
        self._tell = ctypes.CDLL(path).fake_cuda_control
        self._tell.restype, self._tell.argtypes = ctypes.c_size_t, [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
        self.path = path
        # Whether a test has broken a GPU: then nothing can be cleaned up, and the next test gets a new machine.
        self.is_broken = False

    def tell(self, command):
        answer = ctypes.create_string_buffer(1 << 16)
        length = self._tell(command.encode(), len(command.encode()), answer, len(answer))
        text = answer.raw[:length].decode()
        assert text.startswith("+"), text
        return text[1:]

    def numbers(self, command):
        return {name: int(number) for name, number in (pair.split("=") for pair in self.tell(command).split())}

    def reset(self, devices=1, memory_bytes=1 << 30):
        for command in (f"option devices {devices}", f"option memory_bytes {memory_bytes}", "clear-faults", "release", "reset"):
            self.tell(command)

    def ended(self, direction, device=0):
        """How many copies of a direction have ended."""
        return self.numbers(f"engine {device} {direction}")["ended"]

    def break_at(self, execution):
        """Breaks a GPU when it executes this: a direction, and which copy of it from now on."""
        self.is_broken = True
        self.tell(f"fault {execution}:700")

    @contextlib.contextmanager
    def held(self, direction, device=0):
        """Holds back copies that have not begun."""
        self.tell(f"hold {device} {direction}")
        try:
            yield
        finally:
            self.tell(f"open {device} {direction}")


def until(what, is_so):
    """Waits until something is so, by looking at it."""
    ends = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < ends, f"it is still not so that {what}"
        time.sleep(0.002)


@pytest.fixture(scope="session")
def driver_library():
    path = os.environ.get("TENSOR_RELAY_FAKE_CUDA_LIBRARY")
    if not path:
        pytest.skip("TENSOR_RELAY_FAKE_CUDA_LIBRARY does not say where the fake CUDA driver is")
    return FakeCuda(path)


@pytest.fixture
def fake(driver_library):
    """A new machine with two GPUs. After the test nothing of it may be left, and nothing forbidden may have been done."""
    driver_library.reset(devices=2)
    driver_library.tell("allow")
    driver_library.is_broken = False
    yield driver_library
    gc.collect()
    if driver_library.is_broken:
        return
    until("all that was lent is back", lambda: not lent)
    until("no context is left", lambda: driver_library.numbers("live")["contexts"] == 0)
    live = driver_library.numbers("live")
    assert not any(live[name] for name in ("device_blocks", "host_blocks", "streams", "events", "in_flight", "reclaimed")), live
    assert not driver_library.tell("violations")


@pytest.fixture
def gpu(fake):
    with gpu_called(fake, 0) as gpu:
        yield gpu


@contextlib.contextmanager
def gpu_called(fake, ordinal):
    gpu = Gpu(Driver(fake.path), ordinal)
    yield gpu
    gc.collect()
    if fake.is_broken:
        lent.clear()
        return
    until("all that was lent is back", lambda: not lent)
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
    """Runs something, and keeps what it gave."""

    def __init__(self, run):
        super().__init__(daemon=True)
        self._work, self.outcome = run, None
        self.start()

    def run(self):
        try:
            self.outcome = self._work()
        except BaseException as error:
            self.outcome = error

    def is_held(self):
        """Whether it waits, as far as can be told."""
        self.join(HELD_S)
        return self.is_alive()

    def result(self):
        self.join(PATIENCE_S)
        assert not self.is_alive(), "it still waits"
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def received(client, topic="t", **options):
    """The newest version."""
    return client.subscribe(topic, **options).next(timeout=PATIENCE_S)
