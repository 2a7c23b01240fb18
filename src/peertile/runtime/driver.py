"""The driver protocol: everything a device must be able to do, and nothing that can be written once above it.

A `Driver` opens devices of one kind; a `DriverDevice` is a flat table of functions over opaque handles.
No tensors, leases, kernels or ranks here: those are written once on top. Read `memory_model.py` first.

The life of an enqueued operation. Every call that takes a stream enqueues and returns a `Ticket`::

    PENDING ──ran──────────────> DONE
       │ ──failed─────────────> FAULTED   its FaultRecord says how; the stream is now *failed*
       └──stream had failed──> SKIPPED   did not run; its FaultRecord names the operation that failed

A failed stream skips everything until `take_fault`, which also skips what was enqueued before the take. An event
recorded on a failed stream still fires, and a stream that waits for it fails in turn (kind SKIPPED with the
cause), so nothing ever runs on the output of something that did not run.

Rules that every driver keeps (the conformance suite in `peertile.testing.driver_suite` has one test for each):

- operations of one stream run in order; of two streams, at the same time: kernels of two streams may wait for
  each other;
- a wait on an event means the record enqueued last before the wait; an event never recorded is an error;
- every wait is bounded; waits of the host return to Python at least every 50 ms, so that Ctrl-C works;
- creating, allocating and freeing never wait for running work;
- a host callback may not call the driver: UsageError. Hand the work to another thread;
- a process that was forked after the device was opened gets UsageError from every call and frees nothing.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Final, NamedTuple, Protocol

from peertile.errors import ArgumentError, UnsupportedError
from peertile.memory_model import Cmp
from peertile.runtime.linking import Links

__all__ = [
    "HOST_WAIT_SLICE_NS",
    "PRINT_HEADER_BYTES",
    "Capabilities",
    "Driver",
    "DriverDevice",
    "DriverKind",
    "EventHandle",
    "FaultKind",
    "FaultRecord",
    "GraphExecHandle",
    "GraphHandle",
    "Grid",
    "LaunchOptions",
    "LoadableBinary",
    "MemoryStats",
    "ModuleHandle",
    "Pages",
    "PreparedLaunch",
    "PrintSink",
    "SegmentHandle",
    "ShareHandle",
    "ShareKind",
    "Status",
    "StreamHandle",
    "Ticket",
    "cannot_share",
    "check_fill",
    "print_records",
]

HOST_WAIT_SLICE_NS: Final = 50_000_000
"""Longest time that a host thread stays in native code before it looks for signals."""

Grid = tuple[int, int, int]


class DriverKind(Enum):
    """The targets that a program can run on: processors of the host, NVIDIA GPUs, and the model that is checked.

    >>> import peertile as pt
    >>> pt.current_device().driver.kind is pt.DriverKind.CPU
    True
    """

    CPU = "cpu"
    CUDA = "cuda"
    SIM = "sim"


class ShareKind(Enum):
    """How the storage of a symmetric segment reaches another process."""

    FD = "fd"  # a file descriptor sent over a socket: memfd on cpu, VMM with POSIX descriptors on cuda
    IPC = "ipc"  # bytes alone: CUDA IPC
    FABRIC = "fabric"  # bytes alone, across hosts: VMM fabric handles
    LOCAL = "local"  # within one process alone


class Capabilities(NamedTuple):
    """What a device can do; facts of the device, asked once."""

    name: str
    memory_bytes: int
    executors: int  # programs that make progress at the same instant: threads on cpu, multiprocessors on cuda
    resident_programs: int  # most programs of a launch that waits; `max_resident` says it for one module
    stream_priorities: tuple[int, int]  # (least, greatest); equal when priorities do nothing
    peer_atomics: bool  # read-modify-writes on peer memory are atomic
    value_widths: frozenset[int]  # widths in bits that write_value and wait_value take
    host_addressable: bool  # the host may load and store device addresses
    shares: tuple[ShareKind, ...]  # best first
    multicast: bool
    unreachable: frozenset[str] = frozenset()  # identities of devices here whose memory it cannot load and store


class MemoryStats(NamedTuple):
    """Bytes of device memory. `reserved` is held from the system, in use or kept for later."""

    in_use: int
    peak: int
    reserved: int
    limit: int
    allocations: int

    @property
    def free(self) -> int:
        return self.limit - self.in_use


class FaultKind(IntEnum):
    """How an operation failed. The numbers up to ABORTED are those that kernels write."""

    ASSERT = 1
    BOUNDS = 2
    SIGNATURE = 3
    WAIT_TIMEOUT = 4
    ABORTED = 5  # the abort word was set: another rank failed
    SKIPPED = 6  # did not run; `cause` is what failed before it
    CALLBACK = 7  # a host callback raised; `error` is the exception
    DEVICE = 8  # the device itself reported an error; `error` holds its text


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """How one operation failed, as the device saw it; the runtime turns it into a DeviceFault.

    `program` and `place` are -1 where no program of a kernel was to blame; `place` indexes `Binary.places`.
    `got` and `limit` are the values of a check, or (seen, expected) of a wait on the word at `address`. `note`: what
    else the driver knows about the cause, a sentence for the end of the message, or nothing.
    """

    kind: FaultKind
    op: str
    sequence: int
    program: int = -1
    place: int = -1
    got: int = 0
    limit: int = 0
    address: int = 0
    slot: int = 0
    node: int = -1  # which node of a graph, -1 outside one
    cause: FaultRecord | None = None
    error: BaseException | None = field(default=None, compare=False)
    note: str = field(default="", compare=False)

    @property
    def waited(self) -> str:
        """Of a wait that has reached its bound: what it waited for, what it saw, and what may have kept it."""
        return f"expected {self.limit}, last seen {self.got}" + (f"; {self.note}" if self.note else "")


class Status(Enum):
    """Where an enqueued operation is; see the module docstring."""

    PENDING = "pending"
    DONE = "done"
    FAULTED = "faulted"
    SKIPPED = "skipped"


class StreamHandle:
    """A queue of operations that run in order. Opaque; made by `create_stream`."""

    __slots__ = ()


class EventHandle:
    """A point in a stream that others can wait for. Opaque; made by `create_event`."""

    __slots__ = ()


class ModuleHandle:
    """A loaded kernel. Opaque; made by `load_module`."""

    __slots__ = ()


class GraphHandle:
    """Recorded operations. Opaque; made by `end_capture`."""

    __slots__ = ()


class GraphExecHandle:
    """Recorded operations ready to launch. Opaque; made by `instantiate`."""

    __slots__ = ()


class SegmentHandle:
    """Storage that other processes can map. Opaque beyond its size; `map_segment` gives its address."""

    __slots__ = ("nbytes",)
    nbytes: int


class ShareHandle(NamedTuple):
    """A segment on its way to another device or process.

    `payload` travels as bytes; `fds` are open descriptors of the *sending* process: send them with SCM_RIGHTS
    beside the payload and put the received ones in their place (`with_fds`). The exporter's descriptors stay
    the exporter's; those of a received handle belong to the handle until `import_segment` takes them over.
    """

    kind: ShareKind
    payload: bytes
    fds: tuple[int, ...] = ()

    def with_fds(self, fds: tuple[int, ...]) -> ShareHandle:
        """The same handle with other descriptors: those that a socket gave on the other side."""
        return ShareHandle(self.kind, self.payload, fds)


class Pages(ABC):
    """Virtual memory by hand, of one device: the system's calls, with nothing checked and nothing kept. Handles are
    opaque; sizes, addresses and alignments are multiples of the granularity. AllocationError where memory or
    addresses are lacking."""

    @abstractmethod
    def granularity(self, kind: ShareKind) -> int:
        """Bytes that sizes and addresses are multiples of, for memory that can be shared as `kind`."""

    @abstractmethod
    def create(self, nbytes: int, kind: ShareKind) -> Any:
        """Physical memory of the device; zeroed on cpu, undefined on a GPU."""

    @abstractmethod
    def release(self, handle: Any) -> None:
        """Give up the handle of `create` or `import_`."""

    @abstractmethod
    def export(self, handle: Any, nbytes: int, kind: ShareKind) -> ShareHandle:
        """What another process imports; its descriptors are new ones, the caller's to close."""

    @abstractmethod
    def import_(self, share: ShareHandle) -> tuple[Any, int]:
        """A handle of the memory behind `share`, and its bytes; takes over `share.fds`."""

    @abstractmethod
    def reserve(self, nbytes: int, alignment: int) -> int:
        """Addresses that nothing else gets, with nothing behind them."""

    @abstractmethod
    def unreserve(self, address: int, nbytes: int) -> None:
        """Give `reserve`d addresses back, all of them; nothing is mapped there any more."""

    @abstractmethod
    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """All of a handle's memory at reserved addresses. Nobody may access it yet."""

    @abstractmethod
    def unmap(self, address: int, nbytes: int) -> None:
        """Undo one `map`; the addresses stay reserved."""

    @abstractmethod
    def set_access(
        self, address: int, nbytes: int, allowed: Sequence[DriverDevice], forbidden: Sequence[DriverDevice]
    ) -> None:
        """Of a mapping: `allowed` are all the devices that may load and store there, `forbidden` those that no longer
        may."""


class Ticket(NamedTuple):
    """One enqueued operation: where it is in its stream (from 1) and what it is called in errors.

    An operation that was captured instead of enqueued has `sequence` -1: it never runs as itself.
    """

    stream: StreamHandle
    sequence: int
    name: str


PrintSink = Callable[[int, int, bytes], None]
"""Called with (program, place, payload) for each record that a launch printed, in order."""


class LaunchOptions(NamedTuple):
    """What stays the same from launch to launch of one kernel: made once, not per launch.

    `abort_address`: an i32; programs leave at their next poll once it is not zero. 0: none is given.
    `cooperative`: all programs must be resident at once; always so for kernels that wait.
    `on_print`: gets the output of the launch when it has ended, on the driver's thread (like a host callback).
    """

    name: str
    wait_timeout_ns: int
    abort_address: int = 0
    cooperative: bool = False
    on_print: PrintSink | None = None


class PreparedLaunch:
    """A kernel over a grid with its options: all of a launch but the argument block. Made by `prepare_launch`, kept
    by the caller for as long as it likes, and launched any number of times, from any thread and on any stream.

    A driver derives from it to keep what it has checked and looked up: that is its purpose.
    """

    __slots__ = ("expected_ns", "grid", "module", "options")

    def __init__(self, module: ModuleHandle, grid: Grid, options: LaunchOptions) -> None:
        self.module = module
        self.grid = grid
        self.options = options
        self.expected_ns: int | None = None
        """For the caller: how long its kernel takes, once that is known."""


class LoadableBinary(Protocol):
    """What a driver needs of a compiled kernel (backends/binary.py)."""

    @property
    def target(self) -> str: ...
    @property
    def entry(self) -> str: ...
    @property
    def payload(self) -> bytes: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def waits(self) -> bool: ...


# A print buffer, in device memory, is what a kernel that prints gets the address of:
#   u64 capacity   bytes of records that fit (so the buffer is 16 + capacity bytes long)
#   u64 offset     where the next record goes; a program reserves with an atomic add, *before* it writes.
#                  It may run past capacity: records that did not fit are counted as lost, not written
#   records        u64 program, u32 place, u32 nbytes, payload, padding to 8; in the order of reservation.
#                  The driver fills the buffer with ones before a launch: program 2^64 - 1 is a record not written
PRINT_HEADER_BYTES: Final = 16
_RECORD: Final = struct.Struct("<QII")
_NOT_WRITTEN: Final = (1 << 64) - 1


def print_records(buffer: memoryview) -> Iterator[tuple[int, int, bytes]]:
    """(program, place, payload) of each whole record in a print buffer that nobody writes any more."""
    capacity, offset = struct.unpack_from("<QQ", buffer)
    at, end = PRINT_HEADER_BYTES, PRINT_HEADER_BYTES + min(capacity, offset)
    while at + _RECORD.size <= end:
        program, place, nbytes = _RECORD.unpack_from(buffer, at)
        start = at + _RECORD.size
        if program == _NOT_WRITTEN:  # it did not fit, and so did nothing after it
            return
        yield program, place, bytes(buffer[start : start + nbytes])
        at = start + (nbytes + 7) // 8 * 8


def check_fill(width: int, count: int) -> None:
    """What every driver asks of the arguments of `fill`; ArgumentError before anything is enqueued."""
    if width not in (1, 2, 4, 8):
        raise ArgumentError(f"width: expected 1, 2, 4 or 8 bytes, got {width}")
    if count < 0:
        raise ArgumentError(f"count: expected an integer >= 0, got {count}")


def cannot_share(what: str, name: str, kind: ShareKind, shares: Sequence[ShareKind]) -> UnsupportedError:
    """The error of who asks a device for a way to share memory that it does not have."""
    have = ", ".join(k.value for k in shares)
    return UnsupportedError(f"{what}: {name} cannot share memory by {kind.value} here; it can by {have}")


class DriverDevice(ABC):
    """One open device. Calls are safe from any thread; those on one stream take effect in call order.

    Addresses are plain ints. Memory named by an enqueued operation must stay alive until its ticket is not
    PENDING (leases, above, see to it). `on_caller=True` allows a driver to run the operation on the calling
    thread when the stream is idle, and then to return a finished ticket: right before a wait for that ticket.
    """

    kind: DriverKind
    ordinal: int
    capabilities: Capabilities

    @property
    def identity(self) -> str:
        """The same text in every process for the same hardware, another for other hardware of this host."""
        return f"{self.kind.value}:{self.ordinal}"

    @abstractmethod
    def close(self) -> None:
        """Destroy all streams, modules and memory of the device. LaunchError while operations are pending."""

    # ------------------------------------------------------------------------------------------------ memory

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Address of `nbytes` (>= 0) of memory, aligned to 64; contents undefined. AllocationError."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Give back what `allocate` gave, at once: nothing enqueued may still use it.

        May be called from anywhere, as garbage collection does: also in a callback, and without effect after
        `close` and in a forked child.
        """

    def accessible(self, address: int, nbytes: int) -> bool:
        """Whether programs of this device may load and store these bytes; True where the driver cannot tell."""
        return True

    def lend(self, address: int, nbytes: int) -> None:  # noqa: B027 - most drivers have nothing to do
        """Part of the driver's memory becomes an object with undefined contents: what heaps and pools tell drivers
        that watch over memory. Nothing for others."""

    def take_back(self, address: int, nbytes: int) -> None:  # noqa: B027 - as `lend`
        """The object that `lend` told of is over; who still uses it is wrong."""

    @abstractmethod
    def memory_stats(self) -> MemoryStats: ...

    # ---------------------------------------------------------------------------------------------- segments

    @abstractmethod
    def create_segment(self, nbytes: int) -> tuple[SegmentHandle, int]:
        """New zeroed storage that can be shared, and its address here (aligned to 256). AllocationError."""

    def create_shared(self, nbytes: int, kind: ShareKind) -> tuple[SegmentHandle, int]:
        """As `create_segment`, to be shared in this one way; UnsupportedError where the device cannot."""
        if kind not in self.capabilities.shares:
            raise cannot_share("segment", self.capabilities.name, kind, self.capabilities.shares)
        return self.create_segment(nbytes)

    def pages(self) -> Pages | str:
        """What makes physical memory, addresses and mappings one by one, or why there is nothing that does, as a line
        of text."""
        return f"{self.kind.value} has no virtual memory to map by hand"

    def multicast_objects(self) -> Any:
        """What makes multicast objects of the fabric over segments, or why there is nothing that does, as a line of
        text. Asks the system nothing unless the user opted in."""
        return f"{self.kind.value} has no fabric"

    @abstractmethod
    def export_segment(self, segment: SegmentHandle) -> ShareHandle:
        """What another device or process needs to import the segment; valid until `free_segment`."""

    @abstractmethod
    def import_segment(self, share: ShareHandle) -> SegmentHandle:
        """The segment behind a handle from another device; takes over `share.fds`. Not mapped yet."""

    @abstractmethod
    def map_segment(self, segment: SegmentHandle) -> int:
        """Address of the segment in this process; the same one until `unmap_segment`."""

    def enter_group(self, abort_address: int, sharers: int) -> None:
        """Kernels of a group will run here that poll its abort word: whatever has to be done for that once, which
        could wait for running work, is done now. `sharers` ranks of this process run on this very device, this one
        counted: the programs of all of them have to be resident at once."""
        return None

    @abstractmethod
    def unmap_segment(self, segment: SegmentHandle) -> None:
        """Undo `map_segment`; a segment that is not mapped is left alone."""

    @abstractmethod
    def free_segment(self, segment: SegmentHandle) -> None:
        """Unmap, and let go of the storage: it lives on while other processes hold it. Once only."""

    # --------------------------------------------------------------------------------------- streams, events

    @abstractmethod
    def create_stream(self, priority: int = 0) -> StreamHandle: ...

    @abstractmethod
    def destroy_stream(self, stream: StreamHandle) -> None:
        """End a stream; what was enqueued still runs. The handle cannot be used again."""

    @abstractmethod
    def last_ticket(self, stream: StreamHandle) -> Ticket:
        """The operation enqueued last (sequence 0, DONE, if there was none): wait for it to sync the stream."""

    @abstractmethod
    def create_event(self) -> EventHandle: ...

    @abstractmethod
    def destroy_event(self, event: EventHandle) -> None: ...

    @abstractmethod
    def record_event(self, stream: StreamHandle, event: EventHandle) -> Ticket:
        """The event now means this point of the stream; earlier waits keep their meaning."""

    @abstractmethod
    def wait_event(self, stream: StreamHandle, event: EventHandle) -> Ticket:
        """The stream goes on once the event's last record has run. UsageError if it was never recorded."""

    @abstractmethod
    def event_ticket(self, event: EventHandle) -> Ticket:
        """The event's last record, to query or wait for. UsageError if it was never recorded."""

    @abstractmethod
    def elapsed_ns(self, start: EventHandle, end: EventHandle) -> int:
        """Time between the last records of two events, both of which must have run."""

    def event_ns(self, event: EventHandle) -> int | None:
        """When the event's last record ran, by CLOCK_MONOTONIC of this host; None where the driver cannot tell, or it
        has not run."""
        return None

    def read_clock(self) -> tuple[int, int, int] | None:
        """A reading of the clock that kernels see, in ns, between two of this host's CLOCK_MONOTONIC: (before, device,
        after). None where that is the device's clock."""
        return None

    # --------------------------------------------------------------------------------------------- completion

    @abstractmethod
    def query(self, ticket: Ticket) -> Status: ...

    def completed(self, stream: StreamHandle) -> int:
        """A sequence number up to which everything has left the stream: what is known without asking the device, so
        perhaps not the last such number. 0 is right for any driver; a good answer spares a `query` for each ticket."""
        return 0

    def is_sound(self, stream: StreamHandle, sequence: int) -> bool:
        """Whether it is known, without asking the device, that this operation has left the stream and that none on it
        has failed. False is right for any driver; a good answer spares a `query` and a look for its fault."""
        return False

    @abstractmethod
    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> Status:
        """Block until the operation is not pending, or for `timeout_s` (then the result is PENDING)."""

    @abstractmethod
    def fault(self, ticket: Ticket) -> FaultRecord | None:
        """How a FAULTED or SKIPPED operation failed; None for PENDING and DONE. Changes nothing."""

    @abstractmethod
    def take_fault(self, stream: StreamHandle) -> FaultRecord | None:
        """The fault that the stream is failed by, or None. What was enqueued before is skipped, later ones run."""

    # --------------------------------------------------------------------------------------------- operations

    @abstractmethod
    def copy(
        self, stream: StreamHandle, dst: int, src: int, nbytes: int, *, name: str = "copy", on_caller: bool = False
    ) -> Ticket:
        """Copy bytes between any two addresses, of the host or of a device; the ranges must not overlap."""

    @abstractmethod
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
        """Store the low `width` (1, 2, 4, 8) bytes of `pattern` `count` times."""

    @abstractmethod
    def write_value(
        self, stream: StreamHandle, address: int, value: int, width: int, *, name: str = "write_value"
    ) -> Ticket:
        """Store a word of `width` (32, 64) bits, release at system scope, after all that precedes."""

    @abstractmethod
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
        """Go on once `word cmp value` (acquire, system scope); a WAIT_TIMEOUT fault after `timeout_ns`.
        `signed` is how GE, LE, GT and LT compare."""

    @abstractmethod
    def callback(self, stream: StreamHandle, function: Callable[[], None], *, name: str = "callback") -> Ticket:
        """Call `function` on the driver's thread. It may not call the driver; what it raises is a CALLBACK fault."""

    @abstractmethod
    def load_module(self, binary: LoadableBinary) -> ModuleHandle:
        """Load a kernel now, never at its first launch (which could wait for running work)."""

    @abstractmethod
    def unload_module(self, module: ModuleHandle) -> None:
        """Nothing enqueued, and no graph, may still use the module."""

    @abstractmethod
    def max_resident(self, module: ModuleHandle) -> int:
        """Most programs of this kernel that can be resident at once."""

    @abstractmethod
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
        """Run the kernel's programs on the argument block. LaunchError when they must be resident and do not fit."""

    @abstractmethod
    def launch_sync(
        self, stream: StreamHandle, module: ModuleHandle, grid: Grid, args: bytes, options: LaunchOptions
    ) -> FaultRecord | None:
        """Launch, wait for the end, take the fault: what `.sync()` on an idle stream uses.

        Interrupted (Ctrl-C), the launch goes on in the stream; `last_ticket` is then its ticket.
        """

    # The five below are the launches that the runtime makes: one kernel is launched many times over one grid, and what
    # stays the same is checked and looked up once. The defaults are right for any driver; a driver whose launches
    # cost microseconds overrides them, so that `launch_prepared` does no more than copy the block and enqueue, and
    # `launch_many` enqueues a chain by one compiled loop, at one crossing into native code instead of one for each.

    def prepare_launch(self, module: ModuleHandle, grid: Grid, options: LaunchOptions) -> PreparedLaunch:
        """What stays the same from launch to launch. LaunchError when programs must be resident and do not fit, here
        or at the launch. It keeps the module in use: whoever unloads that drops this first."""
        return PreparedLaunch(module, grid, options)

    def launch_prepared(self, stream: StreamHandle, prepared: PreparedLaunch, args: bytes) -> Ticket:
        """As `launch`, of what was prepared on this device. `args` is copied, or kept until the launch is over."""
        return self.launch(stream, prepared.module, prepared.grid, args, prepared.options)

    def enqueue(self, stream: StreamHandle, prepared: PreparedLaunch, args: bytes) -> int:
        """The same; the sequence number alone, which is all that its submission keeps of a ticket."""
        return self.launch_prepared(stream, prepared, args).sequence

    @property
    def links(self) -> Links | None:
        """What does a launch and its bookkeeping in one go, where the driver can."""
        return None

    def linked(self, stream: StreamHandle) -> None:
        """After `LinkCode.LOOK`: take note of what has run."""
        raise NotImplementedError(f"{type(self).__name__}: has no links")

    def launch_many(self, stream: StreamHandle, launches: Sequence[tuple[PreparedLaunch, bytes]]) -> Sequence[int]:
        """Enqueue launches in their order; the sequence number of each, -1 in a capture. Other threads may enqueue in
        between. After an exception some of the first may have been enqueued, and none of the others."""
        return [self.launch_prepared(stream, prepared, args).sequence for prepared, args in launches]

    def run_prepared(self, stream: StreamHandle, prepared: PreparedLaunch, args: bytes) -> FaultRecord | None:
        """As `launch_sync`, of what was prepared on this device."""
        return self.launch_sync(stream, prepared.module, prepared.grid, args, prepared.options)

    # ------------------------------------------------------------------------------------------------- graphs

    @abstractmethod
    def begin_capture(self, stream: StreamHandle) -> None:
        """Operations on the stream are recorded from now on, not run. Other streams are not concerned."""

    @abstractmethod
    def end_capture(self, stream: StreamHandle) -> GraphHandle:
        """Stop recording. Also how a capture is dropped after an error."""

    @abstractmethod
    def instantiate(self, graph: GraphHandle) -> GraphExecHandle:
        """Make a graph ready to launch any number of times; addresses and arguments are baked in."""

    @abstractmethod
    def destroy_graph(self, graph: GraphExecHandle) -> None:
        """No launch of the graph may be pending."""

    @abstractmethod
    def launch_graph(
        self, stream: StreamHandle, graph: GraphExecHandle, *, name: str = "graph", on_caller: bool = False
    ) -> Ticket:
        """Run the recorded operations in order, as one operation; its fault names the node."""

    def run_graph(self, stream: StreamHandle, graph: GraphExecHandle, *, name: str = "graph") -> FaultRecord | None:
        """Launch a graph, wait for the end, take the fault: to `launch_graph` what `launch_sync` is to `launch`."""
        ticket = self.launch_graph(stream, graph, name=name, on_caller=True)
        if self.wait(ticket) is Status.DONE:
            return None
        record = self.fault(ticket)
        self.take_fault(stream)
        return record


class Driver(ABC):
    """One kind of device."""

    kind: DriverKind

    @abstractmethod
    def device_count(self) -> int: ...

    @abstractmethod
    def open(self, ordinal: int = 0) -> DriverDevice:
        """Open a device; ArgumentError for an ordinal that does not exist. Each call opens it anew."""
