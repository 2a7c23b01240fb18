"""Work that waits in a queue holds its inputs: memory that was dropped meanwhile is not handed out again."""

import gc

import pytest
from host_cases import add, device, holding, values

import peertile as pt

pytestmark = pytest.mark.any_device


def test_a_queued_launch_reads_the_memory_it_was_given():
    stream = device().stream()
    x, one, y = pt.full(1000, 4, pt.f32), pt.ones(1000, pt.f32), pt.zeros(1000, pt.f32)
    add(y.partition(1024), x, one).sync()
    with holding(stream):
        add(y.partition(1024), x, one).submit(stream)
        del x, one
        gc.collect()
        z = pt.full(1000, 100, pt.f32)
    stream.sync(20)
    assert (values(y)[0], values(z)[0]) == (5, 100)
