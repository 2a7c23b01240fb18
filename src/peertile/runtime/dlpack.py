"""DLPack capsules, both ways, through ctypes: memory crosses between libraries, no byte is copied.

Invariant: what a capsule was made of stays alive until its consumer calls the deleter; an imported tensor calls
the producer's deleter once, when its storage is collected. Knows no tensors, only addresses, shapes and dtypes.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Final, NamedTuple

from peertile import dtypes
from peertile.dtypes import DType
from peertile.errors import ArgumentError, UnsupportedError
from peertile.runtime.driver import DriverKind

__all__ = ["Foreign", "capsule_of", "cuda_interface", "dlpack_device", "export_capsule", "import_capsule"]

CPU, CUDA = 1, 2
_NAME: Final = b"dltensor"
_VERSIONED: Final = b"dltensor_versioned"
_MAJOR: Final = 1
_READ_ONLY: Final = 1
_CODES: Final = {"i": 0, "u": 1, "f": 2}


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    """What DLPack has had since 1.0: with flags, so that a consumer knows whether it may write."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_exported: dict[int, Any] = {}
"""What consumers hold: address of a managed tensor -> everything that has to stay alive for it."""


def _forget(address: int) -> None:
    _exported.pop(address, None)


def _capsule_gone(capsule: int) -> None:
    # Only a capsule that nobody consumed still has its first name.
    for name in (_NAME, _VERSIONED):
        if ctypes.pythonapi.PyCapsule_IsValid(ctypes.c_void_p(capsule), name):
            _exported.pop(_pointer_of(ctypes.c_void_p(capsule), name), None)


_delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget)
_destroy_capsule = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_capsule_gone)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))


def _type_of(dtype: DType) -> tuple[int, int]:
    special = {"bool": (6, 8), "bf16": (4, 16), "f8e4m3": (10, 8), "f8e5m2": (12, 8)}
    return special.get(dtype.name) or (_CODES[dtype.name[0]], dtype.bits)


def _dtype_of(code: int, bits: int, lanes: int) -> DType:
    for dtype in vars(dtypes).values():
        if isinstance(dtype, DType) and lanes == 1 and _type_of(dtype) == (code, bits):
            return dtype
    raise ArgumentError(
        f"dlpack: expected an element type that peertile has, got code {code}, {bits} bits, {lanes} lanes"
    )


def dlpack_device(device: Any) -> tuple[int, int]:
    """(device type, ordinal) as DLPack counts. Memory of a cpu device is memory of the host."""
    return (CUDA, device.driver.ordinal) if device.driver.kind is DriverKind.CUDA else (CPU, 0)


def export_capsule(
    keep: Any,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: DType,
    where: tuple[int, int],
    *,
    max_version: tuple[int, int] | None = None,
    read_only: bool = False,
) -> Any:
    """A capsule on memory that `keep` keeps alive, of the newest form that the consumer says it knows. BufferError for
    what must not be written where the form cannot say so."""
    versioned = max_version is not None and max_version[0] >= _MAJOR
    if read_only and not versioned:
        raise BufferError(
            "dlpack: expected a consumer of DLPack 1.0 for a frozen share, which nobody may write; export a copy"
        )
    rank = len(shape)
    extents, steps = (ctypes.c_int64 * rank)(*shape), (ctypes.c_int64 * rank)(*strides)
    managed = _ManagedVersioned(major=_MAJOR, flags=_READ_ONLY * read_only) if versioned else _Managed()
    t = managed.tensor
    t.data, t.device.kind, t.device.ordinal, t.ndim, t.byte_offset = address, *where, rank, 0
    t.dtype.code, t.dtype.bits = _type_of(dtype)
    t.dtype.lanes = 1
    t.shape = ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64))
    t.strides = ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = ctypes.cast(_delete, ctypes.c_void_p)
    at = ctypes.addressof(managed)
    _exported[at] = (managed, extents, steps, keep)
    return _new_capsule(at, _VERSIONED if versioned else _NAME, ctypes.cast(_destroy_capsule, ctypes.c_void_p))


class _Owner:
    """Calls the producer's deleter once, when it is collected."""

    __slots__ = ("_address", "_deleter")

    def __init__(self, address: int, deleter: int | None) -> None:
        self._address = address
        self._deleter = deleter

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):
            if self._deleter:
                ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self._deleter)(self._address)


class Foreign(NamedTuple):
    """Memory of another library: `owner` keeps it alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType
    owner: object
    device: tuple[int, int]


def capsule_of(source: Any) -> Any:
    """What `source` exports: in the form of DLPack 1.0 if its library has that, else in the one before."""
    try:
        return source.__dlpack__(max_version=(_MAJOR, 0))
    except TypeError:  # a library from before 1.0 has no such argument
        return source.__dlpack__()


def import_capsule(capsule: Any) -> Foreign:
    """Take over a capsule. ArgumentError for one that was consumed before, or whose memory may not be written."""
    versioned = _is_valid(capsule, _VERSIONED)
    if not versioned and not _is_valid(capsule, _NAME):
        raise ArgumentError("dlpack: expected a capsule that nobody has consumed, got a used one; make a new one")
    at = _pointer(capsule, _VERSIONED if versioned else _NAME)
    managed = _ManagedVersioned.from_address(at) if versioned else _Managed.from_address(at)
    if versioned and managed.major > _MAJOR:
        raise ArgumentError(f"dlpack: expected version {_MAJOR} of DLPack, got {managed.major}")
    if versioned and managed.flags & _READ_ONLY:
        raise ArgumentError("from_dlpack: expected an array that can be written, got a read-only one; copy it")
    t = managed.tensor
    rank = t.ndim
    shape = tuple(t.shape[k] for k in range(rank))
    strides = tuple(t.strides[k] for k in range(rank)) if t.strides else None
    dtype = _dtype_of(t.dtype.code, t.dtype.bits, t.dtype.lanes)
    device = (t.device.kind, t.device.ordinal)
    address = (t.data or 0) + t.byte_offset
    # From here on it is ours to delete.
    _rename(capsule, b"used_dltensor_versioned" if versioned else b"used_dltensor")
    return Foreign(address, shape, strides, dtype, _Owner(at, managed.deleter), device)


def cuda_interface(tensor: Any) -> dict[str, Any]:
    """The CUDA array interface of a tensor. AttributeError (as the protocol asks) where memory is not a GPU's."""
    if tensor.device.driver.kind is not DriverKind.CUDA:
        raise AttributeError(f"{tensor.device.name} has no __cuda_array_interface__; use DLPack or numpy()")
    if tensor.dtype.name in ("bf16", "f8e4m3", "f8e5m2"):
        raise UnsupportedError(f"__cuda_array_interface__: it has no type for {tensor.dtype}; use DLPack")
    item = tensor.dtype.itemsize
    return {
        "shape": tensor.shape,
        "strides": tuple(s * item for s in tensor.strides),
        "typestr": tensor.dtype.numpy.str,
        "data": (tensor.address, False),
        "version": 3,
        "stream": 1,
    }
