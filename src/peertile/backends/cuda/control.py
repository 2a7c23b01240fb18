"""Lowering of control flow to what Triton has: `for` and `while` without break, continue or return, and `if`.

An op *escapes* if the ops after it in its block may not run: it breaks, continues or returns somewhere inside, or
may end the program by a fault. What follows an escaping op is guarded by flags:

- `_alive` is false once the program has returned or faulted;
- `_go` of a loop is false for the rest of a trip that was broken or continued;
- `_run` of a loop is whether another trip follows.

Pure ops need no guard after a possible fault, so that a row of checks costs no nesting. A loop that nothing can
leave early stays a `for`, which Triton pipelines; any other becomes a `while`. Variables that are assigned inside a
guarded place get a value of their type beforehand, since Triton wants both ways to define them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from peertile.backends.cuda import memory, own
from peertile.backends.cuda.last_wait import let_in
from peertile.backends.cuda.spelling import REGISTER, UNSIGNED
from peertile.backends.cuda.state import (
    LAUNCH_WORDS,
    RAW,
    Access,
    Emitter,
    Record,
    Root,
    Symmetric,
    View,
    lowers,
    tile_of,
)
from peertile.backends.cuda.target import capability, has_one_trip
from peertile.dtypes import Kind
from peertile.errors import CompileError
from peertile.ir import ops
from peertile.ir.core import Block, Effect, Op, Value, walk
from peertile.ir.types import TokenType
from peertile.memory_model import Order

__all__ = ["Escape", "emit_body", "escapes"]


class Escape(Enum):
    """Why ops after this one may not run."""

    BREAK = "break"
    CONTINUE = "continue"
    RETURN = "return"
    FAULT = "fault"


ENDS: Final = frozenset({Escape.RETURN, Escape.FAULT})
TRIPS: Final = frozenset({Escape.BREAK, Escape.CONTINUE})
MOST_DIVIDED_BUFFERS: Final = 4
"""Of a loop that Triton 3.6 divides among groups of warps: with five of them a product of 256 by 8192 held NaN on an
H200, with three and four it was right."""
_NONE: Final[frozenset[Escape]] = frozenset()
_OWN: Final[dict[type[Op], frozenset[Escape]]] = {
    ops.Break: frozenset({Escape.BREAK}),
    ops.Continue: frozenset({Escape.CONTINUE}),
    ops.Return: frozenset({Escape.RETURN}),
    ops.Check: frozenset({Escape.FAULT}),
    ops.Wait: frozenset({Escape.FAULT}),
    ops.WaitAny: frozenset({Escape.FAULT}),
    ops.Suspend: frozenset({Escape.FAULT}),
}


@dataclass(slots=True)
class Frame:
    """A loop being emitted: its flags, and the variables that continue and break assign."""

    go: str | None
    run: str | None
    carried: list[tuple[str, Value]]
    results: list[tuple[str, Value]]


def escapes(op: Op) -> frozenset[Escape]:
    """How the ops after `op` may be left out."""
    if isinstance(op, ops.Suspend) and not op.attrs["continues"]:
        return _NONE  # in front of a loop that polls: it only looks at the clock
    if not op.blocks or isinstance(op, ops.ReduceWith | ops.ScanWith):
        return _OWN.get(type(op), _NONE)
    found = _NONE.union(*(escapes(inner) for block in op.blocks for inner in block.ops))
    return found - TRIPS if isinstance(op, ops.For | ops.Loop) else found


def _inside(block: Block) -> frozenset[Escape]:
    """Escapes of the ops of a loop's body, without its own terminator's."""
    return _NONE.union(*(escapes(op) for op in block.ops if not op.TERMINATOR))


def emit_body(e: Emitter) -> None:
    """The whole kernel."""
    e.leaves = any(escapes(op) & ENDS for op in e.kernel.body.ops if not op.TERMINATOR)
    if e.leaves:
        e.w.line("_alive = tl.full((), True, tl.int1)")
    own.plan(e)
    _block(e, e.kernel.body)


def _block(e: Emitter, block: Block) -> None:
    depth, pending = 0, _NONE
    let_in(e, block)
    for op in block.ops:
        if pending and _needs_guard(op, pending):
            e.w.line(f"if {_guard(e, pending)}:")
            e.w.open()
            depth, pending = depth + 1, _NONE
        if block is e.kernel.body:
            own.prepare(e, op)
        e.op(op)
        let_in(e, op)
        if not op.TERMINATOR:
            pending |= escapes(op)
    for _ in range(depth):
        e.w.close()


def _needs_guard(op: Op, pending: frozenset[Escape]) -> bool:
    if op.TERMINATOR:
        # What ends a trip or an arm assigns variables; the end of the kernel assigns none.
        return not (isinstance(op, ops.Return) and not _nested(op))
    if pending == {Escape.FAULT}:
        return not isinstance(op, ops.Check) and (bool(op.effects) or bool(op.blocks))
    return True


def _nested(op: Op) -> bool:
    return op.parent is not None and op.parent.parent is not None


def _guard(e: Emitter, pending: frozenset[Escape]) -> str:
    flags = []
    if pending & TRIPS:
        assert e.frames[-1].go is not None
        flags.append(e.frames[-1].go)
    if pending & ENDS:
        flags.append("_alive")
    return " & ".join(flags)


# ---------------------------------------------------------------- variables


def _declare(e: Emitter, value: Value, base: str) -> str:
    return e.names.fresh(value.hint, base)


def _assign(e: Emitter, targets: list[tuple[str, Value]], values: list[Value]) -> None:
    """targets = values, all at once."""
    pairs = [
        (name, e.typed(value))
        for (name, target), value in zip(targets, values, strict=True)
        if not isinstance(target.type, TokenType)
    ]
    pairs = [(name, text) for name, text in pairs if name != text]
    names = {name for name, _ in pairs}
    if any(text in names for _, text in pairs) and len(pairs) > 1:
        temporary = [e.let_own("next", text) for _, text in pairs]
        pairs = [(name, text) for (name, _), text in zip(pairs, temporary, strict=True)]
    for name, text in pairs:
        e.w.line(f"{name} = {text}")


def _bind(e: Emitter, values: list[Value], variables: list[tuple[str, Value]]) -> None:
    for value, (name, _) in zip(values, variables, strict=True):
        if isinstance(value.type, TokenType):
            e.values[value] = None
        else:
            e.set(value, name)


def _prepare(e: Emitter, variables: list[tuple[str, Value]]) -> None:
    """Give variables a value of their type, for ways on which nothing else does."""
    for name, value in variables:
        if not isinstance(value.type, TokenType):
            e.w.line(f"{name} = {e.zero(value.type)}")


# ---------------------------------------------------------------- if


@lowers(ops.If)
def _if(e: Emitter, op: ops.If) -> None:
    results = [(_declare(e, v, "r"), v) for v in op.results]
    _bind(e, op.results, results)
    if escapes(op):
        _prepare(e, results)
    condition = e.typed(op.operands[0])
    before = e.access.copy()
    with e.w.indented(f"if {condition}:"):
        _block(e, op.blocks[0])
    after = e.access
    e.access = before
    other = op.blocks[1]
    if other in e.last_waits or len(other.ops) > 1 or other.ops[0].operands or not isinstance(other.ops[0], ops.Yield):
        with e.w.indented("else:"):
            _block(e, other)
    e.access.join(after)


@lowers(ops.Yield)
def _yield(e: Emitter, op: ops.Yield) -> None:
    assert op.parent is not None
    owner = op.parent.parent
    assert owner is not None
    targets = [(e.text(v) if not isinstance(v.type, TokenType) else "", v) for v in owner.results]
    _assign(e, targets, op.operands)


@lowers(ops.Return)
def _return(e: Emitter, op: ops.Return) -> None:
    if _nested(op):
        e.w.line("_alive = tl.full((), False, tl.int1)")


@lowers(ops.Break)
def _break(e: Emitter, op: ops.Break) -> None:
    frame = e.frames[-1]
    assert isinstance(frame, Frame)
    _assign(e, frame.results, op.operands)
    assert frame.run is not None
    e.w.line(f"{frame.run} = tl.full((), False, tl.int1)")
    if frame.go is not None:
        e.w.line(f"{frame.go} = tl.full((), False, tl.int1)")


@lowers(ops.Continue)
def _continue(e: Emitter, op: ops.Continue) -> None:
    frame = e.frames[-1]
    assert isinstance(frame, Frame)
    _assign(e, frame.carried, op.operands)
    own = op.parent is not None and isinstance(op.parent.parent, ops.For | ops.Loop)
    if frame.go is not None and not own:
        e.w.line(f"{frame.go} = tl.full((), False, tl.int1)")


# ---------------------------------------------------------------- loops


def _leaves_early(op: Op) -> bool:
    """Whether a loop may end before its range does."""
    inside = _NONE.union(*(escapes(inner) for inner in op.blocks[0].ops))
    return bool(inside & (ENDS | {Escape.BREAK}))


def _loop_accesses(e: Emitter, block: Block) -> Access:
    """Everything that a loop's body accesses: what its next trip may meet."""
    access = Access()
    for op in walk(block):
        effects = op.EFFECTS
        if not effects & {Effect.READ, Effect.WRITE} or op.blocks or op in e.once:
            continue
        views = [view for view, _, _ in op.words()] if isinstance(op, ops.WaitAny) else op.operands[:1]
        for root in [_root(e, view) for view in views]:
            if Effect.READ in effects:
                access.read.add(root)
            if Effect.WRITE in effects:
                access.written.add((root, op.attrs.get("rmw")))
    return access


def _root(e: Emitter, value: Value) -> Root:
    """The root of an access, also of a view that is made inside the loop and has no value yet."""
    field = ""
    while value not in e.values and value.op is not None and value.op.operands:
        field = value.op.attrs.get("field", field)
        value = value.op.operands[0]
    if isinstance(value.op, ops.LaunchWords):
        return LAUNCH_WORDS
    holder = e.values.get(value)
    if isinstance(holder, Record):
        holder = holder.fields[field]
    return holder.root if isinstance(holder, View | Symmetric) else RAW


_SAYS: Final = (ops.WordStore, ops.TileStore, ops.TileAtomic)
"""What orders, with a release, what came before it alone: loads of later trips may be made in front of it."""


def _pipelined(e: Emitter, op: ops.For, access: Access) -> bool:
    """Whether loads may be moved to earlier trips: nothing in the body may order or overwrite them."""
    for inner in walk(op.blocks[0]):
        order = inner.attrs.get("order", Order.WEAK)
        if isinstance(inner, ops.Fence | ops.Wait | ops.WaitAny | ops.WaitTransfer | ops.Print) or (
            order is not Order.WEAK and not (order is Order.RELEASE and isinstance(inner, _SAYS))
        ):
            return False
    return not any(access.conflicts_with_read(root) for root in _loaded(e, op))


def _loaded(e: Emitter, op: ops.For) -> list[Root]:
    """The roots of what a loop loads."""
    loads = [op for op in walk(op.blocks[0]) if Effect.READ in op.EFFECTS and Effect.WRITE not in op.EFFECTS]
    return [_root(e, load.operands[0]) for load in loads]


@lowers(ops.For)
def _for(e: Emitter, op: ops.For) -> None:
    if _has_no_trips(e, op):
        # Triton's own passes fail on accesses that they find nobody can reach.
        for result, value in zip(op.results, op.operands[3:], strict=True):
            e.alias(result, value)
        return
    body = op.blocks[0]
    if e.options.specialize and _is_only_a_body(op):
        _only_trip(e, op)
        return
    carried = [(_declare(e, a, "c"), a) for a in body.args[1:]]
    access = _loop_accesses(e, body)
    pipelined = _pipelined(e, op, access)
    if pipelined and any(e.access.conflicts_with_read(root) for root in _loaded(e, op)):
        e.barrier()  # here, where it does not keep loads of later trips from being made ahead
    before = e.access.copy()
    e.access.join(access)
    _assign_initial(e, carried, op.operands[3:])
    _bind(e, body.args[1:], carried)
    go = e.names.own("go") if _inside(body) & TRIPS else None
    t = tile_of(op.operands[0]).dtype
    unsigned = t.kind is Kind.UINT and t.bits == 64
    if not unsigned and _keeps_bulk_under_way(e, op):
        e.frames.append(Frame(None, None, carried, carried))
        _guarded_for(e, op)
    elif _leaves_early(op) or unsigned:
        run = e.names.own("run")
        e.frames.append(Frame(go, run, carried, carried))
        _while_range(e, op, run, go)
    else:
        e.frames.append(Frame(go, None, carried, carried))
        _plain_for(e, op, go, pipelined)
    e.frames.pop()
    _bind(e, op.results, carried)
    e.access.join(access)
    e.access.join(before)  # a loop without a trip has ordered nothing
    # What its trips need not order among themselves, others behind it may meet.
    e.access.written |= {(_root(e, x.operands[0]), None) for x in walk(body) if x in e.once and x not in e.descriptors}


def _keeps_bulk_under_way(e: Emitter, op: ops.For) -> bool:
    """Whether a loop that may end by a fault alone sends tiles to a peer in bulk: as a `for` loop, which Triton lets go
    on while a tile is on its way; from another one it waits for each."""
    if _NONE.union(*(escapes(inner) for inner in op.blocks[0].ops if not inner.TERMINATOR)) != {Escape.FAULT}:
        return False
    return any(memory.is_sent_in_bulk(e, inner) for inner in op.blocks[0].ops)


def _flattens(e: Emitter) -> bool:
    return e.options.flatten if e.options.flatten is not None else capability(e.arch) == 90


def _guarded_for(e: Emitter, op: ops.For) -> None:
    """A loop whose trips do nothing once something has failed."""
    width = "tl.int64" if tile_of(op.operands[0]).dtype.bits == 64 else "tl.int32"
    name = _declare(e, op.blocks[0].args[0], "k")
    bounds = ", ".join(_bound(e, v, width) for v in op.operands[:3])
    e.last_trips[op] = _is_last(e, op, name, width)
    with e.w.indented(f"for {name} in tl.range({bounds}):"), e.w.indented("if _alive:"):
        _bind_counter(e, op, name, width)
        _block(e, op.blocks[0])


def _has_no_trips(e: Emitter, op: ops.For) -> bool:
    lo, hi = op.operands[:2]
    return e.is_literal(lo) and e.is_literal(hi) and int(e.text(lo)) >= int(e.text(hi))


def _is_only_a_body(op: ops.For) -> bool:
    return has_one_trip(op) and not op.results and not _inside(op.blocks[0])


def _only_trip(e: Emitter, op: ops.For) -> None:
    body = op.blocks[0]
    e.alias(body.args[0], op.operands[0])
    for inner in body.ops:
        if not inner.TERMINATOR:
            e.op(inner)


def _assign_initial(e: Emitter, variables: list[tuple[str, Value]], values: list[Value]) -> None:
    for (name, target), value in zip(variables, values, strict=True):
        if not isinstance(target.type, TokenType):
            e.w.line(f"{name} = {e.typed(value)}")


def _plain_for(e: Emitter, op: ops.For, go: str | None, pipelined: bool) -> None:
    body = op.blocks[0]
    lo, hi, step = op.operands[:3]
    t = tile_of(lo).dtype
    wide = "tl.int64" if t.bits == 64 or (t.kind is Kind.UINT and t.bits == 32) else "tl.int32"
    bounds = [_bound(e, v, wide) for v in (lo, hi, step)]
    # One typed bound fixes the type of the loop variable.
    if e.is_literal(hi):
        bounds[1] = f"tl.full((), {e.text(hi)}, {wide})"
    stages = min(op.attrs["stages"], e.num_stages)
    extra = "" if pipelined else ", num_stages=1"
    if pipelined and op.attrs["stages"] > 1:
        extra = f", num_stages={stages}"
    flat = pipelined and _flattens(e) and _is_persistent_product(op)
    if flat:
        extra += ", flatten=True"
    if pipelined and e.options.specialize and any(isinstance(x, ops.Mma) for x in body.ops):
        if stages > MOST_DIVIDED_BUFFERS:
            raise CompileError(
                f"specialize: a loop that is divided among groups of warps has at most {MOST_DIVIDED_BUFFERS} buffers, "
                f"got {stages}; ask for fewer stages, or do not divide it",
                op.loc,
            )
        extra += ", warp_specialize=True"
    name = _declare(e, body.args[0], "k")
    e.last_trips[op] = _is_last(e, op, name, wide)
    head = f"for {name} in tl.range({', '.join(bounds)}{extra}):"
    with e.w.indented(head):
        _bind_counter(e, op, name, wide)
        if go is not None:
            e.w.line(f"{go} = tl.full((), True, tl.int1)")
        around, e.is_flat = e.is_flat, e.is_flat or flat
        _block(e, body)
        e.is_flat = around


def _is_persistent_product(op: ops.For) -> bool:
    """Whether this is a loop over tiles around one loop over an inner axis with one product, and nothing else. Of two
    sums, which are zeroed behind a tile, the assembler does not see that no product of them is under way then: it would
    wait for the end of each instruction. A wait of our own makes that seen, and yet 2048 x 5120 x 8192 took an H200
    282 us merged and 261 not."""
    inner = [x for x in op.blocks[0].ops if x.blocks]
    return (
        len(inner) == 1
        and isinstance(inner[0], ops.For)
        and sum(isinstance(x, ops.Mma) for x in inner[0].blocks[0].ops) == 1
        and not any(x.blocks for x in inner[0].blocks[0].ops)
    )


def _bound(e: Emitter, v: Value, wide: str) -> str:
    if e.is_literal(v):
        return e.text(v)
    t = tile_of(v).dtype
    return e.text(v) if REGISTER[t.name] == wide else f"{e.text(v)}.to({wide})"


def _is_last(e: Emitter, op: ops.For, counter: str, wide: str) -> str:
    """Whether no trip follows that of `counter`: what is left of the range cannot overflow."""
    hi, step = (_bound(e, v, wide) for v in op.operands[1:3])
    return f"({hi} - {counter} <= {step})"


def _bind_counter(e: Emitter, op: ops.For, name: str, wide: str) -> None:
    counter = op.blocks[0].args[0]
    t = tile_of(counter).dtype
    if REGISTER[t.name] == wide:
        e.set(counter, name)
    else:
        e.define(counter, f"{name}.to({REGISTER[t.name]})")


def _while_range(e: Emitter, op: ops.For, run: str, go: str | None) -> None:
    body = op.blocks[0]
    lo, hi, step = op.operands[:3]
    t = tile_of(lo).dtype
    counter = _declare(e, body.args[0], "k")
    e.w.line(f"{counter} = {e.typed(lo)}")
    last = e.let_own("end", e.typed(hi))
    by = e.let_own("step", e.typed(step))
    e.w.line(f"{run} = {counter} < {last}")
    e.set(body.args[0], counter)
    unsigned = UNSIGNED[t.bits]
    # What is left of the range, as unsigned, cannot overflow; the counter itself could step past the end.
    left, stride = f"{last} - {counter}", by
    if t.is_signed:
        left, stride = f"({left}).to({unsigned}, bitcast=True)", f"{by}.to({unsigned}, bitcast=True)"
    e.last_trips[op] = f"({left} <= {stride})"
    with e.w.indented(f"while {run}:"):
        if go is not None:
            e.w.line(f"{go} = tl.full((), True, tl.int1)")
        _block(e, body)
        alive = " & _alive" if escapes(op) & ENDS else ""
        e.w.line(f"{run} = {run} & ({left} > {stride}){alive}")
        e.w.line(f"{counter} = {counter} + {by}")


@lowers(ops.Loop)
def _loop(e: Emitter, op: ops.Loop) -> None:
    body = op.blocks[0]
    carried = [(_declare(e, a, "c"), a) for a in body.args]
    results = [(_declare(e, v, "r"), v) for v in op.results]
    before, access = e.access.copy(), _loop_accesses(e, body)
    e.access.join(access)
    _assign_initial(e, carried, op.operands)
    _prepare(e, results)
    _bind(e, body.args, carried)
    run = e.names.own("run")
    go = e.names.own("go") if _inside(body) & TRIPS else None
    e.frames.append(Frame(go, run, carried, results))
    e.w.line(f"{run} = tl.full((), True, tl.int1)")
    with e.w.indented(f"while {run}:"):
        if go is not None:
            e.w.line(f"{go} = tl.full((), True, tl.int1)")
        _block(e, body)
        if escapes(op) & ENDS:
            e.w.line(f"{run} = {run} & _alive")
    e.frames.pop()
    _bind(e, op.results, results)
    e.access.join(access)
    e.access.join(before)  # it may have ended in its first trip, in front of whatever orders
