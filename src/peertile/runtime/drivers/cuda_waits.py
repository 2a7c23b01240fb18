"""Streams that wait on a word, by context: what calls that take a whole context have to let end first.

Loading and unloading code, and freeing memory of legacy IPC, wait until all that was enqueued in a context has ended,
and keep every other call for that context waiting meanwhile. So the bound of a stream's wait could not be kept: it is
the pump (`cuda_pump`) that ends such a wait, by calls for the same context. Whoever makes one of those calls therefore
lets the waits of streams end first; each has its bound. Kernels that wait keep their bound themselves. No call of the
NVIDIA driver here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["STREAM_WAITS", "StreamWaits"]

_LONGEST_S: Final = 1e-3


class StreamWaits:
    """Of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the table
        self._asked: dict[int, list[Callable[[], bool]]] = {}

    def add(self, context: int, waiting: Callable[[], bool]) -> None:
        """`waiting` says whether one of a device's streams waits."""
        with self._lock:
            self._asked.setdefault(context, []).append(waiting)

    def remove(self, context: int, waiting: Callable[[], bool]) -> None:
        with self._lock:
            self._asked.get(context, []).remove(waiting)

    def any(self, context: int) -> bool:
        with self._lock:
            asked = list(self._asked.get(context, ()))
        return any(waiting() for waiting in asked)

    def let_end(self, context: int) -> None:
        """Until none waits: as long as the bounds of those that do, at most."""
        pause = 0.0
        while self.any(context):
            time.sleep(pause)
            pause = min(pause + 1e-5, _LONGEST_S)


STREAM_WAITS: Final = StreamWaits()
