"""Elementwise math routines against long double: errors in ULP, special values, the same bits at every width."""

import ctypes
import math
import re
from functools import cache

import numpy as np
import pytest

from peertile.backends.cpu import jit
from peertile.backends.cpu.mathlib import Library, require
from peertile.backends.cpu.target import host_target, named_target
from peertile.errors import InternalError
from peertile.ir.ops import Binary, Unary

LD = np.longdouble
NUMPY = {"f32": np.float32, "f64": np.float64}
FUNCTIONS = [*(f for f in Unary if f is not Unary.NOT), Binary.POW, Binary.ATAN2, Binary.MIN, Binary.MAX]
HOST = host_target()
TARGETS = {"host": HOST} | {
    name: named_target(name)
    for name in ("x86-64-v3", "x86-64")
    if HOST.is_x86 and named_target(name).features <= HOST.features
}
WIDTHS = (1, 4, 8, 16)
CASES = [("host", width) for width in WIDTHS] + [
    pytest.param(target, width, marks=pytest.mark.slow)
    for target, width in (("host", 64), ("x86-64-v3", 8), ("x86-64", 4))
    if target in TARGETS
]

# Bounds in ULP with a fused multiply-add; the last column is what may be added without one.
BOUNDS = {
    Unary.EXP: (1.1, 0.2), Unary.EXP2: (1.25, 0.2), Unary.LOG: (1.2, 0.2), Unary.LOG2: (1.2, 0.9),
    Unary.SIN: (1.6, 0.9), Unary.COS: (1.6, 0.9), Unary.TAN: (3.0, 0.9), Unary.SINH: (1.7, 0.2),
    Unary.COSH: (1.6, 0.2), Unary.TANH: (1.5, 0.2), Unary.ERF: (1.3, 0.2), Unary.SIGMOID: (2.5, 0.2),
    Unary.RSQRT: (1.5, 0.0), Binary.POW: (1.25, 0.2), Binary.ATAN2: (2.5, 0.3),
}  # fmt: skip


def erf_reference(x):
    """Series of positive terms: no cancellation anywhere."""
    a = np.minimum(np.abs(x), LD(7))
    term, total = a.copy(), a.copy()
    for n in range(1, 220):
        term = term * (2 * a * a) / (2 * n + 1)
        total = total + term
    pi = LD(math.pi) + LD(1.2246467991473532e-16)
    return np.copysign(np.where(a >= 7, LD(1), total * np.exp(-a * a) * 2 / np.sqrt(pi)), x)


def sigmoid_reference(x):
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, LD(1)) / (1 + e)


REFERENCE = {
    Unary.NEG: np.negative, Unary.ABS: np.abs, Unary.EXP: np.exp, Unary.EXP2: np.exp2, Unary.LOG: np.log,
    Unary.LOG2: np.log2, Unary.SQRT: np.sqrt, Unary.RSQRT: lambda x: 1 / np.sqrt(x), Unary.SIN: np.sin,
    Unary.COS: np.cos, Unary.TAN: np.tan, Unary.SINH: np.sinh, Unary.COSH: np.cosh, Unary.TANH: np.tanh,
    Unary.ERF: erf_reference, Unary.SIGMOID: sigmoid_reference, Unary.FLOOR: np.floor, Unary.CEIL: np.ceil,
    Unary.ROUND: np.rint, Binary.POW: np.power, Binary.ATAN2: np.arctan2, Binary.MIN: np.minimum,
    Binary.MAX: np.maximum,
}  # fmt: skip


def loop_text(fn, dtype, width, name):
    """A function that applies a routine to arrays whose length the width divides."""
    e, align = ("float", 4) if dtype == "f32" else ("double", 8)
    t = e if width == 1 else f"<{width} x {e}>"
    two = isinstance(fn, Binary)
    return f"""
define void @run.{fn.value}.{dtype}(ptr %o, ptr %x, ptr %y, i64 %n) {{
entry:
  br label %turn
turn:
  %i = phi i64 [ 0, %entry ], [ %j, %turn ]
  %px = getelementptr {e}, ptr %x, i64 %i
  %py = getelementptr {e}, ptr %y, i64 %i
  %po = getelementptr {e}, ptr %o, i64 %i
  %a = load {t}, ptr %px, align {align}
  %b = load {t}, ptr %py, align {align}
  %r = call {t} @{name}({t} %a{f", {t} %b" if two else ""})
  store {t} %r, ptr %po, align {align}
  %j = add i64 %i, {width}
  %c = icmp ult i64 %j, %n
  br i1 %c, label %turn, label %done
done:
  ret void
}}
"""


@cache
def compiled(target, width):
    """Object and entry points of every function at one width: {(fn, dtype): callable on arrays}."""
    library = Library(TARGETS[target].features)
    keys = [(fn, dtype) for fn in FUNCTIONS for dtype in NUMPY]
    loops = [loop_text(fn, dtype, width, library.require(fn, dtype, width)) for fn, dtype in keys]
    payload = jit.compile_text("\n".join(loops) + library.text(), cpu=None if target == "host" else target)
    found = jit.load_object(payload, [f"run.{fn.value}.{dtype}" for fn, dtype in keys])
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)

    def runner(address):
        function = kind(address)

        def run(x, y=None):
            y = x if y is None else y
            size = -(-x.size // 64) * 64
            xs, ys, out = np.ones(size, x.dtype), np.ones(size, x.dtype), np.empty(size, x.dtype)
            xs[: x.size], ys[: x.size] = x, y
            function(out.ctypes.data, xs.ctypes.data, ys.ctypes.data, size)
            return out[: x.size]

        return run

    return payload, {key: runner(found[f"run.{key[0].value}.{key[1]}"]) for key in keys}


def run(target, width, fn, dtype, x, y=None):
    x = np.asarray(x, NUMPY[dtype])
    return compiled(target, width)[1][fn, dtype](x, None if y is None else np.asarray(y, NUMPY[dtype]))


def ulps(got, reference):
    """Distance in ULP of the result's type at the reference; 0 where both round to the same special value."""
    info = np.finfo(got.dtype)
    with np.errstate(all="ignore"):
        rounded = reference.astype(got.dtype)
        exponent = np.maximum(np.frexp(np.abs(reference))[1] - 1, info.minexp)
        unit = np.ldexp(LD(1), (exponent - info.nmant).astype(np.int64))
        error = np.abs(got.astype(LD) - reference) / unit
        # At the end of the range the neighbour of the largest number is infinity.
        edge = (np.isinf(got) != np.isinf(rounded)) & (np.abs(reference) > LD(info.max) * (1 - 4 * LD(info.eps)))
        error = np.where(edge, 1, error)
        same = (np.isnan(got) & np.isnan(rounded)) | (np.isinf(rounded) & (got == rounded))
        error = np.where(same, 0, error)
    return np.where(np.isnan(error), np.inf, error)


@cache
def operands(dtype, count=2000):
    t = NUMPY[dtype]
    rng = np.random.default_rng(1)
    bits, info = (np.uint32, np.finfo(t)) if dtype == "f32" else (np.uint64, np.finfo(t))
    special = [
        0.0, -0.0, math.inf, -math.inf, math.nan, 1, -1, info.tiny, -info.tiny, info.smallest_subnormal,
        -info.smallest_subnormal, info.max, -info.max, 0.5, -0.5, 1.5, 2, 2.5, 3, -3, 88.72283, -103.9, 104, -104,
        709.78, -745.13, 710, -746, 128, 127.99, -149, -150, 1024, -1074, -1075, 1e4, 12800, 12801, 1.6e6, 1.7e6,
    ]  # fmt: skip
    parts = [
        rng.integers(0, np.iinfo(bits).max, count, dtype=bits, endpoint=True).view(t),
        special,
        rng.normal(0, 1, count),
        rng.uniform(-110, 110, count),
        rng.uniform(-1e4, 1e4, count),
        rng.uniform(0.5, 2, count),
        rng.uniform(-760, 760, count),
        rng.uniform(-1e6, 1e6, count),
        rng.uniform(-1, 1, count) * 2.0 ** rng.integers(-30, 3, count),
        math.pi / 2 * rng.integers(0, 10000, count),
    ]
    with np.errstate(all="ignore"):
        x = np.concatenate([np.asarray(p, t) for p in parts])
        y = np.concatenate([rng.permutation(x)[: x.size // 2], rng.normal(0, 3, x.size - x.size // 2).astype(t)])
        grid = np.array([0, -0.0, math.inf, -math.inf, math.nan, 1, -1, 2, -2, 3, -3, 0.5, 1e30, 1e-40, 3.5], t)
        gx, gy = (a.ravel() for a in np.meshgrid(grid, grid))
        near = (1 + rng.normal(0, 1e-3, count)).astype(t)
        x2 = np.concatenate([x, np.abs(x), gx, near, rng.uniform(0, 10, count).astype(t)])
        y2 = np.concatenate([y, y, gy, rng.uniform(-1e5, 1e5, count), rng.uniform(-40, 40, count)]).astype(t)
    return x, (x2, y2)


@cache
def expected(fn, dtype, count=2000):
    x, pair = operands(dtype, count)
    with np.errstate(all="ignore"):
        args = pair if isinstance(fn, Binary) else (x,)
        return args, REFERENCE[fn](*(a.astype(LD) for a in args))


def worst(target, width, count=2000):
    """{(fn, dtype): (largest error, operands there)}."""
    found = {}
    for fn in BOUNDS:
        for dtype in NUMPY:
            args, reference = expected(fn, dtype, count)
            error = ulps(run(target, width, fn, dtype, *args), reference)
            at = int(np.argmax(error))
            found[fn, dtype] = float(error[at]), tuple(float(a[at]) for a in args)
    return found


def over_bound(target, found):
    fused = TARGETS[target].features & {"fma", "avx512f", "neon"}
    for (fn, dtype), (error, at) in found.items():
        print(f"{fn.value:8} {dtype} {error:.2f} ULP at {at}")
    return {
        key: value for key, value in found.items() if value[0] > BOUNDS[key[0]][0] + (0 if fused else BOUNDS[key[0]][1])
    }


@pytest.mark.slow
@pytest.mark.parametrize(("target", "width"), CASES)
def test_errors_stay_within_their_bounds(target, width):
    assert over_bound(target, worst(target, width)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_errors_stay_within_their_bounds_on_many_operands(target):
    assert over_bound(target, worst(target, 8, 40_000)) == {}


@pytest.mark.parametrize(("target", "width"), CASES)
def test_functions_that_do_not_round_are_exact(target, width):
    for fn in (Unary.NEG, Unary.ABS, Unary.FLOOR, Unary.CEIL, Unary.ROUND):
        for dtype in NUMPY:
            x, _ = operands(dtype)
            with np.errstate(invalid="ignore"):
                want = REFERENCE[fn](x)
            got = run(target, width, fn, dtype, x)
            np.testing.assert_array_equal(got, want, err_msg=f"{fn} {dtype}")
            ordered = ~np.isnan(x)
            assert np.array_equal(np.signbit(got[ordered]), np.signbit(want[ordered])), f"sign of {fn} {dtype}"
    for dtype in NUMPY:
        x = np.abs(operands(dtype)[0])
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(run(target, width, Unary.SQRT, dtype, x), np.sqrt(x))


@pytest.mark.parametrize(("target", "width"), CASES)
def test_odd_functions_keep_the_sign_of_zero(target, width):
    for fn in (Unary.SIN, Unary.TAN, Unary.SINH, Unary.TANH, Unary.ERF, Unary.SQRT):
        for dtype in NUMPY:
            got = run(target, width, fn, dtype, [0.0, -0.0])
            assert got.tolist() == [0, 0], (fn, dtype)
            assert np.signbit(got).tolist() == [False, True], (fn, dtype)


INF, NAN = math.inf, math.nan
SPECIAL = {
    Unary.EXP: ([-INF, INF, NAN, 0, -0.0], [0, INF, NAN, 1, 1]),
    Unary.EXP2: ([-INF, INF, NAN, 0, 3, -1], [0, INF, NAN, 1, 8, 0.5]),
    Unary.LOG: ([0, -0.0, INF, -INF, NAN, 1, -1], [-INF, -INF, INF, NAN, NAN, 0, NAN]),
    Unary.LOG2: ([0, -0.0, INF, -1, NAN, 1, 8, 0.125], [-INF, -INF, INF, NAN, NAN, 0, 3, -3]),
    Unary.SIN: ([INF, -INF, NAN], [NAN, NAN, NAN]),
    Unary.COS: ([INF, -INF, NAN, 0], [NAN, NAN, NAN, 1]),
    Unary.TAN: ([INF, -INF, NAN], [NAN, NAN, NAN]),
    Unary.SINH: ([INF, -INF, NAN], [INF, -INF, NAN]),
    Unary.COSH: ([INF, -INF, NAN, 0], [INF, INF, NAN, 1]),
    Unary.TANH: ([INF, -INF, NAN], [1, -1, NAN]),
    Unary.ERF: ([INF, -INF, NAN], [1, -1, NAN]),
    Unary.SIGMOID: ([INF, -INF, NAN, 0], [1, 0, NAN, 0.5]),
    Unary.RSQRT: ([INF, 0, -1, NAN, 4], [0, INF, NAN, NAN, 0.5]),
}


@pytest.mark.parametrize(("target", "width"), CASES)
def test_special_operands_give_what_c_says(target, width):
    for fn, (x, want) in SPECIAL.items():
        for dtype in NUMPY:
            np.testing.assert_array_equal(run(target, width, fn, dtype, x), want, err_msg=f"{fn} {dtype}")


@pytest.mark.slow
@pytest.mark.parametrize(("target", "width"), CASES)
def test_pow_and_atan2_give_what_c_says_on_a_grid_of_special_operands(target, width):
    values = [0, -0.0, INF, -INF, NAN, 1, -1, 2, -2, 3, -3, 0.5, -0.5, 2.0**70, -(2.0**70), 5e-324, 2.0**53 - 1]
    for dtype in NUMPY:
        x, y = (a.ravel() for a in np.meshgrid(np.array(values, NUMPY[dtype]), np.array(values, NUMPY[dtype])))
        for fn in (Binary.POW, Binary.ATAN2):
            with np.errstate(all="ignore"):
                # libm agrees with the table of C; what is neither special nor representable is for the other tests.
                want = REFERENCE[fn](x.astype(LD), y.astype(LD)).astype(x.dtype)
            got = run(target, width, fn, dtype, x, y)
            np.testing.assert_allclose(got, want, rtol=4 * np.finfo(x.dtype).eps, err_msg=f"{fn} {dtype}")
            ordered = ~np.isnan(want)
            assert np.array_equal(np.signbit(got[ordered]), np.signbit(want[ordered])), f"sign of {fn} {dtype}"


@pytest.mark.slow
@pytest.mark.parametrize(("target", "width"), CASES)
def test_min_and_max_give_nan_if_either_is_and_order_the_zeros(target, width):
    x = [1, NAN, 2, NAN, 0.0, -0.0, -INF, 5]
    y = [2, 1, NAN, NAN, -0.0, 0.0, 3, INF]
    for dtype in NUMPY:
        low, high = (run(target, width, fn, dtype, x, y) for fn in (Binary.MIN, Binary.MAX))
        np.testing.assert_array_equal(low, [1, NAN, NAN, NAN, 0, 0, -INF, 5])
        np.testing.assert_array_equal(high, [2, NAN, NAN, NAN, 0, 0, 3, INF])
        assert np.signbit(low[4:6]).tolist() == [True, True]
        assert np.signbit(high[4:6]).tolist() == [False, False]


@pytest.mark.parametrize(("target", "width"), CASES)
def test_results_reach_down_to_denormals(target, width):
    for dtype, x in (("f32", [-87.5, -100.0, -103.5]), ("f64", [-708.5, -730.0, -744.5])):
        info = np.finfo(NUMPY[dtype])
        for fn in (Unary.EXP, Unary.SIGMOID):
            got = run(target, width, fn, dtype, x)
            assert np.all(got > 0), (fn, dtype)
            assert got[2] < 8 * info.smallest_subnormal, (fn, dtype)
        tiny = run(target, width, Unary.LOG2, dtype, [info.smallest_subnormal])
        assert tiny[0] == info.minexp - info.nmant


@pytest.mark.slow
@pytest.mark.parametrize(("target", "width"), CASES)
def test_trigonometry_is_right_far_out(target, width):
    # 1e22 is a double, and its sine a classic; the other is the hardest double for a reduction by π/2.
    got = run(target, width, Unary.SIN, "f64", [1e22, -1e22, 6381956970095103.0 * 2.0**797])
    np.testing.assert_allclose(got, [-0.8522008497671888, 0.8522008497671888, 1.0], rtol=4e-16)
    got = run(target, width, Unary.COS, "f64", [6381956970095103.0 * 2.0**797])
    np.testing.assert_allclose(got, [-4.6871659242546276e-19], rtol=4e-16)
    # One far lane among near ones changes only itself.
    x = np.linspace(-3, 3, 64)
    plain = run(target, width, Unary.SIN, "f64", x)
    x[5] = 1e22
    mixed = run(target, width, Unary.SIN, "f64", x)
    assert np.array_equal(np.delete(mixed, 5), np.delete(plain, 5))
    assert mixed[5] == got.dtype.type(-0.8522008497671888)


@pytest.mark.slow
def test_every_width_gives_the_same_bits():
    for fn in FUNCTIONS:
        for dtype in NUMPY:
            x, pair = operands(dtype)
            args = pair if isinstance(fn, Binary) else (x,)
            results = [run("host", width, fn, dtype, *args) for width in WIDTHS]
            for other in results[1:]:
                np.testing.assert_array_equal(other, results[0], err_msg=f"{fn} {dtype}")


@pytest.mark.parametrize("target", TARGETS)
def test_no_routine_calls_libm(target):
    payload, _ = compiled(target, 4 if target == "x86-64" else 8)
    names = b"exp exp2 log log2 fma fmaf floor floorf ceil ceilf roundeven roundevenf rint rintf ldexp ldexpf pow powf"
    assert [n for n in names.split() if b"\0" + n + b"\0" in payload] == []


def test_a_library_holds_each_routine_and_what_it_calls_once():
    library = Library(HOST.features)
    names = [library.require(fn, "f32", 8) for fn in (Unary.SIN, Unary.COS, Unary.SIN, Unary.EXP)]
    assert names == ["pt.sin.f32x8", "pt.cos.f32x8", "pt.sin.f32x8", "pt.exp.f32x8"]
    defined = re.findall(r"^define internal .*? @([\w.]+)\(", library.text(), re.M)
    assert sorted(defined) == ["pt.cos.f32x8", "pt.exp.f32x8", "pt.far", "pt.far.f32x8", "pt.sin.f32x8"]
    assert library.text().count("define") == len(defined), "a routine is not internal"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((Unary.EXP, "bf16", 8), "mathlib: dtype: expected f32 or f64, got 'bf16'"),
        ((Unary.EXP, "f32", 12), "mathlib: width: expected a power of two from 1 to 64, got 12"),
        ((Unary.EXP, "f32", 128), "mathlib: width: expected a power of two from 1 to 64, got 128"),
        ((Binary.ADD, "f32", 8), "mathlib: fn: no routine for Binary.ADD; lower it to instructions"),
    ],
)
def test_what_has_no_routine_is_refused(args, message):
    with pytest.raises(InternalError) as e:
        require(*args, HOST.features)
    assert str(e.value) == message
