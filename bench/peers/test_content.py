"""Tests of the payload's verification. Run them with `.venv-light/bin/python -m unittest`."""

import unittest

import content
from content import BLOCK_BYTES, PAGE_BYTES

SIZE = BLOCK_BYTES + 3 * PAGE_BYTES + 5
"""More than one block, and a multiple of neither the page size nor the word size."""


def _round(number: int) -> content.Bytes:
    data = content.allocate_resident(SIZE)
    content.fill(data)
    content.mark(data, number)
    return data


class Verification(unittest.TestCase):
    def test_accepts_the_sent_bytes(self) -> None:
        for number in range(3):
            content.verify(_round(number), SIZE, number)

    def test_accepts_a_round_made_from_another_one(self) -> None:
        data = _round(7)
        content.mark(data, 2)
        content.verify(data, SIZE, 2)

    def test_notices_any_changed_byte(self) -> None:
        for position in (0, PAGE_BYTES + 9, BLOCK_BYTES - 1, BLOCK_BYTES, SIZE - 1):
            data = _round(1)
            data[position] ^= 1
            with self.assertRaisesRegex(ValueError, f"from byte {position} on"):
                content.verify(data, SIZE, 1)

    def test_notices_a_page_of_an_earlier_round(self) -> None:
        data, stale = _round(2), _round(1)
        page = slice(5 * PAGE_BYTES, 6 * PAGE_BYTES)
        data[page] = stale[page]
        with self.assertRaisesRegex(ValueError, "round 2"):
            content.verify(data, SIZE, 2)

    def test_notices_missing_bytes(self) -> None:
        with self.assertRaisesRegex(ValueError, "were requested"):
            content.verify(_round(0)[:-1], SIZE, 0)

    def test_notices_another_small_message(self) -> None:
        content.verify_small(content.small(4), 4)
        with self.assertRaisesRegex(ValueError, "small message 5"):
            content.verify_small(content.small(4), 5)


if __name__ == "__main__":
    unittest.main()
