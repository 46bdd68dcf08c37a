"""Coroutines for the awaitables that the Rust code returns, which are not coroutines themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from ._native import Snapshot

_T = TypeVar("_T")


async def await_lazily(begin: Callable[[], Awaitable[_T]]) -> _T:
    """Calls `begin` only when the coroutine is awaited, and returns the result."""
    return await begin()


async def next_async(begin: Callable[[], Awaitable[Callable[[], Snapshot | _Copy]]]) -> Snapshot:
    """Calls `begin` only when the coroutine is awaited, so that a coroutine that is never awaited consumes no version.
    The awaitable's result is a function that takes the version from the queue, so that a coroutine that is cancelled
    before it resumes loses no version."""
    claimed = (await begin())()
    return await finish_copy(*claimed) if isinstance(claimed, tuple) else claimed


# A copy to `out` that was begun: its end, and the function that waits for it and returns the version, which counts as
# delivered if the argument is true.
_Copy = tuple[Awaitable[None], Callable[[bool], Snapshot]]


async def finish_copy(end: Awaitable[None], finish: Callable[[bool], Snapshot]) -> Snapshot:
    """Waits for the end of a copy to `out` without holding the event loop. A coroutine that is cancelled or closed
    meanwhile holds it until the copy has ended, because nothing may write to the tensors after that."""
    try:
        await end
    except BaseException:
        finish(False)
        raise
    return finish(True)
