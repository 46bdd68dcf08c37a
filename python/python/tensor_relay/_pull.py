"""`pull`: receives a topic's files and writes them as they were published."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ._native import Client, unpack_engine_caches
from ._shared import shared_client


def pull(
    source: str | os.PathLike[str] | Client,
    folder: str | os.PathLike[str],
    topic: str | None = None,
    version: int | None = None,
    *,
    keep: int | None = None,
    engine_caches: list[str] | tuple[str, ...] = (),
    timeout: float | None = 600.0,
) -> Path:
    """Receives one version and writes it below `folder` as the files that it was published from: a model's folder for
    `from_pretrained`, or a safetensors or NumPy file. A version that was not published from files becomes a safetensors
    file. Returns the path of the written folder or file: for topic `policy` the folder `folder/policy`, or a single
    file such as `folder/policy.safetensors`.

        path = tensor_relay.pull(ticket, "models", "policy", keep=2)
        model = AutoModel.from_pretrained(path)

    source: a ticket, as for `connect`, or a client.
    topic: the topic's name; by default the topic in the ticket.
    version: the number of the version; None is the newest.
    keep: the number of versions that stay side by side; the returned path is then that of this version alone, as
        `folder/policy/VERSION-EPOCH`, and is deleted when `keep` newer ones have been written. By default the files
        replace those of an earlier version.
    engine_caches: caches of inference engines to unpack, as for `unpack_engine_caches`, which says more. One that was
        not unpacked is logged as a warning, with the reason.
    timeout: how long receiving may take, in seconds. It does not limit writing.

    Each file is written atomically and synced to disk; the files of a folder appear in one step. A program that opens a
    folder's files one after the other, as `from_pretrained` does, gets files of two versions if they are replaced
    meanwhile: where another call may write to `folder`, use `keep`. The call needs memory for the version and, for a
    moment, twice its size on disk.

    Raises the errors of `connect` and `Client.get`, and TensorRelayError when the system refuses to write, or when
    files that do not belong to an earlier version are in the way.
    """
    client, ticket_topic = (source, None) if isinstance(source, Client) else client_and_topic(source)
    snapshot = client.get(topic if topic is not None else ticket_topic, version, timeout=timeout)
    path = snapshot.save_files(folder, keep=keep)
    if engine_caches:
        for name, reason in unpack_engine_caches(path, engine_caches).items():
            if reason is not None:
                logging.getLogger("tensor_relay").warning("The engine cache %s was not unpacked: %s", name, reason)
    return path


def client_and_topic(ticket: str | os.PathLike[str]) -> tuple[Client, str | None]:
    """Returns the shared client of the ticket's server, and the topic that the ticket names."""
    from . import _read_ticket

    text = _read_ticket(ticket)
    return shared_client(text), _topic_of(text)


def _topic_of(ticket: str) -> str | None:
    """The topic in a ticket: the text between the addresses and the key."""
    address_and_topic = ticket.strip().removeprefix("relay://").partition("?")[0]
    return address_and_topic.partition("/")[2] or None
