"""Where in the user's code an operation was made: kept as two words, told as `file:line`. Reads no source.

A frame is not kept: it would keep every local variable of the caller alive, tensors among them.
"""

from __future__ import annotations

import os
import sys
from itertools import islice
from types import CodeType

__all__ = ["OUTSIDE", "Site", "call_site", "describe", "is_outside"]

Site = tuple[CodeType, int]
"""Code and the offset of the instruction in it."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_COMMANDS = f"{_PACKAGE}cli{os.sep}"
"""The command line's programs use the package as anybody's do."""
_MOST_FILES = 4096

OUTSIDE: dict[str, bool] = {}
"""Whether files are outside of this package, as far as anybody asked (`is_outside`)."""


def is_outside(file: str) -> bool:
    """Whether code of this file is the user's."""
    found = OUTSIDE.get(file)
    if found is None:
        if len(OUTSIDE) >= _MOST_FILES:
            OUTSIDE.clear()
        found = OUTSIDE[file] = not file.startswith(_PACKAGE) or file.startswith(_COMMANDS)
    return found


def call_site(depth: int = 1) -> Site | None:
    """The nearest caller outside this package, `depth` frames up or further; None if there is none."""
    try:
        frame = sys._getframe(depth)
    except ValueError:  # native code calls, in a thread of its own or at exit
        return None
    while True:
        code = frame.f_code
        if OUTSIDE.get(code.co_filename) or is_outside(code.co_filename):
            return code, frame.f_lasti
        back = frame.f_back
        if back is None:
            return None
        frame = back


def describe(site: Site | None) -> str:
    """`file:line` of a site."""
    if site is None:
        return "an unknown line"
    code, offset = site
    line = next(islice(code.co_positions(), max(offset, 0) // 2, None), (None,))[0]
    return f"{code.co_filename}:{line or code.co_firstlineno}"
