"""Folds and scans by a function, and the order of sorting, for every dtype: native code against the meaning."""

import numpy as np
import pytest
from tests.backends.cpu.util import K, device_view, run, shared

from peertile.dtypes import ALL_DTYPES, f32, i8, i32, i64, u32
from peertile.ir import ops
from peertile.ir.core import Block
from peertile.ir.ops import Binary, Compare
from peertile.ir.types import TileType
from peertile.ir.verify import verify
from peertile.meaning import run_grid

RNG = np.random.default_rng(5)
SHAPES = [(64,), (4, 8), (16, 1), (2, 4, 8)]


def numbers(shape, d, nan=False):
    """Few different values, so that there are ties; with all of a float's special ones where asked."""
    if d.is_bool:
        return RNG.integers(0, 2, shape).astype(bool)
    if d.is_int:
        return RNG.integers(0 if not d.is_signed else -5, 6, shape).astype(d.numpy)
    x = RNG.integers(-4, 5, shape) / 2
    if nan:
        special = [np.nan, -0.0, 0.0] if d.name == "f8e4m3" else [np.nan, -0.0, 0.0, np.inf, -np.inf]
        x = np.where(RNG.random(shape) < 0.4, RNG.choice(special, shape), x)
    return x.astype(d.numpy)


def both(types, build, *arrays):
    """Runs a kernel natively and by the meaning; the outputs of both. Output views come first."""
    params = {f"o{k}": device_view(t.dtype, t.rank) for k, t in enumerate(types)}
    params |= {f"x{k}": shared(_dtype(a), a.ndim) for k, a in enumerate(arrays)}
    k = K(**params)
    tiles = [k.load(k.p[f"x{i}"], [0] * a.ndim, a.shape) for i, a in enumerate(arrays)]
    for i, value in enumerate(build(k, *tiles)):
        assert value.type == types[i]
        k.store(k.p[f"o{i}"], value, [0] * types[i].rank)
    kernel = k.done()
    verify(kernel)
    native, meant = ([np.zeros(t.shape, t.dtype.numpy) for t in types] for _ in range(2))
    run(kernel, [*native, *arrays])
    assert run_grid(kernel, 1, [*meant, *arrays]).faults == []
    for a, b in zip(native, meant, strict=True):
        np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))
    return native


def _dtype(a):
    return next(d for d in ALL_DTYPES if d.numpy == a.dtype)


def fold(k, cls, tiles, types, fn, **attrs):
    elements = [TileType(t.type.dtype) for t in tiles]
    block = Block(elements * 2)
    with k.b.at(block):
        n = len(tiles)
        k.b.emit(ops.Yield, fn(block.args[:n], block.args[n:]))
    return k.b.emit(cls, tiles, types, [block], **attrs).results


CASES = [(s, a) for s in SHAPES for a in range(len(s))]


@pytest.mark.parametrize(("shape", "axis"), CASES, ids=str)
def test_a_fold_keeps_the_order_of_the_meaning(shape, axis):
    x = RNG.standard_normal(shape).astype(np.float32)
    rest = shape[:axis] + shape[axis + 1 :]

    def build(k, t):
        def fn(a, b):
            return [k.sub(a[0], k.mul(b[0], k.const(0.5)))]

        return fold(k, ops.ReduceWith, [t], [TileType(f32, rest)], fn, axis=axis)

    if not rest:
        return  # a scalar cannot be stored as a tile here; see the test of pairs
    both([TileType(f32, rest)], build, x)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("shape", "axis"), CASES, ids=str)
def test_a_scan_keeps_the_order_of_the_meaning(shape, axis, reverse):
    x = RNG.standard_normal(shape).astype(np.float32)
    (found,) = both(
        [TileType(f32, shape)],
        lambda k, t: fold(k, ops.ScanWith, [t], [t.type], lambda a, b: [k.add(a[0], b[0])], axis=axis, reverse=reverse),
        x,
    )
    turned = np.flip(x, axis) if reverse else x
    want = np.cumsum(turned, axis, dtype=np.float32)
    np.testing.assert_allclose(found, np.flip(want, axis) if reverse else want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("d", ALL_DTYPES, ids=str)
def test_a_scan_of_pairs_of_any_dtype(d):
    x, at = numbers((4, 16), d, nan=True), np.tile(np.arange(16, dtype=np.int32), (4, 1))

    def build(k, t, i):
        def fn(a, b):
            c = k.compare(Compare.EQ, a[0], b[0])
            return [k.select(c, a[0], b[0]), k.select(c, a[1], k.add(a[1], b[1]))]

        types = [t.type, i.type]
        return [
            *fold(k, ops.ScanWith, [t, i], types, fn, axis=1),
            *fold(k, ops.ReduceWith, [t, i], [TileType(d, (16,)), TileType(i32, (16,))], fn, axis=0),
        ]

    both([TileType(d, (4, 16)), TileType(i32, (4, 16)), TileType(d, (16,)), TileType(i32, (16,))], build, x, at)


def test_a_block_may_hold_every_elementwise_op():
    x = RNG.integers(-100, 100, (4, 32)).astype(np.int32)

    def build(k, t):
        def fn(a, b):
            y = k.binary(Binary.MULHI, k.unary(ops.Unary.NEG, a[0]), k.mul(b[0], k.const(7, i32)))
            z = k.cast(y, f32)
            z = k.value(ops.Fma, (z, z, k.const(1.5)), TileType(f32))
            w = k.value(ops.Bitcast, (z,), TileType(u32))
            w = k.value(ops.Bitcast, (w,), TileType(i32))
            return [k.select(k.compare(Compare.LT, a[0], w), k.cast(k.cast(w, i8, saturate=True), i32), b[0])]

        return fold(k, ops.ReduceWith, [t], [TileType(i32, (4,))], fn, axis=1)

    both([TileType(i32, (4,))], build, x)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("d", ALL_DTYPES, ids=str)
def test_sorting_is_stable_and_puts_nan_at_the_top(d, descending):
    x = numbers((4, 32), d, nan=True)
    at = np.tile(np.arange(32, dtype=np.int64), (4, 1))
    keys, order = both(
        [TileType(d, (4, 32)), TileType(i64, (4, 32))],
        lambda k, t, i: k.b.emit(ops.Sort, (t, i), [t.type, i.type], axis=1, descending=descending).results,
        x,
        at,
    )
    for row in range(4):

        def rank(k, row=row):
            value = float(x[row, k])
            return (np.isnan(value), 0.0 if np.isnan(value) else value)

        want = sorted(range(32), key=rank)
        if descending:
            want = sorted(range(31, -1, -1), key=rank)[::-1]
        assert order[row].tolist() == want
        assert (keys[row].view(f"u{x.itemsize}") == x[row][order[row]].view(f"u{x.itemsize}")).all()


def test_an_operand_written_in_place_is_not_one_that_is_still_to_be_read():
    # Found by a random kernel: `rest` is computed after the product and the insertion that write over `x`.
    x, y = (RNG.standard_normal((16, 16)).astype(np.float32) for _ in range(2))

    def build(k, t, u):
        a = k.mul(t, u)
        rest = k.sub(a, t)
        piece = k.full(3.0, f32, (4, 16))
        pasted = k.value(ops.Insert, (a, piece, k.const(1), k.const(0)), a.type)
        b = k.mul(u, u)
        other = k.sub(b, t)
        product = k.mma(k.full(0.0, f32, (16, 16)), u, b)
        return [pasted, rest, product, other]

    pasted, rest, _, other = both([TileType(f32, (16, 16))] * 4, build, x, y)
    assert (pasted[4:8] == 3).all()
    assert (rest == x * y - x).all()
    assert (other == y * y - x).all()
