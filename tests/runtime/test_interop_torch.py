"""Torch tensors of the host in and out without a copy. Runs where torch is installed; peertile never needs it."""

import gc
import weakref

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import LeaseError

torch = pytest.importorskip("torch")

DTYPES = {
    "bool": pt.bool_, "int8": pt.i8, "int16": pt.i16, "int32": pt.i32, "int64": pt.i64, "uint8": pt.u8,
    "uint16": pt.u16, "uint32": pt.u32, "uint64": pt.u64, "float16": pt.f16, "bfloat16": pt.bf16, "float32": pt.f32,
    "float64": pt.f64, "float8_e4m3fn": pt.f8e4m3, "float8_e5m2": pt.f8e5m2,
}  # fmt: skip


@pt.kernel
def add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


@pytest.mark.feature("H15", "cpu")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_crosses_both_ways_in_place(name):
    theirs = torch.zeros(2, 3, dtype=getattr(torch, name))
    ours = pt.from_dlpack(theirs)
    assert (ours.dtype, ours.shape, ours.strides, ours.address) == (DTYPES[name], (2, 3), (3, 1), theirs.data_ptr())
    back = torch.from_dlpack(pt.zeros((2, 3), DTYPES[name]))
    assert (back.dtype, tuple(back.shape)) == (getattr(torch, name), (2, 3))


@pytest.mark.feature("H15", "cpu")
def test_a_kernel_reads_and_writes_torch_memory_and_views_of_it():
    x = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    z = torch.full((3, 4), -1.0)
    columns = x.t()[::2]  # strides (2, 6)
    ours = pt.from_dlpack(columns)
    assert (ours.shape, ours.strides) == ((3, 4), (2, 6))
    add(pt.from_dlpack(z).partition((4, 4)), ours, ours).sync()
    assert torch.equal(z, columns + columns)
    out = pt.ones(8, pt.f32)
    torch.from_dlpack(out).mul_(3)
    assert out.numpy().tolist() == [3] * 8


@pytest.mark.feature("H15", "cpu")
def test_each_side_keeps_the_other_s_memory_alive(hold):
    device = pt.current_device()
    stream = device.stream()
    theirs = torch.ones(1000)
    gone = weakref.ref(theirs)
    z = pt.zeros(1000, pt.f32)
    with hold(stream):
        ours = pt.from_dlpack(theirs)
        add(z.partition(1024), ours, ours).submit(stream)
        del theirs, ours
        gc.collect()
        noise = [torch.full((1000,), 9.0) for _ in range(50)]  # would take the memory if it were free
    stream.sync()
    assert (z.numpy() == 2).all()
    del noise
    pt.live_submissions()
    gc.collect()
    assert gone() is None
    before = device.memory().in_use
    theirs = torch.from_dlpack(pt.full(1000, 4, pt.f32))
    gc.collect()
    assert float(theirs.sum()) == 4000
    assert device.memory().in_use > before
    del theirs
    gc.collect()
    assert device.memory().in_use == before


@pytest.mark.feature("H15", "cpu")
def test_torch_views_of_one_memory_are_leased_as_one(hold):
    device = pt.current_device()
    a, b = device.stream("a"), device.stream("b")
    theirs = torch.zeros(64)
    left, right = pt.from_dlpack(theirs[:40]), pt.from_dlpack(theirs[24:])
    with hold(a):
        pt.op.fill(left, 1).submit(a)
        with pytest.raises(LeaseError) as caught:
            pt.op.fill(right, 2).submit(b)
        assert "would write DLPack array f32[40], but fill on a" in str(caught.value)
        pt.op.fill(pt.from_dlpack(theirs[40:]), 3).sync_on(b)
    a.sync()
    assert theirs.tolist() == [1] * 40 + [3] * 24


@pytest.mark.feature("H15", "cpu")
def test_a_tensor_that_needs_a_gradient_is_refused_by_torch_and_a_parameter_s_data_is_not():
    parameter = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(BufferError):
        pt.from_dlpack(parameter)
    assert pt.from_dlpack(parameter.detach()).numpy().tolist() == [1] * 4


@pytest.mark.feature("H15", "cpu")
def test_numpy_in_between_changes_nothing():
    theirs = torch.arange(6, dtype=torch.int32)
    ours = pt.from_dlpack(theirs.numpy())
    pt.op.fill(ours, 5).sync()
    assert theirs.tolist() == [5] * 6
    np.testing.assert_array_equal(np.from_dlpack(ours), theirs.numpy())
