"""Ranks: which group is meant, this rank, the number of ranks, and checks that an index is in range."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from peertile.frontend.scope import Build
from peertile.frontend.values import Abstract, Barrier, Counter, Mailbox, Multicast, Peer, Signal
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.ir.ops import Binary, CheckKind, Compare
from peertile.ir.types import BOOL, INDEX, ObjectType, SymmetricType

__all__ = ["check_range", "group_object", "num_ranks_of", "rank_of", "symmetric_of"]


def symmetric_of(b: Build, value: Value) -> Value:
    """A symmetric object of the group that `value` belongs to: itself, or a field of it."""
    t = value.type
    if isinstance(t, SymmetricType):
        return value
    assert isinstance(t, ObjectType)
    name, field = next((n, f) for n, f in t.fields.items() if isinstance(f, SymmetricType))
    return b.builder.value(ops.Field, (value,), field, field=name)


def rank_of(b: Build, value: Value) -> Value:
    """This rank in the group of an object."""
    rank = b.builder.value(ops.Rank, (symmetric_of(b, value),), INDEX)
    b.proven_ranks.add(rank)
    return rank


def num_ranks_of(b: Build, value: Value) -> Value:
    """Number of ranks of the group of an object."""
    return b.builder.value(ops.NumRanks, (symmetric_of(b, value),), INDEX)


_GROUPED: Final = (Peer, Multicast, Signal, Counter, Barrier, Mailbox)


def group_object(b: Build, role: str) -> Value:
    """An object of the one group in play; an error where there is none, or more than one."""
    objects = {name: p for name, p in b.params.items() if isinstance(p, _GROUPED)}
    if not objects:
        b.fail(
            f"{role}: expected one group in play, got none: no parameter is T.Peer, T.Signal, T.Counter, T.Barrier "
            "or T.Mailbox; add one"
        )
    if b.groups is not None:
        used = {b.groups[name] for name in objects if name in b.groups}
        if len(used) > 1:
            listed = "; ".join(
                f"group {g}: " + ", ".join(f"`{n}`" for n in objects if b.groups.get(n) == g) for g in sorted(used)
            )
            b.fail(f"{role}: expected one group in play, got {len(used)} ({listed}); ask an object, as in x.rank")
    return _value(next(iter(objects.values())))


def _value(handle: Abstract) -> Value:
    assert isinstance(handle, Peer | Multicast | Signal | Counter | Barrier | Mailbox)
    return handle.value


def check_range(
    b: Build,
    value: Value,
    limit: Callable[[], Value],
    message: str,
    proven: Collection[Value] = (),
    *,
    constants: bool = True,
) -> None:
    """A run-time check that 0 <= value < limit, left out where that is known by construction.

    With `constants`, 0 needs no check: there is always a rank 0, and a slot 0. An extent may be 0.
    """
    if value in proven:
        return
    known = value.op.attrs["value"] if isinstance(value.op, ops.Const) else None
    if constants and known == 0:
        return
    if known is not None and known < 0:
        b.fail(f"{message}: expected 0 or more, got {known}")
    zero = b.builder.value(ops.Const, (), INDEX, value=0)
    bound = limit()
    low = b.builder.value(ops.CompareOp, (value, zero), BOOL, fn=Compare.GE)
    high = b.builder.value(ops.CompareOp, (value, bound), BOOL, fn=Compare.LT)
    ok = b.builder.value(ops.BinaryOp, (low, high), BOOL, fn=Binary.AND)
    b.builder.emit(ops.Check, (ok, value, bound), kind=CheckKind.BOUNDS, message=message)
