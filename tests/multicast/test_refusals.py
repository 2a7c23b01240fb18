"""What no multicast could do is refused where it is written, or at the launch, each with its reason."""

import numpy as np
import pytest
from tests.frontend.helpers import error

import peertile as pt
import peertile.language as T
from peertile.dtypes import ALL_DTYPES, bf16, f16, f32, f64
from peertile.errors import ArgumentError, CompileError, LaunchError
from peertile.frontend.build import build_kernel
from peertile.ir.ops import LOAD_REDUCTIONS, MULTICAST_DTYPES, REDUCTIONS
from peertile.ir.types import MulticastType

pytestmark = [pytest.mark.feature("M3", "cpu"), pytest.mark.feature("M1", "cpu")]


def multicast(dtype=f32, rank=1, unit=None, align=64):
    return MulticastType(dtype, rank, unit if unit is not None else (False,) * (rank - 1) + (True,), align)


def refused(fn, **given):
    """The first line of the error, without the place in the source that the lines after it show."""
    return str(error(fn, **given)).split("\n")[0]


# ---------------------------------------------------------------- element types and reductions

NAMES = ", ".join(MULTICAST_DTYPES)


@pytest.mark.parametrize("dtype", [d for d in ALL_DTYPES if d.name not in MULTICAST_DTYPES], ids=str)
def test_other_element_types_have_no_multicast(dtype):
    def kernel(v):
        v.partition((64,))

    assert refused(kernel, v=multicast(dtype)) == (
        f"partition of the multicast `v`: dtype: expected one of {NAMES}, got {dtype.name}"
    )


def takes(table, rmw):
    names = ", ".join(n for n in MULTICAST_DTYPES if n in table.get(rmw, ()))
    return f"takes {names}" if names else "is none of this operation"


def way(table, rmw, dtype):
    other = {T.Rmw.MIN: T.Rmw.UMIN, T.Rmw.MAX: T.Rmw.UMAX}.get(rmw)
    if dtype.name == "u64" and other is not None and "u64" in table.get(other, ()):
        return f"; {rmw.value} compares as signed, use T.Rmw.{other.name}"
    return ""


@pytest.mark.parametrize("dtype", [d for d in ALL_DTYPES if d.name in MULTICAST_DTYPES], ids=str)
@pytest.mark.parametrize("rmw", list(T.Rmw), ids=lambda r: r.value)
def test_every_reduction_of_every_type_is_legal_or_refused(rmw, dtype):
    def load(v, R: T.Const):
        v.partition((64,)).multimem_load_reduce((0,), R)

    def update(v, R: T.Const):
        v.partition((64,)).multimem_reduce((0,), R, T.zeros((64,), v.dtype))

    for fn, table, name in (
        (load, LOAD_REDUCTIONS, "multimem_load_reduce"),
        (update, REDUCTIONS, "multimem_reduce"),
    ):
        kind = T.Rmw.ADDF if dtype.is_float and rmw is T.Rmw.ADD else rmw
        types = {"v": multicast(dtype)}
        if dtype.name in table.get(kind, ()):
            build_kernel(fn, types, {"R": rmw})
            continue
        with pytest.raises(CompileError) as caught:
            build_kernel(fn, types, {"R": rmw})
        assert caught.value.message == (
            f"{name} of `v`: reduction: {kind.value} {takes(table, kind)}, got {dtype.name}{way(table, kind, dtype)}"
        )


# ---------------------------------------------------------------- shapes and layouts


def test_a_tile_is_whole_32_bit_units():
    def kernel(v):
        v.partition((1,))

    assert refused(kernel, v=multicast(f16)) == (
        "partition of the multicast `v`: expected tiles of a multiple of 4 bytes, got (1,) of f16: 2"
    )


@pytest.mark.parametrize(("unit", "count"), [((False, False), 0), ((True, True), 2)])
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_halves_lie_in_pairs_along_one_axis(dtype, unit, count):
    def kernel(v):
        v.partition((4, 4))

    assert refused(kernel, v=multicast(dtype, 2, unit)) == (
        f"partition of the multicast `v`: {dtype.name} needs exactly one axis of stride 1, along which pairs lie, "
        f"got {count}"
    )


def test_a_tile_cuts_no_pair():
    def kernel(v):
        v.partition((4, 1))

    assert refused(kernel, v=multicast(bf16, 2)) == (
        "partition of the multicast `v`: bf16 needs an even extent along axis 1, where pairs lie, got (4, 1)"
    )


def test_promises_are_one_per_axis():
    def kernel(v):
        v.partition((64,), in_bounds=(True, False))

    assert refused(kernel) == (
        "partition of the multicast `v`: in_bounds: expected a bool, or one per axis (1 of them), got 2"
    )


def test_a_bulk_store_is_one_aligned_range():
    def short(v):
        v.partition((2,)).multimem_bulk_store((0,), T.zeros((2,), v.dtype))

    def rows(v):
        v.partition((4, 4)).multimem_bulk_store((0, 0), T.zeros((4, 4), v.dtype))

    def wide(v):
        v.partition((8,)).multimem_bulk_store((0,), T.zeros((8,), v.dtype))

    assert refused(short) == (
        "multimem_bulk_store to `v`: expected tiles of a multiple of 16 bytes below 2^32, got 8 bytes"
    )
    assert refused(rows, v=multicast(f32, 2)) == (
        "multimem_bulk_store to `v`: expected tiles of one contiguous range, an extent along the last axis "
        "(of stride 1) alone, got (4, 4)"
    )
    assert refused(wide, v=multicast(f32, align=8)) == (
        "multimem_bulk_store to `v`: expected memory aligned to 16 bytes, got 8"
    )


def test_bulk_reductions_are_few():
    def kernel(v):
        v.partition((8,)).multimem_bulk_store((0,), T.zeros((8,), v.dtype), T.add)

    assert refused(kernel, v=multicast(f64)) == (
        "multimem_bulk_store to `v`: reduction: addf takes f16, bf16, f32, got f64"
    )


def test_tiles_have_the_shape_and_type_of_the_partition():
    def shape(v):
        v.partition((64,)).multimem_store((0,), T.zeros((32,), v.dtype))

    def dtype(v):
        v.partition((64,)).multimem_store((0,), T.zeros((64,), T.i32))

    assert refused(shape) == "multimem_store to `v`: tile: expected f32[64], got f32[32]"
    assert refused(dtype) == (
        "multimem_store to `v`: tile: expected f32[64], got i32[64]; convert it with .astype(v.dtype)"
    )


# ---------------------------------------------------------------- orders, scopes, words


def test_orders_that_an_operation_has_not():
    def load(v):
        v.partition((64,)).multimem_load_reduce((0,), T.add, order=T.release)

    def update(v):
        v.partition((64,)).multimem_reduce((0,), T.add, 1.0, order=T.weak)

    def store(v):
        v.partition((64,)).multimem_store((0,), 1.0, order=T.acquire)

    def scoped(v):
        v.partition((64,)).multimem_store((0,), 1.0, order=T.relaxed, scope=T.device)

    def weak(v):
        v.partition((64,)).multimem_load_reduce((0,), T.add, scope=T.system)

    assert refused(load) == (
        "multimem_load_reduce of `v`: order: expected one of T.weak, T.relaxed, T.acquire, got T.release"
    )
    assert refused(update) == "multimem_reduce of `v`: order: expected one of T.relaxed, T.release, got T.weak"
    assert refused(store) == (
        "multimem_store to `v`: order: expected one of T.weak, T.relaxed, T.release, got T.acquire"
    )
    assert refused(scoped) == (
        "multimem_store to `v`: scope: expected T.system on peer memory, got T.device; "
        "other ranks would not be bound to see it"
    )
    assert refused(weak) == (
        "multimem_load_reduce of `v`: scope: a weak access takes none, got T.system; drop it, or give an order"
    )


def test_signals_are_words():
    def floats(v):
        v.multimem_signal(1.0)

    def tiles(vw):
        vw.multimem_signal_add(T.zeros((4,), T.u32))

    assert refused(floats) == "multimem_signal on `v`: expected words of i32, u32, i64, u64, got f32"
    assert refused(tiles) == "multimem_signal_add on `vw`: value: expected a scalar u32, got u32[4]"


@pytest.mark.parametrize("word", ["load((0,), (64,))", "store((0,), 1.0)", "atomic_add((0,), 1.0)", "at(0)", "local"])
def test_ordinary_accesses_do_not_take_a_multicast(word):
    with pytest.raises(CompileError) as caught:
        build_kernel(_with_source(word), {"v": multicast()})
    name = word.split("(")[0]
    assert caught.value.message == (
        f"`v.{name}`: expected an operation on every rank's part, got an ordinary access; write "
        "v.partition(shape).multimem_..., or pass the tensor as T.Peer too and reach one part there"
    )


def _with_source(word):
    def load(v):
        v.load((0,), (64,))

    def store(v):
        v.store((0,), 1.0)

    def atomic_add(v):
        v.atomic_add((0,), 1.0)

    def at(v):
        v.at(0)

    def local(v):
        v.local  # noqa: B018

    return locals()[word.split("(")[0]]


# ---------------------------------------------------------------- at the launch


@pt.kernel
def whole(x: T.Multicast, B: T.Const[int]):
    share = x.partition((B,))
    for i in T.range(x.num_tiles((B,))[0]):
        share.multimem_store((i,), 1.0)


@pt.kernel
def first(x: T.Multicast, B: T.Const[int]):
    x.partition((B,)).multimem_store((0,), 1.0)


@pt.kernel
def anywhere(x: T.Multicast, at: T.i64, B: T.Const[int]):
    x.partition((B,)).multimem_store((at,), 1.0)


@pt.kernel
def promised(x: T.Multicast, at: T.i64, B: T.Const[int]):
    x.partition((B,), in_bounds=True).multimem_store((at,), 1.0)


@pytest.fixture
def heap():
    with pt.SymmetricHeap(pt.init(), 1 << 20) as found:
        yield found


def test_a_partly_overlapping_tile_is_refused(heap):
    x = heap.multicast((100,), pt.f32)
    x.copy_from(np.full(100, 5, np.float32))
    with pytest.raises(LaunchError) as caught:
        whole.grid(1)(x, B=64).sync()
    assert str(caught.value) == (
        "whole: the multicast x: expected an extent of axis 0 of whole tiles of 64, got 100; "
        "a partly overlapping tile is not clipped, so pad the tensor or choose a smaller tile"
    )
    assert x.numpy().tolist() == [5.0] * 100
    whole.grid(1)(x, B=4).sync()
    assert x.numpy().tolist() == [1.0] * 100


def test_a_tile_of_an_empty_tensor_is_refused_and_a_loop_over_none_is_not(heap):
    x = heap.multicast((0,), pt.f32)
    whole.grid(1)(x, B=64).sync()
    with pytest.raises(LaunchError) as caught:
        first.grid(1)(x, B=64).sync()
    assert str(caught.value) == (
        "first: the multicast x: expected an extent of axis 0 of whole tiles of 64, got an empty one; "
        "a partly overlapping tile is not clipped, so pad the tensor or choose a smaller tile"
    )


def test_an_index_outside_is_a_fault_unless_the_caller_promised(heap):
    x = heap.multicast((128,), pt.f32)
    x.copy_from(np.zeros(128, np.float32))
    with pytest.raises(pt.errors.DeviceFault) as caught:
        anywhere.grid(1)(x, at=2, B=64).sync()
    assert "tile index of axis 0 of x is out of bounds" in str(caught.value)
    heap.group.recover()
    promised.grid(1)(x, at=1, B=64).sync()
    assert x.numpy().tolist() == [0.0] * 64 + [1.0] * 64


def test_only_a_multicast_tensor_is_passed_as_one(heap):
    x = heap.empty((128,), pt.f32)
    with pytest.raises(ArgumentError) as caught:
        whole.grid(1)(x, B=64)
    assert str(caught.value) == (
        "x: expected a MulticastTensor (T.Multicast); make one with heap.multicast, got SymmetricTensor"
    )


@pytest.mark.parametrize("dtype", [d for d in ALL_DTYPES if d.name not in MULTICAST_DTYPES], ids=str)
def test_the_heap_makes_no_multicast_of_other_types(heap, dtype):
    before = heap._arena.in_use
    with pytest.raises(ArgumentError) as caught:
        heap.multicast((64,), dtype)
    assert str(caught.value) == f"SymmetricHeap.multicast: dtype: expected one of {NAMES}, got {dtype}"
    assert heap._arena.in_use == before


# ---------------------------------------------------------------- addresses


@pt.kernel(unsafe=True)
def by_address(x: T.Pointer, total: T.Peer, first: T.i64, count: T.i64, B: T.Const[int]):
    view = T.unsafe.multicast_view(T.unsafe.multicast(x) + 16 + first - 16, count)
    share = view.partition((B,))
    for i in T.range(view.num_tiles((B,))[0]):
        share.multimem_store((i,), 2.0)
    T.unsafe.fence_alias()
    total.local.store((0,), share.multimem_load_reduce((0,), T.add))


def test_an_address_and_integers_added_to_it_stay_multicast(heap):
    x, total = heap.multicast((8, 16), pt.f32), heap.zeros((16,), pt.f32)
    x.copy_from(np.ones((8, 16), np.float32))
    by_address.grid(1)(x.pointer(), total, first=32, count=64, B=16).sync()
    assert x.numpy().ravel().tolist() == [1.0] * 32 + [2.0] * 64 + [1.0] * 32
    assert total.numpy().tolist() == [2.0] * 16


def test_an_ordinary_address_is_no_multicast_mapping(heap):
    x, total = pt.zeros((128,), pt.f32), heap.zeros((16,), pt.f32)
    with pytest.raises(CompileError) as caught:
        by_address.grid(1)(x.pointer(), total, first=32, count=64, B=16).sync()
    assert caught.value.message == (
        "T.unsafe.multicast: pointer: expected a multicast mapping, as MulticastTensor.pointer() gives, got ptr<f32>; "
        "saying so makes none of it"
    )


@pytest.mark.parametrize(("first", "count", "what"), [(8, 64, "begins"), (32, 24, "ends")])
def test_a_view_cuts_no_tile(heap, first, count, what):
    x, total = heap.multicast((128,), pt.f32), heap.zeros((16,), pt.f32)
    with pytest.raises(pt.errors.DeviceFault) as caught:
        by_address.grid(1)(x.pointer(), total, first=first, count=count, B=16).sync()
    assert f"the view {what} inside a tile of 16, and a part of a tile is not clipped" in str(caught.value)
    heap.group.recover()


def test_ordinary_accesses_do_not_take_a_multicast_address():
    def load(mptr):
        T.unsafe.load_ptr(mptr, order=T.weak)

    def store(mptr):
        T.unsafe.store_ptr(T.unsafe.multicast(mptr) + 3, 1.0, order=T.weak)

    def update(mptr):
        T.unsafe.atomic_rmw(mptr, T.Rmw.ADD, 1.0, order=T.relaxed, scope=T.system)

    def swap(mptr):
        T.unsafe.atomic_cas(mptr, 0.0, 1.0, order=T.relaxed, scope=T.system)

    def peer(mptr):
        T.unsafe.unicast(mptr)

    words = {"load_ptr": load, "store_ptr": store, "atomic_rmw": update, "atomic_cas": swap, "unicast": peer}
    for word, kernel in words.items():
        assert refused(kernel, unsafe=True) == (
            f"T.unsafe.{word}: pointer: expected an ordinary or a unicast address, got the multicast address `mptr`; "
            "view it with T.unsafe.multicast_view and use its multimem operations"
        )


def test_an_address_is_one_and_is_classified_before_it_is_viewed():
    def tile(mptr):
        T.unsafe.multicast(mptr) + T.iota(64)

    def view(mptr):
        T.unsafe.multicast_view(mptr, 64)

    assert refused(tile, unsafe=True) == (
        "`+`: expected a multicast address and a scalar integer offset, got the multicast address `mptr` and i64[64]; "
        "view the elements with T.unsafe.multicast_view(pointer, extent), and cut the view"
    )
    assert refused(view, unsafe=True) == (
        "T.unsafe.multicast_view: pointer: expected T.unsafe.multicast(pointer), got the multicast address `mptr`"
    )
