"""F18: barriers re-entered at once, and again by the next kernel, never lose a round."""

import pytest
from case_ranks import alone

import peertile as pt
import peertile.language as T

pytestmark = pytest.mark.any_device


@pt.kernel
def back_to_back(words: T.Peer, out: T.Exclusive, rounds: T.i64, stall: T.i64):
    p, n = T.program_id(0), T.num_programs(0)
    wrong, burnt = T.i64(0), T.i64(1)
    for k in T.range(rounds):
        if p == stall:
            for _ in T.range(200):
                burnt = burnt * 3 + 1
        words.local.store((p,), T.full((1,), k, T.i64))
        T.sync_programs()
        seen = T.sum(words.local.load(((p + 1) % n,), (1,)), axis=0)
        wrong += T.where(seen == k, 0, 1)
        T.sync_programs()
    out.store(T.full((1,), wrong + T.minimum(burnt * 0, 0), T.i64))


@pytest.mark.sentence("SG-24")
@pytest.mark.sentence("SG-20")
def test_a_thousand_rounds_of_two_barriers_in_each_of_three_kernels():
    with alone() as heap:
        words, out = heap.zeros((7,), pt.i64), pt.full((7,), -1, pt.i64)
        for stall in (0, 3, 6):
            back_to_back(words, out.partition(1), 1000, stall).sync()
            assert out.numpy().tolist() == [0] * 7
