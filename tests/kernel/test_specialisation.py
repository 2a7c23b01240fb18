"""What a specialisation depends on: captured values, axes of the grid, groups; and grids that slots cannot hold."""

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import CompileError, LaunchError, OutOfBounds

pytestmark = pytest.mark.any_device

FACTOR = 2
SHAPE = (4,)


def scaled(v):
    return v * FACTOR


def shifted(v):
    return v + FACTOR


@pt.kernel
def times(z: T.Exclusive):
    z.store(scaled(T.ones(SHAPE, T.f32)))


def once():
    z = pt.zeros((4,), pt.f32)
    times(z.partition(4)).sync()
    return z.numpy()[0]


@pytest.mark.feature("K1", "cpu")
def test_a_captured_global_that_changes_compiles_again(monkeypatch):
    assert once() == 2
    before = times.compile_count
    assert once() == 2
    assert times.compile_count == before
    monkeypatch.setitem(globals(), "FACTOR", 5)
    assert once() == 5
    assert times.compile_count == before + 1
    monkeypatch.setitem(globals(), "scaled", shifted)
    assert once() == 6


def made(n):
    @pt.kernel
    def fill(z: T.Exclusive):
        z.store(T.full((4,), n, T.f32))

    def change(value):
        nonlocal n
        n = value

    return fill, change


def test_a_captured_variable_of_a_closure_that_changes_compiles_again():
    fill, change = made(3)
    other, _ = made(4)
    z = pt.zeros((4,), pt.f32)
    for kernel, wanted in ((fill, 3), (other, 4), (fill, 3)):
        kernel(z.partition(4)).sync()
        assert z.numpy()[0] == wanted
    change(9)
    fill(z.partition(4)).sync()
    assert z.numpy()[0] == 9
    assert fill.compile_count == 2


def test_an_op_made_before_a_captured_value_changed_runs_with_the_new_one(monkeypatch):
    z = pt.zeros((4,), pt.f32)
    op = times(z.partition(4))
    monkeypatch.setitem(globals(), "FACTOR", 7)
    op.sync()
    assert z.numpy()[0] == 7


# ---------------------------------------------------------------- grids


@pt.kernel
def ids(out: T.Peer):
    p = T.program_id(0) + T.num_programs(0) * (T.program_id(1) + T.num_programs(1) * T.program_id(2))
    out.local.store((p,), T.full((1,), p, T.i64))


@pytest.fixture
def heap():
    """A heap of this process alone, whose group is whole again afterwards."""
    group = pt.init()
    with pt.SymmetricHeap(group, size_bytes=4 << 20) as made_heap:
        yield made_heap
        if group.failure() is not None:
            group.recover()


@pytest.mark.parametrize("grid", [(24,), (2, 3, 4), (4, 6), (1, 24), (24, 1, 1)])
def test_grids_of_one_and_of_several_axes(grid, heap):
    out = heap.zeros((24,), pt.i64)
    ids.grid(*grid)(out).sync()
    assert out.numpy().tolist() == list(range(24))


def test_a_grid_of_one_axis_has_a_binary_of_its_own(heap):
    out = heap.zeros((24,), pt.i64)
    before = ids.compile_count
    ids.grid(24)(out).sync()
    ids.grid(12)(out).sync()
    ids.grid(2, 12)(out).sync()
    ids.grid(4, 6)(out).sync()
    assert ids.compile_count - before <= 2


# ---------------------------------------------------------------- slots


@pt.kernel
def default_slot(s: T.Signal):
    s.notify(to=s.rank)
    s.wait(s.rank)


@pt.kernel
def named_slot(s: T.Signal, k: T.i64):
    s[k].notify(to=s.rank)
    s[k].wait(s.rank)


@pt.kernel
def counts(c: T.Counter):
    c.add(2, to=c.rank)
    c.wait(2)


@pytest.mark.sentence("SG-9")
@pytest.mark.feature("P6", "cpu")
@pytest.mark.parametrize("grid", [(5,), (1, 5), (5, 1, 1)])
def test_a_grid_beyond_the_slots_of_a_signal_is_refused_where_the_slot_is_the_program(grid, heap):
    s = heap.signal(slots=4)
    default_slot.grid(4)(s).sync()
    with pytest.raises(LaunchError) as caught:
        default_slot.grid(*grid)(s).sync()
    assert str(caught.value) == (
        "default_slot: the grid has 5 programs, each with the slot of its index, but the signal s has 4 slots; make it "
        "with slots=5, launch fewer programs, or name the slot with s[k]"
    )
    default_slot.grid(2, 2)(s).sync()


def test_a_grid_beyond_the_slots_of_a_counter_is_refused(heap):
    c = heap.counter(slots=2)
    counts.grid(2)(c).sync()
    with pytest.raises(LaunchError, match="the counter c has 2 slots; make it with slots=3"):
        counts.grid(3)(c).sync()


@pytest.mark.native_only
@pytest.mark.sentence("SG-8")
def test_a_named_slot_takes_any_grid_and_is_checked_in_the_kernel(heap):
    s = heap.signal(slots=4)
    named_slot.grid(1)(s, 3).sync()
    with pytest.raises(OutOfBounds, match="slot of signal `s` out of range: got 4, limit 4"):
        named_slot.grid(1)(s, 4).sync()


# ---------------------------------------------------------------- groups


@pt.kernel
def which(z: T.Exclusive, a: T.Peer, b: T.Peer):
    z.store(T.full((1,), T.rank(), T.i64))


@pt.kernel
def asked(z: T.Exclusive, a: T.Peer, b: T.Peer):
    z.store(T.full((1,), a.rank * 10 + b.rank, T.i64))


def two_groups(group):
    inner = group.subgroup(tuple(range(1, group.size)))
    if inner is None:
        return None
    z = pt.zeros((1,), pt.i64)
    with pt.SymmetricHeap(inner, 1 << 16) as first, pt.SymmetricHeap(inner, 1 << 16) as second:
        which(z.partition(1), first.zeros((1,), pt.f32), second.zeros((1,), pt.f32)).sync()
        one = int(z.numpy()[0])
    inner.barrier("done")
    return one


@pytest.mark.feature("K10", "cpu")
def test_the_rank_is_that_of_the_one_group_in_play():
    found = pt.spawn(two_groups, 3, model=pt.RankModel.THREADS, timeout_s=60)
    assert found == [None, 0, 1]


def rank_of_two(group):
    pair = group.subgroup((1, 0))
    z = pt.zeros((1,), pt.i64)
    with pt.SymmetricHeap(group, 1 << 16) as a, pt.SymmetricHeap(pair, 1 << 16) as b:
        x, y = a.zeros((1,), pt.f32), b.zeros((1,), pt.f32)
        asked(z.partition(1), x, y).sync()
        try:
            which(z.partition(1), x, y).sync()
        except CompileError as error:
            return int(z.numpy()[0]), error.message
    return None


@pytest.mark.feature("K10", "cpu")
@pytest.mark.feature("D8", "cpu")
def test_two_groups_in_one_launch_leave_no_meaning_for_the_rank():
    found = pt.spawn(rank_of_two, 2, model=pt.RankModel.THREADS, timeout_s=60)
    assert [f[0] for f in found] == [1, 10]
    assert found[0][1] == (
        "T.rank(): expected one group in play, got 2 (group 0: `a`; group 1: `b`); ask an object, as in x.rank"
    )


def test_numpy_scalars_are_captured_too():
    width = np.int64(4)

    @pt.kernel
    def fill(z: T.Exclusive):
        z.store(T.full((4,), width, T.f32))

    z = pt.zeros((4,), pt.f32)
    fill(z.partition(4)).sync()
    assert z.numpy()[0] == 4
