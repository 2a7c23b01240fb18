"""Attention in the public language: one kernel, for whole sequences and for one step against a cache.

The softmax is formed block by block (Milakov and Gimelshein, 2018; Rabe and Staats, 2021): a program keeps, for each
of its queries, the greatest score so far, the sum of exponentials relative to it, and the weighted sum of values. No
matrix of scores is ever in memory. Nothing here checks shapes: `attention.py` does.
"""

# Kernels: tiles have operators in the kernel language, not in Python.

from __future__ import annotations

import peertile.language as T
from peertile.kernel import kernel

__all__ = ["attend", "attend_flat"]


def power(x: T.Tile) -> T.Tile:
    """Two to the x, and 0 for less than 2^-126 of the greatest weight, which is nothing beside it: small numbers take
    a GPU several instructions more."""
    return T.where(x < -126.0, 0.0, T.exp2(x))


def attend_blocks(
    query: T.Tile, best: T.Tile, norm: T.Tile, acc: T.Tile, k: T.Shared, v: T.Shared, b: T.Tile, group: T.Tile,
    first: T.Tile, last: T.Tile, stop: T.Tile, when: T.Tile, scale: T.Tile, BK: int, MASKED: bool, CAUSAL: bool,
    BOUNDED: bool, STAGES: int,
) -> tuple[T.Tile, T.Tile, T.Tile]:  # fmt: skip
    """The greatest score, the sum of weights and the weighted sum of values of BQ queries, and blocks `first` to `last`
    of keys more. Scores count in powers of two: `scale`, which is not negative, holds log2 e.

    Without MASKED every query sees all of these keys, which spares the comparisons, most of a block's arithmetic.
    """
    BQ, D = query.shape
    for j in T.range(first, last, stages=STAGES):
        key = T.reshape(k.load((b, group, j, 0), (1, 1, BK, D)), (BK, D))
        value = T.reshape(v.load((b, group, j, 0), (1, 1, BK, D)), (BK, D))
        score = T.mma(query, T.transpose(key))
        if MASKED:
            at = j * BK + T.iota(BK)
            seen = T.broadcast((at < stop)[None, :], (BQ, BK))
            if BOUNDED:  # what lies behind the length was never written, and 0 · NaN is NaN
                value = T.where((at < stop)[:, None], value, T.zeros((BK, D), v.dtype))
            if CAUSAL:
                seen = seen & (at[None, :] <= when[:, None])
            score = T.where(seen, score, float("-inf"))
        peak = T.maximum(best, T.max(score, axis=1, keepdims=True) * scale)
        base = T.where(peak == float("-inf"), 0.0, peak) if MASKED else peak  # no key seen yet: -inf - -inf is NaN
        weight = power(T.fma(score, scale, -base))
        kept = T.exp2(best - base)
        norm = norm * kept + T.sum(weight, axis=1, keepdims=True)
        acc = T.mma(weight.astype(v.dtype), value, acc * kept)
        best = peak
    return best, norm, acc


@kernel
def attend(
    o: T.Exclusive, q: T.Shared, k: T.Shared, v: T.Shared, lengths: T.Shared, scale: T.f32, BK: T.Const[int],
    CAUSAL: T.Const[bool], BOUNDED: T.Const[bool], NEGATED: T.Const[bool], STAGES: T.Const[int] = 2,
) -> None:  # fmt: skip
    """o[:, b, h] = softmax(±scale ln 2 · q[b, h] k[b, g]^T) v[b, g] for the group g of head h, BQ queries a program.
    Minus with NEGATED: the scale itself is not negative.

    Keys from `lengths[b]` on are left out with BOUNDED, and so, with CAUSAL, are keys later than the query, when the
    last query is as late as the last key. A query that sees no key gives 0.
    """
    BQ, D = o.tile_shape[0], o.tile_shape[3]
    for tile in o.tiles(down=True):  # with CAUSAL later queries see more keys: the longest first
        i, b, h, _ = tile.index
        group = h // (q.shape[1] // k.shape[1])
        keys = k.shape[2]
        stop = keys
        if BOUNDED:
            stop = T.clamp(T.reshape(lengths.load((b,), (1,)), ()).astype(T.i64), 0, keys)
        last = stop
        shift = keys - q.shape[2]
        whole = stop // BK  # blocks that all queries see all of
        if CAUSAL:
            last = T.clamp((i + 1) * BQ + shift, 0, stop)
            whole = T.clamp(i * BQ + shift + 1, 0, stop) // BK
        when = i * BQ + T.iota(BQ) + shift
        query = T.reshape(q.load((b, h, i, 0), (1, 1, BQ, D)), (BQ, D))
        if NEGATED:
            query = -query
        best = T.full((BQ, 1), float("-inf"), T.f32)
        norm = T.zeros((BQ, 1), T.f32)
        acc = T.zeros((BQ, D), T.f32)
        best, norm, acc = attend_blocks(
            query, best, norm, acc, k, v, b, group, T.i64(0), whole, stop, when, scale, BK, False, CAUSAL, BOUNDED,
            STAGES,
        )  # fmt: skip
        best, norm, acc = attend_blocks(
            query, best, norm, acc, k, v, b, group, whole, T.cdiv(last, BK), stop, when, scale, BK, True, CAUSAL,
            BOUNDED, STAGES,
        )  # fmt: skip
        out = T.where(norm == 0.0, 0.0, acc / norm)
        tile.store(T.reshape(out, (BQ, 1, 1, D)).astype(o.dtype))


@kernel
def attend_flat(
    o: T.Exclusive, q: T.Shared, k: T.Shared, v: T.Shared, scale: T.f32, BK: T.Const[int], CAUSAL: T.Const[bool],
    STAGES: T.Const[int] = 2,
) -> None:  # fmt: skip
    """As attend without lengths, where batches and heads are one axis: o [queries, heads, D], q [heads · queries, D], k
    and v [groups, keys, D]; queries are a multiple of BQ and, without CAUSAL, keys of BK.

    One loop over keys without checks, which a GPU can divide among groups of warps (`CudaOptions.specialize`): while
    one of them forms weights, another multiplies. So every block is compared with CAUSAL, in 32 bits, and the first
    axis of queries and outputs is the one of rows, which is what Triton divides.
    """
    BQ, D = o.tile_shape[0], o.tile_shape[2]
    for tile in o.tiles(down=True, even=True):
        i, h, _ = tile.index
        keys = k.shape[1]
        queries, heads, _ = o.shape
        shift = keys - queries
        # Always within: nothing has to be checked where it is used.
        rows = T.clamp(h * (queries // BQ) + i, 0, T.maximum(q.num_tiles((BQ, D))[0] - 1, 0))
        group = T.minimum(h // (heads // k.shape[0]), T.maximum(k.num_tiles((1, BK, D))[0] - 1, 0))
        group = T.minimum(group, T.maximum(v.num_tiles((1, BK, D))[0] - 1, 0))
        last = T.clamp((i + 1) * BQ + shift, 0, keys) if CAUSAL else keys
        first = i * BQ + shift  # the last key that the first query sees
        query = q.load((rows, 0), (BQ, D))
        best = T.full((BQ, 1), float("-inf"), T.f32)
        norm = T.zeros((BQ, 1), T.f32)
        acc = T.zeros((BQ, D), T.f32)
        for j in T.range(T.minimum(T.cdiv(last, BK), k.num_tiles((1, BK, D))[1]), stages=STAGES):
            key = T.reshape(k.load((group, j, 0), (1, BK, D)), (BK, D))
            value = T.reshape(v.load((group, j, 0), (1, BK, D)), (BK, D))
            score = T.mma(query, T.transpose(key))
            if CAUSAL:
                seen = T.iota(BQ, T.i32) + T.clamp(first - j * BK, -BQ, BK).astype(T.i32)
                score = T.where(T.iota(BK, T.i32)[None, :] <= seen[:, None], score, float("-inf"))
            peak = T.maximum(best, T.max(score, axis=1, keepdims=True) * scale)
            base = T.where(peak == float("-inf"), 0.0, peak) if CAUSAL else peak
            weight = power(T.fma(score, scale, -base))
            kept = T.exp2(best - base)
            norm = norm * kept + T.sum(weight, axis=1, keepdims=True)
            acc = T.mma(weight.astype(v.dtype), value, acc * kept)
            best = peak
        inverse = T.where(best == float("-inf"), 0.0, 1.0 / norm)  # a division of each element takes as long as a block
        out = acc * inverse
        tile.store(out.astype(o.dtype)[:, None, :])
