"""Random kernels give the same on native code as by the numpy meaning of their ops."""

from collections import Counter, defaultdict
from enum import Enum
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import peertile as pt
from peertile.dtypes import ALL_DTYPES
from peertile.ir import ops
from peertile.ir.core import Block, walk
from peertile.ir.text import parse_kernel, print_kernel
from peertile.ir.types import PointerType, Space, ViewType
from peertile.meaning.grid import run_grid
from peertile.memory_model import Cmp, Order, Rmw, Scope
from peertile.passes.pipeline import run_pipeline
from peertile.runtime.driver import DriverKind
from peertile.testing.native import run_native
from peertile.testing.programs import differences, random_kernel

pytestmark = pytest.mark.any_device

CHUNKS = 10
SUITE = 160
DRAWN = 1200
"""Programs of the table of draws; the rarest of its rows stand in one of a few hundred."""
LONG = 10_000


def compare(seed):
    program = random_kernel(seed)
    if program.ranks > 1 and pt.current_device().driver.kind is not DriverKind.CPU:
        return program.kernel  # several ranks of one process run on cpu alone
    text = print_kernel(program.kernel)
    kernel = run_pipeline(parse_kernel(text))
    expected, found = program.make_args(), program.make_args()
    outcome = run_grid(kernel, program.grid, expected, ranks=program.ranks)
    printed = defaultdict(list)
    sinks = [partial(keep, printed, rank) for rank in range(program.ranks)]
    device = pt.current_device()
    fault = run_native(kernel, program.grid, found, device, ranks=program.ranks, on_print=sinks)
    assert (fault is None) == (not outcome.faults), f"seed {seed}: native {fault}, meaning {outcome.faults}\n{text}"
    if fault is None:
        wrong = differences(program, found, expected)
        assert not wrong, f"seed {seed}: {wrong}\n{text}"
        meant = defaultdict(list)
        for line in outcome.printed:
            meant[line.rank, line.program].append(line.values)
        assert printed.keys() == meant.keys(), f"seed {seed}: {printed} {meant}\n{text}"
        for where, lines in meant.items():
            same = [shows(a, b) for a, b in zip(printed[where], lines, strict=True)]
            assert all(same), f"seed {seed}, rank and program {where}: {printed[where]} {lines}\n{text}"
    return program.kernel


def keep(lines, rank, program, place, payload):
    """A sink of what a launch prints: by program, since programs print in any order."""
    lines[rank, program].append(bytes(payload))


def shows(payload, values):
    """Whether a record is of these values; each is padded to 8 bytes of anything."""
    at = 0
    for value in map(np.ascontiguousarray, values):
        if payload[at : at + value.nbytes] != value.tobytes():
            return False
        at += -(-value.nbytes // 8) * 8
    return at == len(payload)


VIEWED = (ops.Load, ops.Store, ops.TileLoad, ops.TileStore, ops.TileAtomic, ops.AsyncStore, ops.Gather, ops.Scatter)
DERIVED = {ops.ViewSlice: "slice", ops.ViewPermute: "permute", ops.ViewReshape: "reshape"}


def view_kind(value):
    """What an access goes through."""
    if value.type.space is Space.PEER:
        return "peer"
    if isinstance(value.owner, Block):
        if value.type.partition is not None:
            return "persistent partition" if value.type.partition.persistent else "partition"
        return {Space.DEVICE: "device"}.get(value.type.space, "parameter")
    return DERIVED.get(type(value.owner), value.owner.NAME)


def depth_of(op):
    """How many loops and branches are around an op."""
    depth, block = 0, op.parent
    while block.parent is not None:
        depth, block = depth + 1, block.parent.parent
    return depth


def draw(kernel, table):
    """Counts ops, every choice among the values of an enumeration, dtypes, kinds of view and forms of control flow."""
    for op in walk(kernel.body):
        table[op.NAME] += 1
        for value in op.results:
            dtype = getattr(value.type, "dtype", None)
            if dtype is not None:
                table[f"dtype {dtype}"] += 1
        for name, choice in op.attrs.items():
            if isinstance(choice, Enum):
                table[f"{op.NAME} {name} {choice.value}"] += 1
        if isinstance(op, VIEWED):
            table[f"view {view_kind(op.operands[0])}"] += 1
        if isinstance(op, ops.For | ops.Loop | ops.If):
            table[f"form {op.NAME} at depth {depth_of(op)}"] += 1
            table[f"form {op.NAME} with {len(op.results)} carried"] += 1
        if isinstance(op, ops.Break | ops.Continue | ops.Return) and depth_of(op):
            table[f"form {op.NAME} inside"] += 1
        if isinstance(op, ops.Permute) and isinstance(op.operands[0].owner, Block):
            shape = op.operands[0].type.shape
            table["form carried tile turned, square" if len(set(shape)) == 1 else "form carried tile turned"] += 1


def arguments(kernel, seed):
    """Arrays of 64 elements an axis, or one tile of a partition, and small numbers."""
    rng = np.random.default_rng(seed)
    made = []
    for t in (p.type for p in kernel.params):
        shape = ()
        if isinstance(t, ViewType):
            shape = t.partition.tile_shape if t.partition else (64,) * t.rank
        elif isinstance(t, PointerType):
            shape = (64,)
        number = (
            rng.integers(0, 2, shape)
            if t.dtype.is_bool
            else rng.integers(0, 60, shape) / (8 if t.dtype.is_float else 1)
        )
        made.append(np.asarray(number).astype(t.dtype.numpy))
    return made


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "once").glob("*.txt")), ids=lambda path: path.stem)
def test_kernels_that_once_differed(path):
    """`splat_in_one_arm`: a splat kept in scratch by one arm of an `if` was read from there by the other.
    `in_place_in_a_loop`: an expression from outside of a loop was computed in place in each trip.
    `mask_known_to_be_set`: an access whose mask is a constant left a join with an edge that nobody takes.
    `sort_of_an_outer_expression`: the keys were made in the scratch that the sorted tile was taken from.
    `scatter_of_a_piece`: rows of a piece of a tile in scratch were taken from the beginning of the tile."""
    kernel = run_pipeline(parse_kernel(path.read_text()))
    found, expected = arguments(kernel, 1), arguments(kernel, 1)
    assert run_grid(kernel, 1, expected).faults == []
    assert run_native(kernel, 1, found, pt.current_device()) is None
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=1e-5)


@pytest.mark.native_only  # some of them write a word by stores and by adds, which the model forbids and this is not about
@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_kernels_agree_with_their_meaning(chunk):
    size = SUITE // CHUNKS
    for seed in range(chunk * size, (chunk + 1) * size):
        compare(seed)


@pytest.mark.native_only
def test_a_few_random_kernels_agree_with_their_meaning(request):
    first = request.config.option.seed % 100_000 + 10_000
    for seed in range(first, first + 4):
        compare(seed)


# No frontend makes these in front of the passes, and nobody draws them: what passes emit, and what cpu does not have.
BY_PASSES = {"field", "launch_words", "suspend"}
# Passes emit it for a timeline alone.
BY_TIMELINES = {"mark"}
CHOICES = {
    ops.UnaryOp: ("fn", ops.Unary), ops.BinaryOp: ("fn", ops.Binary), ops.CompareOp: ("fn", ops.Compare),
    ops.Reduce: ("fn", ops.Fold), ops.Load: ("padding", ops.Padding), ops.Cast: ("rounding", ops.Rounding),
    ops.WordRmw: ("rmw", Rmw), ops.Check: ("kind", (ops.CheckKind.ASSERT, ops.CheckKind.BOUNDS)),
    ops.Wait: ("cmp", (Cmp.EQ, Cmp.GE, Cmp.LE)), ops.Fence: ("scope", (Scope.DEVICE, Scope.SYSTEM)),
    ops.PtrLoad: ("order", (Order.WEAK, Order.RELAXED, Order.ACQUIRE)),
    ops.PtrStore: ("order", (Order.WEAK, Order.RELAXED, Order.RELEASE)),
    ops.PtrRmw: ("order", (Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL)),
    ops.TileLoad: ("order", (Order.RELAXED, Order.ACQUIRE)), ops.TileStore: ("order", (Order.RELAXED, Order.RELEASE)),
    ops.TileAtomic: ("order", (Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL)),
    ops.MulticastLoad: ("rmw", tuple(ops.LOAD_REDUCTIONS)), ops.MulticastReduce: ("rmw", tuple(ops.REDUCTIONS)),
    ops.MulticastStore: ("order", (Order.WEAK, Order.RELAXED, Order.RELEASE)),
    ops.MulticastBulk: ("rmw", tuple(ops.BULK_REDUCTIONS)),
}  # fmt: skip
VIEWS = (
    "parameter", "device", "peer", "partition", "persistent partition", "slice", "permute", "reshape",
)  # fmt: skip
FORMS = (
    *(f"{op} at depth {n}" for op in ("for", "loop", "if") for n in range(3)), "break inside", "continue inside",
    "return inside", "for with 0 carried", "loop with 0 carried", "if with 0 carried", "for with 1 carried",
    "loop with 1 carried", "if with 1 carried", "carried tile turned", "carried tile turned, square",
)  # fmt: skip
WANTED = {
    *({cls.NAME for cls in ops.ALL_OPS} - BY_PASSES - BY_TIMELINES),
    *(f"{cls.NAME} {name} {x.value}" for cls, (name, values) in CHOICES.items() for x in values),
    *(f"dtype {d}" for d in ALL_DTYPES), *(f"view {v}" for v in VIEWS), *(f"form {f}" for f in FORMS),
}  # fmt: skip
"""Rows of the table of draws that may not be at zero."""


@pytest.mark.slow
def test_everything_is_drawn():
    """The generator's reach, printed: of ops, their choices, dtypes, views and forms, none is at zero."""
    table, after = Counter(), Counter()
    for seed in range(DRAWN):
        kernel = random_kernel(seed).kernel
        draw(kernel, table)
        if seed < 100:
            draw(run_pipeline(kernel), after)
    print(*(f"{name}: {count}" for name, count in sorted(table.items())), sep="\n")
    assert {name for name in WANTED if not table[name]} == set()
    assert {name for name in BY_PASSES if not after[name]} == set()


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(40))
def test_many_random_kernels_agree_with_their_meaning(chunk):
    size = LONG // 40
    for seed in range(200_000 + chunk * size, 200_000 + (chunk + 1) * size):
        compare(seed)
