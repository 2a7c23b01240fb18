"""Lowering of multicast operations of objects that the fabric has a mapping of. Others were loops over ranks before.

A tile is cut into groups of consecutive elements along its last axis. A group is acted on by exactly one thread, and
what it loads is handed to all: two threads that each load-reduce for themselves could see two values and part ways.
Tiles lie inside as a whole, so there are no masks.
"""

from __future__ import annotations

from peertile.backends.cuda import multimem
from peertile.backends.cuda.memory import expand, flat_rows
from peertile.backends.cuda.spelling import MEMORY, shape_text
from peertile.backends.cuda.state import Emitter, Record, Symmetric, lowers, tile_of
from peertile.backends.cuda.target import capability
from peertile.errors import CompileError
from peertile.ir import ops
from peertile.ir.core import Op, Value
from peertile.ir.types import MulticastType, TileType

__all__: list[str] = []

NEEDS = 90
"""The compute capability that has multimem instructions."""


def _object(e: Emitter, op: Op) -> tuple[MulticastType, Symmetric, str]:
    """Type, parts and address of the mapping."""
    t = op.operands[0].type
    assert isinstance(t, MulticastType)
    if capability(e.arch) < NEEDS:
        raise CompileError(
            f"{op.NAME}: multicast instructions need sm_{NEEDS} or newer, and the target is {e.arch}", op.loc
        )
    record = e.values[op.operands[0]]
    assert isinstance(record, Record)
    return t, record.fields["data"], record.fields["window"].text


class _Groups:
    """A tile of an object in groups: how wide they are, how many, and where each begins."""

    def __init__(self, e: Emitter, op: Op, t: TileType, indices: list[Value]) -> None:
        _, data, window = _object(e, op)
        self.e, self.tile, self.root = e, t, data.root
        size = t.dtype.itemsize
        # A multicast tensor has no gaps and its extents are multiples of the tile's: every row of a tile begins at a
        # multiple of the row's length.
        self.width = multimem.width(t.dtype, (t.shape[-1] if t.shape else 1) * size)
        self.elements = max(4 * self.width // size, 1)
        self.count = t.numel // self.elements
        self.rows = flat_rows(e, self.count)
        where = [window]
        for k, (extent, index) in enumerate(zip(t.shape, indices, strict=True)):
            stride = data.strides[k]
            scale = "" if stride == "1" else f" * {stride}"
            if e.text(index) != "0":
                where.append(f"{e.text(index)} * {extent * size}{scale}")
            steps, step = (extent // self.elements, self.elements) if k == t.rank - 1 else (extent, 1)
            line = expand(f"tl.arange(0, {steps})", k, t.rank)
            where.append(f"{line}.to(tl.int64) * {step * size}{scale}")
        flat = (
            f"tl.reshape({' + '.join(where)}, ({self.count},))" if t.shape else f"tl.full((1,), {where[0]}, tl.int64)"
        )
        self.addresses = e.let_own("group", self._lanes(flat))
        self.acts = e.let_own("acts", e.call("_first_row", str(self.rows), str(self.count)))

    def _lanes(self, flat: str) -> str:
        return self.e.call("_lanes", flat, str(self.rows), str(self.count))

    def registers(self, value: Value) -> list[str]:
        """The tile's bits, one integer tile for each register of a group."""
        e, t = self.e, self.tile
        text = e.typed(value)
        if t.dtype.bits == 16:
            pairs = e.let_own(
                "pairs", f"tl.reshape({text}.to(tl.uint16, bitcast=True), ({t.numel // 2}, 2)).to(tl.uint32)"
            )
            low, high = self._split(pairs)
            text = f"({low} | ({high} << 16)).to(tl.int32, bitcast=True)"
        else:
            integer = f"tl.int{t.dtype.bits}"
            text = f"tl.reshape({text}.to({integer}, bitcast=True), ({t.numel},))"
        if self.width == 1:
            found = [text]
        elif self.width == 2:
            found = list(self._split(e.let_own("words", f"tl.reshape({text}, ({self.count}, 2))")))
        else:
            even, odd = self._split(e.let_own("words", f"tl.reshape({text}, ({self.count}, 2, 2))"))
            (a, c), (b, d) = self._split(even), self._split(odd)
            found = [a, b, c, d]
        return [e.let_own("flat", self._lanes(x)) for x in found]

    def _split(self, text: str) -> tuple[str, str]:
        a, b = self.e.names.own("half"), self.e.names.own("half")
        self.e.w.line(f"{a}, {b} = tl.split({text})")
        return a, b

    def tile_from(self, text: str) -> str:
        """The tile whose groups hold the integers of `text`."""
        e, t = self.e, self.tile
        words = t.numel * t.dtype.itemsize // (8 if t.dtype.bits == 64 else 4)
        flat = e.let_own("words", f"tl.reshape({text}, ({words},))")
        memory = MEMORY[t.dtype.name]
        if t.dtype.bits == 16:
            low, high = f"({flat} & 65535).to(tl.uint16)", f"(({flat} >> 16) & 65535).to(tl.uint16)"
            flat = f"tl.reshape(tl.join({low}, {high}), ({t.numel},))"
        return f"tl.reshape({flat}.to({memory}, bitcast=True), {shape_text(t.shape)})"


@lowers(ops.MulticastLoad)
def _load(e: Emitter, op: ops.MulticastLoad) -> None:
    t, order = tile_of(op.result), op.attrs["order"]
    groups = _Groups(e, op, t, op.operands[1:])
    e.before_read(groups.root)
    function = multimem.load_reduce(op.attrs["rmw"], t.dtype, order, op.attrs["scope"], groups.width)
    e.call("_or")
    e.define(op.result, groups.tile_from(e.call_ptx(function, groups.addresses, groups.acts)))
    if order.acquires:
        e.barrier()


@lowers(ops.MulticastReduce)
def _reduce(e: Emitter, op: ops.MulticastReduce) -> None:
    t, order = tile_of(op.operands[1]), op.attrs["order"]
    groups = _Groups(e, op, t, op.operands[2:])
    if order.releases:
        e.barrier()
    e.before_write(groups.root, op.attrs["rmw"])
    function = multimem.reduce(op.attrs["rmw"], t.dtype, order, op.attrs["scope"], groups.width)
    e.w.line(e.call_ptx(function, groups.addresses, *groups.registers(op.operands[1]), groups.acts))


@lowers(ops.MulticastStore)
def _store(e: Emitter, op: ops.MulticastStore) -> None:
    t, order = tile_of(op.operands[1]), op.attrs["order"]
    groups = _Groups(e, op, t, op.operands[2:])
    if order.releases:
        e.barrier()
    e.before_write(groups.root)
    function = multimem.store(t.dtype, order, op.attrs["scope"], groups.width)
    e.w.line(e.call_ptx(function, groups.addresses, *groups.registers(op.operands[1]), groups.acts))


@lowers(ops.MulticastBulk)
def _bulk(e: Emitter, op: ops.MulticastBulk) -> None:
    t, rmw = tile_of(op.operands[1]), op.attrs["rmw"]
    size, nbytes = t.dtype.itemsize, t.numel * t.dtype.itemsize
    _, data, window = _object(e, op)
    e.ptx_version = max(e.ptx_version or 0, multimem.BULK_PTX)
    e.before_write(data.root)
    e.bulk_buffers += 1
    buffer = e.let_own("buffer", e.call_ptx(multimem.bulk_buffer(e.bulk_buffers, nbytes)))
    # Elements of a word at least: halves go in pairs.
    words = nbytes // (8 if size == 8 else 4)
    text = e.typed(op.operands[1])
    if size == 2:
        low, high = e.names.own("half"), e.names.own("half")
        pairs = f"tl.reshape({text}.to(tl.uint16, bitcast=True), ({words}, 2)).to(tl.uint32)"
        e.w.line(f"{low}, {high} = tl.split({pairs})")
        flat = f"({low} | ({high} << 16)).to(tl.int32, bitcast=True)"
    else:
        flat = f"tl.reshape({text}.to(tl.int{8 * size}, bitcast=True), ({words},))"
    bits = 64 if size == 8 else 32
    e.barrier()  # whatever used the buffer before
    places = f"{buffer} + tl.arange(0, {words}) * {bits // 8}"
    e.w.line(e.call_ptx(multimem.bulk_fill(bits), places, e.let_own("flat", flat)))
    e.barrier()
    where = [window]
    for k, (extent, index) in enumerate(zip(t.shape, op.operands[2:], strict=True)):
        if e.text(index) != "0":
            stride = data.strides[k]
            where.append(f"{e.text(index)} * {extent * size}" + ("" if stride == "1" else f" * {stride}"))
    e.w.line(e.call_ptx(multimem.bulk_copy(rmw, t.dtype, nbytes), " + ".join(where), buffer))
    e.barrier()


@lowers(ops.MulticastSignal)
def _signal(e: Emitter, op: ops.MulticastSignal) -> None:
    t, data, window = _object(e, op)
    e.barrier()
    e.before_write(data.root)
    where = [window]
    for k, index in enumerate(op.operands[2:]):
        if e.text(index) != "0":
            stride = data.strides[k]
            where.append(f"{e.text(index)} * {t.dtype.itemsize}" + ("" if stride == "1" else f" * {stride}"))
    value = f"{e.typed(op.operands[1])}.to(tl.int{t.dtype.bits}, bitcast=True)"
    e.w.line(e.call_ptx(multimem.signal(t.dtype, op.attrs["add"]), " + ".join(where), value))
