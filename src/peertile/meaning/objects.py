"""Communication objects as arguments of `run_grid`: fresh words, as the host would allocate them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from peertile.ir.types import MailboxType
from peertile.meaning.grid import PerRank

__all__ = ["new_barrier", "new_counter", "new_mailbox", "new_signal"]


def _words(ranks: int, rows: int, columns: int, start: int = 0) -> PerRank:
    return PerRank([np.full((rows, columns), start, np.uint64) for _ in range(ranks)])


def new_signal(ranks: int, slots: int, start: int = 0) -> dict[str, PerRank]:
    """Words of a signal; `start` puts every epoch at some number, to test what happens at the wrap."""
    return {name: _words(ranks, slots, ranks, start) for name in ("arrived", "sent", "seen")}


def new_counter(ranks: int, slots: int, start: int = 0) -> dict[str, PerRank]:
    """Words of a counter."""
    return {name: _words(ranks, slots, 1, start) for name in ("count", "base")}


def new_barrier(ranks: int, programs: int, start: int = 0) -> dict[str, PerRank]:
    """Words of a barrier."""
    return {"arrived": _words(ranks, programs, ranks, start), "passed": _words(ranks, programs, 1, start)}


def new_mailbox(
    type: MailboxType,
    ranks: int,
    programs: int,
    signature: int | PerRank = 0x5EED,
    epoch: int = 0,
    links: PerRank | None = None,
) -> dict[str, Any]:
    """Slots and words of a mailbox whose next round is `epoch`; `links` where it has some of its own."""
    shape = (programs * type.depth * ranks, prod(type.tile_shape))
    fields: dict[str, Any] = {
        "data": PerRank([np.zeros(shape, type.dtype.numpy) for _ in range(ranks)]),
        "arrived": _words(ranks, programs, ranks, epoch << 24),
        "signatures": _words(ranks, programs * type.depth, ranks),
        "signature": signature,
    }
    if type.acknowledged:
        fields["freed"] = _words(ranks, programs, ranks, epoch << 24)
    if type.linked:
        fields["links"] = links
    return fields
