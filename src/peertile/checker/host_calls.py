"""Calls of a host program that the simulated machine answers itself or refuses, as patches of standard modules.

Answered: clocks, sleeping, waiting for conditions (and so for events, queues and semaphores), signal handlers.
Refused, with the line of the program: whatever would start a thread or a process, or block on the real world.
Nothing here decides when a patch is in place: `isolation.py` does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, NoReturn

from peertile.errors import UnsupportedError
from peertile.sim.hosts import Host
from peertile.sim.verdicts import Waiter

__all__ = ["HostCalls", "Patch", "place_of", "refusal"]

Patch = tuple[Any, str, Any]
"""Owner, name of its attribute, what stands there while the rank runs."""

ONE_THREAD: Final = "the simulated machine has one thread for each rank"
REAL_WORLD: Final = "it would wait for the real world, and a schedule could not be repeated"
_LIBRARY: Final = (sysconfig.get_path("stdlib") + os.sep, "<frozen")

_REFUSED: Final[tuple[tuple[Any, str, str, str], ...]] = (
    (threading.Thread, "start", "threading.Thread.start", ONE_THREAD),
    (subprocess.Popen, "__init__", "subprocess.Popen", ONE_THREAD),
    (os, "fork", "os.fork", ONE_THREAD),
    (os, "forkpty", "os.forkpty", ONE_THREAD),
    (os, "posix_spawn", "os.posix_spawn", ONE_THREAD),
    (os, "posix_spawnp", "os.posix_spawnp", ONE_THREAD),
    (os, "system", "os.system", ONE_THREAD),
    (socket.socket, "__init__", "socket.socket", REAL_WORLD + "; asyncio.start_server and open_connection can be"),
    (select, "select", "select.select", REAL_WORLD),
    (select, "poll", "select.poll", REAL_WORLD),
    (select, "epoll", "select.epoll", REAL_WORLD),
    (signal, "alarm", "signal.alarm", REAL_WORLD),
    (signal, "setitimer", "signal.setitimer", REAL_WORLD),
    (signal, "pause", "signal.pause", REAL_WORLD),
    (signal, "sigwait", "signal.sigwait", REAL_WORLD),
)


def place_of(folder: str, frame: FrameType | None) -> tuple[str, bool]:
    """The innermost place of the program on a stack, as `file:line`, and whether the program made the call itself,
    through nothing but Python's own library."""
    direct, last = True, "?"
    while frame is not None:
        name = frame.f_code.co_filename
        last = f"{name}:{frame.f_lineno}"
        if name.startswith(folder):
            return last, direct
        if not name.startswith(_LIBRARY) and name != __file__:
            direct = False
        frame = frame.f_back
    return last, False


def refusal(what: str, why: str, folder: str, depth: int = 1) -> tuple[UnsupportedError, bool]:
    """The error for a call that the machine does not carry out, and whether the program made the call itself."""
    place, direct = place_of(folder, sys._getframe(depth))
    return UnsupportedError(f"{what}: cannot be checked, as {why} ({place})"), direct


class _Notified:
    """Stands for a lock in `Condition._waiters`: its release wakes the host thread that waits."""

    __slots__ = ("calls", "is_notified", "waiters")

    def __init__(self, calls: HostCalls) -> None:
        self.calls = calls
        self.waiters: list[Any] = []
        self.is_notified = False

    def release(self) -> None:
        self.is_notified = True
        self.calls.host.machine.wake_all(self.waiters)


class HostCalls:
    """The patches of one rank. `refused` is the first refusal of a call that the program made itself: it counts even
    where somebody caught it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.host: Host
        self.refused: UnsupportedError | None = None
        self.handlers: dict[int, Any] = {}
        self._getsignal = signal.getsignal
        self.patches: list[Patch] = [
            (time, "time", self.seconds),
            (time, "monotonic", self.seconds),
            (time, "perf_counter", self.seconds),
            (time, "process_time", self.seconds),
            (time, "time_ns", self.now_ns),
            (time, "monotonic_ns", self.now_ns),
            (time, "perf_counter_ns", self.now_ns),
            (time, "process_time_ns", self.now_ns),
            (time, "sleep", self.sleep),
            (threading.Condition, "wait", self._condition_wait()),
            (signal, "signal", self.signal),
            (signal, "getsignal", self.getsignal),
            *((owner, name, self._refuse(what, why)) for owner, name, what, why in _REFUSED if hasattr(owner, name)),
        ]

    # ---------------------------------------------------------------- the clock of the machine

    def now_ns(self) -> int:
        """Nanoseconds: a microsecond for each step of the machine, and what was slept."""
        machine = self.host.machine
        return machine.now_ns + 1000 * machine.steps

    def seconds(self) -> float:
        return self.now_ns() / 1e9

    def sleep(self, seconds: float) -> None:
        """Others go on; once nobody can, the clock goes to the end of the sleep."""
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        self.pause([], seconds, lambda: "the end of a sleep")

    def pause(self, waiters: list[Any], seconds: float | None, what: Callable[[], str]) -> None:
        """Parks the host thread in `waiters` until somebody wakes them or the time is over; `what` is for people."""
        host = self.host
        machine = host.machine
        if machine.host is not host:  # a callback of the driver: nothing to park
            if seconds:
                machine.now_ns += int(seconds * 1e9)
            return
        timer = None
        if seconds is not None:
            timer = machine.timer(int(seconds * 1e9), lambda: machine.wake_all(waiters))
        place, _ = place_of(self.folder, sys._getframe(1))
        host.block(waiters, lambda: Waiter(host.where(), f"{what()} ({place})"))
        if timer is not None:
            machine.cancel(timer)

    # ---------------------------------------------------------------- threads

    def _condition_wait(self) -> Callable[..., bool]:
        calls = self

        def wait(condition: Any, timeout: float | None = None) -> bool:
            if not condition._is_owned():
                raise RuntimeError("cannot wait on un-acquired lock")
            notified = _Notified(calls)
            condition._waiters.append(notified)
            saved = condition._release_save()
            try:
                calls.pause(notified.waiters, timeout, lambda: "a condition that somebody notifies")
                return notified.is_notified
            finally:
                condition._acquire_restore(saved)
                if not notified.is_notified and notified in condition._waiters:
                    condition._waiters.remove(notified)

        return wait

    # ---------------------------------------------------------------- signals of the system

    def signal(self, number: int, handler: Any) -> Any:
        """Kept for the rank, never called: nobody sends signals to a simulated rank."""
        before = self.getsignal(number)
        self.handlers[int(number)] = handler
        return before

    def getsignal(self, number: int) -> Any:
        return self.handlers.get(int(number), self._getsignal(number))

    # ---------------------------------------------------------------- what is not there

    def refuse(self, what: str, why: str, depth: int = 2) -> NoReturn:
        """Raises UnsupportedError with the line of the program."""
        error, direct = refusal(what, why, self.folder, depth)
        if direct and self.refused is None:
            self.refused = error
        raise error

    def _refuse(self, what: str, why: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            self.refuse(what, why, 3)

        return refuse
