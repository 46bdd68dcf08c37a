"""asyncio's futures of work on Rust threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def new(cancel: Callable[[], None]) -> tuple[asyncio.Future[Any], Callable[[Callable[[], Any]], None]]:
    """A future of the running event loop, whose cancellation calls `cancel`; and the function, to be called by any thread,
    that completes it with the result of another function, which the loop's thread calls unless the future is cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    future.add_done_callback(lambda future: cancel() if future.cancelled() else None)

    def complete(result: Callable[[], Any]) -> None:
        loop.call_soon_threadsafe(_complete, future, result)

    return future, complete


def _complete(future: asyncio.Future[Any], result: Callable[[], Any]) -> None:
    if future.done():
        return  # It was cancelled, and the work with it.
    try:
        future.set_result(result())
    except BaseException as error:
        future.set_exception(error.with_traceback(None))
