"""The symmetric heap: one arena per rank, the same offsets everywhere, and what lives in it.

Every rank makes the same calls in the same order; sizes, dtypes and order are compared, and if one
rank fails every rank raises. Objects here are passed to kernels: tensors (`T.Peer`, or `T.Shared` and
`T.Exclusive` through `.local`), signals, counters, barriers, mailboxes. No kernel is launched here.

Life of a heap::

    made (collective) ──> open ──close() (collective)──> closed     use after close is a UsageError
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from peertile.comm.labels import NBYTES as LABEL_BYTES
from peertile.comm.labels import Labels
from peertile.comm.links import Links
from peertile.comm.memory import PeerMemory
from peertile.comm.multicast import MulticastPath
from peertile.dtypes import DType
from peertile.errors import AllocationError, ArgumentError, UnsupportedError, UsageError
from peertile.ir.ops import MULTICAST_DTYPES
from peertile.ir.types import Access, BarrierType, CounterType, MailboxType, SignalType
from peertile.runtime.argument import Argument, Use, canonical, multicast_type, pack_words, symmetric_type
from peertile.runtime.checks import check_dtype, check_integer
from peertile.runtime.driver import DriverKind, ShareKind
from peertile.runtime.registry import current_device
from peertile.runtime.storage import Storage
from peertile.runtime.tensor import Partition, Tensor, contiguous_strides, normal_shape, normal_tile
from peertile.timelines.upper import note_heap

if TYPE_CHECKING:
    from peertile.comm.group import Group
    from peertile.runtime.device import Device

__all__ = ["Barrier", "Counter", "Mailbox", "MulticastTensor", "Signal", "SymmetricHeap", "SymmetricTensor"]

ALIGNMENT = 256
REDZONE = 256
"""Bytes left free after each object, so that a small overrun hits no neighbour."""
DEFAULT_SLOTS = 1024


class _Arena:
    """First-fit offsets in [0, size). The same calls give the same offsets on every rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free: list[tuple[int, int]] = [(0, size)]

    def take(self, nbytes: int) -> int | None:
        need = -(-(nbytes + REDZONE) // ALIGNMENT) * ALIGNMENT
        for k, (start, length) in enumerate(self.free):
            if length >= need:
                self.free[k : k + 1] = [(start + need, length - need)] if length > need else []
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        need = -(-(nbytes + REDZONE) // ALIGNMENT) * ALIGNMENT
        self.free.append((offset, need))
        self.free.sort()
        merged: list[tuple[int, int]] = []
        for start, length in self.free:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.free = merged

    @property
    def largest(self) -> int:
        """Bytes of the largest object that fits."""
        return max((length - REDZONE for _, length in self.free), default=0)

    @property
    def in_use(self) -> int:
        return self.size - sum(length for _, length in self.free)


class SymmetricHeap:
    """`size_bytes` of memory on every rank of `group`, visible to all of them.

    Collective: every rank makes it, allocates from it and closes it in the same order. It is a context
    manager. `SymmetryError` on every rank if sizes differ, `AllocationError` where memory lacks (then
    `PeerFailed` on the others). `path` forces one way of sharing the memory between processes (`ShareKind`, by
    default the best that all ranks can; PEERTILE_USE_VMM goes before it on GPUs): `UnsupportedError` on every rank
    where one cannot.

    >>> import peertile as pt
    >>> with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
    ...     x = heap.zeros((16,), pt.f32)
    ...     x.local.numpy().sum()
    np.float32(0.0)
    """

    def __init__(self, group: Group, size_bytes: int, *, path: ShareKind | None = None) -> None:
        if not hasattr(group, "all_or_none"):  # by what it does: Group is imported for its type alone
            raise ArgumentError(f"SymmetricHeap(group): expected a group, as pt.init() gives, got {group!r}")
        size_bytes = check_integer("size_bytes", size_bytes, 1)
        self.group = group
        self.device: Device = current_device()
        self.size_bytes = -(-size_bytes // 4096) * 4096
        self._closed = False
        self._objects: dict[int, tuple[Storage, int]] = {}
        # Of objects by the id of their storage: the parts of other ranks that were asked for, by rank.
        self._remote: dict[int, dict[int, Storage]] = {}
        group.agree(f"size_bytes={size_bytes}", "SymmetricHeap")
        self._memory = PeerMemory(group, self.device, self.size_bytes, path)
        self.bases = self._memory.bases
        self._arena = _Arena(self.size_bytes)
        try:
            with group.collective("SymmetricHeap: table"):
                # Four words at least: kernels read the first two bases before they know how many there are.
                table = [group.rank, group.size, *self.bases, *([0] if group.size == 1 else [])]
                self._table = self.device.asarray(np.array(table, np.int64))
        except BaseException:
            self._memory.release()
            raise
        self._channels: list[_Channel] = []
        group.on_recover(self._recover)
        note_heap(f"heap {group.stamp}", tuple(self.bases), self.size_bytes)

    @property
    def multicast_path(self) -> MulticastPath:
        """How operations on multicast tensors are done: by the fabric, or why by loops over the ranks' parts."""
        return self._memory.multicast_path

    @property
    def window(self) -> int | None:
        """Where the multicast mapping of the heap begins in this process; None where there is none."""
        return self._memory.window

    # ---------------------------------------------------------------- allocation

    def _take(self, what: str, nbytes: int) -> Storage:
        """`nbytes` at the same offset on every rank; zeroed nowhere."""
        self._check_open(what)
        offset = self._arena.take(nbytes)
        address = self.bases[self.group.rank] + (offset or 0)
        # Lent before the ranks agree: once one of them goes on, it may write every rank's part.
        if offset is not None:
            self.device.driver.lend(address, nbytes)
        try:
            self.group.agree(what, "SymmetricHeap allocation")
        except BaseException:
            if offset is not None:
                self.device.driver.take_back(address, nbytes)
                self._arena.give(offset, nbytes)
            raise
        if offset is None:
            raise AllocationError(
                f"SymmetricHeap: {what} asks for {nbytes} bytes, {self._arena.in_use} of {self.size_bytes} are in use "
                f"and {self._arena.largest} fit at most; make the heap larger"
            )
        storage = Storage(self.device, address, nbytes, release=None, owner=self, name=what)
        self._objects[id(storage)] = (storage, offset)
        return storage

    def _give_back(self, storage: Storage, why: str) -> None:
        """The bytes of an object that nobody uses any more, on any rank."""
        storage.close(why)
        self.device.driver.take_back(storage.address, storage.nbytes)
        self._arena.give(storage.address - self.bases[self.group.rank], storage.nbytes)

    def _part(self, storage: Storage, offset: int, rank: int) -> Storage:
        """The part of an object that another rank has, as mapped here. It ends with the object."""
        storage.check_alive("SymmetricTensor.at")
        parts = self._remote.setdefault(id(storage), {})
        if rank not in parts:
            parts[rank] = Storage(
                *(self.device, self.bases[rank] + offset, storage.nbytes),
                release=None,
                owner=self,
                name=f"{storage.name} of rank {rank}",
            )
        return parts[rank]

    def _end(self, storage: Storage, why: str) -> None:
        """Nobody uses an object through this rank any more, once what is running has ended."""
        self._settle(storage)
        for part in (storage, *self._remote.pop(id(storage), {}).values()):
            part.close(why)

    def _settle(self, storage: Storage) -> None:
        """What uses an object through this rank has ended."""
        for part in (storage, *self._remote.get(id(storage), {}).values()):
            part.wait_done()

    def _offset(self, storage: Storage) -> int:
        return self._objects[id(storage)][1]

    def empty(self, shape: int | Sequence[int], dtype: DType) -> SymmetricTensor:
        """A symmetric tensor with undefined contents."""
        dims = normal_shape(shape)
        check_dtype(dtype)
        what = f"tensor {dtype}{list(dims)}"
        storage = self._take(what, prod(dims) * dtype.itemsize)
        return SymmetricTensor(self, storage, dtype, dims, self._offset(storage))

    def multicast(self, shape: int | Sequence[int], dtype: DType) -> MulticastTensor:
        """A symmetric tensor with one address that reaches every rank's part, for `T.Multicast`; contents undefined.

        Element types: i32, u32, i64, u64, f16, bf16, f32, f64. `local` is one's own part, by its ordinary address.
        """
        dims = normal_shape(shape)
        check_dtype(dtype)
        if dtype.name not in MULTICAST_DTYPES:
            raise ArgumentError(
                f"SymmetricHeap.multicast: dtype: expected one of {', '.join(MULTICAST_DTYPES)}, got {dtype}"
            )
        what = f"multicast tensor {dtype}{list(dims)}"
        storage = self._take(what, prod(dims) * dtype.itemsize)
        return MulticastTensor(self, storage, dtype, dims, self._offset(storage))

    def zeros(self, shape: int | Sequence[int], dtype: DType) -> SymmetricTensor:
        """A symmetric tensor of zeros on every rank (and every rank knows so on return)."""
        tensor = self.empty(shape, dtype)
        self._zero(tensor.storage)
        self.group.barrier("SymmetricHeap.zeros")
        return tensor

    def _zero(self, storage: Storage) -> None:
        if storage.nbytes:
            driver = self.device.driver
            ticket = driver.fill(
                self.device.default_stream.handle, storage.address, 0, 1, storage.nbytes, name="zero", on_caller=True
            )
            self.device.wait_ticket(ticket)

    @property
    def peer_atomics(self) -> bool:
        """Whether atomics on the memory of every rank are atomic for all of them: asked of the devices once, when the
        heap was made. Where not, a counter is refused, and so is the launch of a kernel with atomics on peers."""
        return self._memory.peer_atomics

    def signal(self, slots: int = DEFAULT_SLOTS) -> Signal:
        """A signal: for each of `slots` slots one monotonic word per (source, destination).

        The default slot of a program is its index, so a grid of up to `slots` programs may use it.
        """
        return Signal(self, _positive("slots", slots))

    def counter(self, slots: int = DEFAULT_SLOTS) -> Counter:
        """A counter: `slots` words that any rank adds to and the owner waits on. UnsupportedError on every rank where
        atomics on the memory of peers are not atomic."""
        if not self.peer_atomics:
            raise UnsupportedError(
                "SymmetricHeap.counter: expected GPUs whose atomics reach each other's memory, got a pair that has no "
                "native peer atomics; use a signal, whose words are stored, not added to"
            )
        return Counter(self, _positive("slots", slots))

    def barrier(self, programs: int = DEFAULT_SLOTS) -> Barrier:
        """A barrier over ranks, for grids of up to `programs` programs."""
        return Barrier(self, _positive("programs", programs))

    def mailbox(
        self,
        *,
        tile: int | Sequence[int],
        dtype: DType,
        programs: int,
        depth: int = 2,
        links: Links | None = None,
        posts_ahead: int = 1,
    ) -> Mailbox:
        """A mailbox of tiles `tile` (extents are powers of two) of `dtype` for grids of up to `programs`
        programs, with `depth` (a power of two) rounds of slots. Memory on every rank:
        programs · depth · ranks · bytes of a tile. `links` says who sends to whom (default: everybody to everybody),
        `posts_ahead` how many rounds a kernel may post before it collects the first. See docs/concepts/mailbox.md.
        """
        shape = normal_tile("tile", tile)
        check_dtype(dtype)
        if check_integer("depth", depth, None) < 1 or depth & (depth - 1):
            raise ArgumentError(f"depth: expected a power of two, got {depth}")
        if not 1 <= check_integer("posts_ahead", posts_ahead, None) <= depth:
            raise ArgumentError(
                f"posts_ahead: expected 1 to depth = {depth}, got {posts_ahead}; a round needs a slot of its own"
            )
        size = self.group.size
        if links is not None and not isinstance(links, Links):
            raise ArgumentError(f"links: expected pt.Links or None, got {links!r}")
        if links is not None:
            links = Links.of(*links)  # its constructor checks nothing
        if links is not None and links.size != size:
            raise ArgumentError(f"links: expected links between {size} ranks, as the group has, got {links.size}")
        return Mailbox(self, shape, dtype, _positive("programs", programs), depth, links, posts_ahead)

    def free(self, item: SymmetricTensor | _Channel) -> None:
        """Give an object back, collectively and in the same order on every rank; its bytes are reused."""
        if not isinstance(item, SymmetricTensor | _Channel):
            raise ArgumentError(f"free: expected an object of a symmetric heap, got {item!r}")
        storages = item.storages
        self._check_open("free")
        # By place: objects that look alike and are freed in another order would leave the ranks' heaps cut differently.
        places = [self._objects[id(s)][1] if id(s) in self._objects else None for s in storages]
        names = [f"{s.name} at {at}" if at is not None else s.name for s, at in zip(storages, places, strict=True)]
        self.group.agree(f"free {names}", "SymmetricHeap.free")
        if None in places:
            raise UsageError(f"free: {storages[places.index(None)].name} was freed before, or belongs to another heap")
        for storage in storages:
            self._end(storage, "freed")
            del self._objects[id(storage)]
        # Nobody may reuse the bytes before every rank is done with them.
        self.group.barrier("SymmetricHeap.free")
        for storage in storages:
            self._give_back(storage, "freed")
        if isinstance(item, _Channel) and item in self._channels:
            self._channels.remove(item)

    # ---------------------------------------------------------------- life

    def _recover(self) -> None:
        """Fresh channels after a failure: every word back to zero, on all ranks before any goes on."""
        if not self._closed:
            for channel in self._channels:
                channel.reset()

    def close(self) -> None:
        """Collective: no rank unmaps before all are done. Later use raises UsageError."""
        if self._closed:
            return
        self._closed = True
        for storage, _ in self._objects.values():
            self._settle(storage)
        self.group.forget_recover(self._recover)
        try:
            if self.group.failure() is None:
                self.group.barrier("SymmetricHeap.close")
        finally:
            for storage, _ in self._objects.values():
                self._end(storage, "closed with its heap")
            self._objects.clear()
            self._memory.release()

    @property
    def closed(self) -> bool:
        """Whether this rank has closed the heap."""
        return self._closed

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise UsageError(f"{what}: the symmetric heap was closed; allocate before that")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.group.size > 1:
            # A rank that leaves on an exception must not leave its peers in the barrier of close.
            self.group.fail(f"{type(error).__name__}: {error}")
        self.close()


def _positive(role: str, value: int) -> int:
    return check_integer(role, value, 1)


class SymmetricTensor:
    """A tensor that every rank has at the same offset of its heap: the argument of `T.Peer`.

    `local` is one's own part as an ordinary tensor, `at(rank)` another's, as mapped here.
    """

    __slots__ = ("_arguments", "_parts", "dtype", "heap", "offset", "shape", "storage")

    def __init__(
        self, heap: SymmetricHeap, storage: Storage, dtype: DType, shape: tuple[int, ...], offset: int
    ) -> None:
        self.heap = heap
        self.storage = storage
        self.dtype = dtype
        self.shape = shape
        self.offset = offset
        self._parts: dict[int, Tensor] = {}
        self._arguments: dict[Access, Argument] = {}

    def __repr__(self) -> str:
        return f"SymmetricTensor({self.dtype}{list(self.shape)}, {self.heap.group.size} ranks)"

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The memory of the tensor on this rank."""
        return (self.storage,)

    @property
    def local(self) -> Tensor:
        """This rank's own part."""
        return self.at(self.heap.group.rank)

    def at(self, rank: int) -> Tensor:
        """The part of `rank`. Nothing orders host access with that rank's kernels but the program itself."""
        size = self.heap.group.size
        check_integer("rank", rank, 0, size - 1)
        if rank not in self._parts:
            if rank == self.heap.group.rank:
                storage = self.storage
            else:
                storage = self.heap._part(self.storage, self.offset, rank)
            self._parts[rank] = Tensor(storage, self.dtype, self.shape)
        return self._parts[rank]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """A view of a box of this rank's part, as `local[index]`."""
        return self.local[index]

    def partition(self, tile_shape: int | Sequence[int | None] | None) -> Partition:
        """This rank's part cut into tiles, for `T.Exclusive`."""
        return self.local.partition(tile_shape)

    def numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """A host copy of this rank's part."""
        return self.local.numpy()

    def copy_from(self, source: Any) -> Self:
        """Copy `source` into this rank's part."""
        self.local.copy_from(source)
        return self

    def peer_argument(self, access: Access) -> Argument:
        """How this tensor is passed as `T.Peer`; made once per access."""
        if access not in self._arguments:
            strides = contiguous_strides(self.shape)
            self._arguments[access] = Argument(
                symmetric_type(self.dtype, self.shape, strides, access, 64),
                pack_words((self.heap._table.address, self.offset, *self.shape, *strides)),
                (Use(self.storage, 0, self.storage.nbytes, writes=access is not Access.READ, lifetime_only=True),),
                self.heap,
                self.shape,
                self.heap.group,
            )
        return self._arguments[access]


class MulticastTensor(SymmetricTensor):
    """A symmetric tensor with one address that reaches every rank's part: the argument of `T.Multicast`.

    It is passed as `T.Peer` too, and `local` as an ordinary tensor: other addresses of the same memory, with an alias
    fence between what a program does through the one and through the other.
    """

    __slots__ = ("_multicast",)

    def __init__(
        self, heap: SymmetricHeap, storage: Storage, dtype: DType, shape: tuple[int, ...], offset: int
    ) -> None:
        super().__init__(heap, storage, dtype, shape, offset)
        self._multicast: Argument | None = None

    def __repr__(self) -> str:
        return f"MulticastTensor({self.dtype}{list(self.shape)}, {self.heap.group.size} ranks)"

    def multicast_argument(self) -> Argument:
        """How this tensor is passed as `T.Multicast`; made once."""
        if self._multicast is None:
            self._multicast = self._passed(self.shape, pointer=False)
        return self._multicast

    def pointer(self) -> MulticastPointer:
        """The address that reaches the first element of every rank's part, for a `T.Pointer` parameter of an unsafe
        kernel, which says `T.unsafe.multicast` of it."""
        return MulticastPointer(self, self._passed((prod(self.shape),), pointer=True))

    def _passed(self, shape: tuple[int, ...], *, pointer: bool) -> Argument:
        strides = contiguous_strides(shape)
        window = self.heap.window
        address = 0 if window is None else window + self.offset
        return Argument(
            multicast_type(self.dtype, shape, strides, 64, hardware=window is not None, pointer=pointer),
            pack_words((self.heap._table.address, self.offset, *shape, *strides, address)),
            (Use(self.storage, 0, self.storage.nbytes, writes=True, lifetime_only=True),),
            self.heap,
            shape,
            self.heap.group,
        )


class MulticastPointer:
    """The multicast address of a tensor, which keeps it alive."""

    __slots__ = ("_argument", "tensor")

    def __init__(self, tensor: MulticastTensor, argument: Argument) -> None:
        self.tensor = tensor
        self._argument = argument

    def __repr__(self) -> str:
        return f"MulticastPointer({self.tensor!r})"

    def pointer_argument(self) -> Argument:
        """How it is passed to a kernel."""
        return self._argument


class _Channel:
    """Base of objects made of words: leased exclusively, zero before first use, reset by recovery."""

    def __init__(self, heap: SymmetricHeap) -> None:
        self.heap = heap
        self._shared: list[Storage] = []
        self._own: list[Tensor] = []
        self._argument: Argument | None = None

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The memory of the channel on this rank."""
        return tuple(self._shared)

    @contextlib.contextmanager
    def _made(self) -> Iterator[None]:
        """Around all that allocates. At its end every rank has the channel, with words that are zero before a peer's
        first store can arrive; or one of them lacked memory, all raise, and none has anything of it."""
        heap = self.heap
        try:
            with heap.group.collective(f"SymmetricHeap.{type(self).__name__.lower()}"):
                yield
        except BaseException:
            for storage in self.storages:
                del heap._objects[id(storage)]
                heap._give_back(storage, "not made on every rank")
            raise
        heap._channels.append(self)

    def _words(self, what: str, shape: tuple[int, int]) -> tuple[int, ...]:
        """Symmetric u64 words, zero; the slots of a `SymmetricType`."""
        storage = self.heap._take(f"{what} {list(shape)}", shape[0] * shape[1] * 8)
        self._shared.append(storage)
        self.heap._zero(storage)
        return (self.heap._table.address, self.heap._offset(storage), *shape, *contiguous_strides(shape))

    def _own_words(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """This rank's own u64 words, zero; the slots of a `ViewType`."""
        tensor = self.heap.device.asarray(np.zeros(shape, np.uint64))
        self._own.append(tensor)
        return (tensor.address, *tensor.shape, *tensor.strides)

    def _finish(
        self, kind: Any, words: tuple[int, ...], max_programs: int | None = None, slots: int | None = None
    ) -> None:
        # One lease speaks for the channel: its memories are used together or not at all, and it keeps them.
        first = self._shared[0]
        uses = (Use(first, 0, first.nbytes, writes=True, channel=True),)
        group = self.heap.group
        self._argument = Argument(canonical(kind), pack_words(words), uses, self, (), group, max_programs, slots)

    def reset(self) -> None:
        """All words back to zero; called on every rank between two barriers."""
        for storage in self._shared:
            storage.check_alive(f"{type(self).__name__}.reset")
        for storage in self._shared:
            self.heap._zero(storage)
        for tensor in self._own:
            self.heap._zero(tensor.storage)

    def channel_argument(self) -> Argument:
        """How this object is passed to a kernel."""
        assert self._argument is not None
        return self._argument


class Signal(_Channel):
    """Monotonic epochs between ranks, the argument of `T.Signal`; see docs/concepts/signals.md."""

    def __init__(self, heap: SymmetricHeap, slots: int) -> None:
        super().__init__(heap)
        n = heap.group.size
        self.slots = slots
        with self._made():
            arrived = self._words("signal words", (slots, n))
            words = (*arrived, *self._own_words((slots, n)), *self._own_words((slots, n)))
            self._finish(SignalType(), words, slots=slots)
        self._arrived = heap._offset(self._shared[0])
        # Epochs that host or stream have written, by slot and destination; kernels count their own.
        self._written: dict[tuple[int, int], int] = {}

    def next_word(self, slot: int, to: int) -> tuple[int, int]:
        """(address, epoch) with which a 64-bit write-value of a stream notifies `slot` at rank `to`, as a kernel
        would by `s[slot].notify(to=to)`. A word has one writer: a slot is the stream's or the kernels', never both.
        """
        group = self.heap.group
        if not 0 <= slot < self.slots:
            raise ArgumentError(f"slot: expected 0 to {self.slots - 1}, got {slot}")
        if not 0 <= to < group.size:
            raise ArgumentError(f"to: expected a rank from 0 to {group.size - 1}, got {to}")
        self._shared[0].check_alive("Signal.next_word")
        epoch = self._written[slot, to] = self._written.get((slot, to), 0) + 1
        return self.heap.bases[to] + self._arrived + 8 * (slot * group.size + group.rank), epoch

    def reset(self) -> None:
        super().reset()
        self._written.clear()


class Counter(_Channel):
    """Words that are added to by any rank, the argument of `T.Counter`."""

    def __init__(self, heap: SymmetricHeap, slots: int) -> None:
        super().__init__(heap)
        self.slots = slots
        with self._made():
            words = (*self._words("counter words", (slots, 1)), *self._own_words((slots, 1)))
            self._finish(CounterType(), words, slots=slots)


class Barrier(_Channel):
    """A barrier over the ranks of the group, the argument of `T.Barrier`."""

    def __init__(self, heap: SymmetricHeap, programs: int) -> None:
        super().__init__(heap)
        self.programs = programs
        with self._made():
            words = self._words("barrier words", (programs, heap.group.size))
            self._finish(BarrierType(), (*words, *self._own_words((programs, 1))), programs)


class Mailbox(_Channel):
    """Slots of tiles for safe communication, the argument of `T.Mailbox`; see docs/concepts/mailbox.md."""

    def __init__(
        self,
        heap: SymmetricHeap,
        tile_shape: tuple[int, ...],
        dtype: DType,
        programs: int,
        depth: int,
        links: Links | None,
        posts_ahead: int,
    ) -> None:
        super().__init__(heap)
        n = heap.group.size
        numel = prod(tile_shape)
        self.tile_shape = tile_shape
        self.dtype = dtype
        self.programs = programs
        self.depth = depth
        everybody = Links.all_to_all(n)
        self.links = everybody if links is None else links
        self.posts_ahead = posts_ahead
        self.acknowledged = bool(self.links.acknowledged(depth, posts_ahead))
        linked = self.links != everybody
        heap.group.agree((sorted(self.links.pairs), posts_ahead), "SymmetricHeap.mailbox: links and posts_ahead")
        self._label_storage: Storage | None = None
        rows = programs * depth * n
        tiles = f"mailbox {dtype}{list(tile_shape)} x {programs} x {depth}"
        with self._made():
            storage = heap._take(tiles, rows * numel * dtype.itemsize)
            self._shared.append(storage)
            heap._zero(storage)
            words: tuple[int, ...] = (heap._table.address, heap._offset(storage), rows, numel, numel, 1)
            words += self._words("mailbox epochs", (programs, n))
            words += self._words("mailbox signatures", (programs * depth, n))
            if self.acknowledged:
                words += self._words("mailbox acknowledgements", (programs, n))
            self.labels = self._labels()
            if linked:
                words += self._link_words(self.links.words(heap.group.rank, depth, posts_ahead))
            kind = MailboxType(dtype, tile_shape, depth, self.acknowledged, linked, posts_ahead)
            self._finish(kind, words, programs)

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The memory of the mailbox on this rank."""
        # The labels are no words: recovery leaves them as they are.
        return (*self._shared, *([self._label_storage] if self._label_storage is not None else []))

    def _link_words(self, values: list[int]) -> tuple[int, ...]:
        """What this rank has with each rank: never written again, so not among the words that recovery resets."""
        self._links = self.heap.device.asarray(np.array(values, np.uint64))
        return (self._links.address, *self._links.shape, *self._links.strides)

    def _labels(self) -> Labels | None:
        """The table of what each rank launches; none on the simulated machine, where it would be traffic to check."""
        heap = self.heap
        access = _host_access(heap.device)
        if access is None:
            return None
        self._label_storage = storage = heap._take("mailbox labels", LABEL_BYTES)
        heap._zero(storage)
        offset = heap._offset(storage)
        return Labels([base + offset for base in heap.bases], heap.group.rank, *access)


_Read = Callable[[int, int], bytes]
_Write = Callable[[int, bytes], object]


def _host_access(device: Device) -> tuple[_Read, _Write] | None:
    """How the host reads and writes the memory of a device beside whatever runs there."""
    if device.capabilities.host_addressable:
        return ctypes.string_at, lambda address, data: ctypes.memmove(address, data, len(data))
    if device.driver.kind is not DriverKind.CUDA:
        return None
    driver, stream = device.driver, device.driver.create_stream()

    def read(address: int, nbytes: int) -> bytes:
        block = ctypes.create_string_buffer(nbytes)
        device.wait_ticket(driver.copy(stream, ctypes.addressof(block), address, nbytes, name="mailbox labels"))
        return block.raw

    def write(address: int, data: bytes) -> None:
        block = ctypes.create_string_buffer(data, len(data))
        device.wait_ticket(driver.copy(stream, address, ctypes.addressof(block), len(data), name="mailbox labels"))

    return read, write
