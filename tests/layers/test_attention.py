"""Attention, rotary positions and caches against numpy in f64."""

import dataclasses
import re

import numpy as np
import pytest
from layer_values import DTYPES, cases, close, made, poisoned

import peertile as pt
from peertile.library import attention_kernels
from peertile.library.attention import RotaryPairs, attention, cache_append, decode_attention, rope, rope_tables

pytestmark = [pytest.mark.any_device]


def expected(q, k, v, *, causal=False, lengths=None, scale=None):
    """The definition, in f64; heads of q share those of k and v in order; a query that sees no key gives 0."""
    shared = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, shared, 1), np.repeat(v, shared, 1)
    queries, keys, dim = q.shape[2], k.shape[2], q.shape[3]
    score = np.einsum("bhqd,bhkd->bhqk", q, k) * (dim**-0.5 if scale is None else scale)
    seen = np.ones((q.shape[0], 1, queries, keys), bool)
    if causal:
        seen &= np.arange(keys)[None, :] <= np.arange(queries)[:, None] + keys - queries
    if lengths is not None:
        seen &= np.arange(keys) < np.asarray(lengths)[:, None, None, None]
    weight = np.where(seen, np.exp(score - score.max(-1, keepdims=True)), 0)
    norm = weight.sum(-1, keepdims=True)
    return np.einsum("bhqk,bhkd->bhqd", np.where(norm == 0, 0, weight / np.where(norm == 0, 1, norm)), v)


SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (2, 3, 3, 37, 37, 32),
    (1, 4, 2, 70, 300, 64),
    (2, 2, 1, 5, 129, 24),
    (1, 6, 6, 130, 65, 80),
]
"""batch, heads, heads of k and v, queries, keys, dim"""


@pytest.mark.feature("A4", "cpu")
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_the_softmax_of_scores_over_values(rng, shape, causal):
    b, h, g, n, m, d = shape
    (q, a), (k, c), (v, e) = (made(rng, s, pt.f32) for s in ((b, h, n, d), (b, g, m, d), (b, g, m, d)))
    out = poisoned((b, h, n, d), pt.f32)
    assert attention(q, k, v, causal=causal, out=out).sync() is out
    close(out, expected(a, c, e, causal=causal), pt.f32)


@pytest.mark.parametrize(
    ("shape", "causal"),
    [((2, 2, 64, 64, 32), False), ((4, 2, 48, 96, 16), False), ((3, 1, 32, 50, 16), True), ((2, 2, 64, 37, 16), True)],
    ids=str,
)
def test_attention_in_one_loop_is_the_same(rng, shape, causal):
    heads, groups, n, m, d = shape
    (q, a), (k, c), (v, e) = (made(rng, s, pt.f32) for s in ((heads, n, d), (groups, m, d), (groups, m, d)))
    out = poisoned((heads, n, d), pt.f32)
    scale = d**-0.5 / np.log(2)
    part = out.permute(1, 0, 2).partition((16, 1, None))
    for cut in (part, part.persistent(programs=3), dataclasses.replace(part, swizzle=2)):
        out.copy_from(np.full(out.shape, np.nan, np.float32))
        attention_kernels.attend_flat(cut, q.reshape(heads * n, d), k, v, scale, BK=32, CAUSAL=causal).sync()
        close(out, expected(a[None], c[None], e[None], causal=causal)[0], pt.f32)


@pytest.mark.parametrize(("queries", "keys", "causal"), [(640, 640, True), (128, 256, False), (128, 200, True)])
def test_whole_tiles_of_heads_of_128_go_through_one_loop(rng, monkeypatch, queries, keys, causal):
    monkeypatch.setattr("peertile.library.attention.can_divide", lambda target: True)
    (q, a), (k, c), (v, e) = (made(rng, (2, h, n, 128), pt.bf16) for h, n in ((4, queries), (2, keys), (2, keys)))
    out = poisoned(q.shape, pt.bf16)
    op = attention(q, k, v, causal=causal, out=out)
    assert op.name == "attend_flat"
    op.sync()
    close(out, expected(a, c, e, causal=causal), pt.bf16)
    assert attention(q[:, :, :100], k, v, causal=causal).name == "attend"


@pytest.mark.slow
@pytest.mark.feature("A4", "cpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_keys_from_the_length_on_are_unseen_whatever_they_hold(rng, causal, dtype):
    lengths = np.array([0, 1, 64, 70, 7])
    (q, a), (k, c), (v, e) = (made(rng, (5, 2, 70, 32), dtype) for _ in range(3))
    for keys in (k, v):
        values = keys.numpy()
        for b, n in enumerate(lengths):
            values[b, :, n:] = np.nan
        keys.copy_from(values)
    out = poisoned(q.shape, dtype)
    attention(q, k, v, causal=causal, lengths=pt.asarray(lengths), out=out).sync()
    close(out, expected(a, c, e, causal=causal, lengths=lengths), dtype, factor=2)


def test_attention_takes_a_scale_batches_without_heads_and_scores_too_large_for_exp(rng):
    (q, a), (k, c), (v, e) = (made(rng, (3, 20, 16), pt.f32, 10.0) for _ in range(3))
    got = attention(q, k, v, scale=2.0).sync()
    want = expected(*(x[:, None] for x in (a, c, e)), scale=2.0)[:, 0]
    close(got, want, pt.f32, factor=200)  # scores of thousands are known to 2^-13, and so is the exponential of one


def test_attention_reads_and_writes_heads_of_packed_products_where_they_lie(rng):
    batch, tokens, heads, dim = 2, 33, 3, 16
    packed, values = made(rng, (batch, tokens, 3 * heads * dim), pt.f32)
    parts = packed.reshape(batch, tokens, 3 * heads, dim).permute(0, 2, 1, 3)
    views = values.reshape(batch, tokens, 3 * heads, dim).transpose(0, 2, 1, 3)
    at = [slice(i * heads, (i + 1) * heads) for i in range(3)]
    out = poisoned((batch, tokens, heads * dim), pt.f32)
    attention(*(parts[:, s] for s in at), out=out.reshape(batch, tokens, heads, dim).permute(0, 2, 1, 3)).sync()
    want = expected(*(views[:, s] for s in at))
    close(out, want.transpose(0, 2, 1, 3).reshape(out.shape), pt.f32)


@pytest.mark.parametrize("shape", [(0, 2, 2, 4, 4, 8), (1, 2, 2, 0, 4, 8), (1, 2, 2, 3, 0, 8)], ids=str)
def test_attention_of_nothing(shape):
    b, h, g, n, m, d = shape
    got = attention(*(pt.ones(s, pt.f32) for s in ((b, h, n, d), (b, g, m, d), (b, g, m, d)))).sync()
    np.testing.assert_array_equal(got.numpy(), np.zeros((b, h, n, d)))


@pytest.mark.slow
@pytest.mark.feature("A4", "cpu")
@pytest.mark.parametrize(("shape", "dtype"), cases((1, 1, 1, 1, 1), (2, 14, 2, 300, 64), (3, 4, 4, 65, 24)), ids=str)
def test_decode_attention_sees_the_cache_up_to_its_length(rng, shape, dtype):
    b, h, g, capacity, d = shape
    lengths = rng.integers(1, capacity + 1, b)
    (q, a), (k, c), (v, e) = (made(rng, s, dtype) for s in ((b, h, d), (b, g, capacity, d), (b, g, capacity, d)))
    out = poisoned((b, h, d), dtype)
    assert decode_attention(q, k, v, pt.asarray(lengths), out=out).sync() is out
    close(out, expected(a[:, :, None], c, e, lengths=lengths)[:, :, 0], dtype, factor=2)


def test_a_recorded_step_sees_its_cache_grow(rng):
    keys, values, length = pt.zeros((1, 1, 8, 4), pt.f32), pt.zeros((1, 1, 8, 4), pt.f32), pt.zeros((1,), pt.i64)
    at, row, q = pt.zeros((1,), pt.i64), pt.zeros((1, 1, 4), pt.f32), pt.ones((1, 1, 4), pt.f32)
    out = poisoned((1, 1, 4), pt.f32)
    stream = pt.current_device().stream("steps")
    step = pt.zip(
        cache_append(keys, row, at), cache_append(values, row, at), decode_attention(q, keys, values, length, out=out)
    )
    graph = step.graph_on(stream)
    seen = rng.standard_normal((8, 4)).astype(np.float32)
    for k in range(8):
        for tensor, host in ((at, [k]), (length, [k + 1]), (row, seen[k].reshape(1, 1, 4))):
            graph.update(pt.op.copy(np.asarray(host, tensor.dtype.numpy), to=tensor))
        graph.launch().sync_on(stream)
        past = seen[: k + 1].astype(np.float64)[None, None]
        close(out, expected(np.ones((1, 1, 1, 4)), past, past)[:, :, 0], pt.f32)


@pytest.mark.slow
@pytest.mark.feature("A4", "cpu")
@pytest.mark.parametrize("pairs", RotaryPairs, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [pytest.param((1, 1, 1, 2), marks=pytest.mark.slow), pytest.param((2, 3, 37, 64), marks=pytest.mark.slow),
              (1, 2, 5, 48)], ids=str
)  # fmt: skip
def test_rope_turns_pairs_by_the_angle_of_their_position(rng, shape, dtype, pairs):
    batch, _, tokens, dim = shape
    x, a = made(rng, shape, dtype)
    at = rng.integers(0, 100_000, (batch, tokens))
    tables = rope_tables(100_000, dim, base=500.0, pairs=pairs)
    out = poisoned(shape, dtype)
    assert rope(x, tables, pt.asarray(at), pairs=pairs, out=out).sync() is out
    turn = np.exp(1j * (at[..., None] * 500.0 ** (-np.arange(0, dim, 2) / dim)))[:, None]
    if pairs is RotaryPairs.HALVES:
        turned = (a[..., : dim // 2] + 1j * a[..., dim // 2 :]) * turn
        want = np.concatenate([turned.real, turned.imag], -1)
    else:
        turned = (a[..., ::2] + 1j * a[..., 1::2]) * turn
        want = np.stack([turned.real, turned.imag], -1).reshape(shape)
    close(out, want, dtype, factor=2)


@pytest.mark.parametrize("bad", [-1, 4])
def test_a_position_beyond_the_tables_or_the_cache_is_an_assertion(bad):
    at = pt.asarray(np.array([[bad]]))
    with pytest.raises(pt.KernelAssert, match="rope: expected positions within the tables"):
        rope(pt.zeros((1, 1, 1, 4), pt.f32), rope_tables(4, 4), at).sync()
    with pytest.raises(pt.KernelAssert, match="cache_append: expected a position within the cache"):
        cache_append(pt.zeros((1, 1, 4, 4), pt.f32), pt.zeros((1, 1, 4), pt.f32), at.reshape(1)).sync()


@pytest.mark.parametrize(("shape", "dtype"), cases((1, 1, 1, 1), (3, 2, 200, 24)), ids=str)
def test_cache_append_writes_one_row_of_each_head_and_nothing_else(rng, shape, dtype):
    cache, before = made(rng, shape, dtype)
    row, values = made(rng, (*shape[:2], shape[3]), dtype)
    at = rng.integers(0, shape[2], shape[0])
    assert cache_append(cache, row, pt.asarray(at)).sync() is cache
    before[np.arange(shape[0]), :, at] = values
    np.testing.assert_array_equal(cache.numpy().astype(np.float64), before)


def ones(*shape, dtype=pt.f32):
    return pt.ones(shape, dtype)


BAD = {
    "attention: q: expected [batch, heads, queries, dim], got [3, 4]": lambda x: attention(ones(3, 4), x, x),
    "attention: k: expected [2, groups, keys, 8], got [2, 4, 5, 6]": lambda x: attention(x, ones(2, 4, 5, 6), x),
    "attention: k: expected [2, keys, 8], got [2, 4, 5, 8]": lambda x: attention(ones(2, 5, 8), x, x),
    "attention: v: expected f32, got f16": lambda x: attention(x, x, ones(2, 4, 5, 8, dtype=pt.f16)),
    "attention: k: expected a number of heads that divides the 4 of q, got 3; heads of q share those of k and v in "
    "order": lambda x: attention(x, ones(2, 3, 5, 8), ones(2, 3, 5, 8)),
    "attention: q: expected heads of at most 512 elements, got 513": lambda x: attention(*[ones(1, 1, 513)] * 3),
    "attention: lengths: expected [2], got [3]": lambda x: attention(x, x, x, lengths=ones(3, dtype=pt.i64)),
    "attention: scale: expected a number, got '1'": lambda x: attention(x, x, x, scale="1"),
    "decode_attention: keys: expected [2, groups, capacity, 8], got [1, 4, 5, 8]": lambda x: decode_attention(
        ones(2, 4, 8), ones(1, 4, 5, 8), x, ones(2, dtype=pt.i64)
    ),
    "decode_attention: lengths: expected i32 or i64, got f32": lambda x: decode_attention(ones(2, 4, 8), x, x, ones(2)),
    "rope_tables: dim: expected an even integer >= 2, got 7": lambda x: rope_tables(4, 7),
    "rope_tables: positions: expected an integer >= 1, got 0": lambda x: rope_tables(0, 8),
    "rope: pairs: expected a RotaryPairs, got 'halves'": lambda x: rope(x, rope_tables(4, 8), x, pairs="halves"),
    "rope: cosines: expected [positions, 8], got [4, 6]": lambda x: rope(x, rope_tables(4, 6), x),
    "rope: positions: expected [2, 5], got [2]": lambda x: rope(x, rope_tables(9, 8), ones(2, dtype=pt.i32)),
    "rope: x: expected an even number of elements in a head, got 3": lambda x: rope(ones(1, 1, 1, 3), (x, x), x),
    "cache_append: rows: expected [2, 4, 8], got [2, 4, 5, 8]": lambda x: cache_append(x, x, ones(2, dtype=pt.i64)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_with_the_whole_reason(message):
    with pytest.raises(pt.ArgumentError, match=f"^{re.escape(message)}$"):
        BAD[message](ones(2, 4, 5, 8))
