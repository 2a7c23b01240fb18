"""Lowering of views of views: address, extents and strides, named once. Nothing is read or written here."""

from __future__ import annotations

from peertile.backends.cuda.memory import make_descriptors
from peertile.backends.cuda.state import Emitter, Expr, Symmetric, View, lowers
from peertile.ir import ops
from peertile.ir.core import Op
from peertile.ir.types import ViewType

__all__: list[str] = []


def _product(a: str, b: str) -> str:
    return b if a == "1" else a if b == "1" else f"{a} * {b}"


@lowers(ops.ViewStride)
def _stride(e: Emitter, op: ops.ViewStride) -> None:
    view = e.values[op.operands[0]]
    assert isinstance(view, View | Symmetric)
    stride = view.strides[op.attrs["axis"]]
    e.values[op.result] = Expr(stride, is_literal=stride.isdigit())


def _derived(e: Emitter, op: Op, pointer: str, extents: tuple[str, ...], strides: tuple[str, ...]) -> None:
    view = e.values[op.operands[0]]
    t = op.result.type
    assert isinstance(t, ViewType)
    # What the result's type promises is written out, so that the compiler sees vectors.
    if t.align > 1 and pointer != view.pointer:
        pointer = e.let(op.result.hint or "part", f"tl.multiple_of({pointer}, {t.align})")
    strides = tuple("1" if unit else s for s, unit in zip(strides, t.unit_stride, strict=True))
    e.values[op.result] = View(t, pointer, extents, strides, view.root)
    make_descriptors(e, op.result)


@lowers(ops.ViewSlice)
def _slice(e: Emitter, op: ops.ViewSlice) -> None:
    view = e.values[op.operands[0]]
    rank = view.type.rank
    texts = [e.text(v) for v in op.operands[1:]]
    starts, extents, steps = texts[:rank], texts[rank : 2 * rank], texts[2 * rank :]
    terms = [view.pointer, *(_product(a, s) for a, s in zip(starts, view.strides, strict=True) if a != "0")]
    pointer = e.let("part", " + ".join(terms)) if len(terms) > 1 else view.pointer
    strides = tuple(
        s if step == "1" else e.let("step", _product(s, step)) for s, step in zip(view.strides, steps, strict=True)
    )
    _derived(e, op, pointer, tuple(extents), strides)


@lowers(ops.ViewPermute)
def _permute(e: Emitter, op: ops.ViewPermute) -> None:
    view, axes = e.values[op.operands[0]], op.attrs["axes"]
    _derived(e, op, view.pointer, tuple(view.extents[k] for k in axes), tuple(view.strides[k] for k in axes))


@lowers(ops.ViewReshape)
def _reshape(e: Emitter, op: ops.ViewReshape) -> None:
    view = e.values[op.operands[0]]
    extents = tuple(e.text(v) for v in op.operands[1:])
    strides, step = [], "1"
    for extent in reversed(extents):
        strides.append(step)
        step = extent if step == "1" else e.let("step", _product(step, extent))
    _derived(e, op, view.pointer, extents, tuple(reversed(strides)))
