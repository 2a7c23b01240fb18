"""LLVM as a package of Python that may be missing."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules["llvmlite"] = None  # what an import of a package that is not there finds
import peertile as pt
import peertile.language as T

@pt.kernel
def ones(z: T.Exclusive):
    z.store(T.ones(z.tile_shape, z.dtype))

try:
    ones(pt.empty((4,), pt.f32).partition(4)).sync()
except pt.UnsupportedError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_llvmlite_a_kernel_says_what_is_missing(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == (
        "cpu: the Python package llvmlite cannot be imported (import of llvmlite halted; None in sys.modules); "
        "install it, as `pip install peertile` does\n",
        "",
    )
