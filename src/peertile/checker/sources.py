"""Which files are those of a checked program, and where on a stack it is. Knows paths alone, runs nothing."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Final

__all__ = ["Sources"]

_STANDARD: Final = (sysconfig.get_path("stdlib") + os.sep, "<frozen")
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_CHECKER: Final = str(Path(__file__).parent) + os.sep
_PACKAGE: Final = str(Path(__file__).parent.parent) + os.sep


class Sources:
    """The files of one program: `file`, and what lies in its folder or in one that it imports from. What is installed
    below such a folder, as in an environment of the project, is a library, and so is this package."""

    def __init__(self, folder: Path, file: str = "") -> None:
        self.folder = str(folder)
        self._below = [self.folder.rstrip(os.sep) + os.sep]
        self._file = file
        self._known: dict[str, bool] = {}

    def owns(self, name: str) -> bool:
        """Whether the file of this name is one of the program's."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = name == self._file or any(_is_own(name, below) for below in self._below)
        return found

    def add(self, folder: str) -> None:
        """What the program imports from `folder` is its own, too."""
        below = os.path.abspath(folder).rstrip(os.sep) + os.sep
        if below not in self._below and not any(mark in below for mark in _INSTALLED):
            self._below.append(below)
            self._known.clear()

    def place_of(self, frame: FrameType | None) -> tuple[str, bool]:
        """The innermost place of the program on a stack, as `file:line`, and whether the program made the call
        itself, through nothing but Python's own library."""
        direct, last = True, "?"
        while frame is not None:
            name = frame.f_code.co_filename
            last = f"{name}:{frame.f_lineno}"
            if self.owns(name):
                return last, direct
            if not _is_standard(name) and not name.startswith(_CHECKER):
                direct = False
            frame = frame.f_back
        return last, False

    def line_of(self, frame: FrameType | None) -> str:
        """The innermost place of the program on a stack, as `file:line`; empty if it is not on it."""
        while frame is not None:
            if self.owns(frame.f_code.co_filename):
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


def _is_own(name: str, below: str) -> bool:
    return (
        name.startswith(below)
        and not any(name.startswith(path) and path.startswith(below) for path in (_STANDARD[0], _PACKAGE))
        and not any(mark in name[len(below) - 1 :] for mark in _INSTALLED)
    )


def _is_standard(name: str) -> bool:
    return name.startswith(_STANDARD) and not any(mark in name for mark in _INSTALLED)
