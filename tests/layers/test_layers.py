"""Layers against numpy in f64: shapes that do not divide, tails, nothing at all, every element type, bad input."""

import math
import re

import numpy as np
import pytest
from layer_values import DTYPES, cases, close, made, poisoned

import peertile as pt
from peertile.library import layer_kernels, layers
from peertile.library.layers import (
    Activation,
    WeightLayout,
    embedding,
    layer_norm,
    linear,
    mean_pool,
    rms_norm,
    softmax,
    swiglu,
)

pytestmark = [pytest.mark.any_device]


def erf(x):
    return np.vectorize(math.erf, otypes=[np.float64])(x)


ACTIVATED = {
    Activation.NONE: lambda x: x,
    Activation.RELU: lambda x: np.maximum(x, 0),
    Activation.GELU: lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    Activation.SILU: lambda x: x / (1 + np.exp(-x)),
}


@pytest.mark.feature("A5", "cpu")
@pytest.mark.parametrize(
    ("shape", "dtype"), cases((1, 1, 1), (37, 100, 130), (129, 65, 33), (3, 300, 200), (200, 16, 384)), ids=str
)
def test_linear_is_a_product_with_a_bias(rng, shape, dtype):
    m, k, n = shape
    (x, a), (w, b), (bias, c) = made(rng, (m, k), dtype), made(rng, (k, n), dtype), made(rng, (n,), dtype)
    out = poisoned((m, n), dtype)
    assert linear(x, w, bias, out=out).sync() is out
    close(out, a @ b + c, dtype)


@pytest.mark.parametrize("activation", Activation, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_applies_its_activation_before_it_adds_the_residual(rng, activation, dtype):
    (x, a), (w, b), (bias, c) = made(rng, (21, 70), dtype), made(rng, (70, 50), dtype, 0.2), made(rng, (50,), pt.f32)
    more, r = made(rng, (21, 50), dtype)
    got = linear(x, w, bias, activation=activation, residual=more).sync()
    close(got, ACTIVATED[activation](a @ b + c) + r, dtype, factor=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_takes_weights_either_way_and_leading_axes(rng, dtype):
    (x, a), (w, b) = made(rng, (2, 3, 5, 40), dtype), made(rng, (24, 40), dtype)
    close(linear(x, w, layout=WeightLayout.OUT_IN).sync(), a @ b.T, dtype)
    close(linear(x, w.permute(1, 0)).sync(), a @ b.T, dtype)


@pytest.mark.feature("A5", "cpu")
@pytest.mark.parametrize("layout", WeightLayout, ids=str)
@pytest.mark.parametrize(("shape", "dtype"), cases((1, 1), (5, 3000), (1100, 70)), ids=str)
def test_one_row_is_multiplied_as_many_are(rng, shape, dtype, layout):
    k, n = shape
    (x, a), (w, b) = made(rng, (1, k), dtype), made(rng, (k, n), dtype, k**-0.5)
    (bias, c), (more, r) = made(rng, (n,), pt.f32), made(rng, (1, n), dtype)
    weight = w if layout is WeightLayout.IN_OUT else pt.dup(w.permute(1, 0))
    want = ACTIVATED[Activation.SILU](a @ b + c) + r
    options = {"activation": Activation.SILU, "residual": more, "layout": layout}
    close(linear(x, weight, bias, **options).sync(), want, dtype, factor=2)
    # The kernel that GPUs have for it runs everywhere.
    out = poisoned((1, n), dtype)
    turned = weight if layout is WeightLayout.IN_OUT else weight.permute(1, 0)
    layer_kernels.linear_row(
        out.partition((1, 16)), x, turned, bias, more, BK=64, STAGES=2, ACTIVATION="silu", BIASED=True, ADDED=True
    ).sync()
    close(out, want, dtype, factor=2)


def test_a_gpu_gets_tiles_that_keep_it_busy():
    shapes = [(4096, 1536), (256, 1152), (256, 384), (16, 1152), (16, 384), (2, 1)]
    assert [layers._f32_way(*shape) for shape in shapes] == [
        ((64, 128), 16), ((64, 64), 32), ((16, 64), 32), ((16, 32), 64), ((16, 16), 64), ((16, 16), 64),
    ]  # fmt: skip
    assert [layers._row_way(n, 4, False) for n in (1, 896, 9728, 151936)] == [
        ((1, 8), 512, 3), ((1, 8), 512, 3), ((1, 32), 128, 1), ((1, 32), 128, 1),
    ]  # fmt: skip
    assert [layers._row_way(n, 2, False) for n in (896, 16384)] == [((1, 8), 1024, 3), ((1, 64), 128, 3)]
    assert layers._row_way(16384, 4, True) == ((1, 8), 512, 3)


def test_a_wide_row_of_f32_has_a_program_of_a_gpu_to_itself(monkeypatch):
    rows, half = pt.zeros((16, 1024), pt.f32), pt.zeros((16, 1024), pt.bf16)
    monkeypatch.setattr(rows.device, "target", None)
    assert layers._whole_rows("softmax", rows).tile_shape == (4, 1024)
    monkeypatch.setattr(rows.device, "target", "sm_90")
    assert layers._whole_rows("softmax", rows).tile_shape == (1, 1024)
    assert layers._whole_rows("softmax", half).tile_shape == (4, 1024)


@pytest.mark.parametrize("shape", [(0, 5, 7), (4, 0, 7), (4, 5, 0), (1, 0, 7)], ids=str)
def test_linear_of_nothing(rng, shape):
    m, k, n = shape
    (x, _), (w, _), (bias, c) = made(rng, (m, k), pt.f32), made(rng, (k, n), pt.f32), made(rng, (n,), pt.f32)
    got = linear(x, w, bias).sync()
    if k:
        assert got.shape == (m, n)
    else:
        np.testing.assert_array_equal(got.numpy(), np.broadcast_to(c, (m, n)))


def test_linear_reads_and_writes_views_with_gaps(rng):
    whole, values = made(rng, (30, 90), pt.f32)
    w, b = made(rng, (40, 20), pt.f32)
    out = pt.zeros((30, 50), pt.f32)
    linear(whole[:, 10:50], w, out=out[:, 20:40]).sync()
    want = np.zeros((30, 50))
    want[:, 20:40] = values[:, 10:50] @ b
    close(out, want, pt.f32, factor=4)


@pytest.mark.feature("A4", "cpu")
@pytest.mark.feature("K3", "cpu")
@pytest.mark.parametrize(("shape", "dtype"), cases((1,), (5, 1), (3, 1000), (130, 33), (2, 3, 17), (2, 5000)), ids=str)
def test_softmax_of_rows(rng, shape, dtype):
    x, a = made(rng, shape, dtype, 10.0)
    out = poisoned(shape, dtype)
    assert softmax(x, out=out).sync() is out
    e = np.exp(a - a.max(-1, keepdims=True))
    close(out, e / e.sum(-1, keepdims=True), dtype)


def test_softmax_of_large_and_infinite_scores_and_of_nothing():
    x = pt.asarray(np.array([[3e38, 3e38, -np.inf], [-3e38, -3e38, -np.inf]], np.float32))
    assert softmax(x).sync().numpy().tolist() == [[0.5, 0.5, 0.0]] * 2
    assert softmax(pt.zeros((0, 4), pt.f32)).sync().shape == (0, 4)
    assert softmax(pt.zeros((4, 0), pt.f32)).sync().shape == (4, 0)
    assert np.isnan(softmax(pt.full((1, 2), float("-inf"), pt.f32)).sync().numpy()).all()


@pytest.mark.feature("A4", "cpu")
@pytest.mark.parametrize("is_added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize(("shape", "dtype"), cases((1, 1), (7, 384), (65, 100), (2, 3, 513)), ids=str)
def test_layer_norm_of_rows(rng, shape, is_added, dtype):
    (x, a), (r, b) = made(rng, shape, dtype), made(rng, shape, dtype)
    (gain, g), (bias, c) = made(rng, shape[-1:], pt.f32), made(rng, shape[-1:], dtype)
    out = poisoned(shape, dtype)
    assert layer_norm(x, gain, bias, epsilon=1e-3, residual=r if is_added else None, out=out).sync() is out
    u = a + b if is_added else a
    want = (u - u.mean(-1, keepdims=True)) / np.sqrt(u.var(-1, keepdims=True) + 1e-3) * g + c
    close(out, want, dtype, factor=4)


def test_layer_norm_of_rows_far_from_zero_keeps_its_precision(rng):
    a = (rng.standard_normal((9, 300)) + 4096).astype(np.float32)
    got = layer_norm(pt.asarray(a), pt.ones((300,), pt.f32), epsilon=0.0).sync().numpy()
    u = a.astype(np.float64)
    np.testing.assert_allclose(got, (u - u.mean(1, keepdims=True)) / u.std(1, keepdims=True), atol=2e-3)


@pytest.mark.feature("A4", "cpu")
@pytest.mark.parametrize("is_added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize(("shape", "dtype"), cases((1, 1), (7, 384), (65, 100), (2, 3, 513)), ids=str)
def test_rms_norm_of_rows(rng, shape, is_added, dtype):
    (x, a), (r, b), (gain, g) = made(rng, shape, dtype), made(rng, shape, dtype), made(rng, shape[-1:], dtype)
    out = poisoned(shape, dtype)
    assert rms_norm(x, gain, residual=r if is_added else None, out=out).sync() is out
    u = a + b if is_added else a
    close(out, u / np.sqrt((u * u).mean(-1, keepdims=True) + 1e-6) * g, dtype, factor=4)


@pytest.mark.parametrize(("rows", "width"), [(9, 2048), (5, 8192)])
def test_wide_rows_of_f32_are_folded_by_as_many_warps_as_are_fast(rng, rows, width):
    (x, a), (gain, g) = made(rng, (rows, width), pt.f32), made(rng, (width,), pt.f32)
    e = np.exp(a - a.max(1, keepdims=True))
    close(softmax(x, out=poisoned((rows, width), pt.f32)).sync(), e / e.sum(1, keepdims=True), pt.f32)
    out = rms_norm(x, gain, out=poisoned((rows, width), pt.f32)).sync()
    close(out, a / np.sqrt((a * a).mean(1, keepdims=True) + 1e-6) * g, pt.f32, factor=4)


@pytest.mark.parametrize("dtype", [pt.bf16, pt.f16], ids=str)
def test_rms_norm_of_long_rows_of_16_bits(rng, dtype):
    (x, a), (gain, g) = made(rng, (3, 16384), dtype), made(rng, (16384,), dtype)
    out = rms_norm(x, gain, out=poisoned((3, 16384), dtype)).sync()
    close(out, a / np.sqrt((a * a).mean(1, keepdims=True) + 1e-6) * g, dtype, factor=4)


@pytest.mark.parametrize(
    ("dtype", "width", "gain", "is_added", "again", "early"),
    [
        (pt.f32, 512, pt.f32, False, False, False),
        (pt.f32, 1024, pt.f32, False, False, True),
        (pt.f32, 2047, pt.f32, False, False, True),
        (pt.f32, 2048, pt.f32, True, True, False),
        (pt.f32, 8192, pt.f32, False, True, True),
        (pt.f32, 16384, pt.f32, False, True, False),
        (pt.bf16, 1024, pt.bf16, False, False, False),
        (pt.bf16, 2048, pt.bf16, False, False, True),
        (pt.bf16, 2049, pt.bf16, False, True, True),
        (pt.bf16, 8192, pt.bf16, False, True, True),
        (pt.bf16, 16000, pt.f16, False, True, True),
        (pt.f16, 16384, pt.f32, False, False, False),
        (pt.bf16, 16384, pt.bf16, True, False, False),
        (pt.bf16, 16385, pt.bf16, False, False, False),
    ],
)
def test_a_gpu_loads_the_rows_twice_that_it_has_no_room_for(monkeypatch, dtype, width, gain, is_added, again, early):
    x, g, seen = pt.zeros((2, width), dtype), pt.ones((width,), gain), []

    def kernel(*_, AGAIN, EARLY, **consts):
        seen.append((AGAIN, EARLY))
        return pt.op.value(x)

    monkeypatch.setattr(layers.kernels, "rms_norm", kernel)
    for target in ("sm_90", None):
        monkeypatch.setattr(x.device, "target", target)
        rms_norm(x, g, residual=x if is_added else None)
    assert seen == [(again, early), (False, False)]


@pytest.mark.parametrize(
    ("rows", "dtype", "high"), [(4096, pt.bf16, 8), (4095, pt.bf16, 4), (4096, pt.f32, 1)], ids=str
)
def test_a_gpu_program_has_more_short_rows_where_there_are_many(monkeypatch, rows, dtype, high):
    x, g, seen = pt.empty((rows, 1024), dtype), pt.ones((1024,), dtype), []

    def kernel(part, *_, EARLY, SCALED, **consts):
        seen.append((part.tile_shape, EARLY, SCALED))
        return pt.op.value(x)

    monkeypatch.setattr(layers.kernels, "rms_norm", kernel)
    monkeypatch.setattr(x.device, "target", "sm_90")
    rms_norm(x, g)
    assert seen == [((high, 1024), high != 4, high == 8)]


@pytest.mark.parametrize("is_added", [False, True], ids=["alone", "added"])
def test_rms_norm_of_a_row_that_is_loaded_twice_is_the_same(rng, is_added):
    (x, a), (r, b), (gain, g) = made(rng, (7, 100), pt.f32), made(rng, (7, 100), pt.f32), made(rng, (100,), pt.f32)
    out = poisoned((7, 100), pt.f32)
    layer_kernels.rms_norm(
        out.partition((1, None)), x, r, gain, 1e-6, ADDED=is_added, AGAIN=True, EARLY=True, SCALED=True
    ).sync()
    u = a + b if is_added else a
    close(out, u / np.sqrt((u * u).mean(1, keepdims=True) + 1e-6) * g, pt.f32, factor=4)


def test_norms_of_nothing_and_of_a_row_of_zeros():
    gain = pt.ones((4,), pt.f32)
    for norm in (layer_norm, rms_norm):
        assert norm(pt.zeros((0, 4), pt.f32), gain).sync().shape == (0, 4)
        assert norm(pt.zeros((2, 4), pt.f32), gain).sync().numpy().tolist() == [[0.0] * 4] * 2


@pytest.mark.feature("A4", "cpu")
@pytest.mark.parametrize(("shape", "dtype"), cases((0, 4), (1, 1), (130, 2000), (2, 3, 5), (5, 300)), ids=str)
def test_swiglu(rng, shape, dtype):
    (gate, g), (up, u) = made(rng, shape, dtype, 3.0), made(rng, shape, dtype)
    out = poisoned(shape, dtype)
    assert swiglu(gate, up, out=out).sync() is out
    close(out, g / (1 + np.exp(-g)) * u, dtype)


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(("shape", "dtype"), cases((5, 3, 0), (1, 1, 1), (100, 384, 37), (5, 700, 9)), ids=str)
def test_embedding_gives_the_rows_that_ids_name(rng, shape, dtype, index):
    rows, width, count = shape
    table, values = made(rng, (rows, width), dtype)
    ids = rng.integers(0, rows, count).astype(index)
    out = poisoned((count, width), dtype)
    assert embedding(table, pt.asarray(ids), out=out).sync() is out
    np.testing.assert_array_equal(out.numpy().astype(np.float64), values[ids])


@pytest.mark.parametrize("bad", [-1, 5])
def test_an_id_of_no_row_is_an_assertion(bad):
    table = pt.zeros((5, 3), pt.f32)
    with pytest.raises(pt.KernelAssert, match="embedding: expected ids of rows of the table"):
        embedding(table, pt.asarray(np.array([0, bad, 1]))).sync()


@pytest.mark.parametrize("normalise", [True, False], ids=["unit", "mean"])
@pytest.mark.parametrize(("shape", "dtype"), cases((1, 1, 1), (2, 16, 50), (4, 7, 700), (3, 37, 384)), ids=str)
def test_mean_pool_leaves_out_what_the_mask_does(rng, shape, normalise, dtype):
    mask = rng.integers(0, 2, shape[:2])
    mask[:, 0] = 1
    a = np.where(mask[..., None] == 1, rng.standard_normal(shape), np.nan)
    x = pt.asarray(a, dtype)
    out = poisoned((shape[0], shape[2]), dtype)
    assert mean_pool(x, pt.asarray(mask), normalise=normalise, out=out).sync() is out
    values = np.where(mask[..., None] == 1, x.numpy().astype(np.float64), 0)
    want = values.sum(1) / mask.sum(1)[:, None]
    close(out, want / np.linalg.norm(want, axis=1, keepdims=True) if normalise else want, dtype)


def test_mean_pool_of_nothing_is_zero():
    x = pt.full((2, 3, 4), float("nan"), pt.f32)
    assert mean_pool(x, pt.zeros((2, 3), pt.i32)).sync().numpy().tolist() == [[0.0] * 4] * 2
    assert mean_pool(pt.zeros((2, 0, 4), pt.f32), pt.zeros((2, 0), pt.i64)).sync().numpy().tolist() == [[0.0] * 4] * 2
    assert mean_pool(pt.zeros((0, 3, 4), pt.f32), pt.zeros((0, 3), pt.i64)).sync().shape == (0, 4)


def test_layers_have_the_same_bits_on_every_run(rng):
    (x, _), (w, _), (gain, _) = made(rng, (70, 200), pt.f32), made(rng, (200, 200), pt.f32), made(rng, (200,), pt.f32)
    runs = [
        [op().sync().numpy().tobytes() for op in (
            lambda: linear(x, w, gain, activation=Activation.GELU), lambda: softmax(x), lambda: layer_norm(x, gain),
            lambda: rms_norm(x, gain),
        )]
        for _ in range(2)
    ]  # fmt: skip
    assert runs[0] == runs[1]


X = np.zeros((4, 6), np.float32)
BAD = {
    "linear: x: expected a tensor, got ndarray; pt.asarray makes one": lambda x, w: linear(X, w),
    "linear: x: expected f32 or f16 or bf16, got i64": lambda x, w: linear(pt.zeros((4, 6), pt.i64), w),
    "linear: weight: expected [6, outputs], got [5, 3]": lambda x, w: linear(x, pt.zeros((5, 3), pt.f32)),
    "linear: weight: expected [outputs, 6], got [6, 5]": lambda x, w: linear(x, w, layout=WeightLayout.OUT_IN),
    "linear: weight: expected f32, got f16": lambda x, w: linear(x, pt.zeros((6, 5), pt.f16)),
    "linear: bias: expected [5], got [6]": lambda x, w: linear(x, w, pt.zeros((6,), pt.f32)),
    "linear: residual: expected [4, 5], got [4, 6]": lambda x, w: linear(x, w, residual=x),
    "linear: out: expected [4, 5], got [5, 4]": lambda x, w: linear(x, w, out=pt.zeros((5, 4), pt.f32)),
    "linear: activation: expected an Activation, got 'relu'": lambda x, w: linear(x, w, activation="relu"),
    "linear: layout: expected a WeightLayout, got 'in_out'": lambda x, w: linear(x, w, layout="in_out"),
    "softmax: out: expected f32, got bf16": lambda x, w: softmax(x, out=pt.zeros((4, 6), pt.bf16)),
    "softmax: x: expected a matrix, or more axes without gaps, got strides (1, 2, 8) for [2, 4, 3]; pt.dup makes a copy "
    "without gaps": lambda x, w: softmax(pt.zeros((3, 4, 2), pt.f32).permute(2, 1, 0)),
    "softmax: x: expected rows of at most 131072 elements, got 131073": lambda x, w: softmax(
        pt.zeros((1, 131073), pt.f32)
    ),
    "layer_norm: gain: expected [6], got [5]": lambda x, w: layer_norm(x, pt.zeros((5,), pt.f32)),
    "layer_norm: bias: expected [6], got [6, 1]": lambda x, w: layer_norm(
        x, pt.zeros((6,), pt.f32), pt.zeros((6, 1), pt.f32)
    ),
    "layer_norm: residual: expected [4, 6], got [4, 5]": lambda x, w: layer_norm(
        x, pt.zeros((6,), pt.f32), residual=pt.zeros((4, 5), pt.f32)
    ),
    "rms_norm: epsilon: expected a number >= 0, got nan": lambda x, w: rms_norm(
        x, pt.zeros((6,), pt.f32), epsilon=float("nan")
    ),
    "swiglu: up: expected [4, 6], got [6, 5]": lambda x, w: swiglu(x, w),
    "embedding: ids: expected i32 or i64, got f32": lambda x, w: embedding(x, pt.zeros((3,), pt.f32)),
    "embedding: table: expected [rows, width], got [3]": lambda x, w: embedding(pt.zeros((3,), pt.f32), x),
    "mean_pool: mask: expected [2, 3], got [2, 4]": lambda x, w: mean_pool(
        pt.zeros((2, 3, 4), pt.f32), pt.zeros((2, 4), pt.i64)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_with_the_whole_reason(message):
    x, w = pt.asarray(X), pt.zeros((6, 5), pt.f32)
    with pytest.raises(pt.ArgumentError, match=f"^{re.escape(message)}$"):
        BAD[message](x, w)
