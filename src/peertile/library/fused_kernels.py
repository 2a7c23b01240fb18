"""The kernels of products fused with communication, in the public language. `fused.py` checks and launches them.

Each is one launch on every rank, with the same number of programs. Nothing waits on the host.

How memory that peers write is reused, the invariant of all three: a rank writes into the staging of a peer only
after it has met it in `hello`. Whoever is met has begun this call, so its programs of all calls before have ended, and
with them their reads of its staging. A call ends, for each rank alone, when its own output is there.
"""

# Kernels: tiles have operators in the kernel language, not in Python.

from __future__ import annotations

import peertile.language as T
from peertile.kernel import kernel

__all__ = ["gather_gemm", "gemm_reduce", "gemm_scatter"]


def meet(hello: T.Mailbox, agreed: T.Tile) -> None:
    """Every rank is here, and called the same: `agreed` stands for what has to be equal, by a number from 0 on."""
    if agreed >= 0:  # always, and so it is part of the signature that peers compare
        hello.post(T.zeros((1,), T.u64))
        for _ in hello.collect():
            pass


def product(a: T.Shared, b: T.Shared, m: T.Tile, n: T.Tile, BM: int, BN: int, BK: int, STAGES: int) -> T.Tile:
    """Tile (m, n) of a @ b, f32."""
    acc = T.zeros((BM, BN), T.f32)
    for k in T.range(a.num_tiles((BM, BK))[1], stages=STAGES):
        acc = T.mma(a.load((m, k), (BM, BK)), b.load((k, n), (BK, BN)), acc)
    return acc


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


def wait_for_rows(arrived: T.Peer, starts: T.Shared, epoch: T.Tile, low: T.Tile, high: T.Tile, CHUNK: int) -> None:
    """Until rows [low, high) of what is gathered have come: chunk by chunk, of whichever ranks have some of them.

    Many programs wait for a chunk, so the epoch is that of the launch: a signal's belongs to the one who waits.
    """
    for r in T.ranks():
        first = T.ld(starts, (r,))
        last = T.ld(starts, (r + 1,))
        begin, end = T.maximum(low, first), T.minimum(high, last)
        if begin < end:
            for k in T.range((begin - first) // CHUNK, T.cdiv(end - first, CHUNK)):
                T.wait_at_least(arrived.local, epoch, (k, r))


@kernel
def gather_gemm(
    own: T.Exclusive, after: T.Exclusive, before: T.Exclusive, a: T.Shared, b: T.Shared, hello: T.Mailbox,
    gathered: T.Peer, arrived: T.Peer, turn: T.Peer, starts: T.Shared, agreed: T.i64,
    CHUNK: T.Const[int], MR: T.Const[int], MC: T.Const[int], MOVERS: T.Const[int],
    BK: T.Const[int], STAGES: T.Const[int],
) -> None:  # fmt: skip
    """(the rows of `a` of all ranks, in rank order) @ b, in three parts: the rows of this rank, of those after it, of
    those before it. A few programs send, the others compute what they have: one's own rows first."""
    p = T.program_id(0)
    me, n = gathered.rank, gathered.num_ranks
    epoch = T.ld(turn.local, (p,)) + 1
    BM, BN = own.tile_shape
    start, stop = T.ld(starts, (me,)), T.ld(starts, (me + 1,))
    total, inner = T.ld(starts, (n,)), a.shape[1]
    if p < MOVERS:
        meet(hello, agreed)
        send_rows(a, gathered, arrived, start, epoch, CHUNK, MR, MC, MOVERS)
    for tile in own.tiles():
        tile.store(product(a, b, tile.index[0], tile.index[1], BM, BN, BK, STAGES).astype(own.dtype))
    later = gathered.local.slice((stop, 0), (total - stop, inner))
    for tile in after.tiles():
        low = stop + tile.index[0] * BM
        wait_for_rows(arrived, starts, epoch, low, T.minimum(low + BM, total), CHUNK)
        tile.store(product(later, b, tile.index[0], tile.index[1], BM, BN, BK, STAGES).astype(own.dtype))
    earlier = gathered.local.slice((0, 0), (start, inner))  # one's own rows, which follow, are not in there
    for tile in before.tiles():
        low = tile.index[0] * BM
        wait_for_rows(arrived, starts, epoch, low, T.minimum(low + BM, start), CHUNK)
        tile.store(product(earlier, b, tile.index[0], tile.index[1], BM, BN, BK, STAGES).astype(own.dtype))
    T.st(turn.local, epoch, (p,))


# ---------------------------------------------------------------- product + reduction


@kernel
def gemm_scatter(
    out: T.Exclusive, a: T.Shared, b: T.Shared, hello: T.Mailbox, inbox: T.Peer, parts: T.Signal, starts: T.Shared,
    agreed: T.i64, BK: T.Const[int], STAGES: T.Const[int],
) -> None:  # fmt: skip
    """The rows of this rank in the sum over the ranks of a @ b. What others own is computed first and goes straight
    into their inbox; one's own comes last, when the others' parts have had time to arrive. Summed in rank order.

    The inbox has (tiles of a rank · ranks) tiles (BM, BN); the signal has a slot for each tile.
    """
    p, P = T.program_id(0), T.num_programs(0)
    me, n = inbox.rank, inbox.num_ranks
    BM, BN = out.tile_shape
    columns = T.cdiv(b.shape[1], BN)
    inner = a.shape[1]
    meet(hello, agreed)
    for d in T.range(1, n):
        to = (me + d) % n
        first, last = T.ld(starts, (to,)), T.ld(starts, (to + 1,))
        theirs = a.slice((first, 0), (last - first, inner))
        for t in T.range(p, T.cdiv(last - first, BM) * columns, P):
            part = product(theirs, b, t // columns, t % columns, BM, BN, BK, STAGES)
            inbox.at(to).store((t * n + me, 0, 0), T.reshape(part.astype(inbox.dtype), (1, BM, BN)))
            parts.notify(to=to, slot=t)
    first, last = T.ld(starts, (me,)), T.ld(starts, (me + 1,))
    mine = a.slice((first, 0), (last - first, inner))
    for tile in out.tiles():
        t = tile.index[0] * columns + tile.index[1]
        part = product(mine, b, tile.index[0], tile.index[1], BM, BN, BK, STAGES)
        acc = T.zeros((BM, BN), T.f32)
        for r in T.ranks():
            if r == me:
                acc += part
            else:
                parts.wait(r, slot=t)
                acc += T.reshape(inbox.local.load((t * n + r, 0, 0), (1, BM, BN)), (BM, BN)).astype(T.f32)
        tile.store(acc.astype(out.dtype))


@kernel
def gemm_reduce(
    out: T.Exclusive, a: T.Shared, b: T.Shared, hello: T.Mailbox, inbox: T.Peer, parts: T.Signal,
    agreed: T.i64, BK: T.Const[int], STAGES: T.Const[int],
) -> None:  # fmt: skip
    """The sum over the ranks of a @ b, the same bits on every rank: each part goes to everybody as soon as it is
    computed, and everybody adds the same numbers in the same order. Inbox and signal as of gemm_scatter."""
    me, n = inbox.rank, inbox.num_ranks
    BM, BN = out.tile_shape
    columns = T.cdiv(b.shape[1], BN)
    meet(hello, agreed)
    for tile in out.tiles():
        t = tile.index[0] * columns + tile.index[1]
        part = product(a, b, tile.index[0], tile.index[1], BM, BN, BK, STAGES)
        piece = T.reshape(part.astype(inbox.dtype), (1, BM, BN))
        inbox.local.store((t * n + me, 0, 0), piece)
        for r in T.peers():
            inbox.at(r).store((t * n + me, 0, 0), piece)
            parts.notify(to=r, slot=t)
    for tile in out.tiles():
        t = tile.index[0] * columns + tile.index[1]
        acc = T.zeros((BM, BN), T.f32)
        for r in T.ranks():
            if r != me:
                parts.wait(r, slot=t)
            acc += T.reshape(inbox.local.load((t * n + r, 0, 0), (1, BM, BN)), (BM, BN)).astype(T.f32)
        tile.store(acc.astype(out.dtype))
