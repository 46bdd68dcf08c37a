"""`Client.get`: a subscription to one version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._native import Client, Snapshot, Subscription
from .errors import RelayTimeoutError


def get(
    client: Client,
    topic: str | None,
    version: int | None,
    epoch: str | None,
    timeout: float | None,
    options: dict[str, Any],
) -> Snapshot:
    """Implements `Client.get`."""
    with _subscribed(client, topic, version, epoch, options) as subscription:
        return subscription.next(timeout)


async def get_async(
    client: Client,
    topic: str | None,
    version: int | None,
    epoch: str | None,
    timeout: float | None,
    options: dict[str, Any],
) -> Snapshot:
    """Implements `Client.get_async`."""
    with _subscribed(client, topic, version, epoch, options) as subscription:
        return await subscription.next_async(timeout)


@contextmanager
def _subscribed(
    client: Client, topic: str | None, version: int | None, epoch: str | None, options: dict[str, Any]
) -> Iterator[Subscription]:
    """A subscription to one version. Its timeout says which version did not come."""
    with client._subscribe_once(topic, version, epoch, **options) as subscription:
        try:
            yield subscription
        except RelayTimeoutError as error:
            if type(error) is not RelayTimeoutError:
                raise  # A subclass says what was missing.
            wanted = "version" if version is None else f"version {version}"
            of_topic = "" if topic is None else f" of {topic}"
            raise RelayTimeoutError(f"{wanted}{of_topic}: {error}") from error
