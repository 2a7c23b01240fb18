"""Facts about strided views on the host: whether they stay inside, and whether two indices share an element."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

__all__ = ["ENUMERATE_LIMIT", "is_injective"]

ENUMERATE_LIMIT = 1 << 22
"""Elements up to which the places of a view are written down one by one, some 30 ms; beyond it must be proven."""


def is_injective(shape: Sequence[int], strides: Sequence[int]) -> bool | None:
    """Whether different indices are different places; None if it is neither proven nor small enough to try.

    Proven: with the axes by rising stride, each stride is more than all that lies below it spans.
    """
    axes = sorted((abs(s), n) for n, s in zip(shape, strides, strict=True) if n > 1)
    if prod(shape) == 0 or not axes:
        return True
    span = 0
    for stride, extent in axes:
        if stride <= span:
            break
        span += stride * (extent - 1)
    else:
        return True
    if any(stride == 0 for stride, _ in axes):
        return False
    count = prod(n for _, n in axes)
    if span < 0 or count > ENUMERATE_LIMIT:
        return None
    places = np.zeros(1, np.int64)
    for stride, extent in axes:
        places = (places[:, None] + stride * np.arange(extent, dtype=np.int64)).reshape(-1)
    return len(np.unique(places)) == count
