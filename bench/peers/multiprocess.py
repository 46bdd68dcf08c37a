"""`multiprocessing` on one machine: a Queue of arrays, a Pipe of bytes, and shared memory.

These are made for processes that one program started. The two sides here are unrelated processes, so the
source sends the sink the reading end of its pipe over a Unix socket. The network is not used.

Tuned: pieces that fit into a cache, received into the reused array, instead of whole tensors (measured: Queue
0.24 GB/s, Pipe 0.9); the largest pipe that the kernel allows; in shared memory, copying out overlaps copying
in.
"""

import argparse
import fcntl
import multiprocessing
import os
import socket
import tempfile
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

import contender
from content import SMALL_BYTES, Bytes

PIPE_BYTES = 1 << 20
"""The default of fs.pipe-max-size, which limits pipes of unprivileged processes."""


class DescriptorSender:
    """A Unix socket by which the source sends the sink a file descriptor."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self.path = tempfile.mktemp(prefix="tensor-relay-peer-")
        self._listener.bind(self.path)
        self._listener.listen()

    def send(self, descriptor: int) -> None:
        with self._listener, self._listener.accept()[0] as sink:
            os.unlink(self.path)
            socket.send_fds(sink, [b"!"], [descriptor])


def receive_reader(hello: dict[str, Any]) -> Connection:
    """Receives the reading end of the source's pipe."""
    with socket.socket(socket.AF_UNIX) as source:
        source.connect(hello["path"])
        _, descriptors, _, _ = socket.recv_fds(source, 1, 1)
    return Connection(descriptors[0], writable=False)


class QueueSource(contender.Source):
    """A `multiprocessing.Queue`, whose own thread writes to its pipe."""

    def __init__(self, setting: contender.Setting) -> None:
        self._piece = setting.options.piece
        self._queue: multiprocessing.Queue[Bytes] = multiprocessing.Queue()
        self._descriptor_sender = DescriptorSender()
        self.hello = {"path": self._descriptor_sender.path}

    def accept(self) -> None:
        reader = self._queue._reader
        _enlarge(reader)
        self._descriptor_sender.send(reader.fileno())

    def send(self, data: Bytes) -> None:
        for start in range(0, len(data), self._piece):
            self._queue.put(data[start : start + self._piece])


class QueueSink(contender.Sink):
    """Reads the queue's pipe as `Queue.get` does, but without its lock, as there is only one reader."""

    def __init__(self, setting: contender.Setting, hello: dict[str, Any]) -> None:
        self._reader = receive_reader(hello)

    def receive(self, into: Bytes) -> Bytes:
        filled = 0
        while filled < len(into):
            piece = self._reader.recv()
            into[filled : filled + len(piece)] = piece
            filled += len(piece)
        return into


class PipeSource(contender.Source):
    def __init__(self, setting: contender.Setting) -> None:
        self._piece = setting.options.piece
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        _enlarge(self._reader)
        self._descriptor_sender = DescriptorSender()
        self.hello = {"path": self._descriptor_sender.path}

    def accept(self) -> None:
        self._descriptor_sender.send(self._reader.fileno())
        self._reader.close()

    def send(self, data: Bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), self._piece):
            self._writer.send_bytes(view[start : start + self._piece])


class PipeSink(contender.Sink):
    def __init__(self, setting: contender.Setting, hello: dict[str, Any]) -> None:
        self._piece = setting.options.piece
        self._reader = receive_reader(hello)

    def receive(self, into: Bytes) -> Bytes:
        view = memoryview(into)
        filled = 0
        while filled < len(view):
            filled += self._reader.recv_bytes_into(view[filled : filled + self._piece])
        return into


class MemorySource(contender.Source):
    """Copies into shared memory, and reports each piece through a pipe."""

    def __init__(self, setting: contender.Setting) -> None:
        self._piece = setting.options.piece
        self._memory = SharedMemory(create=True, size=max(setting.options.bytes, SMALL_BYTES))
        self._array = np.frombuffer(self._memory.buf, np.uint8)
        self._array.fill(0)
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        self._descriptor_sender = DescriptorSender()
        self.hello = {"path": self._descriptor_sender.path, "memory": self._memory.name}

    def accept(self) -> None:
        self._descriptor_sender.send(self._reader.fileno())
        self._reader.close()
        self._writer.send_bytes(b"attach")
        # The sink has opened the memory before it requested the pipe, so the name can be removed now.
        self._memory.unlink()

    def send(self, data: Bytes) -> None:
        for start in range(0, len(data), self._piece):
            piece = data[start : start + self._piece]
            self._array[start : start + len(piece)] = piece
            self._writer.send_bytes(b"")


class MemorySink(contender.Sink):
    def __init__(self, setting: contender.Setting, hello: dict[str, Any]) -> None:
        self._piece = setting.options.piece
        self._view = setting.options.view
        self._memory = SharedMemory(hello["memory"])
        # The source unlinks the memory; this process's resource tracker would try it as well, and warn.
        resource_tracker.unregister(self._memory._name, "shared_memory")
        self._array = np.frombuffer(self._memory.buf, np.uint8)
        self._touch()
        self._reader = receive_reader(hello)
        self._reader.recv_bytes()

    def receive(self, into: Bytes) -> Bytes:
        for start in range(0, len(into), self._piece):
            self._reader.recv_bytes()
            if not self._view:
                end = min(start + self._piece, len(into))
                into[start:end] = self._array[start:end]
        return self._array[: len(into)] if self._view else into

    def _touch(self) -> None:
        """Maps every page, so that receiving causes no page faults."""
        self._array[::4096].sum()


def _enlarge(pipe: Connection) -> None:
    fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)


KINDS = {
    "queue": (QueueSource, QueueSink, 1 << 20),
    "pipe": (PipeSource, PipeSink, 1 << 20),
    "memory": (MemorySource, MemorySink, 16 << 20),
}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--piece", type=int, help="bytes for each piece")
    parser.add_argument(
        "--view", action="store_true", help="use the tensor in shared memory without copying it out"
    )


def _source(setting: contender.Setting) -> contender.Source:
    source, _, piece = KINDS[setting.options.kind]
    setting.options.piece = setting.options.piece or piece
    return source(setting)


def _sink(setting: contender.Setting, hello: dict[str, Any]) -> contender.Sink:
    _, sink, piece = KINDS[setting.options.kind]
    setting.options.piece = setting.options.piece or piece
    return sink(setting, hello)


if __name__ == "__main__":
    contender.main(_source, _sink, _options)
