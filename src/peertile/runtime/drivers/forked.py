"""What becomes of a driver's devices in a forked child: the parent's threads and contexts do not exist there, so every
call is refused, and nothing of the parent's is freed. Knows no driver.
"""

from __future__ import annotations

import os
import weakref
from functools import cache
from typing import Any, Generic, NoReturn, TypeVar

from peertile.errors import UsageError

__all__ = ["ForkGuard"]

D = TypeVar("D")


def _refuse() -> NoReturn:
    raise UsageError("runtime was initialised before fork; use spawn")


@cache
def _refusing(cls: type) -> type:
    """A class like `cls` whose objects do nothing."""

    def lookup(self: Any, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        if name == "free":  # garbage collection calls it; the memory is the parent's
            return lambda address: None
        _refuse()

    return type(f"Forked{cls.__name__}", (cls,), {"__getattribute__": lookup, "__doc__": _refusing.__doc__})


class ForkGuard(Generic[D]):
    """The open devices of one driver. In a forked child they refuse, and `check` refuses to open more."""

    def __init__(self) -> None:
        self.devices: weakref.WeakSet[D] = weakref.WeakSet()
        self._forked = False
        os.register_at_fork(after_in_child=self._after_fork)

    def check(self) -> None:
        """UsageError in the forked child of a process that had opened a device."""
        if self._forked:
            _refuse()

    def _after_fork(self) -> None:
        for device in list(self.devices):
            self._forked = True
            kind: type = type(device)
            device.__class__ = _refusing(kind)
