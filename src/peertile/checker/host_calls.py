"""Calls of a host program that the simulated machine answers itself or refuses, as patches of standard modules.

Answered: clocks, sleeping, locks and conditions (and so events, queues and semaphores), signals that a rank sends
itself, what is to be done at its end, the working directory, what seeds generators of random numbers.
Refused, with the line of the program: whatever would start a thread or a process, end this one, or block on the real
world. Other threads of the process, which go on meanwhile, call what they always do. Nothing here decides when a patch
is in place: `isolation.py` does.
"""

from __future__ import annotations

import _thread
import atexit
import os
import queue
import random
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, Final, NoReturn

from peertile.checker.sources import Sources
from peertile.comm import launcher
from peertile.errors import UnsupportedError
from peertile.sim.hosts import Call, Host
from peertile.sim.verdicts import Waiter

__all__ = ["HostCalls", "Patch"]

Patch = tuple[Any, str, Any]
"""Owner, name of its attribute, what stands there while the rank runs."""

ONE_THREAD: Final = "the simulated machine has one thread for each rank"
REAL_WORLD: Final = "it would wait for the real world, and a schedule could not be repeated"
THE_END: Final = "it would end the process of the checker, in which all ranks run; sys.exit ends a rank"

FREE_LOOKS: Final = 200
"""Looks at a clock that stands still, after which it goes on: who looks so often waits for that."""
LOOKS_FOR_TWICE: Final = 64
"""It then goes twice as fast after each so many looks, so that any time is over soon."""

_CLOCKS: Final = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
_WATCHED: Final = frozenset({signal.SIGINT, getattr(signal, "SIGALRM", signal.SIGINT)})
_posixsubprocess: Any = sys.modules.get("_posixsubprocess")  # of systems that have it, by `subprocess`

_REFUSED: Final[tuple[tuple[Any, str, str, str], ...]] = (
    (threading.Thread, "start", "threading.Thread.start", ONE_THREAD),
    (_thread, "start_new_thread", "_thread.start_new_thread", ONE_THREAD),
    (subprocess.Popen, "__init__", "subprocess.Popen", ONE_THREAD),
    (os, "fork", "os.fork", ONE_THREAD),
    (os, "forkpty", "os.forkpty", ONE_THREAD),
    (os, "posix_spawn", "os.posix_spawn", ONE_THREAD),
    (os, "posix_spawnp", "os.posix_spawnp", ONE_THREAD),
    (os, "system", "os.system", ONE_THREAD),
    (_posixsubprocess, "fork_exec", "starting a process", ONE_THREAD),  # as multiprocessing does
    (launcher, "launch", "starting ranks", "peertile check --ranks N runs the program on the ranks it has"),
    (os, "_exit", "os._exit", THE_END),
    (os, "abort", "os.abort", THE_END),
    (os, "execv", "os.execv", THE_END),
    (os, "execve", "os.execve", THE_END),
    (os, "killpg", "os.killpg", THE_END),
    (socket.socket, "__init__", "socket.socket", REAL_WORLD + "; asyncio.start_server and open_connection can be"),
    (socket, "getaddrinfo", "socket.getaddrinfo", REAL_WORLD),
    (socket, "gethostbyname", "socket.gethostbyname", REAL_WORLD),
    (socket, "getnameinfo", "socket.getnameinfo", REAL_WORLD),
    (select, "select", "select.select", REAL_WORLD),
    (select, "poll", "select.poll", REAL_WORLD),
    (select, "epoll", "select.epoll", REAL_WORLD),
    (signal, "alarm", "signal.alarm", REAL_WORLD),
    (signal, "setitimer", "signal.setitimer", REAL_WORLD),
    (signal, "pause", "signal.pause", REAL_WORLD),
    (signal, "sigwait", "signal.sigwait", REAL_WORLD),
    (signal, "sigwaitinfo", "signal.sigwaitinfo", REAL_WORLD),
    (signal, "sigtimedwait", "signal.sigtimedwait", REAL_WORLD),
)
_IGNORED_SIGNALS: Final = frozenset(getattr(signal, name, -1) for name in ("SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH"))

# The real ones: while a rank runs, others stand in their place.
_getsignal, _kill, _read, _chdir, _fchdir = signal.getsignal, os.kill, os.read, os.chdir, os.fchdir
_lock, _poll, _thread_id = threading.Lock, getattr(select, "poll", None), threading.get_ident
_register, _unregister, _seed = atexit.register, atexit.unregister, random.Random.seed


def _here(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `ours` in the thread that it is made in, where the machine and its ranks run. Another one calls `theirs`:
    it is no part of the program, and has no rank that could be parked while it waits."""
    here = _thread_id()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if _thread_id() == here else theirs)(*args, **kwargs)

    return call


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


class _Lock:
    """A lock of a program: who waits for it parks its host thread. Outside of a rank it is a lock like any other, as
    a module that all ranks share may keep it."""

    __slots__ = ("__weakref__", "_lock", "_waiters")

    def __init__(self) -> None:
        self._lock = _lock()
        self._waiters: list[Any] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(False)
        calls = HostCalls.shown
        if taken or not blocking or calls is None:
            return taken or self._lock.acquire(blocking, timeout)
        end = None if timeout < 0 else calls.now_ns() + int(timeout * 1e9)
        while not self._lock.acquire(False):
            left = None if end is None else (end - calls.now_ns()) / 1e9
            if left is not None and left <= 0:
                return False
            calls.pause(self._waiters, left, lambda: "a lock that is not free")
        return True

    def release(self) -> None:
        self._lock.release()
        calls = HostCalls.shown
        if calls is not None:
            calls.host.machine.wake_all(self._waiters)

    def locked(self) -> bool:
        return self._lock.locked()

    def _at_fork_reinit(self) -> None:  # asked for by modules of Python's library
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class HostCalls:
    """The patches of one rank. `refused` is the first refusal of a call that the program made itself: it counts even
    where somebody caught it."""

    shown: ClassVar[HostCalls | None] = None
    """Those of the rank whose world is in place."""

    def __init__(self, sources: Sources, rank: int) -> None:
        self.sources = sources
        self.host: Host
        self.refused: UnsupportedError | None = None
        self.handlers: dict[int, Any] = {}
        self.exits: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.left_folder: str | None = None
        """The process's working directory, once the rank has one of its own."""
        self._entropy = random.Random(f"entropy of rank {rank}")
        self._looked_at, self._looks = -1, 0
        patches: list[Patch] = [
            *((time, name, self.seconds) for name in _CLOCKS),
            *((time, f"{name}_ns", self.now_ns) for name in _CLOCKS),
            (queue, "time", self.seconds),  # as it was imported there
            (threading, "_time", self.seconds),
            (time, "sleep", self.sleep),
            (threading, "Lock", self.lock),
            (threading.Condition, "wait", self._condition_wait()),
            (signal, "signal", self.signal),
            (signal, "getsignal", self.getsignal),
            (signal, "raise_signal", self.raise_signal),
            (os, "kill", self.kill),
            (os, "read", self.read),
            (os, "chdir", self.chdir),
            (os, "fchdir", self.fchdir),
            (os, "urandom", self.urandom),
            (random, "_urandom", self.urandom),
            (random.Random, "seed", self._seed_of_generators()),
            (atexit, "register", self.register),
            (atexit, "unregister", self.unregister),
            *((owner, name, self._refuse(what, why)) for owner, name, what, why in _REFUSED),
        ]
        there = [(owner, name, ours) for owner, name, ours in patches if hasattr(owner, name)]
        self.patches: list[Patch] = [(owner, name, _here(ours, getattr(owner, name))) for owner, name, ours in there]
        self.patches.append((HostCalls, "shown", self))

    # ---------------------------------------------------------------- the clock of the machine

    def now_ns(self, clock: int = 0) -> int:
        """Nanoseconds: a microsecond for each step of the machine, and what was slept. It goes on by itself for who
        does nothing but look at it."""
        machine = self.host.machine
        if machine.steps != self._looked_at:
            self._looked_at, self._looks = machine.steps, 0
        self._looks += 1
        if self._looks > FREE_LOOKS:
            machine.now_ns += 1000 << min((self._looks - FREE_LOOKS) // LOOKS_FOR_TWICE, 40)
        return machine.now_ns + 1000 * machine.steps

    def seconds(self, clock: int = 0) -> float:
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
            if seconds is None:
                self.refuse(f"waiting for {what()}", "a callback must not wait")
            machine.now_ns += int(seconds * 1e9)
            return
        timer = None
        if seconds is not None:
            timer = machine.timer(int(seconds * 1e9), lambda: machine.wake_all(waiters))
        place, _ = self.sources.place_of(sys._getframe(1))
        host.block(waiters, lambda: Waiter(host.where(), f"{what()} ({place})"))
        if timer is not None:
            machine.cancel(timer)

    def ask(self) -> None:
        """Lets others go on, as somebody who looks whether something has happened."""
        host = self.host
        if host.machine.host is host and not host.machine.stopping:
            host.step(Call.ASKS)

    # ---------------------------------------------------------------- threads

    def lock(self) -> Any:
        """A lock of the program, or of what Python's library makes for it; other libraries get real ones."""
        _, is_direct = self.sources.place_of(sys._getframe(1))
        return _Lock() if is_direct else _lock()

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
        """Kept for the rank: it is called where the rank sends itself that signal. Nobody else does."""
        before = self.getsignal(number)
        self.handlers[int(number)] = handler
        return before

    def getsignal(self, number: int) -> Any:
        if int(number) in self.handlers:
            return self.handlers[int(number)]
        if number in _WATCHED:  # by the checker, for itself
            return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        return _getsignal(number)

    def raise_signal(self, number: int) -> None:
        self._send(number, "signal.raise_signal")

    def kill(self, process: int, number: int) -> None:
        if number == 0:
            _kill(process, 0)
        elif process != os.getpid():
            self.refuse("os.kill", "other processes are not part of the machine")
        else:
            self._send(number, "os.kill")

    def _send(self, number: int, what: str) -> None:
        handler = self.getsignal(number)
        if callable(handler):
            handler(int(number), sys._getframe(3))
        elif handler is not signal.SIG_IGN and number not in _IGNORED_SIGNALS:
            self.refuse(what, THE_END)

    # ---------------------------------------------------------------- files, folders, the end, numbers

    def read(self, fd: int, length: int) -> bytes:
        """Nobody else runs meanwhile, so what is not there yet never comes."""
        kind = os.fstat(fd).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)) and _poll is not None:
            asked = _poll()
            asked.register(fd, select.POLLIN)
            if not asked.poll(0):
                self.refuse("os.read", REAL_WORLD)
        return _read(fd, length)

    def chdir(self, path: Any) -> None:
        """Of this rank alone."""
        before = os.getcwd()
        _chdir(path)
        self._has_left(before)

    def fchdir(self, fd: int) -> None:
        before = os.getcwd()
        _fchdir(fd)
        self._has_left(before)

    def _has_left(self, folder: str) -> None:
        if self.left_folder is None:
            self.left_folder = folder

    def register(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """What the program registers is done at the end of the rank, what a library does at that of the process."""
        if not self.sources.owns(sys._getframe(2).f_code.co_filename):
            return _register(function, *args, **kwargs)
        self.exits.append((function, args, kwargs))
        return function

    def unregister(self, function: Callable[..., Any]) -> None:
        self.exits = [entry for entry in self.exits if entry[0] != function]
        _unregister(function)

    def exit(self) -> None:
        """The rank ends: does what was registered, the last first."""
        while self.exits:
            function, args, kwargs = self.exits.pop()
            function(*args, **kwargs)

    def urandom(self, size: int) -> bytes:
        """The same at every run, and on each rank its own."""
        return self._entropy.randbytes(size)

    def _seed_of_generators(self) -> Callable[..., None]:
        calls = self

        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            _seed(generator, calls.seed() if a is None else a, version)

        return seed

    def seed(self) -> int:
        """For generators that the program gives none."""
        return self._entropy.getrandbits(32)

    # ---------------------------------------------------------------- what is not there

    def refuse(self, what: str, why: str) -> NoReturn:
        """Raises UnsupportedError with the line of the program."""
        error, is_direct = self.refusal(what, why, sys._getframe(1))
        if is_direct and self.refused is None:
            self.refused = error
        raise error

    def refusal(self, what: str, why: str, frame: FrameType | None) -> tuple[UnsupportedError, bool]:
        """The error for what the machine does not do, and whether the program did it itself."""
        place, is_direct = self.sources.place_of(frame)
        return UnsupportedError(f"{what}: cannot be checked, as {why} ({place})"), is_direct

    def _refuse(self, what: str, why: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            self.refuse(what, why)

        return refuse
