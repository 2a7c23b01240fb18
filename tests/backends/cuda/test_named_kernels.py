"""The kernels of the library's products and of the benchmarks compile for every architecture, and ptxas takes them."""

import pytest

import peertile as pt
from peertile.backends.cuda.compile import compile_kernel
from peertile.cli import bench_kernels
from peertile.errors import CompileError
from peertile.frontend.build import build_kernel
from peertile.library import gemm
from peertile.passes.pipeline import run_pipeline

pytestmark = [pytest.mark.usefixtures("triton_needed"), pytest.mark.slow]

MAIN = ("sm_80", "sm_90", "sm_100", "sm_103")
N = 1024


def spec(*shape, dtype=pt.f32):
    return pt.tensor_spec(shape, dtype)


def product(dtype, tile, inner, **consts):
    a, b = spec(N, N, dtype=dtype), spec(N, N, dtype=dtype)
    return (spec(N, N, dtype=dtype).partition(tile), a, b), {"BK": inner, **consts}


def vector():
    return spec(N)


def rows():
    return spec(N, N)


CASES = {  # made by the tests: a description of a tensor opens the device, which may be none here
    "vector_add": lambda: (bench_kernels.vector_add, (vector().partition(256), vector(), vector()), {}),
    "chain": lambda: (bench_kernels.chain, (vector().partition(256), vector(), vector()), {}),
    "softmax": lambda: (bench_kernels.softmax, (rows().partition((1, N)), rows()), {}),
    "rmsnorm": lambda: (bench_kernels.rmsnorm, (rows().partition((1, N)), rows(), spec(1, N), 1 / N), {}),
    "partial_sums": lambda: (bench_kernels.partial_sums, (spec(8).partition(1), vector()), {"B": 256}),
    "whole_sum": lambda: (bench_kernels.whole_sum, (spec(1).partition(1), spec(8)), {"W": 8}),
    "matmul": lambda: (bench_kernels.matmul, *product(pt.bf16, (128, 128), 64)),
    "gemm": lambda: (gemm.gemm, *product(pt.f16, (64, 64), 128, STAGES=4)),
    "gemm_persistent": lambda: (gemm.gemm_persistent, *product(pt.bf16, (128, 256), 64, STAGES=4)),
    "gemm_tailed": lambda: (
        gemm.gemm_tailed,
        (
            spec(N, N, dtype=pt.bf16).partition((128, 256)).persistent(programs=8),
            spec(N, N, dtype=pt.bf16).partition((128, 128)).persistent(programs=8),
            *[spec(N, N, dtype=pt.bf16)] * 3,
        ),
        {"BK": 64, "STAGES": 4},
    ),
    "gemm_persistent_tf32": lambda: (gemm.gemm_persistent, *product(pt.f32, (128, 128), 32, STAGES=3, TF32=True)),
    "gemm_part": lambda: (
        gemm.gemm_part,
        (spec(2, N, N).partition((1, 64, 64)), *product(pt.bf16, (64, 64), 64)[0][1:]),
        {"BK": 64, "STAGES": 3},
    ),
    "gemm_fold": lambda: (gemm.gemm_fold, (rows().partition((16, 256)), spec(2, N, N)), {"S": 2}),
    "turn": lambda: (gemm.turn, (rows().partition((64, 64)), rows()), {}),
}


def lowered(kernel, args, consts):
    types = {}
    for param, value in zip(kernel.params, args, strict=False):
        if isinstance(value, float):
            types[param.name] = pt.ir.types.TileType(param.dtype)
        else:
            own = hasattr(value, "exclusive_argument")
            types[param.name] = (value.exclusive_argument() if own else value.shared_argument()).type
    return run_pipeline(build_kernel(kernel.fn, types, consts, name=kernel.name))


@pytest.mark.parametrize("arch", MAIN)
@pytest.mark.parametrize("name", CASES)
def test_a_named_kernel_compiles(name, arch):
    binary = compile_kernel(lowered(*CASES[name]()), arch)
    assert binary.payload.startswith(b"\x7fELF")
    assert binary.target == f"cuda:{arch}"
    assert binary.overlap == (arch != "sm_80")


@pytest.mark.parametrize("arch", MAIN)
def test_products_of_fp8_compile_or_are_refused_by_name(arch):
    case = (gemm.gemm_persistent, *product(pt.f8e4m3, (128, 128), 128))
    if arch == "sm_80":
        with pytest.raises(CompileError, match="f8e4m3 needs sm_89 or newer, and the target is sm_80"):
            compile_kernel(lowered(*case), arch)
    else:
        assert compile_kernel(lowered(*case), arch).payload.startswith(b"\x7fELF")
