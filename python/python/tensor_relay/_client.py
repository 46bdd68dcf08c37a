"""The methods of `Client` that are written in Python: those that wait more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from . import _native
from ._boxes import Boxes, depend_on_tensors
from ._deadline import deadline_after, remaining
from ._methods import add_to
from ._native import Client, Description, Snapshot, Subscription
from .errors import RelayTimeoutError


def get(
    self: Client,
    topic: str | None = None,
    version: int | None = None,
    *,
    epoch: str | None = None,
    select: str | Iterable[str] | None = None,
    boxes: Boxes = None,
    out: Any = None,
    atomic: bool = True,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
    timeout: float | None = 60.0,
) -> Snapshot:
    """Receives one version of a topic, without a lasting subscription.

    topic: its name; by default the topic that the ticket names.
    version: the number of the version; None is the newest. A version that is not yet published is waited for; one
        that is no longer retained is an error.
    epoch: with `version`, the epoch of the topic, as in `Snapshot.epoch`: after a restart a publisher counts
        versions from 1 again, in a new epoch. Without `version` it is a RequestError.
    select, boxes, out, atomic, strict, rename: as for `subscribe`; boxes that depend on the tensors are computed for
        those of this version.
    timeout: the deadline for the whole call in seconds; None waits without limit. A topic that does not exist is
        waited for at most for the client's `topic_timeout`.

    Raises VersionNotFoundError, TopicNotFoundError, RelayTimeoutError, TopicEndedError, and the other exceptions of
    `Subscription.next`. With `atomic=False`, a timeout during the transfer is a TornError.
    """
    deadline = deadline_after(timeout)
    if depend_on_tensors(boxes):
        boxes = _for_version(boxes, self.describe(topic, version, epoch=epoch, timeout=timeout), select)
    options = select, boxes, out, atomic, strict, rename, timeout
    with _subscribed(self, topic, version, epoch, *options) as subscription:
        return subscription.next(remaining(deadline))


async def get_async(
    self: Client,
    topic: str | None = None,
    version: int | None = None,
    *,
    epoch: str | None = None,
    select: str | Iterable[str] | None = None,
    boxes: Boxes = None,
    out: Any = None,
    atomic: bool = True,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
    timeout: float | None = 60.0,
) -> Snapshot:
    """`get` as a coroutine of asyncio. Not with `atomic=False`. When it is cancelled, the tensors of `out` may have the
    whole version."""
    deadline = deadline_after(timeout)
    if depend_on_tensors(boxes):
        boxes = _for_version(boxes, await self.describe_async(topic, version, epoch=epoch, timeout=timeout), select)
    options = select, boxes, out, atomic, strict, rename, timeout
    with _subscribed(self, topic, version, epoch, *options) as subscription:
        return await subscription.next_async(remaining(deadline))


async def describe_async(
    self: Client,
    topic: str | None = None,
    version: int | None = None,
    *,
    epoch: str | None = None,
    timeout: float | None = 60.0,
) -> Description:
    """`describe` as a coroutine of asyncio."""
    return await self._describe_async(topic, version, epoch, timeout)


def _for_version(boxes: Any, described: Description, select: Any) -> _native.Boxes:
    tensors = [(name, tensor.dtype, tensor.shape) for name, tensor in described.tensors.items()]
    return _native.boxes_of(boxes, tensors, select)


@contextmanager
def _subscribed(client: Client, topic: str | None, version: int | None, *options: Any) -> Iterator[Subscription]:
    """A subscription to one version. Its timeout says which version did not come."""
    with client._subscribe_once(topic, version, *options) as subscription:
        try:
            yield subscription
        except RelayTimeoutError as error:
            if type(error) is not RelayTimeoutError:
                raise  # A subclass says what was missing.
            wanted = "version" if version is None else f"version {version}"
            of_topic = "" if topic is None else f" of {topic}"
            raise RelayTimeoutError(f"{wanted}{of_topic}: {error}") from error


add_to(Client, methods=(get, get_async, describe_async))
