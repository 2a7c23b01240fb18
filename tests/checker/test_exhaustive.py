"""Every schedule that differs, at two ranks: the handshake of pointers, signals, and every protocol of the library."""

import time

import numpy as np
import pytest
from tests.checker.test_library import NAMES, collective

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.checker.program import ProgramCase
from peertile.cli.bench_checker import handshake_rounds
from peertile.cli.bench_protocols import protocols
from peertile.ir.core import Kernel
from peertile.library.fused import FusedProducts
from peertile.library.selection import Algorithm
from peertile.memory_model import Order
from peertile.sim.explore import exhaust
from peertile.sim.verdicts import VerdictKind
from peertile.testing.fences import copy_kernel, synchronising_ops


@pt.kernel
def meet(out: T.Exclusive, x: T.Peer[T.read], ready: T.Signal):
    ready.notify()
    ready.wait()
    out.store(x.at(1 - x.rank).load((0,), (8,)))
    ready.notify()
    ready.wait()


def twice(group) -> None:
    with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
        x, ready, out = heap.zeros((8,), pt.f32), heap.signal(slots=1), pt.empty((8,), pt.f32)
        for turn in range(2):
            x.copy_from(np.full(8, turn + group.rank, np.float32))
            meet(out.partition(8), x, ready).sync()
            assert out.numpy()[0] == turn + 1 - group.rank


@pytest.mark.slow
@pytest.mark.feature("C1", "sim")
@pytest.mark.feature("C8", "sim")
def test_signals_between_hosts_kernels_and_copies_take_few_runs() -> None:
    report = check(twice, 2, exhaustive=True, limit=500)
    assert report.clean, str(report)
    assert report.exploration.complete
    assert report.statement().startswith(f"all schedules: {report.exploration.schedules} runs cover every order")


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.long)])  # `bench checker` runs 2 as well
@pytest.mark.feature("C1", "sim")
@pytest.mark.feature("C8", "sim")
def test_the_handshake_of_two_ranks_is_right_in_every_schedule(rounds: int) -> None:
    """Polls written by hand; each round has some twenty times as many schedules, as a poll may see a later number."""
    start = time.process_time()
    report = check(handshake_rounds(rounds), 2, exhaustive=True, limit=500)
    assert report.clean, str(report)
    assert report.exploration.complete
    assert time.process_time() - start < 60


@pytest.mark.parametrize("order", [Order.RELEASE, Order.ACQUIRE])
def test_the_handshake_with_its_releases_or_acquires_made_relaxed_is_a_race(order: Order) -> None:
    def weaken(kernel: Kernel) -> Kernel:
        copy = copy_kernel(kernel)
        for op in synchronising_ops(copy):
            if op.attrs.get("order") is order:
                op.attrs["order"] = Order.RELAXED
        return copy

    report = exhaust(ProgramCase(handshake_rounds(1), 2, change=weaken), 500)
    assert [verdict.kind for verdict in report.verdicts] == [VerdictKind.RACE]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_protocol_of_the_library_is_right_in_every_schedule(name: str) -> None:
    start = time.process_time()
    report = check(collective(name, n=16, programs=1, turns=1), 2, exhaustive=True, limit=5000)
    assert report.clean, str(report)
    assert report.exploration.complete, report.statement()
    assert time.process_time() - start < 60


OTHERS = {name: main for name, main in protocols().items() if name.startswith(("gpu.", "multicast.", "fused."))}
"""Kernels for GPUs, collectives over one address, fused products, attention, experts."""


def at_once(group) -> None:
    """As on a GPU: a part of the product is begun when all of it is there."""
    a, b = np.ones((2, 3), np.float32), np.ones((3, 3), np.float32)
    with FusedProducts(group, movers=1, workers=1, tile=(2, 4, 4), staging_bytes=1 << 14) as products:
        products._on_gpu, products._worth_waiting = True, 1
        out = pt.zeros((4, 3), pt.f32)
        products.all_gather_matmul(pt.asarray(a + group.rank), pt.asarray(b), out, rows=[2, 2]).sync()
        assert np.array_equal(out.numpy(), np.concatenate([a, a + 1]) @ b)


OTHERS["fused.all_gather_product.at_once"] = at_once


LONGEST = "fused.product_all_reduce.flagged"  # 20 s; `peertile bench checker` runs it too


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n == LONGEST)) for n in OTHERS])
@pytest.mark.feature("C1", "sim")
def test_every_other_protocol_of_the_library_is_right_in_every_schedule(name: str) -> None:
    start = time.process_time()
    report = check(OTHERS[name], 2, exhaustive=True, limit=5000)
    assert report.clean, str(report)
    assert report.exploration.complete, report.statement()
    assert time.process_time() - start < 60


def test_every_way_of_the_library_has_a_protocol_that_is_run_in_every_schedule() -> None:
    ways = {name.split(".")[1] for name in protocols() if name.startswith("all_reduce.")}
    ways |= {name.split(".")[2] for name in protocols() if name.startswith("gpu.")}
    assert {a.value for a in Algorithm} <= ways | {Algorithm.MULTIMEM.value}
    assert "multicast.all_reduce" in OTHERS
