"""Which kernel of cuda_kernels.py a collective on GPUs runs, over how many programs and with which tiles.

The choice is in table.json, rows with the target "cuda", by the bytes that a rank sends to each other one; the bytes of
a tile are those of its payload.

A `GpuPlans` owns the staging memory and the words of one communicator, and builds launches; it never waits for a peer
and checks no arguments: collectives.py does. What it chooses depends on facts that are equal on all ranks alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from peertile.comm.symmetric import SymmetricHeap, SymmetricTensor
from peertile.dtypes import DType, u8, u32, u64
from peertile.kernel import LaunchOp
from peertile.library import cuda_kernels as kernels
from peertile.library.cuda_kernels import AHEAD_SLOTS, LEAST_FILLED, SLOTS
from peertile.library.reductions import ReduceOp, accumulator
from peertile.library.selection import Algorithm, Choice, choose
from peertile.runtime.tensor import Tensor

__all__ = ["PROGRAMS_PER_EXECUTOR", "Family", "GpuPlans", "Room", "Shape", "heap_bytes"]

WORDS = 1024
"""Words of the largest flagged tile."""
FILLED_WORDS = 1024
"""Words (u64) of the largest filled tile."""
SHORT_WORDS = 512
"""Words of the largest filled tile of a message that is short: of half of the programs at most, with many slots, since
a fence in every second turn would be a third of its time."""
SHORT_SLOTS = 128
"""Slots of a program for those, over all ranks."""
LONG_SLOTS = 16
"""So for others."""
TILE_BYTES = 1 << 14
"""Bytes of the largest pushed tile."""
FLAGGED_BYTES = 1 << 19
"""Most bytes that are worth a flag each where the table says filled and the elements are no floats."""
UNFILLED = {True: Choice(Algorithm.FLAGGED, 512), False: Choice(Algorithm.PUSHED, 1 << 13)}
LEAST_PUSHED = 1 << 12
"""Bytes of a pushed tile where the table says flagged and the elements are no words."""
ALL_TO_ALL_BYTES = 1 << 23
"""Most bytes that a rank sends to all others by sending each of them everything; beyond, shares are better."""
PROGRAMS_PER_EXECUTOR = 4
"""Programs of a flagged kernel that a multiprocessor holds for certain, and twice those of a pushed one."""
FEW_RANKS = 2
"""Up to here the kernels are compiled for the number of ranks; N is one more for all that are larger."""


class Family(Enum):
    """Rows of the table."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"

    @property
    def reduces(self) -> bool:
        """Whether elements are numbers, not just bytes."""
        return self in (Family.ALL_REDUCE, Family.REDUCE_SCATTER)


class Way(Enum):
    """How a tile travels; each has turns of its own."""

    FLAGGED = "flagged"
    FILLED = "filled"
    SHORT = "filled, short"
    PUSHED = "pushed"


@dataclass(frozen=True, slots=True)
class Shape:
    """How a message is cut: FLAGGED or PUSHED, the most programs, and the elements of a tile (words where flagged)."""

    algorithm: Algorithm
    programs: int
    tile: int


@dataclass(frozen=True, slots=True)
class Room:
    """What long messages of filled tiles have: slots of a program over all ranks, and words of the largest tile. More
    slots need fewer fences, for more memory; who tunes looks whether that pays."""

    slots: int = LONG_SLOTS
    words: int = FILLED_WORDS


USUAL = Room()


def _sizes(ranks: int, programs: int) -> tuple[int, int]:
    """(words, bytes of the inbox) of a rank."""
    return programs * SLOTS * ranks * WORDS, programs * AHEAD_SLOTS * ranks * TILE_BYTES


def _slots(ranks: int, over_all: int) -> int:
    """Slots of a program for filled tiles, a power of two."""
    return int(max(LEAST_FILLED, 1 << (over_all // max(ranks, 2)).bit_length() - 1))


def _filled(ranks: int, programs: int, room: Room) -> dict[Way, tuple[int, int, int]]:
    """Programs, slots and words of the places of a way."""
    return {
        Way.FILLED: (programs, _slots(ranks, room.slots), room.words),
        Way.SHORT: (max(programs // 2, 1), _slots(ranks, SHORT_SLOTS), SHORT_WORDS),
    }


def heap_bytes(ranks: int, programs: int, room: Room = USUAL) -> int:
    """Symmetric memory that `GpuPlans` takes."""
    words, inbox = _sizes(ranks, programs)
    filled = ranks * sum(map(math.prod, _filled(ranks, programs, room).values()))
    return 8 * (words + filled) + inbox + 8 * programs * ranks * (1 + 3 * AHEAD_SLOTS) + (1 << 16)


class GpuPlans:
    """The channels of one communicator for grids of up to `programs` programs."""

    def __init__(
        self, heap: SymmetricHeap, programs: int, arch: str = "sm_90", own: Callable[[Any], Any] = lambda item: item,
        room: Room = USUAL,
    ) -> None:  # fmt: skip
        """Collective. `own` is told of each object of the heap as soon as there is one, and returns it: whoever calls
        gives them back, those of plans that were never finished too."""
        self.heap = heap
        self.programs = programs
        self.arch = arch
        n = heap.group.size
        self.few = min(n, FEW_RANKS + 1)
        words, inbox = _sizes(n, programs)
        self._words = own(heap.zeros((words,), u64))
        self._inbox = own(heap.empty((inbox,), u8))
        # By way: the places, of how many programs and turns, and where ranks tell each other what they called.
        self._filled: dict[Way, tuple[SymmetricTensor, int, int, SymmetricTensor]] = {}
        for way, (most, slots, of_tile) in _filled(n, programs, room).items():
            places = own(heap.empty((most * slots * n * of_tile,), u64))
            self._fill(places, 0xFF)
            self._filled[way] = places, most, slots, own(heap.zeros((most * AHEAD_SLOTS, n), u64))
        with heap.group.collective("GpuPlans"):  # memory of one device alone
            self._turns = {way: heap.device.asarray(np.zeros(programs, np.int64)) for way in Way}
        self._cuts: dict[tuple[Way, int], Any] = {}
        self._hello = own(heap.zeros((programs * AHEAD_SLOTS, n), u64))
        self._ready = own(heap.signal(slots=programs))
        self._views: dict[tuple[int, DType, int], SymmetricTensor] = {}

    def shape(self, family: Family, nbytes: int, dtype: DType) -> Shape | None:
        """How the table cuts a message of `nbytes` to each other rank; None where these kernels do not take it, or
        where another way is better."""
        n = self.heap.group.size
        if nbytes == 0 or (family is Family.ALL_REDUCE and n > 2 and nbytes * (n - 1) > ALL_TO_ALL_BYTES):
            return None
        choice = choose(family.value, "cuda", self.arch, n, nbytes)
        words = nbytes % 4 == 0
        if not family.reduces and not words:
            return None
        if choice.algorithm is Algorithm.FILLED:
            if family is Family.ALL_REDUCE and nbytes % 8 == 0 and dtype.is_float and dtype.itemsize in (2, 4):
                once = nbytes <= self.programs * choice.tile_bytes
                programs = self.programs if once else max(self.programs // 2, 1)
                return Shape(Algorithm.FILLED, programs, choice.tile_bytes // 8)
            choice = UNFILLED[nbytes <= FLAGGED_BYTES]
        if choice.algorithm is Algorithm.FLAGGED and words and (dtype.itemsize in (2, 4) or not family.reduces):
            # A gathered tile has a row for each rank, rounded up: of many rows fewer programs fit on a multiprocessor.
            programs = self.programs if family.reduces or n <= FEW_RANKS else max(self.programs // 2, 1)
            return Shape(Algorithm.FLAGGED, programs, choice.tile_bytes // 4)
        tile_bytes = choice.tile_bytes if choice.algorithm is Algorithm.PUSHED else LEAST_PUSHED
        few = family.reduces or tile_bytes > TILE_BYTES // 2
        programs = max(self.programs // 2, 1) if few else self.programs
        return Shape(Algorithm.PUSHED, programs, tile_bytes // (dtype.itemsize if family.reduces else 4))

    def recover(self) -> None:
        """Turns may differ between ranks after a failure; those that count from zero again agree."""
        for turn in self._turns.values():
            turn.copy_from(np.zeros(turn.shape, np.int64))
        self._fill(self._words, 0)
        self._fill(self._hello, 0)
        for places, _, _, calls in self._filled.values():
            self._fill(places, 0xFF)
            self._fill(calls, 0)

    def _fill(self, t: SymmetricTensor, byte: int) -> None:
        """Every byte of this rank's part."""
        driver, device, storage = self.heap.device.driver, self.heap.device, t.storage
        device.wait_ticket(driver.fill(device.default_stream.handle, storage.address, byte, 1, storage.nbytes))

    def _view(self, base: SymmetricTensor, dtype: DType, tile: int, programs: int = 0) -> tuple[SymmetricTensor, int]:
        """Staging as rows of `tile` elements, and the rows of one program, of `programs` (0: all)."""
        key = (base.offset, dtype, tile)
        rows = base.storage.nbytes // (tile * dtype.itemsize)
        if key not in self._views:
            self._views[key] = SymmetricTensor(self.heap, base.storage, dtype, (rows, tile), base.offset)
        return self._views[key], rows // (programs or self.programs)

    def _turn(self, way: Way, programs: int) -> Any:
        """The turns of the first programs, one for each."""
        key = way, programs
        if key not in self._cuts:
            self._cuts[key] = self._turns[way][0:programs].partition(1)
        return self._cuts[key]

    # ---------------------------------------------------------------- launches

    def _sign(self, family: Family, shape: Shape, *what: object) -> int:
        """24 bits that differ between calls that do not belong together."""
        return zlib.crc32(" ".join(map(str, (family.value, shape, *what))).encode()) & 0xFFFFFF

    def _flagged(self, shape: Shape, cut: Any, sign: int) -> tuple[Any, ...]:
        """What a flagged kernel takes after its input and output."""
        words, rows = self._view(self._words, u64, shape.tile)
        return words, self._turn(Way.FLAGGED, cut.grid()), rows, self.heap.group.rank, sign

    def _pushed(self, shape: Shape, dtype: DType, cut: Any, sign: int) -> tuple[Any, ...]:
        """What a pushed kernel takes after its input and output."""
        inbox, rows = self._view(self._inbox, dtype, shape.tile)
        turn = self._turn(Way.PUSHED, cut.grid())
        return inbox, self._ready, self._hello, turn, rows, self.heap.group.rank, sign

    def _reduction(self, dtype: DType, op: ReduceOp) -> dict[str, Any]:
        return {"N": self.few, "OP": op, "ACC": accumulator(dtype), "DT": dtype}

    def all_reduce(self, shape: Shape, x: Tensor | None, out: Tensor, op: ReduceOp) -> LaunchOp:
        """x into out, both contiguous; of out itself without x."""
        options = self._reduction(out.dtype, op)
        sign = self._sign(Family.ALL_REDUCE, shape, out.dtype, out.size, op)
        if shape.algorithm is Algorithm.FILLED:
            whole = as_words(out, of=u64)
            tiles = max(1, -(-whole.size // shape.tile))
            once = tiles <= shape.programs
            cut = whole.partition(shape.tile) if once else _cut(whole, 0, shape)
            programs = min(tiles, shape.programs)
            short = shape.tile <= SHORT_WORDS and programs <= self._filled[Way.SHORT][1]
            way = Way.SHORT if short else Way.FILLED
            places, most, options["S"], calls = self._filled[way]
            words, rows = self._view(places, u64, shape.tile, most)
            turn = self._turn(way, programs)
            more = words, calls, turn, rows, self.heap.group.rank, sign
            if x is None:
                in_place = kernels.filled_once_in_place if once else kernels.filled_all_reduce_in_place
                return in_place(cut, *more, **options)
            kernel = kernels.filled_once if once else kernels.filled_all_reduce
            return kernel(cut, as_words(x, of=u64), *more, **options)
        if shape.algorithm is Algorithm.FLAGGED:
            cut = _cut(as_words(out), 0, shape)
            channels = self._flagged(shape, cut, sign)
            options["PACK"] = out.dtype.itemsize == 2
            if x is None:
                return kernels.flagged_all_reduce_in_place(cut, *channels, **options)
            return kernels.flagged_all_reduce(cut, as_words(x), *channels, **options)
        cut = _cut(out.reshape(out.size), 0, shape)
        channels = self._pushed(shape, out.dtype, cut, sign)
        if x is None:
            return kernels.pushed_all_reduce_in_place(cut, *channels, **options)
        return kernels.pushed_all_reduce(cut, x.reshape(x.size), *channels, **options)

    def reduce_scatter(self, shape: Shape, x: Tensor, out: Tensor, op: ReduceOp) -> LaunchOp:
        """Row `rank` of x, which has one for each rank, into out."""
        n = self.heap.group.size
        options = self._reduction(out.dtype, op)
        sign = self._sign(Family.REDUCE_SCATTER, shape, out.dtype, out.size, op)
        if shape.algorithm is Algorithm.FLAGGED:
            cut = _cut(as_words(out), 0, shape)
            options["PACK"] = out.dtype.itemsize == 2
            return kernels.flagged_reduce_scatter(cut, as_words(x, n), *self._flagged(shape, cut, sign), **options)
        cut = _cut(out.reshape(out.size), 0, shape)
        channels = self._pushed(shape, out.dtype, cut, sign)
        return kernels.pushed_reduce_scatter(cut, x.reshape(n, out.size), *channels, **options)

    def gather(self, shape: Shape, x: Tensor, out: Tensor, *, each: bool) -> LaunchOp:
        """Row r of out from rank r: its x, or its row of x for this rank (`each`)."""
        n = self.heap.group.size
        cut = _cut(as_words(out, n), 1 << (n - 1).bit_length(), shape)
        ends = cut, as_words(x, n if each else 1)
        sign = self._sign(Family.ALL_TO_ALL if each else Family.ALL_GATHER, shape, out.dtype, out.size)
        if shape.algorithm is Algorithm.FLAGGED:
            return kernels.flagged_gather(*ends, *self._flagged(shape, cut, sign), N=self.few, EACH=each)
        return kernels.pushed_gather(*ends, *self._pushed(shape, u32, cut, sign), N=self.few, EACH=each)


def as_words(t: Tensor, rows: int = 0, of: DType = u32) -> Tensor:
    """The bytes of a contiguous tensor as u32, or as `of`: a line, or a matrix of `rows` rows of whole words."""
    words = t.nbytes // of.itemsize
    return Tensor(t.storage, of, (rows, words // rows) if rows else (words,), None, t.offset)


def _cut(t: Tensor, high: int, shape: Shape) -> Any:
    """A line in tiles, or a matrix in tiles of all its rows, over as many programs as have something to do."""
    tiles = max(1, -(-t.shape[-1] // shape.tile))
    tile = (high, shape.tile) if high else shape.tile
    return t.partition(tile).persistent(programs=min(shape.programs, tiles))
