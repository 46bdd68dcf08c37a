"""Coroutines for the awaitables that the Rust code returns, which are not coroutines themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from ._native import Snapshot

_T = TypeVar("_T")


async def await_lazily(begin: Callable[[], Awaitable[_T]]) -> _T:
    """Calls `begin` only when the coroutine is awaited, and returns the result."""
    return await begin()


async def next_async(begin: Callable[[], Awaitable[Callable[[], Snapshot]]]) -> Snapshot:
    """Calls `begin` only when the coroutine is awaited, so that a coroutine that is never awaited consumes no version.
    The awaitable's result is a function that takes the version from the queue, so that a coroutine that is cancelled
    before it resumes loses no version."""
    return (await begin())()
