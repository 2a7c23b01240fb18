"""Tensors of a device: dtype, shape and strides over a storage; and partitions of them.

A tensor is a handle: copying data is spelled out (`numpy()`, `pt.asarray`). Strides are in elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final, Self, cast

import numpy as np

from peertile.dtypes import DType, from_numpy
from peertile.errors import ArgumentError
from peertile.ir.types import MAX_TENSOR_RANK, MAX_TILE_ELEMENTS, Access, Space
from peertile.ir.types import Partition as PartitionType
from peertile.runtime.aliases import join
from peertile.runtime.argument import Argument, Use, pack_words, view_type
from peertile.runtime.checks import check_dtype, check_integer
from peertile.runtime.dlpack import cuda_interface, dlpack_device, export_capsule
from peertile.runtime.pointer import Pointer
from peertile.runtime.shared import SharedTensor, share
from peertile.runtime.site import call_site
from peertile.runtime.storage import Borrow, Storage
from peertile.runtime.views import is_injective

if TYPE_CHECKING:
    from peertile.runtime.device import Device

__all__ = [
    "FrozenTensor",
    "Partition",
    "Tensor",
    "TensorView",
    "contiguous_strides",
    "host_array",
    "normal_shape",
    "normal_tile",
]


FP8_LARGEST: Final = {"f8e4m3": 448.0, "f8e5m2": 57344.0}
"""The largest finite numbers, where conversions to fp8 stop."""

MAX_PROGRAMS: Final = (1 << 31) - 1
"""Programs of a launch, as a GPU counts them on the first axis of a grid."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def normal_shape(shape: int | Sequence[int], role: str = "shape") -> tuple[int, ...]:
    """`shape` as a tuple of ints >= 0 of rank 1 to 4; ArgumentError otherwise."""
    iterable = isinstance(shape, Iterable) and not isinstance(shape, str | bytes)
    values = tuple(cast("Sequence[int]", shape)) if iterable else (cast(int, shape),)
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 0 for n in values):
        raise ArgumentError(f"{role}: expected integers >= 0, got {shape!r}")
    if not 1 <= len(values) <= MAX_TENSOR_RANK:
        raise ArgumentError(
            f"{role}: expected 1 to {MAX_TENSOR_RANK} axes, got {len(values)} in {shape!r}; reshape it first"
        )
    return tuple(int(n) for n in values)


def normal_tile(role: str, tile: Any, hint: str = "") -> tuple[int, ...]:
    """`tile` as a tuple of powers of two, of no more elements than a program can be compiled for."""
    iterable = isinstance(tile, Iterable) and not isinstance(tile, str | bytes)
    shape = tuple(tile) if iterable else (tile,)
    for n in shape:
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1 or n & (n - 1):
            raise ArgumentError(f"{role}: expected tile extents that are powers of two, got {n!r} in {shape}{hint}")
    numel = prod(int(n) for n in shape)
    if numel > MAX_TILE_ELEMENTS:
        raise ArgumentError(
            f"{role}: expected at most {MAX_TILE_ELEMENTS} elements per tile, got {numel} in {shape}; "
            "cut smaller tiles, or go through a part in a loop"
        )
    return tuple(int(n) for n in shape)


class Tensor:
    """A view of device memory: `dtype`, `shape` (elements), `strides` (elements), on one device.

    Made by `pt.empty`, `pt.zeros`, `pt.asarray` and by a symmetric heap. Passing it to a kernel gives a
    `T.Shared` parameter; `partition` gives a `T.Exclusive` one.

    >>> import numpy as np, peertile as pt
    >>> x = pt.asarray(np.arange(4, dtype=np.float32))
    >>> x.shape, x.dtype
    ((4,), f32)
    >>> x.numpy().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """

    __slots__ = ("__weakref__", "_exclusive", "_shared", "dtype", "offset", "shape", "storage", "strides")

    def __init__(
        self,
        storage: Storage,
        dtype: DType,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
    ) -> None:
        self.storage = storage
        self.dtype = dtype
        self.shape = shape
        self.strides = contiguous_strides(shape) if strides is None else strides
        self.offset = offset
        # Bound arguments, made once. They hold the storage, not the tensor: no reference cycles.
        self._shared: Argument | None = None
        self._exclusive: dict[tuple[tuple[int, ...], bool, int, int, tuple[bool, ...]], Argument] = {}

    @property
    def device(self) -> Device:
        """The device whose memory this is."""
        device: Device = self.storage.device
        return device

    @property
    def address(self) -> int:
        """Address of the first element, in the device's address space."""
        return self.storage.address + self.offset

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements (without gaps)."""
        return self.size * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        return self.strides == contiguous_strides(self.shape) or self.size == 0

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}{list(self.shape)} on {self.device.name})"

    def byte_range(self) -> tuple[int, int]:
        """[start, end) in bytes within the storage, gaps included."""
        if self.size == 0:
            return self.offset, self.offset
        low = sum(min(0, (n - 1) * s) for n, s in zip(self.shape, self.strides, strict=True))
        high = sum(max(0, (n - 1) * s) for n, s in zip(self.shape, self.strides, strict=True))
        item = self.dtype.itemsize
        return self.offset + low * item, self.offset + (high + 1) * item

    @property
    def _exempt(self) -> tuple[int, ...]:
        """Borrows through which this handle reaches its bytes."""
        return ()

    def _derive(self, shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int) -> Tensor:
        """Another handle of the same kind on the same storage."""
        return Tensor(self.storage, self.dtype, shape, strides, offset)

    def write_use(self) -> Use:
        """How a copy into this tensor uses it."""
        start, end = self.byte_range()
        return Use(self.storage, start, end, writes=True, exclusive=True, exempt=self._exempt)

    def read_use(self) -> Use:
        """How a copy out of this tensor uses it."""
        return Use(self.storage, *self.byte_range(), writes=False)

    def view(self) -> TensorView:
        """A borrow of these elements: while it is held, nobody writes them but through it.

        >>> import peertile as pt
        >>> x = pt.zeros((4,), pt.f32)
        >>> v = x.view()
        >>> v.copy_from([1, 2, 3, 4]).numpy().tolist()
        [1.0, 2.0, 3.0, 4.0]
        """
        start, end = self.byte_range()
        borrow = self.storage.borrow(start, end, "a view", call_site(2))
        return TensorView(self, (borrow.key, *self._exempt), borrow)

    def share(self) -> FrozenTensor:
        """A frozen handle on these elements: while it is held, nobody writes them.

        >>> import peertile as pt
        >>> x = pt.ones((4,), pt.f32)
        >>> frozen = x.share()
        >>> pt.op.dup(frozen).sync().numpy().tolist()
        [1.0, 1.0, 1.0, 1.0]
        """
        start, end = self.byte_range()
        return FrozenTensor(self, (), self.storage.borrow(start, end, "a frozen share", call_site(2)))

    def shared_argument(self) -> Argument:
        """How this tensor is passed as `T.Shared`; made once."""
        if self._shared is None:
            start, end = self.byte_range()
            self._shared = Argument(
                view_type(self.dtype, self.address, self.shape, self.strides, Access.READ),
                pack_words((self.address, *self.shape, *self.strides)),
                (Use(self.storage, start, end, writes=False),),
                None,
                self.shape,
            )
        return self._shared

    def accumulate_argument(self) -> Argument:
        """How this tensor is passed as `T.Accumulate`: other programs of the launch update it too."""
        return Argument(
            view_type(self.dtype, self.address, self.shape, self.strides, Access.WRITE, space=Space.DEVICE),
            pack_words((self.address, *self.shape, *self.strides)),
            (self.write_use(),),
            None,
            self.shape,
        )

    def reshape(self, *shape: int) -> Tensor:
        """The same contiguous elements with another shape; shares the memory."""
        wanted = normal_shape(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if prod(wanted) != self.size:
            raise ArgumentError(f"reshape: expected {self.size} elements, got {prod(wanted)} in {wanted}")
        if not self.is_contiguous:
            raise ArgumentError(f"reshape: expected a contiguous tensor, got strides {self.strides}; copy it first")
        return self._derive(wanted, None, self.offset)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """A view of a box of the tensor: one slice per leading axis, steps >= 1; shares the memory.

        >>> import numpy as np, peertile as pt
        >>> pt.asarray(np.arange(6, dtype=np.int32))[1:6:2].numpy().tolist()
        [1, 3, 5]
        """
        slices = index if isinstance(index, tuple) else (index,)
        if len(slices) > len(self.shape) or not all(isinstance(s, slice) for s in slices):
            raise ArgumentError(f"index: expected up to {len(self.shape)} slices, got {index!r}")
        offset, shape, strides = self.offset, list(self.shape), list(self.strides)
        for axis, s in enumerate(slices):
            try:
                start, stop, step = s.indices(self.shape[axis])
            except (TypeError, ValueError):  # something else than integers, or a step of 0
                raise ArgumentError(
                    f"index: expected a slice of integers with a step >= 1 on axis {axis}, got {s}"
                ) from None
            if step < 1:
                raise ArgumentError(f"index: expected a step >= 1 on axis {axis}, got {step}")
            offset += start * self.strides[axis] * self.dtype.itemsize
            shape[axis] = len(range(start, stop, step))
            strides[axis] *= step
        return self._derive(tuple(shape), tuple(strides), offset)

    def permute(self, *axes: int) -> Tensor:
        """A view whose axis k is axis `axes[k]` of this one; shares the memory.

        >>> import numpy as np, peertile as pt
        >>> pt.asarray(np.zeros((2, 3), np.float32)).permute(1, 0).shape
        (3, 2)
        """
        order = tuple(axes[0]) if len(axes) == 1 and not isinstance(axes[0], int) else axes
        if sorted(order) != list(range(len(self.shape))):
            raise ArgumentError(f"permute: expected each of 0 to {len(self.shape) - 1} once, got {order}")
        shape, strides = tuple(self.shape[k] for k in order), tuple(self.strides[k] for k in order)
        return self._derive(shape, strides, self.offset)

    def strided(self, shape: int | Sequence[int], strides: int | Sequence[int]) -> Tensor:
        """A view with any strides (elements, 0 or more) over a tensor without gaps: windows, diagonals, repeats.

        Elements may be reached by several indices: such a view is read by kernels, and never partitioned.

        >>> import numpy as np, peertile as pt
        >>> pt.asarray(np.arange(6, dtype=np.int32)).strided((3, 4), (1, 1)).numpy().tolist()
        [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]
        """
        dims = normal_shape(shape)
        steps = (strides,) if isinstance(strides, int) else tuple(strides)
        if len(steps) != len(dims) or not all(isinstance(s, int) and s >= 0 for s in steps):
            raise ArgumentError(f"strided: expected {len(dims)} strides of 0 or more, got {strides!r}")
        if not self.is_contiguous:
            raise ArgumentError(f"strided: expected a contiguous tensor, got strides {self.strides}; copy it first")
        last = sum((n - 1) * s for n, s in zip(dims, steps, strict=True))
        if prod(dims) and last >= self.size:
            raise ArgumentError(
                f"strided: expected elements 0 to {self.size - 1}, got up to {last} with {dims} and strides {steps}"
            )
        return self._derive(dims, steps, self.offset)

    def pointer(self) -> Pointer:
        """The address of the first element, for a `T.Pointer` parameter of an unsafe kernel."""
        start, end = self.byte_range()
        if start != self.offset:
            raise ArgumentError(f"pointer: expected strides of 0 or more, got {self.strides}")
        return Pointer(self.storage, self.address, self.dtype, end - start)

    def share_with(self, devices: Sequence[Device]) -> SharedTensor:
        """Let kernels on other devices of this process use the tensor too, as `T.Peer`; it stays where it is."""
        return share(self, devices)

    def partition(self, tile_shape: int | Sequence[int | None] | None) -> Partition:
        """Cut into tiles of `tile_shape`, each owned by one program: the argument of `T.Exclusive`.

        Extents of a tile are powers of two; the last tile of an axis may be partial, and is clipped. None stands
        for a whole axis, which one program owns: its extent up to the next power of two.

        >>> import peertile as pt
        >>> pt.empty((50, 1000), pt.f32).partition((1, None)).tile_shape
        (1, 1024)
        """
        if type(tile_shape) is int and ((tile_shape,), False, 1, 0, ()) in self._exclusive:
            return Partition(self, (tile_shape,))  # cut like this before, hence checked before
        iterable = isinstance(tile_shape, Iterable) and not isinstance(tile_shape, str | bytes)
        shape = tuple(cast("Sequence[int | None]", tile_shape)) if iterable else (cast("int | None", tile_shape),)
        single: tuple[bool, ...] = ()
        if None in shape and len(shape) == len(self.shape):
            single = tuple([n is None for n in shape])
            whole = [1 << max(n - 1, 0).bit_length() for n in self.shape]
            shape = tuple(w if n is None else n for n, w in zip(shape, whole, strict=True))
        # The types first: 4.0 and True would be found as 4 and 1.
        if {*map(type, shape)} == {int} and (shape, False, 1, 0, single) in self._exclusive:
            return Partition(self, cast("tuple[int, ...]", shape), single=single)
        if len(shape) != len(self.shape):
            raise ArgumentError(
                f"partition: expected {len(self.shape)} tile extents for shape {self.shape}, "
                f"got {len(shape)} in {shape}"
            )
        tile = normal_tile(
            "partition", shape, "; take the next power of two: partial tiles are padded on load and clipped on store"
        )
        distinct = is_injective(self.shape, self.strides)
        if not distinct:
            why = "several indices for one element"
            if distinct is None:
                why = "more elements than can be checked one by one"
            raise ArgumentError(
                f"partition: expected a view in which every index is an element of its own, got strides {self.strides} "
                f"for shape {self.shape}, with {why}; two programs would write one place"
            )
        return Partition(self, tile, single=single)

    def numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """A copy on the host, after everything enqueued on this tensor has completed."""
        return self.device.read_tensor(self)

    def copy_from(self, source: Any) -> Self:
        """Copy `source` (array-like of the same shape, converted to this dtype) into the tensor."""
        array = host_array(source)
        if array.shape != self.shape:
            raise ArgumentError(f"copy_from: expected shape {self.shape}, got {array.shape}")
        self.device.write_tensor(self, array)
        return self

    # ---------------------------------------------------------------- other libraries

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        if copy is False:
            raise ValueError("Tensor: numpy.asarray needs a copy; for a view without one use numpy.from_dlpack")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack_device(self.device)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule on this tensor's own memory, after everything enqueued on it has completed. The memory stays
        alive as long as what is made of the capsule; what is launched later is the caller's to order. A frozen share
        goes out as read-only, to consumers of DLPack 1.0 alone."""
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(
                f"dlpack: expected device {self.__dlpack_device__()}, got {dl_device}; copy it there first"
            )
        self.storage.check_alive("Tensor.__dlpack__")
        source = self.device.asarray(self.numpy(), self.dtype) if copy else self
        self.device.settle(source, writes=True)
        join(source.storage)  # it may come back
        return export_capsule(
            source,  # not its storage alone: while the memory is out, a view is still borrowed and a share frozen
            source.address,
            source.shape,
            source.strides,
            source.dtype,
            self.__dlpack_device__(),
            max_version=max_version,
            read_only=isinstance(source, FrozenTensor),
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = cuda_interface(self)
        join(self.storage)
        return interface


class TensorView(Tensor):
    """What `t.view()` gives: a borrow. Slices and reshapes of it are part of the same borrow."""

    __slots__ = ("_borrow", "_keys")

    def __init__(self, base: Tensor, keys: tuple[int, ...], borrow: Borrow) -> None:
        super().__init__(base.storage, base.dtype, base.shape, base.strides, base.offset)
        self._keys = keys
        self._borrow = borrow

    @property
    def _exempt(self) -> tuple[int, ...]:
        return self._keys

    def _derive(self, shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int) -> Tensor:
        plain = Tensor(self.storage, self.dtype, shape, strides, offset)
        return type(self)(plain, self._keys, self._borrow)


class FrozenTensor(TensorView):
    """What `t.share()` gives: reading only, and nobody writes the elements while it is held."""

    __slots__ = ()

    def write_use(self) -> Use:
        raise ArgumentError("copy: expected a destination that can be written, got a frozen share; write the tensor")

    def partition(self, tile_shape: int | Sequence[int | None] | None) -> Partition:
        """Refused: a frozen share is not written."""
        raise ArgumentError("partition: expected a tensor that can be written, got a frozen share; cut the tensor")

    def copy_from(self, source: Any) -> Self:
        """Refused: a frozen share is not written."""
        raise ArgumentError("copy_from: expected a tensor that can be written, got a frozen share; write the tensor")


@dataclass(slots=True, eq=False)
class Partition:
    """A tensor cut into tiles for exclusive writing. `programs` is None for one program per tile."""

    tensor: Tensor
    tile_shape: tuple[int, ...]
    is_persistent: bool = False
    programs: int | None = None
    swizzle: int = 1
    whole: Tensor | None = None
    """For a prefix: the tensor that was cut."""
    spare: int = 0
    single: tuple[bool, ...] = ()
    """Axes whose tile was asked for as None: one tile has the whole of it, which a kernel may rely on."""
    bound: Argument | None = field(default=None, init=False, repr=False)
    """What `exclusive_argument` gave."""

    @property
    def num_tiles(self) -> tuple[int, ...]:
        """Tiles along each axis."""
        return tuple([-(-n // t) for n, t in zip(self.tensor.shape, self.tile_shape, strict=True)])

    def persistent(self, programs: int | None = None, swizzle: int = 1, spare: int = 0) -> Partition:
        """Map the tiles to `programs` programs (default: as many as suit the device), each of which
        walks its share with `for tile in z.tiles()`. `swizzle` > 1 groups that many rows of tiles. The first
        `spare` of the programs own no tile: they do other work of the same launch, such as moving data."""
        if programs is not None:
            programs = check_integer("persistent: programs", programs, 1, MAX_PROGRAMS)
        swizzle = check_integer("persistent: swizzle", swizzle, 1, MAX_PROGRAMS)
        spare = check_integer("persistent: spare", spare, 0, MAX_PROGRAMS)
        if programs is not None and spare >= programs:
            raise ArgumentError(
                f"persistent: spare: expected fewer than the {programs} programs, got {spare}; "
                "one program at least has to own the tiles"
            )
        return Partition(self.tensor, self.tile_shape, True, programs, swizzle, self.whole, spare, self.single)

    def prefix(self, *extents: int) -> Partition:
        """The same cut over the first `extents` elements of the leading axes alone: the rest is not written.

        >>> import peertile as pt
        >>> part = pt.zeros((10, 8), pt.f32).partition((4, 8)).prefix(5)
        >>> part.num_tiles, part.unpartition().shape
        ((2, 1), (10, 8))
        """
        shape = self.tensor.shape
        if not 1 <= len(extents) <= len(shape) or not all(0 <= n <= m for n, m in zip(extents, shape, strict=False)):
            raise ArgumentError(f"prefix: expected up to {len(shape)} extents within {shape}, got {extents}")
        part = self.tensor[tuple(slice(0, n) for n in extents)]
        whole = self.tensor if self.whole is None else self.whole
        return Partition(
            part, self.tile_shape, self.is_persistent, self.programs, self.swizzle, whole, self.spare, self.single
        )

    def unpartition(self) -> Tensor:
        """The tensor that was cut."""
        return self.tensor if self.whole is None else self.whole

    def grid(self) -> int:
        """Programs of a launch over this partition."""
        tiles = prod(self.num_tiles)
        if not self.is_persistent:
            return tiles
        if self.programs is not None:
            return self.programs
        return self.spare + max(1, min(tiles, self.tensor.device.persistent_programs - self.spare))

    def exclusive_argument(self) -> Argument:
        """How this partition is passed as `T.Exclusive`; made once per tensor and way of cutting it."""
        if self.bound is not None:
            return self.bound
        t = self.tensor
        key = (self.tile_shape, self.is_persistent, self.swizzle, self.spare, self.single)
        argument = t._exclusive.get(key)
        if argument is None:
            start, end = t.byte_range()
            argument = t._exclusive[key] = Argument(
                view_type(t.dtype, t.address, t.shape, t.strides, Access.READ_WRITE, PartitionType(*key)),
                pack_words((t.address, *t.shape, *t.strides)),
                (Use(t.storage, start, end, writes=True, exclusive=True, exempt=t._exempt),),
                None,
                t.shape,
                programs=None if self.is_persistent else self.grid(),
            )
        self.bound = argument
        return argument


def host_array(source: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """`source` as numpy reads it; ArgumentError for nested lists of unequal lengths."""
    try:
        return np.asarray(source)
    except ValueError as error:
        raise ArgumentError(f"source: expected an array, or nested lists of equal lengths ({error})") from None


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biuf" or dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def converted(array: np.ndarray[Any, np.dtype[Any]], dtype: DType) -> np.ndarray[Any, np.dtype[Any]]:
    """`array`, contiguous, with elements of `dtype`, converted as `astype` in a kernel does; itself if that is so."""
    if array.dtype == dtype.numpy:
        return np.ascontiguousarray(array)
    if not _is_number(array.dtype):
        raise ArgumentError(f"source: expected numbers of at most 64 bits, got elements of numpy's {array.dtype}")
    with np.errstate(all="ignore"):  # overflow and NaN are values here, not warnings
        if array.dtype.kind not in "biu" and dtype.is_int:
            wide = np.trunc(array.astype(np.float64))
            # 2^63 - 1 is no f64: compare with the power of two above it.
            above, below = wide >= float(dtype.max + 1), wide < float(dtype.min)
            inside = np.where(above | below | np.isnan(wide), 0.0, wide).astype(dtype.numpy)
            inside[above], inside[below] = dtype.max, dtype.min
            return np.ascontiguousarray(inside)
        if dtype.is_float and dtype.bits < 32 and array.dtype == np.float64:
            array = array.astype(np.float32)  # on its way to a narrow type a kernel rounds f64 to f32 first
        if dtype.is_float and dtype.bits == 8:
            limit = FP8_LARGEST[dtype.name]
            array = np.clip(array.astype(np.float32), -limit, limit)
        return np.ascontiguousarray(array, dtype=dtype.numpy)


def array_for(source: Any, dtype: DType | None) -> tuple[np.ndarray[Any, np.dtype[Any]], DType]:
    """`source` as a contiguous numpy array of rank >= 1 and its dtype."""
    if dtype is not None:
        check_dtype(dtype)
    array = host_array(source)
    target = from_numpy(array.dtype) if dtype is None else dtype
    if array.ndim == 0:
        array = array.reshape(1)
    return converted(array, target), target
