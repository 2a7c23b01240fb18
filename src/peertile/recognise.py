"""Recognises a launch that was made before: what its arguments are known by, without binding them.

For each kernel a small Python function is made with the kernel's own parameters, as `dataclasses` makes an `__init__`:
calling it matches positions, names and defaults, and a loop over parameters would cost more than all else together.
It serves the plain case, tensors, partitions, numbers and constants; whatever else is passed raises TypeError or
AttributeError, and is bound the longer way, which explains what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from peertile.language.annotations import REQUIRED, KernelParam, Role
from peertile.runtime.tensor import Partition, Tensor

__all__ = ["CONST", "EXCLUSIVE", "SCALAR", "SHARED", "Recogniser", "constant", "letters", "recogniser"]

Recogniser = Callable[..., tuple[tuple[Any, ...], tuple[Any, ...], Any]]
"""(grid, *arguments) to (key, arguments in order, uses of storage)."""

_OURS = "pt__"
"""Begins the names in the function that are no parameters."""
_ROLES = frozenset({Role.SHARED, Role.EXCLUSIVE, Role.SCALAR, Role.CONST})


SHARED, EXCLUSIVE, SCALAR, CONST = b"SEnc"
"""Letters of the plain kinds of parameters, for native code."""
_LETTERS = {Role.SHARED: SHARED, Role.EXCLUSIVE: EXCLUSIVE, Role.SCALAR: SCALAR, Role.CONST: CONST}


def letters(params: Sequence[KernelParam]) -> bytes:
    """The letter of each parameter of a kernel that has a recogniser."""
    return bytes(_LETTERS[p.role] for p in params)


def _number(value: Any) -> Any:
    """A scalar in a key. Numbers that are equal but not passed alike differ: 1 and 1.0, 0.0 and -0.0."""
    if type(value) is float:
        return value.hex()
    raise TypeError


def constant(value: Any) -> tuple[Any, ...]:
    """A constant in a key. 1, 1.0 and True differ, as do 0.0 and -0.0, in tuples too; NaN is NaN.

    What Python takes for equal though it differs has another form here than (type, value): native code, which looks
    for that, never finds it, and leaves it to Python.
    """
    kind = type(value)
    if kind is float and (value == 0.0 or value != value):
        return kind, value.hex(), None
    if isinstance(value, tuple):
        return kind, tuple(map(constant, value)), None
    if isinstance(value, np.generic):
        return kind, value.tobytes(), None
    return kind, value


def recogniser(params: Sequence[KernelParam]) -> Recogniser | None:
    """The function for a kernel with these parameters; None where one of them is not of the plain kind."""
    views = [p for p in params if p.role in (Role.SHARED, Role.EXCLUSIVE)]
    if not views or any(p.role not in _ROLES or p.name.startswith(_OURS) for p in params):
        return None
    defaults = [p.default is not REQUIRED for p in params]
    if defaults != sorted(defaults):  # Python wants them last
        return None
    scope: dict[str, Any] = {
        f"{_OURS}Tensor": Tensor, f"{_OURS}Partition": Partition, f"{_OURS}number": _number,
        f"{_OURS}constant": constant, f"{_OURS}type": type, f"{_OURS}int": int, f"{_OURS}wrong": TypeError,
    }  # fmt: skip
    head, checks, lines, key, uses = [], [], [], [f"{_OURS}grid"], []
    for k, p in enumerate(params):
        name, kind, argument = p.name, f"{_OURS}type({p.name})", f"{_OURS}{k}"
        if p.default is REQUIRED:
            head.append(name)
        else:
            scope[f"{_OURS}default_{k}"] = p.default
            head.append(f"{name}={_OURS}default_{k}")
        if p.role is Role.SHARED:
            checks.append(f"{kind} is not {_OURS}Tensor")
            lines.append(f"{argument} = {name}._shared or {name}.shared_argument()")
            key.append(f"{argument}.serial")
            uses.append(f"{argument}.uses")
        elif p.role is Role.EXCLUSIVE:
            checks.append(f"{kind} is not {_OURS}Partition")
            lines.append(f"{argument} = {name}.bound or {name}.exclusive_argument()")
            key += [f"{argument}.serial", f"{name}.programs"]
            uses.append(f"{argument}.uses")
        else:
            known = "number" if p.role is Role.SCALAR else "constant"
            key.append(f"{name} if {kind} is {_OURS}int else {_OURS}{known}({name})")
    text = "\n    ".join(
        [
            f"def known({_OURS}grid, /, {', '.join(head)}):",
            f"if {' or '.join(checks)}: raise {_OURS}wrong",
            *lines,
            f"return ({', '.join(key)},), ({', '.join(p.name for p in params)},), {' + '.join(uses)}",
        ]
    )
    exec(text, scope)
    made: Recogniser = scope["known"]
    return made
