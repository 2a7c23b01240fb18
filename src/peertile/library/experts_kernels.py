"""Dispatch of rows to experts and their combination, in the public language. `experts.py` checks and launches them.

Expert e is number e % L of rank e // L, for L experts on a rank. The choices of a rank's rows are cut into tiles, and
each program has some that follow each other. It counts their choices by expert; what the programs before it counted,
and the ranks before this one, says where its rows go in each expert, and no row moves twice. All programs move rows,
whatever the experts.

How memory that peers write is reused: no row is sent before every rank has told its counts in this call, so all ranks
have ended what they did before. The counts themselves have two places, which take turns from call to call: a rank that
is in call e knows that all others have begun call e - 1. Dispatch ends once everybody has sent this rank all of its
rows, combine, which meets the others first, once nobody reads this rank's rows any more.
"""

# ruff: noqa: PT009
# Kernels: tiles have operators in the kernel language, not in Python; `assert_` is one of its words.

from __future__ import annotations

import peertile.language as T
from peertile.kernel import kernel
from peertile.library.fused_kernels import DIFFERENT, meet

__all__ = ["combine", "dispatch"]

TOGETHER = 4
"""Rows that a program has under way at a time."""
RANK_AT = 40
"""The bit from which on the word of a choice's place is the rank; below it is the row there."""


def chosen(ids: T.Shared, t: T.Tile, BT: int, EP: int) -> T.Tile:
    """Of tile t of the choices and each expert: 1 where the choice is that expert's, [BT, EP]."""
    inside = t * BT + T.iota(BT) < ids.shape[0]
    which = T.where(inside, ids.load((t,), (BT,)).astype(T.i32), T.i32(-1))
    return T.where(which[:, None] == T.iota(EP)[None, :], T.i32(1), T.i32(0))


def share(tiles: T.Tile, p: T.Tile, P: T.Tile) -> tuple[T.Tile, T.Tile]:
    """The tiles of program p, from the first on and before the last: neighbours, so that what lies before a tile of
    them is known from what lies before the first, and rows with several choices are fetched once."""
    return p * tiles // P, (p + 1) * tiles // P


def summed(counts: T.Shared, first: T.Tile, last: T.Tile, BS: int, EP: int) -> T.Tile:
    """The sum of rows `first` to `last` of counts [rows, EP]."""
    part = counts.slice((first, 0), (last - first, EP))
    total = T.zeros((EP,), T.i32)
    for s in T.range(part.num_tiles((BS, EP))[0]):
        total += T.sum(part.load((s, 0), (BS, EP)), axis=0)
    return total


def one(values: T.Tile, at: T.Tile, EP: int) -> T.Tile:
    """Element `at` of a tile [EP]."""
    return T.sum(T.where(T.iota(EP) == at, values, T.i32(0))).astype(T.i64)


def parted(place: T.Tile) -> tuple[T.Tile, T.Tile]:
    """The rank and the row of a place; rank 0 and row -1 for none. No division: it would take longer than a row."""
    return T.maximum(place, 0) >> RANK_AT, T.where(place >= 0, place & ((1 << RANK_AT) - 1), -1)


def goal(places: T.Peer, c: T.Tile, last: T.Tile) -> tuple[T.Tile, T.Tile]:
    """The rank that choice c goes to, and where there; -1 for nowhere."""
    rank, at = parted(T.ld(places.local, (T.minimum(c, last - 1),), order=T.weak))
    return rank, T.where(c < last, at, -1)


def fetched(x: T.Shared, c: T.Tile, last: T.Tile, j: T.Tile, K: int, BH: int) -> T.Tile:
    """Columns j of the row of choice c."""
    return x.load((T.minimum(c, last - 1) // K, j), (1, BH))


@kernel
def dispatch(
    received: T.Exclusive, x: T.Shared, ids: T.Shared, rows: T.Peer, counts: T.Peer, tallies: T.Peer,
    places: T.Peer, ready: T.Peer, turn: T.Peer, done: T.Signal, experts: T.i64, C: T.i64, sign: T.i64,
    L: T.Const[int], K: T.Const[int], KEEPS_ALL: T.Const[bool], BT: T.Const[int], EP: T.Const[int], BS: T.Const[int],
    BH: T.Const[int],
) -> None:  # fmt: skip
    """rows [L · C, width] of each rank get the rows of x of all ranks whose choices (K for each row) are its experts:
    C places for each, by rank and then by row. received [L, 1]: how many came, at most C.

    Choices beyond C places are left out, which with KEEPS_ALL is a failed assertion. tallies [programs, EP] and counts
    [2 ranks, EP] count by expert, of which there are up to EP.
    """
    p, P = T.program_id(0), T.num_programs(0)
    me, n = rows.rank, rows.num_ranks
    epoch = T.ld(turn.local, (p,), order=T.weak) + 1
    half = epoch % 2 * n
    last = ids.shape[0]
    first, stop = share(T.cdiv(last, BT), p, P)
    word = ((epoch << 24) + sign).astype(T.u64)  # `sign`, of 24 bits, stands for all that has to be equal
    tally = T.zeros((EP,), T.i32)
    for t in T.range(first, stop):
        some = ids.load((t,), (BT,)).astype(T.i64)  # what lies behind the last one is 0
        T.assert_(
            T.min(some) >= -1 and T.max(some) < experts, "dispatch: ids: expected numbers of experts, or -1 for none"
        )
        tally += T.sum(chosen(ids, t, BT, EP), axis=0)
    tallies.local.store((p, 0), T.reshape(tally, (1, EP)))
    T.sync_programs()
    for to in T.range(p, n, P):
        own = summed(tallies.local, T.i64(0), P, BS, EP)
        counts.at(to).store((half + me, 0), T.reshape(own, (1, EP)))
        T.st(ready, word, (epoch % 2, me), rank=to, order=T.release)
    base = summed(tallies.local, T.i64(0), p, BS, EP)
    for r in T.ranks():
        told = T.wait_at_least(ready.local, (epoch << 24).astype(T.u64), (epoch % 2, r))
        T.assert_(told == word, DIFFERENT)
    base += summed(counts.local, half, half + me, BS, EP)
    for t in T.range(first, stop):
        hits = chosen(ids, t, BT, EP)
        place = T.sum(hits * (T.cumsum(hits, axis=0) - 1 + base[None, :]), axis=1)
        kept = (T.sum(hits, axis=1) > 0) & (place.astype(T.i64) < C)
        if KEEPS_ALL:
            T.assert_(
                T.all(kept | (T.sum(hits, axis=1) == 0)),
                "dispatch: ids: expected different experts for the choices of a row",
            )
        number = T.sum(hits * T.iota(EP).astype(T.i32)[None, :], axis=1)
        expert = number.astype(T.i64)
        at = ((expert // L) << RANK_AT) + expert % L * C + place.astype(T.i64)
        places.local.store((t,), T.where(kept, at, T.i64(-1)))
        base += T.sum(hits, axis=0)
    for i in T.range(first * (BT // TOGETHER), T.minimum(stop * (BT // TOGETHER), T.cdiv(last, TOGETHER))):
        c = i * TOGETHER
        to0, at0 = goal(places, c, last)
        to1, at1 = goal(places, c + 1, last)
        to2, at2 = goal(places, c + 2, last)
        to3, at3 = goal(places, c + 3, last)
        y0, y1, y2, y3 = rows.at(to0), rows.at(to1), rows.at(to2), rows.at(to3)
        for j in T.range(T.cdiv(x.shape[1], BH)):
            r0 = fetched(x, c, last, j, K, BH)
            r1 = fetched(x, c + 1, last, j, K, BH)
            r2 = fetched(x, c + 2, last, j, K, BH)
            r3 = fetched(x, c + 3, last, j, K, BH)
            y0.gather(T.reshape(at0, (1,))).store((0, j), r0)
            y1.gather(T.reshape(at1, (1,))).store((0, j), r1)
            y2.gather(T.reshape(at2, (1,))).store((0, j), r2)
            y3.gather(T.reshape(at3, (1,))).store((0, j), r3)
    all_counts = summed(counts.local, half, half + n, BS, EP)
    for tile in received.tiles():
        total = one(all_counts, me * L + tile.index[0], EP)
        tile.store(T.full((1, 1), T.minimum(total, C), T.i64))
    done.notify()
    done.wait()
    T.st(turn.local, epoch, (p,), order=T.weak)


def word(words: T.Shared, c: T.Tile) -> T.Tile:
    """Word c, as a tile whose index is seen to be inside: each check in front of a word is one more thing that the row
    of a choice comes after, and the rows of the next ones with it. Two H200 fetch 311 GB/s so, and 300 with checks."""
    last = T.maximum(words.num_tiles((1,))[0] - 1, 0)
    return T.reshape(words.load((T.minimum(T.maximum(c, 0), last),), (1,)), ())


def lies(places: T.Peer, weights: T.Shared, c: T.Tile) -> tuple[T.Tile, T.Tile, T.Tile]:
    """The rank and the row of choice c, and its weight; row -1 and weight 0 for a choice without a place."""
    place = word(places.local, c)
    rank, at = parted(place)
    return rank, at, T.where(place >= 0, word(weights, c), 0.0)


def row_at(there: T.Shared, at: T.Tile, j: T.Tile, BH: int) -> T.Tile:
    """Columns j of a row."""
    return there.gather(T.reshape(at, (1,))).load((0, j), (1, BH)).astype(T.f32)


@kernel
def combine(
    out: T.Exclusive, y: T.Peer[T.read], weights: T.Shared, hello: T.Mailbox, places: T.Peer[T.read], done: T.Signal,
    agreed: T.i64, K: T.Const[int],
) -> None:  # fmt: skip
    """out[t] = the sum over the choices k of row t, in order, of weights[t K + k] times what its expert made of it.

    Rows are fetched from where they lie, up to four at a time: first is known where all of them lie, since a check, or
    a word that is looked up, would hold up the rows behind it. Choices without a place add nothing.
    """
    BH = out.tile_shape[1]
    meet(hello, agreed)
    for tile in out.tiles():
        t, j = tile.index
        c = t * K
        acc = T.zeros((1, BH), T.f32)
        for k in T.static_range(0, K - K % 4, 4):
            to0, at0, w0 = lies(places, weights, c + k)
            to1, at1, w1 = lies(places, weights, c + k + 1)
            to2, at2, w2 = lies(places, weights, c + k + 2)
            to3, at3, w3 = lies(places, weights, c + k + 3)
            y0, y1, y2, y3 = y.at(to0), y.at(to1), y.at(to2), y.at(to3)
            r0, r1 = row_at(y0, at0, j, BH), row_at(y1, at1, j, BH)
            r2, r3 = row_at(y2, at2, j, BH), row_at(y3, at3, j, BH)
            acc = acc + r0 * w0 + r1 * w1 + r2 * w2 + r3 * w3
        for k in T.static_range(K - K % 4, K - K % 2, 2):
            to0, at0, w0 = lies(places, weights, c + k)
            to1, at1, w1 = lies(places, weights, c + k + 1)
            y0, y1 = y.at(to0), y.at(to1)
            r0, r1 = row_at(y0, at0, j, BH), row_at(y1, at1, j, BH)
            acc = acc + r0 * w0 + r1 * w1
        for k in T.static_range(K - K % 2, K):
            to0, at0, w0 = lies(places, weights, c + k)
            acc = acc + row_at(y.at(to0), at0, j, BH) * w0
        tile.store(acc.astype(out.dtype))
    done.notify()
    done.wait()
