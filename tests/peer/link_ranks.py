"""Kernels and rank functions of the tests of mailbox links, posts ahead and signatures. No pytest here."""

import numpy as np

import peertile as pt
import peertile.language as T
from peertile.errors import PeertileError

TILE, PROGRAMS = 64, 3
COUNT = TILE * PROGRAMS


@pt.kernel
def sums(out: T.Exclusive, x: T.Shared, box: T.Mailbox, rounds: T.i64):
    for tile in out.tiles():
        acc = T.zeros(tile.tile_shape, out.dtype)
        for k in T.range(rounds):
            box.post(x.load_like(tile) + T.full(tile.tile_shape, k, out.dtype))
            for source, part in box.collect(sources=True):
                acc += part * (source + 1)
        tile.store(acc)


@pt.kernel
def sums_ahead(out: T.Exclusive, x: T.Shared, box: T.Mailbox, rounds: T.i64):
    """As sums of one round each, with two rounds in flight."""
    acc = T.zeros(out.tile_shape, out.dtype)
    mine = x.load_like(out)
    box.post(mine)
    for k in T.range(1, rounds):
        box.post(mine + T.full(out.tile_shape, k, out.dtype))
        for source, part in box.collect(sources=True):
            acc += part * (source + 1)
    for source, part in box.collect(sources=True):
        acc += part * (source + 1)
    out.store(acc)


@pt.kernel
def some(out: T.Exclusive, box: T.Mailbox, step: T.i64):
    """A tile for one rank alone in each round; the other links are empty."""
    me, n = box.rank, box.num_ranks
    acc = T.zeros(out.tile_shape, out.dtype)
    for k in T.range(3):
        with box.round() as r:
            r.put(T.full(out.tile_shape, me * 10 + k, out.dtype), to=(me + step) % n)
        for source, part in box.collect(sources=True):
            acc += part + source * 1000
    out.store(acc)


@pt.kernel
def astray(out: T.Exclusive, box: T.Mailbox):
    """Puts to its predecessor, which is no receiver on a ring."""
    me, n = box.rank, box.num_ranks
    with box.round() as r:
        r.put(T.zeros(out.tile_shape, out.dtype), to=(me + n - 1) % n)
    for part in box.collect():
        out.store(part)


def graph(kind, n):
    return {
        "all": None,
        "ring": pt.Links.ring(n),
        "other way": pt.Links.ring(n, -1),
        "broadcast": pt.Links.broadcast(n, n - 1),
        "pair": pt.Links.among(n, {0, n - 1}),
        "chain": pt.Links.of(n, [(r, r + 1) for r in range(n - 1)]),
        "none": pt.Links.of(n, []),
    }[kind]


def links_carry(group, kinds, depths, ahead, rounds, launches):
    """Sums over every graph and depth; returns which were acknowledged."""
    n, me = group.size, group.rank
    kernel = sums if ahead == 1 else sums_ahead
    acknowledged = []
    base = np.arange(COUNT)
    with pt.SymmetricHeap(group, size_bytes=8 << 20) as heap:
        x = pt.asarray(base + 1000 * me)
        for kind in kinds:
            for depth in depths:
                box = heap.mailbox(
                    tile=TILE, dtype=pt.i64, programs=PROGRAMS, depth=depth, links=graph(kind, n), posts_ahead=ahead
                )
                sources = [s for s in range(n) if (s, me) in box.links.pairs]
                expected = np.zeros(COUNT, np.int64)
                for k in range(rounds):
                    for s in sources:
                        expected += (base + 1000 * s + k) * (s + 1)
                for _ in range(launches):
                    out = pt.full((COUNT,), -1, pt.i64)
                    kernel(out.partition(TILE), x, box, rounds).sync()
                    np.testing.assert_array_equal(out.numpy(), expected, err_msg=f"{kind} {depth}")
                acknowledged.append(box.acknowledged)
                heap.free(box)
    return acknowledged


@pt.kernel
def put_over(out: T.Exclusive, x: T.Shared, box: T.Mailbox, ROUNDS: T.Const[int]):
    """Several tiles to each rank in a round: which ranks they are is not seen while compiling."""
    for k in T.range(ROUNDS):
        with box.round() as r:
            for j in T.range(3 * T.num_ranks()):
                r.put(x.load((j + k,), (TILE,)), to=j % T.num_ranks())
        for source, part in box.collect(sources=True):
            if source == T.num_ranks() - 1:
                out.store(part)


def last_put_wins(group, rounds):
    with pt.SymmetricHeap(group, 1 << 20) as heap:
        box = heap.mailbox(tile=TILE, dtype=pt.i64, programs=1)
        out = pt.zeros(TILE, pt.i64)
        tiles = 3 * group.size + rounds
        x = pt.asarray(np.repeat(np.arange(tiles), TILE))
        put_over.grid(1)(out.partition((TILE,)), x, box, rounds).sync()
        # The last of the three to this rank, in the last round.
        assert (out.numpy() == 2 * group.size + group.rank + rounds - 1).all()


def some_get_tiles(group, kind, step):
    n, me = group.size, group.rank
    with pt.SymmetricHeap(group, size_bytes=8 << 20) as heap:
        box = heap.mailbox(tile=TILE, dtype=pt.i64, programs=PROGRAMS, links=graph(kind, n))
        out = pt.full((COUNT,), -1, pt.i64)
        some(out.partition(TILE), box, step).sync()
        source = (me - step) % n
        np.testing.assert_array_equal(out.numpy(), sum(source * 10 + k + source * 1000 for k in range(3)))
    return True


def told(error):
    return type(error).__name__, str(error).splitlines()[0]


def puts_astray(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        box = heap.mailbox(tile=TILE, dtype=pt.i64, programs=1, links=graph("ring", group.size))
        out = pt.zeros((TILE,), pt.i64)
        try:
            astray(out.partition(TILE), box).sync()
        except PeertileError as error:
            seen = told(error)
        group.recover()
    return seen


def mismatch(group, how):
    """Rank 0 runs something else than rank 1; both say what, and who."""
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        box = heap.mailbox(tile=TILE, dtype=pt.i64, programs=PROGRAMS, posts_ahead=2)
        x, out = pt.zeros((COUNT,), pt.i64), pt.zeros((COUNT,), pt.i64)
        first, rounds, programs = sums, 4, PROGRAMS
        if group.rank == 0:
            first = sums_ahead if how == "kernel" else sums
            rounds = 5 if how == "scalar" else 4
            programs = 2 if how == "grid" else PROGRAMS
        part = out.partition(TILE) if first is sums_ahead else out.partition(TILE).persistent(programs=programs)
        try:
            first(part, x, box, rounds).sync()
        except PeertileError as error:
            seen = told(error)
        group.recover()
    return seen


def different_links(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        try:
            heap.mailbox(tile=4, dtype=pt.f32, programs=1, links=pt.Links.ring(group.size, 1 if group.rank else 2))
        except PeertileError as error:
            return told(error)
    return None
