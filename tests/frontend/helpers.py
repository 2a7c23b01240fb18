"""Compiling a function with types made by hand, running it with the evaluator, and reading its errors."""

from collections.abc import Callable
from typing import Any

import numpy as np

from peertile.dtypes import DType, f32, i64, u32, u64
from peertile.errors import CompileError
from peertile.frontend.build import build_kernel
from peertile.ir.core import Kernel, Op, walk
from peertile.ir.types import (
    Access,
    BarrierType,
    CounterType,
    MailboxType,
    MulticastType,
    Partition,
    PointerType,
    SignalType,
    Space,
    SymmetricType,
    TileType,
    Type,
    ViewType,
)
from peertile.ir.verify import verify
from peertile.meaning import Outcome, run_grid
from peertile.passes.mailbox_rules import check_mailbox_rules
from peertile.passes.pipeline import run_pipeline


def shared(dtype: DType = f32, rank: int = 1) -> ViewType:
    return ViewType(dtype, rank)


def own(dtype: DType = f32, tile: tuple[int, ...] = (64,), persistent: bool = False) -> ViewType:
    return ViewType(dtype, len(tile), Access.READ_WRITE, partition=Partition(tile, persistent))


def peer(dtype: DType = f32, rank: int = 1, access: Access = Access.READ_WRITE) -> SymmetricType:
    return SymmetricType(dtype, rank, access)


def box(dtype: DType = f32, tile: tuple[int, ...] = (64,)) -> MailboxType:
    return MailboxType(dtype, tile, 2, False)


def scalar(dtype: DType = i64) -> TileType:
    return TileType(dtype)


# A parameter by the name it has in most tests; `types(fn)` looks them up.
NAMED: dict[str, Type] = {
    "z": own(),
    "zz": own(f32, (16, 64)),
    "zp": own(f32, (64,), persistent=True),
    "x": shared(),
    "y": shared(),
    "xi": shared(i64),
    "m": shared(f32, 2),
    "h": ViewType(i64, 1, Access.WRITE, Space.DEVICE),
    "p": peer(),
    "q": peer(f32, 1, Access.READ),
    "words": peer(u64),
    "v": MulticastType(f32, 1, (True,), 64),
    "mptr": MulticastType(f32, 1, (True,), 64, pointer=True),
    "vw": MulticastType(u32, 1, (True,), 64),
    "s": SignalType(),
    "c": CounterType(),
    "b": BarrierType(),
    "box": box(),
    "other": box(),
    "ptr": PointerType(f32),
    "n": scalar(),
    "k": scalar(),
}


def types(fn: Callable[..., Any], **given: Type) -> dict[str, Type]:
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    return {name: given.get(name, NAMED.get(name)) for name in names if name in given or name in NAMED}


def build(fn: Callable[..., Any], constants: dict[str, Any] | None = None, **given: Any) -> Kernel:
    """The verified IR of `fn`; parameter types by name, from `given` or from NAMED."""
    options = {k: given.pop(k) for k in ("unsafe", "grid_rank", "groups") if k in given}
    kernel = build_kernel(fn, types(fn, **given), constants, **options)
    verify(kernel, order_rules=False)
    check_mailbox_rules(kernel)
    return kernel


def names(kernel: Kernel) -> list[str]:
    """Names of all ops, outer before inner."""
    return [op.NAME for op in walk(kernel.body)]


def only(kernel: Kernel, cls: type[Op]) -> Op:
    """The one op of a class."""
    (op,) = (op for op in walk(kernel.body) if isinstance(op, cls))
    return op


def all_of(kernel: Kernel, cls: type[Op]) -> list[Op]:
    return [op for op in walk(kernel.body) if isinstance(op, cls)]


def error(fn: Callable[..., Any], constants: dict[str, Any] | None = None, **given: Any) -> CompileError:
    """The error that compiling `fn` raises."""
    try:
        build(fn, constants, **given)
    except CompileError as found:
        return found
    raise AssertionError(f"{fn.__name__} compiled")


def underlined(found: CompileError) -> str:
    """The piece of source that the caret of an error marks."""
    assert found.loc is not None
    text, carets = found.loc.excerpt().splitlines()[-2:]
    start = carets.index("^")
    return text[start : start + carets.count("^")]


def refuses(
    fn: Callable[..., Any],
    message: str,
    under: str | None = None,
    constants: dict[str, Any] | None = None,
    **given: Any,
) -> None:
    """Asserts the whole message of the error of `fn`, and the source under its caret."""
    found = error(fn, constants, **given)
    assert found.message == message
    if under is not None:
        assert underlined(found) == under


def value_of(fn: Callable[..., Any], *args: Any, dtype: DType = i64, constants: dict[str, Any] | None = None) -> Any:
    """Runs `fn(out, *scalars)`, which stores one scalar of `dtype`, and returns what it stored."""
    names = fn.__code__.co_varnames[1 : fn.__code__.co_argcount]
    runtime = [name for name in names if name not in (constants or {})]
    given: dict[str, Type] = {fn.__code__.co_varnames[0]: own(dtype, (1,))}
    given |= {name: scalar() for name in runtime}
    kernel = build_kernel(fn, given, constants)
    verify(kernel, order_rules=False)
    out = np.zeros(1, dtype.numpy)
    outcome = run_grid(run_pipeline(kernel), 1, [out, *args])
    assert outcome.faults == []
    return out[0].item()


def run(fn: Callable[..., Any], args: list[Any], *, grid: Any = 1, ranks: int = 1, **given: Any) -> Outcome:
    """Compiles and runs `fn` with the evaluator; arrays among `args` are written in place."""
    return run_grid(run_pipeline(build(fn, **given)), grid, args, ranks=ranks)
