"""Files of a topic, as they were published."""

from __future__ import annotations

import os
from pathlib import Path

from ._native import Client
from ._shared import shared_client


def pull(
    source: str | os.PathLike[str] | Client,
    folder: str | os.PathLike[str],
    topic: str | None = None,
    version: int | None = None,
    *,
    timeout: float | None = 600.0,
) -> Path:
    """Receives one version, and writes it below `folder` as the files that it was published from: the folder of a model for
    `from_pretrained`, or a safetensors or NumPy file. Tensors that were no files become a safetensors file. Returns the
    path of the folder or file, which is `folder` and the topic's name.

        path = tensor_relay.pull(ticket, "models", "policy")
        model = AutoModel.from_pretrained(path)

    source: a ticket, as for `connect`, or a client.
    topic: its name; without one, that which the ticket names.
    version: the number of the version; None is the newest.
    timeout: how long receiving may take, in seconds. Writing takes as long as the disk does.

    Every file is there whole or not at all, and durable; of a folder, all of them appear in one step. What an earlier
    version left there is replaced. It costs memory for the version, and its bytes on the disk twice for a moment.

    Raises what `connect` and `Client.get` do, and TensorRelayError when the system refuses to write, or when files are
    there that no version left.
    """
    client, meant = (source, None) if isinstance(source, Client) else _connected(source)
    snapshot = client.get(topic if topic is not None else meant, version, timeout=timeout)
    return snapshot.save_files(folder)


def _connected(ticket: str | os.PathLike[str]) -> tuple[Client, str | None]:
    """The client of the ticket's server, and the topic that the ticket names."""
    from . import _read_ticket

    text = _read_ticket(ticket)
    return shared_client(text), topic_of(text)


def topic_of(ticket: str) -> str | None:
    """The topic that a ticket names: what stands between the addresses and the key."""
    place = ticket.strip().removeprefix("relay://").partition("?")[0]
    return place.partition("/")[2] or None
