"""How each matrix product is made on each architecture: the data of the table in the docs. Compiles nothing.

What is said here is what Triton 3.6 makes of a product whose tiles are large enough for the tensor cores (64 rows and
more on sm_90 and newer, else what sm_80 has); a test compiles every entry and looks for the instruction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from peertile.backends.cuda.target import capability
from peertile.dtypes import DType
from peertile.ir.ops import MMA_TYPES, Precision

__all__ = ["ARCHES", "GpuProduct", "gpu_product"]

ARCHES: Final = ("sm_80", "sm_90", "sm_100", "sm_103")
"""Architectures of the table."""


@dataclass(frozen=True, slots=True)
class GpuProduct:
    """`instruction` is found in the PTX; `is_native` is false where factors are converted first; `batched` is None
    where a product with a batch axis is refused."""

    instruction: str
    is_native: bool
    how: str
    batched: str | None


_OLD: Final = "mma.sync"
_CORES: Final = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 103: "tcgen05.mma"}


def gpu_product(dtype: DType, precision: Precision, arch: str) -> GpuProduct | None:
    """How `T.mma` of two factors of `dtype` is made on `arch`; None where it is refused by name."""
    if dtype.name not in MMA_TYPES or (precision is Precision.TF32 and dtype.name != "f32"):
        return None
    number = capability(arch)
    cores = _CORES[number]
    if precision is Precision.TF32:
        return GpuProduct(cores, True, f"tensor cores ({cores}), tf32", _OLD)
    if dtype.name == "f32":
        return GpuProduct("fma.rn.f32", True, "multiply-adds of f32", "fma.rn.f32")
    if dtype.name == "f64":
        if number >= 100:
            return GpuProduct("fma.rn.f64", True, "multiply-adds of f64", "fma.rn.f64")
        return GpuProduct(_OLD, True, f"tensor cores ({_OLD})", _OLD)
    if dtype.name in ("i8", "u8"):
        # The fifth generation of tensor cores has no integers.
        cores = cores if number < 100 else _OLD
        if dtype.name == "i8":
            return GpuProduct(cores, True, f"tensor cores ({cores})", _OLD)
        return GpuProduct(cores, False, f"as i8, less 128, with a correction; tensor cores ({cores})", None)
    if dtype.bits == 8 and number < 90:
        if dtype.name == "f8e4m3":
            return None
        return GpuProduct(_OLD, False, f"converted to f16; tensor cores ({_OLD})", _OLD)
    return GpuProduct(cores, True, f"tensor cores ({cores})", _OLD)
