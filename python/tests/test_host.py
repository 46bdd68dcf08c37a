"""`connect("unix:…")`: processes of one host that share a version's memory."""

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import TIMEOUT_S

import tensor_relay

MIB = 1 << 20


@pytest.fixture
def server(program, tmp_path):
    """A server at a socket without a network, and the content of its topic."""
    content = np.random.default_rng(1).integers(0, 256, 8 * MIB, dtype=np.uint8)
    header = json.dumps({"w": {"dtype": "U8", "shape": [content.size], "data_offsets": [0, content.size]}}).encode()
    (tmp_path / "m").write_bytes(len(header).to_bytes(8, "little") + header + content.tobytes())
    words = [program, "serve", "--json", "--topic=m=m", "--listen=none", f"--socket={tmp_path}/s", f"--state-dir={tmp_path}/state"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    process.stdout.readline()
    yield f"unix:{tmp_path}/s", content, process.pid
    process.terminate()
    assert process.wait(TIMEOUT_S) == 0


@pytest.fixture
def origin(program, tmp_path):
    """A server on the network, and the content of its topic: many chunks."""
    content = np.random.default_rng(2).integers(0, 256, 16 * MIB, dtype=np.uint8)
    header = json.dumps({"w": {"dtype": "U8", "shape": [content.size], "data_offsets": [0, content.size]}}).encode()
    (tmp_path / "m").write_bytes(len(header).to_bytes(8, "little") + header + content.tobytes())
    words = [program, "serve", "--json", "--topic=m=m", "--listen=127.0.0.1:0", "--chunk-size=256KiB", f"--state-dir={tmp_path}/state"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    yield Path(json.loads(process.stdout.readline())["ticket_file"]), content
    process.terminate()
    assert process.wait(TIMEOUT_S) == 0


def test_a_receiver_shares_with_its_host_and_may_write(origin, tmp_path):
    ticket, content = origin
    socket = tmp_path / "host"
    with tensor_relay.connect(ticket, share_host=socket) as receiver:
        received = receiver.subscribe("m").next(timeout=TIMEOUT_S)
        array = received["w"].numpy()
        array += 1  # Its own pages; takers do not see it.
        with tensor_relay.connect(f"unix:{socket}") as taker:
            taken = taker.subscribe("m").next(timeout=TIMEOUT_S)
            assert taken.receipt.sharing == "memory"
            assert (taken.epoch, taken.version) == (received.epoch, received.version)
            np.testing.assert_array_equal(taken["w"].numpy(), content)
        np.testing.assert_array_equal(array, content + 1)
    assert not socket.exists()


def test_subscribers_serve_each_other_what_was_verified(origin):
    ticket, content = origin
    with tensor_relay.connect(ticket, share=True) as first:
        subscription = first.subscribe("m")
        array = subscription.next(timeout=TIMEOUT_S)["w"].numpy()
        array[:] = 0  # What is served is not what the program wrote.
        deadline, peers = time.monotonic() + TIMEOUT_S, 0
        while not peers:  # Until the server has found the port of the first one.
            with tensor_relay.connect(ticket, share="take", memory_bytes=64 * MIB) as second:
                snapshot = second.subscribe("m").next(timeout=TIMEOUT_S)
                np.testing.assert_array_equal(snapshot["w"].numpy(), content)
                receipt = snapshot.receipt
                assert receipt.origin_bytes + receipt.peer_bytes == receipt.wire_bytes
                peers = receipt.peers
                assert time.monotonic() < deadline, receipt
        assert peers == 1 and receipt.peer_bytes > content.size // 2, receipt
    for wrong in ("give", 2):
        with pytest.raises(tensor_relay.RequestError):
            tensor_relay.connect(ticket, share=wrong)


def test_writes_of_one_process_reach_no_other(server):
    ticket, content, _ = server
    with tensor_relay.connect(ticket) as writer, tensor_relay.connect(ticket) as reader:
        written, read = (client.subscribe("m").next(timeout=TIMEOUT_S) for client in (writer, reader))
        assert written.receipt.sharing == read.receipt.sharing == "memory"
        assert written.receipt.transport == "unix"
        array = written["w"].numpy()
        np.testing.assert_array_equal(array, content)
        array += 1  # Every page.
        np.testing.assert_array_equal(array, content + 1)
        np.testing.assert_array_equal(read["w"].numpy(), content)
        with tensor_relay.connect(ticket) as later:
            np.testing.assert_array_equal(later.subscribe("m").next(timeout=TIMEOUT_S)["w"].numpy(), content)


def test_tensors_of_the_user_get_a_copy(server):
    ticket, content, _ = server
    out = {"w": np.zeros(content.size, dtype=np.uint8)}
    with tensor_relay.connect(ticket) as client:
        snapshot = client.subscribe("m", out=out).next(timeout=TIMEOUT_S)
        assert snapshot.receipt.sharing.startswith("memory")
        np.testing.assert_array_equal(out["w"], content)


def test_a_token_admits_through_the_socket(server):
    ticket, content, _ = server
    with_token = (Path(ticket.removeprefix("unix:")).parent / "state/tickets").read_text().strip()
    assert with_token.startswith(f"{ticket}?topic=m&token=")
    with tensor_relay.connect(with_token) as client:
        np.testing.assert_array_equal(client.subscribe("m").next(timeout=TIMEOUT_S)["w"].numpy(), content)


def test_a_hostile_process_changes_nothing(server):
    """Goal: who has the descriptor of a version's memory cannot change it, cut it or pierce it. Method: the descriptor is
    opened again through /proc, as only the same user may, with all rights; then every system call that writes is tried."""
    ticket, content, pid = server
    with tensor_relay.connect(ticket) as client:
        snapshot = client.subscribe("m").next(timeout=TIMEOUT_S)
        found = [path for path in Path(f"/proc/{pid}/fd").iterdir() if "memfd:tensor-relay" in os.readlink(path)]
        assert found, "the version's memory is a memfd"
        libc = ctypes.CDLL(None, use_errno=True)
        for path in found:
            memory = os.open(path, os.O_RDWR)
            size = os.fstat(memory).st_size
            for attack in (
                lambda: os.pwrite(memory, b"x", 0),
                lambda: os.write(memory, b"x"),
                lambda: os.ftruncate(memory, 0),
                lambda: os.ftruncate(memory, size + mmap.PAGESIZE),
                lambda: mmap.mmap(memory, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
                lambda: fcntl.fcntl(memory, 1033, 0x0001),  # F_ADD_SEALS: none can be added, such as one that stops the server.
            ):
                with pytest.raises(PermissionError):
                    attack()
            punch_hole_and_keep_size = 3
            assert libc.fallocate(memory, punch_hole_and_keep_size, ctypes.c_long(0), ctypes.c_long(mmap.PAGESIZE)) == -1
            with contextlib.closing(mmap.mmap(memory, size, mmap.MAP_SHARED, mmap.PROT_READ)) as shown, pytest.raises(OSError):
                shown.madvise(mmap.MADV_REMOVE)
            os.close(memory)
        np.testing.assert_array_equal(snapshot["w"].numpy(), content)
        with tensor_relay.connect(ticket) as other:
            np.testing.assert_array_equal(other.subscribe("m").next(timeout=TIMEOUT_S)["w"].numpy(), content)


def test_a_relay_shares_with_its_host(tmp_path):
    sent = {"w": np.arange(MIB, dtype=np.uint32)}
    with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path, socket=tmp_path / "s", socket_mode=0o600) as relay:
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        relay.publish("m", sent)
        with tensor_relay.connect(f"unix:{tmp_path}/s") as near, tensor_relay.connect(relay.ticket) as far:
            for client, sharing in ((near, "memory"), (far, "chunks")):
                snapshot = client.subscribe("m").next(timeout=TIMEOUT_S)
                assert snapshot.receipt.sharing == sharing
                np.testing.assert_array_equal(snapshot["w"].numpy(), sent["w"])
    assert not (tmp_path / "s").exists()


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(tensor_relay.ServerUnreachableError, match="--socket"):
        tensor_relay.connect(f"unix:{tmp_path}/none")
    for wrong in ("unix:", "unix:/a?key=sha256:" + "0" * 64, "unix:/a?topics=t"):
        with pytest.raises(tensor_relay.TicketError):
            tensor_relay.connect(wrong)
