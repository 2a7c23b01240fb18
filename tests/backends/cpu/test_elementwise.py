"""Every elementwise op over every dtype that it takes, on the cpu target against numpy."""

import itertools
import math

import numpy as np
import pytest
from tests.backends.cpu.util import K, Loaded, exclusive, run, shared

from peertile.dtypes import ALL_DTYPES, b1, bf16, f8e4m3, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64
from peertile.ir import ops
from peertile.ir.ops import Binary, Compare, Fold, Rounding, Unary
from peertile.ir.types import TileType

FLOATS = (f16, bf16, f32, f64)
INTS = (i8, i16, i32, i64, u8, u16, u32, u64)
N = 256


def values(dtype, seed, n=N):
    """Numbers of all sizes, with the special ones at the front."""
    rng = np.random.default_rng(seed)
    if dtype.is_bool:
        return rng.integers(0, 2, n).astype(bool)
    if dtype.is_int:
        wide = rng.integers(0, 1 << 63, n, dtype=np.uint64).astype(dtype.numpy)
        small = rng.integers(0, 20, n).astype(dtype.numpy)
        x = np.where(rng.integers(0, 2, n) == 0, wide, small)
        special = [0, 1, dtype.max, dtype.min, dtype.max - 1, 2, 3, 7]
        x[: len(special)] = np.array(special, dtype.numpy)
        rng.shuffle(x[:64])
        return x
    x = rng.standard_normal(n) * 10.0 ** rng.uniform(-3, 2, n)
    special = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 0.5, 1.5, 2.5, -0.5, -2.5, 1e-6, 448.0, 3e38]
    x[: len(special)] = special
    with np.errstate(all="ignore"):
        x = x.astype(dtype.numpy)
    rng.shuffle(x[:64])
    return x


def apply(build, result, *inputs, tile=N):
    """One tile through `build(kernel, loaded tiles)`."""
    params = {f"x{k}": shared(d, 1) for k, (d, _) in enumerate(inputs)}
    k = K("apply", z=exclusive(result, (tile,)), **params)
    tiles = [k.load(k.p[name], [0], (tile,)) for name in params]
    k.store(k.z, build(k, *tiles), [0])
    z = np.zeros(tile, result.numpy)
    run(k.done(), [z, *[a for _, a in inputs]])
    return z


def same(got, want):
    """Equal by value, NaN equal to NaN."""
    g, w = np.asarray(got), np.asarray(want)
    assert g.dtype == w.dtype
    if g.dtype.kind in "biu":
        bad = g != w
    else:
        a, b = g.astype(np.float64), w.astype(np.float64)
        bad = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    assert not bad.any(), [(int(k), g[k], w[k]) for k in np.flatnonzero(bad)[:5]]


def rounded(x, dtype):
    """float64 or float32 results rounded to dtype."""
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(dtype.numpy)


def ulps(got, want, dtype):
    """Distance in units of the last place of `dtype` around the true value."""
    bits = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}[dtype.name]
    smallest = {"f16": -24, "bf16": -133, "f32": -149, "f64": -1074}[dtype.name]
    a, b = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    both_nan = np.isnan(a) & np.isnan(b)
    with np.errstate(all="ignore"):
        exponent = np.frexp(np.where(np.isfinite(b) & (b != 0), b, 1.0))[1]
        unit = np.ldexp(1.0, np.maximum(exponent - bits, smallest))
        distance = np.abs(a - b) / unit
        near = np.asarray(want).astype(dtype.numpy).astype(np.float64)
    return np.where(both_nan | (a == b) | (a == near), 0.0, distance)


EXACT = {
    Unary.NEG: np.negative, Unary.ABS: np.abs, Unary.FLOOR: np.floor, Unary.CEIL: np.ceil, Unary.ROUND: np.round,
    Unary.SQRT: np.sqrt,
}  # fmt: skip
CLOSE = {
    Unary.EXP: np.exp, Unary.EXP2: np.exp2, Unary.LOG: np.log, Unary.LOG2: np.log2, Unary.SIN: np.sin,
    Unary.COS: np.cos, Unary.TAN: np.tan, Unary.SINH: np.sinh, Unary.COSH: np.cosh, Unary.TANH: np.tanh,
    Unary.RSQRT: lambda x: 1 / np.sqrt(x), Unary.SIGMOID: lambda x: 1 / (1 + np.exp(-x)),
    Unary.ERF: np.vectorize(math.erf, otypes=[np.float64]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unary_float_functions_agree_with_numpy(dtype):
    x = values(dtype, 1)
    wide = x.astype(np.float64)
    names = [*EXACT, *CLOSE]
    k = K("unary", x=shared(dtype, 1), **{f"z_{fn.value}": exclusive(dtype, (N,)) for fn in names})
    tile = k.load(k.x, [0], (N,))
    for fn in names:
        k.store(k.p[f"z_{fn.value}"], k.unary(fn, tile), [0])
    out = [np.zeros(N, dtype.numpy) for _ in names]
    run(k.done(), [x, *out])
    with np.errstate(all="ignore"):
        for fn, z in zip(names, out, strict=True):
            want = EXACT[fn](wide) if fn in EXACT else CLOSE[fn](wide)
            if fn in EXACT:
                same(z, rounded(want, dtype))
            else:
                assert ulps(z, want, dtype).max() <= 4, fn


@pytest.mark.parametrize("dtype", [*INTS, b1], ids=str)
def test_unary_of_integers_wraps(dtype):
    x = values(dtype, 2)
    same(apply(lambda k, a: k.unary(Unary.NOT, a), dtype, (dtype, x)), ~x)
    if dtype is b1:
        return
    same(apply(lambda k, a: k.unary(Unary.NEG, a), dtype, (dtype, x)), np.negative(x))
    same(apply(lambda k, a: k.unary(Unary.ABS, a), dtype, (dtype, x)), np.abs(x))


def python_integer(fn, a, b, dtype):
    """The op on Python ints, then wrapped to the dtype."""
    bits = dtype.bits
    unsigned = b & ((1 << bits) - 1)
    if fn in (Binary.FLOORDIV, Binary.MOD, Binary.QUOT, Binary.REM) and b == 0:
        r = 0 if fn in (Binary.FLOORDIV, Binary.QUOT) else a
    elif fn is Binary.FLOORDIV:
        r = a // b
    elif fn is Binary.MOD:
        r = a % b
    elif fn is Binary.QUOT:
        r = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    elif fn is Binary.REM:
        r = abs(a) % abs(b) * (-1 if a < 0 else 1)
    elif fn is Binary.SHL:
        r = a << unsigned if unsigned < bits else 0
    elif fn is Binary.SHR:
        r = a >> min(unsigned, 200)
    elif fn is Binary.MULHI:
        r = (a * b) >> bits
    else:
        r = {
            Binary.ADD: a + b, Binary.SUB: a - b, Binary.MUL: a * b, Binary.MIN: min(a, b), Binary.MAX: max(a, b),
            Binary.AND: a & b, Binary.OR: a | b, Binary.XOR: a ^ b,
        }[fn]  # fmt: skip
    r &= (1 << bits) - 1
    return r - (1 << bits) if dtype.is_signed and r >> (bits - 1) else r


INT_BINARY = [fn for fn in Binary if fn not in (Binary.DIV, Binary.POW, Binary.ATAN2)]


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_binary_of_integers(dtype):
    a, b = values(dtype, 3), values(dtype, 4)
    b[:24] = np.arange(24).astype(dtype.numpy)
    k = K(
        "binary", a=shared(dtype, 1), b=shared(dtype, 1), **{f"z_{f.value}": exclusive(dtype, (N,)) for f in INT_BINARY}
    )
    x, y = k.load(k.a, [0], (N,)), k.load(k.p["b"], [0], (N,))
    for fn in INT_BINARY:
        k.store(k.p[f"z_{fn.value}"], k.binary(fn, x, y), [0])
    out = [np.zeros(N, dtype.numpy) for _ in INT_BINARY]
    run(k.done(), [a, b, *out])
    for fn, z in zip(INT_BINARY, out, strict=True):
        want = [python_integer(fn, int(p), int(q), dtype) for p, q in zip(a, b, strict=True)]
        same(z, np.array(want, dtype.numpy))


@pytest.mark.parametrize("fn", [Binary.AND, Binary.OR, Binary.XOR], ids=str)
def test_binary_of_bools(fn):
    a, b = values(b1, 3), values(b1, 4)
    want = {Binary.AND: a & b, Binary.OR: a | b, Binary.XOR: a ^ b}[fn]
    same(apply(lambda k, x, y: k.binary(fn, x, y), b1, (b1, a), (b1, b)), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_binary_of_floats(dtype):
    a, b = values(dtype, 5), values(dtype, 6)
    pairs = list(itertools.product([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan], repeat=2))
    a[:36], b[:36] = (np.array(c).astype(dtype.numpy) for c in zip(*pairs, strict=True))
    fns = [Binary.ADD, Binary.SUB, Binary.MUL, Binary.DIV, Binary.MIN, Binary.MAX, Binary.POW, Binary.ATAN2]
    k = K("binary", a=shared(dtype, 1), b=shared(dtype, 1), **{f"z_{f.value}": exclusive(dtype, (N,)) for f in fns})
    x, y = k.load(k.a, [0], (N,)), k.load(k.p["b"], [0], (N,))
    for fn in fns:
        k.store(k.p[f"z_{fn.value}"], k.binary(fn, x, y), [0])
    out = dict(zip(fns, [np.zeros(N, dtype.numpy) for _ in fns], strict=True))
    run(k.done(), [a, b, *out.values()])
    wa, wb = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        same(out[Binary.ADD], rounded(wa + wb, dtype))
        same(out[Binary.SUB], rounded(wa - wb, dtype))
        same(out[Binary.MUL], rounded(wa * wb, dtype))
        same(out[Binary.DIV], rounded(wa / wb, dtype))
        same(out[Binary.MIN], rounded(np.minimum(wa, wb), dtype))
        same(out[Binary.MAX], rounded(np.maximum(wa, wb), dtype))
        assert ulps(out[Binary.POW], np.power(wa, wb), dtype).max() <= 4
        assert ulps(out[Binary.ATAN2], np.arctan2(wa, wb), dtype).max() <= 4


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_comparisons(dtype):
    a, b = values(dtype, 7), values(dtype, 8)
    b[::3] = a[::3]
    fns = [fn for fn in Compare if fn is not Compare.AT_LEAST or dtype.is_int]
    k = K("compare", a=shared(dtype, 1), b=shared(dtype, 1), **{f"z_{f.value}": exclusive(b1, (N,)) for f in fns})
    x, y = k.load(k.a, [0], (N,)), k.load(k.p["b"], [0], (N,))
    for fn in fns:
        k.store(k.p[f"z_{fn.value}"], k.compare(fn, x, y), [0])
    out = dict(zip(fns, [np.zeros(N, bool) for _ in fns], strict=True))
    run(k.done(), [a, b, *out.values()])
    p, q = (a.astype(np.float64), b.astype(np.float64)) if dtype.is_float else (a, b)
    want = {
        Compare.EQ: p == q, Compare.NE: p != q, Compare.LT: p < q, Compare.LE: p <= q, Compare.GT: p > q,
        Compare.GE: p >= q,
    }  # fmt: skip
    if dtype.is_int:
        half = 1 << (dtype.bits - 1)
        want[Compare.AT_LEAST] = np.array([(int(i) - int(j)) % (2 * half) < half for i, j in zip(a, b, strict=True)])
    for fn in fns:
        same(out[fn], want[fn])


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_select_takes_the_bits_of_either_side(dtype):
    c, a, b = values(b1, 9), values(dtype, 10), values(dtype, 11)
    got = apply(lambda k, x, y, z: k.select(x, y, z), dtype, (b1, c), (dtype, a), (dtype, b))
    same(got, np.where(c, a, b))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fma_rounds_once(dtype):
    a, b, c = values(dtype, 12), values(dtype, 13), values(dtype, 14)
    got = apply(
        lambda k, x, y, z: k.value(ops.Fma, (x, y, z), x.type), dtype, (dtype, a), (dtype, b), (dtype, c)
    )  # fmt: skip
    from fractions import Fraction

    def exact(x, y, z):
        x, y, z = float(x), float(y), float(z)
        if not all(map(math.isfinite, (x, y, z))):
            return x * y + z
        return float(Fraction(x) * Fraction(y) + Fraction(z))

    want = np.array([exact(*t) for t in zip(a, b, c, strict=True)])
    with np.errstate(all="ignore"):
        if dtype.bits < 32:
            want = want.astype(np.float32)
        # The exact sum was rounded to f64 first: at most one place off where that made a tie.
        assert ulps(got, rounded(want, dtype), dtype).max() <= (0 if dtype is f64 else 0.51)


# ---------------------------------------------------------------- casts


def cast_reference(x, source, to):
    if to.is_bool:
        return x.astype(np.float64) != 0 if source.is_float else x != 0
    if source.is_float and to.is_int:
        out = []
        for v in x.astype(np.float64):
            if math.isnan(v):
                out.append(0)
            elif math.isinf(v):
                out.append(to.max if v > 0 else to.min)
            else:
                out.append(min(max(int(v), to.min), to.max))
        return np.array(out, to.numpy)
    with np.errstate(all="ignore"):
        if to.bits == 8 and to.is_float:
            largest = 448.0 if to is f8e4m3 else 57344.0
            wide = np.clip(x.astype(np.float64), -largest, largest)
            return wide.astype(np.float32).astype(to.numpy)
        if to.bits < 32 and to.is_float:
            return x.astype(np.float32).astype(to.numpy)
        return x.astype(to.numpy)


@pytest.mark.parametrize("source", ALL_DTYPES, ids=str)
def test_casts_to_every_dtype(source):
    x = values(source, 15)
    targets = [d for d in ALL_DTYPES if d != source]
    k = K("cast", x=shared(source, 1), **{f"z_{d.name}": exclusive(d, (N,)) for d in targets})
    tile = k.load(k.x, [0], (N,))
    for d in targets:
        k.store(k.p[f"z_{d.name}"], k.cast(tile, d), [0])
    out = [np.zeros(N, d.numpy) for d in targets]
    run(k.done(), [x, *out])
    for d, z in zip(targets, out, strict=True):
        same(z, cast_reference(x, source, d))


@pytest.mark.parametrize("to", [f16, bf16, f32], ids=str)
def test_saturating_float_casts_stay_finite(to):
    x = values(f64, 22)
    x[:4] = [1e300, -1e300, math.inf, -math.inf]
    got = apply(lambda k, a: k.cast(a, to, saturate=True), to, (f64, x)).astype(np.float64)
    largest = float(np.finfo(to.numpy).max) if to is not bf16 else 3.3895313892515355e38
    assert (np.abs(got[~np.isnan(got)]) <= largest).all()
    assert got[0] == got[2] == largest
    assert got[1] == got[3] == -largest
    assert (np.isnan(got) == np.isnan(x)).all()


@pytest.mark.parametrize("to", [f8e4m3, f16, bf16, f32], ids=str)
@pytest.mark.parametrize("rounding", [Rounding.ZERO, Rounding.UP, Rounding.DOWN], ids=str)
def test_directed_rounding_of_f64(to, rounding):
    x = values(f64, 16)
    x = x[np.abs(x) < 400]
    x = np.resize(x, N)
    got = apply(lambda k, a: k.cast(a, to, rounding=rounding), to, (f64, x)).astype(np.float64)
    bound = np.abs(x) * 2.0**-2 + 2.0**-6
    assert (np.abs(got - x) <= bound).all()
    if rounding is Rounding.UP:
        assert (got >= x).all()
    elif rounding is Rounding.DOWN:
        assert (got <= x).all()
    else:
        assert (np.abs(got) <= np.abs(x)).all()
    near = x.astype(np.float32).astype(to.numpy).astype(np.float64)
    assert (got == near).any()
    assert (got != near).any()


def test_saturating_integer_casts():
    x = values(i32, 17)
    for to in (i8, u8, i16, u16, u32, i64):
        got = apply(lambda k, a, to=to: k.cast(a, to, saturate=True), to, (i32, x))
        same(got, np.clip(x.astype(object), to.min, to.max).astype(to.numpy))


@pytest.mark.parametrize("rounding", [Rounding.NEAREST, Rounding.UP, Rounding.DOWN, Rounding.ZERO], ids=str)
def test_float_to_integer_rounding(rounding):
    x = np.resize(np.array([0.5, 1.5, 2.5, -0.5, -1.5, 1.2, -1.2, 1e20, -1e20, math.nan, 7.0]), N).astype(np.float32)
    fn = {Rounding.NEAREST: np.round, Rounding.UP: np.ceil, Rounding.DOWN: np.floor, Rounding.ZERO: np.trunc}[rounding]
    got = apply(lambda k, a: k.cast(a, i32, rounding=rounding), i32, (f32, x))
    same(got, cast_reference(fn(x), f32, i32))


def test_bitcasts_keep_bits():
    x = values(f32, 18)
    same(apply(lambda k, a: k.value(ops.Bitcast, (a,), TileType(u32, (N,))), u32, (f32, x)), x.view(np.uint32))
    h = values(bf16, 19)
    same(apply(lambda k, a: k.value(ops.Bitcast, (a,), TileType(i16, (N,))), i16, (bf16, h)), h.view(np.int16))
    g = values(f16, 19)
    same(apply(lambda k, a: k.value(ops.Bitcast, (a,), TileType(bf16, (N,))), bf16, (f16, g)), g.view(bf16.numpy))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_constants_of_every_dtype(dtype):
    items = [0.0, -0.0, 1.0, 0.1, -1.7, 240.0, math.nan, 1e-3]
    if not dtype.is_float:
        items = [True, False] if dtype.is_bool else [dtype.min, dtype.max, 5]
    k = K("constants", z=exclusive(dtype, (16,)))
    for n, v in enumerate(items):
        k.store(k.z, k.full(v, dtype, (16,)), [n])
    z = np.ones(16 * len(items), dtype.numpy)
    run(k.done(), [z])
    first = f32 if dtype.is_float and dtype.bits < 32 else dtype
    want = np.repeat(np.array(items, first.numpy).astype(dtype.numpy), 16)
    same(z, want)
    assert not dtype.is_float or np.signbit(z[16:32].astype(np.float64)).all()


FOLD = {
    Fold.ADD: np.add, Fold.MUL: np.multiply, Fold.MAX: np.maximum, Fold.MIN: np.minimum,
    Fold.AND: np.bitwise_and, Fold.OR: np.bitwise_or, Fold.XOR: np.bitwise_xor,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [d for d in ALL_DTYPES if d.bits > 1 and not (d.is_float and d.bits == 8)], ids=str)
def test_folds(dtype):
    rng = np.random.default_rng(20)
    fns = [f for f in Fold if dtype.is_int or f in (Fold.ADD, Fold.MUL, Fold.MAX, Fold.MIN)]
    x = values(dtype, 21) if dtype.is_int else rng.uniform(0.5, 1.5, N).astype(dtype.numpy)
    k = K("fold", x=shared(dtype, 1), **{f"z_{f.value}": exclusive(dtype, (1,)) for f in fns})
    tile = k.load(k.x, [0], (N,))
    for fn in fns:
        k.store(k.p[f"z_{fn.value}"], k.reshape(k.reduce(fn, tile, 0), (1,)), [0])
    out = [np.zeros(1, dtype.numpy) for _ in fns]
    run(k.done(), [x, *out])
    with np.errstate(all="ignore"):
        for fn, z in zip(fns, out, strict=True):
            if dtype.is_int:
                same(z, FOLD[fn].reduce(x, keepdims=True, dtype=dtype.numpy))
            else:
                want = FOLD[fn].reduce(x.astype(np.float64), keepdims=True)
                scale = 40 if dtype.bits >= 32 else 1
                assert ulps(z, want, dtype).max() <= (scale if fn in (Fold.ADD, Fold.MUL) else 0), fn


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("fn", [Fold.MIN, Fold.MAX], ids=str)
def test_min_and_max_of_a_tile_propagate_nan(dtype, fn):
    k = K("nan", z=exclusive(dtype, (1,)), x=shared(dtype, 1))
    k.store(k.z, k.broadcast(k.reduce(fn, k.load(k.x, [0], (N,)), 0), (1,)), [0])
    loaded = Loaded(k.done())
    for place in (0, 1, 17, 63, 64, 200, 255):
        x, z = np.ones(N).astype(dtype.numpy), np.zeros(1, dtype.numpy)
        x[place] = math.nan
        loaded.run([z, x], 1)
        assert np.isnan(float(z[0]))
