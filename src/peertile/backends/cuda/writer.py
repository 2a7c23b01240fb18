"""Writes lines of Triton source and remembers which user line each came from. Knows no ops."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath

from peertile.source import Loc

__all__ = ["Writer"]


class Writer:
    """Lines with indentation, and for each line the place of the user's program that it stands for.

    A comment with the user's source line opens each group of lines that came from it.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.locs: list[Loc | None] = []
        self.loc: Loc | None = None
        self._depth = 0
        self._commented: tuple[str, int] | None = None

    def line(self, text: str) -> None:
        self._comment()
        self._append(text)

    def at(self, loc: Loc | None) -> None:
        """What follows comes from `loc`."""
        if loc is not None:
            self.loc = loc

    @contextmanager
    def indented(self, head: str) -> Iterator[None]:
        """`head`, then what the context writes one level deeper; `pass` if it writes nothing."""
        self.line(head)
        self.open()
        try:
            yield
        finally:
            self.close()

    def open(self) -> None:
        self._depth += 1

    def close(self) -> None:
        if self._is_empty():
            self._append("pass")
        self._depth -= 1

    def _is_empty(self) -> bool:
        """Whether the block being closed has no statement: its head is the last line that is no comment."""
        for text in reversed(self.lines):
            if not text.lstrip().startswith("#"):
                return len(text) - len(text.lstrip()) == 4 * (self._depth - 1)
        return False

    def _append(self, text: str) -> None:
        self.lines.append("    " * self._depth + text)
        self.locs.append(self.loc)

    def _comment(self) -> None:
        if self.loc is None:
            return
        user = self.loc.user
        if (user.file, user.line) == self._commented:
            return
        self._commented = (user.file, user.line)
        code = linecache.getline(user.file, user.line).strip()
        where = f"{PurePath(user.file).name}:{user.line}"
        self._append(f"# {where}  {code}" if code else f"# {where}")
