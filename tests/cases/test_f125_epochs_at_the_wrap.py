"""Epochs just before 2^31, 2^32, 2^63 and 2^64: no hang and no early pass, whoever stalls."""

import numpy as np
import pytest
from tests.sim.kernels import BARRIER, build, exclusive, floats, two_shot_kernel

from peertile.dtypes import u32
from peertile.meaning import new_signal
from peertile.memory_model import Cmp
from peertile.sim.explore import explore
from peertile.sim.runs import kernel_case
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import VerdictKind

KERNEL = two_shot_kernel(16)


@pytest.mark.sentence("SG-6")
@pytest.mark.sentence("MM-47")
@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 2, 2**63 - 2, 2**64 - 2])
def test_signals_pass_the_wrap(start: int) -> None:
    case = kernel_case(KERNEL, 1, lambda: [floats(2, 32), floats(2, 32), new_signal(2, 1, start)], ranks=2, launches=3)
    report = explore(case, 30, shrinks=0)
    assert report.clean, str(report.verdicts[0])


def rounds(cmp: Cmp, start: int):
    words = [Cell(f"word of {r}", rank=r, start=start, dtype=u32) for r in range(2)]
    data = [[Cell(f"data {k} of {r}", rank=r) for k in range(2)] for r in range(2)]

    def rank(r):
        def run(p):
            for k in range(1, 7):
                p.write(data[r][k % 2], k)
                epoch = (start + k) % 2**32
                yield from p.put(words[1 - r], epoch)
                yield from p.wait(words[r], epoch, cmp)
                p.read(data[1 - r][k % 2])

        return run

    return script_case([(0, rank(0)), (1, rank(1))])


@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 2])
def test_the_modular_comparison_is_right(start: int) -> None:
    assert explore(rounds(Cmp.AT_LEAST, start), 50).clean


def test_the_plain_comparison_is_not() -> None:
    report = explore(rounds(Cmp.GE, 2**32 - 2), 50)
    assert report.verdicts[0].kind in (VerdictKind.RACE, VerdictKind.DEADLOCK)


__all__ = ["BARRIER", "build", "exclusive", "np"]
