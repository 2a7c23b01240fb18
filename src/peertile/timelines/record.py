"""Records what one device is asked to do and what its programs do, for any number of timelines at once.

Adds no wait to a stream and none to the host. When an operation began and ended is told by events of the driver behind
it (on cpu also in front of it), which are read later; programs write marks. Clocks of other devices are compared with
the host's at the beginning and at the end.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from peertile.backends.marks import MARK
from peertile.errors import PeertileError
from peertile.runtime.driver import DriverDevice, DriverKind, Grid, Status, StreamHandle, Ticket
from peertile.runtime.site import Site, call_site, describe
from peertile.timelines.clocks import Clock
from peertile.timelines.events import HOST, Event, Heap, Kind
from peertile.timelines.marks import Launch, MarkBuffer, Programs, Rows
from peertile.timelines.upper import heaps

if TYPE_CHECKING:
    from peertile.runtime.device import Device

__all__ = ["Recorder", "Sink"]

T = TypeVar("T")

_MOST_LAUNCHES: Final = 1 << 16
"""Launches whose numbers are known: marks of older ones are told of as lost."""
_MOST_ROWS: Final = 1 << 20
"""Marks that are held until somebody asks what they say: 64 MiB."""
_AHEAD: Final = 4096
"""Operations that nobody has looked at again, at most."""
_SHORT_NS: Final = 1_000
"""A host that waited for less has found what it waited for."""
_STATE: Final = "timeline_state"


class Sink(Protocol):
    """Who gets events."""

    def take(self, event: Event) -> None: ...
    def lose(self, count: int) -> None:
        """So many were recorded and did not fit."""


class _State:
    """What stays with a device between its timelines: graphs and kept launches name it."""

    def __init__(self, driver: DriverDevice) -> None:
        self.buffer = MarkBuffer(driver)
        self.modules: dict[int, tuple[Any, Any]] = {}
        """Marked ones by their id, kept so that it names no other: (module, binary)."""
        self.numbers = itertools.count(1)
        self.launches: OrderedDict[int, Launch] = OrderedDict()


class _Pending(NamedTuple):
    """An operation that was enqueued. `begin` and `end` are events of the driver."""

    kind: Kind
    track: str
    name: str
    since_ns: int
    begin: Any
    end: Any
    key: tuple[int, Any]
    """Its stream and its number there."""
    info: dict[str, Any]


class _Inside(threading.local):
    """Whether the calling thread is in a call that is noted."""

    on = False


class Recorder:
    """See the module docstring. `drain` may be called from any thread."""

    def __init__(self, device: Device, prefix: str = "") -> None:
        """`prefix` begins the names of its streams, where there are several devices."""
        self.device = device
        self.prefix = prefix
        self.driver = driver = device.driver
        state: _State | None = driver.__dict__.get(_STATE)
        if state is None:
            state = driver.__dict__[_STATE] = _State(driver)
        self.state = state
        self.sinks: list[Sink] = []
        self.is_over = False
        """Nothing is noted any more: the last timeline has ended, or the device was closed."""
        self._over_ns = 0
        """All that was enqueued before then has ended."""
        self._has_lost = False
        """Whether marks gave way to newer ones: programs may have ended without telling."""
        self._inside = _Inside()
        self._lock = threading.RLock()  # held by who drains
        self._pending: deque[_Pending] = deque()
        self._streams = 0
        self._tracks: dict[int, str] = {}
        self._handles: dict[int, StreamHandle] = {}  # so that an id names no other
        self._behind: dict[int, tuple[int, str]] = {}
        """The event behind the last operation of a stream: its number, and the operation's name."""
        self._seen: dict[tuple[int, Any], int] = {}
        """When the host saw that an operation was over."""
        self._spans: dict[int, tuple[str, str, int, dict[str, Any]]] = {}
        """Launches that only their marks tell of: (track, name, since, info) by number."""
        self._extents: dict[int, tuple[int, int, int]] = {}
        """(first begin, last end, programs that have ended) of those."""
        self._rows: deque[Rows] = deque()
        self._held = 0
        self.programs = Programs(state.launches.get, self._word)
        self.exact = driver.kind is DriverKind.CPU or driver.capabilities.host_addressable
        """Events in front of operations cost next to nothing, and their times are the host's."""
        self.clock = Clock(driver)
        with self._unnoted():
            state.buffer.open(is_open=True)
            self.clock.compare()

    # ---------------------------------------------------------------- what the driver is asked

    @contextmanager
    def _unnoted(self) -> Iterator[None]:
        """What is done for the timeline itself is not on it."""
        before, self._inside.on = self._inside.on, True
        try:
            yield
        finally:
            self._inside.on = before

    def operation(
        self, kind: Kind, stream: StreamHandle, name: str, call: Callable[[], T], info: dict[str, Any], *,
        on_caller: bool = False, runs: bool = False, marked: int = 0,
    ) -> T:  # fmt: skip
        """Do what `call` does. `on_caller`: it may be over when it returns; `runs`: it is. `marked`: the number of a
        launch whose programs tell when it began and ended."""
        if self._inside.on or self.is_over:
            return call()
        with self._unnoted():
            if getattr(stream, "capture", None) is not None:
                return call()
            driver, here = self.driver, _here()
            if here:
                info["at"] = here
            begin = end = None
            if self.exact and not (on_caller or runs or marked):
                begin = self._event(stream)
            track = self.track(stream)
            since = time.monotonic_ns()
            if marked:  # before its programs run: another thread may take their marks at once
                self._spans[marked] = track, name, since, info
            try:
                result = call()
            except BaseException:
                self._spans.pop(marked, None)
                raise
            now = time.monotonic_ns()
            over = runs or (on_caller and isinstance(result, Ticket) and driver.query(result) is not Status.PENDING)
            self._emit(Event(Kind.SYNC if over else Kind.SUBMIT, _thread(), name, since, now, info))
            if over and not marked:
                self._span(kind, track, name, since, now, info)
            elif not marked:
                end = self._event(stream, name)
                sequence = result.sequence if isinstance(result, Ticket) else result
                self._pending.append(_Pending(kind, track, name, since, begin, end, (id(stream), sequence), info))
                if self.exact or len(self._pending) > _AHEAD:
                    self._settle(2)
            return result

    def _event(self, stream: StreamHandle, name: str = "") -> Any:
        """An event in front of an operation of the stream, or behind the one of that name."""
        event = self.driver.create_event()
        sequence = self.driver.record_event(stream, event).sequence
        if name:
            self._behind[id(stream)] = sequence, name
        return event

    def last(self, ticket: Ticket) -> Ticket:
        """The last operation of a stream, as its user knows it."""
        sequence, name = self._behind.get(id(ticket.stream), (0, ""))
        return ticket._replace(name=name) if sequence == ticket.sequence else ticket

    def launch(
        self, stream: StreamHandle, module: Any, grid: Grid, args: bytes, name: str, call: Callable[[bytes], T], *,
        on_caller: bool = False, runs: bool = False,
    ) -> T:  # fmt: skip
        """As `operation`, of a launch: one with marks gets its number."""
        if self._inside.on or self.is_over:
            return call(args)
        state = self.state
        number = next(state.numbers)
        found = state.modules.get(id(module))
        info: dict[str, Any] = {"launch": number, "programs": math.prod(grid)}
        if found is None:
            return self.operation(Kind.LAUNCH, stream, name, lambda: call(args), info, on_caller=on_caller, runs=runs)
        state.launches[number] = Launch(name, self.track(stream), found[1].places, "")
        while len(state.launches) > _MOST_LAUNCHES:
            state.launches.popitem(last=False)
        tail = state.buffer.tail(number)
        filled = args[: -len(tail)] + tail
        return self.operation(
            Kind.LAUNCH, stream, name, lambda: call(filled), info, on_caller=on_caller, runs=runs, marked=number
        )

    def host_function(
        self, stream: StreamHandle, name: str, function: Callable[[], None], call: Callable[[Callable[[], None]], T]
    ) -> T:
        """A function that the driver calls: it takes its own times."""
        if self._inside.on or self.is_over:
            return call(function)
        track, at = self.track(stream), _here()

        def timed() -> None:
            begin = time.monotonic_ns()
            try:
                function()
            finally:
                self._span(Kind.HOST, track, name, begin, time.monotonic_ns(), {"at": at} if at else {})

        begin = time.monotonic_ns()
        with self._unnoted():
            result = call(timed)
        self._emit(Event(Kind.SUBMIT, _thread(), name, begin, time.monotonic_ns(), {"at": at} if at else {}))
        return result

    def waited(self, ticket: Ticket, call: Callable[[], T]) -> T:
        """The host waits for an operation."""
        if self._inside.on or self.is_over:
            return call()
        with self._unnoted():
            begin = time.monotonic_ns()
            result = call()
            now = time.monotonic_ns()
        if self._pending:  # the event behind an operation may run when its host is long gone
            self._seen[id(ticket.stream), ticket.sequence] = now
        if now - begin > _SHORT_NS:
            at = _here()
            self._emit(Event(Kind.SYNC, _thread(), f"wait for {ticket.name}", begin, now, {"at": at} if at else {}))
        return result

    def loaded(self, module: Any, binary: Any) -> None:
        """A module was loaded."""
        if any(place.kind == MARK for place in getattr(binary, "places", ())):
            self.state.modules[id(module)] = module, binary

    def word_info(self, address: int, value: int) -> dict[str, Any]:
        """What an event says of a word."""
        return {"word": self._word(address), "value": value}

    def _word(self, address: int) -> str:
        for heap in list(heaps):
            key = Heap(*heap).word(address)
            if key is not None:
                return key
        return f"process {os.getpid()} {address:#x}"

    def track(self, stream: StreamHandle) -> str:
        """What the stream is called."""
        found = self._tracks.get(id(stream))
        if found is None:
            self._streams += 1
            found = self.prefix + (self._named(stream) or f"stream {self._streams}")
            self._tracks[id(stream)] = found
            self._handles[id(stream)] = stream
        return found

    def forget(self, stream: StreamHandle) -> None:
        """It is about to be destroyed; what was enqueued on it still runs."""
        if self._handles.pop(id(stream), None) is not None:
            del self._tracks[id(stream)]
            self._behind.pop(id(stream), None)

    def _named(self, handle: StreamHandle) -> str | None:
        streams = [stream() for stream in self.device.streams.valuerefs()]
        name = next((s.name for s in streams if s is not None and s.handle is handle), None)
        if name is None:
            return None
        is_taken = self.prefix + name in self._tracks.values()
        return f"{name} {self._streams}" if is_taken else name

    # ---------------------------------------------------------------- what has come of it

    def _emit(self, event: Event) -> None:
        for sink in list(self.sinks):
            sink.take(event)

    def _span(self, kind: Kind, track: str, name: str, begin: int, end: int, info: dict[str, Any]) -> None:
        self._emit(Event(kind, track, name, begin, end, info))
        if kind is Kind.WRITE:
            self._emit(Event(Kind.NOTIFY, track, f"notify by {name}", begin, begin, info))

    def _settle(self, most: int | None = None) -> None:
        """Take note of operations that are over, at most so many: the oldest first."""
        with self._lock, self._unnoted():
            while self._pending and (most is None or most > 0):
                pending = self._pending[0]
                end = self.clock.event_ns(pending.end)
                if end is None:
                    return
                self._pending.popleft()
                end = min(end, self._seen.pop(pending.key, end))
                begin = pending.since_ns if pending.begin is None else self.clock.event_ns(pending.begin)
                self._span(pending.kind, pending.track, pending.name, begin or pending.since_ns, end, pending.info)
                for event in (pending.begin, pending.end):
                    if event is not None:
                        self.driver.destroy_event(event)
                if most is not None:
                    most -= 1

    def collect(self) -> None:
        """Take marks out of the device's buffer, before they give way to newer ones. What they say comes later: it
        takes as long as the programs that made them."""
        with self._lock, self._unnoted():
            if self.is_over:
                return
            rows, lost = self.state.buffer.take()
            if len(rows):
                self._rows.append(rows)
                self._held += len(rows)
            while self._held > _MOST_ROWS:
                given_up = len(self._rows.popleft())
                self._held -= given_up
                lost += given_up
            if lost:
                self._has_lost = True
                for sink in list(self.sinks):
                    sink.lose(lost)

    def drain(self) -> None:
        """Hand over what is known by now."""
        with self._lock, self._unnoted():
            if self.is_over:
                return
            self.clock.renew()
            self._settle()
            if not self._pending:
                self._seen.clear()
            self.collect()
            while self._rows:
                for event in self.programs.events(self._rows.popleft(), self.clock.to_host):
                    self._emit(event)
                    if event.kind is Kind.PROGRAM and event.info["launch"] in self._spans:
                        self._extend(event)
            self._held = 0

    def _extend(self, event: Event) -> None:
        """A program of a launch that only its marks tell of has ended."""
        number = event.info["launch"]
        track, name, _, info = self._spans[number]
        begin, end, programs = self._extents.get(number, (event.begin_ns, event.end_ns, 0))
        begin, end, programs = min(begin, event.begin_ns), max(end, event.end_ns), programs + 1
        self._extents[number] = begin, end, programs
        if programs == info["programs"]:
            del self._extents[number], self._spans[number]
            self._span(Kind.LAUNCH, track, name, begin, end, info)

    def settle(self, timeout_s: float) -> None:
        """Wait for what is on its way, so long at most, and hand over what has ended."""
        end, begun = time.monotonic() + timeout_s, time.monotonic_ns()
        with self._unnoted():
            tickets = [self.driver.last_ticket(handle) for handle in list(self._handles.values())]
            with self._lock:  # another thread may take note of them, and destroy their events
                pending = list(self._pending)  # of streams that were destroyed, too
                tickets += [self.driver.event_ticket(one.end) for one in pending]
            ends = [self.driver.wait(ticket, max(end - time.monotonic(), 0.0)) for ticket in tickets]
            if Status.PENDING not in ends:
                self._over_ns = begun
            self.clock.compare()
        self.drain()

    def unfinished(self) -> list[Event]:
        """What has not ended, as far as it is known."""
        with self._lock:
            now = time.monotonic_ns()
            found = [
                Event(one.kind, one.track, one.name, one.since_ns, now, {**one.info, "unfinished": True})
                for one in list(self._pending)
            ]
            found += self.programs.unfinished(now)
            for number, (track, name, since, info) in list(self._spans.items()):
                begin, last, _ = self._extents.get(number, (since, since, 0))
                more = {} if self._has_lost and since < self._over_ns else {"unfinished": True}
                found.append(Event(Kind.LAUNCH, track, name, begin, last, {**info, **more}))
            return found

    def finish(self) -> None:
        """Hand over what has not ended, too, and note no more."""
        with self._lock, self._unnoted():
            if self.is_over:
                return
            self.is_over = True
            for event in self.unfinished():
                self._emit(event)
            with suppress(PeertileError):  # the device is lost
                for pending in list(self._pending):
                    for event in (pending.begin, pending.end):
                        if event is not None:
                            self.driver.destroy_event(event)
                self.state.buffer.open(is_open=False)
                self.clock.close()
            # Calls that are under way keep this object.
            for kept in (self._pending, self._spans, self._extents, self._tracks, self._handles, self._behind):
                kept.clear()

    def closing(self) -> None:
        """The device is about to be closed."""
        if not self.is_over:
            with suppress(PeertileError):
                self.settle(0.0)
            self.finish()


def _thread() -> str:
    return f"{HOST}{threading.current_thread().name}"


_lines: dict[Site, str] = {}
_MOST_LINES: Final = 4096


def _here() -> str:
    """file:line of the user's code that asks."""
    site = call_site(3)
    if site is None:
        return ""
    found = _lines.get(site)
    if found is None:
        if len(_lines) >= _MOST_LINES:
            _lines.clear()
        found = _lines[site] = describe(site)
    return found
