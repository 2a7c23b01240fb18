"""Source locations of kernel code, and how an error shows them. No parsing here.

A `Loc` is a place in a user's file; `inlined_at` chains to the call that inlined it (a helper
function, or a protocol expanded by the compiler), so that an error shows the whole path.
"""

from __future__ import annotations

import linecache
import time
from typing import Final, NamedTuple

__all__ = ["IMPORTED_NS", "Loc"]

IMPORTED_NS: Final = time.time_ns()
"""When this package was imported: before any module with kernels, so an older file is as it was imported."""


class Loc(NamedTuple):
    """Line and columns (1-based line, 0-based columns) of a piece of kernel source."""

    file: str
    line: int
    col: int = 0
    end_col: int | None = None
    function: str = ""
    inlined_at: Loc | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def user(self) -> Loc:
        """The outermost call site: the line in the kernel that the user wrote."""
        loc = self
        while loc.inlined_at is not None:
            loc = loc.inlined_at
        return loc

    def excerpt(self) -> str:
        """The source line with a caret range under it; empty if the file cannot be read."""
        linecache.checkcache(self.file)
        text = linecache.getline(self.file, self.line).rstrip("\n")
        if not text:
            return f"  {self}"
        stripped = text.lstrip()
        shift = len(text) - len(stripped)
        start = max(self.col - shift, 0)
        end = self.end_col - shift if self.end_col is not None and self.end_col > self.col else start + 1
        end = max(min(end, len(stripped)), start + 1)
        where = f" in {self.function}" if self.function else ""
        return f"  {self}{where}\n    {stripped}\n    {' ' * start}{'^' * (end - start)}"

    def render(self, message: str) -> str:
        """`message`, then the excerpt, then one line for each call that inlined this place."""
        parts = [message, self.excerpt()]
        outer = self.inlined_at
        while outer is not None:
            parts.append("  called from\n" + outer.excerpt())
            outer = outer.inlined_at
        return "\n".join(parts)
