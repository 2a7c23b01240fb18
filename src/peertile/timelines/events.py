"""What a timeline is made of: events of ranks, and the files of a rank that is still running. No device, no drawing.

A *part* is what one rank recorded. While it runs, a part may lie in a file of its own, a line of JSON for each event:
whatever ends the process, the lines that are there stay. Times are ns of the host's CLOCK_MONOTONIC, which all ranks of
a host share; of the simulated machine they count its steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from peertile.errors import ArgumentError

__all__ = [
    "DEVICE_KINDS", "HOST", "PROGRAMS", "UNREADABLE", "Event", "Heap", "Kind", "Part", "in_order", "part_path",
    "parts_of", "read_part", "write_lines",
]  # fmt: skip

VERSION: Final = 1
UNREADABLE: Final = (
    OSError, KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
"""What reading a file may raise that is broken, or somebody else's."""


class Kind(Enum):
    """What an event is."""

    LAUNCH = "launch"
    GRAPH = "graph"
    COPY = "copy"
    FILL = "fill"
    HOST = "host function"
    WRITE = "write"
    """A stream stores a word."""
    EVENT = "event"
    """A stream waits for an event of another."""
    PROGRAM = "program"
    WAIT = "wait"
    """A program, or a stream, waits for a word."""
    NOTIFY = "notify"
    """A program, or a stream, releases a word."""
    TRANSFER = "transfer"
    """A program begins an asynchronous copy."""
    SUBMIT = "submit"
    """The host hands an operation over."""
    SYNC = "sync"
    """The host waits for one."""


DEVICE_KINDS: Final = frozenset({Kind.LAUNCH, Kind.GRAPH, Kind.COPY, Kind.FILL, Kind.HOST})
"""What keeps a stream busy."""


class Event(NamedTuple):
    """One event. `track` is where it happened: a host thread, a stream, or the programs of a stream. Something that
    takes no time has no `end_ns` after its begin; what never ended has `info["unfinished"]`.

    `info` has, as far as it is known: `at` (file:line), `program`, `launch` (its number), `bytes`, `where` (a processor
    or multiprocessor), and of a word `word` (its key, the same on all ranks), `value`.
    """

    kind: Kind
    track: str
    name: str
    begin_ns: int
    end_ns: int
    info: dict[str, Any]

    @property
    def ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.begin_ns

    def line(self) -> list[Any]:
        """As JSON."""
        return [self.kind.value, self.track, self.name, self.begin_ns, self.end_ns, self.info]


class Heap(NamedTuple):
    """Memory that ranks share: where each rank's part lies in the process that recorded. `key` is equal on all."""

    key: str
    bases: tuple[int, ...]
    nbytes: int

    def word(self, address: int) -> str | None:
        """The key of a word in it."""
        for rank, base in enumerate(self.bases):
            if base <= address < base + self.nbytes:
                return f"{self.key} rank {rank} +{address - base:#x}"
        return None


@dataclass
class Part:
    """What one rank recorded. `dropped` events did not fit; `clock` says how the device's times were found, which may
    be off by `error_ns`; they were moved by `moved_ns`, so that no rank sees what another one did before it did."""

    rank: int
    ranks: int = 1
    job: str = ""
    device: str = ""
    clock: str = ""
    error_ns: int = 0
    moved_ns: int = 0
    dropped: int = 0
    events: list[Event] = field(default_factory=list)

    def head(self) -> dict[str, Any]:
        """All but the events, as JSON."""
        return {
            "version": VERSION, "rank": self.rank, "ranks": self.ranks, "job": self.job, "device": self.device,
            "clock": self.clock, "error_ns": self.error_ns, "moved_ns": self.moved_ns, "dropped": self.dropped,
        }  # fmt: skip

    @staticmethod
    def of(head: dict[str, Any], events: Iterable[Event] = ()) -> Part:
        """The inverse."""
        return Part(
            int(head["rank"]), int(head["ranks"]), str(head["job"]), str(head["device"]), str(head["clock"]),
            int(head["error_ns"]), int(head["moved_ns"]), int(head["dropped"]), list(events),
        )  # fmt: skip


PROGRAMS: Final = ": programs"
"""At the end of the track of a stream's programs."""
HOST: Final = "host: "
"""At the beginning of the track of a thread of the host."""


def in_order(events: Iterable[Event]) -> list[Event]:
    """Events by their beginning. What is known of a stream's operation is mostly its end, and that it began behind the
    one in front of it: those of one stream come to lie behind each other."""
    streams: dict[str, list[Event]] = {}
    found = []
    for event in events:
        if event.track.startswith(HOST) or event.track.endswith(PROGRAMS) or event.kind is Kind.NOTIFY:
            found.append(event)
        else:
            streams.setdefault(event.track, []).append(event)
    for of_stream in streams.values():
        last = 0
        for event in sorted(of_stream, key=lambda event: event.end_ns):
            begin = min(max(event.begin_ns, last), event.end_ns)
            found.append(event._replace(begin_ns=begin))
            last = event.end_ns
    return sorted(found, key=lambda event: (event.begin_ns, -event.end_ns))


def part_path(path: str, rank: int | None) -> str:
    """Where a rank that is running keeps its part of a timeline that is to be at `path`; None: a process that is not
    of a group, as one that starts ranks."""
    return f"{path}.alone" if rank is None else f"{path}.rank{rank}"


def parts_of(path: str) -> list[str]:
    """The parts that ranks have left beside `path`, by rank."""
    folder, stem = os.path.dirname(path) or ".", f"{os.path.basename(path)}.rank"
    ranks = [name.removeprefix(stem) for name in os.listdir(folder) if name.startswith(stem)]
    return [part_path(path, rank) for rank in sorted(int(rank) for rank in ranks if rank.isdecimal())]


def write_lines(part: Part, events: Iterable[Event]) -> str:
    """Lines that go to the end of a part's file: the head anew, as what it counts may have changed."""
    import json  # takes 3 ms, which `import peertile` does not pay

    lines = [json.dumps(part.head()), *(json.dumps(event.line()) for event in events)]
    return "\n".join(lines) + "\n"


def read_part(path: str) -> Part:
    """A part's file. A last line that was cut off is left out. ArgumentError if it is none."""
    import json

    head: dict[str, Any] | None = None
    events: list[Event] = []
    try:
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                if not line.endswith("\n"):
                    break
                found = json.loads(line)
                if isinstance(found, dict):
                    head = found
                else:
                    kind, track, name, begin, end, info = found
                    events.append(Event(Kind(kind), str(track), str(name), int(begin), int(end), dict(info)))
        if head is not None and head["version"] == VERSION:
            return Part.of(head, in_order(events))
    except UNREADABLE:
        pass
    raise ArgumentError(f"timeline: expected a file that a timeline was written to, got {path!r}") from None
