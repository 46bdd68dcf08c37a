"""`Client.stream`: one version in buckets of tensors, each received while the previous bucket is in use.

Each bucket is a subscription that starts at the version and receives the bucket's chunks, which no other bucket has. In
mode "every" the publisher retains the version for its readers. A bucket's subscription ends after the next bucket's has
begun, so that the version always has a reader.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

from . import _native
from ._deadline import deadline_after, remaining
from ._methods import add_to
from ._native import Client, Description, Snapshot, Subscription, Tensor
from .errors import TensorRelayError, TornError, VersionNotFoundError

# The maximum number of attempts to begin with the newest version, which may be replaced before its first bucket
# arrives.
_ATTEMPTS_MAX = 10


def stream(
    self: Client,
    topic: str | None = None,
    version: int | None = None,
    *,
    epoch: str | None = None,
    select: str | Iterable[str] | None = None,
    bucket_bytes: int = 134_217_728,
    timeout: float | None = 60.0,
) -> Iterator[tuple[str, Tensor]]:
    """Iterates over the tensors of one version with their names, in the order in which they are sent. They are received
    in buckets, so that a version larger than this machine's memory can be read. The next bucket is received while
    the current one is in use. A bucket is delivered once it is complete and verified, the last one only if all
    buckets are of one version. The version is complete only when the iteration has ended without an error: do not
    use its tensors before.

    topic, version, epoch, select: as for `get`. The publisher's next version waits as for a reader in mode "every".
    bucket_bytes: the maximum size of a bucket; a larger chunk or tensor is a bucket by itself. Three buckets are in
        memory at a time: the previous, the current and the next one. Do not keep tensors of earlier buckets.
    timeout: the deadline for each bucket in seconds; None waits without limit.

    Raises the exceptions of `get`, and TornError for a failure after the first tensor: the tensors delivered so far
    are not a complete version.
    """
    _native.check_stream(version, epoch, bucket_bytes, timeout)
    deadline = deadline_after(timeout)
    for attempt in range(_ATTEMPTS_MAX):
        described = self.describe(topic, version, epoch=epoch, timeout=remaining(deadline))
        buckets = _Buckets(self, described, select, bucket_bytes)
        try:
            first = buckets.first(remaining(deadline))
            break
        except VersionNotFoundError:
            if version is not None or attempt + 1 == _ATTEMPTS_MAX:
                raise
    return buckets.tensors(first, timeout)


def stream_async(
    self: Client,
    topic: str | None = None,
    version: int | None = None,
    *,
    epoch: str | None = None,
    select: str | Iterable[str] | None = None,
    bucket_bytes: int = 134_217_728,
    timeout: float | None = 60.0,
) -> AsyncGenerator[tuple[str, Tensor], None]:
    """`stream` as an asynchronous generator, for `async for`: it starts when the first tensor is requested. To leave
    it early, close it (`contextlib.aclosing`); cancellation releases everything."""
    _native.check_stream(version, epoch, bucket_bytes, timeout)
    return _stream_async(self, topic, version, epoch, select, bucket_bytes, timeout)


async def _stream_async(
    client: Client,
    topic: str | None,
    version: int | None,
    epoch: str | None,
    select: Any,
    bucket_bytes: int,
    timeout: float | None,
) -> AsyncGenerator[tuple[str, Tensor], None]:
    deadline = deadline_after(timeout)
    for attempt in range(_ATTEMPTS_MAX):
        described = await client.describe_async(topic, version, epoch=epoch, timeout=remaining(deadline))
        buckets = _Buckets(client, described, select, bucket_bytes)
        try:
            bucket = await buckets.first_async(remaining(deadline))
            break
        except VersionNotFoundError:
            if version is not None or attempt + 1 == _ATTEMPTS_MAX:
                raise
    try:
        for bucket_index, part in enumerate(buckets.buckets):
            if bucket_index > 0:
                bucket = None
                bucket = await buckets.next_async(bucket_index, timeout)
            buckets.subscribe_after(bucket_index)
            for name in part.names:
                assert bucket is not None
                yield name, bucket[name]
    finally:
        buckets.close()


class _Buckets:
    """The buckets of one version, and the subscription to the next bucket."""

    def __init__(self, client: Client, described: Description, select: Any, bucket_bytes: int) -> None:
        self._client = client
        self._described = described
        self.buckets = _native.buckets(described, bucket_bytes, select)
        self._subscription: Subscription | None = None

    def first(self, timeout: float | None) -> Snapshot | None:
        """The first bucket, or None for a version without tensors."""
        if not self.buckets:
            return None
        self._subscription = self._subscribe(0)
        try:
            return self._receive(timeout)
        except BaseException:
            self.close()
            raise

    async def first_async(self, timeout: float | None) -> Snapshot | None:
        if not self.buckets:
            return None
        self._subscription = self._subscribe(0)
        try:
            return await self._receive_async(timeout)
        except BaseException:
            self.close()
            raise

    def tensors(self, bucket: Snapshot | None, timeout: float | None) -> Iterator[tuple[str, Tensor]]:
        try:
            for bucket_index, part in enumerate(self.buckets):
                if bucket_index > 0:
                    bucket = None
                    bucket = self._next(bucket_index, timeout)
                self.subscribe_after(bucket_index)
                for name in part.names:
                    assert bucket is not None
                    yield name, bucket[name]
        finally:
            self.close()

    def close(self) -> None:
        if self._subscription is not None:
            self._subscription.close()

    def _next(self, bucket_index: int, timeout: float | None) -> Snapshot:
        try:
            return self._receive(timeout)
        except TensorRelayError as error:
            raise self._torn_error(bucket_index, error) from error

    async def next_async(self, bucket_index: int, timeout: float | None) -> Snapshot:
        try:
            return await self._receive_async(timeout)
        except TensorRelayError as error:
            raise self._torn_error(bucket_index, error) from error

    def subscribe_after(self, bucket_index: int) -> None:
        """Subscribes to the bucket after this one, and only then ends the subscription to this one."""
        previous, self._subscription = self._subscription, None
        try:
            if bucket_index + 1 < len(self.buckets):
                self._subscription = self._subscribe(bucket_index + 1)
        except TensorRelayError as error:
            if bucket_index == 0:
                raise
            raise self._torn_error(bucket_index, error) from error
        finally:
            if previous is not None:
                previous.close()

    def _subscribe(self, bucket_index: int) -> Subscription:
        return self.buckets[bucket_index].subscribe(self._client)

    def _receive(self, timeout: float | None) -> Snapshot:
        assert self._subscription is not None
        return self._check(self._subscription.next(timeout))

    async def _receive_async(self, timeout: float | None) -> Snapshot:
        assert self._subscription is not None
        return self._check(await self._subscription.next_async(timeout))

    def _check(self, snapshot: Snapshot) -> Snapshot:
        if not _native.is_bucket_of(self._described, snapshot):
            version = self._described.version
            raise VersionNotFoundError(f"version {version} is not kept any more: {snapshot!r} was received in its place")
        return snapshot

    def _torn_error(self, bucket_index: int, error: TensorRelayError) -> TornError:
        torn = TornError(
            f"{self._described.topic} version {self._described.version} ended after {bucket_index} of {len(self.buckets)} "
            f"buckets: {error}; the tensors returned so far are an incomplete version"
        )
        torn.version = self._described.version
        return torn


add_to(Client, methods=(stream, stream_async))
