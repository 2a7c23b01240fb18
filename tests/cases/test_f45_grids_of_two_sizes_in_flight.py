"""Two kernels whose programs wait, one of many small programs and one of few, started together in either order:
each launch has places of its own, so none starves the other."""

import numpy as np
import pytest
from host_cases import device, values

import peertile as pt
import peertile.language as T

pytestmark = pytest.mark.any_device


@pt.kernel
def schedulers(word: T.Peer):
    i = T.program_id(0)
    T.st(word.local, T.i32(1), index=(1 + i,), order=T.release)
    T.wait_eq(word.local, T.i32(1), index=(0,))


@pt.kernel
def workers(word: T.Peer, count: T.i64):
    for k in T.range(count):
        T.wait_eq(word.local, T.i32(1), index=(1 + k,))
    T.sync_programs()
    if T.program_id(0) == 0:  # one writer for a word
        T.st(word.local, T.i32(1), index=(0,), order=T.release)


@pt.kernel
def square(z: T.Exclusive, x: T.Shared):
    z.store(T.mma(x.load((0, 0), (64, 64)), x.load((0, 0), (64, 64))))


@pytest.mark.parametrize("workers_first", [True, False])
def test_grids_that_wait_for_each_other_run_in_either_order(workers_first):
    group = pt.init()
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        word = heap.zeros((300,), pt.i32)
        word.copy_from(np.ones(300, np.int32))
        workers.grid(7)(word, 256).sync()  # once each, as a GPU loads no code while one waits for the other
        schedulers.grid(256)(word).sync()
        word.copy_from(np.zeros(300, np.int32))
        a, b = device().stream(), device().stream()
        launches = [(workers.grid(7)(word, 256), a), (schedulers.grid(256)(word), b)]
        futures = [op.submit(s) for op, s in (launches if workers_first else reversed(launches))]
        try:
            for future in futures:
                future.wait(30)
        except pt.errors.PeertileError:  # a failure is this test's own, not of all that use the group behind it
            group.recover(timeout_s=20)
            raise
        assert sum(values(word.local)) == 257


def test_what_needs_shared_memory_starts_beside_a_grid_that_waits_everywhere():
    """On a GPU the first kernel on a multiprocessor settles how much of it is shared memory while it runs there."""
    group = pt.init()
    x, z = pt.ones((64, 64), pt.f16), pt.zeros((64, 64), pt.f32)
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        word = heap.zeros((300,), pt.i32)
        word.copy_from(np.ones(300, np.int32))
        workers.grid(7)(word, 256).sync()
        schedulers.grid(256)(word).sync()
        square(z.partition((64, 64)), x).sync()
        word.copy_from(np.zeros(300, np.int32))
        pt.op.fill(z, 0).sync()
        a, b = device().stream(), device().stream()
        waiting = schedulers.grid(256)(word).submit(a)
        try:
            square(z.partition((64, 64)), x).sync_on(b)
            assert set(np.ravel(z.numpy())) == {64}
            workers.grid(7)(word, 256).sync_on(b)
            waiting.wait(30)
        except pt.errors.PeertileError:
            group.recover(timeout_s=20)
            raise
