"""The standard streams of simulated ranks: real text streams over what the run keeps of its output, and an input that
nobody types. Nothing here reaches the streams of the process."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Final, NoReturn, TextIO, cast

__all__ = ["KEPT_BYTES", "Printed", "no_input", "printing_to"]

KEPT_BYTES: Final = 1 << 20
"""Of the output of one run; a loop that prints is not to fill the memory before its time is over."""


class Printed:
    """What all ranks of one run have printed, in order: the first part of it, and how much more there was."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._more = 0

    def add(self, data: bytes) -> None:
        kept = data[: KEPT_BYTES - len(self._kept)]
        self._kept += kept
        self._more += len(data) - len(kept)

    def text(self) -> str:
        text = self._kept.decode("utf-8", "replace")
        return f"{text}\n... and {self._more} bytes more\n" if self._more else text


class _Output(io.RawIOBase):
    def __init__(self, printed: Printed, name: str) -> None:
        self._printed = printed
        self.name = name

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._printed.add(bytes(data))
        return len(data)


class _Input(io.RawIOBase):
    name = "<stdin>"

    def __init__(self, refuse: Callable[[], NoReturn]) -> None:
        self._refuse = refuse

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._refuse()


def printing_to(printed: Printed, name: str, errors: str = "strict") -> TextIO:
    """A stream as sys.stdout is one, with lines that arrive whole."""
    made = io.TextIOWrapper(io.BufferedWriter(_Output(printed, name)), "utf-8", errors, line_buffering=True)
    made.mode = "w"  # type: ignore[misc]  # as of the real ones
    return cast(TextIO, made)


def no_input(refuse: Callable[[], NoReturn]) -> TextIO:
    """A stream as sys.stdin is one; whoever reads gets what `refuse` raises."""
    made = io.TextIOWrapper(io.BufferedReader(_Input(refuse)), "utf-8")
    made.mode = "r"  # type: ignore[misc]
    return cast(TextIO, made)
