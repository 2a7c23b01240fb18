"""The cpu driver keeps the driver protocol."""

import pytest

from peertile.runtime.drivers.cpu import CpuDriver
from peertile.testing.cpu_kernels import cpu_kernels
from peertile.testing.driver_suite import DriverSuite


@pytest.fixture(scope="module")
def kernels():
    return cpu_kernels()


@pytest.fixture(scope="module")
def one_thread():
    device = CpuDriver(threads=1, poison=True).open()
    yield device
    device.close()


@pytest.fixture(scope="module")
def three_threads():
    device = CpuDriver(threads=3, poison=True).open()
    yield device
    device.close()


class TestOneThread(DriverSuite):
    @pytest.fixture
    def device(self, one_thread):
        return one_thread


class TestThreeThreads(DriverSuite):
    """With helpers: also more threads than small machines have cores."""

    @pytest.fixture
    def device(self, three_threads):
        return three_threads
