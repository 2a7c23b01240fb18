"""Where the meaning of each op registers: `@evaluates(ops.Load)`. No meaning here.

A meaning is a function of (program, op, *operand values). It returns the value of the only result, or
a tuple of as many as the op has. With `steps=True` it is a generator that yields an `Event` wherever
another agent may act first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from peertile.ir.core import Op

__all__ = ["MEANINGS", "Meaning", "evaluates"]


F = TypeVar("F", bound=Callable[..., Any])


class Meaning(NamedTuple):
    """The function, and whether it is a generator of events."""

    fn: Callable[..., Any]
    steps: bool


MEANINGS: Final[dict[type[Op], Meaning]] = {}


def evaluates(*classes: type[Op], steps: bool = False) -> Callable[[F], F]:
    """Registers the decorated function as the meaning of `classes`."""

    def register(fn: F) -> F:
        for cls in classes:
            assert cls not in MEANINGS, f"two meanings of {cls.NAME}"
            MEANINGS[cls] = Meaning(fn, steps)
        return fn

    return register
