"""What a kernel function sees of the outside, and whether that is still what it was compiled with. No compiling.

A kernel is compiled with the values of the globals and closure variables it names, so a binary is right only
while they are the same objects. `snapshot` notes them; `is_current` costs some 50 ns for each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from opcode import opmap
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeGuard

__all__ = ["Snapshot", "attribute", "chains", "snapshot"]

_OWN = "peertile."
_ABSENT = object()
_CACHE, _EXTENDED = opmap["CACHE"], opmap["EXTENDED_ARG"]
_GLOBAL, _ATTRIBUTE, _METHOD = opmap["LOAD_GLOBAL"], opmap["LOAD_ATTR"], opmap.get("LOAD_METHOD")
_HAS_FLAG = sys.version_info >= (3, 12)
"""Whether the number of an attribute's name has a bit behind it; that of a global has one."""


class Snapshot(NamedTuple):
    """Globals as (namespace, name, value), closure cells as (cell, value), and helpers as (function, code)."""

    globals: tuple[tuple[dict[str, Any], str, Any], ...]
    cells: tuple[tuple[CellType, Any], ...]
    helpers: tuple[tuple[FunctionType, CodeType], ...]

    def is_current(self) -> bool:
        """Whether every name still means the same object, and every function does the same."""
        for namespace, name, value in self.globals:
            if namespace.get(name, _ABSENT) is not value:
                return False
        for cell, value in self.cells:
            if _content(cell) is not value:
                return False
        # A notebook that loads a module again gives its functions new code.
        for helper, code in self.helpers:  # noqa: SIM110 - a generator costs more than the common case, of none
            if helper.__code__ is not code:
                return False
        return True


def snapshot(fn: FunctionType, constants: Iterable[Any] = ()) -> Snapshot:
    """What `fn`, and every function it may call, names outside of itself and could be changed by assignment.

    Functions may be among its `constants`, and in defaults and tuples."""
    namespaces: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
    cells: dict[int, tuple[CellType, Any]] = {}
    pending, seen = [fn], {fn}
    found = list(constants)
    while pending:
        function = pending.pop()
        found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            value = _content(cell)
            cells[id(cell)] = cell, value
            found.append(value)
        for space, name, value in _looked_up(function):
            if value is not _ABSENT and not _is_word(value):
                found.append(value)
                if name in space:
                    namespaces[id(space), name] = space, name, value
        while found:
            value = found.pop()
            if isinstance(value, tuple):
                found += value
            elif isinstance(value, FunctionType) and value not in seen and not _is_own(value):
                seen.add(value)
                pending.append(value)
    helpers = tuple((helper, helper.__code__) for helper in seen if helper is not fn)
    return Snapshot(tuple(namespaces.values()), tuple(cells.values()), helpers)


def _looked_up(function: FunctionType) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Every (namespace, name, value) that the function's code may look up: globals, and attributes of modules."""
    code = function.__code__
    for name, *attributes in sorted(set(chains(code))):
        value = function.__globals__.get(name, _ABSENT)
        yield function.__globals__, name, value
        while _is_foreign(value) and attributes:
            space, name = vars(value), attributes.pop(0)
            value = attribute(value, name, _ABSENT)
            yield space, name, value
        if _is_foreign(value):
            yield from _anywhere(value, code)
    for cell in function.__closure__ or ():
        if _is_foreign(module := _content(cell)):
            yield from _anywhere(module, code)


def attribute(module: ModuleType, name: str, default: Any = None) -> Any:
    """What the compiler finds as `module.name`: some modules make it when they are asked."""
    space = vars(module)
    return space[name] if name in space else getattr(module, name, default) if "__getattr__" in space else default


def _anywhere(module: ModuleType, code: CodeType) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The same for a module that goes by a name of its own: what the code names anywhere, in it and modules of it."""
    names = set(_names(code))
    spaces = [vars(module)]
    for space in spaces:
        for name in names:
            inner = space.get(name, _ABSENT)
            yield space, name, inner
            if _is_foreign(inner) and all(vars(inner) is not known for known in spaces):
                spaces.append(vars(inner))


def chains(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Dotted names that begin with a global, as the code loads them: ("np", "pi"). Names of attributes alone, as
    `index` of a tile, are none, whatever globals are called."""
    raw, extended = code.co_code, 0
    chain: tuple[str, ...] = ()
    for at in range(0, len(raw), 2):
        op, argument = raw[at], raw[at + 1] | extended
        extended = 0
        if op == _EXTENDED:
            extended = argument << 8
        elif op in (_GLOBAL, _ATTRIBUTE, _METHOD):
            has_flag = op == _GLOBAL or (op == _ATTRIBUTE and _HAS_FLAG)
            name = code.co_names[argument >> has_flag]
            if op == _GLOBAL:
                if chain:
                    yield chain
                chain = (name,)
            elif chain:
                chain += (name,)
        elif op != _CACHE and chain:
            yield chain
            chain = ()
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from chains(const)


def _is_foreign(value: Any) -> TypeGuard[ModuleType]:
    """Whether it is a module, and none of peertile's."""
    return isinstance(value, ModuleType) and not f"{value.__name__}.".startswith(_OWN)


def _is_word(value: Any) -> bool:
    """Whether it is what every kernel names, and nobody assigns: a module of peertile, or a class of it. All else may
    be a constant, as a number of numpy is."""
    if isinstance(value, ModuleType):
        return not _is_foreign(value)
    return isinstance(value, type) and value.__module__.startswith(_OWN)


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
