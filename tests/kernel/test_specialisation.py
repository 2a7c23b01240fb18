"""What a specialisation depends on: captured values, axes of the grid, groups; and grids that slots cannot hold."""

from types import ModuleType

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


index = SCALE = np.float32(2)


@pt.kernel
def by_numpy(z: T.Exclusive):
    (at,) = z.index
    z.store(T.full(z.tile_shape, SCALE, T.f32) * np.pi + at.astype(T.f32))


def test_a_number_of_numpy_that_changes_compiles_again_and_a_global_of_an_attributes_name_does_not(monkeypatch):
    z = pt.zeros((4,), pt.f32)

    def once():
        by_numpy(z.partition(4)).sync()
        return z.numpy()[0], by_numpy.compile_count

    assert once() == once() == (np.float32(2) * np.float32(np.pi), 1)
    monkeypatch.setitem(globals(), "index", 7)
    assert once()[1] == 1
    monkeypatch.setitem(globals(), "SCALE", np.float32(3))
    assert once() == once() == (np.float32(3) * np.float32(np.pi), 2)


@pt.kernel
def by_constant(z: T.Exclusive, C: T.Const):
    kind = T.full((1,), C).dtype
    z.store((1.0 if kind == T.f32 else 2.0 if kind == T.i64 else 3.0) / T.full(z.tile_shape, C).astype(T.f32))


@pt.kernel
def by_tuple(z: T.Exclusive, C: T.Const):
    kind = T.full((1,), C[0]).dtype
    z.store((1.0 if kind == T.f32 else 2.0 if kind == T.i64 else 3.0) / T.full(z.tile_shape, C[0]).astype(T.f32))


@pytest.mark.parametrize("kernel", [by_constant, by_tuple])
def test_constants_that_python_takes_for_equal_are_compiled_apart(kernel):
    """1, 1.0 and True, 0.0 and -0.0; and NaN, which Python never takes for equal, is compiled once."""
    z = pt.zeros((4,), pt.f32)
    given = [1, 1.0, True, 0.0, -0.0, np.float32(0.0), np.float32(-0.0), float("nan"), np.float32("nan"), np.int64(1)]
    expected = [2, 1, 3, np.inf, -np.inf, np.inf, -np.inf, np.nan, np.nan, 2]
    for _ in range(3):
        found = []
        for value in given:
            kernel(z.partition(4), (value,) if kernel is by_tuple else value).sync()
            found.append(z.numpy()[0])
        np.testing.assert_array_equal(found, expected)
        given[7] = float("nan")
    assert kernel.compile_count == len(given)


def times_scale(x):
    return x * SCALE


TABLE = ((times_scale, 0),)


@pt.kernel
def by_function(z: T.Exclusive, FN: T.Const, OTHER: T.Const = times_scale):
    z.store(FN(T.ones(z.tile_shape, T.f32)) + OTHER(T.ones(z.tile_shape, T.f32)) + TABLE[0][0](z.load() * 0))


@pytest.mark.parametrize("given", [("FN",), ("OTHER",), ()])
def test_what_a_function_reaches_counts_wherever_it_comes_from(monkeypatch, given):
    z = pt.zeros((4,), pt.f32)
    monkeypatch.setitem(globals(), "SCALE", 2.0)

    def nothing(x):
        return x * 0.0

    functions = {name: times_scale if name in given else nothing for name in ("FN", "OTHER")}

    def once():
        by_function(z.partition(4), **functions).sync()
        return z.numpy()[0]

    assert once() == 2 * len(given)
    before = by_function.compile_count
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert once() == 3 * len(given)
    assert by_function.compile_count == before + 1


def module(**values):
    found = ModuleType("module")
    vars(found).update(values)
    return found


package = module(inner=module(helper=scaled), other=module(helper=shifted))


@pt.kernel
def through_modules(z: T.Exclusive):
    z.store(package.inner.helper(T.ones(SHAPE, T.f32)))


def made_through_modules():
    package = module(inner=module(helper=scaled), other=module(helper=shifted))

    @pt.kernel
    def kernel(z: T.Exclusive):
        z.store(package.inner.helper(T.ones(SHAPE, T.f32)))

    return kernel, package


@pytest.mark.parametrize("where", ["globals", "closure"])
@pytest.mark.feature("K1", "cpu")
def test_what_is_reached_through_modules_in_modules_and_changes_compiles_again(monkeypatch, where):
    kernel, outer = (through_modules, package) if where == "globals" else made_through_modules()
    z = pt.zeros((4,), pt.f32)

    def once():
        kernel(z.partition(4)).sync()
        return z.numpy()[0]

    assert [once(), once()] == [2, 2]
    monkeypatch.setattr(outer.inner, "helper", shifted)
    assert once() == 3
    monkeypatch.setattr(outer, "inner", module(helper=scaled))
    assert once() == 2
    monkeypatch.setattr(outer, "inner", outer.other)
    assert once() == 3


def test_a_helper_with_new_code_in_place_compiles_again():
    """As notebooks do it that load a changed module again."""

    def helper(x):
        return x * 2

    def changed(x):
        return x + 5

    @pt.kernel
    def kernel(z: T.Exclusive):
        z.store(helper(T.ones(SHAPE, T.f32)))

    z = pt.zeros((4,), pt.f32)
    for code, expected in ((helper.__code__, 2), (changed.__code__, 6)):
        helper.__code__ = code
        for _ in range(3):
            kernel(z.partition(4)).sync()
        assert z.numpy()[0] == expected


@pt.kernel
def by_constant_alone(z: T.Exclusive, FN: T.Const):
    z.store(FN(T.ones(z.tile_shape, T.f32)))


def test_new_code_in_place_counts_where_a_function_is_all_that_may_change():
    def helper(x):
        return x * 2

    def changed(x):
        return x + 5

    z = pt.zeros((4,), pt.f32)
    for code, expected in ((helper.__code__, 2), (changed.__code__, 6)):
        helper.__code__ = code
        for _ in range(2):
            by_constant_alone(z.partition(4), helper).sync()
        assert z.numpy()[0] == expected


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
