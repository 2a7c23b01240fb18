"""The choice between staging through the caches and around them, and what is kept of calls."""

import gc

import library_ranks as ranks
import numpy as np
import pytest

import peertile as pt
from peertile.library.collectives import KEPT_CALLS, Collectives
from peertile.library.selection import Algorithm
from peertile.library.staging import AGAIN, EACH, Staging


def drive(staging, through, around, calls):
    """Runs calls that take `through` or `around` ns; which went around."""
    ways = []
    for _ in range(calls):
        way = staging.begin()
        staging.took(around if way else through)
        ways.append(way)
    return ways


def test_both_ways_are_tried_and_the_faster_one_is_kept():
    for through, around in ((100, 60), (60, 100)):
        ways = drive(Staging(), through, around, AGAIN)
        assert ways[: 2 * EACH] == [False] * EACH + [True] * EACH
        assert ways[2 * EACH :] == [around < through] * (AGAIN - 2 * EACH)


def test_a_machine_that_changes_its_mind_is_followed():
    staging = Staging()
    drive(staging, 100, 60, AGAIN)
    assert staging.around
    assert drive(staging, 60, 100, AGAIN)[2 * EACH :] == [False] * (AGAIN - 2 * EACH)


def test_one_disturbed_call_decides_nothing():
    staging = Staging()
    for ns in (100, 100, 9000, 60):
        staging.begin()
        staging.took(ns)
    assert staging.around


def test_equal_times_go_through_the_caches():
    assert drive(Staging(), 50, 50, AGAIN)[-1] is False


# ---------------------------------------------------------------- both ways give the same


def both_ways(group, counts):
    me, n = group.rank, group.size
    with Collectives(group) as comm:
        for count in counts:
            parts = [ranks.vector(r, count) for r in range(n)]
            expected = ranks.fold(parts, ranks.ReduceOp.SUM)
            x, out = pt.zeros((count,), pt.f32), ranks.junk(count, pt.f32)
            ways = set()
            for k in range(2 * EACH + 2):
                x.copy_from(parts[me])
                op = comm.all_reduce(x, out if k % 2 else x, algorithm=Algorithm.PIPELINED)
                ways.add(comm._staging[(4 * count).bit_length()].begin())
                ranks.same(op.sync().numpy(), expected, f"{count}, call {k}")
            assert ways == {False, True}
    return True


@pytest.mark.slow
@pytest.mark.feature("A1", "cpu")
@pytest.mark.parametrize("n", [2, 3])
def test_what_arrives_does_not_depend_on_the_way(n):
    assert all(pt.spawn(both_ways, n, ((1, 1000, 300_001),), model=pt.RankModel.THREADS, timeout_s=100))


def ends_differ(group):
    """Zeros of both signs and NaN of different bits: what rank order decides must be the same on both ranks."""
    bits = np.array([0x7FC00001, 0x00000000, 0x80000000, 0x7FC00003], np.uint32)
    other = np.array([0x7FC00002, 0x80000000, 0x00000000, 0x3F800000], np.uint32)
    x = pt.asarray((other if group.rank else bits).view(np.float32))
    with Collectives(group) as comm:
        return [
            comm.all_reduce(x, op=op, algorithm=Algorithm.PIPELINED).sync().numpy().tobytes() for op in ranks.ReduceOp
        ]


@pytest.mark.slow
def test_ranks_agree_to_the_bit_where_the_order_of_operands_matters():
    first, second = pt.spawn(ends_differ, 2, model=pt.RankModel.THREADS, timeout_s=100)
    assert first == second


# ---------------------------------------------------------------- kept calls


@pytest.mark.slow
def test_a_call_is_kept_no_longer_than_its_tensors():
    with Collectives(pt.init()) as comm:
        x = pt.zeros((1, 1 << 20), pt.f32)
        out = pt.empty((1 << 20,), pt.f32)
        for algorithm in (None, Algorithm.TWO_SHOT, Algorithm.PIPELINED):
            assert comm.all_reduce(x, out, algorithm=algorithm).sync() is out
            assert comm.all_reduce(x, x, algorithm=algorithm).sync() is x
        assert comm.broadcast(x).sync() is x
        assert len(comm._kept) == 7
        del out
        gc.collect()
        assert len(comm._kept) == 4
        held = pt.current_device().memory().in_use
        del x
        gc.collect()
        assert not comm._kept
        assert pt.current_device().memory().in_use <= held - (4 << 20)


def test_the_number_of_kept_calls_is_bounded():
    with Collectives(pt.init()) as comm:
        tensors = [pt.zeros((4,), pt.f32) for _ in range(KEPT_CALLS + 5)]
        for x in tensors:
            comm.all_reduce(x, x).sync()
        assert len(comm._kept) == KEPT_CALLS
