"""On the simulated machine: what is too small, lies elsewhere, or belongs to another group."""

import numpy as np
import pytest
from sim_cases import faulty, silent

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.checker.program import CannotCheck
from peertile.library.collectives import Collectives
from peertile.library.selection import Algorithm
from peertile.runtime.driver import ShareKind
from peertile.sim.verdicts import VerdictKind


@pt.kernel
def lock_words(locks: T.Peer):
    T.st(locks, 1, (T.program_id(0),))


def locks(group, programs):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        words, neighbour = heap.zeros((6,), pt.i64), heap.empty((16,), pt.i64)
        neighbour.copy_from([7] * 16)
        lock_words.grid(programs)(words).sync()
        assert neighbour.numpy().tolist() == [7] * 16
        assert words.numpy().tolist() == [1] * 6


@faulty(VerdictKind.KERNEL, "element index 0 of `locks` out of range", "limit 6", "of lock_words on rank", ranks=1)
def test_f67_more_programs_than_words(group):
    locks(group, 12)


@silent(ranks=1)
def test_f67_a_word_for_each_program(group):
    locks(group, 6)


@pt.kernel
def lock_each(ready: T.Signal):
    ready.notify(to=ready.rank)


@faulty(VerdictKind.LAUNCH, "LaunchError", "the grid has 12 programs", "has 6 slots", ranks=1)
def test_f67_more_programs_than_slots_of_a_signal(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        lock_each.grid(12)(heap.signal(slots=6)).sync()


@pt.kernel
def translated_twice(x: T.Peer, ready: T.Signal):
    T.put(T.full((1,), 42, T.i64), x.at(1), rank=1, signal=ready)


@faulty(VerdictKind.HOST, "CompileError", "T.put: rank: expected a T.Peer parameter with it, got a rank's part of `x`")
def test_f68_an_address_that_is_translated_already(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        translated_twice.grid(1)(heap.zeros((1,), pt.i64), heap.signal(slots=1)).sync()


@pt.kernel
def to_the_second(x: T.Peer, ready: T.Signal):
    if x.rank == 0:
        T.put(T.full((1,), 42, T.i64), x, rank=1, signal=ready)
    else:
        ready.wait(0)


@silent(ranks=3)
def test_f68_rank_1_of_a_subgroup_is_rank_2_of_the_world(group):
    pair = group.subgroup((1, 2))
    if pair is None:
        return
    with pt.SymmetricHeap(pair, 1 << 14) as heap:
        x, ready = heap.zeros((1,), pt.i64), heap.signal(slots=1)
        to_the_second.grid(1)(x, ready).sync()
        pair.barrier("done")
        assert x.numpy()[0] == (42 if group.rank == 2 else 0)


@pt.kernel
def into_a_window(x: T.Peer, v: T.Shared, ready: T.Signal, WAY: T.Const[int]):
    if x.rank == 0:
        window = x.at(1).slice((64,), (64,))
        if WAY == 0:
            T.put(v.load((0,), (16,)), window, (1,))
        elif WAY == 1:
            T.put(v, window.slice((16,), (16,)))
        else:
            for k in T.range(16):
                T.st(window, T.sum(v.load((k,), (1,)), axis=0), (16 + k,))
        ready.notify(to=1)
    else:
        ready.wait(0)


@silent()
def test_f69_every_way_into_a_window_counts_from_its_beginning(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        heap.empty((100,), pt.u8)
        for way in range(3):
            x, ready = heap.zeros((128,), pt.i64), heap.signal(slots=1)
            into_a_window.grid(1)(x, pt.asarray(np.arange(1, 17)), ready, WAY=way).sync()
            group.barrier("done")
            expected = np.zeros(128, np.int64)
            if group.rank == 1:
                expected[80:96] = np.arange(1, 17)
            assert np.array_equal(x.numpy(), expected)


def test_f71_memory_that_the_device_cannot_register_is_refused_when_it_is_made() -> None:
    def main(group):
        pt.SymmetricHeap(group, 1 << 14, path=ShareKind.FD)

    with pytest.raises(CannotCheck, match="memory path: expected fd, which rank 0 on sim:0 cannot share by"):
        check(main, 2, schedules=1)


@pt.kernel
def reduce_far(views: T.Peer, to: T.i64):
    T.atom_add(views, 1, (1,), rank=to)


@faulty(VerdictKind.KERNEL, "rank", "reduce_far on rank", "limit 2")
def test_f72_a_peer_that_cannot_be_reached_is_named_at_the_access(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        reduce_far.grid(1)(heap.zeros((4,), pt.i64), 3).sync()


@silent(ranks=1)
def test_f74_graph_after_graph_nothing_more_is_held(group):
    stream = pt.current_device().stream("graphs")
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        before = None
        for k in range(8):
            x = pt.full((8,), 1.0, pt.f32)
            graph = c.all_reduce(x, algorithm=Algorithm.ONE_SHOT).graph_on(stream)
            graph.launch().sync_on(stream)
            del graph, x
            if k == 1:
                before = pt.current_device().memory().in_use
        assert pt.current_device().memory().in_use == before


@pytest.mark.slow
@faulty(VerdictKind.HOST, "ArgumentError: all_reduce: ONE_SHOT: expected up to 2048 bytes, got 2052")
def test_f75_a_call_larger_than_its_share_of_the_workspace(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        c.all_reduce(pt.zeros((513,), pt.f32), algorithm=Algorithm.ONE_SHOT).sync()


@pytest.mark.slow
@silent()
def test_f75_calls_around_the_capacity_are_right_on_all_ranks(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        for n in (511, 512, 513):
            out = c.all_reduce(pt.full((n,), 1.0 + group.rank, pt.f32)).sync().numpy()
            assert np.array_equal(out, np.full(n, 3.0))


@pt.kernel
def staged_sum(stage: T.Peer, out: T.Exclusive, ready: T.Signal, value: T.i64, first: T.i64, second: T.i64):
    # The sum of two ranks through a stage that lies in the memory of both; two groups may name the same stage.
    stage.local.store((0,), T.full((16,), value, T.i64))
    ready.notify()
    ready.wait()
    out.store(stage.at(first).load((0,), (16,)) + stage.at(second).load((0,), (16,)))
    ready.notify()
    ready.wait()


def two_groups(group, shared):
    # Rank 0 is in both groups and runs them on two streams.
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        stages = [heap.zeros((16,), pt.i64) for _ in range(2)]
        signals = [heap.signal(slots=1) for _ in range(2)]
        running = []
        for k in range(2):
            out = pt.empty((16,), pt.i64)
            stage = stages[0 if shared else k]
            op = staged_sum(stage, out.partition(16), signals[k], 1 + k, 0, 1)
            running.append((k, out, op.submit(pt.current_device().stream(f"group {k}"))))
        for k, out, future in running:
            future.wait()
            assert shared or out.numpy().tolist() == [2 + 2 * k] * 16


@faulty(VerdictKind.RACE, "stage of rank", "of staged_sum on rank")
def test_f76_one_workspace_for_two_groups(group):
    two_groups(group, True)


@silent()
def test_f76_a_workspace_for_each_group(group):
    two_groups(group, False)


@pytest.mark.slow
@silent(ranks=3)
def test_f76_communicators_of_overlapping_groups(group):
    evens = group.subgroup((0, 2))
    groups = [g for g in (group, evens) if g is not None]
    made = [Collectives(g, programs=1, slot_bytes=4096) for g in groups]
    for _ in range(2):
        for g, c in zip(groups, made, strict=True):
            out = c.all_reduce(pt.full((8,), 1.0 + group.rank, pt.f32), algorithm=Algorithm.ONE_SHOT).sync().numpy()
            assert out.tolist() == [6.0 if g is group else 4.0] * 8
    for c in reversed(made):
        c.close()
