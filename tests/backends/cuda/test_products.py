"""Every matrix product of the table in the docs compiles to the instruction that the table names, or is refused."""

import pytest
from tests.backends.cuda.util import K, multiplies, view

from peertile.backends.cuda.compile import compile_kernel
from peertile.backends.cuda.products import ARCHES, gpu_product
from peertile.dtypes import ALL_DTYPES, DType, dtype_named, f32
from peertile.errors import CompileError
from peertile.ir import ops
from peertile.ir.ops import MMA_TYPES, Precision
from peertile.ir.types import TileType

pytestmark = pytest.mark.usefixtures("triton_needed")

ROWS = [(dtype_named(name), Precision.IEEE) for name in MMA_TYPES] + [(f32, Precision.TF32)]


def product(d, precision, batch=()):
    rank, acc = 2 + len(batch), dtype_named(MMA_TYPES[d.name][0])
    k = K("product", x=view(d, rank), y=view(d, rank), z=view(acc, rank))
    zeros = [k.const(0)] * rank
    x, y = k.load(k.x, *zeros, t=TileType(d, (*batch, 64, 32))), k.load(k.y, *zeros, t=TileType(d, (*batch, 32, 64)))
    t = TileType(acc, (*batch, 64, 64))
    k.store(k.z, k.v(ops.Mma, x, y, k.load(k.z, *zeros, t=t), t=t, precision=precision), *zeros)
    return k.done()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("d", "precision"), ROWS, ids=lambda v: v.name if isinstance(v, DType) else v.value)
def test_each_product_is_made_as_the_table_says(d, precision, arch):
    found = gpu_product(d, precision, arch)
    if found is None:
        with pytest.raises(CompileError, match=f"{d} needs sm_89 or newer"):
            compile_kernel(product(d, precision), arch)
        return
    assert multiplies(compile_kernel(product(d, precision), arch).text["ptx"], found.instruction, arch)
    if found.batched is None:
        with pytest.raises(CompileError, match=f"batched {d} is not available on {arch}"):
            compile_kernel(product(d, precision, (2,)), arch)
    else:
        assert multiplies(compile_kernel(product(d, precision, (2,)), arch).text["ptx"], found.batched, arch)


def test_other_types_have_no_product():
    others = [d for d in ALL_DTYPES if d.name not in MMA_TYPES]
    assert all(gpu_product(d, Precision.IEEE, arch) is None for d in others for arch in ARCHES)
    assert gpu_product(dtype_named("f16"), Precision.TF32, "sm_90") is None
