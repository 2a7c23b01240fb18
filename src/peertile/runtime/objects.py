"""Where CPython keeps the parts of objects that native code looks at: found by trying, never assumed.

A slot of a class is at a fixed place in its instances, and a lock has a word that tells whether somebody holds it. Both
are looked for in objects made for it. Where something is not found (another interpreter, a build without the global
lock) there is a `NotFoundError`, and whoever asked does without native code. Changes nothing but those objects.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any, Final

__all__ = ["TYPE_WORD", "NotFoundError", "held_word", "is_locked_globally", "slot_word"]

_WORD: Final = 8
_MOST_WORDS: Final = 64
TYPE_WORD: Final = 1
"""Where an object has its type."""


class NotFoundError(Exception):
    """This interpreter keeps something elsewhere. No LookupError, which a mistake in what is written would be."""


def is_locked_globally() -> bool:
    """Whether one thread at a time runs Python."""
    enabled: Any = getattr(sys, "_is_gil_enabled", None)
    return sys.implementation.name == "cpython" and (enabled is None or bool(enabled()))


def slot_word(cls: type, name: str) -> int:
    """Which word of an instance of exactly `cls` holds a reference to what its slot `name` has."""
    instance: Any = object.__new__(cls)
    marks = _Mark(), _Mark()
    words = min(cls.__basicsize__ // _WORD, _MOST_WORDS)
    if _word(instance, TYPE_WORD) != id(cls):
        raise NotFoundError(f"{cls.__name__}: expected the type in word {TYPE_WORD} of an object")
    found = set(range(2, words))
    for mark in (*marks, None):
        _descriptor(cls, name).__set__(instance, mark)  # not setattr: the class may be frozen
        found &= {k for k in found if _word(instance, k) == id(mark)}
    if len(found) != 1:
        raise NotFoundError(f"{cls.__name__}.{name}: expected its word among {words}, found {sorted(found)}")
    return found.pop()


def held_word() -> int:
    """Which word of a `threading.RLock` is 0 exactly while nobody holds it."""
    lock: Any = threading.RLock()
    words = min(type(lock).__basicsize__ // _WORD, _MOST_WORDS)
    found = {k for k in range(2, words) if _word(lock, k) == 0}
    for _ in range(3):
        lock.acquire()
        found &= {k for k in found if _word(lock, k) != 0}
    for _ in range(2):
        lock.release()
        found &= {k for k in found if _word(lock, k) != 0}
    lock.release()
    found &= {k for k in found if _word(lock, k) == 0}
    if not found:
        raise NotFoundError("RLock: expected a word that tells whether it is held, found none")
    return min(found)


def _descriptor(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    raise NotFoundError(f"{cls.__name__}: has no slot {name}")


class _Mark:
    """Something to look for."""

    __slots__ = ()


def _word(thing: object, k: int) -> int:
    return ctypes.c_size_t.from_address(id(thing) + k * _WORD).value
