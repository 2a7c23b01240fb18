"""The cuda driver over a stand-in for the NVIDIA driver: everything that it decides itself, without a GPU."""

import ctypes
import os
import struct
import threading

import pytest

from peertile.errors import (
    AllocationError,
    ArgumentError,
    DeviceFault,
    LaunchError,
    UnsupportedError,
    UsageError,
)
from peertile.memory_model import Cmp
from peertile.runtime.driver import FaultKind, LaunchOptions, ShareKind, Status
from peertile.runtime.drivers import cuda
from peertile.runtime.drivers.cuda import CudaDriver
from peertile.runtime.drivers.cuda_segments import Segments
from peertile.testing.cuda_kernels import LONG_SLOTS, extra_kernel
from peertile.testing.driver_suite import args, holding, options, raises, read_words, words

from .cuda_suite import CudaSuite
from .fake_cuda import SUITE, FakeCuda

SECOND = 1_000_000_000


@pytest.fixture(scope="module")
def shared_device():
    device = CudaDriver(api=FakeCuda()).open()
    yield device
    device.close()


class TestSuiteOverStandIn(CudaSuite):
    @pytest.fixture
    def device(self, shared_device):
        return shared_device

    @pytest.fixture
    def kernels(self):
        return SUITE

    @pytest.fixture
    def extra(self):
        return lambda entry: extra_kernel(b"python", entry)
