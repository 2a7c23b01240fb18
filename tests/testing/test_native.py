"""Native runs of tile IR on numpy arrays: what a GPU's argument block holds, over a stand-in for the device."""

import ctypes
import struct
from types import SimpleNamespace

import numpy as np

from peertile.ir.text import parse_kernel
from peertile.testing import native

KERNEL = """
kernel @scaled(%x: view<f32, 2, read_write>, %n: i64, %f: f32, %c: bool) {
  return()
}
"""


class Driver:
    """Device memory is host memory of its own, so that its addresses differ from those of the arrays."""

    def __init__(self):
        self.taken, self.block = {}, None

    def load_module(self, binary):
        return binary

    def unload_module(self, module):
        pass

    def allocate(self, nbytes):
        memory = ctypes.create_string_buffer(nbytes)
        self.taken[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address):
        del self.taken[address]

    def copy(self, stream, dst, src, nbytes):
        ctypes.memmove(dst, src, nbytes)

    def launch_sync(self, stream, module, grid, block, options):
        self.block = block
        (address,) = struct.unpack_from("<q", block)
        row = (ctypes.c_float * 3).from_address(address)
        row[:] = [2 * value for value in row]


def run(monkeypatch, *args):
    driver = Driver()
    device = SimpleNamespace(
        target="sm_90", driver=driver, default_stream=SimpleNamespace(handle=None), wait_ticket=lambda ticket: None
    )
    monkeypatch.setattr(native, "compile_for_gpu", lambda kernel, target, keep: b"")
    assert native.run_native(parse_kernel(KERNEL), 1, args, device) is None
    assert not driver.taken
    return driver.block


def test_scalars_travel_by_value_as_numbers_and_as_arrays_of_rank_0(monkeypatch):
    for make in (lambda value, dtype: value, np.asarray):
        x = np.ones((2, 3), np.float32)
        block = run(monkeypatch, x, make(-7, np.int64), make(1.5, np.float32), make(True, np.bool_))
        assert struct.unpack_from("<4q", block, 8) == (2, 3, 3, 1)
        assert struct.unpack_from("<q", block, 40) == (-7,)
        assert struct.unpack_from("<f", block, 48) == (1.5,)
        assert block[56] == 1
        assert len(block) == 64
        np.testing.assert_array_equal(x, [[2, 2, 2], [1, 1, 1]])
