"""Statements of a kernel: assignment, branches, loops, rounds, return. Expressions are in `expressions.py`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from peertile.dtypes import i64
from peertile.frontend.control import branch, counted_loop, endless_loop, truth
from peertile.frontend.convert import constant
from peertile.frontend.expressions import evaluate
from peertile.frontend.groups import group_object, num_ranks_of, rank_of
from peertile.frontend.impl_memory import num_tiles
from peertile.frontend.merge import BROKEN, RETURN, RETURNED, merge
from peertile.frontend.operators import binary
from peertile.frontend.parse import assigned_names
from peertile.frontend.resolve import lookup
from peertile.frontend.scope import Binding, Build, Exit, Flow, NeedsLoop, NeedsTrips, Region, RegionKind
from peertile.frontend.values import (
    NONE,
    Abstract,
    CollectIterator,
    Exclusive,
    ExclusiveTile,
    Known,
    Method,
    Pointer,
    Poison,
    RangeIterator,
    RanksIterator,
    Round,
    RoundContext,
    StaticIterator,
    Tile,
    TilesIterator,
    Token,
    Tup,
    ZippedTiles,
    describe,
)
from peertile.ir import ops
from peertile.ir.core import Block, Value
from peertile.ir.ops import Binary, Compare, Unary
from peertile.ir.types import BOOL, INDEX, TileType

__all__ = ["run_block"]

_MAX_UNROLL: Final = 1024
_MAX_TRIPS: Final = 64
"""Trips of an unrolled loop with a way out at run time: each is nested in the one before it."""

TOO_NESTED: Final = (
    "this statement nests too deeply: blocks, helpers and expressions inside each other, beyond what Python's stack "
    "holds; name parts of its expressions, or call fewer helpers inside each other"
)

_REFUSED: Final[dict[type[ast.stmt], str]] = {
    ast.Try: "try; a kernel has no exceptions: check with T.assert_",
    ast.Raise: "raise; use T.assert_(False, message)",
    ast.Assert: "assert; use T.assert_ at run time, or T.static_assert at compile time",
    ast.FunctionDef: "nested function; define the helper outside the kernel",
    ast.AsyncFunctionDef: "async function; define a plain helper outside the kernel",
    ast.ClassDef: "class; define it outside the kernel",
    ast.Import: "import; import at the top of the module",
    ast.ImportFrom: "import; import at the top of the module",
    ast.Delete: "del; values need no deleting",
    ast.Global: "global; a kernel writes no Python variables outside it: pass a tensor",
    ast.Nonlocal: "nonlocal; a kernel writes no Python variables outside it: pass a tensor",
    ast.AsyncFor: "async for; use for",
    ast.AsyncWith: "async with; use with",
    ast.AnnAssign: "annotated assignment; assign without a type, or write T.f32(value)",
    ast.Match: "match; use if and elif",
}
_TRY_STAR = getattr(ast, "TryStar", None)
if _TRY_STAR is not None:
    _REFUSED[_TRY_STAR] = _REFUSED[ast.Try]


def run_block(b: Build, body: list[ast.stmt]) -> Flow:
    """Compiles statements until control leaves; what follows is unreachable and not looked at."""
    for stmt in body:
        with b.locate(stmt):
            refused = _REFUSED.get(type(stmt))
            if refused is not None:
                b.fail(f"unsupported in a kernel: {refused}")
            handler = _HANDLERS.get(type(stmt))
            if handler is None:
                b.fail(f"unsupported in a kernel: {type(stmt).__name__}")
            try:
                flow = handler(b, stmt)
            except RecursionError:  # within the limit of one expression, and yet deep in blocks and helpers
                b.fail(TOO_NESTED)
        if flow is not Flow.NEXT:
            return flow
    return Flow.NEXT


# ---------------------------------------------------------------- assignment and expressions


def _expr(b: Build, node: ast.Expr) -> Flow:
    if isinstance(node.value, ast.Constant):
        return Flow.NEXT  # a docstring, or `...`
    value = evaluate(b, node.value)
    match value:
        case CollectIterator():
            b.fail(
                f"unused result: `{value.box.name}.collect()` does nothing by itself (rule B6); "
                f"write `for part in {value.box.name}.collect():`"
            )
        case RoundContext():
            b.fail(
                f"unused result: `{value.box.name}.round()` does nothing by itself; "
                f"write `with {value.box.name}.round() as r:`"
            )
        case RangeIterator() | StaticIterator() | RanksIterator() | TilesIterator() | ZippedTiles():
            b.fail("unused result: a range does nothing by itself; write `for k in ...:`")
        case Method():
            b.fail(f"unused result: {describe(value)}; call it with ()")
    return Flow.NEXT


def _assign(b: Build, node: ast.Assign) -> Flow:
    value = evaluate(b, node.value)
    for target in node.targets:
        _bind(b, target, value)
    return Flow.NEXT


def _aug_assign(b: Build, node: ast.AugAssign) -> Flow:
    if not isinstance(node.target, ast.Name):
        _bind(b, node.target, NONE)
    assert isinstance(node.target, ast.Name)
    with b.locate(node.target):
        left = lookup(b, node.target.id)
    right = evaluate(b, node.value)
    b.bind(node.target.id, binary(b, type(node.op), left, right), b.loc(node))
    return Flow.NEXT


def _bind(b: Build, target: ast.expr, value: Abstract) -> None:
    """Binds the names of an assignment target."""
    match target:
        case ast.Name():
            if isinstance(value, CollectIterator | RoundContext):
                where = "a for loop" if isinstance(value, CollectIterator) else "a with statement"
                b.fail(f"`{target.id}` = {describe(value)}: expected it in {where}, got an alias (rule B7)", target)
            if isinstance(value, Tile | Pointer | Token) and not value.value.hint:
                value.value.hint = target.id
            b.bind(target.id, value, b.loc(target))
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            if any(isinstance(t, ast.Starred) for t in targets):
                b.fail("unsupported in a kernel: star target; name each part", target)
            if not isinstance(value, Tup):
                b.fail(f"unpacking: expected a tuple of {len(targets)}, got {describe(value)}", target)
            if len(value.items) != len(targets):
                b.fail(f"unpacking: expected a tuple of {len(targets)}, got {describe(value)}", target)
            for part, item in zip(targets, value.items, strict=True):
                _bind(b, part, item)
        case ast.Subscript():
            b.fail("assignment to an index: memory is written with z.store(tile), and tiles are immutable", target)
        case ast.Attribute():
            b.fail("assignment to an attribute: a kernel assigns to names only; memory is written with store", target)
        case _:
            b.fail(f"assignment to {type(target).__name__}: expected a name or a tuple of names", target)


# ---------------------------------------------------------------- branches


def _if(b: Build, node: ast.If) -> Flow:
    with b.locate(node.test):
        condition = truth(b, evaluate(b, node.test))
    if isinstance(condition, bool):
        return run_block(b, node.body if condition else node.orelse)
    return branch(b, condition, lambda: run_block(b, node.body), lambda: run_block(b, node.orelse))


def _pass(b: Build, node: ast.Pass) -> Flow:
    return Flow.NEXT


# ---------------------------------------------------------------- loops


def _names(b: Build, node: ast.For | ast.While) -> list[str]:
    """Names that a loop's body may bind, a helper's result on its way out included."""
    names = list(assigned_names(node))
    if b.function.wrapped:
        if node not in b.returning:
            b.returning[node] = any(isinstance(n, ast.Return) for n in ast.walk(node))
        if b.returning[node]:
            names.append(RETURNED)
    return names


def _trip(b: Build, body: list[ast.stmt]) -> Flow:
    """One trip of a loop; whoever makes it has not returned."""
    if b.function.wrapped:
        _not_returned(b)
    return run_block(b, body)


def _not_returned(b: Build) -> None:
    b.env[RETURNED] = Binding(Known(False), None)
    b.env.pop(RETURN, None)


def _after_loop(b: Build, flow: Flow) -> Flow:
    """A helper that returned inside the loop goes on returning outside it."""
    binding = b.env.get(RETURNED)
    if flow is not Flow.NEXT or not b.function.wrapped or binding is None or binding.value == Known(False):
        return flow
    if binding.value == Known(True):
        return _return_value(b, b.env[RETURN].value)
    if RETURN not in b.env:
        _not_returned(b)  # there is a return in the text, but no path reaches it
        return flow
    assert isinstance(binding.value, Tile)
    flow = branch(b, binding.value.value, lambda: _return_value(b, b.env[RETURN].value), lambda: Flow.NEXT)
    _not_returned(b)
    return flow


def _for(b: Build, node: ast.For) -> Flow:
    if node.orelse:
        b.fail("unsupported in a kernel: else of a loop; keep a flag and test it behind the loop", node.orelse[0])
    iterable = evaluate(b, node.iter)
    with b.locate(node.iter):
        match iterable:
            case StaticIterator():
                items: list[Abstract] = [Known(i) for i in iterable.items[: _MAX_UNROLL + 1]]
                return _unrolled(b, node, items)
            case Tup():
                return _unrolled(b, node, list(iterable.items))
            case RangeIterator():
                return _over_range(b, node, iterable)
            case TilesIterator():
                return _over_tiles(b, node, (iterable,))
            case ZippedTiles():
                return _over_tiles(b, node, iterable.parts)
            case RanksIterator():
                return _over_ranks(b, node, iterable)
            case CollectIterator():
                return _over_mailbox(b, node, iterable)
    way = "; use T.range(n)" if isinstance(iterable, Tile | Known) else ""
    b.fail(
        f"for: expected T.range, T.static_range, range, z.tiles(), box.collect(), T.ranks(), T.peers() or a tuple, "
        f"got {describe(iterable)}{way}",
        node.iter,
    )


def _unrolled(b: Build, node: ast.For, items: list[Abstract]) -> Flow:
    if len(items) > _MAX_UNROLL:
        b.fail(f"unrolled loop: expected at most {_MAX_UNROLL} trips, got more; use T.range")
    before, block = b.env, b.builder.block
    mark = block.ops[-1] if block.ops else None
    region = Region(RegionKind.UNROLLED, block)
    b.env = dict(before)
    try:
        return _unrolled_flat(b, node, items, region)
    except NeedsTrips as needs:
        if needs.region is not region:
            raise
    if len(items) > _MAX_TRIPS:
        b.fail(
            f"unrolled loop left under a run-time condition: expected at most {_MAX_TRIPS} trips, got {len(items)}; "
            "use T.range"
        )
    # Compiled again from where it began, as a helper that returns from inside control flow is.
    keep = next((k + 1 for k, op in enumerate(block.ops) if op is mark), 0)
    del block.ops[keep:]
    b.env = dict(before)
    return _trips(b, node, items)


def _trips(b: Build, node: ast.For, items: list[Abstract]) -> Flow:
    """Trips that run-time conditions may leave: each is a loop that runs once, and the rest depends on its end."""
    for k, item in enumerate(items):
        flow = _one_trip(b, node, item)
        if flow is not Flow.NEXT:
            return flow
        broken = b.env.pop(BROKEN).value
        if broken == Known(True):
            return Flow.NEXT
        if isinstance(broken, Tile):
            return branch(b, broken.value, lambda: Flow.NEXT, partial(_trips, b, node, items[k + 1 :]))
    return Flow.NEXT


def _one_trip(b: Build, node: ast.For, item: Abstract) -> Flow:
    before, region = b.env, Region(RegionKind.TRIP, Block())
    b.env = dict(before)
    regions = b.function.regions
    with b.inside(region.block):
        regions.append(region)
        try:
            _bind(b, node.target, item)
            flow = _trip(b, node.body)
        finally:
            regions.pop()
        if flow is Flow.NEXT:
            b.bind(BROKEN, Known(False))
            region.breaks.append(Exit(b.env, b.builder.emit(ops.Break)))
    b.env = dict(before)
    types, finish = merge(b, region.breaks, dummies=True)
    op = b.builder.emit(ops.Loop, (), types, [region.block])
    if not region.breaks:
        b.builder.emit(ops.Return)
        return Flow.ENDED
    b.env = finish(op.results)
    return _after_loop(b, Flow.NEXT)


def _unrolled_flat(b: Build, node: ast.For, items: list[Abstract], region: Region) -> Flow:
    regions = b.function.regions
    for item in items:
        _bind(b, node.target, item)
        regions.append(region)
        try:
            flow = run_block(b, node.body)
        finally:
            regions.pop()
        if flow is Flow.STATIC_BREAK:
            break
        if flow in (Flow.ENDED, Flow.RETURNED):
            return flow
    return Flow.NEXT


def _targets(node: ast.For, message: str) -> dict[str, str]:
    """The loop's own variables, with what is said when one is read behind the loop."""
    names = [n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)]
    return {name: message.format(name=name) for name in names}


_ENDED_LOOP: Final = (
    "`{name}` is the variable of a loop that has ended; assign it to another name inside the loop, with a value before"
)


def _counted(
    b: Build,
    node: ast.For,
    bounds: tuple[Value, Value, Value],
    body: Callable[[Value], Flow],
    *,
    stages: int = 1,
    message: str = _ENDED_LOOP,
    kind: RegionKind = RegionKind.LOOP,
    box: str = "",
) -> Flow:
    flow = counted_loop(
        b,
        bounds,
        body,
        assigned=_names(b, node),
        targets=_targets(node, message),
        kind=kind,
        box=box,
        stages=stages,
    )
    return _after_loop(b, flow)


def _over_range(b: Build, node: ast.For, it: RangeIterator) -> Flow:
    def body(iv: Value) -> Flow:
        if it.is_down:
            iv = b.builder.value(ops.UnaryOp, (iv,), iv.type, fn=Unary.NOT)
        iv.hint = node.target.id if isinstance(node.target, ast.Name) else ""
        _bind(b, node.target, Tile(iv))
        return _trip(b, node.body)

    return _counted(b, node, (it.lo, it.hi, it.step), body, stages=it.stages)


def _zero_one(b: Build) -> tuple[Value, Value]:
    return constant(b, 0, i64), constant(b, 1, i64)


def _over_tiles(b: Build, node: ast.For, parts: tuple[TilesIterator, ...]) -> Flow:
    """This program's tiles: several when persistent, its own one otherwise. Of several partitions, which are dealt
    alike, one of each, for as many as all of them have."""
    it = parts[0]
    z = it.exclusive
    program = b.builder.value(ops.ProgramId, (), INDEX, axis=0)
    if z.partition.persistent or it.is_down:
        total = _total_tiles(b, it)
        for other in parts[1:]:
            total = b.builder.value(ops.BinaryOp, (total, _total_tiles(b, other)), INDEX, fn=Binary.MIN)
    if z.partition.persistent:
        step = b.builder.value(ops.NumPrograms, (), INDEX, axis=0)
        if z.partition.spare:
            # The number is part of the type, so all programs agree on who owns what.
            spare = constant(b, z.partition.spare, i64)
            owns = b.builder.value(ops.CompareOp, (program, spare), BOOL, fn=Compare.GE)
            place = b.builder.value(ops.BinaryOp, (program, spare), INDEX, fn=Binary.SUB)
            step = b.builder.value(ops.BinaryOp, (step, spare), INDEX, fn=Binary.SUB)
            first = b.builder.value(ops.Select, (owns, _place(b, place, step, it), total), INDEX)
        else:
            first = _place(b, program, step, it)
        bounds = first, total, step
    else:
        one = constant(b, 1, i64)
        bounds = program, b.builder.value(ops.BinaryOp, (program, one), INDEX, fn=Binary.ADD), one

    if it.is_down:
        highest = b.builder.value(ops.BinaryOp, (total, constant(b, 1, i64)), INDEX, fn=Binary.SUB)

    def body(linear: Value) -> Flow:
        if it.is_even and z.partition.persistent:
            linear = _other_way_round(b, linear, total, step)
        if it.is_down:
            linear = b.builder.value(ops.BinaryOp, (highest, linear), INDEX, fn=Binary.SUB)
        tiles = tuple(_tile_of(b, part.exclusive, linear) for part in parts)
        _bind(b, node.target, Tup(tiles) if len(tiles) > 1 else tiles[0])
        return _trip(b, node.body)

    message = "`{name}` is a tile of a loop that has ended; store to it inside the loop"
    return _counted(b, node, bounds, body, message=message)


def _total_tiles(b: Build, it: TilesIterator) -> Value:
    total, *more = num_tiles(b, it.exclusive.view, it.exclusive.partition.tile_shape)
    for n in more:
        total = b.builder.value(ops.BinaryOp, (total, n), INDEX, fn=Binary.MUL)
    return total


def _tile_of(b: Build, z: Exclusive, linear: Value) -> ExclusiveTile:
    index = tuple(b.builder.emit(ops.TileIndex, (z.view, linear), [INDEX] * z.type.rank).results)
    return ExclusiveTile(z.name, z.view, index)


def _other_way_round(b: Build, linear: Value, total: Value, step: Value) -> Value:
    """The tile that is dealt in the place of tile `linear`, where every other round before the last one goes the other
    way round; that one alone may not be whole."""

    def binary(fn: Binary, x: Value, y: Value) -> Value:
        return b.builder.value(ops.BinaryOp, (x, y), INDEX, fn=fn)

    one, two = constant(b, 1, i64), constant(b, 2, i64)
    turn = binary(Binary.QUOT, linear, step)
    last = binary(Binary.QUOT, binary(Binary.SUB, total, one), step)
    is_turned = b.builder.value(
        ops.CompareOp, (binary(Binary.REM, binary(Binary.SUB, last, turn), two), one), BOOL, fn=Compare.EQ
    )
    # Of round r the first is r s and the last r s + s - 1, so what is opposite to one of them is their sum less it.
    ends = binary(Binary.ADD, binary(Binary.MUL, binary(Binary.MUL, turn, step), two), binary(Binary.SUB, step, one))
    return b.builder.value(ops.Select, (is_turned, binary(Binary.SUB, ends, linear), linear), INDEX)


def _place(b: Build, place: Value, step: Value, it: TilesIterator) -> Value:
    """Which of the tiles dealt next is the first one of the program at `place` among `step`."""
    if it.dealt is None:
        return place
    gone = b.builder.value(ops.BinaryOp, (it.dealt, step), INDEX, fn=Binary.MOD)
    ahead = b.builder.value(ops.BinaryOp, (place, step), INDEX, fn=Binary.ADD)
    ahead = b.builder.value(ops.BinaryOp, (ahead, gone), INDEX, fn=Binary.SUB)
    return b.builder.value(ops.BinaryOp, (ahead, step), INDEX, fn=Binary.MOD)


def _over_ranks(b: Build, node: ast.For, it: RanksIterator) -> Flow:
    """All ranks from 0, or the peers from the next one round: every rank starts at another."""
    symmetric = group_object(b, "T.peers()" if it.peers else "T.ranks()")
    n = num_ranks_of(b, symmetric)
    zero, one = _zero_one(b)
    me = rank_of(b, symmetric) if it.peers else None

    def body(iv: Value) -> Flow:
        rank = iv
        if me is not None:
            ahead = b.builder.value(ops.BinaryOp, (me, iv), INDEX, fn=Binary.ADD)
            rank = b.builder.value(ops.BinaryOp, (ahead, n), INDEX, fn=Binary.MOD)
        b.proven_ranks.add(rank)
        _bind(b, node.target, Tile(rank))
        return _trip(b, node.body)

    return _counted(b, node, (one if it.peers else zero, n, one), body)


def _over_mailbox(b: Build, node: ast.For, it: CollectIterator) -> Flow:
    """collect, then one take per source in rank order, then release; links without a tile are skipped."""
    box = it.box
    regions = b.function.regions
    if any(r.kind is RegionKind.COLLECT for r in regions):
        b.fail(
            f"`{box.name}.collect()` inside the loop over another collect() (rule B6): expected no mailbox operation "
            "there; collect behind it"
        )
    _tile_is_used(b, node, it)
    b.builder.emit(ops.BoxCollect, (box.value,))
    n = num_ranks_of(b, box.value)
    zero, one = _zero_one(b)

    def body(source: Value) -> Flow:
        t = TileType(box.type.dtype, box.type.tile_shape)
        take = b.builder.emit(ops.BoxTake, (box.value, source), (t, BOOL))
        b.proven_ranks.add(source)
        tile, present = take.results

        def with_tile() -> Flow:
            part: Abstract = Tile(tile)
            _bind(b, node.target, Tup((Tile(source), part)) if it.sources else part)
            return run_block(b, node.body)

        return branch(b, present, with_tile, lambda: Flow.NEXT)

    message = (
        f"`{{name}}` came from the mailbox `{box.name}`, whose slots went back when the loop ended; "
        "use it inside the loop, as in `acc += part`"
    )
    flow = _counted(b, node, (zero, n, one), body, message=message, kind=RegionKind.COLLECT, box=box.name)
    b.builder.emit(ops.BoxRelease, (box.value,))
    return flow


def _tile_is_used(b: Build, node: ast.For, it: CollectIterator) -> None:
    """Rule B6 on names: whoever wants the meeting and not the tiles says so with `_`, or a name that begins with it."""
    target = node.target
    if it.sources and isinstance(target, ast.Tuple | ast.List) and len(target.elts) == 2:
        target = target.elts[1]
    if not isinstance(target, ast.Name) or target.id.startswith("_"):
        return
    name = target.id
    for part in (n for stmt in node.body for n in ast.walk(stmt)):
        if isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Load):
            return
        if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name) and part.target.id == name:
            return  # reads it too
    b.fail(
        f"`{name}`: the tiles of `{it.box.name}.collect()` are not used (rule B6): expected the loop to read `{name}`, "
        f"as in `acc += {name}`; where only the meeting counts, name it `_`",
        target,
    )


def _while(b: Build, node: ast.While) -> Flow:
    if node.orelse:
        b.fail("unsupported in a kernel: else of a loop; keep a flag and test it behind the loop", node.orelse[0])

    def body() -> Flow:
        if b.function.wrapped:
            _not_returned(b)
        with b.locate(node.test):
            condition = truth(b, evaluate(b, node.test))
            if isinstance(condition, bool):
                if not condition:
                    return _leave(b, ops.Break)
            else:
                branch(b, condition, lambda: Flow.NEXT, lambda: _leave(b, ops.Break))
        return _trip(b, node.body)

    return _after_loop(b, endless_loop(b, body, assigned=_names(b, node)))


def _leave(b: Build, op: type[ops.Break] | type[ops.Continue]) -> Flow:
    """`break` or `continue` of the innermost loop of the IR."""
    region = next(r for r in reversed(b.function.regions) if r.kind in (RegionKind.LOOP, RegionKind.COLLECT))
    into = region.breaks if op is ops.Break else region.continues
    into.append(Exit(b.env, b.builder.emit(op)))
    return Flow.ENDED


def _break_or_continue(b: Build, node: ast.Break | ast.Continue) -> Flow:
    is_break = isinstance(node, ast.Break)
    word = "break" if is_break else "continue"
    for region in reversed(b.function.regions):
        if region.kind is RegionKind.ROUND:
            b.fail(
                f"`{word}` out of `with {region.box}.round()`: expected the round to be sent (rule B3), got a way out; "
                "end the with statement first"
            )
        if region.kind is RegionKind.COLLECT and is_break:
            b.fail(
                f"`break` in the loop over `{region.box}.collect()`: expected it to run to its end, where the slots go "
                "back (rule B6); use an `if` around what is left to do, or `continue`"
            )
        if region.kind is RegionKind.TRIP:
            b.bind(BROKEN, Known(is_break))
            region.breaks.append(Exit(b.env, b.builder.emit(ops.Break)))
            return Flow.ENDED
        if region.kind is RegionKind.UNROLLED:
            if b.builder.block is not region.block:
                raise NeedsTrips(region)
            return Flow.STATIC_BREAK if is_break else Flow.STATIC_CONTINUE
        if region.kind in (RegionKind.LOOP, RegionKind.COLLECT):
            return _leave(b, ops.Break if is_break else ops.Continue)
    raise AssertionError(word)  # Python's own parser refuses it outside a loop


# ---------------------------------------------------------------- rounds and return


def _with(b: Build, node: ast.With) -> Flow:
    if len(node.items) != 1:
        b.fail("with: expected one `box.round() as r`, got several; nest them")
    item = node.items[0]
    context = evaluate(b, item.context_expr)
    if not isinstance(context, RoundContext):
        b.fail(
            f"unsupported in a kernel: with on {describe(context)}; only `with box.round() as r:` is",
            node.items[0].context_expr,
        )
    box = context.box
    if not isinstance(item.optional_vars, ast.Name):
        b.fail(f"with: expected a name for the round, as in `with {box.name}.round() as r:`")
    name = item.optional_vars.id
    b.builder.emit(ops.BoxRound, (box.value,))
    b.bind(name, Round(box))
    regions = b.function.regions
    regions.append(Region(RegionKind.ROUND, b.builder.block, box.name))
    try:
        flow = run_block(b, node.body)
    finally:
        regions.pop()
    if flow is not Flow.NEXT:
        b.fail(f"with: every path through `with {box.name}.round()` must reach its end (rule B3)")
    b.builder.emit(ops.BoxFlush, (box.value,))
    b.bind(name, Poison(f"`{name}` is a round of the mailbox `{box.name}` that was sent when its with ended"))
    return Flow.NEXT


def _return(b: Build, node: ast.Return) -> Flow:
    function = b.function
    for region in function.regions:
        if region.kind is RegionKind.ROUND:
            b.fail(
                f"`return` out of `with {region.box}.round()`: expected the round to be sent (rule B5), got a way out; "
                "end the with statement first"
            )
        if region.kind is RegionKind.COLLECT:
            b.fail(
                f"`return` in the loop over `{region.box}.collect()`: expected it to run to its end, where the slots "
                "go back (rule B6); return behind it"
            )
    value = evaluate(b, node.value) if node.value is not None else NONE
    if function.is_kernel:
        if value != NONE:
            b.fail(f"return: a kernel returns nothing, got {describe(value)}; store it with z.store(tile)")
        b.builder.emit(ops.Return)
        return Flow.ENDED
    if isinstance(value, CollectIterator | RoundContext):
        b.fail(f"return: expected a value, got {describe(value)}; a helper collects itself (rule B7)")
    return _return_value(b, value)


def _return_value(b: Build, value: Abstract) -> Flow:
    """Leaves a helper with `value`: at once, or through the loops around the place."""
    function = b.function
    if not function.wrapped:
        if b.builder.block is not function.entry:
            raise NeedsLoop(function)
        function.returned = value
        return Flow.RETURNED
    b.bind(RETURN, value)
    kinds = (RegionKind.LOOP, RegionKind.TRIP, RegionKind.HELPER)
    region = next(r for r in reversed(function.regions) if r.kind in kinds)
    if region.kind is RegionKind.TRIP:
        b.bind(BROKEN, Known(False))
    if region.kind is not RegionKind.HELPER:
        b.bind(RETURNED, Known(True))
    region.breaks.append(Exit(b.env, b.builder.emit(ops.Break)))
    return Flow.ENDED


_HANDLERS: Final[dict[type[ast.stmt], Callable[[Build, Any], Flow]]] = {
    ast.Expr: _expr,
    ast.Assign: _assign,
    ast.AugAssign: _aug_assign,
    ast.If: _if,
    ast.Pass: _pass,
    ast.For: _for,
    ast.While: _while,
    ast.Break: _break_or_continue,
    ast.Continue: _break_or_continue,
    ast.With: _with,
    ast.Return: _return,
}
