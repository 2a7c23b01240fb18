"""Words for loops, indices, checks and output. Signatures and formulas; no bodies."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peertile.language.tiles import Tile
from peertile.language.word import word

__all__ = [
    "assert_",
    "num_programs",
    "num_ranks",
    "peers",
    "print_",
    "program_id",
    "range",
    "rank",
    "ranks",
    "static_assert",
    "static_range",
]


@word
def range(lo: Any, hi: Any = None, step: Any = None, *, stages: int = 1) -> Iterator[Tile]:
    """lo, lo + step, … below hi, at run time; one argument is `hi`, with lo = 0.

    A negative step, known when compiling, counts down to above hi. A run-time step is positive, which is checked.

    `stages` > 1 asks for that many trips of loads in flight.

    Example::

        for k in T.range(0, 8, 2, stages=3):
            x.load((k,), (64,))
        for k in T.range(7, -1, -1):
            x.load((k,), (64,))
    """


@word
def static_range(lo: int, hi: int | None = None, step: int | None = None) -> Iterator[int]:
    """As Python's range, unrolled at compile time: the variable is a constant in each trip.

    Example::

        for k in T.static_range(4):
            x.load((k,), (16 << k,))
    """


@word
def static_assert(condition: bool, message: str = "") -> None:
    """A compile error with `message` unless the compile-time `condition` holds.

    Example::

        T.static_assert(N % 16 == 0, "N must be a multiple of 16")
    """


@word
def assert_(condition: Any, message: str = "") -> None:
    """Ends the program with a `KernelAssert` fault unless the bool scalar `condition` holds, on every target.

    Example::

        T.assert_(n > 0, "n must be positive")
    """


@word
def print_(*values: Any) -> None:
    """Prints text, then scalars and tiles, with rank and program in front, on every target.

    Example::

        T.print_("n is", n)
    """


@word
def program_id(axis: int = 0) -> Tile:
    """Index of this program on a grid axis.

    Example::

        x.load((T.program_id(0),), (64,))
    """


@word
def num_programs(axis: int = 0) -> Tile:
    """Number of programs on a grid axis.

    Example::

        for k in T.range(T.program_id(0), 100, T.num_programs(0)):
            x.load((k,), (64,))
    """


@word
def rank() -> Tile:
    """This rank, where one group is in play; with several, ask the object: `p.rank`.

    Example::

        T.rank() == 0
    """


@word
def num_ranks() -> Tile:
    """Number of ranks, where one group is in play; with several, ask the object: `p.num_ranks`.

    Example::

        T.num_ranks()
    """


@word
def ranks() -> Iterator[Tile]:
    """0, 1, …, n-1: every rank, the same order on every rank, so that sums agree to the bit.

    Example::

        acc = T.zeros((64,), T.f32)
        for r in T.ranks():
            acc += p.at(r).load((0,), (64,))
    """


@word
def peers() -> Iterator[Tile]:
    """(rank + k) mod n for k = 1 … n-1: every rank but this one, staggered so that not all hit one.

    Example::

        for r in T.peers():
            p.at(r).store((0,), t)
    """
