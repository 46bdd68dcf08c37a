"""Deadlines of calls that wait more than once."""

from __future__ import annotations

import time


def deadline_after(timeout: float | None) -> float | None:
    """The time of `time.monotonic` after this many seconds; None without a limit."""
    return None if timeout is None else time.monotonic() + timeout


def remaining(deadline: float | None) -> float | None:
    """The seconds until a deadline; None without one."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
