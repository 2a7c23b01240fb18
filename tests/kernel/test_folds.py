"""Reductions, scans, the places of extrema, sorting: the words, natively and by their meaning, against numpy."""

import numpy as np
import pytest
from tests.frontend.helpers import refuses
from tests.kernel.values import each_dtype, run_both, run_cancelling

import peertile.language as T
from peertile.dtypes import ALL_DTYPES

pytestmark = pytest.mark.any_device

RNG = np.random.default_rng(11)
NUMBERS = [d for d in ALL_DTYPES if not d.is_bool and (not d.is_float or d.bits > 8)]
NAN = float("nan")


def numbers(d, shape=(4, 16), nan=False):
    """Small whole numbers with ties, so that sums are exact in every dtype; NaN and both zeros where asked."""
    if d.is_bool:
        return RNG.integers(0, 2, shape).astype(bool)
    x = RNG.integers(-3 if d.is_signed else 0, 4, shape)
    if not d.is_float:
        return x.astype(d.numpy)
    y = x.astype(np.float32)
    if nan:
        y[0, [3, 9]] = np.nan
        y[2] = np.nan
        y[3, 5] = -0.0
    return y.astype(d.numpy)


def wide(x):
    return x.astype(np.float64) if x.dtype.kind not in "biu" else x


def folds(x, sums, prods, highs, lows, best, worst, total, kept):
    t = x.load()
    sums.store(T.sum(t, axis=1))
    prods.store(T.prod(t, axis=0))
    highs.store(T.max(t, axis=-1))
    lows.store(T.min(t, axis=1))
    best.store(T.argmax(t, axis=1))
    worst.store(T.argmin(t, axis=1))
    total.store(T.full((1,), T.sum(t, axis=(0, 1))))
    kept.store(T.max(t, axis=1, keepdims=True))


@pytest.mark.feature("K5", "cpu")
@pytest.mark.parametrize("d", each_dtype(NUMBERS), ids=str)
def test_every_fold_of_every_dtype(d):
    x = numbers(d)
    out = [np.zeros(n, d.numpy) for n in (4, 16, 4, 4)]
    at = [np.zeros(4, np.int64) for _ in range(2)]
    _, sums, prods, highs, lows, best, worst, total, kept = run_both(
        folds, x, *out, *at, np.zeros(1, d.numpy), np.zeros((4, 1), d.numpy)
    )
    w = wide(x)
    assert (sums == w.sum(1).astype(d.numpy)).all()
    assert (prods == w.prod(0, dtype=w.dtype).astype(d.numpy)).all()
    assert (highs == w.max(1).astype(d.numpy)).all()
    assert (lows == w.min(1).astype(d.numpy)).all()
    assert (best == w.argmax(1)).all()
    assert (worst == w.argmin(1)).all()
    assert total[0] == w.sum().astype(d.numpy)
    assert (kept[:, 0] == highs).all()


def nan_rules(x, high, low, high_i, low_i, best, worst, best_i, worst_i, pair, pair_i, run, run_i):
    t = x.load()
    high.store(T.max(t, axis=1))
    low.store(T.min(t, axis=1))
    high_i.store(T.max(t, axis=1, nan=T.NanRule.IGNORE))
    low_i.store(T.min(t, axis=1, nan=T.NanRule.IGNORE))
    best.store(T.argmax(t, axis=1))
    worst.store(T.argmin(t, axis=1))
    best_i.store(T.argmax(t, axis=1, nan=T.NanRule.IGNORE))
    worst_i.store(T.argmin(t, axis=1, nan=T.NanRule.IGNORE))
    pair.store(T.maximum(t, 1.0))
    pair_i.store(T.minimum(t, 1.0, nan=T.NanRule.IGNORE))
    run.store(T.cummax(t, axis=1))
    run_i.store(T.cummin(t, axis=1, nan=T.NanRule.IGNORE))


@pytest.mark.slow
@pytest.mark.feature("K5", "cpu")
@pytest.mark.sentence("NU-24", "NU-45")
@pytest.mark.parametrize("d", each_dtype(d for d in NUMBERS if d.is_float), ids=str)
def test_minima_and_maxima_propagate_or_ignore_nan(d):
    x = numbers(d, nan=True)
    rows, places = [np.zeros(4, d.numpy) for _ in range(4)], [np.zeros(4, np.int64) for _ in range(4)]
    tiles = [np.zeros((4, 16), d.numpy) for _ in range(4)]
    _, high, low, high_i, low_i, best, worst, best_i, worst_i, pair, pair_i, run, run_i = run_both(
        nan_rules, x, *rows, *places, *tiles
    )
    w = wide(x)
    clean = [row[~np.isnan(row)] for row in w]
    some = [0, 1, 3]
    np.testing.assert_array_equal(wide(high), w.max(1))
    np.testing.assert_array_equal(wide(low), w.min(1))
    np.testing.assert_array_equal(wide(high_i)[some], [clean[k].max() for k in some])
    np.testing.assert_array_equal(wide(low_i)[some], [clean[k].min() for k in some])
    assert np.isnan([wide(high_i)[2], wide(low_i)[2]]).all()
    assert best.tolist() == w.argmax(1).tolist()
    assert worst.tolist() == w.argmin(1).tolist()
    assert [best[0], worst[0], best[2], best_i[2], worst_i[2]] == [3, 3, 0, 0, 0]
    assert best_i[some].tolist() == np.nanargmax(w[some], 1).tolist()
    assert worst_i[some].tolist() == np.nanargmin(w[some], 1).tolist()
    np.testing.assert_array_equal(wide(pair), np.maximum(w, 1.0))
    np.testing.assert_array_equal(wide(pair_i), np.fmin(w, 1.0))
    np.testing.assert_array_equal(wide(run), np.maximum.accumulate(w, 1))
    np.testing.assert_array_equal(wide(run_i), np.fmin.accumulate(w, 1))


def scans(x, a, b, c, d, e):
    t = x.load()
    a.store(T.cumsum(t, axis=1))
    b.store(T.cumprod(t, axis=0))
    c.store(T.cummax(t, axis=1, reverse=True))
    d.store(T.cummin(t, axis=0))
    e.store(T.cumsum(t, axis=0, reverse=True))


@pytest.mark.feature("K5", "cpu")
@pytest.mark.parametrize("d", each_dtype(NUMBERS), ids=str)
def test_every_scan_of_every_dtype(d):
    x = numbers(d)
    _, *found = run_both(scans, x, *[np.zeros((4, 16), d.numpy) for _ in range(5)])
    w = wide(x)
    want = [
        w.cumsum(1, dtype=w.dtype), w.cumprod(0, dtype=w.dtype), np.maximum.accumulate(w[:, ::-1], 1)[:, ::-1],
        np.minimum.accumulate(w, 0), w[::-1].cumsum(0, dtype=w.dtype)[::-1],
    ]  # fmt: skip
    for a, b in zip(found, want, strict=True):
        assert (a == b.astype(d.numpy)).all()


@pytest.mark.sentence("NU-44")
def test_narrow_floats_are_summed_in_f32():
    def kernel(x, z):
        z.store(T.cumsum(x.load()))

    _, z = run_both(kernel, np.full(1024, 0.1, np.float16), np.zeros(1024, np.float16))
    exact = np.arange(1, 1025) * np.float64(np.float16(0.1))
    assert np.abs(z - exact).max() < 0.06  # in f16 all along it would be off by 6


# ---------------------------------------------------------------- functions of the kernel's own


def welford(n0, m0, s0, n1, m1, s1):
    n = n0 + n1
    delta = m1 - m0
    return n, m0 + delta * n1 / n, s0 + s1 + delta * delta * n0 * n1 / n


def gated(a0, b0, a1, b1):
    """x -> a·x + b, one map behind the other."""
    return a0 * a1, b0 * a1 + b1


def last_positive(a, b):
    return T.where(b > 0, b, a)


@pytest.mark.feature("K5", "cpu")
def test_reduce_and_scan_take_several_tiles_and_a_function():
    def kernel(x, y, mean, square, h, last, back, kept):
        t, g = x.load(), y.load()
        one = T.ones((8, 32), T.f32)
        n, m, s = T.reduce((one, t, T.zeros((8, 32))), welford, axis=1)
        mean.store(m)
        square.store(s / n)
        _, state = T.scan((g, t), gated, axis=1)
        h.store(state)
        last.store(T.scan(t, last_positive, axis=0))
        back.store(T.scan(t, last_positive, axis=1, reverse=True))
        kept.store(T.reduce(t, T.minimum, axis=-1, keepdims=True))

    x = RNG.standard_normal((8, 32)).astype(np.float32)
    y = RNG.random((8, 32)).astype(np.float32)
    rows, tiles = [np.zeros(8, np.float32) for _ in range(2)], [np.zeros((8, 32), np.float32) for _ in range(3)]
    kept = np.zeros((8, 1), np.float32)
    _, _, mean, square, h, last, back, kept = run_cancelling(kernel, x, y, *rows, *tiles, kept, terms=1.0)
    np.testing.assert_allclose(mean, x.mean(1), atol=1e-6)
    np.testing.assert_allclose(square, x.var(1), rtol=1e-5)
    state, want = np.zeros(8), np.zeros((8, 32))
    for k in range(32):
        state = y[:, k] * state + x[:, k]
        want[:, k] = state
    np.testing.assert_allclose(h, want, rtol=1e-4, atol=1e-5)
    for row in range(1, 8):
        assert (last[row] == np.where(x[row] > 0, x[row], last[row - 1])).all()
    for k in range(30, -1, -1):
        assert (back[:, k] == np.where(x[:, k] > 0, x[:, k], back[:, k + 1])).all()
    assert (kept[:, 0] == x.min(1)).all()


def test_a_function_that_does_more_than_arithmetic_is_refused():
    def branching(a, b):
        if a > b:
            return a
        return b

    def printing(a, b):
        T.print_("x", a)
        return a

    def fewer(a, b, c, d):
        return a

    def wider(a, b):
        return T.f64(a)

    def with_branch(x):
        T.reduce(x.load((0,), (8,)), branching)

    def with_print(x):
        T.reduce(x.load((0,), (8,)), printing)

    def with_fewer(x):
        t = x.load((0,), (8,))
        T.scan((t, t), fewer)

    def with_wider(x):
        T.scan(x.load((0,), (8,)), wider)

    def with_number(x):
        T.scan(x.load((0,), (8,)), 3)

    def with_shapes(x):
        T.scan((x.load((0,), (8,)), x.load((0,), (4,))), fewer)

    refuses(
        with_branch,
        "T.reduce: fn: expected elementwise operations on scalars, got loop; choose with T.where, and keep memory and "
        "control flow out of it",
    )
    refuses(
        with_print,
        "T.reduce: fn: expected elementwise operations on scalars, got print; choose with T.where, and keep memory and "
        "control flow out of it",
    )
    refuses(with_fewer, "T.scan: fn: expected 2 values back, one per tile, got f32")
    refuses(with_wider, "T.scan: value 0 of fn: expected f32, got f64; convert it with .astype(T.f32)")
    refuses(with_number, "T.scan: fn: expected a plain function or a word of two operands, got the int 3")
    refuses(with_shapes, "T.scan: tiles: expected one shape, got f32[8] and f32[4]; T.broadcast one of them")


# ---------------------------------------------------------------- sorting


def sorts(x, up, down, order, back, values, places):
    t = x.load()
    up.store(T.sort(t))
    down.store(T.sort(t, axis=0, descending=True))
    o = T.argsort(t, axis=1)
    order.store(o)
    back.store(T.take(t, o, axis=1))
    v, i = T.top_k(t, 4)
    values.store(v)
    places.store(i)


@pytest.mark.slow
@pytest.mark.feature("K6", "cpu")
@pytest.mark.sentence("NU-46")
@pytest.mark.parametrize("d", each_dtype(ALL_DTYPES), ids=str)
def test_sorting_of_every_dtype(d):
    x = numbers(d, nan=d.is_float)
    tile, index = np.zeros((4, 16), d.numpy), np.zeros((4, 16), np.int64)
    _, up, down, order, back, values, places = run_both(
        sorts, x, tile, tile, index, tile, np.zeros((4, 4), d.numpy), np.zeros((4, 4), np.int64)
    )
    w = wide(x)
    np.testing.assert_array_equal(wide(up), np.sort(w, 1))
    np.testing.assert_array_equal(wide(down), np.sort(w, 0)[::-1])
    np.testing.assert_array_equal(order, np.argsort(w, 1, kind="stable"))
    np.testing.assert_array_equal(wide(back), wide(up))
    want = 15 - np.argsort(w[:, ::-1], 1, kind="stable")[:, ::-1][:, :4]
    np.testing.assert_array_equal(places, want)
    np.testing.assert_array_equal(wide(values), np.take_along_axis(w, want, 1))


def test_what_folds_do_not_take_is_refused_by_name():
    def of_bool(x):
        T.cumsum(x.load((0,), (8,)) > 0)

    def of_axis(x):
        T.argmax(x.load((0,), (8,)), axis=1)

    def of_fp8(x):
        T.argmin(x.load((0,), (8,)).astype(T.f8e4m3))

    def of_k(x):
        T.top_k(x.load((0,), (8,)), 3)

    def of_rule(x):
        T.max(x.load((0,), (8,)), nan="ignore")

    def of_number(x):
        T.sort(3)

    refuses(of_bool, "T.cumsum: expected numbers, got bool[8]; convert with .astype(T.i32), or use T.any or T.all")
    refuses(of_axis, "T.argmax: axis: expected an axis from -1 to 0, got 1")
    refuses(of_fp8, "T.argmin: f8e4m3 has no arithmetic; convert with .astype(T.f32)")
    refuses(of_k, "T.top_k: k: expected a power of two from 1 to 8, got 3; take more and ignore the rest")
    refuses(of_rule, "T.max: nan: expected a T.NanRule, such as T.NanRule.IGNORE, got the str 'ignore'")
    refuses(of_number, "T.sort: expected a tile, got the int 3")
