"""The payload: noise that both sides generate, and that differs in each round.

The sink generates the same noise block by block and compares every byte. So only the payload itself is
transferred, and data that a receiver still holds from an earlier round is noticed.
"""

from typing import Any, TypeAlias

import numpy as np

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

SMALL_BYTES = 4096
"""The size of a small message."""

BLOCK_BYTES = 4 << 20
"""The noise of one seed: small enough to be compared within a cache, large enough to amortise the seeding."""

PAGE_BYTES = 4096
"""The first word of each page changes in every round. No compared library sends smaller pieces."""


def allocate_resident(size: int) -> Bytes:
    """Allocates memory whose pages are resident: receiving into it causes no page faults."""
    array: Bytes = np.empty(size, np.uint8)
    array.fill(0)
    return array


def fill(content: Bytes) -> None:
    """Fills `content` with the noise that all rounds have in common."""
    for start in range(0, len(content), BLOCK_BYTES):
        block = content[start : start + BLOCK_BYTES]
        block[:] = _block(start, len(block))


def mark(content: Bytes, round_number: int) -> None:
    """Turns the noise of any round into that of round `round_number`. Fast: writes one word for each page."""
    _mark(content, 0, round_number)


def verify(received: Bytes, size: int, round_number: int) -> None:
    """Compares all of `received` with the noise of round `round_number`."""
    if received.nbytes != size:
        raise ValueError(f"{received.nbytes} bytes were received where {size} were requested")
    received = received.reshape(-1).view(np.uint8)
    for start in range(0, size, BLOCK_BYTES):
        block = received[start : start + BLOCK_BYTES]
        expected = _block(start, len(block))
        _mark(expected, start, round_number)
        if not np.array_equal(block, expected):
            first = start + int(np.argmax(block != expected))
            reason = f"received other bytes than were sent, from byte {first} on"
            raise ValueError(f"round {round_number}: {reason}")


def small(message_number: int) -> Bytes:
    """The small message `message_number`. Its first word is reserved for the time stamp."""
    return _block(SMALL_SEED + message_number, SMALL_BYTES)


def verify_small(received: Bytes, message_number: int) -> None:
    """Compares `received` with the small message `message_number`, except for the first word."""
    received = received.reshape(-1).view(np.uint8)
    if not np.array_equal(received[8:], small(message_number)[8:]):
        raise ValueError(f"small message {message_number}: received other bytes than were sent")


SMALL_SEED = 1 << 62
"""The first seed of small messages: beyond the seeds of the payload's blocks, which are their offsets."""


def _block(seed: int, size: int) -> Bytes:
    words = np.random.SFC64(seed).random_raw(-(-size // 8))
    return words.view(np.uint8)[:size]


def _mark(content: Bytes, offset: int, round_number: int) -> None:
    words = content[: content.nbytes // 8 * 8].view(np.uint64)[:: PAGE_BYTES // 8]
    page = offset // PAGE_BYTES
    words[:] = np.arange(page, page + len(words), dtype=np.uint64) ^ np.uint64(round_number << 40)
