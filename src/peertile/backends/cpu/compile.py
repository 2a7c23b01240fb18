"""The functions that a driver calls, around the lowered body; parameters; and `compile_kernel`.

Plain kernels get one loop over programs, with everything that does not depend on the program in front of it.
Kernels that wait become a coroutine whose frame the driver gives; `E_start` runs it up to its first wait.
"""

from __future__ import annotations

import re

from peertile.backends.binary import Binary
from peertile.backends.cache import DiskCache, default_cache, key_of
from peertile.backends.cpu import (
    combine,
    control,
    elementwise,
    jit,
    memory,
    mma,
    output,
    pieces,
    pointers,
    sorting,
    views,
    words,
)
from peertile.backends.cpu.lower import Lowering, Record, Symmetric
from peertile.backends.cpu.nodes import ScalarNode, View
from peertile.backends.cpu.target import CpuTarget, host_target
from peertile.backends.cpu.text import LLVM, Function
from peertile.dtypes import DType, u64
from peertile.errors import InternalError
from peertile.ir.core import Kernel, Value
from peertile.ir.types import ObjectType, PointerType, Space, SymmetricType, TileType, Type, ViewType

__all__ = ["compile_kernel", "lower_to_text"]

RULES = (combine, control, elementwise, memory, mma, output, pieces, pointers, sorting, views, words)
"""Modules that register lowerings when they are imported."""
_PLACEHOLDER = "peertile_entry"
PROMISE_OFFSET = 64
"""Where the promise is in a coroutine frame: two pointers, then the alignment of the promise."""


class _Parameters:
    """Reads the argument block, one slot after another."""

    def __init__(self, lo: Lowering) -> None:
        self.lo = lo
        self.slot = 0

    def _address(self) -> str:
        self.slot += 1
        return self.lo.f.value(f"getelementptr inbounds i64, ptr %args, i64 {self.slot - 1}")

    def word(self) -> str:
        return self.lo.f.value(f"load i64, ptr {self._address()}, align 8")

    def pointer(self) -> str:
        return self.lo.f.value(f"load ptr, ptr {self._address()}, align 8")

    def scalar(self, dtype: DType) -> str:
        f, word = self.lo.f, self.word()
        t = LLVM[dtype.name]
        if dtype.is_bool:
            return f.value(f"trunc i64 {word} to i1")
        if t == "double":
            return f.value(f"bitcast i64 {word} to double")
        if t in ("float", "half"):
            bits = f.value(f"trunc i64 {word} to i{dtype.bits}")
            return f.value(f"bitcast i{dtype.bits} {bits} to {t}")
        return word if t == "i64" else f.value(f"trunc i64 {word} to {t}")

    def layout(self, t: ViewType | SymmetricType) -> tuple[tuple[str, ...], tuple[str, ...]]:
        extents = tuple(self.word() for _ in range(t.rank))
        strides = [self.word() for _ in range(t.rank)]
        for axis, unit in enumerate(t.unit_stride):
            if unit:
                strides[axis] = "1"
        return extents, tuple(strides)

    def read(self, t: Type, root: str) -> object:
        """The run-time form of a parameter of type `t`."""
        if isinstance(t, TileType):
            return ScalarNode(t.dtype, (), self.scalar(t.dtype))
        if isinstance(t, PointerType):
            return ScalarNode(u64, (), self.word())
        if isinstance(t, ViewType):
            pointer = self.pointer()
            extents, strides = self.layout(t)
            return View(t, pointer, extents, strides, root if t.space is Space.LOCAL else "", pointer)
        if isinstance(t, SymmetricType):
            table, offset = self.pointer(), self.word()
            extents, strides = self.layout(t)
            return Symmetric(table, offset, extents, strides, t)
        if isinstance(t, ObjectType):
            return Record({name: self.read(field, "") for name, field in t.fields.items()})
        raise InternalError(f"cpu backend: a parameter cannot have type {t}")


def _bind(lo: Lowering, params: list[Value]) -> int:
    """Give every parameter its run-time form; the number of slots."""
    parameters = _Parameters(lo)
    for k, value in enumerate(params):
        lo.define(value, parameters.read(value.type, f"parameter {k}"))
    return parameters.slot


def _plain(kernel: Kernel, target: CpuTarget, entry: str) -> tuple[Lowering, str, int]:
    f = Function(
        f"define void @{entry}_range(ptr %args, ptr %ctx, i64 %begin, i64 %end, ptr %scratch) #0",
        target.soft_half,
    )  # fmt: skip
    lo = Lowering(kernel, target, f)
    with lo.at_entry():
        slots = _bind(lo, kernel.params)
    header, done = f.block("program"), f.block("exit")
    f.place(header)
    program = f.phi(header, "i64")
    program.add("%begin", lo.entry)
    lo.program = program.name
    lo.lower_block(kernel.body)
    if not f.current.terminated:
        f.br(lo.leave)
    f.place(lo.leave)
    following = f.value(f"add nuw nsw i64 {program.name}, 1")
    more = f.value(f"icmp slt i64 {following}, %end")
    program.add(following, f.cond_br(more, header, done))
    f.place(done)
    lo.stream_fence()
    f.end("ret void")
    f.current = lo.entry
    some = f.value("icmp slt i64 %begin, %end")
    f.cond_br(some, header, done)
    return lo, str(f), slots


def _waiting(kernel: Kernel, target: CpuTarget, entry: str) -> tuple[Lowering, str, int]:
    f = Function(
        f"define internal i64 @{entry}_coroutine(ptr %args, ptr %ctx, i64 %p, ptr %scratch, ptr %frame) "
        "presplitcoroutine #0",
        target.soft_half,
    )
    f.emit("%promise = alloca [8 x i64], align 64")
    f.emit("%id = call token @llvm.coro.id(i32 64, ptr %promise, ptr null, ptr null)")
    f.emit("%size = call i64 @llvm.coro.size.i64()")
    # Without a frame the function tells the size of one, which only the coroutine itself can ask for.
    f.emit("%query = icmp eq ptr %frame, null")
    tell, begin = f.block("tell"), f.block("begin")
    f.cond_br("%query", tell, begin, likely=False)
    f.place(tell)
    f.end("ret i64 %size")
    f.place(begin)
    f.emit("%handle = call ptr @llvm.coro.begin(token %id, ptr %frame)")
    lo = Lowering(kernel, target, f)
    lo.entry = begin
    lo.promise = "%promise"
    lo.give_up = f.block("give_up")
    with lo.at_entry():
        slots = _bind(lo, kernel.params)
    body = f.place(f.block("body"))
    lo.program = "%p"
    lo.lower_block(kernel.body)
    if not f.current.terminated:
        f.br(lo.leave)
    f.place(lo.leave)
    lo.stream_fence()
    state = f.value("call i8 @llvm.coro.suspend(token none, i1 true)")
    never = f.block("never")
    f.end(f"switch i8 {state}, label %{lo.give_up.name} [ i8 0, label %{never.name} i8 1, label %{lo.give_up.name} ]")
    f.place(never)
    f.end("unreachable")
    f.place(lo.give_up)
    f.emit("call void @llvm.coro.end(ptr null, i1 false, token none)")
    f.end("ret i64 %size")
    f.current = begin
    f.br(body)
    wrappers = f"""
define i64 @{entry}_frame_size() #1 {{
  %size = call i64 @{entry}_coroutine(ptr null, ptr null, i64 0, ptr null, ptr null)
  %more = add i64 %size, 63
  %whole = and i64 %more, -64
  ret i64 %whole
}}
define i64 @{entry}_promise_offset() #1 {{
  ret i64 {PROMISE_OFFSET}
}}
define void @{entry}_start(ptr %args, ptr %ctx, i64 %program, ptr %scratch, ptr %frame) #1 {{
  %size = call i64 @{entry}_coroutine(ptr %args, ptr %ctx, i64 %program, ptr %scratch, ptr %frame)
  ret void
}}
"""
    return lo, str(f) + wrappers, slots


def _lower(kernel: Kernel, target: CpuTarget, entry: str) -> tuple[Lowering, str, int]:
    lo, body, slots = (_waiting if kernel.waits else _plain)(kernel, target, entry)
    attributes = (
        f'nounwind "min-legal-vector-width"="{target.vector_bits}" "prefer-vector-width"="{target.vector_bits}"'
    )
    parts = [
        body,
        *lo.helpers.values(),
        lo.library.text(),
        f"attributes #0 = {{ {attributes} }}\nattributes #1 = {{ nounwind }}\n",
        lo.metadata(),
    ]
    return lo, "\n".join(parts), slots


def lower_to_text(kernel: Kernel, target: CpuTarget | None = None, entry: str = "E") -> str:
    """LLVM IR of an expanded, verified kernel. Its symbols start with `entry`."""
    return _lower(kernel, target or host_target(), entry)[1]


def compile_kernel(kernel: Kernel, target: CpuTarget | None = None, cache: DiskCache | None = None) -> Binary:
    """Code for an expanded, verified kernel, from the cache if it holds it.

    The key is the text that LLVM would get, which takes a millisecond to make: nothing of this backend can
    change without changing it, and source places (which it lacks) are never stale. `Binary.text` has the stage
    "llvm" (as emitted); the optimised module and the assembly are made on request by `jit.stages`.
    """
    target = target or host_target()
    cache = cache or default_cache()
    lo, text, slots = _lower(kernel, target, _PLACEHOLDER)
    key = key_of((text, target.key, jit.llvmlite_version(), jit.PASSES))
    name = re.sub(r"\W", "_", kernel.name, flags=re.ASCII)
    entry = f"pt_{name}_{key[:16]}"
    text = text.replace(_PLACEHOLDER, entry)
    payload = cache.get(key, lambda: jit.compile_for(text, target))
    return Binary(
        "cpu", entry, payload, lo.scratch.size, kernel.waits, tuple(lo.places), slots, text={"llvm": text}
    )  # fmt: skip
