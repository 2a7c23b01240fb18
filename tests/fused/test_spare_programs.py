"""Persistent partitions whose first programs own no tile: who owns what, the text form, and bad numbers."""

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import ArgumentError, CompileError
from peertile.ir.types import Partition


@pt.kernel
def owners(z: T.Exclusive):
    for tile in z.tiles():
        tile.store(tile.load() + T.program_id(0))


@pytest.mark.any_device
@pytest.mark.feature("K3", "cpu")
@pytest.mark.parametrize(("programs", "spare"), [(1, 0), (2, 1), (7, 3), (40, 39)])
@pytest.mark.parametrize("rows", [0, 1, 13])
def test_every_tile_has_one_owner_and_none_is_spare(programs, spare, rows):
    z = pt.zeros((rows, 4), pt.i64)
    owners(z.partition((2, 4)).persistent(programs=programs, spare=spare)).sync()
    expected = spare + np.arange(rows) // 2 % (programs - spare)
    assert np.array_equal(z.numpy(), np.repeat(expected[:, None], 4, 1))


@pt.kernel
def owners_of_two(y: T.Exclusive, z: T.Exclusive, DEALT: T.Const[int], DOWN: T.Const[bool]):
    for tile in y.tiles():
        tile.store(T.full(tile.tile_shape, T.program_id(0), T.i64))
    for tile in z.tiles(dealt=y.num_tiles()[0] + DEALT, down=DOWN):
        tile.store(T.full(tile.tile_shape, T.program_id(0), T.i64))


@pytest.mark.any_device
@pytest.mark.feature("K3", "cpu")
@pytest.mark.parametrize(("programs", "spare"), [(1, 0), (5, 0), (7, 3)])
@pytest.mark.parametrize("down", [False, True])
def test_dealing_goes_on_where_another_partition_ended(programs, spare, down):
    y, z = pt.full((8,), -1, pt.i64), pt.full((13,), -1, pt.i64)
    parts = [t.partition(1).persistent(programs=programs, spare=spare) for t in (y, z)]
    owners_of_two(*parts, DEALT=0, DOWN=down).sync()
    dealt = spare + np.arange(8 + 13) % (programs - spare)
    assert np.array_equal(y.numpy(), dealt[:8])
    assert np.array_equal(z.numpy(), dealt[8:][::-1] if down else dealt[8:])
    counts = np.bincount(np.concatenate([y.numpy(), z.numpy()]), minlength=programs)[spare:]
    assert counts.max() - counts.min() <= 1
    owners_of_two(*parts, DEALT=10**6, DOWN=down).sync()
    assert sorted(z.numpy()) == sorted(spare + (np.arange(13) + 8 + 10**6) % (programs - spare))


@pt.kernel
def last_first(z: T.Exclusive):
    for tile in z.tiles(down=True):
        tile.store(T.full(tile.tile_shape, T.program_id(0), T.i64))


@pytest.mark.any_device
def test_programs_with_a_tile_each_may_take_them_from_the_last_on():
    z = pt.zeros((3, 10), pt.i64)
    last_first(z.partition((1, 4))).sync()
    assert z.numpy()[:, [0, 4, 8]].tolist() == [[8, 7, 6], [5, 4, 3], [2, 1, 0]]


@pt.kernel
def evenly(z: T.Exclusive, DOWN: T.Const[bool]):
    for tile in z.tiles(down=DOWN, even=True):
        tile.store(T.full(tile.tile_shape, T.program_id(0), T.i64))


@pytest.mark.any_device
@pytest.mark.feature("K3", "cpu")
@pytest.mark.parametrize(("programs", "spare"), [(1, 0), (4, 0), (7, 3)])
@pytest.mark.parametrize("count", [0, 4, 27])
@pytest.mark.parametrize("down", [False, True])
def test_every_other_round_before_the_last_is_dealt_the_other_way_round(programs, spare, count, down):
    z = pt.full((count,), -1, pt.i64)
    evenly(z.partition(1).persistent(programs=programs, spare=spare), DOWN=down).sync()
    width = programs - spare
    rounds = [np.arange(min(width, count - first)) for first in range(0, count, width)]
    dealt = [row if k % 2 == 0 else row[::-1] for k, row in enumerate(reversed(rounds))][::-1]
    expected = spare + np.concatenate([np.zeros(0, np.int64), *dealt])
    assert np.array_equal(z.numpy(), expected[::-1] if down else expected)


@pytest.mark.any_device
def test_even_rounds_change_nothing_for_programs_with_one_tile_each():
    z = pt.full((5,), -1, pt.i64)
    evenly(z.partition(1), DOWN=False).sync()
    assert z.numpy().tolist() == [0, 1, 2, 3, 4]


def test_rounds_of_tiles_that_take_longer_and_longer_come_out_even():
    z = pt.zeros((512,), pt.i64)
    evenly(z.partition(1).persistent(programs=132), DOWN=True).sync()
    taken = np.bincount(z.numpy(), np.arange(512) // 16 + 1, 132)  # what causal attention of 16 heads takes
    assert set(taken.tolist()) == {64}


@pt.kernel
def dealt_one(z: T.Exclusive):
    for tile in z.tiles(dealt=1):
        tile.store(tile.load())


def test_tiles_of_programs_with_one_each_are_not_dealt():
    with pytest.raises(CompileError) as error:
        dealt_one(pt.zeros((4,), pt.f32).partition(2)).sync()
    assert error.value.message == (
        "`z.tiles`: dealt: expected a persistent partition, whose programs have several tiles; leave dealt out, or make "
        "the partition persistent"
    )


@pt.kernel
def side_by_side(y: T.Exclusive, z: T.Exclusive, DEALT: T.Const[int]):
    for tile, other in zip(y.tiles(dealt=DEALT), z.tiles(dealt=DEALT), strict=False):
        tile.store(T.full(tile.tile_shape, T.program_id(0), T.i64))
        i, j = other.index
        m, n = tile.index
        other.store(T.full(other.tile_shape, T.program_id(0) * 1000 + (i - m + j - n), T.i64))


@pytest.mark.any_device
@pytest.mark.feature("K3", "cpu")
@pytest.mark.parametrize(("programs", "spare"), [(1, 0), (5, 0), (7, 3)])
@pytest.mark.parametrize(("rows", "wide"), [(4, 3), (0, 3), (9, 1)])
def test_tiles_of_two_panels_are_walked_side_by_side(programs, spare, rows, wide):
    c = pt.full((2 * rows, 5 * wide), -1, pt.i64)
    left, right = (
        part.partition(tile).persistent(programs=programs, spare=spare, swizzle=2)
        for part, tile in ((c[:, : 4 * wide], (2, 4)), (c[:, 4 * wide :], (2, 1)))
    )
    side_by_side(left, right, DEALT=3).sync()
    owners = c.numpy()[::2, : 4 * wide : 4]
    assert np.array_equal(np.repeat(np.repeat(owners, 2, 0), 4, 1), c.numpy()[:, : 4 * wide])
    assert np.array_equal(np.repeat(owners, 2, 0) * 1000, c.numpy()[:, 4 * wide :])
    counts = np.bincount(owners.ravel(), minlength=programs)
    assert not counts[:spare].any()
    assert counts[spare:].max() - counts[spare:].min() <= 1


@pytest.mark.any_device
@pytest.mark.parametrize(("first", "second"), [(3, 5), (5, 3)])
def test_the_partition_with_the_fewest_tiles_ends_a_walk_side_by_side(first, second):
    y, z = pt.full((first, 1), -1, pt.i64), pt.full((second, 1), -1, pt.i64)
    side_by_side(*(t.partition((1, 1)).persistent(programs=2) for t in (y, z)), DEALT=0).sync()
    assert y.numpy().ravel().tolist() == [0, 1, 0, -1, -1][:first]
    assert z.numpy().ravel().tolist() == [0, 1000, 0, -1, -1][:second]


@pt.kernel
def zipped_with_a_range(z: T.Exclusive):
    for tile, _ in zip(z.tiles(), T.range(3), strict=False):
        tile.store(tile.load())


@pt.kernel
def zipped_strictly(y: T.Exclusive, z: T.Exclusive):
    for tile, other in zip(y.tiles(), z.tiles(), strict=True):
        tile.store(other.load())


@pt.kernel
def zipped_twice(y: T.Exclusive, z: T.Exclusive):
    for tile, other in zip(z.tiles(), z.tiles(), strict=False):
        tile.store(other.load())


@pt.kernel
def zipped(y: T.Exclusive, z: T.Exclusive):
    for tile, other in zip(y.tiles(), z.tiles(), strict=False):
        tile.store(other.load())


def test_what_cannot_be_walked_side_by_side_is_refused():
    y, z = (pt.zeros((4,), pt.f32).partition(2).persistent(programs=2) for _ in range(2))
    spare = pt.zeros((4,), pt.f32).partition(2).persistent(programs=2, spare=1)
    for op, message in (
        (lambda: zipped_with_a_range(z), "zip: expected z.tiles() of each partition, got a loop range; use T.range, and "
         "the index"),
        (lambda: zipped_strictly(y, z), "zip: expected no option but strict=False; the partition with the fewest tiles "
         "ends the loop"),
        (lambda: zipped_twice(y, z), "zip: expected different partitions, got `z` twice"),
        (lambda: zipped(y, spare), "zip: expected partitions that are dealt alike, got `y`, `z`; make all of them "
         "persistent or none, with the same spare, dealt, down and even"),
    ):  # fmt: skip
        with pytest.raises(CompileError) as error:
            op().sync()
        assert error.value.message == message


@pytest.mark.any_device
def test_by_default_the_spare_programs_come_on_top_of_those_that_have_tiles():
    part = pt.zeros((2, 4), pt.f32).partition((2, 4)).persistent(spare=3)
    assert part.grid() == 4
    assert part.prefix(1).grid() == 4


def test_the_number_of_spare_programs_is_checked():
    part = pt.zeros((2, 4), pt.f32).partition((2, 4))
    with pytest.raises(ArgumentError) as error:
        part.persistent(programs=3, spare=3)
    assert str(error.value) == (
        "persistent: spare: expected fewer than the 3 programs, got 3; one program at least has to own the tiles"
    )


def test_spare_programs_are_part_of_the_type():
    assert str(Partition((2, 4), True, 2, 3)) == "tile=[2, 4], persistent, swizzle=2, spare=3"
