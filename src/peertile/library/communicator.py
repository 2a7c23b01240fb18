"""What every communicator of the library is: how the ranks meet, and its life in a symmetric heap.

A communicator is made, used and closed by all ranks in the same order. It owns its channels and its staging in the
heap, its own or the caller's. What it computes is its subclass's business; no kernel is launched here.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from operator import or_
from types import TracebackType
from typing import Any, Self, TypeVar

from peertile.comm.group import Group
from peertile.comm.symmetric import SymmetricHeap
from peertile.errors import AllocationError, PeerFailed, PeertileError, UsageError
from peertile.runtime.device import Device
from peertile.runtime.driver import DriverKind

__all__ = ["Communicator", "meet"]

T = TypeVar("T")


def meet(group: Group, device: Device, what: str, word: str = "") -> tuple[int, list[str]]:
    """Collective. What the device gives each rank at once (cores, or multiprocessors), the same number on all, and the
    `word` of every rank.

    Cores are those that some rank may run on, shared evenly. Ranks of one process on one GPU share it, and have to be
    resident there together: whoever waits must not keep out whom it waits for.
    """
    on_gpu = device.driver.kind is DriverKind.CUDA
    has, place = _cores(), str(group.rank)
    if on_gpu:
        has, place = device.capabilities.executors, f"{os.getpid()} {device.driver.identity}"
    said = [f.decode().split("|") for f in group.exchange(f"{has:x}|{word}|{place}".encode(), what)]
    numbers = [int(number, 16) for number, _, _ in said]
    words = [word for _, word, _ in said]
    if not on_gpu:
        return max(1, reduce(or_, numbers).bit_count() // group.size), words
    sharers = max(Counter(place for _, _, place in said).values())
    return max(1, min(numbers) // sharers), words


def _cores() -> int:
    """The processors that this process may run on, one bit each."""
    if hasattr(os, "sched_getaffinity"):
        return sum(1 << core for core in os.sched_getaffinity(0))
    return (1 << (os.cpu_count() or 1)) - 1


class Communicator:
    """The life of a communicator: a subclass sets these, `_closed` last, and registers `_recover` with its group."""

    group: Group
    heap: SymmetricHeap
    _owns_heap: bool
    _objects: list[Any]
    """What it has in its heap, and in those of tensors that it worked on, to be given back."""
    _closed: bool

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        """Around what a constructor allocates, with `_objects` and `_closed` set. Where memory lacks every rank raises
        (a heap is too small on all alike), and gives back what it had made before: the caller's heap is as it was."""
        try:
            yield
        except (AllocationError, PeerFailed):
            with contextlib.suppress(PeertileError):  # why it cannot be made matters more
                self.close()
            raise

    def _own(self, item: T, *, is_words: bool = False) -> T:
        """Remember an object of the heap, to give it back."""
        self._objects.append(item)
        return item

    def _restart(self) -> None:
        """Words count from zero again: turns may differ between ranks after a failure, and agree then."""
        raise NotImplementedError

    def _recover(self) -> None:
        if self._closed or self.heap.closed:
            self._give_back()
        else:
            self._restart()

    def close(self) -> None:
        """Collective: give the memory back. Closing twice is fine. Where the group has failed, the memory of a heap
        that is not the communicator's own comes back when the group recovers."""
        if self._closed:
            return
        self._closed = True
        if self._owns_heap:  # which takes what is in it
            self._objects = [item for item in self._objects if item.heap is not self.heap]
        if not self._objects or self.group.failure() is None:
            self._give_back()
        if self._owns_heap:
            self.heap.close()

    def _give_back(self) -> None:
        while self._objects:
            heap = self._objects[0].heap
            if not heap.closed:  # which took all of them
                heap.free(self._objects[0])
            del self._objects[0]
        self.group.forget_recover(self._recover)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.group.size > 1:
            # A rank that leaves on an exception must not leave its peers in the barrier of close.
            self.group.fail(f"{type(error).__name__}: {error}")
        self.close()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise UsageError(f"{what}: the communicator was closed; use it before that")
