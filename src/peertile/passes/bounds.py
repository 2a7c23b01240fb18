"""Decides how each access is known to be inside its view (row S1): proven, checked at launch, or checked here.

An index is *limited* by (view, axis, size) if it is less than the number of tiles of `size` along
that axis. Limits come from provenance: a result of `tile_index`, the variable of a loop that runs to
`num_tiles`, a minimum of these. They are found anew for every access from the definition of the index
itself, so a fact never outlives a join, a loop or a reassignment; sums and products count as positive
only while they provably cannot wrap.

What is left gets a `check`: before the loop where the loop runs to its end whatever happens, else in
front of the access. Extents of a symmetric object are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from peertile.errors import CompileError
from peertile.ir import ops
from peertile.ir.core import Block, Builder, Effect, Kernel, Op, Value
from peertile.ir.ops import Binary, Bounds, CheckKind, Compare
from peertile.ir.types import INDEX, TileType, ViewType
from peertile.passes.rewrite import Scalars, constant_of, leaving

__all__ = ["LaunchCheck", "WholeTiles", "decide_bounds"]


class LaunchCheck(NamedTuple):
    """num_tiles(lhs, lhs_axis, lhs_size) <= num_tiles(rhs, rhs_axis, rhs_size), by parameter name."""

    description: str
    lhs: str
    lhs_axis: int
    lhs_size: int
    rhs: str
    rhs_axis: int
    rhs_size: int


class WholeTiles(NamedTuple):
    """The extent of `axis` of a multicast parameter is a multiple of `size`, and not 0 if `some`."""

    name: str
    axis: int
    size: int
    some: bool


class _Limit(NamedTuple):
    """num_tiles of `size` elements along `axis` of `view` (a parameter or the value of a field)."""

    view: Value
    axis: int
    size: int


def decide_bounds(kernel: Kernel, *, residual: bool = True) -> Kernel:
    """Sets `bounds` of every access that has none, in place; returns `kernel`.

    Leaves `facts["launch_checks"]` (a list of LaunchCheck), `facts["whole_tiles"]` (of WholeTiles) and
    `facts["bounds"]` (accesses by how they were decided). With `residual=False` an access that needs a check in the
    kernel is a CompileError.
    """
    kernel.facts.setdefault("launch_checks", [])
    kernel.facts.setdefault("whole_tiles", [])
    kernel.facts["bounds"] = {"proven": 0, "launch": 0, "kernel": 0}
    _Bounds(kernel, residual).block(kernel.body, frozenset())
    return kernel


_LOADS: Final = (ops.Load, ops.TileLoad, ops.MulticastLoad)
_MULTICAST: Final = (ops.MulticastLoad, ops.MulticastReduce, ops.MulticastStore, ops.MulticastBulk)
_ACCESSES: Final = (
    *_LOADS, ops.Store, ops.TileAtomic, ops.TileStore, ops.AsyncStore, ops.Gather, ops.Scatter, *_MULTICAST,
)  # fmt: skip
_Checked = frozenset[tuple[Value, _Limit]]


class _Bounds:
    def __init__(self, kernel: Kernel, residual: bool) -> None:
        self.kernel = kernel
        self.residual = residual
        self.names = dict(zip(kernel.params, kernel.param_names, strict=True))

    def block(self, block: Block, checked: _Checked) -> None:
        """Decides the accesses of `block`; `checked` are the checks that have been passed on the way in."""
        for op in list(block.ops):
            for inner in op.blocks:
                # A hoisted check lands in front of `op`, so its own block must not be walked before.
                self.block(inner, checked)
            if isinstance(op, _MULTICAST):
                self.whole_tiles(op)
            if isinstance(op, _ACCESSES) and op.attrs["bounds"] is Bounds.UNKNOWN:
                op.attrs["bounds"], checked = self.access(op, checked)
                self.kernel.facts["bounds"][op.attrs["bounds"].value] += 1

    def whole_tiles(self, op: Op) -> None:
        """A multicast access clips nothing: extents are multiples of the tile's, and at least one tile of it where
        its index is known without a loop over tiles. Left to the launch."""
        for axis, index, size in _indices(op):
            whole = WholeTiles(self.name(op.operands[0]), axis, size, constant_of(index) is not None)
            if whole not in self.kernel.facts["whole_tiles"]:
                self.kernel.facts["whole_tiles"].append(whole)

    def access(self, op: Op, checked: _Checked) -> tuple[Bounds, _Checked]:
        view = op.operands[0]
        worst = Bounds.PROVEN
        for axis, index, size in _indices(op):
            want = _Limit(_root(view), axis, size)
            found = self.decide(op, index, want)
            if found is Bounds.KERNEL:
                if not self.residual:
                    raise CompileError(
                        f"{op.NAME}: tile index of axis {axis} of {self.name(want.view)} cannot be proven to be in "
                        "bounds, and checks in the kernel are off; loop over num_tiles, or use the index of a tile",
                        op.loc,
                    )
                if (index, want) not in checked:
                    self.check(op, view, index, want)
                    checked |= {(index, want)}
                worst = Bounds.KERNEL
            elif found is Bounds.LAUNCH and worst is Bounds.PROVEN:
                worst = Bounds.LAUNCH
        return worst, checked

    def decide(self, op: Op, index: Value, want: _Limit) -> Bounds:
        constant = constant_of(index)
        if constant is not None:
            if constant < 0:
                raise CompileError(
                    f"{op.NAME}: tile index of axis {want.axis} of {self.name(want.view)}: expected 0 or more, "
                    f"got {constant}; tile indices count from the beginning of the view",
                    op.loc,
                )
            return Bounds.PROVEN if constant == 0 else Bounds.KERNEL
        if _bits(index) is None:
            return Bounds.KERNEL
        limits = list(_limits(index))
        # Larger tiles are fewer: what counts tiles of at least this size on this axis is in bounds.
        if any(k.view is want.view and k.axis == want.axis and k.size >= want.size for k in limits):
            return Bounds.PROVEN
        # With several limits (a minimum) one of them is enough, and the launch cannot tell which.
        if len(limits) == 1 and {limits[0].view, want.view} <= self.names.keys() and _always_runs(op, index):
            self.launch_check(limits[0], want)
            return Bounds.LAUNCH
        return Bounds.KERNEL

    def name(self, view: Value) -> str:
        return self.names.get(view) or view.hint or "a view"

    def launch_check(self, limit: _Limit, want: _Limit) -> None:
        lhs, rhs = self.name(limit.view), self.name(want.view)
        text = (
            f"tiles of {limit.size} along axis {limit.axis} of {lhs} must be no more than "
            f"tiles of {want.size} along axis {want.axis} of {rhs}"
        )
        check = LaunchCheck(text, lhs, limit.axis, limit.size, rhs, want.axis, want.size)
        if check not in self.kernel.facts["launch_checks"]:
            self.kernel.facts["launch_checks"].append(check)

    # -- checks in the kernel

    def check(self, op: Op, view: Value, index: Value, want: _Limit) -> None:
        """Puts a check of 0 <= index < max(num_tiles, 1) where it runs least often."""
        place, low, high = op, index, index
        hoisted: list[ops.For] = []
        while (loop := _hoistable(place, want.view)) is not None:
            if index is loop.blocks[0].args[0] and not hoisted and constant_of(loop.operands[2]) == 1:
                low, high = loop.operands[0], loop.operands[1]
            elif not all(_known_outside(v, loop) for v in (low, high, *(x for h in hoisted for x in h.operands[:2]))):
                break
            hoisted.append(loop)
            place = loop
        assert place.parent is not None
        s = Scalars(Builder(place.parent, op.loc, place))

        def here(v: Value) -> Value:
            """A constant may be written inside of the loop."""
            number = constant_of(v)
            assert isinstance(v.type, TileType)
            return v if number is None or not hoisted else s.const(int(number), v.type)

        # Inside a loop the view may be a peer's; outside, its symmetric object has the same extents.
        source = want.view if hoisted else view
        tiles = s.b.value(ops.NumTiles, (source,), INDEX, axis=want.axis, size=want.size)
        limit = s.binary(Binary.MAX, tiles, 1)
        if low is high:
            got = here(index)
            inside = s.inside(got, limit)
        else:
            # The whole range of the loop: lo >= 0 and hi <= limit.
            low, high = here(low), here(high)
            at_least, at_most = s.compare(Compare.GE, low, 0), s.compare(Compare.LE, high, limit)
            got, inside = s.sub(high, 1), s.binary(Binary.AND, at_least, at_most)
        for trips in hoisted:
            # A loop without a trip accesses nothing.
            empty = s.compare(Compare.GE, *map(here, trips.operands[:2]))
            inside = s.binary(Binary.OR, inside, empty)
        message = f"tile index of axis {want.axis} of {self.name(want.view)} is out of bounds"
        s.b.emit(ops.Check, (inside, got, limit), kind=CheckKind.BOUNDS, message=message)


def _indices(op: Op) -> Iterator[tuple[int, Value, int]]:
    """(axis, tile index, extent of the tile) of an access. Along the axis of a gather or scatter there is no tile
    index: what its indices name outside of the view is padding, or not written."""
    loads = isinstance(op, (*_LOADS, ops.Gather))
    tile = op.result.type if loads else op.operands[1].type
    assert isinstance(tile, TileType)
    axes = list(enumerate(tile.shape))
    rest = op.operands[1 if loads else 2 :]
    if isinstance(op, ops.Gather | ops.Scatter):
        del axes[op.attrs["axis"]]
        rest = rest[1:]
    for (axis, size), index in zip(axes, rest, strict=True):
        yield axis, index, size


def _root(view: Value) -> Value:
    """The parameter or field whose extents `view` has: a peer's part has those of the whole object."""
    return view.op.operands[0] if isinstance(view.op, ops.PeerView) else view


# ---------------------------------------------------------------- facts about one value


def _limits(v: Value) -> Iterator[_Limit]:
    """What `v` is less than."""
    op = v.op
    if isinstance(op, ops.TileIndex):
        t = op.operands[0].type
        assert isinstance(t, ViewType)
        assert t.partition is not None
        yield _Limit(op.operands[0], v.index, t.partition.tile_shape[v.index])
    elif isinstance(op, ops.BinaryOp) and op.attrs["fn"] is Binary.MIN:
        for x in op.operands:
            yield from _limits(x)
    elif isinstance(op, ops.Select):
        b = set(_limits(op.operands[2]))
        yield from (k for k in _limits(op.operands[1]) if k in b)
    elif isinstance(op, ops.BinaryOp) and op.attrs["fn"] is Binary.MAX:
        # max(num_tiles - 1, 0): the last tile; of a view without any the one that is all padding.
        for less, zero in (op.operands, op.operands[::-1]):
            if constant_of(zero) == 0 and _is_one_less(less):
                assert less.op is not None
                yield from _at_most(less.op.operands[0])
    elif (loop := _loop_of(v)) is not None:
        yield from _at_most(loop.operands[1])


def _is_one_less(v: Value) -> bool:
    """Whether `v` is a number of tiles less 1."""
    op = v.op
    return (
        isinstance(op, ops.BinaryOp)
        and (
            (op.attrs["fn"] is Binary.SUB and constant_of(op.operands[1]) == 1)
            or (op.attrs["fn"] is Binary.ADD and constant_of(op.operands[1]) == -1)
        )
        and isinstance(op.operands[0].op, ops.NumTiles)
    )


def _at_most(v: Value) -> Iterator[_Limit]:
    """What `v` is less than or equal to."""
    op = v.op
    if isinstance(op, ops.NumTiles):
        yield _Limit(_root(op.operands[0]), op.attrs["axis"], op.attrs["size"])
    elif isinstance(op, ops.BinaryOp) and op.attrs["fn"] is Binary.MIN:
        for x in op.operands:
            yield from _at_most(x)


def _loop_of(v: Value) -> ops.For | None:
    """The loop whose variable `v` is."""
    if isinstance(v.owner, Block) and v.index == 0 and isinstance(v.owner.parent, ops.For):
        return v.owner.parent
    return None


_PROGRAM_BITS: Final = 31
_RANK_BITS: Final = 16
_EXTENT_BITS: Final = 47
"""Programs of an axis are less than 2^31, ranks of a group than 2^16, elements than an address space."""


def _bits(v: Value, depth: int = 0) -> int | None:
    """b such that 0 <= v < 2^b; None if that is not known or may wrap."""
    op = v.op
    if depth > 16:
        return None
    if op is None:
        loop = _loop_of(v)
        if loop is None or _bits(loop.operands[0], depth + 1) is None:
            return None
        high = _bits(loop.operands[1], depth + 1)
        return 63 if high is None else high
    if isinstance(op, ops.Const):
        value = op.attrs["value"]
        return int(value).bit_length() if value >= 0 else None
    if isinstance(op, ops.ProgramId | ops.NumPrograms):
        return _PROGRAM_BITS
    if isinstance(op, ops.Rank | ops.NumRanks):
        return _RANK_BITS
    if isinstance(op, ops.Extent | ops.NumTiles | ops.TileIndex):
        return _EXTENT_BITS
    if isinstance(op, ops.Select):
        a, b = (_bits(x, depth + 1) for x in op.operands[1:])
        return None if a is None or b is None else max(a, b)
    if isinstance(op, ops.BinaryOp) and op.attrs["fn"] is Binary.MAX and any(_is_one_less(x) for x in op.operands):
        return _EXTENT_BITS
    if isinstance(op, ops.BinaryOp) and op.attrs["fn"] is Binary.MAX and v.type == INDEX:
        known = [b for b in (_bits(x, depth + 1) for x in op.operands) if b is not None]
        return None if not known else max(known) if len(known) == 2 else 63  # no less than what is not negative
    if isinstance(op, ops.BinaryOp):
        a, b = (_bits(x, depth + 1) for x in op.operands)
        found = None if a is None or b is None else _BITS_OF.get(op.attrs["fn"], lambda a, b: 64)(a, b)
        return None if found is None or found > 63 else found
    return None


_BITS_OF: Final[dict[Binary, Any]] = {
    Binary.ADD: lambda a, b: max(a, b) + 1,
    Binary.MUL: lambda a, b: a + b,
    Binary.MIN: min,
    Binary.MAX: max,
    Binary.AND: min,
    Binary.OR: max,
    Binary.QUOT: lambda a, b: a,
    Binary.FLOORDIV: lambda a, b: a,
    Binary.REM: lambda a, b: a,
    Binary.MOD: lambda a, b: a,
    Binary.SHR: lambda a, b: a,
}


# ---------------------------------------------------------------- facts about places


def _leaves_early(block: Block) -> bool:
    """Whether something in `block`, beside its own terminator, may leave it or its loop."""
    return any(True for op in block.ops for _ in leaving(op) if op.blocks)


def _always_runs(op: Op, index: Value) -> bool:
    """Whether `op` runs whenever `index` is computed (but for loops without a trip)."""
    home = index.owner if isinstance(index.owner, Block) else index.owner.parent
    block = op.parent
    while block is not None:
        if _leaves_early(block):
            return False
        if block is home:
            return True
        if not isinstance(block.parent, ops.For):
            return False
        block = block.parent.parent
    return False


def _hoistable(op: Op, view: Value) -> ops.For | None:
    """The loop directly around `op` if `op` runs in every one of its trips, and all trips run."""
    block = op.parent
    loop = block.parent if block is not None else None
    if not isinstance(loop, ops.For) or block is None or _leaves_early(block):
        return None
    if not isinstance(block.terminator, ops.Continue) or not _defined_outside(view, loop):
        return None
    # A wait in the loop may never end: the fault must not come before it.
    return None if Effect.WAIT in loop.effects else loop


def _known_outside(v: Value, loop: Op) -> bool:
    """Whether `v` is a constant, or defined outside of `loop`."""
    return constant_of(v) is not None or _defined_outside(v, loop)


def _defined_outside(v: Value, loop: Op) -> bool:
    """Whether `v` is defined outside of `loop`."""
    block = v.owner if isinstance(v.owner, Block) else v.owner.parent
    while block is not None:
        if block.parent is loop:
            return False
        block = block.parent.parent if block.parent is not None else None
    return True
