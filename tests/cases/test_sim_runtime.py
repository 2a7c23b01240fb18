"""On the simulated machine: memory under queued work, leases, arguments, results, and the end of a program."""

import os
import threading

import numpy as np
import pytest
from sim_cases import faulty, silent

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.checker.program import CannotCheck
from peertile.sim.verdicts import VerdictKind


@pt.kernel
def twice(z: T.Exclusive, x: T.Shared):
    z.store(x.load_like(z) * 2.0)


@pt.kernel
def set_to(z: T.Exclusive, value: T.f32):
    z.store(T.full(z.tile_shape, value, T.f32))


def held(stream):
    """Holds a stream until the function that it gives is called."""
    word = pt.zeros((1,), pt.u32)
    future = pt.op.wait_eq(word, 1).submit(stream)

    def let_go():
        pt.op.set_signal(word, 1).sync_on(pt.current_device().stream("release"))
        future.wait()

    return let_go


def copied(group, raw):
    stream = pt.current_device().stream("copies")
    x = pt.full((16,), 7, pt.f32)
    let_go = held(stream)
    future = pt.op.copy(x).submit(stream)
    if raw:
        pt.current_device().driver.free(x.address)
    del x
    others = [pt.full((16,), 9, pt.f32) for _ in range(3)]
    let_go()
    assert (future.wait() == 7).all()
    assert len(others) == 3


@faulty(VerdictKind.LIFETIME, "copies from (weak) memory of rank 0", "was freed by the host of rank 0", ranks=1)
def test_f89_a_source_is_given_back_before_its_copy(group):
    copied(group, True)


@silent(ranks=1)
def test_f89_a_temporary_lives_until_its_copy_is_over(group):
    copied(group, False)


def queued(group, raw):
    stream = pt.current_device().stream("queue")
    x, y = pt.full((16,), 4, pt.f32), pt.zeros((16,), pt.f32)
    let_go = held(stream)
    twice(y.partition(16), x).submit(stream)
    if raw:
        pt.current_device().driver.free(x.address)
    del x
    z = pt.full((16,), 100, pt.f32)
    let_go()
    stream.sync()
    assert (y.numpy()[0], z.numpy()[0]) == (8, 100)


@faulty(VerdictKind.LIFETIME, "twice on rank 0", ranks=1)
def test_f91_queued_work_with_a_bare_pointer(group):
    queued(group, True)


@silent(ranks=1)
def test_f91_queued_work_holds_its_memory(group):
    queued(group, False)


def test_f93_f94_threads_are_refused_with_their_line() -> None:
    def main(group):
        threading.Thread(target=print).start()

    with pytest.raises(CannotCheck, match=r"threading\.Thread.*test_sim_runtime\.py"):
        check(main, 1, schedules=1)


@silent(ranks=1)
def test_f96_what_reads_memory_comes_after_what_is_queued_on_it(group):
    x, y = pt.zeros((16,), pt.f32), pt.zeros((16,), pt.f32)
    for k in (2, 3):
        pt.op.fill(x, k).submit()
        twice(y.partition(16), x).submit()
        assert y.numpy().tolist() == [2 * k] * 16


@silent(ranks=1)
def test_f97_each_launch_reads_its_own_arguments(group):
    streams = [pt.current_device().stream(f"s{k}") for k in range(2)]
    outs = [pt.zeros((4,), pt.f32) for _ in streams]
    going = [held(s) for s in streams]
    futures = [
        set_to(out.partition(4), float(k)).submit(s) for k, (out, s) in enumerate(zip(outs, streams, strict=True))
    ]
    for let_go in reversed(going):
        let_go()
    for future in futures:
        future.wait()
    assert [out.numpy()[0] for out in outs] == [0, 1]


@silent(ranks=1)
def test_f98_the_host_gets_results_and_not_what_was_there_before(group):
    stream = pt.current_device().stream("s")
    a = pt.zeros((16,), pt.f32)
    pt.op.fill(a, 9).submit(stream)
    del a
    b = pt.asarray(np.zeros(16, np.float32))
    x = pt.zeros((4,), pt.f32)
    future = pt.op.fill(x, 3).then(lambda: pt.op.copy(x)).map(lambda h: float(h[0])).submit(stream)
    assert future.wait() == 3.0
    assert not b.numpy().any()


def test_f100_a_fork_is_refused() -> None:
    def main(group):
        os.fork()

    with pytest.raises(CannotCheck, match="fork"):
        check(main, 1, schedules=1)


@faulty(VerdictKind.HOST, "UsageError", "closed", ranks=1)
def test_f101_memory_of_a_heap_that_was_closed(group):
    heap = pt.SymmetricHeap(group, 1 << 12)
    heap.zeros((4,), pt.f32)
    heap.close()
    heap.zeros((4,), pt.f32)


@silent()
def test_f101_what_is_left_at_the_end_is_nobodys_fault(group):
    heap = pt.SymmetricHeap(group, 1 << 12)
    kept = heap.zeros((4,), pt.f32)
    assert kept.numpy().tolist() == [0] * 4
