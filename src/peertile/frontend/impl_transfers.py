"""put and get between tiles and views, flagged transfers, and the wait for one of several words."""

from __future__ import annotations

from collections.abc import Callable

import peertile.language as T
from peertile.dtypes import u8 as byte
from peertile.dtypes import u16, u32, u64
from peertile.frontend.convert import broadcast_to, cast, constant, dtype_arg, flag_arg, int_arg
from peertile.frontend.impl_comm import notify_rank
from peertile.frontend.impl_memory import index_args, load_tile, shape_for, store_tile
from peertile.frontend.impl_memory import writable as require_writable
from peertile.frontend.impl_tiles import enum_arg
from peertile.frontend.impl_views import extent_of
from peertile.frontend.impl_words import element, word_index, word_view
from peertile.frontend.orders import order_arg, scope_of_access
from peertile.frontend.registry import implements
from peertile.frontend.scope import Build
from peertile.frontend.values import (
    NONE,
    Abstract,
    ExclusiveTile,
    Known,
    Peer,
    Signal,
    SignalSlot,
    Tile,
    Transfer,
    Tup,
    View,
    describe,
)
from peertile.ir import ops
from peertile.ir.core import Block, Value
from peertile.ir.ops import Binary, Bounds, CheckKind, Compare, Fold
from peertile.ir.types import BOOL, INDEX, TileType, TransferType
from peertile.memory_model import Cmp, Order, Scope

__all__: list[str] = []

CHUNK = 1024
"""Elements of a trip of a copy between views, along the last axis."""


def _hints(b: Build, granularity: Abstract, unroll: Abstract, vectorize: Abstract, role: str) -> None:
    """Hints are checked and may be ignored."""
    enum_arg(b, granularity, T.Granularity, f"{role}: granularity", "a T.Granularity, such as T.Granularity.WARP")
    if int_arg(b, unroll, f"{role}: unroll") < 1:
        b.fail(f"{role}: unroll: expected 1 or more, got {int_arg(b, unroll, role)}")
    flag_arg(b, vectorize, f"{role}: vectorize")


def _zeros(rank: int) -> Abstract:
    return Tup(tuple(Known(0) for _ in range(rank)))


def _is_remote(view: View | Peer, rank: Abstract) -> bool:
    return rank != NONE if isinstance(view, Peer) else view.is_remote


def _target(b: Build, dst: Abstract, rank: Abstract, role: str) -> View:
    if not isinstance(dst, Peer | View):
        b.fail(f"{role}: expected a T.Peer parameter or a view of one, got {describe(dst)}")
    return word_view(b, dst, rank, role.partition(":")[0])


def _source(b: Build, value: Abstract, role: str) -> View:
    """A local view to copy from or to."""
    if isinstance(value, Peer):
        return word_view(b, value, NONE, role)
    if isinstance(value, ExclusiveTile):
        b.fail(f"{role}: expected a tile or a view, got {describe(value)}; write {value.name}.load()")
    if not isinstance(value, View):
        b.fail(f"{role}: expected a tile or a view, got {describe(value)}")
    return value


@implements(T.put)
def _put(
    b: Build,
    src: Abstract,
    dst: Abstract,
    index: Abstract,
    rank: Abstract,
    signal: Abstract,
    wait: Abstract,
    granularity: Abstract,
    unroll: Abstract,
    vectorize: Abstract,
) -> Abstract:
    role = "T.put"
    _hints(b, granularity, unroll, vectorize, role)
    waits = flag_arg(b, wait, f"{role}: wait")
    view = _target(b, dst, rank, f"{role}: dst")
    handle: Abstract = NONE
    if isinstance(src, Tile):
        at = _zeros(view.type.rank) if index == NONE else index
        if waits:
            store_tile(b, view, at, src)
        else:
            handle = _async_store(b, view, at, src)
    else:
        source = _source(b, src, f"{role}: src")
        if index != NONE:
            b.fail(f"{role}: index: expected none with a view, which is put as a whole; slice the view instead")
        if source.is_remote and _is_remote(dst, rank):  # type: ignore[arg-type]
            b.fail(
                f"{role}: expected one local side, got a part of another rank on both (`{source.name}` and "
                f"`{view.name}`); get it into a local view first"
            )
        require_writable(b, view, f"{role} to")
        _copy(b, source, view, role, asynchronous=not waits)
        handle = NONE if waits else Transfer(None)
    if signal != NONE:
        _signal(b, signal, view, waits)
    return handle


def _signal(b: Build, signal: Abstract, view: View, waits: bool) -> None:
    """Notifies the rank that was put to, behind what was put."""
    role = "T.put: signal"
    if not isinstance(signal, Signal | SignalSlot):
        b.fail(f"{role}: expected a T.Signal parameter or a slot of one, got {describe(signal)}")
    if view.rank is None:
        b.fail(f"{role}: expected a destination on some rank, got `{view.name}`; notify yourself with a word, by T.st")
    if not waits:
        # A signal is sent by this program, so the copy must be over: its agent is another one.
        b.builder.emit(ops.WaitTransfer)
    notify_rank(b, signal, view.rank)


def _async_store(b: Build, view: View, index: Abstract, tile: Tile) -> Abstract:
    """As a store, given to an agent of its own."""
    block = b.builder.block
    store_tile(b, view, index, tile)
    store = block.ops.pop()
    assert isinstance(store, ops.Store)
    return Transfer(b.builder.value(ops.AsyncStore, store.operands, TransferType()))


def _copy(b: Build, source: View, target: View, role: str, *, asynchronous: bool = False) -> None:
    """All elements of `source` to a view of the same extents, in chunks along the last axis."""
    s, t = source.type, target.type
    if s.dtype != t.dtype:
        b.fail(f"{role}: expected views of one dtype, got {s.dtype.name} of `{source.name}` and {t.dtype.name}")
    if s.rank != t.rank:
        b.fail(f"{role}: expected views of as many axes, got {s.rank} of `{source.name}` and {t.rank}")
    for axis in range(s.rank):
        have, want = extent_of(b, source.value, axis), extent_of(b, target.value, axis)
        if have is not want:
            equal = b.builder.value(ops.CompareOp, (have, want), BOOL, fn=Compare.EQ)
            message = f"{role}: extents of axis {axis} of `{source.name}` and `{target.name}` differ"
            b.builder.emit(ops.Check, (equal, have, want), kind=CheckKind.BOUNDS, message=message)
    shape = (*(1 for _ in range(s.rank - 1)), CHUNK)[: s.rank]
    tile = TileType(s.dtype, shape)

    def nest(axis: int, index: list[Value]) -> None:
        if axis == s.rank:
            part = b.builder.value(ops.Load, (source.value, *index), tile, bounds=Bounds.PROVEN)
            operands = (target.value, part, *index)
            if asynchronous:
                b.builder.value(ops.AsyncStore, operands, TransferType(), bounds=Bounds.PROVEN, copies=True)
            else:
                b.builder.emit(ops.Store, operands, bounds=Bounds.PROVEN)
            return
        count = b.builder.value(ops.NumTiles, (source.value,), INDEX, axis=axis, size=shape[axis])
        _loop(b, count, lambda k: nest(axis + 1, [*index, k]))

    nest(0, [])


def _loop(b: Build, count: Value, body: Callable[[Value], None]) -> None:
    zero, one = constant(b, 0, T.i64), constant(b, 1, T.i64)
    block = Block((INDEX,), ("k",))
    with b.inside(block):
        body(block.args[0])
        b.builder.emit(ops.Continue)
    b.builder.emit(ops.For, (zero, count, one), (), (block,))


@implements(T.get)
def _get(
    b: Build,
    src: Abstract,
    shape: Abstract,
    index: Abstract,
    to: Abstract,
    rank: Abstract,
    padding: Abstract,
    granularity: Abstract,
    unroll: Abstract,
    vectorize: Abstract,
) -> Abstract:
    role = "T.get"
    _hints(b, granularity, unroll, vectorize, role)
    view = _target(b, src, rank, f"{role}: src")
    if to == NONE:
        if shape == NONE:
            b.fail(f"{role}: expected the shape of a tile, or to=view, got neither")
        return load_tile(b, view, _zeros(view.type.rank) if index == NONE else index, shape, padding)
    if shape != NONE or index != NONE:
        b.fail(f"{role}: to: expected it without shape and index, got both; slice the views instead")
    target = _source(b, to, f"{role}: to")
    require_writable(b, target, f"{role} to")
    if target.is_remote and _is_remote(src, rank):  # type: ignore[arg-type]
        b.fail(
            f"{role}: expected one local side, got a part of another rank on both (`{view.name}` and "
            f"`{target.name}`); get it into a local view first"
        )
    _copy(b, view, target, role)
    return NONE


@implements(T.wait_put)
def _wait_put(b: Build, *transfers: Abstract) -> Abstract:
    role = "T.wait_put"
    if not transfers:
        b.fail(f"{role}: expected the handle of a put with wait=False, got none; T.quiet() waits for all")
    for k, handle in enumerate(transfers):
        if not isinstance(handle, Transfer):
            b.fail(f"{role}: handle {k}: expected that of a put with wait=False, got {describe(handle)}")
    values = [h.value for h in transfers if isinstance(h, Transfer) and h.value is not None]
    whole = len(values) < len(transfers)
    b.builder.emit(ops.WaitTransfer, () if whole else values)
    return NONE


@implements(T.quiet)
def _quiet(b: Build) -> Abstract:
    b.builder.emit(ops.WaitTransfer)
    return NONE


# ---------------------------------------------------------------- flagged transfers


def _words(b: Build, words: Abstract, rank: Abstract, role: str) -> View:
    view = _target(b, words, rank, f"{role}: words")
    if view.type.dtype != u64:
        b.fail(f"{role}: words: expected u64, payload and epoch in one, got {view.type.dtype.name} in `{view.name}`")
    return view


def _payload(b: Build, dtype: T.DType, role: str) -> T.DType:
    """The unsigned integer of the width of a payload."""
    if dtype.bits > 32:
        b.fail(f"{role}: expected a payload of at most 32 bits, got {dtype.name}; send it in two halves")
    return {8: byte, 16: u16, 32: u32}[dtype.itemsize * 8]


def _epoch(b: Build, epoch: Abstract, role: str) -> Value:
    """The epoch in the high half of a word; it wraps at 2^32."""
    if isinstance(epoch, Known) and isinstance(epoch.value, int) and not isinstance(epoch.value, bool):
        value = constant(b, epoch.value & 0xFFFFFFFF, u64)
    elif isinstance(epoch, Tile) and epoch.type.is_scalar and epoch.type.dtype.is_int:
        value = cast(b, cast(b, epoch.value, u32), u64)
    else:
        b.fail(f"{role}: epoch: expected an integer scalar, got {describe(epoch)}")
    return b.builder.value(ops.BinaryOp, (value, constant(b, 32, u64)), TileType(u64), fn=Binary.SHL)


@implements(T.put_flagged)
def _put_flagged(
    b: Build, src: Abstract, words: Abstract, index: Abstract, epoch: Abstract, rank: Abstract
) -> Abstract:
    role = "T.put_flagged"
    if not isinstance(src, Tile):
        b.fail(f"{role}: src: expected a tile, got {describe(src)}; load it first")
    view = _words(b, words, rank, role)
    require_writable(b, view, f"{role} to")
    t = src.type
    bits = _payload(b, t.dtype, role)
    value = src.value
    if t.dtype.is_bool:
        value = cast(b, value, bits)
    elif t.dtype != bits:
        value = b.builder.value(ops.Bitcast, (value,), t.with_dtype(bits))
    low = cast(b, value, u64)
    if t.rank != view.type.rank:
        b.fail(f"{role}: src: expected a tile of {view.type.rank} axes, got {t}")
    high = broadcast_to(b, _epoch(b, epoch, role), t.shape)
    word = b.builder.value(ops.BinaryOp, (low, high), t.with_dtype(u64), fn=Binary.OR)
    indices = index_args(b, _zeros(t.rank) if index == NONE else index, t.rank, role)
    b.builder.emit(ops.TileStore, (view.value, word, *indices), order=Order.RELAXED, scope=_scope(view))
    return NONE


def _scope(view: View) -> Scope:
    return Scope.SYSTEM if view.peer else Scope.DEVICE


@implements(T.take_flagged)
def _take_flagged(
    b: Build, words: Abstract, shape: Abstract, index: Abstract, epoch: Abstract, dtype: Abstract, rank: Abstract
) -> Abstract:
    """Looks at the whole tile; while an element is missing, waits for the first of those. The wait is bounded and
    lets others run, which a loop of looks would not."""
    role = "T.take_flagged"
    view = _words(b, words, rank, role)
    d = dtype_arg(b, dtype, f"{role}: dtype")
    bits = _payload(b, d, role)
    extents = shape_for(b, shape, view.type.rank, role)
    indices = index_args(b, _zeros(len(extents)) if index == NONE else index, len(extents), role)
    flag = _epoch(b, epoch, role)
    t = TileType(u64, extents)
    index_t = TileType(T.i64, (t.numel,))
    place_t = TileType(T.i32, (t.numel,))
    expected = broadcast_to(b, flag, extents)
    v = b.builder.value
    scope = _scope(view)
    # Coordinates of the flattened tile; what lies outside of the view is never written.
    iota = v(ops.Iota, (), index_t)
    sizes = [constant(b, n, T.i64) for n in extents]
    origins = [v(ops.BinaryOp, pair, INDEX, fn=Binary.MUL) for pair in zip(indices, sizes, strict=True)]
    outside: Value | None = None
    step = t.numel
    for axis, n in enumerate(extents):
        step //= n
        at = v(ops.BinaryOp, (iota, constant(b, step, T.i64, (t.numel,))), index_t, fn=Binary.QUOT)
        at = v(ops.BinaryOp, (at, constant(b, n, T.i64, (t.numel,))), index_t, fn=Binary.REM)
        at = v(ops.BinaryOp, (at, broadcast_to(b, origins[axis], (t.numel,))), index_t, fn=Binary.ADD)
        limit = broadcast_to(b, extent_of(b, view.value, axis), (t.numel,))
        beyond = v(ops.CompareOp, (at, limit), TileType(T.b1, (t.numel,)), fn=Compare.GE)
        outside = beyond if outside is None else v(ops.BinaryOp, (outside, beyond), beyond.type, fn=Binary.OR)
    half = constant(b, 32, u64, extents)
    wanted = v(ops.BinaryOp, (expected, half), t, fn=Binary.SHR)
    places, scalar = cast(b, iota, T.i32), TileType(T.i32)
    body = Block()
    with b.inside(body):
        seen = v(ops.TileLoad, (view.value, *indices), t, order=Order.RELAXED, scope=scope)
        come = v(ops.CompareOp, (seen, expected), TileType(T.b1, extents), fn=Compare.AT_LEAST)
        here = v(ops.Reshape, (come,), TileType(T.b1, (t.numel,)))
        if outside is not None:
            here = v(ops.BinaryOp, (here, outside), here.type, fn=Binary.OR)
        mark = v(ops.BinaryOp, (seen, half), t, fn=Binary.SHR)
        right = v(ops.CompareOp, (mark, wanted), TileType(T.b1, extents), fn=Compare.EQ)
        right = v(ops.Reshape, (right,), here.type)
        if outside is not None:
            right = v(ops.BinaryOp, (right, outside), here.type, fn=Binary.OR)
        fold = t.numel > 1
        everything = v(ops.Reduce, (right,), BOOL, fn=Fold.AND, axis=0) if fold else v(ops.Reshape, (right,), BOOL)
        all_right, missing = Block(), Block()
        with b.inside(all_right):
            b.builder.emit(ops.Break, (seen, constant(b, t.numel + 1, T.i32)))
        with b.inside(missing):
            # One more fold: the first element that is missing, or else that one has come that is wrong.
            good, bad = (constant(b, t.numel + k, T.i32, (t.numel,)) for k in (1, 0))
            first = v(ops.Select, (right, good, bad), place_t)
            first = v(ops.Select, (here, first, places), place_t)
            least = v(ops.Reduce, (first,), scalar, fn=Fold.MIN, axis=0) if fold else None
            first = v(ops.Reshape, (first,), scalar) if least is None else least
            done = v(ops.CompareOp, (first, constant(b, t.numel, T.i32)), BOOL, fn=Compare.GE)
            yes, no = Block(), Block()
            with b.inside(yes):
                b.builder.emit(ops.Break, (seen, first))
            with b.inside(no):
                step = t.numel
                place = []
                first = cast(b, first, T.i64)
                for origin, n in zip(origins, extents, strict=True):
                    step //= n
                    at = v(ops.BinaryOp, (first, constant(b, step, T.i64)), INDEX, fn=Binary.QUOT)
                    at = v(ops.BinaryOp, (at, constant(b, n, T.i64)), INDEX, fn=Binary.REM)
                    place.append(v(ops.BinaryOp, (at, origin), INDEX, fn=Binary.ADD))
                # Acquire: what orders is the flag of each element; the wait is only for its time.
                v(
                    ops.Wait, (view.value, flag, *place), TileType(u64),
                    cmp=Cmp.AT_LEAST, order=Order.ACQUIRE, scope=scope, what=view.name,
                )  # fmt: skip
                b.builder.emit(ops.Yield)
            b.builder.emit(ops.If, (done,), (), (yes, no))
            b.builder.emit(ops.Yield)
        b.builder.emit(ops.If, (everything,), (), (all_right, missing))
        b.builder.emit(ops.Continue)
    word, outcome = b.builder.emit(ops.Loop, (), (t, scalar), (body,)).results
    right = v(ops.CompareOp, (outcome, constant(b, t.numel + 1, T.i32)), BOOL, fn=Compare.EQ)
    message = f"{role}: `{view.name}` was written again before it was taken; alternate between places"
    b.builder.emit(ops.Check, (right,), kind=CheckKind.ASSERT, message=message)
    payload = cast(b, word, bits)
    if d.is_bool:
        return Tile(cast(b, payload, d))
    return Tile(payload if d == bits else v(ops.Bitcast, (payload,), TileType(d, extents)))


# ---------------------------------------------------------------- filled transfers


def _places(b: Build, words: Abstract, rank: Abstract, role: str) -> View:
    view = _target(b, words, rank, f"{role}: words")
    if view.type.dtype not in (u32, u64):
        b.fail(f"{role}: words: expected u32 or u64, got {view.type.dtype.name} in `{view.name}`")
    require_writable(b, view, f"{role} to")
    return view


def _empty(b: Build, dtype: T.DType, shape: tuple[int, ...] = ()) -> Value:
    """What an empty place holds."""
    return constant(b, (1 << dtype.bits) - 1, dtype, shape)


@implements(T.put_filled)
def _put_filled(b: Build, src: Abstract, words: Abstract, index: Abstract, rank: Abstract) -> Abstract:
    role = "T.put_filled"
    if not isinstance(src, Tile):
        b.fail(f"{role}: src: expected a tile, got {describe(src)}; load it first")
    view, t, v = _places(b, words, rank, role), src.type, b.builder.value
    if t.dtype != view.type.dtype:
        b.fail(f"{role}: src: expected {view.type.dtype.name} as `{view.name}` has, got {t}; T.bitcast it")
    if t.rank != view.type.rank:
        b.fail(f"{role}: src: expected a tile of {view.type.rank} axes, got {t}")
    empty = v(
        ops.CompareOp, (src.value, _empty(b, t.dtype, t.shape)), t.with_dtype(T.b1), fn=Compare.EQ
    )  # fmt: skip
    other = constant(b, (1 << t.dtype.bits) - 2, t.dtype, t.shape)
    word = v(ops.Select, (empty, other, src.value), t)
    indices = index_args(b, _zeros(t.rank) if index == NONE else index, t.rank, role)
    b.builder.emit(ops.TileStore, (view.value, word, *indices), order=Order.RELAXED, scope=_scope(view))
    return NONE


@implements(T.take_filled)
def _take_filled(b: Build, words: Abstract, shape: Abstract, index: Abstract, rank: Abstract) -> Abstract:
    """As `take_flagged`: looks at the whole tile; while a word is missing, waits for the first of those."""
    role = "T.take_filled"
    view = _places(b, words, rank, role)
    extents = shape_for(b, shape, view.type.rank, role)
    indices = index_args(b, _zeros(len(extents)) if index == NONE else index, len(extents), role)
    dtype, v, scope = view.type.dtype, b.builder.value, _scope(view)
    t = TileType(dtype, extents)
    n, scalar = t.numel, TileType(T.i32)
    empty = _empty(b, dtype, extents)
    body = Block()
    with b.inside(body):
        # What lies outside of the view is read as zero, which is not empty.
        seen = v(ops.TileLoad, (view.value, *indices), t, order=Order.RELAXED, scope=scope)
        come = v(ops.CompareOp, (seen, empty), t.with_dtype(T.b1), fn=Compare.NE)
        here = v(ops.Reshape, (come,), TileType(T.b1, (n,)))
        everything = v(ops.Reduce, (here,), BOOL, fn=Fold.AND, axis=0) if n > 1 else v(ops.Reshape, (here,), BOOL)
        done, missing = Block(), Block()
        with b.inside(done):
            b.builder.emit(ops.Break, (seen,))
        with b.inside(missing):
            places = cast(b, v(ops.Iota, (), TileType(T.i64, (n,))), T.i32)
            first = v(ops.Select, (here, constant(b, n - 1, T.i32, (n,)), places), places.type)
            first = v(ops.Reduce, (first,), scalar, fn=Fold.MIN, axis=0) if n > 1 else v(ops.Reshape, (first,), scalar)
            step, place, first = n, [], cast(b, first, T.i64)
            for index_value, size in zip(indices, extents, strict=True):
                step //= size
                at = v(ops.BinaryOp, (first, constant(b, step, T.i64)), INDEX, fn=Binary.QUOT)
                at = v(ops.BinaryOp, (at, constant(b, size, T.i64)), INDEX, fn=Binary.REM)
                origin = v(ops.BinaryOp, (index_value, constant(b, size, T.i64)), INDEX, fn=Binary.MUL)
                place.append(v(ops.BinaryOp, (at, origin), INDEX, fn=Binary.ADD))
            v(
                ops.Wait, (view.value, _empty(b, dtype), *place), TileType(dtype),
                cmp=Cmp.NE, order=Order.ACQUIRE, scope=scope, what=view.name,
            )  # fmt: skip
            b.builder.emit(ops.Yield)
        b.builder.emit(ops.If, (everything,), (), (done, missing))
        b.builder.emit(ops.Continue)
    (word,) = b.builder.emit(ops.Loop, (), (t,), (body,)).results
    b.builder.emit(ops.TileStore, (view.value, empty, *indices), order=Order.RELAXED, scope=scope)
    return Tile(word)


# ---------------------------------------------------------------- one of several words


@implements(T.wait_any)
def _wait_any(b: Build, *words: Abstract, cmp: Abstract, order: Abstract, scope: Abstract) -> Abstract:
    role = "T.wait_any"
    kind = enum_arg(b, cmp, Cmp, f"{role}: cmp", "a T.Cmp, such as T.Cmp.GE")
    o = order_arg(b, order, role, (Order.RELAXED, Order.ACQUIRE))
    if not words:
        b.fail(f"{role}: expected at least one (word, value), got none")
    operands: list[Value] = []
    names, scopes = [], []
    for k, word in enumerate(words):
        if not isinstance(word, Tup) or len(word.items) not in (2, 3):
            b.fail(f"{role}: word {k}: expected (word, value) or (word, value, index), got {describe(word)}")
        view = word_view(b, word.items[0], NONE, role)
        d = view.type.dtype
        if not d.is_int or d.bits < 32:
            b.fail(f"{role}: word {k}: expected words of i32, u32, i64 or u64, got {d.name} in `{view.name}`")
        value = element(b, word.items[1], view, f"{role}: value {k}")
        index = word.items[2] if len(word.items) == 3 else NONE
        operands += [view.value, value, *word_index(b, view, index, role)]
        names.append(view.name)
        scopes.append(scope_of_access(b, scope, view.type.space, o, role))
    widest = Scope.SYSTEM if Scope.SYSTEM in scopes else scopes[0]
    what = " or ".join(dict.fromkeys(names))
    return Tile(b.builder.value(ops.WaitAny, operands, INDEX, cmp=kind, order=o, scope=widest, what=what))
