"""Lowering of pieces of tiles (take, extract, insert), of permutation, of sorting, and of folds by a kernel's function.

Triton gathers along an axis; everything here but the folds is made of that. Bools and fp8 travel as integers, which
is all that Triton moves between threads.
"""

from __future__ import annotations

from math import prod

from peertile.backends.cuda.memory import expand
from peertile.backends.cuda.shape import apart
from peertile.backends.cuda.spelling import REGISTER, shape_text
from peertile.backends.cuda.state import LOWERINGS, Emitter, lowers, tile_of
from peertile.backends.cuda.writer import Writer
from peertile.dtypes import DType, Kind
from peertile.ir import ops
from peertile.ir.core import Block, Op, Value
from peertile.ir.types import TileType

__all__: list[str] = []


def _carried(text: str, d: DType) -> str:
    """A value as what moves between threads."""
    if d.is_bool:
        return f"{text}.to(tl.int32)"
    return f"{text}.to(tl.int8, bitcast=True)" if d.is_float and d.bits == 8 else text


def _arrived(text: str, d: DType) -> str:
    """The inverse of `_carried`."""
    if d.is_bool:
        return f"({text} != 0)"
    return f"{text}.to({REGISTER[d.name]}, bitcast=True)" if d.is_float and d.bits == 8 else text


# ---------------------------------------------------------------- pieces


def _along(e: Emitter, x: str, index: str, axis: int) -> str:
    return f"tl.gather({x}, {index}, {axis})"


@lowers(ops.Take)
def _take(e: Emitter, op: ops.Take) -> None:
    x, d = tile_of(op.operands[0]), tile_of(op.result).dtype
    axis = op.attrs["axis"]
    # Extents are powers of two, so the low bits of an index are its remainder, of negative ones too.
    index = f"({e.typed(op.operands[1])}.to(tl.int32) & {x.shape[axis] - 1})"
    e.define(op.result, _arrived(_along(e, _carried(e.typed(op.operands[0]), d), index, axis), d))


def _line(n: int, axis: int, shape: tuple[int, ...], text: str) -> str:
    """A 1-d index along `axis`, repeated over a tile of `shape`."""
    return f"tl.broadcast_to({expand(text, axis, len(shape))}, {shape_text(shape)})"


def _number(e: Emitter, index: Value, pieces: int) -> str:
    """A tile index modulo the number of pieces, as an i32 scalar."""
    if e.is_literal(index):
        return str(int(e.text(index)) % pieces)
    return e.let_own("piece", f"({e.text(index)} & {pieces - 1}).to(tl.int32)")


@lowers(ops.Extract)
def _extract(e: Emitter, op: ops.Extract) -> None:
    x, piece = tile_of(op.operands[0]), tile_of(op.result)
    text = _carried(e.typed(op.operands[0]), x.dtype)
    shape = list(x.shape)
    for axis, (n, size) in enumerate(zip(x.shape, piece.shape, strict=True)):
        if n == size:
            continue
        shape[axis] = size
        index_of = op.operands[1 + axis]
        if (n, size, axis) == (2, 1, x.rank - 1) and e.is_literal(index_of) and not _is_carried(op.operands[0], op):
            # Neighbours are in one thread, which nothing has to be moved between.
            halves = [e.names.own("half") for _ in range(2)]
            e.w.line(f"{', '.join(halves)} = tl.split({text})")
            text = f"tl.reshape({halves[int(e.text(index_of)) % 2]}, {shape_text(tuple(shape))})"
            continue
        number = _number(e, index_of, n // size)
        index = _line(size, axis, tuple(shape), f"({number} * {size} + tl.arange(0, {size}))")
        text = e.let_own("part", _along(e, text, index, axis))
    e.define(op.result, _arrived(text, x.dtype))


@lowers(ops.Insert)
def _insert(e: Emitter, op: ops.Insert) -> None:
    x, piece = tile_of(op.operands[0]), tile_of(op.operands[1])
    whole = _carried(e.typed(op.operands[0]), x.dtype)
    text = _carried(e.typed(op.operands[1]), x.dtype)
    inside = []
    # Not by gathers, one axis after the other: Triton's choice of layouts for such a chain does not come to an end.
    one, many = [], []
    for axis, (n, size) in enumerate(zip(x.shape, piece.shape, strict=True)):
        if n == size:
            one.append(n)
            many.append(n)
            continue
        one += [1, size]
        many += [n // size, size]
        number = _number(e, op.operands[2 + axis], n // size)
        inside.append(expand(f"(tl.arange(0, {n}) // {size} == {number})", axis, x.rank))
    if not inside:
        e.alias(op.result, op.operands[1])
        return
    text = f"tl.broadcast_to(tl.reshape({text}, {shape_text(tuple(one))}), {shape_text(tuple(many))})"
    text = e.let_own("part", f"tl.reshape({text}, {shape_text(x.shape)})")
    e.define(op.result, _arrived(f"tl.where({' & '.join(inside)}, {text}, {whole})", x.dtype))


# ---------------------------------------------------------------- permutation


@lowers(ops.Permute)
def _permute(e: Emitter, op: ops.Permute) -> None:
    axes, (x,) = op.attrs["axes"], op.operands
    if axes == tuple(range(len(axes))):
        e.alias(op.result, x)
    elif _is_carried(x, op):
        a, r = tile_of(x), tile_of(op.result)
        places = [prod(a.shape[axis + 1 :]) for axis in axes]
        lines = [
            f"{expand(f'tl.arange(0, {n})', k, r.rank)} * {place}"
            for k, (n, place) in enumerate(zip(r.shape, places, strict=True))
        ]
        index = f"tl.reshape(tl.broadcast_to({' + '.join(lines)}, {shape_text(r.shape)}), ({r.numel},))"
        flat = _along(e, f"tl.reshape({_carried(e.typed(x), a.dtype)}, ({a.numel},))", index, 0)
        e.define(op.result, _arrived(f"tl.reshape({flat}, {shape_text(r.shape)})", a.dtype))
    else:
        e.define(op.result, f"tl.permute({e.text(x)}, {shape_text(axes)})")


def _is_carried(x: Value, by: Op) -> bool:
    """Whether a tile comes from what a loop carries that `by`, an op that turns it, is in. Turned in each trip it keeps
    Triton choosing layouts for ever, since each choice asks for its turned one; the result of a gather has a layout of
    its own. What a loop has carried that has ended is turned once for each."""
    around = []
    loop = ops.enclosing_loop(by)
    while loop is not None:
        around.append(loop)
        loop = ops.enclosing_loop(loop)
    seen: set[Value] = set()
    todo = [x]
    while todo:
        v = todo.pop()
        if v in seen or not isinstance(v.type, TileType) or not v.type.shape:
            continue
        seen.add(v)
        if isinstance(v.owner, Block):
            if isinstance(v.owner.parent, ops.For | ops.Loop) and v.owner.parent in around:
                return True
            continue
        todo += v.owner.operands
        ends = [block.terminator for block in v.owner.blocks]
        todo += [operand for end in ends if end is not None for operand in end.operands]
    return False


# ---------------------------------------------------------------- sorting


@lowers(ops.Sort)
def _sort(e: Emitter, op: ops.Sort) -> None:
    """The key as an unsigned number in its order, with the place below it: sorting those is stable whatever the
    network does. A key of 64 bits takes two rounds, low half first."""
    key = tile_of(op.operands[0])
    axis, n, shape = op.attrs["axis"], key.shape[op.attrs["axis"]], key.shape
    number, bits = _ordered(e, e.variable(op.operands[0]), key.dtype)
    if op.attrs["descending"]:
        number = f"({number} ^ {(1 << bits) - 1})"
    number = e.let_own("order", number)
    halves = [number] if bits == 32 else [f"({number} & 4294967295)", f"({number} >> 32)"]
    chosen = ""
    for half in halves:
        if chosen:
            half = f"{_along(e, f'{half}.to(tl.int64, bitcast=True)', chosen, axis)}.to(tl.uint64, bitcast=True)"
        place = _line(n, axis, shape, f"tl.arange(0, {n})")
        word = f"({half}.to(tl.uint64) << 32) | {place}.to(tl.uint64)"
        order = e.let_own("places", f"({_sorted(e, word, axis, key.rank)} & 4294967295).to(tl.int32)")
        chosen = order if not chosen else e.let_own("places", _along(e, chosen, order, axis))
    for result, value in zip(op.results, op.operands, strict=True):
        d = tile_of(value).dtype
        e.define(result, _arrived(_along(e, _carried(e.typed(value), d), chosen, axis), d))


def _sorted(e: Emitter, text: str, axis: int, rank: int) -> str:
    """Triton sorts along the last axis."""
    if axis == rank - 1:
        return f"tl.sort({text})"
    swap = list(range(rank))
    swap[axis], swap[-1] = swap[-1], swap[axis]
    return f"tl.permute(tl.sort(tl.permute({text}, {shape_text(tuple(swap))})), {shape_text(tuple(swap))})"


def _ordered(e: Emitter, x: str, d: DType) -> tuple[str, int]:
    """Keys as unsigned numbers of 32 or 64 bits in the same order: NaN the greatest, zeros equal."""
    if d.is_float:
        wide = d.bits == 64
        x = x if d.bits >= 32 else f"{x}.to(tl.float32)"
        return e.call("_float_order64" if wide else "_float_order32", x), 64 if wide else 32
    if d.bits == 64:
        return (x, 64) if d.kind is Kind.UINT else (f"({x}.to(tl.uint64, bitcast=True) ^ {1 << 63})", 64)
    if d.is_signed:
        return f"({x}.to(tl.int32).to(tl.uint32, bitcast=True) ^ {1 << 31})", 32
    return f"{x}.to(tl.uint32)", 32


# ---------------------------------------------------------------- folds by a function of the kernel


@lowers(ops.ReduceWith)
def _reduce_with(e: Emitter, op: ops.ReduceWith) -> None:
    _fold(e, op, f"tl.reduce({{tiles}}, {op.attrs['axis']}, {{function}})")


@lowers(ops.ScanWith)
def _scan_with(e: Emitter, op: ops.ScanWith) -> None:
    reverse = ", reverse=True" if op.attrs["reverse"] else ""
    _fold(e, op, f"tl.associative_scan({{tiles}}, {op.attrs['axis']}, {{function}}{reverse})")


def _fold(e: Emitter, op: Op, template: str) -> None:
    dtypes = [tile_of(v).dtype for v in op.operands]
    function = _function(e, op, dtypes)
    tiles = [_carried(e.typed(v), d) for v, d in zip(op.operands, dtypes, strict=True)]
    if len(tiles) == 1:
        tiles = [apart(tiles[0], tile_of(op.operands[0]))]
        text = template.format(tiles=tiles[0], function=function)
        e.define(op.result, _arrived(text, dtypes[0]))
        return
    names = [e.names.own("folded") for _ in tiles]
    together = "(" + ", ".join(tiles) + ")"
    e.w.line(f"{', '.join(names)} = {template.format(tiles=together, function=function)}")
    for result, name, d in zip(op.results, names, dtypes, strict=True):
        if _arrived(name, d) == name:
            e.set(result, name)
        else:
            e.define(result, _arrived(name, d))


def _function(e: Emitter, op: Op, dtypes: list[DType]) -> str:
    """The op's block as a function of the file; its lines are not in the line table, the call's is."""
    name = e.names.own("combine")
    (block,) = op.blocks
    params = [e.names.fresh(a.hint, "a") for a in block.args]
    saved, e.w = e.w, Writer()
    try:
        e.w.open()
        for param, arg, d in zip(params, block.args, [*dtypes, *dtypes], strict=True):
            if _arrived(param, d) == param:
                e.set(arg, param)
            else:
                e.define(arg, _arrived(param, d))
        for inner in block.ops[:-1]:
            LOWERINGS[type(inner)](e, inner)
        results = [_carried(e.typed(v), d) for v, d in zip(block.ops[-1].operands, dtypes, strict=True)]
        e.w.line(f"return {', '.join(results)}")
        body = "\n".join(e.w.lines)
    finally:
        e.w = saved
    e.called[name] = f"@triton.jit\ndef {name}({', '.join(params)}):\n{body}\n"
    return name
