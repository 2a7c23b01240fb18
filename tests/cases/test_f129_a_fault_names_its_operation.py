"""An operation fails, good ones follow, then the host synchronises: the failed one is named, with its line."""

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.sim.verdicts import VerdictKind


@pt.kernel
def good(z: T.Exclusive):
    z.store(z.load() + 1.0)


@pt.kernel
def bad(z: T.Exclusive, at: T.i64):
    T.assert_(at < 4, "the place does not exist")
    z.store(z.load() + 1.0)


def test_the_verdict_names_the_kernel_and_the_line() -> None:
    def main(group) -> None:
        z = pt.zeros((16,), pt.f32)
        running = [good(z.partition(16)).submit(), bad(z.partition(16), group.rank + 3).submit()]
        running += [good(z.partition(16)).submit() for _ in range(3)]
        for submission in running:
            submission.wait()

    (verdict,) = check(main, 2, schedules=1).verdicts
    assert verdict.kind is VerdictKind.KERNEL
    text = str(verdict)
    assert "the place does not exist" in text
    assert "program 0 of bad on rank 1" in text
    assert 'T.assert_(at < 4, "the place does not exist")' in text
