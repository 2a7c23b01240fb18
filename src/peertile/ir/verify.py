"""The verifier of tile IR: one function, run after the frontend, after parsing text and after every pass
that changed something.

It checks structure (blocks, terminators, visibility), what every op declares (operands, results,
attributes), each op's own rule, the tiers, and the rules of memory order that need no data flow
(row S3 of docs/features.md). It changes nothing and knows no backend. Whatever needs values
(races, bounds, the mailbox rules) is checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

from peertile.errors import VerifyError
from peertile.ir import ops
from peertile.ir.core import Block, Effect, Kernel, Op, Value, walk
from peertile.ir.types import (
    MAX_TENSOR_RANK,
    MAX_TILE_ELEMENTS,
    MAX_TILE_RANK,
    MailboxType,
    MulticastType,
    PointerType,
    SymmetricType,
    TileType,
    TokenType,
    Type,
    ViewType,
)
from peertile.memory_model import Order
from peertile.source import Loc

__all__ = ["OrderFault", "order_faults", "verify"]

UNSAFE_OPS: Final = (
    ops.NewToken, ops.JoinTokens, ops.PtrOffset, ops.PtrBroadcast, ops.Unicast,
    ops.PtrLoad, ops.PtrStore, ops.PtrRmw, ops.PtrCas,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OrderFault:
    """A broken rule of memory order: the sentence, and the op that breaks it."""

    op: Op
    message: str

    @property
    def loc(self) -> Loc | None:
        return self.op.loc


def verify(kernel: Kernel, *, expanded: bool = False, bounds_known: bool = False, order_rules: bool = True) -> None:
    """Raise VerifyError, with the source line, for the first rule that `kernel` breaks.

    `expanded`: no op of `ops.EXPANDED` may be left, nor, but for mappings of the fabric, one of `ops.MULTICAST`.
    `bounds_known`: every access must have its bounds decided. `order_rules=False` skips the rules of memory order, for
    the checker, which shows the race itself; `order_faults` lists them.
    """
    _Verifier(kernel, expanded, bounds_known).run()
    if order_rules:
        for fault in order_faults(kernel):
            fault.op.fail(fault.message)


class _Verifier:
    def __init__(self, kernel: Kernel, expanded: bool, bounds_known: bool) -> None:
        self.kernel = kernel
        self.expanded = expanded
        self.bounds_known = bounds_known
        self.visible: set[Value] = set()
        self.shown: list[Value] = []  # what is visible, in order: a block takes its own away at its end
        self.seen: set[Op | Block] = set()
        self.right: set[int] = set()
        """Types that keep the rules, by identity: the kernel holds them as long as this runs."""

    def run(self) -> None:
        kernel = self.kernel
        if len(kernel.param_names) != len(kernel.params):
            raise VerifyError(
                f"kernel {kernel.name}: expected one name for each of {len(kernel.params)} parameters, "
                f"got {len(kernel.param_names)}",
                kernel.loc,
            )
        if len(set(kernel.param_names)) != len(kernel.param_names):
            raise VerifyError(f"kernel {kernel.name}: two parameters have one name", kernel.loc)
        if kernel.grid_rank not in (1, 2, 3):
            text = f"grid rank: expected 1, 2 or 3, got {kernel.grid_rank}"
            raise VerifyError(f"kernel {kernel.name}: {text}", kernel.loc)
        for name, value in zip(kernel.param_names, kernel.params, strict=True):
            self.check_type(value.type, f"kernel {kernel.name}: parameter {name}", kernel.loc)
        if kernel.body.parent is not None:
            raise VerifyError(f"kernel {kernel.name}: the body hangs below an op", kernel.loc)
        self.block(kernel.body, None)

    def block(self, block: Block, owner: Op | None) -> None:
        loc = owner.loc if owner is not None else self.kernel.loc
        where = owner.NAME if owner is not None else f"kernel {self.kernel.name}"
        if block in self.seen:
            raise VerifyError(f"{where}: a block hangs in two places", loc)
        self.seen.add(block)
        if block.terminator is None:
            last = block.ops[-1].NAME if block.ops else "nothing"
            raise VerifyError(f"{where}: block: expected a terminator at its end, got {last}", loc)
        for k, value in enumerate(block.args):
            if value.owner is not block or value.index != k:
                raise VerifyError(f"{where}: block argument {k} belongs to another place", loc)
        outside = len(self.shown)
        self.show(block.args)
        for op in block.ops:
            self.op(op, block)
        self.visible.difference_update(self.shown[outside:])
        del self.shown[outside:]

    def show(self, values: Iterable[Value]) -> None:
        """From here to the end of the block at hand, operands may be these."""
        new = [v for v in values if v not in self.visible]
        self.visible.update(new)
        self.shown += new

    def op(self, op: Op, block: Block) -> None:
        if op in self.seen:
            op.fail("the op hangs in two places")
        self.seen.add(op)
        op.require(type(op) in ops.ALL_OPS, "not an op of tile IR")
        op.require(op.parent is block, "its parent is another block")
        op.require(not op.TERMINATOR or op is block.ops[-1], "a terminator must be the last op of its block")
        # Messages are made when something is wrong, here and for what kernels have most of: they took a third of it.
        visible = self.visible
        for k, value in enumerate(op.operands):
            if value not in visible:
                op.fail(f"operand {k} ({value!r}) is not visible here")
        self.counts(op)
        self.attributes(op)
        for k, value in enumerate(op.results):
            if value.owner is not op or value.index != k:
                op.fail(f"result {k} belongs to another op")
            if id(value.type) not in self.right:
                self.check_type(value.type, f"{op.NAME}: result {k}", op.loc)
        self.tier(op)
        op.verify()
        for inner in op.blocks:
            op.require(inner.parent is op, "a block has another parent")
            for value in inner.args:
                if id(value.type) not in self.right:
                    self.check_type(value.type, f"{op.NAME}: block argument {value.index}", op.loc)
            self.block(inner, op)
        self.show(op.results)

    def counts(self, op: Op) -> None:
        for role, (low, high), n in (
            ("operands", op.OPERANDS, len(op.operands)),
            ("results", op.RESULTS, len(op.results)),
            ("blocks", (op.N_BLOCKS, op.N_BLOCKS), len(op.blocks)),
        ):
            if low <= n and (high is None or n <= high):
                continue
            if low == high:
                op.fail(f"{role}: expected {low}, got {n}")
            elif high is None:
                op.fail(f"{role}: expected at least {low}, got {n}")
            else:
                op.fail(f"{role}: expected {low} to {high}, got {n}")

    def attributes(self, op: Op) -> None:
        for name in op.attrs:
            if name not in op.ATTRS:
                op.fail(f"attribute {name}: there is none of this name")
        for name in op.ATTRS:
            if name not in op.attrs:
                op.fail(f"attribute {name}: required, got none")
            value, allowed = op.attrs[name], ops.ATTR_TYPES[name]
            right = isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))
            if not right:
                kinds = " or ".join("none" if t is type(None) else t.__name__ for t in allowed)
                op.fail(f"attribute {name}: expected {kinds}, got {value!r}")

    def tier(self, op: Op) -> None:
        if not self.kernel.unsafe and isinstance(op, UNSAFE_OPS):
            op.fail(f"belongs to T.unsafe, and kernel {self.kernel.name} is not marked unsafe=True")
        if self.expanded:
            op.require(not isinstance(op, ops.EXPANDED), "must have been expanded into primitive ops")
            op.require(
                not isinstance(op, ops.MULTICAST) or _hardware(op),
                "must have been expanded into primitive ops: its object has no mapping of the fabric",
            )
        if self.bounds_known and "bounds" in op.attrs:
            op.require(op.attrs["bounds"] is not ops.Bounds.UNKNOWN, "bounds: must have been decided")

    def check_type(self, t: Type, role: str, loc: Loc | None) -> None:
        for rule, text in _type_rules(t):
            if not rule:
                raise VerifyError(f"{role}: {text}, got {t}", loc)
        if isinstance(t, PointerType | TokenType) and not self.kernel.unsafe:
            raise VerifyError(f"{role}: {t} belongs to kernels marked unsafe=True", loc)
        self.right.add(id(t))


def _hardware(op: Op) -> bool:
    t = op.operands[0].type
    return isinstance(t, MulticastType) and t.hardware


_FEW_ELEMENTS: Final = f"expected at most {MAX_TILE_ELEMENTS} elements in a tile"


def _type_rules(t: Type) -> Iterator[tuple[bool, str]]:
    """Pairs (holds, what was expected) for everything a type must satisfy."""
    if isinstance(t, TileType | PointerType):
        yield len(t.shape) <= MAX_TILE_RANK, f"expected a tile rank of at most {MAX_TILE_RANK}"
        yield all(_power_of_two(n) for n in t.shape), "expected extents that are powers of two"
        yield prod(t.shape) <= MAX_TILE_ELEMENTS, _FEW_ELEMENTS
    elif isinstance(t, ViewType | SymmetricType | MulticastType):
        yield 0 <= t.rank <= MAX_TENSOR_RANK, f"expected a rank of at most {MAX_TENSOR_RANK}"
        yield len(t.unit_stride) == t.rank, "expected one unit-stride promise per axis"
        yield len(t.divisible) == t.rank, "expected one divisibility promise per axis"
        yield all(n >= 1 for n in t.divisible), "expected divisibility of at least 1"
        yield t.align == 0 or _power_of_two(t.align), "expected an alignment that is a power of two"
        if isinstance(t, ViewType) and t.partition is not None:
            yield len(t.partition.tile_shape) == t.rank, "expected a partition with one extent per axis"
            yield all(_power_of_two(n) for n in t.partition.tile_shape), "expected a tile shape of powers of two"
            yield prod(t.partition.tile_shape) <= MAX_TILE_ELEMENTS, _FEW_ELEMENTS
            yield t.partition.swizzle >= 1, "expected a swizzle of at least 1"
            spare = t.partition.spare
            yield spare == 0 or (spare > 0 and t.partition.persistent), "expected spare programs of persistent ones"
            yield len(t.partition.single) in (0, t.rank), "expected one promise of a single tile per axis, or none"
    elif isinstance(t, MailboxType):
        yield all(_power_of_two(n) for n in t.tile_shape), "expected a tile shape of powers of two"
        yield prod(t.tile_shape) <= MAX_TILE_ELEMENTS, _FEW_ELEMENTS
        yield _power_of_two(t.depth), "expected a depth that is a power of two"
        yield 1 <= t.posts_ahead <= t.depth, "expected 1 to depth posts ahead"


def _power_of_two(n: int) -> bool:
    return n >= 1 and n & (n - 1) == 0


# ---------------------------------------------------------------- memory order (S3)


def order_faults(kernel: Kernel) -> list[OrderFault]:
    """Every broken rule of memory order that can be seen without following values, in program order.

    A relaxed wait that no fence follows orders nothing: what is read after it may be stale. A release
    that stores again what the release before it stored, with nothing done in between, publishes
    nothing; kernel entry counts as something done, and the end of the kernel as an ordered use. Both
    rules may miss faults that need data flow; neither reports a right program.
    """
    faults = []
    for op in walk(kernel.body):
        if isinstance(op, ops.Wait) and op.attrs["order"] is Order.RELAXED and not _fence_follows(op):
            faults.append(
                OrderFault(op, "order: a relaxed wait orders nothing unless a fence follows before the next access")
            )
        elif isinstance(op, ops.WordStore) and op.attrs["order"].releases and _repeats_release(op):
            faults.append(OrderFault(op, "order: this release publishes nothing: the one before it is the same"))
    return faults


def _fence_follows(wait: Op) -> bool:
    """Whether a fence comes before the next access or the end; further relaxed polls may come between."""
    for op in _after(wait):
        if isinstance(op, ops.Fence):
            return True
        if isinstance(op, ops.Wait | ops.WordLoad) and op.attrs["order"] is not Order.WEAK:
            continue
        if op.effects & {Effect.READ, Effect.WRITE}:
            return False
        if isinstance(op, ops.Return):
            return False
    return False


def _after(op: Op) -> Iterable[Op]:
    """The ops that follow `op` in its block, then those after the op that owns the block, and so on."""
    here: Op | None = op
    while here is not None and here.parent is not None:
        block = here.parent
        yield from block.ops[block.ops.index(here) + 1 :]
        here = block.parent


def _repeats_release(store: Op) -> bool:
    assert store.parent is not None
    block = store.parent.ops
    for op in reversed(block[: block.index(store)]):
        if isinstance(op, ops.WordStore) and op.attrs["order"].releases:
            return op.operands == store.operands
        if op.blocks or op.effects:
            return False
    return False
