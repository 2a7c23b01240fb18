"""Words of `T.unsafe`: raw pointers and tokens. Every illegal order, type and scope is refused by name."""

from __future__ import annotations

import peertile.language as T
from peertile.frontend.convert import broadcast_to, to_dtype
from peertile.frontend.impl_tiles import enum_arg
from peertile.frontend.orders import order_arg, scope_arg
from peertile.frontend.registry import implements
from peertile.frontend.scope import Build
from peertile.frontend.values import NONE, Abstract, MulticastPointer, Pointer, Tile, Token, Tup, describe
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.types import PointerType, Space, TileType, TokenType, Type
from peertile.memory_model import Order, Rmw, Scope

__all__: list[str] = []


@implements(T.unsafe.token)
def _token(b: Build) -> Abstract:
    return Token(b.builder.value(ops.NewToken, (), TokenType()))


def _token_arg(b: Build, value: Abstract, role: str) -> Value:
    if not isinstance(value, Token):
        b.fail(f"{role}: expected a token, from T.unsafe.token() or an operation, got {describe(value)}")
    return value.value


@implements(T.unsafe.join_tokens)
def _join_tokens(b: Build, *tokens: Abstract) -> Abstract:
    role = "T.unsafe.join_tokens"
    if not tokens:
        b.fail(f"{role}: expected at least one token, got none")
    values = [_token_arg(b, t, f"{role}: token {k}") for k, t in enumerate(tokens)]
    return Token(b.builder.value(ops.JoinTokens, values, TokenType()))


def _pointer(b: Build, value: Abstract, role: str) -> Pointer:
    if isinstance(value, MulticastPointer):
        b.fail(
            f"{role}: pointer: expected an ordinary or a unicast address, got {describe(value)}; view it with "
            "T.unsafe.multicast_view and use its multimem operations"
        )
    if not isinstance(value, Pointer):
        b.fail(f"{role}: pointer: expected a T.Pointer, got {describe(value)}")
    return value


@implements(T.unsafe.unicast)
def _unicast(b: Build, pointer: Abstract) -> Abstract:
    p = _pointer(b, pointer, "T.unsafe.unicast")
    if p.type.space is Space.PEER:
        return p
    return Pointer(b.builder.value(ops.Unicast, (p.value,), PointerType(p.type.dtype, p.type.shape, Space.PEER)))


def _elements(b: Build, value: Abstract, p: PointerType, role: str) -> Value:
    """A tile of the pointers' dtype and shape; a scalar repeats."""
    tile = to_dtype(b, value, p.dtype, role)
    assert isinstance(tile.type, TileType)
    if tile.type.shape not in ((), p.shape):
        b.fail(f"{role}: expected {TileType(p.dtype, p.shape)} as the pointers, or a scalar, got {tile.type}")
    return broadcast_to(b, tile, p.shape)


def _scope(b: Build, value: Abstract, order: Order, p: PointerType, role: str, atomic: bool) -> Scope | None:
    scope = scope_arg(b, value, role)
    if order is Order.WEAK:
        if scope is not None:
            b.fail(f"{role}: scope: a weak access takes none, got order T.weak with scope T.{scope.value}")
        return None
    if scope is None:
        b.fail(f"{role}: scope: order T.{order.value} needs one, got none; say scope=T.device or scope=T.system")
    if p.space is Space.PEER and scope is not Scope.SYSTEM:
        if not atomic:
            b.fail(
                f"{role}: scope: expected T.system on a unicast pointer, got T.{scope.value}; "
                "other ranks would not be bound to see it"
            )
        where = f"{b.here}: " if b.here is not None else ""
        b.notes[f"{where}{role}: scope {scope.value} widened to system, as every atomic on peer memory"] = None
        return Scope.SYSTEM
    return scope


def _tail(b: Build, mask: Abstract, token: Abstract, p: PointerType, role: str) -> tuple[list[Value], bool, bool]:
    """Mask and token operands, and which of them are there."""
    values = []
    if mask != NONE:
        tile = to_dtype(b, mask, T.b1, f"{role}: mask")
        assert isinstance(tile.type, TileType)
        if tile.type.shape not in ((), p.shape):
            b.fail(f"{role}: mask: expected {TileType(T.b1, p.shape)} as the pointers, or a scalar, got {tile.type}")
        values.append(broadcast_to(b, tile, p.shape))
    if token != NONE:
        values.append(_token_arg(b, token, f"{role}: token"))
    return values, mask != NONE, token != NONE


@implements(T.unsafe.load_ptr)
def _load_ptr(
    b: Build, pointer: Abstract, order: Abstract, scope: Abstract, mask: Abstract, fill: Abstract, token: Abstract
) -> Abstract:
    role = "T.unsafe.load_ptr"
    p = _pointer(b, pointer, role)
    o = order_arg(b, order, role, (Order.WEAK, Order.RELAXED, Order.ACQUIRE))
    s = _scope(b, scope, o, p.type, role, atomic=False)
    padding = _elements(b, fill, p.type, f"{role}: fill") if not _default_fill(p.type, fill) else _false(b, p.type)
    tail, masked, ordered = _tail(b, mask, token, p.type, role)
    results: list[Type] = [TileType(p.type.dtype, p.type.shape), TokenType()]
    op = b.builder.emit(
        ops.PtrLoad, (p.value, padding, *tail), results, order=o, scope=s, masked=masked, ordered=ordered
    )
    return Tup((Tile(op.results[0]), Token(op.results[1])))


def _default_fill(p: PointerType, fill: Abstract) -> bool:
    """The default, 0, is no bool: for a pointer to bool it means False."""
    return p.dtype.is_bool and getattr(fill, "value", None) == 0


def _false(b: Build, p: PointerType) -> Value:
    return broadcast_to(b, b.builder.value(ops.Const, (), TileType(p.dtype), value=False), p.shape)


@implements(T.unsafe.store_ptr)
def _store_ptr(
    b: Build, pointer: Abstract, value: Abstract, order: Abstract, scope: Abstract, mask: Abstract, token: Abstract
) -> Abstract:
    role = "T.unsafe.store_ptr"
    p = _pointer(b, pointer, role)
    o = order_arg(b, order, role, (Order.WEAK, Order.RELAXED, Order.RELEASE))
    s = _scope(b, scope, o, p.type, role, atomic=False)
    tile = _elements(b, value, p.type, f"{role}: value")
    tail, masked, ordered = _tail(b, mask, token, p.type, role)
    op = b.builder.emit(
        ops.PtrStore, (p.value, tile, *tail), (TokenType(),), order=o, scope=s, masked=masked, ordered=ordered
    )
    return Token(op.result)


_ATOMIC_ORDERS = (Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL)


@implements(T.unsafe.atomic_rmw)
def _atomic_rmw(
    b: Build,
    pointer: Abstract,
    rmw: Abstract,
    value: Abstract,
    order: Abstract,
    scope: Abstract,
    mask: Abstract,
    token: Abstract,
) -> Abstract:
    role = "T.unsafe.atomic_rmw"
    p = _pointer(b, pointer, role)
    kind = enum_arg(b, rmw, Rmw, f"{role}: rmw", "a T.Rmw, such as T.Rmw.ADD")
    d = p.type.dtype
    if d.is_float and kind not in (Rmw.ADDF, Rmw.MIN, Rmw.MAX, Rmw.XCHG):
        way = "; use T.Rmw.ADDF" if kind is Rmw.ADD else ""
        b.fail(f"{role}: rmw: {kind.value} takes integers, got pointers to {d.name}{way}")
    if not d.is_float and kind is Rmw.ADDF:
        b.fail(f"{role}: rmw: addf takes floats, got pointers to {d.name}; use T.Rmw.ADD")
    o = order_arg(b, order, role, _ATOMIC_ORDERS)
    s = _scope(b, scope, o, p.type, role, atomic=True)
    tile = _elements(b, value, p.type, f"{role}: value")
    tail, masked, ordered = _tail(b, mask, token, p.type, role)
    op = b.builder.emit(
        ops.PtrRmw,
        (p.value, tile, *tail),
        (TileType(d, p.type.shape), TokenType()),
        rmw=kind,
        order=o,
        scope=s,
        masked=masked,
        ordered=ordered,
    )
    return Tup((Tile(op.results[0]), Token(op.results[1])))


@implements(T.unsafe.atomic_cas)
def _atomic_cas(
    b: Build,
    pointer: Abstract,
    compare: Abstract,
    value: Abstract,
    order: Abstract,
    scope: Abstract,
    mask: Abstract,
    token: Abstract,
) -> Abstract:
    role = "T.unsafe.atomic_cas"
    p = _pointer(b, pointer, role)
    o = order_arg(b, order, role, _ATOMIC_ORDERS)
    s = _scope(b, scope, o, p.type, role, atomic=True)
    expected = _elements(b, compare, p.type, f"{role}: compare")
    new = _elements(b, value, p.type, f"{role}: value")
    tail, masked, ordered = _tail(b, mask, token, p.type, role)
    op = b.builder.emit(
        ops.PtrCas,
        (p.value, expected, new, *tail),
        (TileType(p.type.dtype, p.type.shape), TokenType()),
        order=o,
        scope=s,
        masked=masked,
        ordered=ordered,
    )
    return Tup((Tile(op.results[0]), Token(op.results[1])))
