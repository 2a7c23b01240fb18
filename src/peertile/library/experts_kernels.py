"""Dispatch of rows to experts and their combination, in the public language. `experts.py` checks and launches them.

Expert e is number e % L of rank e // L, for L experts on a rank. A rank's rows are cut into tiles, and each program has
some that follow each other. It counts their choices by expert; what the programs before it counted, and the ranks
before this one, says where its rows go in each expert. All programs move rows, whatever the experts.

A row goes to a rank once, into the place of its first choice there. What its other choices on that rank are comes as a
list, and the program there that the list is for copies the row, once the program here that wrote it has told that the
rows of its share have come: of eight experts a row, over two ranks, that leaves a quarter of the bytes to the link.

How memory that peers write is reused: no row, and no list, is sent before every rank has told its counts in this call,
so all ranks have ended what they did before. The counts themselves have two places, which take turns from call to call:
a rank that is in call e knows that all others have begun call e - 1. Dispatch ends once everybody has sent this rank
all of its rows, combine, which meets the others first, once nobody reads this rank's rows any more. combine_summed ends
once all sums have come; what it tells the others of its choices is read before those come, and how many rows it has
takes turns between two places.
"""

# ruff: noqa: PT009
# Kernels: tiles have operators in the kernel language, not in Python; `assert_` is one of its words.

from __future__ import annotations

import peertile.language as T
from peertile.kernel import kernel
from peertile.library.fused_kernels import DIFFERENT, meet

__all__ = ["combine", "combine_summed", "dispatch"]

TOGETHER = 4
"""Rows that a program has under way at a time."""
RANK_AT = 41
"""The bit from which on the word of a choice's place is the rank."""
FOLLOWS = 40
"""The bit that says of a place that its row is sent to its rank for an earlier choice; below it is the row there."""
FROM_AT = 32
"""The bit from which on the word of a copy is the row that is copied; below it is the row that it becomes."""
TOLD = 32
"""Pieces that are told to the other ranks together."""
COUNT_BITS = 32
"""Of a word that tells a call and how many pieces were sent in it."""
LISTED = 64
"""Choices that are looked at together for what their rank has to copy."""


def numbers(ids: T.Shared, t: T.Tile, BR: int, K: int, KP: int) -> T.Tile:
    """The experts that the rows of tile t chose, [BR · KP], K for each row; -1 for none."""
    inside = (t * BR + T.iota(BR) < ids.shape[0])[:, None] & (T.iota(KP) < K)[None, :]
    return T.reshape(T.where(inside, ids.load((t, 0), (BR, KP)).astype(T.i32), T.i32(-1)), (BR * KP,))


def chosen(ids: T.Shared, t: T.Tile, BR: int, K: int, KP: int, EP: int) -> T.Tile:
    """Of the choices of tile t and each expert: 1 where the choice is that expert's, [BR · KP, EP]."""
    return T.where(numbers(ids, t, BR, K, KP)[:, None] == T.iota(EP)[None, :], T.i32(1), T.i32(0))


def share(tiles: T.Tile, p: T.Tile, P: T.Tile) -> tuple[T.Tile, T.Tile]:
    """The tiles of program p, from the first on and before the last: neighbours, so that what lies before a tile of
    them is known from what lies before the first."""
    return p * tiles // P, (p + 1) * tiles // P


def counted(counts: T.Shared, s: T.Tile, BS: int, EP: int) -> T.Tile:
    """Tile s of counts, [BS, EP]; 0 where there is none."""
    last = T.maximum(counts.num_tiles((BS, EP))[0] - 1, 0)
    return T.where(s <= last, counts.load((T.minimum(s, last), 0), (BS, EP)), T.i32(0))


def summed(counts: T.Shared, first: T.Tile, last: T.Tile, BS: int, EP: int) -> T.Tile:
    """The sum of rows `first` to `last` of counts [rows, EP]: four tiles at a time, which come in one trip."""
    part = counts.slice((first, 0), (last - first, EP))
    total = T.zeros((EP,), T.i32)
    for s in T.range(0, part.num_tiles((BS, EP))[0], 4):
        c0, c1 = counted(part, s, BS, EP), counted(part, s + 1, BS, EP)
        c2, c3 = counted(part, s + 2, BS, EP), counted(part, s + 3, BS, EP)
        total += T.sum(c0 + c1 + (c2 + c3), axis=0)
    return total


def one(values: T.Tile, at: T.Tile, EP: int) -> T.Tile:
    """Element `at` of a tile [EP]."""
    return T.sum(T.where(T.iota(EP) == at, values, T.i32(0))).astype(T.i64)


def parted(place: T.Tile) -> tuple[T.Tile, T.Tile]:
    """The rank and the row of a place; rank 0 and row -1 for none. No division: it would take longer than a row."""
    return T.maximum(place, 0) >> RANK_AT, T.where(place >= 0, place & ((1 << FOLLOWS) - 1), -1)


def follows(place: T.Tile) -> T.Tile:
    """Whether the row of a place is sent to its rank for an earlier choice, and copied there."""
    return (place >= 0) & ((place >> FOLLOWS & 1) == 1)


def word(words: T.Shared, c: T.Tile) -> T.Tile:
    """Word c, as a tile whose index is seen to be inside: each check in front of a word is one more thing that the row
    of a choice comes after, and the rows of the next ones with it. Two H200 fetch 311 GB/s so, and 300 with checks."""
    last = T.maximum(words.num_tiles((1,))[0] - 1, 0)
    return T.reshape(words.load((T.minimum(T.maximum(c, 0), last),), (1,)), ())


def sent(places: T.Shared, t: T.Tile, k: T.Tile, last: T.Tile, K: int, KP: int) -> T.Tile:
    """The place that row t is sent to for choice k; -1 for a row from `last` on, and for what its rank copies."""
    place = word(places, T.minimum(t, last - 1) * KP + T.minimum(k, K - 1))
    return T.where((t < last) & ~follows(place), place, -1)


def row_of(x: T.Shared, t: T.Tile, j: T.Tile, BH: int) -> T.Tile:
    """Columns j of row t; 0 for a row that there is not."""
    return x.gather(T.reshape(t, (1,))).load((0, j), (1, BH))


def put_row(rows: T.Peer, place: T.Tile, j: T.Tile, piece: T.Tile) -> None:
    """Columns j of the row at a place."""
    rank, at = parted(place)
    rows.at(rank).gather(T.reshape(at, (1,))).store((0, j), piece)


def copied(words: T.Shared, c: T.Tile, last: T.Tile) -> tuple[T.Tile, T.Tile]:
    """The rows from which and to which copy c goes; -1 from `last` on."""
    both = word(words, T.minimum(c, last - 1))
    return T.where(c < last, both >> FROM_AT, -1), T.where(c < last, both & ((1 << FROM_AT) - 1), -1)


def to_row(rows: T.Shared, at: T.Tile, j: T.Tile, piece: T.Tile) -> None:
    """Columns j of row `at`, which is -1 for none."""
    rows.gather(T.reshape(at, (1,))).store((0, j), piece)


@kernel
def dispatch(
    received: T.Exclusive, x: T.Shared, ids: T.Shared, rows: T.Peer, counts: T.Peer, tallies: T.Peer,
    places: T.Peer, sources: T.Peer, copies: T.Peer, copied_rows: T.Peer, ready: T.Peer, turn: T.Peer, done: T.Signal,
    experts: T.i64, C: T.i64, sign: T.i64, most: T.i64,
    L: T.Const[int], K: T.Const[int], KEEPS_ALL: T.Const[bool], BR: T.Const[int], KP: T.Const[int], EP: T.Const[int],
    BS: T.Const[int], BH: T.Const[int],
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
    tokens = x.shape[0]
    first, stop = share(T.cdiv(tokens, BR), p, P)
    word_of_all = ((epoch << 24) + sign).astype(T.u64)  # `sign`, of 24 bits, stands for all that has to be equal
    tally = T.zeros((EP,), T.i32)
    for t in T.range(first, stop):
        some = ids.load((t, 0), (BR, KP)).astype(T.i64)  # what lies outside is 0
        T.assert_(
            T.min(some) >= -1 and T.max(some) < experts, "dispatch: ids: expected numbers of experts, or -1 for none"
        )
        tally += T.sum(chosen(ids, t, BR, K, KP, EP), axis=0)
    tallies.local.store((p, 0), T.reshape(tally, (1, EP)))
    T.sync_programs()
    for to in T.range(p, n, P):
        own = summed(tallies.local, T.i64(0), P, BS, EP)
        counts.at(to).store((half + me, 0), T.reshape(own, (1, EP)))
        T.st(ready, word_of_all, (epoch % 2, me), rank=to, order=T.release)
    base = summed(tallies.local, T.i64(0), p, BS, EP)
    for r in T.ranks():
        told = T.wait_at_least(ready.local, (epoch << 24).astype(T.u64), (epoch % 2, r))
        T.assert_(told == word_of_all, DIFFERENT)
    base += summed(counts.local, half, half + me, BS, EP)
    for t in T.range(first, stop):
        hits = chosen(ids, t, BR, K, KP, EP)
        place = T.sum(hits * (T.cumsum(hits, axis=0) - 1 + base[None, :]), axis=1)
        kept = (T.sum(hits, axis=1) > 0) & (place.astype(T.i64) < C)
        if KEEPS_ALL:
            T.assert_(
                T.all(kept | (T.sum(hits, axis=1) == 0)),
                "dispatch: ids: expected different experts for the choices of a row",
            )
        number = T.sum(hits * T.iota(EP).astype(T.i32)[None, :], axis=1)
        expert = number.astype(T.i64)
        base += T.sum(hits, axis=0)
        goes = T.reshape(T.where(kept, expert // L, T.i64(-1)), (BR, KP))
        at = T.reshape(expert % L * C + place.astype(T.i64), (BR, KP))
        k = T.iota(KP)
        earliest = T.min(T.where(goes[:, :, None] == goes[:, None, :], k[None, None, :], T.i64(KP)), axis=2)
        source = T.sum(T.where(earliest[:, :, None] == k[None, None, :], at[:, None, :], T.i64(0)), axis=2)
        later = (goes >= 0) & (goes != me) & (earliest < k[None, :])
        words = T.where(goes >= 0, (goes << RANK_AT) + at, T.i64(-1)) + T.where(later, T.i64(1 << FOLLOWS), T.i64(0))
        places.local.store((t,), T.reshape(words, (BR * KP,)))
        sources.local.store((t,), T.reshape(source, (BR * KP,)))
    start, last = first * BR, T.minimum(stop * BR, tokens)
    for i in T.range(T.cdiv(last - start, TOGETHER)):
        t = start + i * TOGETHER
        for j in T.range(T.cdiv(x.shape[1], BH)):
            r0, r1 = row_of(x, t, j, BH), row_of(x, t + 1, j, BH)
            r2, r3 = row_of(x, t + 2, j, BH), row_of(x, t + 3, j, BH)
            p0, p1 = sent(places.local, t, T.i64(0), last, K, KP), sent(places.local, t + 1, T.i64(0), last, K, KP)
            p2, p3 = sent(places.local, t + 2, T.i64(0), last, K, KP), sent(places.local, t + 3, T.i64(0), last, K, KP)
            for k in T.range(K):
                n0, n1 = sent(places.local, t, k + 1, last, K, KP), sent(places.local, t + 1, k + 1, last, K, KP)
                n2, n3 = sent(places.local, t + 2, k + 1, last, K, KP), sent(places.local, t + 3, k + 1, last, K, KP)
                put_row(rows, p0, j, r0)
                put_row(rows, p1, j, r1)
                put_row(rows, p2, j, r2)
                put_row(rows, p3, j, r3)
                p0, p1, p2, p3 = n0, n1, n2, n3
    count = T.maximum(last - start, 0) * KP
    own_places = places.local.slice((start * KP,), (count,))
    own_sources = sources.local.slice((start * KP,), (count,))
    for r in T.peers():
        listed = copies.at(r).slice(((me * P + p) * most,), (most,))
        many = T.i64(0)
        for s in T.range(own_places.num_tiles((LISTED,))[0]):
            place = own_places.load((s,), (LISTED,))
            rank, at = parted(place)
            mine = follows(place) & (rank == r)
            at_list = T.where(mine, many + T.cumsum(T.where(mine, T.i64(1), T.i64(0))) - 1, T.i64(-1))
            listed.gather(at_list).store((0,), (own_sources.load((s,), (LISTED,)) << FROM_AT) + at)
            many += T.sum(T.where(mine, T.i64(1), T.i64(0)))
        T.st(copied_rows, many, (me, p), rank=r, order=T.weak)
    all_counts = summed(counts.local, half, half + n, BS, EP)
    for tile in received.tiles():
        total = one(all_counts, me * L + tile.index[0], EP)
        tile.store(T.full((1, 1), T.minimum(total, C), T.i64))
    done.notify()
    done.wait()
    for r in T.peers():
        many = T.ld(copied_rows.local, (r, p), order=T.weak)
        listed = copies.local.slice(((r * P + p) * most,), (most,))
        for i in T.range(T.cdiv(many, TOGETHER)):
            c = i * TOGETHER
            from0, to0 = copied(listed, c, many)
            from1, to1 = copied(listed, c + 1, many)
            from2, to2 = copied(listed, c + 2, many)
            from3, to3 = copied(listed, c + 3, many)
            for j in T.range(T.cdiv(x.shape[1], BH)):
                r0, r1 = row_of(rows.local, from0, j, BH), row_of(rows.local, from1, j, BH)
                r2, r3 = row_of(rows.local, from2, j, BH), row_of(rows.local, from3, j, BH)
                to_row(rows.local, to0, j, r0)
                to_row(rows.local, to1, j, r1)
                to_row(rows.local, to2, j, r2)
                to_row(rows.local, to3, j, r3)
    T.st(turn.local, epoch, (p,), order=T.weak)


def lies(places: T.Peer, weights: T.Shared, t: T.Tile, k: int, K: int, KP: int) -> tuple[T.Tile, T.Tile, T.Tile]:
    """The rank and the row of choice k of row t, and its weight; row -1 and weight 0 for one without a place."""
    place = word(places.local, t * KP + k)
    rank, at = parted(place)
    return rank, at, T.where(place >= 0, word(weights, t * K + k), 0.0)


def row_at(there: T.Shared, at: T.Tile, j: T.Tile, BH: int) -> T.Tile:
    """Columns j of a row."""
    return there.gather(T.reshape(at, (1,))).load((0, j), (1, BH)).astype(T.f32)


@kernel
def combine(
    out: T.Exclusive, y: T.Peer[T.read], weights: T.Shared, hello: T.Mailbox, places: T.Peer[T.read], done: T.Signal,
    agreed: T.i64, K: T.Const[int], KP: T.Const[int],
) -> None:  # fmt: skip
    """out[t] = the sum over the choices k of row t, in order, of weights[t K + k] times what its expert made of it.

    Rows are fetched from where they lie, up to four at a time: first is known where all of them lie, since a check, or
    a word that is looked up, would hold up the rows behind it. Choices without a place add nothing.
    """
    BH = out.tile_shape[1]
    meet(hello, agreed)
    for tile in out.tiles():
        t, j = tile.index
        acc = T.zeros((1, BH), T.f32)
        for k in T.static_range(0, K - K % 4, 4):
            to0, at0, w0 = lies(places, weights, t, k, K, KP)
            to1, at1, w1 = lies(places, weights, t, k + 1, K, KP)
            to2, at2, w2 = lies(places, weights, t, k + 2, K, KP)
            to3, at3, w3 = lies(places, weights, t, k + 3, K, KP)
            y0, y1, y2, y3 = y.at(to0), y.at(to1), y.at(to2), y.at(to3)
            r0, r1 = row_at(y0, at0, j, BH), row_at(y1, at1, j, BH)
            r2, r3 = row_at(y2, at2, j, BH), row_at(y3, at3, j, BH)
            acc = acc + r0 * w0 + r1 * w1 + r2 * w2 + r3 * w3
        for k in T.static_range(K - K % 4, K - K % 2, 2):
            to0, at0, w0 = lies(places, weights, t, k, K, KP)
            to1, at1, w1 = lies(places, weights, t, k + 1, K, KP)
            y0, y1 = y.at(to0), y.at(to1)
            r0, r1 = row_at(y0, at0, j, BH), row_at(y1, at1, j, BH)
            acc = acc + r0 * w0 + r1 * w1
        for k in T.static_range(K - K % 2, K):
            to0, at0, w0 = lies(places, weights, t, k, K, KP)
            acc = acc + row_at(y.at(to0), at0, j, BH) * w0
        tile.store(acc.astype(out.dtype))
    done.notify()
    done.wait()


def added(
    y: T.Peer, given: T.Shared, factors: T.Shared, c: T.Tile, j: T.Tile, BH: int, K: int
) -> tuple[T.Tile, T.Tile]:
    """Columns j of what experts here made of a row whose words begin at c, added; and -1 if they made nothing."""
    acc = T.zeros((1, BH), T.f32)
    some = T.i64(-1)
    for g in T.range(0, K - K % 4, 4):
        at0, at1 = word(given, c + g), word(given, c + g + 1)
        at2, at3 = word(given, c + g + 2), word(given, c + g + 3)
        w0, w1, w2, w3 = (
            word(factors, c + g),
            word(factors, c + g + 1),
            word(factors, c + g + 2),
            word(factors, c + g + 3),
        )
        r0, r1, r2, r3 = (
            row_at(y.local, at0, j, BH),
            row_at(y.local, at1, j, BH),
            row_at(y.local, at2, j, BH),
            row_at(y.local, at3, j, BH),
        )
        acc = acc + r0 * w0 + r1 * w1 + r2 * w2 + r3 * w3
        some = T.maximum(T.maximum(some, T.maximum(at0, at1)), T.maximum(at2, at3))
    for k in T.static_range(K - K % 4, K - K % 2, 2):
        at0, at1, w0, w1 = word(given, c + k), word(given, c + k + 1), word(factors, c + k), word(factors, c + k + 1)
        r0, r1 = row_at(y.local, at0, j, BH), row_at(y.local, at1, j, BH)
        acc = acc + r0 * w0 + r1 * w1
        some = T.maximum(some, T.maximum(at0, at1))
    for k in T.static_range(K - K % 2, K):
        at0, w0 = word(given, c + k), word(factors, c + k)
        acc = acc + row_at(y.local, at0, j, BH) * w0
        some = T.maximum(some, at0)
    return acc, some


def send_sum(
    y: T.Peer, given: T.Peer, factors: T.Peer, lengths: T.Peer, parts: T.Peer, n: T.Tile, half: T.Tile, most: T.Tile,
    rows: T.Tile, BH: int, K: int, KP: int, ACROSS: int,
) -> None:  # fmt: skip
    """Piece n of this program, of each other rank that has so many."""
    p, P = T.program_id(0), T.num_programs(0)
    t, j = (p + n * P) // ACROSS, (p + n * P) % ACROSS
    for r in T.peers():
        if n < T.ld(lengths.local, (half + r, p), order=T.weak):
            acc, some = added(y, given.local, factors.local, ((r * P + p) * most + n) * KP, j, BH, K)
            to_row(parts.at(r), T.where(some >= 0, y.rank * rows + t, T.i64(-1)), j, acc.astype(parts.dtype))


def tell_sent(arrived: T.Peer, epoch: T.Tile, sent: T.Tile) -> None:
    """Tells the others how many pieces this program has sent them."""
    for r in T.peers():
        T.st(arrived, (epoch << COUNT_BITS) + sent, (arrived.rank, T.program_id(0)), rank=r, order=T.release)


@kernel
def combine_summed(
    out: T.Exclusive, y: T.Peer[T.read], weights: T.Shared, hello: T.Mailbox, places: T.Peer[T.read], given: T.Peer,
    factors: T.Peer, comes: T.Peer, lengths: T.Peer, parts: T.Peer, arrived: T.Peer, calls: T.Peer, agreed: T.i64,
    most: T.i64, rows: T.i64, ahead: T.i64, K: T.Const[int], KP: T.Const[int], ACROSS: T.Const[int],
) -> None:  # fmt: skip
    """As combine, but each rank adds what its own experts made of a row, and sends the sum.

    A piece of a row, of whatever rank, is the business of one program of each rank, the same everywhere. In turn n it
    sends piece n + `ahead` of the others and folds its own piece n, which the others have sent in turn n - `ahead` or
    before: so nobody waits for who waits for him. What the programs look up is told to them in front of all that, since
    what is told in between would come once in each turn.
    """
    BH = out.tile_shape[1]
    p, P = T.program_id(0), T.num_programs(0)
    me = y.rank
    epoch = T.ld(calls.local, (p,), order=T.weak) + 1
    half = epoch % 2 * y.num_ranks
    tokens = out.shape[0]
    own = T.maximum(T.cdiv(tokens * ACROSS - p, P), 0)
    placed = places.local.slice((0,), (tokens * KP,)).reshape((tokens, KP))
    for b in T.range(T.cdiv(own, TOLD)):
        n = b * TOLD + T.iota(TOLD)
        t = T.where(n < own, (p + n * P) // ACROSS, T.i64(-1))
        place = T.where((n < own)[:, None], placed.gather(t).load((0, 0), (TOLD, KP)), T.i64(-1))
        weight = weights.gather(t).load((0, 0), (TOLD, KP))
        rank, at = parted(place)
        for r in T.ranks():
            here = T.where(rank == r, at, T.i64(-1))
            first = (me * P + p) * most * KP
            given.at(r).slice((first,), (most * KP,)).store((b,), T.reshape(here, (TOLD * KP,)))
            factors.at(r).slice((first,), (most * KP,)).store(
                (b,), T.reshape(T.where(here >= 0, weight, 0.0), (TOLD * KP,))
            )
            comes.local.slice(((r * P + p) * most,), (most,)).store((b,), T.max(here, axis=1))
    for r in T.peers():
        T.st(lengths, own, (half + me, p), rank=r, order=T.weak)
    meet(hello, agreed)
    longest = T.i64(0)
    for r in T.peers():
        longest = T.maximum(longest, T.ld(lengths.local, (half + r, p), order=T.weak))
    s = T.maximum(T.minimum(ahead, longest), longest - own)
    for n in T.range(s):
        send_sum(y, given, factors, lengths, parts, n, half, most, rows, BH, K, KP, ACROSS)
        tell_sent(arrived, epoch, n + 1)
    n = T.i64(0)
    for tile in out.tiles():
        if s < longest:
            send_sum(y, given, factors, lengths, parts, s, half, most, rows, BH, K, KP, ACROSS)
        acc, _ = added(y, given.local, factors.local, ((me * P + p) * most + n) * KP, (p + n * P) % ACROSS, BH, K)
        if s < longest:
            s += 1
            tell_sent(arrived, epoch, s)
        for r in T.peers():
            at = word(comes.local, (r * P + p) * most + n)
            T.wait_at_least(arrived.local, (epoch << COUNT_BITS) + n + 1, (r, p))
            at = T.where(at >= 0, r * rows + (p + n * P) // ACROSS, T.i64(-1))
            acc = acc + row_at(parts.local, at, (p + n * P) % ACROSS, BH)
        tile.store(acc.astype(out.dtype))
        n += 1
    T.st(calls.local, epoch, (p,), order=T.weak)
