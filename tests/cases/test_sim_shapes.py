"""On the simulated machine: addresses that are not aligned, layouts, uneven and empty shares, very large offsets."""

import numpy as np
import pytest
from sim_cases import faulty, silent

import peertile as pt
import peertile.language as T
from peertile.library.collectives import Collectives
from peertile.library.selection import Algorithm
from peertile.sim.verdicts import VerdictKind


@pytest.mark.slow
@silent()
def test_f115_an_aligned_size_at_a_misaligned_address(group):
    me = group.rank
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        base, target = pt.zeros((64,), pt.f16), pt.zeros((64,), pt.f16)
        x, out = base[1 + me : 41 + me], target[3:43]
        x.copy_from(np.full(40, 1 + me, np.float16))
        c.all_reduce(x, out, algorithm=Algorithm.ONE_SHOT).sync()
        assert target.numpy().tolist() == [0] * 3 + [3] * 40 + [0] * 21


@faulty(VerdictKind.HOST, "ArgumentError: all_reduce: x: expected a contiguous tensor, got strides (6, 2)")
def test_f117_a_strided_input(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        x = pt.zeros((4, 6), pt.f32)
        c.all_reduce(x[:, ::2], pt.zeros((12,), pt.f32)).sync()


@silent()
def test_f117_a_copy_of_a_strided_input(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        x = pt.asarray(np.arange(8, dtype=np.float32).reshape(2, 4).T.copy())
        out = c.all_reduce(x).sync().numpy()
        assert np.array_equal(out, 2 * np.arange(8, dtype=np.float32).reshape(2, 4).T)


@pt.kernel
def far(z: T.Exclusive, x: T.Peer):
    row = T.i64(524288)
    x.at(0).store((row * 4096 // 16,), T.full((16,), 3, T.u8))
    z.store(x.at(0).load((row * 4096 // 16,), (16,)))


@silent(ranks=1)
def test_f118_offsets_beyond_two_to_the_31_into_memory_that_nobody_backs(group):
    with pt.SymmetricHeap(group, (1 << 31) + (1 << 20)) as heap:
        x, z = heap.empty(((1 << 31) + 64,), pt.u8), pt.zeros((16,), pt.u8)
        far(z.partition(16), x).sync()
        assert z.numpy().tolist() == [3] * 16


@pytest.mark.slow
@silent(ranks=3)
def test_f120_gaps_of_a_bucket_poison_nothing(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        bucket = pt.full((21,), float("nan"), pt.f32)
        a, b = bucket[:3], bucket[16:21]
        a.copy_from(np.full(3, 1, np.float32))
        b.copy_from(np.full(5, 2, np.float32))
        c.all_reduce(bucket, bucket, algorithm=Algorithm.ONE_SHOT).sync()
        assert a.numpy().tolist() == [3] * 3
        assert b.numpy().tolist() == [6] * 5


@pytest.mark.slow
@silent(ranks=4)
def test_f121_uneven_shares_round_trip(group):
    me, shares = group.rank, [0, 3, 2, 0]
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        x = pt.asarray(np.full(shares[me], 1 + me, np.float32))
        whole = c.all_gather_v(x, shares).sync()
        assert whole.numpy().tolist() == [2] * 3 + [3] * 2
        back = c.reduce_scatter_v(whole, shares).sync()
        assert back.numpy().tolist() == [4 * (1 + me)] * shares[me]


@pytest.mark.slow
@faulty(VerdictKind.HOST, "ArgumentError: all_to_all: x: expected a number of elements that 2 ranks divide, got 7")
def test_f121_an_uneven_size_where_shares_are_equal(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        c.all_to_all(pt.zeros((7,), pt.f32)).sync()


@pytest.mark.slow
@silent(ranks=2)
def test_f122_zero_elements_are_a_collective_like_any_other(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        x = pt.empty((1, 0, 2), pt.f32)
        for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT):
            assert c.all_reduce(x, algorithm=algorithm).sync().size == 0
        for call in (c.all_gather, c.broadcast):
            assert call(x).sync().size == 0
        assert c.all_reduce(pt.full((3,), 1.0, pt.f32)).sync().numpy().tolist() == [2.0] * 3
