"""Which algorithm and tile a collective uses: a committed table of measured winners, and how it is read.

The choice depends on facts that are equal on all ranks alone (target, architecture that all ranks agree on,
number of ranks, bytes), never on what one rank has or where its buffers lie. `table.json` is written by
`benchmarks/tune_collectives.py`; nothing is measured here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final

__all__ = ["GPU_ONLY", "Algorithm", "Choice", "by_fabric", "choose", "load_table", "set_table"]


class Algorithm(Enum):
    """How an all-reduce goes.

    ONE_SHOT: everybody reads everything, one exchange. TWO_SHOT: everybody reduces a share and shows it, two
    exchanges, pipelined over chunks. PIPELINED: as one-shot, tile by tile, one exchange each, any size. FLAGGED: one
    exchange, every element carries its own flag. RING: each rank talks to its neighbours alone; folds in the order
    of the ring, which differs from rank order. PUSHED: on GPUs, everybody pushes everything, one exchange a tile.
    FILLED: on GPUs, of floats, as PUSHED but for a signal: words arrive in places that were empty.
    MULTIMEM: of a multicast tensor in place, by one address; the table may name it where the fabric has a mapping.
    """

    ONE_SHOT = "one_shot"
    TWO_SHOT = "two_shot"
    PIPELINED = "pipelined"
    FLAGGED = "flagged"
    FILLED = "filled"
    RING = "ring"
    PUSHED = "pushed"
    MULTIMEM = "multimem"


GPU_ONLY: Final = frozenset({Algorithm.PUSHED, Algorithm.FILLED})
"""What a communicator does on GPUs alone."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm and the bytes of its largest tile."""

    algorithm: Algorithm
    tile_bytes: int


def load_table() -> dict[str, Any]:
    """The committed table: {collective: [{target, arch, world, entries: [[up to bytes, algorithm, tile bytes]]}]}.

    The last entry of a row has null for its bound.
    """
    table: dict[str, Any] = json.loads(Path(__file__).with_name("table.json").read_text(encoding="utf-8"))
    return table


_override: dict[str, Any] | None = None


def set_table(table: dict[str, Any] | None) -> None:
    """Choose by `table` in this process from now on, by the committed one with None: for measuring candidates.
    The same on every rank."""
    global _override
    _override = table
    _rows.cache_clear()


@cache
def _rows(collective: str, target: str, arch: str, world: int) -> tuple[tuple[float, Choice], ...]:
    """The row measured on the nearest machine: this target first, this architecture next, then the most ranks
    that are no more than `world`."""
    rows = (_override or load_table())["collectives"][collective]

    def distance(row: dict[str, Any]) -> tuple[bool, bool, bool, int]:
        return row["target"] != target, row["arch"] != arch, row["world"] > world, abs(row["world"] - world)

    best = min(rows, key=distance)
    return tuple(
        (float("inf") if bound is None else bound, Choice(Algorithm(name), tile))
        for bound, name, tile in best["entries"]
    )


def by_fabric(collective: str, target: str, arch: str, world: int, nbytes: int) -> bool:
    """Whether the fabric's multicast is the measured winner for a message of `nbytes` per rank, here: only a row that
    was measured on this architecture with this many ranks says so. Asked where the heap has a mapping, only.

    >>> by_fabric("all_reduce", "cuda", "sm_90", 8, 1 << 20)
    False
    """
    for row in (_override or load_table())["collectives"].get(f"{collective}_multicast", []):
        if (row["target"], row["arch"], row["world"]) == (target, arch, world):
            covering = (name for bound, name, _ in row["entries"] if bound is None or nbytes <= bound)
            return next(covering, None) == Algorithm.MULTIMEM.value
    return False


def choose(collective: str, target: str, arch: str, world: int, nbytes: int) -> Choice:
    """The measured winner for a message of `nbytes` per rank.

    >>> choose("all_reduce", "cpu", "x86_64-512", 2, 64 << 20).algorithm
    <Algorithm.PIPELINED: 'pipelined'>
    """
    for bound, choice in _rows(collective, target, arch, world):
        if nbytes <= bound:
            return choice
    raise AssertionError("the last row of the table has no bound")
