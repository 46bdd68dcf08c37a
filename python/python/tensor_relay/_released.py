"""The callbacks of `Publication.on_released`, on a thread of their own: neither the network nor what gives memory back waits
for them."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from ._native import Publication

_Callback = Callable[[Publication], object]

# One entry for each callback that a program has registered, so the program bounds both.
_waiting: dict[int, tuple[_Callback, Publication]] = {}
_due: SimpleQueue[tuple[_Callback, Publication] | None] = SimpleQueue()
_numbers = itertools.count()
_lock = threading.Lock()
_thread: threading.Thread | None = None

# How often the end of the interpreter looks whether what was let go is released.
_LOOK_S = 0.005


def register(callback: _Callback, publication: Publication) -> Callable[[str | None], None]:
    """Gives what is called when the publication is released, or when it is not known whether it is. That never waits."""
    _begin()
    number = next(_numbers)
    _waiting[number] = (callback, publication)
    return functools.partial(_is_due, number)


def _is_due(number: int, lost: str | None = None) -> None:
    if (waited := _waiting.pop(number, None)) is None:
        return  # The end of the interpreter was faster.
    if lost is None:
        _due.put(waited)
    else:
        _logger().warning("%r is not known to be released, and its callback is not called: %s", waited[1], lost)


def _begin() -> None:
    """Starts the thread, if it does not run. Not when the first callback is due: an interpreter that ends starts no threads."""
    global _thread
    with _lock:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="tensor-relay-callbacks", daemon=True)
            _thread.start()


def finish(timeout: float) -> None:
    """Waits until what the end of the interpreter releases has been called. Nothing is called later."""
    if _thread is None or not _thread.is_alive():
        return
    late = time.monotonic() + timeout
    while _waiting and time.monotonic() < late:
        time.sleep(_LOOK_S)
    _waiting.clear()
    _due.put(None)
    _thread.join(max(0.0, late - time.monotonic()))


def _run() -> None:
    while (due := _due.get()) is not None:
        callback, publication = due
        try:
            callback(publication)
        except SystemExit:
            pass  # As in any thread: of a program that ends, for one that still uses this package.
        except BaseException:
            _logger().exception("The callback %r of %r failed.", callback, publication)
        del due, callback, publication  # What they hold may be a version's memory.


def _logger() -> logging.Logger:
    return logging.getLogger("tensor_relay")
