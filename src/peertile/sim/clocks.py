"""Vector clocks: what an agent knows of the others. A clock maps an entry to the epoch known of it.

An entry belongs to a (stream, program index) pair, to a stream's engine, to a host thread or to a strand of
tokens, and is never reused for another one within a run. An agent's own entry goes up at each of its
releases, so accesses between two releases share an epoch: x of entry e in epoch c happens before whoever
has `clock[e] >= c`. Sparse on purpose: most agents know few others, and joins touch what is known only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

__all__ = ["Adds", "Clock", "join", "necessary", "seen", "seen_too"]

Clock = dict[int, int]


def seen(entry: int) -> int:
    """The entry that says what of `entry` has happened before in this run, where a wait was ordered after less: what
    it could have passed without is no order to judge races by, but replaced values are gone all the same."""
    return -(4 * entry + 4)


def seen_too(known: Mapping[int, int], released: Mapping[int, int]) -> Clock:
    """`known`, and all else of `released` as seen."""
    found = dict(known)
    for entry, epoch in released.items():
        if entry >= 0:
            if found.get(entry, 0) >= epoch:
                continue
            entry = seen(entry)
        elif entry & 3:  # of a proxy
            continue
        if found.get(entry, 0) < epoch:
            found[entry] = epoch
    return found


def join(clock: Clock, other: Mapping[int, int]) -> None:
    """Everything that `other` knows is known to `clock` too."""
    get = clock.get
    for entry, epoch in other.items():
        if get(entry, 0) < epoch:
            clock[entry] = epoch


def necessary(adds: Sequence[tuple[int, Mapping[int, int]]], need: int) -> Clock:
    """What must have happened before a wait for `need` out of `adds`, pairs of (weight, clock released with it).

    An event is necessary iff the adds that are not ordered after it sum to less than `need`. Per entry this is
    an order statistic: sort the adds by what they know of the entry; the event at the epoch where the running
    sum first reaches `need` is the last necessary one. If all adds are needed this is their join, if any one is
    enough their pointwise minimum.
    """
    total = sum(weight for weight, _ in adds)
    if need <= 0:
        return {}
    if total - min(weight for weight, _ in adds) < need:  # none can be missing
        known: Clock = {}
        for _, clock in adds:
            join(known, clock)
        return known
    found: Clock = {}
    for entry in {e for _, clock in adds for e in clock}:
        running = 0
        for epoch, weight in sorted((clock.get(entry, 0), weight) for weight, clock in adds):
            running += weight
            if running >= need:
                if epoch:
                    found[entry] = epoch
                break
    return found


class Adds:
    """The adds to one word, in order: weights and released clocks, cut where every later add is ordered after all
    earlier ones.

    A wait for a number that is reached within a segment needs everything before the segment, and nothing after it
    counts: so the cost of a wait is that of its segment, not of the history. An add that is not after an earlier
    segment joins the two again.
    """

    __slots__ = ("_ends", "_joins", "_open", "clocks", "sums", "weights")

    def __init__(self) -> None:
        self.weights: list[int] = []
        self.clocks: list[Clock] = []
        self.sums: list[int] = []
        self._ends: list[int] = []
        self._joins: list[Clock] = []
        self._open: Clock = {}

    def append(self, weight: int, clock: Clock) -> None:
        joins, ends = self._joins, self._ends
        while joins and not _includes(clock, joins[-1]):
            ends.pop()
            join(self._open, joins.pop())
        if self.weights and _includes(clock, self._open) and (not ends or ends[-1] < len(self.weights)):
            ends.append(len(self.weights))
            joins.append(self._open)
            self._open = dict(clock)
        else:
            join(self._open, clock)
        self.weights.append(weight)
        self.clocks.append(clock)
        self.sums.append((self.sums[-1] if self.sums else 0) + weight)

    def _segment(self, index: int) -> tuple[int, int]:
        k = bisect_left(self._ends, index + 1)
        return self._ends[k - 1] if k else 0, self._ends[k] if k < len(self._ends) else len(self.weights)

    def needed(self, need: int) -> Clock:
        """What must have happened before a wait for `need`, of all adds so far."""
        index = bisect_left(self.sums, need)
        if need <= 0 or index == len(self.sums):
            return {}
        low, high = self._segment(index)
        before = self.sums[low - 1] if low else 0
        part = list(zip(self.weights[low:high], self.clocks[low:high], strict=True))
        return necessary(part, need - before)

    def rivals(self, index: int) -> Sequence[Clock]:
        """Clocks of the adds from `index` on that are not ordered after all adds before it."""
        if index == 0 or index >= len(self.clocks):
            return self.clocks[index:]
        _, high = self._segment(index - 1)
        return self.clocks[index:high]


def _includes(clock: Mapping[int, int], other: Mapping[int, int]) -> bool:
    get = clock.get
    for entry, epoch in other.items():  # noqa: SIM110 (a generator costs more than the comparisons)
        if get(entry, 0) < epoch:
            return False
    return True
