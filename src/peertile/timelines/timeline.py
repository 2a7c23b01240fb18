"""Who gets what is recorded: a `with pt.timeline()`, which holds the newest events, or a file that a whole program
writes while it runs, so that what a rank did is there however it ends. Loaded when the first timeline begins.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import threading
import time
from collections import deque
from typing import Any, Final

from peertile.config import config
from peertile.errors import ArgumentError, PeertileError, UsageError
from peertile.runtime.device import Device
from peertile.runtime.driver import DriverKind
from peertile.timelines.compiled import compile_with_marks, compile_without_marks
from peertile.timelines.driver import unwatch, watch
from peertile.timelines.events import Event, Part, in_order, part_path, read_part, write_lines
from peertile.timelines.record import Recorder
from peertile.timelines.start import GRACE_S, checked_path
from peertile.timelines.trace import add_to, warn
from peertile.timelines.upper import ranks

__all__ = ["Recording", "record_process"]

LIFELINE: Final = "PEERTILE_LIFELINE"
"""In the environment of ranks that a launcher of ours has started, which puts their parts together."""
_FILE_EVENTS: Final = 1 << 21
"""Events that go to a file, some 300 MiB."""
_PERIOD_S: Final = 0.5
_COLLECT_S: Final = 0.02

_lock: Final = threading.RLock()  # devices begin and end to be recorded one at a time


class _Collector:
    """A thread that takes marks out of the devices' buffers, as long as anything is recorded."""

    def __init__(self) -> None:
        self._recorders: list[Recorder] = []
        self._thread: threading.Thread | None = None

    def begin(self, recorder: Recorder) -> None:
        self._recorders.append(recorder)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="peertile-timeline-marks", daemon=True)
            self._thread.start()

    def end(self, recorder: Recorder) -> None:
        self._recorders.remove(recorder)

    def _serve(self) -> None:
        while True:
            time.sleep(_COLLECT_S)
            with _lock:
                if not self._recorders:
                    self._thread = None
                    return
                recorders = list(self._recorders)
            for recorder in recorders:
                with contextlib.suppress(PeertileError):  # it is closed meanwhile, or lost
                    recorder.collect()


_collector: Final = _Collector()


def _attach(device: Device, sink: _Sink, prefix: str = "") -> Recorder:
    """Record `device` for one more sink; `prefix` as of `Recorder`."""
    with _lock:
        recorder: Recorder | None = device.driver.__dict__.get("recorder")
        if recorder is None or recorder.is_over:
            recorder = Recorder(device, prefix)
            _collector.begin(recorder)
            watch(device.driver, recorder)
            device.marks = recorder.state.buffer.tail(0)
            compile_with_marks(device)
        else:
            recorder.drain()
        recorder.sinks.append(sink)
        return recorder


def _detach(recorder: Recorder, sink: _Sink, timeout_s: float) -> None:
    try:
        # Without the lock: what is on its way may wait for a rank of this process that begins its own timeline.
        with contextlib.suppress(PeertileError):  # of a device that is closed or lost, what is known is all there is
            recorder.settle(timeout_s)
    finally:
        with _lock:
            if recorder.sinks == [sink]:
                _collector.end(recorder)
                recorder.finish()
                unwatch(recorder.driver)
                compile_without_marks(recorder.device)
            elif not recorder.is_over:
                for event in recorder.unfinished():
                    sink.take(event)
            recorder.sinks.remove(sink)


class _Sink:
    """Events since `begin_ns`, of one device or several."""

    def __init__(self) -> None:
        self.begin_ns = time.monotonic_ns()
        self.dropped = 0
        self.recorders: list[Recorder] = []
        self.place: tuple[int, int, bool] | None = None
        """Of a rank that is a thread, which others ask for, too."""

    def take(self, event: Event) -> None:
        raise NotImplementedError

    def lose(self, count: int) -> None:
        self.dropped += count

    def head(self) -> Part:
        """All that is known but the events."""
        place = self.place or ranks.place()
        rank, size = (_rank_of_environment(), 1) if place is None else place[:2]
        devices = [recorder.device.name for recorder in self.recorders]
        clocks = dict.fromkeys(recorder.clock.describe() for recorder in self.recorders)
        error = max((recorder.clock.error_ns for recorder in self.recorders), default=0)
        return Part(rank, size, _job(), ", ".join(devices), "; ".join(clocks), error, dropped=self.dropped)


def _rank_of_environment() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def _job() -> str:
    """What is equal for all ranks of a job and for no other: who adds to a file of another job begins it anew."""
    found = os.environ.get("PEERTILE_JOB") or os.environ.get("TORCHELASTIC_RUN_ID")
    return found or f"process {os.getpid()}"


class _Newest(_Sink):
    """The newest events."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self.events: deque[Event] = deque()

    def take(self, event: Event) -> None:
        if len(self.events) >= self._most:
            self.events.popleft()
            self.dropped += 1
        self.events.append(event)


class Recording:
    """Of the devices of one `with`: begins when it is made."""

    def __init__(self, devices: tuple[Device, ...], events: int) -> None:
        self._sink = sink = _Newest(events)
        self._simulated: list[Any] = []
        for device in devices:
            if device.is_closed:
                raise UsageError(f"timeline: expected an open device, got {device.name}, which is closed")
        try:
            for device in devices:
                if device.driver.kind is DriverKind.SIM:
                    simulated: Any = importlib.import_module("peertile.timelines.simulated")
                    self._simulated.append(simulated.Simulated(device))
                else:
                    sink.recorders.append(_attach(device, sink, f"{device.name} " if len(devices) > 1 else ""))
        except BaseException:
            self.end(0.0)
            raise

    def end(self, timeout_s: float) -> Part:
        """What was recorded, once what is on its way has ended, or for `timeout_s`."""
        sink = self._sink
        for recorder in sink.recorders:
            _detach(recorder, sink, timeout_s)
        part = sink.head()
        # What came before is another timeline's of the same device, unless the device's clock only seems to say so.
        since = sink.begin_ns - part.error_ns
        part.events = in_order([event for event in sink.events if event.end_ns >= since])
        for simulated in self._simulated:
            part.events += simulated.events()
            part.device, part.clock = simulated.device.name, simulated.clock
        return part


# -------------------------------------------------------------------- of a whole program


class _FileSink(_Sink):
    """Events to a rank's file as they come."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self._fresh: list[Event] = []
        self._written = 0
        self._file: Any = None
        self._lock = threading.Lock()
        self._is_over = False

    def take(self, event: Event) -> None:
        if self._written + len(self._fresh) >= _FILE_EVENTS:
            self.dropped += 1
        else:
            self._fresh.append(event)

    def flush(self) -> None:
        """Write what there is. A file that cannot be written is told of once."""
        with self._lock:
            if self._is_over:
                return
            fresh, self._fresh = self._fresh, []
            if self._file is not None and not fresh:
                return
            head = self.head()
            try:
                if self._file is None:
                    is_rank = self.place is not None or head.ranks > 1 or "RANK" in os.environ
                    name = part_path(self.path, head.rank if is_rank else None)
                    self._file = open(name, "w", encoding="utf-8")  # noqa: SIM115 - to the end
                self._file.write(write_lines(head, fresh))
                self._file.flush()
            except OSError as error:
                self._is_over = True
                warn(self.path, error)
            self._written += len(fresh)

    def end(self) -> None:
        """The rank ends. Whoever started it puts the ranks' files together; one that nobody started does so itself."""
        for recorder in self.recorders:
            _detach(recorder, self, GRACE_S)
        self.flush()
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self._file.close()
            if LIFELINE in os.environ or ranks.has_launcher():
                return
            name = self._file.name
            if name != part_path(self.path, None) or not ranks.has_launched:
                add_to(self.path, [read_part(name)])
            os.unlink(name)


class _Process:
    """The timelines of a process that are recorded from its beginning: one for each rank of it."""

    def __init__(self) -> None:
        self.sinks: dict[int | None, _FileSink] = {}
        """By the numbers of ranks that are threads; None for the process."""
        self.thread: threading.Thread | None = None
        self.pid = os.getpid()

    def begin(self, device: Device, path: str) -> None:
        place = ranks.place()
        key = place[0] if place is not None and place[2] else None
        with _lock:
            sink = self.sinks.get(key)
            if sink is None:
                sink = self.sinks[key] = _FileSink(path)
                if key is not None:
                    sink.place, ranks.has_launched = place, True
            others = any(not recorder.is_over for recorder in sink.recorders)
            sink.recorders.append(_attach(device, sink, f"{device.name} " if others else ""))
            if self.thread is None:
                self.thread = threading.Thread(target=self._serve, name="peertile-timeline", daemon=True)
                self.thread.start()
                atexit.register(self._end)

    def _serve(self) -> None:
        while True:
            time.sleep(_PERIOD_S)
            for sink in list(self.sinks.values()):
                for recorder in list(sink.recorders):
                    with contextlib.suppress(PeertileError):  # a device that is closed meanwhile, or lost
                        recorder.drain()
                sink.flush()

    def _end(self) -> None:
        if os.getpid() != self.pid:
            return
        for sink in self.sinks.values():
            try:
                sink.end()
            except (OSError, ArgumentError) as error:
                warn(sink.path, error)


_process: Final = _Process()


def record_process(device: Device) -> None:
    """Record a device from its opening to the end of the process, where PEERTILE_TIMELINE says so."""
    path = config().timeline
    if path is not None:
        _process.begin(device, checked_path("PEERTILE_TIMELINE", path))
