"""The text form of the IR on the simulated machine: a kernel that was printed and parsed does what it did, and breaks
what it broke, at the same lines."""

import numpy as np
import pytest
from tests.sim.kernels import all_reduce_kernel, box_type, floats, two_shot_kernel

from peertile.ir.core import Kernel
from peertile.ir.text import parse_kernel, print_kernel
from peertile.meaning import new_mailbox, new_signal
from peertile.sim.explore import explore
from peertile.sim.runs import Case, kernel_case
from peertile.sim.verdicts import VerdictKind
from peertile.testing.fences import Change, changed, ordering_ops


def two_shot(kernel: Kernel, outs: list) -> Case:
    def make():
        outs.append(floats(2, 64))
        return [outs[-1], floats(2, 64), new_signal(2, 2)]

    return kernel_case(kernel, 2, make, ranks=2)


def mailbox(kernel: Kernel, outs: list) -> Case:
    def make():
        outs.append(floats(3, 96))
        return [outs[-1], floats(3, 96), new_mailbox(box_type(16, 2, True), 3, 2)]

    return kernel_case(kernel, 2, make, ranks=3)


@pytest.mark.feature("K15", "sim")
@pytest.mark.parametrize(
    ("kernel", "case"), [(two_shot_kernel(), two_shot), (all_reduce_kernel(16, 2, True), mailbox)], ids=["shot", "box"]
)
def test_a_kernel_that_comes_back_from_its_text_runs_as_it_did(kernel: Kernel, case) -> None:
    text = print_kernel(kernel)
    again = parse_kernel(text)
    assert print_kernel(again) == text
    first, second = [], []
    ran = [explore(case(k, outs), 5) for k, outs in ((kernel, first), (again, second))]
    assert [report.clean for report in ran] == [True, True]
    assert [report.steps for report in ran] == [ran[0].steps] * 2
    for before, after in zip(first, second, strict=True):
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(a, b)
    assert any(np.any(part) for part in first[0])


@pytest.mark.feature("K15", "sim")
def test_a_fault_of_a_kernel_from_its_text_is_that_of_the_kernel() -> None:
    box = all_reduce_kernel(16, 2, True)
    first = next(k for k, op in enumerate(ordering_ops(box)) if op.NAME == "word_store")
    weak = changed(box, [(first, Change.WEAKEN)])
    reports = [explore(mailbox(kernel, []), 5) for kernel in (weak, parse_kernel(print_kernel(weak)))]
    assert [v.kind for v in reports[0].verdicts] == [VerdictKind.RACE]
    known, found = reports[0].verdicts[0], reports[1].verdicts[0]
    assert (found.headline, found.replay) == (known.headline, known.replay)
    for a, b in zip(known.accesses(), found.accesses(), strict=True):  # the text has no lines of a source
        assert (b.verb, b.object, b.elements, b.agent) == (a.verb, a.object, a.elements, a.agent)
