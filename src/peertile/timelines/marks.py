"""Buffers of marks of a device, and what the marks of its programs say. Reads memory; launches nothing.

The buffer stays as long as the device: a graph that was captured with marks may be replayed long after the timeline,
and finds it closed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from peertile.backends.binary import Place
from peertile.backends.marks import HEAD_WORDS, PLACE_BIT, RECORD_WORDS, MarkHead, MarkRecord
from peertile.ir.ops import Moment
from peertile.runtime.driver import DriverDevice
from peertile.runtime.drivers.cpu_marks import mark_function
from peertile.runtime.ordering import in_order
from peertile.timelines.events import PROGRAMS, Event, Kind

__all__ = ["MARKS", "Launch", "MarkBuffer", "Programs"]

MARKS: Final = 1 << 18
"""Marks that a device holds until they are read: 16 MiB."""
_MOMENTS: Final = list(Moment)
_Row = Sequence[int]
Rows = np.ndarray[Any, np.dtype[np.int64]]
"""Marks, a row for each."""


class MarkBuffer:
    """The buffer of one device: in memory of the host where programs can store there, else in the device's."""

    def __init__(self, driver: DriverDevice, marks: int = MARKS) -> None:
        self._driver = driver
        self._read = 0
        self.marks = marks
        self._memory = np.zeros(HEAD_WORDS + RECORD_WORDS * marks, np.int64)
        self._memory[MarkHead.MASK] = marks - 1
        self._on_host = driver.capabilities.host_addressable
        if self._on_host:
            self._memory[MarkHead.FUNCTION] = mark_function()
            self.address = self._memory.ctypes.data
        else:
            self.address = driver.allocate(self._memory.nbytes)
            self._stream = driver.create_stream()
            self._copy(self.address, self._memory.ctypes.data, self._memory.nbytes)

    def tail(self, number: int) -> bytes:
        """What a launch passes behind its arguments."""
        return struct.pack("<2q", self.address, number)

    def open(self, *, is_open: bool) -> None:
        """Let programs write, or not."""
        self._memory[MarkHead.OPEN] = int(is_open)
        if not self._on_host:
            word = 8 * MarkHead.OPEN
            self._copy(self.address + word, self._memory.ctypes.data + word, 8)

    def _copy(self, dst: int, src: int, nbytes: int) -> None:
        self._driver.wait(self._driver.copy(self._stream, dst, src, nbytes, name="marks"))

    def _fetch(self, first: int, count: int) -> None:
        """Marks `first` to `count` from the device's memory."""
        size, low, high = 8 * RECORD_WORDS, first & (self.marks - 1), count & (self.marks - 1)
        pieces = [(low, high)] if low < high else [(low, self.marks), (0, high)]
        for start, end in pieces:
            at = 8 * HEAD_WORDS + start * size
            if start < end:
                self._copy(self._memory.ctypes.data + at, self.address + at, (end - start) * size)

    def take(self) -> tuple[Rows, int]:
        """The marks since the last time, and how many were overwritten before they were read."""
        memory = self._memory
        if not self._on_host:
            self._copy(memory.ctypes.data, self.address, 8 * HEAD_WORDS)
        count = int(memory[MarkHead.COUNT])
        first = max(self._read, count - self.marks)
        if count > first and not self._on_host:
            self._fetch(first, count)
            # Programs went on: whatever they had begun to overwrite may be half of each.
            self._copy(memory.ctypes.data, self.address, 8 * HEAD_WORDS)
            first = min(max(first, int(memory[MarkHead.COUNT]) - self.marks), count)
        lost = first - self._read
        rows = memory[HEAD_WORDS:].reshape(self.marks, RECORD_WORDS)
        numbers = np.arange(first, count)
        at = numbers & (self.marks - 1)
        # Before and after, as programs may go on writing: what changed under the copy has another number, or none.
        before = rows[at, MarkRecord.NUMBER]
        in_order()
        found = rows[at]
        in_order()
        now = rows[at, MarkRecord.NUMBER]
        unwritten = np.flatnonzero(now < numbers + 1)
        if len(unwritten):  # a program is at it: the next time
            count = first + int(unwritten[0])
            found, before, now, numbers = (part[: unwritten[0]] for part in (found, before, now, numbers))
        self._read = count
        whole = (before == numbers + 1) & (now == numbers + 1)
        kept = found[whole]
        return kept, lost + len(found) - len(kept)


class Launch(NamedTuple):
    """What a number stands for."""

    name: str
    track: str
    places: tuple[Place, ...]
    at: str


class _Open(NamedTuple):
    begin_ns: int
    where: int


class Programs:
    """Marks to events: programs, their waits and releases."""

    def __init__(self, launch_of: Callable[[int], Launch | None], word_of: Callable[[int], str]) -> None:
        self._launch_of = launch_of
        self._word_of = word_of
        self._open: dict[tuple[int, int], _Open] = {}
        self._waits: dict[tuple[int, int], tuple[int, dict[str, Any], str]] = {}

    def events(self, rows: Rows, to_host: Callable[[int], int]) -> Iterator[Event]:
        """The events that these marks end. Marks of one program are in order."""
        for row in rows.tolist():
            event = self._one(row, to_host(row[MarkRecord.TIME]))
            if event is not None:
                yield event

    def _one(self, row: _Row, ns: int) -> Event | None:
        number, program, tag = row[MarkRecord.LAUNCH], row[MarkRecord.PROGRAM], row[MarkRecord.TAG]
        launch = self._launch_of(number)
        if launch is None:
            return None
        key = number, program
        moment = _MOMENTS[tag & ((1 << PLACE_BIT) - 1)]
        if moment is Moment.BEGIN:
            self._open[key] = _Open(ns, row[MarkRecord.WHERE])
            return None
        info: dict[str, Any] = {"program": program, "launch": number}
        track = launch.track + PROGRAMS
        if moment is Moment.END:
            begun = self._open.pop(key, None)
            if begun is None:  # its beginning was overwritten
                return None
            info["where"] = begun.where
            return Event(Kind.PROGRAM, track, f"{launch.name} {program}", begun.begin_ns, ns, info)
        place = launch.places[tag >> PLACE_BIT]
        if place.loc is not None:
            info["at"] = f"{place.loc.user.file}:{place.loc.user.line}"
        if row[MarkRecord.ADDRESS]:
            info |= {"word": self._word_of(row[MarkRecord.ADDRESS]), "value": row[MarkRecord.VALUE]}
        if moment is Moment.WAIT:
            self._waits[key] = ns, info, place.what
            return None
        if moment is Moment.WAITED:
            began = self._waits.pop(key, None)
            return Event(Kind.WAIT, track, f"wait for {place.what}", began[0] if began else ns, ns, info)
        kind, name = (Kind.NOTIFY, "notify") if moment is Moment.NOTIFY else (Kind.TRANSFER, "transfer of")
        return Event(kind, track, f"{name} {place.what}", ns, ns, info)

    def unfinished(self, now_ns: int) -> Iterator[Event]:
        """What had not ended by the end of the timeline."""
        for (number, program), begun in self._open.items():
            launch = self._launch_of(number)
            if launch is not None:
                info = {"program": program, "launch": number, "where": begun.where, "unfinished": True}
                name = f"{launch.name} {program}"
                yield Event(Kind.PROGRAM, launch.track + PROGRAMS, name, begun.begin_ns, now_ns, info)
        for (number, _), (begin, info, what) in self._waits.items():
            launch = self._launch_of(number)
            if launch is not None:
                track = launch.track + PROGRAMS
                yield Event(Kind.WAIT, track, f"wait for {what}", begin, now_ns, {**info, "unfinished": True})
