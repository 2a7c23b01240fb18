"""How dtypes, numbers and names are spelled in Triton source. Knows no ops and no Triton package.

Memory and registers may differ: a bool is a `uint8` in memory and an `int1` in registers.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable
from typing import Final

import numpy as np

from peertile.dtypes import DType
from peertile.ir.ops import Padding

__all__ = [
    "BITS",
    "MEMORY",
    "REGISTER",
    "SIGNATURE",
    "UNSIGNED",
    "Names",
    "bits_of",
    "from_bits",
    "literal",
    "padding_bits",
    "power_of_two_part",
    "shape_text",
]

REGISTER: Final = {
    "bool": "tl.int1", "i8": "tl.int8", "i16": "tl.int16", "i32": "tl.int32", "i64": "tl.int64",
    "u8": "tl.uint8", "u16": "tl.uint16", "u32": "tl.uint32", "u64": "tl.uint64",
    "f16": "tl.float16", "bf16": "tl.bfloat16", "f32": "tl.float32", "f64": "tl.float64",
    "f8e4m3": "tl.float8e4nv", "f8e5m2": "tl.float8e5",
}  # fmt: skip
"""Type of an element in registers."""

MEMORY: Final = REGISTER | {"bool": "tl.uint8"}
"""Type that pointers point to."""

SIGNATURE: Final = {
    "bool": "u8", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64", "u8": "u8", "u16": "u16", "u32": "u32",
    "u64": "u64", "f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64", "f8e4m3": "fp8e4nv", "f8e5m2": "fp8e5",
}  # fmt: skip
"""Type of a pointer parameter, after its `*`."""

BITS: Final = {8: "tl.int8", 16: "tl.int16", 32: "tl.int32", 64: "tl.int64"}
UNSIGNED: Final = {8: "tl.uint8", 16: "tl.uint16", 32: "tl.uint32", 64: "tl.uint64"}

_TAKEN: Final = frozenset(
    {*keyword.kwlist, *keyword.softkwlist, "tl", "triton", "libdevice", "float", "int", "range", "len", "print"}
)
_SPOILED = re.compile(r"[^A-Za-z0-9_]")


class Names:
    """Gives out identifiers, each once. Names of ours start with an underscore, those of users never do."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken: set[str] = {*_TAKEN, *reserved}
        self._next: dict[str, int] = {}

    def fresh(self, hint: str, default: str = "v") -> str:
        """A new name like `hint`."""
        base = _SPOILED.sub("_", hint).strip("_") or default
        if base[0].isdigit():
            base = f"{default}{base}"
        return self._unique(base)

    def own(self, base: str) -> str:
        """A new name for a variable that no value of the kernel stands behind."""
        return self._unique(f"_{base}")

    def _unique(self, base: str) -> str:
        name = base
        while name in self._taken:
            self._next[base] = self._next.get(base, 0) + 1
            name = f"{base}_{self._next[base]}"
        self._taken.add(name)
        return name


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as Triton reads it: `(128, 64)`, `(256,)`, `()`."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def power_of_two_part(n: int) -> int:
    """The largest power of two that divides `n` > 0."""
    return n & -n


def bits_of(value: int | float | bool, dtype: DType) -> int:
    """The bit pattern of `value` as a signed integer of the dtype's width in memory."""
    raw = np.asarray(value).astype(dtype.numpy).tobytes()
    return int.from_bytes(raw, "little", signed=True)


def from_bits(pattern: int, dtype: DType, shape: tuple[int, ...] = ()) -> str:
    """A tile full of the element with this (signed) bit pattern; safe for -0 and NaN, which Triton's literals lose."""
    return f"tl.full({shape_text(shape)}, {pattern}, {BITS[dtype.bits]}).to({REGISTER[dtype.name]}, bitcast=True)"


def padding_bits(padding: Padding, dtype: DType) -> int:
    """The bit pattern of what a load puts outside its view."""
    numbers = {
        Padding.ZERO: 0.0, Padding.NEG_ZERO: -0.0, Padding.NAN: math.nan, Padding.INF: math.inf,
        Padding.NEG_INF: -math.inf,
    }  # fmt: skip
    return bits_of(numbers[padding] if dtype.is_float else 0, dtype)


def literal(value: int | float | bool, dtype: DType) -> str | None:
    """`value` as a Python literal that means the same in Triton, or None where only bits will do."""
    if dtype.is_bool or dtype.is_int:
        return repr(value)
    assert isinstance(value, float)
    negative_zero = value == 0 and math.copysign(1.0, value) < 0
    if not math.isfinite(value) or negative_zero or dtype.bits == 8:
        return None
    return repr(float(value))
