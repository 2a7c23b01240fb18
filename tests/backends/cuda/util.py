"""What the tests of the cuda backend share: a builder of kernels, kernels by text, and what PTX says."""

from __future__ import annotations

import re
from typing import Any

from peertile.dtypes import DType
from peertile.errors import VerifyError
from peertile.ir import ops
from peertile.ir.core import Block, Builder, Kernel, Value
from peertile.ir.text import parse_kernel
from peertile.ir.types import INDEX, Access, PointerType, Space, TileType, Type, ViewType
from peertile.ir.verify import verify
from peertile.memory_model import Order, Scope

PROVEN = ops.Bounds.PROVEN


class K:
    """Builds one kernel op by op: `k.x` is the parameter x."""

    def __init__(self, name: str, *, unsafe: bool = False, grid_rank: int = 1, **params: Type) -> None:
        body = Block(list(params.values()), list(params))
        self.kernel = Kernel(name, tuple(params), body, unsafe=unsafe, grid_rank=grid_rank)
        self.b = Builder(body)
        self.params = dict(zip(params, body.args, strict=True))

    def __getattr__(self, name: str) -> Value:
        return self.params[name]

    def op(self, cls: type[ops.Op], *operands: Value, results: tuple[Type, ...] = (), **attrs: Any) -> ops.Op:
        return self.b.emit(cls, operands, results, **attrs)

    def v(self, cls: type[ops.Op], *operands: Value, t: Type, **attrs: Any) -> Value:
        return self.b.value(cls, operands, t, **attrs)

    def const(self, value: Any, t: TileType = INDEX) -> Value:
        return self.v(ops.Const, t=t, value=value)

    def full(self, value: Any, t: TileType) -> Value:
        scalar = self.const(value, TileType(t.dtype))
        return self.v(ops.Broadcast, scalar, t=t) if t.shape else scalar

    def try_(self, cls: type[ops.Op], *operands: Value, results: tuple[Type, ...], **attrs: Any) -> ops.Op | None:
        """The op, or None where its own rule forbids it."""
        op = cls(operands, results, attrs)
        try:
            op.verify()
        except VerifyError:
            return None
        return self.b.add(op)

    def load(self, view: Value, *index: Value, t: TileType, **attrs: Any) -> Value:
        return self.v(ops.Load, view, *index, t=t, bounds=PROVEN, **attrs)

    def store(self, view: Value, tile: Value, *index: Value) -> None:
        self.op(ops.Store, view, tile, *index, bounds=PROVEN)

    def done(self) -> Kernel:
        self.b.emit(ops.Return)
        verify(self.kernel, expanded=True)
        return self.kernel


def view(
    dtype: DType, rank: int = 1, access: Access = Access.READ_WRITE, space: Space = Space.LOCAL, **facts: Any
) -> ViewType:
    """A row-major view."""
    facts = {"unit_stride": (*[False] * (rank - 1), True) if rank else (), "align": 64} | facts
    return ViewType(dtype, rank, access, space, **facts)


def parsed(text: str) -> Kernel:
    kernel = parse_kernel(text)
    verify(kernel, expanded=True)
    return kernel


def body_of(source: str, name: str) -> str:
    """The statements of the kernel in emitted source."""
    return source.split(f"def {name}(\n", 1)[1].split("):\n", 1)[1]


def memory_ops(ptx: str) -> list[str]:
    """Ordered accesses, fences and block barriers of PTX, in order; weak accesses and shared memory left out."""
    found = []
    for line in ptx.splitlines():
        text = re.sub(r"^\s*(?:@!?%?\w+\s+)?", "", line)
        m = re.match(
            r"((?:ld|st)\.(?:relaxed|acquire|release)[\w.]*|(?:atom|red)\.[\w.]+|fence\.[\w.]+|bar(?:rier)?\.[\w.]+)",
            text,
        )
        if m is not None and "shared" not in m[1]:
            found.append(m[1])
    return found


__all__ = ["INDEX", "PROVEN", "K", "Order", "PointerType", "Scope", "body_of", "memory_ops", "parsed", "view"]
