"""The kernels of the benchmarks."""

from __future__ import annotations

import peertile.language as T
from peertile.dtypes import f32 as F32
from peertile.kernel import kernel

__all__ = ["F32", "vector_add"]


@kernel
def vector_add(z: T.Exclusive, x: T.Shared, y: T.Shared) -> None:
    """z = x + y."""
    z.store(x.load_like(z) + y.load_like(z))
