"""A collective of the same tensors again and again takes a short way on the host; it is refused where a new one is."""

import gc
import weakref

import numpy as np
import pytest

import peertile as pt
from peertile.errors import LeaseError, PeerFailed, UsageError
from peertile.library.collectives import Collectives
from peertile.library.reductions import ReduceOp

pytestmark = pytest.mark.feature("A1", "cpu")


@pytest.fixture
def comm():
    with Collectives(pt.init()) as comm:
        yield comm


def vector(n, value):
    return pt.asarray(np.full(n, value, np.float32))


@pytest.mark.parametrize("n", [16, 100_000])
def test_it_sees_what_its_tensors_hold_now(comm, n):
    x, out = vector(n, 0), pt.empty((n,), pt.f32)
    for value in range(1, 6):
        x.copy_from(np.full(n, value, np.float32))
        assert comm.all_reduce(x, out).sync() is out
        assert (out.numpy() == value).all()


def test_it_runs_on_the_stream_that_is_named_and_then_there(comm):
    device = pt.current_device()
    a, b = device.stream("a"), device.stream("b")
    x, out = vector(16, 3), pt.empty((16,), pt.f32)
    for stream in (a, a, b, b, a):
        comm.all_reduce(x, out).sync_on(stream)
        assert comm.all_reduce(x, out).preferred_stream() is stream
        comm.all_reduce(x, out).sync()
    assert (out.numpy() == 3).all()


def test_an_output_that_is_lent_out_is_refused_and_taken_again_afterwards(comm):
    x, out = vector(16, 3), pt.empty((16,), pt.f32)
    for _ in range(3):
        comm.all_reduce(x, out).sync()
    view = out.view()
    with pytest.raises(LeaseError) as caught:
        comm.all_reduce(x, out).sync()
    text = str(caught.value)
    assert text.startswith("lease: all_reduce_one_shot on ")
    assert ") would write a tensor f32[16], but a view of it, made at " in text
    assert text.endswith(" is still held; let go of it first, or write through it")
    del view, caught
    comm.all_reduce(x, out).sync()
    assert (out.numpy() == 3).all()


def test_another_stream_that_uses_a_tensor_is_refused_while_it_does(comm):
    device = pt.current_device()
    a, b, release = (device.stream(name) for name in ("a", "b", "release"))
    word = pt.zeros(1, pt.u32)
    x, out = vector(16, 3), pt.empty((16,), pt.f32)
    comm.all_reduce(x, out).sync_on(a)
    comm.all_reduce(x, out).sync_on(a)
    held = pt.op.wait_eq(word, 1, timeout_s=20).submit(b)
    try:
        pt.op.fill(x, 5).submit(b)
        with pytest.raises(LeaseError) as caught:
            comm.all_reduce(x, out).sync_on(a)
    finally:
        pt.op.set_signal(word, 1).sync_on(release)
        held.wait(20)
    assert ") would read a tensor f32[16], but fill on b (" in str(caught.value)
    b.sync()
    comm.all_reduce(x, out).sync_on(a)
    assert (out.numpy() == 5).all()
    pt.op.fill(out, 7).sync_on(b)  # between two calls it is anybody's
    assert (out.numpy() == 7).all()


def test_after_a_failure_of_the_group_it_raises_until_the_group_recovers(comm):
    x, out = vector(16, 3), pt.empty((16,), pt.f32)
    for _ in range(3):
        comm.all_reduce(x, out).sync()
    comm.group.fail("a test")
    for _ in range(2):
        with pytest.raises(PeerFailed, match=r"^rank 0 failed: a test$"):
            comm.all_reduce(x, out).sync()
    comm.group.recover()
    comm.all_reduce(x, out).sync()
    assert (out.numpy() == 3).all()


def test_a_closed_communicator_refuses_it():
    x, out = vector(16, 3), pt.empty((16,), pt.f32)
    with Collectives(pt.init()) as comm:
        comm.all_reduce(x, out).sync()
        op = comm.all_reduce(x, out)
    with pytest.raises(UsageError) as caught:
        op.sync()
    assert str(caught.value) == "all_reduce(f32[16], SUM, one_shot): the communicator was closed; use it before that"


def test_its_memory_goes_with_its_tensors(comm):
    x, out = vector(1000, 3), pt.empty((1000,), pt.f32)
    for _ in range(3):
        comm.all_reduce(x, out).sync()
    storages = [weakref.ref(t.storage) for t in (x, out)]
    gc.collect()
    gc.disable()
    try:
        del x, out
        assert [ref() for ref in storages] == [None, None]
    finally:
        gc.enable()


def test_each_reduction_of_the_same_tensors_is_a_call_of_its_own(comm):
    x, out = vector(16, 3), pt.empty((16,), pt.f32)
    for _ in range(3):
        for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG):
            comm.all_reduce(x, out, op).sync()
            assert (out.numpy() == 3).all()
