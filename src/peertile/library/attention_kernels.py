"""Attention in the public language: one kernel, for whole sequences and for one step against a cache.

The softmax is formed block by block (Milakov and Gimelshein, 2018; Rabe and Staats, 2021): a program keeps, for each
of its queries, the greatest score so far, the sum of exponentials relative to it, and the weighted sum of values. No
matrix of scores is ever in memory. Nothing here checks shapes: `attention.py` does.
"""

# Kernels: tiles have operators in the kernel language, not in Python.

from __future__ import annotations

import peertile.language as T
from peertile.kernel import kernel

__all__ = ["attend"]


@kernel
def attend(
    o: T.Exclusive, q: T.Shared, k: T.Shared, v: T.Shared, lengths: T.Shared, scale: T.f32, BK: T.Const[int],
    CAUSAL: T.Const[bool], BOUNDED: T.Const[bool], STAGES: T.Const[int] = 2,
) -> None:  # fmt: skip
    """o[b, h] = softmax(scale · q[b, h] k[b, g]^T) v[b, g] for the group g of head h; a program for BQ queries.

    Keys from `lengths[b]` on are left out with BOUNDED, and so, with CAUSAL, are keys later than the query, when the
    last query is as late as the last key. A query that sees no key gives 0.
    """
    b, h, i, _ = o.index
    BQ, D = o.tile_shape[2], o.tile_shape[3]
    group = h // (q.shape[1] // k.shape[1])
    keys = k.shape[2]
    stop = keys
    if BOUNDED:
        stop = T.clamp(T.reshape(lengths.load((b,), (1,)), ()).astype(T.i64), 0, keys)
    last = stop
    shift = keys - q.shape[2]
    if CAUSAL:
        last = T.clamp((i + 1) * BQ + shift, 0, stop)
    when = i * BQ + T.iota(BQ) + shift
    query = T.reshape(q.load((b, h, i, 0), (1, 1, BQ, D)), (BQ, D))
    best = T.full((BQ, 1), float("-inf"), T.f32)
    norm = T.zeros((BQ, 1), T.f32)
    acc = T.zeros((BQ, D), T.f32)
    for j in T.range(0, T.cdiv(last, BK), stages=STAGES):
        key = T.reshape(k.load((b, group, j, 0), (1, 1, BK, D)), (BK, D))
        value = T.reshape(v.load((b, group, j, 0), (1, 1, BK, D)), (BK, D))
        at = j * BK + T.iota(BK)
        seen = (at < stop)[None, :]
        if BOUNDED:  # what lies behind the length was never written, and 0 · NaN is NaN
            value = T.where((at < stop)[:, None], value, T.zeros((BK, D), v.dtype))
        if CAUSAL:
            seen = seen & (at[None, :] <= when[:, None])
        score = T.where(seen, T.mma(query, T.transpose(key)) * scale, float("-inf"))
        peak = T.maximum(best, T.max(score, axis=1, keepdims=True))
        base = T.where(peak == float("-inf"), 0.0, peak)  # no key seen yet: -inf - -inf is NaN
        weight = T.exp(score - base)
        kept = T.exp(best - base)
        norm = norm * kept + T.sum(weight, axis=1, keepdims=True)
        acc = T.mma(weight.astype(v.dtype), value, acc * kept)
        best = peak
    out = T.where(norm == 0.0, 0.0, acc / norm)
    o.store(T.reshape(out, (1, 1, BQ, D)).astype(o.dtype))
