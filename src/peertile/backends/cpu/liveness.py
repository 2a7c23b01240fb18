"""Where in a kernel each value is used for the last time. Positions count ops in the order of lowering."""

from __future__ import annotations

from collections.abc import Iterator

from peertile.ir import ops
from peertile.ir.core import Block, Kernel, Op, Value

__all__ = ["Liveness", "ops_of"]


def ops_of(block: Block) -> Iterator[Op]:
    """Every op of a block and of the blocks below, outer before inner."""
    for op in block.ops:
        yield op
        for inner in op.blocks:
            yield from ops_of(inner)


class Liveness:
    """`at` and `end` of an op are the positions where it and its blocks begin and end; `uses` of a value where ops
    name it; `last_use` is the last of these, or the end of a loop that uses the value and did not make it, since
    the next trip uses it again."""

    def __init__(self, kernel: Kernel) -> None:
        self.at: dict[Op, int] = {}
        self.end: dict[Op, int] = {}
        self.uses: dict[Value, list[int]] = {}
        self.last_use: dict[Value, int] = {}
        self._count = 0
        self._number(kernel.body)
        for op in ops_of(kernel.body):
            for value in op.operands:
                self.uses.setdefault(value, []).append(self.at[op])
                self.last_use[value] = max(self.last_use.get(value, 0), self._live_to(op, value))

    def _number(self, block: Block) -> None:
        for op in block.ops:
            self._count += 1
            self.at[op] = self._count
            for inner in op.blocks:
                self._number(inner)
            self._count += 1
            self.end[op] = self._count

    def _live_to(self, op: Op, value: Value) -> int:
        home = value.owner if isinstance(value.owner, Block) else value.owner.parent
        position, block = self.at[op], op.parent
        while block is not home and block is not None:
            owner = block.parent
            if owner is None:
                break
            if isinstance(owner, ops.For | ops.Loop):
                position = self.end[owner]
            block = owner.parent
        return position
