"""A loop of graph replays with host work in between: the next input is prepared while the device works.

Every rank does its own. Prints how much of the host's work was hidden behind the device's.
"""

import time

import numpy as np

import peertile as pt
import peertile.language as T

SHAPE, STEPS, LAYERS = (256, 256), 20, 4
CHECK = {"steps": 3}


@pt.kernel
def layer(y: T.Exclusive, x: T.Shared, w: T.Shared):
    """y = max(x w, 0)."""
    row, column = y.index
    acc = T.zeros((64, 64), T.f32)
    for k in T.range(x.num_tiles((64, 64))[1]):
        acc = T.mma(x.load((row, k), (64, 64)), w.load((k, column), (64, 64)), acc)
    y.store(T.maximum(acc, 0.0))


def network(x, weights):
    """A chain of layers, as one lazy operation."""
    op = pt.op.value(x)
    for w in weights:
        op = op.then(lambda x, w=w: layer(pt.empty(SHAPE, pt.f32).partition((64, 64)), x, w)).map(
            lambda y, *_: y.unpartition()
        )
    return op


def prepare(step):
    """The host's own work between two replays."""
    return np.random.default_rng(step).standard_normal(SHAPE).astype(np.float32)


@pt.program
def main(group, steps=STEPS):
    rng = np.random.default_rng(99 + group.rank)
    w = [rng.standard_normal(SHAPE).astype(np.float32) / 12 for _ in range(LAYERS)]
    stream = pt.current_device().stream("network")
    inp = pt.zeros(SHAPE, pt.f32)
    graph = network(inp, [pt.asarray(x) for x in w]).graph_on(stream)
    out = graph.take_output()

    inputs, spent = prepare(0), 0.0
    began = time.perf_counter()
    for step in range(steps):
        graph.update(pt.op.copy(inputs, to=inp))
        running = graph.launch().submit(graph.stream)
        used, start = inputs, time.perf_counter()
        inputs = prepare(step + 1)  # while the device works
        spent += time.perf_counter() - start
        running.wait()
    total = time.perf_counter() - began

    want = used.astype(np.float64)
    for x in w:
        want = np.maximum(want @ x, 0)
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-3, atol=1e-3 * np.abs(want).max())
    if group.rank == 0:
        print(f"{steps} replays took {total * 1e3:.1f} ms, {spent * 1e3:.1f} ms of host work went on meanwhile")
        print(f"graph_loop: {graph.replays} replays of {graph.nodes} nodes are right")


if __name__ == "__main__":
    pt.run(main)
