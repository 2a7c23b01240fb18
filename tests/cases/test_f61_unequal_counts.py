"""Ranks call the same collective with unequal sizes or element types."""

import pytest

import peertile as pt
from peertile.checker.check import check
from peertile.sim.verdicts import VerdictKind


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (lambda heap, r: heap.empty((8 - 2 * r,), pt.f32), ("rank 0: 'tensor f32[8]'", "rank 1: 'tensor f32[6]'")),
        (lambda heap, r: heap.empty((8 * (1 - r),), pt.f32), ("rank 0: 'tensor f32[8]'", "rank 1: 'tensor f32[0]'")),
    ],
)
def test_counts_are_named_by_rank(make, texts) -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            make(heap, group.rank)

    (verdict,) = check(main, 2, schedules=1).verdicts
    assert verdict.kind is VerdictKind.COLLECTIVE
    for text in texts:
        assert text in verdict.headline
