"""`relay://`: a read-only fsspec file system with topics as folders and tensors as files (pandas, pyarrow, dask, …).

    pandas.read_parquet("relay://tables/prices.parquet", storage_options={"ticket": ticket})
    fsspec.filesystem("relay", ticket=ticket).ls("tables")

A path is a topic's name followed by a tensor's name. The files beside a model's weights keep their names
(`policy/config.json`); each weight is a file of the tensor's raw bytes (`tensor_relay.pull` restores the original
files). The file system cannot write: `publish_folder` publishes a folder of any files as a topic.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from .._native import Client, Description, Publication, Relay
from .._shared import shared_client
from ..errors import TopicEndedError, TopicNotFoundError, VersionNotFoundError
from . import check_host

check_host("fsspec", "2023.9", "2028")

from fsspec.spec import AbstractFileSystem  # noqa: E402

__all__ = ["RelayFileSystem", "publish_folder"]

SIDE_FILE_PREFIX = "tensor-relay.file:"
"""The prefix of the names of tensors that contain the files beside a model's weights."""


def publish_folder(
    relay: Relay, topic: str, folder: str | os.PathLike[str], *, metadata: Mapping[str, Any] | None = None
) -> Publication:
    """Publishes all files below a folder as the next version of a topic, each as a tensor of bytes named by its path.
    Symbolic links to files are followed within the folder, and to the blobs of Hugging Face's cache; special files are
    skipped. For a model's folder use `Relay.publish_files`, which publishes the weights as tensors. During the call,
    memory holds the files twice.

    Raises OSError, which names the file: one that cannot be read or that changes meanwhile, a folder that cannot be
    read, a link to a folder, a link that leads nowhere or out of the folder. Then nothing was published. Also raises
    the errors of `Relay.publish`.
    """
    root = Path(folder)
    if root.is_file():
        raise NotADirectoryError(errno.ENOTDIR, "it is a file: give the folder that it is in", os.fspath(folder))
    files: dict[str, bytearray] = {}
    states: dict[Path, tuple[int, ...]] = {}
    for path in sorted(_files_below(root)):
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            content = bytearray(before.st_size)
            if file.readinto(content) < before.st_size:
                _raise_changed(path)
        files[path.relative_to(root).as_posix()], states[path] = content, _state(before)
    if not files:
        raise FileNotFoundError(errno.ENOENT, "there are no files in it", os.fspath(folder))
    for path, state in states.items():
        if _state(path.stat()) != state:
            _raise_changed(path)
    return relay.publish(topic, files, metadata=metadata)


def _files_below(root: Path) -> Iterator[Path]:
    """The regular files below a folder, with links to those that may be published."""
    roots = _link_roots(root.resolve())
    for parent, folders, names in os.walk(root, onerror=_raise):
        for path in (Path(parent, name) for name in (*folders, *names)):
            mode = path.stat().st_mode  # Raises for a link that leads nowhere.
            if path.is_symlink():
                if stat.S_ISDIR(mode):
                    reason = "links to folders are not followed: copy the folder, or publish it as a topic of its own"
                    raise IsADirectoryError(errno.EISDIR, reason, os.fspath(path))
                if not any(path.resolve().is_relative_to(each) for each in roots):
                    reason = "the link leads out of the folder, and is not followed: copy the file"
                    raise PermissionError(errno.EPERM, reason, os.fspath(path))
            if stat.S_ISREG(mode):
                yield path


def _link_roots(folder: Path) -> list[Path]:
    """The folders that links may lead to, as for `Relay.publish_files`: the folder itself; and for
    `MODEL/snapshots/REVISION` of Hugging Face's cache, or a folder in it, `MODEL/blobs`."""
    return [folder, *(above.parent / "blobs" for above in folder.parents if above.name == "snapshots")][:2]


def _state(status: os.stat_result) -> tuple[int, ...]:
    """What differs once a file was written to or replaced."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _raise_changed(path: Path) -> NoReturn:
    reason = "the file changed while the folder was read: publish the folder again when nothing writes to it"
    raise OSError(errno.EBUSY, reason, os.fspath(path))


def _raise(error: OSError) -> NoReturn:
    raise error


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


class RelayFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The topics of one server as a read-only file system.

    ticket: as for `tensor_relay.connect`. By default the value of TENSOR_RELAY_TICKET. A URL may contain the ticket:
        the output of `tensor-relay serve`, with the file's path after the topic.
    version: the number of the version to read of each topic. By default the newest one when a file is opened: each file
        is of one version, but two files may be of different versions.
    timeout: how long each request may take, in seconds.
    cache_bytes: the most memory for received files, cached for further reads.

    The first read of a file receives the whole file. A listing costs at most two round trips, and no payload. A
    listing that fails raises its error; fsspec's own `walk`, and so `find` and `glob`, would leave files out instead.
    """

    protocol = "relay"
    root_marker = ""

    def __init__(
        self,
        ticket: str | None = None,
        version: int | None = None,
        timeout: float = 60.0,
        cache_bytes: int = 256 << 20,
        **options: Any,
    ) -> None:
        super().__init__(ticket=ticket, version=version, timeout=timeout, cache_bytes=cache_bytes, **options)
        self._ticket, self._version, self._timeout = ticket, version, timeout
        self._file_cache = _FileCache(cache_bytes)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        path = os.fspath(path)
        if "?key=" in path:  # A ticket: the addresses come first.
            path = path.removeprefix("relay://").partition("?key=")[0].partition("/")[2]
        return path.removeprefix("relay://").strip("/")

    @staticmethod
    def _get_kwargs_from_urls(url: str) -> dict[str, Any]:
        address_and_path, separator, key = url.removeprefix("relay://").partition("?key=")
        address = address_and_path.partition("/")[0]
        return {"ticket": f"relay://{address}?key={key}"} if separator else {}

    @property
    def client(self) -> Client:
        """The client, which is shared by everything in this process that reads from the same server."""
        return shared_client(self._ticket, timeout=self._timeout)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The entries of a folder; for a file, the entry of the file itself."""
        path = self._strip_protocol(path)
        entries: dict[str, dict[str, Any]] = {}
        for part in self._entries(path):
            if entries:
                part.pop(path, None)  # A folder hides a file of its name.
            entries = part | entries
            if path in entries:
                break
        if not entries and path:
            raise FileNotFoundError(errno.ENOENT, "there is no such topic or file", path)
        found = sorted(entries.values(), key=lambda entry: entry["name"])
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """The size and kind of a file or folder; for a file also its version, tensor, dtype and shape."""
        path = self._strip_protocol(path)
        for part in self._entries(path):
            if part:
                return part.get(path, _folder(path))
        if path:
            raise FileNotFoundError(errno.ENOENT, "there is no such topic or file", path)
        return _folder(path)

    def _entries(self, path: str) -> Iterator[dict[str, dict[str, Any]]]:
        """The entries of a folder or file by name: first the folders that are parts of topic names, then those of each
        topic whose name the path begins with. The longest name comes first, and what comes first hides the others."""
        topics = [each.topic for each in self.client.topics()]
        yield _folders_below(path, topics)
        for topic in sorted(topics, key=len, reverse=True):
            if f"{path}/".startswith(f"{topic}/"):
                yield _entries_of(self._describe(topic), path.removeprefix(topic).strip("/"))

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: str | Callable[[OSError], Any] = _raise_unless_missing,
        **options: Any,
    ) -> Any:
        """As in fsspec, except that by default all errors are raised but that there is no such topic or folder."""
        return super().walk(path, maxdepth, topdown, on_error, **options)

    def exists(self, path: str, **_: Any) -> bool:
        return self._type_of(path) is not None

    def isdir(self, path: str) -> bool:
        return self._type_of(path) == "directory"

    def isfile(self, path: str) -> bool:
        return self._type_of(path) == "file"

    def _type_of(self, path: str) -> str | None:
        """The kind of an entry, or None if there is none. Other errors are raised."""
        try:
            return str(self.info(path)["type"])
        except FileNotFoundError:
            return None

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes of a file, or a range of them. The whole file is received, and cached within `cache_bytes`."""
        return bytes(self._content(self._file(path))[slice(start, end)])

    def modified(self, path: str) -> Any:
        raise NotImplementedError("versions have no dates: `info` says which version a file is of")

    def ukey(self, path: str) -> str:
        """A text that differs for each version of a file."""
        return "{epoch}-{version}-{name}".format_map(self._file(path))

    def invalidate_cache(self, path: str | None = None) -> None:
        """Drops the cached files. Listings are never cached."""
        self._file_cache.clear()
        super().invalidate_cache(path)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BufferedReader:
        if mode != "rb":
            raise OSError(errno.EROFS, "this file system is read-only: topics are published by a relay (`publish_folder`)", path)
        entry = self._file(path)
        return io.BufferedReader(_File(entry["size"], lambda: self._content(entry)))

    def _file(self, path: str) -> dict[str, Any]:
        entry = self.info(path)
        if entry["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, "it is a folder", path)
        return entry

    def _content(self, entry: dict[str, Any]) -> memoryview:
        """The bytes of exactly the version that the entry names.

        Raises VersionNotFoundError when that version was replaced since the listing, and is not retained.
        """
        key = (entry["topic"], entry["epoch"], entry["version"], entry["tensor"])
        if (content := self._file_cache.get(key)) is None:
            topic, epoch, version, tensor = key
            try:
                snapshot = self.client.get(topic, version, epoch=epoch, select=tensor, timeout=self._timeout)
            except (VersionNotFoundError, TopicEndedError) as error:
                raise VersionNotFoundError(
                    f"{entry['name']}: {error}. The file was replaced after it was opened: open it again, or let its "
                    "publisher keep more versions (`relay.open(topic, keep_versions=2)`)"
                ) from error
            raw: Any = snapshot[tensor].raw  # Its buffer protocol is visible to type checkers from Python 3.12 on.
            content = memoryview(raw).toreadonly()
            self._file_cache.put(key, content)
        return content

    def _describe(self, topic: str) -> Description:
        try:
            return self.client.describe(topic, self._version, timeout=self._timeout)
        except TopicNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, str(error), topic) from error


def _folders_below(path: str, topics: list[str]) -> dict[str, dict[str, Any]]:
    """The subfolders of `path` that are parts of topic names."""
    below = f"{path}/" if path else ""
    names = (topic.removeprefix(below) for topic in topics if topic.startswith(below))
    return {folder: _folder(folder) for folder in (below + name.partition("/")[0] for name in names)}


def _entries_of(described: Description, name: str) -> dict[str, dict[str, Any]]:
    """The entries of a version under this name: one file, or the content of a folder."""
    entries: dict[str, dict[str, Any]] = {}
    for tensor, info in described.tensors.items():
        file = tensor.removeprefix(SIDE_FILE_PREFIX)
        below = f"{name}/" if name else ""
        if file != name and not file.startswith(below):
            continue
        first, is_deeper, _ = file.removeprefix(below).partition("/")
        path = f"{described.topic}/{file if file == name else below + first}"
        if is_deeper and file != name:
            entries.setdefault(path, _folder(path))
            continue
        entries[path] = {
            "name": path,
            "size": info.nbytes,
            "type": "file",
            "topic": described.topic,
            "epoch": described.epoch,
            "version": described.version,
            "tensor": tensor,
            "dtype": info.dtype,
            "shape": info.shape,
        }
    return entries


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}


class _File(io.RawIOBase):
    """A file of known size, received on the first read."""

    def __init__(self, size: int, receive: Any) -> None:
        self._size, self._receive, self._position = size, receive, 0
        self._content: memoryview | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "the position is before the first byte")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._size:
            return 0
        if self._content is None:
            self._content = self._receive()
        out = memoryview(buffer).cast("B")
        part = self._content[self._position : self._position + len(out)]
        out[: len(part)] = part
        self._position += len(part)
        return len(part)

    def close(self) -> None:
        self._content = None
        super().close()


class _FileCache:
    """The cache of the files that were read last, up to a number of bytes. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._files: OrderedDict[tuple[Any, ...], memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[Any, ...]) -> memoryview | None:
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
            return self._files.get(key)

    def put(self, key: tuple[Any, ...], content: memoryview) -> None:
        with self._lock:
            self._files[key] = content
            while sum(each.nbytes for each in self._files.values()) > self._bytes_max:
                self._files.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._files.clear()
