"""`peertile bench checker`: what a check costs: time per tile access, schedules a second, exhaustive checks.

Everything runs on the simulated machine, on one thread, and is timed in seconds of that thread's processor, so that
a busy machine disturbs it little; the names say so. Nothing here uses a device.
"""

# ruff: noqa: PT009
# mypy: disable-error-code="operator,arg-type"
# Kernels: T.assert_ is a word of the kernel language, and so is a pointer plus an offset, which no class declares.

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

import peertile.language as T
from peertile.checker.program import ProgramCase
from peertile.cli.bench_protocols import protocols, with_collectives
from peertile.comm.symmetric import SymmetricHeap
from peertile.creation import asarray, empty
from peertile.dtypes import f32, i64, u32
from peertile.frontend.build import build_kernel
from peertile.ir.core import Kernel
from peertile.ir.types import Access, SignalType, SymmetricType, TileType
from peertile.kernel import kernel
from peertile.library.collectives import Collectives
from peertile.library.selection import Algorithm
from peertile.meaning import PerRank, new_signal
from peertile.passes.pipeline import run_pipeline
from peertile.sim.choices import RandomChooser
from peertile.sim.explore import Report, exhaust
from peertile.sim.runs import Case, kernel_case
from peertile.testing.measure import Figure

__all__ = ["bench_checker", "handshake_rounds"]

TILES: Final = (64, 256, 1024, 4096)
ACCESSES: Final = (200, 20_000)
ACCESS_LIMIT_US: Final = 8.0
SCHEDULES_LIMIT: Final = 400.0
EXHAUSTIVE_LIMIT_S: Final = 60.0

_PEER: Final = SymmetricType(f32, 1, unit_stride=(True,))
_READ: Final = SymmetricType(f32, 1, Access.READ, unit_stride=(True,))


def walk(out: T.Peer, x: T.Peer[T.read], ready: T.Signal, trips: T.i64, B: T.Const[int]) -> None:
    """Tiles of a peer are read, own tiles are written, over and over."""
    ready.notify()
    ready.wait()
    p = T.program_id(0)
    for k in T.range(trips):
        out.local.store((p * 8 + k % 8,), x.at(1 - x.rank).load((p * 8 + (k + 3) % 8,), (B,)))


def two_shot(out: T.Peer, x: T.Peer[T.read], ready: T.Signal, B: T.Const[int]) -> None:
    """The all-reduce of the tutorial: everybody reduces a share of the tiles and gives it to all."""
    me, n = x.rank, x.num_ranks
    tiles = x.local.num_tiles((B,))[0]
    ready.notify()
    ready.wait()
    for t in T.range(T.program_id(0) * n + me, tiles, T.num_programs(0) * n):
        acc = T.zeros((B,), T.f32)
        for r in T.ranks():
            acc += x.at(r).load((t,), (B,))
        for r in T.ranks():
            out.at(r).store((t,), acc.astype(out.dtype))
    ready.notify()
    ready.wait()


def _built(fn: Any, tile: int, **types: Any) -> Kernel:
    given = {"out": _PEER, "x": _READ, "ready": SignalType(), **types}
    return run_pipeline(build_kernel(fn, given, {"B": tile}, unsafe=False, name=fn.__name__))


def _floats(ranks: int, n: int) -> PerRank:
    return PerRank([np.arange(n, dtype=np.float32) + rank for rank in range(ranks)])


def _access_case(tile: int, accesses: int) -> Case:
    """2 ranks of 2 programs that make `accesses` accesses of tiles together."""
    built, n, trips = _built(walk, tile, trips=TileType(i64)), 16 * tile, accesses // 8
    return kernel_case(
        built, 2, lambda: [_floats(2, n), _floats(2, n), new_signal(2, 2), trips], ranks=2, max_steps=1_000_000
    )


def _all_reduce_case(ranks: int = 3, programs: int = 4, tile: int = 64) -> Case:
    built, n = _built(two_shot, tile), tile * ranks * programs
    return kernel_case(
        built, programs, lambda: [_floats(ranks, n), _floats(ranks, n), new_signal(ranks, programs)], ranks=ranks
    )


def _per_access() -> list[Figure]:
    figures = []
    for tile in TILES:
        for accesses in ACCESSES:
            case = _access_case(tile, accesses)
            times = []
            repeats = 25 if accesses < 1000 else 3
            for seed in range(repeats + 1):
                start = time.process_time()
                outcome = case.run(seed=seed)
                times.append((time.process_time() - start) / accesses * 1e6)
                assert outcome.verdict is None, outcome.verdict
            name = f"checker.cpu.access.tile_{tile}.after_{accesses}"
            figures.append(Figure(name, statistics.median(times[1:]), "us", repeats, limit=ACCESS_LIMIT_US))
    return figures


def _rate(case: Case, schedules: int) -> float:
    """Schedules a second."""
    case.run(seed=0)
    start = time.process_time()
    for seed in range(1, schedules + 1):
        outcome = case.run(RandomChooser(seed))
        assert outcome.verdict is None, outcome.verdict
    return schedules / (time.process_time() - start)


def _schedules() -> list[Figure]:
    """Rates, as milliseconds of a schedule, so that the limit is one from above."""
    kernels, schedules = _all_reduce_case(), 600
    rates = [_rate(kernels, schedules // 3) for _ in range(3)]
    whole = ProgramCase(_two_shot_program(4), 3)
    return [
        Figure(
            "checker.cpu.schedule.two_shot.3_ranks_4_programs", 1e3 / statistics.median(rates), "ms", schedules,
            limit=1e3 / SCHEDULES_LIMIT,
        ),
        Figure("checker.cpu.schedule.two_shot.3_ranks_4_programs.with_hosts", 1e3 / _rate(whole, 100), "ms", 100),
    ]  # fmt: skip


# ---------------------------------------------------------------- exhaustive checks


@kernel(unsafe=True)
def handshake(
    data: T.Pointer, their_data: T.Pointer, inbox: T.Pointer, their_inbox: T.Pointer, log: T.Pointer, rounds: T.i32,
    N: T.Const[int], LIMIT: T.Const[int] = 1 << 16,
) -> None:  # fmt: skip
    """The two-rank handshake of examples/handshake.py without its tallies: data and sequence numbers to the
    partner's memory, polled with a bound."""
    i = T.iota(N)
    token = T.unsafe.token()
    for r in T.range(rounds):
        value = (i + r).astype(T.f32)
        token = T.unsafe.store_ptr(T.unsafe.unicast(their_data) + i, value, order=T.weak, token=token)
        for phase in T.static_range(2):
            seq = (2 * r + phase + 1).astype(T.u32)
            token = T.unsafe.store_ptr(T.unsafe.unicast(their_inbox), seq, order=T.release, scope=T.system, token=token)
            got = T.u32(0)
            for _ in T.range(LIMIT):
                got, token = T.unsafe.load_ptr(inbox, order=T.acquire, scope=T.system, token=token)
                if T.at_least(got, seq):
                    break
            T.assert_(T.at_least(got, seq), "the partner did not signal")
            if phase == 0:
                tile, token = T.unsafe.load_ptr(data + i, order=T.weak, token=token)
                token = T.unsafe.store_ptr(log + r * N + i, tile, order=T.weak, token=token)


def handshake_rounds(rounds: int) -> Callable[[Any], None]:
    """A program of `rounds` rounds of the handshake in one launch."""

    def main(group: Any) -> None:
        with SymmetricHeap(group, size_bytes=1 << 12) as heap:
            data, inbox = heap.zeros((8,), f32), heap.zeros((1,), u32)
            log = empty((rounds, 8), f32)
            peer = 1 - group.rank
            handshake.grid(1)(
                *(data.local.pointer(), data.at(peer).pointer(), inbox.local.pointer(), inbox.at(peer).pointer()),
                *(log.pointer(), rounds),
                N=8,
            ).sync()
            expected = np.arange(8)[None, :] + np.arange(rounds)[:, None]
            assert np.array_equal(log.numpy(), expected)

    return main


@kernel
def meeting(x: T.Peer, ready: T.Signal, out: T.Exclusive, rounds: T.i64) -> None:
    """The handshake with a signal: data to the partner, it has arrived, it has been read."""
    for r in T.range(rounds):
        x.at(1 - x.rank).store((0,), T.full((8,), r.astype(T.f32), T.f32))
        ready.notify()
        ready.wait()
        out.store(x.local.load((0,), (8,)))
        ready.notify()
        ready.wait()


def _meetings(group: Any) -> None:
    with SymmetricHeap(group, size_bytes=1 << 12) as heap:
        out = empty((8,), f32)
        meeting(heap.zeros((8,), f32), heap.signal(slots=1), out.partition(8), 2).sync()
        assert np.array_equal(out.numpy(), np.full(8, 1.0))


def _two_shot_program(programs: int) -> Callable[[Any], None]:
    def call(c: Collectives, me: int, turn: int) -> None:
        c.all_reduce(asarray(np.full(768, 1.0 + me, np.float32)), algorithm=Algorithm.TWO_SHOT).sync()

    return with_collectives(call, programs=programs)


def _exhaustive() -> list[Figure]:
    """Seconds of exhaustive checks; the repetitions of a figure are the schedules that were run."""
    cases: list[tuple[str, Callable[[Any], None]]] = [("handshake.waits", _meetings)]
    cases += protocols().items()
    # Each round has some twenty times as many schedules as the one before.
    cases += [("handshake.polls", handshake_rounds(1)), ("handshake.polls.two_rounds", handshake_rounds(2))]
    figures = []
    for name, main in cases:
        seconds, report = _exhausted(ProgramCase(main, 2), EXHAUSTIVE_LIMIT_S)
        assert report.clean, f"{name}: {report.verdicts[0]}"
        if report.complete:
            figures.append(Figure(f"checker.cpu.exhaustive.{name}", seconds, "s", report.schedules, EXHAUSTIVE_LIMIT_S))
        else:  # no time to compare: it is not known how long all of it takes
            figures.append(Figure(f"checker.cpu.exhaustive.{name}.incomplete", report.schedules, "count", 1))
    return figures


def _exhausted(case: Case, time_s: float) -> tuple[float, Report]:
    """Seconds and outcome of an exhaustive check that is given up after `time_s`, looked at now and then."""
    start, limit = time.process_time(), 64
    while True:
        begun = time.process_time()
        report = exhaust(case, limit)
        end = time.process_time()
        if report.complete or report.verdicts or end - start > time_s / 4:
            return end - begun, report
        limit *= 4


def bench_checker() -> list[Figure]:
    """Microseconds of a tile access after 200 and 20,000 of them; milliseconds of a schedule of an all-reduce; seconds
    of exhaustive checks, whose repetitions are the interleavings that were run."""
    return [*_per_access(), *_schedules(), *_exhaustive()]
