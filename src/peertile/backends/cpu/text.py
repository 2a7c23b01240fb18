"""Writes LLVM IR text: modules, functions, blocks, phis, constants. Knows no tile IR but its dtypes.

Blocks are collected out of order and printed in the order they were placed, so a phi can get its edges
late. Index arithmetic folds literals, since most of it is by constants and text costs compile time.
"""

from __future__ import annotations

import math
import struct
from typing import Final

import numpy as np

from peertile.dtypes import DType

__all__ = ["LLVM", "MEMORY", "Block", "Function", "Phi", "add", "literal", "mul", "splat_literal", "vector"]

# bf16 and fp8 are integers in registers: LLVM's bfloat arithmetic differs between targets and flushes
# denormals on some; conversions are spelled out in convert.py instead.
LLVM: Final = {
    "bool": "i1", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64",
    "u8": "i8", "u16": "i16", "u32": "i32", "u64": "i64",
    "f16": "half", "bf16": "i16", "f32": "float", "f64": "double", "f8e4m3": "i8", "f8e5m2": "i8",
}  # fmt: skip
MEMORY: Final = LLVM | {"bool": "i8"}
"""Type in memory: bool is a byte."""


def vector(element: str, lanes: int) -> str:
    """The type of `lanes` elements; one lane is the element itself."""
    return element if lanes == 1 else f"<{lanes} x {element}>"


class Phi:
    """A phi whose edges are added as they are found."""

    __slots__ = ("edges", "name", "type")

    def __init__(self, name: str, type: str) -> None:
        self.name = name
        self.type = type
        self.edges: list[tuple[str, str]] = []

    def add(self, value: str, block: Block) -> None:
        self.edges.append((value, block.name))

    def __str__(self) -> str:
        edges = ", ".join(f"[ {value}, %{block} ]" for value, block in self.edges)
        return f"{self.name} = phi {self.type} {edges}"


class Block:
    """A basic block."""

    __slots__ = ("lines", "name", "phis", "predecessors", "terminated")

    def __init__(self, name: str) -> None:
        self.name = name
        self.phis: list[Phi] = []
        self.lines: list[str] = []
        self.predecessors = 0
        self.terminated = False


class Function:
    """A function being written. `emit` goes to the current block; `entry` is the first one. `soft_half`: the
    processor cannot convert f16, and LLVM must not be asked to."""

    def __init__(self, header: str, soft_half: bool = False) -> None:
        self.header = header
        self.soft_half = soft_half
        self._count = 0
        self.blocks: list[Block] = []
        self.entry = self.place(self.block("entry"))
        self.current = self.entry

    def fresh(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def block(self, hint: str) -> Block:
        self._count += 1
        return Block(f"{hint}{self._count}")

    def place(self, block: Block) -> Block:
        """Put `block` next in the text and make it current."""
        self.blocks.append(block)
        self.current = block
        return block

    def emit(self, line: str) -> None:
        assert not self.current.terminated, f"emit after terminator: {line}"
        self.current.lines.append(line)

    def value(self, expression: str) -> str:
        """Emit `%fresh = expression`."""
        name = self.fresh()
        self.emit(f"{name} = {expression}")
        return name

    def phi(self, block: Block, type: str) -> Phi:
        phi = Phi(self.fresh(), type)
        block.phis.append(phi)
        return phi

    def br(self, block: Block) -> Block:
        """Jump; returns the block that jumped, for the edges of phis."""
        source = self.current
        self.emit(f"br label %{block.name}")
        block.predecessors += 1
        source.terminated = True
        return source

    def cond_br(self, condition: str, yes: Block, no: Block, likely: bool | None = None) -> Block:
        source = self.current
        if condition in ("true", "false"):
            return self.br(yes if condition == "true" else no)
        weights = "" if likely is None else ", !prof !" + ("0" if likely else "1")
        self.emit(f"br i1 {condition}, label %{yes.name}, label %{no.name}{weights}")
        yes.predecessors += 1
        no.predecessors += 1
        source.terminated = True
        return source

    def end(self, line: str) -> None:
        """A terminator other than a jump."""
        self.emit(line)
        self.current.terminated = True

    def __str__(self) -> str:
        out = [self.header + " {"]
        for block in self.blocks:
            out.append(f"{block.name}:")
            out += [f"  {phi}" for phi in block.phis]
            out += [f"  {line}" for line in block.lines]
        out.append("}\n")
        return "\n".join(out)


def is_literal(a: str) -> bool:
    return a[0] in "-0123456789"


def add(f: Function, a: str, b: str | int) -> str:
    """a + b as i64, folded where literal."""
    b = str(b)
    if is_literal(a) and is_literal(b):
        return str(int(a) + int(b))
    if a == "0":
        return b
    if b == "0":
        return a
    return f.value(f"add i64 {a}, {b}")


def mul(f: Function, a: str, b: str | int) -> str:
    """a * b as i64, folded where literal."""
    b = str(b)
    if is_literal(a) and is_literal(b):
        return str(int(a) * int(b))
    if a == "0" or b == "0":
        return "0"
    if a == "1":
        return b
    if b == "1":
        return a
    return f.value(f"mul i64 {a}, {b}")


def float_bits(value: float, dtype: DType) -> int:
    """Bits of `value` rounded to nearest even as `dtype`."""
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.array(value, np.float64).astype(dtype.numpy)
    return int.from_bytes(array.tobytes(), "little")


def literal(value: int | float | bool, dtype: DType) -> str:
    """`value` as an LLVM constant of `dtype` (without its type)."""
    if dtype.is_bool:
        return "true" if value else "false"
    if dtype.is_int:
        v = int(value) & ((1 << dtype.bits) - 1)
        return str(v - (1 << dtype.bits) if v >> (dtype.bits - 1) else v)
    if dtype.name == "f64":
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    if dtype.name == "f32":
        bits = float_bits(value, dtype).to_bytes(4, "little")
        return f"0x{struct.unpack('<Q', struct.pack('<d', struct.unpack('<f', bits)[0]))[0]:016X}"
    if dtype.name == "f16":
        return f"0xH{float_bits(value, dtype):04X}"
    if dtype.name == "bf16":
        return str(_signed(_bf16_bits(value), 16))
    bits8 = float_bits(value, dtype)
    return str(_signed(bits8, 8))


def _signed(v: int, bits: int) -> int:
    return v - (1 << bits) if v >> (bits - 1) else v


def _bf16_bits(value: float) -> int:
    # Spelled out, since numpy needs ml_dtypes for bf16 and a constant is no reason to import it.
    if value != value:
        return 0x7FC0
    bits = struct.unpack("<Q", struct.pack("<d", value))[0]
    sign, magnitude = bits >> 63, abs(value)
    if magnitude == float("inf"):
        return int(sign << 15 | 0x7F80)
    # Round the double to 8 significant bits (fewer below 2^-126) by scaling to an integer: exact, so one rounding.
    exponent = max(_exponent(magnitude), -126)
    units = round(magnitude / 2.0 ** (exponent - 7))
    code = (exponent + 126 << 7) + units if magnitude else 0
    return int(sign << 15 | min(code, 0x7F80))


def _exponent(x: float) -> int:
    """e with 2^e <= x < 2^(e+1); -1075 for zero."""
    return math.frexp(x)[1] - 1 if x else -1075


def splat_literal(constant: str, element: str, lanes: int) -> str:
    """A vector constant all of whose lanes are `constant`."""
    if lanes == 1:
        return constant
    if constant in ("0", "false"):
        return "zeroinitializer"
    return f"splat ({element} {constant})"
