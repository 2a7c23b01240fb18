"""Native runtime of the cpu driver, the top: operations and the streams that run them.

Read `cpu_native.py` first.
"""

from __future__ import annotations

import sys
from typing import Final

from peertile.runtime.driver import FaultKind
from peertile.runtime.drivers.cpu_emit import Function, Module, Value
from peertile.runtime.drivers.cpu_layout import (
    ARGS,
    CPU_WORDS,
    HISTORY,
    C,
    Context,
    Dev,
    Exec,
    Fault,
    Job,
    Kind,
    Mod,
    Result,
    S,
)
from peertile.runtime.drivers.cpu_native_polling import FOREVER, YIELDS, awake

__all__ = ["emit_streams"]

_TAIL_YIELDS: Final = 4000  # yields before a sleep where a helper ends its last chunk: work known to be running
_DIRECT_NS: Final = 5_000  # a grid worth less is run by its caller alone
_WAKE_NS: Final = 50_000  # a grid worth less is not worth waking a worker (25-55 us)
_SPINS_BETWEEN: Final = 5  # times Dev.SPINS: some 8 us on a machine of its own, 1 us where ranks share the cores
_CHUNK_NS: Final = 20_000  # what a chunk is worth where that is known: the last one to end keeps the others waiting
_SLICED_NS: Final = 5_000_000  # a grid worth more is run in chunks, with a look at the deadline between

# Phases of an operation, kept in S.PHASE.
_FRESH, _CLAIM, _TAIL, _WAITING, _ASK_PYTHON, _IN_PYTHON = range(6)


def emit_streams(m: Module) -> None:
    for emit in (
        _fail,
        _finish_launch,
        _set_context,
        _open_launch,
        _launch,
        _fill,
        _wait_value,
        _await_completion,
        _wait_event,
        _step,
        _run_current,
        _begin,
        _complete,
        _run,
        _has_work,
        _keep_off,
        _spread,
        _wake_stream,
        _leave,
        _lock_gate,
        _next_seq,
        _submit,
        _write_launch,
        _submit_launch,
        _run_inline,
        _run_launch,
        _run_graph,
        _host_wait,
        _stream_loop,
        _take_fault,
    ):
        emit(m)


def _fail(m: Module) -> None:
    f = m.define("fail", "void", "ptr s")  # the record is written; the stream's operation has failed
    s = f["s"]
    current = f.load(s, S.CURRENT, "ptr")
    f.store(s, S.FAULT + Fault.NODE, f.load(current, C.KIND).eq(Kind.GRAPH).select(f.load(s, S.NODE), -1))
    f.store(s, S.FAILED, f.load(current, C.SEQ), order="release")
    f.ret()


def _finish_launch(m: Module) -> None:
    f = m.define("finish_launch", "i64", "ptr s")
    with f.if_(f.load(f["s"], S.FAULT + Fault.STATE, order="acquire").ne(0)):
        f.call("fail", f["s"])
    f.ret(Result.DONE)


def _set_context(m: Module) -> None:
    f = m.define("set_context", "void", "ptr s, ptr c")
    s, c = f["s"], f["c"]
    ctx = f.at(s, S.CONTEXT)
    for axis in range(3):
        f.store(ctx, Context.GRID0 + axis, f.load(c, C.GRID + axis))
    f.store(ctx, Context.PROGRAMS, f.load(c, C.PROGRAMS))
    abort, none = f.load(c, C.ABORT, "ptr"), f.at(s, S.NO_ABORT)
    f.store(ctx, Context.ABORT, abort.to("i64").eq(0).select(none, abort, "ptr"))
    f.store(ctx, Context.TIMEOUT, f.load(c, C.TIMEOUT))
    f.store(ctx, Context.PRINT, f.load(c, C.PRINT))
    f.store(ctx, Context.SEQUENCE, f.load(f.load(s, S.CURRENT, "ptr"), C.SEQ))
    for k in range(8):
        f.store(s, S.WORDS + k, 0)
    f.ret()


def _open_launch(m: Module) -> None:
    """Begin a launch. Short plain ones are over then (DONE); of others the job is open (BUSY)."""
    f = m.define("open_launch", "i64", "ptr s, ptr c")
    s, c = f["s"], f["c"]
    e, ctx, device = f.at(s, S.EXECUTOR), f.at(s, S.CONTEXT), f.load(s, S.DEVICE, "ptr")
    module, args = f.load(c, C.MODULE, "ptr"), f.load(c, C.ARGS, "ptr")
    n = f.load(c, C.PROGRAMS)
    with f.if_(n.eq(0)):
        f.ret(Result.DONE)
    waits = f.load(module, Mod.WAITS).ne(0)
    f.call("set_context", s, c)
    cost = f.load(module, Mod.COST, order="monotonic") * n
    known = cost.ne(0)
    helpers = f.load(device, Dev.WORKERS)
    alone = helpers.eq(0) | n.eq(1) | (known & (cost < _DIRECT_NS))
    scratch = f.load(module, Mod.SCRATCH)
    with f.if_(waits.eq(0)):
        with f.if_(f.call("has_scratch", e, scratch).eq(0)):
            f.call("report", f.at(s, S.FAULT), FaultKind.DEVICE, -1, -1, 0, scratch, 0, 0)
            f.ret(f.call("finish_launch", s))
        with f.if_(n.eq(1)):  # the shortest way: no job, no clock
            f.call("run_range", e, module, args, ctx, 0, 1)
            f.ret(f.call("finish_launch", s))
        with f.if_(alone & known & (cost < _SLICED_NS)):
            before = f.call("clock")
            f.call("run_range", e, module, args, ctx, 0, n)
            f.call("set_cost", module, f.call("clock") - before, n)
            f.ret(f.call("finish_launch", s))
    slot = f.var("i64", -1)
    with f.if_(alone.eq(0)):
        slot.set(f.call("take_slot", device))
    f.store(s, S.JOB, slot)
    shared = slot.v >= 0
    job = _job(f, s)
    parts = shared.select(((helpers + 1) * 8).max(cost // _CHUNK_NS), 64)
    chunk = (n // parts).max(1)
    words = {
        Job.MODULE: module,
        Job.CONTEXT: ctx,
        Job.ARGS: args,
        Job.PROGRAMS: n,
        Job.CHUNK: chunk,
        Job.ARENA: f.load(s, S.ARENA),
        Job.STRIDE: f.load(module, Mod.FRAME) + scratch,
    }
    for word, value in words.items():
        f.store(job, word, value)
    f.call("open_job", job, (n + (chunk - 1)) // chunk)
    with f.if_(shared):
        f.call("call_workers", device, known.eq(0) | (cost > _WAKE_NS))
    f.store(s, S.TAKEN, 0)
    f.store(s, S.BEGAN, f.call("clock"))
    for counter in (Exec.COUNT, Exec.BUSY, Exec.TAKEN):
        f.store(e, counter, 0)
    awake(f, e)
    f.store(s, S.PHASE, waits.select(_WAITING, _CLAIM))
    f.ret(Result.BUSY)


def _job(f: Function, s: Value) -> Value:
    """The job of the launch at hand: a slot that workers look at, or the stream's own."""
    slot, device = f.load(s, S.JOB), f.load(s, S.DEVICE, "ptr")
    return (slot >= 0).select(f.at(device, slot * 32 + Dev.JOB0), f.at(s, S.PRIVATE_JOB), "ptr")


def _launch(m: Module) -> None:
    f = m.define("launch", "i64", "ptr s, ptr c, i64 deadline")
    s, c, deadline = f["s"], f["c"], f["deadline"]
    with f.if_(f.load(s, S.PHASE).eq(_FRESH)), f.if_(f.call("open_launch", s, c).eq(Result.DONE)):
        f.ret(Result.DONE)
    e, device, module = f.at(s, S.EXECUTOR), f.load(s, S.DEVICE, "ptr"), f.load(c, C.MODULE, "ptr")
    n = f.load(c, C.PROGRAMS)
    job = _job(f, s)
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
        awake(f, e)
        f.store(s, S.PHASE, _TAIL)
    with f.if_(f.load(s, S.PHASE).eq(_WAITING)):
        with f.if_(f.call("run_waiting", e, job, device, deadline).eq(Result.SLICE)):
            f.ret(Result.SLICE)
        with f.if_(n > 1):
            f.call("set_cost", module, f.load(e, Exec.BUSY), f.load(e, Exec.TAKEN))
        awake(f, e)
        f.store(s, S.PHASE, _TAIL)
    with f.loop():
        f.stop_if(f.load(job, Job.DONE, order="acquire").eq(n))
        read = f.call("back_off", e, device, _TAIL_YIELDS, deadline)
        with f.if_(read > deadline):
            f.ret(Result.SLICE)
    slot = f.load(s, S.JOB)
    with f.if_(slot >= 0):
        f.rmw("or", device, Dev.SLOTS, f.value(1) << slot)
    f.ret(f.call("finish_launch", s))


def _fill(m: Module) -> None:
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


def _wait_value(m: Module) -> None:
    f = m.define("wait_value", "i64", "ptr s, ptr c, i64 deadline")
    s, c = f["s"], f["c"]
    e, device = f.at(s, S.EXECUTOR), f.load(s, S.DEVICE, "ptr")
    word, expected, cmp, width = f.load(c, C.A, "ptr"), f.load(c, C.B), f.load(c, C.C), f.load(c, C.D)
    timeout, abort = f.load(c, C.E), f.load(c, C.F, "ptr")
    with f.if_(f.load(s, S.PHASE).eq(_FRESH)):
        f.store(s, S.BEGAN, f.call("clock"))
        awake(f, e)
        f.store(s, S.PHASE, _WAITING)
    with f.loop():
        seen = f.call("seen", word, width)
        with f.if_(f.call("holds", seen, expected, cmp, width)):
            f.ret(Result.DONE)
        with f.if_(abort.to("i64").ne(0)), f.if_(f.load(abort, type="i32", order="acquire").ne(0)):
            f.call("report", f.at(s, S.FAULT), FaultKind.ABORTED, -1, -1, seen, expected, word.to("i64"), 0)
            f.call("fail", s)
            f.ret(Result.DONE)
        read = f.call("back_off", e, device, YIELDS, f["deadline"].min(f.load(s, S.BEGAN) + timeout))
        with f.if_(read.ne(0)):
            with f.if_((read - f.load(s, S.BEGAN)) > timeout):
                f.call("report", f.at(s, S.FAULT), FaultKind.WAIT_TIMEOUT, -1, -1, seen, expected, word.to("i64"), 0)
                f.call("fail", s)
                f.ret(Result.DONE)
            with f.if_(read > f["deadline"]):
                f.ret(Result.SLICE)


def _await_completion(m: Module) -> None:
    """Sleep until a stream has completed `seq`: DONE or SLICE."""
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


def _wait_event(m: Module) -> None:
    """Wait for operation B of stream A. A fault there before that operation becomes one here."""
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


def _step(m: Module) -> None:
    """Run or go on with one operation: DONE (also when it failed), SLICE, NEEDS_THREAD or PYTHON."""
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


def _run_current(m: Module) -> None:
    """The operation in S.CURRENT: nodes of a graph one by one. Same results as step."""
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


def _begin(m: Module) -> None:
    f = m.define("begin", "void", "ptr s, ptr c")
    f.store(f["s"], S.PHASE, _FRESH)
    f.store(f["s"], S.NODE, 0)
    f.store(f["s"], S.ARENA, f.load(f["c"], C.ARENA))
    f.store(f["s"], S.CURRENT, f["c"])
    f.ret()


def _complete(m: Module) -> None:
    f = m.define("complete", "void", "ptr s")
    s = f["s"]
    seq = f.load(f.load(s, S.CURRENT, "ptr"), C.SEQ)
    f.store(s, S.CURRENT, 0)
    f.store(s, S.COMPLETED, seq, order="seq_cst")
    with f.if_(f.load(s, S.WAITERS, "i32", "seq_cst").ne(0)):
        f.call("wake_all", f.at(s, S.COMPLETED))
    f.ret()


def _run(m: Module) -> None:
    """Run the stream, as its runner, until `target` is complete (DONE) or nothing is left (IDLE)."""
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


def _has_work(m: Module) -> None:
    f = m.define("has_work", "i1", "ptr s")
    s = f["s"]
    following = f.load(f.load(s, S.CURSOR, "ptr", "monotonic"), C.NEXT, order="seq_cst")
    f.ret((f.load(s, S.CURRENT, order="monotonic") | following).ne(0))


def _wake_stream(m: Module) -> None:
    f = m.define("wake_stream", "void", "ptr s", exported=True)
    f.rmw("add", f["s"], S.WAKE, 1, "i32")
    with f.if_(f.load(f["s"], S.SLEEPING, "i32", "seq_cst").ne(0)):
        f.call("keep_off", f["s"])
        f.call("wake_all", f.at(f["s"], S.WAKE))
    f.ret()


def _keep_off(m: Module) -> None:
    """Let the stream's sleeping thread wake on another processor than this one, whose thread goes on: see `make_way`.
    Awake, it may run anywhere again (`spread`): where nobody else works, streams share all processors."""
    f = m.define("keep_off", "void", "ptr s")
    if sys.platform == "linux":
        cpus = f.load(f.load(f["s"], S.DEVICE, "ptr"), Dev.CPUS, "ptr", "acquire")
        thread = f.load(f["s"], S.TID, order="monotonic")
        with f.if_(cpus.to("i64").eq(0) | thread.eq(0)):
            f.ret()
        cpu = f.call("sched_getcpu").to("i64", signed=True)
        with f.if_(cpu.ult(CPU_WORDS * 64).eq(0)):
            f.ret()
        others = f.buffer(CPU_WORDS)
        f.copy_bytes(others, cpus, f.value(CPU_WORDS * 8))
        word, bit = cpu >> 6, f.value(1) << (cpu & 63)
        f.store(others, word, f.load(others, word) - (f.load(others, word) & bit))
        f.call("sched_setaffinity", thread.to("i32"), CPU_WORDS * 8, others)
    f.ret()


def _spread(m: Module) -> None:
    """This thread may run on every processor of the device."""
    f = m.define("spread", "void", "ptr s")
    if sys.platform == "linux":
        cpus = f.load(f.load(f["s"], S.DEVICE, "ptr"), Dev.CPUS, "ptr", "acquire")
        with f.if_(cpus.to("i64").ne(0)):
            f.call("sched_setaffinity", 0, CPU_WORDS * 8, cpus)
    f.ret()


def _leave(m: Module) -> None:
    """Stop being the runner for good. The stream's thread may have found the stream taken and gone to sleep."""
    f = m.define("leave", "void", "ptr s")
    f.store(f["s"], S.RUNNER, 0, "i32", "seq_cst")
    # Seen or not, each has to be looked at behind that store, which loads that only acquire need not be.
    with f.if_(f.call("has_work", f["s"]) | f.load(f["s"], S.STOP, "i32", "seq_cst").ne(0)):
        f.call("wake_stream", f["s"])
    f.ret()


def _lock_gate(m: Module) -> None:
    f = m.define("lock_gate", "void", "ptr s")
    with f.loop():
        f.stop_if(f.cas(f["s"], S.GATE, 0, 1, "i32"))
        f.call("pause")
    f.ret()


def _next_seq(m: Module) -> None:
    f = m.define("next_seq", "i64", "ptr s, ptr c")
    seq = f.load(f["s"], S.SUBMITTED) + 1
    f.store(f["s"], S.SUBMITTED, seq, order="monotonic")
    f.store(f["c"], C.SEQ, seq)
    f.ret(seq)


def _submit(m: Module) -> None:
    """Put an operation at the end of the queue: its sequence number."""
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


def _write_launch(m: Module) -> None:
    """Make the slot `c` a launch: what was prepared, with this block of arguments and these frames."""
    f = m.define("write_launch", "void", "ptr c, ptr header, ptr args, i64 nbytes, i64 arena")
    c, args_at = f["c"], f.at(f["c"], ARGS)
    f.copy_bytes(c, f["header"], f.value(8 * ARGS))
    f.copy_bytes(args_at, f["args"], f["nbytes"])
    f.store(c, C.ARGS, args_at)
    f.store(c, C.ARENA, f["arena"])
    f.ret()


def _submit_launch(m: Module) -> None:
    f = m.define("submit_launch", "i64", "ptr s, ptr c, ptr header, ptr args, i64 nbytes, i64 arena", exported=True)
    f.call("write_launch", f["c"], f["header"], f["args"], f["nbytes"], f["arena"])
    f.ret(f.call("submit", f["s"], f["c"]))


def _run_launch(m: Module) -> None:
    """As run_inline, of what was prepared. The slot is the caller's alone, also after BUSY."""
    f = m.define(
        "run_launch", "i64", "ptr s, ptr c, ptr header, ptr args, i64 nbytes, i64 arena, i64 slice", exported=True
    )
    f.call("write_launch", f["c"], f["header"], f["args"], f["nbytes"], f["arena"])
    f.ret(f.call("run_inline", f["s"], f["c"], f["slice"]))


def _run_inline(m: Module) -> None:
    """Run an operation here and now if the stream is idle. After SLICE, host_wait goes on with it."""
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
    until = f.var("i64", FOREVER)
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


def _run_graph(m: Module) -> None:
    """As run_inline, of the `n` operations that a table names; none of them has work for Python."""
    f = m.define("run_graph", "i64", "ptr s, ptr c, ptr table, i64 n, i64 arena, i64 slice", exported=True)
    c = f["c"]
    f.store(c, C.KIND, Kind.GRAPH)
    f.store(c, C.FLAGS, 0)
    f.store(c, C.A, f["table"])
    f.store(c, C.B, f["n"])
    f.store(c, C.ARENA, f["arena"])
    f.ret(f.call("run_inline", f["s"], c, f["slice"]))


def _host_wait(m: Module) -> None:
    """Wait until `seq` is complete, at most for `slice`; run the stream meanwhile if nobody else does."""
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


def _stream_loop(m: Module) -> None:
    """The stream's own thread. `held`: it comes back from Python work, still the runner. PYTHON or STOPPED."""
    f = m.define("stream_loop", "i64", "ptr s, i64 held", exported=True)
    s = f["s"]
    held = f.var("i64", f["held"])
    # Longer than it takes Python to enqueue the next operation: waking a sleeper costs as much as enqueueing.
    spins = f.load(f.load(s, S.DEVICE, "ptr"), Dev.SPINS) * _SPINS_BETWEEN
    with f.loop():
        seen = f.load(s, S.WAKE, "i32", "seq_cst")
        got = f.var("i64", held)
        with f.if_(held.v.eq(0)):
            got.set(f.cas(s, S.RUNNER, 0, 1, "i32").to("i64"))
        held.set(0)
        with f.if_(got.v.ne(0)):
            r = f.call("run", s, FOREVER, FOREVER, 1)
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
            with f.if_(idle.v <= spins) as spin:
                f.call("pause")
            with spin.otherwise():
                with f.if_(idle.v <= spins + 10) as polite:
                    f.call("sched_yield")
                with polite.otherwise():
                    f.store(s, S.SLEEPING, 1, "i32", "seq_cst")
                    f.call("sleep_on", f.at(s, S.WAKE), seen, FOREVER)
                    f.store(s, S.SLEEPING, 0, "i32", "seq_cst")
                    f.call("spread", s)
                    idle.set(0)


def _take_fault(m: Module) -> None:
    """Take the fault: what was enqueued so far is skipped. The record must have been read before."""
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
