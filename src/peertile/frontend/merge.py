"""What a variable is where paths meet, and what a loop carries from trip to trip. Emits no control flow.

A variable is split into *leaves* (tiles, pointers, tokens, Python numbers), which can be results of an op,
and the rest of its structure, which must be equal on all paths. Where types do not agree the variable is
poisoned rather than refused at once: only reading it is an error, so that a name may be reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from peertile.dtypes import b1, f32, i64
from peertile.frontend.convert import broadcast_to, cast, constant, default_dtype, number
from peertile.frontend.scope import Binding, Build, Env, Exit
from peertile.frontend.values import (
    Abstract,
    Known,
    Pointer,
    Poison,
    Tile,
    Token,
    Tup,
    describe,
    ir_values,
    is_number,
)
from peertile.ir.core import Op, Value
from peertile.ir.types import PointerType, TileType, TokenType, Type
from peertile.source import Loc

__all__ = ["BROKEN", "RETURN", "RETURNED", "VALUE", "Carried", "merge"]

RETURN: Final = "<return>"
"""Holds a helper's result on its way out of loops; the names of users contain no `<`."""
RETURNED: Final = "<returned>"
BROKEN: Final = "<broken>"
"""Whether a trip of an unrolled loop ended the loop."""
VALUE: Final = "<value>"
"""The result of a conditional expression."""

_LEAF: Final = "leaf"


def _flatten(value: Abstract) -> tuple[Any, list[Abstract]]:
    """The structure of `value` with its leaves taken out, and the leaves."""
    if isinstance(value, Tup):
        parts = [_flatten(item) for item in value.items]
        return tuple(s for s, _ in parts), [leaf for _, leaves in parts for leaf in leaves]
    if isinstance(value, Tile | Pointer | Token) or is_number(value):
        return _LEAF, [value]
    return value, []


def _rebuild(structure: Any, leaves: Iterator[Abstract]) -> Abstract:
    if structure is _LEAF:
        return next(leaves)
    if isinstance(structure, tuple):
        return Tup(tuple(_rebuild(s, leaves) for s in structure))
    assert isinstance(structure, Abstract)
    return structure


def _fixed_parts(structure: Any) -> Iterator[Abstract]:
    if isinstance(structure, tuple):
        for part in structure:
            yield from _fixed_parts(part)
    elif structure is not _LEAF:
        yield structure


def _wrap(value: Value, weak: bool = False) -> Abstract:
    match value.type:
        case TileType():
            return Tile(value, weak)
        case PointerType():
            return Pointer(value)
        case TokenType():
            return Token(value)
    raise AssertionError(value.type)


def _name(values: Sequence[Value], name: str) -> None:
    """Lets the text form show a value under the name of its variable."""
    if not name.startswith("<"):
        for value in values:
            value.hint = name


def _type_name(value: Abstract) -> str:
    if is_number(value):
        assert isinstance(value, Known)
        return f"the number {value.value!r}"
    if isinstance(value, Tup):
        return f"({', '.join(map(_type_name, value.items))})"
    return describe(value)


def _fits(leaf: Abstract, t: Type) -> bool:
    """Whether `leaf` can become `t` without loss."""
    if isinstance(leaf, Known):
        return isinstance(t, TileType) and number(leaf.value, t.dtype) is not None
    assert isinstance(leaf, Tile | Pointer | Token)
    if isinstance(leaf, Tile) and leaf.weak and isinstance(t, TileType) and leaf.value.type != t:
        # A weak tile stands for a Python int or float whose value is not looked at yet.
        return t.dtype.is_float or (t.dtype.is_int and leaf.type.dtype.is_int)
    return leaf.value.type == t


def _coerce(b: Build, leaf: Abstract, t: Type) -> Value:
    """`leaf`, which fits, as a value of type `t`."""
    if isinstance(leaf, Known):
        assert isinstance(t, TileType)
        return constant(b, leaf.value, t.dtype, t.shape)
    assert isinstance(leaf, Tile | Pointer | Token)
    if leaf.value.type != t:
        assert isinstance(t, TileType)
        b.adaptations += 1
        return broadcast_to(b, cast(b, leaf.value, t.dtype), t.shape)
    return leaf.value


def _zero(b: Build, t: Type) -> Value | None:
    """A value of `t` that is never read, None where there is none."""
    if not isinstance(t, TileType):
        return None
    zero: bool | int | float = False if t.dtype.is_bool else 0 if t.dtype.is_int else 0.0
    return constant(b, zero, t.dtype, t.shape)


def _joined(leaves: Sequence[Abstract]) -> Known | tuple[Type, bool] | None:
    """What leaves of several paths become: a constant equal on all, or a type and whether it is weak."""
    firm = [
        leaf.value.type
        for leaf in leaves
        if isinstance(leaf, Pointer | Token) or (isinstance(leaf, Tile) and not leaf.weak)
    ]
    first = leaves[0]
    if firm:
        t, weak = firm[0], False
    elif isinstance(first, Known) and all(leaf == first for leaf in leaves):
        return first
    else:
        weak = any(isinstance(leaf, Tile) for leaf in leaves)
        dtypes = {default_dtype(leaf.value) if isinstance(leaf, Known) else leaf.type.dtype for leaf in leaves}  # type: ignore[attr-defined]
        t = TileType(f32 if f32 in dtypes else i64 if dtypes != {b1} else b1)
    return (t, weak) if all(_fits(leaf, t) for leaf in leaves) else None


def _depends(name: str, bindings: Sequence[Binding]) -> Poison:
    """The poison of a variable whose type is not the same on all paths."""
    shown: dict[str, Loc | None] = {}
    for binding in bindings:
        shown.setdefault(_type_name(binding.value), binding.loc)
    parts = [f"{t} (line {loc.line})" if loc is not None else t for t, loc in shown.items()]
    if len(parts) == 1:
        return Poison(
            f"`{name}` is {next(iter(shown))} made on one path and another on the other; "
            "only tiles and numbers can be chosen at run time: choose the index or the rank instead"
        )
    if name == RETURN:
        return Poison(f"Type of the helper's result depends on path taken: {' vs. '.join(parts)}")
    if name == VALUE:
        return Poison(f"Type of the conditional expression depends on path taken: {' vs. '.join(shown)}")
    return Poison(f"Type of `{name}` depends on path taken: {' vs. '.join(parts)}")


def merge(b: Build, exits: list[Exit], *, dummies: bool = False) -> tuple[list[Type], Callable[[Sequence[Value]], Env]]:
    """Joins the environments of `exits` where they meet, in the current block.

    Sets the operands of each exit's terminator and returns their types, and a function from the results
    of the op that was left to the environment behind it. With `dummies`, RETURN may be missing on a path:
    a zero, never read, takes its place.
    """
    names = list(dict.fromkeys(name for e in exits for name in e.env))
    env: Env = {}
    types: list[Type] = []
    plans: list[tuple[str, Any, list[Known | tuple[int, bool]], Loc | None]] = []
    for name in names:
        found = [e.env.get(name) for e in exits]
        present = [binding for binding in found if binding is not None]
        if len(present) < len(found) and not (dummies and name == RETURN):
            if not name.startswith("<"):
                at = f" (line {present[0].loc.line})" if present[0].loc is not None else ""
                env[name] = Binding(
                    Poison(f"`{name}` has a value on some paths only{at}; assign it on every path"), None
                )
            continue
        first = present[0]
        poison = next((binding for binding in present if isinstance(binding.value, Poison)), None)
        if poison is not None:
            env[name] = poison
            continue
        same = all(binding.value == first.value for binding in present)
        if same and all(b.visible(v) for v in ir_values(first.value)):
            env[name] = first
            continue
        plan = _plan(b, name, present)
        if isinstance(plan, Poison):
            env[name] = Binding(plan, None)
            continue
        structure, leaves = plan
        numbered: list[Known | tuple[int, bool]] = []
        for leaf in leaves:
            if isinstance(leaf, Known):
                numbered.append(leaf)
            else:
                numbered.append((len(types), leaf[1]))
                types.append(leaf[0])
        plans.append((name, structure, numbered, first.loc))
    for e in exits:
        with b.before(e.op):
            e.op.operands = _operands(b, e.env, plans, types)

    def finish(results: Sequence[Value]) -> Env:
        for name, structure, numbered, loc in plans:
            _name([results[n[0]] for n in numbered if not isinstance(n, Known)], name)
            leaves = iter([n if isinstance(n, Known) else _wrap(results[n[0]], n[1]) for n in numbered])
            env[name] = Binding(_rebuild(structure, leaves), loc)
        return env

    return types, finish


def _plan(b: Build, name: str, bindings: Sequence[Binding]) -> tuple[Any, list[Known | tuple[Type, bool]]] | Poison:
    flat = [_flatten(binding.value) for binding in bindings]
    structure = flat[0][0]
    fixed = all(b.visible(v) for part in _fixed_parts(structure) for v in ir_values(part))
    if not fixed or any(s != structure for s, _ in flat):
        return _depends(name, bindings)
    leaves = [_joined([leaves[k] for _, leaves in flat]) for k in range(len(flat[0][1]))]
    if any(leaf is None for leaf in leaves):
        return _depends(name, bindings)
    return structure, [leaf for leaf in leaves if leaf is not None]


def _operands(
    b: Build, env: Env, plans: list[tuple[str, Any, list[Known | tuple[int, bool]], Loc | None]], types: list[Type]
) -> list[Value]:
    operands = []
    for name, _, numbered, _ in plans:
        binding = env.get(name)
        leaves = _flatten(binding.value)[1] if binding is not None else [None] * len(numbered)
        for leaf, n in zip(leaves, numbered, strict=True):
            if isinstance(n, Known):
                continue
            value = _zero(b, types[n[0]]) if leaf is None else _coerce(b, leaf, types[n[0]])
            if value is None:
                b.fail(f"a helper returns {types[n[0]]} from inside a loop; only numbers and tiles can leave it so")
            operands.append(value)
    return operands


# ---------------------------------------------------------------- loops


@dataclass(slots=True)
class _Leaf:
    """One carried value. `init` is None for a dummy; `weak` while a Python number looks for its type."""

    type: Type
    init: Abstract | None
    weak: bool = False


@dataclass(slots=True)
class _Slot:
    name: str
    before: Binding
    structure: Any
    leaves: list[_Leaf]


class Carried:
    """The variables that a loop carries, and the search for their types.

    A Python number before the loop takes the type of what the body makes of it, where it fits. So the body
    is compiled with a guess, its ends are compared with it, and compiled again with a better guess until
    the two agree. Invariant: a guess is only ever refined or given up, so the search ends.
    """

    def __init__(self, before: Env, assigned: Sequence[str]) -> None:
        self._before = before
        self._slots: dict[str, _Slot] = {}
        self._dead: dict[str, Poison] = {}
        for name in assigned:
            binding = before.get(name)
            if binding is not None and not isinstance(binding.value, Poison):
                self._slots[name] = self._slot(name, binding)

    def _slot(self, name: str, binding: Binding) -> _Slot:
        structure, leaves = _flatten(binding.value)
        carried = []
        for leaf in leaves:
            if isinstance(leaf, Known):
                # A bool has one type only; an int or a float still looks for its own.
                carried.append(_Leaf(TileType(default_dtype(leaf.value)), leaf, not isinstance(leaf.value, bool)))
            else:
                assert isinstance(leaf, Tile | Pointer | Token)
                carried.append(_Leaf(leaf.value.type, leaf, isinstance(leaf, Tile) and leaf.weak))
        return _Slot(name, binding, structure, carried)

    @property
    def types(self) -> list[Type]:
        return [leaf.type for slot in self._slots.values() for leaf in slot.leaves]

    def initial(self, b: Build) -> list[Value]:
        """The values that enter the loop."""
        values = []
        for slot in self._slots.values():
            for leaf in slot.leaves:
                value = _zero(b, leaf.type) if leaf.init is None else _coerce(b, leaf.init, leaf.type)
                assert value is not None
                values.append(value)
        return values

    def bind(self, env: Env, values: Sequence[Value]) -> Env:
        """`env` with the carried variables bound to `values`: block arguments, or results."""
        env = dict(env)
        it = iter(values)
        for slot in self._slots.values():
            own = [next(it) for _ in slot.leaves]
            _name(own, slot.name)
            leaves = iter([_wrap(v, leaf.weak) for v, leaf in zip(own, slot.leaves, strict=True)])
            env[slot.name] = Binding(_rebuild(slot.structure, leaves), slot.before.loc)
        for name, poison in self._dead.items():
            env[name] = Binding(poison, None)
        return env

    def settle(self, b: Build, exits: list[Exit], args: Sequence[Value], adapted: bool) -> bool:
        """Sets the operands of the terminators that carry; False when the body must be compiled again.

        `adapted` says that some weak tile took another type than its guess on the way.
        """
        stable = True
        for e in exits:
            if RETURN in e.env and RETURN not in self._slots and RETURN not in self._dead:
                self._slots[RETURN] = self._dummy(b, e.env[RETURN])
                stable = False
        if not stable:
            return False
        position = 0
        operands: list[list[Value]] = [[] for _ in exits]
        for slot in list(self._slots.values()):
            own = args[position : position + len(slot.leaves)]
            position += len(slot.leaves)
            for e, into in zip(exits, operands, strict=True):
                binding = e.env.get(slot.name)
                values = list(own) if binding is None else self._match(b, slot, binding, e.op)
                if values is None:
                    stable = False
                    values = list(own)
                into += values
        for e, values in zip(exits, operands, strict=True):
            e.op.operands = values
        return stable and not (self._firm() and adapted)

    def _firm(self) -> bool:
        """Takes the guesses for final; whether any was still weak. One that a loop around this one still
        looks for stays weak: its own search is not over."""
        changed = False
        for slot in self._slots.values():
            for leaf in slot.leaves:
                if leaf.weak and not (isinstance(leaf.init, Tile) and leaf.init.weak):
                    leaf.weak, changed = False, True
        return changed

    def _dummy(self, b: Build, binding: Binding) -> _Slot:
        structure, leaves = _flatten(binding.value)
        types = [TileType(default_dtype(v.value)) if isinstance(v, Known) else v.value.type for v in leaves]  # type: ignore[attr-defined]
        if any(not isinstance(t, TileType) for t in types):
            b.fail("a helper returns from inside a loop what only numbers and tiles can be", binding.loc)
        return _Slot(RETURN, binding, structure, [_Leaf(t, None) for t in types])

    def _match(self, b: Build, slot: _Slot, binding: Binding, op: Op) -> list[Value] | None:
        """The values that one end of the body carries, None when the guess changed."""
        if slot.name not in self._slots:
            return None
        if isinstance(binding.value, Poison):
            return self._given_up(slot.name, binding.value)
        structure, leaves = _flatten(binding.value)
        visible = all(b.visible(v) for part in _fixed_parts(structure) for v in ir_values(part))
        if structure != slot.structure or not visible:
            return self._given_up(slot.name, _depends(slot.name, [slot.before, binding]))
        values = []
        for leaf, carried in zip(leaves, slot.leaves, strict=True):
            if _fits(leaf, carried.type):
                with b.before(op):
                    values.append(_coerce(b, leaf, carried.type))
            elif not self._refine(carried, leaf):
                return self._given_up(slot.name, _depends(slot.name, [slot.before, binding]))
        return values if len(values) == len(leaves) else None

    def _refine(self, carried: _Leaf, leaf: Abstract) -> bool:
        """A better guess for a value that was a Python number before the loop."""
        if carried.init is None or not carried.weak:
            return False
        t: Type
        if isinstance(leaf, Known):
            t, weak = TileType(default_dtype(leaf.value)), True
        else:
            assert isinstance(leaf, Tile | Pointer | Token)
            t, weak = leaf.value.type, isinstance(leaf, Tile) and leaf.weak
        if not _fits(carried.init, t):
            return False
        carried.type, carried.weak = t, weak
        return True

    def _given_up(self, name: str, poison: Poison) -> list[Value] | None:
        """None, after the variable was made unreadable: at the start of a trip, and behind the loop."""
        self._dead[name] = poison
        self._slots.pop(name, None)
        return None
