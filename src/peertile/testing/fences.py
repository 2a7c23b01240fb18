"""Fence toggles and mutants: the same kernel with some of its order taken away, to see that the checker notices.

A fence test runs a kernel in every setting of its fences and compares the reports with a formula of one line; a
mutation run deletes or weakens one synchronising operation at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from peertile.ir import ops
from peertile.ir.core import Kernel, Op, Value, walk
from peertile.ir.text import parse_kernel, print_kernel
from peertile.memory_model import Order, Scope

__all__ = [
    "Change",
    "Mutant",
    "apply",
    "changed",
    "changes_of",
    "copy_kernel",
    "mutants",
    "ordering_ops",
    "synchronising_ops",
]


class Change(Enum):
    """What is done to an operation."""

    WEAKEN = "weaken"
    """Relaxed instead of acquire or release, weak instead of relaxed."""
    DELETE = "delete"
    """It is gone. A wait whose value is used becomes a look at the word, with the same order."""
    DROP = "drop"
    """It is gone, and with it the book-keeping of its statement: a notify that does not count, a wait that does not
    go on to the next number."""
    DEVICE = "device"
    """Device scope instead of system scope."""
    PROGRAM = "program"
    """Program scope instead of a wider one."""


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


def synchronising_ops(kernel: Kernel) -> list[Op]:
    """The operations of an expanded kernel that have an order at all, and its fences, in program order: a superset
    of `ordering_ops`."""
    return [
        op
        for op in walk(kernel.body)
        if isinstance(op, ops.Fence)
        or (isinstance(op.attrs.get("order"), Order) and op.attrs["order"] is not Order.WEAK)
    ]


def changes_of(op: Op, used: frozenset[Value]) -> tuple[Change, ...]:
    """What can be done to a synchronising operation; `used` are the values that the kernel uses."""
    found: list[Change] = []
    weak_is_legal = isinstance(op, ops.WordLoad | ops.WordStore)
    if not isinstance(op, ops.Fence) and (op.attrs["order"] is not Order.RELAXED or weak_is_legal):
        found.append(Change.WEAKEN)
    is_used = any(v in used for v in op.results)
    if not is_used or isinstance(op, ops.Wait):
        found.append(Change.DELETE)
    if not is_used and any(other is not op for other in _statement(op)):
        found.append(Change.DROP)
    scope = op.attrs.get("scope")
    if scope is Scope.SYSTEM:
        found.append(Change.DEVICE)
    if scope in (Scope.SYSTEM, Scope.DEVICE):
        found.append(Change.PROGRAM)
    return tuple(found)


def _statement(op: Op) -> list[Op]:
    """The operation and the weak stores to words that were made from the same place of the source, beside it or
    in the block around it."""
    found = [op]
    block = op.parent
    while block is not None and op.loc is not None:
        found += [
            other
            for other in block.ops
            if other is not op
            and isinstance(other, ops.WordStore)
            and other.attrs["order"] is Order.WEAK
            and other.loc == op.loc
        ]
        outer = block.parent
        block = outer.parent if outer is not None and outer.loc == op.loc else None
    return found


def _remove(op: Op) -> None:
    assert op.parent is not None
    op.parent.ops.remove(op)


def apply(op: Op, change: Change, used: frozenset[Value]) -> None:
    """Make one change to an operation of a kernel that may be changed: a copy."""
    if change is Change.DEVICE:
        op.attrs["scope"] = Scope.DEVICE
    elif change is Change.PROGRAM:
        op.attrs["scope"] = Scope.PROGRAM
    elif change is Change.WEAKEN and not isinstance(op, ops.Fence):
        if op.attrs["order"] is Order.RELAXED:
            op.attrs["order"], op.attrs["scope"] = Order.WEAK, None
        else:
            op.attrs["order"] = Order.RELAXED
    elif isinstance(op, ops.Wait) and any(v in used for v in op.results):
        _look_instead(op)
    elif change is Change.DROP:
        for part in _statement(op):
            _remove(part)
    else:
        _remove(op)


def _look_instead(op: ops.Wait) -> None:
    """A load of the word in place of the wait: the result is what it holds, whatever that is."""
    attrs = {"order": op.attrs["order"], "scope": op.attrs["scope"]}
    load = ops.WordLoad([op.operands[0], *op.operands[2:]], [v.type for v in op.results], attrs)
    load.loc = op.loc
    load.results = op.results
    for value in load.results:
        value.owner = load
    block = op.parent
    assert block is not None
    block.ops[block.ops.index(op)] = load
    load.parent = block


def used_values(kernel: Kernel) -> frozenset[Value]:
    """Values that some operation of the kernel uses."""
    return frozenset(v for op in walk(kernel.body) for v in op.operands)


def changed(kernel: Kernel, changes: Sequence[tuple[int, Change]]) -> Kernel:
    """A copy of the kernel with changes to its ordering operations, by index."""
    copy = copy_kernel(kernel)
    found, used = ordering_ops(copy), used_values(copy)
    for index, change in changes:
        apply(found[index], change, used)
    return copy


def mutants(kernel: Kernel, changes: Sequence[Change] = tuple(Change)) -> Iterator[Mutant]:
    """Every kernel with one synchronising operation changed in one of the ways of `changes` that it allows."""
    used = used_values(kernel)
    for index, op in enumerate(synchronising_ops(kernel)):
        where = f"{op.NAME} at {op.loc.user}" if op.loc is not None else op.NAME
        for change in changes_of(op, used):
            if change in changes:
                copy = copy_kernel(kernel)
                apply(synchronising_ops(copy)[index], change, used_values(copy))
                yield Mutant(copy, change, where, index)
