"""F67: a grid with more programs than an object has words is refused before anything runs; its neighbour stays."""

import pytest
from case_ranks import alone

import peertile as pt
import peertile.language as T
from peertile.errors import LaunchError, OutOfBounds

pytestmark = pytest.mark.any_device


@pt.kernel
def lock_each(locks: T.Signal):
    locks.notify(to=locks.rank)


@pt.kernel
def lock_words(locks: T.Peer):
    T.st(locks, 1, (T.program_id(0),))


@pt.kernel
def meets(b: T.Barrier):
    b.sync()


def test_slots_programs_and_words_are_counted_before_the_launch():
    with alone() as heap:
        locks, b = heap.signal(slots=736), heap.barrier(programs=736)
        words, neighbour = heap.zeros((736,), pt.i32), heap.empty((1000,), pt.i32)
        neighbour.copy_from([7] * 1000)
        with pytest.raises(LaunchError, match=r"the grid has 1472 programs.* the signal locks has 736 slots"):
            lock_each.grid(1472)(locks).sync()
        with pytest.raises(LaunchError, match="the grid has 1472 programs, but the barrier b was made for 736"):
            meets.grid(1472)(b)
        with pytest.raises(OutOfBounds, match=r"T.st: element index 0 of `locks` out of range: got .*, limit 736"):
            lock_words.grid(1472)(words).sync()
        assert set(neighbour.numpy().tolist()) == {7}
