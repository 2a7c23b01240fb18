"""Lazy operations on the host: chains, zips, shared work, awaiting, a graph whose input changes.

Every rank does its own; nothing here communicates.
"""

import asyncio

import numpy as np

import peertile as pt
import peertile.language as T


@pt.kernel
def forward(y: T.Exclusive, x: T.Shared, w: T.Shared):
    """y = tanh(x w), a tile of 16 x 16 per program."""
    row, column = y.index
    acc = T.zeros((16, 16), T.f32)
    for k in T.range(x.num_tiles((16, 16))[1]):
        acc = T.mma(x.load((row, k), (16, 16)), w.load((k, column), (16, 16)), acc)
    y.store(T.tanh(acc))


@pt.kernel
def loss(out: T.Exclusive, y: T.Shared):
    """The mean of the squares of a 64 x 64 tensor."""
    total = T.f32(0)
    for row in T.range(y.num_tiles((16, 64))[0]):
        tile = y.load((row, 0), (16, 64))
        total += T.sum(T.sum(tile * tile, axis=1), axis=0)
    out.store(T.full((1,), total / 4096.0, T.f32))


def step(x, w):
    """A fresh lazy operation each time: an op is used once."""
    y, out = pt.empty((64, 64), pt.f32), pt.empty((1,), pt.f32)
    return (
        forward(y.partition((16, 16)), x, w)
        .then(lambda y, *_: loss(out.partition(1), y.unpartition()))
        .map(lambda out, *_: out.unpartition())
    )


def expected(x, w):
    return np.float32(np.mean(np.tanh(x.astype(np.float64) @ w) ** 2))


def check(tensor, x, w):
    np.testing.assert_allclose(tensor.numpy()[0], expected(x, w), rtol=1e-4)


async def many(xs, w, weights):
    """Awaited together: each chain on a stream of its own, the loop free meanwhile."""

    async def one(x):
        return await step(pt.asarray(x), weights)

    for x, result in zip(xs, await asyncio.gather(*(one(x) for x in xs)), strict=True):
        check(result, x, w)


@pt.program
def main(group):
    rng = np.random.default_rng(group.rank)
    w = rng.standard_normal((64, 64)).astype(np.float32) / 8
    xs = [rng.standard_normal((64, 64)).astype(np.float32) for _ in range(6)]
    weights = pt.asarray(w)

    left, right = pt.zip(step(pt.asarray(xs[0]), weights), step(pt.asarray(xs[1]), weights)).sync()  # in order
    check(left, xs[0], w)
    check(right, xs[1], w)

    asyncio.run(many(xs, w, weights))

    once = step(pt.asarray(xs[2]), weights).shared()  # runs once, whoever gets there first
    first, second = once.sync(), once.clone().sync_on(pt.current_device().stream())
    assert first is second
    check(first, xs[2], w)

    stream = pt.current_device().stream("replays")
    inp = pt.zeros((64, 64), pt.f32)
    graph = step(inp, weights).graph_on(stream)  # addresses are baked in: inp is what to change
    out = graph.take_output()  # unwritten until the first launch
    for x in xs:
        graph.update(pt.op.copy(x, to=inp))  # ordered before launches on graph.stream
        graph.launch().sync_on(graph.stream)
        check(out, x, w)

    if group.rank == 0:
        print(f"pipelines: {len(xs)} inputs agree, chained, awaited, shared and replayed")


if __name__ == "__main__":
    pt.run(main)
