"""On the simulated machine: words used for ordering. Wrong kinds of wait, wrong words, slots of other groups, and
flags that lie where data of another call does."""

import numpy as np
from sim_cases import faulty, silent

import peertile as pt
import peertile.language as T
from peertile.sim.verdicts import VerdictKind


@pt.kernel
def data_wait(ready: T.Signal):
    T.wait_ge(ready, 1, (0,))


@faulty(VerdictKind.HOST, "CompileError", "T.wait_ge", "signal")
def test_f10_a_signal_awaited_as_data_is_refused(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        data_wait.grid(1)(heap.signal(slots=1)).sync()


@pt.kernel
def put_then_tell(x: T.Peer, ready: T.Signal, out: T.Exclusive):
    if x.rank == 0:
        T.put(T.full((16,), 7, T.i64), x, rank=1, signal=ready)
        out.store(T.zeros((16,), T.i64))
    else:
        ready.wait(0)
        out.store(x.local.load((0,), (16,)))


@silent()
def test_f10_the_wait_of_a_signal_covers_the_put(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        out = pt.empty((16,), pt.i64)
        put_then_tell(heap.zeros((16,), pt.i64), heap.signal(slots=1), out.partition(16)).sync()
        assert out.numpy().tolist() == [7 * group.rank] * 16


@pt.kernel
def put_and_add(x: T.Peer, words: T.Peer):
    if x.rank == 0:
        x.at(1).store((0,), T.full((16,), 7, T.i64))
        T.atom_add(words, 5, (2,), rank=1, order=T.release)
    else:
        T.wait_ge(words, 12, (2,))


@silent()
def test_f23_an_add_changes_its_own_word_alone(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        x, words = heap.zeros((16,), pt.i64), heap.empty((4,), pt.i64)
        words.copy_from(np.full(4, 7))
        group.barrier("written")
        put_and_add.grid(1)(x, words).sync()
        group.barrier("over")
        assert words.numpy().tolist() == ([7, 7, 12, 7] if group.rank == 1 else [7] * 4)
        assert x.numpy().tolist() == [7 * group.rank] * 16


@pt.kernel
def through_one_pad(pad: T.Peer, x: T.Peer, out: T.Exclusive):
    # Two groups, (0, 1) and (2, 1), one pad: the slot is the number of the sender in its group, 0 in both.
    if x.rank == 1:
        T.wait_ge(pad, 1, (0,))
        out.store(x.local.load((0,), (16,)))
    else:
        if x.rank == 0:
            x.at(1).store((0,), T.full((16,), 42, T.i64))
        T.atom_add(pad, 1, (0,), rank=1, order=T.release)  # stores would be two writers, told first


@faulty(VerdictKind.RACE, "x of rank 1", "of through_one_pad on rank 0", "of through_one_pad on rank 1", ranks=3)
def test_f24_a_slot_shared_by_two_groups(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        pad, x, out = heap.zeros((1,), pt.u64), heap.zeros((16,), pt.i64), pt.zeros((16,), pt.i64)
        through_one_pad(pad, x, out.partition(16)).sync()


@pt.kernel
def tell(ready: T.Signal, x: T.Peer, value: T.i64):
    if value > 0:
        x.at(1).store((0,), T.full((16,), value, T.i64))
    ready.notify(to=1)


@pt.kernel
def hear(ready: T.Signal, x: T.Peer, out: T.Exclusive):
    ready.wait(0)
    out.store(x.local.load((0,), (16,)))


@silent(ranks=3)
def test_f24_slots_of_each_group_are_its_own(group):
    for number, members in enumerate(((0, 1), (2, 1))):
        sub = group.subgroup(members)
        if sub is None:
            continue
        heap = pt.SymmetricHeap(sub, 1 << 14)
        ready, x = heap.signal(slots=1), heap.zeros((16,), pt.i64)
        if sub.rank == 0:
            tell.grid(1)(ready, x, 42 if number == 0 else 0).sync()
        else:
            out = pt.zeros((16,), pt.i64)
            hear(ready, x, out.partition(16)).sync()
            assert out.numpy().tolist() == [42 if number == 0 else 0] * 16
        heap.close()


@pt.kernel
def meet(ready: T.Signal):
    ready.notify()
    ready.wait()


@silent()
def test_f25_words_in_memory_that_held_data_begin_at_zero(group):
    with pt.SymmetricHeap(group, 1 << 12) as heap:
        old = heap.empty((256,), pt.u8)
        old.copy_from(np.full(256, 255, np.uint8))
        heap.free(old)
        ready = heap.signal(slots=1)
        meet.grid(1)(ready).sync()
        meet.grid(1)(ready).sync()


@pt.kernel
def past_a_barrier(x: T.Peer, out: T.Exclusive, b: T.Barrier, REAL: T.Const[bool]):
    x.local.store((0,), T.full((16,), 1, T.i64))
    if REAL:
        b.sync()
    out.store(x.at(1 - x.rank).load((0,), (16,)))
    b.sync()


def pass_it(group, real):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        x, out = heap.zeros((16,), pt.i64), pt.empty((16,), pt.i64)
        past_a_barrier(x, out.partition(16), heap.barrier(programs=1), REAL=real).sync()
        assert not real or out.numpy().tolist() == [1] * 16


@faulty(VerdictKind.RACE, "x of rank", "of past_a_barrier on rank 0", "of past_a_barrier on rank 1")
def test_f26_a_barrier_that_does_nothing(group):
    pass_it(group, False)


@silent()
def test_f26_nobody_leaves_a_barrier_before_all_have_come(group):
    pass_it(group, True)


@pt.kernel
def laid_out(area: T.Peer, out: T.Exclusive, n: T.i64, flag: T.i64, value: T.i64):
    # n tiles of data at the front of the area, the flag of the call at word `flag`.
    for k in T.range(n):
        area.at(1 - area.rank).store((k,), T.full((16,), value, T.i64))
    T.st(area, value, (flag,), rank=1 - area.rank, order=T.release)
    T.wait_ge(area, value, (flag,))
    total = T.zeros((16,), T.i64)
    for k in T.range(n):
        total += area.local.load((k,), (16,))
    out.store(total)


@faulty(VerdictKind.RACE, "area of rank", "of laid_out on rank 0", "of laid_out on rank 1")
def test_f31_flags_of_a_smaller_call_lie_on_data_of_the_one_before(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        area, out = heap.zeros((128,), pt.i64), pt.empty((16,), pt.i64)
        laid_out(area, out.partition(16), 4, 64, 1).sync()
        laid_out(area, out.partition(16), 1, 16, 2).sync()


@silent()
def test_f31_flags_and_both_phases_have_areas_of_their_own(group):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        areas = [heap.zeros((128,), pt.i64) for _ in range(2)]
        for value, n in ((1, 4), (2, 1), (3, 4), (4, 2)):
            out = pt.empty((16,), pt.i64)
            laid_out(areas[value % 2], out.partition(16), n, 100, value).sync()
            assert out.numpy().tolist() == [n * value] * 16


@pt.kernel
def by_regions(stage: T.Peer, out: T.Exclusive, turn: T.Peer, ready: T.Signal, number: T.i64, COUNTED: T.Const[bool]):
    # Two regions; with one program it has both. The slot of a call: by this program's own calls, or by the number.
    p, programs = T.program_id(0), T.num_programs(0)
    own = T.ld(turn.local, (p,))
    slot = own % 2
    if not COUNTED:
        slot = number % 2
    for region in T.range(p, 2, programs):
        stage.local.store((slot * 2 + region,), T.full((16,), number + stage.rank, T.i64))
    ready.notify()
    ready.wait()
    for tile in out.tiles():
        region = tile.index[0]
        tile.store(stage.at(0).load((slot * 2 + region,), (16,)) + stage.at(1).load((slot * 2 + region,), (16,)))
    T.st(turn.local, own + 1, (p,))


def three_calls(group, counted):
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        stage, turn, ready = heap.zeros((64,), pt.i64), heap.zeros((2,), pt.i64), heap.signal(slots=2)
        for number, programs in enumerate((2, 1, 2)):
            out = pt.empty((32,), pt.i64)
            cut = out.partition(16).persistent(programs=programs)
            by_regions(stage, cut, turn, ready, number, COUNTED=counted).sync()
            assert counted or out.numpy().tolist() == [2 * number + 1] * 32


@faulty(VerdictKind.RACE, "stage of rank", "of by_regions on rank 0", "of by_regions on rank 1")
def test_f32_a_slot_for_each_program_while_the_grid_changes(group):
    three_calls(group, True)


@silent()
def test_f32_a_slot_for_each_call(group):
    three_calls(group, False)
