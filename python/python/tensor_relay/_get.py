"""`Client.get`: a subscription that ends after its first version."""

from __future__ import annotations

import time
from typing import Any

from ._coroutines import finish_copy
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
    """Implements `Client.get`."""
    deadline = None if timeout is None else time.monotonic() + timeout
    in_place = options["out"] is not None and not options["atomic"]
    if in_place and version is not None:
        # Raises if the version does not exist. Without this check, another version would be written to `out` first.
        client.describe(topic, version, epoch=epoch, timeout=timeout)
    installs_later = _installs_later(version, options)
    with _subscribe(client, topic, version, epoch, options, installs_later) as subscription:
        try:
            snapshot = subscription.next(remaining(deadline))
        except VersionsMissedError as error:
            raise _not_found_error(version, error) from error
        except RelayTimeoutError as error:
            if type(error) is not RelayTimeoutError:
                raise  # A subclass says what was missing.
            raise _timeout_error(topic, version, timeout) from error
    if version is not None and snapshot.version != version:
        if in_place:
            reason = f"version {version} was replaced by version {snapshot.version} meanwhile"
            raise _torn_error(snapshot.version, reason)
        raise _not_found_error(version, f"the oldest kept version is {snapshot.version}")
    return client.install(snapshot, options["out"], **_fit(options)) if installs_later else snapshot


async def get_async(
    client: Client,
    topic: str | None,
    version: int | None,
    epoch: str | None,
    timeout: float | None,
    options: dict[str, Any],
) -> Snapshot:
    """Implements `Client.get_async`."""
    installs_later = _installs_later(version, options)
    async with _subscribe(client, topic, version, epoch, options, installs_later) as subscription:
        try:
            snapshot = await subscription.next_async(timeout)
        except VersionsMissedError as error:
            raise _not_found_error(version, error) from error
        except RelayTimeoutError as error:
            if type(error) is not RelayTimeoutError:
                raise  # A subclass says what was missing.
            raise _timeout_error(topic, version, timeout) from error
    if version is not None and snapshot.version != version:
        raise _not_found_error(version, f"the oldest kept version is {snapshot.version}")
    if not installs_later:
        return snapshot
    return await finish_copy(*client._begin_install(snapshot, options["out"], **_fit(options)))


def _fit(options: dict[str, Any]) -> dict[str, Any]:
    return {"strict": options["strict"], "rename": options["rename"]}


def _installs_later(version: int | None, options: dict[str, Any]) -> bool:
    """Whether the snapshot is copied to `out` only after its version number was checked."""
    return version is not None and options["out"] is not None and bool(options["atomic"])


def _subscribe(
    client: Client,
    topic: str | None,
    version: int | None,
    epoch: str | None,
    options: dict[str, Any],
    installs_later: bool,
) -> Subscription:
    if version is None:
        return client.subscribe(topic, **options)
    start: Any = version if epoch is None else (epoch, version)
    if installs_later:
        options = options | {"out": None, "strict": True, "rename": None}
    # A window of 1: the server must not send a second version ahead.
    return client.subscribe(topic, mode="every", start=start, window=1, **options)


def remaining(deadline: float | None) -> float | None:
    """The seconds until `deadline`, a time of `time.monotonic`; None without one."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _timeout_error(topic: str | None, version: int | None, timeout: float | None) -> RelayTimeoutError:
    wanted = "version" if version is None else f"version {version}"
    of_topic = "" if topic is None else f" of {topic}"
    return RelayTimeoutError(f"no {wanted}{of_topic} arrived within {timeout} s: see the chained error for the cause")


def _not_found_error(version: int | None, reason: object) -> VersionNotFoundError:
    return VersionNotFoundError(f"version {version} is not kept any more: {reason}")


def _torn_error(version: int, reason: str) -> TornError:
    torn = TornError(f"{reason}; with atomic=False, the tensors of `out` may hold bytes of it: fill them again")
    torn.version = version
    return torn
