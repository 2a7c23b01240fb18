"""The kernels of the collectives, in the public language. Who chooses among them is in collectives.py.

Every message is seen as a matrix: (1, count), or (ranks, count per rank). Tiles are (1, B). What program p of
a rank does concerns program p of the other ranks alone, so any number of programs is right as long as it is
the same on all ranks.

Every kernel first meets its peers in the mailbox `hello`. That exchange orders the data like any other, and
its signature (kernel, grid, constants, extents) makes ranks that called different collectives fail at once.

How memory that peers read is reused, the invariants:

- `stage` (one exchange a turn, two slots): a rank writes the slot of turn t + 2 after it has heard everybody in
  turn t + 1, and a peer spoke in turn t + 1 after it had read turn t. Turns count in device memory (`turn`),
  over all launches: a relaunch or a replayed graph goes on where the last one ended.
- `inbox` (written by peers, read by its owner, answered by `done`): whoever ended a call has `done` for all of
  it, so every inbox is free at the beginning of a call. Within a call a slot comes back after 4 chunks, and
  `done` of a chunk is waited for 2 chunks later.
- `shelf` (written by its owner, read by peers): written only after the first exchange of a call; by then every
  peer has ended its last call. Within a call: as `inbox`, or acknowledged, or (pipelined) by its distance: who
  has heard that everybody shows chunk k knows that everybody is done with chunk k - 2, and writes chunk k + 2.
- A symmetric tensor of the user is read by peers between two exchanges of one call.
"""

# ruff: noqa: SIM113, PT009
# Kernels: tiles have operators in the kernel language, not in Python, and it has no enumerate.

from __future__ import annotations

import peertile.language as T
from peertile.kernel import kernel
from peertile.library.reductions import finish, fold

__all__ = ["FEW_RANKS", "FLAGGED_TURN", "SLOTS", "STAGE_TURN"]

SLOTS = 4
"""Chunks in flight of the pipelined kernels."""
FEW_RANKS = 4
"""Up to here the loop over the ranks is unrolled, so that a sum is one pass over memory. The constant `N` of the
kernels is the number of ranks up to here, and one more for all that are larger: one kernel serves those."""
STAGE_TURN, FLAGGED_TURN = 0, 1
"""Rows of `turn`."""


def meet(hello: T.Mailbox) -> None:
    """Every rank is here, and called the same."""
    hello.post(T.zeros((1,), T.u64))
    for _ in hello.collect():
        pass


def combine(x: T.Peer, row: T.Tile, column: T.Tile, B: int, N: int, OP: object, ACC: T.DType) -> T.Tile:
    """The tiles at (row, column) of all ranks as one, in rank order: the same bits wherever it is computed."""
    acc = x.at(0).load((row, column), (1, B)).astype(ACC)
    if N <= FEW_RANKS:
        for r in T.static_range(1, N):
            acc = fold(acc, x.at(r).load((row, column), (1, B)).astype(ACC), OP)
    else:
        for r in T.range(1, x.num_ranks):
            acc = fold(acc, x.at(r).load((row, column), (1, B)).astype(ACC), OP)
    return finish(acc, x.num_ranks, OP)


def share(tiles: T.Tile) -> T.Tile:
    """How many of `tiles` are this program's: p, p + P, p + 2 P, …"""
    return T.maximum(T.cdiv(tiles - T.program_id(0), T.num_programs(0)), 0)


@kernel
def barrier(hello: T.Mailbox) -> None:
    """Nobody leaves before everybody has come."""
    meet(hello)


# ---------------------------------------------------------------- all-reduce through staging


@kernel
def all_reduce_one_shot(
    out: T.Exclusive, x: T.Shared, hello: T.Mailbox, stage: T.Peer, turn: T.Peer, rows: T.i64,
    N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """Everybody stages all of x, then reads all of everybody's. One exchange. `rows`: tiles of a program's stage."""
    p = T.program_id(0)
    e = T.ld(turn.local, (STAGE_TURN, p))
    row = p * rows + e % 2 * (rows // 2)
    k = 0
    for tile in out.tiles():
        stage.local.store((row + k, 0), x.load_like(tile))
        k += 1
    if out.shape[1] >= 0:  # always, and so the count is part of the signature
        meet(hello)
    k = 0
    for tile in out.tiles():
        tile.store(combine(stage, row + k, 0, out.tile_shape[1], N, OP, ACC).astype(out.dtype))
        k += 1
    T.st(turn.local, e + 1, (STAGE_TURN, p))


@kernel
def all_reduce_one_shot_in_place(
    out: T.Exclusive, hello: T.Mailbox, stage: T.Peer, turn: T.Peer, rows: T.i64,
    N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """As all_reduce_one_shot, of `out` itself."""
    p = T.program_id(0)
    e = T.ld(turn.local, (STAGE_TURN, p))
    row = p * rows + e % 2 * (rows // 2)
    k = 0
    for tile in out.tiles():
        stage.local.store((row + k, 0), tile.load())
        k += 1
    if out.shape[1] >= 0:
        meet(hello)
    k = 0
    for tile in out.tiles():
        tile.store(combine(stage, row + k, 0, out.tile_shape[1], N, OP, ACC).astype(out.dtype))
        k += 1
    T.st(turn.local, e + 1, (STAGE_TURN, p))


def push(x: T.Shared, inbox: T.Peer, first: T.Tile, c: T.Tile, mine: T.Tile, B: int, N: int) -> None:
    """Chunk c: each owner's tile of x into that owner's inbox."""
    me, n = inbox.rank, inbox.num_ranks
    p, P = T.program_id(0), T.num_programs(0)
    row = first + c % SLOTS * n + me
    for j in T.peers():
        k = c * n + j
        if k < mine:
            inbox.at(j).store((row, 0), x.load((0, p + k * P), (1, B)))
    if N > 2:
        k = c * n + me
        if k < mine:
            inbox.local.store((row, 0), x.load((0, p + k * P), (1, B)))


def settle(
    x: T.Shared, inbox: T.Peer, shelf: T.Peer, first: T.Tile, place: T.Tile, c: T.Tile, mine: T.Tile,
    B: int, N: int, OP: object, ACC: T.DType,
) -> None:  # fmt: skip
    """Chunk c: my tile of it, folded in rank order, onto my shelf."""
    me, n = inbox.rank, inbox.num_ranks
    k = c * n + me
    row = first + c % SLOTS * n
    if k < mine:
        if N == 1:
            own = x.load((0, T.program_id(0) + k * T.num_programs(0)), (1, B)).astype(ACC)
            shelf.local.store((place + c % SLOTS, 0), finish(own, n, OP).astype(x.dtype))
        elif N == 2:  # both orders give the same bits, and one's own part need not go through memory
            own = x.load((0, T.program_id(0) + k * T.num_programs(0)), (1, B)).astype(ACC)
            other = inbox.local.load((row + 1 - me, 0), (1, B)).astype(ACC)
            shelf.local.store((place + c % SLOTS, 0), finish(fold(own, other, OP), n, OP).astype(x.dtype))
        else:
            acc = inbox.local.load((row, 0), (1, B)).astype(ACC)
            for r in T.range(1, n):
                acc = fold(acc, inbox.local.load((row + r, 0), (1, B)).astype(ACC), OP)
            shelf.local.store((place + c % SLOTS, 0), finish(acc, n, OP).astype(x.dtype))


@kernel
def all_reduce_two_shot(
    out: T.Exclusive, x: T.Shared, hello: T.Mailbox, ready: T.Signal, done: T.Signal, inbox: T.Peer, shelf: T.Peer,
    inbox_rows: T.i64, shelf_rows: T.i64, N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """Everybody reduces its share of each chunk and shows it to all; chunk c is pushed while c - 1 is reduced
    and c - 2 is read. A chunk is one tile for each rank."""
    B = out.tile_shape[1]
    n = inbox.num_ranks
    mine = share(out.num_tiles()[1])
    chunks = T.cdiv(mine, n)
    first, place = T.program_id(0) * inbox_rows, T.program_id(0) * shelf_rows
    push(x, inbox, first, T.i64(0), mine, B, N)
    if out.shape[1] >= 0:
        meet(hello)
    if chunks > 0:
        if chunks > 1:
            push(x, inbox, first, T.i64(1), mine, B, N)
            ready.notify()
        settle(x, inbox, shelf, first, place, T.i64(0), mine, B, N, OP, ACC)
        done.notify()
    k = 0
    for tile in out.tiles():
        c, j = k // n, k % n
        if j == 0:
            if c + 2 < chunks:
                push(x, inbox, first, c + 2, mine, B, N)
                ready.notify()
            if c + 1 < chunks:
                ready.wait()
                settle(x, inbox, shelf, first, place, c + 1, mine, B, N, OP, ACC)
                done.notify()
            done.wait()
        tile.store(shelf.at(j).load((place + c % SLOTS, 0), (1, B)))
        k += 1


@kernel
def all_reduce_two_shot_in_place(
    out: T.Exclusive, hello: T.Mailbox, done: T.Signal, inbox: T.Peer, shelf: T.Peer,
    inbox_rows: T.i64, shelf_rows: T.i64, N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """As all_reduce_two_shot, of `out` itself, all chunks at once: the host cuts it to fit inbox and shelf."""
    B = out.tile_shape[1]
    me, n = inbox.rank, inbox.num_ranks
    first, place = T.program_id(0) * inbox_rows, T.program_id(0) * shelf_rows
    k = 0
    for tile in out.tiles():
        inbox.at(k % n).store((first + k // n * n + me, 0), tile.load())
        k += 1
    if out.shape[1] >= 0:
        meet(hello)
    mine = share(out.num_tiles()[1])
    for c in T.range(T.cdiv(mine - me, n)):
        row = first + c * n
        acc = inbox.local.load((row, 0), (1, B)).astype(ACC)
        for r in T.range(1, n):
            acc = fold(acc, inbox.local.load((row + r, 0), (1, B)).astype(ACC), OP)
        shelf.local.store((place + c, 0), finish(acc, n, OP).astype(out.dtype))
    done.notify()
    done.wait()
    k = 0
    for tile in out.tiles():
        tile.store(shelf.at(k % n).load((place + k // n, 0), (1, B)))
        k += 1


# ---------------------------------------------------------------- all-reduce, pipelined


def show(x: T.Tile, shelf: T.Peer, row: T.Tile, around: T.Tile) -> None:
    """A tile onto my shelf; around the caches, if that is how it reaches the others faster (see staging.py)."""
    if around != 0:
        T.put(x, shelf, (row, 0), wait=False)
        T.quiet()
    else:
        shelf.local.store((row, 0), x)


def in_rank_order(mine: T.Tile, other: T.Tile, me: T.Tile, DT: T.DType) -> tuple[T.Tile, T.Tile]:
    """The values of rank 0 and of rank 1. The order decides which of two NaN is kept; a choice between the values
    would be compiled away, since it makes no other difference."""
    if DT is T.f32:
        bits = T.u32
    elif DT is T.f64:
        bits = T.u64
    else:
        return mine, other
    a, b = T.bitcast(mine, bits), T.bitcast(other, bits)
    flip = (a ^ b) & (T.i64(0) - me).astype(bits)
    return T.bitcast(a ^ flip, DT), T.bitcast(b ^ flip, DT)


def combine_shown(own: T.Tile, shelf: T.Peer, row: T.Tile, B: int, N: int, OP: object, ACC: T.DType) -> T.Tile:
    """What everybody shows in `row`, in rank order. Of two, one's own need not be read back."""
    if N == 2:
        other = shelf.at(1 - shelf.rank).load((row, 0), (1, B)).astype(ACC)
        first, second = in_rank_order(own.astype(ACC), other, shelf.rank, ACC)
        return finish(fold(first, second, OP), shelf.num_ranks, OP)
    return combine(shelf, row, 0, B, N, OP, ACC)


def fold_and_show(
    tile: T.Exclusive, x: T.Shared, shelf: T.Peer, row: T.Tile, place: T.Tile, at: T.Tile,
    B: int, N: int, OP: object, ACC: T.DType, AROUND: bool,
) -> None:  # fmt: skip
    """What everybody shows in `row` into `tile`, and tile `at` of x onto my shelf at `place`. Both stores are in one
    loop: while one waits for the other rank's cache, the other keeps memory busy."""
    total = combine_shown(x.load_like(tile), shelf, row, B, N, OP, ACC).astype(tile.dtype)
    ahead = x.load((0, at), (1, B))
    if AROUND:
        T.put(ahead, shelf, (place, 0), wait=False)
        tile.store(total)
        T.quiet()
    else:
        shelf.local.store((place, 0), ahead)
        tile.store(total)


@kernel
def all_reduce_pipelined(
    out: T.Exclusive, x: T.Shared, hello: T.Mailbox, ready: T.Signal, shelf: T.Peer, rows: T.i64, way: T.Shared,
    N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """As one-shot, tile by tile: in one pass over memory tile k of everybody is folded and tile k + 2 is shown, so that
    memory is read, exchanged and written all the time. Any count; the shelf holds SLOTS tiles. `way`: 0 through the
    caches."""
    p, P = T.program_id(0), T.num_programs(0)
    B = out.tile_shape[1]
    mine = share(out.num_tiles()[1])
    first = p * rows
    around = T.ld(way, (0,))
    if out.shape[1] >= 0:
        meet(hello)
    for s in T.range(T.minimum(mine, 2)):
        show(x.load((0, p + s * P), (1, B)), shelf, first + s, around)
        ready.notify()
    k = 0
    for tile in out.tiles():
        ready.wait()
        row = first + k % SLOTS
        place, at = first + (k + 2) % SLOTS, p + (k + 2) * P
        if k + 2 >= mine:
            tile.store(combine_shown(x.load_like(tile), shelf, row, B, N, OP, ACC).astype(out.dtype))
        elif around == 0:
            fold_and_show(tile, x, shelf, row, place, at, B, N, OP, ACC, False)
            ready.notify()
        else:
            fold_and_show(tile, x, shelf, row, place, at, B, N, OP, ACC, True)
            ready.notify()
        k += 1


@kernel
def all_reduce_pipelined_in_place(
    out: T.Exclusive, hello: T.Mailbox, ready: T.Signal, shelf: T.Peer, rows: T.i64, way: T.Shared,
    N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """As all_reduce_pipelined, of `out` itself, one tile after the other."""
    first = T.program_id(0) * rows
    around = T.ld(way, (0,))
    if out.shape[1] >= 0:
        meet(hello)
    k = 0
    for tile in out.tiles():
        row = first + k % SLOTS
        show(tile.load(), shelf, row, around)
        ready.notify()
        ready.wait()
        tile.store(combine_shown(tile.load(), shelf, row, out.tile_shape[1], N, OP, ACC).astype(out.dtype))
        k += 1


# ---------------------------------------------------------------- all-reduce, flagged


def flag_words(words: T.Peer, value: T.Tile, row: T.Tile, i: T.Tile, mark: T.Tile, BITS: T.DType) -> None:
    """Payload and flag in one indivisible store, to everybody."""
    bits = T.reshape(T.bitcast(value, BITS).astype(T.u64), ())
    for r in T.ranks():
        T.st(words, bits | mark, (row, i), rank=r, order=T.release)


def take_flagged(words: T.Peer, row: T.Tile, i: T.Tile, mark: T.Tile, BITS: T.DType, DT: T.DType) -> T.Tile:
    """Wait for a flagged word, check whose call it belongs to, and arm it again: its next writer writes after
    it has heard from here once more."""
    word = T.wait_ne(words.local, T.u64(0), (row, i))
    T.assert_(word >> 32 == mark >> 32, "a peer called all_reduce with another count, dtype or reduction")
    T.st(words.local, T.u64(0), (row, i))
    return T.bitcast((word & 0xFFFFFFFF).astype(BITS), DT)


def reduce_flagged(
    words: T.Peer, half: T.Tile, i: T.Tile, mark: T.Tile,
    OP: object, ACC: T.DType, BITS: T.DType, DT: T.DType,
) -> T.Tile:  # fmt: skip
    acc = take_flagged(words, half, i, mark, BITS, DT).astype(ACC)
    for r in T.range(1, words.num_ranks):
        acc = fold(acc, take_flagged(words, half + r, i, mark, BITS, DT).astype(ACC), OP)
    return T.full((1, 1), finish(acc, words.num_ranks, OP).astype(DT), DT)


@kernel
def all_reduce_flagged(
    out: T.Exclusive, x: T.Shared, words: T.Peer, turn: T.Peer, mark: T.u64,
    OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType], BITS: T.Const[T.DType],
) -> None:  # fmt: skip
    """No separate signal: each element travels with a flag. `words`: two turns of a row for each source."""
    e = T.ld(turn.local, (FLAGGED_TURN, 0))
    half = e % 2 * words.num_ranks
    for tile in out.tiles():
        flag_words(words, x.load_like(tile), half + words.rank, tile.index[1], mark, BITS)
    for tile in out.tiles():
        tile.store(reduce_flagged(words, half, tile.index[1], mark, OP, ACC, BITS, out.dtype))
    T.st(turn.local, e + 1, (FLAGGED_TURN, 0))


@kernel
def all_reduce_flagged_in_place(
    out: T.Exclusive, words: T.Peer, turn: T.Peer, mark: T.u64,
    OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType], BITS: T.Const[T.DType],
) -> None:  # fmt: skip
    """As all_reduce_flagged, of `out` itself."""
    e = T.ld(turn.local, (FLAGGED_TURN, 0))
    half = e % 2 * words.num_ranks
    for tile in out.tiles():
        flag_words(words, tile.load(), half + words.rank, tile.index[1], mark, BITS)
    for tile in out.tiles():
        tile.store(reduce_flagged(words, half, tile.index[1], mark, OP, ACC, BITS, out.dtype))
    T.st(turn.local, e + 1, (FLAGGED_TURN, 0))


# ---------------------------------------------------------------- all-reduce, ring


def go_round(shelf: T.Peer, tiles: T.Tile, hop: T.Signal, B: int, OP: object) -> None:
    """The ring over the first `tiles` rows of everybody's shelf: partial sums go round once, results once.

    Rank r ends up with segment r + 1 and takes the others from its predecessor. A segment is overwritten by
    its result only after the successor has folded it in, since the result comes out of that.
    """
    me, n = shelf.rank, shelf.num_ranks
    prev, after = (me + n - 1) % n, (me + 1) % n
    size = T.cdiv(tiles, n)
    if n > 1:
        hop.notify(to=after)
    for s in T.range(n - 1):
        q = (me + 2 * n - s - 1) % n
        hop.wait(prev)
        for t in T.range(q * size, T.minimum(q * size + size, tiles)):
            shelf.local.store((t, 0), fold(shelf.at(prev).load((t, 0), (1, B)), shelf.local.load((t, 0), (1, B)), OP))
        hop.notify(to=after)
    for s in T.range(n - 1):
        q = (me + n - s) % n
        hop.wait(prev)
        for t in T.range(q * size, T.minimum(q * size + size, tiles)):
            shelf.local.store((t, 0), shelf.at(prev).load((t, 0), (1, B)))
        if s < n - 2:
            hop.notify(to=after)


@kernel
def all_reduce_ring(
    out: T.Exclusive, x: T.Shared, hello: T.Mailbox, hop: T.Signal, shelf: T.Peer,
    OP: T.Const, DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """Each rank talks to its neighbours alone; every element is folded in the order of the ring. One program;
    the host cuts the message to fit the shelf."""
    if out.shape[1] >= 0:
        meet(hello)
    for tile in out.tiles():
        shelf.local.store((tile.index[1], 0), x.load_like(tile))
    go_round(shelf, out.num_tiles()[1], hop, out.tile_shape[1], OP)
    for tile in out.tiles():
        tile.store(finish(shelf.local.load((tile.index[1], 0), out.tile_shape), shelf.num_ranks, OP))


@kernel
def all_reduce_ring_in_place(
    out: T.Exclusive, hello: T.Mailbox, hop: T.Signal, shelf: T.Peer, OP: T.Const, DT: T.Const[T.DType]
) -> None:
    """As all_reduce_ring, of `out` itself."""
    if out.shape[1] >= 0:
        meet(hello)
    for tile in out.tiles():
        shelf.local.store((tile.index[1], 0), tile.load())
    go_round(shelf, out.num_tiles()[1], hop, out.tile_shape[1], OP)
    for tile in out.tiles():
        tile.store(finish(shelf.local.load((tile.index[1], 0), out.tile_shape), shelf.num_ranks, OP))


# ---------------------------------------------------------------- all-reduce of symmetric tensors


@kernel
def all_reduce_symmetric_one_shot(
    out: T.Exclusive, x: T.Peer[T.read], hello: T.Mailbox, done: T.Signal,
    N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """Everybody reads everybody's x where it lies; nobody leaves while x is read."""
    if x.shape[1] >= 0:
        meet(hello)
    for tile in out.tiles():
        tile.store(combine(x, 0, tile.index[1], out.tile_shape[1], N, OP, ACC).astype(out.dtype))
    done.notify()
    done.wait()


@kernel
def all_reduce_symmetric_two_shot(
    out: T.Peer, x: T.Peer[T.read], hello: T.Mailbox, done: T.Signal,
    B: T.Const[int], N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """Everybody reduces its share of the tiles and writes it to all. `out` may be `x`: one rank alone reads
    and writes a tile between the exchanges."""
    if x.shape[1] >= 0:
        meet(hello)
    me, n = x.rank, x.num_ranks
    for t in T.range(T.program_id(0) * n + me, x.local.num_tiles((1, B))[1], T.num_programs(0) * n):
        result = combine(x, 0, t, B, N, OP, ACC).astype(out.dtype)
        if N <= FEW_RANKS:
            for r in T.static_range(N):
                out.at(r).store((0, t), result)
        else:
            for r in T.ranks():
                out.at(r).store((0, t), result)
    done.notify()
    done.wait()


# ---------------------------------------------------------------- reduce-scatter


@kernel
def reduce_scatter_staged(
    out: T.Exclusive, x: T.Shared, hello: T.Mailbox, go: T.Signal, stage: T.Peer, turn: T.Peer, rows: T.i64,
    N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """Row `rank` of x, folded over the ranks. Groups of tiles, one exchange each."""
    p, P = T.program_id(0), T.num_programs(0)
    me, n = stage.rank, stage.num_ranks
    B = out.tile_shape[1]
    group = rows // 2 // n
    mine = share(out.num_tiles()[1])
    e = T.ld(turn.local, (STAGE_TURN, p))
    row = p * rows
    k = 0
    for tile in out.tiles():
        g = k % group
        if g == 0:
            row = p * rows + e % 2 * (rows // 2)
            for i in T.range(T.minimum(group, mine - k)):
                for j in T.ranks():
                    stage.local.store((row + i * n + j, 0), x.load((j, p + (k + i) * P), (1, B)))
            e += 1
            if k == 0:
                meet(hello)
            else:
                go.notify()
                go.wait()
        tile.store(combine(stage, row + g * n + me, 0, B, N, OP, ACC).astype(out.dtype))
        k += 1
    if k == 0:
        meet(hello)
    T.st(turn.local, e, (STAGE_TURN, p))


@kernel
def reduce_scatter_symmetric(
    out: T.Exclusive, x: T.Peer[T.read], hello: T.Mailbox, done: T.Signal,
    N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """As reduce_scatter_staged, out of everybody's x where it lies."""
    if x.shape[1] >= 0:
        meet(hello)
    for tile in out.tiles():
        tile.store(combine(x, x.rank, tile.index[1], out.tile_shape[1], N, OP, ACC).astype(out.dtype))
    done.notify()
    done.wait()


# ---------------------------------------------------------------- all-gather and all-to-all


@kernel
def gather_staged(
    out: T.Exclusive, x: T.Shared, hello: T.Mailbox, go: T.Signal, stage: T.Peer, turn: T.Peer, rows: T.i64,
    EACH: T.Const[bool], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """Row r of out comes from rank r: its x (all-gather), or its row of x for this rank (EACH: all-to-all).

    Expects tiles with the rank running fastest. A group of tiles is staged by whoever has them, then read.
    """
    p, P = T.program_id(0), T.num_programs(0)
    me, n = stage.rank, stage.num_ranks
    B = out.tile_shape[1]
    width = n if EACH else 1
    group = rows // 2 // width
    mine = share(out.num_tiles()[0] * out.num_tiles()[1])
    e = T.ld(turn.local, (STAGE_TURN, p))
    row = p * rows
    k = 0
    for tile in out.tiles():
        g = k % group
        if g == 0:
            row = p * rows + e % 2 * (rows // 2)
            for i in T.range(T.minimum(group, mine - k)):
                at = p + (k + i) * P
                if at % n == me:
                    if EACH:
                        for j in T.ranks():
                            stage.local.store((row + i * n + j, 0), x.load((j, at // n), (1, B)))
                    else:
                        stage.local.store((row + i, 0), x.load((0, at // n), (1, B)))
            e += 1
            if k == 0:
                meet(hello)
            else:
                go.notify()
                go.wait()
        source = tile.index[0]
        if EACH:
            tile.store(stage.at(source).load((row + g * n + me, 0), (1, B)))
        else:
            tile.store(stage.at(source).load((row + g, 0), (1, B)))
        k += 1
    if k == 0:
        meet(hello)
    T.st(turn.local, e, (STAGE_TURN, p))


@kernel
def gather_symmetric(
    out: T.Exclusive, x: T.Peer[T.read], hello: T.Mailbox, done: T.Signal, EACH: T.Const[bool], DT: T.Const[T.DType]
) -> None:
    """As gather_staged, out of everybody's x where it lies."""
    if x.shape[1] >= 0:
        meet(hello)
    for tile in out.tiles():
        r, t = tile.index
        if EACH:
            tile.store(x.at(r).load((x.rank, t), out.tile_shape))
        else:
            tile.store(x.at(r).load((0, t), out.tile_shape))
    done.notify()
    done.wait()


# ---------------------------------------------------------------- one rank to all, all to one, pairs


@kernel
def broadcast_in_place(
    x: T.Exclusive, hello: T.Mailbox, lead: T.Signal, ack: T.Signal, shelf: T.Peer, rows: T.i64, root: T.i64,
    DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """x of rank `root` becomes everybody's: over the root's shelf, whose slots come back acknowledged."""
    B = x.tile_shape[1]
    if x.shape[1] + root >= 0:
        meet(hello)
    k = 0
    for tile in x.tiles():
        row = T.program_id(0) * rows + k % SLOTS
        if shelf.rank == root:
            if k >= SLOTS:
                ack.wait()
            shelf.local.store((row, 0), tile.load())
            lead.notify()
        else:
            lead.wait(root)
            tile.store(shelf.at(root).load((row, 0), (1, B)))
            ack.notify(to=root)
        k += 1
    if shelf.rank == root:
        for _ in T.range(T.minimum(k, SLOTS)):
            ack.wait()


@kernel
def broadcast_from(
    out: T.Exclusive, x: T.Shared, hello: T.Mailbox, lead: T.Signal, ack: T.Signal, shelf: T.Peer, rows: T.i64,
    root: T.i64, DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """As broadcast_in_place; the root reads x, nobody else does."""
    B = out.tile_shape[1]
    if out.shape[1] + root >= 0:
        meet(hello)
    k = 0
    for tile in out.tiles():
        row = T.program_id(0) * rows + k % SLOTS
        if shelf.rank == root:
            if k >= SLOTS:
                ack.wait()
            part = x.load((0, tile.index[1]), (1, B))
            shelf.local.store((row, 0), part)
            lead.notify()
            tile.store(part)
        else:
            lead.wait(root)
            tile.store(shelf.at(root).load((row, 0), (1, B)))
            ack.notify(to=root)
        k += 1
    if shelf.rank == root:
        for _ in T.range(T.minimum(k, SLOTS)):
            ack.wait()


@kernel
def reduce_to(
    out: T.Exclusive, x: T.Shared, hello: T.Mailbox, lead: T.Signal, ack: T.Signal, shelf: T.Peer, rows: T.i64,
    root: T.i64, N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """x folded over the ranks into `out` of rank `root`; the others' `out` only says how much there is."""
    B = out.tile_shape[1]
    if out.shape[1] + root >= 0:
        meet(hello)
    k = 0
    for tile in out.tiles():
        row = T.program_id(0) * rows + k % SLOTS
        if shelf.rank == root:
            shelf.local.store((row, 0), x.load_like(tile))
            lead.wait()
            tile.store(combine(shelf, row, 0, B, N, OP, ACC).astype(out.dtype))
            ack.notify()
        else:
            if k >= SLOTS:
                ack.wait(root)
            shelf.local.store((row, 0), x.load_like(tile))
            lead.notify(to=root)
        k += 1
    if shelf.rank != root:
        for _ in T.range(T.minimum(k, SLOTS)):
            ack.wait(root)


def hand_over(x: T.Shared, shelf: T.Peer, lead: T.Signal, ack: T.Signal, to: T.Tile, k: T.Tile, B: int) -> None:
    """Tile k of x onto the shelf for rank `to`, once it has taken what the slot held."""
    if k >= SLOTS:
        ack.wait(to)
    shelf.local.store((k % SLOTS, 0), x.load((0, k), (1, B)))
    lead.notify(to=to)


@kernel
def trade(
    out: T.Exclusive, x: T.Shared, hello: T.Mailbox, lead: T.Signal, ack: T.Signal, shelf: T.Peer,
    to: T.i64, source: T.i64, shift: T.i64, DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """x to rank `to`, out from rank `source`: one step of an uneven all-to-all. One program.

    Sending tile k needs tile k - SLOTS taken, and every rank takes tile k before it sends k + 1, so the rank
    that is furthest behind can always go on.
    """
    B = out.tile_shape[1]
    if shift >= 0:
        meet(hello)
    tiles = x.num_tiles((1, B))[1]
    k = 0
    for tile in out.tiles():
        if k < tiles:
            hand_over(x, shelf, lead, ack, to, k, B)
        lead.wait(source)
        tile.store(shelf.at(source).load((k % SLOTS, 0), (1, B)))
        ack.notify(to=source)
        k += 1
    for rest in T.range(k, tiles):
        hand_over(x, shelf, lead, ack, to, rest, B)
    for _ in T.range(T.minimum(tiles, SLOTS)):
        ack.wait(to)


@kernel
def copy(out: T.Exclusive, x: T.Shared) -> None:
    """out = x."""
    for tile in out.tiles():
        tile.store(x.load_like(tile))


@kernel
def agree_counts(out: T.Exclusive, send: T.Shared, receive: T.Shared, counts: T.Mailbox, DT: T.Const[T.DType]) -> None:
    """Everybody tells each rank how much it will send; what comes must be what is expected."""
    with counts.round() as r:
        for k in T.ranks():
            r.put(T.reshape(send.load((k,), (1,)), (1,)), to=k)
    wrong = T.i64(0)
    for source, part in counts.collect(sources=True):
        wrong += T.sum(T.abs(part - receive.load((source,), (1,))))
    T.assert_(wrong == 0, "all_to_all_v: a rank sends another count than this rank expects from it")
    out.store(T.full((1,), wrong, T.i64))
