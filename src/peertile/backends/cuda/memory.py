"""Lowering of views, tile loads, tile stores and tile atomics.

A tile access is a block of pointers with a mask, or a bulk copy (TMA) through a tensor descriptor. The address of
the tile's corner is computed in 64 bits from its index; inside the tile only the axes without unit stride multiply
in 64 bits. Descriptors are for what feeds a matrix product, in memory that nobody else sees during the launch:
bulk copies go through another proxy and would need fences against ordinary accesses.
"""

from __future__ import annotations

from typing import Final

from peertile.backends.cuda import ptx
from peertile.backends.cuda.spelling import REGISTER, UNSIGNED, from_bits, padding_bits, shape_text
from peertile.backends.cuda.state import LAUNCH_WORDS, Emitter, Narrow, Ranks, Record, Symmetric, View, lowers, tile_of
from peertile.backends.cuda.target import check_rmw, emulated_rmw, has_one_trip, reread
from peertile.dtypes import DType
from peertile.ir import ops
from peertile.ir.core import Block, Op, Value, walk
from peertile.ir.ops import Binary, Padding
from peertile.ir.types import Space, TileType, ViewType
from peertile.memory_model import Rmw, Scope

__all__ = [
    "RMW_FUNCTION",
    "SEM",
    "by_swap",
    "expand",
    "flat_rows",
    "is_sent_in_bulk",
    "make_descriptors",
    "padding_text",
    "plan_accesses",
    "read_tables",
    "to_memory",
    "to_register",
]

SEM: Final = {"relaxed": "relaxed", "acquire": "acquire", "release": "release", "acq_rel": "acq_rel"}
RMW_FUNCTION: Final = {
    Rmw.ADD: "add", Rmw.ADDF: "add", Rmw.AND: "and", Rmw.OR: "or", Rmw.XOR: "xor", Rmw.MIN: "min", Rmw.MAX: "max",
    Rmw.UMIN: "min", Rmw.UMAX: "max", Rmw.XCHG: "xchg",
}  # fmt: skip


# ---------------------------------------------------------------- views


@lowers(ops.PeerView)
def _peer_view(e: Emitter, op: ops.PeerView) -> None:
    s = e.values[op.operands[0]]
    assert isinstance(s, Symmetric)
    t = op.result.type
    assert isinstance(t, ViewType)
    base = f"{e.ranks[s.table].base(e.text(op.operands[1]), literal=e.is_literal(op.operands[1]))} + {s.offset}"
    pointer = f"({base}).to({e.pointer_type(t.dtype)})"
    if t.align > 1:
        pointer = f"tl.multiple_of({pointer}, {t.align})"
    name = e.let(op.result.hint or "at", pointer)
    e.values[op.result] = View(t, name, s.extents, s.strides, s.root)
    make_descriptors(e, op.result)


@lowers(ops.Field)
def _field(e: Emitter, op: ops.Field) -> None:
    record = e.values[op.operands[0]]
    assert isinstance(record, Record)
    e.values[op.result] = record.fields[op.attrs["field"]]


@lowers(ops.LaunchWords)
def _launch_words(e: Emitter, op: ops.LaunchWords) -> None:
    t = op.result.type
    assert isinstance(t, ViewType)
    e.values[op.result] = View(t, "_launch", ("8",), ("1",), LAUNCH_WORDS)


# ---------------------------------------------------------------- blocks of pointers


def expand(text: str, axis: int, rank: int) -> str:
    """A 1-d tile as axis `axis` of a tile of `rank` axes."""
    if rank == 1:
        return text
    return f"{text}[{', '.join(':' if k == axis else 'None' for k in range(rank))}]"


def _product(a: str, b: str) -> str:
    if a.lstrip("-").isdigit() and b.lstrip("-").isdigit():
        return str(int(a) * int(b))
    return "0" if "0" in (a, b) else a if b == "1" else b if a == "1" else f"{a} * {b}"


def block_of(
    e: Emitter, view: View, indices: list[Value], shape: tuple[int, ...], skip: int | None = None
) -> tuple[str, str | None]:
    """(pointers, mask) of a tile; no mask for a view without axes. `skip` leaves an axis, which has no index, out."""
    rank = len(shape)
    if rank == 0:
        return view.pointer, None
    masks, corner, inside = [], [view.pointer], []
    rest = iter(indices)
    for k, size in enumerate(shape):
        if k == skip:
            continue
        index = next(rest)
        start = _product(e.text(index), str(size))
        if start != "0":
            corner.append(_product(start, view.strides[k]))
        extent = view.extents[k] if not view.extents[k].isdigit() else f"tl.full((), {view.extents[k]}, tl.int64)"
        left = e.let_own("room", e.call("_left", extent, start, str(size)))
        line = expand(f"tl.arange(0, {size})", k, rank)
        masks.append(f"({line} < {left})")
        inside.append(line if view.strides[k] == "1" else f"{line}.to(tl.int64) * {view.strides[k]}")
    if skip is not None and rank == 1:
        return view.pointer, None
    pointers = e.let(f"{view.pointer}_at", " + ".join([*corner, *inside]))
    return pointers, " & ".join(masks)


def to_register(text: str, dtype: DType) -> str:
    return f"{text} != 0" if dtype.is_bool else text


def to_memory(text: str, dtype: DType) -> str:
    return f"{text}.to(tl.uint8)" if dtype.is_bool else text


def padding_text(padding: Padding, dtype: DType) -> str:
    if padding is Padding.ZERO and not (dtype.is_float and dtype.bits == 8):
        return "0.0" if dtype.is_float else "0"
    return from_bits(padding_bits(padding, dtype), dtype)


@lowers(ops.Load)
def _load(e: Emitter, op: ops.Load) -> None:
    view, t = e.view(op.operands[0]), tile_of(op.result)
    e.before_read(view.root)
    if op in e.descriptors:
        e.define(op.result, _descriptor_load(e, op, t))
        return
    pointers, mask = block_of(e, view, op.operands[1:], t.shape)
    if mask is None:
        e.define(op.result, to_register(f"tl.load({pointers})", t.dtype))
    else:
        other = padding_text(op.attrs["padding"], t.dtype)
        hint = f', eviction_policy="{e.reread[op]}"' if op in e.reread else ""
        e.define(op.result, to_register(f"tl.load({pointers}, mask={mask}, other={other}{hint})", t.dtype))


@lowers(ops.Store)
def _store(e: Emitter, op: ops.Store) -> None:
    view = e.view(op.operands[0])
    t = tile_of(op.operands[1])
    if op not in e.once:
        e.before_write(view.root, in_bulk=op in e.descriptors)
    value = to_memory(e.typed(op.operands[1]), t.dtype)
    if op in e.descriptors:
        _descriptor_store(e, op, value, t)
        return
    pointers, mask = block_of(e, view, op.operands[2:], t.shape)
    e.w.line(f"tl.store({pointers}, {value})" if mask is None else f"tl.store({pointers}, {value}, mask={mask})")


# ---------------------------------------------------------------- tile atomics


@lowers(ops.TileAtomic)
def _tile_atomic(e: Emitter, op: ops.TileAtomic) -> None:
    view, t = e.view(op.operands[0]), tile_of(op.operands[1])
    kind, order = op.attrs["rmw"], op.attrs["order"]
    check_rmw(kind, t.dtype, e.arch, op.loc)
    scope = e.scope(op.attrs["scope"], view.type.space)
    if order.releases:
        e.barrier()
    e.before_write(view.root, kind)
    value = e.typed(op.operands[1])
    pointers, mask = block_of(e, view, op.operands[2:], t.shape)
    if emulated_rmw(kind, t.dtype):
        function = ptx.rmw_tile(kind, t.dtype, order, scope)
        e.w.line(by_swap(e, function, pointers, [value], mask, t, "").strip())
    else:
        call = native_rmw(kind, t.dtype, pointers, value, mask, order.value, scope)
        e.w.line(call)
    if order.acquires:
        e.barrier()


def native_rmw(kind: Rmw, dtype: DType, pointers: str, value: str, mask: str | None, order: str, scope: Scope) -> str:
    """A call of one of Triton's atomics; the compared type carries the sign of min and max."""
    if kind in (Rmw.MIN, Rmw.MAX, Rmw.UMIN, Rmw.UMAX):
        signed = kind in (Rmw.MIN, Rmw.MAX)
        t = f"tl.{'int' if signed else 'uint'}{dtype.bits}"
        if REGISTER[dtype.name] != t:
            pointers, value = f"{pointers}.to(tl.pointer_type({t}))", f"{value}.to({t}, bitcast=True)"
    masked = "" if mask is None else f", mask={mask}"
    name = RMW_FUNCTION[kind]
    return f'tl.atomic_{name}({pointers}, {value}{masked}, sem="{SEM[order]}", scope="{ptx.SCOPE[scope]}")'


def flat_rows(e: Emitter, numel: int) -> int:
    """Copies of a flat tile that give each thread an element of its own."""
    return max(e.lanes // numel, 1)


def by_swap(
    e: Emitter, function: ptx.Function, pointers: str, operands: list[str], mask: str | None, t: TileType, result: str
) -> str:
    """Runs a `ptx` function over tiles so that each element is acted on by exactly one thread.

    Small tiles are copied to one element a thread, of which the first row acts; with `result`, the outcome (0
    elsewhere) is folded back, so that it is the same in every thread, and its expression is returned.
    """
    bits = t.dtype.itemsize * 8
    rows, n = flat_rows(e, t.numel), t.numel
    flat = [pointers, *(as_word(x, t.dtype) for x in operands)]
    active = mask or "tl.full((), True, tl.int1)"
    active = f"({active})"
    if t.shape:
        shape = shape_text((n,))
        full = shape_text(t.shape)
        flat = [f"tl.reshape(tl.broadcast_to({x}, {full}), {shape})" for x in flat]
        active = f"tl.reshape(tl.broadcast_to({active}, {full}), {shape})"
    else:
        flat = [f"tl.broadcast_to({x}, (1,))" for x in flat]
        active = f"tl.broadcast_to({active}, (1,))"
    spread = [e.let_own("flat", e.call("_lanes", x, str(rows), str(n))) for x in flat]
    masked = e.call("_lanes", f"{active}.to(tl.int32)", str(rows), str(n))
    acts = e.let_own("acts", f"{masked} * {e.call('_first_row', str(rows), str(n))}")
    call = e.call_ptx(function, *spread, acts)
    if not result:
        return call
    e.call("_or")
    found = e.let_own("seen", f"tl.reduce({call}, 0, _or)")
    narrow = f"{found}.to({UNSIGNED[bits]})" if bits < 32 else found
    if not t.shape:
        narrow = f"tl.reduce({narrow}.to(tl.int{max(bits, 32)}), 0, _or)"
        narrow = f"{narrow}.to({UNSIGNED[bits]})" if bits < 32 else narrow
    else:
        narrow = f"tl.reshape({narrow}, {shape_text(t.shape)})"
    return from_word(narrow, t.dtype)


def as_word(text: str, dtype: DType) -> str:
    """A value as the integer, of 32 bits at least, that PTX takes."""
    if dtype.is_bool:
        return f"{text}.to(tl.int32)"
    bits = dtype.itemsize * 8
    unsigned = text if REGISTER[dtype.name] == UNSIGNED[bits] else f"{text}.to({UNSIGNED[bits]}, bitcast=True)"
    return f"{unsigned}.to(tl.int32)" if bits < 32 else f"{unsigned}.to(tl.int{bits}, bitcast=True)"


def from_word(text: str, dtype: DType) -> str:
    """The inverse of `as_word`, from an integer of the element's width or of 32 bits."""
    if dtype.is_bool:
        return f"{text} != 0"
    bits = dtype.itemsize * 8
    narrow = f"{text}.to({UNSIGNED[bits]})" if bits < 32 else text
    return f"{narrow}.to({REGISTER[dtype.name]}, bitcast=True)"


# ---------------------------------------------------------------- tensor descriptors


class Descriptor:
    """One descriptor: its variable, the axes of the view in the order of memory, and the tile it moves, which of a wide
    store is half of the op's."""

    __slots__ = ("axes", "name", "shape")

    def __init__(self, name: str, axes: tuple[int, ...], shape: tuple[int, ...]) -> None:
        self.name = name
        self.axes = axes
        self.shape = shape


def read_tables(e: Emitter) -> None:
    """Reads what the kernel uses of the tables of ranks, at its head and all at once: each is a round trip to memory,
    which would come before every first access of a peer. The tables of one object's fields are one."""
    used: dict[str, str] = {}  # table -> the one that is read for it
    for op in walk(e.kernel.body):
        if not isinstance(op, ops.PeerView | ops.Rank | ops.NumRanks):
            continue
        source = op.operands[0]
        if isinstance(source.op, ops.Field):
            record = e.values[source.op.operands[0]]
            assert isinstance(record, Record)
            found = record.fields[source.op.attrs["field"]]
            first = next(f for f in record.fields.values() if isinstance(f, Symmetric))
        else:
            found = first = e.values[source]
        assert isinstance(found, Symmetric)
        assert isinstance(first, Symmetric)
        used[found.table] = first.table
    for table in dict.fromkeys(used.values()):
        names = []
        for k, word in enumerate(("rank", "ranks", "base", "base")):
            at = f"{table} + {k}"
            # Where time is what counts; the assembler would sink a plain load to its use, behind a wait for another.
            names.append(e.let_own(word, e.call_ptx(ptx.load_table(), at) if e.kernel.waits else f"tl.load({at})"))
        e.ranks[table] = Ranks(table, *names)
    for table, read in used.items():
        e.ranks[table] = e.ranks[read]


def plan_accesses(e: Emitter) -> None:
    """Finds the stores that hit each tile once, and the accesses that go through descriptors; writes those at the head
    of the kernel."""
    found = _accesses(e)
    for loads in reread(e.kernel):
        # Triton would also make one of two that say the same.
        e.reread |= dict.fromkeys(loads[:-1], "evict_last") | {loads[-1]: "evict_first"}
    for accesses in found.values():
        e.once.update(op for op in accesses if isinstance(op, ops.Store) and _alone(accesses))
    if not e.options.descriptors or _largest_product(e) < _WORTH_BULK:
        return
    feeding = _feeding_mma(e)
    made: dict[tuple[Value, tuple[int, ...]], Descriptor] = {}
    for view, accesses in found.items():
        axes = _bulk_axes(view)
        if _only_loads(e, view):  # its slices, too, are read alone
            accesses = [op for op in accesses if not isinstance(op, ops.ViewSlice)]
        if axes is None or not _alone(accesses):
            continue
        for op in accesses:
            if not isinstance(op, ops.Load | ops.Store):
                continue
            if isinstance(op, ops.Load) and (op not in feeding or op.attrs["padding"] is not Padding.ZERO):
                continue
            if isinstance(op, ops.Store) and not e.options.specialize and (_is_made_once(op) or _is_beside_sent(op)):
                continue
            t = tile_of(op.result if isinstance(op, ops.Load) else op.operands[1])
            if not _fits_bulk(t, axes):
                continue
            if isinstance(op, ops.Store) and not e.options.specialize:  # each group of warps stores its own rows then
                t = _moved_at_once(t, axes, _beside(op))
            key = (view, t.shape)
            if key not in made:
                made[key] = _make_descriptor(e, view, axes, t)
            e.descriptors[op] = made[key]
    _plan_derived(e, feeding)


def _is_made_once(op: Op) -> bool:
    """Whether each program comes by `op` once at most: making a descriptor takes longer than a bulk copy saves, for a
    result of 256 by 8192 on an H200 54.4 us with it and 52.7 us without."""
    loop = ops.enclosing_loop(op)
    while loop is not None:
        if not isinstance(loop, ops.For) or not has_one_trip(loop):
            return False
        loop = ops.enclosing_loop(loop)
    return True


def _is_beside_sent(op: Op) -> bool:
    """Whether the trip that stores this sends a tile to a peer, too: that one stays in shared memory until the link has
    taken it, and there is no room for another beside the buffers of a product."""
    assert op.parent is not None
    return any(map(_is_sent, op.parent.ops))


def is_sent_in_bulk(e: Emitter, op: Op) -> bool:
    """Whether `op` stores a tile in a peer's memory by a bulk copy."""
    return op in e.descriptors and _is_sent(op)


def _is_sent(op: Op) -> bool:
    """Whether `op` stores a tile in a peer's memory."""
    source = _source(op.operands[0]).op if isinstance(op, ops.Store) else None
    return isinstance(source, ops.PeerView) and not isinstance(source.operands[1].op, ops.Rank)


_WORTH_BULK: Final = 128 * 128
"""Elements of a product's result from which on bulk copies are worth it: a program makes its descriptors itself, which
takes as long as some trips of a small product's loop. Measured on an H200, 16 and 64 rows by 8192 columns: 0.93 of
cuBLAS with them, 0.99 without."""
_WIDE_STORE: Final = 1 << 16


def _plan_derived(e: Emitter, feeding: set[Op]) -> None:
    """Finds the accesses of parts of peers' memory and of slices that go through descriptors, which are made where the
    view is, outside of the loop that uses it.

    Peers see this memory: what they wrote by ordinary stores is fetched by another proxy, so a wait is followed by a
    fence between the two (`Emitter.fences_bulk`), and what is stored in bulk is waited for before anything is released
    (`Emitter.awaits_bulk`).
    """
    for op in walk(e.kernel.body):
        if not isinstance(op, ops.Load | ops.Store) or op in e.descriptors or op.operands[0] in e.values:
            continue
        view = op.operands[0]
        if view.op is None or ops.enclosing_loop(view.op) is ops.enclosing_loop(op):
            continue
        if _is_moved(e, op):
            if isinstance(op, ops.Store) and _is_sent(op) and _hits_once(op):
                e.once.add(op)
            continue
        axes = _derived_axes(e, view)
        if axes is None:
            continue
        t = tile_of(op.result if isinstance(op, ops.Load) else op.operands[1])
        if not _fits_bulk(t, axes):
            continue
        source = _source(view)
        if isinstance(op, ops.Load):
            if op.attrs["padding"] is not Padding.ZERO or (op not in feeding and t.numel < _WORTH_BULK):
                continue
            if isinstance(source.op, ops.PeerView):
                if not isinstance(source.op.operands[1].op, ops.Rank):
                    continue  # a peer's memory is read by ordinary loads, which its writers order against
                e.fences_bulk = True
            elif not _only_loads(e, source):
                continue
        else:
            if not isinstance(source.op, ops.PeerView) or not _hits_once(op):
                continue
            # As a whole: the second half would wait until the link has taken the first one from shared memory.
            e.awaits_bulk = True
            e.once.add(op)
            if not _is_sent(op):
                t = _moved_at_once(t, axes)
        e.planned.setdefault(view, []).append((op, axes, t))


def _is_moved(e: Emitter, op: ops.Load | ops.Store) -> bool:
    """Whether a tile goes from memory to memory as it is, and then through registers: a bulk copy to a peer has to wait
    until the link has taken the one before from shared memory, so that it moves less."""
    if isinstance(op, ops.Store):
        return _is_loaded(op.operands[1], 0)
    users = [o for o in walk(e.kernel.body) if op.result in o.operands]
    return bool(users) and all(
        isinstance(o, ops.Yield | ops.Continue | ops.For) or (isinstance(o, ops.Store) and _is_loaded(o.operands[1], 0))
        for o in users
    )


def _is_loaded(value: Value, depth: int) -> bool:
    """Whether a tile was loaded, in this trip of a loop or in the one before."""
    if isinstance(value.op, ops.Load):
        return True
    if value.op is not None or depth or not isinstance(value.owner, Block):
        return False
    loop = value.owner.parent
    return isinstance(loop, ops.For) and _is_loaded(loop.operands[2 + value.index], 1)


def _source(view: Value) -> Value:
    """What a view is a part of: a parameter, or the part of a symmetric object that a rank has."""
    while isinstance(view.op, ops.ViewSlice):
        view = view.op.operands[0]
    return view


def _only_loads(e: Emitter, source: Value) -> bool:
    """Whether a parameter is read by tiles alone, itself and its slices."""
    return isinstance(e.values.get(source), View) and not any(
        isinstance(op, ops.Store | ops.TileStore | ops.WordStore | ops.TileAtomic | ops.WordRmw | ops.Scatter)
        and _source(op.operands[0]) is source
        for op in walk(e.kernel.body)
    )


def _derived_axes(e: Emitter, view: Value) -> tuple[int, ...] | None:
    """As `_bulk_axes`, of slices and of what a rank has of a symmetric object: a slice that begins at the beginning of
    the unit axis, with steps of 1, is aligned as the whole is."""
    at = view
    while isinstance(at.op, ops.ViewSlice):
        t = at.type
        assert isinstance(t, ViewType)
        starts, steps = at.op.operands[1 : 1 + t.rank], at.op.operands[1 + 2 * t.rank :]
        if any(not _is_constant(step, 1) for step in steps):
            return None
        if any(unit and not _is_constant(start, 0) for unit, start in zip(t.unit_stride, starts, strict=True)):
            return None
        at = at.op.operands[0]
    if isinstance(at.op, ops.PeerView):
        if not isinstance(e.values.get(at.op.operands[0]), Symmetric):
            return None
        return _bulk_axes(at, Space.PEER)
    return _bulk_axes(at) if at in e.values else None


def _is_constant(value: Value, number: int) -> bool:
    return isinstance(value.op, ops.Const) and value.op.attrs["value"] == number


def make_descriptors(e: Emitter, value: Value) -> None:
    """The descriptors that were planned for a view, which has just been named."""
    made: dict[tuple[int, ...], Descriptor] = {}
    planned = e.planned.pop(value, ())
    if any(isinstance(op, ops.Store) for op, _, _ in planned):
        e.barrier()  # what was stored through another view may lie in the same place
    for op, axes, t in planned:
        if t.shape not in made:
            made[t.shape] = _make_descriptor(e, value, axes, t)
        e.descriptors[op] = made[t.shape]


def _largest_product(e: Emitter) -> int:
    return max((tile_of(op.result).numel for op in walk(e.kernel.body) if isinstance(op, ops.Mma)), default=0)


def _moved_at_once(t: TileType, axes: tuple[int, ...], beside: int = _WIDE_STORE) -> TileType:
    """A wide tile is stored as two halves, one behind the other, or in pieces of `beside` columns: the shared memory
    that a store goes through is as large as what it moves, and every byte of it is missing for the buffers of the
    loads. Stores of one shape share it."""
    columns = t.shape[-1]
    flat = max(t.shape[:-2], default=1) == 1 and axes == tuple(range(t.rank))
    whole = not flat or t.numel * t.dtype.itemsize < _WIDE_STORE or columns < 128
    return t if whole else TileType(t.dtype, (*t.shape[:-1], min(columns // 2, beside)))


def _beside(store: ops.Store) -> int:
    """Columns of the narrowest tile that is stored next to one, of as many rows."""
    assert store.parent is not None
    rows = tile_of(store.operands[1]).shape[:-1]
    tiles = [tile_of(op.operands[1]) for op in store.parent.ops if isinstance(op, ops.Store)]
    return max(min(t.shape[-1] for t in tiles if t.shape[:-1] == rows), 64)


def _feeding_mma(e: Emitter) -> set[Op]:
    """Loads whose tiles reach a matrix product as a factor, through changes of shape and casts alone."""
    found: set[Op] = set()
    todo = [v for op in walk(e.kernel.body) if isinstance(op, ops.Mma) for v in op.operands[:2]]
    while todo:
        op = todo.pop().op
        if isinstance(op, ops.Load):
            found.add(op)
        elif isinstance(op, ops.Permute | ops.Cast | ops.Reshape):
            todo.append(op.operands[0])
    return found


def _accesses(e: Emitter) -> dict[Value, list[Op]]:
    """Every op that touches each view parameter."""
    found: dict[Value, list[Op]] = {}
    for op in walk(e.kernel.body):
        if op.operands and op.operands[0] in e.values and isinstance(e.values[op.operands[0]], View):
            found.setdefault(op.operands[0], []).append(op)
    return found


def _alone(accesses: list[Op]) -> bool:
    """Whether all accesses of a view may be bulk copies: only loads, or one store that hits each tile once.

    Two bulk stores of one tile are not ordered by program order, since they are waited for only as far as their
    source is concerned.
    """
    touching = [op for op in accesses if not isinstance(op, ops.Extent | ops.NumTiles | ops.TileIndex | ops.ViewStride)]
    if all(isinstance(op, ops.Load) for op in touching):
        return True
    return len(touching) == 1 and isinstance(touching[0], ops.Store) and _hits_once(touching[0])


def _hits_once(store: ops.Store) -> bool:
    """Whether a store's index is this program's own tile, or that of the loop over its tiles that is right around."""
    loop = ops.enclosing_loop(store)
    # Beside the tile's own index there may be what stays the same throughout the loop.
    index = [v for v in store.operands[2:] if loop is None or not _defined_outside(v, loop)]
    tile = index[0].op if index else None
    if isinstance(loop, ops.For) and index == [loop.blocks[0].args[0]]:
        linear = index[0]
    elif not isinstance(tile, ops.TileIndex) or index != tile.results:
        return False
    else:
        linear = tile.operands[1]
    if isinstance(linear.op, ops.BinaryOp) and linear.op.attrs["fn"] is Binary.SUB:
        # From the last tile on: as many as there are less 1, less the number in turn.
        whole, linear = linear.op.operands
        if loop is not None and not _defined_outside(whole, loop):
            return False
    if loop is None:
        return isinstance(linear.op, ops.ProgramId)
    # A view that is made in a loop around is another one in each of its trips.
    made = store.operands[0].op
    around = None if made is None else ops.enclosing_loop(made)
    return ops.enclosing_loop(loop) is around and isinstance(loop, ops.For) and linear is loop.blocks[0].args[0]


def _defined_outside(v: Value, loop: Op) -> bool:
    """Whether `v` is defined outside of `loop`, or is a constant."""
    if isinstance(v.op, ops.Const):
        return True
    block = v.owner if isinstance(v.owner, Block) else v.owner.parent
    while block is not None:
        if block.parent is loop:
            return False
        block = block.parent.parent if block.parent is not None else None
    return True


def _bulk_axes(view: Value, space: Space = Space.LOCAL) -> tuple[int, ...] | None:
    """The axes with the unit one last, or None where facts do not allow bulk copies."""
    t = view.type
    if not isinstance(t, ViewType) or t.space is not space or t.rank not in (2, 3, 4) or t.dtype.is_bool:
        return None
    if t.align % 16 or not t.align or not any(t.unit_stride):
        return None
    unit = max(k for k in range(t.rank) if t.unit_stride[k])
    # Every stride but the unit one is a multiple of each `divisible`; another unit stride is no multiple of 16 bytes.
    if sum(t.unit_stride) > 1 or max(t.divisible) * t.dtype.itemsize % 16:
        return None
    return (*(k for k in range(t.rank) if k != unit), unit)


def _fits_bulk(t: TileType, axes: tuple[int, ...]) -> bool:
    return t.shape[axes[-1]] * t.dtype.itemsize >= 16 and all(n <= 256 for n in t.shape)


def _make_descriptor(e: Emitter, value: Value, axes: tuple[int, ...], t: TileType) -> Descriptor:
    view = e.view(value)
    shape = tuple(t.shape[k] for k in axes)
    source = _source(value)
    # A slice has no extents of its own that a launch could look at; it is no larger than what it is a part of.
    slots = e.values[source.op.operands[0] if isinstance(source.op, ops.PeerView) else source].slots
    for k in axes:
        e.narrow.append(Narrow(slots[k], is_stride=False))
        if view.strides[k] != "1":
            e.narrow.append(Narrow(slots[len(view.extents) + k], is_stride=True))
    # A view may be empty, and nothing is copied then; a descriptor must not be.
    extents = ", ".join(f"tl.maximum({_wide(view.extents[k])}, 1).to(tl.int32)" for k in axes)
    strides = ", ".join(view.strides[k] for k in axes)
    name = e.let(
        f"{view.pointer}_tiles",
        f"tl.make_tensor_descriptor({view.pointer}, shape=[{extents}], strides=[{strides}], "
        f"block_shape=[{', '.join(map(str, shape))}])",
    )
    return Descriptor(name, axes, shape)


def _wide(extent: str) -> str:
    return f"tl.full((), {extent}, tl.int64)" if extent.isdigit() else extent


def _offsets(e: Emitter, d: Descriptor, indices: list[Value]) -> str:
    terms = []
    for k, size in zip(d.axes, d.shape, strict=True):
        index = indices[k]
        terms.append(
            str(int(e.text(index)) * size) if e.is_literal(index) else f"({e.text(index)} * {size}).to(tl.int32)"
        )
    return f"[{', '.join(terms)}]"


def _descriptor_load(e: Emitter, op: Op, t: TileType) -> str:
    d = e.descriptors[op]
    text = f"{d.name}.load({_offsets(e, d, op.operands[1:])})"
    if d.axes == tuple(range(t.rank)):
        return text
    return f"tl.permute({text}, {shape_text(tuple(d.axes.index(k) for k in range(t.rank)))})"


def _descriptor_store(e: Emitter, op: Op, value: str, t: TileType) -> None:
    d = e.descriptors[op]
    if d.shape != tuple(t.shape[k] for k in d.axes):
        _store_pieces(e, d, op, value, t)
        return
    if d.axes != tuple(range(t.rank)):
        value = f"tl.permute({value}, {shape_text(d.axes)})"
    e.w.line(f"{d.name}.store({_offsets(e, d, op.operands[2:])}, {value})")


def _store_pieces(e: Emitter, d: Descriptor, op: Op, value: str, t: TileType) -> None:
    rows, columns = t.shape[-2:]
    *outer, row, column = (e.typed(v) for v in op.operands[2:])
    corner = [*(f"({x}).to(tl.int32)" for x in outer), f"({row} * {rows}).to(tl.int32)"]
    at = e.let_own("column", f"({column} * {columns}).to(tl.int32)")

    def store(piece: str, first: int, width: int) -> None:
        if width > d.shape[-1]:
            halves = [e.names.own("half") for _ in range(2)]
            parts = f"tl.permute(tl.reshape({piece}, ({rows}, 2, {width // 2})), (0, 2, 1))"
            e.w.line(f"{', '.join(halves)} = tl.split({parts})")
            for k, half in enumerate(halves):
                store(half, first + k * (width // 2), width // 2)
            return
        offset = f" + {first}" if first else ""
        part = piece if t.rank == 2 else f"tl.reshape({piece}, {shape_text(d.shape)})"
        e.w.line(f"{d.name}.store([{', '.join(corner)}, {at}{offset}], {part})")

    store(value, 0, columns)
