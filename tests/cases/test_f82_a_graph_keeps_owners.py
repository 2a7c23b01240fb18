"""A graph keeps what it was recorded with alive: buffers whose handles are gone, host arrays that are copied at
each replay. Memory that was given back on purpose ends the graph with an error."""

import gc

import numpy as np
import pytest
from host_cases import device, values

import peertile as pt
from peertile.errors import UsageError

pytestmark = pytest.mark.any_device


@pytest.mark.slow
@pytest.mark.parametrize("scoped", [True, False])
def test_a_replay_reads_what_was_recorded_not_what_took_its_place(scoped):
    stream = device().stream()
    out, copied = pt.zeros(4, pt.f32), pt.zeros(4, pt.f32)

    def make():
        b = pt.full(4, 5, pt.f32)
        ops = pt.op.copy(b, to=out), pt.op.copy(np.full(4, 3, np.float32), to=copied)
        if not scoped:
            return pt.zip(*ops).graph_on(stream)
        with pt.capture(stream) as scope:
            for op in ops:
                scope.record(op)
        return scope.graph

    graph = make()
    gc.collect()
    junk = [pt.full(4, 9, pt.f32) for _ in range(100)]
    graph.launch().sync_on(stream)
    assert (values(out), values(copied), len(junk)) == ([5] * 4, [3] * 4, 100)


def test_a_replay_after_an_explicit_close_is_an_error():
    stream, out = device().stream(), pt.zeros(4, pt.f32)
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        b = heap.zeros((4,), pt.f32)
        graph = pt.op.copy(b.local, to=out).graph_on(stream, "the graph")
        heap.free(b)
        with pytest.raises(UsageError) as caught:
            graph.launch().sync_on(stream)
        assert str(caught.value) == "the graph (replay 1): tensor f32[4] was freed; use it before that"
