"""F10: a signal is a type of its own; a data wait on it is refused, its own wait covers the put before it."""

import numpy as np
from case_ranks import spawn
from tests.frontend.helpers import error
from tests.frontend.test_syntax import compiled

import peertile as pt
import peertile.language as T


def test_a_data_wait_on_a_signal_is_a_compile_error():
    assert error(compiled("T.wait_eq(s, 1, (0,))", "s")).message == (
        "T.wait_eq: word: expected a T.Peer parameter or a view of one, got the signal `s`"
    )


@pt.kernel
def with_its_signal(x: T.Peer, s: T.Signal, out: T.Exclusive):
    if x.rank == 0:
        T.put(T.full((64,), 7, T.i64), x, rank=1, signal=s)
    else:
        s.wait(0)
    out.store(x.local.load((0,), (64,)))


def ranks(group):
    with pt.SymmetricHeap(group, 1 << 20) as heap:
        x, s, out = heap.zeros((64,), pt.i64), heap.signal(slots=1), pt.zeros((64,), pt.i64)
        with_its_signal(x, s, out.partition(64)).sync()
        group.barrier("done")
    return out.numpy()


def test_the_wait_of_the_signal_covers_the_put():
    assert np.all(spawn(ranks, 2)[1] == 7)
