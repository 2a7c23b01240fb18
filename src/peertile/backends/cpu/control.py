"""Lowering of control flow: for, loop, if, and the terminators.

Scalars travel through phis; a tile that is carried around a loop, or out of an `if`, lives in one piece of
scratch which every path writes before it gets to the join. Where the new value was computed in place (an
accumulator), nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from peertile.backends.cpu.lower import Lowering, lowers
from peertile.backends.cpu.nodes import Buffer, BufferNode, Node, ScalarNode, View, resolve
from peertile.backends.cpu.reads import buffers_below, reads_below
from peertile.backends.cpu.text import LLVM, Block, Phi
from peertile.dtypes import DType, u64
from peertile.errors import InternalError
from peertile.ir import ops
from peertile.ir.core import Op, Value
from peertile.ir.types import PointerType, TileType, TokenType, Type, ViewType


def is_tile(t: Type) -> bool:
    """Whether a value of the type lives in scratch when it is carried."""
    return isinstance(t, TileType | PointerType) and bool(t.shape)


def carried_dtype(t: Type) -> DType:
    """Pointers are carried as addresses."""
    assert isinstance(t, TileType | PointerType)
    return t.dtype if isinstance(t, TileType) else u64


def register_types(t: Type) -> list[str]:
    """LLVM types of the registers of a value that is no tile."""
    if isinstance(t, TileType | PointerType):
        return [LLVM[carried_dtype(t).name]]
    if isinstance(t, ViewType):
        return ["ptr"] + ["i64"] * (2 * t.rank)
    if isinstance(t, TokenType):
        return []
    raise InternalError(f"cpu backend: a value of type {t} cannot be carried")


def registers(lo: Lowering, value: Value) -> list[str]:
    t = value.type
    if isinstance(t, TileType | PointerType):
        return [lo.scalar(value)]
    if isinstance(t, ViewType):
        view = lo.values[value]
        return [view.pointer, *view.extents, *view.strides]
    return []


def bind(lo: Lowering, value: Value, found: list[str]) -> None:
    """Give `value` the registers that `registers` would have given."""
    t = value.type
    if isinstance(t, TileType | PointerType):
        lo.define(value, ScalarNode(carried_dtype(t), (), found[0]))
    elif isinstance(t, ViewType):
        extents, strides = tuple(found[1 : 1 + t.rank]), tuple(found[1 + t.rank :])
        lo.define(value, View(t, found[0], extents, strides, "", found[0]))
    else:
        lo.define(value, None)


@dataclass(eq=False, slots=True)
class Join:
    """A block that values reach along several edges: phis for registers, scratch for tiles."""

    block: Block
    types: list[Type]
    phis: list[list[Phi]] = field(default_factory=list)
    tiles: list[BufferNode | None] = field(default_factory=list)

    @staticmethod
    def make(lo: Lowering, block: Block, types: Sequence[Type], tiles: list[BufferNode | None]) -> Join:
        join = Join(block, list(types), [], tiles)
        for t in types:
            join.phis.append([] if is_tile(t) else [lo.f.phi(block, r) for r in register_types(t)])
        return join

    def go(self, lo: Lowering, values: Sequence[Value]) -> None:
        """Put `values` where the join expects them and jump."""
        found = [[] if is_tile(v.type) else registers(lo, v) for v in values]
        assign(lo, [(lo.node(v), to) for v, to in zip(values, self.tiles, strict=True) if to is not None])
        source = lo.f.br(self.block)
        for phis, regs in zip(self.phis, found, strict=True):
            for phi, register in zip(phis, regs, strict=True):
                phi.add(register, source)

    def edge(self, found: list[list[str]], source: Block) -> None:
        """An edge whose registers are known and whose tiles are in place."""
        for phis, regs in zip(self.phis, found, strict=True):
            for phi, register in zip(phis, regs, strict=True):
                phi.add(register, source)

    def bind(self, lo: Lowering, values: Sequence[Value]) -> None:
        for value, phis, tile in zip(values, self.phis, self.tiles, strict=True):
            if tile is not None:
                lo.define(value, BufferNode(tile.buffer, tile.dtype, tile.shape))
            else:
                bind(lo, value, [p.name for p in phis])


def assign(lo: Lowering, pairs: list[tuple[Node, BufferNode]]) -> None:
    """Compute nodes into given scratch, all at once: none sees what another wrote."""
    lo.flush()
    todo = [(resolve(n), to) for n, to in pairs]
    todo = [(n, to) for n, to in todo if not _is_there(n, to)]
    targets = {to.buffer for _, to in todo}
    # One group computes everything of a trip before it stores, so values at their own positions never collide.
    together = len({n.shape for n, _ in todo}) == 1 and all(
        same for n, _ in todo for read, same in reads_below(n) if read.buffer in targets
    )
    protected, lo.protected = lo.protected, lo.protected | {to.buffer for _, to in pairs}
    ready: list[tuple[Node, BufferNode]] = []
    for node, to in todo:
        reads = reads_below(node)
        moved = any(n.buffer is to.buffer and not same for n, same in reads)
        others = any(n.buffer in targets and n.buffer is not to.buffer for n, _ in reads)
        if not together and (moved or others):
            temporary = lo.tile_buffer(node.dtype, node.shape)
            lo.keep_into(node, temporary)
            lo.flush()
            node = temporary
        ready.append((node, to))
    for node, to in ready:
        lo.keep_into(node, to)
    lo.flush()
    lo.protected = protected


def _is_there(node: Node, to: BufferNode) -> bool:
    return isinstance(node, BufferNode) and node.buffer is to.buffer and node.is_dense


def _owned(lo: Lowering, value: Value, node: Node, after: int, taken: set[Buffer]) -> bool:
    """Whether the scratch of `value` may be written: nobody reads it at or after `after`."""
    if not isinstance(node, BufferNode) or not node.is_dense or node.buffer in taken:
        return False
    if lo.last_use.get(value, 0) >= after:
        return False
    return not any(v is not value and node.buffer in buffers_below(n, set()) for v, n in lo.live(after))


def _carried(lo: Lowering, op: Op, inits: Sequence[Value]) -> tuple[list[BufferNode | None], list[Buffer]]:
    """Scratch of the carried tiles, holding their initial values; and the buffers pinned for that."""
    start = lo.at[op]
    tiles: list[BufferNode | None] = []
    pinned: list[Buffer] = []
    pairs: list[tuple[Node, BufferNode]] = []
    taken: set[Buffer] = set()
    for value in inits:
        if not is_tile(value.type):
            tiles.append(None)
            continue
        node = lo.node(value)
        uses = [u for u in lo.uses[value] if u >= start]
        if len(uses) == 1 and _owned(lo, value, node, start + 1, taken):
            assert isinstance(node, BufferNode)
            to = BufferNode(node.buffer, node.dtype, node.shape)
        else:
            to = lo.tile_buffer(node.dtype, node.shape)
            pairs.append((node, to))
        taken.add(to.buffer)
        if not to.buffer.pinned:
            to.buffer.pinned = True
            pinned.append(to.buffer)
        tiles.append(to)
    assign(lo, pairs)
    return tiles, pinned


def _result_tiles(lo: Lowering, types: Sequence[Type]) -> tuple[list[BufferNode | None], list[Buffer]]:
    tiles: list[BufferNode | None] = []
    pinned = []
    for t in types:
        if not is_tile(t):
            tiles.append(None)
            continue
        assert isinstance(t, TileType | PointerType)
        to = lo.tile_buffer(carried_dtype(t), t.shape, pinned=True)
        pinned.append(to.buffer)
        tiles.append(to)
    return tiles, pinned


def _release(pinned: list[Buffer]) -> None:
    for buffer in pinned:
        buffer.pinned = False


@dataclass(eq=False, slots=True)
class LoopFrame:
    """Where `continue` and `break` of a loop go."""

    next: Join
    exit: Join


@lowers(ops.For)
def _for(lo: Lowering, op: ops.For) -> None:
    f = lo.f
    lo.enter_nested(op)
    first, last, step = (lo.scalar(v) for v in op.operands[:3])
    t = op.operands[0].type
    assert isinstance(t, TileType)
    it, signed = LLVM[t.dtype.name], "s" if t.dtype.is_signed else "u"
    inits = op.operands[3:]
    tiles, pinned = _carried(lo, op, inits)
    body = op.blocks[0]
    start = [[] if is_tile(v.type) else registers(lo, v) for v in inits]
    types = [v.type for v in inits]
    header, latch, done = f.block("for"), f.block("next"), f.block("end")
    head, next_, exit_ = (Join.make(lo, b, types, tiles) for b in (header, latch, done))
    some = f.value(f"icmp {signed}lt {it} {first}, {last}")
    source = f.cond_br(some, header, done)
    index = f.phi(header, it)
    index.add(first, source)
    head.edge(start, source)
    exit_.edge(start, source)
    f.place(header)
    lo.define(body.args[0], ScalarNode(t.dtype, (), index.name))
    head.bind(lo, body.args[1:])
    lo.frames.append(LoopFrame(next_, exit_))
    lo.lower_block(body)
    lo.frames.pop()
    if latch.predecessors:
        f.place(latch)
        # hi - iv > step, not iv + step < hi: the sum may wrap around.
        left = f.value(f"sub {it} {last}, {index.name}")
        more = f.value(f"icmp ugt {it} {left}, {step}")
        following = f.value(f"add {it} {index.name}, {step}")
        carried = [[p.name for p in phis] for phis in next_.phis]
        source = f.cond_br(more, header, done)
        index.add(following, source)
        head.edge(carried, source)
        exit_.edge(carried, source)
    f.place(done)
    _after(lo, op, exit_, pinned)


def _after(lo: Lowering, op: Op, join: Join, pinned: list[Buffer]) -> None:
    lo.now = lo.end[op]
    join.bind(lo, op.results)
    _release(pinned)
    if not join.block.predecessors:
        lo.f.end("unreachable")


@lowers(ops.Loop)
def _loop(lo: Lowering, op: ops.Loop) -> None:
    f = lo.f
    lo.enter_nested(op)
    inits = op.operands
    tiles, pinned = _carried(lo, op, inits)
    results, pinned_results = _result_tiles(lo, [r.type for r in op.results])
    body = op.blocks[0]
    start = [[] if is_tile(v.type) else registers(lo, v) for v in inits]
    header, done = f.block("loop"), f.block("end")
    head = Join.make(lo, header, [v.type for v in inits], tiles)
    exit_ = Join.make(lo, done, [r.type for r in op.results], results)
    source = f.br(header)
    head.edge(start, source)
    f.place(header)
    head.bind(lo, body.args)
    lo.frames.append(LoopFrame(head, exit_))
    lo.lower_block(body)
    lo.frames.pop()
    f.place(done)
    _after(lo, op, exit_, pinned + pinned_results)


@lowers(ops.If)
def _if(lo: Lowering, op: ops.If) -> None:
    f = lo.f
    lo.enter_nested(op)
    condition = lo.scalar(op.operands[0])
    tiles, pinned = _if_tiles(lo, op)
    yes, no, done = f.block("then"), f.block("else"), f.block("end")
    join = Join.make(lo, done, [r.type for r in op.results], tiles)
    f.cond_br(condition, yes, no)
    lo.frames.append(join)
    for block, arm in zip((yes, no), op.blocks, strict=True):
        f.place(block)
        if block.predecessors:
            lo.lower_block(arm)
        else:
            f.end("unreachable")
        if not f.current.terminated:
            lo.f.br(done)  # an arm without a terminator, where there are no results
    lo.frames.pop()
    f.place(done)
    _after(lo, op, join, pinned)


def _if_tiles(lo: Lowering, op: ops.If) -> tuple[list[BufferNode | None], list[Buffer]]:
    """Scratch of the results: that of a value which an arm hands on unchanged and nobody reads later, if any."""
    tiles: list[BufferNode | None] = []
    pinned: list[Buffer] = []
    taken: set[Buffer] = set()
    yields = [b.terminator for b in op.blocks]
    for k, result in enumerate(op.results):
        t = result.type
        if not is_tile(t):
            tiles.append(None)
            continue
        assert isinstance(t, TileType | PointerType)
        to: BufferNode | None = None
        for y in yields:
            if not isinstance(y, ops.Yield):
                continue
            value = y.operands[k]
            node = lo.values.get(value)
            if isinstance(node, Node) and _owned(lo, value, resolve(node), lo.end[op] + 1, taken):
                node = resolve(node)
                assert isinstance(node, BufferNode)
                if node.dtype == carried_dtype(t) and node.shape == t.shape:
                    to = BufferNode(node.buffer, node.dtype, node.shape)
                    break
        if to is None:
            to = lo.tile_buffer(carried_dtype(t), t.shape)
        taken.add(to.buffer)
        if not to.buffer.pinned:
            to.buffer.pinned = True
            pinned.append(to.buffer)
        tiles.append(to)
    return tiles, pinned


def _loop_frame(lo: Lowering) -> LoopFrame:
    return next(frame for frame in reversed(lo.frames) if isinstance(frame, LoopFrame))


@lowers(ops.Yield)
def _yield(lo: Lowering, op: ops.Yield) -> None:
    lo.flush()
    join = lo.frames[-1]
    assert isinstance(join, Join)
    join.go(lo, op.operands)


@lowers(ops.Continue)
def _continue(lo: Lowering, op: ops.Continue) -> None:
    lo.flush()
    _loop_frame(lo).next.go(lo, op.operands)


@lowers(ops.Break)
def _break(lo: Lowering, op: ops.Break) -> None:
    lo.flush()
    _loop_frame(lo).exit.go(lo, op.operands)


@lowers(ops.Return)
def _return(lo: Lowering, op: ops.Return) -> None:
    lo.flush()
    lo.f.br(lo.leave)
