"""Statements of random kernels that fold, scan, sort and move elements; the values they work on are in
`program_values.py`.

Functions of a fold are ones whose result does not depend on the order, or is bounded whatever it is; what decides
by comparison (sorting, the place of a maximum) takes fixed values only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peertile.dtypes import DType, b1, i32, i64
from peertile.ir import ops
from peertile.ir.core import Block, Op, Value
from peertile.ir.ops import Binary, Compare
from peertile.ir.types import INDEX, TileType
from peertile.testing.program_values import EPS, INTS, MATH, V, Values

__all__ = ["Folds"]


class Folds(Values):
    """Adds its statements to those of `Values`."""

    def moving(self) -> list[Callable[[], V | None]]:
        return [self.iota, self.fold, self.place, self.sorting, self.taking, self.cutting, self.pasting]

    def iota(self) -> V | None:
        return V(self.b.value(ops.Iota, (), TileType(self.r.choice(INTS), (self.r.choice([4, 16, 32]),))))

    def _axis(self, v: V) -> int:
        return self.r.randrange(v.type.rank)

    def _with(
        self, cls: type[Op], tiles: Sequence[V], axis: int, fn: Callable[[list[Value]], Sequence[Value]]
    ) -> list[Value]:
        """A fold or a scan by what `fn` builds from the elements of both sides."""
        block = Block([v.type.with_shape(()) for v in tiles] * 2)
        with self.b.at(block):
            self.b.emit(ops.Yield, fn(block.args))
        types = [v.type for v in tiles]
        attrs = {}
        if cls is ops.ReduceWith:
            types = [t.with_shape(t.shape[:axis] + t.shape[axis + 1 :]) for t in types]
        else:
            attrs["reverse"] = self.r.random() < 0.5
        return self.b.emit(cls, [v.value for v in tiles], types, (block,), axis=axis, **attrs).results

    def fold(self) -> V | None:
        v = self.pick(lambda v: v.type.rank > 0 and (v.dtype.is_int or v.dtype in MATH))
        if v is None:
            return None
        cls, axis = self.r.choice([ops.ReduceWith, ops.ScanWith]), self._axis(v)
        n, fns = v.type.shape[axis], [Binary.MIN, Binary.MAX]
        if v.dtype.is_int:
            fns += [Binary.ADD, Binary.MUL, Binary.AND, Binary.OR, Binary.XOR]
        elif not self.fixed_only:
            fns += [Binary.ADD]
        fn = self.r.choice(fns)
        if v.dtype.is_float and fn is not Binary.ADD:
            v = self.plus_one(v)  # no zeros of both signs
        magnitude, error = v.magnitude, v.error
        if v.dtype.is_float and fn is Binary.ADD:
            v = self.clamp(v, 8.0)
            magnitude = n * v.magnitude
            error = n * v.error + magnitude * n * EPS[v.dtype.name]
        t = v.type.with_shape(())
        (value,) = self._with(cls, [v], axis, lambda x: [self.emit(ops.BinaryOp, (x[0], x[1]), t, fn=fn)])
        return V(value, magnitude, error)

    def place(self) -> V | None:
        """A maximum and its place: the second is right in any order."""
        v = self.pick(lambda v: v.type.rank > 0 and not v.error and (v.dtype.is_int or v.dtype in MATH))
        if v is None:
            return None
        axis = self._axis(v)
        at = self._along(v, axis, self.r.choice([i32, i64]))

        def better(x: list[Value]) -> Sequence[Value]:
            above = self._compare(Compare.GT, x[2], x[0])
            same = self._compare(Compare.EQ, x[2], x[0])
            before = self._compare(Compare.LT, x[3], x[1])
            tie = self.emit(ops.BinaryOp, (same, before), _type(same), fn=Binary.AND)
            wins = self.emit(ops.BinaryOp, (above, tie), _type(above), fn=Binary.OR)
            return [self.emit(ops.Select, (wins, b, a), _type(a)) for a, b in ((x[0], x[2]), (x[1], x[3]))]

        best, where = self._with(self.r.choice([ops.ReduceWith, ops.ScanWith]), [v, at], axis, better)
        self.pool.append(V(best, v.magnitude))
        return V(where)

    def _compare(self, fn: Compare, a: Value, b: Value) -> Value:
        return self.emit(ops.CompareOp, (a, b), _type(a).with_dtype(b1), fn=fn)

    def _along(self, v: V, axis: int, d: DType) -> V:
        """The coordinate along an axis, in the shape of `v`."""
        n, rank = v.type.shape[axis], v.type.rank
        numbers = self.emit(ops.Iota, (), TileType(d, (n,)))
        thin = TileType(d, tuple(n if k == axis else 1 for k in range(rank)))
        if rank > 1:
            numbers = self.emit(ops.Reshape, (numbers,), thin)
        return self.broadcast(V(numbers), v.type.shape)

    def sorting(self) -> V | None:
        key = self.pick(lambda v: v.type.rank > 0 and not v.error)
        if key is None:
            return None
        other = self.pick(lambda v: v.type.shape == key.type.shape) or key
        axis = self._axis(key)
        found = self.b.emit(
            ops.Sort, (key.value, other.value), (key.type, other.type), axis=axis, descending=self.r.random() < 0.5
        ).results
        self.pool.append(V(found[0], key.magnitude))
        return V(found[1], other.magnitude, other.error)

    def taking(self) -> V | None:
        x = self.pick(lambda v: v.type.rank > 0)
        if x is None:
            return None
        axis, shape = self._axis(x), list(x.type.shape)
        if x.type.numel <= 128:
            shape[axis] = self.r.choice([shape[axis], 2 * shape[axis], max(shape[axis] // 2, 1)])
        index = self.pick(lambda v: v.dtype.is_int and v.type.shape == tuple(shape))
        if index is None:
            t = TileType(self.r.choice(INTS), tuple(shape))
            index = self.convert(self.of_shape(t.shape), t.dtype)
        value = self.emit(ops.Take, (x.value, index.value), index.type.with_dtype(x.dtype), axis=axis)
        return V(value, x.magnitude, x.error)

    def _place_of(self, x: V, piece: tuple[int, ...]) -> list[Value]:
        """Tile indices of a piece, some of them run-time numbers; beyond the last one they count again."""
        found = []
        for n, m in zip(x.type.shape, piece, strict=True):
            index = self.pick(lambda v: v.type == INDEX) if self.r.random() < 0.5 else None
            found.append(self.index(self.r.randrange(2 * n // m)) if index is None else index.value)
        return found

    def _piece(self, x: V) -> tuple[int, ...]:
        return tuple(self.r.choice([k for k in (1, 2, 4, 8, n) if k <= n]) for n in x.type.shape)

    def cutting(self) -> V | None:
        x = self.pick(lambda v: v.type.rank > 0)
        if x is None:
            return None
        piece = self._piece(x)
        value = self.emit(ops.Extract, (x.value, *self._place_of(x, piece)), x.type.with_shape(piece))
        return V(value, x.magnitude, x.error)

    def pasting(self) -> V | None:
        x = self.pick(lambda v: v.type.rank > 0)
        if x is None:
            return None
        piece = self._piece(x)
        part = self.of_type(x.type.with_shape(piece))
        value = self.emit(ops.Insert, (x.value, part.value, *self._place_of(x, piece)), x.type)
        return V(value, max(x.magnitude, part.magnitude), max(x.error, part.error))


def _type(value: Value) -> TileType:
    assert isinstance(value.type, TileType)
    return value.type
