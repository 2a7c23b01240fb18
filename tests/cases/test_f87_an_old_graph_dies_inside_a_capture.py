"""A graph that is collected while another capture is open is destroyed when that has ended: nothing of it is
recorded."""

import gc

import pytest
from host_cases import add, device, values

import peertile as pt

pytestmark = pytest.mark.any_device


@pytest.mark.slow
def test_the_new_graph_holds_what_was_recorded_and_no_more():
    stream, x, y = device().stream(), pt.ones(4, pt.f32), pt.zeros(4, pt.f32)
    circle = [pt.op.fill(x, 5).graph_on(stream)]
    circle.append(circle)
    with pt.capture(stream) as scope:
        del circle
        gc.collect()
        scope.record(add(y.partition(4), x, x))
    assert scope.graph.nodes == 1
    scope.graph.launch().sync_on(stream)
    assert values(y) == [2] * 4
