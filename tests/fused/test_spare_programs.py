"""Persistent partitions whose first programs own no tile: who owns what, the text form, and bad numbers."""

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import ArgumentError
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
