"""Values of random kernels and the statements that make them; the frame is in `programs.py`.

A value carries a bound of its magnitude and of how far a right target may be off: 0 while only
operations were used whose result is fixed to the bit (integers, and float operations that round once),
more after exp, sums, products of matrices. What jumps (comparisons, floor, float to integer) takes
fixed values only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import cosh, exp, prod
from typing import Any, Final

import numpy as np

from peertile.dtypes import ALL_DTYPES, DType, b1, bf16, f8e4m3, f8e5m2, f16, f32, f64, i32
from peertile.ir import ops
from peertile.ir.core import Builder, Op, Value
from peertile.ir.ops import Binary, Compare, Fold, Rounding, Unary
from peertile.ir.types import INDEX, TileType

__all__ = ["EPS", "INTS", "LIMIT", "MATH", "V", "Values"]


@dataclass(frozen=True, slots=True)
class V:
    """A value, a bound of its magnitude (floats), and of its error; error 0 means fixed to the bit."""

    value: Value
    magnitude: float = 0.0
    error: float = 0.0

    @property
    def type(self) -> TileType:
        assert isinstance(self.value.type, TileType)
        return self.value.type

    @property
    def dtype(self) -> DType:
        return self.type.dtype


EPS: Final = {"f8e4m3": 2.0**-3, "f8e5m2": 2.0**-2, "f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-23, "f64": 2.0**-52}
LIMIT: Final = {"f8e4m3": 16.0, "f8e5m2": 16.0, "f16": 512.0, "bf16": 4096.0, "f32": 1e5, "f64": 1e5}
"""Magnitudes beyond these are clamped before they are used."""
MATH: Final = (f16, bf16, f32, f64)
INTS: Final = tuple(d for d in ALL_DTYPES if d.is_int)
_SHAPES: Final[tuple[tuple[int, ...], ...]] = ((), (4,), (16,), (32,), (2, 4), (4, 8), (8, 8), (16, 16), (2, 2, 4))

_BOUNDED: Final[dict[Unary, tuple[float, float, float]]] = {
    # Largest argument, largest slope and largest value up to there.
    Unary.EXP: (4, exp(4), exp(4)), Unary.EXP2: (6, 45, 64), Unary.SIN: (30, 1, 1), Unary.COS: (30, 1, 1),
    Unary.TAN: (1, 3.5, 1.6), Unary.SINH: (4, cosh(4), cosh(4)), Unary.COSH: (4, cosh(4), cosh(4)),
    Unary.TANH: (30, 1, 1), Unary.ERF: (30, 1.2, 1), Unary.SIGMOID: (30, 0.25, 1),
}  # fmt: skip
_POSITIVE: Final = {Unary.LOG: 1.0, Unary.LOG2: 1.5, Unary.SQRT: 0.5, Unary.RSQRT: 0.5}
"""Functions taken of abs(x) + 1, with their slope there."""
_INT_BINARY: Final = tuple(set(Binary) - {Binary.DIV, Binary.POW, Binary.ATAN2})


class Values:
    """A pool of values and a builder; `statements` adds more of them."""

    def __init__(self, seed: int, builder: Builder) -> None:
        self.r = random.Random(seed)
        self.b = builder
        self.pool: list[V] = []
        self.fixed_only = 0
        """Depth of loops whose carried values must stay fixed to the bit."""
        self.named: dict[str, Value] = {}
        """Parameters by name."""

    def moving(self) -> list[Callable[[], V | None]]:
        """Further statements, which may stand anywhere."""
        return []

    def more(self) -> list[Callable[[], V | None]]:
        """Further statements, where they may stand."""
        return []

    # -- small pieces

    def emit(self, cls: type[Op], operands: Sequence[Value], t: TileType, **attrs: Any) -> Value:
        return self.b.value(cls, operands, t, **attrs)

    def index(self, k: int) -> Value:
        return self.emit(ops.Const, (), INDEX, value=k)

    def const(self, number: float, t: TileType) -> V:
        value: int | float | bool
        if t.dtype.is_float:
            value = float(np.asarray(number).astype(np.float32).astype(t.dtype.numpy))
        else:
            value = bool(number) if t.dtype.is_bool else max(t.dtype.min, min(int(number), t.dtype.max))
        scalar = V(self.emit(ops.Const, (), TileType(t.dtype), value=value), max(abs(float(value)), 1.0))
        return self.broadcast(scalar, t.shape)

    def broadcast(self, v: V, shape: tuple[int, ...]) -> V:
        if v.type.shape == shape:
            return v
        return V(self.emit(ops.Broadcast, (v.value,), v.type.with_shape(shape)), v.magnitude, v.error)

    def pick(self, ok: Callable[[V], bool]) -> V | None:
        found = [v for v in self.pool if ok(v) and not (self.fixed_only and v.error)]
        # Later values are likelier, so that chains grow.
        return found[max(self.r.randrange(len(found)), self.r.randrange(len(found)))] if found else None

    def of_shape(self, shape: tuple[int, ...]) -> V:
        """Some value of this shape: one that is there, or one that is made to fit."""
        v = self.pick(lambda v: v.type.shape == shape)
        if v is not None and self.r.random() < 0.9:
            return v
        v = self.pick(lambda v: v.type.numel == prod(shape) and v.dtype.bits > 1)
        if v is not None:
            return V(self.emit(ops.Reshape, (v.value,), v.type.with_shape(shape)), v.magnitude, v.error)
        v = self.pick(lambda v: v.type.is_scalar)
        return self.broadcast(v if v is not None else self.const(3, TileType(i32)), shape)

    def of_type(self, t: TileType) -> V:
        v = self.pick(lambda v: v.type == t)
        return v if v is not None else self.convert(self.of_shape(t.shape), t.dtype)

    def fixed(self, shape: tuple[int, ...] | None = None) -> V:
        """A value that is the same to the bit on all targets."""
        v = self.pick(lambda v: v.error == 0 and (shape is None or v.type.shape == shape))
        return v if v is not None else self.const(2, TileType(i32, shape or ()))

    def binary_exact(self, fn: Binary, a: V, b: V, magnitude: float) -> V:
        return V(self.emit(ops.BinaryOp, (a.value, b.value), a.type, fn=fn), magnitude, max(a.error, b.error))

    def clamp(self, v: V, bound: float) -> V:
        """|v| <= bound, by min and max."""
        if v.magnitude <= bound:
            return v
        high = self.binary_exact(Binary.MIN, v, self.const(bound, v.type), v.magnitude)
        return self.binary_exact(Binary.MAX, high, self.const(-bound, v.type), bound)

    def settled(self, v: V) -> V:
        """Within the limit of its dtype."""
        return self.clamp(v, LIMIT[v.dtype.name]) if v.dtype in MATH else v

    # -- conversion

    def convert(self, v: V, d: DType) -> V:
        """`v` as dtype `d`; a value that is not fixed goes to a fixed type through the size of its tile."""
        if v.dtype == d:
            return v
        if v.error and not d.is_float:
            v = self.fixed(v.type.shape)
            if v.dtype == d:
                return v
        t = v.type.with_dtype(d)
        if not v.dtype.is_float:
            return self.from_int(v, t)
        attrs: dict[str, Any] = {}
        if self.r.random() < 0.3 and not v.error:
            attrs["rounding"] = self.r.choice(list(Rounding))
        if not d.is_float:
            return V(self.emit(ops.Cast, (v.value,), t, **attrs))
        if v.dtype in MATH:
            v = self.clamp(v, LIMIT[d.name])
        error = v.error + EPS[d.name] * v.magnitude * 2 if v.error else 0.0
        return V(self.emit(ops.Cast, (v.value,), t, **attrs), v.magnitude * 1.25, error)

    def from_int(self, v: V, t: TileType) -> V:
        saturate = t.dtype.is_int and self.r.random() < 0.3
        if not t.dtype.is_float:
            return V(self.emit(ops.Cast, (v.value,), t, saturate=saturate))
        small = v
        if v.dtype.is_int:
            mask = self.const(15, v.type)
            small = V(self.emit(ops.BinaryOp, (v.value, mask.value), v.type, fn=Binary.AND))
        return V(self.emit(ops.Cast, (small.value,), t), 15.0)

    # -- statements

    def statements(self, n: int) -> None:
        for _ in range(n):
            makers: list[Callable[[], V | None]] = [
                self.arithmetic, self.arithmetic, self.integer, self.integer, self.function, self.comparison,
                self.selection, self.conversion, self.shape, self.reduction, self.constant, self.fused,
                self.function,
                *self.moving(),
            ]  # fmt: skip
            if not self.fixed_only:
                makers += [self.matmul, *self.more()]
            v = self.r.choice(makers)()
            if v is not None:
                self.pool.append(self.settled(v))

    def constant(self) -> V | None:
        t = TileType(self.r.choice([*MATH, *INTS, b1]), self.r.choice(_SHAPES))
        return self.const(self.r.randint(-8, 8) / 2, t)

    def pair(self, ok: Callable[[DType], bool]) -> tuple[V, V] | None:
        a = self.pick(lambda v: ok(v.dtype))
        return None if a is None else (a, self.of_type(a.type))

    def arithmetic(self) -> V | None:
        found = self.pair(lambda d: d in MATH)
        if found is None:
            return None
        a, b = found
        eps = EPS[a.dtype.name]
        fn = self.r.choice(
            [Binary.ADD, Binary.SUB, Binary.MUL, Binary.DIV, Binary.MIN, Binary.MAX, Binary.ATAN2, Binary.POW]
        )
        if fn in (Binary.ADD, Binary.SUB):
            magnitude, error = a.magnitude + b.magnitude, a.error + b.error
        elif fn is Binary.MUL:
            magnitude, error = a.magnitude * b.magnitude, a.error * b.magnitude + b.error * a.magnitude
            if magnitude > 1e4 * LIMIT[a.dtype.name]:
                return None
        elif fn in (Binary.MIN, Binary.MAX):
            # Which zero of two is not fixed; nothing here tells them apart but bits, so keep them off.
            b = self.plus_one(b)
            return self.binary_exact(fn, a, b, max(a.magnitude, b.magnitude))
        elif self.fixed_only and fn is not Binary.DIV:
            return None
        else:
            b = self.plus_one(b)
            if fn is Binary.DIV:
                magnitude, error = a.magnitude, a.error + b.error * a.magnitude
            elif fn is Binary.ATAN2:
                magnitude, error = 3.2, a.error + b.error * a.magnitude + 16 * eps * 3.2
            else:
                a, b = b, self.clamp(a, 2.0)
                a = self.clamp(a, 8.0)
                magnitude, error = 64.0, 16 * a.error + 140 * b.error + 64 * 16 * eps
        if error:
            error += eps * magnitude
        return V(self.emit(ops.BinaryOp, (a.value, b.value), a.type, fn=fn), magnitude, error)

    def plus_one(self, v: V) -> V:
        """abs(v) + 1: at least 1."""
        positive = V(self.emit(ops.UnaryOp, (v.value,), v.type, fn=Unary.ABS), v.magnitude, v.error)
        one = self.const(1, v.type)
        value = self.emit(ops.BinaryOp, (positive.value, one.value), v.type, fn=Binary.ADD)
        error = v.error + EPS[v.dtype.name] * (v.magnitude + 1) if v.error else 0.0
        return V(value, v.magnitude + 1, error)

    def integer(self) -> V | None:
        found = self.pair(lambda d: d.is_int)
        if found is None:
            return None
        a, b = found
        if self.r.random() < 0.2:
            fn = self.r.choice([Unary.NEG, Unary.ABS, Unary.NOT])
            return V(self.emit(ops.UnaryOp, (a.value,), a.type, fn=fn))
        names = sorted(fn.value for fn in _INT_BINARY)
        return V(self.emit(ops.BinaryOp, (a.value, b.value), a.type, fn=Binary(self.r.choice(names))))

    def function(self) -> V | None:
        v = self.pick(lambda v: v.dtype in MATH)
        if v is None:
            return None
        eps = EPS[v.dtype.name]
        choices = [*_BOUNDED, *_POSITIVE, Unary.NEG, Unary.ABS, Unary.FLOOR, Unary.CEIL, Unary.ROUND]
        fn = self.r.choice(choices)
        if fn in (Unary.NEG, Unary.ABS):
            return V(self.emit(ops.UnaryOp, (v.value,), v.type, fn=fn), v.magnitude, v.error)
        if fn in (Unary.FLOOR, Unary.CEIL, Unary.ROUND):
            return None if v.error else V(self.emit(ops.UnaryOp, (v.value,), v.type, fn=fn), v.magnitude + 1)
        if fn is Unary.SQRT and not v.error:
            v = self.plus_one(v)
            return V(self.emit(ops.UnaryOp, (v.value,), v.type, fn=fn), v.magnitude)
        if self.fixed_only:
            return None
        if fn in _POSITIVE:
            v = self.plus_one(v)
            slope, magnitude = _POSITIVE[fn], max(v.magnitude, 1.0)
        else:
            bound, slope, magnitude = _BOUNDED[fn]
            v = self.clamp(v, bound)
        return V(self.emit(ops.UnaryOp, (v.value,), v.type, fn=fn), magnitude, slope * v.error + 16 * eps * magnitude)

    def fused(self) -> V | None:
        found = self.pair(lambda d: d in MATH)
        if found is None:
            return None
        (a, b), c = found, self.of_type(found[0].type)
        magnitude = a.magnitude * b.magnitude + c.magnitude
        if magnitude > 1e4 * LIMIT[a.dtype.name]:
            return None
        error = a.error * b.magnitude + b.error * a.magnitude + c.error
        if error:
            error += EPS[a.dtype.name] * magnitude
        return V(self.emit(ops.Fma, (a.value, b.value, c.value), a.type), magnitude, error)

    def comparison(self) -> V | None:
        a = self.fixed()
        if a.dtype.is_bool:
            logic = self.r.choice([Binary.AND, Binary.OR, Binary.XOR])
            return V(self.emit(ops.BinaryOp, (a.value, self.condition(a.type.shape).value), a.type, fn=logic))
        b = self.pick(lambda v: v.type == a.type and not v.error) or self.const(1, a.type)
        fn = self.r.choice([c for c in Compare if a.dtype.is_int or c is not Compare.AT_LEAST])
        return V(self.emit(ops.CompareOp, (a.value, b.value), a.type.with_dtype(b1), fn=fn))

    def condition(self, shape: tuple[int, ...]) -> V:
        v = self.pick(lambda v: v.dtype.is_bool and v.type.shape == shape)
        return v if v is not None else self.broadcast(V(self.named["c"]), shape)

    def selection(self) -> V | None:
        found = self.pair(lambda d: True)
        if found is None:
            return None
        a, b = found
        c = self.condition(a.type.shape)
        value = self.emit(ops.Select, (c.value, a.value, b.value), a.type)
        return V(value, max(a.magnitude, b.magnitude), max(a.error, b.error))

    def conversion(self) -> V | None:
        v = self.pick(lambda v: True)
        assert v is not None
        same_width = [d for d in (*INTS, *MATH, f8e4m3, f8e5m2) if d.bits == v.dtype.bits and d.is_int]
        if not v.error and same_width and self.r.random() < 0.2:
            return V(self.emit(ops.Bitcast, (v.value,), v.type.with_dtype(self.r.choice(same_width))))
        return self.convert(v, self.r.choice(ALL_DTYPES))

    def shape(self) -> V | None:
        v = self.pick(lambda v: v.type.rank > 0)
        if v is None:
            return None
        shape = v.type.shape
        if self.r.random() < 0.5:
            axes = tuple(self.r.sample(range(len(shape)), len(shape)))
            t = v.type.with_shape(tuple(shape[k] for k in axes))
            return V(self.emit(ops.Permute, (v.value,), t, axes=axes), v.magnitude, v.error)
        to = self.r.choice([s for s in (*_SHAPES, (v.type.numel,), (1, *shape)) if prod(s) == v.type.numel])
        v = V(self.emit(ops.Reshape, (v.value,), v.type.with_shape(to)), v.magnitude, v.error)
        if 1 in to and v.type.numel <= 128:
            wide = tuple(self.r.choice([2, 4]) if n == 1 else n for n in to)
            return self.broadcast(v, wide)
        return v

    def reduction(self) -> V | None:
        v = self.pick(lambda v: v.type.rank > 0 and (v.dtype.is_int or v.dtype in MATH))
        if v is None:
            return None
        axis = self.r.randrange(v.type.rank)
        n, fns = v.type.shape[axis], [Fold.MAX, Fold.MIN]
        if v.dtype.is_int:
            fns = list(Fold)
        elif not self.fixed_only:
            fns += [Fold.ADD, Fold.ADD, *([Fold.MUL] if n <= 16 else [])]
        fn = self.r.choice(fns)
        magnitude, error = v.magnitude, v.error
        if v.dtype.is_float and fn in (Fold.MAX, Fold.MIN):
            v = self.plus_one(v)  # no zeros of both signs
            magnitude, error = v.magnitude, v.error
        elif v.dtype.is_float and fn is Fold.MUL:
            v = self.clamp(v, 1.25)
            magnitude = 1.25**n
            error = n * magnitude * (v.error + 2 * EPS[v.dtype.name])
        elif v.dtype.is_float and fn is Fold.ADD:
            # Narrow floats are summed in f32 and rounded at the end.
            magnitude = n * v.magnitude
            error = n * v.error + magnitude * (2 * EPS[v.dtype.name] + n * EPS["f32" if v.dtype.bits < 64 else "f64"])
        t = v.type.with_shape(v.type.shape[:axis] + v.type.shape[axis + 1 :])
        return V(self.emit(ops.Reduce, (v.value,), t, fn=fn, axis=axis), magnitude, error)

    def matmul(self) -> V | None:
        name = self.r.choice(sorted(ops.MMA_TYPES))
        d, acc = (next(x for x in ALL_DTYPES if x.name == n) for n in (name, ops.MMA_TYPES[name][0]))
        m, k, n = (self.r.choice([1, 2, 4, 8, 16]) for _ in range(3))
        batch = self.r.choice([(), (), (), (2,)])
        a, b = (self.convert(self.of_shape((*batch, *s)), d) for s in ((m, k), (k, n)))
        c = self.convert(self.of_shape((*batch, m, n)), acc)
        t = TileType(acc, (*batch, m, n))
        value = self.emit(ops.Mma, (a.value, b.value, c.value), t)
        if not acc.is_float:
            return V(value)
        magnitude = k * a.magnitude * b.magnitude + c.magnitude
        error = k * (a.error * b.magnitude + b.error * a.magnitude) + c.error
        return V(value, magnitude, error + (k + 2) * EPS[acc.name] * magnitude)
