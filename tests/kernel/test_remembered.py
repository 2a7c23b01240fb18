"""Launches that are recognised: what was found out about one before is used again, and only where it is the same."""

import gc
import weakref

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import ArgumentError, LaunchError

pytestmark = pytest.mark.any_device

factor = 2


@pt.kernel
def named(type: T.Exclusive, Tensor: T.Shared, int: T.i32):
    type.store(Tensor.load_like(type) + int)


@pt.kernel
def by_global(z: T.Exclusive, x: T.Shared):
    z.store(x.load_like(z) * factor)


def tensors(n=8):
    return pt.zeros(n, pt.f32), pt.asarray(np.arange(n, dtype=np.float32))


def launched(kernel):
    """How many launches a kernel remembers."""
    return len(kernel.ready)


@pytest.mark.feature("H2", "cpu")
def test_parameters_may_be_called_as_they_like():
    z, x = pt.zeros(8, pt.i32), pt.ones(8, pt.i32)
    part = z.partition(8)
    for n in (1, 1, 5):
        named(part, x, int=n).sync()
        assert z.numpy().tolist() == [n + 1] * 8


@pytest.mark.feature("H2", "cpu")
def test_a_repeated_launch_binds_nothing(monkeypatch):
    z, x = pt.zeros(8, pt.i32), pt.ones(8, pt.i32)
    part = z.partition(8)
    named(part, x, 3).sync()
    monkeypatch.setattr(type(named), "bind", None)
    op = named(part, x, 3)
    assert op.device is x.device
    op.sync()
    assert z.numpy().tolist() == [4] * 8


@pytest.mark.feature("H2", "cpu")
def test_arguments_that_are_equal_but_not_the_same_are_told_apart():
    z, x = tensors()
    part = z.partition(8)

    @pt.kernel
    def times(z: T.Exclusive, x: T.Shared, by: T.f32):
        z.store(x.load_like(z) * by)

    for by in (2, 2.0, 0.0, -0.0, 1, True, 1.0):
        for _ in range(2):
            times(part, x, by).sync()
            want = np.arange(8, dtype=np.float32) * np.float32(by)
            assert z.numpy().tobytes() == want.tobytes()


@pytest.mark.feature("H2", "cpu")
def test_a_global_that_changes_is_seen():
    global factor
    z, x = tensors()
    part = z.partition(8)
    try:
        for factor in (2, 2, 3, 2):
            by_global(part, x).sync()
            assert z.numpy().tolist() == [factor * n for n in range(8)]
    finally:
        factor = 2


@pytest.mark.feature("H2", "cpu")
def test_what_is_remembered_keeps_no_memory():
    z, x = pt.zeros(8, pt.i32), pt.ones(8, pt.i32)
    storages = weakref.ref(z.storage), weakref.ref(x.storage)
    for _ in range(3):
        named(z.partition(8), x, 1).sync()
    del z, x
    gc.collect()
    assert [ref() for ref in storages] == [None, None]


@pytest.mark.feature("H2", "cpu")
def test_new_memory_at_an_old_address_is_not_taken_for_the_old():
    for n in range(20):
        z, x = pt.zeros(8, pt.i32), pt.full(8, n, pt.i32)
        named(z.partition(8), x, 1).sync()
        assert z.numpy().tolist() == [n + 1] * 8
        del z, x


@pytest.mark.feature("H2", "cpu")
def test_as_many_launches_are_remembered_as_fit():
    z, x = pt.zeros(8, pt.i32), pt.ones(8, pt.i32)
    part = z.partition(8)
    for n in range(1100):
        named(part, x, n).sync()
    assert launched(named) <= 1024
    assert z.numpy().tolist() == [1100] * 8


@pytest.mark.feature("H2", "cpu")
def test_wrong_arguments_are_told_as_ever_after_a_launch_was_remembered():
    z, x = pt.zeros(8, pt.i32), pt.ones(8, pt.i32)
    named(z.partition(8), x, 3).sync()
    with pytest.raises(ArgumentError) as caught:
        named(z.partition(8), x)
    assert str(caught.value) == "named: parameter 'int' (scalar) was not given"
    with pytest.raises(ArgumentError) as caught:
        named(z.partition(8), x, 3, int=3)
    assert str(caught.value) == "named: parameter 'int' was given twice"
    with pytest.raises(ArgumentError) as caught:
        named(z, x, 3)
    assert (
        str(caught.value) == "type: expected a partition (T.Exclusive); write tensor.partition(tile_shape), got Tensor"
    )
    with pytest.raises(LaunchError):
        named(z.partition(8), z, 3).sync()


@pytest.mark.feature("H2", "cpu")
def test_partitions_that_differ_in_programs_alone_are_told_apart():
    @pt.kernel
    def count(z: T.Exclusive):
        for tile in z.tiles():
            tile.store(T.full(tile.tile_shape, T.num_programs(), T.i64))

    z = pt.zeros(64, pt.i64)
    for programs in (1, 2, 4, 2):
        count(z.partition(8).persistent(programs=programs)).sync()
        assert set(z.numpy().tolist()) == {programs}
