"""Memory allocated inside a capture belongs to the graph: every launch writes the same block, and it goes with the
graph, not with its last launch."""

import gc

import pytest
from host_cases import device, values

import peertile as pt

pytestmark = pytest.mark.any_device


@pytest.mark.slow
def test_bytes_in_use_stay_flat_over_graphs_and_launches():
    stream = device().stream()
    gc.collect()
    before = device().memory().in_use
    for k in range(50):
        graph = pt.op.full(1000, k, pt.f32).graph_on(stream)
        out = graph.take_output()
        graph.launch().sync_on(stream)
        pt.op.fill(out, -1).sync_on(stream)
        graph.launch().sync_on(stream)
        assert values(out)[0] == k
        del graph, out
    gc.collect()
    assert device().memory().in_use == before
