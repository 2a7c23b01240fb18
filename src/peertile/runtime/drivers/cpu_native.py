"""The native runtime of the cpu driver: what runs without the interpreter lock. Emits text; loads nothing itself.

Three kinds of threads run it: a *caller* (a Python thread in `run_inline` or `host_wait`), a stream's own thread
(`stream_loop`) and the workers of a device (`worker_loop`). A stream is run by one thread at a time, whoever holds
S.RUNNER; all progress is in the stream, so that another thread can go on where one left off. The design:

- Programs are claimed in chunks from one word, {epoch | chunks left}. The caller takes part and completion counts
  programs, so a worker that is late or asleep never delays a launch. A worker reads what a job is only after it
  has claimed a chunk of it: from then on the job cannot end without that chunk.
- Programs that wait are coroutines. An executor starts all programs that nobody has claimed, then goes round
  those it started, testing the polled words itself and resuming the satisfied ones. So a launch needs no thread
  per program, and any number of executors (also one) makes progress.
- When nothing can run: pause, then yield, then sleep for a growing time. Not on a futex: the words polled are
  many, and are stored to by kernels of other processes that know nothing of who sleeps. The sleep is at most a
  sixteenth of the time waited so far (50 us to 1 ms), so it costs a long wait 6 % and a short one nothing.
- Lost wake-ups: whoever goes to sleep announces it (seq_cst) and looks again; whoever has news publishes it
  (seq_cst) and then looks for sleepers.

Deadlines are CLOCK_MONOTONIC in ns; a call with one returns SLICE soon after it, except while a single chunk of
a plain kernel or one copy runs.
"""

from __future__ import annotations

import platform
import sys
from typing import Final

from peertile.memory_model import Cmp
from peertile.runtime.driver import FaultKind
from peertile.runtime.drivers.cpu_emit import Function, Module, Value
from peertile.runtime.drivers.cpu_layout import (
    HISTORY,
    JOBS,
    C,
    Context,
    Dev,
    Exec,
    Fault,
    Job,
    Kind,
    Mod,
    Poll,
    Result,
    S,
)

__all__ = ["native_module"]

_FOREVER: Final = (1 << 63) - 1
_LOW: Final = 0xFFFFFFFF
_YIELDS: Final = 200  # yields before a poll sleeps
_TAIL_YIELDS: Final = 4000  # the same where a helper ends its last chunk: work that is known to be running
_NAP_MIN: Final = 50_000
_NAP_MAX: Final = 1_000_000
_POLLS_PER_CLOCK: Final = 256
_DIRECT_NS: Final = 5_000  # a grid worth less is run by its caller alone
_WAKE_NS: Final = 50_000  # a grid worth less is not worth waking a worker (25-55 us)
_SLICED_NS: Final = 5_000_000  # a grid worth more is run in chunks, with a look at the deadline between
_SLEEP_CAP: Final = 10_000_000_000  # sleepers look again now and then, whatever happens

# Phases of an operation, kept in S.PHASE.
_FRESH, _CLAIM, _TAIL, _WAITING, _ASK_PYTHON, _IN_PYTHON = range(6)

_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98}
_PAUSE: Final = {"x86_64": "call void @llvm.x86.sse2.pause()", "aarch64": "call void @llvm.aarch64.hint(i32 1)"}


def native_module() -> Module:
    """All functions, for this platform. The text of the module is the key of its cached object."""
    m = Module()
    _platform(m)
    _polling(m)
    _programs(m)
    _waiting(m)
    _workers(m)
    _operations(m)
    _streams(m)
    return m


# ---------------------------------------------------------------------------------------------- platform


def _platform(m: Module) -> None:
    machine = platform.machine()
    m.declare("llvm.memmove.p0.p0.i64", "void", "ptr", "ptr", "i64", "i1")
    m.declare("llvm.memset.p0.i64", "void", "ptr", "i8", "i64", "i1")
    m.declare("llvm.cttz.i64", "i64", "i64", "i1")
    m.declare("clock_gettime", "i32", "i32", "ptr")
    m.declare("nanosleep", "i32", "ptr", "ptr")
    m.declare("sched_yield", "i32")
    m.declare("mmap", "ptr", "ptr", "i64", "i32", "i32", "i32", "i64")
    m.declare("munmap", "i32", "ptr", "i64")
    if machine == "x86_64":
        m.declare("llvm.x86.sse2.pause", "void")
    elif machine == "aarch64":
        m.declare("llvm.aarch64.hint", "void", "i32")

    f = m.define("pause", "void")
    if machine in _PAUSE:
        f.line(_PAUSE[machine])
    f.ret()

    clock = 1 if sys.platform == "linux" else 6  # CLOCK_MONOTONIC
    f = m.define("clock", "i64")
    seconds, _ = _timespec(f)
    f.call("clock_gettime", clock, seconds)
    f.ret(f.load(seconds) * 1_000_000_000 + f.load(seconds, 1))

    f = m.define("nap", "void", "i64 ns")
    time, _ = _timespec(f, f["ns"])
    f.call("nanosleep", time, 0)
    f.ret()

    # Sleep while the i32 is `expected`, at most `ns`; may return early for no reason.
    f = m.define("sleep_on", "void", "ptr word, i32 expected, i64 ns")
    wake = m.define("wake_all", "void", "ptr word")
    if sys.platform == "linux" and machine in _SYS_FUTEX:
        m.declare("syscall", "i64", "i64", "i64", "i64", "i64", "i64", "i64", "i64")
        private = 128
        number = _SYS_FUTEX[machine]
        time, _ = _timespec(f, f["ns"].min(_SLEEP_CAP))
        f.call("syscall", number, f["word"].to("i64"), 0 | private, f["expected"].to("i64"), time.to("i64"), 0, 0)
        wake.call("syscall", number, wake["word"].to("i64"), 1 | private, 0x7FFFFFFF, 0, 0, 0)
    else:  # no futex: look again after a short sleep; nobody needs to be woken
        f.call("nap", f["ns"].min(_NAP_MIN * 4))
    f.ret()
    wake.ret()


def _timespec(f: Function, ns: Value | int = 0) -> tuple[Value, Value]:
    """Address of a struct timespec on the stack (seconds, nanoseconds), and of its second word."""
    base = f.buffer(2)
    value = f.value(ns)
    if not isinstance(ns, int):
        value = value.max(1)
        seconds = value // 1_000_000_000
        f.store(base, 0, seconds)
        f.store(base, 1, value - seconds * 1_000_000_000)
    return base, f.at(base, 1)


# ----------------------------------------------------------------------------------------------- polling


def _polling(m: Module) -> None:
    # The word as an i64: sign-extended if signed, zero-extended otherwise. width = bits | signed << 8.
    f = m.define("seen", "i64", "ptr word, i64 width")
    with f.if_((f["width"] & 0xFF).eq(64)):
        f.ret(f.load(f["word"], order="acquire"))
    narrow = f.load(f["word"], type="i32", order="acquire")
    f.ret((f["width"] < 256).select(narrow.to("i64"), narrow.to("i64", signed=True)))

    f = m.define("holds", "i1", "i64 seen, i64 expected, i64 cmp, i64 width")
    is32 = (f["width"] & 0xFF).eq(32)
    signed = f["width"] >= 256
    low = f["expected"].to("i32")
    expected = is32.select(signed.select(low.to("i64", signed=True), low.to("i64")), f["expected"])
    cmp = f["cmp"]
    index = {c: i for i, c in enumerate(Cmp)}
    with f.if_(cmp.eq(index[Cmp.AT_LEAST])):
        distance = f["seen"] - expected
        f.ret(is32.select(distance.to("i32").to("i64", signed=True), distance) >= 0)
    with f.if_(cmp.eq(index[Cmp.EQ])):
        f.ret(f["seen"].eq(expected))
    with f.if_(cmp.eq(index[Cmp.NE])):
        f.ret(f["seen"].ne(expected))
    flip = signed.select(0, -(1 << 63))  # unsigned order is signed order with the top bit turned over
    a = f.emit("i64", f"xor i64 {f['seen'].text}, {flip.text}")
    b = f.emit("i64", f"xor i64 {expected.text}, {flip.text}")
    with f.if_(cmp.eq(index[Cmp.GE])):
        f.ret(a >= b)
    with f.if_(cmp.eq(index[Cmp.LE])):
        f.ret(a <= b)
    with f.if_(cmp.eq(index[Cmp.GT])):
        f.ret(a > b)
    f.ret(a < b)

    # One step of back-off; `e` counts the steps. Returns the clock if it was read, else 0.
    f = m.define("back_off", "i64", "ptr e, ptr device, i64 yields, i64 deadline")
    e = f["e"]
    idle = f.load(e, Exec.IDLE) + 1
    f.store(e, Exec.IDLE, idle)
    spins = f.load(f["device"], Dev.SPINS)
    with f.if_(idle <= spins):
        f.call("pause")
        f.ret(0)
    with f.if_(f.load(e, Exec.IDLE_SINCE).eq(0)):
        now = f.call("clock")
        f.store(e, Exec.IDLE_SINCE, now)
        f.ret(now)
    with f.if_(idle <= spins + f["yields"]):
        f.call("sched_yield")
        f.ret(0)
    now = f.call("clock")
    ns = ((now - f.load(e, Exec.IDLE_SINCE)) >> 4).max(_NAP_MIN).min(_NAP_MAX)
    f.call("nap", ns.min((f["deadline"] - now).max(1)))
    f.ret(f.call("clock"))

    # Be the one that reports: the first fault of a launch wins.
    fields = (Fault.KIND, Fault.PROGRAM, Fault.PLACE, Fault.GOT, Fault.LIMIT, Fault.ADDRESS, Fault.SLOT)
    f = m.define("report", "void", "ptr record, " + ", ".join(f"i64 {x.name.lower()}" for x in fields))
    with f.if_(f.cas(f["record"], Fault.STATE, 0, 1)):
        for field in fields:
            f.store(f["record"], field, f[field.name.lower()])
        f.store(f["record"], Fault.STATE, 2, order="release")
    f.ret()


def _awake(f: Function, e: Value) -> None:
    """Start a new back-off."""
    f.store(e, Exec.IDLE, 0)
    f.store(e, Exec.IDLE_SINCE, 0)


# ------------------------------------------------------------------------------- claims, plain programs


def _programs(m: Module) -> None:
    f = m.define("claim", "i64", "ptr job")  # the next chunk, -1 when all are taken
    with f.loop():
        word = f.load(f["job"], Job.CLAIM, order="acquire")
        left = word & _LOW
        with f.if_(left.eq(0)):
            f.ret(-1)
        chunks = f.load(f["job"], Job.CHUNKS, order="monotonic")
        f.stop_if(f.cas(f["job"], Job.CLAIM, word, word - 1))
    f.ret(chunks - left)

    f = m.define("has_scratch", "i1", "ptr e, i64 nbytes")
    e, nbytes = f["e"], f["nbytes"]
    capacity = f.load(e, Exec.SCRATCH_BYTES)
    with f.if_(capacity >= nbytes):
        f.ret(1)
    with f.if_(capacity > 0):
        f.call("munmap", f.load(e, Exec.SCRATCH, "ptr"), capacity)
        f.store(e, Exec.SCRATCH_BYTES, 0)
    read_write, private_anonymous = 3, 0x22 if sys.platform == "linux" else 0x1002
    new = f.call("mmap", 0, nbytes, read_write, private_anonymous, -1, 0)
    with f.if_(new.to("i64").eq(-1)):
        f.ret(0)
    f.store(e, Exec.SCRATCH, new)
    f.store(e, Exec.SCRATCH_BYTES, nbytes)
    f.ret(1)

    f = m.define("run_range", "void", "ptr e, ptr module, ptr args, ptr ctx, i64 begin, i64 end")
    function = f.load(f["module"], Mod.RANGE, "ptr")
    f.call_address(function, "void", f["args"], f["ctx"], f["begin"], f["end"], f.load(f["e"], Exec.SCRATCH, "ptr"))
    f.ret()

    # Run chunk `i` of a plain job; the result is how many programs that were.
    f = m.define("run_chunk", "i64", "ptr e, ptr job, i64 i")
    job = f["job"]
    chunk = f.load(job, Job.CHUNK)
    begin = f["i"] * chunk
    end = (begin + chunk).min(f.load(job, Job.PROGRAMS))
    module, ctx, args = (f.load(job, w, "ptr") for w in (Job.MODULE, Job.CONTEXT, Job.ARGS))
    scratch = f.load(module, Mod.SCRATCH)
    with f.if_(f.call("has_scratch", f["e"], scratch)) as able:
        f.call("run_range", f["e"], module, args, ctx, begin, end)
    with able.otherwise():  # a claim cannot be given back
        f.call("report", f.load(ctx, Context.FAULT, "ptr"), FaultKind.DEVICE, begin, -1, 0, scratch, 0, 0)
    f.rmw("add", job, Job.DONE, end - begin)
    f.ret(end - begin)

    f = m.define("set_cost", "void", "ptr module, i64 ns, i64 programs")
    with f.if_(f["programs"] > 0):
        new = (f["ns"] // f["programs"]).max(1)
        old = f.load(f["module"], Mod.COST, order="monotonic")
        mean = ((old * 3 + new) >> 2).max(1)
        f.store(f["module"], Mod.COST, old.eq(0).select(new, mean), order="monotonic")
    f.ret()


# ------------------------------------------------------------------------------------ waiting programs


def _leaving(f: Function, ctx: Value) -> tuple[Value, Value]:
    """(i1 the abort word is set, i1 programs must leave: aborted or faulted)."""
    aborted = f.load(f.load(ctx, Context.ABORT, "ptr"), type="i32", order="acquire").ne(0)
    faulted = f.load(f.load(ctx, Context.FAULT, "ptr"), Fault.STATE, order="monotonic").ne(0)
    return aborted, aborted | faulted


def _waiting(m: Module) -> None:
    # Start the programs of chunk `i`; those that suspend go to the executor's list.
    f = m.define("start_chunk", "void", "ptr e, ptr job, i64 i")
    e, job = f["e"], f["job"]
    chunk = f.load(job, Job.CHUNK)
    begin = f["i"] * chunk
    end = (begin + chunk).min(f.load(job, Job.PROGRAMS))
    module, ctx, args, arena = (f.load(job, w, "ptr") for w in (Job.MODULE, Job.CONTEXT, Job.ARGS, Job.ARENA))
    stride = f.load(job, Job.STRIDE)
    aborted, leaving = _leaving(f, ctx)
    with f.if_(leaving):  # what has not started never does
        with f.if_(aborted):
            f.call("report", f.load(ctx, Context.FAULT, "ptr"), FaultKind.ABORTED, begin, -1, 0, 0, 0, 0)
        f.rmw("add", job, Job.DONE, end - begin)
        f.ret()
    start = f.load(module, Mod.START, "ptr")
    frame_bytes = f.load(module, Mod.FRAME)
    suspended = f.load(e, Exec.LIST, "ptr")
    held, ended = f.var("i64", f.load(e, Exec.COUNT)), f.var("i64", 0)
    with f.range(end - begin) as k:
        program = begin + k
        frame = f.offset(arena, program * stride)
        f.store(frame, 0, 0)  # a coroutine without suspension points never writes its frame
        f.call_address(start, "void", args, ctx, program, f.offset(frame, frame_bytes), frame)
        with f.if_(f.load(frame).eq(0)) as done:
            ended.add(1)
        with done.otherwise():
            f.store(suspended, held.v, program)
            held.add(1)
    f.store(e, Exec.COUNT, held)
    f.store(e, Exec.TAKEN, f.load(e, Exec.TAKEN) + (end - begin))
    f.rmw("add", job, Job.DONE, ended)
    f.ret()

    # Run what can be run of a waiting job: DONE when nothing of it is left here, SLICE at the deadline.
    f = m.define("run_waiting", "i64", "ptr e, ptr job, ptr device, i64 deadline")
    e, job, device, deadline = f["e"], f["job"], f["device"], f["deadline"]
    module, ctx, arena = (f.load(job, w, "ptr") for w in (Job.MODULE, Job.CONTEXT, Job.ARENA))
    stride, promise = f.load(job, Job.STRIDE), f.load(module, Mod.PROMISE)
    record = f.load(ctx, Context.FAULT, "ptr")
    timeout = f.load(ctx, Context.TIMEOUT)
    suspended = f.load(e, Exec.LIST, "ptr")
    now = f.var("i64", 0)

    def read_clock() -> None:
        now.set(f.call("clock"))
        f.store(ctx, Context.NOW, now, order="monotonic")
        f.store(e, Exec.BUDGET, _POLLS_PER_CLOCK)

    read_clock()
    _awake(f, e)
    with f.loop():
        i = f.call("claim", job)
        f.stop_if(i < 0)
        before = now.v
        f.call("start_chunk", e, job, i)
        read_clock()
        f.store(e, Exec.BUSY, f.load(e, Exec.BUSY) + (now.v - before))
        with f.if_(now.v > deadline):
            f.ret(Result.SLICE)
    with f.loop():
        count = f.load(e, Exec.COUNT)
        with f.if_(count.eq(0)):
            f.ret(Result.DONE)
        with f.if_(f.load(e, Exec.BUDGET) <= 0):
            read_clock()
            with f.if_(now.v > deadline):
                f.ret(Result.SLICE)
        aborted, leaving = _leaving(f, ctx)
        kept, resumed = f.var("i64", 0), f.var("i64", 0)
        with f.range(count) as k:
            program = f.load(suspended, k)
            frame = f.offset(arena, program * stride)
            poll = f.offset(frame, promise)
            outcome = f.var("i64", -1)
            with f.if_(leaving) as leave:
                outcome.set(1)
                with f.if_(aborted):
                    _report_poll(f, record, FaultKind.ABORTED, program, poll)
            with leave.otherwise():
                word = f.load(poll, Poll.ADDRESS, "ptr")
                width = f.load(poll, Poll.WIDTH)
                with f.if_(word.to("i64").eq(0)) as always:
                    outcome.set(0)
                with always.otherwise():
                    seen = f.call("seen", word, width)
                    holds = f.call("holds", seen, f.load(poll, Poll.EXPECTED), f.load(poll, Poll.CMP), width)
                    with f.if_(holds) as ready:
                        outcome.set(0)
                    with ready.otherwise():
                        since = f.load(poll, Poll.START)
                        with f.if_(since.eq(0)) as first:
                            f.store(poll, Poll.START, now)
                        with first.otherwise(), f.if_((now.v - since) > timeout):
                            outcome.set(2)
                            _report_poll(f, record, FaultKind.WAIT_TIMEOUT, program, poll, seen)
            keep = f.var("i64", 1)
            with f.if_(outcome.v >= 0):
                f.store(poll, Poll.OUTCOME, outcome)
                f.store(poll, Poll.START, 0)  # the next wait of this program has its own bound
                f.call_address(f.load(frame, 0, "ptr"), "void", frame, convention="fastcc")
                resumed.add(1)
                keep.set(f.load(frame).ne(0).to("i64"))
            with f.if_(keep.v.ne(0)):
                f.store(suspended, kept, program)
                kept.add(1)
        f.store(e, Exec.COUNT, kept)
        with f.if_(kept.v < count):
            f.rmw("add", job, Job.DONE, count - kept.v)
        f.store(e, Exec.BUDGET, f.load(e, Exec.BUDGET) - count)
        with f.if_(resumed.v.ne(0)) as some:
            _awake(f, e)
            with f.if_(count > 1):  # what one program costs matters only where there are several
                before = now.v
                read_clock()
                f.store(e, Exec.BUSY, f.load(e, Exec.BUSY) + (now.v - before))
                with f.if_(now.v > deadline):
                    f.ret(Result.SLICE)
        with some.otherwise():
            f.store(e, Exec.IDLE, f.load(e, Exec.IDLE) + (count >> 3))  # a round over many is a pause by itself
            read = f.call("back_off", e, device, _YIELDS, deadline)
            with f.if_(read.ne(0)):
                now.set(read)
                f.store(ctx, Context.NOW, now, order="monotonic")
                f.store(e, Exec.BUDGET, _POLLS_PER_CLOCK)
                with f.if_(read > deadline):
                    f.ret(Result.SLICE)


def _report_poll(
    f: Function, record: Value, kind: FaultKind, program: Value, poll: Value, seen: Value | int = 0
) -> None:
    place, expected, address, slot = (f.load(poll, w) for w in (Poll.PLACE, Poll.EXPECTED, Poll.ADDRESS, Poll.SLOT))
    f.call("report", record, kind, program, place, seen, expected, address, slot)


# ------------------------------------------------------------------------------------------ job slots


def _workers(m: Module) -> None:
    # Take a free job slot: its index, or -1.
    f = m.define("take_slot", "i64", "ptr device")
    with f.loop():
        free = f.load(f["device"], Dev.SLOTS, order="monotonic")
        with f.if_(free.eq(0)):
            f.ret(-1)
        f.stop_if(f.cas(f["device"], Dev.SLOTS, free, free & (free - 1)))
    f.ret(f.call("llvm.cttz.i64", free, 1))

    # Open a job, whose other words are set, for claims.
    f = m.define("open_job", "void", "ptr job, i64 chunks")
    epoch = f.load(f["job"], Job.CLAIM, order="monotonic") >> 32
    f.store(f["job"], Job.DONE, 0, order="monotonic")
    f.store(f["job"], Job.CHUNKS, f["chunks"], order="monotonic")
    f.store(f["job"], Job.CLAIM, ((epoch + 1) << 32) | f["chunks"], order="release")
    f.ret()

    f = m.define("call_workers", "void", "ptr device, i1 wake")
    f.rmw("add", f["device"], Dev.EPOCH, 1, "i32")
    with f.if_(f["wake"]), f.if_(f.load(f["device"], Dev.SLEEPERS, "i32", "seq_cst").ne(0)):
        f.call("wake_all", f.at(f["device"], Dev.EPOCH))
    f.ret()

    # Take part in a job if a chunk of it is left: whether one was.
    f = m.define("help", "i1", "ptr e, ptr job, ptr device")
    e, job = f["e"], f["job"]
    with f.if_((f.load(job, Job.CLAIM, order="acquire") & _LOW).eq(0)):
        f.ret(0)
    i = f.var("i64", f.call("claim", job))
    with f.if_(i.v < 0):
        f.ret(0)
    module = f.load(job, Job.MODULE, "ptr")
    with f.if_(f.load(module, Mod.WAITS).ne(0)):
        f.call("start_chunk", e, job, i)
        f.call("run_waiting", e, job, f["device"], _FOREVER)
        f.ret(1)
    with f.loop():
        f.call("run_chunk", e, job, i)
        i.set(f.call("claim", job))
        f.stop_if(i.v < 0)
    f.ret(1)

    f = m.define("worker_loop", "void", "ptr e, ptr device", exported=True)
    e, device = f["e"], f["device"]
    idle = f.var("i64", 0)
    with f.loop():
        with f.if_(f.load(device, Dev.STOP, "i32", "monotonic").ne(0)):
            f.ret()
        epoch = f.load(device, Dev.EPOCH, "i32", "seq_cst")
        found = f.var("i64", 0)
        with f.range(JOBS) as k:
            job = f.at(device, k * 32 + Dev.JOB0)
            with f.if_(f.call("help", e, job, device)):
                found.set(1)
        with f.if_(found.v.ne(0)) as work:
            idle.set(0)
        with work.otherwise():
            idle.add(1)
            with f.if_(idle.v <= 2000) as spin:
                f.call("pause")
            with spin.otherwise():
                with f.if_(idle.v <= 2020) as polite:
                    f.call("sched_yield")
                with polite.otherwise():
                    f.rmw("add", device, Dev.SLEEPERS, 1, "i32")
                    f.call("sleep_on", f.at(device, Dev.EPOCH), epoch, _FOREVER)
                    f.rmw("sub", device, Dev.SLEEPERS, 1, "i32")
                    with f.if_(f.load(device, Dev.EPOCH, "i32", "seq_cst").ne(epoch)):
                        idle.set(0)

    f = m.define("stop_workers", "void", "ptr device", exported=True)
    f.store(f["device"], Dev.STOP, 1, "i32", "seq_cst")
    f.call("call_workers", f["device"], 1)
    f.ret()


# ----------------------------------------------------------------------------------------- operations


def _operations(m: Module) -> None:
    f = m.define("fail", "void", "ptr s")  # the record is written; the stream's operation has failed
    s = f["s"]
    current = f.load(s, S.CURRENT, "ptr")
    f.store(s, S.FAULT + Fault.NODE, f.load(current, C.KIND).eq(Kind.GRAPH).select(f.load(s, S.NODE), -1))
    f.store(s, S.FAILED, f.load(current, C.SEQ), order="release")
    f.ret()

    f = m.define("launch", "i64", "ptr s, ptr c, i64 deadline")
    s, c, deadline = f["s"], f["c"], f["deadline"]
    e, ctx, device = f.at(s, S.EXECUTOR), f.at(s, S.CONTEXT), f.load(s, S.DEVICE, "ptr")
    module, args = f.load(c, C.MODULE, "ptr"), f.load(c, C.ARGS, "ptr")
    n = f.load(c, C.PROGRAMS)
    waits = f.load(module, Mod.WAITS).ne(0)
    record = f.at(s, S.FAULT)

    def finish() -> None:
        with f.if_(f.load(record, Fault.STATE, order="acquire").ne(0)):
            f.call("fail", s)
        f.ret(Result.DONE)

    with f.if_(f.load(s, S.PHASE).eq(_FRESH)):
        with f.if_(n.eq(0)):
            f.ret(Result.DONE)
        for axis in range(3):
            f.store(ctx, Context.GRID0 + axis, f.load(c, C.GRID + axis))
        f.store(ctx, Context.PROGRAMS, n)
        abort = f.load(c, C.ABORT, "ptr")
        none = f.at(s, S.NO_ABORT)
        f.store(ctx, Context.ABORT, abort.to("i64").eq(0).select(none, abort, "ptr"))
        f.store(ctx, Context.TIMEOUT, f.load(c, C.TIMEOUT))
        f.store(ctx, Context.PRINT, f.load(c, C.PRINT))
        f.store(ctx, Context.SEQUENCE, f.load(f.load(s, S.CURRENT, "ptr"), C.SEQ))
        for k in range(8):
            f.store(s, S.WORDS + k, 0)
        scratch = f.load(module, Mod.SCRATCH)
        with f.if_(waits.eq(0)), f.if_(f.call("has_scratch", e, scratch).eq(0)):
            f.call("report", record, FaultKind.DEVICE, -1, -1, 0, scratch, 0, 0)
            finish()
        with f.if_(waits.eq(0)), f.if_(n.eq(1)):  # the shortest way: no job, no clock
            f.call("run_range", e, module, args, ctx, 0, 1)
            finish()
        cost = f.load(module, Mod.COST, order="monotonic") * n
        helpers = f.load(device, Dev.WORKERS)
        known = cost.ne(0)
        alone = helpers.eq(0) | n.eq(1) | (known & (cost < _DIRECT_NS))
        with f.if_(waits.eq(0)), f.if_(alone), f.if_(known & (cost < _SLICED_NS)):
            before = f.call("clock")
            f.call("run_range", e, module, args, ctx, 0, n)
            f.call("set_cost", module, f.call("clock") - before, n)
            finish()
        slot = f.var("i64", -1)
        with f.if_(alone.eq(0)):
            slot.set(f.call("take_slot", device))
        f.store(s, S.JOB, slot)
        shared = slot.v >= 0
        in_slot, in_stream = f.at(device, slot.v * 32 + Dev.JOB0), f.at(s, S.PRIVATE_JOB)
        job = shared.select(in_slot, in_stream, "ptr")
        parts = shared.select((helpers + 1) * 8, 64)
        chunk = (n // parts).max(1)
        f.store(job, Job.MODULE, module)
        f.store(job, Job.CONTEXT, ctx)
        f.store(job, Job.ARGS, args)
        f.store(job, Job.PROGRAMS, n)
        f.store(job, Job.CHUNK, chunk)
        f.store(job, Job.ARENA, f.load(s, S.ARENA))
        f.store(job, Job.STRIDE, f.load(module, Mod.FRAME) + scratch)
        f.call("open_job", job, (n + (chunk - 1)) // chunk)
        with f.if_(shared):
            f.call("call_workers", device, known.eq(0) | (cost > _WAKE_NS))
        f.store(s, S.TAKEN, 0)
        f.store(s, S.BEGAN, f.call("clock"))
        f.store(e, Exec.COUNT, 0)
        f.store(e, Exec.BUSY, 0)
        f.store(e, Exec.TAKEN, 0)
        _awake(f, e)
        f.store(s, S.PHASE, waits.select(_WAITING, _CLAIM))
    slot_index = f.load(s, S.JOB)
    is_shared = slot_index >= 0
    in_slot, in_stream = f.at(device, slot_index * 32 + Dev.JOB0), f.at(s, S.PRIVATE_JOB)
    job = is_shared.select(in_slot, in_stream, "ptr")
    with f.if_(f.load(s, S.PHASE).eq(_CLAIM)):
        now = f.var("i64", f.load(s, S.BEGAN))
        with f.loop():
            i = f.call("claim", job)
            f.stop_if(i < 0)
            f.store(s, S.TAKEN, f.load(s, S.TAKEN) + f.call("run_chunk", e, job, i))
            now.set(f.call("clock"))
            with f.if_(now.v > deadline):
                f.ret(Result.SLICE)
        f.call("set_cost", module, now.v - f.load(s, S.BEGAN), f.load(s, S.TAKEN))
        _awake(f, e)
        f.store(s, S.PHASE, _TAIL)
    with f.if_(f.load(s, S.PHASE).eq(_WAITING)):
        with f.if_(f.call("run_waiting", e, job, device, deadline).eq(Result.SLICE)):
            f.ret(Result.SLICE)
        with f.if_(n > 1):
            f.call("set_cost", module, f.load(e, Exec.BUSY), f.load(e, Exec.TAKEN))
        _awake(f, e)
        f.store(s, S.PHASE, _TAIL)
    with f.loop():
        f.stop_if(f.load(job, Job.DONE, order="acquire").eq(n))
        read = f.call("back_off", e, device, _TAIL_YIELDS, deadline)
        with f.if_(read > deadline):
            f.ret(Result.SLICE)
    with f.if_(is_shared):
        bit = f.emit("i64", f"shl i64 1, {slot_index.text}")
        f.rmw("or", device, Dev.SLOTS, bit)
    finish()

    f = m.define("fill", "void", "ptr dst, i64 pattern, i64 nbytes")
    words = f["nbytes"] >> 3
    with f.range(words) as i:
        f.line(f"store i64 {f['pattern'].text}, ptr {f.at(f['dst'], i).text}, align 1")
    done = words << 3
    rest = f.var("i64", f["pattern"])
    with f.range(f["nbytes"] - done) as i:  # little-endian: the low byte comes first
        f.line(f"store i8 {rest.v.to('i8').text}, ptr {f.offset(f['dst'], done + i).text}")
        rest.set(rest.v >> 8)
    f.ret()

    f = m.define("wait_value", "i64", "ptr s, ptr c, i64 deadline")
    s, c = f["s"], f["c"]
    e, device = f.at(s, S.EXECUTOR), f.load(s, S.DEVICE, "ptr")
    word, expected, cmp, width = f.load(c, C.A, "ptr"), f.load(c, C.B), f.load(c, C.C), f.load(c, C.D)
    timeout, abort = f.load(c, C.E), f.load(c, C.F, "ptr")
    with f.if_(f.load(s, S.PHASE).eq(_FRESH)):
        f.store(s, S.BEGAN, f.call("clock"))
        _awake(f, e)
        f.store(s, S.PHASE, _WAITING)
    with f.loop():
        seen = f.call("seen", word, width)
        with f.if_(f.call("holds", seen, expected, cmp, width)):
            f.ret(Result.DONE)
        with f.if_(abort.to("i64").ne(0)), f.if_(f.load(abort, type="i32", order="acquire").ne(0)):
            f.call("report", f.at(s, S.FAULT), FaultKind.ABORTED, -1, -1, seen, expected, word.to("i64"), 0)
            f.call("fail", s)
            f.ret(Result.DONE)
        read = f.call("back_off", e, device, _YIELDS, f["deadline"].min(f.load(s, S.BEGAN) + timeout))
        with f.if_(read.ne(0)):
            with f.if_((read - f.load(s, S.BEGAN)) > timeout):
                f.call("report", f.at(s, S.FAULT), FaultKind.WAIT_TIMEOUT, -1, -1, seen, expected, word.to("i64"), 0)
                f.call("fail", s)
                f.ret(Result.DONE)
            with f.if_(read > f["deadline"]):
                f.ret(Result.SLICE)

    # Sleep until a stream has completed `seq`: DONE or SLICE.
    f = m.define("await_completion", "i64", "ptr s, i64 seq, i64 deadline")
    s, seq = f["s"], f["seq"]
    idle = f.var("i64", 0)
    spins = f.load(f.load(s, S.DEVICE, "ptr"), Dev.SPINS)
    with f.loop():
        with f.if_(f.load(s, S.COMPLETED, order="acquire") >= seq):
            f.ret(Result.DONE)
        idle.add(1)
        with f.if_(idle.v <= spins) as spin:
            f.call("pause")
        with spin.otherwise():
            with f.if_(idle.v <= spins + 20) as polite:
                f.call("sched_yield")
            with polite.otherwise():
                f.rmw("add", s, S.WAITERS, 1, "i32")
                seen = f.load(s, S.COMPLETED, order="seq_cst")
                left = f["deadline"] - f.call("clock")
                with f.if_((seen < seq) & (left > 0)):
                    f.call("sleep_on", f.at(s, S.COMPLETED), seen.to("i32"), left)
                f.rmw("sub", s, S.WAITERS, 1, "i32")
                with f.if_(f.call("clock") >= f["deadline"]):
                    f.ret(Result.SLICE)

    # Wait for operation B of stream A. A fault there before that operation becomes one here.
    f = m.define("wait_event", "i64", "ptr s, ptr c, i64 deadline")
    s, other, seq = f["s"], f.load(f["c"], C.A, "ptr"), f.load(f["c"], C.B)
    r = f.call("await_completion", other, seq, f["deadline"])
    with f.if_(r.ne(Result.DONE)):
        f.ret(r)
    source = f.var("i64", 0)
    failed = f.load(other, S.FAILED, order="acquire")
    with f.if_(failed.ne(0) & (failed <= seq)):
        source.set(failed)
    # May miss a fault that was taken HISTORY faults ago; never invents one.
    with f.range(HISTORY) as i:
        pair = f.at(other, (i << 1) + S.HISTORY)
        first, last = f.load(pair, 0, order="acquire"), f.load(pair, 1, order="acquire")
        whole = f.load(pair, 0, order="acquire").eq(first)
        with f.if_(whole & first.ne(0) & (first <= seq) & (seq <= last)):
            source.set(first)
    with f.if_(source.v.ne(0)):
        f.store(s, S.FAULT + Fault.SOURCE, other)
        f.store(s, S.FAULT + Fault.SOURCE_SEQ, source)
        f.call("report", f.at(s, S.FAULT), FaultKind.SKIPPED, -1, -1, 0, 0, 0, 0)
        f.call("fail", s)
    f.ret(Result.DONE)


# -------------------------------------------------------------------------------------------- streams


def _streams(m: Module) -> None:
    # Run or go on with one operation: DONE (also when it failed), SLICE, NEEDS_THREAD or PYTHON.
    f = m.define("step", "i64", "ptr s, ptr c, i64 deadline, i1 thread")
    s, c, deadline = f["s"], f["c"], f["deadline"]
    kind, phase = f.load(c, C.KIND), f.load(s, S.PHASE)
    with f.if_(phase.eq(_IN_PYTHON)):
        with f.if_(f.load(s, S.PYTHON_FAILED).ne(0)):
            with f.if_(f.load(s, S.FAILED).eq(0)):
                f.call("report", f.at(s, S.FAULT), FaultKind.CALLBACK, -1, -1, 0, 0, 0, 0)
                f.call("fail", s)
            f.store(s, S.PYTHON_FAILED, 0)
        f.ret(Result.DONE)
    with f.if_(phase.ne(_ASK_PYTHON)):
        result = f.var("i64", Result.DONE)
        with f.if_(kind.eq(Kind.LAUNCH)):
            result.set(f.call("launch", s, c, deadline))
        with f.if_(kind.eq(Kind.COPY)):
            f.copy_bytes(f.load(c, C.A, "ptr"), f.load(c, C.B, "ptr"), f.load(c, C.C))
        with f.if_(kind.eq(Kind.FILL)):
            f.call("fill", f.load(c, C.A, "ptr"), f.load(c, C.B), f.load(c, C.C))
        with f.if_(kind.eq(Kind.RECORD)):
            f.store(f.load(c, C.A, "ptr"), 0, f.call("clock"))
        with f.if_(kind.eq(Kind.WAIT_EVENT)):
            result.set(f.call("wait_event", s, c, deadline))
        with f.if_(kind.eq(Kind.WRITE_VALUE)):
            word, value = f.load(c, C.A, "ptr"), f.load(c, C.B)
            with f.if_(f.load(c, C.C).eq(64)) as wide:
                f.store(word, 0, value, order="release")
            with wide.otherwise():
                f.store(word, 0, value.to("i32"), "i32", "release")
        with f.if_(kind.eq(Kind.WAIT_VALUE)):
            result.set(f.call("wait_value", s, c, deadline))
        with f.if_(result.v.ne(Result.DONE)):
            f.ret(result)
        with f.if_(f.load(c, C.FLAGS).eq(0)):
            f.ret(Result.DONE)
        f.store(s, S.PHASE, _ASK_PYTHON)
    with f.if_(f["thread"].eq(0)):
        f.ret(Result.NEEDS_THREAD)
    f.store(s, S.PHASE, _IN_PYTHON)
    f.ret(Result.PYTHON)

    # The operation in S.CURRENT: nodes of a graph one by one. Same results as step.
    f = m.define("run_current", "i64", "ptr s, i64 deadline, i1 thread")
    s = f["s"]
    c = f.load(s, S.CURRENT, "ptr")
    fresh = f.load(s, S.PHASE).eq(_FRESH) & f.load(s, S.NODE).eq(0)
    skip = f.load(s, S.FAILED, order="acquire").ne(0) | (f.load(c, C.SEQ) <= f.load(s, S.SKIP_UNTIL, order="monotonic"))
    with f.if_(fresh & skip):
        f.ret(Result.DONE)
    with f.if_(f.load(c, C.KIND).ne(Kind.GRAPH)):
        f.ret(f.call("step", s, c, f["deadline"], f["thread"]))
    with f.loop():
        node = f.load(s, S.NODE)
        f.stop_if(node >= f.load(c, C.B))
        r = f.call("step", s, f.load(f.load(c, C.A, "ptr"), node, "ptr"), f["deadline"], f["thread"])
        with f.if_(r.ne(Result.DONE)):
            f.ret(r)
        f.store(s, S.PHASE, _FRESH)
        f.stop_if(f.load(s, S.FAILED).ne(0))
        f.store(s, S.NODE, node + 1)
    f.ret(Result.DONE)

    f = m.define("begin", "void", "ptr s, ptr c")
    f.store(f["s"], S.PHASE, _FRESH)
    f.store(f["s"], S.NODE, 0)
    f.store(f["s"], S.ARENA, f.load(f["c"], C.ARENA))
    f.store(f["s"], S.CURRENT, f["c"])
    f.ret()

    f = m.define("complete", "void", "ptr s")
    s = f["s"]
    seq = f.load(f.load(s, S.CURRENT, "ptr"), C.SEQ)
    f.store(s, S.CURRENT, 0)
    f.store(s, S.COMPLETED, seq, order="seq_cst")
    with f.if_(f.load(s, S.WAITERS, "i32", "seq_cst").ne(0)):
        f.call("wake_all", f.at(s, S.COMPLETED))
    f.ret()

    # Run the stream, as its runner, until `target` is complete (DONE) or nothing is left (IDLE).
    f = m.define("run", "i64", "ptr s, i64 target, i64 deadline, i1 thread")
    s = f["s"]
    with f.loop():
        with f.if_(f.load(s, S.COMPLETED, order="monotonic") >= f["target"]):
            f.ret(Result.DONE)
        with f.if_(f.load(s, S.CURRENT).eq(0)):
            following = f.load(f.load(s, S.CURSOR, "ptr"), C.NEXT, "ptr", "acquire")
            with f.if_(following.to("i64").eq(0)):
                f.ret(Result.IDLE)
            f.store(s, S.CURSOR, following)
            f.call("begin", s, following)
        r = f.call("run_current", s, f["deadline"], f["thread"])
        with f.if_(r.ne(Result.DONE)):
            f.ret(r)
        f.call("complete", s)

    f = m.define("has_work", "i1", "ptr s")
    s = f["s"]
    following = f.load(f.load(s, S.CURSOR, "ptr", "monotonic"), C.NEXT, order="seq_cst")
    f.ret((f.load(s, S.CURRENT, order="monotonic") | following).ne(0))

    f = m.define("wake_stream", "void", "ptr s", exported=True)
    f.rmw("add", f["s"], S.WAKE, 1, "i32")
    with f.if_(f.load(f["s"], S.SLEEPING, "i32", "seq_cst").ne(0)):
        f.call("wake_all", f.at(f["s"], S.WAKE))
    f.ret()

    # Stop being the runner for good. The stream's thread may have found the stream taken and gone to sleep.
    f = m.define("leave", "void", "ptr s")
    f.store(f["s"], S.RUNNER, 0, "i32", "seq_cst")
    with f.if_(f.call("has_work", f["s"]) | f.load(f["s"], S.STOP, "i32", "acquire").ne(0)):
        f.call("wake_stream", f["s"])
    f.ret()

    f = m.define("lock_gate", "void", "ptr s")
    with f.loop():
        f.stop_if(f.cas(f["s"], S.GATE, 0, 1, "i32"))
        f.call("pause")
    f.ret()

    f = m.define("next_seq", "i64", "ptr s, ptr c")
    seq = f.load(f["s"], S.SUBMITTED) + 1
    f.store(f["s"], S.SUBMITTED, seq, order="monotonic")
    f.store(f["c"], C.SEQ, seq)
    f.ret(seq)

    # Put an operation at the end of the queue: its sequence number.
    f = m.define("submit", "i64", "ptr s, ptr c", exported=True)
    s, c = f["s"], f["c"]
    f.store(c, C.NEXT, 0)
    f.call("lock_gate", s)
    seq = f.call("next_seq", s, c)
    f.store(f.load(s, S.TAIL, "ptr"), C.NEXT, c, order="seq_cst")
    f.store(s, S.TAIL, c)
    f.store(s, S.GATE, 0, "i32", "release")
    f.call("wake_stream", s)
    f.ret(seq)

    # Run an operation here and now if the stream is idle. After SLICE, host_wait goes on with it.
    f = m.define("run_inline", "i64", "ptr s, ptr c, i64 slice", exported=True)
    s, c = f["s"], f["c"]
    with f.if_(f.cas(s, S.RUNNER, 0, 1, "i32").eq(0)):
        f.ret(Result.BUSY)
    f.call("lock_gate", s)
    with f.if_(f.call("has_work", s)):
        f.store(s, S.GATE, 0, "i32", "release")
        f.call("leave", s)
        f.ret(Result.BUSY)
    seq = f.call("next_seq", s, c)
    f.call("begin", s, c)
    f.store(s, S.GATE, 0, "i32", "release")
    # The clock is read only where something may run on: one plain program cannot be left anyway.
    may_last = f.var("i64", 1)
    with f.if_(f.load(c, C.KIND).eq(Kind.LAUNCH)), f.if_(f.load(c, C.PROGRAMS).eq(1)):
        may_last.set(f.load(f.load(c, C.MODULE, "ptr"), Mod.WAITS))
    until = f.var("i64", _FOREVER)
    with f.if_(may_last.v.ne(0)):
        until.set(f.call("clock") + f["slice"])
    r = f.call("run_current", s, until, 0)
    with f.if_(r.ne(Result.DONE)):
        f.store(s, S.RUNNER, 0, "i32", "seq_cst")
        f.ret(r)
    failed = f.load(s, S.FAILED)
    skipped = failed.ne(0) | (seq <= f.load(s, S.SKIP_UNTIL, order="monotonic"))
    f.call("complete", s)
    f.call("leave", s)
    f.ret(failed.eq(seq).select(Result.FAULTED, skipped.select(Result.SKIPPED, Result.DONE)))

    # Wait until `seq` is complete, at most for `slice`; run the stream meanwhile if nobody else does.
    f = m.define("host_wait", "i64", "ptr s, i64 seq, i64 slice, i64 help", exported=True)
    s, seq = f["s"], f["seq"]
    with f.if_(f.load(s, S.COMPLETED, order="acquire") >= seq):
        f.ret(Result.DONE)
    deadline_now = f.call("clock") + f["slice"]
    with f.if_(f["help"].ne(0)), f.if_(f.cas(s, S.RUNNER, 0, 1, "i32")):
        r = f.call("run", s, seq, deadline_now, 0)
        with f.if_(r.eq(Result.SLICE)):
            f.store(s, S.RUNNER, 0, "i32", "seq_cst")  # the caller comes back, or wakes the stream's thread
            f.ret(r)
        f.call("leave", s)
        with f.if_(r.eq(Result.NEEDS_THREAD)):
            f.ret(r)
    f.ret(f.call("await_completion", s, seq, deadline_now))

    # The stream's own thread. `held`: it comes back from Python work, still the runner. PYTHON or STOPPED.
    f = m.define("stream_loop", "i64", "ptr s, i64 held", exported=True)
    s = f["s"]
    held = f.var("i64", f["held"])
    with f.loop():
        seen = f.load(s, S.WAKE, "i32", "seq_cst")
        got = f.var("i64", held)
        with f.if_(held.v.eq(0)):
            got.set(f.cas(s, S.RUNNER, 0, 1, "i32").to("i64"))
        held.set(0)
        with f.if_(got.v.ne(0)):
            r = f.call("run", s, _FOREVER, _FOREVER, 1)
            with f.if_(r.eq(Result.PYTHON)):
                f.ret(r)
            f.store(s, S.RUNNER, 0, "i32", "seq_cst")
            with f.if_(f.load(s, S.STOP, "i32", "acquire").ne(0)), f.if_(f.call("has_work", s).eq(0)):
                f.ret(Result.STOPPED)
        idle = f.var("i64", 0)
        idle.set(0)
        with f.loop():
            f.stop_if(f.load(s, S.WAKE, "i32", "seq_cst").ne(seen))
            idle.add(1)
            with f.if_(idle.v <= 100) as spin:
                f.call("pause")
            with spin.otherwise():
                with f.if_(idle.v <= 110) as polite:
                    f.call("sched_yield")
                with polite.otherwise():
                    f.store(s, S.SLEEPING, 1, "i32", "seq_cst")
                    f.call("sleep_on", f.at(s, S.WAKE), seen, _FOREVER)
                    f.store(s, S.SLEEPING, 0, "i32", "seq_cst")
                    idle.set(0)

    # Take the fault: what was enqueued so far is skipped. The record must have been read before.
    f = m.define("take_fault", "i64", "ptr s", exported=True)
    s = f["s"]
    f.call("lock_gate", s)
    last = f.load(s, S.SUBMITTED)
    index = f.load(s, S.HISTORY_NEXT)
    pair = f.at(s, ((index & (HISTORY - 1)) << 1) + S.HISTORY)
    f.store(pair, 0, 0, order="monotonic")
    f.store(pair, 1, last, order="release")
    f.store(pair, 0, f.load(s, S.FAILED), order="release")
    f.store(s, S.HISTORY_NEXT, index + 1)
    f.store(s, S.SKIP_UNTIL, last, order="monotonic")
    f.store(s, S.FAULT + Fault.STATE, 0, order="monotonic")
    f.store(s, S.FAILED, 0, order="release")
    f.store(s, S.GATE, 0, "i32", "release")
    f.ret(last)
