"""Lowering of broadcast, reshape, reductions and matrix products.

Matrix products go to the tensor cores by `tl.dot`; extents below what those take are summed elementwise, within a
bound on the work, and refused by name beyond it. u8 goes through i8. See `docs` for the table by architecture.
"""

from __future__ import annotations

from typing import Final

from peertile.backends.cuda import ptx
from peertile.backends.cuda.memory import expand
from peertile.backends.cuda.spelling import REGISTER, shape_text
from peertile.backends.cuda.state import Emitter, lowers, tile_of
from peertile.dtypes import DType
from peertile.ir import ops
from peertile.ir.core import walk
from peertile.ir.ops import Fold, Precision
from peertile.ir.types import TileType

__all__ = ["MAX_SUMMED", "apart", "plan_agreements"]

MAX_SUMMED: Final = 1 << 16
"""Most products of a matrix product that is summed elementwise: all of them are in registers at once."""


@lowers(ops.Broadcast)
def _broadcast(e: Emitter, op: ops.Broadcast) -> None:
    a, r = op.operands[0], tile_of(op.result)
    if tile_of(a) == r:
        e.alias(op.result, a)
    elif e.is_literal(a):
        e.define(op.result, f"tl.full({shape_text(r.shape)}, {e.text(a)}, {REGISTER[r.dtype.name]})")
    else:
        e.define(op.result, f"tl.broadcast_to({e.text(a)}, {shape_text(r.shape)})")


@lowers(ops.Reshape)
def _reshape(e: Emitter, op: ops.Reshape) -> None:
    a, r = tile_of(op.operands[0]), tile_of(op.result)
    x = e.typed(op.operands[0])
    if a == r:
        e.alias(op.result, op.operands[0])
    elif not a.shape:
        e.define(op.result, f"tl.broadcast_to({x}, {shape_text(r.shape)})")
    elif not r.shape:
        flat = x if a.rank == 1 else f"tl.reshape({x}, (1,))"
        e.define(op.result, _reduced(e, Fold.ADD if not a.dtype.is_bool else Fold.OR, flat, 0, a.dtype))
    elif a.rank == 1 and max(r.shape) == a.numel:
        # A line along an axis, such as a fold that keeps its axis: what is beside what stays in the same threads, where
        # a reshape would go through shared memory.
        e.define(op.result, expand(x, r.shape.index(a.numel), r.rank))
    elif e.options.specialize and (axes := _with_units(a.shape, r.shape)) is not None:
        # Groups of warps that share a loop know this as each one's own rows, and a reshape not at all.
        e.define(op.result, f"{x}[{', '.join(axes)}]")
    else:
        e.define(op.result, f"tl.reshape({x}, {shape_text(r.shape)})")


def _with_units(shape: tuple[int, ...], wanted: tuple[int, ...]) -> list[str] | None:
    """The subscript that makes `wanted` out of `shape` by axes of extent 1 alone, if there is one."""
    axes, rest = [], list(shape)
    for n in wanted:
        kept = bool(rest) and rest[0] == n
        axes.append(":" if kept else "None")
        if kept:
            del rest[0]
        elif n != 1:
            return None
    return None if rest else axes


_COMBINE: Final = {
    Fold.ADD: "_add", Fold.MUL: "_mul", Fold.MAX: "_max", Fold.MIN: "_min", Fold.AND: "_and", Fold.OR: "_or",
    Fold.XOR: "_xor",
}  # fmt: skip


@lowers(ops.Reduce)
def _reduce(e: Emitter, op: ops.Reduce) -> None:
    a = tile_of(op.operands[0])
    if e.judges and _agreement(e, op):
        function = ptx.judge(max(1, min(a.numel // e.lanes, MAX_PACK)))
        e.w.line(e.call_ptx(function, f"{e.typed(op.operands[0])}.to(tl.int32)"))
        e.define(op.result, e.call_ptx(ptx.agree()))
        e.met()
        return
    x = e.typed(op.operands[0])
    if op.attrs["fn"] is Fold.ADD and a.dtype.bits >= 32:  # narrower ones are made wide in between
        x = apart(x, a)
    e.define(op.result, _reduced(e, op.attrs["fn"], x, op.attrs["axis"], a.dtype))


def apart(x: str, t: TileType) -> str:
    """The same number, which Triton does not take for a product: of a sum of `a[:, :, None] * b[None, :, :]` it makes a
    product of matrices (3.6 sees few of those, 3.9 more), which adds in another order, and with factors of 10 bits in
    some versions. The addition of -0, which keeps even the sign of a zero, is gone from the machine code."""
    return f"tl.fma({x}, 1.0, -0.0)" if t.rank == 3 and t.dtype.is_float and t.dtype.bits >= 16 else x


MAX_PACK: Final = 8


def _agreement(e: Emitter, op: ops.Reduce) -> bool:
    """Whether a reduction asks all threads whether all is true: a barrier that counts says so."""
    a = tile_of(op.operands[0])
    return op.attrs["fn"] is Fold.AND and a.dtype.is_bool and a.rank == 1 and e.num_warps > 1 and a.numel >= e.lanes


def plan_agreements(e: Emitter) -> None:
    """The register of those reductions, at the head; in kernels that wait, whose time is the waiting."""
    reductions = (op for op in walk(e.kernel.body) if isinstance(op, ops.Reduce))
    e.judges = e.kernel.waits and any(_agreement(e, op) for op in reductions)
    if e.judges:
        e.w.line(e.call_ptx(ptx.verdict()))


def _reduced(e: Emitter, fn: Fold, x: str, axis: int, dtype: DType) -> str:
    """Narrow types are folded in 32 bits: exact for integers, and what tile IR says for floats."""
    combine = _COMBINE[fn]
    e.call(combine)
    if dtype.is_float and dtype.bits == 8:
        # Only how one element is taken out of its tile.
        bits = f"tl.reduce({x}.to(tl.int8, bitcast=True).to(tl.int32), {axis}, {combine})"
        return f"{bits}.to(tl.int8).to({REGISTER[dtype.name]}, bitcast=True)"
    narrow = dtype.bits < 32
    wide = "tl.float32" if dtype.is_float else "tl.int32" if dtype.is_signed or dtype.is_bool else "tl.uint32"
    folded = f"tl.reduce({f'{x}.to({wide})' if narrow else x}, {axis}, {combine})"
    if dtype.is_bool:
        return f"{folded} != 0"
    return f"{folded}.to({REGISTER[dtype.name]})" if narrow else folded


# ---------------------------------------------------------------- matrix products


@lowers(ops.Mma)
def _mma(e: Emitter, op: ops.Mma) -> None:
    a, b = (tile_of(v) for v in op.operands[:2])
    acc = tile_of(op.result)
    x, y, z = (e.typed(v) for v in op.operands)
    least = 32 if a.dtype.bits == 8 else 16
    batched = a.rank == 3
    if a.shape[-1] < least:
        _refuse_large(e, op, a, b, least)
        e.define(op.result, e.call("_dot_by_sum_batched" if batched else "_dot_by_sum", x, y, z))
    elif a.dtype.name == "u8":
        if batched:
            raise e.fail(op, f"mma: batched u8 is not available on {e.arch}; use i8, or a loop over the batch")
        e.define(op.result, e.call("_dot_u8", x, y, z, str(a.shape[-1])))
    else:
        precision = e.options.f32_mma if a.dtype.name == "f32" else "ieee"
        if op.attrs["precision"] is Precision.TF32:
            precision = "tf32"
        out = REGISTER[acc.dtype.name]
        e.define(op.result, f'tl.dot({x}, {y}, {z}, input_precision="{precision}", out_dtype={out})')


def _refuse_large(e: Emitter, op: ops.Mma, a: TileType, b: TileType, least: int) -> None:
    products = a.numel * b.shape[-1]
    if products > MAX_SUMMED:
        raise e.fail(
            op,
            f"mma: an inner extent of {a.shape[-1]} is below the {least} that {a.dtype} takes on {e.arch}, and "
            f"{a} with {b} has {products} products, more than the {MAX_SUMMED} that are summed instead; "
            f"use an inner extent of at least {least}",
        )
