"""Which matrix products the cpu target has, and how: native, emulated or refused. A table, no code generation."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from peertile.dtypes import DType
from peertile.ir.ops import MMA_TYPES, Precision

__all__ = ["Product", "Support", "product"]


class Support(Enum):
    """How a target multiplies matrices of a type."""

    NATIVE = "native"
    """The processor has multiply-adds of the type."""
    EMULATED = "emulated"
    """Factors are converted, exactly, to a type that it has them of."""
    REFUSED = "refused"


class Product(NamedTuple):
    """One entry: how, and in which words for people."""

    support: Support
    how: str


_NATIVE_BF16: Final = frozenset({"avx512bf16", "avx512vl"})


def product(d: DType, precision: Precision, features: frozenset[str]) -> Product:
    """How `T.mma` of factors of dtype `d` runs on a processor with these LLVM features."""
    if d.name not in MMA_TYPES:
        return Product(Support.REFUSED, "no accumulator of this type")
    if precision is Precision.TF32:
        if d.name != "f32":
            return Product(Support.REFUSED, "the precision is for f32")
        return Product(Support.EMULATED, "in full f32, which is more precise")
    if d.name in ("f32", "f64"):
        return Product(Support.NATIVE, f"multiply-adds of {d.name}")
    if d.is_int:
        return Product(Support.EMULATED, "as pairs of i16, summed in i32")
    if d.name == "bf16" and features >= _NATIVE_BF16:
        return Product(Support.NATIVE, "dot products of bf16 pairs, summed in f32")
    return Product(Support.EMULATED, "converted to f32")
