"""What a launch, a collective call and a replay have to keep, and how a device may behave where the model leaves it
open: each verdict with its whole text."""

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.checker.program import ProgramCase
from peertile.sim.conditions import Conditions, Overlap
from peertile.sim.explore import explore
from peertile.sim.verdicts import VerdictKind
from peertile.testing.check import assert_clean


def line(function, text: str) -> str:
    """`file:line` of the first line of `function` that contains `text`."""
    with open(__file__) as file:
        lines = file.read().split("\n")
    first = function.__code__.co_firstlineno
    return f"{__file__}:{next(k for k in range(first, len(lines) + 1) if text in lines[k - 1])}"


@pt.kernel
def meet(ready: T.Signal):
    ready.notify()
    ready.wait()


@pt.kernel
def twice(z: T.Exclusive, x: T.Shared):
    z.store(x.load_like(z) * 2.0)


@pt.kernel
def wait_for(word: T.Peer[T.read]):
    T.wait_eq(word.local, T.i32(1), index=(0,))


@pt.kernel
def set_to_one(word: T.Peer):
    T.st(word.local, T.i32(1), index=(0,), order=T.release)


# ---------------------------------------------------------------- collective calls


@pytest.mark.feature("C4", "sim")
def test_different_sizes_name_every_rank_and_its_line() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            heap.zeros((4 + group.rank,), pt.f32)

    (verdict,) = check(main, 2, schedules=1).verdicts
    where = line(main, "heap.zeros")
    assert str(verdict) == (
        "collective: SymmetryError: ranks disagree about SymmetricHeap allocation: rank 0: 'tensor f32[4]'; rank 1: "
        "'tensor f32[5]'. It must be the same on every rank\n"
        f"  rank 0: agree(SymmetricHeap allocation), at {where}\n"
        f"  rank 1: agree(SymmetricHeap allocation), at {where}\n"
        "  repair: let every rank of the group make the same collective calls, in one order and with equal sizes, "
        "dtypes and grids; what selects a path must be known to be equal on all ranks\n"
        "  replay: --seed 0 or --choices z0"
    )


def test_another_order_is_named_with_both_lines() -> None:
    def main(group) -> None:
        if group.rank == 0:
            group.barrier("one")
        else:
            group.exchange(b"", "two")

    (verdict,) = check(main, 2, schedules=1).verdicts
    assert verdict.kind is VerdictKind.COLLECTIVE
    assert set(verdict.calls) == {
        f"rank 0: barrier(one), at {line(main, 'barrier')}",
        f"rank 1: exchange(two), at {line(main, 'exchange')}",
    }


def test_a_rank_that_has_ended_is_named() -> None:
    def main(group) -> None:
        group.barrier("all")
        if group.rank != 1:
            group.barrier("rest")

    for seed in range(5):
        (verdict,) = check(main, 3, schedules=1, seed=seed).verdicts
        assert verdict.kind is VerdictKind.COLLECTIVE
        assert verdict.headline.startswith("collective: rank 1 has ended, and rank ")
        assert f"rank 1: its program has ended; before that barrier(all), at {line(main, 'all')}" in verdict.calls


# ---------------------------------------------------------------- launches


@pytest.mark.sentence("MM-46")
@pytest.mark.feature("C4", "sim")
def test_different_grids_on_one_channel_are_named() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            ready = heap.signal(slots=4)
            meet.grid(2)(ready).sync()
            meet.grid(2 + group.rank)(ready).sync()

    for seed in range(5):
        (verdict,) = check(main, 2, schedules=1, seed=seed).verdicts
        where = line(main, "group.rank")
        assert str(verdict).split("  replay")[0] == (
            "launch: launch 2 on `ready` has grid 2 on rank 0 and 3 on rank 1\n"
            f"  rank 0: meet, grid 2, at {where}\n"
            f"  rank 1: meet, grid 3, at {where}\n"
            "  repair: launch with one grid on all ranks, as a program meets the program of its own index on the "
            "others; or name the slots of the channel\n"
        )


@pytest.mark.slow
def test_equal_grids_are_fine_whatever_their_order_in_time() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            ready = heap.signal(slots=4)
            for grid in (1, 3, 2):
                meet.grid(grid)(ready).sync()

    assert_clean(main, 3, schedules=20)


def overlapping(group) -> None:
    with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
        word = heap.zeros((1,), pt.i32)
        first = wait_for.grid(1)(word).submit(pt.current_device().stream("waits"))
        second = set_to_one.grid(1)(word).submit(pt.current_device().stream("sets"))
        first.wait()
        second.wait()


@pytest.mark.sentence("MM-73")
def test_a_program_that_needs_two_kernels_at_once_is_reported_where_they_run_one_by_one() -> None:
    assert check(overlapping, 1, schedules=20).clean
    for overlap in (Overlap.CHOSEN, Overlap.NEVER):
        (verdict,) = check(overlapping, 1, schedules=40, conditions=Conditions(overlap)).verdicts
        assert verdict.kind is VerdictKind.DEADLOCK
        assert "waits for the device to be free for set_to_one: another kernel runs on it" in str(verdict)
        assert "no program may rely on two kernels of one device running at the same time" in str(verdict)


def test_kernels_that_need_nobody_run_one_by_one_as_well() -> None:
    def main(group) -> None:
        x = pt.asarray(np.arange(8, dtype=np.float32))
        streams = [pt.current_device().stream() for _ in range(3)]
        outs = [pt.empty((8,), pt.f32) for _ in streams]
        for future in [twice(z.partition(4), x).submit(s) for z, s in zip(outs, streams, strict=True)]:
            future.wait()
        assert all(z.numpy().tolist() == [2.0 * k for k in range(8)] for z in outs)

    for overlap in Overlap:
        assert check(main, 2, schedules=10, conditions=Conditions(overlap)).clean


@pytest.mark.feature("C4", "sim")
def test_a_launch_that_returns_late_blocks_the_one_that_would_end_it() -> None:
    (verdict,) = check(overlapping, 1, schedules=5, conditions=Conditions(blocking_launches=True)).verdicts
    where = line(wait_for.__wrapped__, "T.wait_eq")
    assert str(verdict) == (
        "deadlock: 2 agents wait and nobody is left who could let them go on\n"
        "  the host thread of rank 0 waits for its launch of wait_for on stream 1 of rank 0, which returns when the "
        "kernel has ended\n"
        f"    at {line(overlapping, 'first = ')}\n"
        "  program 0 of wait_for on rank 0 waits for word[0] on rank 0 eq 1; last saw 0, nobody has written it\n"
        f"      {where} in wait_for\n"
        "        T.wait_eq(word.local, T.i32(1), index=(0,))\n"
        "        ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        f"    launched at {line(overlapping, 'first = ')}\n"
        "  replay: --seed 0 or --choices z0"
    )


def queued(group) -> None:
    with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
        word, out = heap.zeros((1,), pt.i32), pt.zeros((8,), pt.f32)
        busy = pt.current_device().stream("busy")
        futures = [wait_for.grid(1)(word).submit(busy)]
        futures += [twice(out.partition(8), out_of(group)).submit(busy) for _ in range(6)]
        set_to_one.grid(1)(word).sync_on(pt.current_device().stream("other"))
        for future in futures:
            future.wait()


def out_of(group) -> pt.Tensor:
    return pt.asarray(np.full(8, group.rank, np.float32))


@pytest.mark.feature("C4", "sim")
def test_a_full_queue_blocks_the_host_that_would_end_the_wait() -> None:
    assert check(queued, 1, schedules=10, conditions=Conditions(queue=8)).clean
    (verdict,) = check(queued, 1, schedules=10, conditions=Conditions(queue=3)).verdicts
    assert verdict.kind is VerdictKind.DEADLOCK
    assert (
        "the host thread of rank 0 waits for room in the queue of stream 1 of rank 0, which holds 3 operations, for "
        "twice"
    ) in str(verdict)


def test_an_allocation_that_waits_for_the_device_is_named() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            word, spinning = heap.zeros((1,), pt.i32), pt.current_device().stream("spinning")
            other = pt.current_device().stream("other")
            first = wait_for.grid(1)(word).submit(spinning)
            pt.empty((8,), pt.f32)
            set_to_one.grid(1)(word).sync_on(other)
            first.wait()

    assert check(main, 1, schedules=10).clean
    (verdict,) = check(main, 1, schedules=10, conditions=Conditions(syncing_allocations=True)).verdicts
    assert verdict.kind is VerdictKind.DEADLOCK
    assert "the host thread of rank 0 waits for an allocation that waits for wait_for on stream 1 of rank 0" in str(
        verdict
    )


def test_the_conditions_are_part_of_what_was_covered() -> None:
    def main(group) -> None:
        group.barrier("all")

    conditions = Conditions(Overlap.CHOSEN, queue=4, blocking_launches=True, syncing_allocations=True)
    assert (
        "kernels of one device on different streams run side by side or one by one; a stream takes 4 operations; "
        "launches return when their kernel has ended; allocating and freeing wait for the device to be idle"
    ) in check(main, 1, schedules=1, conditions=conditions).statement()


# ---------------------------------------------------------------- memory that is given back


@pytest.mark.feature("C5", "sim")
def test_a_replay_whose_argument_was_given_back_is_named() -> None:
    def main(group) -> None:
        driver, stream = pt.current_device().driver, pt.current_device().stream("replays")
        x, z = pt.asarray(np.ones(8, np.float32)), pt.zeros((8,), pt.f32)
        graph = twice(z.partition(8), x).graph_on(stream)
        graph.launch().sync_on(stream)
        driver.free(x.address)
        graph.launch().sync_on(stream)

    (verdict,) = check(main, 1, schedules=1).verdicts
    assert verdict.kind is VerdictKind.GRAPH
    assert str(verdict) == (
        f"stale graph argument: x of twice (node 0) in {verdict.graph}: its memory was given back by the host of rank 0 "
        f"at {line(main, 'driver.free')} after the capture\n"
        "  repair: keep what a graph uses as long as the graph, or capture it anew; addresses are baked in\n"
        "  replay: --seed 0 or --choices z0"
    )


@pt.kernel
def read_peer(out: T.Exclusive, x: T.Peer[T.read]):
    out.store(x.at(1 - x.rank).load((0,), (64,)))


@pytest.mark.sentence("MM-63")
@pytest.mark.feature("C5", "sim")
def test_memory_of_a_heap_that_is_used_again_is_never_written_at_first() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            x = heap.zeros((64,), pt.f32)
            heap.free(x)
            y, out = heap.empty((64,), pt.f32), pt.empty((64,), pt.f32)
            read_peer(out.partition(64), y).sync()
            group.barrier("read")

    (verdict,) = check(main, 2, schedules=1).verdicts
    assert verdict.kind is VerdictKind.NEVER_WRITTEN
    assert verdict.headline.startswith("never written: x of rank")


@pytest.mark.feature("C5", "sim")
def test_a_stale_view_of_a_heap_is_a_use_after_free() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            x, out = heap.zeros((64,), pt.f32), pt.empty((64,), pt.f32)
            read_peer(out.partition(64), x).sync()
            group.barrier("before")
            pt.current_device().driver.take_back(x.local.address, 256)
            group.barrier("all gave it back")
            read_peer(out.partition(64), x).sync()

    (verdict,) = check(main, 2, schedules=1).verdicts
    assert verdict.kind is VerdictKind.LIFETIME
    where = line(main, "take_back")
    assert verdict.headline in {
        f"use after free: x of rank {rank} was freed by the host of rank {rank} at {where}" for rank in range(2)
    }
    assert "program 0 of read_peer on rank" in str(verdict)
    assert "x.at(1 - x.rank).load((0,), (64,))" in str(verdict)


@pt.kernel(unsafe=True)
def overrun(p: T.Pointer, N: T.Const[int]):
    token = T.unsafe.token()
    T.unsafe.store_ptr(p + T.iota(N), T.full((N,), 1.0, T.f32), order=T.weak, token=token)


@pytest.mark.feature("C5", "sim")
@pytest.mark.parametrize("n", [64, 128])
def test_a_pointer_that_leaves_its_object_of_a_heap_is_out_of_bounds(n: int) -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            x, _ = heap.zeros((64,), pt.f32), heap.zeros((64,), pt.f32)
            overrun.grid(1)(x.local.pointer(), N=n).sync()

    report = check(main, 1, schedules=1)
    assert report.clean is (n == 64), str(report)
    if n != 64:
        assert report.verdicts[0].headline == (
            "out of bounds: bytes 508 to 512 of symmetric memory, 252 bytes behind the object at bytes 0 to 256"
        )


@pytest.mark.slow
def test_objects_of_8_gib_cost_nothing_until_they_are_touched() -> None:
    def main(group) -> None:
        x = pt.zeros((1 << 31,), pt.f32)
        tail = x[(1 << 31) - 64 :]
        z = pt.empty((64,), pt.f32)
        twice(z.partition(64), tail).sync()
        assert not z.numpy().any()

    assert_clean(main, 1, schedules=2)


# ---------------------------------------------------------------- faults that the host hears of


@pt.kernel
def breaks(x: T.Peer, word: T.Peer):
    p = T.program_id(0)
    if p == 1:
        T.st(word, T.i32(1), (0,), rank=word.rank, order=T.release)
    if p == 0:
        T.wait_ge(word, T.i32(1), (0,))
        T.assert_(p == 1, "as it was asked to")
    x.local.store((p,), T.full((4,), 1.0, T.f32))


def test_a_launch_with_a_fault_is_over_when_all_of_its_programs_are() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            x, word = heap.zeros((16,), pt.f32), heap.zeros((1,), pt.i32)
            with pytest.raises(pt.KernelAssert, match="as it was asked to"):
                breaks.grid(4)(x, word).sync()
            x.copy_from(np.zeros(16, np.float32))
            group.recover()

    report = explore(ProgramCase(main, 1, follow_faults=True), 30)
    assert report.clean, str(report.verdicts[0])
