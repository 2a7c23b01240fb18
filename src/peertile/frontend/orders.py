"""Orders and scopes as arguments of words: which are allowed where, each refusal with both sides named."""

from __future__ import annotations

from peertile.frontend.impl_tiles import enum_arg
from peertile.frontend.scope import Build
from peertile.frontend.values import NONE, Abstract
from peertile.ir.types import Space
from peertile.memory_model import Order, Scope

__all__ = ["order_arg", "scope_arg", "scope_of_access", "scope_of_atomic"]


def order_arg(b: Build, value: Abstract, role: str, allowed: tuple[Order, ...]) -> Order:
    """A memory order out of those that an operation has."""
    order = enum_arg(b, value, Order, f"{role}: order", "a memory order, such as T.acquire")
    assert isinstance(order, Order)
    if order not in allowed:
        names = ", ".join(f"T.{o.value}" for o in allowed)
        b.fail(f"{role}: order: expected one of {names}, got T.{order.value}")
    return order


def scope_arg(b: Build, value: Abstract, role: str) -> Scope | None:
    """A scope, or None where none was given."""
    if value == NONE:
        return None
    scope = enum_arg(b, value, Scope, f"{role}: scope", "T.program, T.device or T.system")
    assert isinstance(scope, Scope)
    return scope


def scope_of_atomic(b: Build, value: Abstract, space: Space, role: str) -> Scope:
    """The scope of a read-modify-write: on peer memory always system, with a note where less was asked."""
    scope = scope_arg(b, value, role)
    if space is not Space.PEER:
        return scope or Scope.DEVICE
    if scope not in (None, Scope.SYSTEM):
        where = f"{b.here}: " if b.here is not None else ""
        b.notes[f"{where}{role}: scope {scope.value} widened to system, as every atomic on peer memory"] = None
    return Scope.SYSTEM


def scope_of_access(b: Build, value: Abstract, space: Space, order: Order, role: str) -> Scope | None:
    """The scope of a load, store or wait: none when weak, system on peers and nothing less."""
    scope = scope_arg(b, value, role)
    if order is Order.WEAK:
        if scope is not None:
            b.fail(f"{role}: scope: a weak access takes none, got T.{scope.value}; drop it, or give an order")
        return None
    if space is Space.PEER:
        if scope not in (None, Scope.SYSTEM):
            b.fail(
                f"{role}: scope: expected T.system on peer memory, got T.{scope.value}; "
                "other ranks would not be bound to see it"
            )
        return Scope.SYSTEM
    return scope or Scope.DEVICE
