"""Where things are in a buffer of marks, in 8-byte words: what kernels write for a timeline. Numbers only.

    word 0 … 7        the head: how many marks there were, a mask for their places, whether it is open, on cpu the
                      address of the function that writes one
    then              records of 8 words; mark k is in place k & mask, so that the oldest give way

A record's first word is written last: k + 1, so that who reads knows whether it is whole.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = ["HEAD_WORDS", "MARK", "PLACE_BIT", "RECORD_WORDS", "MarkHead", "MarkRecord"]

HEAD_WORDS: Final = 8
RECORD_WORDS: Final = 8
PLACE_BIT: Final = 8
"""The tag of a mark is the index of its moment, and from this bit on its place in the binary."""
MARK: Final = "mark"
"""The kind of such a place."""


class MarkHead(IntEnum):
    COUNT = 0
    MASK = 1
    OPEN = 2
    FUNCTION = 3


class MarkRecord(IntEnum):
    NUMBER = 0
    TIME = 1
    """Of the device, in ns."""
    TAG = 2
    LAUNCH = 3
    """The number that the launch was given."""
    PROGRAM = 4
    ADDRESS = 5
    VALUE = 6
    WHERE = 7
    """The processor or multiprocessor."""
