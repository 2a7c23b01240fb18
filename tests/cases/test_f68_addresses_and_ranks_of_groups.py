"""F68: a part of a rank is not translated again, and the rank of a put is one of the object's own group."""

from case_ranks import spawn
from tests.frontend.helpers import error
from tests.frontend.test_syntax import compiled

import peertile as pt
import peertile.language as T


def test_a_part_of_a_rank_takes_no_rank():
    assert error(compiled("T.put(z.load(), p.at(1), rank=1)", "z, p")).message == (
        "T.put: rank: expected a T.Peer parameter with it, got a rank's part of `p`; drop rank="
    )


@pt.kernel
def to_the_second(x: T.Peer, s: T.Signal):
    if x.rank == 0:
        T.put(T.full((1,), 42, T.i64), x, rank=1, signal=s)
    else:
        s.wait(0)


def ranks(group):
    pair = group.subgroup((1, 2))
    if pair is None:
        return None
    with pt.SymmetricHeap(pair, 1 << 18) as heap:
        x, s = heap.zeros((1,), pt.i64), heap.signal(slots=1)
        to_the_second.grid(1)(x, s).sync()
        pair.barrier("done")
        return int(x.numpy()[0])


def test_rank_1_of_the_subgroup_is_rank_2_of_the_world():
    assert spawn(ranks, 3) == [None, 0, 42]
