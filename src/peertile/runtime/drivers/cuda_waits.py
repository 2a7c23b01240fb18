"""Streams that wait on a word, by context: what calls that take a whole context have to let end first.

Loading and unloading code, and freeing memory of legacy IPC, wait until all that was enqueued in a context has ended,
and keep every other call for that context waiting meanwhile. So the bound of a stream's wait could not be kept: it is
the pump (`cuda_pump`) that ends such a wait, by calls for the same context. Whoever makes one of those calls therefore
lets the waits of streams end first; each has its bound. Only once there is none does it have the context alone, and
until it gives that up no stream begins to wait. Before that streams may, for some time: what a wait that is under way
is waiting for may be another one. Kernels that wait keep their bound themselves. No call of the NVIDIA driver here.
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
PATIENCE_S: Final = 10.0
"""How long who wants a context alone lets others begin to wait there."""


class StreamWaits:
    """Of one process."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._condition = threading.Condition()  # protects the tables; held while a wait is made known
        self._asked: dict[int, list[Callable[[], bool]]] = {}
        self._alone: Counter[int] = Counter()
        self._impatient: Counter[int] = Counter()

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

    def may_begin(self, context: int) -> bool:
        """False once somebody has waited for the context as long as patience lasts: a wait then stays in its stream's
        backlog. To block in `begin` instead could block the pump, which has to end the waits there are."""
        return self._impatient[context] <= 0

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
        """Once no stream waits. Each that does has its bound; others may begin meanwhile, but not for ever, so this is
        over at the latest when those that had begun by then have reached theirs."""
        pause, patient, impatient = 0.0, time.monotonic() + self._patience_s, 0
        try:
            while not self.take(context):
                if not impatient and time.monotonic() >= patient:
                    impatient = 1
                    with self._condition:
                        self._impatient[context] += impatient
                time.sleep(pause)
                pause = min(pause + 1e-5, _LONGEST_S)
            try:
                yield
            finally:
                self.give(context)
        finally:
            with self._condition:
                self._impatient[context] -= impatient


STREAM_WAITS: Final = StreamWaits()
