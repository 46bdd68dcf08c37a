"""Adds methods that are written in Python to the classes of the Rust extension module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._native import Client, Producer, Relay, Subscription
from .errors import ForkError


def add_to(*classes: type, methods: Sequence[Callable[..., Any]]) -> None:
    """Makes functions methods of `classes`."""
    for method in methods:
        method.__qualname__ = f"{classes[0].__name__}.{method.__name__}"
        for kind in classes:
            setattr(kind, method.__name__, method)


def __enter__(self: Any) -> Any:
    return self


def __exit__(self: Client | Producer | Relay | Subscription, *exception: object) -> None:
    """Closes the object, except in a forked child, whose parent uses it. A relay ends its topics unless an exception
    leaves the block."""
    try:
        if isinstance(self, Relay):
            self.close(end=all(part is None for part in exception))
        else:
            self.close()
    except ForkError:
        pass


add_to(Client, Producer, Relay, Subscription, methods=(__enter__, __exit__))
