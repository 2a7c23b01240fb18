"""What the communicators of fused kernels share: the heap, the meeting of the ranks, turns, and checks of arguments.

A communicator is made, used and closed by all ranks in the same order, as `Collectives` is. It owns its channels and
its staging in a symmetric heap; all launches of one have the same number of programs. No kernel is launched here.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from peertile.comm.group import Group
from peertile.comm.symmetric import SymmetricHeap, SymmetricTensor
from peertile.dtypes import DType, bf16, f16, f32, i64, u64
from peertile.errors import ArgumentError
from peertile.kernel import LaunchOp
from peertile.library.communicator import Communicator, meet
from peertile.runtime.device import Device
from peertile.runtime.driver import DriverKind
from peertile.runtime.registry import current_device
from peertile.runtime.tensor import Tensor

__all__ = ["FLOATS", "MOST_WORKERS", "FusedBase", "check_count", "check_shape", "check_tile", "power_of_two"]

T = TypeVar("T")

FLOATS = (f32, f16, bf16)
"""Types of factors and rows. Sums are f32."""
OVERHEAD_BYTES = 1 << 18
"""Of a heap that the communicator makes: for words, and for what alignment leaves."""
GPU_MOVERS = 16
"""Programs that move data on a GPU, where nothing else was asked for: so many fill the link (339 of 360 GB/s)."""
MOST_WORKERS = 256
"""Programs that compute, at most: words are laid out for so many."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n.

    >>> power_of_two(5), power_of_two(0)
    (8, 1)
    """
    return 1 << max(n - 1, 0).bit_length()


def check_count(what: str, value: Any, least: int = 1) -> int:
    """`value`, an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ArgumentError(f"{what}: expected an integer >= {least}, got {value!r}")
    return int(value)


def check_tile(what: str, tile: Any, axes: int) -> tuple[int, ...] | None:
    """`tile`, None or so many powers of two."""
    if tile is not None and not (
        isinstance(tile, tuple)
        and len(tile) == axes
        and all(isinstance(n, int) and n > 0 and not n & n - 1 for n in tile)
    ):
        raise ArgumentError(f"{what}: tile: expected {axes} powers of two, got {tile!r}")
    return tile


def check_shape(what: str, t: Any, device: Device, dtypes: Sequence[DType], axes: Sequence[str | int]) -> Tensor:
    """`t`, a tensor on `device` of one of `dtypes` whose axes are as said: a number is an extent, a name any."""
    if not isinstance(t, Tensor):
        raise ArgumentError(f"{what}: expected a Tensor, got {type(t).__name__}; pt.asarray makes one")
    if t.device is not device:
        raise ArgumentError(f"{what} is on {t.device.name}, the communicator on {device.name}; copy it there")
    if t.dtype not in dtypes:
        raise ArgumentError(f"{what}: expected {' or '.join(d.name for d in dtypes)}, got {t.dtype}")
    fits = len(t.shape) == len(axes) and all(
        isinstance(want, str) or want == got for want, got in zip(axes, t.shape, strict=True)
    )
    if not fits:
        raise ArgumentError(f"{what}: expected [{', '.join(map(str, axes))}], got {list(t.shape)}")
    return t


def _any(group: Group, value: bool, what: str) -> bool:
    """Collective. Whether some rank says so."""
    return any(group.exchange(b"1" if value else b"", what))


class FusedBase(Communicator):
    """The part of a communicator that does not depend on what it computes.

    `where`: a group, which then gets a heap of its own, or a heap. `movers` programs of each launch move data, and
    `workers` compute (default: what the device gives each rank, on a GPU `crowd` for each of its multiprocessors).
    """

    def __init__(
        self,
        where: Group | SymmetricHeap,
        *,
        staging_bytes: int,
        movers: int | None,
        workers: int | None,
        agreed: object,
        crowd: int = 1,
    ) -> None:
        name = type(self).__name__
        self._name = name
        self.group = group = where if isinstance(where, Group) else where.group
        device = current_device() if isinstance(where, Group) else where.device
        if movers is not None:
            check_count(f"{name}: movers", movers, 0)
        if workers is not None and check_count(f"{name}: workers", workers) > MOST_WORKERS:
            raise ArgumentError(f"{name}: workers: expected at most {MOST_WORKERS}, got {workers}")
        self._on_gpu = on_gpu = device.driver.kind is DriverKind.CUDA
        own, _ = meet(group, device, name)
        if movers is None:
            movers = min(GPU_MOVERS, max(1, own // 4)) if on_gpu else 1
        if workers is None:
            workers = min(max(1, crowd * own - movers if on_gpu else own), MOST_WORKERS)
        self.movers, self.workers = movers, workers
        self.programs = movers + workers
        """Programs of every launch: the first `movers` of them move data."""
        group.agree((self.programs, movers, agreed), f"{name}(...)")
        self._owns_heap = isinstance(where, Group)
        if isinstance(where, Group):
            words = 64 * self.programs * group.size + OVERHEAD_BYTES
            self.heap = SymmetricHeap(group, size_bytes=staging_bytes + words)
        else:
            self.heap = where
        self.device: Device = self.heap.device
        self._objects: list[Any] = []
        self._words: list[SymmetricTensor] = []
        self._offsets: dict[tuple[int, ...], Tensor] = {}
        self._closed = False
        self._is_shared = on_gpu and _any(group, own < device.capabilities.executors, name)
        with self._making():
            self._hello = self._own(self.heap.mailbox(tile=1, dtype=u64, programs=self.programs))
            self._turn = self._own(self.heap.zeros((self.programs,), i64), is_words=True)
        group.on_recover(self._recover)

    # ---------------------------------------------------------------- life

    def _own(self, item: T, *, is_words: bool = False) -> T:
        """Remember an object of the heap, to give it back; words start from zero again when the group recovers."""
        if is_words:
            assert isinstance(item, SymmetricTensor), "words are a tensor"
            self._words.append(item)
        return super()._own(item)

    def _restart(self) -> None:
        for words in self._words:
            words.copy_from(np.zeros(words.shape, np.int64 if words.dtype == i64 else np.uint64))

    # ---------------------------------------------------------------- launches

    def _met(self, launch: LaunchOp) -> LaunchOp:
        """`launch`; on a GPU that ranks share, once each of them has loaded the kernel for its own shapes: nothing is
        loaded there while another rank's kernel waits for this one's."""
        if self._is_shared:
            launch.load()
            self.group.barrier(f"{self._name}: {launch.name} is loaded on every rank")
        return launch

    # ---------------------------------------------------------------- arguments

    def _seen_as(self, base: SymmetricTensor, dtype: DType, shape: tuple[int, ...]) -> SymmetricTensor:
        """Staging bytes as a tensor."""
        return SymmetricTensor(self.heap, base.storage, dtype, shape, base.offset)

    def _shares(self, what: str, counts: Sequence[int] | None, own: int | None) -> tuple[int, ...]:
        """Rows of each rank: `counts` checked, or as many as this rank has; `own` is what this rank must have."""
        n, me = self.group.size, self.group.rank
        if counts is None:
            assert own is not None
            return (own,) * n
        shares = tuple(int(c) for c in counts if isinstance(c, int | np.integer) and c >= 0)
        if len(counts) != n or len(shares) != n:
            raise ArgumentError(f"{what}: expected {n} integers >= 0, one for each rank, got {list(counts)!r}")
        if own is not None and shares[me] != own:
            raise ArgumentError(f"{what}: expected {own} for rank {me}, which has so many, got {shares[me]}")
        return shares

    def _starts(self, shares: tuple[int, ...]) -> Tensor:
        """Where the rows of each rank begin, and the end, on the device."""
        found = self._offsets.get(shares)
        if found is None:
            found = self._offsets[shares] = self.device.asarray(np.cumsum([0, *shares]), i64)
        return found

    def _number(self, *facts: object) -> int:
        """What all ranks have to agree on, as the number that they compare when they meet."""
        return zlib.crc32(repr(facts).encode())
