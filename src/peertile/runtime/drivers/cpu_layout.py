"""Where things are in the native structures of the cpu driver, in 8-byte words. Numbers only.

LaunchContext, FaultRecord and PollDesc are the ABI of compiled kernels; the rest is between the native
runtime (`cpu_native.py`) and Python. Words that different threads write lie at least 64 bytes apart.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = [
    "ARGS",
    "CACHE_LINE",
    "COMMAND_WORDS",
    "CPU_WORDS",
    "DEVICE_BYTES",
    "EXECUTOR_BYTES",
    "HISTORY",
    "JOBS",
    "MAX_RESIDENT",
    "STREAM_BYTES",
    "C",
    "Context",
    "Dev",
    "Exec",
    "Fault",
    "Job",
    "Kind",
    "Mod",
    "Poll",
    "Result",
    "S",
]

CACHE_LINE: Final = 64
MAX_RESIDENT: Final = 8192  # programs of one waiting launch; an executor's list holds that many
CPU_WORDS: Final = 16  # of a set of processors
JOBS: Final = 8  # launches that can have helpers at the same time; further ones run on their caller alone


class Context(IntEnum):
    """LaunchContext, 32 words."""

    GRID0 = 0
    GRID1 = 1
    GRID2 = 2
    PROGRAMS = 3
    ABORT = 4  # address of an i32
    FAULT = 5  # address of the FaultRecord
    TIMEOUT = 6
    NOW = 7
    WORDS = 8  # address of u64[8]
    PRINT = 9
    SEQUENCE = 10


class Fault(IntEnum):
    """FaultRecord, 16 words."""

    STATE = 0  # 0 none, 1 being written, 2 complete
    KIND = 1
    PROGRAM = 2
    PLACE = 3
    GOT = 4
    LIMIT = 5
    ADDRESS = 6
    SLOT = 7
    NODE = 8  # of a graph, or -1; written by the stream
    SOURCE = 9  # for SKIPPED: the stream that failed first, and
    SOURCE_SEQ = 10  # the sequence number there


class Poll(IntEnum):
    """PollDesc: the promise of a suspended program."""

    ADDRESS = 0
    EXPECTED = 1
    CMP = 2
    WIDTH = 3  # bits | signed << 8
    START = 4
    PLACE = 5
    OUTCOME = 6  # 0 satisfied, 1 abort, 2 timed out
    SLOT = 7


class Dev(IntEnum):
    """A device: what its workers share."""

    EPOCH = 0  # i32: counts posted jobs; workers sleep on it
    SLEEPERS = 8  # i32
    STOP = 16  # i32
    WORKERS = 17  # how many threads help callers
    SPINS = 18  # pauses before a poll yields; few when there are more ranks than cores
    SLOTS = 24  # bit mask of free job slots
    CALLER_CPU = 25  # 1 + the processor that workers keep away from; 0: none yet
    CPUS = 26  # address of the processors that workers may use, CPU_WORDS words of bits; 0: leave them alone
    TIDS = 27  # address of i64[WORKERS]: what the system calls their threads
    JOB0 = 32


class Job(IntEnum):
    """A launch that executors take programs of; 32 words. Invariant: a slot is reused only when done."""

    CLAIM = 0  # epoch << 32 | chunks not claimed yet
    DONE = 8  # programs that have ended, or were dropped
    MODULE = 16
    CONTEXT = 17
    ARGS = 18
    PROGRAMS = 19
    CHUNK = 20
    CHUNKS = 21
    ARENA = 22  # frames and scratch of a waiting launch
    STRIDE = 23


class Mod(IntEnum):
    """A loaded kernel."""

    RANGE = 0
    START = 1
    FRAME = 2  # bytes of a coroutine frame
    PROMISE = 3  # offset of the PollDesc in the frame
    SCRATCH = 4
    WAITS = 5
    COST = 6  # ns a program took, a running mean; 0: not known yet


class Exec(IntEnum):
    """What one thread needs to run programs."""

    SCRATCH = 0
    SCRATCH_BYTES = 1
    LIST = 2  # i64[MAX_RESIDENT]: suspended programs of the job at hand
    COUNT = 3
    IDLE = 4  # rounds in which nothing could run
    IDLE_SINCE = 5
    BUDGET = 6  # polls until the clock is read again
    NOW = 7
    BUSY = 8  # ns spent in programs of the waiting job at hand
    TAKEN = 9  # how many of its programs were started here


class S(IntEnum):
    """A stream."""

    # written by those who enqueue
    GATE = 0  # i32 spin lock around the next two words; held for nanoseconds, never while anything runs
    SUBMITTED = 1
    TAIL = 2
    # written by whoever runs the stream
    COMPLETED = 8  # i64; its low half is what waiters sleep on
    RUNNER = 16  # i32: 1 while a thread runs operations of the stream
    CURRENT = 17  # the operation being run, 0 between operations
    CURSOR = 18  # the operation taken last; its `next` is what comes next
    PHASE = 19  # progress within CURRENT, so that another thread can go on with it
    NODE = 20  # progress within a graph
    JOB = 21  # job slot of a launch that has helpers
    ARENA = 22  # frames for launches of the current top-level operation
    TAKEN = 23  # programs of a plain launch that the caller ran itself, to measure their cost
    BEGAN = 24  # clock at the start of a launch or a wait
    FAILED = 25  # sequence number of the operation that failed; 0 for a stream in order
    SKIP_UNTIL = 26  # after a fault was taken: operations up to this one are skipped
    HISTORY_NEXT = 27
    PYTHON_FAILED = 28  # what a host callback reports
    WAITERS = 32  # i32: threads asleep on COMPLETED
    WAKE = 40  # i32: what the stream's thread sleeps on
    SLEEPING = 41  # i32
    STOP = 42  # i32
    TID = 43  # the stream's thread, as the system counts
    DEVICE = 48
    NO_ABORT = 49  # an i32 that is always 0
    CONTEXT = 64
    FAULT = 96
    WORDS = 112
    EXECUTOR = 128
    PRIVATE_JOB = 160
    HISTORY = 192  # pairs (failed, last skipped)


HISTORY: Final = 16


class Kind(IntEnum):
    """Kinds of operations."""

    LAUNCH = 1
    COPY = 2
    FILL = 3
    RECORD = 4
    WAIT_EVENT = 5
    WRITE_VALUE = 6
    WAIT_VALUE = 7
    PYTHON = 8
    GRAPH = 9


class C(IntEnum):
    """An operation. Words from A on mean something else for each kind."""

    NEXT = 0
    SEQ = 1
    KIND = 2
    FLAGS = 3  # 1: Python has work to do when it has run, whether it failed or not
    A = 4
    B = 5
    C = 6
    D = 7
    E = 8
    F = 9
    ARENA = 10  # launches and graphs
    # launches
    MODULE = 4
    ARGS = 5
    ABORT = 6
    TIMEOUT = 7
    PRINT = 8
    PROGRAMS = 9
    GRID = 11


ARGS: Final = 14  # argument block of a launch, where it fits
COMMAND_WORDS: Final = 128

DEVICE_BYTES: Final = (Dev.JOB0 + 32 * JOBS) * 8
STREAM_BYTES: Final = (S.HISTORY + 2 * HISTORY) * 8
EXECUTOR_BYTES: Final = 2 * CACHE_LINE + MAX_RESIDENT * 8


class Result(IntEnum):
    """What native calls return."""

    DONE = 0
    SLICE = 1  # the time slice is over; call again
    FAULTED = 2
    SKIPPED = 3
    BUSY = 4  # the stream is not idle
    NEEDS_THREAD = 5  # only the stream's thread can go on: a host callback
    PYTHON = 6
    STOPPED = 7
    IDLE = 8
