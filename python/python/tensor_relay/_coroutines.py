"""Coroutines around what is written in Rust, which has none of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from ._native import Snapshot

_T = TypeVar("_T")


async def awaited(begin: Callable[[], Awaitable[_T]]) -> _T:
    """Begins when it is awaited."""
    return await begin()


async def next_async(begin: Callable[[], Awaitable[Callable[[], Snapshot]]]) -> Snapshot:
    """Begins when it is awaited, so that no version is taken for a coroutine that nobody awaits. What is awaited gives the
    version when it is called, so that none is lost where the coroutine is cancelled before it goes on."""
    return (await begin())()
