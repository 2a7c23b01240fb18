"""The NVIDIA driver as the cuda driver sees it: one method for each call, plain numbers in and out, errors raised.

The only module that imports cuda.bindings, at the first `CudaApi()`. It decides nothing and keeps nothing but the
table of host functions. Handles (streams, events, modules) are whatever the bindings return: opaque to callers.
Multicast objects are never made here, and no setting of a GPU is changed.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final

from peertile.errors import UnsupportedError
from peertile.runtime.driver import ShareKind

__all__ = ["CudaApi", "CudaError", "LaunchConfig", "PointerKind"]

Handle = Any

_MOST_SHARED: Final = 100  # CU_SHAREDMEM_CARVEOUT_MAX_SHARED: the percentage of a multiprocessor's memory
_STICKY: Final = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT", "CONTEXT_IS_DESTROYED", "CONTAINED", "DEINITIALIZED", "DEVICE_UNAVAILABLE", "ECC_UNCORRECTABLE",
        "EXTERNAL_DEVICE", "HARDWARE_STACK_ERROR", "ILLEGAL_ADDRESS", "ILLEGAL_INSTRUCTION", "INVALID_ADDRESS_SPACE",
        "INVALID_PC", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "MISALIGNED_ADDRESS", "NVLINK_UNCORRECTABLE",
        "TENSOR_MEMORY_LEAK", "UNKNOWN",
    )
)  # fmt: skip
"""Errors after which a context does nothing more."""


class CudaError(Exception):
    """A driver call failed. `name` is the driver's constant, `text` its sentence, `call` the function."""

    def __init__(self, call: str, name: str, text: str) -> None:
        super().__init__(f"{call}: {text} ({name})")
        self.call = call
        self.name = name
        self.text = text

    @property
    def sticky(self) -> bool:
        """Whether the context is lost."""
        return self.name in _STICKY

    @property
    def out_of_memory(self) -> bool:
        return self.name == "CUDA_ERROR_OUT_OF_MEMORY"


class PointerKind(Enum):
    """What an address points to."""

    PAGEABLE = "pageable"  # host memory that the driver knows nothing of
    PINNED = "pinned"  # host memory that devices can access
    DEVICE = "device"


class LaunchConfig:
    """A CUlaunchConfig for a stream, with the attribute that lets a launch overlap the end of the one in front, and
    with the one of a cooperative launch where that is asked for."""

    __slots__ = ("_attributes", "address", "words")

    _OVERLAP: Final = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    _COOPERATIVE: Final = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    _WORDS: Final = 18  # of an attribute: id, padding, 64 bytes of value

    def __init__(self, stream: int, cooperative: bool = False) -> None:
        self._attributes = (ctypes.c_uint32 * (2 * self._WORDS))(self._OVERLAP, 0, 1)
        if cooperative:
            self._attributes[self._WORDS], self._attributes[self._WORDS + 2] = self._COOPERATIVE, 1
        self.words = (ctypes.c_uint32 * 14)(1, 1, 1, 1, 1, 1, 0, 0)  # grid, block, shared memory, padding
        self.address = ctypes.addressof(self.words)
        pointers = (ctypes.c_uint64 * 2).from_address(self.address + 32)
        pointers[0], pointers[1] = stream, ctypes.addressof(self._attributes)
        self.words[12] = 1 + cooperative


class CudaApi:
    """See the module docstring. UnsupportedError if the bindings or the NVIDIA driver are missing."""

    def __init__(self) -> None:
        try:
            self._d: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise UnsupportedError(
                f"cuda: the Python package cuda-bindings cannot be imported ({error}); "
                "install peertile with its cuda extra: pip install 'peertile[cuda]'"
            ) from error
        d = self._d
        # Streams that share a queue of the hardware run what is in it in the order of the queue, so that a kernel that
        # waits for one in another stream may stand in front of it, and both end at their bound. 8 queues are the
        # default, 32 are all that there are, and CUDA asks for the number once, now. They are most of what a context
        # costs: on an H200 it takes 0.48 s to make and 0.31 s to end, with 8 queues 0.14 and 0.10.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        try:
            (result,) = d.cuInit(0)
        except Exception as error:  # the bindings raise what their loader raises
            raise UnsupportedError(
                f"cuda: the NVIDIA driver library cannot be loaded ({type(error).__name__}: {error}); install the "
                "NVIDIA driver"
            ) from error
        if getattr(result, "name", "") == "CUDA_ERROR_NO_DEVICE":
            named = os.environ.get("CUDA_VISIBLE_DEVICES")
            what = "cuda: expected a GPU, the NVIDIA driver finds none"
            if named is not None:
                what += f"; CUDA_VISIBLE_DEVICES is {named!r}: leave it out, or name GPUs that exist"
            raise UnsupportedError(what)
        self._ok("cuInit", (result,))
        self._handle_types = {
            ShareKind.FD: d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            ShareKind.FABRIC: d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC,
        }
        self._calls: dict[int, tuple[Callable[[], None], bool]] = {}  # key -> (function, once)
        self._keys = itertools.count(1)
        self._trampoline = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._dispatch)
        # Not through the bindings: they free what they wrap a host function in after its first call, so that the
        # second replay of a graph that has one would run into freed memory (NVIDIA/cuda-python issue 790).
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self._launch_host: Any = library.cuLaunchHostFunc
            self._pointer_attribute: Any = library.cuPointerGetAttribute
        except (OSError, AttributeError) as error:
            raise UnsupportedError(
                f"cuda: libcuda.so.1 cannot be loaded ({error}); install the NVIDIA driver, or add its folder to "
                "LD_LIBRARY_PATH"
            ) from error
        self._launch_host.argtypes = [ctypes.c_void_p, type(self._trampoline), ctypes.c_void_p]
        self._launch_host.restype = ctypes.c_int
        self._pointer_attribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
        self._pointer_attribute.restype = ctypes.c_int
        self._library = library
        self._in_pool = int(d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE)
        self._memory_type = int(d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        self._invalid_value = int(d.CUresult.CUDA_ERROR_INVALID_VALUE)
        self._pinned_type = int(d.CUmemorytype.CU_MEMORYTYPE_HOST)
        self.host_threads: set[int] = set()
        """Threads that are inside a host function now: no driver call is allowed on them."""

    def _dispatch(self, key: int) -> None:
        """Runs on a thread of the driver; nothing may escape."""
        function, once = self._calls[key]
        if once:
            del self._calls[key]
        thread = threading.get_ident()
        self.host_threads.add(thread)
        try:
            function()
        finally:
            self.host_threads.discard(thread)

    def _ok(self, call: str, result: Any) -> Any:
        """The value of a call (None, one, or a tuple); CudaError if it failed."""
        if result[0] != 0:
            raise self._error(call, result[0])
        if len(result) == 2:
            return result[1]
        return result[1:] or None

    def _error(self, call: str, code: Any) -> CudaError:
        text = self._d.cuGetErrorString(code)[1]
        sentence = text.decode() if isinstance(text, bytes) else "no text"
        return CudaError(call, getattr(code, "name", str(code)), sentence)

    # ---------------------------------------------------------------------------------------- devices, contexts

    def driver_version(self) -> int:
        """1000 · major + 10 · minor of the newest CUDA that the driver supports."""
        return int(self._ok("cuDriverGetVersion", self._d.cuDriverGetVersion()))

    def device_count(self) -> int:
        result = self._d.cuDeviceGetCount()
        if getattr(result[0], "name", "") == "CUDA_ERROR_NO_DEVICE":
            return 0
        return int(self._ok("cuDeviceGetCount", result))

    def device(self, ordinal: int) -> Handle:
        return self._ok("cuDeviceGet", self._d.cuDeviceGet(ordinal))

    def device_name(self, device: Handle) -> str:
        name: bytes = self._ok("cuDeviceGetName", self._d.cuDeviceGetName(256, device))
        return name.split(b"\0")[0].decode()

    def device_uuid(self, device: Handle) -> bytes:
        return bytes(self._ok("cuDeviceGetUuid", self._d.cuDeviceGetUuid(device)).bytes)

    def attribute(self, device: Handle, name: str) -> int:
        """CU_DEVICE_ATTRIBUTE_`name`; 0 where the driver does not know it."""
        attribute = getattr(self._d.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if attribute is None:
            return 0
        result = self._d.cuDeviceGetAttribute(attribute, device)
        return int(result[1]) if result[0] == 0 else 0

    def total_memory(self, device: Handle) -> int:
        return int(self._ok("cuDeviceTotalMem", self._d.cuDeviceTotalMem(device)))

    def can_access_peer(self, device: Handle, peer: Handle) -> bool:
        return bool(self._ok("cuDeviceCanAccessPeer", self._d.cuDeviceCanAccessPeer(device, peer)))

    def native_peer_atomics(self, device: Handle, peer: Handle) -> bool:
        attribute = self._d.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        return bool(self._ok("cuDeviceGetP2PAttribute", self._d.cuDeviceGetP2PAttribute(attribute, device, peer)))

    def retain_context(self, device: Handle) -> Handle:
        """The device's primary context, which torch and CuPy use as well."""
        return self._ok("cuDevicePrimaryCtxRetain", self._d.cuDevicePrimaryCtxRetain(device))

    def release_context(self, device: Handle) -> None:
        self._ok("cuDevicePrimaryCtxRelease", self._d.cuDevicePrimaryCtxRelease(device))

    def current_context(self) -> int:
        return int(self._ok("cuCtxGetCurrent", self._d.cuCtxGetCurrent()))

    def set_context(self, context: Handle) -> None:
        self._ok("cuCtxSetCurrent", self._d.cuCtxSetCurrent(context))

    def push_context(self, context: Handle) -> None:
        self._ok("cuCtxPushCurrent", self._d.cuCtxPushCurrent(context))

    def pop_context(self) -> None:
        self._ok("cuCtxPopCurrent", self._d.cuCtxPopCurrent())

    def priority_range(self) -> tuple[int, int]:
        """(least, greatest); smaller numbers are greater priorities."""
        least, greatest = self._ok("cuCtxGetStreamPriorityRange", self._d.cuCtxGetStreamPriorityRange())
        return int(least), int(greatest)

    # ---------------------------------------------------------------------------------------- streams, events

    def create_stream(self, priority: int) -> Handle:
        flags = self._d.CUstream_flags.CU_STREAM_NON_BLOCKING
        return self._ok("cuStreamCreateWithPriority", self._d.cuStreamCreateWithPriority(flags, priority))

    def destroy_stream(self, stream: Handle) -> None:
        self._ok("cuStreamDestroy", self._d.cuStreamDestroy(stream))

    def stream_idle(self, stream: Handle) -> bool:
        result = self._d.cuStreamQuery(stream)
        if result[0] == 0:
            return True
        if result[0].name == "CUDA_ERROR_NOT_READY":
            return False
        raise self._error("cuStreamQuery", result[0])

    def create_event(self) -> Handle:
        return self._ok("cuEventCreate", self._d.cuEventCreate(self._d.CUevent_flags.CU_EVENT_DEFAULT))

    def destroy_event(self, event: Handle) -> None:
        self._ok("cuEventDestroy", self._d.cuEventDestroy(event))

    def record_event(self, event: Handle, stream: Handle) -> None:
        self._ok("cuEventRecord", self._d.cuEventRecord(event, stream))

    def wait_event(self, stream: Handle, event: Handle) -> None:
        self._ok("cuStreamWaitEvent", self._d.cuStreamWaitEvent(stream, event, 0))

    def elapsed_ms(self, start: Handle, end: Handle) -> float:
        return float(self._ok("cuEventElapsedTime", self._d.cuEventElapsedTime(start, end)))

    # ---------------------------------------------------------------------------------------- operations

    def copy(self, dst: int, src: int, nbytes: int, stream: Handle) -> None:
        self._ok("cuMemcpyAsync", self._d.cuMemcpyAsync(dst, src, nbytes, stream))

    def fill(self, dst: int, value: int, width: int, count: int, stream: Handle) -> None:
        """`width` is 1, 2 or 4 bytes."""
        d = self._d
        function = {1: d.cuMemsetD8Async, 2: d.cuMemsetD16Async, 4: d.cuMemsetD32Async}[width]
        self._ok("cuMemsetAsync", function(dst, value, count, stream))

    def write_value(self, stream: Handle, address: int, value: int, width: int) -> None:
        """After everything before it, with a fence at system scope."""
        d = self._d
        function = d.cuStreamWriteValue64 if width == 64 else d.cuStreamWriteValue32
        self._ok(f"cuStreamWriteValue{width}", function(stream, address, value, 0))

    def wait_value(self, stream: Handle, address: int, value: int, width: int, *, equal: bool) -> None:
        """Until word == value, or until word - value >= 0 as a signed number."""
        d = self._d
        flags = d.CUstreamWaitValue_flags
        flag = flags.CU_STREAM_WAIT_VALUE_EQ if equal else flags.CU_STREAM_WAIT_VALUE_GEQ
        function = d.cuStreamWaitValue64 if width == 64 else d.cuStreamWaitValue32
        self._ok(f"cuStreamWaitValue{width}", function(stream, address, value, flag))

    def host_function(self, stream: Handle, function: Callable[[], None], *, once: bool = True) -> int:
        """Call `function`, which must not raise, on a thread of the driver. The key is for `forget`."""
        key = next(self._keys)
        self._calls[key] = (function, once)
        try:
            code = self._launch_host(int(stream), self._trampoline, key)
            self._ok("cuLaunchHostFunc", (self._d.CUresult(code),))
        except BaseException:
            del self._calls[key]
            raise
        return key

    def forget(self, key: int) -> None:
        """A host function that is not `once` will not be called any more."""
        self._calls.pop(key, None)

    # ---------------------------------------------------------------------------------------- memory

    def create_pool(self, device: Handle, keep_bytes: int) -> Handle:
        """A pool of device memory that keeps up to `keep_bytes` of what is freed."""
        d = self._d
        props = d.CUmemPoolProps()
        props.allocType = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        props.handleTypes = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
        props.location = self._location(device)
        pool = self._ok("cuMemPoolCreate", d.cuMemPoolCreate(props))
        threshold = d.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        self._ok("cuMemPoolSetAttribute", d.cuMemPoolSetAttribute(pool, threshold, d.cuuint64_t(keep_bytes)))
        return pool

    def destroy_pool(self, pool: Handle) -> None:
        self._ok("cuMemPoolDestroy", self._d.cuMemPoolDestroy(pool))

    def trim_pool(self, pool: Handle, keep_bytes: int) -> None:
        self._ok("cuMemPoolTrimTo", self._d.cuMemPoolTrimTo(pool, keep_bytes))

    def pool_reserved(self, pool: Handle) -> int:
        """Bytes that the pool holds from the system."""
        attribute = self._d.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
        return int(self._ok("cuMemPoolGetAttribute", self._d.cuMemPoolGetAttribute(pool, attribute)))

    def set_pool_access(self, pool: Handle, devices: Sequence[Handle]) -> None:
        """Let other devices read and write what the pool holds."""
        descriptors = self._access(devices)
        self._ok("cuMemPoolSetAccess", self._d.cuMemPoolSetAccess(pool, descriptors, len(descriptors)))

    def allocate(self, pool: Handle, nbytes: int, stream: Handle) -> int:
        return int(self._ok("cuMemAllocFromPoolAsync", self._d.cuMemAllocFromPoolAsync(nbytes, pool, stream)))

    def free(self, address: int, stream: Handle) -> None:
        self._ok("cuMemFreeAsync", self._d.cuMemFreeAsync(address, stream))

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the current context's device."""
        free, total = self._ok("cuMemGetInfo", self._d.cuMemGetInfo())
        return int(free), int(total)

    def allocate_host(self, nbytes: int) -> int:
        """Pinned memory that every device sees at the same address."""
        flags = self._d.CU_MEMHOSTALLOC_PORTABLE | self._d.CU_MEMHOSTALLOC_DEVICEMAP
        return int(self._ok("cuMemHostAlloc", self._d.cuMemHostAlloc(nbytes, flags)))

    def free_host(self, address: int) -> None:
        self._ok("cuMemFreeHost", self._d.cuMemFreeHost(address))

    def register_host(self, address: int, nbytes: int) -> None:
        flags = self._d.CU_MEMHOSTREGISTER_PORTABLE | self._d.CU_MEMHOSTREGISTER_DEVICEMAP
        self._ok("cuMemHostRegister", self._d.cuMemHostRegister(address, nbytes, flags))

    def unregister_host(self, address: int) -> None:
        self._ok("cuMemHostUnregister", self._d.cuMemHostUnregister(address))

    def host_device_pointer(self, address: int) -> int:
        return int(self._ok("cuMemHostGetDevicePointer", self._d.cuMemHostGetDevicePointer(address, 0)))

    def pointer_kind(self, address: int) -> PointerKind:
        # Not by the bindings, which make two enumerations of it: every copy asks twice.
        kind = ctypes.c_uint32(0)
        code = self._pointer_attribute(ctypes.addressof(kind), self._memory_type, address)
        if code == self._invalid_value:
            return PointerKind.PAGEABLE
        if code:
            raise self._error("cuPointerGetAttribute", self._d.CUresult(code))
        if kind.value == 0:
            return PointerKind.PAGEABLE
        return PointerKind.PINNED if kind.value == self._pinned_type else PointerKind.DEVICE

    def in_pool(self, address: int) -> bool:
        """Whether the byte belongs to a memory pool: operations of streams on values refuse such memory."""
        pool = ctypes.c_uint64(0)
        # An attribute that the driver does not know, or an address without one, leaves 0.
        return self._pointer_attribute(ctypes.addressof(pool), self._in_pool, address) == 0 and pool.value != 0

    def accessible(self, address: int) -> bool:
        """Whether kernels of the current context can access the byte there."""
        attribute = self._d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        result = self._d.cuPointerGetAttribute(attribute, address)
        if result[0] == 0:
            return True
        if result[0].name == "CUDA_ERROR_INVALID_VALUE":
            return False
        raise self._error("cuPointerGetAttribute", result[0])

    # ---------------------------------------------------------------------------------------- shared memory

    def _location(self, device: Handle) -> Any:
        location = self._d.CUmemLocation()
        location.type = self._d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = int(device)
        return location

    def _access(self, devices: Sequence[Handle], is_allowed: bool = True) -> list[Any]:
        flags = self._d.CUmemAccess_flags
        descriptors = []
        for device in devices:
            descriptor = self._d.CUmemAccessDesc()
            descriptor.location = self._location(device)
            descriptor.flags = (
                flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if is_allowed else flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
            )
            descriptors.append(descriptor)
        return descriptors

    def _properties(self, device: Handle, kind: ShareKind) -> Any:
        d = self._d
        properties = d.CUmemAllocationProp()
        properties.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location(device)
        properties.requestedHandleTypes = self._handle_types[kind]
        return properties

    def granularity(self, device: Handle, kind: ShareKind) -> int:
        d = self._d
        flag = d.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        properties = self._properties(device, kind)
        return int(self._ok("cuMemGetAllocationGranularity", d.cuMemGetAllocationGranularity(properties, flag)))

    def create_memory(self, device: Handle, nbytes: int, kind: ShareKind) -> Handle:
        """Physical memory that can be exported as `kind`; a multiple of the granularity."""
        return self._ok("cuMemCreate", self._d.cuMemCreate(nbytes, self._properties(device, kind), 0))

    def release_memory(self, handle: Handle) -> None:
        self._ok("cuMemRelease", self._d.cuMemRelease(handle))

    def export_memory(self, handle: Handle, kind: ShareKind) -> int | bytes:
        """A file descriptor of ours, or the bytes of a fabric handle."""
        value = self._ok(
            "cuMemExportToShareableHandle",
            self._d.cuMemExportToShareableHandle(handle, self._handle_types[kind], 0),
        )
        return bytes(value.data) if kind is ShareKind.FABRIC else int(value)

    def import_memory(self, value: int | bytes, kind: ShareKind) -> Handle:
        """The physical memory behind a handle; a descriptor stays the caller's."""
        buffer = ctypes.create_string_buffer(value, len(value)) if isinstance(value, bytes) else None
        shared = ctypes.addressof(buffer) if buffer is not None else value
        return self._ok(
            "cuMemImportFromShareableHandle",
            self._d.cuMemImportFromShareableHandle(shared, self._handle_types[kind]),
        )

    def reserve(self, nbytes: int, alignment: int) -> int:
        return int(self._ok("cuMemAddressReserve", self._d.cuMemAddressReserve(nbytes, alignment, 0, 0)))

    def free_reservation(self, address: int, nbytes: int) -> None:
        self._ok("cuMemAddressFree", self._d.cuMemAddressFree(address, nbytes))

    def map(self, address: int, nbytes: int, handle: Handle) -> None:
        self._ok("cuMemMap", self._d.cuMemMap(address, nbytes, 0, handle, 0))

    def unmap(self, address: int, nbytes: int) -> None:
        self._ok("cuMemUnmap", self._d.cuMemUnmap(address, nbytes))

    def set_access(self, address: int, nbytes: int, devices: Sequence[Handle], *, is_allowed: bool = True) -> None:
        descriptors = self._access(devices, is_allowed)
        self._ok("cuMemSetAccess", self._d.cuMemSetAccess(address, nbytes, descriptors, len(descriptors)))

    def allocate_ipc(self, nbytes: int) -> int:
        """Memory that legacy IPC can export; its `free_ipc` may wait for running work."""
        return int(self._ok("cuMemAlloc", self._d.cuMemAlloc(nbytes)))

    def free_ipc(self, address: int) -> None:
        self._ok("cuMemFree", self._d.cuMemFree(address))

    def export_ipc(self, address: int) -> bytes:
        handle = self._ok("cuIpcGetMemHandle", self._d.cuIpcGetMemHandle(address))
        return ctypes.string_at(handle.getPtr(), 64)

    def open_ipc(self, data: bytes) -> int:
        handle = self._d.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), data, 64)
        flag = self._d.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._ok("cuIpcOpenMemHandle", self._d.cuIpcOpenMemHandle(handle, flag)))

    def close_ipc(self, address: int) -> None:
        self._ok("cuIpcCloseMemHandle", self._d.cuIpcCloseMemHandle(address))

    # ---------------------------------------------------------------------------------------- modules, launches

    def load_module(self, image: bytes) -> Handle:
        return self._ok("cuModuleLoadData", self._d.cuModuleLoadData(image))

    def unload_module(self, module: Handle) -> None:
        self._ok("cuModuleUnload", self._d.cuModuleUnload(module))

    def function(self, module: Handle, name: str) -> Handle:
        """A kernel, loaded now: under lazy loading a first launch could wait for running work."""
        function = self._ok("cuModuleGetFunction", self._d.cuModuleGetFunction(module, name.encode()))
        self._ok("cuFuncLoad", self._d.cuFuncLoad(function))
        return function

    def allow_shared_memory(self, function: Handle, nbytes: int) -> None:
        attribute = self._d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._ok("cuFuncSetAttribute", self._d.cuFuncSetAttribute(function, attribute, nbytes))

    def share_multiprocessors(self, function: Handle) -> None:
        """Multiprocessors that this kernel occupies keep room for shared memory of kernels that come later.

        How much of a multiprocessor's first-level cache is shared memory changes only while nothing runs there, and is
        by default what the first kernel needs. A kernel without shared memory that spins on all of them would keep any
        kernel that needs some from starting, and so from ending the wait.
        """
        attribute = self._d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        self._ok("cuFuncSetAttribute", self._d.cuFuncSetAttribute(function, attribute, _MOST_SHARED))

    def occupancy(self, function: Handle, threads: int, shared_bytes: int) -> int:
        """Blocks of this kernel that one multiprocessor holds."""
        return int(
            self._ok(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                self._d.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, shared_bytes),
            )
        )

    def launch(
        self, function: Handle, blocks: int, threads: int, shared_bytes: int, stream: Handle, params: int,
        cooperative: bool, overlap: bool = False,
    ) -> None:  # fmt: skip
        """`params` is the address of an array of pointers to the kernel's parameters, which are copied now. With
        `overlap` the kernel may start before the one in front of it has ended: it waits for that itself."""
        d = self._d
        if overlap:
            config = LaunchConfig(int(stream), cooperative)
            config.words[0], config.words[3], config.words[6] = blocks, threads, shared_bytes
            arguments = (ctypes.c_void_p(x) for x in (config.address, int(function), params, 0))
            result: Any = (d.CUresult(self._library.cuLaunchKernelEx(*arguments)),)
        elif cooperative:
            result = d.cuLaunchCooperativeKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, params)
        else:
            result = d.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, params, 0)
        if result[0] != 0:
            raise self._error("cuLaunchKernel", result[0])

    def entries(self) -> tuple[int, ...]:
        """Addresses of the functions that native code calls for a launch, in the order of `cuda_native.Lane`."""
        names = (
            "cuLaunchKernel", "cuLaunchCooperativeKernel", "cuStreamWriteValue64_v2", "cuCtxGetCurrent",
            "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuLaunchKernelEx",
        )  # fmt: skip
        return tuple(ctypes.cast(getattr(self._library, n), ctypes.c_void_p).value or 0 for n in names)

    def refused(self, code: int) -> CudaError:
        """The error of a launch that native code made."""
        return self._error("cuLaunchKernel", self._d.CUresult(code))

    # ---------------------------------------------------------------------------------------- graphs

    def begin_capture(self, stream: Handle) -> None:
        mode = self._d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._ok("cuStreamBeginCapture", self._d.cuStreamBeginCapture(stream, mode))

    def end_capture(self, stream: Handle) -> Handle:
        return self._ok("cuStreamEndCapture", self._d.cuStreamEndCapture(stream))

    def instantiate(self, graph: Handle) -> Handle:
        return self._ok("cuGraphInstantiate", self._d.cuGraphInstantiate(graph, 0))

    def destroy_graph(self, graph: Handle) -> None:
        self._ok("cuGraphDestroy", self._d.cuGraphDestroy(graph))

    def destroy_exec(self, graph: Handle) -> None:
        self._ok("cuGraphExecDestroy", self._d.cuGraphExecDestroy(graph))

    def launch_graph(self, graph: Handle, stream: Handle) -> None:
        self._ok("cuGraphLaunch", self._d.cuGraphLaunch(graph, stream))
