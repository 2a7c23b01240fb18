"""Loads, stores, shapes, reductions and mma of tiles: edges, strides, padding, hazards, scratch."""

import itertools
import math
import re

import numpy as np
import pytest
from tests.backends.cpu.util import INDEX, K, Loaded, exclusive, run, shared

from peertile.backends.cpu.compile import _lower, lower_to_text
from peertile.backends.cpu.lower import DUMMY_BYTES, MANY_STORES
from peertile.backends.cpu.target import host_target, named_target
from peertile.dtypes import b1, bf16, f8e4m3, f8e5m2, f16, f32, f64, i8, i32, i64, u8
from peertile.ir import ops
from peertile.ir.ops import Binary, Fold, Padding, Unary
from peertile.ir.types import TileType
from peertile.memory_model import Order, Rmw, Scope

RNG = np.random.default_rng(0)


def random(shape, dtype=f32):
    if dtype.is_bool:
        return RNG.integers(0, 2, shape).astype(bool)
    if dtype.is_int:
        return RNG.integers(-50, 50, shape).astype(dtype.numpy)
    return RNG.standard_normal(shape).astype(dtype.numpy)


def cdiv(a, b):
    return -(-a // b)


@pytest.mark.parametrize("tile", [1, 4, 128, 1024])
def test_copy_of_every_length(tile):
    k = K(z=exclusive(f32, (tile,)), x=shared(f32, 1))
    i = k.tile_index(k.z)
    k.store(k.z, k.load(k.x, i, (tile,)), i)
    loaded = Loaded(k.done())
    for n in (1, 15, 16, 63, 1000, 1023, 1024, 1025, 4096):
        x, z = random(n), np.full(n + 8, 7, np.float32)
        loaded.run([z[:n], x], cdiv(n, tile))
        assert (z[:n] == x).all()
        assert (z[n:] == 7).all()


@pytest.mark.sentence("BD-3")
@pytest.mark.parametrize("dtype", [b1, i8, f16, f32, f64, i64], ids=str)
@pytest.mark.parametrize("tile", [(1, 32), (8, 16), (16, 1)])
def test_two_dimensional_tiles_clip_and_keep_what_is_outside(dtype, tile):
    k = K(z=exclusive(dtype, tile), x=shared(dtype, 2))
    i = k.tile_index(k.z)
    k.store(k.z, k.load(k.x, i, tile), i)
    loaded = Loaded(k.done())
    for shape in [(5, 7), (64, 64), (33, 100), (1, 50), (50, 1)]:
        x = random(shape, dtype)
        big = random((shape[0] + 3, shape[1] + 5), dtype)
        want = big.copy()
        want[: shape[0], : shape[1]] = x
        inner = big[: shape[0], : shape[1]]
        loaded.run([inner, x], cdiv(shape[0], tile[0]) * cdiv(shape[1], tile[1]))
        assert (big == want).all()


@pytest.mark.sentence("BD-5")
def test_tile_0_of_an_empty_view_is_all_padding():
    k = K(z=exclusive(f32, (4, 16)), x=shared(f32, 2, divisible=(16, 16)))
    k.store(k.z, k.load(k.x, [0, 0], (4, 16), padding=Padding.INF), [0, 0])
    loaded = Loaded(k.done())
    for shape in [(0, 16), (16, 0), (0, 0)]:
        z = np.zeros((4, 16), np.float32)
        loaded.run([z, np.zeros(shape, np.float32)], 1)
        assert (z == math.inf).all()
    empty, full = np.zeros((0, 16), np.float32), np.ones((4, 16), np.float32)
    loaded.run([empty, full], 1)


@pytest.mark.parametrize("steps", [(1, 1), (2, 1), (1, 3), (-1, 2), (1, -1)])
def test_strides_of_any_sign(steps):
    k = K(z=exclusive(f32, (8, 32), unit=False), x=shared(f32, 2, unit=False))
    i = k.tile_index(k.z)
    k.store(k.z, k.load(k.x, i, (8, 32)), i)
    x, z = random((40, 200)), np.zeros((90, 200), np.float32)
    xs, zs = x[:: steps[0], :: steps[1]][:13, :61], z[::2, ::3][:13, :61]
    run(k.done(), [zs, xs], 4)
    assert (zs == xs).all()
    assert np.count_nonzero(z) == 13 * 61


def test_zero_strides_repeat_an_element():
    k = K(z=exclusive(f32, (64,)), x=shared(f32, 1, unit=False))
    i = k.tile_index(k.z)
    k.store(k.z, k.load(k.x, i, (64,)), i)
    z = np.zeros(100, np.float32)
    run(k.done(), [z, np.broadcast_to(np.float32(3), 100)], 2)
    assert (z == 3).all()


PADDING = {
    Padding.ZERO: 0.0, Padding.NEG_ZERO: -0.0, Padding.NAN: math.nan, Padding.INF: math.inf, Padding.NEG_INF: -math.inf,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64, f8e5m2], ids=str)
def test_padding_fills_what_is_outside(dtype):
    k = K(x=shared(dtype, 1), **{p.value: exclusive(dtype, (32,)) for p in PADDING})
    for p in PADDING:
        k.store(k.p[p.value], k.load(k.x, [0], (32,), padding=p), [0])
    out = [random(32, dtype) for _ in PADDING]
    x = random(20, dtype)
    run(k.done(), [x, *out])
    for z, want in zip(out, PADDING.values(), strict=True):
        tail = z[20:].astype(np.float64)
        assert (z[:20] == x).all()
        assert np.array_equal(tail, np.full(12, want), equal_nan=True)
        assert (np.signbit(tail) == np.signbit(want)).all() or math.isnan(want)


@pytest.mark.parametrize("swizzle", [1, 2, 4])
@pytest.mark.parametrize("grid", [(5, 3), (4, 4), (1, 7), (7, 1)])
def test_tile_index_visits_every_tile_once_in_swizzled_order(swizzle, grid):
    m, n = grid
    k = K(z=exclusive(i64, (2, 4), swizzle=swizzle))
    i = k.tile_index(k.z)
    k.store(k.z, k.broadcast(k.pid(), (2, 4)), i)
    z = np.full((m * 2, n * 4), -1, np.int64)
    run(k.done(), [z], m * n)
    order = []
    if swizzle == 1:
        order = list(itertools.product(range(m), range(n)))
    else:
        for start in range(0, m, swizzle):
            order += [(r, c) for c in range(n) for r in range(start, min(start + swizzle, m))]
    want = np.empty((m, n), np.int64)
    for p, (r, c) in enumerate(order):
        want[r, c] = p
    assert (z == np.repeat(np.repeat(want, 2, 0), 4, 1)).all()


def test_three_dimensional_grid_has_axis_0_fastest():
    k = K(grid_rank=3, z=exclusive(i64, (1, 4)))
    p = k.pid(0)
    p1 = k.mul(k.pid(1), k.const(10))
    p2 = k.mul(k.pid(2), k.const(100))
    n = k.value(ops.NumPrograms, (), INDEX, axis=1)
    linear = k.add(k.add(k.pid(0), k.mul(k.pid(1), k.const(3))), k.mul(k.pid(2), k.const(6)))
    v = k.add(k.add(k.add(p, p1), p2), k.mul(n, k.const(1000)))
    k.store(k.z, k.broadcast(v, (1, 4)), [linear, 0])
    z = np.zeros((24, 4), np.int64)
    run(k.done(), [z], (3, 2, 4))
    want = [a + 10 * b + 100 * c + 2000 for c in range(4) for b in range(2) for a in range(3)]
    assert (z[:, 0] == want).all()


# ---------------------------------------------------------------- shapes


def through(build, x, tile, out, dtype=f32):
    k = K(z=exclusive(dtype, out), x=shared(dtype, len(tile)))
    k.store(k.z, build(k, k.load(k.x, [0] * len(tile), tile)), [0] * len(out))
    z = np.zeros(out, dtype.numpy)
    run(k.done(), [z, x])
    return z


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("kept", [False, True])
def test_permute(axes, kept):
    x = random((4, 8, 32))

    def build(k, t):
        t = k.exp(k.add(t, t)) if kept else t
        return k.permute(t, axes)

    got = through(build, x, (4, 8, 32), tuple(x.shape[a] for a in axes))
    want = np.exp(x + x) if kept else x
    np.testing.assert_allclose(got, want.transpose(axes), rtol=1e-6)


@pytest.mark.parametrize("shape", [(4, 8), (8, 1, 4), (32,), (2, 2, 8), (1, 32, 1)])
@pytest.mark.parametrize("source", [(4, 8), (32,), (32, 1)])
def test_reshape(source, shape):
    x = random(source)
    assert (through(lambda k, t: k.reshape(k.add(t, t), shape), x, source, shape) == (x + x).reshape(shape)).all()


def test_transposed_tile_added_to_itself():
    x = random((32, 32))
    got = through(lambda k, t: k.add(t, k.permute(t, (1, 0))), x, (32, 32), (32, 32))
    assert (got == x + x.T).all()


@pytest.mark.parametrize("source", [(1, 64), (16, 1), (1, 1), (16, 64)])
def test_broadcast(source):
    x = random(source)
    got = through(lambda k, t: k.broadcast(t, (16, 64)), x, source, (16, 64))
    assert (got == np.broadcast_to(x, (16, 64))).all()
    got = through(lambda k, t: k.broadcast(k.exp(k.exp(t)), (16, 64)), x, source, (16, 64))
    np.testing.assert_allclose(got, np.broadcast_to(np.exp(np.exp(x)), (16, 64)), rtol=1e-5)


@pytest.mark.parametrize("dtype", [i8, i32, i64, u8], ids=str)
def test_iota_along_rows_and_columns(dtype):
    k = K(z=exclusive(dtype, (8, 32)))
    rows = k.broadcast(k.reshape(k.value(ops.Iota, (), TileType(dtype, (8,))), (8, 1)), (8, 32))
    columns = k.broadcast(k.reshape(k.value(ops.Iota, (), TileType(dtype, (32,))), (1, 32)), (8, 32))
    k.store(k.z, k.add(k.mul(rows, k.full(3, dtype, (8, 32))), columns), [0, 0])
    z = np.zeros((8, 32), dtype.numpy)
    run(k.done(), [z])
    assert (z == np.arange(8)[:, None] * 3 + np.arange(32)).all()


# ---------------------------------------------------------------- reductions


@pytest.mark.parametrize("shape", [(64,), (8, 64), (64, 8), (4, 8, 16), (1, 256), (256, 1), (2, 2), (16, 2, 4)])
def test_sum_along_each_axis(shape):
    for axis in range(len(shape)):
        x = random(shape)
        rest = shape[:axis] + shape[axis + 1 :]
        out = rest or (1,)
        got = through(
            lambda k, t, axis=axis, out=out: k.reshape(k.reduce(Fold.ADD, t, axis), out), x, shape, out
        )  # fmt: skip
        np.testing.assert_allclose(got.reshape(rest), x.sum(axis), rtol=1e-4, atol=1e-5)


def test_reduction_over_all_axes_of_an_expression():
    x = random((16, 64))
    got = through(
        lambda k, t: k.broadcast(k.reduce(Fold.ADD, k.reduce(Fold.ADD, k.mul(t, t), 1), 0), (1,)), x, (16, 64), (1,)
    )
    np.testing.assert_allclose(got[0], (x * x).sum(), rtol=1e-5)


@pytest.mark.sentence("NU-50")
def test_padded_elements_take_part_in_a_reduction():
    k = K(z=exclusive(f32, (1,)), x=shared(f32, 1))
    t = k.load(k.x, [0], (64,), padding=Padding.INF)
    k.store(k.z, k.broadcast(k.reduce(Fold.MAX, t, 0), (1,)), [0])
    z = np.zeros(1, np.float32)
    run(k.done(), [z, random(50)])
    assert z[0] == math.inf


def test_narrow_floats_are_summed_in_f32():
    for dtype in (f16, bf16):
        x = np.full(4096, 1.0).astype(dtype.numpy)
        got = through(lambda k, t: k.broadcast(k.reduce(Fold.ADD, t, 0), (1,)), x, (4096,), (1,), dtype)
        assert float(got[0]) == 4096


def softmax(k, x, shape):
    r, _ = shape
    m = k.broadcast(k.reshape(k.reduce(Fold.MAX, x, 1), (r, 1)), shape)
    e = k.exp(k.sub(x, m))
    s = k.broadcast(k.reshape(k.reduce(Fold.ADD, e, 1), (r, 1)), shape)
    return k.binary(Binary.DIV, e, s)


@pytest.mark.parametrize(
    ("shape", "size"),
    [((1, 1024), (64, 1000)), ((4, 256), (64, 250)), ((4, 256), (17, 16)), ((16, 16), (17, 16)), ((32, 4), (5, 3))],
)
def test_softmax(shape, size):
    k = K("softmax", z=exclusive(f32, shape), x=shared(f32, 2))
    i = k.tile_index(k.z)
    k.store(k.z, softmax(k, k.load(k.x, i, shape, padding=Padding.NEG_INF), shape), i)
    x = random(size)
    z = np.zeros_like(x)
    run(k.done(), [z, x], cdiv(size[0], shape[0]))
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(z, e / e.sum(1, keepdims=True), rtol=1e-5)


def test_softmax_computes_exp_once_in_the_pass_that_sums_it():
    k = K("softmax", z=exclusive(f32, (1, 1024)), x=shared(f32, 2))
    i = k.tile_index(k.z)
    k.store(k.z, softmax(k, k.load(k.x, i, (1, 1024)), (1, 1024)), i)
    text = lower_to_text(k.done())
    body = text[: text.index("\n}\n")]
    calls = [line for line in body.splitlines() if "exp" in line and " call " in line]
    assert len(calls) == 2  # whole vectors and those at the edge
    # Three passes, the last one with and without stores around the caches.
    assert sum(line.startswith("loop") for line in body.splitlines()) == 4


def fetches(k):
    return lower_to_text(k.done()).count("call void @llvm.prefetch.p0(")


def test_a_tile_that_is_read_again_fetches_the_next_programs_tile():
    k = K("softmax", z=exclusive(f32, (1, 1024)), x=shared(f32, 2))
    i = k.tile_index(k.z)
    k.store(k.z, softmax(k, k.load(k.x, i, (1, 1024)), (1, 1024)), i)
    # The pass that takes the maximum reads memory; the one behind it reads caches, and fetches every line once.
    text = lower_to_text(k.done(), named_target("x86-64-v4"))  # four vectors, of a line each
    assert text.count("call void @llvm.prefetch.p0(") == 4
    assert len(set(re.findall(r"prefetch\.p0\(ptr (\S+),", text))) == 4


@pytest.mark.parametrize(
    ("shape", "index", "passes"),
    [
        pytest.param((1, 1024), "own", 1, id="read once"),
        pytest.param((1, 1024), "first", 2, id="the same tile for all programs"),
        pytest.param((1, 128), "own", 2, id="too small"),
        pytest.param((64, 2048), "own", 2, id="too large"),
    ],
)
def test_nothing_is_fetched_where_it_would_not_help(shape, index, passes):
    k = K(z=exclusive(f32, shape), x=shared(f32, 2))
    i = k.tile_index(k.z)
    x = k.load(k.x, i if index == "own" else [0, 0], shape)
    k.store(k.z, softmax(k, x, shape) if passes > 1 else k.add(x, x), i)
    assert fetches(k) == 0


@pytest.mark.parametrize("size", [(7, 1024), (7, 4096), (3, 1000)])
def test_fetching_behind_the_last_tile_reads_nothing(size):
    shape = (1, 1024)
    k = K("softmax", z=exclusive(f32, shape), x=shared(f32, 2))
    i = k.tile_index(k.z)
    k.store(k.z, softmax(k, k.load(k.x, i, shape, padding=Padding.NEG_INF), shape), i)
    x = random(size)
    z = np.zeros_like(x)
    run(k.done(), [z, x], size[0] * cdiv(size[1], 1024))
    for start in range(0, size[1], 1024):
        part = x[:, start : start + 1024]
        e = np.exp(part - part.max(1, keepdims=True))
        np.testing.assert_allclose(z[:, start : start + 1024], e / e.sum(1, keepdims=True), rtol=1e-5)


# ---------------------------------------------------------------- length


@pytest.mark.parametrize(("count", "around"), [(MANY_STORES, True), (MANY_STORES + 1, False)])
def test_kernels_of_many_stores_do_without_stores_around_the_caches(count, around):
    k = K(z=exclusive(f32, (64,)), x=shared(f32, 1))
    i = k.tile_index(k.z)
    for n in range(count):
        k.store(k.z, k.add(k.load(k.x, i, (64,)), k.full(float(n), f32, (64,))), i)
    assert ("!nontemporal" in lower_to_text(k.done())) is around


def test_lowering_a_long_kernel_forgets_what_is_dead():
    k = K(z=exclusive(f32, (64,)), x=shared(f32, 1))
    i = k.tile_index(k.z)
    value = k.load(k.x, i, (64,))
    for _ in range(400):
        value = k.add(value, value)
        k.store(k.z, value, i)
    lowering, _, _ = _lower(k.done(), host_target(), "E")
    lowering.now = 1 << 40
    assert list(lowering.live()) == []
    assert lowering._tiles == {}


# ---------------------------------------------------------------- hazards


def test_a_load_sees_memory_as_it_was_before_a_later_store():
    k = K(z=exclusive(f32, (64,)))
    old = k.load(k.z, [0], (64,))
    k.store(k.z, k.full(5.0, f32, (64,)), [0])
    k.store(k.z, k.add(old, k.load(k.z, [0], (64,))), [1])
    z = random(128)
    want = z[:64] + 5
    run(k.done(), [z])
    assert (z[:64] == 5).all()
    assert (z[64:] == want).all()


def test_in_place_update_at_the_same_tile_needs_no_scratch():
    k = K(z=exclusive(f32, (64,)))
    i = k.tile_index(k.z)
    t = k.load(k.z, i, (64,))
    k.store(k.z, k.mul(t, t), i)
    z = random(1000)
    want = z * z
    loaded = Loaded(k.done())
    loaded.run([z], 16)
    assert (z == want).all()
    assert loaded.binary.scratch_bytes == DUMMY_BYTES


def test_transpose_in_place_goes_through_scratch():
    k = K(z=exclusive(f32, (32, 32)))
    k.store(k.z, k.permute(k.load(k.z, [0, 0], (32, 32)), (1, 0)), [0, 0])
    z = random((32, 32))
    want = z.T.copy()
    run(k.done(), [z])
    assert (z == want).all()


def test_shifted_tiles_of_one_view():
    k = K(z=exclusive(f32, (64,)))
    a, b = k.load(k.z, [0], (64,)), k.load(k.z, [1], (64,))
    k.store(k.z, b, [0])
    k.store(k.z, a, [1])
    z = random(128)
    want = np.concatenate([z[64:], z[:64]])
    run(k.done(), [z])
    assert (z == want).all()


def test_a_reversed_pair_of_stores_and_reductions():
    k = K(z=exclusive(f32, (64,)), x=shared(f32, 1))
    x = k.load(k.x, [0], (64,))
    k.store(k.z, x, [0])
    total = k.broadcast(k.reduce(Fold.ADD, k.load(k.z, [0], (64,)), 0), (64,))
    k.store(k.z, k.add(k.load(k.z, [0], (64,)), total), [0])
    x, z = random(64), np.zeros(64, np.float32)
    run(k.done(), [z, x])
    np.testing.assert_allclose(z, x + x.sum(), rtol=1e-4, atol=1e-4)


def test_many_chained_ops_are_cut():
    k = K(z=exclusive(f32, (64,)), x=shared(f32, 1))
    t = k.load(k.x, [0], (64,))
    x = random(64)
    want = x.copy()
    for n in range(300):
        t = k.add(t, k.full(float(n % 3), f32, (64,)))
        want = want + np.float32(n % 3)
    k.store(k.z, t, [0])
    z = np.zeros(64, np.float32)
    run(k.done(), [z, x])
    assert (z == want).all()


# ---------------------------------------------------------------- atomics of tiles


@pytest.mark.parametrize(
    ("dtype", "rmw"),
    [(i32, Rmw.ADD), (f32, Rmw.ADDF), (bf16, Rmw.ADDF), (f32, Rmw.MAX), (i32, Rmw.MIN), (i64, Rmw.XOR), (f64, Rmw.MIN)],
    ids=str,
)
def test_tile_atomics_are_clipped(dtype, rmw):
    k = K(z=exclusive(dtype, (4, 8)), x=shared(dtype, 2))
    t = k.load(k.x, [0, 0], (4, 8))
    k.b.emit(
        ops.TileAtomic, (k.z, t, k.const(0), k.const(0)),
        rmw=rmw, bounds=ops.Bounds.PROVEN, order=Order.RELAXED, scope=Scope.DEVICE,
    )  # fmt: skip
    x, z = random((4, 8), dtype), random((5, 9), dtype)
    want = z.copy()
    fn = {Rmw.ADD: np.add, Rmw.ADDF: np.add, Rmw.MAX: np.maximum, Rmw.MIN: np.minimum, Rmw.XOR: np.bitwise_xor}[rmw]
    want[:3, :7] = fn(z[:3, :7], x[:3, :7])
    run(k.done(), [z[:3, :7], x])
    assert (z == want).all()


# ---------------------------------------------------------------- mma

MMA = [(f32, f32), (f64, f64), (f16, f32), (bf16, f32), (f8e4m3, f32), (f8e5m2, f32), (i8, i32), (u8, i32)]


def small(shape, dtype):
    return RNG.integers(-3 if dtype.is_signed else 0, 4, shape).astype(dtype.numpy)


def check_mma(dtype, acc, mnk, transposed):
    m, n, kk = mnk
    a, b, c = small((m, kk), dtype), small((kk, n), dtype), small((m, n), acc)
    k = K("mma", z=exclusive(acc, (m, n)), a=shared(dtype, 2), bb=shared(dtype, 2), c=shared(acc, 2))
    x = k.load(k.a, [0, 0], (m, kk))
    y = k.permute(k.load(k.bb, [0, 0], (n, kk)), (1, 0)) if transposed else k.load(k.bb, [0, 0], (kk, n))
    k.store(k.z, k.mma(x, y, k.load(k.c, [0, 0], (m, n))), [0, 0])
    z = np.zeros((m, n), acc.numpy)
    run(k.done(), [z, a, b.T.copy() if transposed else b, c])
    want = a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float64)
    assert (z.astype(np.float64) == want).all()


@pytest.mark.parametrize(("dtype", "acc"), MMA, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_mma_of_every_type(dtype, acc, transposed):
    check_mma(dtype, acc, (16, 32, 16), transposed)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "acc"), MMA, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_mma_of_every_type_and_odd_shapes(dtype, acc, transposed):
    for mnk in [(16, 16, 16), (32, 64, 32), (1, 32, 64), (64, 8, 4), (8, 1, 16), (128, 64, 64)]:
        check_mma(dtype, acc, mnk, transposed)


def test_batched_mma():
    a, b = random((4, 16, 32)), random((4, 32, 8))
    k = K(z=exclusive(f32, (4, 16, 8)), a=shared(f32, 3), bb=shared(f32, 3))
    z = np.zeros((4, 16, 8), np.float32)
    zero = [0, 0, 0]
    x, y = k.load(k.a, zero, (4, 16, 32)), k.load(k.bb, zero, (4, 32, 8))
    k.store(k.z, k.mma(x, y, k.full(0.0, f32, (4, 16, 8))), zero)
    run(k.done(), [z, a, b])
    np.testing.assert_allclose(z, a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(128, 128, 128), (100, 70, 90), (64, 64, 65), (1, 1, 1)])
@pytest.mark.parametrize("unit", [True, False])
def test_matmul_with_edges(size, unit):
    m, n, kk = size
    bm, bn, bk = 32, 64, 32
    k = K("matmul", c=exclusive(f32, (bm, bn)), a=shared(f32, 2, unit=unit), bb=shared(f32, 2, unit=unit))
    i, j = k.tile_index(k.c)
    trips = k.value(ops.NumTiles, (k.a,), INDEX, axis=1, size=bk)

    def body(t, carried):
        a, b = k.load(k.a, [i, t], (bm, bk)), k.load(k.bb, [t, j], (bk, bn))
        return [k.mma(a, b, carried[0])]

    (acc,) = k.loop(0, trips, [k.full(0.0, f32, (bm, bn))], body)
    k.store(k.c, acc, [i, j])
    a, b, c = random((m, kk)), random((kk, n)), np.zeros((m, n), np.float32)
    if not unit:
        a, b = np.asfortranarray(a), np.repeat(b, 2, 1)[:, ::2]
    run(k.done(), [c, a, b], cdiv(m, bm) * cdiv(n, bn))
    np.testing.assert_allclose(c, a @ b, rtol=1e-3, atol=1e-3)


def test_an_accumulator_that_is_read_later_is_copied():
    k = K(z=exclusive(f32, (16, 16)), x=shared(f32, 2))
    x = k.load(k.x, [0, 0], (16, 16))
    first = k.mma(x, x, k.full(0.0, f32, (16, 16)))
    second = k.mma(x, x, first)
    third = k.mma(first, x, second)
    k.store(k.z, k.add(k.add(first, second), third), [0, 0])
    x, z = random((16, 16)), np.zeros((16, 16), np.float32)
    run(k.done(), [z, x])
    w = x.astype(np.float64)
    f = w @ w
    np.testing.assert_allclose(z, f + 2 * f + (f @ w + 2 * f), rtol=1e-3, atol=1e-3)


def test_flash_attention_step_keeps_one_accumulator():
    n, d = 64, 32
    k = K("attention", z=exclusive(f32, (16, d)), q=shared(f32, 2), kk=shared(f32, 2), v=shared(f32, 2))
    i = k.tile_index(k.z)
    q = k.load(k.q, [i[0], 0], (16, d))

    def body(t, carried):
        acc, m, total = carried
        s = k.mma(q, k.permute(k.load(k.kk, [t, 0], (16, d)), (1, 0)), k.full(0.0, f32, (16, 16)))
        new = k.binary(Binary.MAX, m, k.reduce(Fold.MAX, s, 1))
        p = k.exp(k.sub(s, k.broadcast(k.reshape(new, (16, 1)), (16, 16))))
        alpha = k.exp(k.sub(m, new))
        total = k.add(k.mul(total, alpha), k.reduce(Fold.ADD, p, 1))
        acc = k.mul(acc, k.broadcast(k.reshape(alpha, (16, 1)), (16, d)))
        acc = k.mma(p, k.load(k.v, [t, 0], (16, d)), acc)
        return [acc, new, total]

    inits = [k.full(0.0, f32, (16, d)), k.full(-1e30, f32, (16,)), k.full(0.0, f32, (16,))]
    acc, _, total = k.loop(0, n // 16, inits, body)
    k.store(k.z, k.binary(Binary.DIV, acc, k.broadcast(k.reshape(total, (16, 1)), (16, d))), i)
    q, kk, v, z = random((48, d)), random((n, d)), random((n, d)), np.zeros((48, d), np.float32)
    run(k.done(), [z, q, kk, v], 3)
    s = q @ kk.T
    p = np.exp(s - s.max(1, keepdims=True))
    np.testing.assert_allclose(z, p / p.sum(1, keepdims=True) @ v, rtol=1e-3, atol=1e-4)


def test_unary_of_a_loaded_scalar_tile():
    k = K(z=exclusive(f32, (1, 1)), x=shared(f32, 2))
    k.store(k.z, k.unary(Unary.NEG, k.load(k.x, [0, 0], (1, 1))), [0, 0])
    z = np.zeros((1, 1), np.float32)
    run(k.done(), [z, np.full((1, 1), 3, np.float32)])
    assert z[0, 0] == -3
