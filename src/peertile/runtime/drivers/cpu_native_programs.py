"""Native runtime of the cpu driver, the middle: claims, plain and waiting programs, workers.

Read `cpu_native.py` first.
"""

from __future__ import annotations

import sys
from typing import Final

from peertile.runtime.driver import FaultKind
from peertile.runtime.drivers.cpu_emit import Function, Module, Value
from peertile.runtime.drivers.cpu_layout import CPU_WORDS, JOBS, Context, Dev, Exec, Fault, Job, Mod, Poll, Result
from peertile.runtime.drivers.cpu_native_polling import FOREVER, YIELDS, awake

__all__ = ["emit_programs"]

_LOW: Final = 0xFFFFFFFF
_POLLS_PER_CLOCK: Final = 256


def emit_programs(m: Module) -> None:
    for emit in (
        _claim,
        _has_scratch,
        _run_range,
        _run_chunk,
        _set_cost,
        _start_chunk,
        _run_waiting,
        _take_slot,
        _open_job,
        _make_way,
        _call_workers,
        _help,
        _worker_loop,
        _stop_workers,
    ):
        emit(m)


def _leaving(f: Function, ctx: Value) -> tuple[Value, Value]:
    """(i1 the abort word is set, i1 programs must leave: aborted or faulted)."""
    aborted = f.load(f.load(ctx, Context.ABORT, "ptr"), type="i32", order="acquire").ne(0)
    faulted = f.load(f.load(ctx, Context.FAULT, "ptr"), Fault.STATE, order="monotonic").ne(0)
    return aborted, aborted | faulted


def _report_poll(
    f: Function, record: Value, kind: FaultKind, program: Value, poll: Value, seen: Value | int = 0
) -> None:
    place, expected, address, slot = (f.load(poll, w) for w in (Poll.PLACE, Poll.EXPECTED, Poll.ADDRESS, Poll.SLOT))
    f.call("report", record, kind, program, place, seen, expected, address, slot)


def _claim(m: Module) -> None:
    f = m.define("claim", "i64", "ptr job")  # the next chunk, -1 when all are taken
    with f.loop():
        word = f.load(f["job"], Job.CLAIM, order="acquire")
        left = word & _LOW
        with f.if_(left.eq(0)):
            f.ret(-1)
        chunks = f.load(f["job"], Job.CHUNKS, order="monotonic")
        f.stop_if(f.cas(f["job"], Job.CLAIM, word, word - 1))
    f.ret(chunks - left)


def _has_scratch(m: Module) -> None:
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


def _run_range(m: Module) -> None:
    f = m.define("run_range", "void", "ptr e, ptr module, ptr args, ptr ctx, i64 begin, i64 end")
    function = f.load(f["module"], Mod.RANGE, "ptr")
    f.call_address(function, "void", f["args"], f["ctx"], f["begin"], f["end"], f.load(f["e"], Exec.SCRATCH, "ptr"))
    f.ret()


def _run_chunk(m: Module) -> None:
    """Run chunk `i` of a plain job; the result is how many programs that were."""
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


def _set_cost(m: Module) -> None:
    f = m.define("set_cost", "void", "ptr module, i64 ns, i64 programs")
    with f.if_(f["programs"] > 0):
        new = (f["ns"] // f["programs"]).max(1)
        old = f.load(f["module"], Mod.COST, order="monotonic")
        mean = ((old * 3 + new) >> 2).max(1)
        f.store(f["module"], Mod.COST, old.eq(0).select(new, mean), order="monotonic")
    f.ret()


def _start_chunk(m: Module) -> None:
    """Start the programs of chunk `i`; those that suspend go to the executor's list."""
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


def _run_waiting(m: Module) -> None:
    """Run what can be run of a waiting job: DONE when nothing of it is left here, SLICE at the deadline."""
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
    awake(f, e)
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
        kept, resumed, worked = f.var("i64", 0), f.var("i64", 0), f.var("i64", 0)
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
                    # A loop that polls by itself: resumed every round, until its time is over.
                    outcome.set(0)
                    since = f.load(poll, Poll.START)
                    with f.if_(since.eq(0)) as first:
                        f.store(poll, Poll.START, now)
                    with first.otherwise(), f.if_((now.v - since) > timeout):
                        outcome.set(2)
                        _report_poll(f, record, FaultKind.WAIT_TIMEOUT, program, poll)
                with always.otherwise():
                    seen = f.call("seen", word, width)
                    holds = f.call("holds", seen, f.load(poll, Poll.EXPECTED), f.load(poll, Poll.CMP), width)
                    with f.if_(holds) as ready:
                        outcome.set(0)
                        worked.add(1)
                        f.store(poll, Poll.START, 0)  # the next wait of this program has its own bound
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
            with f.if_(worked.v.ne(0)) as progress:
                awake(f, e)
            with progress.otherwise():  # others may need this core for what the loops wait for
                looks = f.load(e, Exec.IDLE) + 1
                f.store(e, Exec.IDLE, looks)
                with f.if_((looks & 63).eq(0)):
                    f.call("sched_yield")
            with f.if_(count > 1):  # what one program costs matters only where there are several
                before = now.v
                read_clock()
                f.store(e, Exec.BUSY, f.load(e, Exec.BUSY) + (now.v - before))
                with f.if_(now.v > deadline):
                    f.ret(Result.SLICE)
        with some.otherwise():
            f.store(e, Exec.IDLE, f.load(e, Exec.IDLE) + (count >> 3))  # a round over many is a pause by itself
            read = f.call("back_off", e, device, YIELDS, deadline)
            with f.if_(read.ne(0)):
                now.set(read)
                f.store(ctx, Context.NOW, now, order="monotonic")
                f.store(e, Exec.BUDGET, _POLLS_PER_CLOCK)
                with f.if_(read > deadline):
                    f.ret(Result.SLICE)


def _take_slot(m: Module) -> None:
    """Take a free job slot: its index, or -1."""
    f = m.define("take_slot", "i64", "ptr device")
    with f.loop():
        free = f.load(f["device"], Dev.SLOTS, order="monotonic")
        with f.if_(free.eq(0)):
            f.ret(-1)
        f.stop_if(f.cas(f["device"], Dev.SLOTS, free, free & (free - 1)))
    f.ret(f.call("llvm.cttz.i64", free, 1))


def _open_job(m: Module) -> None:
    """Open a job, whose other words are set, for claims."""
    f = m.define("open_job", "void", "ptr job, i64 chunks")
    epoch = f.load(f["job"], Job.CLAIM, order="monotonic") >> 32
    f.store(f["job"], Job.DONE, 0, order="monotonic")
    f.store(f["job"], Job.CHUNKS, f["chunks"], order="monotonic")
    f.store(f["job"], Job.CLAIM, ((epoch + 1) << 32) | f["chunks"], order="release")
    f.ret()


def _make_way(m: Module) -> None:
    """Keep the workers off the caller's processor, which it does not leave while it works.

    Where processors are virtual, Linux does not take a halted one for idle: it puts a woken worker behind the very
    thread that woke it, and moves it away milliseconds later, when the launch is over. So the choice is taken from
    it. Only when the caller has moved since the last time: 1 us for each worker. A caller that is bound to the
    only processor there is leaves an empty set, which the system refuses.
    """
    f = m.define("make_way", "void", "ptr device")
    device = f["device"]
    if sys.platform == "linux":
        cpus = f.load(device, Dev.CPUS, "ptr", "acquire")
        with f.if_(cpus.to("i64").eq(0)):
            f.ret()
        cpu = f.call("sched_getcpu").to("i64", signed=True)
        with f.if_((cpu + 1).eq(f.load(device, Dev.CALLER_CPU, order="monotonic"))):
            f.ret()
        with f.if_(cpu.ult(CPU_WORDS * 64).eq(0)):
            f.ret()
        f.store(device, Dev.CALLER_CPU, cpu + 1, order="monotonic")
        others = f.buffer(CPU_WORDS)
        f.copy_bytes(others, cpus, f.value(CPU_WORDS * 8))
        word, bit = cpu >> 6, f.value(1) << (cpu & 63)
        f.store(others, word, f.load(others, word) - (f.load(others, word) & bit))
        tids = f.load(device, Dev.TIDS, "ptr")
        with f.range(f.load(device, Dev.WORKERS)) as k:
            f.call("sched_setaffinity", f.load(tids, k).to("i32"), CPU_WORDS * 8, others)
    f.ret()


def _call_workers(m: Module) -> None:
    f = m.define("call_workers", "void", "ptr device, i1 wake")
    f.rmw("add", f["device"], Dev.EPOCH, 1, "i32")
    with f.if_(f["wake"]), f.if_(f.load(f["device"], Dev.SLEEPERS, "i32", "seq_cst").ne(0)):
        f.call("make_way", f["device"])
        f.call("wake_all", f.at(f["device"], Dev.EPOCH))
    f.ret()


def _help(m: Module) -> None:
    """Take part in a job if a chunk of it is left: whether one was."""
    f = m.define("help", "i1", "ptr e, ptr job, ptr device")
    e, job = f["e"], f["job"]
    with f.if_((f.load(job, Job.CLAIM, order="acquire") & _LOW).eq(0)):
        f.ret(0)
    i = f.var("i64", f.call("claim", job))
    with f.if_(i.v < 0):
        f.ret(0)
    with f.loop():
        # A claimed chunk, or a suspended program, holds the job. Between two chunks it may end and its slot become
        # another launch's, so what kind of job this is has to be asked again after every claim.
        with f.if_(f.load(f.load(job, Job.MODULE, "ptr"), Mod.WAITS).ne(0)) as waits:
            f.call("start_chunk", e, job, i)
            with f.if_(f.load(e, Exec.COUNT).ne(0)):
                f.call("run_waiting", e, job, f["device"], FOREVER)
        with waits.otherwise():
            f.call("run_chunk", e, job, i)
        i.set(f.call("claim", job))
        f.stop_if(i.v < 0)
    f.ret(1)


def _worker_loop(m: Module) -> None:
    f = m.define("worker_loop", "void", "ptr e, ptr device", exported=True)
    e, device = f["e"], f["device"]
    idle = f.var("i64", 0)
    with f.loop():
        epoch = f.load(device, Dev.EPOCH, "i32", "seq_cst")
        # Behind it: who stops the workers changes the epoch last, so that is seen here or keeps them from sleeping.
        with f.if_(f.load(device, Dev.STOP, "i32", "monotonic").ne(0)):
            f.ret()
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
                    f.call("sleep_on", f.at(device, Dev.EPOCH), epoch, FOREVER)
                    f.rmw("sub", device, Dev.SLEEPERS, 1, "i32")
                    with f.if_(f.load(device, Dev.EPOCH, "i32", "seq_cst").ne(epoch)):
                        idle.set(0)


def _stop_workers(m: Module) -> None:
    f = m.define("stop_workers", "void", "ptr device", exported=True)
    f.store(f["device"], Dev.STOP, 1, "i32", "seq_cst")
    f.call("call_workers", f["device"], 1)
    f.ret()
