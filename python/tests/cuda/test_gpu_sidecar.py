"""GPU tensors published through a sidecar: the path of their bytes, and when the producer may write to them again."""

import json
import os
import queue
import subprocess
from pathlib import Path

import pytest
from conftest import BLOCKED_MIN_S, TIMEOUT_S, noise, received, wait_until
from cuda_by_hand import lent_tensors

import tensor_relay


class Server:
    """A sidecar process that uses the same fake GPUs."""

    def __init__(self, program, library, folder):
        self.socket, self.report = folder / "s", folder / "report"
        for name in ("libcuda.so", "libcuda.so.1"):
            (folder / name).symlink_to(Path(library).resolve())
        paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(filter(None, paths)),
            "TENSOR_RELAY_FAKE_CUDA": "1",
            "FAKE_CUDA_DEVICES": "2",
            "FAKE_CUDA_REPORT": str(self.report),
            "TENSOR_RELAY_PINNED_MEM": "16MiB",
        }
        words = [program, "serve", "--json", "--listen=127.0.0.1:0", f"--state-dir={folder}/state", "--device=cuda:0"]
        words.append(f"--publish-socket={self.socket}")
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
        self.ticket = Path(json.loads(self.process.stdout.readline())["ticket_file"]).read_text().splitlines()[-1]


@pytest.fixture
def server(fake, tmp_path):
    program = os.environ.get("TENSOR_RELAY_PROGRAM")
    if not program:
        pytest.skip("TENSOR_RELAY_PROGRAM, the path of the command line, is not set")
    server = Server(program, fake.path, tmp_path)
    yield server
    server.process.terminate()
    assert server.process.wait(TIMEOUT_S) == 0
    report = server.report.read_text()
    assert "violations=0" in report and " violation " not in report, report


@pytest.fixture
def set_shareable(fake):
    """A function that sets what the driver can share with other processes: allocations in place, and buffers."""

    def choose(in_place, buffers):
        fake.control(f"option exportable {int(in_place)}")
        fake.control(f"option shareable_fds {int(buffers)}")

    yield choose
    choose(True, True)


@pytest.mark.parametrize(
    ("hold", "in_place", "buffers", "path", "reason"),
    [
        ("stage", True, True, "cuda_fd", "so that they may be written again"),
        ("stage", True, False, "memfd", "through host memory"),
        ("borrow", True, True, "cuda_ipc", "in place"),
        ("borrow", False, True, "cuda_fd", "cannot be shared in place"),
    ],
)
def test_the_path_depends_on_hold_and_driver(server, gpu, set_shareable, hold, in_place, buffers, path, reason):
    set_shareable(in_place, buffers)
    array, other = gpu.array(noise(5 << 20)), gpu.array(noise(5 << 20, 1))
    expected = array.bytes()
    with tensor_relay.publish_to(server.socket) as producer, tensor_relay.connect(server.ticket) as client:
        published = producer.publish("t", {"w": array, "tied": array, "step": 3}, hold=hold)
        assert (published.path, reason in published.path_reason) == (path, True), published.path_reason
        if path == "cuda_ipc":
            assert published.copied_bytes == 0 and not published.released and lent_tensors
            with pytest.raises(tensor_relay.RelayTimeoutError):
                published.wait_released(0.01)
        else:
            assert published.copied_bytes == 5 << 20 and published.released and not lent_tensors
            gpu.copy(array.address, other.address, 5 << 20)
            gpu.synchronize()
        snapshot = received(client)
        assert snapshot["w"].numpy().tobytes() == snapshot["tied"].numpy().tobytes() == expected
        assert snapshot.entries == {"step": 3}
        published.withdraw()
        published.wait_released(TIMEOUT_S)
        wait_until("the tensors are returned", lambda: not lent_tensors)


def test_a_callback_runs_when_the_server_releases(server, gpu, set_shareable):
    set_shareable(True, True)
    called = queue.SimpleQueue()
    with tensor_relay.publish_to(server.socket) as producer:
        for hold, path in (("stage", "cuda_fd"), ("borrow", "cuda_ipc")):
            published = producer.publish("t", {"w": gpu.array(noise(5 << 20))}, hold=hold)
            assert published.path == path
            published.on_released(called.put)
            if hold == "borrow":
                with pytest.raises(queue.Empty):
                    called.get(timeout=BLOCKED_MIN_S)
                published.withdraw()
            assert called.get(timeout=TIMEOUT_S) is published


def test_no_callback_when_the_release_is_unknown(fake, gpu, set_shareable, tmp_path, caplog):
    program = os.environ.get("TENSOR_RELAY_PROGRAM")
    if not program:
        pytest.skip("TENSOR_RELAY_PROGRAM, the path of the command line, is not set")
    set_shareable(True, True)
    server, called = Server(program, fake.path, tmp_path), queue.SimpleQueue()
    with tensor_relay.publish_to(server.socket) as producer:
        published = producer.publish("t", {"w": gpu.array(noise(5 << 20))}, hold="borrow")
        published.on_released(called.put)
        server.process.kill()
        server.process.wait(TIMEOUT_S)
        wait_until(
            "the lost release is logged",
            lambda: any("not known to be released" in record.getMessage() for record in caplog.records),
        )
    assert called.empty()


def test_tensors_of_several_devices_pass_through_the_host(server, gpu):
    with tensor_relay.publish_to(server.socket) as producer, tensor_relay.connect(server.ticket) as client:
        tensors = {"gpu": gpu.array(noise(9 << 20)), "host": memoryview(noise(5000, 1))}
        published = producer.publish("t", tensors, hold="borrow")
        assert published.path == "memfd" and published.released
        snapshot = received(client)
        assert {name: tensor.numpy().tobytes() for name, tensor in snapshot.items()} == {
            "gpu": noise(9 << 20),
            "host": noise(5000, 1),
        }
