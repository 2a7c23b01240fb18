"""What higher floors tell timelines: which rank this is, what memory ranks share, and which launches are kept. They
register here when they are imported; nothing is asked of them before a timeline is recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["heaps", "note_heap", "ranks", "renew"]

_MOST_HEAPS: Final = 256

heaps: Final[deque[tuple[str, tuple[int, ...], int]]] = deque(maxlen=_MOST_HEAPS)
"""(key, where each rank's part is, bytes) as `events.Heap`, the newest first. Closed ones too: what was recorded may
name their words."""

renew: Final[list[Callable[[object], None]]] = []
"""Called with a device when its kernels are compiled otherwise from now on: who keeps launches makes them anew."""


class _Ranks:
    """Who knows the rank of the calling thread."""

    def __init__(self) -> None:
        self.place: Callable[[], tuple[int, int, bool] | None] = lambda: None
        """(rank, number of ranks, whether it is a thread); None outside of a group."""
        self.has_launcher: Callable[[], bool] = lambda: False
        """Whether a launcher of ours has started this process, and will see it end."""
        self.has_launched = False
        """Whether this process has started ranks itself, whose timeline the file is."""


ranks: Final = _Ranks()


def note_heap(key: str, bases: tuple[int, ...], nbytes: int) -> None:
    """Ranks share this memory."""
    heaps.appendleft((key, bases, nbytes))
