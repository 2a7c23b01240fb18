"""Bounds what a host does without letting others go on, in real time: a loop, or a wait for the real world.

A timer of the system looks once a second, from the main thread, which alone hears of it: a check that runs in another
thread is not bounded. What is found is raised where the host is, with the line of the program.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

__all__ = ["HOST_SECONDS", "Watch", "is_dropped"]

HOST_SECONDS: Final = 60.0
"""How long one stretch of a host may take."""
STOP_SECONDS: Final = 2.0
"""The same at its end, where it was told to stop."""
_LOOKS: Final = 4
"""In the time that a stretch may take."""

_getsignal, _signal, _setitimer = signal.getsignal, signal.signal, getattr(signal, "setitimer", None)
_monotonic = time.monotonic


class Watch:
    """Watches `count`, which goes up with every step of the machine: if it stands still for `seconds`, `stuck` is
    called with the frame that runs, and again while it still stands. `heard` is what came from outside, such as
    Ctrl-C: `end` raises it where the host is, which may catch it, so whoever watches raises it again."""

    def __init__(
        self, seconds: float, count: Callable[[], int], stuck: Callable[[FrameType | None], None],
        end: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self.heard: BaseException | None = None
        self._seconds = seconds
        self._tick = seconds / _LOOKS
        self._count = count
        self._stuck = stuck
        self._end = end
        self._seen, self._looks = -1, 0
        self._is_armed = False
        self._other: Any = None
        self._other_at: float | None = None
        self._other_interval = 0.0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watches inside the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        interrupts = _getsignal(signal.SIGINT)
        if callable(interrupts):
            _signal(signal.SIGINT, self._interrupt)
        self._is_armed = self._arm()
        try:
            yield
        finally:
            if self._is_armed:
                self._disarm()
            if callable(interrupts):
                _signal(signal.SIGINT, interrupts)

    def hurry(self) -> None:
        """From here on hosts end, for which they have less time."""
        if self._is_armed and self._seconds > STOP_SECONDS:
            assert _setitimer is not None
            self._seen = -1
            self._tick = STOP_SECONDS / _LOOKS
            _setitimer(signal.ITIMER_REAL, self._tick, self._tick)

    @property
    def stands_for(self) -> float:
        """Seconds for which the machine has stood still, at least."""
        return self._looks * self._tick

    def _arm(self) -> bool:
        """Takes the timer of the system. Somebody else's, such as a test's bound, is kept in mind and acts as well."""
        self._other = None if _setitimer is None else _getsignal(signal.SIGALRM)
        if _setitimer is None or self._other is None:
            return False
        tick = self._tick
        _signal(signal.SIGALRM, self._look)
        left, self._other_interval = _setitimer(signal.ITIMER_REAL, tick, tick)
        self._other_at = _monotonic() + left if left else None
        if left and left < tick:
            _setitimer(signal.ITIMER_REAL, left, tick)
        return True

    def _disarm(self) -> None:
        assert _setitimer is not None
        _setitimer(signal.ITIMER_REAL, 0)
        _signal(signal.SIGALRM, self._other)
        if self._other_at is not None:
            _setitimer(signal.ITIMER_REAL, max(self._other_at - _monotonic(), 1e-3), self._other_interval)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.heard = KeyboardInterrupt()
        self._end(self.heard)

    def _look(self, number: int, frame: FrameType | None) -> None:
        if self._other_at is not None and _monotonic() >= self._other_at:
            self._other_at = self._other_at + self._other_interval if self._other_interval else None
            try:
                if callable(self._other):
                    self._other(number, frame)
            except BaseException as error:
                self.heard = error
                self._end(error)
        count = self._count()
        if count != self._seen:
            self._seen, self._looks = count, 0
            return
        self._looks += 1
        if self._looks >= _LOOKS and not is_dropped(frame):
            self._stuck(frame)


def is_dropped(frame: FrameType | None) -> bool:
    """Whether Python drops what is raised here: the collector has called what runs, or it is a finaliser. A later look
    will find it."""
    codes = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in codes or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
