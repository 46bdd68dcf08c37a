"""Runs the callbacks of `Publication.on_released` on a thread of their own, so that neither the network's threads nor
the release of memory waits for them."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from ._methods import add_to
from ._native import Publication

_Callback = Callable[[Publication], object]

# The callbacks, by registration ID, of publications that are not released yet, and the queue of callbacks to run.
# Neither has a bound of its own: each registration adds one entry.
_waiting: dict[int, tuple[_Callback, Publication]] = {}
_due: SimpleQueue[tuple[_Callback, Publication] | None] = SimpleQueue()
_registration_ids = itertools.count()
_lock = threading.Lock()
_thread: threading.Thread | None = None

# How often `finish` checks whether the publications have been released.
_POLL_INTERVAL_S = 0.005


def on_released(self: Publication, callback: _Callback) -> None:
    """Calls `callback(publication)` once the tensors may be written again (`released`). All callbacks run on one Python
    thread, one after the other, also if nothing refers to the publication; exceptions are logged. When the interpreter
    exits, callbacks of versions released by the exit have one second to run.

    If a `Producer` loses its connection, the callback is not called, and that is logged: the server may still be reading
    the tensors.

    Raises TypeError if `callback` is not callable."""
    if not callable(callback):
        raise TypeError(f"{callback} is not callable")
    _start_thread()
    registration_id = next(_registration_ids)
    _waiting[registration_id] = (callback, self)
    try:
        self._on_released(functools.partial(_make_due, registration_id))
    except BaseException:
        _waiting.pop(registration_id, None)
        raise


def _make_due(registration_id: int, error: str | None = None) -> None:
    """Called when the publication is released, or with an error text when its release cannot be observed any more. Never
    blocks."""
    if (registered := _waiting.pop(registration_id, None)) is None:
        return  # `finish` has dropped the callback.
    if error is None:
        _due.put(registered)
    else:
        _logger().warning("%r is not known to be released, and its callback is not called: %s", registered[1], error)


def _start_thread() -> None:
    """Starts the thread unless it is running. `register` calls this, because an exiting interpreter cannot start
    threads."""
    global _thread
    with _lock:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="tensor-relay-callbacks", daemon=True)
            _thread.start()


def finish(timeout: float) -> None:
    """Waits at interpreter exit, for `timeout` seconds at most, until all publications are released and their callbacks
    have run. Drops the callbacks of publications that are not released by then."""
    if _thread is None or not _thread.is_alive():
        return
    deadline = time.monotonic() + timeout
    while _waiting and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
    _waiting.clear()
    _due.put(None)
    _thread.join(max(0.0, deadline - time.monotonic()))


def _run() -> None:
    while (due := _due.get()) is not None:
        callback, publication = due
        try:
            callback(publication)
        except SystemExit:
            pass  # As in any thread, `exit` ends only the callback.
        except BaseException:
            _logger().exception("The callback %r of %r failed.", callback, publication)
        del due, callback, publication  # They may hold a version's memory.


def _logger() -> logging.Logger:
    return logging.getLogger("tensor_relay")


add_to(Publication, methods=(on_released,))
