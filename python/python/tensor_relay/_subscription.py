"""The coroutines of `Subscription`. The awaitables that the Rust code returns are asyncio's futures, and begin at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ._methods import add_to
from ._native import Snapshot, Subscription


async def next_async(self: Subscription, timeout: float | None = None) -> Snapshot:
    """`next` as a coroutine of asyncio, which begins when it is awaited or made a task. When it is cancelled, no version
    is lost: the next call returns it, even if the tensors of `out` have it already. Not with `atomic=False`."""
    return await _delivered(await self._begin_next(timeout, True))


def prefetch_async(self: Subscription, timeout: float | None = None) -> Coroutine[Any, Any, Snapshot]:
    """`prefetch` as a coroutine of asyncio, with the properties of `next_async`."""
    self._check_atomic()
    return _prefetched(self, timeout)


async def _prefetched(subscription: Subscription, timeout: float | None) -> Snapshot:
    return await _delivered(await subscription._begin_next(timeout, False))


async def __anext__(self: Subscription) -> Snapshot:
    return await _delivered(await self._begin_anext())


async def __aenter__(self: Subscription) -> Subscription:
    return self


async def __aexit__(self: Subscription, *_exception: object) -> None:
    self.close()


# A copy to `out` that was begun: its end, and the function that waits for it and returns the version, which counts as
# delivered if the argument is true.
_Copy = tuple[Awaitable[None], Callable[[bool], Snapshot]]


async def _delivered(claim: Callable[[], Snapshot | _Copy]) -> Snapshot:
    """The version that `claim` takes from the queue: a coroutine that is cancelled before this loses no version.

    A copy to `out` does not hold the event loop. A coroutine that is cancelled or closed meanwhile holds it until the copy
    has ended, because nothing may write to the tensors after that."""
    claimed = claim()
    if not isinstance(claimed, tuple):
        return claimed
    end, finish = claimed
    try:
        await end
    except BaseException:
        finish(False)
        raise
    return finish(True)


add_to(Subscription, methods=(next_async, prefetch_async, __anext__, __aenter__, __aexit__))
