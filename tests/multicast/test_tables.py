"""Every element type, reduction and order of multicast operations: right values, or the stated refusal."""

import itertools

import multicast_ranks as mr
import pytest

import peertile as pt
import peertile.language as T
from peertile.checker.program import ProgramCase
from peertile.ir.ops import BULK_REDUCTIONS, LOAD_REDUCTIONS, MULTICAST_DTYPES, REDUCTIONS
from peertile.sim.explore import explore

R = T.Rmw
LOADS = (T.weak, T.relaxed, T.acquire)
UPDATES = (T.relaxed, T.release)
STORES = (T.weak, T.relaxed, T.release)


def quick_first(name, orders):
    """A parameter whose first value is tried in the quick tier, and the others in the suite: each compiles a kernel for
    every row of a table."""
    first, *others = orders
    values = [first, *(pytest.param(o, marks=pytest.mark.slow) for o in others)]
    return pytest.mark.parametrize(name, values, ids=[o.value for o in orders])


def alone_and_together(orders):
    """Three ranks with each order, and one alone with the first: with the others in the long tier."""
    pairs = [(order, ranks) for ranks in (1, 3) for order in orders]
    marks = {
        **{(order, 1): [pytest.mark.slow, pytest.mark.long] for order in orders[1:]},
        **{(order, 3): [pytest.mark.slow] for order in orders[1:]},
        (orders[0], 1): [pytest.mark.slow],
    }
    return pytest.mark.parametrize(
        ("order", "ranks"), [pytest.param(*p, id=f"{p[0].value}-{p[1]}", marks=marks.get(p, ())) for p in pairs]
    )


def rows(table):
    """(dtype, reduction) of a table in the words of the language: an addition of floats is written T.add."""
    return [
        (name, R.ADD if rmw is R.ADDF else rmw) for rmw in R for name in MULTICAST_DTYPES if name in table.get(rmw, ())
    ]


def spawn(function, ranks, *args):
    return pt.spawn(function, ranks, args, model=pt.RankModel.THREADS, timeout_s=100)


@pytest.mark.sentence("MM-80")
@pytest.mark.slow
@pytest.mark.any_device
@pytest.mark.feature("M1", "cpu")
@pytest.mark.feature("M1", "cuda")
@pytest.mark.feature("M2", "cpu")
@pytest.mark.feature("M2", "cuda")
@pytest.mark.feature("M6", "cpu")
@pytest.mark.feature("M6", "cuda")
@alone_and_together(LOADS)
def test_every_load_reduce(ranks, order, seed):
    cases = [(name, rmw, order) for name, rmw in rows(LOAD_REDUCTIONS)]
    assert all(spawn(mr.load_reduces, ranks, cases, seed))


@pytest.mark.slow
@pytest.mark.any_device
@pytest.mark.feature("M2", "cpu")
@pytest.mark.feature("M2", "cuda")
@pytest.mark.feature("M6", "cpu")
@pytest.mark.feature("M6", "cuda")
@alone_and_together(UPDATES)
def test_every_reduction_into_the_members(ranks, order, seed):
    cases = [(name, rmw, order) for name, rmw in rows(REDUCTIONS)]
    assert all(spawn(mr.reduces, ranks, cases, seed))


@pytest.mark.slow
@pytest.mark.any_device
@pytest.mark.feature("M2", "cpu")
@pytest.mark.feature("M2", "cuda")
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_every_store(ranks, seed):
    cases = list(itertools.product(MULTICAST_DTYPES, STORES))
    assert all(spawn(mr.stores, ranks, cases, seed))


@pytest.mark.slow
@pytest.mark.any_device
@pytest.mark.feature("M4", "cpu")
@pytest.mark.feature("M4", "cuda")
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_every_bulk_store_and_bulk_reduction(ranks, seed):
    assert all(spawn(mr.stores, ranks, [(name, T.weak) for name in MULTICAST_DTYPES], seed, True))
    cases = [(name, rmw, None) for name, rmw in rows(BULK_REDUCTIONS)]
    assert all(spawn(mr.reduces, ranks, cases, seed, True))


@pytest.mark.any_device
@pytest.mark.feature("M5", "cpu")
@pytest.mark.feature("M5", "cuda")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_signals_reach_every_rank(ranks):
    assert all(spawn(mr.signal_words, ranks, ["i32", "u32", "i64", "u64"]))


@pytest.mark.slow
@pytest.mark.any_device
@pytest.mark.feature("M2", "cpu")
@pytest.mark.feature("M2", "cuda")
@pytest.mark.parametrize(("ranks", "name"), [(1, "f32"), (2, "bf16"), (3, "f32"), (4, "u64")])
def test_all_reduce_in_one_address(ranks, name, seed):
    assert all(spawn(mr.all_reduces, ranks, name, 1 << 12, 64, seed))


# ---------------------------------------------------------------- the same on the simulated machine


def simulated(function, *args):
    """One schedule on two simulated ranks; the functions assert the values."""

    def program(group):
        function(group.rank, *args)

    report = explore(ProgramCase(program, 2), 1)
    assert report.clean, "\n".join(map(str, report.verdicts))


@pytest.mark.sentence("MM-80")
@pytest.mark.feature("M1", "sim")
@pytest.mark.feature("M2", "sim")
@quick_first("order", LOADS)
def test_every_load_reduce_in_sim(order, seed):
    simulated(mr.load_reduces, [(name, rmw, order) for name, rmw in rows(LOAD_REDUCTIONS)], seed)


@pytest.mark.slow
@pytest.mark.feature("M2", "sim")
@pytest.mark.feature("M3", "sim")
@quick_first("order", UPDATES)
def test_every_reduction_into_the_members_in_sim(order, seed):
    simulated(mr.reduces, [(name, rmw, order) for name, rmw in rows(REDUCTIONS)], seed)


@pytest.mark.slow
@pytest.mark.feature("M2", "sim")
def test_every_store_in_sim(seed):
    simulated(mr.stores, list(itertools.product(MULTICAST_DTYPES, STORES)), seed)


@pytest.mark.slow
@pytest.mark.feature("M4", "sim")
def test_every_bulk_row_in_sim(seed):
    simulated(mr.stores, [(name, T.weak) for name in MULTICAST_DTYPES], seed, True)
    simulated(mr.reduces, [(name, rmw, None) for name, rmw in rows(BULK_REDUCTIONS)], seed, True)


@pytest.mark.feature("M5", "sim")
def test_signals_reach_every_rank_in_sim():
    simulated(mr.signal_words, ["i32", "u32", "i64", "u64"])
