"""Barriers and all-reduces for rank counts that are no power of two, and with some rank stalled."""

import numpy as np
import pytest
from tests.sim.kernels import BARRIER, all_reduce_kernel, box_type, build, exclusive, floats, two_shot_kernel

import peertile.language as T
from peertile.meaning import PerRank, new_barrier, new_mailbox, new_signal
from peertile.sim.explore import explore
from peertile.sim.runs import kernel_case

RANKS = (1, 2, 3, 5, 6, 7)


def meet(z: T.Exclusive, b: T.Barrier):
    b.sync()
    z.store(T.full((1,), 1.0, T.f32))
    b.sync()


MEET = build(meet, {"z": exclusive(1), "b": BARRIER})


@pytest.mark.parametrize("ranks", RANKS)
def test_barriers(ranks: int) -> None:
    case = kernel_case(
        MEET, 2, lambda: [PerRank([np.zeros(2, np.float32) for _ in range(ranks)]), new_barrier(ranks, 2)], ranks=ranks
    )
    assert explore(case, 12, shrinks=0).clean


@pytest.mark.parametrize("ranks", RANKS)
def test_all_reduces_are_right_and_clean(ranks: int) -> None:
    n = 16 * 2
    expected = sum(np.arange(n, dtype=np.float32) + r for r in range(ranks))
    outputs = []

    def make_two_shot():
        out, x = floats(ranks, n), floats(ranks, n)
        outputs.append(out)
        return [out, x, new_signal(ranks, 1)]

    def make_mailbox():
        out, x = PerRank([np.zeros(n, np.float32) for _ in range(ranks)]), floats(ranks, n)
        outputs.append(out)
        return [out, x, new_mailbox(box_type(16), ranks, 1)]

    for kernel, make in ((two_shot_kernel(16), make_two_shot), (all_reduce_kernel(16), make_mailbox)):
        case = kernel_case(kernel, 1, make, ranks=ranks)
        for seed in range(6):
            report = explore(case, 1, seed=seed, shrinks=0)
            assert report.clean, str(report.verdicts[0])
            assert all(np.array_equal(part, expected) for part in outputs[-1])
