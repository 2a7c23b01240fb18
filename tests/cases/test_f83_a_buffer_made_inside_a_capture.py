"""Memory made inside a capture is the graph's: it takes over no block that the graph still writes, and graphs that
use one buffer give the right values in any order of replay."""

import itertools

import pytest
from host_cases import add, device, values

import peertile as pt

pytestmark = pytest.mark.any_device


def test_values_are_right_in_every_order_of_replays():
    stream = device().stream()
    workspace, x = pt.zeros(4, pt.f32), pt.ones(4, pt.f32)

    def recorded(by):
        with pt.capture(stream) as scope:
            temporary = scope.record(pt.op.full(4, by, pt.f32))
            address = temporary.address
            del temporary
            fresh = scope.record(pt.op.zeros(4, pt.f32))
            assert fresh.address != address  # the temporary's block is the graph's as long as the graph lives
            scope.record(pt.op.fill(workspace, by).then(lambda: add(fresh.partition(4), workspace, x)))
        return scope.graph, fresh

    (g1, out1), (g2, out2) = recorded(3), recorded(5)
    for order in itertools.product((g1, g2), repeat=3):
        for graph in order:
            graph.launch().sync_on(stream)
        assert values(workspace) == [3 if order[-1] is g1 else 5] * 4
    assert (values(out1), values(out2)) == ([4] * 4, [6] * 4)
