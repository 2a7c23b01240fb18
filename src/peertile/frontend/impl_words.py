"""Words on single elements: loads, stores, atomics and waits with an order; fences."""

from __future__ import annotations

from typing import Any

import peertile.language as T
from peertile.frontend.convert import flag_arg, index_scalar, to_dtype
from peertile.frontend.groups import check_range, rank_of
from peertile.frontend.impl_memory import atomic_rmw, index_args, peer_view, writable
from peertile.frontend.impl_tiles import enum_arg
from peertile.frontend.operators import compare_tiles
from peertile.frontend.orders import order_arg, scope_of_access, scope_of_atomic
from peertile.frontend.registry import implements
from peertile.frontend.scope import Build
from peertile.frontend.values import NONE, Abstract, ExclusiveTile, Known, Peer, Tile, Tup, View, describe
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import Compare
from peertile.ir.types import INDEX, Space, TileType
from peertile.memory_model import Cmp, Order, Rmw, Scope

__all__ = ["element", "word_index", "word_view"]


def word_view(b: Build, word: Abstract, rank: Abstract, role: str) -> View:
    """The view that a word lies in: a view, or the part of a symmetric parameter on `rank`."""
    if isinstance(word, Peer):
        r = rank_of(b, word.value) if rank == NONE else index_scalar(b, rank, f"{role}: rank")
        return peer_view(b, word, r)
    if rank != NONE:
        b.fail(f"{role}: rank: expected a T.Peer parameter with it, got {describe(word)}; drop rank=")
    if isinstance(word, ExclusiveTile):
        b.fail(f"{role}: expected a view that other agents see, got {describe(word)}; use a T.Peer parameter for words")
    if not isinstance(word, View):
        b.fail(f"{role}: word: expected a T.Peer parameter or a view of one, got {describe(word)}")
    return word


def word_index(b: Build, view: View, index: Abstract, role: str) -> list[Value]:
    """Element indices, zeros by default, each checked against its extent."""
    rank = view.type.rank
    if index == NONE:
        index = Tup(tuple(Known(0) for _ in range(rank)))
    indices = index_args(b, index, rank, role, "an element index")
    for k, v in enumerate(indices):

        def extent(axis: int = k) -> Value:
            return b.builder.value(ops.Extent, (view.value,), INDEX, axis=axis)

        check_range(b, v, extent, f"{role}: element index {k} of `{view.name}` out of range", constants=False)
    return indices


def _atomic_dtype(b: Build, view: View, role: str) -> None:
    if view.type.dtype.bits not in (8, 16, 32, 64) and not view.type.dtype.is_bool:
        b.fail(f"{role}: {view.type.dtype.name} cannot be accessed atomically")


@implements(T.ld)
def _ld(
    b: Build,
    word: Abstract,
    index: Abstract,
    rank: Abstract,
    order: Abstract,
    scope: Abstract,
    no_allocate: Abstract,
    coherent: Abstract,
) -> Abstract:
    view = word_view(b, word, rank, "T.ld")
    o = order_arg(b, order, "T.ld", (Order.WEAK, Order.RELAXED, Order.ACQUIRE))
    flag_arg(b, no_allocate, "T.ld: no_allocate")
    if not flag_arg(b, coherent, "T.ld: coherent"):
        if view.type.space is Space.PEER:
            text = f"expected True on peer memory, which other ranks write, got False for `{view.name}`"
            b.fail(f"T.ld: coherent: {text}")
        if o is not Order.WEAK:
            b.fail(f"T.ld: coherent: expected True with an order, got False with T.{o.value}; say order=T.weak")
    s = scope_of_access(b, scope, view.type.space, o, "T.ld")
    indices = word_index(b, view, index, "T.ld")
    return Tile(b.builder.value(ops.WordLoad, (view.value, *indices), TileType(view.type.dtype), order=o, scope=s))


@implements(T.st)
def _st(
    b: Build,
    word: Abstract,
    value: Abstract,
    index: Abstract,
    rank: Abstract,
    order: Abstract,
    scope: Abstract,
    no_allocate: Abstract,
) -> Abstract:
    flag_arg(b, no_allocate, "T.st: no_allocate")
    view = word_view(b, word, rank, "T.st")
    writable(b, view, "T.st to")
    o = order_arg(b, order, "T.st", (Order.WEAK, Order.RELAXED, Order.RELEASE))
    s = scope_of_access(b, scope, view.type.space, o, "T.st")
    number = element(b, value, view, "T.st: value")
    indices = word_index(b, view, index, "T.st")
    b.builder.emit(ops.WordStore, (view.value, number, *indices), order=o, scope=s)
    return NONE


def element(b: Build, value: Abstract, view: View, role: str) -> Value:
    """A scalar of the dtype of a view."""
    number = to_dtype(b, value, view.type.dtype, role)
    if number.type != TileType(view.type.dtype):
        b.fail(f"{role}: expected a scalar {view.type.dtype.name}, got {number.type}")
    return number


@implements(T.atom_add)
def _atom_add(
    b: Build, word: Abstract, value: Abstract, index: Abstract, rank: Abstract, order: Abstract, scope: Abstract
) -> Abstract:
    return _word_rmw(b, "T.atom_add", word, Rmw.ADD, value, index, rank, order, scope)


@implements(T.atom)
def _atom(
    b: Build,
    word: Abstract,
    rmw: Abstract,
    value: Abstract,
    index: Abstract,
    rank: Abstract,
    order: Abstract,
    scope: Abstract,
) -> Abstract:
    kind = enum_arg(b, rmw, Rmw, "T.atom: rmw", "a T.Rmw, such as T.Rmw.MAX")
    assert isinstance(kind, Rmw)
    return _word_rmw(b, "T.atom", word, kind, value, index, rank, order, scope)


def _word_rmw(
    b: Build,
    role: str,
    word: Abstract,
    rmw: Rmw,
    value: Abstract,
    index: Abstract,
    rank: Abstract,
    order: Abstract,
    scope: Abstract,
) -> Abstract:
    view = word_view(b, word, rank, role)
    writable(b, view, f"{role} on")
    kind = atomic_rmw(b, rmw, view.type.dtype, role)
    o = order_arg(b, order, role, (Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL))
    s = scope_of_atomic(b, scope, view.type.space, role)
    number = element(b, value, view, f"{role}: value")
    indices = word_index(b, view, index, role)
    t = TileType(view.type.dtype)
    return Tile(b.builder.value(ops.WordRmw, (view.value, number, *indices), t, rmw=kind, order=o, scope=s))


def _wait(
    b: Build,
    role: str,
    cmp: Cmp,
    word: Abstract,
    value: Abstract,
    index: Abstract,
    rank: Abstract,
    order: Abstract,
    scope: Abstract,
) -> Abstract:
    view = word_view(b, word, rank, role)
    d = view.type.dtype
    if not d.is_int or d.bits < 32:
        b.fail(f"{role}: expected words of i32, u32, i64 or u64, got {d.name} in `{view.name}`")
    o = order_arg(b, order, role, (Order.RELAXED, Order.ACQUIRE))
    s = scope_of_access(b, scope, view.type.space, o, role)
    number = element(b, value, view, f"{role}: value")
    indices = word_index(b, view, index, role)
    return Tile(
        b.builder.value(
            ops.Wait, (view.value, number, *indices), TileType(d), cmp=cmp, order=o, scope=s, what=view.name
        )
    )


def _implements_wait(word_fn: Any, role: str, cmp: Cmp) -> None:
    @implements(word_fn)
    def emit(
        b: Build, word: Abstract, value: Abstract, index: Abstract, rank: Abstract, order: Abstract, scope: Abstract
    ) -> Abstract:
        return _wait(b, role, cmp, word, value, index, rank, order, scope)


for _word_fn, _role, _cmp in (
    (T.wait_eq, "T.wait_eq", Cmp.EQ),
    (T.wait_ne, "T.wait_ne", Cmp.NE),
    (T.wait_at_least, "T.wait_at_least", Cmp.AT_LEAST),
    (T.wait_ge, "T.wait_ge", Cmp.GE),
    (T.wait_le, "T.wait_le", Cmp.LE),
    (T.wait_gt, "T.wait_gt", Cmp.GT),
    (T.wait_lt, "T.wait_lt", Cmp.LT),
):
    _implements_wait(_word_fn, _role, _cmp)


@implements(T.test)
def _test(
    b: Build,
    word: Abstract,
    value: Abstract,
    index: Abstract,
    cmp: Abstract,
    rank: Abstract,
    order: Abstract,
    scope: Abstract,
) -> Abstract:
    role = "T.test"
    kind = enum_arg(b, cmp, Cmp, f"{role}: cmp", "a T.Cmp, such as T.Cmp.GE")
    view = word_view(b, word, rank, role)
    o = order_arg(b, order, role, (Order.RELAXED, Order.ACQUIRE))
    s = scope_of_access(b, scope, view.type.space, o, role)
    number = element(b, value, view, f"{role}: value")
    indices = word_index(b, view, index, role)
    t = TileType(view.type.dtype)
    seen = Tile(b.builder.value(ops.WordLoad, (view.value, *indices), t, order=o, scope=s))
    return compare_tiles(b, Compare[kind.name], seen, Tile(number), role)


@implements(T.sync_system)
def _sync_system(b: Build) -> Abstract:
    b.builder.emit(ops.Fence, scope=Scope.SYSTEM)
    return NONE


@implements(T.sync_programs)
def _sync_programs(b: Build) -> Abstract:
    b.builder.emit(ops.SyncPrograms)
    return NONE
