"""The cuda driver: devices, modules, launches and graphs, on the NVIDIA driver through `cuda_api.py`.

How streams complete and fail is in `cuda_stream.py`, what operations do in `cuda_ops.py`, memory in `cuda_memory.py`
and `cuda_segments.py`. Kernels come compiled. Multicast objects are made only where the user opted in (see
`cuda_multicast.py`), and no GPU's settings are changed.

Longer than most modules, because the protocol is one flat table of functions.

Where this driver differs from the protocol's letter: an operation that was enqueued before the host saw an earlier
one of its stream fail, or that is a node behind a faulted node of a graph, may have run. It is reported SKIPPED all
the same, and what it wrote counts as undefined. Loading a module waits for kernels that run, which the NVIDIA driver
does not let us avoid: load (`KernelFunction.warm_up`) before launching what waits.

Which memory operations take: copies any, pageable memory of the host through pinned blocks; fills and values memory
of a device, segments and pinned memory, else ArgumentError; an abort word may also be in shared memory of the host,
whose page is then registered.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from peertile.backends.cuda.binary import CudaBinary
from peertile.config import config
from peertile.errors import ArgumentError, DeviceFault, LaunchError, PeertileError, UnsupportedError, UsageError
from peertile.memory_model import Cmp
from peertile.runtime.driver import (
    Capabilities,
    Driver,
    DriverDevice,
    DriverKind,
    EventHandle,
    FaultRecord,
    GraphExecHandle,
    GraphHandle,
    Grid,
    LaunchOptions,
    LoadableBinary,
    MemoryStats,
    ModuleHandle,
    Pages,
    PreparedLaunch,
    SegmentHandle,
    ShareHandle,
    ShareKind,
    Status,
    StreamHandle,
    Ticket,
    cannot_share,
    check_fill,
)
from peertile.runtime.drivers.cuda_api import CudaApi, CudaError, PointerKind
from peertile.runtime.drivers.cuda_feeder import Feeder
from peertile.runtime.drivers.cuda_graph import CudaGraph, CudaGraphExec, LaunchGraph
from peertile.runtime.drivers.cuda_handles import as_own, check_word, ran
from peertile.runtime.drivers.cuda_launches import MAX_PROGRAMS, CudaLaunch
from peertile.runtime.drivers.cuda_links import links
from peertile.runtime.drivers.cuda_memory import Heap, Pinned, SideStream
from peertile.runtime.drivers.cuda_multicast import MulticastCalls, MulticastObjects, consent_refusal
from peertile.runtime.drivers.cuda_native import CLOSELY, LONG_WAY, Native, native
from peertile.runtime.drivers.cuda_ops import (
    MAX_NS,
    CallBack,
    CopyIn,
    CopyOut,
    CudaEvent,
    CudaModule,
    DeviceCopy,
    Fill,
    HostCopy,
    Launch,
    Nothing,
    Record,
    RecordEvent,
    WaitEvent,
    WaitWord,
    WriteValue,
)
from peertile.runtime.drivers.cuda_pages import CudaPages
from peertile.runtime.drivers.cuda_peers import HostPages, SharedModules
from peertile.runtime.drivers.cuda_probe import capabilities_of, identity_of
from peertile.runtime.drivers.cuda_ptx import NAMES, PTX
from peertile.runtime.drivers.cuda_pump import Pump
from peertile.runtime.drivers.cuda_segments import CudaSegment, Segments
from peertile.runtime.drivers.cuda_stream import LOOK_MASK, CudaStream, Op, Params
from peertile.runtime.drivers.forked import ForkGuard
from peertile.runtime.linking import Links

__all__ = ["CudaDevice", "CudaDriver"]

_CHUNK: Final = 64 << 20  # longest piece that is staged at once
_SPIN_NS: Final = 100_000
_LONG_SPIN_NS: Final = 2_000_000
_SPIN_PIECE_NS: Final = 20_000
_HEALTH_NS: Final = 2_000_000
_CLOCK_NS: Final = 100_000_000
"""A look at the device's clock takes 10 us where the device has room for one more thread."""


def _refuse(stream: Any, prepared: Any, args: bytes) -> int:
    """Where there are no links."""
    return 0


_segments: Final = Segments()
_pages: Final = HostPages()
_modules: Final = SharedModules()
_guard: Final[ForkGuard[CudaDevice]] = ForkGuard()
_numbers: Final = itertools.count(1)


class _Using:
    """The device's context is current inside, and errors of the NVIDIA driver leave as ours."""

    __slots__ = ("_device", "_pushed")

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def __enter__(self) -> CudaApi:
        device = self._device
        device.enter()
        api = device.api
        try:
            self._pushed = api.current_context() != device.context_number
            if self._pushed:
                api.push_context(device.context)
        except CudaError as error:
            raise device.failed_call(error) from error
        return api

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._pushed:
            self._device.api.pop_context()
        if isinstance(error, CudaError):
            raise self._device.failed_call(error) from error


class CudaDevice(DriverDevice):
    """One GPU, through its primary context; see DriverDevice for what each function means."""

    kind = DriverKind.CUDA

    def __init__(self, api: CudaApi, ordinal: int, *, memory_limit: int | None, launch_blocking: bool) -> None:
        self.api = api
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        self.lost: DeviceFault | None = None
        self._launch_blocking = launch_blocking
        self._closed = False
        self._lock = threading.Lock()  # protects the lists of streams and host pages
        self._streams: list[CudaStream] = []
        self._words: dict[int, int] = {}  # abort word of the host -> its address on the device
        self._sharers = 1  # ranks of this process on this GPU: programs that wait have to fit beside theirs
        self._events: deque[Any] = deque()
        self._capture_lock = threading.Lock()  # held while a graph is made on `_capture`
        self._health_ns = 0
        self.native: Native = native()
        self._enqueue = self.native.launch
        self._push: Callable[[Any, Any, bytes], int] = _refuse
        self._links: Links | None = None
        self._has_links = False
        self.feeder = Feeder(self.native, self.name)
        self._reserved = 0
        self.handle = api.device(ordinal)
        self.context = api.retain_context(self.handle)
        self.context_number = int(self.context)
        with _Using(self):
            self.capabilities: Capabilities = capabilities_of(api, self.handle)
            greatest = self.capabilities.stream_priorities[1]
            limit = memory_limit or self.capabilities.memory_bytes
            self.side = SideStream(api, greatest)
            mapped = ShareKind.FD in self.capabilities.shares
            self.heap = Heap(api, self.handle, self.side, limit, self.name, mapped=mapped)
            self.pinned = Pinned(api)
            self.zero_word = self.heap.take(64)
            api.fill(self.zero_word, 0, 4, 16, self.side.cu)
            self.side.settle()
            self._capture = api.create_stream(0)
            module = api.load_module(PTX.encode() + b"\0")
            self.kernels = {name: api.function(module, name) for name in NAMES}
            api.share_multiprocessors(self.kernels["peertile_wait"])
            self.pump = Pump(self, api, greatest)
            self._capability = (
                api.attribute(self.handle, "COMPUTE_CAPABILITY_MAJOR"),
                api.attribute(self.handle, "COMPUTE_CAPABILITY_MINOR"),
            )
            self.arch = "sm_{}{}".format(*self._capability)
            """What kernels are compiled for."""
            self._max_shared = api.attribute(self.handle, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.default_share = self.capabilities.shares[0]
        self._meet_peers()
        _guard.devices.add(self)

    def _meet_peers(self) -> None:
        """Copies between the devices of this process need each to reach the other's pool."""
        for other in list(_guard.devices):
            if other._closed or other.lost is not None or other.ordinal == self.ordinal:
                continue
            with _Using(self) as api:
                both = ((self.handle, other.handle), (other.handle, self.handle))
                if all(api.can_access_peer(*pair) for pair in both):
                    self.heap.grant(other.handle)
                    other.heap.grant(self.handle)

    @property
    def identity(self) -> str:
        return identity_of(self.api, self.handle)

    # ------------------------------------------------------------------------------------------------ inside

    def enter(self) -> None:
        """Every call that may reach the GPU starts here: not in a host function, not after close, not once lost."""
        self._outside_callbacks()
        if self.lost is not None:
            raise DeviceFault(self.lost.message)

    def _outside_callbacks(self) -> None:
        threads = self.api.host_threads
        if threads and threading.get_ident() in threads:
            raise UsageError(
                "driver: expected a call from outside host callbacks, got a runtime call inside a completion "
                "callback; hand the work to another thread"
            )
        if self._closed:
            raise UsageError(f"driver: expected an open device, got {self.name}, which was closed")

    def translate(self, error: CudaError | PeertileError) -> PeertileError:
        """Our error for a refused call of the NVIDIA driver."""
        if isinstance(error, PeertileError):
            return error
        if error.out_of_memory:
            return LaunchError(f"{self.name}: the device has no memory for {error.call}; free some tensors ({error})")
        return LaunchError(f"{self.name}: {error}")

    def failed_call(self, error: CudaError) -> PeertileError:
        """The same; after an error that ends the context, the device is lost."""
        if not error.sticky:
            return self.translate(error)
        names = [name for s in list(self._streams) if (name := s.names_under_way()) is not None]
        where = f"; it was in {' or '.join(names[:4])}" if names else ""
        self.lose(
            DeviceFault(
                f"{self.name} is lost: {error.text} ({error.name}){where}. Nothing runs on it any more in this "
                "process; end the process and start again",
                op=names[0] if names else None,
            )
        )
        assert self.lost is not None
        return self.lost

    def lose(self, error: DeviceFault) -> None:
        """Nothing runs any more: what has not completed by now fails with `error`."""
        if self.lost is None:
            self.lost = error
        for stream in list(self._streams):
            stream.lose(self.lost)

    def _check_health(self) -> None:
        """Ask the NVIDIA driver, now and then, whether the context still lives: a lost one completes nothing."""
        now = time.monotonic_ns()
        if now - self._health_ns < _HEALTH_NS:
            return
        self._health_ns = now
        if self.lost is None:
            with contextlib.suppress(PeertileError), _Using(self) as api:
                api.stream_idle(self.side.cu)

    def busy(self) -> bool:
        """Whether work is pending; False for a device that is closed or lost."""
        if self._closed or self.lost is not None:
            return False
        return any(not s.done(s.submitted) for s in list(self._streams))

    def zero(self, address: int, nbytes: int) -> None:
        """Clear memory, beside all streams."""
        with self.side.lock:
            self.api.fill(address, 0, 1, nbytes, self.side.cu)
            self.side.settle()

    def event_handle(self) -> Any:
        return self._events.popleft() if self._events else self.api.create_event()

    def _submit(self, stream: StreamHandle, op: Op, *, awaited: bool = False) -> Ticket:
        own = as_own(stream, CudaStream, "stream")
        with _Using(self):
            return own.submit(op, awaited=awaited)

    def close(self) -> None:
        self._outside_callbacks()
        if self.lost is None:
            with _Using(self) as api:
                for stream in self._streams:
                    if not stream.done(stream.submitted):
                        stream.want(stream.submitted)
                        if not self._soon(stream):
                            raise LaunchError(
                                f"{self.name}: cannot close while operations are pending; sync its streams first"
                            )
                self.pump.stop()
                self.feeder.stop()
                _segments.leave(self)
                self.heap.settle()
                for stream in self._streams:
                    if not stream.closed:
                        stream.close()
                while self._events:
                    api.destroy_event(self._events.popleft())
                self._closed = True
                for own in (self.side.cu, self._capture):
                    api.destroy_stream(own)
                _pages.leave(self)
                _modules.leave(self)
                self.pinned.release()
                self.heap.release()
            self.api.release_context(self.handle)
        self._closed = True

    @staticmethod
    def _soon(stream: CudaStream) -> bool:
        """Whether an idle stream's last marker arrives: it may have been asked for only now."""
        end = time.monotonic() + 0.005
        while time.monotonic() < end:
            if stream.done(stream.submitted):
                return True
            time.sleep(1e-5)
        return False

    # ------------------------------------------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> int:
        with _Using(self):
            return self.heap.allocate(nbytes)

    def free(self, address: int) -> None:
        if not self._closed and self.lost is None:
            self.heap.free(address)

    def accessible(self, address: int, nbytes: int) -> bool:
        """The first and the last byte are asked about: what lies between them is one allocation in practice."""
        with _Using(self) as api:
            return api.accessible(address) and (nbytes <= 1 or api.accessible(address + nbytes - 1))

    def allocate_host(self, nbytes: int) -> int:
        """Address of pinned memory of the host, which the device sees at the same address: for words that both
        look at, and for copies without staging. Beyond the protocol."""
        with _Using(self):
            return self.pinned.take(nbytes)

    def free_host(self, address: int) -> None:
        """Give back what `allocate_host` gave; from anywhere, as `free`."""
        if not self._closed and self.lost is None:
            self.pinned.give(address)

    def memory_stats(self) -> MemoryStats:
        if self.lost is not None:
            return self.heap.stats(lambda: self._reserved)
        with _Using(self):
            self.heap.settle()
            self._reserved = self.heap.reserved()
            return self.heap.stats(lambda: self._reserved)

    # ---------------------------------------------------------------------------------------------- segments

    def create_segment(self, nbytes: int, kind: ShareKind | None = None) -> tuple[SegmentHandle, int]:
        """`kind` chooses how the segment can be shared; UnsupportedError where the device cannot. The default is
        `default_share`."""
        kind = kind or self.default_share
        if kind not in self.capabilities.shares:
            raise cannot_share("segment", self.name, kind, self.capabilities.shares)
        with _Using(self):
            segment = _segments.create(self, nbytes, kind)
            return segment, segment.address

    def create_shared(self, nbytes: int, kind: ShareKind) -> tuple[SegmentHandle, int]:
        return self.create_segment(nbytes, kind)

    def pages(self) -> Pages | str:
        if not any(kind in self.capabilities.shares for kind in (ShareKind.FD, ShareKind.FABRIC)):
            return f"{self.name} has no virtual memory management"
        return CudaPages(lambda: _Using(self), self.handle, self.name)

    def multicast_objects(self) -> MulticastObjects | str:
        refusal = consent_refusal(config())
        if refusal is not None:
            return refusal
        objects = MulticastObjects(MulticastCalls(), lambda: _Using(self), self.handle)
        return objects.refusal() or objects

    def enter_group(self, abort_address: int, sharers: int) -> None:
        self._word_address(abort_address)
        self._sharers = max(sharers, self._sharers)

    def export_segment(self, segment: SegmentHandle) -> ShareHandle:
        with _Using(self):
            return _segments.export(as_own(segment, CudaSegment, "segment"))

    def import_segment(self, share: ShareHandle) -> SegmentHandle:
        with _Using(self):
            return _segments.import_(self, share)

    def map_segment(self, segment: SegmentHandle) -> int:
        with _Using(self):
            return _segments.map(as_own(segment, CudaSegment, "segment"))

    def unmap_segment(self, segment: SegmentHandle) -> None:
        with _Using(self):
            _segments.unmap(as_own(segment, CudaSegment, "segment"))

    def free_segment(self, segment: SegmentHandle) -> None:
        """While work is running the memory is let go of later: unmapping could wait for that work."""
        with _Using(self):
            _segments.free(as_own(segment, CudaSegment, "segment"))

    # --------------------------------------------------------------------------------------- streams, events

    def create_stream(self, priority: int = 0) -> StreamHandle:
        least, greatest = self.capabilities.stream_priorities
        if not greatest <= priority <= least:
            raise ArgumentError(f"priority: expected {greatest} (greatest) to {least} (least), got {priority}")
        with _Using(self):
            stream = CudaStream(self, priority, next(_numbers))
        with self._lock:
            self._streams.append(stream)
        return stream

    def destroy_stream(self, stream: StreamHandle) -> None:
        with _Using(self):
            as_own(stream, CudaStream, "stream").close()

    def last_ticket(self, stream: StreamHandle) -> Ticket:
        self._outside_callbacks()
        own = as_own(stream, CudaStream, "stream")
        with own.lock:
            return Ticket(own, own.submitted, own.name)

    def create_event(self) -> EventHandle:
        self._outside_callbacks()
        return CudaEvent()

    def destroy_event(self, event: EventHandle) -> None:
        self._outside_callbacks()
        as_own(event, CudaEvent, "event").record = None

    def record_event(self, stream: StreamHandle, event: EventHandle) -> Ticket:
        own, queue = as_own(event, CudaEvent, "event"), as_own(stream, CudaStream, "stream")
        if queue.capture is not None:
            raise UsageError("record_event: expected a stream that runs, got one that is being captured")
        with _Using(self), queue.lock:
            record = Record(queue, self.event_handle(), self._events)
            ticket = queue.submit(RecordEvent(record))
            record.sequence = ticket.sequence
        own.record = record
        return ticket

    def wait_event(self, stream: StreamHandle, event: EventHandle) -> Ticket:
        record = self._record(event)
        if as_own(stream, CudaStream, "stream").capture is not None:
            raise UsageError("wait_event: expected a stream that runs, got one that is being captured")
        return self._submit(stream, WaitEvent(record))

    def event_ticket(self, event: EventHandle) -> Ticket:
        record = self._record(event)
        return Ticket(record.stream, record.sequence, "event record")

    def _record(self, event: EventHandle) -> Record:
        self._outside_callbacks()
        record = as_own(event, CudaEvent, "event").record
        if record is None:
            raise UsageError("event: expected an event that was recorded, got one never recorded; record it first")
        return record

    def elapsed_ns(self, start: EventHandle, end: EventHandle) -> int:
        records = []
        for role, event in (("start", start), ("end", end)):
            record = self._record(event)
            if self.query(self.event_ticket(event)) is Status.PENDING:
                raise UsageError(f"{role}: expected an event that has run, got one still pending; wait for it first")
            records.append(record)
        with _Using(self) as api:
            return round(api.elapsed_ms(records[0].cu, records[1].cu) * 1e6)

    def read_clock(self) -> tuple[int, int, int] | None:
        with _Using(self) as api, self.side.lock:
            address = self.pinned.take(8)
            word = ctypes.c_uint64.from_address(address)
            word.value = 0
            params = Params()
            before = time.monotonic_ns()
            api.launch(self.kernels["peertile_clock"], 1, 1, 0, self.side.cu, params.pack(address), False)
            end = before + _CLOCK_NS
            while not word.value and time.monotonic_ns() < end:
                pass  # its time is what is asked for
            after = time.monotonic_ns()
            device = word.value
            if not device:  # programs that wait, perhaps for this rank, have all of it: the word is still to come
                return None
            self.pinned.give(address)
        return before, device, after

    # --------------------------------------------------------------------------------------------- completion

    def query(self, ticket: Ticket) -> Status:
        self._outside_callbacks()
        stream, sequence = ran(ticket), ticket.sequence
        if not stream.done(sequence):
            if sequence > stream.marked and self.lost is None:
                with _Using(self):
                    stream.want(sequence)
            self._check_health()
            if not stream.done(sequence):
                return Status.PENDING
        return stream.status(sequence)

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> Status:
        status = self.query(ticket)
        if status is not Status.PENDING:
            return status
        stream, sequence = ran(ticket), ticket.sequence
        start = time.monotonic_ns()
        end = None if timeout_s is None else start + int(timeout_s * 1e9)
        # Without the interpreter lock, which host functions need. As long as it takes many a graph, where a processor
        # can be spared: a thread that sleeps wakes up some 60 us late.
        longest = _LONG_SPIN_NS if self.feeder.serves else _SPIN_NS
        piece = _SPIN_PIECE_NS if end is None else max(min(_SPIN_PIECE_NS, end - start), 0)
        while True:
            self.native.spin(stream.lane_address, sequence, piece)
            if stream.done(sequence):
                return stream.status(sequence)
            now = time.monotonic_ns()
            if end is not None and now >= end:
                return Status.PENDING
            if stream.marked < sequence <= stream.issued and self.lost is None:
                self.query(ticket)
            if now - start > longest:
                piece = 0
                self._check_health()
                # Late by a sixteenth of the wait at most; never long, so that Ctrl-C is seen.
                pause = min((now - start) / 16e9, 1e-3)
                time.sleep(pause if end is None else min(pause, (end - now) / 1e9))

    def fault(self, ticket: Ticket) -> FaultRecord | None:
        self._outside_callbacks()
        return ran(ticket).fault(ticket.sequence, ticket.name)

    def take_fault(self, stream: StreamHandle) -> FaultRecord | None:
        self._outside_callbacks()
        return as_own(stream, CudaStream, "stream").take_fault()

    # --------------------------------------------------------------------------------------------- operations

    def copy(
        self, stream: StreamHandle, dst: int, src: int, nbytes: int, *, name: str = "copy", on_caller: bool = False
    ) -> Ticket:
        """Pageable memory of the host goes through pinned blocks. Pinning it is faster."""
        if nbytes < 0:
            raise ArgumentError(f"nbytes: expected an integer >= 0, got {nbytes}")
        own = as_own(stream, CudaStream, "stream")
        with _Using(self) as api:
            if nbytes == 0:
                return own.submit(Nothing(name))
            kinds = api.pointer_kind(dst), api.pointer_kind(src)
            if PointerKind.PAGEABLE not in kinds:
                return own.submit(DeviceCopy(name, dst, src, nbytes))
            if PointerKind.DEVICE not in kinds:
                return own.submit(HostCopy(name, dst, src, nbytes))
            make = CopyOut if kinds[0] is PointerKind.PAGEABLE else CopyIn
            if nbytes <= _CHUNK:
                return own.submit(make(name, dst, src, nbytes))
            # An idle stream surely goes on, so that two blocks are enough; else all has to be staged at once.
            alone = own.capture is None and own.done(own.submitted)
            tickets: list[Ticket] = []
            for at in range(0, nbytes, _CHUNK):
                tickets.append(own.submit(make(name, dst + at, src + at, min(_CHUNK, nbytes - at))))
                if alone and len(tickets) > 1:
                    self.wait(tickets[-2])
            return tickets[-1]

    def fill(
        self,
        stream: StreamHandle,
        dst: int,
        pattern: int,
        width: int,
        count: int,
        *,
        name: str = "fill",
        on_caller: bool = False,
    ) -> Ticket:
        check_fill(width, count)
        if count == 0:
            return self._submit(stream, Nothing(name))
        self._place("dst", dst, "fill an array of the host there, or allocate_host")
        return self._submit(stream, Fill(name, dst, pattern, width, count))

    def write_value(
        self, stream: StreamHandle, address: int, value: int, width: int, *, name: str = "write_value"
    ) -> Ticket:
        check_word(address, width)
        by_kernel = self._by_kernel(address)
        return self._submit(stream, WriteValue(name, address, value, width, by_kernel=by_kernel))

    def wait_value(
        self,
        stream: StreamHandle,
        address: int,
        value: int,
        width: int,
        cmp: Cmp,
        *,
        timeout_ns: int,
        signed: bool = False,
        abort_address: int = 0,
        name: str = "wait_value",
    ) -> Ticket:
        check_word(address, width)
        abort = self._word_address(abort_address) if abort_address else 0
        by_kernel = self._by_kernel(address)
        return self._submit(
            stream,
            WaitWord(name, address, value, width, cmp, timeout_ns, abort, signed=signed, by_kernel=by_kernel),
        )

    def _place(self, role: str, address: int, instead: str) -> None:
        """ArgumentError for pageable memory of the host, which only copies take (staged through pinned blocks)."""
        with _Using(self) as api:
            if api.pointer_kind(address) is PointerKind.PAGEABLE:
                raise ArgumentError(
                    f"{role}: expected memory of a device, a segment, or pinned memory of the host, got {address:#x}, "
                    f"which is pageable or nobody's; {instead}"
                )

    def _by_kernel(self, address: int) -> bool:
        """Whether a kernel has to read or write the word: streams refuse memory of pools, which `allocate` gives.
        Words of segments and pinned words are read and written by the stream itself."""
        self._place("address", address, "put the word into memory of the device or of allocate_host")
        with _Using(self) as api:
            return api.in_pool(address)

    def _word_address(self, address: int) -> int:
        """Where the device sees a word that may be in shared memory of the host, which is then registered."""
        known = self._words.get(address)
        if known is None:
            with _Using(self):
                known = self._words[address] = _pages.take(self, address)
        return known

    def callback(self, stream: StreamHandle, function: Callable[[], None], *, name: str = "callback") -> Ticket:
        return self._submit(stream, CallBack(name, function))

    # ------------------------------------------------------------------------------------------------ modules

    def load_module(self, binary: LoadableBinary) -> ModuleHandle:
        if not isinstance(binary, CudaBinary):
            raise ArgumentError(f"binary: expected one for cuda, got one for {binary.target}")
        self._check_arch(binary)
        if binary.shared_bytes > self._max_shared:
            raise LaunchError(
                f"{binary.entry}: its programs need {binary.shared_bytes} bytes of shared memory, {self.name} has "
                f"{self._max_shared} for each; use smaller tiles or fewer stages"
            )
        with _Using(self) as api:
            try:
                module, function = _modules.load(self, binary.payload, binary.entry)
            except CudaError as error:
                if error.name != "CUDA_ERROR_NO_BINARY_FOR_GPU":
                    raise
                raise self._wrong_arch(binary) from error
            if binary.shared_bytes > 0:
                api.allow_shared_memory(function, binary.shared_bytes)
            if binary.waits:
                api.share_multiprocessors(function)
            blocks = api.occupancy(function, binary.threads, binary.shared_bytes)
        return CudaModule(
            module, function, binary.entry, binary.threads, binary.shared_bytes, binary.layout,
            waits=binary.waits, limit=blocks * self.capabilities.executors, overlap=binary.overlap,
            tells=binary.tells,
        )  # fmt: skip

    def _check_arch(self, binary: CudaBinary) -> None:
        arch = binary.target.partition(":sm_")[2].removesuffix("a")
        if arch and not (int(arch[:-1]) == self._capability[0] and int(arch[-1]) <= self._capability[1]):
            raise self._wrong_arch(binary)

    def _wrong_arch(self, binary: CudaBinary) -> UnsupportedError:
        major, minor = self._capability
        return UnsupportedError(
            f"binary: {binary.entry} was compiled for {binary.target}, and {self.name} is an sm_{major}{minor}; "
            f"compile it for sm_{major}{minor}"
        )

    def unload_module(self, module: ModuleHandle) -> None:
        own = as_own(module, CudaModule, "module")
        with _Using(self):
            if own.module is not None:
                _modules.unload(self, own.module)
                own.module = own.function = None

    def held_up(self) -> str:
        """What else of this process may have kept a wait from ending."""
        return _modules.held_up()

    def max_resident(self, module: ModuleHandle) -> int:
        self._outside_callbacks()
        return as_own(module, CudaModule, "module").limit // self._sharers

    # ----------------------------------------------------------------------------------------------- launches

    def _launch_op(self, module: ModuleHandle, grid: Grid, args: bytes, options: LaunchOptions) -> Op:
        kernel = as_own(module, CudaModule, "module")
        n0, n1, n2 = grid
        if n0 < 0 or n1 < 0 or n2 < 0:
            raise ArgumentError(f"grid of {options.name}: expected three integers >= 0, got {grid}")
        programs = n0 * n1 * n2
        if kernel.waits or options.cooperative:
            self._check_waiting(kernel, programs, options)
        if programs == 0:
            return Nothing(options.name)
        if programs > MAX_PROGRAMS:
            raise LaunchError(f"{options.name}: a launch has at most {MAX_PROGRAMS} programs, got {programs}")
        if kernel.layout.extents and not kernel.layout.fits(args):
            raise LaunchError(
                f"{options.name}: its bulk copies take extents of 0 to 2^31 - 1 and strides up to 2^36; compile it "
                "without descriptors for these tensors"
            )
        abort = self._word_address(options.abort_address) if options.abort_address else self.zero_word
        return Launch(kernel, grid, programs, args, options, abort)

    def _check_waiting(self, kernel: CudaModule, programs: int, options: LaunchOptions) -> None:
        limit = kernel.limit // self._sharers
        if programs > limit:
            among = "" if self._sharers == 1 else f" for each of the {self._sharers} ranks of this process on it"
            raise LaunchError(
                f"{options.name}: its {programs} programs wait for each other and must be resident at once, "
                f"{self.name} holds {limit} of them{among}; use a grid of at most {limit} programs"
            )
        if self._launch_blocking:
            raise LaunchError(
                f"{options.name}: it waits, and with CUDA_LAUNCH_BLOCKING=1 its launch would not return before what "
                "it waits for is launched; unset that variable"
            )

    def launch(
        self,
        stream: StreamHandle,
        module: ModuleHandle,
        grid: Grid,
        args: bytes,
        options: LaunchOptions,
        *,
        on_caller: bool = False,
    ) -> Ticket:
        return self._submit(stream, self._launch_op(module, grid, args, options), awaited=on_caller)

    def launch_sync(
        self, stream: StreamHandle, module: ModuleHandle, grid: Grid, args: bytes, options: LaunchOptions
    ) -> FaultRecord | None:
        return self.run_prepared(stream, self.prepare_launch(module, grid, options), args)

    def prepare_launch(self, module: ModuleHandle, grid: Grid, options: LaunchOptions) -> CudaLaunch:
        kernel = as_own(module, CudaModule, "module")
        if kernel.function is None:
            raise UsageError(f"{options.name}: expected a loaded module, got one that was unloaded")
        self._make_links()
        abort = self._word_address(options.abort_address) if options.abort_address else self.zero_word
        resident = kernel.limit // self._sharers
        timeout = min(options.wait_timeout_ns, MAX_NS)
        return CudaLaunch(kernel, grid, options, abort, timeout, resident, blocking=self._launch_blocking)

    def launch_prepared(self, stream: StreamHandle, prepared: PreparedLaunch, args: bytes) -> Ticket:
        return Ticket(stream, self.enqueue(stream, prepared, args), prepared.options.name)

    @property
    def links(self) -> Links | None:
        return self._links

    def _make_links(self) -> None:
        """When a launch is made ready for the first time, not when the device is opened."""
        if not self._has_links:
            self._has_links = True
            self._links = own = links(self.native)
            if own is not None and self.feeder.serves:  # it makes what they post
                self._push = own.push

    def linked(self, stream: StreamHandle) -> None:
        as_own(stream, CudaStream, "stream").linked()

    def enqueue(self, stream: StreamHandle, prepared: PreparedLaunch, args: bytes) -> int:
        sequence = self._push(stream, prepared, args)
        if sequence:
            if sequence >= CLOSELY or not sequence & LOOK_MASK:
                self.linked(stream)
            return sequence & (CLOSELY - 1)
        # The one path whose cost counts in nanoseconds. What forbids native code to launch on a stream, a lost device
        # for instance, shuts the stream's gate; the long way does it then, or says what is wrong.
        if type(stream) is CudaStream and type(prepared) is CudaLaunch and prepared.plain and not self.api.host_threads:
            with stream.lock:
                run = stream.run
                if run is not None:
                    sequence = self._enqueue(stream.lane_address, prepared.address, args, 0)
                    if 0 < sequence < CLOSELY and sequence & LOOK_MASK:
                        run.ops.append(prepared)
                        stream.name = prepared.name
                        return sequence
                else:
                    sequence = LONG_WAY
                try:
                    sequence = stream.launched(sequence, prepared, args, self._enqueue)
                except CudaError as error:
                    raise self.failed_call(error) from error
                if sequence:
                    return sequence
        return self.launch(stream, prepared.module, prepared.grid, args, prepared.options).sequence

    def launch_many(self, stream: StreamHandle, launches: Sequence[tuple[PreparedLaunch, bytes]]) -> Sequence[int]:
        numbers: list[int] = []
        natively = type(stream) is CudaStream and not self.api.host_threads
        for launch, _ in launches:
            natively = natively and type(launch) is CudaLaunch and launch.plain
        while len(numbers) < len(launches):
            rest: Any = launches[len(numbers) :] if numbers else launches
            made = 0
            if natively:
                assert isinstance(stream, CudaStream)
                try:
                    first, made = stream.launch_chain(rest, self.native.chain)
                except CudaError as error:
                    raise self.failed_call(error) from error
                numbers += range(first, first + made)
            if made < len(rest):  # the next one takes the long way, which makes room for those behind it
                launch, args = rest[made]
                ticket = self.launch(stream, launch.module, launch.grid, args, launch.options)
                numbers.append(ticket.sequence)
        return numbers

    def run_prepared(self, stream: StreamHandle, prepared: PreparedLaunch, args: bytes) -> FaultRecord | None:
        assert isinstance(stream, CudaStream)
        own = stream
        if own.capture is not None:
            raise UsageError(f"{prepared.options.name}: expected a stream that runs, got one that is being captured")
        sequence = 0
        if type(prepared) is CudaLaunch and prepared.plain and not self.api.host_threads:
            try:
                sequence = own.launch(prepared, args, self.native.run, _SPIN_NS)
            except CudaError as error:
                raise self.failed_call(error) from error
        if sequence:
            if own.settle_last(sequence) or (own.done(sequence) and not own.spans):
                return None
            ticket = Ticket(own, sequence, prepared.options.name)
        else:
            ticket = self.launch(stream, prepared.module, prepared.grid, args, prepared.options, on_caller=True)
        if self.wait(ticket) is Status.DONE:
            return None
        record = own.fault(ticket.sequence, ticket.name)
        own.take_fault()
        return record

    def completed(self, stream: StreamHandle) -> int:
        assert isinstance(stream, CudaStream)
        stream.look()
        return stream.settled

    def is_sound(self, stream: StreamHandle, sequence: int) -> bool:
        return type(stream) is CudaStream and sequence <= stream.settled and not stream.spans

    # ------------------------------------------------------------------------------------------------- graphs

    def begin_capture(self, stream: StreamHandle) -> None:
        self._outside_callbacks()
        queue = as_own(stream, CudaStream, "stream")
        with queue.lock:
            queue.usable()
            if queue.capture is not None:
                raise UsageError("begin_capture: expected a stream that is not being captured, got one that is")
            queue.capture = []
            queue.gate()

    def end_capture(self, stream: StreamHandle) -> GraphHandle:
        self._outside_callbacks()
        queue = as_own(stream, CudaStream, "stream")
        with queue.lock:
            if queue.capture is None:
                raise UsageError("end_capture: expected a stream that is being captured, got one that is not")
            nodes, queue.capture = tuple(queue.capture), None
            queue.gate()
        return CudaGraph(nodes)

    def instantiate(self, graph: GraphHandle) -> GraphExecHandle:
        nodes = as_own(graph, CudaGraph, "graph").nodes
        with _Using(self), self._capture_lock:
            return CudaGraphExec(self, nodes, self._capture)

    def destroy_graph(self, graph: GraphExecHandle) -> None:
        own = as_own(graph, CudaGraphExec, "graph")
        with _Using(self):
            if own.live:
                own.destroy()

    def launch_graph(
        self, stream: StreamHandle, graph: GraphExecHandle, *, name: str = "graph", on_caller: bool = False
    ) -> Ticket:
        own, queue = as_own(graph, CudaGraphExec, "graph"), as_own(stream, CudaStream, "stream")
        if not own.live:
            raise UsageError("graph: expected a live graph, got one that was destroyed")
        if queue.capture is not None:
            raise UsageError("launch_graph: expected a stream that runs, got one that is being captured")
        return self._submit(queue, LaunchGraph(name, own), awaited=on_caller)


class CudaDriver(Driver):
    """Opens the GPUs that the process may see. `memory_limit` bounds what `allocate` gives out.

    UnsupportedError where the NVIDIA driver or the Python package is missing.
    """

    kind = DriverKind.CUDA

    def __init__(self, *, memory_limit: int | None = None, api: CudaApi | None = None) -> None:
        _guard.check()
        self._api = api or CudaApi()
        self._memory_limit = memory_limit
        # A variable of CUDA's own, which its driver reads when it is initialised.
        self._launch_blocking = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"

    def device_count(self) -> int:
        _guard.check()
        return self._api.device_count()

    def open(self, ordinal: int = 0) -> DriverDevice:
        count = self.device_count()
        if not 0 <= ordinal < count:
            raise ArgumentError(f"ordinal: expected 0 to {count - 1}, got {ordinal}")
        return CudaDevice(self._api, ordinal, memory_limit=self._memory_limit, launch_blocking=self._launch_blocking)
