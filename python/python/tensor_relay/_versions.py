"""Versions of other packages."""

from __future__ import annotations

import re


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 55, 0) for 2.55.0rc1."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
