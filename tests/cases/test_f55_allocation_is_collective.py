"""An allocation of symmetric memory is a collective call: in another order than a barrier it can never pair up."""

import peertile as pt
from peertile.checker.check import check
from peertile.sim.verdicts import VerdictKind


def test_both_calls_are_named() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            if group.rank == 0:
                heap.empty((1,), pt.f32)
                group.barrier("mine")
            else:
                group.barrier("mine")
                heap.empty((1,), pt.f32)

    (verdict,) = check(main, 2, schedules=1).verdicts
    assert verdict.kind is VerdictKind.COLLECTIVE
    assert "barrier(mine)" in verdict.headline
    assert "SymmetricHeap allocation" in verdict.headline
