"""Small configurations that together come to every synchronising operation of the library's kernels. No pytest here.

Each runs a collective twice or more, on inputs that are written anew in between, and looks at the values. Sizes are
chosen for the branches of the kernels: one chunk, two, more than there are slots; `slot_bytes` is the smallest.
"""

import numpy as np

import peertile as pt
from peertile.library.collectives import Collectives
from peertile.library.selection import Algorithm
from peertile.testing.mutation import Configuration

__all__ = ["COLLECTIVES", "by_name", "families"]


def values(rank, n):
    return (np.arange(n) % 7 + rank).astype(np.float32)


def program(call, turns, programs):
    """`call(c, me, turn)` makes one collective and looks at what came of it."""

    def main(group):
        with Collectives(group, programs=programs, slot_bytes=4096) as c:
            for turn in range(turns):
                call(c, group.rank, turn)

    return main


def summed(n, algorithm, in_place=False):
    def call(c, me, turn):
        x = pt.asarray(values(me + turn, n))
        out = c.all_reduce(x, x if in_place else None, algorithm=algorithm).sync().numpy()
        assert np.array_equal(out, sum(values(r + turn, n) for r in range(c.group.size)))

    return call


def symmetric(n, algorithm=None, name="all_reduce"):
    """On symmetric tensors, made once and written anew in every turn."""

    def main(group):
        size, me = group.size, group.rank
        with pt.SymmetricHeap(group, size_bytes=1 << 19) as heap:
            x, out = heap.empty((n,), pt.f32), heap.empty((n * size if name == "all_gather" else n,), pt.f32)
            with Collectives(heap, programs=1, slot_bytes=4096) as c:
                for turn in range(2):
                    all_of = [values(r + turn, n) for r in range(size)]
                    x.copy_from(all_of[me])
                    if name == "all_reduce":
                        found = c.all_reduce(x, out, algorithm=algorithm).sync().local.numpy()
                        expected = sum(all_of)
                    elif name == "reduce_scatter":
                        found = c.reduce_scatter(x, pt.empty((n // size,), pt.f32)).sync().numpy()
                        expected = sum(all_of).reshape(size, -1)[me]
                    elif name == "all_gather":
                        found = c.all_gather(x, out).sync().local.numpy()
                        expected = np.concatenate(all_of)
                    else:
                        found = c.all_to_all(x, pt.empty((n,), pt.f32)).sync().numpy()
                        expected = np.concatenate([part.reshape(size, -1)[me] for part in all_of])
                    assert np.array_equal(found, expected)

    return main


def scattered(n):
    def call(c, me, turn):
        size = c.group.size
        out = c.reduce_scatter(pt.asarray(values(me + turn, n * size))).sync().numpy()
        assert np.array_equal(out, sum(values(r + turn, n * size) for r in range(size)).reshape(size, n)[me])

    return call


def gathered(n):
    def call(c, me, turn):
        out = c.all_gather(pt.asarray(values(me + turn, n))).sync().numpy()
        assert np.array_equal(out.ravel(), np.concatenate([values(r + turn, n) for r in range(c.group.size)]))

    return call


def traded(n):
    def call(c, me, turn):
        size = c.group.size
        out = c.all_to_all(pt.asarray(values(me + turn, n * size))).sync().numpy()
        expected = np.concatenate([values(r + turn, n * size).reshape(size, n)[me] for r in range(size)])
        assert np.array_equal(out, expected)

    return call


def spread(n, in_place):
    def call(c, me, turn):
        root = turn % c.group.size
        x = pt.asarray(values(me + turn, n))
        out = c.broadcast(x, None if in_place else pt.empty((n,), pt.f32), root=root).sync().numpy()
        assert np.array_equal(out, values(root + turn, n))

    return call


def collected(n):
    def call(c, me, turn):
        root = turn % c.group.size
        out = c.reduce(pt.asarray(values(me + turn, n)), root=root).sync()
        if me == root:
            assert np.array_equal(out.numpy(), sum(values(r + turn, n) for r in range(c.group.size)))

    return call


def uneven(n):
    """All-to-all in which rank s sends n · (s + 1) elements to everybody: some send more tiles than they get."""

    def call(c, me, turn):
        size = c.group.size
        sends, receives = [n * (me + 1)] * size, [n * (r + 1) for r in range(size)]
        out = c.all_to_all_v(pt.asarray(values(me + turn, sum(sends))), sends, receives).sync().numpy()
        parts = [values(r + turn, n * (r + 1) * size).reshape(size, n * (r + 1))[me] for r in range(size)]
        assert np.array_equal(out, np.concatenate(parts))

    return call


def meeting():
    def call(c, me, turn):
        c.barrier().sync()

    return call


def several(name, make, sizes, *, ranks=2, turns=2, programs=1):
    return [
        Configuration(f"{name}, {n} elements, {ranks} ranks", program(make(n), turns, programs), ranks) for n in sizes
    ]


def _all_reduces():
    for in_place in (False, True):
        where = " in place" if in_place else ""
        for algorithm, sizes in (
            (Algorithm.ONE_SHOT, (40, 300)), (Algorithm.FLAGGED, (2,)),
            (Algorithm.TWO_SHOT, (40, 200, 400, 800, 1300)), (Algorithm.RING, (40, 300)),
            (Algorithm.PIPELINED, (40, 200, 400, 800)),
        ):  # fmt: skip

            def make(n, algorithm=algorithm, in_place=in_place):
                return summed(n, algorithm, in_place)

            turns = 3 if algorithm in (Algorithm.ONE_SHOT, Algorithm.FLAGGED) else 2
            yield from several(f"all_reduce {algorithm.value}{where}", make, sizes, turns=turns)
            if algorithm is Algorithm.RING:
                yield from several(f"all_reduce {algorithm.value}{where}", make, (40, 300), ranks=3)
            if algorithm is Algorithm.ONE_SHOT:
                yield from several(
                    f"all_reduce {algorithm.value}{where}, 2 programs", make, (300,), turns=3, programs=2
                )


COLLECTIVES = (
    Configuration("barrier", program(meeting(), 3, 1)),
    *_all_reduces(),
    *(
        Configuration(f"all_reduce symmetric {a.value}, {n} elements", symmetric(n, a))
        for a in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)
        for n in (40, 200)
    ),
    *several("reduce_scatter", scattered, (40, 1100, 0), turns=3),
    Configuration("reduce_scatter symmetric", symmetric(128, name="reduce_scatter")),
    *several("all_gather", gathered, (40, 1100, 0), turns=3),
    Configuration("all_gather symmetric", symmetric(64, name="all_gather")),
    *several("all_to_all", traded, (40, 1100, 0), turns=3),
    Configuration("all_to_all symmetric", symmetric(128, name="all_to_all")),
    *several("broadcast in place", lambda n: spread(n, True), (40, 400, 5000)),
    *several("broadcast", lambda n: spread(n, False), (40, 400, 5000)),
    *several("reduce", collected, (40, 400, 5000)),
    *several("all_to_all_v", uneven, (40, 1100, 4500)),
)


def families():
    """The configurations in groups that have no kernel in common, by name."""
    found = {}
    for configuration in COLLECTIVES:
        name = configuration.name.partition(",")[0]
        # Gathers share their kernels.
        key = "gathers" if name.partition(" ")[0] in ("all_gather", "all_to_all") else name
        found.setdefault(key, []).append(configuration)
    return found


def by_name(name):
    """The configurations whose name starts so."""
    found = [c for c in COLLECTIVES if c.name.startswith(name)]
    assert found, name
    return found
