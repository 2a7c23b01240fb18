"""Lowering of words (single elements with an order), waits, fences, checks and output.

Every ordered access to a word is made by one elected thread. A block barrier comes before a release, so that it
covers what the other threads wrote, and after an acquire, so that it covers what they will read. Peer memory is
always accessed at system scope.
"""

from __future__ import annotations

from typing import Final

from peertile.backends.cuda import ptx
from peertile.backends.cuda.memory import as_word, by_swap, from_word, native_rmw, to_memory, to_register
from peertile.backends.cuda.spelling import REGISTER
from peertile.backends.cuda.state import Emitter, View, lowers, tile_of
from peertile.backends.cuda.target import check_rmw, emulated_rmw
from peertile.backends.marks import MARK, PLACE_BIT
from peertile.ir import ops
from peertile.ir.core import Value, walk
from peertile.ir.ops import CheckKind, Compare, Moment
from peertile.ir.types import PointerType, TileType
from peertile.memory_model import Order

__all__ = ["FAULT_KINDS", "PRINT_HEADER", "address_of"]

FAULT_KINDS: Final = {CheckKind.ASSERT: ptx.FAULT_ASSERT, CheckKind.BOUNDS: 2, CheckKind.SIGNATURE: 3}
PRINT_HEADER: Final = 16
"""Bytes before the records of a print buffer, and of a record before its payload."""


def address_of(e: Emitter, view: View, indices: list[Value]) -> str:
    terms = [view.pointer]
    for value, stride in zip(indices, view.strides, strict=True):
        index = e.text(value)
        if index == "0":
            continue
        if not e.is_literal(value):
            terms.append(index if stride == "1" else f"{index} * {stride}")
        else:
            terms.append(str(int(index) * int(stride)) if stride.isdigit() else f"{index} * {stride}")
    return " + ".join(terms)


@lowers(ops.WordLoad)
def _word_load(e: Emitter, op: ops.WordLoad) -> None:
    view, order = e.view(op.operands[0]), op.attrs["order"]
    dtype = view.type.dtype
    if view.root in e.own:
        e.set(op.result, e.let_own("word", e.own[view.root].name))
        return
    e.before_read(view.root)
    address = address_of(e, view, op.operands[1:])
    if order is Order.WEAK:
        e.define(op.result, to_register(f"tl.load({address})", dtype))
        return
    function = ptx.load_elected(order, e.scope(op.attrs["scope"], view.type.space), dtype.itemsize * 8)
    e.call("_or")
    e.define(op.result, from_word(e.call_ptx(function, address, str(e.lanes)), dtype))
    if order.acquires:
        e.barrier()


@lowers(ops.WordStore)
def _word_store(e: Emitter, op: ops.WordStore) -> None:
    view, order = e.view(op.operands[0]), op.attrs["order"]
    dtype = view.type.dtype
    value = e.typed(op.operands[1])
    if view.root in e.own:  # nobody reads it in this launch
        e.w.line(f"{e.own[view.root].name} = {value}")
        e.w.line(f"tl.store({address_of(e, view, op.operands[2:])}, {to_memory(value, dtype)})")
        return
    if order.releases:
        e.barrier()
    e.before_write(view.root)
    address = address_of(e, view, op.operands[2:])
    if order is Order.WEAK:
        e.w.line(f"tl.store({address}, {to_memory(value, dtype)})")
        return
    function = ptx.store_elected(order, e.scope(op.attrs["scope"], view.type.space), dtype.itemsize * 8)
    e.w.line(e.call_ptx(function, address, as_word(value, dtype)))


@lowers(ops.WordRmw)
def _word_rmw(e: Emitter, op: ops.WordRmw) -> None:
    view, kind, order = e.view(op.operands[0]), op.attrs["rmw"], op.attrs["order"]
    dtype = view.type.dtype
    check_rmw(kind, dtype, e.arch, op.loc)
    scope = e.scope(op.attrs["scope"], view.type.space)
    if order.releases:
        e.barrier()
    e.before_write(view.root, kind)
    address = address_of(e, view, op.operands[2:])
    value = e.typed(op.operands[1])
    if emulated_rmw(kind, dtype):
        function = ptx.rmw_tile(kind, dtype, order, scope)
        e.define(op.result, by_swap(e, function, address, [value], None, TileType(dtype), "old"))
    else:
        text = native_rmw(kind, dtype, f"({address})", value, None, order.value, scope)
        t = tile_of(op.result).dtype
        if kind.value in ("min", "max", "umin", "umax"):
            text = f"{text}.to({REGISTER[t.name]}, bitcast=True)"
        if op.result in e.used:
            e.define(op.result, text)
        else:
            e.w.line(text)
            e.set(op.result, "_unused")
    if order.acquires:
        e.barrier()


@lowers(ops.Fence)
def _fence(e: Emitter, op: ops.Fence) -> None:
    e.barrier()
    e.w.line(e.call_ptx(ptx.fence(op.attrs["scope"], e.elected_fences)))
    e.barrier()


@lowers(ops.FenceAlias)
def _fence_alias(e: Emitter, op: ops.FenceAlias) -> None:
    """By every thread, for what it did itself; the barriers hand that on to the others on both sides."""
    e.barrier()
    e.w.line(e.call_ptx(ptx.fence_alias()))
    e.barrier()
    e.tokens(op.results)


@lowers(ops.Suspend)
def _suspend(e: Emitter, op: ops.Suspend) -> None:
    """Resident programs of a GPU always make progress, so that there is nothing to do for others; but a loop that polls
    has the bound of a wait, from where it begins."""
    if not op.attrs["continues"]:
        e.w.line(f"_since = {e.call_ptx(ptx.clock())}")
        return
    place = e.place(op, "wait", what="a loop that polls")
    args = ["_since", "_abort", "_fault", "_timeout", "_program", _i64(place)]
    e.w.line(f"_alive = _alive & {e.call_ptx(ptx.patience(), *args)}")
    e.met()


# ---------------------------------------------------------------- waits and checks


@lowers(ops.Wait)
def _wait(e: Emitter, op: ops.Wait) -> None:
    view = e.view(op.operands[0])
    word = (op.operands[0], op.operands[1], op.operands[2:])
    asserted = _asserted(e, op)
    if asserted is not None:
        _poll(e, op, [word], "", asserted)
        e.set(op.result, "_unused")
        return
    found = _poll(e, op, [word], "value" if op.result in e.used else "")
    if found is not None:
        dtype = view.type.dtype
        e.define(op.result, from_word(f"{found}.to(tl.int{dtype.bits})" if dtype.bits < 64 else found, dtype))


@lowers(ops.WaitAny)
def _wait_any(e: Emitter, op: ops.WaitAny) -> None:
    found = _poll(e, op, op.words(), "index")
    assert found is not None
    e.set(op.result, found)


def _asserted(e: Emitter, op: ops.Wait) -> tuple[Value, ops.Check] | None:
    """What the word has to be equal to once it has come, where nothing else is done with it: the thread that polls then
    says so itself, and the value need not reach the others. The comparison and the assertion are made here."""
    block = op.parent
    assert block is not None
    at = block.ops.index(op)
    compare, check = None, None
    for other in block.ops[at + 1 :]:
        if compare is None and isinstance(other, ops.CompareOp) and op.result in other.operands:
            compare = other
        elif compare is not None and isinstance(other, ops.Check) and other.operands[0] is compare.result:
            check = other
            break
        elif other.effects or other.blocks or other.TERMINATOR:
            return None
    if compare is None or check is None or compare.attrs["fn"] is not Compare.EQ or len(check.operands) > 1:
        return None
    users = [o for o in walk(e.kernel.body) if op.result in o.operands or compare.result in o.operands]
    value = compare.operands[1] if compare.operands[0] is op.result else compare.operands[0]
    if users != [compare, check] or check.attrs["kind"] is not CheckKind.ASSERT or value not in e.values:
        return None
    e.settled |= {compare, check}
    return value, check


def _poll(
    e: Emitter, op: ops.Wait | ops.WaitAny, words: list[tuple[Value, Value, list[Value]]], result: str,
    asserted: tuple[Value, ops.Check] | None = None,
) -> str | None:  # fmt: skip
    """Waits until one of the words is satisfied, or leaves; gives the variable with the result that was asked for."""
    views = [e.view(view) for view, _, _ in words]
    for view in views:
        e.before_read(view.root)
    scope = max((e.scope(op.attrs["scope"], view.type.space) for view in views), key=lambda s: s.width)
    exact = asserted is not None
    poll = ptx.Poll(
        tuple(v.type.dtype for v in views), op.attrs["cmp"], op.attrs["order"], scope, result, exact, e.num_warps == 1
    )
    args = []
    for view, (_, expected, indices) in zip(views, words, strict=True):
        args += [address_of(e, view, indices), as_word(e.typed(expected), view.type.dtype)]
    place = e.place(op, "wait", what=op.attrs["what"])
    slot = e.typed(words[0][2][0]) if words[0][2] else _i64("0")
    args += ["_abort", "_fault", "_timeout", "_program", _i64(place), slot]
    if asserted is not None:
        value, check = asserted
        args += [
            as_word(e.typed(value), views[0].type.dtype),
            _i64(e.place(check, CheckKind.ASSERT.value, check.attrs["message"])),
        ]
    if not result:
        satisfied, found = e.let_own("satisfied", e.call_ptx(ptx.wait(poll), *args)), None
        e.set(op.result, "_unused")
    else:
        e.call("_or")
        e.call("_and")
        satisfied, found = e.names.own("satisfied"), e.names.own("found")
        e.w.line(f"{satisfied}, {found} = {e.call_ptx(ptx.wait(poll), *args, str(e.lanes))}")
    e.w.line(f"_alive = _alive & {satisfied}")
    # The barrier of `barrier.red` comes after the acquire; the value, where there is one, took another way since.
    if result:
        e.barrier()
    else:
        e.met()
    return found


def _i64(text: str) -> str:
    return f"tl.full((), {text}, tl.int64)"


@lowers(ops.Check)
def _check(e: Emitter, op: ops.Check) -> None:
    kind = op.attrs["kind"]
    place = e.place(op, kind.value, op.attrs["message"])
    numbers = [e.typed(v) for v in op.operands[1:]]
    numbers += [_i64("0")] * (2 - len(numbers))
    tag = f"tl.full((), {FAULT_KINDS[kind] << 24 | int(place)}, tl.int32)"
    args = ["_alive", e.typed(op.operands[0]), tag, *numbers]
    e.w.line(f"_alive = {e.call_ptx(ptx.check(), *args)}")


# ---------------------------------------------------------------- output


@lowers(ops.Print)
def _print(e: Emitter, op: ops.Print) -> None:
    """One record: program, place, bytes; then the operands, each from a multiple of 8 bytes on."""
    place = e.place(op, "print", op.attrs["prefix"], "; ".join(str(v.type) for v in op.operands))
    sizes = [(tile_of(v).numel * tile_of(v).dtype.itemsize + 7) // 8 * 8 for v in op.operands]
    total = sum(sizes)
    record = PRINT_HEADER + total
    with e.w.indented("if _print.to(tl.int64) != 0:"):
        offset = e.let_own("offset", f'tl.atomic_add(_print + 1, {record}, sem="relaxed", scope="gpu").to(tl.int64)')
        with e.w.indented(f"if {offset} + {record} <= tl.load(_print).to(tl.int64):"):
            at = e.let_own("record", f"(_print.to(tl.int64) + {PRINT_HEADER} + {offset})")
            words = e.let_own("words", f"{at}.to(tl.pointer_type(tl.int64))")
            e.w.line(f"tl.store({words}, _program)")
            e.w.line(f"tl.store({words} + 1, {_i64(str(int(place) | total << 32))})")
            byte = PRINT_HEADER
            for v, size in zip(op.operands, sizes, strict=True):
                _print_operand(e, v, at, byte)
                byte += size


def _print_operand(e: Emitter, v: Value, at: str, byte: int) -> None:
    t = tile_of(v)
    pointer = f"({at} + {byte}).to({e.pointer_type(t.dtype)})"
    value = to_memory(e.typed(v), t.dtype)
    if t.shape:
        value = f"tl.reshape({value}, ({t.numel},))"
        pointer = f"{pointer} + tl.arange(0, {t.numel})"
    e.w.line(f"tl.store({pointer}, {value})")


# ---------------------------------------------------------------- marks


@lowers(ops.Mark)
def _mark(e: Emitter, op: ops.Mark) -> None:
    """One thread writes it, when it comes here: others may be late, or ahead by what no barrier held up."""
    address, value = _i64("0"), _i64("0")
    if len(op.operands) > 2:
        word = op.operands[2]
        value = e.typed(op.operands[3])
        where = e.text(word) if isinstance(word.type, PointerType) else address_of(e, e.view(word), op.operands[4:])
        address = f"({where}).to(tl.int64)"
    tag = list(Moment).index(op.attrs["moment"]) | int(e.place(op, MARK, what=op.attrs["what"])) << PLACE_BIT
    buffer, number = (e.typed(v) for v in op.operands[:2])
    e.w.line(e.call_ptx(ptx.mark(), buffer, _i64(str(tag)), number, "_program", address, value))
