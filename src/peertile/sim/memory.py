"""The memory of a machine: objects at addresses that are never reused, their bytes, shadow and words.

Addresses are numbers of our own, so a run is the same every time, an address that was freed stays known, and the
space between objects catches what runs over. Objects without backing cost nothing until they are touched.
"""

from __future__ import annotations

import mmap
import sys
from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from peertile.dtypes import DType, i8, i16, i32, i64, u8, u16, u32, u64
from peertile.errors import InternalError
from peertile.ir.types import SymmetricType, ViewType
from peertile.sim.cells import Box, Geometry, Record, Run, Shadow, normal_box
from peertile.sim.words import Word

__all__ = ["AddressSpace", "Object", "Partitions", "Symmetric", "Tile", "View"]

Bytes = npt.NDArray[np.uint8]
FIRST_ADDRESS: Final = 1 << 56
"""Beyond every address that the host uses, so that copies tell the two apart."""
REDZONE: Final = 4096
_POISON: Final = 0xFB
_POISONED: Final = 1 << 20
"""Bytes of one allocation that are filled with poison: beyond, shadow memory alone knows."""
MAX_LOOSE: Final = 4096
"""Loose writes of one object that are kept: what older ones replaced is not read any more."""
UNSIGNED: Final[dict[DType, DType]] = {i8: u8, i16: u16, i32: u32, i64: u64}


class Partitions:
    """The shadows of objects from run to run: the n-th object of a rank and its size name the partition."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int, bool], Shadow] = {}

    def shadow(self, rank: int, ordinal: int, nbytes: int, zeroed: bool) -> Shadow:
        key = (rank, ordinal, nbytes, zeroed)
        shadow = self._kept.get(key)
        if shadow is None:
            shadow = self._kept[key] = Shadow(nbytes, zeroed=zeroed)
        else:
            shadow.clear()
        return shadow


class Tile(NamedTuple):
    """Where a tile of a view lies: its bytes (None: outside), the part inside the view, and that part of the tile
    (None: all of it)."""

    box: Box | None
    inside: tuple[slice, ...]
    part: tuple[slice, ...] | None


class Loose:
    """A write of a tile, element by element, by an access with an order that releases nothing: kept until one of its
    elements becomes a word, whose history it is part of. `before`: the bytes that it replaced, run by run."""

    __slots__ = ("adds", "before", "dead", "record", "runs")

    def __init__(self, runs: Sequence[Run], before: Bytes, record: Record, *, adds: bool) -> None:
        self.runs = runs
        self.before = before
        self.record = record
        self.adds = adds
        self.dead: list[Run] = []
        """Where a weak write has come since."""

    def place(self, start: int, nbytes: int) -> int | None:
        """Where the bytes from `start` lie in `before`; None if they were not written, or not as one element."""
        site = self.record.site
        end = start + nbytes
        if site is None or site.size != nbytes or any(a < end and start < b for a, b in self.dead):
            return None
        at = 0
        for low, high in self.runs:
            if low <= start and end <= high:
                return at + start - low
            at += high - low
        return None

    def ends(self, runs: Sequence[Run]) -> bool:
        """Weak writes of `runs`: whether nothing is left of this one."""
        self.dead += [(a, b) for a, b in runs if any(a < high and low < b for low, high in self.runs)]
        return all(any(a <= low and high <= b for a, b in self.dead) for low, high in self.runs)


class Object:
    """One allocation. `freed_by` says who gave it back."""

    __slots__ = (
        "base", "data", "freed_by", "gone", "holders", "loose", "name", "nbytes", "parts", "rank", "shadow", "sizes",
        "typed_", "views", "words", "zeroed",
    )  # fmt: skip

    def __init__(self, base: int, nbytes: int, rank: int, name: str, shadow: Shadow, data: Bytes, zeroed: bool) -> None:
        self.base = base
        self.nbytes = nbytes
        self.rank = rank
        self.name = name
        self.shadow = shadow
        self.data = data
        self.zeroed = zeroed
        self.freed_by: str | None = None
        self.holders = 0
        """Segments of it that devices hold, where it is shared."""
        self.words: dict[tuple[int, DType], Word] = {}
        self.loose: list[Loose] = []
        """Writes with an order that released nothing, of tiles, while nothing here was a word yet."""
        self.sizes: set[int] = set()
        self.typed_: dict[DType, npt.NDArray[Any]] = {}
        self.views: dict[Any, View] = {}
        self.parts: list[tuple[int, int]] | None = None
        """[start, end) of what is lent out of it, in order; None: it was never divided."""
        self.gone: list[tuple[int, int, str]] = []
        """Parts that were given back and not lent again, and by whom."""

    def typed(self, dtype: DType) -> npt.NDArray[Any]:
        """All bytes as elements of `dtype`."""
        array = self.typed_.get(dtype)
        if array is None:
            whole = self.nbytes // dtype.itemsize * dtype.itemsize
            array = self.typed_[dtype] = self.data[:whole].view(dtype.numpy)
        return array

    def clear(self, start: int, nbytes: int) -> None:
        """Makes bytes zero. What nobody has touched of a large object stays without backing, and is not even read: the
        system takes its whole pages back, and gives zeros for them."""
        memory = getattr(self.data.base, "obj", None)
        end = start + nbytes
        # Of another length it would be that of an object of which this one is a part, which begins elsewhere.
        whole = isinstance(memory, mmap.mmap) and len(memory) == self.nbytes
        if memory is not None and whole and nbytes > _SPARSE_FROM and sys.platform == "linux":
            first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            memory.madvise(mmap.MADV_DONTNEED, first, last - first)
            self.data[start:first] = 0
            start = last
        self.data[start:end] = 0

    def get(self, dtype: DType, offset: int) -> Any:
        """The element at byte `offset`: an int, a bool or a numpy scalar."""
        size = dtype.itemsize
        if offset % size:
            return scalar(np.frombuffer(self.data[offset : offset + size].tobytes(), dtype.numpy)[0], dtype)
        return scalar(self.typed(dtype)[offset // size], dtype)

    def set(self, dtype: DType, offset: int, value: Any) -> None:
        size = dtype.itemsize
        if offset % size:
            self.data[offset : offset + size] = np.frombuffer(np.asarray(value).astype(dtype.numpy).tobytes(), np.uint8)
        else:
            self.typed(dtype)[offset // size] = value

    def word(self, dtype: DType, offset: int, name: str) -> Word:
        """The word at byte `offset`, with the history of its ordered accesses. Integers are kept as unsigned."""
        dtype = UNSIGNED.get(dtype, dtype)
        key = (offset, dtype)
        word = self.words.get(key)
        if word is None:
            box = self.shadow.box((offset, (), dtype.itemsize))
            word = self.words[key] = Word(name, self.rank, offset, dtype, box, self.get(dtype, offset))
            word.home = self
            self.sizes.add(dtype.itemsize)
            if self.loose:
                word.recall(self._loose_writes(offset, dtype))
        elif len(self.sizes) > 1:  # the same bytes may be a word of another size too
            value = self.get(dtype, offset)
            if value != word.value:
                word.reset(value)
        return word

    def _loose_writes(self, offset: int, dtype: DType) -> list[tuple[Any, Loose]]:
        """What the element at byte `offset` held before each of the loose writes that reached it."""
        found = []
        for write in self.loose:
            at = write.place(offset, dtype.itemsize)
            if at is not None:
                data = write.before[at : at + dtype.itemsize].tobytes()
                found.append((scalar(np.frombuffer(data, dtype.numpy)[0], dtype), write))
        return found

    def renew(self, runs: Sequence[Run]) -> None:
        """A weak write: everything before is ordered before it, so that no read sees what loose writes replaced."""
        self.loose = [write for write in self.loose if not write.ends(runs)]

    def lend(self, start: int, nbytes: int) -> None:
        """Bytes that are an object of their own from now on, never written. Whoever used them before must be done."""
        if nbytes == 0:
            return
        if self.parts is None:
            self.parts = []
        end = start + nbytes
        insort(self.parts, (start, end))
        self.gone = [part for part in self.gone if part[1] <= start or end <= part[0]]
        for cell in self.shadow.box((start, (), nbytes)).cells:
            cell.reborn()
        for key in [k for k in self.words if start <= k[0] < start + nbytes]:
            del self.words[key]
        if self.loose:
            self.renew([(start, end)])
        # A view that is still known was made since the bytes were given back, by a rank that was ahead of this one: it
        # is of the new object.
        for view in self.views.values():
            low, high = view.ends()
            if view.stale is not None and low < end and start < high:
                view.revive()
        if not self.zeroed:
            self.data[start : start + min(nbytes, _POISONED)] = _POISON

    def take_back(self, start: int, nbytes: int, by: str) -> None:
        """The object there is over: views of it are stale from now on."""
        end = start + nbytes
        if self.parts is not None and (start, end) in self.parts:
            self.parts.remove((start, end))
        self.gone.append((start, end, by))
        for key, view in list(self.views.items()):
            low, high = view.ends()
            if low < end and start < high:
                view.retire(by)
                del self.views[key]

    def given_back(self, start: int, end: int) -> str | None:
        """Who gave back a part that these bytes reach, if somebody did."""
        return next((by for low, high, by in self.gone if low < end and start < high), None)

    def part_around(self, start: int, end: int) -> bool:
        """Whether the bytes lie in one object, of those that were lent out if any were."""
        parts = self.parts
        if parts is None:
            return start >= 0 and end <= self.nbytes
        k = bisect_right(parts, (start, self.nbytes + 1)) - 1
        return k >= 0 and end <= parts[k][1]

    def nearest_part(self, start: int) -> tuple[int, int] | None:
        """The object that lies at `start` or next before it."""
        if not self.parts:
            return None
        k = bisect_right(self.parts, (start, self.nbytes + 1)) - 1
        return self.parts[max(k, 0)]

    def write_loosely(self, runs: Sequence[Run], record: Record, *, adds: bool) -> None:
        """A write of a tile is about to happen whose elements are no words: what it replaces stays readable."""
        before = np.concatenate([self.data[start:end] for start, end in runs])
        self.loose.append(Loose(runs, before, record, adds=adds))
        if len(self.loose) > MAX_LOOSE:
            del self.loose[0]

    def reset(self) -> None:
        """Forget what happened; the bytes are the caller's business."""
        self.words.clear()
        self.loose = []
        self.sizes.clear()
        self.shadow.clear()
        self.freed_by = None


def scalar(value: Any, dtype: DType) -> Any:
    """Numbers as programs of the machine hold them: int and bool for integers and bools, numpy scalars for floats."""
    if dtype.is_bool:
        return bool(value)
    return int(value) if dtype.is_int else value


class View:
    """A view at run time: what the evaluator's `ViewRef` is, over an object of the machine. Strides in bytes."""

    __slots__ = (
        "_array", "derived", "extents", "name", "object", "offset", "rank", "stale", "strides", "tiles", "type",
    )  # fmt: skip

    def __init__(
        self, type: ViewType, object: Object, offset: int, extents: tuple[int, ...], strides: tuple[int, ...], name: str
    ) -> None:
        self.type = type
        self.object = object
        self.offset = offset
        self.extents = extents
        self.strides = strides
        self.name = name
        self.rank = object.rank
        self._array: npt.NDArray[Any] | None = None
        self.derived: dict[Any, View] = {}
        """Views of this view, by what they show."""
        self.stale: str | None = None
        """Who gave its memory back, if somebody did: then it has no tiles, so that the next access looks."""
        self.tiles: dict[Any, Tile] = self._known_tiles()

    def _known_tiles(self) -> dict[Any, Tile]:
        key = (self.offset, self.type.dtype.itemsize, self.extents, self.strides)
        return self.object.shadow.tiles.setdefault(key, {})

    def revive(self) -> None:
        """Its memory is lent out again, as what the view was made for."""
        self.stale = None
        self.tiles = self._known_tiles()
        for view in self.derived.values():
            view.revive()

    def retire(self, by: str) -> None:
        """Its memory was given back."""
        self.stale = by
        self.tiles = {}
        for view in self.derived.values():
            view.retire(by)

    @property
    def array(self) -> npt.NDArray[Any]:
        """The elements, sharing the object's bytes."""
        if self._array is None:
            self._array = np.ndarray(
                self.extents, self.type.dtype.numpy, self.object.data.data, self.offset, self.strides
            )
        return self._array

    def ends(self) -> tuple[int, int]:
        """[first, last) byte of the object that the view can reach."""
        if 0 in self.extents:
            return self.offset, self.offset
        spans = [(n - 1) * s for n, s in zip(self.extents, self.strides, strict=True)]
        low = self.offset + sum(s for s in spans if s < 0)
        return low, self.offset + sum(s for s in spans if s > 0) + self.type.dtype.itemsize

    def tile(self, origin: Sequence[int], shape: tuple[int, ...]) -> Tile:
        """The tile of `shape` at element `origin`, clipped at the view's edge."""
        counts = [max(0, min(n, extent - at)) for at, n, extent in zip(origin, shape, self.extents, strict=True)]
        inside = tuple(slice(at, at + n) for at, n in zip(origin, counts, strict=True))
        whole = tuple(counts) == tuple(shape)
        offset = self.offset + sum(at * stride for at, stride in zip(origin, self.strides, strict=True))
        geometry: Geometry | None = normal_box(offset, counts, self.strides, self.type.dtype.itemsize)
        box = None if geometry is None else self.object.shadow.box(geometry)
        return Tile(box, inside, None if whole else tuple(slice(0, n) for n in counts))


class Symmetric:
    """A symmetric object as one rank sees it: the views of all ranks."""

    __slots__ = ("rank", "type", "views")

    def __init__(self, type: SymmetricType, views: tuple[View, ...], rank: int) -> None:
        self.type = type
        self.views = views
        self.rank = rank

    @property
    def extents(self) -> tuple[int, ...]:
        return self.views[self.rank].extents


_SPARSE_FROM: Final = 1 << 24


def _sparse(nbytes: int) -> Bytes:
    """Bytes that cost nothing until they are touched, and that the system need not promise to have."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)


class AddressSpace:
    """Every object that the machine ever had, by address."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._starts: list[int] = []
        self._objects: list[Object] = []
        self._next = FIRST_ADDRESS
        self._ordinals: dict[int, int] = {}

    def make(self, nbytes: int, rank: int, name: str, *, zeroed: bool = False, backing: Bytes | None = None) -> Object:
        """A new object. `backing` gives its bytes instead of memory of its own."""
        ordinal = self._ordinals.get(rank, 0)
        self._ordinals[rank] = ordinal + 1
        base = self._next
        self._next += -(-(nbytes + REDZONE) // 4096) * 4096
        if backing is None:
            # Fresh pages of the system are zero and take no memory before they are touched.
            backing = _sparse(nbytes) if nbytes > _SPARSE_FROM else np.zeros(max(nbytes, 1), np.uint8)
            if not zeroed and nbytes <= _POISONED:
                backing[:] = _POISON
        shadow = self._partitions.shadow(rank, ordinal, nbytes, zeroed)
        made = Object(base, nbytes, rank, name, shadow, backing, zeroed)
        self._starts.append(base)
        self._objects.append(made)
        return made

    @property
    def objects(self) -> Sequence[Object]:
        return self._objects

    def find(self, address: int) -> tuple[Object, int] | None:
        """The object that `address` belongs to, its redzone included, and the byte of it; None for a host address."""
        if address < FIRST_ADDRESS:
            return None
        k = bisect_right(self._starts, address) - 1
        if k < 0 or address >= self._next:
            return None
        return self._objects[k], address - self._starts[k]

    def at(self, address: int) -> tuple[Object, int]:
        """As `find`, of an address that must be one of ours."""
        found = self.find(address)
        if found is None:
            raise InternalError(f"address {address:#x} belongs to no object of the machine")
        return found
