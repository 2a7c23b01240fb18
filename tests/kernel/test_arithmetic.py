"""Elementwise words, operators and casts of every dtype, natively: exact ones to the bit of their meaning, the
others within a few units in the last place."""

import itertools
import math

import numpy as np
import pytest
from tests.frontend.helpers import refuses, shared
from tests.frontend.test_syntax import compiled
from tests.kernel.values import each_dtype, run_both, run_pair

import peertile as pt
import peertile.language as T
from peertile.dtypes import ALL_DTYPES, b1
from peertile.errors import ArgumentError

pytestmark = pytest.mark.any_device

INTS = [d for d in ALL_DTYPES if d.is_int]
MATH = [d for d in ALL_DTYPES if d.is_float and d.bits > 8]
FLOATS = [d for d in ALL_DTYPES if d.is_float]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -1.5, 2.5, 3.0, 1e-3, -7.25, math.inf, -math.inf, math.nan, 100.0, 0.1, -0.3]


def edges(d) -> list[int]:
    found = {d.min, d.min + 1, d.max, d.max - 1, 0, 1, 2, 3, 7, d.bits - 1, d.bits, d.max // 2}
    return sorted(found | ({-1, -2, -7} if d.is_signed else set()))


def power_of_two(values, d) -> np.ndarray:
    n = 1 << (len(values) - 1).bit_length()
    values = [*values, *[values[0]] * (n - len(values))]
    with np.errstate(all="ignore"):
        return np.array(values, None if d.is_float else d.numpy).astype(d.numpy)


def pairs(values, d) -> tuple[np.ndarray, np.ndarray]:
    both = list(itertools.product(values, values))
    return power_of_two([a for a, _ in both], d), power_of_two([b for _, b in both], d)


def every(expressions, names="x, y"):
    """A kernel that stores each expression of `a` and `b` in an output of its own."""
    body = "a = x.load()\n" + ("b = y.load()\n" if "y" in names else "")
    body += "\n".join(f"z{k}.store({e})" for k, e in enumerate(expressions))
    return compiled(body, f"{names}, {', '.join(f'z{k}' for k in range(len(expressions)))}")


INTEGER = [
    "a + b", "a - b", "a * b", "a // b", "a % b", "a & b", "a | b", "a ^ b", "a << b", "a >> b", "T.quot(a, b)",
    "T.rem(a, b)", "T.mod(a, b)", "T.minimum(a, b)", "T.maximum(a, b)", "T.mulhi(a, b)", "T.cdiv(a, b)", "-a", "~a",
    "+a", "T.abs(a)", "T.clamp(a, b, 3)", "a**3", "T.where(a < b, a, b)",
]  # fmt: skip
COMPARED = ["a < b", "a <= b", "a > b", "a >= b", "a == b", "a != b"]


def python_int(expression: str, a: int, b: int, d) -> int:
    """The expression on Python's own numbers, before it wraps."""
    q = abs(a) // abs(b) if b else 0
    q = q if (a < 0) == (b < 0) else -q
    count = b % (1 << d.bits)
    special = {
        "a // b": a // b if b else 0, "a % b": a % b if b else a, "T.mod(a, b)": a % b if b else a,
        "T.quot(a, b)": q, "T.rem(a, b)": a - q * b, "a << b": a << min(count, d.bits),
        "a >> b": a >> min(count, d.bits), "T.mulhi(a, b)": (a * b) >> d.bits,
        "T.cdiv(a, b)": -(-a // b) if b else int(a != 0), "T.minimum(a, b)": min(a, b), "T.maximum(a, b)": max(a, b),
        "T.abs(a)": abs(a), "T.clamp(a, b, 3)": min(max(a, b), 3), "T.where(a < b, a, b)": min(a, b),
    }  # fmt: skip
    return special[expression] if expression in special else eval(expression, {"a": a, "b": b})


@pytest.mark.slow
@pytest.mark.feature("K6", "cpu")
@pytest.mark.feature("K8", "cpu")
@pytest.mark.sentence("NU-10", "NU-11", "NU-12", "NU-13", "NU-14")
@pytest.mark.parametrize("d", each_dtype(INTS), ids=str)
def test_every_word_of_integers(d):
    a, b = pairs(edges(d), d)
    _, _, *found = run_both(every([*INTEGER, *COMPARED, "T.at_least(a, b)"]), a, b, *_outputs(a, len(INTEGER), 7))
    for expression, z in zip(INTEGER, found, strict=False):
        want = [python_int(expression, int(x), int(y), d) % (1 << d.bits) for x, y in zip(a, b, strict=True)]
        assert [int(v) % (1 << d.bits) for v in z] == want, expression
    for expression, z in zip(COMPARED, found[len(INTEGER) :], strict=False):
        assert (z == eval(expression, {"a": a, "b": b})).all(), expression
    ahead = [(int(x) - int(y)) % (1 << d.bits) < 1 << (d.bits - 1) for x, y in zip(a, b, strict=True)]
    assert found[-1].tolist() == ahead


def _outputs(like: np.ndarray, same: int, bools: int = 0) -> list[np.ndarray]:
    return [np.zeros_like(like) for _ in range(same)] + [np.zeros(like.shape, np.bool_) for _ in range(bools)]


@pytest.mark.feature("K6", "cpu")
def test_every_word_of_bools():
    a, b = pairs([False, True], b1)
    words = ["a & b", "a | b", "a ^ b", "~a", "T.where(a, b, ~b)", "a == b", "a != b", "a < b"]
    _, _, *found = run_both(every(words), a, b, *_outputs(a, len(words)))
    want = [a & b, a | b, a ^ b, ~a, np.where(a, b, ~b), a == b, a != b, a < b]
    assert [z.tolist() for z in found] == [w.tolist() for w in want]


# ---------------------------------------------------------------- floats

EXACT = [
    "a + b", "a - b", "a * b", "a / b", "T.clamp(a, b, 1.0)", "T.fma(a, b, a)", "a * b + a", "T.sqrt(a)", "T.floor(a)",
    "T.ceil(a)", "T.round(a)", "T.abs(a)", "-a", "T.where(a < b, a, b)",
]  # fmt: skip
CLOSE = {
    "T.exp(a)": np.exp, "T.exp2(a)": np.exp2, "T.log(a)": np.log, "T.log2(a)": np.log2,
    "T.rsqrt(a)": lambda x: 1 / np.sqrt(x), "T.sin(a)": np.sin, "T.cos(a)": np.cos, "T.tan(a)": np.tan,
    "T.sinh(a)": np.sinh, "T.cosh(a)": np.cosh, "T.tanh(a)": np.tanh, "T.erf(a)": np.vectorize(math.erf),
    "T.sigmoid(a)": lambda x: 1 / (1 + np.exp(-x)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.feature("K6", "cpu")
@pytest.mark.sentence("NU-20", "NU-21", "NU-22", "NU-24", "NU-25", "NU-26")
@pytest.mark.parametrize("d", each_dtype(MATH), ids=str)
def test_every_word_of_floats_that_rounds_once(d):
    a, b = pairs(SPECIAL, d)
    # Which of two zeros a minimum gives is not fixed: those two are compared by value.
    words = [*EXACT, *COMPARED]
    _, _, *found = run_both(every(words), a, b, *_outputs(a, len(EXACT), len(COMPARED)))
    x, y = (v.astype(np.float64) for v in (a, b))
    with np.errstate(all="ignore"):
        for expression, z in zip(COMPARED, found[len(EXACT) :], strict=True):
            assert (z == eval(expression, {"a": x, "b": y})).all(), expression
        fused, twice = found[EXACT.index("T.fma(a, b, a)")], found[EXACT.index("a * b + a")]
        assert (fused != twice).any() or d.name == "f64"
    low, high = run_pair(every(["T.minimum(a, b)", "T.maximum(a, b)"]), a, b, *_outputs(a, 2))[0][2:]
    np.testing.assert_array_equal(low.astype(np.float64), np.minimum(x, y))
    np.testing.assert_array_equal(high.astype(np.float64), np.maximum(x, y))


@pytest.mark.slow
@pytest.mark.feature("K6", "cpu")
@pytest.mark.sentence("NU-23")
@pytest.mark.parametrize("d", each_dtype(MATH), ids=str)
def test_every_math_word_is_right_to_a_few_units(d):
    g = np.random.default_rng(2)
    a = power_of_two([*SPECIAL, *g.uniform(-8, 8, 496)], d)
    b = power_of_two([*g.uniform(-3, 3, 496), *SPECIAL], d)
    words = [*CLOSE, "T.pow(T.abs(a), b)", "T.abs(a) ** b", "T.atan2(a, b)"]
    native, meant = run_pair(every(words), a, b, *_outputs(a, len(words)))
    x, y = (v.astype(np.float64) for v in (a, b))
    with np.errstate(all="ignore"):
        exact = [f(x) for f in CLOSE.values()] + [np.power(np.abs(x), y)] * 2 + [np.arctan2(x, y)]
        unit = 2.0 ** -{"f16": 10, "bf16": 7, "f32": 23, "f64": 52}[d.name]
        for word, z, m, want in zip(words, native[2:], meant[2:], exact, strict=True):
            big = float(np.finfo(d.numpy).max) if d.name != "bf16" else 3.38e38
            want = np.where(np.abs(want) > big, np.copysign(np.inf, want), want)
            for found in (z.astype(np.float64), m.astype(np.float64)):
                right = (found == want) | (np.isnan(found) & np.isnan(want))
                # Denormals of the type have fewer bits: their unit is that of the smallest normal number.
                least = 2.0 ** {"f16": -14, "bf16": -126, "f32": -126, "f64": -1022}[d.name]
                near = np.abs(found - want) <= 4 * unit * np.maximum(np.abs(want), least)
                assert (right | near).all(), (word, a[~(right | near)][:3], found[~(right | near)][:3])


# ---------------------------------------------------------------- casts


def values_of(d) -> np.ndarray:
    if d.is_bool:
        return np.array([False, True])
    if d.is_int:
        return power_of_two(edges(d), d)
    g = np.random.default_rng(4)
    numbers = [*SPECIAL, 127.5, -128.5, 255.5, 65504.0, 65520.0, 448.0, 465.0, 57344.0, 3e38, -3.4e38, 1e-7, 2.0**31]
    return power_of_two([*numbers, *(g.standard_normal(100) * 2.0 ** g.integers(-20, 20, 100))], d)


@pytest.mark.feature("K6", "cpu")
@pytest.mark.sentence("NU-30", "NU-31", "NU-32", "NU-33", "NU-34", "NU-35")
@pytest.mark.parametrize("saturate", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "mode",
    [m if m is T.Rounding.DEFAULT else pytest.param(m, marks=pytest.mark.slow) for m in T.Rounding],
    ids=[m.value for m in T.Rounding],
)
@pytest.mark.parametrize("d", each_dtype(ALL_DTYPES), ids=str)
def test_every_cast_in_every_rounding(d, mode, saturate):
    if mode is not T.Rounding.DEFAULT and not d.is_float:

        def rounded(x, MODE):
            x.load((0,), (4,)).astype(T.f32, rounding=MODE)

        message = f"astype: rounding: only floats round as asked, got {d.name}[4] with {mode.value}; leave it out"
        refuses(rounded, message, constants={"MODE": mode}, x=shared(d, 1))
        return
    x = values_of(d)
    targets = [t for t in ALL_DTYPES if t != d]
    body = "a = x.load()\n" + "\n".join(
        f"z{k}.store(a.astype(T.{'b1' if t.is_bool else t.name}, rounding=MODE, saturate=SATURATE))"
        for k, t in enumerate(targets)
    )
    kernel = compiled(body, f"x, {', '.join(f'z{k}' for k in range(len(targets)))}, MODE, SATURATE")
    _, *found = run_both(kernel, x, *[np.zeros(x.shape, t.numpy) for t in targets], MODE=mode, SATURATE=saturate)
    if d.is_float:
        wide = x.astype(np.float64)
        for t, z in zip(targets, found, strict=True):
            if t.is_float and mode in (T.Rounding.UP, T.Rounding.DOWN) and not saturate and t.bits > 8:
                ok = z.astype(np.float64) >= wide if mode is T.Rounding.UP else z.astype(np.float64) <= wide
                assert (ok | np.isnan(wide)).all() or d.name == "f64", t


@pytest.mark.slow
def test_saturating_makes_infinities_finite_within_one_type():
    floats = [d for d in ALL_DTYPES if d.is_float]
    names = [f"{kind}{k}" for k in range(len(floats)) for kind in "xz"]
    body = "\n".join(f"z{k}.store(x{k}.load().astype(T.{d.name}, saturate=True))" for k, d in enumerate(floats))
    x = [np.array([np.inf, -np.inf, np.nan, -0.0, 1.5, -2, 0, 1]).astype(d.numpy) for d in floats]
    found = run_both(compiled(body, ", ".join(names)), *[a for one in x for a in (one, np.zeros_like(one))])
    for d, before, z in zip(floats, x, found[1::2], strict=True):
        largest = {"bf16": 3.3895313892515355e38, "f8e4m3": np.nan, "f8e5m2": 57344}.get(d.name) or np.finfo(
            d.numpy
        ).max
        assert z[:3].astype(np.float64).tolist() == pytest.approx([largest, -largest, np.nan], nan_ok=True), d
        assert z[3:].tobytes() == before[3:].tobytes(), d


@pytest.mark.feature("K6", "cpu")
def test_bitcast_keeps_the_bits_of_every_dtype():
    for d in ALL_DTYPES:
        if d.is_bool:
            continue
        same = [t for t in ALL_DTYPES if t.bits == d.bits]
        x = np.random.default_rng(1).integers(0, 256, 16 * d.itemsize).astype(np.uint8).view(d.numpy)
        kernel = every([f"a.bitcast(T.{t.name})" for t in same], "x")
        _, *found = run_pair(kernel, x, *[np.zeros(16, t.numpy) for t in same])[0]
        assert all(z.tobytes() == x.tobytes() for z in found), d


# ---------------------------------------------------------------- creation, promotion, dtypes


@pytest.mark.feature("K6", "cpu")
@pytest.mark.parametrize("d", each_dtype(ALL_DTYPES), ids=str)
def test_tiles_are_made_of_every_dtype(d):
    name = "b1" if d.is_bool else d.name
    words = [f"T.zeros((16,), T.{name})", f"T.ones((16,), T.{name})", f"T.full((16,), 1, T.{name})"]
    if d.is_bool:
        words[2] = "T.full((16,), True)"
    if d.is_int:
        words += [f"T.iota(16, T.{name})", f"T.{name}(7) + a", "a * 2"]
    _, *found = run_both(every(words, "x"), np.ones(16, d.numpy), *_outputs(np.zeros(16, d.numpy), len(words)))
    want = [0, 1, 1, np.arange(16), 8, 2]
    for z, w in zip(found, want, strict=False):
        assert (z.astype(np.float64) == w).all()


@pytest.mark.feature("K8", "cpu")
def test_other_dtypes_are_refused_by_name():
    for numpy_name in ("complex64", "datetime64[ns]", "U4", "O"):
        with pytest.raises(ArgumentError) as caught:
            pt.asarray(np.zeros(4, numpy_name))
        assert str(caught.value).startswith("dtype: expected one of bool, int8,"), str(caught.value)
        assert str(caught.value).endswith(f"got {np.dtype(numpy_name).name}")

    def complex_tile(x):
        T.zeros((8,), complex)

    refuses(complex_tile, "T.zeros: dtype: expected a dtype such as T.f32, got the class complex")
