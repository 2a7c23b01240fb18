"""Dispatch of rows to experts and their combination, in the public language. `experts.py` checks and launches them.

Expert e is number e % L of rank e // L, for L experts on a rank. Program p of a rank sees to the experts whose number
is p modulo the number of programs, of all ranks: so what it does concerns program p of the others alone. A rank says
how many rows it has for each expert; with those numbers everybody knows where its rows begin, and no row moves twice.

How memory that peers write is reused: a call begins with `hello`, so every rank has ended what it did before, and
dispatch ends once everybody has sent this rank all of its rows, combine once nobody reads this rank's rows any more.
"""

# ruff: noqa: PT009
# Kernels: tiles have operators in the kernel language, not in Python; `assert_` is one of its words.

from __future__ import annotations

import peertile.language as T
from peertile.kernel import kernel
from peertile.library.fused_kernels import meet

__all__ = ["combine", "dispatch"]


def chosen(ids: T.Shared, t: T.Tile, expert: T.Tile, BT: int) -> tuple[T.Tile, T.Tile]:
    """Of tile t of the choices: their numbers, and which of them are for `expert`."""
    at = t * BT + T.iota(BT)
    return at, (ids.load((t,), (BT,)).astype(T.i64) == expert) & (at < ids.shape[0])


def check_choices(ids: T.Shared, experts: T.Tile, BT: int) -> None:
    """This program's tiles of the choices are numbers of experts, or -1. What lies behind them is 0."""
    for t in T.range(T.program_id(0), T.cdiv(ids.shape[0], BT), T.num_programs(0)):
        some = ids.load((t,), (BT,)).astype(T.i64)
        T.assert_(
            T.min(some) >= -1 and T.max(some) < experts, "dispatch: ids: expected numbers of experts, or -1 for none"
        )


def count_choices(ids: T.Shared, counts: T.Peer, number: T.Tile, L: int, BT: int) -> None:
    """Tells everybody how many choices of this rank are for expert `number` of each rank."""
    me = counts.rank
    for r in T.ranks():
        expert = r * L + number
        count = T.i64(0)
        for t in T.range(T.cdiv(ids.shape[0], BT)):
            _, hit = chosen(ids, t, expert, BT)
            count += T.sum(T.where(hit, 1, 0))
        for to in T.ranks():
            T.st(counts, count, (me, expert), rank=to)


def list_choices(
    ids: T.Shared, order: T.Peer, places: T.Peer, expert: T.Tile, start: T.Tile, base: T.Tile, C: T.Tile, BT: int
) -> T.Tile:
    """The choices for `expert`, in order, at order[start …]; where each goes, -1 for one too many, into places."""
    found = T.i64(0)
    for t in T.range(T.cdiv(ids.shape[0], BT)):
        at, hit = chosen(ids, t, expert, BT)
        one = T.where(hit, 1, 0)
        nth = found + T.cumsum(one) - 1
        order.local.gather(T.where(hit, start + nth, -1)).store((0,), at)
        places.local.gather(T.where(hit, at, -1)).store((0,), T.where(base + nth < C, base + nth, -1))
        found += T.sum(one)
    return found


@kernel
def dispatch(
    received: T.Exclusive, x: T.Shared, ids: T.Shared, hello: T.Mailbox, rows: T.Peer, counts: T.Peer, order: T.Peer,
    places: T.Peer, ready: T.Signal, done: T.Signal, experts: T.i64, C: T.i64, agreed: T.i64, L: T.Const[int],
    K: T.Const[int], KEEPS_ALL: T.Const[bool], BT: T.Const[int], BR: T.Const[int], BH: T.Const[int],
) -> None:  # fmt: skip
    """rows [L · C, width] of each rank get the rows of x of all ranks whose choices (K for each row) are its experts:
    C places for each, by rank and then by row. received [L, 1]: how many came, at most C.

    Choices beyond C places are left out, which with KEEPS_ALL is a failed assertion.
    """
    me, n = rows.rank, rows.num_ranks
    width = x.shape[1]
    most = order.shape[0] // T.num_programs(0)
    start = T.program_id(0) * most
    check_choices(ids, experts, BT)
    meet(hello, agreed)
    for tile in received.tiles():
        count_choices(ids, counts, tile.index[0], L, BT)
    ready.notify()
    ready.wait()
    for tile in received.tiles():
        number = tile.index[0]
        for d in T.range(n):
            to = (me + d) % n
            expert = to * L + number
            base = T.i64(0)
            for r in T.range(me):
                base += T.ld(counts.local, (r, expert))
            found = list_choices(ids, order, places, expert, start, base, C, BT)
            kept = T.clamp(C - base, 0, found)
            if KEEPS_ALL:
                T.assert_(kept == found, "dispatch: ids: expected different experts for the choices of a row")
            if kept > 0:
                there = rows.at(to).slice((number * C + base, 0), (kept, width))
                mine = order.local.slice((start,), (kept,))
                for i in T.range(T.cdiv(kept, BR)):
                    inside = i * BR + T.iota(BR) < kept
                    picked = x.gather(T.where(inside, mine.load((i,), (BR,)) // K, -1))
                    for j in T.range(T.cdiv(width, BH)):
                        there.store((i, j), picked.load((0, j), (BR, BH)))
        total = T.i64(0)
        for r in T.ranks():
            total += T.ld(counts.local, (r, me * L + number))
        tile.store(T.full((1, 1), T.minimum(total, C), T.i64))
    done.notify()
    done.wait()


@kernel
def combine(
    out: T.Exclusive, y: T.Peer[T.read], ids: T.Shared, weights: T.Shared, hello: T.Mailbox, places: T.Peer[T.read],
    done: T.Signal, C: T.i64, agreed: T.i64, L: T.Const[int], K: T.Const[int],
) -> None:  # fmt: skip
    """out[t] = the sum over the choices k of row t, in order, of weights[t K + k] times what its expert made of it.

    Rows are fetched from where they lie. Choices without a place add nothing.
    """
    BH = out.tile_shape[1]
    meet(hello, agreed)
    for tile in out.tiles():
        t, j = tile.index
        acc = T.zeros((1, BH), T.f32)
        for k in T.static_range(K):
            expert = T.ld(ids, (t * K + k,)).astype(T.i64)
            if expert >= 0:
                place = T.ld(places.local, (t * K + k,))
                if place >= 0:
                    row = y.at(expert // L).load((expert % L * C + place, j), (1, BH)).astype(T.f32)
                    acc += row * T.ld(weights, (t * K + k,))
        tile.store(acc.astype(out.dtype))
    done.notify()
    done.wait()
