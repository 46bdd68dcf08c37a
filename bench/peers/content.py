"""What travels: noise that both sides can make, and that is another one in each round.

The sink makes the same noise again, block by block, and compares every byte. So nothing but the payload
itself needs to cross, and what a receiver still holds from an earlier round is never taken for a new one.
"""

from typing import Any, TypeAlias

import numpy as np

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

SMALL_BYTES = 4096
"""The size of a small message."""

BLOCK_BYTES = 4 << 20
"""How much noise one seed makes: small enough to compare within a cache, large enough to hide the seeding."""

PAGE_BYTES = 4096
"""Each page begins with a word that changes with every round: no piece that travels is smaller than this."""


def touched(size: int) -> Bytes:
    """Memory that the kernel has already given: receiving into it costs no page faults."""
    array: Bytes = np.empty(size, np.uint8)
    array.fill(0)
    return array


def fill(content: Bytes) -> None:
    """Fills `content` with the noise that every round is made of."""
    for start in range(0, len(content), BLOCK_BYTES):
        block = content[start : start + BLOCK_BYTES]
        block[:] = _block(start, len(block))


def mark(content: Bytes, number: int) -> None:
    """Turns the noise of any round into that of round `number`: one word for each page, done in no time."""
    _mark(content, 0, number)


def verify(received: Bytes, size: int, number: int) -> None:
    """Compares all of `received` with the noise of round `number`."""
    if received.nbytes != size:
        raise ValueError(f"{received.nbytes} bytes came where {size} were asked for")
    received = received.reshape(-1).view(np.uint8)
    for start in range(0, size, BLOCK_BYTES):
        block = received[start : start + BLOCK_BYTES]
        expected = _block(start, len(block))
        _mark(expected, start, number)
        if not np.array_equal(block, expected):
            first = start + int(np.argmax(block != expected))
            raise ValueError(f"round {number}: what came is not what was sent, from byte {first} on")


def small(number: int) -> Bytes:
    """Message `number`. Its first word is free for the time at which it is sent."""
    return _block(SMALL_SEED + number, SMALL_BYTES)


def verify_small(received: Bytes, number: int) -> None:
    """Compares `received` with message `number`, but for its first word."""
    received = received.reshape(-1).view(np.uint8)
    if not np.array_equal(received[8:], small(number)[8:]):
        raise ValueError(f"small message {number}: what came is not what was sent")


SMALL_SEED = 1 << 62
"""Where the seeds of small messages begin: beyond any payload, whose blocks have their offsets for seeds."""


def _block(seed: int, size: int) -> Bytes:
    words = np.random.SFC64(seed).random_raw(-(-size // 8))
    return words.view(np.uint8)[:size]


def _mark(content: Bytes, offset: int, number: int) -> None:
    words = content[: content.nbytes // 8 * 8].view(np.uint64)[:: PAGE_BYTES // 8]
    page = offset // PAGE_BYTES
    words[:] = np.arange(page, page + len(words), dtype=np.uint64) ^ np.uint64(number << 40)
