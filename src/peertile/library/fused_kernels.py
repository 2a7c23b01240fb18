"""The kernels of products fused with communication, in the public language. `fused.py` checks and launches them.

Each is one launch on every rank, with the same number of programs. Nothing waits on the host, and nobody waits for
the others before there is something to wait for.

How memory that peers write is reused, the invariant of all of them: what is sent has two places, which take turns from
call to call. In call e a rank writes into its peers' place e % 2, which call e - 2 used last. A call ends only when
every peer has said that it has begun the same one (`greet` and `check`), so whoever is in call e knows that all others
have begun call e - 1, and have ended call e - 2 with all that it read. Where the two places lie depends on the shapes:
a call that is not as the one before it checks before it writes, when the others have ended that one too. Calls are
counted in device memory, `calls` [programs, 4]: all of them, those of one kind, the sign of the last one, and those of
another kind.
"""

# Kernels: tiles have operators in the kernel language, not in Python.

from __future__ import annotations

import peertile.language as T
from peertile.kernel import kernel
from peertile.library.cuda_kernels import high, low, pair
from peertile.library.gemm import product, wide_product

__all__ = [
    "MOST_TURNS",
    "PAIRS",
    "gather_gemm",
    "gather_gemm_wide",
    "gemm_reduce",
    "gemm_reduce_flagged",
    "gemm_scatter",
    "gemm_scatter_moved",
    "gemm_scatter_pairs",
]

DIFFERENT = (
    "a peer called this with other shapes, or other numbers of rows; launch the same kernel with the same of them on "
    "every rank"
)


def meet(hello: T.Mailbox, agreed: T.Tile) -> None:
    """Every rank is here, and called the same: `agreed` stands for what has to be equal, by a number from 0 on."""
    if agreed >= 0:  # always, and so it is part of the signature that peers compare
        hello.post(T.zeros((1,), T.u64))
        for _ in hello.collect():
            pass


def greet(begun: T.Peer, epoch: T.Tile, sign: T.Tile) -> None:
    """Tells the others that this rank has begun, and what: `sign` stands for all that has to be equal, 24 bits. One
    program speaks for its rank. There is a word for each parity, since the others may be one call behind."""
    if T.program_id(0) == 0:
        for r in T.peers():
            word = ((epoch << 24) + sign).astype(T.u64)
            T.st(begun, word, (epoch % 2, begun.rank), rank=r, order=T.release)


def check(begun: T.Peer, epoch: T.Tile, sign: T.Tile) -> None:
    """The others have begun, and called the same: before anything is waited for that they would not send else."""
    # What is compared with is there before the wait, which then compares itself: the word need not go to all threads.
    least, same = (epoch << 24).astype(T.u64), ((epoch << 24) + sign).astype(T.u64)
    for r in T.peers():
        word = T.wait_at_least(begun.local, least, (epoch % 2, r))
        T.assert_(word == same, DIFFERENT)  # noqa: PT009 - of the kernel language


def check_once(begun: T.Peer, epoch: T.Tile, sign: T.Tile) -> None:
    """As check, by the last program for its rank: a call ends when all programs have ended, and where the others do not
    send what they should, this fails the launch, and with it all waits."""
    if T.program_id(0) == T.num_programs(0) - 1:
        check(begun, epoch, sign)


def last_tile(a: T.Shared, BM: int, BK: int) -> T.Tile:
    """The index of the last tile of rows of `a`; 0 where there is none."""
    return T.maximum(a.num_tiles((BM, BK))[0] - 1, 0)


# ---------------------------------------------------------------- all-gather + product


def send_rows(
    a: T.Shared, gathered: T.Peer, arrived: T.Peer, start: T.Tile, epoch: T.Tile,
    CHUNK: int, MR: int, MC: int, MOVERS: int,
) -> None:  # fmt: skip
    """This mover's chunks of a, into everybody's `gathered` from row `start` on; each is announced when it is there.

    The rank that begins with these rows, after its own, is the one before this one: it gets them first.
    """
    me, n = gathered.rank, gathered.num_ranks
    rows, inner = a.shape
    for d in T.range(1, n):
        to = (me + n - d) % n
        there = gathered.at(to).slice((start, 0), (rows, inner))
        for k in T.range(T.program_id(0), T.cdiv(rows, CHUNK), MOVERS):
            for i in T.range(k * (CHUNK // MR), T.minimum((k + 1) * (CHUNK // MR), T.cdiv(rows, MR))):
                for j in T.range(T.cdiv(inner, MC)):
                    there.store((i, j), a.load((i, j), (MR, MC)))
            T.st(arrived, epoch, (k, me), rank=to, order=T.release)


def place_in_turn(a: T.Shared, t: T.Tile, across: T.Tile, MR: int, MC: int) -> tuple[T.Tile, T.Tile]:
    """The index of tile t of a, row by row, `across` tiles in each; of what lies behind the last row, in that one."""
    down, wide = a.num_tiles((MR, MC))
    return T.minimum(t // across, T.maximum(down - 1, 0)), T.minimum(t % across, T.maximum(wide - 1, 0))


def tile_in_turn(a: T.Shared, t: T.Tile, across: T.Tile, MR: int, MC: int) -> T.Tile:
    """That tile."""
    i, j = place_in_turn(a, t, across, MR, MC)
    return a.load((i, j), (MR, MC))


def send_all_rows(
    a: T.Shared, gathered: T.Peer, arrived: T.Peer, start: T.Tile, round: T.Tile, MR: int, MC: int, MOVERS: int
) -> None:
    """As send_rows, announced as a whole: the mover that ends last says so, as the others have told it by a count in
    this rank's memory. Two rows of `arrived` are for this: the last one has the counts, that before it what is said.

    One loop over tiles without checks, and the next tile is under way while one is sent.
    """
    me, n = gathered.rank, gathered.num_ranks
    rows, inner = a.shape
    said = arrived.shape[0] - 2
    p = T.program_id(0)
    across = a.num_tiles((MR, MC))[1]
    for d in T.range(1, n):
        to = (me + n - d) % n
        there = gathered.at(to).slice((start, 0), (rows, inner))
        piece = tile_in_turn(a, p, across, MR, MC)
        for t in T.range(p, a.num_tiles((MR, MC))[0] * across, MOVERS):
            ahead = tile_in_turn(a, t + MOVERS, across, MR, MC)
            i, j = place_in_turn(there, t, across, MR, MC)
            there.store((i, j), piece)
            piece = ahead
        ended = T.atom_add(arrived.local, 1, (said + 1, to), order=T.acq_rel) + 1
        if ended == round * MOVERS:
            T.st(arrived, round, (said, me), rank=to, order=T.release)


def wait_for_all_rows(arrived: T.Peer, round: T.Tile, first: T.Tile, last: T.Tile) -> None:
    """Until all rows of the ranks from `first` on, before `last`, have come."""
    for r in T.range(first, last):
        T.wait_at_least(arrived.local, round, (arrived.shape[0] - 2, r))


def wait_for_rows(arrived: T.Peer, starts: T.Shared, epoch: T.Tile, low: T.Tile, high: T.Tile, CHUNK: int) -> None:
    """Until rows [low, high) of what is gathered have come: chunk by chunk, of whichever ranks have some of them.

    Many programs wait for a chunk, so the epoch is that of the launch: a signal's belongs to the one who waits.
    """
    for r in T.ranks():
        first = T.ld(starts, (r,), order=T.weak)
        last = T.ld(starts, (r + 1,), order=T.weak)
        begin, end = T.maximum(low, first), T.minimum(high, last)
        if begin < end:
            for k in T.range((begin - first) // CHUNK, T.cdiv(end - first, CHUNK)):
                T.wait_at_least(arrived.local, epoch, (k, r))


@kernel
def gather_gemm(
    own: T.Exclusive, rest: T.Exclusive, after: T.Exclusive, before: T.Exclusive, tail: T.Exclusive, a: T.Shared,
    b: T.Shared, begun: T.Peer, gathered: T.Peer, arrived: T.Peer, calls: T.Peer, starts: T.Shared, sign: T.i64,
    at_tail: T.i64, CHUNK: T.Const[int], MR: T.Const[int], MC: T.Const[int], MOVERS: T.Const[int],
    BK: T.Const[int], STAGES: T.Const[int], AT_ONCE: T.Const[bool], QUICK: T.Const[bool], REST: T.Const[bool],
    TAIL: T.Const[bool],
) -> None:  # fmt: skip
    """(the rows of `a` of all ranks, in rank order) @ b, in three parts: the rows of this rank (own, then rest), of
    those after it, of those before it. A few programs send first, while the others compute `own`, and join them then.
    With QUICK they have sent before the others have computed a tile: `own` is for all, theirs come last.

    With AT_ONCE a part is begun when all of its rows are there, which leaves the loop over its tiles free of waits, so
    that the loads of the next tile overlap the end of this one; else each tile waits for its own rows. With TAIL too
    the rows from `at_tail` on, of the part that is last, are in `tail`, in smaller tiles (see gemm.gemm_tailed).
    """
    p, P = T.program_id(0), T.num_programs(0)
    me, n = gathered.rank, gathered.num_ranks
    epoch = T.ld(calls.local, (p, 0), order=T.weak) + 1
    round = T.ld(calls.local, (p, 1), order=T.weak) + 1
    BM, BN = own.tile_shape
    start, stop = T.ld(starts, (me,), order=T.weak), T.ld(starts, (me + 1,), order=T.weak)
    total, inner = T.ld(starts, (n,), order=T.weak), a.shape[1]
    steps = a.num_tiles((BM, BK))[1]
    place = epoch % 2 * total
    greet(begun, epoch, sign)
    if T.ld(calls.local, (p, 2), order=T.weak) != sign:
        check(begun, epoch, sign)
    if p < MOVERS:
        if AT_ONCE:
            send_all_rows(a, gathered, arrived, place + start, round, MR, MC, MOVERS)
        else:
            send_rows(a, gathered, arrived, place + start, epoch, CHUNK, MR, MC, MOVERS)
    if QUICK:
        for tile in own.tiles(dealt=MOVERS):
            m = tile.index[0]
            tile.store(product(a, b, m, tile.index[1], 0, steps, BM, BN, BK, STAGES, False).astype(own.dtype))
        dealt = own.num_tiles()[0] * own.num_tiles()[1] + MOVERS
    else:
        for tile in own.tiles():
            m = tile.index[0]
            tile.store(product(a, b, m, tile.index[1], 0, steps, BM, BN, BK, STAGES, False).astype(own.dtype))
        # The programs that got one tile more of `own` come last, and before them those that have been sending.
        dealt = own.num_tiles()[0] * own.num_tiles()[1] % (P - MOVERS) + MOVERS
    if REST:
        done = own.shape[0]
        more = a.slice((done, 0), (a.shape[0] - done, inner))
        end = last_tile(more, BM, BK)
        for tile in rest.tiles(dealt=dealt):
            m = T.minimum(tile.index[0], end)
            tile.store(product(more, b, m, tile.index[1], 0, steps, BM, BN, BK, STAGES, False).astype(own.dtype))
        dealt += rest.num_tiles()[0] * rest.num_tiles()[1]
    check_once(begun, epoch, sign)
    if me < n - 1:  # what has no tiles has no loads to begin with, either
        later = gathered.local.slice((place + stop, 0), (total - stop, inner))
        end = last_tile(later, BM, BK)
        if AT_ONCE:
            wait_for_all_rows(arrived, round, me + 1, n)
            for tile in after.tiles(dealt=dealt):
                m = T.minimum(tile.index[0], end)
                tile.store(product(later, b, m, tile.index[1], 0, steps, BM, BN, BK, STAGES, False).astype(own.dtype))
        else:
            for tile in after.tiles(dealt=dealt):
                low = stop + tile.index[0] * BM
                wait_for_rows(arrived, starts, epoch, low, T.minimum(low + BM, total), CHUNK)
                m = T.minimum(tile.index[0], end)
                tile.store(product(later, b, m, tile.index[1], 0, steps, BM, BN, BK, STAGES, False).astype(own.dtype))
    dealt += after.num_tiles()[0] * after.num_tiles()[1]
    if me > 0:
        earlier = gathered.local.slice((place, 0), (start, inner))  # one's own rows, which follow, are not in there
        end = last_tile(earlier, BM, BK)
        if AT_ONCE:
            wait_for_all_rows(arrived, round, T.i64(0), me)
            for tile in before.tiles(dealt=dealt):
                m = T.minimum(tile.index[0], end)
                tile.store(product(earlier, b, m, tile.index[1], 0, steps, BM, BN, BK, STAGES, False).astype(own.dtype))
        else:
            for tile in before.tiles(dealt=dealt):
                low = tile.index[0] * BM
                wait_for_rows(arrived, starts, epoch, low, T.minimum(low + BM, start), CHUNK)
                m = T.minimum(tile.index[0], end)
                tile.store(product(earlier, b, m, tile.index[1], 0, steps, BM, BN, BK, STAGES, False).astype(own.dtype))
    if TAIL:
        # The rows of the rank before this one, or the last one, have come; behind this the loop below has no barriers.
        T.wait_at_least(arrived.local, round, (arrived.shape[0] - 2, (me + n - 1) % n))
        HM, HN = tail.tile_shape
        final = gathered.local.slice((place + at_tail, 0), (tail.shape[0], inner))
        end = last_tile(final, HM, BK)
        for tile in tail.tiles(dealt=dealt + before.num_tiles()[0] * before.num_tiles()[1]):
            m = T.minimum(tile.index[0], end)
            tile.store(product(final, b, m, tile.index[1], 0, steps, HM, HN, BK, STAGES, False).astype(own.dtype))
    T.st(calls.local, epoch, (p, 0), order=T.weak)
    T.st(calls.local, sign, (p, 2), order=T.weak)
    if AT_ONCE:
        T.st(calls.local, round, (p, 1), order=T.weak)


def move_four(
    here: T.View, there: T.View, first: T.Tile | int, second: T.Tile, third: T.Tile, fourth: T.Tile, MR: int, MC: int
) -> None:
    """Four tiles of each row of tiles, from here to there. One of the next row is fetched as soon as its registers have
    been sent, so that three of four are always under way, and none is moved from register to register, which would wait
    for it."""
    bottom = T.maximum(here.num_tiles((MR, MC))[0] - 1, 0)
    w = here.load((0, first), (MR, MC))
    x = here.load((0, second), (MR, MC))
    y = here.load((0, third), (MR, MC))
    z = here.load((0, fourth), (MR, MC))
    for t in T.range(0, T.minimum(here.num_tiles((MR, MC))[0], there.num_tiles((MR, MC))[0])):
        ahead = T.minimum(t + 1, bottom)
        there.store((t, first), w)
        w = here.load((ahead, first), (MR, MC))
        there.store((t, second), x)
        x = here.load((ahead, second), (MR, MC))
        there.store((t, third), y)
        y = here.load((ahead, third), (MR, MC))
        there.store((t, fourth), z)
        z = here.load((ahead, fourth), (MR, MC))


def send_by_halves(
    a: T.Shared, gathered: T.Peer, halves: T.Peer, start: T.Tile, half: T.Tile, MR: int, MC: int, MOVERS: int
) -> None:
    """This mover's rows of a, into the other rank's `gathered` from row `start` on: the first half * 4 tiles of
    columns, and then the others; `halves` counts there who has sent each."""
    p, to = T.program_id(0), 1 - gathered.rank
    words = halves.at(to).slice((0, 1 - to), (2, 1))
    rows, inner = a.shape
    share = T.cdiv(T.cdiv(rows, MR), MOVERS) * MR
    first = T.minimum(p * share, rows)
    count = T.minimum(rows - first, share)
    groups = T.cdiv(a.num_tiles((MR, MC))[1], 4)
    for h in T.range(2):
        for g in T.range(T.where(h == 0, 0, half), T.where(h == 0, half, groups)):
            here = a.slice((first, 0), (count, inner))
            there = gathered.at(to).slice((start + first, 0), (count, inner))
            edge = T.minimum(
                T.maximum(here.num_tiles((MR, MC))[1] - 1, 0), T.maximum(there.num_tiles((MR, MC))[1] - 1, 0)
            )
            left = T.maximum(4 * g, 0)
            second, third, fourth = T.minimum(left + 1, edge), T.minimum(left + 2, edge), T.minimum(left + 3, edge)
            move_four(here, there, T.minimum(left, edge), second, third, fourth, MR, MC)
        words.atomic_add((h, 0), T.full((1, 1), 1, T.i64), order=T.release)


@kernel
def gather_gemm_wide(
    own: T.Exclusive, own_side: T.Exclusive, rest: T.Exclusive, rest_side: T.Exclusive, a: T.Shared, b: T.Shared,
    side: T.Shared, begun: T.Peer, gathered: T.Peer, halves: T.Peer, calls: T.Peer, sign: T.i64, BK: T.Const[int],
    STAGES: T.Const[int], MR: T.Const[int], MC: T.Const[int], MOVERS: T.Const[int],
) -> None:  # fmt: skip
    """As gather_gemm for two ranks of as many rows, in wide tiles: of b's columns, and of some more in `side` (see
    gemm.gemm_wide). MOVERS programs only move, half of the inner axis first: a tile of the other's rows, `rest`, is
    begun when that has come, and waits for the other half in its middle. `halves` [2, ranks] counts movers of all
    calls.

    Movers check before they send, and nobody else does, nor once more in the end: what may wait, and brings a word to
    all threads, keeps the assembler from holding what the loops count in registers of the warp."""
    p = T.program_id(0)
    me = gathered.rank
    last_epoch, last_round = T.ld(calls.local, (p, 0), order=T.weak), T.ld(calls.local, (p, 3), order=T.weak)
    BM, BN = own.tile_shape
    BS = own_side.tile_shape[1]
    rows, inner = a.shape
    steps = a.num_tiles((BM, BK))[1]
    half = T.maximum(T.cdiv(a.num_tiles((MR, MC))[1], 4) // 2, 1)
    if p < MOVERS:
        e = last_epoch + 1
        greet(begun, e, sign)
        check(begun, e, sign)
        send_by_halves(a, gathered, halves, (e % 2 * 2 + me) * rows, half, MR, MC, MOVERS)
    for tile, more in zip(own.tiles(), own_side.tiles(), strict=False):
        m, n = tile.index
        left, right = T.zeros((BM, BN), T.f32), T.zeros((BM, BS), T.f32)
        left, right = wide_product(a, b, side, m, n, 0, steps, left, right, BM, BN, BS, BK, STAGES)
        tile.store(left.astype(own.dtype))
        more.store(right.astype(own.dtype))
    epoch, round = last_epoch + 1, last_round + 1
    dealt = own.num_tiles()[0] * own.num_tiles()[1]
    others = gathered.local.slice(((epoch % 2 * 2 + 1 - me) * rows, 0), (rows, inner))
    end = last_tile(others, BM, BK)
    middle = T.minimum(half * (4 * MC // BK), steps)
    T.wait_at_least(halves.local, round * MOVERS, (0, 1 - me))
    for tile, more in zip(rest.tiles(dealt=dealt), rest_side.tiles(dealt=dealt), strict=False):
        m, n = T.minimum(tile.index[0], end), tile.index[1]
        left, right = T.zeros((BM, BN), T.f32), T.zeros((BM, BS), T.f32)
        left, right = wide_product(others, b, side, m, n, 0, middle, left, right, BM, BN, BS, BK, STAGES)
        T.wait_at_least(halves.local, round * MOVERS, (1, 1 - me))
        left, right = wide_product(others, b, side, m, n, middle, steps, left, right, BM, BN, BS, BK, STAGES)
        tile.store(left.astype(own.dtype))
        more.store(right.astype(own.dtype))
    T.st(calls.local, epoch, (p, 0), order=T.weak)
    T.st(calls.local, sign, (p, 2), order=T.weak)
    T.st(calls.local, round, (p, 3), order=T.weak)


# ---------------------------------------------------------------- product + reduction


def wait_for_part(
    arrived: T.Peer, starts: T.Shared, epoch: T.Tile, source: T.Tile, t: T.Tile, BM: int, columns: T.Tile
) -> None:
    """Until tile `t` of this rank's rows has come from rank `source`: which of its programs makes it follows from how
    it deals, to the ranks behind it in turn."""
    me, n = arrived.rank, arrived.num_ranks
    before = T.i64(0)
    for d in T.range(1, (me + n - source) % n):
        to = (source + d) % n
        before += T.cdiv(T.ld(starts, (to + 1,), order=T.weak) - T.ld(starts, (to,), order=T.weak), BM) * columns
    T.wait_at_least(arrived.local, epoch, ((before + t) % T.num_programs(0), source))


def tell_last(arrived: T.Peer, epoch: T.Tile) -> None:
    """This program's part for the rank that it computed for last is there."""
    me, n = arrived.rank, arrived.num_ranks
    if n > 1:
        T.st(arrived, epoch, (T.program_id(0), me), rank=(me + n - 1) % n, order=T.release)


@kernel
def gemm_scatter(
    out: T.Exclusive, a: T.Shared, b: T.Shared, begun: T.Peer, inbox: T.Peer, arrived: T.Peer, calls: T.Peer,
    starts: T.Shared, sign: T.i64, BK: T.Const[int], STAGES: T.Const[int], EVEN: T.Const[bool],
) -> None:  # fmt: skip
    """The rows of this rank in the sum over the ranks of a @ b. What others own is computed first and goes straight
    into their inbox; one's own comes last, when the others' parts have had time to arrive. They are added in turn,
    those of the next rank first.

    The inbox [2 ranks, rows, columns] has the parts of two calls from every rank. A program says once, to each rank,
    that all it computed for that one is there: the loop over its tiles has nothing to wait for. It tells the last one
    when it has computed the first tile of its own rows, while the part was on its way. EVEN: all ranks have as many
    tiles, so those of others are cut as one's own.
    """
    p, P = T.program_id(0), T.num_programs(0)
    me, n = inbox.rank, inbox.num_ranks
    epoch = T.ld(calls.local, (p, 0), order=T.weak) + 1
    BM, BN = out.tile_shape
    columns = T.cdiv(b.shape[1], BN)
    inner = a.shape[1]
    steps = a.num_tiles((BM, BK))[1]
    place = epoch % 2 * n
    mine = place + me
    greet(begun, epoch, sign)
    if T.ld(calls.local, (p, 2), order=T.weak) != sign:
        check(begun, epoch, sign)
    dealt = T.i64(0)
    for d in T.range(1, n):
        to = (me + d) % n
        first, last = T.ld(starts, (to,), order=T.weak), T.ld(starts, (to + 1,), order=T.weak)
        theirs = a.slice((first, 0), (last - first, inner))
        there = inbox.at(to)
        tiles = T.cdiv(last - first, BM) * columns
        if EVEN:
            end = last_tile(theirs, BM, BK)
            for tile in out.tiles(dealt=dealt):
                m = T.minimum(tile.index[0], end)
                part = product(theirs, b, m, tile.index[1], 0, steps, BM, BN, BK, STAGES, False).astype(inbox.dtype)
                there.store((mine, tile.index[0], tile.index[1]), T.reshape(part, (1, BM, BN)))
        else:
            for t in T.range((p + P - dealt % P) % P, tiles, P):
                part = product(theirs, b, t // columns, t % columns, 0, steps, BM, BN, BK, STAGES, False).astype(
                    inbox.dtype
                )
                there.store((mine, t // columns, t % columns), T.reshape(part, (1, BM, BN)))
        if d < n - 1:
            T.st(arrived, epoch, (p, me), rank=to, order=T.release)
        dealt += tiles
    first, last = T.ld(starts, (me,), order=T.weak), T.ld(starts, (me + 1,), order=T.weak)
    own = a.slice((first, 0), (last - first, inner))
    end = last_tile(own, BM, BK)
    check_once(begun, epoch, sign)
    here = inbox.local
    begin = (p + P - dealt % P) % P
    turned = begin
    for tile in out.tiles(dealt=dealt):
        m, c = tile.index
        acc = product(own, b, T.minimum(m, end), c, 0, steps, BM, BN, BK, STAGES, False)
        if turned == begin:
            tell_last(arrived, epoch)
        t = turned if EVEN else m * columns + c  # as the others count it
        for r in T.peers():
            wait_for_part(arrived, starts, epoch, r, t, BM, columns)
            acc += T.reshape(here.load((place + r, m, c), (1, BM, BN)), (BM, BN)).astype(T.f32)
        tile.store(acc.astype(out.dtype))
        turned += P
    if turned == begin:
        tell_last(arrived, epoch)
    T.st(calls.local, epoch, (p, 0), order=T.weak)
    T.st(calls.local, sign, (p, 2), order=T.weak)


MOST_TURNS = 512
"""Turns of the workers in a part of gemm_scatter_moved, at most: each has a word for each mover."""


def place_of(t: T.Tile, down: T.Tile, across: T.Tile, TOGETHER: int) -> tuple[T.Tile, T.Tile]:
    """The index of tile t of `down` by `across`, as a partition of swizzle TOGETHER walks them. Every tile begins with
    this, and a division of 32 bits takes a fraction of the time of one of 64."""
    at, height, group = t.astype(T.u32), down.astype(T.u32), (across * TOGETHER).astype(T.u32)
    first, inside = at // group * TOGETHER, at % group
    rows = T.minimum(height - first, T.u32(TOGETHER))
    return T.maximum((first + inside % rows).astype(T.i64), 0), T.maximum((inside // rows).astype(T.i64), 0)


def slot_of(epoch: T.Tile, d: T.Tile, N: int) -> T.Tile:
    """Where what the rank d before its owner sends lies in this call: behind the two places of what the owner sends."""
    return 2 + epoch % 2 * (N - 1) + d - 1


def as_dealt(tile: T.Tile) -> T.Tile:
    """A tile [128, 256] of a product in the order that the threads of a GPU have it in: each of 256 has pairs of
    neighbours, in every eighth column of two rows of its warp's 16; here, eight elements in a row of each of 16. Stored
    and fetched like that it goes from registers to memory and back as it is. In rows it would pass through shared
    memory: 2048 x 8192 x 4096 took an H200 that is its own peer 224 us, and takes 220."""
    rows = T.permute(T.reshape(tile, (8, 2, 8, 8, 32)), (1, 3, 0, 2, 4))
    return T.reshape(T.permute(T.reshape(rows, (1024, 4, 4, 2)), (0, 2, 1, 3)), (16, 2048))


def from_dealt(tile: T.Tile) -> T.Tile:
    """The inverse of as_dealt."""
    rows = T.permute(T.reshape(tile, (1024, 4, 4, 2)), (0, 2, 1, 3))
    return T.reshape(T.permute(T.reshape(rows, (2, 8, 8, 8, 32)), (2, 0, 3, 1, 4)), (128, 256))


def move_parts(
    tiles: T.Peer, told: T.Peer, landed: T.Peer, starts: T.Shared, epoch: T.Tile, columns: T.Tile, share: T.Tile,
    BM: int, N: int, MOVERS: int, PIECE: int,
) -> None:  # fmt: skip
    """This mover's share of what others own, turn by turn of the workers: as soon as all of its tiles are there.

    A tile travels as four pieces, words whatever they mean.
    """
    p, me = T.program_id(0), tiles.rank
    each = tiles.shape[0] // (2 * N)
    for d in T.range(1, N):
        to = (me + d) % N
        first, last = T.ld(starts, (to,), order=T.weak), T.ld(starts, (to + 1,), order=T.weak)
        whole = T.cdiv(last - first, BM) * columns
        for k in T.range(T.cdiv(whole, share * MOVERS)):
            begin = T.minimum((k * MOVERS + p) * share, whole)
            count = T.minimum(whole - begin, share)
            row = d % 2 * MOST_TURNS + k
            T.wait_at_least(told.local, count, (row, p))
            T.st(told.local, 0, (row, p), order=T.weak)
            here = tiles.local.slice((d % 2 * each + begin, 0), (count, 4 * PIECE))
            there = tiles.at(to).slice((slot_of(epoch, d, N) * each + begin, 0), (count, 4 * PIECE))
            edge = T.minimum(
                T.maximum(here.num_tiles((1, PIECE))[1] - 1, 0), T.maximum(there.num_tiles((1, PIECE))[1] - 1, 0)
            )
            second, third, fourth = T.minimum(1, edge), T.minimum(2, edge), T.minimum(3, edge)
            move_four(here, there, 0, second, third, fourth, 1, PIECE)
            T.st(landed, epoch * MOST_TURNS + k, (p, me), rank=to, order=T.release)
        if N > 3:
            T.st(landed.local, epoch * N + d, (MOVERS + p, me), order=T.release)


def compute_part(
    a: T.Shared, b: T.Shared, parts: T.View, words: T.View, top: T.Tile, down: T.Tile, columns: T.Tile,
    steps: T.Tile, begin: T.Tile, step: T.Tile, BM: int, BN: int, BK: int, STAGES: int, TOGETHER: int, PR: int, PC: int,
) -> None:  # fmt: skip
    """This worker's tiles of a part, from row `top` of tiles of `a` on, each told to its mover when it is there."""
    end = last_tile(a, BM, BK)
    right = T.maximum(b.num_tiles((BK, BN))[1] - 1, 0)
    bottom = T.maximum(words.num_tiles((1, 1))[0] - 1, 0)
    k = T.i64(0)
    for t in T.range(T.maximum(begin, 0), T.minimum(down * columns, parts.num_tiles((PR, PC))[0]), step):
        i, c = place_of(t, down, columns, TOGETHER)
        m = T.minimum(T.maximum(top + i, 0), end)
        part = product(a, b, m, T.minimum(c, right), 0, steps, BM, BN, BK, STAGES, False).astype(parts.dtype)
        if PR != BM:
            part = as_dealt(part)
        parts.store((t, 0), part)
        words.atomic_add((T.minimum(T.maximum(k, 0), bottom), 0), T.full((1, 1), 1, T.i64), order=T.release)
        k += 1


def with_part(
    acc: T.Tile, box: T.View, landed: T.Peer, turn: T.Tile, mover: T.Tile, r: T.Tile, place: T.Tile, BM: int, PR: int,
    PC: int,
) -> T.Tile:  # fmt: skip
    """acc and the part in a place of the inbox, once rank r's mover has brought what it has in this turn."""
    T.wait_at_least(landed.local, turn, (mover, r))
    last = T.maximum(box.num_tiles((PR, PC))[0] - 1, 0)
    part = box.load((T.minimum(T.maximum(place, 0), last), 0), (PR, PC))
    if PR != BM:
        part = from_dealt(part)
    return acc + part.astype(T.f32)


@kernel
def gemm_scatter_moved(
    out: T.Exclusive, a: T.Shared, b: T.Shared, begun: T.Peer, inbox: T.Peer, tiles: T.Peer, told: T.Peer,
    landed: T.Peer, calls: T.Peer, starts: T.Shared, sign: T.i64, BK: T.Const[int], STAGES: T.Const[int],
    N: T.Const[int], MOVERS: T.Const[int], PIECE: T.Const[int], EVEN: T.Const[bool], TOGETHER: T.Const[int],
    PR: T.Const[int], PC: T.Const[int],
) -> None:  # fmt: skip
    """As gemm_scatter, with MOVERS programs that only move: the others, the workers, store parts in this rank's memory,
    which takes them no longer than a product's result, and go on. The number of movers divides that of the workers.

    A turn of the workers is as many tiles as there are of them; each mover has a share of it, in a row. `told`
    [2 turns, movers] counts a share's tiles, and is back at 0 before the next call; `landed` [2 movers, ranks] has the
    last turn that a mover of each rank has brought here, and behind that, for this rank alone, the last part that it
    has moved. The inbox has two places for what this rank sends, which parts take in turn, and one for each other rank
    and parity; tiles lie one after the other in it. `tiles` is the same memory, [tiles, words]. Workers write the first
    two places and check nothing before: nobody else does, and who wrote there in a call before, which lay otherwise,
    has been waited for. EVEN: all ranks have the same number of whole tiles, which need no views of their own.
    """
    p, P = T.program_id(0), T.num_programs(0)
    me = inbox.rank
    last_epoch, last_sign = last_call(calls)
    BM, BN = out.tile_shape
    columns = T.cdiv(b.shape[1], BN)
    inner = a.shape[1]
    steps = a.num_tiles((BM, BK))[1]
    W = P - MOVERS
    share = W // MOVERS
    if p < MOVERS:
        e = last_epoch + 1
        greet(begun, e, sign)
        if last_sign != sign:
            check(begun, e, sign)
        move_parts(tiles, told, landed, starts, e, columns, share, BM, N, MOVERS, PIECE)
    spot = T.maximum(p - MOVERS, 0)
    box = inbox.local
    each = box.num_tiles((PR, PC))[0] // (2 * N)
    if N == 2 and EVEN:
        down = out.num_tiles()[0]
        words = told.local.slice((MOST_TURNS, spot // share), (MOST_TURNS, 1))
        compute_part(
            a, b, box.slice((each * PR, 0), (each * PR, PC)), words, down * ((me + 1) % N), down, columns, steps,
            T.where(p < MOVERS, down * columns, spot), W, BM, BN, BK, STAGES, TOGETHER, PR, PC,
        )  # fmt: skip
        dealt = down * columns
    else:
        dealt = T.i64(0)
        for d in T.range(1, N):
            to = (me + d) % N
            first, last = T.ld(starts, (to,), order=T.weak), T.ld(starts, (to + 1,), order=T.weak)
            theirs, down = a.slice((first, 0), (last - first, inner)), T.cdiv(last - first, BM)
            if N > 3 and d > 2:  # its place has the part before the last one
                for q in T.range(MOVERS):
                    T.wait_at_least(landed.local, (last_epoch + 1) * N + d - 2, (MOVERS + q, me))
            place = (spot + W - dealt % W) % W
            parts = box.slice((d % 2 * each * PR, 0), (each * PR, PC))
            words = told.local.slice((d % 2 * MOST_TURNS, place // share), (MOST_TURNS, 1))
            compute_part(
                theirs, b, parts, words, T.i64(0), down, columns, steps,
                T.where(p < MOVERS, down * columns, place), W, BM, BN, BK, STAGES, TOGETHER, PR, PC,
            )  # fmt: skip
            dealt += down * columns
    epoch = last_epoch + 1
    if EVEN:
        own, top = a, out.num_tiles()[0] * me
    else:
        first, last = T.ld(starts, (me,), order=T.weak), T.ld(starts, (me + 1,), order=T.weak)
        own, top = a.slice((first, 0), (last - first, inner)), T.i64(0)
    end = last_tile(own, BM, BK)
    check_once(begun, epoch, sign)
    t = (spot + W - dealt % W) % W
    turn = epoch * MOST_TURNS
    mover = t // share
    for tile in out.tiles(dealt=dealt):
        i, c = tile.index
        m = T.minimum(T.maximum(top + i, 0), end)
        acc = product(own, b, m, c, 0, steps, BM, BN, BK, STAGES, False)
        if N == 2:
            acc = with_part(acc, box, landed, turn, mover, 1 - me, slot_of(epoch, T.i64(1), N) * each + t, BM, PR, PC)
        else:
            for r in T.peers():
                place = slot_of(epoch, (me + N - r) % N, N) * each + t
                acc = with_part(acc, box, landed, turn, mover, r, place, BM, PR, PC)
        tile.store(acc.astype(out.dtype))
        t += W
        turn += 1
    T.st(calls.local, epoch, (p, 0), order=T.weak)
    T.st(calls.local, sign, (p, 2), order=T.weak)


PAIRS = 1 << 12
"""Tiles of one program in a call of gemm_scatter_pairs, at most."""


@kernel
def gemm_scatter_pairs(
    out: T.Exclusive, a: T.Shared, b: T.Shared, begun: T.Peer, inbox: T.Peer, paired: T.Peer, calls: T.Peer,
    sign: T.i64, BK: T.Const[int], STAGES: T.Const[int],
) -> None:  # fmt: skip
    """As gemm_scatter for two ranks with as many rows each: a tile of the other rank's and then the same of one's own,
    so that what is sent is on its way while the next tile is computed. The program that computes a tile here is the one
    that computes it there, so each waits for one word of `paired` [programs, 2], which counts up with each tile."""
    p = T.program_id(0)
    me = inbox.rank
    to = 1 - me
    epoch = T.ld(calls.local, (p, 0), order=T.weak) + 1
    BM, BN = out.tile_shape
    rows, inner = out.shape[0], a.shape[1]
    steps = a.num_tiles((BM, BK))[1]
    mine, others = epoch % 2 * 2 + me, epoch % 2 * 2 + to
    greet(begun, epoch, sign)
    if T.ld(calls.local, (p, 2), order=T.weak) != sign:
        check(begun, epoch, sign)
    check_once(begun, epoch, sign)
    theirs = a.slice((rows * to, 0), (rows, inner))
    own = a.slice((rows * me, 0), (rows, inner))
    end = last_tile(own, BM, BK)
    there, here = inbox.at(to), inbox.local
    word = epoch * PAIRS
    for tile in out.tiles():
        m, c = tile.index
        at = T.minimum(m, end)
        part = product(theirs, b, at, c, 0, steps, BM, BN, BK, STAGES, False).astype(inbox.dtype)
        there.store((mine, m, c), T.reshape(part, (1, BM, BN)))
        acc = product(own, b, at, c, 0, steps, BM, BN, BK, STAGES, False)
        T.st(paired, word, (p, me), rank=to, order=T.release)
        T.wait_at_least(paired.local, word, (p, to))
        acc += T.reshape(here.load((others, m, c), (1, BM, BN)), (BM, BN)).astype(T.f32)
        tile.store(acc.astype(out.dtype))
        word += 1
    T.st(calls.local, epoch, (p, 0), order=T.weak)
    T.st(calls.local, sign, (p, 2), order=T.weak)


def last_call(calls: T.Peer) -> tuple[T.Tile, T.Tile]:
    """The number of this rank's last call, and its sign. To be read in front of a product, and used behind it: then it
    comes while the product is under way, and the product does not wait for it."""
    p = T.program_id(0)
    return T.ld(calls.local, (p, 0), order=T.weak), T.ld(calls.local, (p, 2), order=T.weak)


@kernel
def gemm_reduce(
    out: T.Exclusive, a: T.Shared, b: T.Shared, begun: T.Peer, inbox: T.Peer, parts: T.Signal, calls: T.Peer,
    sign: T.i64, BK: T.Const[int], STAGES: T.Const[int], ONCE: T.Const[bool],
) -> None:  # fmt: skip
    """The sum over the ranks of a @ b, the same bits on every rank: each part goes to everybody as soon as it is
    computed, and everybody adds the same numbers in the same order. The inbox is as of gemm_scatter; the signal has a
    slot for each tile. With ONCE no program has more than a tile, and adds as soon as it has sent; the last one has
    none, so that what is different is found while the others wait."""
    p = T.program_id(0)
    me, n = inbox.rank, inbox.num_ranks
    BM, BN = out.tile_shape
    columns = T.cdiv(b.shape[1], BN)
    steps = a.num_tiles((BM, BK))[1]
    last, last_sign = last_call(calls)
    for tile in out.tiles():
        m, c = tile.index
        part = product(a, b, m, c, 0, steps, BM, BN, BK, STAGES, False).astype(inbox.dtype)
        epoch = last + 1
        place = epoch % 2 * n
        if last_sign != sign:
            greet(begun, epoch, sign)
            check(begun, epoch, sign)
        piece = T.reshape(part, (1, BM, BN))
        if not ONCE:
            inbox.local.store((place + me, m, c), piece)
        for r in T.peers():
            inbox.at(r).store((place + me, m, c), piece)
            parts.notify(to=r, slot=m * columns + c)
        if ONCE:
            acc = T.zeros((BM, BN), T.f32)
            for r in T.ranks():
                if r == me:
                    acc += part.astype(T.f32)
                else:
                    parts.wait(r, slot=m * columns + c)
                    acc += T.reshape(inbox.local.load((place + r, m, c), (1, BM, BN)), (BM, BN)).astype(T.f32)
            tile.store(acc.astype(out.dtype))
    epoch = last + 1
    place = epoch % 2 * n
    greet(begun, epoch, sign)
    check_once(begun, epoch, sign)
    if not ONCE:
        for tile in out.tiles():
            m, c = tile.index
            acc = T.zeros((BM, BN), T.f32)
            for r in T.ranks():
                if r != me:
                    parts.wait(r, slot=m * columns + c)
                acc += T.reshape(inbox.local.load((place + r, m, c), (1, BM, BN)), (BM, BN)).astype(T.f32)
            tile.store(acc.astype(out.dtype))
    T.st(calls.local, epoch, (p, 0), order=T.weak)
    T.st(calls.local, sign, (p, 2), order=T.weak)


def send_part(mine: T.Tile, words: T.Peer, slot: T.Tile, m: T.Tile, c: T.Tile, e: T.Tile, N: int) -> None:
    """This rank's words of a tile to all ranks; where there are two, to the other alone."""
    if N == 2:
        T.put_flagged(mine, words, (slot + words.rank, m, c), epoch=e, rank=1 - words.rank)
    else:
        for r in T.ranks():
            T.put_flagged(mine, words, (slot + words.rank, m, c), epoch=e, rank=r)


def take_part(words: T.Peer, slot: T.Tile, r: T.Tile, m: T.Tile, c: T.Tile, e: T.Tile, BM: int, BW: int) -> T.Tile:
    """The words of a tile that came from rank r."""
    return T.reshape(T.take_flagged(words, (1, BM, BW), (slot + r, m, c), epoch=e, dtype=T.u32), (BM, BW))


@kernel
def gemm_reduce_flagged(
    out: T.Exclusive, a: T.Shared, b: T.Shared, begun: T.Peer, words: T.Peer, calls: T.Peer, sign: T.i64,
    BK: T.Const[int], STAGES: T.Const[int], N: T.Const[int], PACK: T.Const[bool], DT: T.Const[T.DType],
) -> None:  # fmt: skip
    """As gemm_reduce, each word of a part with its own flag: one flight over the link and no signal, for twice the
    bytes. words [2 ranks, rows, words of a row]. With PACK two neighbours of type DT are a word, of `out` too, which
    is seen as words then; else parts travel as f32.
    """
    p = T.program_id(0)
    BM, BW = out.tile_shape
    BN = 2 * BW if PACK else BW
    steps = a.num_tiles((BM, BK))[1]
    last, last_sign = last_call(calls)
    for tile in out.tiles():
        m, c = tile.index
        part = product(a, b, m, c, 0, steps, BM, BN, BK, STAGES, False)
        epoch = last + 1
        slot = epoch % 2 * N
        e = (epoch << 8) + (sign & 255)
        if PACK:
            pairs = T.reshape(part, (BM, BW, 2))
            first = T.reshape(T.extract(pairs, (0, 0, 0), (BM, BW, 1)), (BM, BW))
            second = T.reshape(T.extract(pairs, (0, 0, 1), (BM, BW, 1)), (BM, BW))
            mine = pair(first, second, DT)
        else:
            mine = T.bitcast(part, T.u32)
        if last_sign != sign:  # who takes a word of this call knows that its sender has begun it, and needs no other
            greet(begun, epoch, sign)
            check(begun, epoch, sign)
        send_part(T.reshape(mine, (1, BM, BW)), words, slot, m, c, e, N)
        if N == 2:
            other = take_part(words, slot, 1 - words.rank, m, c, e, BM, BW)
            if PACK:
                first = low(mine, DT, T.f32) + low(other, DT, T.f32)
                second = high(mine, DT, T.f32) + high(other, DT, T.f32)
            else:
                first = T.bitcast(mine, T.f32) + T.bitcast(other, T.f32)
        else:
            other = take_part(words, slot, T.i64(0), m, c, e, BM, BW)
            if PACK:
                first, second = low(other, DT, T.f32), high(other, DT, T.f32)
            else:
                first = T.bitcast(other, T.f32)
            for r in T.range(1, N):
                other = take_part(words, slot, r, m, c, e, BM, BW)
                if PACK:
                    first = first + low(other, DT, T.f32)
                    second = second + high(other, DT, T.f32)
                else:
                    first = first + T.bitcast(other, T.f32)
        if PACK:
            tile.store(pair(first, second, DT))
        else:
            tile.store(first.astype(out.dtype))
    T.st(calls.local, last + 1, (p, 0), order=T.weak)
    T.st(calls.local, sign, (p, 2), order=T.weak)
