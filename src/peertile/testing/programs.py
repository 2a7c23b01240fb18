"""Random kernels with known answers' accuracy, to compare a backend with the meaning of the ops.

`random_kernel(seed)` is deterministic. Every program of a kernel writes only its own tile, words and
(commutative, integer) atomic updates, so any order of programs gives one answer. Values carry a bound
of their magnitude and of how far a right target may be off: 0 while only operations were used whose
result is fixed to the bit (integers, and float operations that round once), more after exp, sums,
products of matrices. What jumps (comparisons, floor, float to integer) takes fixed values only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import cosh, exp, prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from peertile.dtypes import ALL_DTYPES, DType, b1, bf16, f8e4m3, f8e5m2, f16, f32, f64, i32, i64
from peertile.ir import ops
from peertile.ir.core import Block, Builder, Kernel, Op, Value
from peertile.ir.ops import Binary, Compare, Fold, Padding, Rounding, Unary
from peertile.ir.types import BOOL, INDEX, Access, Partition, Space, TileType, Type, ViewType
from peertile.memory_model import Order, Rmw, Scope

__all__ = ["RandomKernel", "differences", "random_kernel"]


class RandomKernel(NamedTuple):
    """A kernel as a frontend would give it (passes have not run), and how to run it."""

    kernel: Kernel
    grid: int
    make_args: Callable[[], list[Any]]
    """Fresh arguments, the same ones at each call; outputs are among them."""
    tolerance: dict[int, float]
    """For each argument that is written: how far an element may be from the meaning's; 0 means equal."""


def differences(program: RandomKernel, found: Sequence[Any], expected: Sequence[Any]) -> list[str]:
    """What is wrong with the arguments `found` after a run, against `expected`; empty if nothing is."""
    texts = []
    for k, tolerance in program.tolerance.items():
        t = program.kernel.params[k].type
        assert isinstance(t, ViewType)
        a, b = np.asarray(found[k]), np.asarray(expected[k])
        if t.dtype.is_float:
            a, b = a.astype(np.float64), b.astype(np.float64)
            wrong = ~((np.abs(a - b) <= tolerance) | (np.isnan(a) & np.isnan(b)))
        else:
            wrong = a != b
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            name = program.kernel.param_names[k]
            texts.append(f"{name}{list(at)}: expected {b[at]} within {tolerance}, got {a[at]} ({wrong.sum()} wrong)")
    return texts


@dataclass(frozen=True, slots=True)
class _V:
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


_EPS: Final = {"f8e4m3": 2.0**-3, "f8e5m2": 2.0**-2, "f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-23, "f64": 2.0**-52}
_LIMIT: Final = {"f8e4m3": 16.0, "f8e5m2": 16.0, "f16": 512.0, "bf16": 4096.0, "f32": 1e5, "f64": 1e5}
"""Magnitudes beyond these are clamped before they are used."""
_MATH: Final = (f16, bf16, f32, f64)
_INTS: Final = tuple(d for d in ALL_DTYPES if d.is_int)
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


def random_kernel(seed: int) -> RandomKernel:
    """The kernel of `seed`."""
    return _Maker(seed).make()


class _Maker:
    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.seed = seed
        self.params: list[tuple[str, Type, Callable[[np.random.Generator], Any]]] = []
        self.pool: list[_V] = []
        self.fixed_only = 0
        """Depth of loops whose carried values must stay fixed to the bit."""
        self.tolerance: dict[str, float] = {}

    # -- parameters and the frame of the kernel

    def make(self) -> RandomKernel:
        r = self.r
        tile = r.choice([(16,), (32,), (4, 8), (8, 8), (16, 16)])
        extents = tuple(r.randint(1, 3) * n - r.choice([0, 0, r.randrange(n)]) for n in tile)
        self.tile, self.extents = tile, extents
        self.grid = prod(-(-n // t) for n, t in zip(extents, tile, strict=True))
        out = r.choice([*_MATH, *_INTS, b1])
        partition = Partition(tile, False, r.choice([1, 1, 2]))
        self.param("z", ViewType(out, len(tile), Access.READ_WRITE, Space.LOCAL, partition), self.array(out, extents))
        for k in range(r.randint(1, 3)):
            d = r.choice(ALL_DTYPES)
            self.param(f"x{k}", ViewType(d, len(tile)), self.array(d, extents, strided=True))
        self.words = r.choice([i32, i64, f32])
        self.param("w", ViewType(self.words, 1, Access.READ_WRITE), self.array(self.words, (self.grid + 3,)))
        self.param("a", ViewType(i32, 1, Access.READ_WRITE, Space.DEVICE), self.array(i32, (29,)))
        self.param("n", INDEX, lambda g: int(g.integers(0, 6)))
        self.param("f", TileType(f32), lambda g: float(np.float32(g.uniform(-2, 2))))
        self.param("c", BOOL, lambda g: bool(g.integers(0, 2)))
        body = Block([t for _, t, _ in self.params], [name for name, _, _ in self.params])
        self.named = dict(zip((name for name, _, _ in self.params), body.args, strict=True))
        self.b = Builder(body)
        self.body()
        self.b.emit(ops.Return)
        names = tuple(name for name, _, _ in self.params)
        kernel = Kernel(f"random_{self.seed}", names, body)
        return RandomKernel(
            kernel, self.grid, self.args, {names.index(n): e for n, e in sorted(self.tolerance.items())}
        )

    def param(self, name: str, t: Type, make: Callable[[np.random.Generator], Any]) -> None:
        self.params.append((name, t, make))

    def args(self) -> list[Any]:
        g = np.random.default_rng(self.seed)
        return [make(g) for _, _, make in self.params]

    def array(
        self, d: DType, extents: tuple[int, ...], strided: bool = False
    ) -> Callable[[np.random.Generator], npt.NDArray[Any]]:
        step = self.r.choice([1, 1, 2]) if strided else 1

        def make(g: np.random.Generator) -> npt.NDArray[Any]:
            shape = (*extents[:-1], extents[-1] * step)
            if d.is_float:
                eighths = g.integers(-32, 32, shape) / 8
                x: npt.NDArray[Any] = np.where(g.integers(0, 2, shape), eighths, g.uniform(-4, 4, shape))
                x = x.astype(np.float32)
            elif d.is_bool:
                x = g.integers(0, 2, shape)
            else:
                wide = g.integers(d.min, d.max, shape, d.numpy, endpoint=True)
                x = np.where(g.integers(0, 2, shape), wide, (wide % d.numpy.type(10)).astype(d.numpy))
            return np.ascontiguousarray(x.astype(d.numpy))[..., ::step]

        return make

    def body(self) -> None:
        r = self.r
        self.program = self.b.value(ops.ProgramId, (), INDEX)
        index = self.b.emit(ops.TileIndex, (self.named["z"], self.program), [INDEX] * len(self.tile)).results
        for name in self.named:
            if name[0] in "xz":
                self.pool.append(self.load(self.named[name], index))
        self.pool.append(_V(self.named["f"], 2.0))
        self.pool.append(self.broadcast(_V(self.named["f"], 2.0), self.tile))
        self.pool.append(self.broadcast(_V(self.named["n"]), self.tile))
        self.statements(r.randint(4, 14))
        if r.random() < 0.2:
            self.leave_early()
        self.store_tile(index)
        if r.random() < 0.3:
            # What was stored is read again.
            self.pool.append(self.load(self.named["z"], index, self.tolerance["z"]))
            self.statements(2)
            self.store_tile(index)
        self.store_word()
        self.update()

    def leave_early(self) -> None:
        leave, stay = Block(), Block()
        with self.b.at(leave):
            self.b.emit(ops.Return)
        with self.b.at(stay):
            self.b.emit(ops.Yield)
        self.b.emit(ops.If, (self.named["c"],), blocks=(leave, stay))

    def store_tile(self, index: Sequence[Value]) -> None:
        t = self.named["z"].type
        assert isinstance(t, ViewType)
        v = self.convert(self.of_shape(self.tile), t.dtype)
        self.b.emit(ops.Store, (self.named["z"], v.value, *index))
        self.tolerance["z"] = max(self.tolerance.get("z", 0.0), v.error)

    def store_word(self) -> None:
        v = self.convert(self.of_shape(()), self.words)
        self.b.emit(ops.WordStore, (self.named["w"], v.value, self.program), order=Order.WEAK, scope=None)
        self.tolerance["w"] = v.error

    def update(self) -> None:
        v = self.convert(self.of_shape((16,)), i32)
        # One kind per kernel: different kinds do not commute.
        fn = self.r.choice([Rmw.ADD, Rmw.AND, Rmw.OR, Rmw.XOR, Rmw.MIN, Rmw.MAX, Rmw.UMIN, Rmw.UMAX])
        index = self.index(self.r.randrange(2))
        self.b.emit(ops.TileAtomic, (self.named["a"], v.value, index), rmw=fn, scope=Scope.DEVICE)
        self.tolerance["a"] = 0.0

    # -- small pieces

    def emit(self, cls: type[Op], operands: Sequence[Value], t: TileType, **attrs: Any) -> Value:
        return self.b.value(cls, operands, t, **attrs)

    def index(self, k: int) -> Value:
        return self.emit(ops.Const, (), INDEX, value=k)

    def const(self, number: float, t: TileType) -> _V:
        value: int | float | bool
        if t.dtype.is_float:
            value = float(np.asarray(number).astype(np.float32).astype(t.dtype.numpy))
        else:
            value = bool(number) if t.dtype.is_bool else max(t.dtype.min, min(int(number), t.dtype.max))
        scalar = _V(self.emit(ops.Const, (), TileType(t.dtype), value=value), max(abs(float(value)), 1.0))
        return self.broadcast(scalar, t.shape)

    def broadcast(self, v: _V, shape: tuple[int, ...]) -> _V:
        if v.type.shape == shape:
            return v
        return _V(self.emit(ops.Broadcast, (v.value,), v.type.with_shape(shape)), v.magnitude, v.error)

    def load(self, view: Value, index: Sequence[Value], error: float = 0.0) -> _V:
        t = view.type
        assert isinstance(t, ViewType)
        choices = [Padding.ZERO, Padding.ZERO]
        if t.dtype.is_float:
            choices += [Padding.NEG_ZERO, *([Padding.INF] if t.dtype in _MATH else [])]
        padding = self.r.choice(choices)
        value = self.emit(ops.Load, (view, *index), TileType(t.dtype, self.tile), padding=padding)
        bound = 2 * _LIMIT[t.dtype.name] if t.dtype.is_float and view is self.named["z"] else 4.0
        v = _V(value, bound if t.dtype.is_float else 0.0, error if t.dtype.is_float else 0.0)
        if padding is Padding.INF:
            return self.binary_exact(Binary.MIN, v, self.const(bound, v.type), bound)
        return v

    def pick(self, ok: Callable[[_V], bool]) -> _V | None:
        found = [v for v in self.pool if ok(v) and not (self.fixed_only and v.error)]
        # Later values are likelier, so that chains grow.
        return found[max(self.r.randrange(len(found)), self.r.randrange(len(found)))] if found else None

    def of_shape(self, shape: tuple[int, ...]) -> _V:
        """Some value of this shape: one that is there, or one that is made to fit."""
        v = self.pick(lambda v: v.type.shape == shape)
        if v is not None and self.r.random() < 0.9:
            return v
        v = self.pick(lambda v: v.type.numel == prod(shape) and v.dtype.bits > 1)
        if v is not None:
            return _V(self.emit(ops.Reshape, (v.value,), v.type.with_shape(shape)), v.magnitude, v.error)
        v = self.pick(lambda v: v.type.is_scalar)
        return self.broadcast(v if v is not None else self.const(3, TileType(i32)), shape)

    def of_type(self, t: TileType) -> _V:
        v = self.pick(lambda v: v.type == t)
        return v if v is not None else self.convert(self.of_shape(t.shape), t.dtype)

    def fixed(self, shape: tuple[int, ...] | None = None) -> _V:
        """A value that is the same to the bit on all targets."""
        v = self.pick(lambda v: v.error == 0 and (shape is None or v.type.shape == shape))
        return v if v is not None else self.const(2, TileType(i32, shape or ()))

    def binary_exact(self, fn: Binary, a: _V, b: _V, magnitude: float) -> _V:
        return _V(self.emit(ops.BinaryOp, (a.value, b.value), a.type, fn=fn), magnitude, max(a.error, b.error))

    def clamp(self, v: _V, bound: float) -> _V:
        """|v| <= bound, by min and max."""
        if v.magnitude <= bound:
            return v
        high = self.binary_exact(Binary.MIN, v, self.const(bound, v.type), v.magnitude)
        return self.binary_exact(Binary.MAX, high, self.const(-bound, v.type), bound)

    def settled(self, v: _V) -> _V:
        """Within the limit of its dtype."""
        return self.clamp(v, _LIMIT[v.dtype.name]) if v.dtype in _MATH else v

    # -- conversion

    def convert(self, v: _V, d: DType) -> _V:
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
            return _V(self.emit(ops.Cast, (v.value,), t, **attrs))
        if v.dtype in _MATH:
            v = self.clamp(v, _LIMIT[d.name])
        error = v.error + _EPS[d.name] * v.magnitude * 2 if v.error else 0.0
        return _V(self.emit(ops.Cast, (v.value,), t, **attrs), v.magnitude * 1.25, error)

    def from_int(self, v: _V, t: TileType) -> _V:
        saturate = t.dtype.is_int and self.r.random() < 0.3
        if not t.dtype.is_float:
            return _V(self.emit(ops.Cast, (v.value,), t, saturate=saturate))
        small = v
        if v.dtype.is_int:
            mask = self.const(15, v.type)
            small = _V(self.emit(ops.BinaryOp, (v.value, mask.value), v.type, fn=Binary.AND))
        return _V(self.emit(ops.Cast, (small.value,), t), 15.0)

    # -- statements

    def statements(self, n: int) -> None:
        for _ in range(n):
            makers: list[Callable[[], _V | None]] = [
                self.arithmetic, self.arithmetic, self.integer, self.integer, self.function, self.comparison,
                self.selection, self.conversion, self.shape, self.reduction, self.constant, self.fused,
            ]  # fmt: skip
            if not self.fixed_only:
                makers += [self.matmul, self.counted, self.polled, self.branch, self.word]
            v = self.r.choice(makers)()
            if v is not None:
                self.pool.append(self.settled(v))

    def constant(self) -> _V | None:
        t = TileType(self.r.choice([*_MATH, *_INTS, b1]), self.r.choice(_SHAPES))
        return self.const(self.r.randint(-8, 8) / 2, t)

    def word(self) -> _V | None:
        load = ops.WordLoad
        v = self.b.value(load, (self.named["w"], self.program), TileType(self.words), order=Order.WEAK, scope=None)
        return _V(v, 4.0 if self.words.is_float else 0.0)

    def pair(self, ok: Callable[[DType], bool]) -> tuple[_V, _V] | None:
        a = self.pick(lambda v: ok(v.dtype))
        return None if a is None else (a, self.of_type(a.type))

    def arithmetic(self) -> _V | None:
        found = self.pair(lambda d: d in _MATH)
        if found is None:
            return None
        a, b = found
        eps = _EPS[a.dtype.name]
        fn = self.r.choice(
            [Binary.ADD, Binary.SUB, Binary.MUL, Binary.DIV, Binary.MIN, Binary.MAX, Binary.ATAN2, Binary.POW]
        )
        if fn in (Binary.ADD, Binary.SUB):
            magnitude, error = a.magnitude + b.magnitude, a.error + b.error
        elif fn is Binary.MUL:
            magnitude, error = a.magnitude * b.magnitude, a.error * b.magnitude + b.error * a.magnitude
            if magnitude > 1e4 * _LIMIT[a.dtype.name]:
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
        return _V(self.emit(ops.BinaryOp, (a.value, b.value), a.type, fn=fn), magnitude, error)

    def plus_one(self, v: _V) -> _V:
        """abs(v) + 1: at least 1."""
        positive = _V(self.emit(ops.UnaryOp, (v.value,), v.type, fn=Unary.ABS), v.magnitude, v.error)
        one = self.const(1, v.type)
        value = self.emit(ops.BinaryOp, (positive.value, one.value), v.type, fn=Binary.ADD)
        error = v.error + _EPS[v.dtype.name] * (v.magnitude + 1) if v.error else 0.0
        return _V(value, v.magnitude + 1, error)

    def integer(self) -> _V | None:
        found = self.pair(lambda d: d.is_int)
        if found is None:
            return None
        a, b = found
        if self.r.random() < 0.2:
            fn = self.r.choice([Unary.NEG, Unary.ABS, Unary.NOT])
            return _V(self.emit(ops.UnaryOp, (a.value,), a.type, fn=fn))
        names = sorted(fn.value for fn in _INT_BINARY)
        return _V(self.emit(ops.BinaryOp, (a.value, b.value), a.type, fn=Binary(self.r.choice(names))))

    def function(self) -> _V | None:
        v = self.pick(lambda v: v.dtype in _MATH)
        if v is None:
            return None
        eps = _EPS[v.dtype.name]
        choices = [*_BOUNDED, *_POSITIVE, Unary.NEG, Unary.ABS, Unary.FLOOR, Unary.CEIL, Unary.ROUND]
        fn = self.r.choice(choices)
        if fn in (Unary.NEG, Unary.ABS):
            return _V(self.emit(ops.UnaryOp, (v.value,), v.type, fn=fn), v.magnitude, v.error)
        if fn in (Unary.FLOOR, Unary.CEIL, Unary.ROUND):
            return None if v.error else _V(self.emit(ops.UnaryOp, (v.value,), v.type, fn=fn), v.magnitude + 1)
        if fn is Unary.SQRT and not v.error:
            v = self.plus_one(v)
            return _V(self.emit(ops.UnaryOp, (v.value,), v.type, fn=fn), v.magnitude)
        if self.fixed_only:
            return None
        if fn in _POSITIVE:
            v = self.plus_one(v)
            slope, magnitude = _POSITIVE[fn], max(v.magnitude, 1.0)
        else:
            bound, slope, magnitude = _BOUNDED[fn]
            v = self.clamp(v, bound)
        return _V(self.emit(ops.UnaryOp, (v.value,), v.type, fn=fn), magnitude, slope * v.error + 16 * eps * magnitude)

    def fused(self) -> _V | None:
        found = self.pair(lambda d: d in _MATH)
        if found is None:
            return None
        (a, b), c = found, self.of_type(found[0].type)
        magnitude = a.magnitude * b.magnitude + c.magnitude
        if magnitude > 1e4 * _LIMIT[a.dtype.name]:
            return None
        error = a.error * b.magnitude + b.error * a.magnitude + c.error
        if error:
            error += _EPS[a.dtype.name] * magnitude
        return _V(self.emit(ops.Fma, (a.value, b.value, c.value), a.type), magnitude, error)

    def comparison(self) -> _V | None:
        a = self.fixed()
        if a.dtype.is_bool:
            logic = self.r.choice([Binary.AND, Binary.OR, Binary.XOR])
            return _V(self.emit(ops.BinaryOp, (a.value, self.condition(a.type.shape).value), a.type, fn=logic))
        b = self.pick(lambda v: v.type == a.type and not v.error) or self.const(1, a.type)
        fn = self.r.choice([c for c in Compare if a.dtype.is_int or c is not Compare.AT_LEAST])
        return _V(self.emit(ops.CompareOp, (a.value, b.value), a.type.with_dtype(b1), fn=fn))

    def condition(self, shape: tuple[int, ...]) -> _V:
        v = self.pick(lambda v: v.dtype.is_bool and v.type.shape == shape)
        return v if v is not None else self.broadcast(_V(self.named["c"]), shape)

    def selection(self) -> _V | None:
        found = self.pair(lambda d: True)
        if found is None:
            return None
        a, b = found
        c = self.condition(a.type.shape)
        value = self.emit(ops.Select, (c.value, a.value, b.value), a.type)
        return _V(value, max(a.magnitude, b.magnitude), max(a.error, b.error))

    def conversion(self) -> _V | None:
        v = self.pick(lambda v: True)
        assert v is not None
        same_width = [d for d in (*_INTS, *_MATH, f8e4m3, f8e5m2) if d.bits == v.dtype.bits and d.is_int]
        if not v.error and same_width and self.r.random() < 0.2:
            return _V(self.emit(ops.Bitcast, (v.value,), v.type.with_dtype(self.r.choice(same_width))))
        return self.convert(v, self.r.choice(ALL_DTYPES))

    def shape(self) -> _V | None:
        v = self.pick(lambda v: v.type.rank > 0)
        if v is None:
            return None
        shape = v.type.shape
        if self.r.random() < 0.5:
            axes = tuple(self.r.sample(range(len(shape)), len(shape)))
            t = v.type.with_shape(tuple(shape[k] for k in axes))
            return _V(self.emit(ops.Permute, (v.value,), t, axes=axes), v.magnitude, v.error)
        to = self.r.choice([s for s in (*_SHAPES, (v.type.numel,), (1, *shape)) if prod(s) == v.type.numel])
        v = _V(self.emit(ops.Reshape, (v.value,), v.type.with_shape(to)), v.magnitude, v.error)
        if 1 in to and v.type.numel <= 128:
            wide = tuple(self.r.choice([2, 4]) if n == 1 else n for n in to)
            return self.broadcast(v, wide)
        return v

    def reduction(self) -> _V | None:
        v = self.pick(lambda v: v.type.rank > 0 and (v.dtype.is_int or v.dtype in _MATH))
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
            error = n * magnitude * (v.error + 2 * _EPS[v.dtype.name])
        elif v.dtype.is_float and fn is Fold.ADD:
            # Narrow floats are summed in f32 and rounded at the end.
            magnitude = n * v.magnitude
            error = n * v.error + magnitude * (2 * _EPS[v.dtype.name] + n * _EPS["f32" if v.dtype.bits < 64 else "f64"])
        t = v.type.with_shape(v.type.shape[:axis] + v.type.shape[axis + 1 :])
        return _V(self.emit(ops.Reduce, (v.value,), t, fn=fn, axis=axis), magnitude, error)

    def matmul(self) -> _V | None:
        name = self.r.choice(sorted(ops.MMA_TYPES))
        d, acc = (next(x for x in ALL_DTYPES if x.name == n) for n in (name, ops.MMA_TYPES[name][0]))
        m, k, n = (self.r.choice([1, 2, 4, 8, 16]) for _ in range(3))
        batch = self.r.choice([(), (), (), (2,)])
        a, b = (self.convert(self.of_shape((*batch, *s)), d) for s in ((m, k), (k, n)))
        c = self.convert(self.of_shape((*batch, m, n)), acc)
        t = TileType(acc, (*batch, m, n))
        value = self.emit(ops.Mma, (a.value, b.value, c.value), t)
        if not acc.is_float:
            return _V(value)
        magnitude = k * a.magnitude * b.magnitude + c.magnitude
        error = k * (a.error * b.magnitude + b.error * a.magnitude) + c.error
        return _V(value, magnitude, error + (k + 2) * _EPS[acc.name] * magnitude)

    # -- control flow

    def carried(self) -> list[_V]:
        """Values that a loop may carry: fixed to the bit, so that no error grows from trip to trip."""
        found = [v for v in self.pool if not v.error and v.type.numel <= 256]
        return self.r.sample(found, min(len(found), self.r.randint(1, 3)))

    def trip(self, carried: Sequence[_V], n: int) -> list[_V]:
        """Statements of one trip; the next values of the same types, in the same bounds."""
        self.pool += carried
        self.statements(n)
        next_values = []
        for v in carried:
            new = self.of_type(v.type)
            next_values.append(self.clamp(new, v.magnitude) if v.dtype in _MATH else new if v.dtype.bits > 1 else v)
        return [
            v if w.dtype.is_float and w.dtype not in _MATH else w for v, w in zip(carried, next_values, strict=True)
        ]

    def scoped(self, block: Block, run: Callable[[], None]) -> None:
        """Builds `block`; values made in it are forgotten after, and all it uses is fixed."""
        pool, self.pool = self.pool, list(self.pool)
        self.fixed_only += 1
        with self.b.at(block):
            run()
        self.fixed_only -= 1
        self.pool = pool

    def counted(self) -> _V | None:
        """A `for` with carried values, and sometimes a way out."""
        start = self.carried()
        if not start:
            return None
        types = [v.type for v in start]
        block = Block([INDEX, *types])
        lo, step = self.index(self.r.randint(0, 2)), self.index(self.r.randint(1, 2))
        hi = self.r.choice([self.named["n"], self.index(self.r.randint(0, 4))])

        def run() -> None:
            carried = [_V(a, v.magnitude) for a, v in zip(block.args[1:], start, strict=True)]
            self.pool.append(_V(block.args[0]))
            if self.r.random() < 0.4:
                self.way_out(self.r.choice([ops.Break, ops.Continue]), [v.value for v in carried])
            end = self.r.choice([ops.Continue] * 5 + [ops.Break])
            self.b.emit(end, [v.value for v in self.trip(carried, self.r.randint(1, 4))])

        self.scoped(block, run)
        initial = [v.value for v in start]
        results = self.b.emit(ops.For, (lo, hi, step, *initial), types, (block,)).results
        self.pool += [_V(x, v.magnitude) for x, v in zip(results, start, strict=True)]
        return None

    def way_out(self, cls: type[Op], values: Sequence[Value]) -> None:
        leave, stay = Block(), Block()
        with self.b.at(leave):
            self.b.emit(cls, values)
        with self.b.at(stay):
            self.b.emit(ops.Yield)
        self.b.emit(ops.If, (self.condition(()).value,), blocks=(leave, stay))

    def polled(self) -> _V | None:
        """A `loop` with a counter that ends it."""
        start = self.carried()
        types = [v.type for v in start]
        block = Block([INDEX, *types])
        limit = self.index(self.r.randint(1, 4))

        def run() -> None:
            carried = [_V(a, v.magnitude) for a, v in zip(block.args[1:], start, strict=True)]
            over = self.emit(ops.CompareOp, (block.args[0], limit), BOOL, fn=Compare.GE)
            leave, stay = Block(), Block()
            with self.b.at(leave):
                self.b.emit(ops.Break, [v.value for v in carried])
            with self.b.at(stay):
                self.b.emit(ops.Yield)
            self.b.emit(ops.If, (over,), blocks=(leave, stay))
            count = self.emit(ops.BinaryOp, (block.args[0], self.index(1)), INDEX, fn=Binary.ADD)
            self.b.emit(ops.Continue, [count, *(v.value for v in self.trip(carried, self.r.randint(1, 3)))])

        self.scoped(block, run)
        results = self.b.emit(ops.Loop, (self.index(0), *(v.value for v in start)), types, (block,)).results
        self.pool += [_V(x, v.magnitude) for x, v in zip(results, start, strict=True)]
        return None

    def branch(self) -> _V | None:
        """An `if` whose arms give values of the same types."""
        start = self.carried()
        blocks = Block(), Block()
        for block in blocks:

            def run() -> None:
                self.b.emit(ops.Yield, [v.value for v in self.trip(start, self.r.randint(1, 3))])

            self.scoped(block, run)
        results = self.b.emit(ops.If, (self.condition(()).value,), [v.type for v in start], blocks).results
        self.pool += [_V(x, v.magnitude) for x, v in zip(results, start, strict=True)]
        return None
