"""Who wins, from figures alone: numbers in, indices out. Measures nothing and talks to nobody.

Every function gives the same answer on every rank, as each rank calls it with the same figures: those of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from peertile.errors import ArgumentError

__all__ = ["Figures", "Rules", "batch_calls", "finalists", "group_bests", "group_medians", "order", "winner"]

Figures = Mapping[int, Sequence[Sequence[float]]]
"""Candidate -> for each round, the seconds of a call on each rank."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How candidates are measured and compared. The same on every rank.

    `screen` rounds over all candidates, then `rounds` over those whose best round was within `close` times the best of
    all: in each round every candidate runs one batch of calls, about `batch_s` seconds, and every other round goes
    backwards. By their medians, a candidate within `tie` of the best counts as equal to it, and the first listed of the
    equal ones wins. After `budget_s` seconds the decision is made with what has been measured. `tolerance`: how far a
    float may be from the reference, relative to its own size and to that of a typical element; None for what suits the
    element type.
    """

    screen: int = 2
    rounds: int = 7
    close: float = 1.3
    tie: float = 0.05
    batch_s: float = 0.003
    budget_s: float = 60.0
    tolerance: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "tolerance" and value is None:
                continue
            whole = field.name in ("screen", "rounds")
            least = {"screen": 1, "rounds": 1, "close": 1.0, "tie": 0.0, "tolerance": 0.0}.get(field.name)
            right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not right or not (value > 0 if least is None else value >= least) or value > 1e9:
                kind = "an integer" if whole else "a number"
                bound = "> 0" if least is None else f">= {least:g}"
                raise ArgumentError(f"Rules({field.name}): expected {kind} {bound}, got {value!r}")


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])


def group_medians(figures: Figures) -> dict[int, float]:
    """Seconds of each candidate that has figures: the median over rounds on each rank, of the slowest rank."""
    return {
        candidate: max(_median(rank) for rank in zip(*rounds, strict=True))
        for candidate, rounds in figures.items()
        if rounds
    }


def group_bests(figures: Figures) -> dict[int, float]:
    """Seconds of each candidate that has figures: the least over rounds on each rank, of the slowest rank. With few
    rounds this is what tells candidates apart: whatever disturbs a round only makes it longer."""
    return {
        candidate: max(min(rank) for rank in zip(*rounds, strict=True))
        for candidate, rounds in figures.items()
        if rounds
    }


def finalists(seconds: Mapping[int, float], close: float) -> list[int]:
    """The candidates within `close` times the best, as listed."""
    best = min(seconds.values())
    return sorted(candidate for candidate, value in seconds.items() if value <= best * close)


def winner(medians: Mapping[int, float], tie: float) -> int:
    """The first listed of those within the tie band of the best.

    >>> winner({0: 1.04, 1: 1.0, 2: 1.2}, tie=0.05)
    0
    """
    return finalists(medians, 1.0 + tie)[0]


def order(candidates: Sequence[int], turn: int) -> list[int]:
    """The candidates of a round: forwards, backwards, forwards, … so that a drift meets all alike."""
    return list(candidates) if turn % 2 == 0 else list(reversed(candidates))


def batch_calls(call_s: float, batch_s: float) -> int:
    """Calls of a batch, for the seconds of one call on the slowest rank: 1 to 1000."""
    return max(1, min(1000, int(batch_s / max(call_s, 1e-9))))
