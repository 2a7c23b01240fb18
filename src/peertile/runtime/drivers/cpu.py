"""The cpu driver: devices, modules, launches and graphs. Native code is in `cpu_native.py`, memory in
`cpu_memory.py`, streams in `cpu_stream.py`; kernels come compiled.

Longer than most modules, because the protocol is one flat table of functions.

A device is memory of this process and threads that run programs. The thread that waits for an operation runs it
itself when nobody does, so a launch that is waited for at once costs one native call.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final

from peertile.backends.cpu import jit
from peertile.config import config
from peertile.errors import ArgumentError, LaunchError, UsageError
from peertile.memory_model import Cmp
from peertile.runtime.driver import (
    HOST_WAIT_SLICE_NS,
    PRINT_HEADER_BYTES,
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
    PrintSink,
    SegmentHandle,
    ShareHandle,
    ShareKind,
    Status,
    StreamHandle,
    Ticket,
    check_fill,
    print_records,
)
from peertile.runtime.drivers.cpu_handles import (
    CpuEvent,
    CpuGraph,
    CpuGraphExec,
    CpuModule,
    as_own,
    check_word,
    operation,
)
from peertile.runtime.drivers.cpu_layout import (
    CACHE_LINE,
    CPU_WORDS,
    DEVICE_BYTES,
    EXECUTOR_BYTES,
    JOBS,
    MAX_RESIDENT,
    C,
    Dev,
    Exec,
    Kind,
    Mod,
    Result,
    S,
)
from peertile.runtime.drivers.cpu_library import Native, native
from peertile.runtime.drivers.cpu_maps import is_mapped
from peertile.runtime.drivers.cpu_memory import Heap, Segment, Segments, map_anonymous, physical_bytes
from peertile.runtime.drivers.cpu_pages import CpuPages
from peertile.runtime.drivers.cpu_stream import (
    INLINE_ARGS,
    Arenas,
    CpuLaunch,
    CpuStream,
    Operation,
    PythonWork,
    callback_threads,
    pack,
    streams_by_address,
    words_at,
)
from peertile.runtime.drivers.cpu_stream import (
    signed as to_signed,
)
from peertile.runtime.drivers.forked import ForkGuard

__all__ = ["CpuDevice", "CpuDriver"]

_MAX_NS: Final = 1 << 61  # as good as for ever, and no sum with the clock overflows
_FRAMES_LIMIT: Final = 4 << 30
_PRINT_BYTES: Final = 1 << 20
_print_header: Final = memoryview(struct.pack("<2q", _PRINT_BYTES, 0)).cast("q")
_CMP_INDEX: Final = {cmp: k for k, cmp in enumerate(Cmp)}
_MODULE_WORDS: Final = 8
_SLICE: Final = HOST_WAIT_SLICE_NS
_DONE, _SLICED, _FAULTED, _BUSY = (
    int(r) for r in (Result.DONE, Result.SLICE, Result.FAULTED, Result.BUSY)
)  # plain ints: comparing enum members costs more than the launch itself


_segments: Final = Segments()
_guard: Final[ForkGuard[CpuDevice]] = ForkGuard()
_numbers: Final = itertools.count(1)


class CpuDevice(DriverDevice):
    """One cpu device; see DriverDevice for what each function means."""

    kind = DriverKind.CPU

    def __init__(self, ordinal: int, *, threads: int, spins: int, memory_limit: int, poison: bool) -> None:
        self.ordinal = ordinal
        self._name = f"cpu:{ordinal}"
        self._native: Native = native()
        self._run_launch = self._native.run_launch
        self._heap = Heap(memory_limit, poison=poison, device=self._name)
        self._arenas = Arenas()
        self._lock = threading.Lock()  # protects the lists below
        self._streams: weakref.WeakSet[CpuStream] = weakref.WeakSet()
        self._workers: list[threading.Thread] = []
        self._worker_count = threads - 1
        self._closed = False
        self._address = self._map(DEVICE_BYTES)
        words = words_at(self._address, DEVICE_BYTES)
        words[Dev.WORKERS] = 0  # until they have been started
        words[Dev.SPINS] = spins
        words[Dev.SLOTS] = (1 << JOBS) - 1
        self._words = words
        self.capabilities = Capabilities(
            name=f"{platform.machine()}, {threads} threads",
            memory_bytes=memory_limit,
            executors=threads,
            resident_programs=MAX_RESIDENT,
            stream_priorities=(0, 0),
            peer_atomics=True,
            value_widths=frozenset({32, 64}),
            host_addressable=True,
            shares=(ShareKind.FD,),
            multicast=False,
        )
        _guard.devices.add(self)

    def _map(self, nbytes: int) -> int:
        """Memory for native structures. It stays mapped to the end of the process: threads may be late."""
        address = map_anonymous(nbytes)
        if not address:
            raise self._heap.no_memory(nbytes)
        return address

    def _enter(self) -> None:
        """Every call starts here: not in a callback, not after close."""
        if callback_threads and threading.get_ident() in callback_threads:
            raise UsageError(
                "driver: expected a call from outside host callbacks, got a runtime call inside a completion "
                "callback; hand the work to another thread"
            )
        if self._closed:
            raise UsageError(f"driver: expected an open device, got {self._name}, which was closed")

    def _start_workers(self) -> None:
        """Threads enter the native loop once and stay there. As daemons: the process may end with them inside."""
        with self._lock:
            missing = self._worker_count - len(self._workers)
            for _ in range(missing):
                executor = self._map(EXECUTOR_BYTES)
                words_at(executor, EXECUTOR_BYTES)[Exec.LIST] = executor + 2 * CACHE_LINE
                thread = threading.Thread(
                    target=self._native.worker_loop,
                    args=(executor, self._address),
                    name=f"peertile-{self._name}-worker-{len(self._workers)}",
                    daemon=True,
                )
                self._workers.append(thread)
                thread.start()
            self._words[Dev.WORKERS] = len(self._workers)
            self._tell_processors()

    def _tell_processors(self) -> None:
        """Where workers may run, for `make_way`. A process with one processor has no choice."""
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        if len(cpus) < 2 or max(cpus) >= 64 * CPU_WORDS:
            return
        nbytes = 8 * (CPU_WORDS + len(self._workers))
        at = self._map(nbytes)
        words = words_at(at, nbytes)
        for cpu in cpus:
            words[cpu >> 6] = to_signed(words[cpu >> 6] | 1 << (cpu & 63))
        for k, thread in enumerate(self._workers, CPU_WORDS):
            words[k] = thread.native_id or 0
        self._words[Dev.TIDS] = at + 8 * CPU_WORDS
        self._native.release(self._address + 8 * Dev.CPUS, at)  # streams may be running

    def close(self) -> None:
        self._enter()
        with self._lock:
            streams = list(self._streams)
            for stream in streams:
                if stream.completed() < stream.words[S.SUBMITTED]:
                    raise LaunchError(
                        f"{self._name}: cannot close while operations are pending; sync its streams first"
                    )
            self._closed = True
        for stream in streams:
            stream.stop()
        self._native.stop_workers(self._address)
        threads = [t for t in (*self._workers, *(s.thread for s in streams)) if t is not None]
        for thread in threads:
            thread.join(1.0)
        for stream in streams:
            streams_by_address.pop(stream.address, None)
        if not any(t.is_alive() for t in threads):
            self._arenas.release()
        self._heap.release()

    # ------------------------------------------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> int:
        self._enter()
        return self._heap.allocate(nbytes)

    def free(self, address: int) -> None:
        if not self._closed:
            self._heap.free(address)

    def accessible(self, address: int, nbytes: int) -> bool:
        return is_mapped(address, nbytes)

    def memory_stats(self) -> MemoryStats:
        self._enter()
        return self._heap.stats()

    # ---------------------------------------------------------------------------------------------- segments

    def pages(self) -> Pages | str:
        return CpuPages(self._name)

    def create_segment(self, nbytes: int) -> tuple[SegmentHandle, int]:
        self._enter()
        segment = _segments.create(nbytes)
        return segment, segment.address

    def export_segment(self, segment: SegmentHandle) -> ShareHandle:
        self._enter()
        return _segments.export(as_own(segment, Segment, "segment"))

    def import_segment(self, share: ShareHandle) -> SegmentHandle:
        self._enter()
        return _segments.import_(share)

    def map_segment(self, segment: SegmentHandle) -> int:
        self._enter()
        return _segments.map(as_own(segment, Segment, "segment"))

    def unmap_segment(self, segment: SegmentHandle) -> None:
        self._enter()
        _segments.unmap(as_own(segment, Segment, "segment"))

    def free_segment(self, segment: SegmentHandle) -> None:
        self._enter()
        _segments.free(as_own(segment, Segment, "segment"))

    # --------------------------------------------------------------------------------------- streams, events

    def create_stream(self, priority: int = 0) -> StreamHandle:
        self._enter()
        if priority != 0:
            raise ArgumentError(f"priority: expected 0 (cpu streams have no priorities), got {priority}")
        stream = CpuStream(self._native, self._address, self._arenas, next(_numbers))
        with self._lock:
            self._streams.add(stream)
            streams_by_address[stream.address] = stream
        return stream

    def destroy_stream(self, stream: StreamHandle) -> None:
        """Its native memory goes to the next stream once no event and no ticket of it is left."""
        self._enter()
        own = as_own(stream, CpuStream, "stream")
        with own.lock:
            own._usable()
        own.stop()

    def last_ticket(self, stream: StreamHandle) -> Ticket:
        self._enter()
        own = as_own(stream, CpuStream, "stream")
        with own.lock:
            sequence = own.words[S.SUBMITTED]
            name = own.pending[-1][2].name if own.pending and own.pending[-1][0] == sequence else own.inline_name
        return Ticket(own, sequence, name)

    def create_event(self) -> EventHandle:
        self._enter()
        return CpuEvent()

    def destroy_event(self, event: EventHandle) -> None:
        self._enter()
        own = as_own(event, CpuEvent, "event")
        own.ticket = own.stamp = None

    def record_event(self, stream: StreamHandle, event: EventHandle) -> Ticket:
        self._enter()
        own, queue = as_own(event, CpuEvent, "event"), as_own(stream, CpuStream, "stream")
        if queue.capture is not None:
            raise UsageError("record_event: expected a stream that runs, got one that is being captured")
        stamp = ctypes.c_int64()
        ticket = queue.enqueue(operation("event record", Kind.RECORD, ctypes.addressof(stamp), keep=stamp))
        own.ticket, own.stamp = ticket, stamp
        return ticket

    def wait_event(self, stream: StreamHandle, event: EventHandle) -> Ticket:
        recorded = self.event_ticket(event)
        queue = as_own(stream, CpuStream, "stream")
        if queue.capture is not None:
            raise UsageError("wait_event: expected a stream that runs, got one that is being captured")
        source = as_own(recorded.stream, CpuStream, "stream")
        op = operation("event wait", Kind.WAIT_EVENT, source.address, recorded.sequence, keep=source)
        return queue.enqueue(op)

    def event_ticket(self, event: EventHandle) -> Ticket:
        self._enter()
        ticket = as_own(event, CpuEvent, "event").ticket
        if ticket is None:
            raise UsageError("event: expected an event that was recorded, got one never recorded; record it first")
        return ticket

    def elapsed_ns(self, start: EventHandle, end: EventHandle) -> int:
        times = []
        for role, event in (("start", start), ("end", end)):
            ticket = self.event_ticket(event)
            stamp = as_own(event, CpuEvent, role).stamp
            if self.query(ticket) is Status.PENDING or stamp is None:
                raise UsageError(f"{role}: expected an event that has run, got one still pending; wait for it first")
            times.append(stamp.value)
        return times[1] - times[0]

    def event_ns(self, event: EventHandle) -> int | None:
        stamp = as_own(event, CpuEvent, "event").stamp
        return None if stamp is None or not stamp.value else stamp.value

    # --------------------------------------------------------------------------------------------- completion

    def query(self, ticket: Ticket) -> Status:
        self._enter()
        return _ran(ticket).query(ticket)

    def completed(self, stream: StreamHandle) -> int:
        assert isinstance(stream, CpuStream)
        return stream.completed()

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> Status:
        self._enter()
        stream, sequence = _ran(ticket), ticket.sequence
        end = None if timeout_s is None else time.monotonic_ns() + int(timeout_s * 1e9)
        step, helps = _SLICE, True
        try:
            while True:
                if end is not None:
                    step = max(min(end - time.monotonic_ns(), _SLICE), 0)
                    helps = helps and step == _SLICE  # a short wait must not get into running a long program itself
                result = self._native.host_wait(stream.address, sequence, step, helps)
                if result == _DONE:
                    break
                if result == Result.NEEDS_THREAD:
                    helps = False
                elif end is not None and time.monotonic_ns() >= end:
                    self._native.wake_stream(stream.address)
                    return Status.PENDING
        except BaseException:
            self._native.wake_stream(stream.address)  # this thread may have left an operation half done
            raise
        stream.settle()
        return stream.query(ticket)

    def fault(self, ticket: Ticket) -> FaultRecord | None:
        self._enter()
        return _ran(ticket).fault(ticket.sequence, ticket.name)

    def take_fault(self, stream: StreamHandle) -> FaultRecord | None:
        self._enter()
        return as_own(stream, CpuStream, "stream").take_fault()

    # --------------------------------------------------------------------------------------------- operations

    def _enqueue(self, stream: StreamHandle, op: Operation, on_caller: bool = False) -> Ticket:
        queue = as_own(stream, CpuStream, "stream")
        if on_caller and queue.capture is None and op.python is None:
            ticket = queue.run_inline(op)
            if ticket is not None:
                return ticket
        return queue.enqueue(op)

    def copy(
        self, stream: StreamHandle, dst: int, src: int, nbytes: int, *, name: str = "copy", on_caller: bool = False
    ) -> Ticket:
        self._enter()
        if nbytes < 0:
            raise ArgumentError(f"nbytes: expected an integer >= 0, got {nbytes}")
        return self._enqueue(stream, operation(name, Kind.COPY, dst, src, nbytes), on_caller)

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
        self._enter()
        check_fill(width, count)
        one = (pattern & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        word = int.from_bytes(one * (8 // width), "little", signed=True)
        return self._enqueue(stream, operation(name, Kind.FILL, dst, word, width * count), on_caller)

    def write_value(
        self, stream: StreamHandle, address: int, value: int, width: int, *, name: str = "write_value"
    ) -> Ticket:
        self._enter()
        check_word(address, width)
        return self._enqueue(stream, operation(name, Kind.WRITE_VALUE, address, to_signed(value), width))

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
        self._enter()
        check_word(address, width)
        words = (
            address,
            to_signed(value),
            _CMP_INDEX[cmp],
            width | signed << 8,
            min(timeout_ns, _MAX_NS),
            abort_address,
        )
        return self._enqueue(stream, operation(name, Kind.WAIT_VALUE, *words))

    def callback(self, stream: StreamHandle, function: Callable[[], None], *, name: str = "callback") -> Ticket:
        self._enter()
        return self._enqueue(stream, operation(name, Kind.PYTHON, python=function))

    # ------------------------------------------------------------------------------------------------ modules

    def load_module(self, binary: LoadableBinary) -> ModuleHandle:
        self._enter()
        if binary.target != "cpu":
            raise ArgumentError(f"binary: expected one for cpu, got one for {binary.target}")
        entry = binary.entry
        suffixes = ("_start", "_frame_size", "_promise_offset") if binary.waits else ("_range",)
        symbols = jit.load_object(binary.payload, [entry + s for s in suffixes])
        scratch = (binary.scratch_bytes + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
        address = self._map(_MODULE_WORDS * 8)
        words = words_at(address, _MODULE_WORDS * 8)
        words[Mod.SCRATCH] = scratch
        words[Mod.WAITS] = int(binary.waits)
        stride = scratch
        if binary.waits:
            number = ctypes.CFUNCTYPE(ctypes.c_int64)
            words[Mod.START] = symbols[f"{entry}_start"]
            words[Mod.FRAME] = number(symbols[f"{entry}_frame_size"])()
            words[Mod.PROMISE] = number(symbols[f"{entry}_promise_offset"])()
            stride += words[Mod.FRAME]
        else:
            words[Mod.RANGE] = symbols[f"{entry}_range"]
        budget = min(_FRAMES_LIMIT, self._heap.limit // 4)
        limit = min(MAX_RESIDENT, budget // stride) if binary.waits else MAX_RESIDENT
        if len(self._workers) < self._worker_count:
            self._start_workers()
        return CpuModule(address, entry, waits=binary.waits, stride=stride, limit=limit)

    def unload_module(self, module: ModuleHandle) -> None:
        """Code is a few kilobytes and stays mapped: a worker that is late may still be about to return from it."""
        self._enter()
        as_own(module, CpuModule, "module")

    def max_resident(self, module: ModuleHandle) -> int:
        self._enter()
        return as_own(module, CpuModule, "module").limit

    # ----------------------------------------------------------------------------------------------- launches

    def _programs(self, module: CpuModule, grid: Grid, options: LaunchOptions) -> int:
        """Number of programs of a grid, all of which can run."""
        n0, n1, n2 = grid
        if n0 < 0 or n1 < 0 or n2 < 0:
            raise ArgumentError(f"grid of {options.name}: expected three integers >= 0, got {grid}")
        n = n0 * n1 * n2
        if (module.waits or options.cooperative) and n > module.limit:
            raise LaunchError(
                f"{options.name}: its {n} programs wait for each other and must be resident at once, {self._name} "
                f"holds {module.limit} of them; use a grid of at most {module.limit} programs"
            )
        return n

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
        self._enter()
        kernel = as_own(module, CpuModule, "module")
        n = self._programs(kernel, grid, options)
        python: PythonWork | None = None
        printer = 0
        if options.on_print is not None:
            printer, python = self._printer(as_own(stream, CpuStream, "stream"), options.on_print)
        timeout = min(options.wait_timeout_ns, _MAX_NS)
        words = (kernel.address, 0, options.abort_address, timeout, printer, n, 0, *grid)
        op = Operation(
            name=options.name,
            header=pack(Kind.LAUNCH, words, python=python is not None),
            args=args,
            keep=kernel,
            python=python,
            arena_bytes=n * kernel.stride if kernel.waits else 0,
        )
        return self._enqueue(stream, op, on_caller)

    def launch_sync(
        self, stream: StreamHandle, module: ModuleHandle, grid: Grid, args: bytes, options: LaunchOptions
    ) -> FaultRecord | None:
        return self.run_prepared(stream, self.prepare_launch(module, grid, options), args)

    def prepare_launch(self, module: ModuleHandle, grid: Grid, options: LaunchOptions) -> CpuLaunch:
        self._enter()
        kernel = as_own(module, CpuModule, "module")
        n = self._programs(kernel, grid, options)
        timeout = min(options.wait_timeout_ns, _MAX_NS)
        header = pack(Kind.LAUNCH, (kernel.address, 0, options.abort_address, timeout, 0, n, 0, *grid))
        return CpuLaunch(kernel, grid, options, header, n, n * kernel.stride if kernel.waits else 0)

    def launch_prepared(self, stream: StreamHandle, prepared: PreparedLaunch, args: bytes) -> Ticket:
        return Ticket(stream, self.enqueue(stream, prepared, args), prepared.options.name)

    def enqueue(self, stream: StreamHandle, prepared: PreparedLaunch, args: bytes) -> int:
        if (
            type(stream) is CpuStream
            and type(prepared) is CpuLaunch
            and prepared.is_plain
            and stream.capture is None
            and len(args) <= INLINE_ARGS
            and not callback_threads
            and not self._closed
        ):
            return stream.enqueue_launch(prepared, args)
        return self.launch(stream, prepared.module, prepared.grid, args, prepared.options).sequence

    def launch_many(self, stream: StreamHandle, launches: Sequence[tuple[PreparedLaunch, bytes]]) -> Sequence[int]:
        self._enter()
        queue = as_own(stream, CpuStream, "stream")
        if queue.capture is None:
            for launch, args in launches:
                if type(launch) is not CpuLaunch or not launch.is_plain or len(args) > INLINE_ARGS:
                    break
            else:
                return queue.enqueue_launches(launches)  # type: ignore[arg-type]
        return [self.launch(stream, p.module, p.grid, args, p.options).sequence for p, args in launches]

    def run_prepared(self, stream: StreamHandle, prepared: PreparedLaunch, args: bytes) -> FaultRecord | None:
        # The one path whose cost counts in nanoseconds: it does what `launch` and `run_inline` do, without objects.
        assert isinstance(stream, CpuStream) and isinstance(prepared, CpuLaunch)  # noqa: PT018
        if (
            stream.capture is None
            and prepared.is_plain
            and prepared.programs
            and not callback_threads
            and not self._closed
            and not stream.closed
            and len(args) <= INLINE_ARGS
            and stream.inline_lock.acquire(blocking=False)
        ):
            try:
                slot = stream.inline_slot
                # Whoever gives the stream another one leaves this one alone while `inline_lock` is held.
                have, arena = stream.arena
                if prepared.arena_bytes > have:
                    with stream.lock:
                        arena = stream.arena_for(prepared.arena_bytes)
                stream.inline_name = prepared.name
                stream.inline_nodes = None
                result = self._run_launch(stream.address, slot.address, prepared.header, args, arena, _SLICE)
                if result == _DONE:
                    return None
                if result != _BUSY:
                    sequence = slot.words[C.SEQ]
                    if result == _SLICED:
                        stream.go_on(sequence)
                    return self._finish(stream, sequence, prepared.name)
            except BaseException:
                stream.hand_over(prepared.name, prepared.module)
                raise
            finally:
                stream.inline_lock.release()
        options = prepared.options
        if stream.capture is not None:
            raise UsageError(f"{options.name}: expected a stream that runs, got one that is being captured")
        ticket = self.launch(stream, prepared.module, prepared.grid, args, options, on_caller=True)
        self.wait(ticket)
        return self._finish(stream, ticket.sequence, options.name)

    @staticmethod
    def _finish(stream: CpuStream, sequence: int, name: str) -> FaultRecord | None:
        record = stream.fault(sequence, name)
        if record is not None:
            stream.take_fault()
        return record

    def _printer(self, stream: CpuStream, sink: PrintSink) -> tuple[int, PythonWork]:
        """A print buffer for a launch, and what empties it: the stream's, or a new one for a node of a graph."""
        memory = stream.print_address
        if not memory or stream.capture is not None:
            try:
                memory = self._arenas.printers.popleft()
            except IndexError:
                memory = self._map(PRINT_HEADER_BYTES + _PRINT_BYTES)
            ctypes.memset(memory, 0xFF, PRINT_HEADER_BYTES + _PRINT_BYTES)
            words_at(memory, PRINT_HEADER_BYTES)[:] = _print_header
            if stream.capture is None:
                stream.print_address = memory
        header = words_at(memory, PRINT_HEADER_BYTES)

        def drain() -> None:
            size = PRINT_HEADER_BYTES + min(header[1], _PRINT_BYTES)
            data = bytes((ctypes.c_char * size).from_address(memory))
            lost = header[1] - _PRINT_BYTES
            ctypes.memset(memory, 0xFF, size)
            header[:] = _print_header
            for record in print_records(memoryview(data)):
                sink(*record)
            if lost > 0:
                sink(-1, -1, b"... output beyond the print buffer was lost")

        return memory, drain

    # ------------------------------------------------------------------------------------------------- graphs

    def begin_capture(self, stream: StreamHandle) -> None:
        self._enter()
        queue = as_own(stream, CpuStream, "stream")
        with queue.lock:
            queue._usable()
            if queue.capture is not None:
                raise UsageError("begin_capture: expected a stream that is not being captured, got one that is")
            queue.capture = []

    def end_capture(self, stream: StreamHandle) -> GraphHandle:
        self._enter()
        queue = as_own(stream, CpuStream, "stream")
        with queue.lock:
            if queue.capture is None:
                raise UsageError("end_capture: expected a stream that is being captured, got one that is not")
            nodes, queue.capture = tuple(queue.capture), None
        return CpuGraph(nodes)

    def instantiate(self, graph: GraphHandle) -> GraphExecHandle:
        self._enter()
        return CpuGraphExec(as_own(graph, CpuGraph, "graph").nodes)

    def destroy_graph(self, graph: GraphExecHandle) -> None:
        self._enter()
        own = as_own(graph, CpuGraphExec, "graph")
        own.nodes = own.memory = None

    def launch_graph(
        self, stream: StreamHandle, graph: GraphExecHandle, *, name: str = "graph", on_caller: bool = False
    ) -> Ticket:
        self._enter()
        own, queue = as_own(graph, CpuGraphExec, "graph"), as_own(stream, CpuStream, "stream")
        if own.nodes is None:
            raise UsageError("graph: expected a live graph, got one that was destroyed")
        if queue.capture is not None:
            raise UsageError("launch_graph: expected a stream that runs, got one that is being captured")
        op = Operation(name, own.header, b"", own, None, own.arena_bytes)
        if on_caller and not own.python:
            ticket = queue.run_inline(op, own.nodes)
            if ticket is not None:
                return ticket
        return queue.enqueue(op, own.nodes)

    def run_graph(self, stream: StreamHandle, graph: GraphExecHandle, *, name: str = "graph") -> FaultRecord | None:
        # To launch_graph what run_prepared is to launch: a replay of short kernels costs no more than they do.
        if (
            type(stream) is CpuStream
            and type(graph) is CpuGraphExec
            and graph.nodes is not None
            and not graph.python
            and stream.capture is None
            and not callback_threads
            and not self._closed
            and not stream.closed
            and stream.inline_lock.acquire(blocking=False)
        ):
            try:
                slot = stream.inline_slot
                arena = 0
                if graph.arena_bytes:
                    with stream.lock:
                        arena = stream.arena_for(graph.arena_bytes)
                stream.inline_name, stream.inline_nodes = name, graph.nodes
                result = self._native.run_graph(stream.address, slot.address, graph.table, graph.count, arena, _SLICE)
                if result == _DONE:
                    return None
                if result != _BUSY:
                    sequence = slot.words[C.SEQ]
                    if result == _SLICED:
                        stream.go_on(sequence)
                    return self._finish(stream, sequence, name)
            except BaseException:
                stream.hand_over(name, graph, graph.nodes)
                raise
            finally:
                stream.inline_lock.release()
        return super().run_graph(stream, graph, name=name)


def _ran(ticket: Ticket) -> CpuStream:
    stream = as_own(ticket.stream, CpuStream, "ticket")
    if ticket.sequence < 0:
        raise UsageError(f"ticket: {ticket.name} was captured and does not run by itself; launch the graph")
    return stream


class CpuDriver(Driver):
    """Opens cpu devices. `threads` run programs (default: PEERTILE_CPU_THREADS, else cores / `local_ranks`);
    `poison` fills memory that is allocated or freed, for tests."""

    kind = DriverKind.CPU

    def __init__(
        self,
        *,
        devices: int = 8,
        threads: int | None = None,
        local_ranks: int = 1,
        memory_limit: int | None = None,
        poison: bool = False,
    ) -> None:
        self._devices = devices
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = threads or config().cpu_threads or max(self._cores // local_ranks, 1)
        self._spins = 10 if local_ranks > self._cores else 100
        self._memory_limit = memory_limit or physical_bytes()
        self._poison = poison
        self._make: Callable[..., CpuDevice] = CpuDevice

    def device_count(self) -> int:
        return self._devices

    def open(self, ordinal: int = 0) -> DriverDevice:
        _guard.check()
        if not 0 <= ordinal < self._devices:
            raise ArgumentError(f"ordinal: expected 0 to {self._devices - 1}, got {ordinal}")
        return self._make(
            ordinal,
            threads=self._threads,
            spins=self._spins,
            memory_limit=self._memory_limit,
            poison=self._poison,
        )
