"""Vector clocks: what an agent knows of the others. A clock maps an entry to the epoch known of it.

An entry belongs to a (stream, program index) pair, to a stream's engine, to a host thread or to a strand of
tokens, and is never reused for another one within a run. An agent's own entry goes up at each of its
releases, so accesses between two releases share an epoch: x of entry e in epoch c happens before whoever
has `clock[e] >= c`. Sparse on purpose: most agents know few others, and joins touch what is known only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["Clock", "join", "necessary"]

Clock = dict[int, int]


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
