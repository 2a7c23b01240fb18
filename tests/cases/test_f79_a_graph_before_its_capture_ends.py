"""A graph cannot be had, let alone replayed, before the scope that records it has ended."""

import pytest
from host_cases import device, values

import peertile as pt
from peertile.errors import UsageError

pytestmark = pytest.mark.any_device


def test_a_graph_exists_once_its_capture_has_ended():
    stream, x = device().stream(), pt.zeros(4, pt.f32)
    with pt.capture(stream, "early") as scope:
        scope.record(pt.op.fill(x, 1))
        with pytest.raises(UsageError) as caught:
            scope.graph.launch()
        assert str(caught.value) == "early: expected a capture that has ended; leave the with block first"
    scope.graph.launch().sync_on(stream)
    assert values(x) == [1] * 4
