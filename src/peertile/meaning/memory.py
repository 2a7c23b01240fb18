"""What a program's views, objects and pointers are at run time, and the interface to memory.

Every access of the evaluator goes through a `Memory`. `NumpyMemory` here is the plain one:
sequentially consistent, no history. The checker has its own, with shadow state. A memory never
decides when an access happens: the scheduler does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from peertile.dtypes import DType
from peertile.errors import ArgumentError
from peertile.ir.core import Op
from peertile.ir.types import ObjectType, PointerType, SymmetricType, ViewType
from peertile.meaning.faults import FaultKind, ProgramFault
from peertile.meaning.numbers import Array, apply_rmw
from peertile.memory_model import Rmw

if TYPE_CHECKING:
    from peertile.meaning.program import Program

__all__ = ["Memory", "NumpyMemory", "ObjectRef", "SymmetricRef", "ViewRef"]


@dataclass(frozen=True, slots=True, eq=False)
class ViewRef:
    """A view: its type, the strided array that is its storage, and whose memory it is.

    `name` is the object in the words of the kernel ("x", "ready.arrived"); with `rank` it identifies
    the storage for a memory that keeps more than numbers.
    """

    type: ViewType
    array: Array
    name: str
    rank: int

    @property
    def extents(self) -> tuple[int, ...]:
        return self.array.shape


@dataclass(frozen=True, slots=True, eq=False)
class SymmetricRef:
    """A symmetric object as one rank sees it: the views of all ranks."""

    type: SymmetricType
    views: tuple[ViewRef, ...]
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class ObjectRef:
    """A communication object of one rank: the values of its fields."""

    type: ObjectType
    fields: Mapping[str, Any]


class Memory(Protocol):
    """All that the evaluator asks of memory. `program` and `op` say who asks and why (order, scope).

    `origin` is the element index at which a tile begins; a tile may reach beyond its view, where
    loads give `padding` and stores nothing. Word indices are element indices, inside the view.
    """

    def load_tile(
        self, program: Program, op: Op, view: ViewRef, origin: Sequence[int], shape: tuple[int, ...], padding: Any
    ) -> Array: ...

    def store_tile(self, program: Program, op: Op, view: ViewRef, origin: Sequence[int], tile: Array) -> None: ...

    def tile_atomic(
        self, program: Program, op: Op, view: ViewRef, origin: Sequence[int], tile: Array, rmw: Rmw
    ) -> None: ...

    def word_load(self, program: Program, op: Op, view: ViewRef, index: tuple[int, ...]) -> Any: ...

    def word_store(self, program: Program, op: Op, view: ViewRef, index: tuple[int, ...], value: Any) -> None: ...

    def word_rmw(
        self, program: Program, op: Op, view: ViewRef, index: tuple[int, ...], value: Any, rmw: Rmw
    ) -> Any: ...

    def peek(self, view: ViewRef, index: tuple[int, ...]) -> Any:
        """The newest value of a word, for the scheduler; no access of the program."""
        ...

    def fence(self, program: Program, op: Op) -> None: ...

    def address(self, storage: Array, type: PointerType) -> int:
        """The address of the first element of `storage`, which pointers may reach from now on."""
        ...

    def ptr_load(
        self, program: Program, op: Op, dtype: DType, addresses: Array, fill: Array, mask: Array, token: Any
    ) -> tuple[Array, Any]: ...

    def ptr_store(
        self, program: Program, op: Op, dtype: DType, addresses: Array, tile: Array, mask: Array, token: Any
    ) -> Any: ...

    def ptr_rmw(
        self, program: Program, op: Op, dtype: DType, addresses: Array, tile: Array, mask: Array, token: Any, rmw: Rmw
    ) -> tuple[Array, Any]: ...

    def ptr_cas(
        self,
        program: Program,
        op: Op,
        dtype: DType,
        addresses: Array,
        compare: Array,
        value: Array,
        mask: Array,
        token: Any,
    ) -> tuple[Array, Any]: ...

    def new_token(self, program: Program, tokens: Sequence[Any]) -> Any:
        """A token after all of `tokens`."""
        ...


def clip(view: ViewRef, origin: Sequence[int], shape: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The part of a tile that lies inside its view, as slices of the view and of the tile."""
    counts = [max(0, min(n, extent - at)) for at, n, extent in zip(origin, shape, view.extents, strict=True)]
    inside = tuple(slice(at, at + n) for at, n in zip(origin, counts, strict=True))
    return inside, tuple(slice(0, n) for n in counts)


@dataclass
class NumpyMemory:
    """Memory that is only numbers: every access takes effect at once, everywhere."""

    starts: list[int] = field(default_factory=list)
    storages: list[Array] = field(default_factory=list)
    """Bytes that pointers may reach, by ascending address."""

    def load_tile(
        self, program: Program, op: Op, view: ViewRef, origin: Sequence[int], shape: tuple[int, ...], padding: Any
    ) -> Array:
        inside, part = clip(view, origin, shape)
        tile = np.full(shape, padding, view.array.dtype)
        tile[part] = view.array[inside]
        return tile

    def store_tile(self, program: Program, op: Op, view: ViewRef, origin: Sequence[int], tile: Array) -> None:
        inside, part = clip(view, origin, tile.shape)
        view.array[inside] = tile[part]

    def tile_atomic(
        self, program: Program, op: Op, view: ViewRef, origin: Sequence[int], tile: Array, rmw: Rmw
    ) -> None:
        inside, part = clip(view, origin, tile.shape)
        view.array[inside] = apply_rmw(rmw, view.array[inside], tile[part], view.type.dtype)

    def word_load(self, program: Program, op: Op, view: ViewRef, index: tuple[int, ...]) -> Any:
        return view.array[index]

    def word_store(self, program: Program, op: Op, view: ViewRef, index: tuple[int, ...], value: Any) -> None:
        view.array[index] = value

    def word_rmw(self, program: Program, op: Op, view: ViewRef, index: tuple[int, ...], value: Any, rmw: Rmw) -> Any:
        old = view.array[index]
        view.array[index] = apply_rmw(rmw, old, value, view.type.dtype)
        return old

    def peek(self, view: ViewRef, index: tuple[int, ...]) -> Any:
        return view.array[index]

    def fence(self, program: Program, op: Op) -> None:
        pass

    # -- pointers: real addresses, each checked to lie in storage that was handed over

    def address(self, storage: Array, type: PointerType) -> int:
        if not storage.flags.c_contiguous:
            raise ArgumentError(f"pointer: expected a contiguous array, got strides {storage.strides}")
        start = int(storage.ctypes.data)
        at = bisect_right(self.starts, start)
        if at == 0 or self.starts[at - 1] != start:
            self.starts.insert(at, start)
            self.storages.insert(at, storage.reshape(-1).view(np.uint8))
        return start

    def _element(self, op: Op, address: int, dtype: DType) -> Array:
        """The element at `address`, as an array of one that shares its storage."""
        at = bisect_right(self.starts, address) - 1
        offset = address - self.starts[at] if at >= 0 else -1
        if at < 0 or offset + dtype.itemsize > self.storages[at].size:
            raise ProgramFault(
                FaultKind.BOUNDS, f"{op.NAME}: address {address:#x} lies in no storage of the launch", op
            )
        return self.storages[at][offset : offset + dtype.itemsize].view(dtype.numpy)

    def ptr_load(
        self, program: Program, op: Op, dtype: DType, addresses: Array, fill: Array, mask: Array, token: Any
    ) -> tuple[Array, Any]:
        tile = np.array(fill)
        for k in zip(*np.nonzero(np.atleast_1d(mask)), strict=True):
            np.atleast_1d(tile)[k] = self._element(op, int(np.atleast_1d(addresses)[k]), dtype)[0]
        return tile, None

    def ptr_store(
        self, program: Program, op: Op, dtype: DType, addresses: Array, tile: Array, mask: Array, token: Any
    ) -> Any:
        for k in zip(*np.nonzero(np.atleast_1d(mask)), strict=True):
            self._element(op, int(np.atleast_1d(addresses)[k]), dtype)[0] = np.atleast_1d(tile)[k]

    def ptr_rmw(
        self, program: Program, op: Op, dtype: DType, addresses: Array, tile: Array, mask: Array, token: Any, rmw: Rmw
    ) -> tuple[Array, Any]:
        old = np.zeros_like(np.atleast_1d(tile))
        for k in zip(*np.nonzero(np.atleast_1d(mask)), strict=True):
            element = self._element(op, int(np.atleast_1d(addresses)[k]), dtype)
            old[k] = element[0]
            element[0] = apply_rmw(rmw, element[0], np.atleast_1d(tile)[k], dtype)
        return old.reshape(np.shape(tile)), None

    def ptr_cas(
        self,
        program: Program,
        op: Op,
        dtype: DType,
        addresses: Array,
        compare: Array,
        value: Array,
        mask: Array,
        token: Any,
    ) -> tuple[Array, Any]:
        old = np.zeros_like(np.atleast_1d(value))
        for k in zip(*np.nonzero(np.atleast_1d(mask)), strict=True):
            element = self._element(op, int(np.atleast_1d(addresses)[k]), dtype)
            old[k] = element[0]
            if element.tobytes() == np.atleast_1d(compare)[k].tobytes():
                element[0] = np.atleast_1d(value)[k]
        return old.reshape(np.shape(value)), None

    def new_token(self, program: Program, tokens: Sequence[Any]) -> Any:
        return None
