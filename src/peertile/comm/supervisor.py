"""Starts the ranks of a job as processes, watches over them, and says how it ended. Knows no groups.

A rank is a process (and process group) of its own, so that Ctrl-C reaches it once: through the
launcher. The life of a job::

    running ──a rank fails, a signal, the time limit──> ending ──all gone──> over
                                                        after 3/5 of the grace: SIGTERM, at its end: SIGKILL

Ranks that end normally do not end the job. Every rank holds a lifeline (lifeline.py): it tells why it
fails, and ends when the launcher is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TextIO

from peertile.comm.lifeline import VARIABLE, Lifeline, Report
from peertile.errors import ArgumentError, UnsupportedError
from peertile.timelines.upper import ranks as ranks_of_timelines

if TYPE_CHECKING:
    import subprocess

__all__ = ["JobReport", "Output", "RankEnd", "free_port", "launch"]

GRACE_S = 5.0
TIMELINE = "PEERTILE_TIMELINE"
"""Where the parts of a timeline that ranks leave are put together."""
_OTHERS_VARIABLES = (
    *("NNODES", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)


class RankEnd(NamedTuple):
    """How a rank ended: exit status (128 + signal), why as far as it is known, and whom it blames."""

    rank: int
    status: int
    cause: str
    peer: int | None = None
    stopped: bool = False  # by the launcher

    @property
    def is_origin(self) -> bool:
        """Whether the rank failed by itself, not because another did or the launcher ended it."""
        return self.status != 0 and not self.stopped and self.peer in (None, self.rank)


class JobReport(NamedTuple):
    """How a job ended. `ends` is in the order in which the ranks ended; `signal` ended it, where one came to the
    launcher."""

    status: int
    ends: tuple[RankEnd, ...]
    timed_out: bool = False
    signal: signal.Signals | None = None

    @property
    def first_failure(self) -> RankEnd | None:
        """The rank that failed first by itself, else the first that failed."""
        failed = [end for end in self.ends if end.status != 0]
        return next((end for end in failed if end.is_origin), failed[0] if failed else None)

    def summary(self) -> str:
        """One line for each rank that failed, the first failure first; empty if none did."""
        first = self.first_failure
        failed = sorted((end for end in self.ends if end.status != 0), key=lambda end: (end is not first, end.rank))
        return "\n".join(f"rank {end.rank} ended with status {end.status}: {end.cause}" for end in failed)


class Output(NamedTuple):
    """Where the ranks' output goes: theirs is the launcher's unless `labels`, which names the rank on each line."""

    labels: bool = False
    stdout_to_stderr: bool = False


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    lifeline: Lifeline
    threads: list[threading.Thread] = field(default_factory=list)
    report: Report | None = None
    end: RankEnd | None = None
    stopped: bool = False


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
    output: Output | None = None,
    grace_s: float = GRACE_S,
    timeout_s: float | None = None,
    task: object = None,
    on_message: Callable[[int, Any], None] | None = None,
) -> JobReport:
    """Runs `command` as `ranks` processes and returns when all have ended; the job's status is in the report:
    0 only if all are 0, 130 for Ctrl-C, else that of the rank that failed first.

    `task` is sent to each rank; `on_message` is called, on another thread, with what a rank sends besides its Report.
    """
    if ranks < 1:
        raise ArgumentError(f"number of ranks: expected at least 1, got {ranks}")
    if os.name != "posix":
        raise UnsupportedError(
            f"ranks as processes: expected Linux or macOS, got {sys.platform}; use RankModel.THREADS"
        )
    job = _Job(grace_s, timeout_s, output or Output(), on_message)
    base = {
        name: value for name, value in (os.environ if env is None else env).items() if name not in _OTHERS_VARIABLES
    }
    base |= {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port() if port is None else port),
        "PEERTILE_JOB": f"{os.getpid()}-{time.monotonic_ns():x}",
    }
    if port is not None:
        base["PEERTILE_MASTER_PORT"] = str(port)
    if base.get(TIMELINE):  # wherever the ranks go before they begin it
        base[TIMELINE] = os.path.abspath(base[TIMELINE])
    with job.signals():
        try:
            for rank in range(ranks):
                job.start(rank, command, base | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, task)
            return job.watch()
        finally:
            job.sweep()
            if base.get(TIMELINE):
                files: Any = importlib.import_module("peertile.timelines.trace")
                files.gather(base[TIMELINE], base["PEERTILE_JOB"])
                ranks_of_timelines.has_launched = True


def free_port() -> int:
    """A TCP port of this host that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Job:
    """The ranks of one job and what has happened so far. All events arrive in one queue."""

    def __init__(
        self,
        grace_s: float,
        timeout_s: float | None,
        output: Output,
        on_message: Callable[[int, Any], None] | None,
    ) -> None:
        self.ranks: list[_Rank] = []
        self.ends: list[RankEnd] = []
        self._events: SimpleQueue[int | signal.Signals | _Rank] = SimpleQueue()
        self._grace_s = grace_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._output = output
        self._on_message = on_message
        self._print_lock = threading.Lock()  # keeps lines of the ranks whole
        self._ending: float | None = None  # since when
        self._terminated = False
        self._signal: signal.Signals | None = None
        self._timed_out = False

    def start(self, number: int, command: Sequence[str], env: dict[str, str], task: object) -> None:
        import subprocess

        lifeline, theirs = Lifeline.pair()
        env[VARIABLE] = Lifeline.variable(theirs)
        if self._output.labels:
            env.setdefault("PYTHONUNBUFFERED", "1")
        stdout = subprocess.PIPE if self._output.labels else 2 if self._output.stdout_to_stderr else None
        # A rank is in the background of the terminal: reading from it would stop the rank for good.
        inherits = number == 0 and not (sys.__stdin__ is None or sys.__stdin__.closed or sys.__stdin__.isatty())
        try:
            process = subprocess.Popen(
                list(command),
                env=env,
                stdin=None if inherits else subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.PIPE if self._output.labels else None,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        except BaseException:
            lifeline.close()
            raise
        finally:
            theirs.close()
        rank = _Rank(number, process, lifeline)
        self.ranks.append(rank)
        if task is not None:
            lifeline.send(task)
        targets: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(self._listen, (rank,))]
        if self._output.labels:
            out = sys.stderr if self._output.stdout_to_stderr else sys.stdout
            targets += [
                (self._label, (number, process.stdout, out)),
                (self._label, (number, process.stderr, sys.stderr)),
            ]
        for target, arguments in targets:
            thread = threading.Thread(target=target, args=arguments, daemon=True)
            thread.start()
            rank.threads.append(thread)
        threading.Thread(target=self._await, args=(rank,), daemon=True).start()

    def watch(self) -> JobReport:
        while any(rank.end is None for rank in self.ranks):
            due = self._due()
            try:
                event = self._events.get(timeout=None if due is None else max(due - time.monotonic(), 0.0))
            except Empty:
                self._escalate()
                continue
            if isinstance(event, _Rank):
                self._ended(event)
            else:
                self._signalled(signal.Signals(event))
        if self._signal is not None:
            status = 128 + self._signal
        else:
            first = JobReport(0, tuple(self.ends)).first_failure
            status = first.status if first is not None else 0
        return JobReport(status, tuple(self.ends), self._timed_out, self._signal)

    def sweep(self) -> None:
        """Whatever happened: no rank stays, and its socket is closed."""
        for rank in self.ranks:
            if rank.end is None:
                _kill(rank.process.pid, signal.SIGKILL)
                rank.process.wait()
            rank.lifeline.close()

    # Events

    def _listen(self, rank: _Rank) -> None:
        while (messages := rank.lifeline.receive()) is not None:
            for message in messages:
                if isinstance(message, Report):
                    rank.report = rank.report or message
                elif self._on_message is not None:
                    self._on_message(rank.number, message)

    def _await(self, rank: _Rank) -> None:
        # Not reaped yet: as long as the rank is a zombie, its number names no other process group.
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
        else:
            rank.process.wait()
        self._events.put(rank)

    def _ended(self, rank: _Rank) -> None:
        for thread in rank.threads:  # what the rank said before its end is there; its children may hold the pipes
            thread.join(0.5)
        ending = self._ending is not None
        if hasattr(os, "waitid"):
            info = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
            failed = info is not None and not (info.si_code == os.CLD_EXITED and info.si_status == 0)
            if ending or failed:
                _kill(rank.process.pid, signal.SIGKILL)  # children that it left in its process group
        code = rank.process.wait()
        if not hasattr(os, "waitid") and (ending or code != 0):
            # As above, where the system (macOS, before Python 3.13) has no way to look without reaping: as long as a
            # child is left the number is not given away, and if none is, not for thousands of processes to come.
            _kill(rank.process.pid, signal.SIGKILL)
        status = code if code >= 0 else 128 - code
        if rank.report is not None:
            cause, peer = rank.report.cause, rank.report.peer
        elif code < 0:
            cause, peer = f"ended by {_signal_name(-code)}", None
        else:
            cause, peer = "ended normally" if code == 0 else f"exited with status {code}", None
        rank.end = RankEnd(rank.number, status, cause, peer, rank.stopped)
        self.ends.append(rank.end)
        if status != 0 and not ending:
            self._ending = time.monotonic()

    def _signalled(self, number: signal.Signals) -> None:
        if self._signal is not None and number == signal.SIGINT:
            self._stop(signal.SIGKILL)  # a second Ctrl-C: now
            return
        forwarded = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self._signal = self._signal or number
        self._ending = self._ending or time.monotonic()
        self._stop(forwarded)

    def _due(self) -> float | None:
        if self._ending is None:
            return self._deadline
        return self._ending + self._grace_s * (1.0 if self._terminated else 0.6)

    def _escalate(self) -> None:
        now = time.monotonic()
        due = self._due()
        if due is None or now < due:
            return
        if self._ending is None:
            self._timed_out = True
            self._ending = now - self._grace_s * 0.6  # nothing to wait for: SIGTERM now
        elif self._terminated:
            self._ending = now  # at most one SIGKILL per grace, for as long as the kernel needs
            self._stop(signal.SIGKILL)
            return
        self._terminated = True
        self._stop(signal.SIGTERM)

    def _stop(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            if rank.end is None:
                rank.stopped = True
                _kill(rank.process.pid, number)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP become events, where they can: in the main thread. A SIGHUP that is ignored, as by
        nohup, stays so."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def put(number: int, frame: FrameType | None) -> None:
            self._events.put(number)  # SimpleQueue.put may be called from a handler

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        previous = {number: signal.signal(number, put) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _label(self, number: int, source: IO[bytes], target: TextIO) -> None:
        encoding = target.encoding or "utf-8"
        # Where nobody takes the lines any more (a closed pipe, a full disk) the rank's own pipe is closed, so that its
        # next write fails as it would without labels: a pipe that nobody reads would hold it up for ever.
        with source, contextlib.suppress(OSError, ValueError):
            for line in source:
                text = line.decode(errors="replace").rstrip("\n").encode(encoding, "backslashreplace").decode(encoding)
                with self._print_lock:
                    target.write(f"[rank {number}] {text}\n")
                    target.flush()


def _kill(pid: int, number: int) -> None:
    """A signal to a rank and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
