"""Words that reduce, scan and sort along an axis. No memory, no control flow.

A function of the kernel's own becomes the block of a `reduce_with` or `scan_with`; arg-maxima and cumulative
folds are such blocks written here, so that a target has two ops to lower and not twelve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import peertile.language as T
from peertile.dtypes import DType, b1, f32, i64
from peertile.frontend.convert import (
    axis_number,
    broadcast_to,
    cast,
    constant,
    flag_arg,
    int_arg,
    int_tuple_arg,
    to_dtype,
)
from peertile.frontend.impl_tiles import nan_arg, tuple_text
from peertile.frontend.registry import call_word, implements
from peertile.frontend.scope import Build
from peertile.frontend.values import NONE, Abstract, Known, Tile, Tup, describe
from peertile.ir import ops
from peertile.ir.core import Block, Op, Value
from peertile.ir.ops import Binary, Compare, Fold, Unary
from peertile.ir.types import INDEX, TileType
from peertile.language.folds import NanRule
from peertile.language.word import word_of

__all__ = ["index_along"]


def _tile(b: Build, x: Abstract, role: str) -> Tile:
    if not isinstance(x, Tile):
        b.fail(f"{role}: expected a tile, got {describe(x)}")
    return x


def _numbers(b: Build, x: Abstract, role: str) -> Tile:
    """A tile that has arithmetic."""
    tile = _tile(b, x, role)
    d = tile.type.dtype
    if d.is_bool:
        b.fail(f"{role}: expected numbers, got {tile.type}; convert with .astype(T.i32), or use T.any or T.all")
    if d.is_float and d.bits == 8:
        b.fail(f"{role}: {d.name} has no arithmetic; convert with .astype(T.f32)")
    return tile


def _axis(b: Build, value: Abstract, rank: int, role: str) -> int:
    return axis_number(b, int_arg(b, value, f"{role}: axis"), rank, f"{role}: axis")


def _without(t: TileType, axis: int) -> TileType:
    return t.with_shape(t.shape[:axis] + t.shape[axis + 1 :])


def _is_nan(b: Build, x: Value) -> Value:
    t = x.type
    assert isinstance(t, TileType)
    return b.builder.value(ops.CompareOp, (x, x), t.with_dtype(b1), fn=Compare.NE)


# ---------------------------------------------------------------- reductions


def _reduce(b: Build, role: str, fold: Fold, x: Abstract, axis: Abstract, keepdims: Abstract) -> Tile:
    if fold in (Fold.AND, Fold.OR):
        tile = _tile(b, x, role)
        if not tile.type.dtype.is_bool:
            b.fail(f"{role}: expected a bool tile, got {tile.type}; compare it first, as in `x != 0`")
    else:
        tile = _numbers(b, x, role)
    t = tile.type
    keep = flag_arg(b, keepdims, f"{role}: keepdims")
    if axis == NONE:
        axes = tuple(range(t.rank))
    else:
        axes = tuple(axis_number(b, a, t.rank, f"{role}: axis") for a in int_tuple_arg(b, axis, f"{role}: axis"))
    if len(set(axes)) != len(axes):
        b.fail(f"{role}: axis: expected each axis once, got {tuple_text(axes)}")
    return Tile(_fold(b, fold, tile.value, axes, keep))


def _fold(b: Build, fold: Fold, value: Value, axes: tuple[int, ...], keep: bool) -> Value:
    t = value.type
    assert isinstance(t, TileType)
    # From the last axis to the first, so that the numbers of the axes still to come stay right.
    for a in sorted(axes, reverse=True):
        have = value.type
        assert isinstance(have, TileType)
        value = b.builder.value(ops.Reduce, (value,), _without(have, a), fn=fold, axis=a)
    if keep and axes:
        shape = tuple(1 if k in axes else n for k, n in enumerate(t.shape))
        value = b.builder.value(ops.Reshape, (value,), t.with_dtype(value.type.dtype).with_shape(shape))  # type: ignore[attr-defined]
    return value


def _implements_reduction(word: Any, role: str, fold: Fold) -> None:
    @implements(word)
    def emit(b: Build, x: Abstract, axis: Abstract, keepdims: Abstract) -> Abstract:
        return _reduce(b, role, fold, x, axis, keepdims)


for _reduction, _name, _kind in (
    (T.sum, "T.sum", Fold.ADD),
    (T.prod, "T.prod", Fold.MUL),
    (T.any, "T.any", Fold.OR),
    (T.all, "T.all", Fold.AND),
):
    _implements_reduction(_reduction, _name, _kind)


def _implements_extremum(word: Any, role: str, fold: Fold) -> None:
    @implements(word)
    def emit(b: Build, x: Abstract, axis: Abstract, keepdims: Abstract, nan: Abstract) -> Abstract:
        rule = nan_arg(b, nan, role)
        if rule is NanRule.PROPAGATE or not isinstance(x, Tile) or not x.type.dtype.is_float:
            return _reduce(b, role, fold, x, axis, keepdims)
        tile = _numbers(b, x, role)
        is_nan = _is_nan(b, tile.value)
        worst = constant(b, float("-inf" if fold is Fold.MAX else "inf"), tile.type.dtype, tile.type.shape)
        others = b.builder.value(ops.Select, (is_nan, worst, tile.value), tile.type)
        best = _reduce(b, role, fold, Tile(others), axis, keepdims)
        none = _reduce(b, role, Fold.AND, Tile(is_nan), axis, keepdims)
        nothing = constant(b, float("nan"), best.type.dtype, best.type.shape)
        return Tile(b.builder.value(ops.Select, (none.value, nothing, best.value), best.type))


_implements_extremum(T.max, "T.max", Fold.MAX)
_implements_extremum(T.min, "T.min", Fold.MIN)


# ---------------------------------------------------------------- folds by a function

_Fn = Callable[[Sequence[Value], Sequence[Value]], Sequence[Value]]


def _with(b: Build, cls: type[Op], tiles: Sequence[Value], axis: int, fn: _Fn, **attrs: bool) -> list[Value]:
    """A `reduce_with` or `scan_with` whose block is what `fn` emits."""
    types = [t for t in (v.type for v in tiles) if isinstance(t, TileType)]
    block = Block([t.with_shape(()) for t in types] * 2)
    with b.inside(block):
        n = len(tiles)
        b.builder.emit(ops.Yield, fn(block.args[:n], block.args[n:]))
    results = [_without(t, axis) for t in types] if cls is ops.ReduceWith else types
    return b.builder.emit(cls, tiles, results, (block,), axis=axis, **attrs).results


def _user_function(b: Build, fn: Abstract, dtypes: Sequence[DType], role: str) -> _Fn:
    """The combining function that a kernel gave, inlined into the block."""
    target = fn.value if isinstance(fn, Known) else None
    word = word_of(target)
    if word is None and not isinstance(target, FunctionType):
        b.fail(f"{role}: fn: expected a plain function or a word of two operands, got {describe(fn)}")

    def combine(first: Sequence[Value], second: Sequence[Value]) -> Sequence[Value]:
        args: list[Abstract] = [Tile(v) for v in (*first, *second)]
        block = b.builder.block
        if word is not None:
            result = call_word(b, word, args, {})
        else:
            assert isinstance(target, FunctionType)
            result = b.inline(b, target, args, {})
        foreign = next((op for op in block.ops if not isinstance(op, ops.COMBINER)), None)
        if foreign is not None:
            b.fail(
                f"{role}: fn: expected elementwise operations on scalars, got {foreign.NAME}; choose with T.where, and "
                "keep memory and control flow out of it",
                foreign.loc,
            )
        values = result.items if isinstance(result, Tup) else (result,)
        if len(values) != len(dtypes):
            b.fail(f"{role}: fn: expected {len(dtypes)} values back, one per tile, got {describe(result)}")
        return [
            to_dtype(b, v, d, f"{role}: value {k} of fn") for k, (v, d) in enumerate(zip(values, dtypes, strict=True))
        ]

    return combine


def _by_function(
    b: Build, role: str, cls: type[Op], tiles: Abstract, fn: Abstract, axis: Abstract, **attrs: bool
) -> tuple[list[Value], int]:
    items = tiles.items if isinstance(tiles, Tup) else (tiles,)
    if not items:
        b.fail(f"{role}: tiles: expected a tile or a tuple of them, got an empty tuple")
    found = [_tile(b, x, f"{role}: tiles") for x in items]
    for x in found[1:]:
        if x.type.shape != found[0].type.shape:
            b.fail(f"{role}: tiles: expected one shape, got {found[0].type} and {x.type}; T.broadcast one of them")
    k = _axis(b, axis, found[0].type.rank, role)
    combine = _user_function(b, fn, [x.type.dtype for x in found], role)
    return _with(b, cls, [x.value for x in found], k, combine, **attrs), k


def _as_given(tiles: Abstract, values: Sequence[Value]) -> Abstract:
    """A tile for a tile, a tuple for a tuple."""
    return Tup(tuple(map(Tile, values))) if isinstance(tiles, Tup) else Tile(values[0])


def _kept(b: Build, value: Value, axis: int) -> Value:
    """`value` with the axis that was folded away put back with extent 1."""
    t = value.type
    assert isinstance(t, TileType)
    return b.builder.value(ops.Reshape, (value,), t.with_shape((*t.shape[:axis], 1, *t.shape[axis:])))


@implements(T.reduce)
def _reduce_by(b: Build, tiles: Abstract, fn: Abstract, axis: Abstract, keepdims: Abstract) -> Abstract:
    keep = flag_arg(b, keepdims, "T.reduce: keepdims")
    values, k = _by_function(b, "T.reduce", ops.ReduceWith, tiles, fn, axis)
    return _as_given(tiles, [_kept(b, v, k) for v in values] if keep else values)


@implements(T.scan)
def _scan_by(b: Build, tiles: Abstract, fn: Abstract, axis: Abstract, reverse: Abstract) -> Abstract:
    backwards = flag_arg(b, reverse, "T.scan: reverse")
    values, _ = _by_function(b, "T.scan", ops.ScanWith, tiles, fn, axis, reverse=backwards)
    return _as_given(tiles, values)


def _cumulative(b: Build, role: str, fn: Binary, x: Abstract, axis: Abstract, reverse: Abstract, rule: NanRule) -> Tile:
    tile = _numbers(b, x, role)
    t = tile.type
    k = _axis(b, axis, t.rank, role)
    backwards = flag_arg(b, reverse, f"{role}: reverse")
    # Sums and products of narrow floats are kept in f32, or each step would round.
    wide = f32 if fn in (Binary.ADD, Binary.MUL) and t.dtype.is_float and t.dtype.bits < 32 else t.dtype

    def combine(first: Sequence[Value], second: Sequence[Value]) -> Sequence[Value]:
        (p,), (q,) = first, second
        both = b.builder.value(ops.BinaryOp, (p, q), p.type, fn=fn)
        if rule is NanRule.PROPAGATE or not wide.is_float:
            return [both]
        left = b.builder.value(ops.Select, (_is_nan(b, q), p, both), p.type)
        return [b.builder.value(ops.Select, (_is_nan(b, p), q, left), p.type)]

    (value,) = _with(b, ops.ScanWith, [cast(b, tile.value, wide)], k, combine, reverse=backwards)
    return Tile(cast(b, value, t.dtype))


def _implements_sum(word: Any, role: str, fn: Binary) -> None:
    @implements(word)
    def emit(b: Build, x: Abstract, axis: Abstract, reverse: Abstract) -> Abstract:
        return _cumulative(b, role, fn, x, axis, reverse, NanRule.PROPAGATE)


_implements_sum(T.cumsum, "T.cumsum", Binary.ADD)
_implements_sum(T.cumprod, "T.cumprod", Binary.MUL)


def _implements_cumulative_extremum(word: Any, role: str, fn: Binary) -> None:
    @implements(word)
    def emit(b: Build, x: Abstract, axis: Abstract, reverse: Abstract, nan: Abstract) -> Abstract:
        return _cumulative(b, role, fn, x, axis, reverse, nan_arg(b, nan, role))


_implements_cumulative_extremum(T.cummax, "T.cummax", Binary.MAX)
_implements_cumulative_extremum(T.cummin, "T.cummin", Binary.MIN)


# ---------------------------------------------------------------- the place of an extremum


def index_along(b: Build, shape: tuple[int, ...], axis: int) -> Value:
    """A tile of `shape` (i64) with the coordinate along `axis` in each element."""
    n = shape[axis]
    numbers = b.builder.value(ops.Iota, (), INDEX.with_shape((n,)))
    thin = tuple(n if k == axis else 1 for k in range(len(shape)))
    if thin != (n,):
        numbers = b.builder.value(ops.Reshape, (numbers,), INDEX.with_shape(thin))
    return broadcast_to(b, numbers, shape)


def _arg(b: Build, role: str, better: Compare, x: Abstract, axis: Abstract, keepdims: Abstract, nan: Abstract) -> Tile:
    tile = _numbers(b, x, role)
    k = _axis(b, axis, tile.type.rank, role)
    keep, rule = flag_arg(b, keepdims, f"{role}: keepdims"), nan_arg(b, nan, role)

    def logic(fn: Binary, p: Value, q: Value) -> Value:
        return b.builder.value(ops.BinaryOp, (p, q), p.type, fn=fn)

    def compare(fn: Compare, p: Value, q: Value) -> Value:
        return b.builder.value(ops.CompareOp, (p, q), TileType(b1), fn=fn)

    def combine(first: Sequence[Value], second: Sequence[Value]) -> Sequence[Value]:
        # The second is taken if it is better, or equal with a smaller index: right in any order of combining.
        (x1, i1), (x2, i2) = first, second
        wins, equal = compare(better, x2, x1), compare(Compare.EQ, x1, x2)
        if tile.type.dtype.is_float:
            nan1, nan2 = _is_nan(b, x1), _is_nan(b, x2)
            above, below = (nan2, nan1) if rule is NanRule.PROPAGATE else (nan1, nan2)
            only = logic(Binary.AND, above, b.builder.value(ops.UnaryOp, (below,), below.type, fn=Unary.NOT))
            wins = logic(Binary.OR, wins, only)
            equal = logic(Binary.OR, equal, logic(Binary.AND, nan1, nan2))
        wins = logic(Binary.OR, wins, logic(Binary.AND, equal, compare(Compare.LT, i2, i1)))
        return [b.builder.value(ops.Select, (wins, q, p), p.type) for p, q in ((x1, x2), (i1, i2))]

    places = index_along(b, tile.type.shape, k)
    _, found = _with(b, ops.ReduceWith, [tile.value, places], k, combine)
    return Tile(_kept(b, found, k) if keep else found)


@implements(T.argmax)
def _argmax(b: Build, x: Abstract, axis: Abstract, keepdims: Abstract, nan: Abstract) -> Abstract:
    return _arg(b, "T.argmax", Compare.GT, x, axis, keepdims, nan)


@implements(T.argmin)
def _argmin(b: Build, x: Abstract, axis: Abstract, keepdims: Abstract, nan: Abstract) -> Abstract:
    return _arg(b, "T.argmin", Compare.LT, x, axis, keepdims, nan)


# ---------------------------------------------------------------- sorting


def _sorted(b: Build, role: str, x: Abstract, axis: Abstract, descending: bool, places: bool) -> list[Value]:
    tile = _tile(b, x, role)
    k = _axis(b, axis, tile.type.rank, role)
    operands = [tile.value, *([index_along(b, tile.type.shape, k)] if places else [])]
    return b.builder.emit(ops.Sort, operands, [v.type for v in operands], axis=k, descending=descending).results


@implements(T.sort)
def _sort(b: Build, x: Abstract, axis: Abstract, descending: Abstract) -> Abstract:
    return Tile(_sorted(b, "T.sort", x, axis, flag_arg(b, descending, "T.sort: descending"), False)[0])


@implements(T.argsort)
def _argsort(b: Build, x: Abstract, axis: Abstract, descending: Abstract) -> Abstract:
    return Tile(_sorted(b, "T.argsort", x, axis, flag_arg(b, descending, "T.argsort: descending"), True)[1])


@implements(T.top_k)
def _top_k(b: Build, x: Abstract, k: Abstract, axis: Abstract) -> Abstract:
    role = "T.top_k"
    tile, count = _tile(b, x, role), int_arg(b, k, f"{role}: k")
    a = _axis(b, axis, tile.type.rank, role)
    n = tile.type.shape[a]
    if not 1 <= count <= n or count & (count - 1):
        b.fail(f"{role}: k: expected a power of two from 1 to {n}, got {count}; take more and ignore the rest")
    zero = constant(b, 0, i64)
    shape = tuple(count if j == a else m for j, m in enumerate(tile.type.shape))
    found = []
    for value in _sorted(b, role, x, axis, True, True):
        t = value.type
        assert isinstance(t, TileType)
        found.append(Tile(b.builder.value(ops.Extract, (value, *[zero] * t.rank), t.with_shape(shape))))
    return Tup(tuple(found))
