"""tensor-relay inside of other systems: one module for each, imported when it is asked for and not before.

    import tensor_relay.integrations.ray

Each names the versions of its host that it was made for, and refuses others (`IntegrationError`). docs/integrations.md has
a page for each: what it replaces, the line that switches it on, what it costs, and when not to use it.
"""

from __future__ import annotations

import importlib.metadata
import re

from ..errors import IntegrationError

__all__ = ["check_host"]


def check_host(package: str, at_least: str, below: str) -> str:
    """Looks for another system's package, and gives its version.

    at_least, below: the versions that are known to have the interface that an integration is made for.

    Raises IntegrationError where it is not installed, or in another version.
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


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: 2.55.0rc1 is (2, 55, 0)."""
    begun = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in begun[0].split(".")) if begun else ()
