"""Which parameters of a kernel reach memory of peers by read-modify-writes: a fact for the launcher. Changes no op.

Between some pairs of GPUs an atomic on the other's memory is not atomic, and nothing in the kernel could tell: the sum
would be wrong now and then. So the launcher asks the memory before it launches (`launch.py`); here only the names of
the parameters are found. Errs towards asking: where the way back to a parameter is not seen, every one that an atomic
of that kind can go through is named.
"""

from __future__ import annotations

from typing import Final

from peertile.ir import ops
from peertile.ir.core import Kernel, Op, Value, walk
from peertile.ir.types import PointerType, Space, SymmetricType, ViewType

__all__ = ["note_peer_atomics"]

_ON_VIEWS: Final = (ops.TileAtomic, ops.WordRmw)
_ON_POINTERS: Final = (ops.PtrRmw, ops.PtrCas)


def note_peer_atomics(kernel: Kernel) -> Kernel:
    """Leaves `facts["peer_atomics"]`: names of the symmetric and pointer parameters that atomics go through."""
    params = dict(zip(kernel.params, kernel.param_names, strict=True))
    found: set[str] = set()
    for op in walk(kernel.body):
        kind = _reached(op)
        if kind is None:
            continue
        root = _root(op.operands[0])
        if root in params:
            found.add(params[root])
        else:
            found.update(name for value, name in params.items() if isinstance(value.type, kind))
    kernel.facts["peer_atomics"] = found
    return kernel


def _reached(op: Op) -> type[SymmetricType] | type[PointerType] | None:
    """The kind of parameter through which `op` updates memory of peers; None if it does not."""
    if isinstance(op, _ON_POINTERS):
        return PointerType
    view = op.operands[0].type if isinstance(op, _ON_VIEWS) else None
    return SymmetricType if isinstance(view, ViewType) and view.space is Space.PEER else None


def _root(value: Value) -> Value:
    """What a view or a tile of pointers was made of."""
    while value.op is not None and value.op.operands:
        value = value.op.operands[0]
    return value
