"""A shared folder: np.save under a temporary name, a rename, and np.load as soon as the file exists.

Tuned: the reader polls every 0.2 ms, a short interval for a real system; `--reuse` reads into the reused
array instead of np.load's new one. The file is removed after the sink has read it, which is not timed.
Nothing is synced to disk.
"""

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import contender
from content import Bytes

POLL_INTERVAL_S = 0.0002


class FolderSource(contender.Source):
    def __init__(self, setting: contender.Setting) -> None:
        self._prefix = str(Path(setting.options.folder).resolve() / f"tensor-relay-peer-{os.getpid()}")
        self._names = _names(self._prefix)
        self.hello = {"prefix": self._prefix}

    def send(self, data: Bytes) -> None:
        self._file = next(self._names)
        partial = self._file.with_suffix(".part")
        with partial.open("wb") as file:
            np.save(file, data)
        partial.rename(self._file)

    def release(self) -> None:
        self._file.unlink()


class FolderSink(contender.Sink):
    def __init__(self, setting: contender.Setting, hello: dict[str, Any]) -> None:
        self._names = _names(hello["prefix"])
        self._reuse = setting.options.reuse

    def receive(self, into: Bytes) -> Bytes:
        path = next(self._names)
        _wait_for(path)
        if not self._reuse:
            return np.load(path)
        with path.open("rb", buffering=0) as file:
            np.lib.format.read_magic(file)
            (size,), _, _ = np.lib.format.read_array_header_1_0(file)
            return into[: _fill(file, into[:size])]


def _names(prefix: str) -> Iterator[Path]:
    """The file names, which both sides generate alike."""
    return (Path(f"{prefix}-{number}.npy") for number in itertools.count())


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(POLL_INTERVAL_S)


def _fill(file: Any, into: Bytes) -> int:
    """Reads until `into` is full, since one system call reads 2 GiB at most. Returns the number of bytes."""
    view, filled = memoryview(into), 0
    while filled < len(view) and (count := file.readinto(view[filled:])):
        filled += count
    return filled


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", default="/dev/shm", help="the folder for the files: on a tmpfs or a disk"
    )
    parser.add_argument("--reuse", action="store_true", help="read into the reused array")


if __name__ == "__main__":
    contender.main(FolderSource, FolderSink, _options)
