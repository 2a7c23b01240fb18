"""Sentences of docs/concepts/bounds.md that no other test shows: empty axes, edges, and what a failed check does."""

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import OutOfBounds

pytestmark = pytest.mark.any_device


@pt.kernel
def copies(z: T.Exclusive, x: T.Shared, PAD: T.Const):
    z.store(x.load(z.index, z.tile_shape, padding=PAD))


@pytest.mark.sentence("BD-3")
def test_a_store_leaves_what_lies_around_its_view_as_it_was(rng):
    """Views of random extents inside of a larger tensor; the padding is a number that would be seen."""
    for _ in range(6):
        rows, columns = (int(n) for n in rng.integers(1, 40, 2))
        top, left = (int(n) for n in rng.integers(0, 5, 2))
        before = rng.standard_normal((top + rows + 3, left + columns + 4)).astype(np.float32)
        data = rng.standard_normal((rows, columns)).astype(np.float32)
        whole = pt.asarray(before)
        part = whole[top : top + rows, left : left + columns]
        copies(part.partition((8, 16)), pt.asarray(data), PAD=T.Padding.INF).sync()
        before[top : top + rows, left : left + columns] = data
        np.testing.assert_array_equal(whole.numpy(), before)


@pt.kernel
def first_tile(out: T.Exclusive, x: T.Shared, own: T.Peer):
    tile = x.load((0, 0), (4, 8), padding=T.Padding.NEG_INF)
    own.local.store((0,), T.full((8,), 9.0, T.f32))
    out.store(tile)


@pytest.mark.sentence("BD-5")
@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
def test_tile_0_of_an_axis_without_elements_is_all_padding_and_a_store_there_writes_nothing(shape):
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 14) as heap:
        out, own = pt.zeros((4, 8), pt.f32), heap.empty((0,), pt.f32)
        first_tile(out.partition((4, 8)), pt.zeros(shape, pt.f32), own).sync()
        assert (out.numpy() == -np.inf).all()


@pt.kernel
def picks(z: T.Exclusive, x: T.Shared, at: T.Shared):
    index = T.ld(at, (T.program_id(0),))
    z.store(x.load((index,), (4,)))


@pt.kernel
def picks_and_meets(z: T.Exclusive, x: T.Shared, at: T.Shared):
    index = T.ld(at, (T.program_id(0),))
    tile = x.load((index,), (4,))
    T.sync_programs()
    z.store(tile)


@pytest.mark.sentence("BD-23")
def test_a_check_that_fails_ends_its_program_alone_and_the_device_goes_on(rng):
    n, bad = 16, 5
    x = rng.standard_normal(40).astype(np.float32)
    at = rng.integers(0, 10, n)
    at[bad] = 10
    z = pt.full((4 * n,), -7, pt.f32)
    with pytest.raises(OutOfBounds) as caught:
        picks(z.partition(4), pt.asarray(x), pt.asarray(at)).sync()
    assert str(caught.value).startswith(
        f"tile index of axis 0 of x is out of bounds: got 10, limit 10 (program {bad}, "
    )
    rows = z.numpy().reshape(n, 4)
    assert (rows[bad] == -7).all()
    ended = [p for p in range(n) if (rows[p] != -7).any()]  # the others may have ended before they came so far
    assert all((rows[p] == x.reshape(10, 4)[at[p]]).all() for p in ended)
    at[bad] = 3
    picks(z.partition(4), pt.asarray(x), pt.asarray(at)).sync()
    np.testing.assert_array_equal(z.numpy().reshape(n, 4), x.reshape(10, 4)[at])


@pytest.mark.native_only
@pytest.mark.sentence("BD-23")
def test_programs_that_wait_for_one_whose_check_failed_leave_at_their_wait(rng):
    n = 8
    x, at = pt.asarray(rng.standard_normal(40).astype(np.float32)), np.zeros(n, np.int64)
    at[n - 1] = -1
    z = pt.full((4 * n,), -7, pt.f32)
    with pytest.raises(OutOfBounds) as caught:
        picks_and_meets(z.partition(4), x, pt.asarray(at)).sync()
    assert str(caught.value).startswith(
        f"tile index of axis 0 of x is out of bounds: got -1, limit 10 (program {n - 1}, "
    )
    assert (z.numpy() == -7).all()  # nobody passed the barrier
    at[n - 1] = 9
    picks_and_meets(z.partition(4), x, pt.asarray(at)).sync()
    assert not (z.numpy() == -7).any()
