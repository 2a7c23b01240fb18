"""Memory that one thread drops while its work is queued is not given to another thread."""

import threading

import pytest
from host_cases import device, holding

import peertile as pt

pytestmark = pytest.mark.any_device


@pytest.mark.native_only
def test_another_threads_tensor_is_not_written_by_queued_work():
    slow, fast = device().stream("slow"), device().stream("fast")
    seen = []
    with holding(slow):
        x = pt.zeros(1000, pt.f32)
        pt.op.fill(x, 5).submit(slow)
        address = x.address
        del x

        def work():
            y = pt.op.full(1000, 1, pt.f32).sync_on(fast)
            seen.append((y.address != address, y))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
    slow.sync(20)
    ((apart, y),) = seen
    assert apart
    assert (y.numpy() == 1).all()
