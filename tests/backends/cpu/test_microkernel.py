"""Matrix multiply plans against float64 and exact integers: every dtype, kernel shape, packing and target."""

import ctypes
import re
from functools import cache

import numpy as np
import pytest

from peertile.backends.cpu import jit
from peertile.backends.cpu.microkernel import plan_matmul
from peertile.backends.cpu.target import AARCH64, host_target, named_target
from peertile.dtypes import dtype_named
from peertile.errors import InternalError
from peertile.ir.ops import MMA_TYPES

HOST = host_target()
OTHERS = {
    name: named_target(name)
    for name in ("x86-64-v4", "x86-64-v3", "x86-64")
    if HOST.is_x86 and named_target(name).features <= HOST.features
}
TARGETS = {"host": HOST} | OTHERS
# One row of blocks and many, narrow and wide, k of one unit, of less than a vector, of several blocks.
QUICK = ((1, 1, 1), (16, 32, 64), (4, 128, 32), (32, 64, 512), (32, 8, 64), (16, 2, 2))
MORE = (
    (2, 2, 2), (4, 4, 4), (16, 16, 64), (1, 256, 64), (8, 32, 16), (64, 64, 8), (512, 32, 4), (64, 1, 128),
    (2, 1, 256), (16, 4, 8), (4, 64, 128),
)  # fmt: skip
PAD = 3  # columns beyond each matrix, so that a row stride is not an extent


def accumulator(dtype):
    return dtype_named(MMA_TYPES[dtype][0]).numpy


@cache
def module(target, dtype, sizes=QUICK):
    """The plans of some sizes compiled as one module: {(size, transposed): plan}, entry points."""
    plans = {
        (size, t): plan_matmul(dtype, *size, TARGETS[target].features, b_transposed=t)
        for size in sizes
        for t in (False, True)
    }
    return compile_plans(target, plans)


def compile_plans(target, plans):
    text, names = [], []
    for plan in plans.values():
        text.append(plan.text)
        matrices = "ptr %c, i64 %ldc, ptr %a, i64 %lda, ptr %b, i64 %ldb"
        for name, head in (
            (plan.run_name, f"{matrices}, ptr %s"),
            (plan.matmul_name, matrices),
            (plan.pack_a_name, "ptr %d, ptr %x, i64 %ld"),
            (plan.pack_b_name, "ptr %d, ptr %x, i64 %ld"),
        ):
            if name is not None:
                text.append(f"define void @go.{name}({head}) {{\n  call void @{name}({head})\n  ret void\n}}\n")
                names.append(f"go.{name}")
    payload = jit.compile_text("\n".join(text), cpu=None if target == "host" else target)
    return plans, jit.load_object(payload, names)


def call(addresses, name, *args):
    kinds = [ctypes.c_void_p if isinstance(a, np.ndarray) else ctypes.c_int64 for a in args]
    values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in args]
    ctypes.CFUNCTYPE(None, *kinds)(addresses[f"go.{name}"])(*values)


def aligned(size):
    """Scratch of exactly `size` bytes, aligned, full of NaN patterns, with a guard behind."""
    raw = np.full(size + 128, 0xFF, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size + 64]


def strides(*matrices):
    return [x.shape[1] for x in matrices]


def random_matrix(rng, dtype, rows, columns):
    t = dtype_named(dtype).numpy
    if t.kind in "iu":
        return rng.integers(np.iinfo(t).min, np.iinfo(t).max, (rows, columns + PAD), t, endpoint=True)
    return rng.normal(0, 1, (rows, columns + PAD)).astype(np.float32).astype(t)


def small_integers(rng, dtype, rows, columns):
    low = 0 if dtype == "u8" else -3
    return rng.integers(low, 4, (rows, columns + PAD)).astype(np.float32).astype(dtype_named(dtype).numpy)


def execute(target, dtype, sizes, size, transposed, make):
    """(C after, C before, A, B) through the all-in-one entry point; checks that nothing else was written."""
    plans, addresses = module(target, dtype, sizes)
    plan = plans[size, transposed]
    m, n, k = size
    rng = np.random.default_rng(m * n * k)
    a = make(rng, dtype, m, k)
    b = make(rng, dtype, *((n, k) if transposed else (k, n)))
    before = rng.integers(-50, 50, (m, n + PAD)).astype(accumulator(dtype))
    c, scratch = before.copy(), aligned(plan.scratch_bytes)
    lda, ldb, ldc = strides(a, b, c)
    call(addresses, plan.run_name, c, ldc, a, lda, b, ldb, scratch)
    np.testing.assert_array_equal(c[:, n:], before[:, n:], err_msg="wrote beyond a row of C")
    assert np.all(scratch[plan.scratch_bytes :] == 0xFF), "wrote beyond the scratch"
    wide = np.int64 if a.dtype.kind in "iu" else np.float64
    a64, b64 = a[:, :k].astype(wide), b[:, : k if transposed else n].astype(wide)
    return c[:, :n], before[:, :n].astype(wide), a64, b64.T if transposed else b64


CASES = [pytest.param("host", d, QUICK, id=f"host-{d}") for d in MMA_TYPES] + [
    pytest.param(target, d, sizes, id=f"{target}-{d}-more", marks=pytest.mark.slow)
    for target, sizes in [("host", MORE), *((target, QUICK + MORE) for target in OTHERS)]
    for d in MMA_TYPES
]


@pytest.mark.parametrize("transposed", [False, True], ids=["b", "b_transposed"])
@pytest.mark.parametrize(("target", "dtype", "sizes"), CASES)
def test_small_integers_are_multiplied_exactly(target, dtype, sizes, transposed):
    for size in sizes:
        c, before, a, b = execute(target, dtype, sizes, size, transposed, small_integers)
        np.testing.assert_array_equal(c, before + a @ b, err_msg=f"{size}")


@pytest.mark.parametrize("transposed", [False, True], ids=["b", "b_transposed"])
@pytest.mark.parametrize(("target", "dtype", "sizes"), CASES)
def test_the_error_is_that_of_summing_in_the_accumulator(target, dtype, sizes, transposed):
    for size in sizes:
        c, before, a, b = execute(target, dtype, sizes, size, transposed, random_matrix)
        exact = before + a @ b
        if c.dtype.kind == "i":
            np.testing.assert_array_equal(c, exact.astype(np.int32), err_msg=f"{size}")
            continue
        size_of_terms = np.abs(before) + np.abs(a) @ np.abs(b)
        error = np.max(np.abs(c - exact) / size_of_terms) / np.finfo(c.dtype).eps
        assert error < 3, f"{size}: {error:.1f} eps of the sum of absolute terms"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", MMA_TYPES)
def test_packing_apart_gives_the_same_bits(dtype):
    plans, addresses = module("host", dtype)
    rng = np.random.default_rng(0)
    for ((m, n, k), transposed), plan in plans.items():
        a = random_matrix(rng, dtype, m, k)
        b = random_matrix(rng, dtype, *((n, k) if transposed else (k, n)))
        whole, parts = np.zeros((2, m, n), accumulator(dtype))
        lda, ldb, ldc = strides(a, b, whole)
        call(addresses, plan.run_name, whole, ldc, a, lda, b, ldb, aligned(plan.scratch_bytes))
        packed_a, packed_b = aligned(plan.pack_a_bytes), aligned(plan.pack_b_bytes)
        if plan.packs_a:
            call(addresses, plan.pack_a_name, packed_a, a, lda)
            a, lda = packed_a, -1
        if plan.packs_b:
            call(addresses, plan.pack_b_name, packed_b, b, ldb)
            b, ldb = packed_b, -1
        call(addresses, plan.matmul_name, parts, ldc, a, lda, b, ldb)
        np.testing.assert_array_equal(parts, whole, err_msg=plan.run_name)
        assert plan.scratch_bytes == plan.pack_a_bytes + plan.pack_b_bytes


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "bits"), [("f8e4m3", 8), ("f8e5m2", 8), ("f16", 16), ("bf16", 16)])
def test_every_code_of_a_narrow_float_is_converted_exactly(target, dtype, bits):
    codes = np.arange(1 << bits, dtype=np.uint16).astype(f"u{bits // 8}")
    values = codes.view(dtype_named(dtype).numpy)
    with np.errstate(invalid="ignore"):
        want = values.astype(np.float32)
    one = np.ones((1, 1), values.dtype)
    features = TARGETS[target].features
    plans, addresses = compile_plans(
        target,
        {"a": plan_matmul(dtype, codes.size, 1, 1, features), "b": plan_matmul(dtype, 1, codes.size, 1, features)},
    )
    for side, (a, b) in {"a": (values, one), "b": (one, values)}.items():
        c = np.zeros(codes.size, np.float32)
        ld = codes.size if side == "b" else 1
        call(addresses, plans[side].run_name, c, ld, a, 1, b, ld, aligned(plans[side].scratch_bytes))
        np.testing.assert_array_equal(c, want)


def test_bf16_pairs_flush_denormals_where_the_processor_multiplies_pairs():
    plan = plan_matmul("bf16", 1, 16, 2, HOST.features)
    _, addresses = compile_plans("host", {0: plan})
    t = dtype_named("bf16").numpy
    a, b, c = np.full((1, 2), 1e-39, t), np.ones((2, 16), t), np.zeros((1, 16), np.float32)
    call(addresses, plan.run_name, c, 16, a, 2, b, 16, aligned(plan.scratch_bytes))
    pairs = "dpbf16ps" in plan.text
    assert pairs == ({"avx512bf16", "avx512vl"} <= HOST.features)
    assert np.all(c == (0 if pairs else np.float32(a[0, 0]) * 2))


def test_infinities_and_nans_pass_through_every_kernel_shape():
    plans, addresses = module("host", "f32")
    for ((m, n, k), transposed), plan in plans.items():
        a, b = np.ones((m, k), np.float32), np.ones((n, k) if transposed else (k, n), np.float32)
        a[0, 0], a[-1, -1] = np.inf, np.nan
        c = np.zeros((m, n), np.float32)
        with np.errstate(invalid="ignore"):
            want = a @ (b.T if transposed else b)
        lda, ldb, ldc = strides(a, b, c)
        call(addresses, plan.run_name, c, ldc, a, lda, b, ldb, aligned(plan.scratch_bytes))
        np.testing.assert_array_equal(c, want, err_msg=plan.run_name)


@pytest.mark.parametrize(
    ("dtype", "size", "transposed", "packs_a", "packs_b"),
    [
        ("f32", (256, 256, 256), False, False, True),
        ("f32", (8, 256, 256), False, False, False),  # each element of B is read once: packing would be a copy
        ("f32", (1, 256, 256), False, False, False),
        ("f32", (256, 256, 256), True, False, True),
        ("f32", (1, 256, 256), True, False, False),  # rows of k on both sides: dot products
        ("f32", (256, 1, 256), False, False, True),
        ("f16", (256, 256, 256), False, True, True),
        ("bf16", (256, 256, 256), False, False, True),
        ("i8", (256, 256, 256), False, True, True),
    ],
)
def test_what_is_packed_follows_from_the_extents(dtype, size, transposed, packs_a, packs_b):
    features = named_target("znver4").features
    plan = plan_matmul(dtype, *size, features, b_transposed=transposed)
    assert (plan.packs_a, plan.packs_b) == (packs_a, packs_b)
    assert (plan.pack_a_bytes > 0, plan.pack_b_bytes > 0) == (packs_a, packs_b)


@pytest.mark.parametrize(
    ("cpu", "dtype", "instruction"),
    [
        ("znver4", "f32", "@llvm.fma.v16f32"),
        ("x86-64-v3", "f32", "@llvm.fma.v8f32"),
        ("x86-64", "f32", "fmul <4 x float>"),
        ("znver4", "f64", "@llvm.fma.v8f64"),
        ("znver4", "bf16", "@llvm.x86.avx512bf16.dpbf16ps.512"),
        ("x86-64-v4", "bf16", "@llvm.fma.v16f32"),
        ("znver4", "i8", "@llvm.x86.avx512.vpdpwssd.512"),
        ("x86-64-v4", "i8", "@llvm.x86.avx512.pmaddw.d.512"),
        ("x86-64-v3", "u8", "@llvm.x86.avx2.pmadd.wd"),
        ("x86-64", "i8", "mul <4 x i32>"),
    ],
)
def test_a_target_gets_its_widest_instruction(cpu, dtype, instruction):
    assert instruction in plan_matmul(dtype, 64, 64, 64, named_target(cpu).features).text


def test_arm_text_holds_no_x86_intrinsics():
    for dtype in MMA_TYPES:
        text = plan_matmul(dtype, 64, 64, 64, AARCH64.features).text
        assert "llvm.x86" not in text
        assert dtype in ("i8", "u8") or "@llvm.fma." in text


def test_all_functions_of_a_plan_are_internal_and_named_after_it():
    plan = plan_matmul("f16", 64, 64, 64, HOST.features, b_transposed=True)
    defined = re.findall(r"^define internal void @([\w.]+)\(.*\) noinline optsize nounwind \{$", plan.text, re.M)
    assert sorted(defined) == [
        "pt.mm.f16.64x64x64.t", "pt.mm.f16.64x64x64.t.micro", "pt.mm.f16.64x64x64.t.pack_a",
        "pt.mm.f16.64x64x64.t.pack_b", "pt.mm.f16.64x64x64.t.run",
    ]  # fmt: skip
    assert plan.text.count("define") == len(defined)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("i16", 4, 4, 4),
            "matmul: dtype: expected one of f32, f64, f16, bf16, f8e4m3, f8e5m2, i8, u8, got 'i16'",
        ),
        (("f32", 3, 4, 4), "matmul: m: expected a power of two, got 3"),
        (("f32", 4, 0, 4), "matmul: n: expected a power of two, got 0"),
        (("f32", 4, 4, 12), "matmul: k: expected a power of two, got 12"),
    ],
)
def test_what_has_no_plan_is_refused(args, message):
    with pytest.raises(InternalError) as e:
        plan_matmul(*args, HOST.features)
    assert str(e.value) == message
