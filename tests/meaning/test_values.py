"""Every op on values against a plain Python loop with exact numbers."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from peertile import dtypes
from peertile.dtypes import ALL_DTYPES, DType, bf16, f8e4m3, f8e5m2, f16, f32, f64, i8, i32, i64, u8, u16, u32, u64
from peertile.ir.ops import Binary, Compare, Fold, Padding, Rounding, Unary
from peertile.ir.text import parse_kernel
from peertile.ir.types import TileType
from peertile.meaning import run_grid

INTS = [d for d in ALL_DTYPES if d.is_int]
FLOATS = [d for d in ALL_DTYPES if d.is_float]
MATH = [f16, bf16, f32, f64]


def apply(op: str, result: TileType, *arrays: np.ndarray) -> np.ndarray:
    """`%r = op : result` on whole arrays (%a, %b, %c), through a kernel."""
    names = "abc"[: len(arrays)]
    types = [dtypes.from_numpy(x.dtype) for x in arrays]
    params = [f"%v{n}: view<{d}, {x.ndim}, read>" for n, d, x in zip(names, types, arrays, strict=True)]
    text = "%zero = const(value=0) : i64\n"
    for n, d, x in zip(names, types, arrays, strict=True):
        text += f"%{n} = load(%v{n}{', %zero' * x.ndim}) : {TileType(d, x.shape)}\n"
    text += f"%r = {op} : {result}\nstore(%out, %r{', %zero' * result.rank})\nreturn()"
    params.append(f"%out: view<{result.dtype}, {result.rank}, write>")
    out = np.zeros(result.shape, result.dtype.numpy)
    assert run_grid(parse_kernel(f"kernel @k({', '.join(params)}) {{ {text} }}"), 1, [*arrays, out]).faults == []
    return out


def power_of_two(values: list, dtype: DType) -> np.ndarray:
    """The values, padded with the first one to a power of two."""
    n = 1 << (len(values) - 1).bit_length()
    values = [*values, *[values[0]] * (n - len(values))]
    return np.array(values, None if dtype.is_float else dtype.numpy).astype(dtype.numpy)


def pairs(values: list, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    both = list(itertools.product(values, values))
    return power_of_two([a for a, _ in both], dtype), power_of_two([b for _, b in both], dtype)


def wrap(value: int, d: DType) -> int:
    value %= 1 << d.bits
    return value - (1 << d.bits) if d.is_signed and value >= 1 << (d.bits - 1) else value


def edge_ints(d: DType) -> list[int]:
    small = [0, 1, 2, 3, 7, d.bits - 1, d.bits]
    return sorted({d.min, d.min + 1, d.max, d.max - 1, d.max // 2 + 1, *small, *([-1, -2, -7] if d.min else [])})


def naive_int(fn: Binary, a: int, b: int, d: DType) -> int:
    q = abs(a) // abs(b) if b else 0
    trunc = q if (a < 0) == (b < 0) else -q
    floor = math.floor(Fraction(a, b)) if b else 0
    count = min(b % (1 << d.bits), d.bits)
    return {
        Binary.ADD: a + b, Binary.SUB: a - b, Binary.MUL: a * b, Binary.MULHI: (a * b) >> d.bits,
        Binary.FLOORDIV: floor, Binary.MOD: a - b * floor, Binary.QUOT: trunc, Binary.REM: a - b * trunc,
        Binary.MIN: min(a, b), Binary.MAX: max(a, b), Binary.AND: a & b, Binary.OR: a | b, Binary.XOR: a ^ b,
        Binary.SHL: (a << count) % (1 << d.bits), Binary.SHR: a >> count,
    }[fn]  # fmt: skip


INT_FNS = [fn for fn in Binary if fn not in (Binary.DIV, Binary.POW, Binary.ATAN2)]


@pytest.mark.parametrize("d", INTS, ids=str)
@pytest.mark.parametrize("fn", INT_FNS, ids=lambda fn: fn.value)
def test_binary_of_integers(fn: Binary, d: DType) -> None:
    a, b = pairs(edge_ints(d), d)
    found = apply(f"binary(%a, %b, fn=Binary.{fn.value})", TileType(d, a.shape), a, b)
    assert found.tolist() == [wrap(naive_int(fn, x, y, d), d) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


@pytest.mark.parametrize("fn", [Binary.AND, Binary.OR, Binary.XOR], ids=lambda fn: fn.value)
def test_binary_of_bools(fn: Binary) -> None:
    a, b = pairs([False, True], dtypes.b1)
    found = apply(f"binary(%a, %b, fn=Binary.{fn.value})", TileType(dtypes.b1, (4,)), a, b)
    assert found.tolist() == [bool(naive_int(fn, x, y, u8)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


SOME_FLOATS = [0.0, -0.0, 1.0, -1.5, 0.1, 3.25, 100.0, -1e-3, 6e4, math.inf, -math.inf, math.nan]


def rounded(value: float, d: DType) -> float:
    """`value` (an f64 result) as `d`: through f32 where that is wider."""
    with np.errstate(all="ignore"):
        return float(np.float64(value).astype(np.float32 if d.bits < 32 else d.numpy).astype(d.numpy))


def same(found: np.ndarray, expected: list[float]) -> None:
    """Equal bit for bit, but for the bits of NaN."""
    got = [float(x) for x in found]
    assert [(repr(x)) for x in got] == [repr(x) for x in expected]


def naive_float(fn: Binary, a: float, b: float) -> float:
    if fn in (Binary.MIN, Binary.MAX):
        return math.nan if math.isnan(a) or math.isnan(b) else min(a, b) if fn is Binary.MIN else max(a, b)
    with np.errstate(all="ignore"):
        x, y = np.float64(a), np.float64(b)
        return float({Binary.ADD: x + y, Binary.SUB: x - y, Binary.MUL: x * y, Binary.DIV: x / y}[fn])


@pytest.mark.parametrize("d", MATH, ids=str)
@pytest.mark.parametrize("fn", [Binary.ADD, Binary.SUB, Binary.MUL, Binary.DIV], ids=lambda fn: fn.value)
def test_arithmetic_of_floats_rounds_once(fn: Binary, d: DType) -> None:
    a, b = pairs(SOME_FLOATS, d)
    found = apply(f"binary(%a, %b, fn=Binary.{fn.value})", TileType(d, a.shape), a, b)
    same(found, [rounded(naive_float(fn, float(x), float(y)), d) for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize("d", MATH, ids=str)
@pytest.mark.parametrize("fn", [Binary.MIN, Binary.MAX], ids=lambda fn: fn.value)
def test_minimum_and_maximum_give_nan_if_either_is(fn: Binary, d: DType) -> None:
    a, b = pairs([x for x in SOME_FLOATS if x != 0 or math.copysign(1, x) > 0], d)
    found = apply(f"binary(%a, %b, fn=Binary.{fn.value})", TileType(d, a.shape), a, b)
    same(found, [naive_float(fn, float(x), float(y)) for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize("d", MATH, ids=str)
def test_pow_and_atan2(d: DType) -> None:
    a, b = pairs([0.5, 1.0, 2.0, 3.0], d)
    for fn, naive in ((Binary.POW, math.pow), (Binary.ATAN2, math.atan2)):
        found = apply(f"binary(%a, %b, fn=Binary.{fn.value})", TileType(d, a.shape), a, b)
        expected = [naive(float(x), float(y)) for x, y in zip(a, b, strict=True)]
        np.testing.assert_allclose(found.astype(np.float64), expected, rtol=2.0 ** -{16: 8, 32: 22, 64: 50}[d.bits])


NAIVE_UNARY = {
    Unary.EXP: math.exp, Unary.EXP2: lambda x: 2.0**x, Unary.LOG: math.log, Unary.LOG2: math.log2,
    Unary.SQRT: math.sqrt, Unary.RSQRT: lambda x: 1 / math.sqrt(x), Unary.SIN: math.sin, Unary.COS: math.cos,
    Unary.TAN: math.tan, Unary.SINH: math.sinh, Unary.COSH: math.cosh, Unary.TANH: math.tanh, Unary.ERF: math.erf,
    Unary.SIGMOID: lambda x: 1 / (1 + math.exp(-x)), Unary.FLOOR: math.floor, Unary.CEIL: math.ceil, Unary.ROUND: round,
}  # fmt: skip


@pytest.mark.parametrize("d", MATH, ids=str)
@pytest.mark.parametrize("fn", NAIVE_UNARY, ids=lambda fn: fn.value)
def test_functions_of_floats(fn: Unary, d: DType) -> None:
    x = power_of_two([0.25, 0.5, 1.0, 1.5, 2.5, 3.0, 7.75], d)
    found = apply(f"unary(%a, fn=Unary.{fn.value})", TileType(d, x.shape), x)
    expected = [NAIVE_UNARY[fn](float(v)) for v in x]
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=2.0 ** -{16: 8, 32: 23, 64: 50}[d.bits])


def test_every_unary_function_is_covered() -> None:
    assert set(NAIVE_UNARY) | {Unary.NEG, Unary.ABS, Unary.NOT} == set(Unary)


@pytest.mark.parametrize("d", FLOATS, ids=str)
def test_sign_functions_of_floats(d: DType) -> None:
    values = [x for x in SOME_FLOATS if d.bits > 8 or abs(x) <= 100]
    x = power_of_two(values, d)
    same(apply("unary(%a, fn=Unary.neg)", TileType(d, x.shape), x), [-float(v) for v in x])
    same(apply("unary(%a, fn=Unary.abs)", TileType(d, x.shape), x), [abs(float(v)) for v in x])


@pytest.mark.parametrize("d", INTS, ids=str)
def test_unary_of_integers(d: DType) -> None:
    x = power_of_two(edge_ints(d), d)
    for name, naive in (("neg", lambda v: -v), ("abs", abs), ("not", lambda v: ~v)):
        found = apply(f"unary(%a, fn=Unary.{name})", TileType(d, x.shape), x)
        assert found.tolist() == [wrap(naive(v), d) for v in x.tolist()]


def test_not_of_bools() -> None:
    assert apply("unary(%a, fn=Unary.not)", TileType(dtypes.b1, (2,)), np.array([True, False])).tolist() == [
        False,
        True,
    ]


@pytest.mark.parametrize("d", [d for d in ALL_DTYPES if not d.is_bool], ids=str)
@pytest.mark.parametrize("fn", [fn for fn in Compare if fn is not Compare.AT_LEAST], ids=lambda fn: fn.value)
def test_comparison(fn: Compare, d: DType) -> None:
    values = edge_ints(d) if d.is_int else [x for x in SOME_FLOATS if d.bits > 8 or not abs(x) > 100]
    a, b = pairs(values, d)
    found = apply(f"compare(%a, %b, fn=Compare.{fn.value})", TileType(dtypes.b1, a.shape), a, b)
    py = {"eq": "__eq__", "ne": "__ne__", "lt": "__lt__", "le": "__le__", "gt": "__gt__", "ge": "__ge__"}[fn.value]
    kind = int if d.is_int else float
    assert found.tolist() == [getattr(kind(x), py)(kind(y)) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("d", INTS, ids=str)
def test_at_least_is_the_signed_difference(d: DType) -> None:
    a, b = pairs(edge_ints(d), d)
    found = apply("compare(%a, %b, fn=Compare.at_least)", TileType(dtypes.b1, a.shape), a, b)
    half = 1 << (d.bits - 1)
    assert found.tolist() == [(x - y) % (2 * half) < half for x, y in zip(a.tolist(), b.tolist(), strict=True)]


def test_select() -> None:
    c, a, b = np.array([True, False]), np.array([1, 2], np.int8), np.array([3, 4], np.int8)
    assert apply("select(%a, %b, %c)", TileType(i8, (2,)), c, a, b).tolist() == [1, 4]


def nearest(exact: Fraction, d: DType) -> float:
    """The number of `d` nearest to `exact`, ties to even, by comparing with the neighbours."""
    near = d.numpy.type(float(exact))
    candidates = [np.nextafter(near, d.numpy.type(-np.inf)), near, np.nextafter(near, d.numpy.type(np.inf))]
    bits = np.dtype(f"u{d.itemsize}")
    return float(min(candidates, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(bits)) & 1)))


@pytest.mark.parametrize("d", [f32, f64], ids=str)
def test_fma_rounds_once(d: DType) -> None:
    random = np.random.default_rng(5)
    a, b, c = (random.standard_normal(256).astype(d.numpy) for _ in range(3))
    c[:128] = -(a[:128] * b[:128])  # what is left is the error of the product
    found = apply("fma(%a, %b, %c)", TileType(d, (256,)), a, b, c)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    assert found.tolist() == [nearest(e, d) for e in exact]


def test_fma_of_special_values() -> None:
    a = np.array([math.inf, 1e300, 0.0, 1.0])
    b = np.array([1.0, 1e300, math.inf, 2.0])
    c = np.array([1.0, -1.0, 1.0, math.nan])
    same(apply("fma(%a, %b, %c)", TileType(f64, (4,)), a, b, c), [math.inf, math.inf, math.nan, math.nan])


# ---------------------------------------------------------------- conversion


@pytest.mark.parametrize("src", INTS, ids=str)
@pytest.mark.parametrize("dst", INTS, ids=str)
def test_integer_to_integer(src: DType, dst: DType) -> None:
    x = power_of_two(edge_ints(src), src)
    found = apply("cast(%a)", TileType(dst, x.shape), x)
    assert found.tolist() == [wrap(v, dst) for v in x.tolist()]
    found = apply("cast(%a, saturate=true)", TileType(dst, x.shape), x)
    assert found.tolist() == [max(dst.min, min(v, dst.max)) for v in x.tolist()]


@pytest.mark.parametrize("src", [f16, bf16, f32, f64, f8e4m3, f8e5m2], ids=str)
@pytest.mark.parametrize("dst", INTS, ids=str)
@pytest.mark.parametrize("rounding", list(Rounding), ids=lambda r: r.value)
def test_float_to_integer_saturates(src: DType, dst: DType, rounding: Rounding) -> None:
    values = [
        0.0,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        100.25,
        -100.75,
        7e4,
        -7e4,
        3e9,
        2e19,
        -2e19,
        math.inf,
        -math.inf,
        math.nan,
    ]
    with np.errstate(all="ignore"):
        x = power_of_two(values, src)
    found = apply(f"cast(%a, rounding=Rounding.{rounding.value})", TileType(dst, x.shape), x)
    to_int = {Rounding.UP: math.ceil, Rounding.DOWN: math.floor, Rounding.NEAREST: round}.get(rounding, math.trunc)

    def naive(v: float) -> int:
        if math.isnan(v):
            return 0
        if math.isinf(v):
            return dst.max if v > 0 else dst.min
        return max(dst.min, min(to_int(v), dst.max))

    assert found.tolist() == [naive(float(v)) for v in x]


def all_numbers(d: DType) -> list[float]:
    """Every finite number of a type of at most 16 bits, ascending."""
    bits = np.arange(1 << d.bits, dtype=np.uint32).astype(np.dtype(f"u{d.itemsize}"))
    with np.errstate(all="ignore"):
        values = bits.view(d.numpy).astype(np.float64)
    return sorted(set(values[np.isfinite(values)].tolist()))


def even(value: float, d: DType) -> bool:
    return int(np.asarray(value).astype(d.numpy).view(f"u{d.itemsize}")) % 2 == 0


@pytest.mark.parametrize("dst", [f16, bf16, f8e4m3, f8e5m2], ids=str)
@pytest.mark.parametrize("rounding", list(Rounding), ids=lambda r: r.value)
def test_float_to_narrower_float(dst: DType, rounding: Rounding) -> None:
    numbers = all_numbers(dst)
    random = np.random.default_rng(1)
    span = {"f16": 14, "bf16": 60, "f8e4m3": 9, "f8e5m2": 15}[dst.name]
    x = (random.choice([-1.0, 1.0], 1024) * 2.0 ** random.uniform(-span - 2, span, 1024)).astype(np.float32)
    x[:256] = random.choice(numbers, 256).astype(np.float32)
    k = random.integers(1, len(numbers) - 1, 256)  # halfway between two numbers
    x[256:512] = [(numbers[i] + numbers[i + 1]) / 2 for i in k]
    found = apply(f"cast(%a, rounding=Rounding.{rounding.value})", TileType(dst, x.shape), x)
    table = np.array(numbers)
    for v, got in zip(x.astype(np.float64), found.astype(np.float64), strict=True):
        low = table[max(np.searchsorted(table, v, side="right") - 1, 0)]
        high = table[min(np.searchsorted(table, v), len(table) - 1)]
        if low > v or high < v:
            continue  # beyond the largest: the next test
        toward = {Rounding.UP: high, Rounding.DOWN: low, Rounding.ZERO: low if v > 0 else high}
        if rounding in toward:
            expected = toward[rounding]
        elif v - low != high - v:
            expected = low if v - low < high - v else high
        else:
            expected = low if even(low, dst) else high
        assert got == expected, (v, got, expected)


def test_beyond_the_largest_number() -> None:
    x = np.array([1e6, -1e6, math.inf, math.nan], np.float32)
    same(apply("cast(%a)", TileType(f16, (4,)), x), [math.inf, -math.inf, math.inf, math.nan])
    same(apply("cast(%a, saturate=true)", TileType(f16, (4,)), x), [65504.0, -65504.0, 65504.0, math.nan])
    same(apply("cast(%a, rounding=Rounding.zero)", TileType(f16, (4,)), x), [65504.0, -65504.0, math.inf, math.nan])
    same(apply("cast(%a, rounding=Rounding.down)", TileType(f16, (4,)), x), [65504.0, -math.inf, math.inf, math.nan])
    same(apply("cast(%a)", TileType(f8e4m3, (4,)), x), [448.0, -448.0, 448.0, math.nan])
    same(apply("cast(%a)", TileType(f8e5m2, (4,)), x), [57344.0, -57344.0, 57344.0, math.nan])


@pytest.mark.parametrize("src", FLOATS, ids=str)
@pytest.mark.parametrize("dst", [f32, f64], ids=str)
def test_float_to_wider_float_is_exact(src: DType, dst: DType) -> None:
    if src.bits < dst.bits:
        x = power_of_two([0.0, -0.0, 0.5, 1.5, -2.0, 0.0625], src)
        for rounding in Rounding:
            found = apply(f"cast(%a, rounding=Rounding.{rounding.value})", TileType(dst, x.shape), x)
            same(found, [float(v) for v in x])


def test_conversions_of_f64_go_through_f32_to_narrower_types() -> None:
    # Just above a tie of bf16 and of f16, lost in f32: to the even neighbour, not up.
    x = np.array([1 + 2**-8 + 2**-40, 1 + 2**-11 + 2**-40], np.float64)
    assert apply("cast(%a)", TileType(bf16, (2,)), x)[0] == 1
    assert apply("cast(%a)", TileType(f16, (2,)), x)[1] == 1


@pytest.mark.parametrize("src", INTS, ids=str)
@pytest.mark.parametrize("dst", FLOATS, ids=str)
def test_integer_to_float(src: DType, dst: DType) -> None:
    x = power_of_two([0, 1, 2, 3, 100, *([-1, -100] if src.min else [])], src)
    found = apply("cast(%a)", TileType(dst, x.shape), x)
    same(found, [float(np.float32(v).astype(dst.numpy)) for v in x.tolist()])


@pytest.mark.parametrize("d", [d for d in ALL_DTYPES if not d.is_bool], ids=str)
def test_to_and_from_bool(d: DType) -> None:
    x = power_of_two([0, 1, 2], d)
    assert apply("cast(%a)", TileType(dtypes.b1, (4,)), x).tolist() == [False, True, True, False]
    b = np.array([True, False])
    assert [float(v) for v in apply("cast(%a)", TileType(d, (2,)), b)] == [1, 0]


def test_nan_is_true() -> None:
    assert apply("cast(%a)", TileType(dtypes.b1, (2,)), np.array([math.nan, -0.0], np.float32)).tolist() == [
        True,
        False,
    ]


def test_bitcast() -> None:
    x = np.array([1.0, -0.0], np.float32)
    assert apply("bitcast(%a)", TileType(u32, (2,)), x).tolist() == [0x3F800000, 0x80000000]


# ---------------------------------------------------------------- shape

X = np.arange(32, dtype=np.int32).reshape(4, 8)


def test_broadcast() -> None:
    assert apply("broadcast(%a)", TileType(i32, (2, 2)), np.array(7, np.int32)).tolist() == [[7, 7], [7, 7]]
    column = np.array([[1], [2]], np.int32)
    assert apply("broadcast(%a)", TileType(i32, (2, 2)), column).tolist() == [[1, 1], [2, 2]]


def test_reshape_is_row_major() -> None:
    found = apply("reshape(%a)", TileType(i32, (8, 4)), X)
    assert all(found[k // 4, k % 4] == k for k in range(32))


def test_permute() -> None:
    x = np.arange(16, dtype=np.int32).reshape(2, 4, 2)
    found = apply("permute(%a, axes=[2, 0, 1])", TileType(i32, (2, 2, 4)), x)
    assert all(found[k, i, j] == x[i, j, k] for i in range(2) for j in range(4) for k in range(2))


@pytest.mark.parametrize("d", [u8, u64, i8, i64], ids=str)
def test_iota(d: DType) -> None:
    body = f"%z = const(value=0) : i64 %r = iota() : {d}[8] store(%out, %r, %z) return()"
    out = np.zeros(8, d.numpy)
    run_grid(parse_kernel(f"kernel @k(%out: view<{d}, 1, write>) {{ {body} }}"), 1, [out])
    assert out.tolist() == list(range(8))


NAIVE_FOLD = {
    Fold.ADD: lambda a, b: a + b, Fold.MUL: lambda a, b: a * b, Fold.MAX: max, Fold.MIN: min,
    Fold.AND: lambda a, b: a & b, Fold.OR: lambda a, b: a | b, Fold.XOR: lambda a, b: a ^ b,
}  # fmt: skip


def naive_fold(fn: Fold, x: np.ndarray, axis: int) -> list:
    columns = np.moveaxis(x, axis, 0).tolist()
    total = columns[0]
    for column in columns[1:]:
        total = [NAIVE_FOLD[fn](a, b) for a, b in zip(total, column, strict=True)]
    return total


@pytest.mark.parametrize("d", INTS, ids=str)
@pytest.mark.parametrize("fn", list(Fold), ids=lambda fn: fn.value)
@pytest.mark.parametrize("axis", [0, 1])
def test_reduce_of_integers(fn: Fold, d: DType, axis: int) -> None:
    x = np.random.default_rng(3).integers(d.min, d.max, (4, 8), d.numpy, endpoint=True)
    found = apply(f"reduce(%a, fn=Fold.{fn.value}, axis={axis})", TileType(d, (x.shape[1 - axis],)), x)
    assert found.tolist() == [wrap(v, d) for v in naive_fold(fn, x, axis)]


@pytest.mark.parametrize("d", MATH, ids=str)
@pytest.mark.parametrize("fn", [Fold.ADD, Fold.MUL, Fold.MAX, Fold.MIN], ids=lambda fn: fn.value)
def test_reduce_of_floats(fn: Fold, d: DType) -> None:
    x = np.random.default_rng(3).uniform(0.5, 2, (4, 8)).astype(d.numpy)
    found = apply(f"reduce(%a, fn=Fold.{fn.value}, axis=1)", TileType(d, (4,)), x)
    expected = naive_fold(fn, x.astype(np.float64), 1)
    if d is f64:  # the order of folding is not promised
        np.testing.assert_allclose(found, expected, rtol=1e-15)
    else:
        same(found, [rounded(v, d) for v in expected])


def test_reduce_to_a_scalar_and_nan() -> None:
    x = np.array([1.0, math.nan, 3.0, 0.0], np.float32)
    assert math.isnan(apply("reduce(%a, fn=Fold.max, axis=0)", TileType(f32), x)[()])
    assert apply("reduce(%a, fn=Fold.or, axis=0)", TileType(dtypes.b1), np.array([False, True]))[()]


MMA = [(f32, f32), (f64, f64), (f16, f32), (bf16, f32), (f8e4m3, f32), (f8e5m2, f32), (i8, i32), (u8, i32)]


@pytest.mark.parametrize(("d", "acc"), MMA, ids=str)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_mma(d: DType, acc: DType, batch: tuple[int, ...]) -> None:
    random = np.random.default_rng(4)
    a, b = (random.integers(-4, 4, (*batch, *s)).astype(d.numpy) for s in ((2, 8), (8, 4)))
    c = random.integers(-4, 4, (*batch, 2, 4)).astype(acc.numpy)
    found = apply("mma(%a, %b, %c)", TileType(acc, c.shape), a, b, c)
    for at in np.ndindex(*c.shape):
        *k, m, n = at
        terms = [float(a[(*k, m, j)]) * float(b[(*k, j, n)]) for j in range(8)]
        assert float(found[at]) == float(c[at]) + sum(terms)


def test_integer_mma_wraps() -> None:
    a = np.full((1, 2), 127, np.int8)
    c = np.full((1, 1), np.iinfo(np.int32).max, np.int32)
    found = apply("mma(%a, %b, %c)", TileType(i32, (1, 1)), a, a.reshape(2, 1), c)
    assert found[0, 0] == wrap(2**31 - 1 + 2 * 127 * 127, i32)


# ---------------------------------------------------------------- constants and padding


CONSTS = [("-3", i8, -3), ("true", dtypes.b1, 1), ("0.1", f32, 0.10000000149011612), ("65535", u16, 65535)]


@pytest.mark.parametrize(("text", "d", "value"), [*CONSTS, ("-inf", bf16, -math.inf)], ids=str)
def test_const(text: str, d: DType, value) -> None:
    out = np.zeros((), d.numpy)
    body = f"%r = const(value={text}) : {d} store(%out, %r) return()"
    run_grid(parse_kernel(f"kernel @k(%out: view<{d}, 0, write>) {{ {body} }}"), 1, [out])
    assert float(out) == value


@pytest.mark.parametrize("padding", list(Padding), ids=lambda p: p.value)
def test_padding(padding: Padding) -> None:
    text = f"""kernel @k(%x: view<f32, 1, read>, %out: view<f32, 1, write>) {{
      %one = const(value=1) : i64
      %t = load(%x, %one, padding=Padding.{padding.value}) : f32[4]
      store(%out, %t, %one) return() }}"""
    out = np.zeros(8, np.float32)
    run_grid(parse_kernel(text), 1, [np.arange(1, 6, dtype=np.float32), out])
    fill = {"zero": 0.0, "neg_zero": -0.0, "nan": math.nan, "inf": math.inf, "neg_inf": -math.inf}[padding.value]
    same(out, [0.0] * 4 + [5.0, fill, fill, fill])
