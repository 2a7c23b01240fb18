"""Native runtime of the cpu driver, the bottom: platform calls, polling, back-off, reporting a fault.

Read `cpu_native.py` first.
"""

from __future__ import annotations

import sys
from typing import Final

from peertile.backends.cpu.target import host_arch
from peertile.memory_model import Cmp
from peertile.runtime.drivers.cpu_emit import Function, Module, Value
from peertile.runtime.drivers.cpu_layout import Dev, Exec, Fault

__all__ = ["FOREVER", "YIELDS", "awake", "emit_polling"]

FOREVER: Final = (1 << 63) - 1
YIELDS: Final = 200  # yields before a poll sleeps
_NAP_MIN: Final = 50_000
_NAP_MAX: Final = 1_000_000
_SLEEP_CAP: Final = 10_000_000_000  # sleepers look again now and then, whatever happens

_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98}
_PAUSE: Final = {"x86_64": "call void @llvm.x86.sse2.pause()", "aarch64": "call void @llvm.aarch64.hint(i32 1)"}


def emit_polling(m: Module) -> None:
    for emit in (_platform, _ordered, _seen, _holds, _back_off, _report):
        emit(m)


def _platform(m: Module) -> None:
    machine = host_arch()
    m.declare("llvm.memmove.p0.p0.i64", "void", "ptr", "ptr", "i64", "i1")
    m.declare("llvm.memset.p0.i64", "void", "ptr", "i8", "i64", "i1")
    m.declare("llvm.cttz.i64", "i64", "i64", "i1")
    m.declare("clock_gettime", "i32", "i32", "ptr")
    m.declare("nanosleep", "i32", "ptr", "ptr")
    m.declare("sched_yield", "i32")
    m.declare("mmap", "ptr", "ptr", "i64", "i32", "i32", "i32", "i64")
    m.declare("munmap", "i32", "ptr", "i64")
    if sys.platform == "linux":
        m.declare("sched_getcpu", "i32")
        m.declare("sched_setaffinity", "i32", "i32", "i64", "ptr")
    if machine == "x86_64":
        m.declare("llvm.x86.sse2.pause", "void")
    elif machine == "aarch64":
        m.declare("llvm.aarch64.hint", "void", "i32")

    f = m.define("pause", "void")
    if machine in _PAUSE:
        f.line(_PAUSE[machine])
    f.ret()

    # CLOCK_MONOTONIC; on macOS that counts in microseconds, and CLOCK_UPTIME_RAW is what time.monotonic reads.
    clock = 1 if sys.platform == "linux" else 8
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
    else:  # no futex: look again after sleeps that grow; nobody needs to be woken
        left, nap = f.var("i64", f["ns"].min(_SLEEP_CAP)), f.var("i64", _NAP_MIN)
        with f.loop():
            f.stop_if(f.load(f["word"], type="i32", order="acquire").ne(f["expected"]))
            f.stop_if(left.v <= 0)
            f.call("nap", nap.v.min(left.v))
            left.add(f.value(0) - nap.v)
            nap.set((nap.v * 2).min(_NAP_MAX))
    f.ret()
    wake.ret()


def _ordered(m: Module) -> None:
    """How Python reads a word that says that something else is there to be read, and says so itself. Its own loads and
    stores carry no order: on x86 they need none, elsewhere what they announce might be seen later than they are."""
    f = m.define("acquired", "i64", "ptr word")
    f.ret(f.load(f["word"], order="acquire"))
    f = m.define("release", "void", "ptr word, i64 value")
    f.store(f["word"], 0, f["value"], order="release")
    f.ret()


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


def awake(f: Function, e: Value) -> None:
    """Start a new back-off."""
    f.store(e, Exec.IDLE, 0)
    f.store(e, Exec.IDLE_SINCE, 0)


def _seen(m: Module) -> None:
    """The word as an i64: sign-extended if signed, zero-extended otherwise. width = bits | signed << 8."""
    f = m.define("seen", "i64", "ptr word, i64 width")
    with f.if_((f["width"] & 0xFF).eq(64)):
        f.ret(f.load(f["word"], order="acquire"))
    narrow = f.load(f["word"], type="i32", order="acquire")
    f.ret((f["width"] < 256).select(narrow.to("i64"), narrow.to("i64", signed=True)))


def _holds(m: Module) -> None:
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


def _back_off(m: Module) -> None:
    """One step of back-off; `e` counts the steps. Returns the clock if it was read, else 0."""
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


def _report(m: Module) -> None:
    """Be the one that reports: the first fault of a launch wins."""
    fields = (Fault.KIND, Fault.PROGRAM, Fault.PLACE, Fault.GOT, Fault.LIMIT, Fault.ADDRESS, Fault.SLOT)
    f = m.define("report", "void", "ptr record, " + ", ".join(f"i64 {x.name.lower()}" for x in fields))
    with f.if_(f.cas(f["record"], Fault.STATE, 0, 1)):
        for field in fields:
            f.store(f["record"], field, f[field.name.lower()])
        f.store(f["record"], Fault.STATE, 2, order="release")
    f.ret()
