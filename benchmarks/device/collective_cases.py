"""What measurements of collectives on GPUs share: ranks that take turns, a collective with its inputs and what has to
come out, and the ways to do it: ours, by shapes of the library's kernels, and NCCL's and torch's symmetric memory's.

Needs torch with NCCL for the other side. Makes no multicast object and changes no setting of a GPU.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import turns
from turns import Json, Run

import peertile as pt
from peertile.library.cuda_collectives import FILLED_WORDS, TILE_BYTES, WORDS, Family, GpuPlans, Room, Shape
from peertile.library.reductions import ReduceOp
from peertile.library.selection import Algorithm

KIB, MIB = 1 << 10, 1 << 20
SIZES = [1 * KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
PROGRAMS = 528
FLAGGED, FILLED, PUSHED = Algorithm.FLAGGED, Algorithm.FILLED, Algorithm.PUSHED


ROOMS = (Room(32), Room(64), Room(16, 2 * FILLED_WORDS), Room(32, 2 * FILLED_WORDS))
"""What else filled tiles may have: fewer fences, longer tiles."""


@dataclass(frozen=True, slots=True)
class Roomy(Shape):
    """A shape of plans that have this room."""

    room: Room


class Bench:
    """One rank's side: what both libraries need, and turns of timing that all ranks take together."""

    def __init__(self, group: pt.Group, plain: bool) -> None:
        self.group = group
        self.device = pt.current_device()
        self.stream = self.device.stream("bench")
        self.rng = np.random.default_rng(1 + group.rank)
        self.torch: Any = None if plain else self._torch()

    def _torch(self) -> Any:
        torch: Any = importlib.import_module("torch")
        ordinal = self.device.driver.ordinal
        torch.cuda.set_device(ordinal)
        torch.distributed.init_process_group(
            "nccl", init_method=f"tcp://127.0.0.1:{os.environ['PEERTILE_BENCH_PORT']}", rank=self.group.rank,
            world_size=self.group.size, device_id=torch.device("cuda", ordinal),
        )  # fmt: skip
        return torch

    def random(self, count: int, rank: int | None = None, seed: int = 0) -> Any:
        """Rank's bf16 input of so many elements: every rank can make everybody's. Long ones repeat, at an odd distance,
        so that nothing that went to the wrong tile looks right."""
        rng = np.random.default_rng((seed, self.group.rank if rank is None else rank))
        block = rng.standard_normal(min(count, 3_000_017), np.float32).astype(ml_dtypes.bfloat16)
        return np.resize(block, count)

    # ---------------------------------------------------------------- timing

    def ours(self, make: Callable[[], Any], calls: int) -> Callable[[int], float]:
        """f(repeats) -> microseconds of a call of what `make` builds, captured `calls` times in a graph."""
        ops = make()
        with pt.capture(self.stream, "bench") as scope:
            for _ in range(calls):
                for op in ops() if callable(ops) else ops:
                    scope.record(op)
        scope.graph.launch().sync_on(self.stream)
        return turns.per_call(turns.replayed(self.device, self.stream, scope.graph), calls)

    def theirs(self, call: Callable[[], Any], calls: int, *keep: Any) -> Callable[[int], float]:
        """The same of a call of torch. `keep` is what the graph uses: it stays as long as the result."""
        graph = turns.torch_graph(self.torch, [call], calls)
        graph.replay()
        self.torch.cuda.synchronize()
        return turns.per_call(turns.torch_replayed(self.torch, graph, *keep), calls)

    def compare(self, candidates: dict[str, Callable[[], Callable[[int], float]]], nbytes: int) -> Json:
        """Medians in microseconds, of the slower rank, the candidates taking turns."""
        return turns.compare(self.group, candidates, 5, 2 if nbytes >= 64 * MIB else 5)


def calls_of(nbytes: int) -> int:
    """Calls in a graph."""
    return 50 if nbytes <= MIB else 20 if nbytes <= 16 * MIB else 4


def verify(b: Bench, got: Any, want: Any) -> None:
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


class Case:
    """A collective of bf16 at one size: what goes in, what has to come out, and ways to do it.

    `nbytes` are those of the longer side of a rank, `sent` those that it sends to each other one, by which the table
    chooses.
    """

    def __init__(
        self, b: Bench, plans: GpuPlans, family: Family, nbytes: int, roomy: Mapping[Room, GpuPlans] | None = None
    ) -> None:
        self.b, self.plans, self.family, self.nbytes = b, plans, family, nbytes
        self.roomy = roomy or {}
        n, me = b.group.size, b.group.rank
        count = nbytes // 2
        self.sent = nbytes if family is Family.ALL_REDUCE else nbytes // n
        everybody = [b.random(count, r, nbytes) for r in range(n)]
        rows = [e.reshape(n, count // n) for e in everybody] if family is not Family.ALL_REDUCE else []
        self.source = everybody[me]
        if family is Family.ALL_REDUCE:
            self.want = sum(e.astype(np.float32) for e in everybody).astype(ml_dtypes.bfloat16)
        elif family is Family.REDUCE_SCATTER:
            self.want = sum(r[me].astype(np.float32) for r in rows).astype(ml_dtypes.bfloat16)
        elif family is Family.ALL_GATHER:
            self.want, self.source = np.concatenate([r[0] for r in rows]), rows[me][0]
        else:
            self.want = np.concatenate([r[me] for r in rows])
        self.calls = calls_of(nbytes)
        self.x, self.out = pt.asarray(self.source, pt.bf16), pt.empty((self.want.size,), pt.bf16)

    def launch(self, shape: Shape) -> Any:
        """Ours, by kernels of that shape."""
        plans = self.roomy[shape.room] if isinstance(shape, Roomy) else self.plans
        if self.family is Family.ALL_REDUCE:
            return plans.all_reduce(shape, self.x, self.out, ReduceOp.SUM)
        if self.family is Family.REDUCE_SCATTER:
            return plans.reduce_scatter(shape, self.x, self.out, ReduceOp.SUM)
        return plans.gather(shape, self.x, self.out, each=self.family is Family.ALL_TO_ALL)

    def ours(self, shape: Shape) -> Callable[[], Run]:
        """Makes its graph, and looks at what comes out of it, to the bit."""

        def make() -> Run:
            pt.op.fill(self.out, float("nan")).sync()
            run = self.b.ours(lambda: lambda: [self.launch(shape)], self.calls)
            verify(self.b, self.out.numpy(), self.want)
            return run

        return make

    def theirs(self) -> dict[str, Callable[[], Run]]:
        """The others, where there is torch."""
        torch = self.b.torch
        if torch is None:
            return {}
        values = torch.from_numpy(self.source.astype(np.float32)).cuda().bfloat16()
        if self.family is Family.ALL_REDUCE:
            return {
                "nccl": lambda: self.b.theirs(lambda: torch.distributed.all_reduce(values), self.calls),
                "torch one-shot": self._symmetric(values, "one_shot_all_reduce"),
                "torch two-shot": self._symmetric(values, "two_shot_all_reduce_"),
            }
        outputs = torch.empty(self.want.size, dtype=torch.bfloat16, device=values.device)
        functions = {
            Family.ALL_GATHER: lambda: torch.distributed.all_gather_into_tensor(outputs, values),
            Family.REDUCE_SCATTER: lambda: torch.distributed.reduce_scatter_tensor(outputs, values),
            Family.ALL_TO_ALL: lambda: torch.distributed.all_to_all_single(outputs, values),
        }
        return {"nccl": lambda: self.b.theirs(functions[self.family], self.calls)}

    def _symmetric(self, values: Any, function: str) -> Callable[[], Run]:
        torch = self.b.torch
        symm = importlib.import_module("torch.distributed._symmetric_memory")
        world = torch.distributed.group.WORLD

        def make() -> Run:
            shared = symm.empty(values.numel(), dtype=torch.bfloat16, device=values.device)
            symm.rendezvous(shared, world)
            shared.copy_(values)
            torch.cuda.synchronize()
            call = getattr(torch.ops.symm_mem, function)
            return self.b.theirs(lambda: call(shared, "sum", world.group_name), self.calls, shared)

        return make


LINK_GB_S = 370.0
"""What a GPU stores into one other over NVLink 4, both ways at once, of what the two measured 366."""
LAUNCH_US, HOP_US, RELEASED_US = 0.87, 0.72, 1.33
"""A small kernel in a graph; a store until its word is seen; a signal, which is released, likewise."""


def least_us(algorithm: Algorithm, sent: int, ranks: int) -> float:
    """What a call takes at least: its launch, its bytes on the link, and the way of the last of them.

    What is pushed has come before its signal is sent; a flag for each word doubles the bytes. Reading, folding and
    storing come on top, in so far as nothing else travels meanwhile.
    """
    wire = sent * (ranks - 1) * (2 if algorithm is FLAGGED else 1) / LINK_GB_S / 1000
    return round(LAUNCH_US + wire + (HOP_US + RELEASED_US if algorithm is PUSHED else HOP_US), 2)


def variants(family: Family, sent: int, itemsize: int) -> dict[str, Shape]:
    """Ways to cut a message of `sent` bytes to each other rank, of elements of `itemsize` bytes where they are summed.

    What the table can say comes first: its programs follow from the tile. The others have other numbers of programs.
    """
    found: dict[str, Shape] = {}

    def add(algorithm: Algorithm, tile_bytes: int, programs: int, unit: int) -> None:
        tiles = -(-sent // tile_bytes)
        programs = min(programs, tiles)
        found.setdefault(f"{algorithm.value} {tile_bytes} x {programs}", Shape(algorithm, programs, tile_bytes // unit))

    unit = itemsize if family.reduces else 4
    if sent <= MIB:
        for tile in (128, 256, 512, 1024, 2048, 4 * WORDS):
            if tile <= max(sent, 1024) and -(-sent // tile) <= PROGRAMS:
                add(FLAGGED, tile, PROGRAMS, 4)
    if family is Family.ALL_REDUCE:
        for tile in (512, 1024, 2048, 4096, 8 * FILLED_WORDS):
            tiles = -(-sent // tile)
            if tile <= sent and (tiles <= PROGRAMS or tile >= 4096):
                add(FILLED, tile, PROGRAMS if tiles <= PROGRAMS else PROGRAMS // 2, 8)
        if sent > PROGRAMS * 8 * FILLED_WORDS:
            for programs in (132, 396, PROGRAMS):
                add(FILLED, 8 * FILLED_WORDS, programs, 8)
    if sent >= 128 * KIB:
        for tile in (4096, 8192, TILE_BYTES):
            few = family.reduces or tile > TILE_BYTES // 2
            add(PUSHED, tile, PROGRAMS // 2 if few else PROGRAMS, unit)
        if sent >= 4 * MIB:
            for tile, programs in ((8192, PROGRAMS // 2), (TILE_BYTES, 132), (TILE_BYTES, 198)):
                add(PUSHED, tile, programs, unit)
    return found


def roomy_variants(family: Family, sent: int, itemsize: int) -> dict[str, Shape]:
    """Ways beside those of `variants` for a long message of all-reduce, whose programs take several turns: other
    numbers of programs, such that all of them have as many turns, and what `ROOMS` make possible."""
    found: dict[str, Shape] = {}
    if family is not Family.ALL_REDUCE or sent <= PROGRAMS * 8 * FILLED_WORDS:
        return found

    def even(tile_bytes: int, most: int) -> list[int]:
        """As many programs as are asked for at most, and the fewest that take as few turns."""
        tiles = -(-sent // tile_bytes)
        return sorted({most, -(-tiles // -(-tiles // most))})

    for tile_bytes, most in ((8192, PROGRAMS), (TILE_BYTES, PROGRAMS // 2), (TILE_BYTES, PROGRAMS * 3 // 4)):
        for programs in even(tile_bytes, most):
            found[f"pushed {tile_bytes} x {programs}"] = Shape(PUSHED, programs, tile_bytes // itemsize)
    for programs in even(8 * FILLED_WORDS, PROGRAMS):
        found[f"filled {8 * FILLED_WORDS} x {programs}"] = Shape(FILLED, programs, FILLED_WORDS)
    for room in ROOMS:
        tile_bytes = 8 * room.words
        for most in (PROGRAMS // 2, PROGRAMS):
            for programs in even(tile_bytes, most):
                name = f"filled {tile_bytes} x {programs}, {room.slots} slots"
                found[name] = Roomy(FILLED, programs, room.words, room)
    return found
