"""Order among Python's own loads and stores of words that other threads or processes look at. Waits for nobody."""

from __future__ import annotations

import threading

__all__ = ["in_order"]


def in_order() -> None:
    """What comes before is done, and seen by others, before what comes behind. x86 keeps such an order by itself;
    elsewhere the release of a lock and then its acquire do, with all that comes before and after the two."""
    edge = threading.Lock()  # nobody else has it: only the barriers of its steps count
    for _ in range(2):
        with edge:
            pass
