"""Every matrix product of the table in the docs compiles to the instruction that the table names, or is refused."""

import pytest
from tests.backends.cuda.util import K, multiplies, view

import peertile as pt
from peertile.backends.cuda.compile import MAX_SHARED_BYTES, compile_kernel, lower_to_text, sass
from peertile.backends.cuda.products import ARCHES, gpu_product
from peertile.dtypes import ALL_DTYPES, DType, dtype_named, f32
from peertile.errors import CompileError
from peertile.frontend.build import build_kernel
from peertile.ir import ops
from peertile.ir.ops import MMA_TYPES, Precision
from peertile.ir.types import TileType
from peertile.library import gemm, products
from peertile.passes.pipeline import run_pipeline

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


def in_wide_tiles():
    """A product of 1024 x 640 x 256 as the library makes one in tiles of 128 x 320."""
    a, b, c = (pt.tensor_spec(shape, pt.bf16) for shape in ((1024, 256), (256, 640), (1024, 640)))
    arguments = {
        "c": c[:, :512].partition((128, 256)).persistent(swizzle=16).exclusive_argument(),
        "edge": c[:, 512:].partition((128, products.SIDE)).persistent(swizzle=16).exclusive_argument(),
        "a": a.shared_argument(), "b": b[:, :512].shared_argument(), "side": b[:, 512:].shared_argument(),
    }  # fmt: skip
    types = {name: argument.type for name, argument in arguments.items()}
    consts = dict(zip(("BK", "STAGES"), products.WIDE, strict=True))
    return run_pipeline(build_kernel(gemm.gemm_wide.fn, types, consts, name="gemm_wide"))


def test_a_wide_tile_is_stored_in_pieces_that_share_their_memory():
    text = lower_to_text(in_wide_tiles())
    assert text.count("block_shape=[128, 64]") == 2
    assert text.count("c_tiles.store(") == 4
    assert text.count("edge_tiles.store(") == 1
    assert [f"_column + {64 * k}]" in text for k in range(5)] == [False, True, True, True, False]
    assert "flatten" not in text


@pytest.mark.slow
def test_both_products_of_a_wide_tile_are_under_way_together():
    """The assembler waits for the end of each instruction where it sees a sum changed under one, and for two of them in
    turn else: at the end of a trip, and behind the loop."""
    binary = compile_kernel(in_wide_tiles())
    assert binary.shared_bytes <= MAX_SHARED_BYTES[90]
    assert "num_stages=7" in binary.text["triton"]
    assert "wgmma.wait_group.sync.aligned 2;" in binary.text["ptx"]
    code = sass(binary)
    assert code.count("HGMMA.64x256x16") == code.count("HGMMA.64x64x16") == 2
    assert code.count("WARPGROUP.DEPBAR") == 2
