"""The kernels of the collectives on GPUs, in the public language. Who chooses among them is in cuda_collectives.py.

Three ways to exchange a tile with the same program of every other rank, each in one step:

- *flagged*: every 32-bit word travels with the number of its turn in one indivisible store, and the receiver looks at
  the words themselves. One flight over the link and no signal, for twice the bytes: for small messages.
- *filled*: places are empty, all ones, until a 64-bit word comes, and are emptied as it is taken. One flight, no
  signal, and the bytes once, for what can spare one of its values: sums of floats, which have many NaNs. (The idea is
  Lamport's queue; the one-shot all-reduce of TensorRT-LLM does it with -0.)
- *pushed*: the tile is stored into the peer's memory, then a signal is released. Two flights, the bytes once.

Data is pushed, never pulled: a store over NVLink is worth more than a load, and nobody waits for it.

Turns count in device memory (`turn`, one for each program and way), over all launches, so that a relaunch and a
replayed graph go on where the last one ended. How a slot is reused, the invariant: a program owns its slots, and
handles one tile a turn. It writes into the slot of turn t + S only after it has taken its peers' tiles of turn
t + S - w, where w is how many turns ahead it sends; they sent those after they had taken turn t + S - 2w of this
program. So S >= 2w slots are enough and nothing is acknowledged. All programs of all ranks take the same turns, since
grids and counts are equal. Filled places are emptied as a turn is taken, and fences order that before the next use: the
more slots, the fewer fences (`order_emptied`).

Ranks that called different collectives must fail, not fold what does not belong together. `sign` is a number of what
a rank called. Flagged words carry 8 bits of it in their turn, so that those of another call are not taken, or taken
for too late; pushed and filled tiles come with a word that has all of it.

Where a tile needs one axis it has one: finding the row and column of a tile takes a division.

What a kernel needs before it can send is an argument where it can be (`me`, this rank), not a word in memory: each
would be a round trip to the memory of the device, which is a tenth of a small message's time.

Every kernel handles rank order: results are folded from rank 0 upwards, the same bits on every rank. Where there are
two ranks, both orders give the same bits, and one's own part does not go through memory.
"""

from __future__ import annotations

import peertile.language as T
from peertile.kernel import kernel
from peertile.library.reductions import finish, fold

__all__ = ["AHEAD_SLOTS", "LEAST_FILLED", "SLOTS"]

DIFFERENT = "a peer called another collective, or this one with another count, dtype or reduction"
SLOTS = 2
"""Turns that a program's part of `words` and `inbox` has room for, where it sends no turn ahead."""
AHEAD_SLOTS = 4
"""The same where it sends one turn ahead."""
LEAST_FILLED = 8
"""The same of filled places, at least: with 4, a launch of several turns, one of one and one of several again could
fill places that are not known to be empty."""


# ---------------------------------------------------------------- values of 16 bits, two to a word


def low(word: T.Tile, DT: T.DType, ACC: T.DType) -> T.Tile:
    """The first of two elements."""
    return T.bitcast((word & 0xFFFF).astype(T.u16), DT).astype(ACC)


def high(word: T.Tile, DT: T.DType, ACC: T.DType) -> T.Tile:
    """The second of two elements."""
    return T.bitcast((word >> 16).astype(T.u16), DT).astype(ACC)


def pair(first: T.Tile, second: T.Tile, DT: T.DType) -> T.Tile:
    """Two elements as a word."""
    return T.bitcast(first.astype(DT), T.u16).astype(T.u32) | (T.bitcast(second.astype(DT), T.u16).astype(T.u32) << 16)


# ---------------------------------------------------------------- flagged


def place_of(words: T.Peer, row: T.Tile, source: T.Tile, rows: T.Tile, N: int) -> T.Tile:
    """Where the words of a rank are in a turn's places: the same bytes for all tiles, so that a word has one writer and
    nothing has to order two of them. From the other of two ranks come all of them anyhow."""
    if N == 2:
        return row + source
    else:
        return row + source * (rows // (SLOTS * words.num_ranks))


def send_words(mine: T.Tile, words: T.Peer, row: T.Tile, rows: T.Tile, e: T.Tile, me: T.Tile, N: int) -> None:
    """This rank's words of a turn to all ranks; where there are two, to the other alone."""
    if N == 2:
        T.put_flagged(mine, words, (row + me, 0), epoch=e, rank=1 - me)
    else:
        for r in T.ranks():
            T.put_flagged(mine, words, (place_of(words, row, me, rows, N), 0), epoch=e, rank=r)


def take_words(words: T.Peer, row: T.Tile, source: T.Tile, rows: T.Tile, e: T.Tile, W: int, N: int) -> T.Tile:
    """The words of a turn that came from a rank."""
    return T.take_flagged(words, (1, W), (place_of(words, row, source, rows, N), 0), epoch=e, dtype=T.u32)


def fold_words(
    mine: T.Tile, words: T.Peer, row: T.Tile, rows: T.Tile, e: T.Tile, me: T.Tile, W: int,
    N: int, OP: object, ACC: T.DType, DT: T.DType, PACK: bool,
) -> T.Tile:  # fmt: skip
    """The words of all ranks as one; `mine` are this rank's."""
    n = words.num_ranks
    if N == 2:
        other = take_words(words, row, 1 - me, rows, e, W, N)
        if PACK:
            first = finish(fold(low(mine, DT, ACC), low(other, DT, ACC), OP), n, OP)
            second = finish(fold(high(mine, DT, ACC), high(other, DT, ACC), OP), n, OP)
            return pair(first, second, DT)
        total = finish(fold(T.bitcast(mine, DT).astype(ACC), T.bitcast(other, DT).astype(ACC), OP), n, OP)
        return T.bitcast(total.astype(DT), T.u32)
    start = take_words(words, row, T.i64(0), rows, e, W, N)
    if PACK:
        first, second = low(start, DT, ACC), high(start, DT, ACC)
        for r in T.range(1, n):
            part = take_words(words, row, r, rows, e, W, N)
            first = fold(first, low(part, DT, ACC), OP)
            second = fold(second, high(part, DT, ACC), OP)
        return pair(finish(first, n, OP), finish(second, n, OP), DT)
    acc = T.bitcast(start, DT).astype(ACC)
    for r in T.range(1, n):
        acc = fold(acc, T.bitcast(take_words(words, row, r, rows, e, W, N), DT).astype(ACC), OP)
    return T.bitcast(finish(acc, n, OP).astype(DT), T.u32)


@kernel
def flagged_all_reduce(
    out: T.Exclusive, x: T.Shared, words: T.Peer, turn: T.Exclusive, rows: T.i64, me: T.i64, sign: T.i64,
    N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType], PACK: T.Const[bool],
) -> None:  # fmt: skip
    """x folded over the ranks. `out` and `x` as words; `rows`: of a program in `words`."""
    p, P = T.program_id(0), T.num_programs(0)
    W = out.tile_shape[0]
    tiles = x.num_tiles((W,))[0]
    ahead = T.zeros((W,), T.u32)
    if p < tiles:
        ahead = x.load((p,), (W,))
    e = T.reshape(turn.load(), ())
    for tile in out.tiles():
        e += 1
        epoch = (e << 8) + (sign & 255)
        row = p * rows + (e & 1) * (rows // 2)
        mine = T.reshape(ahead, (1, W))
        send_words(mine, words, row, rows, epoch, me, N)
        t = tile.index[0] + P
        if t < tiles:
            ahead = x.load((t,), (W,))
        tile.store(T.reshape(fold_words(mine, words, row, rows, epoch, me, W, N, OP, ACC, DT, PACK), (W,)))
    turn.store(T.reshape(e, (1,)))


@kernel
def flagged_all_reduce_in_place(
    out: T.Exclusive, words: T.Peer, turn: T.Exclusive, rows: T.i64, me: T.i64, sign: T.i64,
    N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType], PACK: T.Const[bool],
) -> None:  # fmt: skip
    """As flagged_all_reduce, of `out` itself."""
    p = T.program_id(0)
    W = out.tile_shape[0]
    e = T.reshape(turn.load(), ())
    for tile in out.tiles():
        e += 1
        epoch = (e << 8) + (sign & 255)
        row = p * rows + (e & 1) * (rows // 2)
        mine = T.reshape(tile.load(), (1, W))
        send_words(mine, words, row, rows, epoch, me, N)
        tile.store(T.reshape(fold_words(mine, words, row, rows, epoch, me, W, N, OP, ACC, DT, PACK), (W,)))
    turn.store(T.reshape(e, (1,)))


@kernel
def flagged_reduce_scatter(
    out: T.Exclusive, x: T.Shared, words: T.Peer, turn: T.Exclusive, rows: T.i64, me: T.i64, sign: T.i64,
    N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType], PACK: T.Const[bool],
) -> None:  # fmt: skip
    """Row `rank` of x, folded over the ranks: each rank sends every other one the row that is its."""
    p = T.program_id(0)
    W = out.tile_shape[0]
    e = T.reshape(turn.load(), ())
    for tile in out.tiles():
        e += 1
        epoch = (e << 8) + (sign & 255)
        row, t = p * rows + (e & 1) * (rows // 2), tile.index[0]
        if N == 2:
            T.put_flagged(x.load((1 - me, t), (1, W)), words, (row + me, 0), epoch=epoch, rank=1 - me)
        else:
            place = place_of(words, row, me, rows, N)
            for r in T.ranks():
                T.put_flagged(x.load((r, t), (1, W)), words, (place, 0), epoch=epoch, rank=r)
        mine = x.load((me, t), (1, W))
        tile.store(T.reshape(fold_words(mine, words, row, rows, epoch, me, W, N, OP, ACC, DT, PACK), (W,)))
    turn.store(T.reshape(e, (1,)))


@kernel
def flagged_gather(
    out: T.Exclusive, x: T.Shared, words: T.Peer, turn: T.Exclusive, rows: T.i64, me: T.i64, sign: T.i64,
    N: T.Const[int], EACH: T.Const[bool],
) -> None:  # fmt: skip
    """Row r of out comes from rank r: its x (all-gather), or its row of x for this rank (EACH: all-to-all). A tile of
    out has the same columns of all rows."""
    p = T.program_id(0)
    n = words.num_ranks
    R, W = out.tile_shape
    which = T.reshape(T.iota(R), (R, 1))
    e = T.reshape(turn.load(), ())
    for tile in out.tiles():
        e += 1
        epoch = (e << 8) + (sign & 255)
        row, t = p * rows + (e & 1) * (rows // 2), tile.index[1]
        if EACH:
            for r in T.peers():
                theirs = x.load((r, t), (1, W))
                T.put_flagged(theirs, words, (place_of(words, row, me, rows, N), 0), epoch=epoch, rank=r)
            mine = x.load((me, t), (1, W))
        else:
            mine = x.load((0, t), (1, W))
            for r in T.peers():
                T.put_flagged(mine, words, (place_of(words, row, me, rows, N), 0), epoch=epoch, rank=r)
        whole = T.broadcast(mine, (R, W))
        if N == 2:
            whole = T.where(which == me, whole, take_words(words, row, 1 - me, rows, epoch, W, N))
        else:
            for k in T.range(1, n):
                r = (me + k) % n
                whole = T.where(which == r, take_words(words, row, r, rows, epoch, W, N), whole)
        tile.store(whole)
    turn.store(T.reshape(e, (1,)))


# ---------------------------------------------------------------- filled


def part(word: T.Tile, k: int, DT: T.DType, ACC: T.DType) -> T.Tile:
    """Element k of the two or four in a u64."""
    if DT.itemsize == 2:
        return T.bitcast(((word >> (16 * k)) & 0xFFFF).astype(T.u16), DT).astype(ACC)
    return T.bitcast(((word >> (32 * k)) & 0xFFFFFFFF).astype(T.u32), DT).astype(ACC)


def placed(value: T.Tile, k: int, n: T.Tile, OP: object, DT: T.DType) -> T.Tile:
    """A folded element at its place in a u64."""
    if DT.itemsize == 2:
        return T.bitcast(finish(value, n, OP).astype(DT), T.u16).astype(T.u64) << (16 * k)
    return T.bitcast(finish(value, n, OP).astype(DT), T.u32).astype(T.u64) << (32 * k)


def send_filled(mine: T.Tile, words: T.Peer, row: T.Tile, me: T.Tile, N: int) -> None:
    """This rank's words of a turn to all ranks; where there are two, to the other alone."""
    if N == 2:
        T.put_filled(mine, words, (row + me, 0), rank=1 - me)
    else:
        for r in T.ranks():
            T.put_filled(mine, words, (row + me, 0), rank=r)


def fold_filled(
    mine: T.Tile, words: T.Peer, row: T.Tile, me: T.Tile, W: int, N: int, OP: object, ACC: T.DType, DT: T.DType
) -> T.Tile:
    """The words of all ranks as one; `mine` are this rank's."""
    n = words.num_ranks
    if N == 2:
        first, then = mine, T.take_filled(words, (1, W), (row + 1 - me, 0))
    else:
        first, then = T.take_filled(words, (1, W), (row, 0)), mine
    a0, a1 = part(first, 0, DT, ACC), part(first, 1, DT, ACC)
    if DT.itemsize == 2:
        a2, a3 = part(first, 2, DT, ACC), part(first, 3, DT, ACC)
    if N == 2:
        a0, a1 = fold(a0, part(then, 0, DT, ACC), OP), fold(a1, part(then, 1, DT, ACC), OP)
        if DT.itemsize == 2:
            a2, a3 = fold(a2, part(then, 2, DT, ACC), OP), fold(a3, part(then, 3, DT, ACC), OP)
    else:
        for r in T.range(1, n):
            other = T.take_filled(words, (1, W), (row + r, 0))
            a0, a1 = fold(a0, part(other, 0, DT, ACC), OP), fold(a1, part(other, 1, DT, ACC), OP)
            if DT.itemsize == 2:
                a2, a3 = fold(a2, part(other, 2, DT, ACC), OP), fold(a3, part(other, 3, DT, ACC), OP)
    total = placed(a0, 0, n, OP, DT) | placed(a1, 1, n, OP, DT)
    if DT.itemsize == 2:
        return total | placed(a2, 2, n, OP, DT) | placed(a3, 3, n, OP, DT)
    return total


def tell(calls: T.Peer, p: T.Tile, e: T.Tile, me: T.Tile, sign: T.Tile, N: int) -> None:
    """Tells all others what this rank called in the launch whose first turn is `e`."""
    slot, word = p * AHEAD_SLOTS + (e & (AHEAD_SLOTS - 1)), (((e + 1) << 24) + sign).astype(T.u64)
    if N == 2:
        T.st(calls, word, (slot, me), rank=1 - me)
    else:
        for r in T.peers():
            T.st(calls, word, (slot, me), rank=r)


def told(calls: T.Peer, p: T.Tile, e: T.Tile, r: T.Tile, sign: T.Tile) -> None:
    """Waits for what rank r called in the launch whose first turn is `e`."""
    slot, least = p * AHEAD_SLOTS + (e & (AHEAD_SLOTS - 1)), ((e + 1) << 24).astype(T.u64)
    same = least + sign.astype(T.u64)
    word = T.wait_at_least(calls.local, least, (slot, r))
    T.assert_(word == same, DIFFERENT)  # noqa: PT009 - of the kernel language


def meet(calls: T.Peer, p: T.Tile, e: T.Tile, me: T.Tile, sign: T.Tile, N: int) -> None:
    """All others called the same. Before a second turn is sent, so that nobody tells in the same place again."""
    if N == 2:
        told(calls, p, e, 1 - me, sign)
    else:
        for r in T.peers():
            told(calls, p, e, r, sign)


def order_emptied(e: T.Tile, S: int) -> None:
    """A fence in one of S/2 launches of one turn, before anything of it is told or sent: what was emptied up to here
    comes before what others send from the next launch on, since they wait for the word (`meet`). So places are filled
    again S turns behind their emptying, at the earliest.

    Where other programs have sent already it takes the way there and back and more, some 2.9 us between two H200: so
    there are many turns."""
    if e & (S // 2 - 1) == 1:
        T.sync_system()


def order_turns(e: T.Tile, first: T.Tile, S: int) -> None:
    """The same in a launch of several turns: a fence in the first, for what launches before it emptied, before that is
    told; and in one of S/4, for what was emptied in turn t and before, before turn f + 1 is sent, f <= t + S/4. Who has
    taken that has a fence behind it, in turn f + S/4 or two turns on, before turn t + S is sent.

    It stands behind what is sent: while it waits for that to arrive, what is taken next is on its way as well."""
    if (e == first) | (e & (S // 4 - 1) == 0):
        T.sync_system()


def one_turn(
    out: T.Exclusive, mine: T.Tile, words: T.Peer, calls: T.Peer, turn: T.Exclusive, rows: T.Tile, me: T.Tile,
    sign: T.Tile, N: int, S: int, OP: object, ACC: T.DType, DT: T.DType,
) -> None:  # fmt: skip
    """`mine`, words of this rank, folded with those of all others into the program's tile of `out`: all of a launch."""
    p = T.program_id(0)
    W = out.tile_shape[0]
    e = T.reshape(turn.load(), ())
    row = p * rows + (e & (S - 1)) * (rows // S)
    order_emptied(e, S)
    # First what is one word, so that it is here before the others: looking for it behind them takes 0.3 us longer.
    tell(calls, p, e, me, sign, N)
    send_filled(mine, words, row, me, N)
    turn.store(T.reshape(e + 1, (1,)))
    meet(calls, p, e, me, sign, N)
    out.store(T.reshape(fold_filled(mine, words, row, me, W, N, OP, ACC, DT), (W,)))


@kernel
def filled_once(
    out: T.Exclusive, x: T.Shared, words: T.Peer, calls: T.Peer, turn: T.Exclusive,
    rows: T.i64, me: T.i64, sign: T.i64,
    N: T.Const[int], S: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """x folded over the ranks, a tile for each program. `out` and `x` as u64; `rows`: of a program in `words`.

    Without a loop around it nothing is computed in front of the first store that is not needed for it."""
    W = out.tile_shape[0]
    mine = T.reshape(x.load_like(out), (1, W))
    one_turn(out, mine, words, calls, turn, rows, me, sign, N, S, OP, ACC, DT)


@kernel
def filled_once_in_place(
    out: T.Exclusive, words: T.Peer, calls: T.Peer, turn: T.Exclusive,
    rows: T.i64, me: T.i64, sign: T.i64,
    N: T.Const[int], S: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """As filled_once, of `out` itself."""
    W = out.tile_shape[0]
    mine = T.reshape(out.load(), (1, W))
    one_turn(out, mine, words, calls, turn, rows, me, sign, N, S, OP, ACC, DT)


@kernel
def filled_all_reduce(
    out: T.Exclusive, x: T.Shared, words: T.Peer, calls: T.Peer, turn: T.Exclusive,
    rows: T.i64, me: T.i64, sign: T.i64,
    N: T.Const[int], S: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """As filled_once, several tiles to a program, the next of them read while the last one travels."""
    p, P = T.program_id(0), T.num_programs(0)
    W = out.tile_shape[0]
    tiles = x.num_tiles((W,))[0]
    ahead = T.zeros((W,), T.u64)
    if p < tiles:
        ahead = x.load((p,), (W,))
    e = T.reshape(turn.load(), ())
    first = e
    slot = rows // S
    for tile in out.tiles():
        row = p * rows + (e & (S - 1)) * slot
        mine = T.reshape(ahead, (1, W))
        send_filled(mine, words, row, me, N)
        order_turns(e, first, S)
        if e == first:
            tell(calls, p, first, me, sign, N)
        t = tile.index[0] + P
        if t < tiles:
            ahead = x.load((t,), (W,))
        tile.store(T.reshape(fold_filled(mine, words, row, me, W, N, OP, ACC, DT), (W,)))
        if e == first:
            meet(calls, p, first, me, sign, N)
        e += 1
    turn.store(T.reshape(e, (1,)))


@kernel
def filled_all_reduce_in_place(
    out: T.Exclusive, words: T.Peer, calls: T.Peer, turn: T.Exclusive,
    rows: T.i64, me: T.i64, sign: T.i64,
    N: T.Const[int], S: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """As filled_all_reduce, of `out` itself."""
    p = T.program_id(0)
    W = out.tile_shape[0]
    e = T.reshape(turn.load(), ())
    first = e
    slot = rows // S
    for tile in out.tiles():
        row = p * rows + (e & (S - 1)) * slot
        mine = T.reshape(tile.load(), (1, W))
        send_filled(mine, words, row, me, N)
        order_turns(e, first, S)
        if e == first:
            tell(calls, p, first, me, sign, N)
        tile.store(T.reshape(fold_filled(mine, words, row, me, W, N, OP, ACC, DT), (W,)))
        if e == first:
            meet(calls, p, first, me, sign, N)
        e += 1
    turn.store(T.reshape(e, (1,)))


# ---------------------------------------------------------------- pushed


def push_tile(mine: T.Tile, inbox: T.Peer, row: T.Tile, me: T.Tile, N: int) -> None:
    """This rank's tile of a turn to all ranks; where there are two, to the other alone."""
    if N == 2:
        inbox.at(1 - me).store((row + me, 0), mine)
    else:
        for r in T.ranks():
            inbox.at(r).store((row + me, 0), mine)


def fold_tiles(
    mine: T.Tile, inbox: T.Peer, row: T.Tile, me: T.Tile, B: int, N: int, OP: object, ACC: T.DType, DT: T.DType
) -> T.Tile:
    """The tiles of all ranks as one, once they are here; `mine` is this rank's."""
    n = inbox.num_ranks
    if N == 2:
        other = inbox.local.load((row + 1 - me, 0), (1, B))
        return finish(fold(mine.astype(ACC), other.astype(ACC), OP), n, OP).astype(DT)
    acc = inbox.local.load((row, 0), (1, B)).astype(ACC)
    for r in T.range(1, n):
        acc = fold(acc, inbox.local.load((row + r, 0), (1, B)).astype(ACC), OP)
    return finish(acc, n, OP).astype(DT)


def announce(ready: T.Signal, me: T.Tile, N: int) -> None:
    """The tile of a turn is in the inboxes of all others. Where there is one other, the number of the turn stays in a
    register: a loop over ranks reads it from memory each time, which is two meetings of the threads and a trip."""
    if N == 2:
        ready.notify(to=1 - me)
    else:
        ready.notify()


def await_tiles(ready: T.Signal, me: T.Tile, N: int) -> None:
    """The tiles of a turn from all others are here."""
    if N == 2:
        ready.wait(1 - me)
    else:
        ready.wait()


@kernel
def pushed_all_reduce(
    out: T.Exclusive, x: T.Shared, inbox: T.Peer, ready: T.Signal, hello: T.Peer, turn: T.Exclusive,
    rows: T.i64, me: T.i64, sign: T.i64,
    N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """x folded over the ranks, one turn sent ahead. `rows`: of a program in `inbox`."""
    p, P = T.program_id(0), T.num_programs(0)
    B = out.tile_shape[0]
    tiles = out.num_tiles()[0]
    e = T.reshape(turn.load(), ())
    slot = rows // AHEAD_SLOTS
    first = e
    if p < tiles:
        tell(hello, p, first, me, sign, N)
        push_tile(T.reshape(x.load((p,), (B,)), (1, B)), inbox, p * rows + (e & (AHEAD_SLOTS - 1)) * slot, me, N)
        announce(ready, me, N)
    for tile in out.tiles():
        t = tile.index[0]
        if t + P < tiles:
            row = p * rows + ((e + 1) & (AHEAD_SLOTS - 1)) * slot
            push_tile(T.reshape(x.load((t + P,), (B,)), (1, B)), inbox, row, me, N)
            announce(ready, me, N)
        mine = T.reshape(x.load_like(tile), (1, B))
        await_tiles(ready, me, N)
        if e == first:
            meet(hello, p, first, me, sign, N)
        row = p * rows + (e & (AHEAD_SLOTS - 1)) * slot
        tile.store(T.reshape(fold_tiles(mine, inbox, row, me, B, N, OP, ACC, DT), (B,)))
        e += 1
    turn.store(T.reshape(e, (1,)))


@kernel
def pushed_all_reduce_in_place(
    out: T.Exclusive, inbox: T.Peer, ready: T.Signal, hello: T.Peer, turn: T.Exclusive,
    rows: T.i64, me: T.i64, sign: T.i64,
    N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """As pushed_all_reduce, of `out` itself, and no turn ahead: the programs of a multiprocessor keep the link busy."""
    p = T.program_id(0)
    B = out.tile_shape[0]
    e = T.reshape(turn.load(), ())
    slot = rows // AHEAD_SLOTS
    first = e
    for tile in out.tiles():
        row = p * rows + (e & (AHEAD_SLOTS - 1)) * slot
        mine = T.reshape(tile.load(), (1, B))
        push_tile(mine, inbox, row, me, N)
        if e == first:
            tell(hello, p, first, me, sign, N)
        announce(ready, me, N)
        await_tiles(ready, me, N)
        if e == first:
            meet(hello, p, first, me, sign, N)
        tile.store(T.reshape(fold_tiles(mine, inbox, row, me, B, N, OP, ACC, DT), (B,)))
        e += 1
    turn.store(T.reshape(e, (1,)))


@kernel
def pushed_reduce_scatter(
    out: T.Exclusive, x: T.Shared, inbox: T.Peer, ready: T.Signal, hello: T.Peer, turn: T.Exclusive,
    rows: T.i64, me: T.i64, sign: T.i64,
    N: T.Const[int], OP: T.Const, ACC: T.Const[T.DType], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """Row `rank` of x, folded over the ranks: each rank pushes every other one the row that is its."""
    p = T.program_id(0)
    B = out.tile_shape[0]
    e = T.reshape(turn.load(), ())
    slot = rows // AHEAD_SLOTS
    first = e
    for tile in out.tiles():
        row, t = p * rows + (e & (AHEAD_SLOTS - 1)) * slot, tile.index[0]
        if N == 2:
            inbox.at(1 - me).store((row + me, 0), x.load((1 - me, t), (1, B)))
        else:
            for r in T.ranks():
                inbox.at(r).store((row + me, 0), x.load((r, t), (1, B)))
        if e == first:
            tell(hello, p, first, me, sign, N)
        announce(ready, me, N)
        mine = x.load((me, t), (1, B))
        await_tiles(ready, me, N)
        if e == first:
            meet(hello, p, first, me, sign, N)
        tile.store(T.reshape(fold_tiles(mine, inbox, row, me, B, N, OP, ACC, DT), (B,)))
        e += 1
    turn.store(T.reshape(e, (1,)))


@kernel
def pushed_gather(
    out: T.Exclusive, x: T.Shared, inbox: T.Peer, ready: T.Signal, hello: T.Peer, turn: T.Exclusive,
    rows: T.i64, me: T.i64, sign: T.i64,
    N: T.Const[int], EACH: T.Const[bool],
) -> None:  # fmt: skip
    """As flagged_gather, by tiles that are pushed."""
    p = T.program_id(0)
    n = inbox.num_ranks
    R, B = out.tile_shape
    which = T.reshape(T.iota(R), (R, 1))
    e = T.reshape(turn.load(), ())
    slot = rows // AHEAD_SLOTS
    first = e
    for tile in out.tiles():
        row, t = p * rows + (e & (AHEAD_SLOTS - 1)) * slot, tile.index[1]
        if EACH:
            if N == 2:
                inbox.at(1 - me).store((row + me, 0), x.load((1 - me, t), (1, B)))
            else:
                for r in T.peers():
                    inbox.at(r).store((row + me, 0), x.load((r, t), (1, B)))
            mine = x.load((me, t), (1, B))
        else:
            mine = x.load((0, t), (1, B))
            if N == 2:
                inbox.at(1 - me).store((row + me, 0), mine)
            else:
                for r in T.peers():
                    inbox.at(r).store((row + me, 0), mine)
        if e == first:
            tell(hello, p, first, me, sign, N)
        announce(ready, me, N)
        await_tiles(ready, me, N)
        if e == first:
            meet(hello, p, first, me, sign, N)
        whole = T.broadcast(mine, (R, B))
        if N == 2:
            whole = T.where(which == me, whole, inbox.local.load((row + 1 - me, 0), (1, B)))
        else:
            for k in T.range(1, n):
                r = (me + k) % n
                whole = T.where(which == r, inbox.local.load((row + r, 0), (1, B)), whole)
        tile.store(whole)
        e += 1
    turn.store(T.reshape(e, (1,)))
