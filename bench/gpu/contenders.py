#!/usr/bin/env python3
"""Copies from the GPU memory of one process to that of another over loopback, by tensor-relay and by its rivals.

`measure` is the sender. It starts this file once more, as the receiver, which prints a line when a round's bytes are in
its GPU memory, by the clock that both processes share. The bytes of the first two rounds, which differ, are compared.

GPU memory is that of cuda_by_hand.py, so nothing but a driver is needed. The rivals get what helps them: page-locked
memory, and the copy of one piece from or to the GPU while the piece before is sent or the next one received.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import pickle
import queue
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# cuda_by_hand.py: copied by bench/gpu/build, or that of the tests.
sys.path += [str(HERE / "bin"), str(HERE.parent.parent / "python" / "tests" / "cuda")]

from cuda_by_hand import Driver, Gpu  # noqa: E402

MIB = 1 << 20
PIECE_BYTES = 8 * MIB
ROUND_TIMEOUT_S = 60


class Skipped(Exception):
    """The error of a part that cannot run on this machine. Its message is the reason."""


def open_gpu():
    try:
        return Gpu(Driver())
    except Exception as error:
        raise Skipped(f"CUDA is not installed, or has no GPU: {error}") from error


def noise(gpu, nbytes):
    """An array of random bytes, repeated on the GPU: no codec compresses them within a chunk."""
    pattern = gpu.array(os.urandom(min(nbytes, 64 * MIB)))
    array = gpu.empty(nbytes)
    for start in range(0, nbytes, pattern.nbytes):
        gpu.copy(array.address + start, pattern.address, min(pattern.nbytes, nbytes - start))
    gpu.synchronize()
    return array


class Staging:
    """Two page-locked pieces of host memory, between an array on the GPU and a connection."""

    def __init__(self, gpu):
        self.gpu = gpu
        nbytes = ctypes.c_size_t(PIECE_BYTES)
        addresses = [gpu.create("cuMemHostAlloc", ctypes.c_void_p, nbytes, 0) for _ in range(2)]
        self.pieces = [(at, memoryview((ctypes.c_uint8 * PIECE_BYTES).from_address(at)).cast("B")) for at in addresses]
        self.streams = [gpu.stream() for _ in addresses]

    def _copy(self, function, array, start):
        """Begins to copy the piece of `array` that begins at `start`. Returns its host memory and its stream."""
        index = start // PIECE_BYTES % 2
        (address, view), stream = self.pieces[index], self.streams[index]
        nbytes = min(PIECE_BYTES, array.nbytes - start)
        places = ctypes.c_void_p(address), ctypes.c_uint64(array.address + start)
        to, source = places if function == "cuMemcpyDtoHAsync_v2" else reversed(places)
        self.gpu(function, to, source, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream))
        return view[:nbytes], stream

    def outgoing(self, array):
        """The pieces of `array`, each to be sent before the next is asked for, while that one is copied."""
        ahead = self._copy("cuMemcpyDtoHAsync_v2", array, 0)
        for start in range(PIECE_BYTES, array.nbytes + PIECE_BYTES, PIECE_BYTES):
            piece, stream = ahead
            if start < array.nbytes:
                ahead = self._copy("cuMemcpyDtoHAsync_v2", array, start)
            self.gpu("cuStreamSynchronize", ctypes.c_void_p(stream))
            yield piece

    def incoming(self, array):
        """Memory for the pieces of `array`, each to be filled before the next is asked for. The last one is copied when
        the iteration ends."""
        for start in range(0, array.nbytes, PIECE_BYTES):
            index = start // PIECE_BYTES % 2
            self.gpu("cuStreamSynchronize", ctypes.c_void_p(self.streams[index]))
            yield self.pieces[index][1][: min(PIECE_BYTES, array.nbytes - start)]
            self._copy("cuMemcpyHtoDAsync_v2", array, start)
        for stream in self.streams:
            self.gpu("cuStreamSynchronize", ctypes.c_void_p(stream))


# The contenders. A sender has an `address` for the receiver and sends arrays; a receiver is a generator that yields when
# it is ready, and then whenever a round's bytes are in `array`.


class RelaySender:
    def __init__(self, gpu, folder, hold="borrow", **_):
        import tensor_relay

        self.relay, self.hold = tensor_relay.serve("127.0.0.1:0", state_dir=folder), hold
        self.address = self.relay.ticket

    def send(self, array):
        self.relay.publish("t", {"w": array}, hold=self.hold)


def relay_receiver(gpu, array, ticket, lanes=None, snapshots=False, transport="auto", **_):
    """`snapshots` receives into new memory instead of into `array`."""
    import tensor_relay

    with tensor_relay.connect(ticket, device="cuda:0", lanes=lanes, transport=transport) as client:
        subscription = client.subscribe("t") if snapshots else client.subscribe("t", out={"w": array})
        yield
        while True:
            snapshot = subscription.next(timeout=ROUND_TIMEOUT_S)
            # A delta, or nothing at all, would be another measurement.
            assert snapshot.receipt.wire_bytes >= array.nbytes, f"{snapshot.receipt.wire_bytes} bytes were sent"
            yield snapshot["w"] if snapshots else None


class SocketSender:
    def __init__(self, gpu, folder, **_):
        self.staging, self.connection = Staging(gpu), None
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = str(self.listener.getsockname()[1])

    def secure(self, connection):
        return connection

    def send(self, array):
        if self.connection is None:
            self.connection = self.secure(self.listener.accept()[0])
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in self.staging.outgoing(array):
            self.connection.sendall(piece)


def socket_receiver(gpu, array, port, secure=lambda connection: connection, **_):
    connection = socket.create_connection(("127.0.0.1", int(port)))
    yield
    staging, connection = Staging(gpu), secure(connection)
    while True:
        for piece in staging.incoming(array):
            while piece:
                received = connection.recv_into(piece)
                if not received:
                    return
                piece = piece[received:]
        yield


class SslSender(SocketSender):
    """TLS 1.3 with Python's `ssl`, and the cipher that it chooses."""

    def __init__(self, gpu, folder, **options):
        super().__init__(gpu, folder, **options)
        if not shutil.which("openssl"):
            raise Skipped("the program openssl is not installed, which makes the certificate")
        key, certificate = folder / "key.pem", folder / "certificate.pem"
        words = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        words += ["-subj", "/CN=localhost", "-keyout", key, "-out", certificate]
        subprocess.run(words, check=True, capture_output=True)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.load_cert_chain(certificate, key)

    def secure(self, connection):
        return self.context.wrap_socket(connection, server_side=True)


def ssl_receiver(gpu, array, port, **_):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The certificate was made for this measurement. Encryption costs the same with and without a check of it.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    yield from socket_receiver(gpu, array, port, secure=context.wrap_socket)


def gloo(folder, rank):
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=2)
    # Tensors in the page-locked pieces.
    return dist, lambda piece: torch.frombuffer(piece, dtype=torch.uint8)


class GlooSender:
    def __init__(self, gpu, folder, **_):
        if importlib.util.find_spec("torch") is None:
            raise Skipped("torch is not installed, of which Gloo is a part")
        self.staging, self.folder, self.group = Staging(gpu), folder, None
        self.address = str(folder)

    def send(self, array):
        self.group = self.group or gloo(self.folder, 0)
        dist, tensor = self.group
        for piece in self.staging.outgoing(array):
            dist.send(tensor(piece), 1)


def gloo_receiver(gpu, array, folder, **_):
    yield
    dist, tensor = gloo(folder, 1)
    staging = Staging(gpu)
    while True:
        for piece in staging.incoming(array):
            dist.recv(tensor(piece), 0)
        yield


def nixl_agent(name):
    # Between hosts without RDMA: TCP, from and to GPU memory.
    os.environ.setdefault("UCX_TLS", "tcp,cuda_copy")
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


class NixlSender:
    """The receiver reads: the sender registers its memory, and tells the receiver by a file when it may read it."""

    def __init__(self, gpu, folder, arrays, **_):
        if importlib.util.find_spec("nixl") is None:
            raise Skipped("nixl is not installed")
        self.agent, self.folder, self.rounds = nixl_agent("sender"), folder, 0
        places = [[(array.address, array.nbytes, gpu.ordinal)] for array in arrays]
        for ((address, nbytes, ordinal),) in places:
            self.agent.register_memory([(address, nbytes, ordinal, "")], "VRAM")
        descriptors = [self.agent.get_serialized_descs(self.agent.get_xfer_descs(place, "VRAM")) for place in places]
        (folder / "nixl").write_bytes(pickle.dumps((self.agent.get_agent_metadata(), descriptors)))
        self.address = str(folder)

    def send(self, array):
        (self.folder / f"round{self.rounds}").touch()
        self.rounds += 1


def nixl_receiver(gpu, array, folder, **_):
    agent, folder = nixl_agent("receiver"), Path(folder)
    metadata, descriptors = pickle.loads((folder / "nixl").read_bytes())
    agent.register_memory([(array.address, array.nbytes, gpu.ordinal, "")], "VRAM")
    local = agent.get_xfer_descs([(array.address, array.nbytes, gpu.ordinal)], "VRAM")
    remote = agent.add_remote_agent(metadata)
    reads = [agent.initialize_xfer("READ", local, agent.deserialize_descs(one), remote) for one in descriptors]
    yield
    for number in range(1 << 20):
        while not (folder / f"round{number}").exists():
            time.sleep(0.0002)
        state = agent.transfer(reads[number % len(reads)])
        while state == "PROC":
            state = agent.check_xfer_state(reads[number % len(reads)])
        assert state == "DONE", f"NIXL: {state}"
        yield


CONTENDERS = {
    "relay": (RelaySender, relay_receiver),
    "socket": (SocketSender, socket_receiver),
    "ssl": (SslSender, ssl_receiver),
    "gloo": (GlooSender, gloo_receiver),
    "nixl": (NixlSender, nixl_receiver),
}


def measure(name, arrays, gpu, rounds, **options):
    """The rates of `rounds` rounds, which send the arrays in turn, and the median of the processor seconds of both ends
    for a GiB. The first rate includes what is made once: memory, connections, lanes."""
    sender_type, _ = CONTENDERS[name]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sender = sender_type(gpu, folder, arrays=arrays, **options)
        settings = {"nbytes": arrays[0].nbytes, "address": sender.address, "options": options}
        words = [sys.executable, __file__, name, json.dumps(settings)]
        receiver = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        stack.callback(lambda: (receiver.kill(), receiver.communicate()))
        lines = queue.Queue()

        def read_lines():
            for line in receiver.stdout:
                if line.startswith("{"):  # NIXL writes its log there, too.
                    lines.put(line)
            lines.put(None)

        threading.Thread(target=read_lines, daemon=True).start()

        def next_line():
            line = lines.get(timeout=ROUND_TIMEOUT_S)
            if line is None:
                raise RuntimeError(f"the receiver ended: {receiver.communicate()[1][-2000:]}")
            return json.loads(line)

        next_line()
        rates, cpu_s_per_gib = [], []
        for number in range(rounds):
            array = arrays[number % len(arrays)]
            begun, cpu_s = time.monotonic(), time.process_time()
            sender.send(array)
            received = next_line()
            cpu_s = time.process_time() - cpu_s + received["cpu_s"]
            rates.append(round(array.nbytes / (received["at"] - begun) / 1e9, 2))
            cpu_s_per_gib.append(cpu_s * (1 << 30) / array.nbytes)
            if number < len(arrays):
                assert received["digest"] == digest_of(array), f"round {number} of {name} has other bytes"
    return {"gb_per_s": rates, "cpu_s_per_gib": round(statistics.median(cpu_s_per_gib), 2)}


@functools.cache  # The arrays that are sent do not change.
def digest_of(array):
    return hashlib.blake2b(array.bytes()).hexdigest()


def receive(name, nbytes, address, options):
    """The receiver: what `measure` starts."""
    from cuda_by_hand import Imported

    gpu = open_gpu()
    array = gpu.empty(nbytes)
    rounds = CONTENDERS[name][1](gpu, array, address, **options)
    next(rounds)
    print("{}", flush=True)
    cpu_s = time.process_time()
    for number, tensor in enumerate(rounds):
        line = {"at": time.monotonic(), "cpu_s": time.process_time() - cpu_s}
        if number < 2:
            line["digest"] = digest_of.__wrapped__(Imported(gpu, tensor) if tensor is not None else array)
        print(json.dumps(line), flush=True)
        del tensor
        cpu_s = time.process_time()


if __name__ == "__main__":
    receive(sys.argv[1], **json.loads(sys.argv[2]))
