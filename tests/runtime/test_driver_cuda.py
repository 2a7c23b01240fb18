"""The cuda driver keeps the driver protocol on a GPU."""

import functools
import subprocess
import sys

import pytest
from tests.runtime.cuda_suite import CudaSuite

from peertile.runtime.driver import ShareKind, Status
from peertile.runtime.drivers.cuda import CudaDriver
from peertile.testing.cuda_kernels import compile_cubin, cuda_kernels, extra_kernel
from peertile.testing.driver_suite import args, holding, options, read_words, words

pytestmark = pytest.mark.cuda


@functools.cache
def arch():
    api = CudaDriver()._api
    device = api.device(0)
    return f"sm_{api.attribute(device, 'COMPUTE_CAPABILITY_MAJOR')}{api.attribute(device, 'COMPUTE_CAPABILITY_MINOR')}"


@pytest.fixture(scope="module")
def gpu():
    device = CudaDriver().open()
    yield device
    device.close()


@pytest.fixture
def device(gpu):
    return gpu


@pytest.fixture(scope="module")
def kernels():
    return cuda_kernels(arch())


@pytest.fixture
def extra():
    return lambda entry: extra_kernel(compile_cubin(arch()), entry)


class TestOneGpu(CudaSuite):
    @pytest.fixture
    def device(self, gpu):
        return gpu


def test_200_kib_of_shared_memory_can_be_used(device, extra):
    s = device.create_stream()
    out = words(device, s, [0])
    kernel = device.load_module(extra("extra_shared"))
    assert device.max_resident(kernel) == device.capabilities.executors
    assert device.launch_sync(s, kernel, (1, 1, 1), args(out), options("shared")) is None
    assert read_words(device, s, out, 1) == [31]


def test_two_grids_that_wait_run_at_the_same_time(device, kernels):
    a, b = device.create_stream(), device.create_stream()
    w, first, second = (words(device, a, v) for v in ([0], [0] * 4, [0] * 4))
    await_word, barrier = device.load_module(kernels.await_word), device.load_module(kernels.barrier)
    waiting = device.launch(a, await_word, (4, 1, 1), args(w, 1, first), options("first"))
    assert device.launch_sync(b, barrier, (4, 1, 1), args(second), options("second")) is None
    device.write_value(b, w, 1, 64)
    assert device.wait(waiting) is Status.DONE


def test_a_wait_of_a_stream_does_not_keep_a_full_grid_from_running(device, kernels):
    a, b = device.create_stream(), device.create_stream()
    barrier = device.load_module(kernels.barrier)
    n = device.max_resident(barrier)
    first, second = words(device, b, [0] * n), words(device, b, [0] * n)
    # Alone first, twice if need be: what other devices of this process left running has a bound, of 30 s at most.
    assert any(device.launch_sync(b, barrier, (n, 1, 1), args(first), options("alone")) is None for _ in range(2))
    with holding(device, a) as held:
        # Its bound is long for a GPU that processes share by slices of time, and ends before that of the wait does.
        assert device.launch_sync(b, barrier, (n, 1, 1), args(second), options("full")) is None
        assert device.query(held) is Status.PENDING
    assert read_words(device, b, second, n) == [n] * n


@pytest.mark.parametrize("kind", [ShareKind.FD, ShareKind.IPC])
def test_segments_of_each_kind_hold_what_is_written(device, kind):
    s = device.create_stream()
    segment, address = device.create_segment(1 << 20, kind)
    assert read_words(device, s, address, 1 << 17) == [0] * (1 << 17)
    share = device.export_segment(segment)
    assert share.kind is kind
    again = device.import_segment(share)
    assert device.map_segment(again) == address
    device.free_segment(again)
    device.free_segment(segment)


ILLEGAL = """
from peertile.errors import DeviceFault
from peertile.runtime.drivers.cuda import CudaDriver
from peertile.testing.cuda_kernels import compile_cubin, extra_kernel
from peertile.testing.driver_suite import args, options
import sys

device = CudaDriver().open()
kernel = device.load_module(extra_kernel(compile_cubin(sys.argv[1]), "extra_illegal"))
s = device.create_stream()
a = device.allocate(64)
bad = device.launch(s, kernel, (1, 1, 1), args(64), options("bad"))
behind = device.fill(s, a, 0, 8, 1)
print(device.wait(bad, 20).value, device.fault(bad).kind.name, device.fault(bad).op)
print(device.wait(behind, 20).value)
try:
    device.allocate(8)
except DeviceFault as error:
    print(error)
device.close()
"""


def test_an_illegal_address_loses_the_device():
    done = subprocess.run(
        [sys.executable, "-c", ILLEGAL, arch()], capture_output=True, text=True, timeout=90, check=False
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("faulted DEVICE"), done.stderr
    assert lines[1] in ("skipped", "faulted")
    assert lines[2].startswith("cuda:0 is lost: an illegal memory access was encountered")
