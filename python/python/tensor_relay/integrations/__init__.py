"""Integrations with other systems: one module for each, which is not imported with `tensor_relay`.

    import tensor_relay.integrations.ray

Each module refuses versions of its host package that it was not made for (`IntegrationError`). docs/integrations.md has
a page for each: what it replaces, the line that switches it on, what it costs, and when not to use it.
"""

from __future__ import annotations

import importlib.metadata

from .._versions import numbers
from ..errors import IntegrationError

__all__ = ["check_host", "check_timeout"]


def check_host(package: str, at_least: str, below: str) -> str:
    """Returns the installed version of an integration's host package.

    at_least, below: the range of versions that have the interface that the integration uses.

    Raises IntegrationError when the package is not installed, or in a version outside the range.
    """
    wanted = f"pip install '{package}>={at_least},<{below}'"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise IntegrationError(f"tensor_relay's integration with {package} needs that package: {wanted}") from error
    if not numbers(at_least) <= numbers(found) < numbers(below):
        raise IntegrationError(
            f"tensor_relay's integration with {package} is made for versions from {at_least} to below {below}, and {found} is "
            f"installed: {wanted}, or a tensor_relay that knows {found}"
        )
    return found


def check_timeout(name: str, seconds: float) -> float:
    """Returns a timeout that an integration counts down itself.

    Raises ValueError for a negative number or NaN, as the methods of the package do.
    """
    if not seconds >= 0:
        raise ValueError(f"{name} is {seconds}, but must be in seconds, 0 or more")
    return seconds
