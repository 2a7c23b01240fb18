"""One rank takes part with another element type."""

import peertile as pt
from peertile.checker.check import check


def test_element_types_are_named_by_rank() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            heap.empty((4,), pt.bf16 if group.rank == 0 else pt.f32)

    (verdict,) = check(main, 3, schedules=1).verdicts
    assert "rank 0: 'tensor bf16[4]'; ranks 1, 2: 'tensor f32[4]'" in verdict.headline
