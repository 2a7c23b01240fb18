"""On the simulated machine: memory that peers read, written or given back too early; one buffer for two purposes."""

import numpy as np
import pytest
from sim_cases import faulty, silent

import peertile as pt
import peertile.language as T
from peertile.library.collectives import Collectives
from peertile.library.selection import Algorithm
from peertile.sim.verdicts import VerdictKind


def same(got, expected):
    assert np.array_equal(got, expected), (got, expected)


@pt.kernel
def sum_where_it_lies(x: T.Peer, ready: T.Signal, STAGED: T.Const[bool]):
    # The output is the input: whoever writes his x while a peer still reads it spoils the peer's sum.
    ready.notify()
    ready.wait()
    total = x.at(0).load((0,), (16,)) + x.at(1).load((0,), (16,))
    if STAGED:
        ready.notify()
        ready.wait()
    x.local.store((0,), total)


def in_place(group, staged):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        x, ready = heap.empty((16,), pt.f32), heap.signal(slots=1)
        x.copy_from(np.full(16, 1.0 + group.rank, np.float32))
        sum_where_it_lies.grid(1)(x, ready, STAGED=staged).sync()
        assert not staged or x.numpy().tolist() == [3.0] * 16


@faulty(VerdictKind.RACE, "x of rank", "of sum_where_it_lies on rank 0", "of sum_where_it_lies on rank 1")
def test_f37_an_algorithm_that_reads_inputs_where_they_lie_in_place(group):
    in_place(group, False)


@silent()
def test_f37_everybody_has_read_before_anybody_writes(group):
    in_place(group, True)


@pytest.mark.slow
@silent()
def test_f37_one_shot_in_place_goes_through_staging(group):
    with pt.SymmetricHeap(group, 1 << 18) as heap, Collectives(heap, programs=1, slot_bytes=4096) as c:
        x = heap.empty((40,), pt.f32)
        x.copy_from(np.full(40, 1.0 + group.rank, np.float32))
        c.all_reduce(x, x, algorithm=Algorithm.ONE_SHOT).sync()
        same(x.numpy(), np.full(40, 3.0))


@pytest.mark.slow
@faulty(VerdictKind.HOST, "ArgumentError: all_to_all: out: expected another tensor than x, got the same")
def test_f37_all_to_all_in_place_is_refused(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        x = pt.zeros((16,), pt.f32)
        c.all_to_all(x, x).sync()


@pytest.mark.slow
@faulty(VerdictKind.HOST, "ArgumentError: all_reduce: x and out overlap in part")
def test_f37_partial_overlap_is_refused(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        x = pt.zeros((17,), pt.f32)
        c.all_reduce(x[:16], x[1:]).sync()


@silent()
def test_f39_the_input_of_a_running_collective_is_dropped(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        other = pt.current_device().stream("other")
        for k in range(3):
            a = pt.asarray(np.full(40, k + group.rank, np.float32))
            running = c.all_reduce(a, algorithm=Algorithm.ONE_SHOT).submit()
            del a
            b = pt.empty((40,), pt.f32)
            pt.op.fill(b, -1).submit(other)
            same(running.wait().numpy(), np.full(40, 2.0 * k + 1))
            other.sync()


@pytest.mark.slow
@faulty(VerdictKind.LIFETIME, "all_reduce_one_shot on rank", "was freed by the host of rank")
def test_f39_the_input_is_given_back_while_it_is_read(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        a = pt.asarray(np.full(40, group.rank, np.float32))
        running = c.all_reduce(a, algorithm=Algorithm.ONE_SHOT).submit()
        pt.current_device().driver.free(a.address)
        running.wait()


@pt.kernel
def produce(out: T.Peer, ready: T.Signal, EARLY: T.Const[bool]):
    if EARLY:
        ready.notify(to=1)
    out.at(1).store((0,), T.full((16,), 5, T.i64))
    if not EARLY:
        ready.notify(to=1)


@pt.kernel
def consume(y: T.Exclusive, out: T.Peer, ready: T.Signal):
    ready.wait(0)
    y.store(out.local.load((0,), (16,)))


def stages(group, early):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        out, ready, y = heap.zeros((16,), pt.i64), heap.signal(slots=1), pt.zeros((16,), pt.i64)
        if group.rank == 0:
            produce.grid(1)(out, ready, EARLY=early).sync()
        else:
            consume(y.partition(16), out, ready).sync()
            assert early or y.numpy().tolist() == [5] * 16


@faulty(VerdictKind.RACE, "out of rank 1", "produce on rank 0", "consume on rank 1")
def test_f41_dependents_are_let_go_before_the_output_is_written(group):
    stages(group, True)


@silent()
def test_f41_dependents_are_let_go_last(group):
    stages(group, False)


@pt.kernel
def dispatch(buffer: T.Peer, out: T.Exclusive, n: T.i64, at: T.i64, value: T.i64, ready: T.Signal):
    # n tiles of data for the peer, and how many behind them, at word `at`.
    peer = 1 - buffer.rank
    for k in T.range(n):
        buffer.at(peer).store((k,), T.full((16,), value, T.i64))
    buffer.at(peer).store((at,), T.full((16,), n, T.i64))
    ready.notify()
    ready.wait()
    total = buffer.local.load((at,), (16,))
    for k in T.range(n):
        total += buffer.local.load((k,), (16,))
    out.store(total)


def graphs(group, capacities_in_the_buffer):
    stream = pt.current_device().stream("graphs")
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        buffers = [heap.zeros((144,), pt.i64) for _ in range(2)]
        out, ready = pt.zeros((16,), pt.i64), heap.signal(slots=1)
        made = {}
        for capacity, buffer in ((4, 0), (1, 1 if capacities_in_the_buffer else 0)):
            at = 8 if capacities_in_the_buffer else capacity
            call = dispatch(buffers[buffer], out.partition(16), capacity, at, capacity, ready)
            made[capacity] = call.graph_on(stream)
        for capacity in (4, 1, 4, 1):
            made[capacity].launch().sync_on(stream)
            assert not capacities_in_the_buffer or out.numpy().tolist() == [capacity + capacity * capacity] * 16


@faulty(VerdictKind.RACE, "buffer of rank", "dispatch on rank 0", "dispatch on rank 1")
def test_f42_the_layout_of_a_shared_buffer_depends_on_the_call(group):
    graphs(group, False)


@silent()
def test_f42_the_capacity_belongs_to_the_buffer(group):
    graphs(group, True)


@silent()
def test_f42_calls_of_many_sizes_share_the_staging_of_a_communicator(group):
    with Collectives(group, programs=1, slot_bytes=4096) as c:
        for n in (300, 3, 500, 1):
            same(c.all_reduce(pt.full((n,), 1.0 + group.rank, pt.f32)).sync().numpy(), np.full(n, 3.0))
