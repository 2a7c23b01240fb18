"""Kernels through the public API on a cuda device whose NVIDIA driver is a stand-in: what is compiled, kept and loaded."""

import numpy as np
import pytest
from tests.runtime.fake_cuda import FakeCuda

import peertile as pt
import peertile.language as T
from peertile.backends.cuda.binary import CudaBinary
from peertile.direct import CudaCompiler, for_arch
from peertile.runtime.device import Device
from peertile.runtime.drivers.cuda import CudaDriver

pytestmark = pytest.mark.usefixtures("triton_needed")


@pt.kernel
def add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


@pt.kernel
def product(c: T.Exclusive, a: T.Shared, b: T.Shared):
    for tile in c.tiles():
        m, n = tile.index
        acc = T.zeros(tile.tile_shape, T.f32)
        for k in T.range(a.num_tiles((64, 64))[1]):
            acc = T.mma(a.load((m, k), (128, 64)), b.load((k, n), (64, 128)), acc)
        tile.store(acc.astype(c.dtype))


@pytest.fixture
def device():
    device = Device(CudaDriver(api=FakeCuda(multiprocessors=12)).open())
    pt.use_device(device)
    yield device
    pt.use_device(None)
    device.close()


@pytest.mark.slow
def test_a_kernel_is_compiled_for_the_device_that_it_runs_on(device):
    z, x = pt.tensor_spec((1000,), pt.f32), pt.tensor_spec((1000,), pt.f32)
    here = add(z.partition(256), x, x).compiled()
    assert isinstance(here.binary, CudaBinary)
    assert (here.binary.target, device.target) == ("cuda:sm_90", "sm_90")
    assert {"ir", "lowered", "triton", "ptx"} <= set(here.compiled.stages())
    pt.use_device(None)
    z, x = pt.tensor_spec((1000,), pt.f32), pt.tensor_spec((1000,), pt.f32)
    there = add(z.partition(256), x, x).compiled()
    assert there.binary.target == "cpu"
    assert there.compiled.checks == here.compiled.checks


def test_a_cached_binary_is_the_same(device):
    z, x = pt.tensor_spec((1000,), pt.f32), pt.tensor_spec((1000,), pt.f32)
    binaries = [pt.kernel(add.fn)(z.partition(256), x, x).compiled().binary for _ in range(2)]
    assert binaries[0] == binaries[1]
    assert binaries[1].layout == binaries[0].layout


@pytest.mark.slow
def test_arguments_that_bulk_copies_cannot_take_get_a_kernel_without_them(device):
    a, b = pt.zeros((8, 64), pt.bf16), pt.zeros((64, 64), pt.bf16)
    repeated, c = a.strided((8, 64), (0, 1)), pt.zeros((8, 64), pt.bf16)
    assert product(c.partition((128, 128)).persistent(), a, b).compiled().binary.layout.extents
    op = product(c.partition((128, 128)).persistent(), repeated, b)
    ready = op._prepare()
    spec = ready.spec
    assert spec.binary.layout.extents == ()
    assert spec.binary.fits(ready.args)
    assert op.bound.spec is spec


def test_the_compiler_of_an_architecture_is_equal_by_what_it_makes():
    assert for_arch("sm_90") == CudaCompiler("sm_90", True)
    assert for_arch("sm_90") != for_arch("sm_90", descriptors=False)


def test_a_persistent_partition_has_one_program_for_each_multiprocessor(device):
    assert device.persistent_programs == device.capabilities.executors
    c = pt.tensor_spec((64 * 100, 64), pt.bf16)
    assert c.partition((64, 64)).persistent().grid() == device.persistent_programs


def test_tensors_live_on_the_device(device):
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    x = pt.asarray(a)
    assert x.device is device
    assert (x.numpy() == a).all()
    assert pt.full((2, 3), 1.5, pt.f64).numpy().tolist() == [[1.5] * 3] * 2
    x.copy_from(a + 1)
    assert (pt.op.copy(x).sync() == a + 1).all()


def test_devices_are_opened_by_kind():
    assert pt.open_device(pt.DriverKind.CPU).target is None
    with pytest.raises(pt.UnsupportedError) as caught:
        pt.open_device(pt.DriverKind.SIM)
    assert str(caught.value) == "device: sim has no devices to open; use cpu or cuda"
