"""Mistakes that a user can make, each as a function, and a program in which one of two ranks makes one. No pytest here.

`peertile run bad_inputs.py --ranks 2 -- NAME`: rank 1 makes the mistake NAME while rank 0 waits for it in a kernel.
"""

import os
import resource
import signal
import sys

import peertile as pt
import peertile.language as T


@pt.kernel
def add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


@pt.kernel
def two_outputs(a: T.Exclusive, b: T.Exclusive):
    a.store(T.zeros(a.tile_shape, a.dtype))
    b.store(T.zeros(b.tile_shape, b.dtype))


@pt.kernel
def matrix(z: T.Exclusive, x: T.Shared):
    z.store(T.reshape(x.load((0, 0), (1, 8)), (8,)))


@pt.kernel
def pick(z: T.Exclusive, x: T.Shared, index: T.i64):
    z.store(x.load((index,), (4,)))


@pt.kernel
def past_the_end(z: T.Exclusive, x: T.Shared):
    z.store(x.load((-1,), (4,)))


@pt.kernel
def with_block(z: T.Exclusive):
    with open("file"):
        z.store(T.zeros(z.tile_shape, z.dtype))


@pt.kernel
def no_name(z: T.Exclusive):
    z.store(T.zeros(z.tile_shape, z.dtype) + not_there)  # noqa: F821


@pt.kernel
def two_types(z: T.Exclusive, n: T.i32):
    if n > 0:
        tile = T.zeros((8,), T.f32)
    else:
        tile = T.zeros((8,), T.i32)
    z.store(tile)


@pt.kernel
def no_such_peer(x: T.Peer, rank: T.i32):
    x.at(rank).store((0,), T.zeros((8,), x.dtype))


@pt.kernel
def no_such_slot(s: T.Signal, slot: T.i32):
    s[slot].notify()


@pt.kernel
def meet(z: T.Exclusive):
    z.store(T.zeros((1,), z.dtype))
    T.sync_programs()


@pt.kernel
def awaits(ready: T.Signal):
    ready.wait()


class Given:
    """What the mistakes start from, made by all ranks."""

    def __init__(self, heap):
        self.heap = heap
        self.x = heap.zeros((8,), pt.f32)
        self.slots = heap.signal(slots=4)


def vector(n=16, dtype=pt.f32):
    return pt.zeros((n,), dtype)


def wrong_dtype(given):
    add(vector().partition(8), vector(dtype=pt.f64), vector()).sync()


def wrong_rank(given):
    matrix(vector(8).partition(8), vector(8)).sync()


def wrong_grid(given):
    add.grid(3)(vector().partition(8), vector(), vector()).sync()


def wrong_partition(given):
    add(vector().partition((4, 4)), vector(), vector()).sync()


def aliasing_outputs(given):
    z = vector()
    two_outputs(z[:8].partition(8), z[4:12].partition(8)).sync()


def out_of_bounds_proven(given):
    past_the_end(vector(4).partition(4), vector(8)).sync()


def out_of_bounds_met(given):
    pick(vector(4).partition(4), vector(8), 2).sync()


def unsupported_python(given):
    with_block(vector(8).partition(8)).sync()


def unknown_name(given):
    no_name(vector(8).partition(8)).sync()


def type_changes_over_a_branch(given):
    two_types(vector(8).partition(8), 1).sync()


def peer_out_of_range(given):
    no_such_peer.grid(1)(given.x, 7).sync()


def slot_out_of_range(given):
    no_such_slot.grid(1)(given.slots, 4).sync()


def too_many_programs(given):
    meet(pt.zeros((1 << 26,), pt.i8).partition(1)).sync()


def heap_too_small(given):
    given.heap.zeros((1 << 20,), pt.f32)


def no_shared_memory(given):
    """What a full /dev/shm does: the segment of a heap cannot grow to its size."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        pt.SymmetricHeap(given.heap.group, 1 << 24)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


COLLECTIVE = {"heap_too_small", "no_shared_memory", "unequal_allocation"}
"""Made by all ranks at once: allocation is collective."""


def unequal_allocation(given):
    given.heap.zeros((8 + 8 * given.heap.group.rank,), pt.f32)


MISTAKES = {
    f.__name__: f
    for f in (
        wrong_dtype, wrong_rank, wrong_grid, wrong_partition, aliasing_outputs, out_of_bounds_proven,
        out_of_bounds_met, unsupported_python, unknown_name, type_changes_over_a_branch, peer_out_of_range,
        slot_out_of_range, unequal_allocation, too_many_programs, heap_too_small, no_shared_memory,
    )
}  # fmt: skip


def main(name):
    group = pt.init()
    with pt.SymmetricHeap(group, 1 << 20) as heap:
        given, ready = Given(heap), heap.signal(slots=1)
        if name in COLLECTIVE or group.rank == 1:
            MISTAKES[name](given)
        else:
            try:
                awaits.grid(1)(ready).sync()
            except pt.errors.PeerFailed:
                os.write(1, b"rank 0 was released\n")
                raise


if __name__ == "__main__":
    main(sys.argv[1])
