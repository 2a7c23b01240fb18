"""Loops that poll: what a trip of one read, and whether it came to nothing. Decides no schedule.

A trip comes to nothing if it wrote nothing and carries the same values into the next one as it got, but for tokens and
its own counter: with the same numbers read, the next trip is the same again (MM-74).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from peertile.sim.memory import Symmetric, View
from peertile.sim.sites import Site

if TYPE_CHECKING:
    from peertile.sim.words import Word

__all__ = ["TRIES", "Read", "Trip", "same"]

TRIES: Final = 256
"""A loop of so few trips counts them, and is no wait; and so often one that polls goes round before it is said to wait
for ever, as its bound may be written by hand."""

Read = tuple["Word", int, Site]
"""A word, which of its writes was read, and where."""


class Trip:
    """The present trip of the loop `loop`. `free`: what its body uses from outside, if a trip is one read of one place
    and what is made of it, else None."""

    __slots__ = ("_key", "before", "carried", "counted", "free", "loop", "reads", "tries", "writes")

    def __init__(
        self, loop: int, writes: int, carried: tuple[Any, ...] = (), free: tuple[Any, ...] | None = None,
        counted: bool = False,
    ) -> None:  # fmt: skip
        self.loop = loop
        self.writes = writes
        """Writes of the program so far."""
        self.carried = carried
        self.free = free
        self.counted = counted
        self.reads: list[Read] = []
        self.before: list[tuple[Word, int]] | None = None
        """What the trip before it read, if that came to nothing."""
        self.tries = 0
        self._key: Any = None

    def next(self, writes: int, carried: tuple[Any, ...]) -> None:
        """A trip that came to something is over."""
        self.writes = writes
        self.carried = carried
        self.reads = []
        self.before = None
        self.tries = 0
        self._key = None

    @property
    def key(self) -> tuple[Any, ...] | None:
        """What decides what the trip makes of a number that it reads; None where that is not known."""
        if self.free is None:
            return None
        if self._key is None:
            self._key = (_frozen(self.free), _frozen(self.carried))
        return self._key  # type: ignore[no-any-return]


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one is other or _frozen(one) == _frozen(other)


def _frozen(value: Any) -> Any:
    """A value of a program as something to compare and to look up, equal where its bits are."""
    if isinstance(value, tuple | list):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple(_frozen(v) for v in value.values())
    if isinstance(value, np.ndarray | np.generic):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, View | Symmetric):  # where it lies is told by the word that is read through it
        return value.extents
    return object()  # like nothing else
