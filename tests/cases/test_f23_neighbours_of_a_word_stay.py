"""F23: an add behind a put changes one word: not its neighbours, and not the payload."""

import pytest
from case_ranks import spawn

import peertile as pt
import peertile.language as T

pytestmark = pytest.mark.any_device


@pt.kernel
def put_and_add(x: T.Peer, f: T.Peer, ready: T.Signal):
    if x.rank == 0:
        T.put(T.full((16,), 9, T.i64), x, rank=1)
        T.atom_add(f, 5, (2,), rank=1)
        ready.notify(to=1)
    else:
        ready.wait(0)


def ranks(group):
    with pt.SymmetricHeap(group, 1 << 20) as heap:
        x, f, ready = heap.zeros((16,), pt.i64), heap.zeros((4,), pt.i64), heap.signal(slots=1)
        f.copy_from([7] * 4)
        group.barrier("filled")
        put_and_add.grid(1)(x, f, ready).sync()
        group.barrier("done")
        return f.numpy().tolist(), x.numpy().tolist()


@pytest.mark.feature("P4", "cpu")
def test_the_third_word_alone_grows():
    assert spawn(ranks, 2)[1] == ([7, 7, 12, 7], [9] * 16)
