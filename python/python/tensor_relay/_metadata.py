"""A version's metadata: text on the wire, Python values in programs.

Text is sent as it is, and any other value as JSON: the number 1 is the text `1` for the command line and for Rust. One
more key, `_JSON_KEYS`, lists the keys whose values are JSON, so that Python receives values of the types published.

Entries of a `state_dict` other than tensors are metadata, too: their keys have a prefix, and all are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ._frameworks import to_python_number
from ._native import RESERVED_PREFIX
from ._state_dict import type_name
from .errors import DamagedError, RequestError

_JSON_KEYS = "tensor_relay.json"
_ENTRY = "tensor_relay.entry:"

# The prefix of this package's own keys, which users must not use.
_RESERVED = "tensor_relay."

_Pairs = Sequence[tuple[str, str]]


def encoded(metadata: Any) -> list[tuple[str, str]]:
    """A user's metadata as it is sent. Raises TypeError, which names the first value that cannot be sent; RequestError
    for a reserved key."""
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is a mapping of names to values, and not a {type_name(metadata)}")
    pairs: list[tuple[str, str]] = []
    json_keys: list[str] = []
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise TypeError(f"the keys of metadata are text, and {key!r} is not")
        if key.startswith((_RESERVED, RESERVED_PREFIX)):
            raise RequestError(
                f'metadata "{key}" has a prefix reserved for tensor-relay ({_RESERVED} or {RESERVED_PREFIX}): call it '
                "something else"
            )
        if not isinstance(value, str):
            json_keys.append(key)
            value = _to_json(key, value)
        if not (_is_unicode(key) and _is_unicode(value)):
            raise TypeError(f"metadata {key!r} cannot be sent: it has surrogates, which UTF-8 cannot encode")
        pairs.append((key, value))
    if json_keys:
        pairs.append((_JSON_KEYS, _dumped(json_keys)))
    return pairs


def decoded(pairs: _Pairs) -> dict[str, Any]:
    """The part of a version's metadata that users see. Raises DamagedError for a value that should be JSON and is not,
    which is the publisher's fault."""
    json_keys: Any = next((_loaded(f'metadata "{key}"', text) for key, text in pairs if key == _JSON_KEYS), [])
    if not isinstance(json_keys, list):
        raise DamagedError(f'the metadata "{_JSON_KEYS}" of this version cannot be read: it is no list of keys')
    return {
        key: _loaded(f'metadata "{key}"', text) if key in json_keys else text
        for key, text in pairs
        if key != _JSON_KEYS and not key.startswith(_ENTRY)
    }


def encoded_entry(name: str, value: Any) -> tuple[str, str]:
    """A value of a state dict that is not a tensor, as a pair of metadata."""
    return _ENTRY + name, json.dumps(value)


def entries(pairs: _Pairs) -> dict[str, Any]:
    """The values of a state dict in a version's metadata, by name. Raises DamagedError for one that is not JSON."""
    named = ((key.removeprefix(_ENTRY), text) for key, text in pairs if key.startswith(_ENTRY))
    return {name: _loaded(f'entry "{name}"', text) for name, text in named}


def _to_json(key: str, value: Any) -> str:
    try:
        text = _dumped(value)
    except Exception as error:
        raise TypeError(
            f'metadata "{key}" ({type_name(value)}) cannot be sent: {error}. Supported are text, numbers, truth values, '
            "None, and lists and dictionaries of these"
        ) from error
    _check_keys(key, value)
    return text


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 has all of the text's characters: not those of names that the system could not decode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_keys(key: str, value: Any) -> None:
    """Refuses dictionaries with keys that are not text: JSON would turn them into text, and merge two keys with the same
    text. The loop ends: a value that contains itself was refused by the JSON encoder before."""
    unchecked = [value]
    while unchecked:
        value = unchecked.pop()
        if isinstance(value, dict):
            for nested in value:
                if not isinstance(nested, str):
                    raise TypeError(
                        f'metadata "{key}" has a dictionary with the key {nested!r}, which would be received as text: make '
                        "it text"
                    )
            unchecked.extend(value.values())
        elif isinstance(value, (list, tuple)):
            unchecked.extend(value)


def _dumped(value: Any) -> str:
    """The value as JSON; scalars of NumPy and other frameworks as numbers."""
    return json.dumps(value, ensure_ascii=False, default=to_python_number)


def _loaded(what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except Exception as error:
        raise DamagedError(f"the {what} of this version cannot be read: {error}") from error
