"""`pt.timeline`, and nothing else of timelines: a program that records none loads none."""

from __future__ import annotations

import importlib
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from peertile.config import config
from peertile.errors import ArgumentError, UsageError
from peertile.runtime.checks import check_integer
from peertile.runtime.device import Device
from peertile.runtime.registry import current_device

if TYPE_CHECKING:
    from peertile.timelines.events import Event, Part
    from peertile.timelines.timeline import Recording

__all__ = ["EVENTS", "GRACE_S", "Timeline", "checked_path", "timeline"]

EVENTS: Final = 1 << 18
"""Events that a timeline holds, some 60 MiB."""
GRACE_S: Final = 1.0
"""How long the end of a timeline waits for what is on its way, after an error."""


class Timeline:
    """What was recorded between the beginning and the end of a `with`, on this rank. Made by `timeline`."""

    def __init__(self, path: str | None, devices: tuple[Device, ...], events: int) -> None:
        self.path = path
        self._devices = devices
        self._most = events
        self._pid = os.getpid()
        self._recording: Recording | None = None
        self._part: Part | None = None

    def __repr__(self) -> str:
        return "<Timeline, not over>" if self._part is None else f"<Timeline, {len(self._part.events)} events>"

    def __enter__(self) -> Self:
        if self._recording is not None or self._part is not None:
            raise UsageError("timeline: expected a new one, got one that was recorded before; call pt.timeline again")
        work: Any = importlib.import_module("peertile.timelines.timeline")
        self._recording = work.Recording(self._devices or (current_device(),), self._most)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._recording is not None
        if os.getpid() != self._pid:  # a forked child has neither the device nor what is recorded of it
            return
        self._part = self._recording.end(config().wait_timeout_s if error is None else GRACE_S)
        self._recording = None
        if self.path is not None:
            self.write(self.path)

    @property
    def part(self) -> Part:
        """What was recorded: `events`, how many were `dropped`, and how far off the `clock` may be. UsageError before
        the end of the `with`."""
        if self._part is None:
            raise UsageError("timeline: expected one that has ended, got one that is recorded; leave its with block")
        return self._part

    @property
    def events(self) -> list[Event]:
        """What was recorded, in order of beginning: each has a `kind`, `track`, `name`, `begin_ns`, `end_ns` and
        `info`. UsageError before the end of the `with`."""
        return self.part.events

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace file; ranks of a job that write to one path share the file. ArgumentError for what is no path
        of a file, OSError if it cannot be written, UsageError before the end of the `with`."""
        files: Any = importlib.import_module("peertile.timelines.trace")
        files.add_to(checked_path("Timeline.write(path)", path), [self.part])


def timeline(path: str | os.PathLike[str] | None = None, *devices: Device, events: int = EVENTS) -> Timeline:
    """Record what this rank does inside a `with`: launches, copies, host functions and waits of its streams, and the
    programs of its kernels with their waits and signals.

    Kernels are compiled once more for it. With `path`, the ranks of a job write one file in the Trace Event Format,
    which Perfetto and `peertile timeline` open. Records the device that the thread works on, or `devices`. Of more than
    `events` the newest are kept, and `part.dropped` counts the others. Times are in ns.

    ArgumentError for what is no path of a file; beginning it is a UsageError if a device is closed, and the end of the
    `with` raises OSError if the file cannot be written.

    >>> import peertile as pt
    >>> x = pt.zeros((4,), pt.f32)
    >>> with pt.timeline() as t:
    ...     pt.op.fill(x, 1).sync()
    >>> [event.name for event in t.events if event.kind.value == "fill"]
    ['fill']
    """
    check_integer("timeline(events)", events, 1)
    for device in devices:
        if not isinstance(device, Device):
            raise ArgumentError(f"timeline(devices): expected devices, got {device!r}; pt.current_device() is one")
    found = None if path is None else checked_path("timeline(path)", path)
    return Timeline(found, tuple(dict.fromkeys(devices)), events)


def checked_path(role: str, path: Any, *, is_replaced: bool = True) -> str:
    """The absolute path of a file that can be there; ArgumentError. A file that is replaced is no device, which would
    be gone."""
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"{role}: expected a path of a file, got {path!r}")
    found = os.path.abspath(os.fspath(path))
    is_device = is_replaced and os.path.exists(found) and not os.path.isfile(found)
    if is_device or os.path.isdir(found) or not os.path.isdir(os.path.dirname(found)):
        raise ArgumentError(f"{role}: expected a file in a folder that is there, got {str(path)!r}")
    return found
