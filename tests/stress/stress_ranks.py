"""Rank functions of the stress tests. No pytest here: every rank imports this."""

import peertile as pt
import peertile.language as T

TILE = 32


def stalled(state):
    """The next number of a generator, and a sum that takes a random while to make: mostly short, at times long."""
    state = state * 6364136223846793005 + 1442695040888963407
    draw = (state >> 33) & 1023
    length = T.where(draw < 8, draw * 500, draw & 31)
    junk = T.f32(0)
    for _ in T.range(length):
        junk = junk * 0.5 + 1.0
    return state, T.where(junk < 0.0, 1, 0)


@pt.kernel
def rounds_of_a_mailbox(wrong: T.Exclusive, box: T.Mailbox, rounds: T.i64, seed: T.i64):
    """Counts the elements that differ from what their sender put into this round."""
    p, me = T.program_id(0), T.rank()
    bad = T.i64(0)
    state = seed + me * 7919 + p * 104729
    for e in T.range(rounds):
        state, zero = stalled(state)
        bad += zero
        box.post(T.iota(TILE, T.i64) + (me * 1000003 + e * 31 + p))
        for source, part in box.collect(sources=True):
            expected = T.iota(TILE, T.i64) + (source * 1000003 + e * 31 + p)
            bad += T.sum(T.where(part == expected, T.i64(0), T.i64(1)), axis=0)
            state, zero = stalled(state)
            bad += zero
    wrong.store(T.full((1,), bad, T.i64))


@pt.kernel
def rounds_ahead(wrong: T.Exclusive, box: T.Mailbox, rounds: T.i64, seed: T.i64):
    """As rounds_of_a_mailbox, with two rounds in flight; also counts tiles that come too often or not at all."""
    p, me = T.program_id(0), T.rank()
    bad = T.i64(0)
    state = seed + me * 7919 + p * 104729
    box.post(T.iota(TILE, T.i64) + (me * 1000003 + p))
    for e in T.range(1, rounds + 1):
        state, zero = stalled(state)
        bad += zero
        box.post(T.iota(TILE, T.i64) + (me * 1000003 + e * 31 + p))
        for source, part in box.collect(sources=True):
            expected = T.iota(TILE, T.i64) + (source * 1000003 + (e - 1) * 31 + p)
            bad += T.sum(T.where(part == expected, T.i64(0), T.i64(1)), axis=0)
            state, zero = stalled(state)
            bad += zero
    for source, part in box.collect(sources=True):
        expected = T.iota(TILE, T.i64) + (source * 1000003 + rounds * 31 + p)
        bad += T.sum(T.where(part == expected, T.i64(0), T.i64(1)), axis=0)
    wrong.store(T.full((1,), bad, T.i64))


@pt.kernel
def rounds_of_flags(wrong: T.Exclusive, words: T.Peer, rounds: T.i64, seed: T.i64):
    """Tiles whose elements carry their epoch, over two places; counts wrong elements."""
    p, me, n = T.program_id(0), words.rank, words.num_ranks
    bad = T.i64(0)
    state = seed + me * 7919 + p * 104729
    for e in T.range(rounds):
        epoch = (seed * rounds + e + 1).astype(T.u32)
        row = (p * 2 + e % 2) * n
        state, zero = stalled(state)
        bad += zero
        mine = (T.iota(TILE, T.i64) + (me * 10007 + e * 31 + p)).astype(T.i32)
        for r in T.ranks():
            T.put_flagged(T.reshape(mine, (1, TILE)), words, (row + me, 0), epoch=epoch, rank=r)
        for r in T.ranks():
            got = T.take_flagged(words, (1, TILE), (row + r, 0), epoch=epoch, dtype=T.i32)
            expected = (T.iota(TILE, T.i64) + (r * 10007 + e * 31 + p)).astype(T.i32)
            bad += T.sum(T.where(T.reshape(got, (TILE,)) == expected, T.i64(0), T.i64(1)), axis=0)
            state, zero = stalled(state)
            bad += zero
    wrong.store(T.full((1,), bad, T.i64))


@pt.kernel
def rounds_of_signals(wrong: T.Exclusive, x: T.Peer, ready: T.Signal, rounds: T.i64, seed: T.i64):
    """Push and pull of one word a program with two signals a round; counts wrong words."""
    p, me = T.program_id(0), x.rank
    bad = T.i64(0)
    state = seed + me * 7919 + p * 104729
    for e in T.range(rounds):
        x.local.store((p,), T.full((1,), me * 1000003 + e * 31 + p, T.i64))
        state, zero = stalled(state)
        bad += zero
        ready.notify()
        ready.wait()
        for r in T.ranks():
            got = T.sum(x.at(r).load((p,), (1,)), axis=0)
            bad += T.where(got == r * 1000003 + e * 31 + p, 0, 1)
        state, zero = stalled(state)
        bad += zero
        ready.notify()
        ready.wait()
    wrong.store(T.full((1,), bad, T.i64))


@pt.kernel
def rounds_of_barriers(wrong: T.Exclusive, x: T.Peer, b: T.Barrier, rounds: T.i64, seed: T.i64):
    """All programs of all ranks meet; each then reads a word of another program of another rank."""
    p, me, n = T.program_id(0), x.rank, x.num_ranks
    bad = T.i64(0)
    state = seed + me * 7919 + p * 104729
    for e in T.range(rounds):
        x.local.store((p,), T.full((1,), me * 1000003 + e * 31 + p, T.i64))
        state, zero = stalled(state)
        bad += zero
        b.sync_all()
        other, q = (me + 1) % n, (p + 1) % T.num_programs(0)
        got = T.sum(x.at(other).load((q,), (1,)), axis=0)
        bad += T.where(got == other * 1000003 + e * 31 + q, 0, 1)
        b.sync_all()
    wrong.store(T.full((1,), bad, T.i64))


def mailbox(group, depth, programs, rounds, launches):
    total = 0
    with pt.SymmetricHeap(group, size_bytes=8 << 20) as heap:
        box = heap.mailbox(tile=TILE, dtype=pt.i64, programs=programs, depth=depth)
        for launch in range(launches):
            wrong = pt.full((programs,), -1, pt.i64)
            rounds_of_a_mailbox(wrong.partition(1), box, rounds // launches, launch).sync()
            total += int(abs(wrong.numpy()).sum())
    return total


LINKS = {
    "ring": lambda n: pt.Links.ring(n),
    "broadcast": lambda n: pt.Links.broadcast(n, n - 1),
    "chain": lambda n: pt.Links.of(n, [(r, r + 1) for r in range(n - 1)]),
    "star": lambda n: pt.Links.of(n, [(0, r) for r in range(n)] + [(r, 0) for r in range(n)]),
}


def links(group, kind, depth, ahead, rounds, launches):
    total = 0
    kernel = rounds_of_a_mailbox if ahead == 1 else rounds_ahead
    with pt.SymmetricHeap(group, size_bytes=8 << 20) as heap:
        graph = LINKS[kind](group.size)
        box = heap.mailbox(tile=TILE, dtype=pt.i64, programs=2, depth=depth, links=graph, posts_ahead=ahead)
        for launch in range(launches):
            wrong = pt.full((2,), -1, pt.i64)
            kernel(wrong.partition(1), box, rounds // launches, launch).sync()
            total += int(abs(wrong.numpy()).sum())
    return total


def flags(group, programs, rounds, launches):
    total = 0
    with pt.SymmetricHeap(group, size_bytes=8 << 20) as heap:
        words = heap.zeros((programs * 2 * group.size, TILE), pt.u64)
        for launch in range(launches):
            wrong = pt.full((programs,), -1, pt.i64)
            rounds_of_flags(wrong.partition(1), words, rounds // launches, launch).sync()
            total += int(abs(wrong.numpy()).sum())
            # A rank has taken what was sent in its last turn, its peers perhaps not: the places begin again.
            group.barrier("taken")
    return total


def signals(group, programs, rounds, launches):
    total = 0
    with pt.SymmetricHeap(group, size_bytes=8 << 20) as heap:
        x, ready = heap.zeros((programs,), pt.i64), heap.signal(slots=programs)
        for launch in range(launches):
            wrong = pt.full((programs,), -1, pt.i64)
            rounds_of_signals(wrong.partition(1), x, ready, rounds // launches, launch).sync()
            total += int(abs(wrong.numpy()).sum())
    return total


def barriers(group, programs, rounds, launches):
    total = 0
    with pt.SymmetricHeap(group, size_bytes=8 << 20) as heap:
        x, b = heap.zeros((programs,), pt.i64), heap.barrier(programs=programs)
        for launch in range(launches):
            wrong = pt.full((programs,), -1, pt.i64)
            rounds_of_barriers(wrong.partition(1), x, b, rounds // launches, launch).sync()
            total += int(abs(wrong.numpy()).sum())
    return total
