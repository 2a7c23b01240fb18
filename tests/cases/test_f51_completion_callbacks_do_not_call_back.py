"""A function that the driver calls when work is over may not start work; handing it to a thread is fine."""

import threading

import pytest
from host_cases import values

import peertile as pt
from peertile.errors import UsageError

pytestmark = pytest.mark.any_device


@pytest.mark.native_only
def test_a_runtime_call_inside_a_completion_callback_is_refused():
    x = pt.zeros(4, pt.f32)
    with pytest.raises(UsageError) as caught:
        pt.op.host(lambda: pt.op.fill(x, 1).sync()).sync()
    assert str(caught.value) == (
        "driver: expected a call from outside host callbacks, got a runtime call inside a completion callback; "
        "hand the work to another thread"
    )
    over = threading.Event()
    worker = threading.Thread(target=lambda: (over.wait(20), pt.op.fill(x, 2).sync()))
    worker.start()
    pt.op.host(over.set).sync()
    worker.join(20)
    assert values(x) == [2] * 4
