"""A tensor that nobody holds any more stays until its copy to the host is over, whatever other streams do."""

import gc

import pytest
from host_cases import device, holding

import peertile as pt

pytestmark = pytest.mark.any_device


def test_a_temporary_lives_until_its_copy_is_over():
    stream = device().stream()
    with holding(stream):
        future = pt.op.copy(pt.full(1000, 7, pt.f32)).submit(stream)
        gc.collect()
        others = [pt.full(1000, 9, pt.f32) for _ in range(20)]
    assert (future.wait(20) == 7).all()
    assert len(others) == 20
