"""One version, once: a subscription that ends with its first version."""

from __future__ import annotations

import time
from typing import Any

from ._native import Client, Snapshot, Subscription
from .errors import RelayTimeoutError, TornError, VersionNotFoundError, VersionsMissedError


def get(
    client: Client,
    topic: str | None,
    version: int | None,
    epoch: str | None,
    timeout: float | None,
    options: dict[str, Any],
) -> Snapshot:
    """What `Client.get` does."""
    deadline = None if timeout is None else time.monotonic() + timeout
    in_place = options["out"] is not None and not options["atomic"]
    if in_place and version is not None:
        # Once its bytes come it is too late to see that they are another version's.
        client.describe(topic, version, epoch=epoch, timeout=timeout)
    later = _installs_later(version, options)
    with _subscribed(client, topic, version, epoch, options, later) as subscription:
        try:
            snapshot = subscription.next(_rest(deadline))
        except VersionsMissedError as error:
            raise _gone(version, error) from error
        except RelayTimeoutError as error:
            if in_place and subscription.progress().wire_bytes:
                raise _torn(subscription.progress().version, f"{error}; part of it may have come") from error
            if type(error) is not RelayTimeoutError:
                raise  # It says what is missing.
            raise _late(topic, version, timeout) from error
    if version is not None and snapshot.version != version:
        if in_place:
            raise _torn(snapshot.version, f"version {version} was replaced by version {snapshot.version} meanwhile")
        raise _gone(version, f"version {snapshot.version} is the oldest that is")
    return _installed(client, snapshot, options) if later else snapshot


async def get_async(
    client: Client,
    topic: str | None,
    version: int | None,
    epoch: str | None,
    timeout: float | None,
    options: dict[str, Any],
) -> Snapshot:
    """What `Client.get_async` does."""
    later = _installs_later(version, options)
    async with _subscribed(client, topic, version, epoch, options, later) as subscription:
        try:
            snapshot = await subscription.next_async(timeout)
        except VersionsMissedError as error:
            raise _gone(version, error) from error
        except RelayTimeoutError as error:
            if type(error) is not RelayTimeoutError:
                raise  # It says what is missing.
            raise _late(topic, version, timeout) from error
    if version is not None and snapshot.version != version:
        raise _gone(version, f"version {snapshot.version} is the oldest that is")
    return _installed(client, snapshot, options) if later else snapshot


def _installs_later(version: int | None, options: dict[str, Any]) -> bool:
    """Whether it is copied to `out` when it is known to be the version that was asked for."""
    return version is not None and options["out"] is not None and bool(options["atomic"])


def _installed(client: Client, snapshot: Snapshot, options: dict[str, Any]) -> Snapshot:
    return client.install(snapshot, options["out"], strict=options["strict"])


def _subscribed(
    client: Client, topic: str | None, version: int | None, epoch: str | None, options: dict[str, Any], later: bool
) -> Subscription:
    if version is None:
        return client.subscribe(topic, **options)
    start: Any = version if epoch is None else (epoch, version)
    if later:
        options = options | {"out": None, "strict": True}
    # Of one version no second is wanted, so none is sent ahead.
    return client.subscribe(topic, mode="every", start=start, window=1, **options)


def _rest(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _late(topic: str | None, version: int | None, timeout: float | None) -> RelayTimeoutError:
    wanted = "version" if version is None else f"version {version}"
    of = "" if topic is None else f" of {topic}"
    return RelayTimeoutError(f"no {wanted}{of} came within {timeout} s: see the error before this one")


def _gone(version: int | None, why: object) -> VersionNotFoundError:
    return VersionNotFoundError(f"version {version} is not kept any more: {why}")


def _torn(version: int, why: str) -> TornError:
    torn = TornError(f"{why}; with atomic=False, the tensors of `out` may hold bytes of it: fill them anew")
    torn.version = version
    return torn
