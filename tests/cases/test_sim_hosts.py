"""On the simulated machine: launches that wait for each other, calls that wait for running work, ranks that do not
do the same."""

import numpy as np
import pytest
from sim_cases import faulty, silent

import peertile as pt
import peertile.language as T
from peertile.library.collectives import Collectives
from peertile.library.selection import Algorithm
from peertile.sim.verdicts import VerdictKind


@pt.kernel
def schedulers(words: T.Peer):
    i = T.program_id(0)
    T.st(words.local, 1, (1 + i,), order=T.release)
    T.wait_ge(words.local, 1, (0,))


@pt.kernel
def workers(words: T.Peer, count: T.i64):
    i = T.program_id(0)
    for k in T.range(count):
        T.wait_ge(words.local, 1, (1 + k,))
    T.st(words.local, 1, (8 + i,), order=T.release)
    if i == 0:
        for k in T.range(T.num_programs(0)):
            T.wait_ge(words.local, 1, (8 + k,))
        T.st(words.local, 1, (0,), order=T.release)


def grids(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        words = heap.zeros((16,), pt.i64)
        a, b = pt.current_device().stream("a"), pt.current_device().stream("b")
        futures = [workers.grid(3)(words, 2).submit(a), schedulers.grid(2)(words).submit(b)]
        for future in futures:
            future.wait()


@faulty(VerdictKind.DEADLOCK, "a place to run", "words", ranks=1, resident=3)
def test_f45_two_grids_that_need_each_other_do_not_both_fit(group):
    grids(group)


@silent(ranks=1, resident=5)
def test_f45_room_for_both_grids(group):
    grids(group)


@pt.kernel
def meet(ready: T.Signal):
    ready.notify()
    ready.wait()


@faulty(VerdictKind.LAUNCH, "LeaseError", "meet on b", "meet on a", "still uses it as a channel")
def test_f48_one_channel_on_two_streams_at_once(group):
    a, b = pt.current_device().stream("a"), pt.current_device().stream("b")
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        ready = heap.signal(slots=1)
        if group.rank == 0:
            first = meet.grid(1)(ready).submit(a)
            meet.grid(1)(ready).submit(b)
            first.wait()
        group.barrier("over")


@silent()
def test_f48_a_channel_for_each_stream(group):
    a, b = pt.current_device().stream("a"), pt.current_device().stream("b")
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        one, two = heap.signal(slots=1), heap.signal(slots=1)
        order = ((one, a), (two, b)) if group.rank == 0 else ((two, b), (one, a))
        for future in [meet.grid(1)(ready).submit(stream) for ready, stream in order]:
            future.wait()


@pt.kernel
def wait_for_word(word: T.Peer):
    T.wait_ge(word.local, 1, (0,))


@pt.kernel
def set_word(word: T.Peer):
    T.st(word.local, 1, (0,), order=T.release)


@faulty(VerdictKind.DEADLOCK, "the host thread of rank 0 waits for wait_for_word", "word[0] on rank 0", ranks=1)
def test_f50_the_host_waits_for_running_work_before_it_launches_what_ends_it(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        word = heap.zeros((1,), pt.i64)
        spinning = pt.current_device().stream("spinning")
        wait_for_word.grid(1)(word).submit(spinning)
        spinning.sync()  # as an allocation that waits for an idle device would
        set_word.grid(1)(word).sync()


@silent(ranks=1)
def test_f50_streams_memory_and_launches_are_had_while_a_kernel_spins(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        word = heap.zeros((1,), pt.i64)
        running = wait_for_word.grid(1)(word).submit(pt.current_device().stream("spinning"))
        other = pt.current_device().stream("another")
        made = [pt.zeros((1000,), pt.f32) for _ in range(3)]
        del made
        other.record().sync()
        set_word.grid(1)(word).sync_on(other)
        running.wait()


@faulty(VerdictKind.HOST, "UsageError", "a runtime call inside a completion callback", ranks=1)
def test_f51_a_callback_that_calls_the_runtime(group):
    x = pt.zeros((4,), pt.f32)
    pt.op.host(lambda: pt.op.fill(x, 1).sync()).sync()


@silent(ranks=1)
def test_f51_a_callback_that_leaves_a_note(group):
    x, notes = pt.zeros((4,), pt.f32), []
    pt.op.host(lambda: notes.append("over")).sync()
    if notes:
        pt.op.fill(x, 1).sync()
    assert x.numpy().tolist() == [1] * 4


@silent()
def test_f56_handles_dropped_in_any_order_block_nobody(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        a, b = heap.zeros((64,), pt.f32), heap.zeros((64,), pt.f32)
        if group.rank == 0:
            del b
            del a
        else:
            circle = [b]
            circle.append(circle)
            del a, b, circle
        group.barrier("dropped")
        c = heap.zeros((64,), pt.f32)
        assert len(set(group.exchange(str(c.offset).encode(), "where"))) == 1


@faulty(VerdictKind.DEADLOCK, "ready.arrived[0, 1] on rank 0", "nobody has written it")
def test_f64_a_signal_that_is_lost_is_named_by_its_word(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        ready = heap.signal(slots=1)
        if group.rank == 0:
            meet.grid(1)(ready).sync()
        else:
            group.barrier("never")


@pytest.mark.slow
@silent(ranks=4)
def test_f65_fewer_elements_than_ranks(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        for n, algorithm in ((1, Algorithm.TWO_SHOT), (3, Algorithm.RING)):
            out = c.all_reduce(pt.full((n,), 1.0 + group.rank, pt.f32), algorithm=algorithm).sync().numpy()
            assert out.tolist() == [10.0] * n


@faulty(VerdictKind.COLLECTIVE, "SymmetryError", "rank 0", "rank 1")
def test_f81_ranks_that_register_different_numbers_of_buffers(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        heap.zeros((16,), pt.f32)
        if group.rank == 0:
            heap.zeros((16,), pt.f32)


@pytest.mark.slow
@silent()
def test_f81_what_is_recorded_does_not_depend_on_addresses(group):
    stream = pt.current_device().stream("graph")
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        junk = [pt.zeros((8 * (1 + 3 * group.rank),), pt.f32) for _ in range(1 + group.rank)]
        x, out = pt.full((8,), 1.0, pt.f32), pt.zeros((8,), pt.f32)
        graph = c.all_reduce(x, out, algorithm=Algorithm.ONE_SHOT).graph_on(stream)
        for _ in range(2):
            graph.launch().sync_on(stream)
        assert out.numpy().tolist() == [2.0] * 8
        del junk


@faulty(VerdictKind.HOST, "rank 1 raised ZeroDivisionError")
def test_f130_a_rank_that_fails_while_another_one_waits_for_it(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        ready = heap.signal(slots=1)
        if group.rank == 1:
            raise ZeroDivisionError("the original cause")
        meet.grid(1)(ready).sync()


@silent()
def test_f130_the_values_are_there_when_nobody_fails(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        meet.grid(1)(heap.signal(slots=1)).sync()
        assert np.array_equal(pt.zeros((2,), pt.f32).numpy(), [0, 0])
