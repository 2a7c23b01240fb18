"""What makes a function a word of the kernel language. No meaning: the frontend attaches that from outside.

A word has a signature, a docstring and no body. The compiler reads calls of it in a kernel's source;
calling it anywhere else raises `UsageError`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, Final, NamedTuple, TypeVar

from peertile.errors import UsageError

__all__ = ["REQUIRED", "KernelOnly", "Word", "WordParam", "word", "word_of"]

F = TypeVar("F", bound=Callable[..., Any])

REQUIRED: Final = object()
"""The default of a parameter that has none."""

_MARK = "__peertile_word__"


class WordParam(NamedTuple):
    """A parameter of a word: `default` is REQUIRED where there is none."""

    name: str
    default: Any
    keyword_only: bool


class Word(NamedTuple):
    """The signature of a word. `rest` names the parameter that takes further positional arguments."""

    name: str
    params: tuple[WordParam, ...]
    rest: str | None = None
    unsafe: bool = False


def read_signature(fn: FunctionType) -> tuple[tuple[WordParam, ...], str | None]:
    """Parameters of a Python function, and the name of its `*rest` parameter.

    Read from the code object: `inspect.signature` costs a hundred times as much and this runs at import.
    """
    code = fn.__code__
    names = code.co_varnames
    n, k = code.co_argcount, code.co_kwonlyargcount
    defaults = fn.__defaults__ or ()
    first_default = n - len(defaults)
    params = [
        WordParam(name, defaults[i - first_default] if i >= first_default else REQUIRED, False)
        for i, name in enumerate(names[:n])
    ]
    keywords = fn.__kwdefaults__ or {}
    params += [WordParam(name, keywords.get(name, REQUIRED), True) for name in names[n : n + k]]
    rest = names[n + k] if code.co_flags & 0x04 else None
    return tuple(params), rest


def word(fn: F) -> F:
    """Makes `fn` a word: its body is never run, a call outside a kernel says so."""
    assert isinstance(fn, FunctionType)
    unsafe = fn.__module__.endswith(".unsafe")
    name = f"unsafe.{fn.__qualname__}" if unsafe else fn.__qualname__

    @wraps(fn)
    def outside(*args: object, **kwargs: object) -> Any:
        raise UsageError(
            f"T.{name}: expected a call inside a kernel, got one from the host; "
            "it is a word of the kernel language, so write it in a function marked @pt.kernel, or in a helper it calls"
        )

    params, rest = read_signature(fn)
    setattr(outside, _MARK, Word(name, params, rest, unsafe))
    return outside  # type: ignore[return-value]


def word_of(obj: object) -> Word | None:
    """The signature of a word, None for anything else."""
    found = getattr(obj, _MARK, None)
    return found if isinstance(found, Word) else None


class KernelOnly:
    """Base of the types that exist only inside a kernel: they annotate parameters and document methods."""

    def __new__(cls, *args: object, **kwargs: object) -> KernelOnly:
        raise UsageError(
            f"T.{cls.__name__}: expected an annotation of a kernel parameter, got a call; the host passes tensors, "
            "partitions and communication objects, and the kernel sees them as this type"
        )
