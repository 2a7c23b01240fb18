"""Two launches of one kernel in flight at once keep their own arguments."""

import pytest
from host_cases import device, holding, values

import peertile as pt
import peertile.language as T

pytestmark = pytest.mark.any_device


@pt.kernel
def set_to(z: T.Exclusive, value: T.f32):
    z.store(T.full(z.tile_shape, value, T.f32))


def test_each_launch_reads_the_arguments_it_was_given():
    streams = [device().stream() for _ in range(4)]
    outs = [pt.zeros(4, pt.f32) for _ in streams]
    set_to(outs[0].partition(4), 9.0).sync()
    with holding(*streams):
        futures = [
            set_to(out.partition(4), float(k)).submit(s) for k, (out, s) in enumerate(zip(outs, streams, strict=True))
        ]
        pt.zeros(4, pt.f32)
    for future in futures:
        future.wait(20)
    assert [values(out)[0] for out in outs] == [0, 1, 2, 3]
