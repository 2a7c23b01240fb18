"""Every choice of a run goes through a chooser, and its answers are the replay.

A task is chosen as its distance from the one that ran last, so that 0 means "go on": a run of zeros is the one
with the fewest switches, which is what a shrunk schedule tends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from random import Random
from typing import Any, Protocol

__all__ = ["Chooser", "RandomChooser", "ReplayChooser", "Style"]


class Chooser(Protocol):
    """Answers the questions of one run. `taken` holds the answers so far."""

    taken: list[int]
    every: bool
    """Whether it wants to be asked even where only one task is ready."""

    def task(self, ready: Sequence[Any], current: int) -> int:
        """Index into `ready` (at least two) of who goes on; `current` is where the last one was."""
        ...

    def value(self, n: int) -> int:
        """A number below `n`, 0 being the usual one: the newest value, the first in line."""
        ...


class Style(Enum):
    """How a random schedule behaves as a whole: runs of one style each find what uniform choices rarely do."""

    UNIFORM = "uniform"
    PRIORITY = "priority"
    """Fixed random priorities with a few changes: some run far ahead."""
    STALL = "stall"
    """One agent hardly ever runs."""
    RUN = "run"
    """Long runs of one agent."""


class RandomChooser:
    """A schedule from a seed; the seed also draws its style."""

    every = False

    def __init__(self, seed: int | str) -> None:
        self.random = Random(seed)
        self.taken: list[int] = []
        self.style = self.random.choice(list(Style))
        self._priorities: dict[int, float] = {}
        self._stalled: int | None = None
        self._known = 0

    def task(self, ready: Sequence[Any], current: int) -> int:
        n = len(ready)
        draw = self.random.random
        style = self.style
        if style is Style.UNIFORM:
            picked = int(draw() * n)
        elif style is Style.RUN:
            picked = current % n if draw() < 0.85 else int(draw() * n)
        elif style is Style.STALL:
            picked = int(draw() * n)
            if self._stalled is None and draw() < 0.2:
                self._stalled = ready[picked].entry
            if ready[picked].entry == self._stalled and draw() < 0.97:
                picked = (picked + 1) % n
        else:
            priorities = self._priorities
            best, picked = -1.0, 0
            for k, task in enumerate(ready):
                priority = priorities.get(task.entry)
                if priority is None:
                    priority = priorities[task.entry] = draw()
                if priority > best:
                    best, picked = priority, k
            if draw() < 0.04:
                priorities[ready[picked].entry] = draw() * 0.01
        self.taken.append((picked - current) % n)
        return picked

    def value(self, n: int) -> int:
        k = 0 if self.random.random() < 0.6 else int(self.random.random() * n)
        self.taken.append(k)
        return k


class ReplayChooser:
    """Repeats answers; beyond their end, or where one does not fit, 0."""

    every = False

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices = choices
        self.taken: list[int] = []

    def _next(self, n: int) -> int:
        k = len(self.taken)
        choice = self.choices[k] if k < len(self.choices) else 0
        choice = choice if choice < n else 0
        self.taken.append(choice)
        return choice

    def task(self, ready: Sequence[Any], current: int) -> int:
        n = len(ready)
        return (current + self._next(n)) % n

    def value(self, n: int) -> int:
        return self._next(n)
