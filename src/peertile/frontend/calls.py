"""Calls in a kernel: words, dtypes, helpers, and Python functions of compile-time values."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import peertile.language as T
from peertile.dtypes import DType
from peertile.frontend import (
    impl_accumulate,
    impl_comm,
    impl_folds,
    impl_memory,
    impl_multicast,
    impl_pieces,
    impl_random,
    impl_tiles,
    impl_transfers,
    impl_unsafe,
    impl_views,
    impl_words,
)
from peertile.frontend.impl_control import static_range
from peertile.frontend.impl_tiles import typed
from peertile.frontend.operators import as_value
from peertile.frontend.registry import call_word
from peertile.frontend.resolve import BUILTINS, ONLY_MATH, here, lift
from peertile.frontend.scope import Build
from peertile.frontend.values import Abstract, Known, Mailbox, Method, TilesIterator, Tup, ZippedTiles, describe
from peertile.ir import ops
from peertile.ir.core import Value
from peertile.language.word import KernelOnly, word_of

__all__ = ["call"]

# The implementations register themselves when imported; named here so that no import looks unused.
IMPLEMENTATIONS: Final = (
    impl_accumulate, impl_comm, impl_folds, impl_memory, impl_multicast, impl_pieces, impl_random, impl_tiles,
    impl_transfers, impl_unsafe, impl_views, impl_words,
)  # fmt: skip

_Evaluate = Callable[[Build, ast.expr], Abstract]

_INSTEAD: Final = {
    "abs": "T.abs",
    "all": "T.all",
    "any": "T.any",
    "bool": "`x != 0`",
    "divmod": "// and %",
    "enumerate": "T.range or T.static_range, and the index",
    "float": ".astype(T.f32)",
    "input": "a parameter of the kernel",
    "int": ".astype(T.i64)",
    "isinstance": "a T.Const parameter",
    "len": ".shape",
    "list": "a tuple",
    "max": "T.maximum (of two) or T.max (along an axis)",
    "min": "T.minimum (of two) or T.min (along an axis)",
    "open": "the host: a kernel reads and writes memory only",
    "pow": "`**` or T.pow",
    "print": "T.print_",
    "range": "T.range",
    "round": "T.round",
    "sum": "T.sum",
    "zip": "T.range or T.static_range, and the index",
}


def call(b: Build, function: Abstract, node: ast.Call, evaluate: _Evaluate, argument: _Evaluate) -> Abstract:
    """Calls `function` with the arguments of `node`; only a helper's may be a mailbox."""
    target = function.value if isinstance(function, Known) else None
    is_helper = isinstance(target, FunctionType) and word_of(target) is None
    value_of = argument if is_helper else evaluate
    args = [value_of(b, arg) for arg in node.args]
    kwargs = {k.arg: value_of(b, k.value) for k in node.keywords if k.arg is not None}
    if isinstance(function, Method):
        return call_word(b, function.word, [function.receiver, *args], kwargs)
    if not isinstance(function, Known):
        b.fail(f"call: expected a function, got {describe(function)}")
    word = word_of(target)
    if word is not None:
        if word.unsafe and not b.unsafe:
            b.fail(
                f"T.{word.name} in the kernel `{b.name}`, which is not unsafe; mark it @pt.kernel(unsafe=True), "
                "or use T.Peer, signals or a mailbox"
            )
        return call_word(b, word, args, kwargs)
    if is_helper:
        assert isinstance(target, FunctionType)
        _no_mailbox_twice(b, target, [*args, *kwargs.values()])
        return b.inline(b, target, args, kwargs)
    if isinstance(target, DType):
        if len(args) != 1 or kwargs:
            b.fail(f"T.{target.name}(...): expected one number or tile, got {len(args) + len(kwargs)} arguments")
        return typed(b, target, args[0])
    return _python_call(b, target, args, kwargs)


def _no_mailbox_twice(b: Build, fn: FunctionType, values: list[Abstract]) -> None:
    boxes = [v.name for v in values if isinstance(v, Mailbox)]
    for name in boxes:
        if boxes.count(name) > 1:
            b.fail(
                f"`{fn.__name__}`: expected different mailboxes (rule B7), got `{name}` twice; "
                "pass it once, so that one name stands for one mailbox"
            )


def _python_call(b: Build, target: Any, args: list[Abstract], kwargs: dict[str, Abstract]) -> Abstract:
    """A builtin or a function of `math` on compile-time values; everything else is refused by name."""
    name = getattr(target, "__name__", None)
    if target is BUILTINS["range"]:
        if kwargs or not 1 <= len(args) <= 3:
            b.fail(f"range: expected 1 to 3 arguments, got {len(args) + len(kwargs)}")
        if not all(isinstance(a, Known) for a in args):
            b.fail("range: expected ints known at compile time, which are unrolled; use T.range for run-time values")
        return static_range(b, "range", args)
    if target is zip and any(isinstance(a, TilesIterator) for a in args):
        return _zipped(b, args, kwargs)
    if target is BUILTINS["len"] and len(args) == 1 and isinstance(args[0], Tup):
        return Known(len(args[0].items))
    is_builtin = name is not None and getattr(builtins, name, None) is target
    allowed = (is_builtin and name in BUILTINS) or (callable(target) and _in_math(target))
    if allowed:
        try:
            values = [as_value(a) for a in args]
            named = {k: as_value(v) for k, v in kwargs.items()}
        except TypeError as error:
            way = f"; use {_INSTEAD[name]}" if is_builtin and name in _INSTEAD else ""
            way = way or f"; use the word T.{name} if there is one"
            b.fail(f"{name}: expected compile-time values, got {error}{way}")
        try:
            return lift(b, target(*values, **named), f"result of {name}")
        except (TypeError, ValueError, ArithmeticError) as error:
            b.fail(f"{name}: {error}")
    if is_builtin and name in _INSTEAD:
        b.fail(f"{name}: cannot be called inside a kernel; use {_INSTEAD[name]}")
    if isinstance(target, type) and issubclass(target, KernelOnly):
        b.fail(f"T.{target.__name__}: an annotation of kernel parameters cannot be called inside a kernel")
    shown = name or type(target).__name__
    way_out = f"; write T.{shown}" if word_of(getattr(T, shown, None)) is not None else here(shown)
    b.fail(
        f"`{shown}` cannot be called inside a kernel: expected a word of peertile.language, a dtype, or a plain "
        f"Python function with source{way_out}"
    )


def _zipped(b: Build, args: list[Abstract], kwargs: dict[str, Abstract]) -> ZippedTiles:
    """Tiles side by side: a program owns one of each, since all of them are dealt alike."""
    if any(name != "strict" or value != Known(False) for name, value in kwargs.items()):
        b.fail("zip: expected no option but strict=False; the partition with the fewest tiles ends the loop")
    parts = tuple(a for a in args if isinstance(a, TilesIterator))
    if len(parts) != len(args):
        other = next(a for a in args if not isinstance(a, TilesIterator))
        b.fail(f"zip: expected z.tiles() of each partition, got {describe(other)}; use T.range, and the index")
    names = [part.exclusive.name for part in parts]
    if len(set(names)) != len(names):
        b.fail(f"zip: expected different partitions, got `{max(names, key=names.count)}` twice")
    ways = {
        (p.exclusive.partition.persistent, p.exclusive.partition.spare, _number_or(p.dealt), p.is_down, p.is_even)
        for p in parts
    }
    if len(ways) > 1:
        b.fail(
            f"zip: expected partitions that are dealt alike, got {', '.join(f'`{name}`' for name in names)}; "
            "make all of them persistent or none, with the same spare, dealt, down and even"
        )
    return ZippedTiles(parts)


def _number_or(value: Value | None) -> Any:
    return value.op.attrs["value"] if value is not None and isinstance(value.op, ops.Const) else value


def _in_math(target: Any) -> bool:
    try:
        return target in ONLY_MATH
    except TypeError:
        return False
