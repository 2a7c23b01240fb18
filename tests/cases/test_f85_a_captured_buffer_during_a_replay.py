"""While a replay runs, writing what it reads and reading what it writes is refused, and freeing is put off."""

import gc

import pytest
from host_cases import add, device, holding, values

import peertile as pt
from peertile.errors import LeaseError

pytestmark = pytest.mark.any_device


def test_a_replay_borrows_what_was_captured():
    stream, other = device().stream("replays"), device().stream("other")
    x, one, y = pt.ones(4, pt.f32), pt.ones(4, pt.f32), pt.zeros(4, pt.f32)
    graph = add(y.partition(4), x, one).graph_on(stream, "the graph")
    for _ in range(2):
        graph.launch().sync_on(stream)
    with holding(stream):
        future = graph.launch().submit(stream)
        for conflict, verb in ((pt.op.fill(x, 7), "write"), (pt.op.copy(y), "read")):
            with pytest.raises(LeaseError) as caught:
                conflict.sync_on(other)
            assert f" would {verb} a tensor f32[4], but the graph (replay 3) on replays (" in str(caught.value)
        del x, one
        gc.collect()
        pt.full(4, 99, pt.f32)
    future.wait(20)
    assert values(y) == [2] * 4


def test_an_update_comes_before_the_next_replay():
    stream = device().stream()
    x, one, y = pt.ones(4, pt.f32), pt.ones(4, pt.f32), pt.zeros(4, pt.f32)
    graph = add(y.partition(4), x, one).graph_on(stream)
    with holding(stream):
        first = graph.launch().submit(stream)
        graph.update(pt.op.fill(x, 7))
        second = graph.launch().then(lambda: pt.op.copy(y)).schedule(pt.SingleStream(stream))
    first.wait(20)
    assert second.wait(20).tolist() == [8] * 4
