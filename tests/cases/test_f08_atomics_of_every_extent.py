"""A tile of flags is added to with release, for an even and an odd number of flags: the same verdict for both."""

import numpy as np
import pytest
from tests.sim.kernels import PEER, build

import peertile.language as T
from peertile.dtypes import i32
from peertile.ir.types import SymmetricType
from peertile.meaning import PerRank
from peertile.memory_model import Order
from peertile.sim.explore import explore
from peertile.sim.runs import kernel_case
from peertile.testing.fences import Change, changed, ordering_ops

FLAGS = SymmetricType(i32, 1, unit_stride=(True,))


def send(x: T.Peer, flags: T.Peer, N: T.Const[int]):
    if x.rank == 0:
        x.at(1).store((0,), T.full((16,), 1.0, T.f32))
        for k in T.range(flags.local.shape[0]):
            T.atom_add(flags, 1, (k,), rank=1, order=T.acq_rel)
    else:
        for k in T.range(flags.local.shape[0]):
            T.wait_ge(flags, 1, (k,))
        x.local.store((0,), x.local.load((0,), (16,)) * 2.0)


KERNEL = build(send, {"x": PEER, "flags": FLAGS}, {"N": 4})


def case(kernel, extent: int):
    def make():
        return [
            PerRank([np.zeros(16, np.float32) for _ in range(2)]),
            PerRank([np.zeros(extent, np.int32) for _ in range(2)]),
        ]

    return kernel_case(kernel, 1, make, ranks=2)


@pytest.mark.parametrize("extent", [3, 4])
def test_ordered_atomics_are_clean(extent: int) -> None:
    assert explore(case(KERNEL, extent), 50).clean


@pytest.mark.parametrize("extent", [3, 4])
def test_weakened_atomics_race(extent: int) -> None:
    weak = [(k, Change.WEAKEN) for k, op in enumerate(ordering_ops(KERNEL)) if op.attrs["order"] is Order.ACQ_REL]
    assert weak
    assert not explore(case(changed(KERNEL, weak), extent), 5).clean
