"""Small programs with fused kernels, each on inputs that are written anew in between. No pytest here.

They run as ranks, on any device, and on the simulated machine; each looks at the values.
"""

import numpy as np

import peertile as pt
from peertile.library.experts import Experts
from peertile.library.fused import FusedProducts
from peertile.library.ring_attention import RingAttention

__all__ = ["PROGRAMS", "SMALL", "TOLERANCE", "attention_reference", "caught", "close", "moe_reference", "numbers"]

TOLERANCE = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}
"""Of one rounding to the type, relative to values of about 1."""


def numbers(seed, dtype, *shape):
    """Normal numbers as a tensor of `dtype`, and what it holds as f64."""
    x = pt.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), getattr(pt, dtype))
    return x, x.numpy().astype(np.float64)


def poisoned(shape, dtype):
    return pt.asarray(np.full(shape, np.nan, np.float32), getattr(pt, dtype))


def close(got, want, dtype, scale=1.0):
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    worst = np.abs(got - want).max(initial=0)
    assert worst <= TOLERANCE[dtype] * scale, f"off by {worst}"  # a NaN is not <= anything


def caught(call, error):
    try:
        call()
    except error as found:
        return str(found)
    return None


# ---------------------------------------------------------------- products


def gathered_product(
    group, rows=(5, 0, 3, 9), inner=6, columns=5, dtype="f32", turns=2, seed=0, at_once=False, wide=False, **options
):
    """All-gather + product, twice with new factors, into poisoned outputs. With `at_once` as on a GPU: a part is begun
    when all of it is there. With `wide` in wide tiles, where two ranks have as many rows."""
    rows = list(rows)[: group.size]
    with FusedProducts(group, **{"staging_bytes": 1 << 20, **options}) as products:
        if at_once:
            products._on_gpu, products._worth_waiting = True, 1
        products._wide = wide
        for turn in range(turns):
            parts = [numbers((seed, turn, r), dtype, rows[r], inner) for r in range(group.size)]
            b, exact = numbers((seed, turn, 100 + group.rank), dtype, inner, columns)
            out = poisoned((sum(rows), columns), dtype)
            products.all_gather_matmul(parts[group.rank][0], b, out, rows=rows).sync()
            close(out.numpy(), np.concatenate([p[1] for p in parts]) @ exact, dtype, max(inner, 1) ** 0.5 * 2)
    return True


def _factors(group, seed, dtype, m, inner, columns):
    parts = [
        (numbers((seed, r), dtype, m, inner[r]), numbers((seed, 100 + r), dtype, inner[r], columns))
        for r in range(group.size)
    ]
    want = sum(a[1] @ b[1] for a, b in parts)
    return parts[group.rank][0][0], parts[group.rank][1][0], want


def scattered_product(
    group,
    rows=(5, 0, 3, 9),
    inner=(6, 3, 0, 7),
    columns=5,
    dtype="f32",
    turns=2,
    seed=0,
    in_pairs=True,
    moved=0,
    deals=False,
    **options,
):
    """Product + reduce-scatter; without `in_pairs` two ranks with as many rows each do as more of them do, and with
    `moved` programs that only move, as GPUs do, tiles of 128 by 256 as their threads have them with `deals`."""
    rows, inner = list(rows)[: group.size], list(inner)[: group.size]
    first = sum(rows[: group.rank])
    with FusedProducts(group, **{"staging_bytes": 1 << 20, **options}) as products:
        products._in_pairs = in_pairs
        products._part_movers = moved
        products._deals = deals
        for turn in range(turns):
            a, b, want = _factors(group, seed + turn, dtype, sum(rows), inner, columns)
            out = poisoned((rows[group.rank], columns), dtype)
            products.matmul_reduce_scatter(a, b, out, rows=rows, inner=inner).sync()
            close(out.numpy(), want[first : first + rows[group.rank]], dtype, max(sum(inner), 1) ** 0.5 * 2)
    return True


def reduced_product(group, m=3, inner=(6, 3, 0, 7), columns=9, dtype="f32", turns=2, seed=0, **options):
    """Product + all-reduce: right, and the same bits on every rank."""
    inner = list(inner)[: group.size]
    with FusedProducts(group, **{"staging_bytes": 1 << 20, **options}) as products:
        for turn in range(turns):
            a, b, want = _factors(group, seed + turn, dtype, m, inner, columns)
            out = poisoned((m, columns), dtype)
            products.matmul_all_reduce(a, b, out, inner=inner).sync()
            got = out.numpy()
            close(got, want, dtype, max(sum(inner), 1) ** 0.5 * 2)
            assert len(set(group.exchange(got.tobytes(), "bits"))) == 1
    return True


# ---------------------------------------------------------------- attention


def attention_reference(q, k, v, causal, shift):
    """Of f64 [heads, tokens, dim], the queries beginning `shift` tokens into the sequence."""
    k, v = (np.repeat(x, q.shape[0] // x.shape[0], 0) for x in (k, v))
    score = np.einsum("hsd,htd->hst", q, k) / np.sqrt(q.shape[2])
    if causal:
        score = np.where(np.arange(k.shape[1])[None] <= np.arange(q.shape[1])[:, None] + shift, score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True, initial=-np.inf))
    return np.einsum("hst,htd->hsd", weight / weight.sum(-1, keepdims=True), v)


def ring(group, rows=(3, 0, 5, 2), heads=2, groups=1, dim=4, dtype="f32", causal=False, turns=2, seed=0, **options):
    """Ring attention, twice with new inputs."""
    rows, me = list(rows)[: group.size], group.rank
    with RingAttention(group, staging_bytes=1 << 19, **options) as attend:
        for turn in range(turns):
            q, exact = numbers((seed, turn, me, 0), dtype, heads, rows[me], dim)
            k, v = (
                [numbers((seed, turn, r, i), dtype, groups, rows[r], dim) for r in range(group.size)] for i in (1, 2)
            )
            out = poisoned(q.shape, dtype)
            attend.attention(q, k[me][0], v[me][0], out, causal=causal, rows=rows).sync()
            keys, values = (np.concatenate([x[1] for x in parts], 1) for parts in (k, v))
            close(out.numpy(), attention_reference(exact, keys, values, causal, sum(rows[:me])), dtype, 2.0)
    return True


def causal_ring(group, **options):
    return ring(group, causal=True, **options)


# ---------------------------------------------------------------- experts


def moe_reference(xs, ids, weights, places):
    """Rows of each expert, and the combination where expert e multiplies by e + 1 and the first `places` are kept."""
    got = {}
    outs = [np.zeros_like(x) for x in xs]
    for r, x in enumerate(xs):
        for t in range(len(x)):
            for e, w in zip(ids[r][t], weights[r][t], strict=True):
                if e < 0:
                    continue
                taken = got.setdefault(int(e), [])
                if len(taken) < places:
                    taken.append(x[t])
                    outs[r][t] += w * (e + 1) * x[t]
    return got, outs


def experts(group, rows=(5, 0, 3, 7), count=5, width=6, top_k=2, dtype="f32", places=None, turns=2, seed=0, **options):
    """Dispatch, experts that multiply, and combination; expert 1 is chosen by everybody, expert 2 by nobody."""
    rows, n, me = list(rows)[: group.size], group.size, group.rank
    with Experts(
        group,
        experts=count,
        rows=max(rows),
        width=width,
        top_k=top_k,
        dtype=getattr(pt, dtype),
        places=places,
        **options,
    ) as moe:
        most = moe.places
        for turn in range(turns):
            rng = np.random.default_rng((seed, turn))
            ids, weights, xs = [], [], []
            for r in range(n):
                others = np.array([0, 3, 4, -1])
                ids.append(np.array([[1, *rng.permutation(others)[: top_k - 1]] for _ in range(rows[r])], np.int64))
                ids[r] = ids[r].reshape(rows[r], top_k)
                weights.append(rng.random((rows[r], top_k)).astype(np.float32))
                xs.append(numbers((seed, turn, r), dtype, rows[r], width))
            got, outs = moe_reference([x[1] for x in xs], ids, weights, most)
            sent = moe.dispatch(xs[me][0], pt.asarray(ids[me])).sync()
            counts = sent.counts.numpy()[:, 0]
            held = np.zeros((moe.on_rank, most, width), np.float32)
            if counts.any():  # memory that nobody wrote is not read
                held = sent.rows.numpy().astype(np.float32).reshape(held.shape)
            made = np.zeros_like(held)
            for number in range(moe.on_rank):
                expert = me * moe.on_rank + number
                expected = got.get(expert, [])
                assert counts[number] == len(expected)
                if expected:
                    assert np.array_equal(held[number, : len(expected)].astype(np.float64), np.array(expected))
                made[number, : len(expected)] = held[number, : len(expected)] * (expert + 1)
            sent.rows.copy_from(made.reshape(-1, width))
            for _ in range(2):
                out = poisoned((rows[me], width), dtype)
                moe.combine(sent, pt.asarray(weights[me]), out=out).sync()
                close(out.numpy(), outs[me], dtype, 20.0)
    return True


def few_places(group, **options):
    return experts(group, places=4, **options)


def summed_experts(group, **options):
    return experts(group, top_k=3, partials=pt.f32, **options)


def few_places_summed(group, **options):
    return experts(group, top_k=3, places=4, partials=pt.f32, **options)


PROGRAMS = {
    "all-gather + product": gathered_product,
    "product + reduce-scatter": scattered_product,
    "product + all-reduce": reduced_product,
    "ring attention": ring,
    "causal ring attention": causal_ring,
    "experts": experts,
    "experts with few places": few_places,
    "experts whose results are added first": summed_experts,
    "experts with few places whose results are added first": few_places_summed,
}


def _small(program, **options):
    def main(group):
        program(group, **options)

    return main


_PRODUCT = {"workers": 2, "tile": (2, 4, 4), "staging_bytes": 1 << 14}
SMALL = {
    "all-gather + product": _small(gathered_product, rows=(5, 0, 3, 4), **_PRODUCT),
    "all-gather at once + product": _small(gathered_product, rows=(5, 0, 3, 4), at_once=True, movers=2, **_PRODUCT),
    "all-gather at once + a product of few tiles": _small(
        gathered_product, rows=(4, 2, 3, 1), columns=60, at_once=True, **(_PRODUCT | {"tile": (4, 64, 4)})
    ),
    "all-gather + product in wide tiles": _small(
        gathered_product, rows=(4, 4, 3, 1), inner=40, columns=10, turns=3, wide=True, **(_PRODUCT | {"workers": 6})
    ),
    "product + reduce-scatter": _small(scattered_product, rows=(5, 0, 3, 2), **_PRODUCT),
    "product + reduce-scatter of even shares": _small(scattered_product, rows=(3, 3, 3, 3), columns=9, **_PRODUCT),
    "product + reduce-scatter in two parts": _small(
        scattered_product, rows=(3, 3, 3, 3), columns=9, in_pairs=False, **_PRODUCT
    ),
    "product + reduce-scatter with a mover": _small(scattered_product, rows=(5, 0, 3, 2), moved=1, **_PRODUCT),
    "product + reduce-scatter of whole tiles with movers": _small(
        scattered_product, rows=(4, 4, 4, 4), columns=9, moved=2, turns=3, **(_PRODUCT | {"workers": 3})
    ),
    "product + all-reduce": _small(reduced_product, **_PRODUCT),
    "product + all-reduce, a tile for each program": _small(reduced_product, m=2, columns=6, **_PRODUCT),
    "flagged product + all-reduce": _small(reduced_product, flagged=True, **_PRODUCT),
    "ring attention": _small(ring, workers=2, tile=(2, 4)),
    "causal ring attention": _small(ring, causal=True, workers=2, tile=(2, 4)),
    "experts": _small(experts, rows=(3, 0, 2, 1), width=2, workers=2),
    "experts with few places": _small(experts, rows=(3, 0, 2, 1), width=2, places=4, workers=2),
    "experts whose results are added first": _small(
        experts, rows=(3, 0, 2, 1), width=2, top_k=3, partials=pt.f32, workers=2
    ),
    "experts whose results are added first, sent and folded in turn": _small(
        experts, rows=(19, 19, 19, 19), width=2, top_k=3, partials=pt.f32, workers=2
    ),
}
"""Programs for the simulated machine: with several tiles and chunks for each program, and few elements in them."""
