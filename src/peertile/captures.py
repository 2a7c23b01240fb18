"""What a kernel function sees of the outside, and whether that is still what it was compiled with. No compiling.

A kernel is compiled with the values of the globals and closure variables it names, so a binary is right only
while they are the same objects. `snapshot` notes them; `is_current` costs some 50 ns for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from peertile.dtypes import DType

__all__ = ["Snapshot", "snapshot"]

_OWN = "peertile."
_ABSENT = object()


class Snapshot(NamedTuple):
    """Globals as (namespace, name, value) and closure cells as (cell, value)."""

    globals: tuple[tuple[dict[str, Any], str, Any], ...]
    cells: tuple[tuple[CellType, Any], ...]

    def is_current(self) -> bool:
        """Whether every name still means the same object."""
        for namespace, name, value in self.globals:
            if namespace.get(name, _ABSENT) is not value:
                return False
        for cell, value in self.cells:  # noqa: SIM110 - a generator costs more than the common case, of none
            if _content(cell) is not value:
                return False
        return True


def snapshot(fn: FunctionType) -> Snapshot:
    """What `fn`, and every function it may call, names outside of itself and could be changed by assignment."""
    namespaces: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
    cells: dict[int, tuple[CellType, Any]] = {}
    pending, seen = [fn], {fn}
    while pending:
        function = pending.pop()
        names = set(_names(function.__code__))
        found: list[Any] = []
        for cell in function.__closure__ or ():
            value = _content(cell)
            cells[id(cell)] = cell, value
            found.append(value)
        spaces = [function.__globals__]
        for name in names:
            value = function.__globals__.get(name, _ABSENT)
            if isinstance(value, ModuleType) and not f"{value.__name__}.".startswith(_OWN):
                spaces.append(vars(value))
        for space in spaces:
            for name in names:
                value = space.get(name, _ABSENT)
                if isinstance(value, bool | int | float | str | None | tuple | DType | Enum | FunctionType):
                    namespaces[id(space), name] = space, name, value
                    found.append(value)
        for value in found:
            if isinstance(value, FunctionType) and value not in seen and not _is_own(value):
                seen.add(value)
                pending.append(value)
    return Snapshot(tuple(namespaces.values()), tuple(cells.values()))


def _is_own(fn: FunctionType) -> bool:
    """Whether `fn` is part of peertile; what exec defines in a bare namespace has no module."""
    return (fn.__module__ or "").startswith(_OWN)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later by the enclosing function
        return _ABSENT


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)
