"""Handing memory to another library waits for what is queued on it; so does the next time."""

import threading

import numpy as np
import pytest
from host_cases import device

import peertile as pt

pytestmark = pytest.mark.any_device


@pytest.mark.cpu_only  # numpy looks at memory of the host
def test_a_view_of_another_library_sees_what_was_queued_before():
    x, release = pt.zeros(4, pt.f32), device().stream()
    for k in (2, 3):
        word = pt.zeros(1, pt.u32)
        pt.op.wait_eq(word, 1).then(lambda k=k: pt.op.fill(x, k)).submit(device().stream("queue"))
        got = []
        reader = threading.Thread(target=lambda got=got: got.append((np.from_dlpack(x) * 10).tolist()))
        reader.start()
        pt.op.set_signal(word, 1).sync_on(release)
        reader.join(20)
        assert got == [[10 * k] * 4]
