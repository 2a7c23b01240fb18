"""Element types: names, sizes, promotion, numpy equivalents. Knows nothing of tiles or memory.

`ml_dtypes` is imported only when bf16 or fp8 meets numpy, since it costs as much as numpy itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Final

import numpy as np

from peertile.errors import ArgumentError

__all__ = [
    "ALL_DTYPES",
    "DType",
    "Kind",
    "b1",
    "bf16",
    "dtype_named",
    "f8e4m3",
    "f8e5m2",
    "f16",
    "f32",
    "f64",
    "from_numpy",
    "i8",
    "i16",
    "i32",
    "i64",
    "promote",
    "u8",
    "u16",
    "u32",
    "u64",
]


class Kind(Enum):
    """Families of element types."""

    BOOL = "bool"
    INT = "int"
    UINT = "uint"
    FLOAT = "float"


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. In kernel code, calling it makes a typed constant: `T.u32(0)`."""

    name: str
    kind: Kind
    bits: int

    def __repr__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        # Of the fields it would be hashed anew at each look-up, and these are keys everywhere; a string keeps its hash.
        return hash(self.name)

    @property
    def itemsize(self) -> int:
        """Bytes per element in memory (bool is one byte)."""
        return self.bits + 7 >> 3

    @property
    def is_float(self) -> bool:
        """Any floating-point type, bf16 and fp8 included."""
        return self.kind is Kind.FLOAT

    @property
    def is_int(self) -> bool:
        """Signed or unsigned integer; bool is not one."""
        return self.kind in (Kind.INT, Kind.UINT)

    @property
    def is_signed(self) -> bool:
        """Whether values may be negative: signed integers and floats."""
        return self.kind in (Kind.INT, Kind.FLOAT)

    @property
    def is_bool(self) -> bool:
        """Whether it is the truth type."""
        return self.kind is Kind.BOOL

    @property
    def min(self) -> int:
        """Smallest value of an integer type."""
        return -(1 << (self.bits - 1)) if self.kind is Kind.INT else 0

    @property
    def max(self) -> int:
        """Largest value of an integer type."""
        return (1 << (self.bits - (self.kind is Kind.INT))) - 1

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype that stores this type on the host."""
        return _numpy_dtype(self.name)

    def __call__(self, value: Any) -> Any:
        """A host value of this type (numpy scalar); inside a kernel the compiler reads it as a cast."""
        return self.numpy.type(value)


b1: Final = DType("bool", Kind.BOOL, 1)
i8: Final = DType("i8", Kind.INT, 8)
i16: Final = DType("i16", Kind.INT, 16)
i32: Final = DType("i32", Kind.INT, 32)
i64: Final = DType("i64", Kind.INT, 64)
u8: Final = DType("u8", Kind.UINT, 8)
u16: Final = DType("u16", Kind.UINT, 16)
u32: Final = DType("u32", Kind.UINT, 32)
u64: Final = DType("u64", Kind.UINT, 64)
f16: Final = DType("f16", Kind.FLOAT, 16)
bf16: Final = DType("bf16", Kind.FLOAT, 16)
f32: Final = DType("f32", Kind.FLOAT, 32)
f64: Final = DType("f64", Kind.FLOAT, 64)
f8e4m3: Final = DType("f8e4m3", Kind.FLOAT, 8)
f8e5m2: Final = DType("f8e5m2", Kind.FLOAT, 8)

ALL_DTYPES: Final = (b1, i8, i16, i32, i64, u8, u16, u32, u64, f16, bf16, f32, f64, f8e4m3, f8e5m2)
_BY_NAME: Final = {d.name: d for d in ALL_DTYPES}
_NUMPY_NAMES: Final = {
    "bool": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
    "f16": "float16", "f32": "float32", "f64": "float64",
}  # fmt: skip
_ML_NAMES: Final = {"bf16": "bfloat16", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
_FROM_NUMPY: Final = {numpy: ours for ours, numpy in (_NUMPY_NAMES | _ML_NAMES).items()}


@cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name in _NUMPY_NAMES:
        return np.dtype(_NUMPY_NAMES[name])
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_NAMES[name]))
    return dtype


def dtype_named(name: str) -> DType:
    """The dtype called `name` ("f32"); ArgumentError if there is none."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ArgumentError(f"dtype: expected one of {', '.join(_BY_NAME)}, got {name!r}") from None


def from_numpy(dtype: Any) -> DType:
    """The dtype that stores numpy's `dtype`; ArgumentError naming it if peertile has none."""
    name = np.dtype(dtype).name
    try:
        return _BY_NAME[_FROM_NUMPY[name]]
    except KeyError:
        raise ArgumentError(f"dtype: expected one of {', '.join(_FROM_NUMPY)}, got {name}") from None


def promote(a: DType, b: DType) -> DType | None:
    """The type of `a op b`, or None where there is no lossless common type (write a cast).

    Same family: the wider one. bool joins anything. An integer with a float gives the float. f16 with
    bf16, fp8 with anything but itself, and signed with unsigned of the same or larger size have none.
    """
    if a == b:
        return a
    if a.is_bool:
        return b
    if b.is_bool:
        return a
    if a.kind is b.kind:
        if a.bits == b.bits or (8 in (a.bits, b.bits) and a.is_float):
            return None
        return a if a.bits > b.bits else b
    if a.is_float or b.is_float:
        f = a if a.is_float else b
        return f if f.bits > 8 else None
    signed, unsigned = (a, b) if a.kind is Kind.INT else (b, a)
    return signed if signed.bits > unsigned.bits else None
