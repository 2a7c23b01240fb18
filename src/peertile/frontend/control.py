"""Branches and loops of the IR: conditions, if, for, while, short circuits. Reads no syntax.

Bodies are given as functions that compile into the current block and say how control leaves it; so a loop
over tiles, over ranks and over a mailbox is the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from peertile.dtypes import b1
from peertile.frontend.convert import constant
from peertile.frontend.merge import VALUE, Carried, merge
from peertile.frontend.scope import Binding, Build, Exit, Flow, Region, RegionKind
from peertile.frontend.values import Abstract, Known, Poison, Tile, Tup, describe
from peertile.ir import ops
from peertile.ir.core import Block, Value
from peertile.ir.ops import Binary, Unary
from peertile.ir.types import BOOL

__all__ = ["branch", "choose", "counted_loop", "endless_loop", "negation", "short_circuit", "truth"]

_MAX_ATTEMPTS: Final = 64

_Body = Callable[[], Flow]


def truth(b: Build, value: Abstract, role: str = "condition") -> bool | Value:
    """A condition: a Python bool where it is known at compile time, else a bool scalar."""
    if isinstance(value, Known):
        return bool(value.value)
    if isinstance(value, Tup):
        return bool(value.items)
    if not isinstance(value, Tile):
        b.fail(f"{role}: expected a bool, got {describe(value)}")
    t = value.type
    if t.shape:
        b.fail(
            f"{role}: expected a bool scalar, got a tile {t}; choose per element with T.where, "
            "or reduce with T.any or T.all"
        )
    if not t.dtype.is_bool:
        b.fail(f"{role}: expected a bool scalar, got {t}; compare it, as in `x != 0`")
    return value.value


def negation(b: Build, value: Abstract) -> Abstract:
    """`not value`."""
    if isinstance(value, Tile) and value.type.shape and value.type.dtype.is_bool:
        b.fail(f"`not`: expected a bool scalar, got a tile {value.type}; use ~ for each element")
    condition = truth(b, value, "`not`")
    if isinstance(condition, bool):
        return Known(not condition)
    return Tile(b.builder.value(ops.UnaryOp, (condition,), BOOL, fn=Unary.NOT))


def branch(b: Build, condition: Value, then: _Body, other: _Body) -> Flow:
    """`if`: both arms, and the join of their environments."""
    before = b.env
    exits: list[Exit] = []
    blocks = []
    for run in (then, other):
        block = Block()
        b.env = dict(before)
        with b.inside(block):
            flow = run()
            if flow is Flow.NEXT:
                exits.append(Exit(b.env, b.builder.emit(ops.Yield)))
        blocks.append(block)
    b.env = dict(before)
    types, finish = merge(b, exits)
    op = b.builder.emit(ops.If, (condition,), types, blocks)
    if not exits:
        # Nothing comes here, but a block ends in a terminator.
        b.builder.emit(ops.Return)
        return Flow.ENDED
    b.env = finish(op.results)
    return Flow.NEXT


def choose(b: Build, condition: Value, then: Callable[[], Abstract], other: Callable[[], Abstract]) -> Abstract:
    """A conditional expression: the value of one of two expressions, only one of them evaluated."""

    def arm(make: Callable[[], Abstract]) -> _Body:
        def run() -> Flow:
            b.bind(VALUE, make())
            return Flow.NEXT

        return run

    branch(b, condition, arm(then), arm(other))
    value = b.env.pop(VALUE).value
    if isinstance(value, Poison):
        b.fail(f"{value.message}; convert one side with .astype(...)")
    return value


def short_circuit(b: Build, is_and: bool, left: Value, rest: Callable[[], Abstract]) -> Tile:
    """`left and rest`, `left or rest` on run-time scalars: `rest` is evaluated only where it decides."""
    block = Block()
    with b.inside(block):
        decided = truth(b, rest(), "`and`" if is_and else "`or`")
        right = constant(b, decided, b1) if isinstance(decided, bool) else decided
    if all(not op.blocks and not op.effects for op in block.ops):
        # Nothing but arithmetic: evaluating it always is the same and needs no branch.
        for op in block.ops:
            b.builder.add(op)
        fn = Binary.AND if is_and else Binary.OR
        return Tile(b.builder.value(ops.BinaryOp, (left, right), BOOL, fn=fn))
    skipped = Block()
    with b.inside(block):
        b.builder.emit(ops.Yield, (right,))
    with b.inside(skipped):
        b.builder.emit(ops.Yield, (constant(b, not is_and, b1),))
    blocks = [block, skipped] if is_and else [skipped, block]
    return Tile(b.builder.emit(ops.If, (left,), (BOOL,), blocks).result)


# ---------------------------------------------------------------- loops


def counted_loop(
    b: Build,
    bounds: tuple[Value, Value, Value],
    body: Callable[[Value], Flow],
    *,
    assigned: Sequence[str],
    targets: dict[str, str],
    kind: RegionKind = RegionKind.LOOP,
    box: str = "",
    stages: int = 1,
) -> Flow:
    """`for`: `body(iv)` compiles one trip. `assigned` are the names it may bind; `targets` maps the names of
    the loop's own variables to the message for reading one behind the loop."""
    before = b.env
    own = [name for name in assigned if name not in targets]
    carried = Carried(before, own)
    for _ in range(_MAX_ATTEMPTS):
        block = Block([bounds[0].type, *carried.types])
        region = Region(kind, block, box)
        adaptations = b.adaptations
        b.env = carried.bind(before, block.args[1:])
        _run_body(b, region, lambda iv=block.args[0]: body(iv))  # type: ignore[misc]
        ends = region.continues + region.breaks
        if carried.settle(b, ends, block.args[1:], b.adaptations != adaptations):
            break
    else:
        raise AssertionError("the search for the types of a loop did not end")
    b.env = dict(before)
    initial = carried.initial(b)
    op = b.builder.emit(ops.For, (*bounds, *initial), [v.type for v in initial], [block], stages=stages)
    env = carried.bind(before, op.results)
    for name in own:
        if name not in env and not name.startswith("<"):
            line = b.function.assigned.get(name)
            at = f" at line {line}" if line is not None else ""
            env[name] = Binding(
                Poison(
                    f"`{name}` is assigned only inside the loop{at}, which may run no times; assign it before the loop"
                ),
                None,
            )
    for name, message in targets.items():
        env[name] = Binding(Poison(message), None)
    b.env = env
    return Flow.NEXT


def endless_loop(b: Build, body: _Body, *, assigned: Sequence[str]) -> Flow:
    """`while`: repeats `body` until it breaks; what it assigned is visible behind it."""
    before = b.env
    carried = Carried(before, assigned)
    for _ in range(_MAX_ATTEMPTS):
        block = Block(carried.types)
        region = Region(RegionKind.LOOP, block)
        b.env = carried.bind(before, block.args)
        _run_body(b, region, body)
        # Always "adapted": what leaves by a break may be weak still, so a guess is compiled again.
        if carried.settle(b, region.continues, block.args, True):
            break
    else:
        raise AssertionError("the search for the types of a loop did not end")
    b.env = dict(before)
    types, finish = merge(b, region.breaks, dummies=True)
    op = b.builder.emit(ops.Loop, carried.initial(b), types, [block])
    if not region.breaks:
        b.builder.emit(ops.Return)
        return Flow.ENDED
    b.env = finish(op.results)
    return Flow.NEXT


def _run_body(b: Build, region: Region, body: _Body) -> None:
    """Compiles one trip into the region's block; falling off its end continues."""
    regions = b.function.regions
    with b.inside(region.block):
        regions.append(region)
        try:
            flow = body()
        finally:
            regions.pop()
        if flow is Flow.NEXT:
            region.continues.append(Exit(b.env, b.builder.emit(ops.Continue)))
