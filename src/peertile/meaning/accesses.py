"""The meaning of ops on memory: which elements an access reaches, and when another agent may act first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from peertile.errors import InternalError
from peertile.ir import ops
from peertile.ir.core import Op
from peertile.ir.types import PointerType, TileType
from peertile.meaning.faults import FaultKind, ProgramFault
from peertile.meaning.memory import ObjectRef, SymmetricRef, ViewRef
from peertile.meaning.numbers import Array, satisfies
from peertile.meaning.program import Event, EventKind, Program, Steps
from peertile.meaning.registry import evaluates
from peertile.memory_model import Order

__all__ = ["PADDING", "check_inside", "element_of", "origin_of"]


@evaluates(ops.PeerView)
def peer_view(program: Program, op: Op, x: SymmetricRef, rank: Any) -> ViewRef:
    check_inside(op, "rank", int(rank), len(x.views))
    return x.views[int(rank)]


@evaluates(ops.Field)
def field(program: Program, op: Op, x: ObjectRef) -> Any:
    return x.fields[op.attrs["field"]]


def check_inside(op: Op, role: str, index: int, limit: int) -> None:
    """Faults unless 0 <= index < limit. Where the compiler has said that it holds, that is its bug."""
    if 0 <= index < limit:
        return
    text = f"{op.NAME}: {role}: expected 0 to {limit - 1}, got {index}"
    claimed = op.attrs.get("bounds", ops.Bounds.UNKNOWN)
    if claimed is not ops.Bounds.UNKNOWN:
        raise InternalError(f"{text}, though its bounds were {claimed.value}")
    raise ProgramFault(FaultKind.BOUNDS, text, op, index, limit)


# ---------------------------------------------------------------- tiles


def origin_of(op: Op, view: ViewRef, indices: Sequence[Any], shape: Sequence[int]) -> list[int]:
    """Element index of the tile's first element. Tile 0 of an empty axis is in bounds (all padding)."""
    for axis, (k, n, size) in enumerate(zip(indices, view.extents, shape, strict=True)):
        check_inside(op, f"tile index of axis {axis}", int(k), max(-(-n // size), 1))
    return [int(k) * size for k, size in zip(indices, shape, strict=True)]


PADDING: Final = {
    ops.Padding.ZERO: 0.0,
    ops.Padding.NEG_ZERO: -0.0,
    ops.Padding.NAN: np.nan,
    ops.Padding.INF: np.inf,
    ops.Padding.NEG_INF: -np.inf,
}


@evaluates(ops.Load)
def load(program: Program, op: Op, view: ViewRef, *indices: Any) -> Array:
    t = op.result.type
    assert isinstance(t, TileType)
    origin = origin_of(op, view, indices, t.shape)
    padding = np.asarray(PADDING[op.attrs["padding"]]).astype(t.dtype.numpy)[()]
    return program.memory.load_tile(program, op, view, origin, t.shape, padding)


@evaluates(ops.Store)
def store(program: Program, op: Op, view: ViewRef, tile: Array, *indices: Any) -> None:
    program.memory.store_tile(program, op, view, origin_of(op, view, indices, tile.shape), tile)


@evaluates(ops.TileAtomic, steps=True)
def tile_atomic(program: Program, op: Op, view: ViewRef, tile: Array, *indices: Any) -> Steps:
    origin = origin_of(op, view, indices, tile.shape)
    yield Event(EventKind.ACCESS, program, op)
    program.memory.tile_atomic(program, op, view, origin, tile, op.attrs["rmw"])


# ---------------------------------------------------------------- words


def element_of(op: Op, view: ViewRef, indices: Sequence[Any]) -> tuple[int, ...]:
    for axis, (k, n) in enumerate(zip(indices, view.extents, strict=True)):
        check_inside(op, f"element index of axis {axis}", int(k), n)
    return tuple(int(k) for k in indices)


@evaluates(ops.WordLoad, steps=True)
def word_load(program: Program, op: Op, view: ViewRef, *indices: Any) -> Steps:
    index = element_of(op, view, indices)
    if op.attrs["order"] is not Order.WEAK:
        yield Event(EventKind.ACCESS, program, op)
    return program.memory.word_load(program, op, view, index)


@evaluates(ops.WordStore, steps=True)
def word_store(program: Program, op: Op, view: ViewRef, value: Any, *indices: Any) -> Steps:
    index = element_of(op, view, indices)
    if op.attrs["order"] is not Order.WEAK:
        yield Event(EventKind.ACCESS, program, op)
    program.memory.word_store(program, op, view, index, value)


@evaluates(ops.WordRmw, steps=True)
def word_rmw(program: Program, op: Op, view: ViewRef, value: Any, *indices: Any) -> Steps:
    index = element_of(op, view, indices)
    yield Event(EventKind.ACCESS, program, op)
    return program.memory.word_rmw(program, op, view, index, value, op.attrs["rmw"])


@evaluates(ops.Wait, steps=True)
def wait(program: Program, op: Op, view: ViewRef, expected: Any, *indices: Any) -> Steps:
    index = element_of(op, view, indices)
    while True:
        yield Event(EventKind.WAIT, program, op, view, index, expected)
        seen = program.memory.word_load(program, op, view, index)
        if satisfies(op.attrs["cmp"], seen, expected, view.type.dtype):
            return seen


@evaluates(ops.Fence, steps=True)
def fence(program: Program, op: Op) -> Steps:
    yield Event(EventKind.FENCE, program, op)
    program.memory.fence(program, op)


@evaluates(ops.FenceAlias)
def fence_alias(program: Program, op: Op, *tokens: Any) -> Any:
    """Addresses are one in numpy memory: nothing to order."""
    return program.memory.new_token(program, tokens) if op.results else None


@evaluates(ops.LaunchWords)
def launch_words(program: Program, op: Op) -> ViewRef:
    return program.launch_words


# ---------------------------------------------------------------- pointers


@evaluates(ops.NewToken, ops.JoinTokens)
def token(program: Program, op: Op, *tokens: Any) -> Any:
    return program.memory.new_token(program, tokens)


@evaluates(ops.PtrOffset)
def ptr_offset(program: Program, op: Op, pointer: Any, offset: Array) -> Any:
    return np.add(pointer, np.multiply(offset.astype(np.int64), _pointee(op).dtype.itemsize))


@evaluates(ops.PtrBroadcast)
def ptr_broadcast(program: Program, op: Op, pointer: Any) -> Any:
    t = op.result.type
    assert isinstance(t, PointerType)
    return np.broadcast_to(pointer, t.shape)


@evaluates(ops.Unicast)
def unicast(program: Program, op: Op, pointer: Any) -> Any:
    return pointer


def _pointee(op: Op) -> PointerType:
    t = op.operands[0].type
    assert isinstance(t, PointerType)
    return t


def _mask_and_token(op: Op, pointer: Any, rest: Sequence[Any]) -> tuple[Array, Any]:
    mask = rest[0] if op.attrs["masked"] else np.ones(np.shape(pointer), np.bool_)
    return np.asarray(mask), rest[-1] if op.attrs["ordered"] else None


@evaluates(ops.PtrLoad, steps=True)
def ptr_load(program: Program, op: Op, pointer: Any, fill: Array, *rest: Any) -> Steps:
    if op.attrs["order"] is not Order.WEAK:
        yield Event(EventKind.ACCESS, program, op)
    mask, after = _mask_and_token(op, pointer, rest)
    return program.memory.ptr_load(program, op, _pointee(op).dtype, pointer, fill, mask, after)


@evaluates(ops.PtrStore, steps=True)
def ptr_store(program: Program, op: Op, pointer: Any, tile: Array, *rest: Any) -> Steps:
    if op.attrs["order"] is not Order.WEAK:
        yield Event(EventKind.ACCESS, program, op)
    mask, after = _mask_and_token(op, pointer, rest)
    return program.memory.ptr_store(program, op, _pointee(op).dtype, pointer, tile, mask, after)


@evaluates(ops.PtrRmw, steps=True)
def ptr_rmw(program: Program, op: Op, pointer: Any, tile: Array, *rest: Any) -> Steps:
    yield Event(EventKind.ACCESS, program, op)
    mask, after = _mask_and_token(op, pointer, rest)
    dtype = _pointee(op).dtype
    return program.memory.ptr_rmw(program, op, dtype, pointer, tile, mask, after, op.attrs["rmw"])


@evaluates(ops.PtrCas, steps=True)
def ptr_cas(program: Program, op: Op, pointer: Any, compare: Array, value: Array, *rest: Any) -> Steps:
    yield Event(EventKind.ACCESS, program, op)
    mask, after = _mask_and_token(op, pointer, rest)
    return program.memory.ptr_cas(program, op, _pointee(op).dtype, pointer, compare, value, mask, after)
