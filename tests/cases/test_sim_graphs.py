"""On the simulated machine: what a graph bakes in, what it owns, and what happens beside its capture and its replays."""

import gc
import itertools

import numpy as np
import pytest
from sim_cases import faulty, silent

import peertile as pt
import peertile.language as T
from peertile.library.collectives import Collectives
from peertile.library.selection import Algorithm
from peertile.sim.verdicts import VerdictKind


@pt.kernel
def add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


@pt.kernel
def swap(out: T.Exclusive, x: T.Shared, stage: T.Peer, flag: T.Peer, turn: T.Peer, slot: T.i64, BAKED: T.Const[bool]):
    # One exchange. BAKED: slot and colour of the flag are numbers of the host; else they count in device memory.
    me = stage.rank
    e = T.ld(turn.local, (0,)) + 1
    T.st(turn.local, e, (0,))
    at, colour = e % 2, e
    if BAKED:
        at, colour = slot, T.i64(1)
    stage.local.store((at,), x.load((0,), (16,)))
    T.st(flag, colour, (0,), rank=1 - me, order=T.release)
    T.wait_ge(flag, colour, (0,))
    out.store(stage.at(1 - me).load((at,), (16,)))


def replayed(group, baked, rounds=1):
    stream, me = pt.current_device().stream("graph"), group.rank
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        stage, flag, turn = heap.zeros((32,), pt.i64), heap.zeros((1,), pt.i64), heap.zeros((1,), pt.i64)
        x, out = pt.zeros((16,), pt.i64), pt.zeros((16,), pt.i64)
        with pt.capture(stream) as scope:
            for k in range(rounds):
                scope.record(swap(out.partition(16), x, stage, flag, turn, k % 2, BAKED=baked))
        for replay in (100, 200):
            pt.op.copy(np.full(16, replay + me), to=x).sync_on(stream)
            scope.graph.launch().sync_on(stream)
            assert baked or out.numpy().tolist() == [replay + 1 - me] * 16


@pytest.mark.slow
@faulty(VerdictKind.RACE, "stage of rank", "swap on rank 0", "swap on rank 1")
def test_f77_the_colour_of_a_round_is_baked_into_the_graph(group):
    replayed(group, True)


@silent()
def test_f77_epochs_count_in_device_memory(group):
    replayed(group, False)


@faulty(VerdictKind.RACE, "stage of rank", "swap on rank 0", "swap on rank 1")
def test_f78_an_odd_number_of_rounds_with_slots_chosen_at_capture(group):
    replayed(group, True, 3)


@silent()
def test_f78_odd_numbers_of_rounds_with_slots_chosen_on_the_device(group):
    replayed(group, False, 3)


@silent()
def test_f78_collectives_in_odd_and_even_numbers(group):
    stream = pt.current_device().stream("graph")
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        x, out = pt.full((8,), 1.0, pt.f32), pt.zeros((8,), pt.f32)
        for rounds in (1, 2):
            with pt.capture(stream) as scope:
                for _ in range(rounds):
                    scope.record(c.all_reduce(x, out, algorithm=Algorithm.ONE_SHOT))
            for _ in range(2):
                pt.op.fill(out, -1).sync_on(stream)
                scope.graph.launch().sync_on(stream)
                assert out.numpy().tolist() == [2.0] * 8


@faulty(VerdictKind.HOST, "UsageError: early: expected a capture that has ended", ranks=1)
def test_f79_a_graph_before_its_capture_has_ended(group):
    x = pt.zeros((4,), pt.f32)
    with pt.capture(pt.current_device().stream("s"), "early") as scope:
        scope.record(pt.op.fill(x, 1))
        scope.graph.launch()


@silent(ranks=1)
def test_f79_a_graph_after_its_capture_has_ended(group):
    x, stream = pt.zeros((4,), pt.f32), pt.current_device().stream("s")
    with pt.capture(stream, "in time") as scope:
        scope.record(pt.op.fill(x, 1))
    scope.graph.launch().sync_on(stream)
    assert x.numpy().tolist() == [1] * 4


def kept(group, close):
    stream, out = pt.current_device().stream("s"), pt.zeros((4,), pt.f32)
    with pt.SymmetricHeap(group, 1 << 12) as heap:
        b = heap.zeros((4,), pt.f32)
        b.copy_from([5, 5, 5, 5])
        graph = pt.op.copy(b.local, to=out).graph_on(stream, "the graph")
        if close:
            heap.free(b)
        graph.launch().sync_on(stream)
        assert out.numpy().tolist() == [5] * 4


@faulty(VerdictKind.HOST, "UsageError: the graph (replay 1): tensor f32[4] was freed", ranks=1)
def test_f82_a_replay_of_what_was_given_back(group):
    kept(group, True)


@silent(ranks=1)
def test_f82_a_graph_holds_what_it_was_recorded_with(group):
    kept(group, False)
    stream, out = pt.current_device().stream("s"), pt.zeros((4,), pt.f32)

    def make():
        return pt.op.copy(pt.full((4,), 5, pt.f32), to=out).graph_on(stream)

    graph = make()
    junk = [pt.full((4,), 9, pt.f32) for _ in range(4)]
    graph.launch().sync_on(stream)
    assert (out.numpy().tolist(), len(junk)) == ([5] * 4, 4)


@silent(ranks=1)
def test_f83_replays_in_every_order_are_right(group):
    stream = pt.current_device().stream("s")
    workspace, x = pt.zeros((4,), pt.f32), pt.ones((4,), pt.f32)

    def recorded(by):
        with pt.capture(stream) as scope:
            temporary = scope.record(pt.op.full(4, by, pt.f32))
            del temporary
            fresh = scope.record(pt.op.zeros(4, pt.f32))
            scope.record(pt.op.fill(workspace, by).then(lambda: add(fresh.partition(4), workspace, x)))
        return scope.graph, fresh

    (g1, _), (g2, _) = recorded(3), recorded(5)
    for order in itertools.product((g1, g2), repeat=2):
        for graph in order:
            graph.launch().sync_on(stream)
        assert workspace.numpy().tolist() == [3 if order[-1] is g1 else 5] * 4


def while_it_runs(group, conflict):
    stream, other = pt.current_device().stream("replays"), pt.current_device().stream("other")
    x, one, y = pt.ones((4,), pt.f32), pt.ones((4,), pt.f32), pt.zeros((4,), pt.f32)
    graph = add(y.partition(4), x, one).graph_on(stream, "the graph")
    word = pt.zeros((1,), pt.u32)
    held = pt.op.wait_eq(word, 1).submit(stream)
    future = graph.launch().submit(stream)
    if conflict:
        conflict(x, y).sync_on(other)
    else:
        graph.update(pt.op.fill(x, 7))
        second = graph.launch().submit(stream)
    pt.op.set_signal(word, 1).sync_on(other)
    held.wait()
    future.wait()
    second.wait()
    assert y.numpy().tolist() == [8] * 4


@faulty(VerdictKind.LAUNCH, "LeaseError", "would write a tensor f32[4], but the graph (replay 1) on replays", ranks=1)
def test_f85_what_a_replay_reads_is_written(group):
    while_it_runs(group, lambda x, y: pt.op.fill(x, 7))


@faulty(VerdictKind.LAUNCH, "LeaseError", "would read a tensor f32[4], but the graph (replay 1) on replays", ranks=1)
def test_f85_what_a_replay_writes_is_read(group):
    while_it_runs(group, lambda x, y: pt.op.copy(y))


@silent(ranks=1)
def test_f85_an_update_comes_between_two_replays(group):
    while_it_runs(group, None)


@pytest.mark.slow
@silent(ranks=1)
def test_f86_bytes_in_use_stay_flat_over_graphs_and_launches(group):
    stream, device = pt.current_device().stream("s"), pt.current_device()
    before = None
    for k in range(4):
        graph = pt.op.full(100, k, pt.f32).graph_on(stream)
        out = graph.take_output()
        for _ in range(2):
            graph.launch().sync_on(stream)
            assert out.numpy()[0] == k
            pt.op.fill(out, -1).sync_on(stream)
        del graph, out
        if before is None:
            before = device.memory().in_use
    assert device.memory().in_use == before


@silent(ranks=1)
def test_f87_an_old_graph_that_dies_in_a_capture_leaves_nothing_in_it(group):
    stream, x, y = pt.current_device().stream("s"), pt.ones((4,), pt.f32), pt.zeros((4,), pt.f32)
    old = [pt.op.fill(x, 5).graph_on(stream)]
    with pt.capture(stream) as scope:
        old.clear()
        gc.collect(0)
        scope.record(add(y.partition(4), x, x))
    assert scope.graph.nodes == 1
    scope.graph.launch().sync_on(stream)
    assert y.numpy().tolist() == [2] * 4
