"""Attention over ranks in the public language: keys and values go round a ring, the softmax is formed on line.

Every rank holds the queries, keys and values of a stretch of the sequence. In step s a rank attends to the block of
rank - s, while its movers send that block on. A block lies in one of two slots: the slot that step s fills held the
block of step s - 2, and is written once the successor has said that its workers are done with that and its movers have
sent it on. Nothing here checks shapes: `ring_attention.py` does.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Liu, Zaharia and Abbeel, "Ring Attention
with Blockwise Transformers", 2023.
"""

# Kernels: tiles have operators in the kernel language, not in Python.

from __future__ import annotations

import peertile.language as T
from peertile.kernel import kernel
from peertile.library.fused_kernels import meet

__all__ = ["ring_attend"]


def send_block(
    k: T.Shared, v: T.Shared, slots: T.Peer, s: T.Tile, count: T.Tile, to: T.Tile, MOVERS: int, MR: int, D: int
) -> None:
    """This mover's rows of the block of step s into slot s % 2 of rank `to`: one's own, or what came last."""
    groups = k.shape[0]
    there = slots.at(to)
    into = s % 2 * 2 * groups
    source = (s + 1) % 2 * 2 * groups
    for g in T.range(groups):
        for i in T.range(T.program_id(0), T.cdiv(count, MR), MOVERS):
            if s == 0:
                there.store((into + g, i, 0), k.load((g, i, 0), (1, MR, D)))
                there.store((into + groups + g, i, 0), v.load((g, i, 0), (1, MR, D)))
            else:
                there.store((into + g, i, 0), slots.local.load((source + g, i, 0), (1, MR, D)))
                there.store((into + groups + g, i, 0), slots.local.load((source + groups + g, i, 0), (1, MR, D)))


def go_round(
    k: T.Shared, v: T.Shared, hello: T.Mailbox, slots: T.Peer, arrived: T.Peer, free: T.Signal, starts: T.Shared,
    base: T.Tile, agreed: T.Tile, MOVERS: int, MR: int, D: int,
) -> None:  # fmt: skip
    """What a mover does: n - 1 times to the successor, each time once the slot is free and the block is here."""
    p = T.program_id(0)
    me, n = slots.rank, slots.num_ranks
    workers = T.num_programs(0) - MOVERS
    before, after = (me + n - 1) % n, (me + 1) % n
    meet(hello, agreed)
    for s in T.range(n - 1):
        source = (me + n - s) % n
        if s >= 1:
            T.wait_at_least(arrived.local, base + s, (p,))
        if s >= 2:
            for w in T.range(workers + 1):
                free.wait(after, slot=p * (workers + 1) + w)
        send_block(k, v, slots, s, T.ld(starts, (source + 1,)) - T.ld(starts, (source,)), after, MOVERS, MR, D)
        T.st(arrived, base + s + 1, (p,), rank=after, order=T.release)
        if s >= 1 and s <= n - 3:
            free.notify(to=before, slot=p * (workers + 1) + workers)


def attend_block(
    query: T.Tile, best: T.Tile, norm: T.Tile, acc: T.Tile, k: T.Shared, v: T.Shared, key_at: T.Tile,
    value_at: T.Tile, count: T.Tile, shift: T.Tile, scale: T.Tile, BK: int, CAUSAL: bool,
) -> tuple[T.Tile, T.Tile, T.Tile]:  # fmt: skip
    """The sums of BQ queries, and `count` keys more: at key_at of k, with values at value_at of v.

    With CAUSAL query i sees key j for j <= i + shift.
    """
    BQ, D = query.shape
    stop = count
    if CAUSAL:
        stop = T.clamp(shift + BQ, 0, count)
    for j in T.range(T.cdiv(stop, BK)):
        at = j * BK + T.iota(BK)
        key = T.reshape(k.load((key_at, j, 0), (1, BK, D)), (BK, D))
        value = T.reshape(v.load((value_at, j, 0), (1, BK, D)), (BK, D))
        # Beyond the block lies what an earlier one left, or nothing ever: 0 · NaN is NaN.
        value = T.where((at < count)[:, None], value, T.zeros((BK, D), value.dtype))
        seen = T.broadcast((at < count)[None, :], (BQ, BK))
        if CAUSAL:
            seen = seen & (at[None, :] <= (T.iota(BQ) + shift)[:, None])
        score = T.where(seen, T.mma(query, T.transpose(key)) * scale, float("-inf"))
        peak = T.maximum(best, T.max(score, axis=1, keepdims=True))
        base = T.where(peak == float("-inf"), 0.0, peak)  # no key seen yet: -inf - -inf is NaN
        weight = T.exp(score - base)
        kept = T.exp(best - base)
        norm = norm * kept + T.sum(weight, axis=1, keepdims=True)
        acc = T.mma(weight.astype(value.dtype), value, acc * kept)
        best = peak
    return best, norm, acc


@kernel
def ring_attend(
    o: T.Exclusive, q: T.Shared, k: T.Shared, v: T.Shared, hello: T.Mailbox, slots: T.Peer, sums: T.Peer,
    arrived: T.Peer, free: T.Signal, turn: T.Peer, starts: T.Shared, scale: T.f32, agreed: T.i64,
    BK: T.Const[int], CAUSAL: T.Const[bool], MOVERS: T.Const[int], MR: T.Const[int],
) -> None:  # fmt: skip
    """o[h] = softmax(scale · q[h] K[g]^T) V[g] for the group g of head h, K and V those of all ranks.

    Between steps a tile's weighted sum of values, its norm and its greatest score are in `sums` [heads, rows, 2 D]:
    the sum, then the score, then the norm in all that is left. No program but its owner touches them.
    """
    p = T.program_id(0)
    me, n = slots.rank, slots.num_ranks
    workers = T.num_programs(0) - MOVERS
    turns = T.ld(turn.local, (p,))
    base = turns * n
    BQ, D = o.tile_shape[1], o.tile_shape[2]
    groups = k.shape[0]
    if p < MOVERS:
        go_round(k, v, hello, slots, arrived, free, starts, base, agreed, MOVERS, MR, D)
    else:
        last = n - 1
        if CAUSAL:
            last = me  # what comes after this rank's own is later than all of its queries
        for s in T.range(n):
            source = (me + n - s) % n
            first = T.ld(starts, (source,))
            count = T.ld(starts, (source + 1,)) - first
            if s <= last:
                if s > 0:
                    for m in T.range(MOVERS):
                        T.wait_at_least(arrived.local, base + s, (m,))
                slot = (s + 1) % 2 * 2 * groups
                for tile in o.tiles():
                    h, i, _ = tile.index
                    query = T.reshape(q.load((h, i, 0), (1, BQ, D)), (BQ, D))
                    g = h // (q.shape[0] // groups)
                    best = T.full((BQ, 1), float("-inf"), T.f32)
                    norm = T.zeros((BQ, 1), T.f32)
                    acc = T.zeros((BQ, D), T.f32)
                    if s > 0:
                        kept = T.reshape(sums.local.load((h, i, 0), (1, BQ, 2 * D)), (BQ, 2 * D))
                        acc = T.extract(kept, (0, 0), (BQ, D))
                        best = T.extract(kept, (0, D), (BQ, 1))
                        norm = T.extract(kept, (0, D + 1), (BQ, 1))
                    shift = T.ld(starts, (me,)) + i * BQ - first
                    if s == 0:
                        best, norm, acc = attend_block(
                            query, best, norm, acc, k, v, g, g, count, shift, scale, BK, CAUSAL
                        )
                    else:
                        best, norm, acc = attend_block(
                            query, best, norm, acc, slots.local, slots.local, slot + g, slot + groups + g, count,
                            shift, scale, BK, CAUSAL,
                        )  # fmt: skip
                    if s == last:
                        out = T.where(norm == 0.0, 0.0, acc / norm)
                        tile.store(T.reshape(out, (1, BQ, D)).astype(o.dtype))
                    else:
                        more = T.where((T.iota(D) == 0)[None, :], best, norm)
                        sums.local.store((h, i, 0), T.reshape(T.cat((acc, more), axis=1), (1, BQ, 2 * D)))
            if s >= 1 and s <= n - 3:
                for m in T.range(MOVERS):
                    free.notify(to=(me + n - 1) % n, slot=m * (workers + 1) + p - MOVERS)
    T.st(turn.local, turns + 1, (p,))
