"""Timelines of the simulated machine: from what it wrote down of a run, all of which it knows. Its time is the number
of an event, of which each takes a microsecond.
"""

from __future__ import annotations

from typing import Any, Final

from peertile.sim.trace import Deed, Trace, Work
from peertile.sim.trace import Event as Step
from peertile.timelines.events import HOST, PROGRAMS, Event, Kind, Part

__all__ = ["CLOCK", "Simulated", "parts_of_run"]

CLOCK: Final = "the simulated machine's, of which an event takes 1 us"
_NS: Final = 1_000
_CALLS: Final = "calls "
_KINDS: Final = {
    Work.LAUNCH: Kind.LAUNCH, Work.GRAPH: Kind.GRAPH, Work.COPY: Kind.COPY, Work.FILL: Kind.FILL,
    Work.HOST: Kind.HOST, Work.WRITE: Kind.WRITE, Work.WAIT: Kind.WAIT, Work.EVENT: Kind.EVENT,
}  # fmt: skip


def parts_of_run(trace: Trace, ranks: int, first: int = 0) -> list[Part]:
    """The timeline of each rank, of the events of a run from number `first` on."""
    found = [Part(rank, ranks, "simulated", "sim", CLOCK) for rank in range(ranks)]
    reader = _Reader(trace, found)
    sources = {b: a for a, b in trace.edges}
    for number in range(first, len(trace.events)):
        reader.read(number, trace.events[number], sources.get(number, -1))
    reader.end(len(trace.events))
    for part in found:
        part.events.sort(key=lambda event: (event.begin_ns, -event.end_ns))
    return found


_Who = tuple[int, ...] | tuple[int, str, int]


class _Reader:
    """Steps to events."""

    def __init__(self, trace: Trace, parts: list[Part]) -> None:
        self.lanes = trace.lanes
        self.parts = parts
        self.open: dict[_Who, tuple[int, Step]] = {}
        """What each agent has begun: where."""
        self.waits: dict[_Who, tuple[int, Step]] = {}
        self.launches: dict[_Who, tuple[int, str]] = {}
        """Of programs: the number of their launch, and their stream."""
        self.count = 0

    def _who(self, step: Step) -> _Who:
        """The agent; a strand of a program counts as the program."""
        return (step.lane,) if step.program < 0 else (self.lanes[step.lane][0], step.label, step.program)

    def _put(self, kind: Kind, name: str, begin: int, end: int, step: Step, **info: Any) -> None:
        rank, where = self.lanes[step.lane]
        if step.program >= 0:
            launch, stream = self.launches.get(self._who(step), (0, step.label))
            track = stream + PROGRAMS
            info |= {"program": step.program, "launch": launch}
        else:
            track = f"{HOST}rank {rank}" if kind is Kind.SYNC else step.label or where
        if step.loc is not None:
            info["at"] = f"{step.loc.user.file}:{step.loc.user.line}"
        self.parts[rank].events.append(Event(kind, track, name, begin * _NS, end * _NS, info))

    def read(self, number: int, step: Step, source: int) -> None:
        who, deed = self._who(step), step.deed
        if deed is Deed.BEGIN:
            self.open[who] = number, step
            if step.program >= 0:
                self.count += step.program == 0 or not self.launches
                self.launches[who] = self.count, step.stream
            return
        if deed is Deed.WAIT:
            self.waits.setdefault(who, (number, step))
            return
        # Whoever polls has waited until it does something else.
        if deed is Deed.WAITED or (step.program >= 0 and who in self.waits):
            self._waited(who, number, step, source)
        if deed is Deed.END:
            self._ended(who, number)
        elif deed is Deed.RELEASE:
            self._put(Kind.NOTIFY, f"notify {step.what}", number, number, step, word=f"event {number}")

    def _waited(self, who: _Who, number: int, step: Step, source: int) -> None:
        begin, began = self.waits.pop(who, (number, step))
        word = {"word": f"event {source}"} if source >= 0 else {}
        if began.what.startswith(_CALLS):
            self._put(Kind.SYNC, began.what.removeprefix(_CALLS), begin, number, began)
        else:  # of a stream that waits, the operation is the wait; this is where it ends
            name = began.what.replace("waits", "wait", 1).replace("waited", "wait", 1)
            self._put(Kind.WAIT, name, begin, number, began, **word)

    def _ended(self, who: _Who, number: int, **info: Any) -> None:
        begin, step = self.open.pop(who, (-1, None))
        if step is None:
            return
        if step.program >= 0:
            self._put(Kind.PROGRAM, f"{step.label} {step.program}", begin, number, step, **info)
        elif step.work is not Work.OTHER:
            self._put(_KINDS[step.work], step.what.removeprefix("starts "), begin, number, step, **info)

    def end(self, number: int) -> None:
        """The run is over: what has not ended never did."""
        for begin, step in self.waits.values():
            kind = Kind.SYNC if step.what.startswith(_CALLS) else Kind.WAIT
            name = step.what.removeprefix(_CALLS).replace("waits", "wait", 1)
            self._put(kind, name, begin, number, step, unfinished=True)
        for who in list(self.open):
            self._ended(who, number, unfinished=True)


class Simulated:
    """What records a device of the simulated machine, in the place of a `Recorder`: the machine writes down all."""

    clock = CLOCK

    def __init__(self, device: Any) -> None:
        self.device = device
        self.machine = device.driver.machine
        if self.machine.trace is None:  # and to the end of the run: words remember by which event they were written
            self.machine.trace = Trace()
        self.first = len(self.machine.trace.events)

    def events(self) -> list[Event]:
        """What the device's rank did since, at the end."""
        trace: Trace = self.machine.trace
        found: list[Event] = parts_of_run(trace, self.machine.ranks, self.first)[self.device.driver.ordinal].events
        return found
