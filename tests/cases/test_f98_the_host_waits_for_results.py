"""What the host reads has been written, and memory that queued work still writes is not handed out again."""

import gc

import numpy as np
import pytest
from host_cases import device, holding, values

import peertile as pt

pytestmark = pytest.mark.any_device


def test_memory_that_is_still_written_is_not_reused():
    stream = device().stream()
    with holding(stream):
        a = pt.zeros(1000, pt.f32)
        pt.op.fill(a, 9).submit(stream)
        del a
        gc.collect()
        b = pt.asarray(np.zeros(1000, np.float32))
    stream.sync(20)
    assert (b.numpy() == 0).all()


def test_a_result_on_the_host_is_the_result():
    x = pt.zeros(4, pt.f32)
    future = pt.op.fill(x, 3).then(lambda: pt.op.copy(x)).map(lambda h: float(h[0])).submit(device().stream())
    assert future.wait(20) == 3.0
    pt.op.fill(x, 4).submit(device().stream())
    assert values(x) == [4] * 4
