"""The feeder of a cuda device: a thread that makes launches while the thread that submits them prepares the next ones.

It has native code do it (`cuda_native_feeding.py`), to the end without the interpreter lock, for which it would wait
too long beside a busy thread, and sleeps unless launches follow each other closely: a single launch is made by its
caller, who would wait for the feeder's waking longer than for the launch.
It decides nothing, and nothing is lost when it sleeps: what is posted is made by whoever next looks at the stream.

    ASLEEP ──wake──> serving ──nothing posted for a while──> ASLEEP ──stop──> ended
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Final

from peertile.runtime.drivers.cuda_native import Native
from peertile.runtime.drivers.cuda_native_feeding import RING_SLOTS, SLOT_BYTES, Feeding

__all__ = ["AFTER", "NEVER", "Feeder", "Ring"]

LEAST_CORES: Final = 4
"""On fewer processors the feeder would take the time of the thread that it serves."""
MOST_LANES: Final = 64
AFTER: Final = 4
"""Launches that follow each other closely before the feeder is woken."""


NEVER: Final = 1 << 59


class Ring:
    """Where launches of one stream wait for the feeder."""

    __slots__ = ("address", "memory")

    def __init__(self) -> None:
        self.memory = (ctypes.c_int64 * (RING_SLOTS * SLOT_BYTES // 8))()
        self.address = ctypes.addressof(self.memory)


class Feeder:
    """See the module docstring. `add` a lane, `wake` when launches come closely."""

    def __init__(self, native: Native, name: str) -> None:
        self._native = native
        self._name = name
        self._memory = (ctypes.c_int64 * (Feeding.LANES + MOST_LANES))()
        self.words = memoryview(self._memory).cast("B").cast("q")
        self.address = ctypes.addressof(self._memory)
        self._kept: list[object] = []  # memory that the thread may look at, also of streams that ended
        self._lock = threading.Lock()  # protects the lanes and the start
        self._thread: threading.Thread | None = None
        self.serves = len(os.sched_getaffinity(0)) >= LEAST_CORES
        """Whether it makes launches on this host."""

    def add(self, lane: object, address: int, ring: Ring) -> bool:
        """Look after a lane from here on; False where there are too many already. The memory of both is kept."""
        with self._lock:
            count = self.words[Feeding.COUNT]
            if count >= MOST_LANES:
                return False
            self._kept += (lane, ring)
            self.words[Feeding.LANES + count] = address
            self.words[Feeding.COUNT] = count + 1
            return True

    def wake(self) -> None:
        """Launches come closely: make them from here on."""
        if self.words[Feeding.AWAKE] or self.words[Feeding.STOP]:
            return
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    name = f"peertile-{self._name}-feeder"
                    self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                    self._thread.start()
        self._native.call_feeder(self.address)

    def _serve(self) -> None:
        # A method, so that the thread keeps the words that it looks at.
        self._native.serve(self.address)

    def stop(self) -> None:
        """End the thread; nothing is posted any more."""
        self.words[Feeding.STOP] = 1
        self._native.call_feeder(self.address)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
