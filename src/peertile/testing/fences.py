"""Fence toggles and mutants: the same kernel with some of its order taken away, to see that the checker notices.

A fence test runs a kernel in every setting of its fences and compares the reports with a formula of one line; a
mutation run deletes or weakens one synchronising operation at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from peertile.ir import ops
from peertile.ir.core import Kernel, Op, walk
from peertile.ir.text import parse_kernel, print_kernel
from peertile.memory_model import Order

__all__ = ["Change", "Mutant", "changed", "copy_kernel", "mutants", "ordering_ops"]


class Change(Enum):
    """What is done to an operation."""

    WEAKEN = "weaken"
    """Relaxed instead of acquire or release."""
    DELETE = "delete"


@dataclass(frozen=True)
class Mutant:
    """A kernel with one change, and where it is."""

    kernel: Kernel
    change: Change
    what: str
    index: int

    def __str__(self) -> str:
        return f"{self.change.value} {self.what}"


def copy_kernel(kernel: Kernel) -> Kernel:
    """The same kernel as other objects, places in the source and facts included."""
    copy = parse_kernel(print_kernel(kernel))
    for a, b in zip(walk(kernel.body), walk(copy.body), strict=True):
        b.loc = a.loc
    copy.facts = dict(kernel.facts)
    return copy


def ordering_ops(kernel: Kernel) -> list[Op]:
    """The operations of an expanded kernel that order, in program order."""
    found = []
    for op in walk(kernel.body):
        order = op.attrs.get("order")
        if isinstance(op, ops.Fence) or (isinstance(order, Order) and (order.acquires or order.releases)):
            found.append(op)
    return found


def changed(kernel: Kernel, changes: Sequence[tuple[int, Change]]) -> Kernel:
    """A copy of the kernel with changes to its ordering operations, by index. A wait whose value is used, and a
    read-modify-write whose result is, can only be weakened."""
    copy = copy_kernel(kernel)
    found = ordering_ops(copy)
    for index, change in changes:
        op = found[index]
        if change is Change.WEAKEN and not isinstance(op, ops.Fence):
            op.attrs["order"] = Order.RELAXED
        else:
            assert op.parent is not None
            op.parent.ops.remove(op)
    return copy


def mutants(kernel: Kernel) -> Iterator[Mutant]:
    """Every kernel with one ordering operation weakened or deleted."""
    found = ordering_ops(kernel)
    used = {v for op in walk(kernel.body) for v in op.operands}
    for index, op in enumerate(found):
        where = f"{op.NAME} at {op.loc.user}" if op.loc is not None else op.NAME
        if not isinstance(op, ops.Fence):
            yield Mutant(changed(kernel, [(index, Change.WEAKEN)]), Change.WEAKEN, where, index)
        if not any(v in used for v in op.results):
            yield Mutant(changed(kernel, [(index, Change.DELETE)]), Change.DELETE, where, index)
