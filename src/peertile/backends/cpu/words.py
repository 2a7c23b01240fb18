"""Lowering of words and what goes with them: ordered accesses, waits, fences, launch words.

A wait looks at the word itself, spins for a moment, then suspends the coroutine with a description of the
word in its promise (the layout is `PollDesc` of the launch protocol); the executor resumes it when the word
satisfies the comparison, or tells it to leave. A resumed program loads the word again with the order asked
for, so that the edge is its own.
"""

from __future__ import annotations

from peertile.backends.cpu.atomics import atomic_load, atomic_rmw, atomic_store
from peertile.backends.cpu.lower import Lowering, lowers
from peertile.backends.cpu.nodes import View
from peertile.backends.cpu.text import LLVM, MEMORY, add, mul
from peertile.dtypes import DType
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.types import ViewType
from peertile.memory_model import Cmp, Order

SPINS = 8
"""Looks at the word before suspending, a pause (24 ns) apart: other programs of the executor wait meanwhile."""


def address_of(lo: Lowering, view: View, indices: list[Value]) -> str:
    offset = "0"
    for value, stride in zip(indices, view.strides, strict=True):
        offset = add(lo.f, offset, mul(lo.f, lo.scalar(value), stride))
    if offset == "0":
        return view.pointer
    return lo.f.value(f"getelementptr {MEMORY[view.type.dtype.name]}, ptr {view.pointer}, i64 {offset}")


@lowers(ops.WordLoad)
def _word_load(lo: Lowering, op: ops.WordLoad) -> None:
    view = lo.values[op.operands[0]]
    order = op.attrs["order"]
    if order is Order.WEAK:
        lo.before_load(view)
    else:
        lo.order_point()
    address = address_of(lo, view, op.operands[1:])
    lo.define_scalar(op.result, atomic_load(lo, view.type.dtype, address, order))


@lowers(ops.WordStore)
def _word_store(lo: Lowering, op: ops.WordStore) -> None:
    view = lo.values[op.operands[0]]
    order = op.attrs["order"]
    value = lo.scalar(op.operands[1])
    if order is Order.WEAK:
        lo.before_write(view)
        lo.flush()
    else:
        lo.order_point()
    atomic_store(lo, view.type.dtype, address_of(lo, view, op.operands[2:]), value, order)


@lowers(ops.WordRmw)
def _word_rmw(lo: Lowering, op: ops.WordRmw) -> None:
    view = lo.values[op.operands[0]]
    value = lo.scalar(op.operands[1])
    lo.order_point()
    address = address_of(lo, view, op.operands[2:])
    old = atomic_rmw(lo, op.attrs["rmw"], view.type.dtype, address, value, op.attrs["order"])
    lo.define_scalar(op.result, old)


@lowers(ops.Fence)
def _fence(lo: Lowering, op: ops.Fence) -> None:
    lo.order_point()
    lo.stream_fence()
    lo.f.emit("fence acq_rel")


@lowers(ops.FenceAlias)
def _fence_alias(lo: Lowering, op: ops.FenceAlias) -> None:
    """Caches of a processor go by the storage, not by its address: only the compiler has to keep the order."""
    lo.order_point()
    lo.f.emit("fence acq_rel")
    for token in op.results:
        lo.define(token, None)


@lowers(ops.LaunchWords)
def _launch_words(lo: Lowering, op: ops.LaunchWords) -> None:
    t = op.result.type
    assert isinstance(t, ViewType)
    pointer = lo.context_pointer(8)
    lo.define(op.result, View(t, pointer, ("8",), ("1",), "", "launch words"))


# ---------------------------------------------------------------- waits

_COMPARE = {Cmp.EQ: "eq", Cmp.NE: "ne", Cmp.GE: "ge", Cmp.LE: "le", Cmp.GT: "gt", Cmp.LT: "lt"}


def satisfied(lo: Lowering, cmp: Cmp, dtype: DType, value: str, expected: str) -> str:
    """i1: whether a value of a word ends the wait for `expected`."""
    t = LLVM[dtype.name]
    if cmp is Cmp.AT_LEAST:
        difference = lo.f.value(f"sub {t} {value}, {expected}")
        return lo.f.value(f"icmp sge {t} {difference}, 0")
    sign = "" if cmp in (Cmp.EQ, Cmp.NE) else "s" if dtype.is_signed else "u"
    return lo.f.value(f"icmp {sign}{_COMPARE[cmp]} {t} {value}, {expected}")


def widened(lo: Lowering, dtype: DType, value: str) -> str:
    """A word as i64, by its sign."""
    if dtype.bits == 64:
        return value
    return lo.f.value(f"{'sext' if dtype.is_signed else 'zext'} {LLVM[dtype.name]} {value} to i64")


def pause(lo: Lowering) -> None:
    if lo.target.is_x86:
        lo.f.emit("call void @llvm.x86.sse2.pause()")
    elif lo.target.arch == "aarch64":
        # `yield` is nothing on most of them; a barrier of instructions takes as long as a pause. No inline assembly:
        # llvmlite has no parser for it, and LLVM ends the process.
        lo.f.emit("call void @llvm.aarch64.isb(i32 15)")


@lowers(ops.Wait)
def _wait(lo: Lowering, op: ops.Wait) -> None:
    f = lo.f
    view = lo.values[op.operands[0]]
    expected = lo.scalar(op.operands[1])
    indices = op.operands[2:]
    lo.order_point()
    dtype, order, cmp = view.type.dtype, op.attrs["order"], op.attrs["cmp"]
    address = address_of(lo, view, indices)
    slot = lo.scalar(indices[0]) if indices else "0"
    place = lo.place(op, "wait", what=op.attrs["what"])
    look, spin, sleep, done = f.block("look"), f.block("spin"), f.block("sleep"), f.block("satisfied")
    source = f.br(look)
    f.place(look)
    left = f.phi(look, "i64")
    left.add(str(SPINS), source)
    value = atomic_load(lo, dtype, address, order)
    holds = satisfied(lo, cmp, dtype, value, expected)
    other = f.block("unsatisfied")
    f.cond_br(holds, done, other)
    f.place(other)
    fewer = f.value(f"sub i64 {left.name}, 1")
    again = f.value(f"icmp sgt i64 {fewer}, 0")
    f.cond_br(again, spin, sleep)
    f.place(spin)
    pause(lo)
    left.add(fewer, f.br(look))
    f.place(sleep)
    number = list(Cmp).index(cmp)
    width = dtype.bits | int(dtype.is_signed) << 8
    bits = f.value(f"ptrtoint ptr {address} to i64")
    suspend(lo, [bits, widened(lo, dtype, expected), str(number), str(width), "0", str(place), "0", slot])
    left.add("0", f.br(look))
    f.place(done)
    lo.define_scalar(op.result, value)


@lowers(ops.Suspend)
def _suspend(lo: Lowering, op: ops.Suspend) -> None:
    lo.order_point()
    place = lo.place(op, "wait", what="a loop that polls")
    suspend(lo, ["0", "0", "0", "0", None if op.attrs["continues"] else "0", str(place), "0", "0"])


def suspend(lo: Lowering, words: list[str | None]) -> None:
    """Suspend with these words in the promise (None: as it is); when resumed with an outcome other than 0, leave."""
    f = lo.f
    for k, word in enumerate(words):
        if word is None:
            continue
        address = f.value(f"getelementptr inbounds i64, ptr {lo.promise}, i64 {k}")
        f.emit(f"store i64 {word}, ptr {address}, align 8")
    state = f.value("call i8 @llvm.coro.suspend(token none, i1 false)")
    resumed = f.block("resumed")
    f.end(f"switch i8 {state}, label %{lo.give_up.name} [ i8 0, label %{resumed.name} i8 1, label %{lo.give_up.name} ]")
    f.place(resumed)
    address = f.value(f"getelementptr inbounds i64, ptr {lo.promise}, i64 6")
    outcome = f.value(f"load i64, ptr {address}, align 8")
    fine = f.value(f"icmp eq i64 {outcome}, 0")
    goes_on = f.block("on")
    f.cond_br(fine, goes_on, lo.leave, likely=True)
    f.place(goes_on)
