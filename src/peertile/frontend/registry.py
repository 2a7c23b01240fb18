"""Attaches meaning to the words of the language: word -> function that emits IR. No meaning itself.

A word and its implementation must have the same parameters; this is checked when the frontend is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, TypeVar

from peertile.errors import InternalError
from peertile.frontend.scope import Build
from peertile.frontend.values import Abstract, Known
from peertile.language.word import REQUIRED, Word, read_signature, word_of

__all__ = ["Impl", "call_word", "implementation", "implements"]

Impl = Callable[..., Abstract]
F = TypeVar("F", bound=Callable[..., Any])

_IMPLS: Final[dict[str, Impl]] = {}


def implements(*words: Any) -> Callable[[F], F]:
    """The decorated function `(build, …parameters of the word)` emits these words."""

    def register(impl: F) -> F:
        assert isinstance(impl, FunctionType)
        params, rest = read_signature(impl)
        own = tuple(p.name for p in params[1:]), rest
        for found in words:
            word = word_of(found.fget if isinstance(found, property) else found)
            if word is None:
                raise InternalError(f"{impl.__name__}: {found!r} is no word")
            expected = tuple(p.name for p in word.params), word.rest
            if own != expected:
                raise InternalError(f"T.{word.name}: its implementation takes {own}, the word {expected}")
            _IMPLS[word.name] = impl
        return impl

    return register


def implementation(word: Word) -> Impl:
    """What emits a word."""
    try:
        return _IMPLS[word.name]
    except KeyError:
        raise InternalError(f"T.{word.name}: no implementation in the frontend") from None


def call_word(b: Build, word: Word, args: list[Abstract], kwargs: dict[str, Abstract]) -> Abstract:
    """Binds arguments to the word's parameters and emits it."""
    bound = bind_arguments(b, f"T.{word.name}", word, args, kwargs)
    if word.rest is None:
        return implementation(word)(b, **bound)
    n = sum(not p.keyword_only for p in word.params)
    keywords = {p.name: bound.pop(p.name) for p in word.params if p.keyword_only}
    return implementation(word)(b, *bound.values(), *args[n:], **keywords)


def bind_arguments(
    b: Build, role: str, word: Word, args: list[Abstract], kwargs: dict[str, Abstract]
) -> dict[str, Abstract]:
    """Arguments by parameter name, as Python would bind them; CompileError where it would raise."""
    # The receiver of a method is bound already, and not something its caller counts.
    shown = [p for p in word.params if p.name != "self"]
    offset = len(word.params) - len(shown)
    positional = [p for p in word.params if not p.keyword_only]
    if len(args) > len(positional) and word.rest is None:
        names = ", ".join(p.name for p in shown if not p.keyword_only) or "none"
        b.fail(
            f"{role}: expected at most {len(positional) - offset} positional arguments ({names}), "
            f"got {len(args) - offset}"
        )
    bound = {p.name: a for p, a in zip(positional, args, strict=False)}
    for name, value in kwargs.items():
        if name in bound:
            b.fail(f"{role}: `{name}` is given twice, by position and by name")
        if not any(p.name == name for p in shown):
            b.fail(f"{role}: expected {', '.join(p.name for p in shown) or 'no arguments'}, got the keyword `{name}`")
        bound[name] = value
    for p in word.params:
        if p.name not in bound:
            if p.default is REQUIRED:
                b.fail(f"{role}: missing argument `{p.name}`; expected {', '.join(q.name for q in shown)}")
            bound[p.name] = Known(p.default)
    return {p.name: bound[p.name] for p in word.params}
