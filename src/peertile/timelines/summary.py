"""What a timeline comes to: for each rank its time in kernels, waits and copies, and idle; and the longest waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from peertile.timelines.events import DEVICE_KINDS, Event, Kind, Part
from peertile.timelines.trace import arrows_of

__all__ = ["LongWait", "RankTimes", "Summary", "covered", "joined", "spelled_ns", "summary_of"]


class RankTimes(NamedTuple):
    """Of one rank, in ns. Kernels, copies (and fills) and host functions are times in which at least one stream was at
    such a thing, idle those in which none was at anything. `program_ns` is the sum over all programs, and
    `wait_ns` what they waited of it."""

    rank: int
    device: str
    kernel_ns: int
    copy_ns: int
    host_ns: int
    idle_ns: int
    program_ns: int
    wait_ns: int
    launches: int
    programs: int
    dropped: int
    clock: str

    @property
    def waiting(self) -> float:
        """The part of the programs' time that they waited."""
        return self.wait_ns / self.program_ns if self.program_ns else 0.0


class LongWait(NamedTuple):
    """One wait: of a program, or of a stream. `by` is the rank that ended it, where that was recorded."""

    rank: int
    event: Event
    by: int | None


class Summary(NamedTuple):
    """Of a whole timeline: `ns` from the first beginning to the last end on any rank."""

    ns: int
    ranks: tuple[RankTimes, ...]
    waits: tuple[LongWait, ...]

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "ns": self.ns,
            "ranks": [{**times._asdict(), "waiting": times.waiting} for times in self.ranks],
            "waits": [
                {
                    "rank": wait.rank, "name": wait.event.name, "ns": wait.event.ns, "by": wait.by,
                    "track": wait.event.track, **wait.event.info,
                }
                for wait in self.waits
            ],
        }  # fmt: skip


def summary_of(parts: Sequence[Part], longest: int = 10) -> Summary:
    """The summary, with as many of the longest waits."""
    events = [event for part in parts for event in part.events]
    if not events:
        return Summary(0, (), ())
    first, last = min(event.begin_ns for event in events), max(event.end_ns for event in events)
    ranks = tuple(_times(part, last - first) for part in sorted(parts, key=lambda part: part.rank))
    by = {id(arrow.wait): arrow.source for arrow in arrows_of(parts)}
    waits = [LongWait(p.rank, e, by.get(id(e))) for p in parts for e in p.events if e.kind is Kind.WAIT]
    waits.sort(key=lambda wait: -wait.event.ns)
    return Summary(last - first, ranks, tuple(waits[:longest]))


def _times(part: Part, ns: int) -> RankTimes:
    def busy(*kinds: Kind) -> int:
        return covered((e.begin_ns, e.end_ns) for e in part.events if e.kind in kinds)

    def of_programs(kind: Kind) -> int:
        return sum(e.ns for e in part.events if e.kind is kind and "program" in e.info)

    return RankTimes(
        part.rank,
        part.device,
        busy(Kind.LAUNCH, Kind.GRAPH),
        busy(Kind.COPY, Kind.FILL),
        busy(Kind.HOST),
        ns - busy(*DEVICE_KINDS),
        of_programs(Kind.PROGRAM),
        of_programs(Kind.WAIT),
        sum(e.kind in (Kind.LAUNCH, Kind.GRAPH) for e in part.events),
        sum(e.kind is Kind.PROGRAM for e in part.events),
        part.dropped,
        part.clock,
    )


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """The time that lies in at least one of the spans."""
    return sum(high - low for low, high in joined(spans))


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same times, as spans that are apart from each other, in order."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def spelled_ns(ns: int) -> str:
    """A time for people: 1.23 ms."""
    for unit, size in (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)):
        if abs(ns) >= size:
            return f"{ns / size:.{2 if abs(ns) < 10 * size else 1}f} {unit}"
    return f"{ns} ns"
