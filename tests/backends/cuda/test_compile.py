"""Kernels compile to cubins without a GPU, for every architecture, and errors name the user's line."""

import os
import re
import subprocess
import sys

import pytest
from tests.backends.cuda.test_emit import gemm
from tests.backends.cuda.util import K, N, casts, elementwise, memory_ops, multiplies, parsed, view

from peertile.backends.cuda import compile as compiling
from peertile.backends.cuda import ptx, state
from peertile.backends.cuda.binary import CudaBinary
from peertile.backends.cuda.compile import compile_kernel, sass
from peertile.backends.cuda.target import ARCHES, CudaOptions
from peertile.backends.cuda.triton_compile import PassFailure, compile_source
from peertile.dtypes import ALL_DTYPES, DType, bf16, f8e4m3, f8e5m2, f16, f32, f64, i8, i32, i64, u8
from peertile.errors import CompileError
from peertile.ir import ops
from peertile.ir.ops import Binary, Unary
from peertile.ir.text import parse_kernel, print_kernel
from peertile.ir.types import INDEX, Access, TileType
from peertile.memory_model import Scope
from peertile.passes.pipeline import run_pipeline
from peertile.source import Loc
from peertile.testing.programs import random_kernel

pytestmark = pytest.mark.usefixtures("triton_needed")

MAIN = ("sm_80", "sm_90", "sm_100", "sm_103")


def small_floats(arch: str) -> list[DType]:
    return [d for d in ALL_DTYPES if d != f8e4m3 or arch != "sm_80"]


# ---------------------------------------------------------------- every op, every dtype, every architecture


@pytest.mark.long
@pytest.mark.parametrize("arch", MAIN)
@pytest.mark.parametrize("d", ALL_DTYPES, ids=str)
def test_every_function_and_cast_of_every_dtype_compiles(d, arch):
    if d not in small_floats(arch):
        with pytest.raises(CompileError, match="f8e4m3 needs sm_89 or newer"):
            compile_kernel(elementwise(d), arch)
        return
    assert compile_kernel(elementwise(d), arch).payload.startswith(b"\x7fELF")
    assert compile_kernel(casts(d, small_floats(arch)), arch).payload.startswith(b"\x7fELF")


@pytest.mark.slow
@pytest.mark.parametrize("arch", MAIN)
def test_the_functions_of_f32_and_casts_compile_everywhere(arch):
    assert compile_kernel(elementwise(f32), arch).payload.startswith(b"\x7fELF")
    assert compile_kernel(casts(i32, small_floats(arch)), arch).payload.startswith(b"\x7fELF")


MMA = [
    # dtype, accumulator, what the tensor cores or the plain units are told, by architecture
    (bf16, f32, {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "sm_103": "tcgen05.mma"}),
    (f16, f32, {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "sm_103": "tcgen05.mma"}),
    (f8e5m2, f32, {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "sm_103": "tcgen05.mma"}),
    (f8e4m3, f32, {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "sm_103": "tcgen05.mma"}),
    (i8, i32, {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "mma.sync"}),
    (u8, i32, {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "mma.sync"}),
    (f32, f32, {"sm_80": "fma.rn.f32", "sm_90": "fma.rn.f32", "sm_100": "fma.rn.f32", "sm_103": "fma.rn.f32"}),
    (f64, f64, {"sm_80": "mma.sync", "sm_90": "mma.sync", "sm_100": "fma.rn.f64", "sm_103": "fma.rn.f64"}),
]


def product(d, acc, batch=()):
    rank = 2 + len(batch)
    k = K("product", x=view(d, rank), y=view(d, rank), z=view(acc, rank))
    zeros = [k.const(0)] * rank
    x, y = k.load(k.x, *zeros, t=TileType(d, (*batch, 64, 32))), k.load(k.y, *zeros, t=TileType(d, (*batch, 32, 64)))
    t = TileType(acc, (*batch, 64, 64))
    k.store(k.z, k.v(ops.Mma, x, y, k.load(k.z, *zeros, t=t), t=t), *zeros)
    return k.done()


@pytest.mark.slow
@pytest.mark.parametrize(("d", "acc", "expected"), MMA, ids=[str(row[0]) for row in MMA])
def test_matrix_products_use_the_tensor_cores_where_there_are_any(d, acc, expected):
    for arch, instruction in expected.items():
        assert multiplies(compile_kernel(product(d, acc), arch).text["ptx"], instruction, arch), arch


@pytest.mark.slow
def test_batched_products_compile():
    assert compile_kernel(product(f16, f32, (4,))).payload
    with pytest.raises(CompileError, match="batched u8 is not available on sm_90"):
        compile_kernel(product(u8, i32, (4,)))


@pytest.mark.slow
def test_one_process_compiles_fp8_for_old_and_new_architectures():
    kernel = casts(f32, [f8e5m2])
    for arch in ("sm_90", "sm_80", "sm_90"):
        native = "e5m2x2" in compile_kernel(kernel, arch).text["ptx"]
        assert native == (arch == "sm_90")


def test_products_of_f32_can_go_through_tf32():
    fast = compile_kernel(product(f32, f32), options=CudaOptions(f32_mma="tf32x3")).text["ptx"]
    assert "tf32" in fast


# ---------------------------------------------------------------- gemm


@pytest.fixture(scope="module")
def matmul(triton_needed):
    return compile_kernel(gemm())


def test_a_gemm_copies_in_bulk_and_multiplies_asynchronously(matmul):
    text = matmul.text["ptx"]
    # The name of the shared window differs between versions of triton.
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared::(cluster|cta)\.global", text)
    assert "cp.async.bulk.tensor.2d.global.shared::cta" in text
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in text
    assert matmul.scratch_bytes == 3 * 128
    assert matmul.layout.scratch_per_program == 3 * 128
    assert (matmul.num_warps, matmul.threads) == (8, 256)


def test_every_parameter_of_the_cubin_is_one_word(matmul):
    params = re.findall(r"\.param (\.\w+)[^,)]*matmul_param_(\d+)", matmul.text["ptx"])
    assert [kind for kind, _ in params] == [".u64"] * matmul.layout.n_words
    assert matmul.n_slots == 15
    assert matmul.target == "cuda:sm_90"


def test_a_binary_survives_bytes_but_for_its_text(matmul):
    back = CudaBinary.from_bytes(matmul.to_bytes())
    assert back == matmul
    assert back.layout == matmul.layout
    assert back.text == {}
    assert set(matmul.text) == {"triton", "ttir", "ttgir", "llir", "ptx"}


@pytest.mark.slow
def test_machine_code_can_be_read(matmul):
    assert re.search(r"HGMMA|MMA", sass(matmul))


@pytest.mark.slow
def test_stages_are_given_up_where_the_tiles_leave_no_room(matmul):
    assert "num_stages=4" in matmul.text["triton"]
    many = gemm(stages=("stages=4", "stages=6"))
    assert "num_stages=4" in compile_kernel(many).text["triton"]
    with pytest.raises(CompileError, match="with 6 stages, and sm_90 has 232448 for a program"):
        compile_kernel(many, options=CudaOptions(num_stages=6))


@pytest.mark.slow
def test_tiles_beyond_the_shared_memory_are_refused_with_numbers():
    wide = gemm(a=("bf16[128, 64]", "bf16[128, 256]"), b=("bf16[64, 256]", "bf16[256, 256]"))
    with pytest.raises(CompileError) as caught:
        compile_kernel(wide, "sm_89", options=CudaOptions(num_stages=1))
    assert re.fullmatch(
        r"shared memory: the tiles of kernel matmul need \d+ bytes with 1 stages, and sm_89 has 101376 for a program; "
        r"use smaller tiles or fewer stages",
        caught.value.message,
    )


# ---------------------------------------------------------------- speed that can be read off the PTX


def test_divisible_extents_make_vector_accesses():
    text = """
kernel @copy(%z: view<f32, 1, read_write, tile=[1024], unit=[1], align=64, divisible=[16]>,
             %x: view<f32, 1, read, unit=[1], align=64, divisible=[16]>) {
  %p = program_id() : i64
  %i = tile_index(%z, %p) : i64
  %a = load(%x, %i, bounds=Bounds.launch) : f32[1024]
  store(%z, %a, %i, bounds=Bounds.proven)
  return()
}
"""
    found = compile_kernel(parsed(text)).text["ptx"]
    assert "ld.global.v4" in found
    assert "st.global.v4" in found
    assert not re.search(r"(ld|st)\.global\.b32", found)


def test_offsets_are_computed_in_64_bits():
    k = K("far", x=view(f32, 2, unit_stride=(False, False)), z=view(f32), i=INDEX)
    tile = k.load(k.x, k.i, k.i, t=TileType(f32, (16, 16)))
    k.store(k.z, k.v(ops.Reshape, tile, t=TileType(f32, (256,))), k.i)
    text = compile_kernel(k.done()).text["ptx"]
    addresses = re.findall(r"(?:ld|st)\.global\.[\w.]+ .*\[ (%rd\d+)", text)
    assert addresses
    # 32-bit products may appear for lanes alone, never with a stride or an index from the arguments.
    parameters = set(re.findall(r"ld\.param\.b64\s+(%rd\d+)", text))
    assert not re.search(r"cvt\.u32\.u64\s+%r\d+, (" + "|".join(parameters) + r");", text)


def test_multiplication_and_addition_are_not_contracted_and_small_numbers_not_flushed():
    k = K("rounds", x=view(f32), z=view(f32))
    t = TileType(f32, (N,))
    x = k.load(k.x, k.const(0), t=t)
    square = k.v(ops.BinaryOp, x, x, t=t, fn=Binary.MUL)
    k.store(k.z, k.v(ops.BinaryOp, square, x, t=t, fn=Binary.ADD), k.const(0))
    k.store(k.z, k.v(ops.UnaryOp, x, t=t, fn=Unary.EXP), k.const(1))
    k.store(k.z, k.v(ops.BinaryOp, x, square, t=t, fn=Binary.DIV), k.const(2))
    text = compile_kernel(k.done()).text["ptx"]
    assert "mul.rn.f32" in text
    assert "div.rn.f32" in text
    assert not re.search(r"(add|mul|fma|div)\.(rn\.)?ftz", text)


SUM_OF_PRODUCTS = """
kernel @outer(%x: view<{d}, 2, read>, %y: view<{d}, 2, read>, %z: view<{d}, 2, read_write>) {{
  %0 = const(value=0) : i64
  %1 = load(%x, %0, %0) : {d}[32, {k}]
  %2 = reshape(%1) : {d}[32, {k}, 1]
  %3 = broadcast(%2) : {d}[32, {k}, 64]
  %4 = load(%y, %0, %0) : {d}[{k}, 64]
  %5 = reshape(%4) : {d}[1, {k}, 64]
  %6 = broadcast(%5) : {d}[32, {k}, 64]
  %7 = binary(%3, %6, fn=Binary.mul) : {d}[32, {k}, 64]
  {sum}
  %9 = reshape(%8) : {d}[32, 64]
  store(%z, %9, %0, %0)
  return()
}}
"""
SUMS = {
    "sum": "%8 = reduce(%7, fn=Fold.add, axis=1) : {d}[32, 64]",
    "function": "%8 = reduce_with(%7, axis=1) : {d}[32, 64] (%a: {d}, %b: {d}) {{\n"
    "    %c = binary(%a, %b, fn=Binary.add) : {d}\n    yield(%c)\n  }}",
}


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize(("how", "d"), [("sum", f32), ("function", f32), ("function", f16)], ids=str)
def test_a_sum_of_products_is_no_product_of_matrices(how, d, k):
    """Triton makes one of what it recognises, whose factors have 10 bits (and whose sums are wrong where k is 1)."""
    stages = compile_kernel(parsed(SUM_OF_PRODUCTS.format(d=d, k=k, sum=SUMS[how].format(d=d)))).text
    assert "tt.dot" not in stages["ttir"]
    assert "mma" not in stages["ptx"]
    assert "fma.rn" not in stages["ptx"]
    assert f"mul.rn.{d}" in stages["ptx"] or f"mul.{d}" in stages["ptx"]


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("d", [f32, f16, f8e5m2], ids=str)
def test_products_below_the_tensor_cores_are_sums(d, k):
    a, b, c = f"{d}[16, {k}]", f"{d}[{k}, 16]", "f32[16, 16]"
    text = f"""
kernel @small(%x: view<{d}, 2, read>, %y: view<{d}, 2, read>, %z: view<f32, 2, read_write>) {{
  %0 = const(value=0) : i64
  %1 = load(%x, %0, %0) : {a}
  %2 = load(%y, %0, %0) : {b}
  %3 = load(%z, %0, %0) : {c}
  %4 = mma(%1, %2, %3) : {c}
  store(%z, %4, %0, %0)
  return()
}}
"""
    stages = compile_kernel(parsed(text)).text
    assert "tt.dot" not in stages["ttir"]
    assert "mma" not in stages["ptx"]


# ---------------------------------------------------------------- errors


@pytest.fixture
def located(tmp_path):
    """A kernel whose second statement is at line 3 of a user's file."""
    file = tmp_path / "user.py"
    file.write_text("def kernel(z):\n    x = T.iota(64)\n    z.store((0,), x)\n    T.sync_system()\n")
    k = K("kernel", z=view(i64, access=Access.READ_WRITE))
    k.b.loc = Loc(str(file), 2, 8)
    x = k.v(ops.Iota, t=TileType(i64, (64,)))
    k.b.loc = Loc(str(file), 3, 4)
    k.store(k.z, k.v(ops.BinaryOp, x, x, t=TileType(i64, (64,)), fn=Binary.MUL), k.const(0))
    k.b.loc = Loc(str(file), 4, 4)
    k.op(ops.Fence, scope=Scope.SYSTEM)
    k.b.loc = None
    return k.done()


def test_what_triton_refuses_is_an_error_at_the_users_line(located, monkeypatch, capfd):
    def wrong(e, op):
        e.define(op.result, f"tl.arange(0, 48) * {e.text(op.operands[0])}")

    monkeypatch.setitem(state.LOWERINGS, ops.BinaryOp, wrong)
    with pytest.raises(CompileError) as caught:
        compile_kernel(located)
    assert re.fullmatch(
        r"triton refused the kernel for sm_90: arange's range must be a power of 2 "
        r"\(emitted source: \S+/kernel_\w+\.py\)",
        caught.value.message,
    )
    assert caught.value.loc.line == 3
    assert "z.store((0,), x)" in str(caught.value)


def test_what_a_pass_refuses_is_an_error_at_the_users_line(located, monkeypatch, capfd):
    def wrong(e, op):
        x = e.text(op.operands[0])
        e.define(op.result, f"{x}.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float64).to(tl.int64)")

    monkeypatch.setitem(state.LOWERINGS, ops.BinaryOp, wrong)
    with pytest.raises(CompileError) as caught:
        compile_kernel(located)
    assert "triton failed on the kernel for sm_90: " in caught.value.message
    assert "Unsupported conversion from f8E4M3FN to f64" in caught.value.message
    assert "error" not in capfd.readouterr().err


def test_what_the_assembler_refuses_is_an_error_at_the_users_line(located, monkeypatch, capfd):
    def broken(scope, elected):
        name, text = ptx_fence(scope, elected)
        return name, text.replace("fence.acq_rel.sys", "fence.acq_rel.nowhere")

    ptx_fence = ptx.fence
    monkeypatch.setattr(ptx, "fence", broken)
    with pytest.raises(CompileError) as caught:
        compile_kernel(located)
    assert caught.value.message.startswith("the assembler (ptxas) refused the kernel for sm_90: ")
    assert "nowhere" in caught.value.message
    assert caught.value.loc.line == 4
    captured = capfd.readouterr()
    assert ".visible .entry" not in captured.out + captured.err


def test_where_passes_break_down_at_one_number_of_warps_another_is_taken(located, monkeypatch):
    tried = []

    def breaks_down(emitted, arch, options):
        tried.append(emitted.num_warps)
        if emitted.num_warps in broken:
            raise PassFailure(f"broken at {emitted.num_warps}")
        return compile_source(emitted, arch, options)

    monkeypatch.setattr(compiling, "compile_source", breaks_down)
    broken = {1, 4}
    assert compile_kernel(located).num_warps == 8
    assert tried == [1, 4, 8]
    broken = {1, 2, 4, 8}
    with pytest.raises(PassFailure, match="broken at 1"):
        compile_kernel(located)
    tried.clear()
    with pytest.raises(PassFailure, match="broken at 4"):  # asked for
        compile_kernel(located, options=CudaOptions(num_warps=4))
    assert tried == [4]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [57, 233, 459, 583, 611])
def test_kernels_that_triton_s_passes_broke_down_on_compile(seed):
    """57: "operation destroyed but still has uses", at 1 and 2 warps; 233: an assertion about a gather, above 1. The
    others carry a tile that is turned in each trip, for which the choice of layouts did not come to an end."""
    kernel = run_pipeline(parse_kernel(print_kernel(random_kernel(seed).kernel)))
    assert compile_kernel(kernel).payload.startswith(b"\x7fELF")


def test_emitting_and_importing_need_no_triton():
    code = (
        "import sys; import peertile.backends.cuda.compile as c; import peertile.backends.cuda.emit; "
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_a_kernel_with_everything_that_waits_assembles_on_every_architecture(arch):
    kernel = parsed("""
kernel @waits(%w: view<u64, 2, read_write, device, unit=[0, 1]>, %z: view<f32, 1, read_write, unit=[1]>, %n: i64) {
  %p = program_id() : i64
  %one = const(value=1) : i64
  %want = const(value=3) : u64
  %ok = compare(%p, %n, fn=Compare.lt) : bool
  check(%ok, %p, %n, kind=CheckKind.bounds, message="out")
  word_store(%w, %want, %p, %one, order=Order.release, scope=Scope.system)
  %seen = wait(%w, %want, %p, %one, cmp=Cmp.at_least, scope=Scope.system, what="ready") : u64
  %old = word_rmw(%w, %seen, %p, %one, rmw=Rmw.add, order=Order.acq_rel, scope=Scope.device) : u64
  fence(scope=Scope.system)
  %f = cast(%old) : f32
  %t = broadcast(%f) : f32[64]
  store(%z, %t, %p, bounds=Bounds.proven)
  print(%t, prefix="t")
  return()
}
""")
    binary = compile_kernel(kernel, arch)
    assert [place.kind for place in binary.places] == ["bounds", "wait", "print"]
    assert "fence.acq_rel.sys" in memory_ops(binary.text["ptx"])


COMPILES_IN_THREADS = """
import os, sys, threading
from pathlib import Path
from peertile.backends.cuda.compile import compile_kernel
from peertile.ir.text import parse_kernel, print_kernel
from peertile.passes.pipeline import run_pipeline
from peertile.testing.programs import random_kernel
import triton

def kernel(seed):
    return run_pipeline(parse_kernel(print_kernel(random_kernel(seed, alone=True).kernel)))

compile_kernel(kernel(0), "sm_90")  # Triton loads its parts
kernels, ready = [kernel(seed) for seed in range(1, 13)], threading.Barrier(3)
before = os.fstat(2).st_ino, sys.stdout, triton.knobs.cache.dir

def some(k):
    ready.wait(20)
    for one in kernels[k::3]:
        compile_kernel(one, "sm_90")

threads = [threading.Thread(target=some, args=(k,)) for k in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(100)
print(before == (os.fstat(2).st_ino, sys.stdout, triton.knobs.cache.dir), file=sys.__stdout__, flush=True)
print(Path(os.environ["HOME"], ".triton").exists(), file=sys.__stdout__, flush=True)
os.write(2, b"still there")
"""


@pytest.mark.slow
def test_threads_that_compile_leave_the_process_and_triton_as_they_were(tmp_path):
    """Where the output of a compiler goes, and where Triton keeps things, is set for the whole process meanwhile."""
    program = tmp_path / "program.py"
    program.write_text(COMPILES_IN_THREADS)
    env = {**os.environ, "HOME": str(tmp_path), "PEERTILE_CACHE_DIR": str(tmp_path / "cache")}
    env.pop("TRITON_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=110, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nFalse\n", "still there")
