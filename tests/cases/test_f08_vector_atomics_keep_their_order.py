"""F08: an acq_rel atomic on a tile keeps its order whatever the extent of the tile is."""

import re

import numpy as np
import pytest
from case_ranks import spawn
from tests.frontend.helpers import build, peer
from tests.frontend.test_syntax import compiled

import peertile as pt
import peertile.language as T
from peertile.backends.cpu.compile import lower_to_text
from peertile.passes.pipeline import run_pipeline

pytestmark = pytest.mark.any_device


@pytest.mark.sentence("MM-90")
@pytest.mark.parametrize("extent", [1, 2, 4, 64])
@pytest.mark.parametrize("order", ["relaxed", "acquire", "release", "acq_rel"])
def test_the_emitted_order_is_the_one_asked_for(order, extent):
    body = f"p.at(0).atomic_add((0,), T.ones(({extent},), T.i32), order=T.{order})"
    text = lower_to_text(run_pipeline(build(compiled(body, "p"), p=peer(pt.i32))))
    emitted = re.findall(r"atomicrmw add ptr %\S+, i32 \S+ (\w+),", text)
    assert emitted
    assert set(emitted) == {{"relaxed": "monotonic"}.get(order, order)}


@pt.kernel
def publish(x: T.Peer, flags: T.Peer, out: T.Exclusive, N: T.Const[int]):
    if x.rank == 0:
        x.at(1).store((0,), T.full((64,), 5, T.i64))
        flags.at(1).atomic_add((0,), T.ones((N,), T.i64), order=T.acq_rel)
    else:
        for k in T.static_range(N):
            T.wait_eq(flags, 1, (k,))
    out.store(x.local.load((0,), (64,)))


def ranks(group, extent):
    with pt.SymmetricHeap(group, 1 << 20) as heap:
        x, flags, out = heap.zeros((64,), pt.i64), heap.zeros((4,), pt.i64), pt.zeros((64,), pt.i64)
        publish(x, flags, out.partition(64), N=extent).sync()
        group.barrier("done")
    return out.numpy()


@pytest.mark.parametrize("extent", [1, 4])
def test_what_was_written_before_is_seen(extent):
    assert np.all(spawn(ranks, 2, extent)[1] == 5)
