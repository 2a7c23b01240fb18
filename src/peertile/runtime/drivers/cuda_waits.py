"""Streams that wait on a word, by context: what calls that take a whole context have to let end first.

Loading and unloading code, and freeing memory of legacy IPC, wait until all that was enqueued in a context has ended,
and keep every other call for that context waiting meanwhile. So the bound of a stream's wait could not be kept: it is
the pump (`cuda_pump`) that ends such a wait, by calls for the same context. Whoever makes one of those calls therefore
lets the waits of streams end first; each has its bound. Only once there is none does it have the context alone, and
until it gives that up no stream begins to wait: what a wait that is under way is waiting for may be another wait.
Kernels that wait keep their bound themselves. No call of the NVIDIA driver here.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["STREAM_WAITS", "StreamWaits"]

_LONGEST_S: Final = 1e-3


class StreamWaits:
    """Of one process."""

    def __init__(self) -> None:
        self._condition = threading.Condition()  # protects the tables; held while a wait is made known
        self._asked: dict[int, list[Callable[[], bool]]] = {}
        self._alone: Counter[int] = Counter()

    def add(self, context: int, waiting: Callable[[], bool]) -> None:
        """`waiting` says whether one of a device's streams waits."""
        with self._condition:
            self._asked.setdefault(context, []).append(waiting)

    def remove(self, context: int, waiting: Callable[[], bool]) -> None:
        with self._condition:
            self._asked.get(context, []).remove(waiting)

    def begin(self, context: int, make_known: Callable[[], None]) -> None:
        """Before a stream waits: `make_known` has `waiting` say so. Not while somebody has the context alone."""
        with self._condition:
            while self._alone[context]:
                self._condition.wait()
            make_known()

    def take(self, context: int) -> bool:
        """Have the context alone, unless a stream waits. Whoever got it has to `give` it."""
        with self._condition:
            if any(waiting() for waiting in self._asked.get(context, ())):
                return False
            self._alone[context] += 1
            return True

    def give(self, context: int) -> None:
        with self._condition:
            self._alone[context] -= 1
            self._condition.notify_all()

    @contextmanager
    def alone(self, context: int) -> Iterator[None]:
        """Once no stream waits. Each that does has its bound, but others may begin meanwhile: where one always waits,
        this does, too."""
        pause = 0.0
        while not self.take(context):
            time.sleep(pause)
            pause = min(pause + 1e-5, _LONGEST_S)
        try:
            yield
        finally:
            self.give(context)


STREAM_WAITS: Final = StreamWaits()
