"""Parameter annotations of kernels, and how a kernel's signature is read. No types of arguments here.

`read_signature(fn)` is what the launcher asks: the role of each parameter, its default, and what the
annotation restricts. Annotations written as text (`from __future__ import annotations`) are resolved.
"""

from __future__ import annotations

from enum import Enum
from types import FunctionType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Union, get_args, get_origin

import numpy as np

from peertile.dtypes import DType, b1, f32, i64
from peertile.errors import CompileError
from peertile.ir.types import Access
from peertile.language.accumulate import Accumulate
from peertile.language.multicast import Multicast
from peertile.language.objects import Barrier, Counter, Mailbox, Pointer, Signal
from peertile.language.views import Exclusive, Peer, PeerAccess, Shared
from peertile.language.word import REQUIRED, KernelOnly
from peertile.language.word import read_signature as read_parameters
from peertile.source import Loc

__all__ = ["REQUIRED", "Const", "ConstOf", "KernelParam", "Role", "read_signature"]


class Role(Enum):
    """What a kernel parameter is."""

    EXCLUSIVE = "exclusive"
    ACCUMULATE = "accumulate"
    SHARED = "shared"
    PEER = "peer"
    MULTICAST = "multicast"
    SIGNAL = "signal"
    COUNTER = "counter"
    BARRIER = "barrier"
    MAILBOX = "mailbox"
    POINTER = "pointer"
    SCALAR = "scalar"
    CONST = "const"


class ConstOf(NamedTuple):
    """`T.Const[type]`: a compile-time constant of that Python type."""

    type: Any

    def __repr__(self) -> str:
        return f"T.Const[{getattr(self.type, '__name__', self.type)}]"

    @property
    def is_sound(self) -> bool:
        """Whether the type is a class, or some of them."""
        if get_origin(self.type) in (Union, UnionType):
            return all(ConstOf(one).is_sound for one in get_args(self.type))
        return isinstance(get_origin(self.type) or self.type, type)

    def takes(self, value: object) -> bool:
        """Whether `value` is one of that type. Numbers of numpy pass for Python's, and an int for a float."""
        if get_origin(self.type) in (Union, UnionType):
            return any(ConstOf(one).takes(value) for one in get_args(self.type))
        kind = get_origin(self.type) or self.type
        return isinstance(value, _PASS_FOR.get(kind, kind))


_PASS_FOR: Final[dict[type, tuple[type, ...]]] = {
    bool: (bool, np.bool_),
    int: (int, np.integer),
    float: (float, int, np.floating, np.integer),
}


if TYPE_CHECKING:
    # To a type checker a constant is what it is a constant of: `N: T.Const[int]` is an int.
    from typing_extensions import TypeVar

    _T = TypeVar("_T", default=Any)
    Const = Annotated[_T, "compile-time constant"]
else:

    class Const(KernelOnly):
        """A compile-time constant: a new value compiles a new kernel.

        `T.Const[int]`, `T.Const[float]`, `T.Const[bool]`, `T.Const[str]`, `T.Const[tuple]`, `T.Const[T.DType]`,
        or `T.Const` for any of them. In the kernel it is an ordinary Python value: a shape, a branch that is
        not compiled, an argument of `T.static_range`.

        Example::

            T.static_assert(N % 16 == 0, "N must be a multiple of 16")
            for k in T.static_range(N // 16):
                x.load((k,), (16,))
        """

        def __class_getitem__(cls, type: Any) -> ConstOf:
            return ConstOf(type)


class KernelParam(NamedTuple):
    """A parameter of a kernel. `access` is set for peers, `dtype` for typed scalars (None: from the
    argument), `const_type` for constants (None: any), `default` is REQUIRED where there is none."""

    name: str
    role: Role
    default: Any = REQUIRED
    access: Access | None = None
    dtype: DType | None = None
    const_type: Any = None

    @property
    def required(self) -> bool:
        return self.default is REQUIRED


_ROLES: Final[dict[type, Role]] = {
    Exclusive: Role.EXCLUSIVE,
    Accumulate: Role.ACCUMULATE,
    Shared: Role.SHARED,
    Peer: Role.PEER,
    Multicast: Role.MULTICAST,
    Signal: Role.SIGNAL,
    Counter: Role.COUNTER,
    Barrier: Role.BARRIER,
    Mailbox: Role.MAILBOX,
    Pointer: Role.POINTER,
}
_PYTHON_SCALARS: Final[dict[Any, DType]] = {bool: b1, int: i64, float: f32}
_TYPES: Final = (
    "T.Exclusive, T.Accumulate, T.Shared, T.Peer, T.Multicast, T.Signal, T.Counter, T.Barrier, T.Mailbox, T.Pointer, "
    "T.Const[...], or a dtype such as T.i32 for a scalar"
)


def _resolved(fn: FunctionType, name: str, annotation: Any, loc: Loc) -> Any:
    """The object an annotation written as text means, in the names the function sees."""
    if not isinstance(annotation, str):
        return annotation
    names = dict(fn.__globals__)
    for free, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            names[free] = cell.cell_contents
        except ValueError:  # an empty cell: a name that the enclosing function assigns later
            continue
    try:
        return eval(annotation, names)
    except Exception as error:
        raise CompileError(
            f"parameter `{name}`: annotation {annotation!r} cannot be evaluated ({error}); "
            "use names that the kernel's module defines",
            loc,
        ) from None


def _param(name: str, annotation: Any, default: Any, unsafe: bool, loc: Loc) -> KernelParam:
    if isinstance(annotation, type) and annotation in _PYTHON_SCALARS:
        return KernelParam(name, Role.SCALAR, default, dtype=_PYTHON_SCALARS[annotation])
    if annotation is Const:
        return KernelParam(name, Role.CONST, default)
    if isinstance(annotation, ConstOf):
        if not annotation.is_sound:
            raise CompileError(f"parameter `{name}`: expected a type in T.Const[...], got {annotation.type!r}", loc)
        if default is not REQUIRED and not annotation.takes(default):
            raise CompileError(f"parameter `{name}`: default: expected a value for {annotation}, got {default!r}", loc)
        return KernelParam(name, Role.CONST, default, const_type=annotation.type)
    if isinstance(annotation, DType):
        return KernelParam(name, Role.SCALAR, default, dtype=annotation)
    if isinstance(annotation, PeerAccess):
        return KernelParam(name, Role.PEER, default, access=annotation.access)
    role = _ROLES.get(annotation) if isinstance(annotation, type) else None
    if role is None:
        shown = "no annotation" if annotation is REQUIRED else repr(annotation)
        raise CompileError(f"parameter `{name}`: expected {_TYPES}, got {shown}", loc)
    if role is Role.POINTER and not unsafe:
        raise CompileError(
            f"parameter `{name}`: T.Pointer is a raw address, which only unsafe kernels take; "
            "mark the kernel @pt.kernel(unsafe=True), or take T.Shared, T.Exclusive or T.Peer",
            loc,
        )
    if default is not REQUIRED:
        raise CompileError(
            f"parameter `{name}`: only scalars and constants have defaults, "
            f"got {default!r} for T.{annotation.__name__}",
            loc,
        )
    return KernelParam(name, role, default, access=Access.READ_WRITE if role is Role.PEER else None)


def read_signature(fn: FunctionType, *, unsafe: bool = False) -> tuple[KernelParam, ...]:
    """The parameters of a kernel function, in order.

    Raises CompileError for a missing or foreign annotation, for *args, and for T.Pointer in a kernel that is
    not unsafe.
    """
    code = fn.__code__
    loc = Loc(code.co_filename, code.co_firstlineno, function=fn.__name__)
    params, rest = read_parameters(fn)
    if rest is not None or code.co_flags & 0x08:
        raise CompileError(f"kernel `{fn.__name__}`: expected named parameters only, got *args or **kwargs", loc)
    return tuple(
        _param(p.name, _resolved(fn, p.name, fn.__annotations__.get(p.name, REQUIRED), loc), p.default, unsafe, loc)
        for p in params
    )
