"""A tensor shared between devices of one process: kernels of each use the one buffer."""

import threading

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import ArgumentError
from peertile.runtime.registry import open_device, use_device


@pt.kernel
def add_mine(x: T.Peer, rounds: T.i32, mine: T.i64):
    for _ in T.range(rounds):
        T.atom_add(x, mine, (0,))
    x.local.store((mine,), T.full((1,), x.num_ranks * 100 + x.rank + mine, T.i64))


@pt.kernel
def look(z: T.Exclusive, x: T.Peer[T.read]):
    z.store(x.at(0).load(z.index, z.tile_shape))


@pt.kernel
def passes_on(x: T.Peer, turn: T.i32, rounds: T.i32):
    """Two devices count one word up in turn."""
    for k in T.range(rounds):
        T.wait_ge(x, 2 * k + turn, (0,))
        T.st(x, (2 * k + turn + 1).astype(T.i64), (0,), order=T.release)


@pytest.fixture
def other():
    device = open_device()
    yield device
    use_device(None)
    device.close()


@pytest.mark.feature("D2", "cpu")
def test_kernels_of_both_devices_write_one_buffer(other):
    x = pt.zeros((4,), pt.i64)
    shared = x.share_with([other])
    add_mine.grid(1)(shared, 10, 1).sync()
    use_device(other)
    add_mine.grid(1)(shared, 10, 2).sync()
    z = other.empty((4,), pt.i64)
    look(z.partition(2), shared).sync()
    assert z.numpy().tolist() == [30, 101, 102, 0]
    use_device(None)
    assert x.numpy().tolist() == shared.numpy().tolist() == [30, 101, 102, 0]


@pytest.mark.feature("D2", "cpu")
def test_kernels_of_both_devices_run_at_once_and_hand_a_word_over(other):
    x = pt.zeros((1,), pt.i64)
    shared = x.share_with([other])

    def second():
        use_device(other)
        passes_on.grid(1)(shared, 1, 100).sync()

    thread = threading.Thread(target=second)
    thread.start()
    passes_on.grid(1)(shared, 0, 100).sync()
    thread.join(20)
    assert not thread.is_alive()
    assert x.numpy().tolist() == [200]


def test_a_device_that_it_was_not_shared_with_is_refused(other):
    x = pt.zeros((4,), pt.i64)
    shared = x.share_with([])
    z = other.empty((4,), pt.i64)
    with pytest.raises(ArgumentError, match="x is not shared with cpu:0, where this launch runs"):
        look(z.partition(2), shared)


def test_each_device_is_named_once(other):
    with pytest.raises(ArgumentError, match="expected each device once"):
        pt.zeros((4,), pt.i64).share_with([other, other])
    assert np.all(pt.zeros((4,), pt.i64).share_with([other]).local.numpy() == 0)


@pytest.mark.parametrize("wrong", [None, 3, "cpu"])
def test_the_devices_are_a_sequence(other, wrong):
    x = pt.zeros((4,), pt.i64)
    with pytest.raises(ArgumentError) as caught:
        x.share_with(wrong)
    assert str(caught.value) == (f"share_with(devices): expected a sequence of devices, got {wrong!r}; write [device]")
    with pytest.raises(ArgumentError, match=r"expected a sequence of devices, got .*Device"):
        x.share_with(other)


def test_a_tensor_that_is_not_shared_is_no_peer():
    z = pt.zeros((4,), pt.i64)
    with pytest.raises(ArgumentError) as caught:
        look(z.partition(2), pt.zeros((4,), pt.i64))
    assert str(caught.value) == "x: expected a SymmetricTensor (T.Peer); make one with heap.empty, got Tensor"
