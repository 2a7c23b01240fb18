"""Tools that passes share: constants, scalar arithmetic, loops, and replacing values. No pass here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from peertile.dtypes import i64
from peertile.ir import ops
from peertile.ir.core import Block, Builder, Kernel, Op, Value, walk
from peertile.ir.ops import Binary, Compare
from peertile.ir.types import BOOL, INDEX, TileType

__all__ = ["Scalars", "constant_of", "leaving", "replace_values"]


def replace_values(kernel: Kernel, replacements: Mapping[Value, Value]) -> None:
    """Uses `replacements[v]` (or what that is replaced by in turn) wherever `v` is an operand."""
    if not replacements:
        return

    def final(v: Value) -> Value:
        while v in replacements:
            v = replacements[v]
        return v

    for op in walk(kernel.body):
        op.operands = [final(v) for v in op.operands]


def constant_of(value: Value) -> int | float | bool | None:
    """The number that `value` always is, if it is the result of a `const`."""
    op = value.op
    found: int | float | bool | None = op.attrs["value"] if isinstance(op, ops.Const) else None
    return found


def leaving(op: Op) -> Iterator[Op]:
    """The terminators inside `op` that lead further than out of it: to an outer loop, or out of the kernel."""
    inside = {op, *(inner for block in op.blocks for inner in walk(block))}
    for inner in inside:
        loops = isinstance(inner, ops.Break | ops.Continue)
        if isinstance(inner, ops.Return) or (loops and ops.enclosing_loop(inner) not in inside):
            yield inner


class Scalars:
    """Short forms for scalar arithmetic at the point of a builder; `type` is i64 unless said otherwise."""

    def __init__(self, builder: Builder) -> None:
        self.b = builder

    def const(self, value: int, type: TileType = INDEX) -> Value:
        return self.b.value(ops.Const, (), type, value=value)

    def true(self) -> Value:
        return self.b.value(ops.Const, (), BOOL, value=True)

    def binary(self, fn: Binary, x: Value, y: Value | int) -> Value:
        t = x.type
        assert isinstance(t, TileType)
        return self.b.value(ops.BinaryOp, (x, self.const(y, t) if isinstance(y, int) else y), t, fn=fn)

    def add(self, x: Value, y: Value | int) -> Value:
        return self.binary(Binary.ADD, x, y)

    def sub(self, x: Value, y: Value | int) -> Value:
        return self.binary(Binary.SUB, x, y)

    def mul(self, x: Value, y: Value | int) -> Value:
        return self.binary(Binary.MUL, x, y)

    def compare(self, fn: Compare, x: Value, y: Value | int) -> Value:
        t = x.type
        assert isinstance(t, TileType)
        return self.b.value(ops.CompareOp, (x, self.const(y, t) if isinstance(y, int) else y), BOOL, fn=fn)

    def inside(self, index: Value, limit: Value) -> Value:
        """0 <= index < limit."""
        low = self.compare(Compare.GE, index, 0)
        high = self.compare(Compare.LT, index, limit)
        return self.binary(Binary.AND, low, high)

    def bitcast(self, x: Value, type: TileType) -> Value:
        return x if x.type == type else self.b.value(ops.Bitcast, (x,), type)

    def num_programs(self, grid_rank: int) -> Value:
        """Programs of the whole grid."""
        n = self.b.value(ops.NumPrograms, (), INDEX, axis=0)
        for axis in range(1, grid_rank):
            n = self.mul(n, self.b.value(ops.NumPrograms, (), INDEX, axis=axis))
        return n

    def program(self, grid_rank: int) -> Value:
        """Linear index of this program; axis 0 changes fastest."""
        # Written as the frontend writes it, so that both are shared.
        index = self.b.value(ops.ProgramId, (), INDEX, axis=0)
        if grid_rank == 1:
            return index
        stride = self.b.value(ops.NumPrograms, (), INDEX, axis=0)
        for axis in range(1, grid_rank):
            index = self.add(index, self.mul(self.b.value(ops.ProgramId, (), INDEX, axis=axis), stride))
            if axis + 1 < grid_rank:
                stride = self.mul(stride, self.b.value(ops.NumPrograms, (), INDEX, axis=axis))
        return index

    def loop(self, lo: Value | int, hi: Value, body: Callable[[Value], None]) -> None:
        """for k in range(lo, hi): body(k)"""
        lo = self.const(lo) if isinstance(lo, int) else lo
        block = Block((TileType(i64),), ("k",))
        step = self.const(1)
        with self.b.at(block):
            body(block.args[0])
            self.b.emit(ops.Continue)
        self.b.emit(ops.For, (lo, hi, step), blocks=(block,))

    def when(self, condition: Value, body: Callable[[], None]) -> None:
        """if condition: body()"""
        then, other = Block(), Block()
        with self.b.at(then):
            body()
            self.b.emit(ops.Yield)
        with self.b.at(other):
            self.b.emit(ops.Yield)
        self.b.emit(ops.If, (condition,), blocks=(then, other))
