"""A stream of the cuda driver: sequence numbers, completion, faults, and the operations that are still under way.

Completion. A pinned word of the stream holds the number of the last operation known to have run: *markers* (stream
value writes) store it. A marker follows every operation but kernel launches, whose next marker comes with the next
other operation, with the 32nd launch, before anything that may block, or when somebody asks. So a chain of launches
costs one marker for 32, and a wait for a launch never waits for an operation behind it that may block.

Failing. The host sees a fault when it sees that the operation has run. Operations enqueued after that are not run.
Those that were enqueued before *may have run* on the GPU, which no flag can stop: they are reported SKIPPED all the
same, and what they wrote counts as undefined. Host callbacks and copies into pageable memory are really skipped.

Depth. The NVIDIA driver blocks a caller with about a thousand operations pending, for ever if the stream waits for
that caller. So beyond `DEPTH` operations wait in a backlog, which the device's pump enqueues as others complete.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from peertile.errors import DeviceFault, InternalError, PeertileError, UsageError
from peertile.runtime.driver import (
    PRINT_HEADER_BYTES,
    FaultKind,
    FaultRecord,
    Grid,
    LaunchOptions,
    PrintSink,
    Status,
    StreamHandle,
    Ticket,
    print_records,
)
from peertile.runtime.drivers.cuda_api import CudaApi, CudaError
from peertile.runtime.drivers.cuda_memory import words_at

if TYPE_CHECKING:
    from peertile.runtime.drivers.cuda import CudaDevice

__all__ = ["BLOCK_SLOTS", "FAULT_WORDS", "Block", "CudaStream", "HostWork", "Op", "Params", "Slot", "Target", "state"]

DEPTH: Final = 256
MARK_EVERY: Final = 32
BLOCK_SLOTS: Final = 64
FAULT_WORDS: Final = 16
LAUNCH_BYTES: Final = 64
MAX_PARAMS: Final = 4096
HIDDEN: Final = struct.Struct("<10Q")
"""The words after the argument block, see backends/cuda/layout.py."""
PRINT_BYTES: Final = (1 << 20) - PRINT_HEADER_BYTES

state: Final = threading.RLock()
"""Protects what the host knows of the operations of every stream: pending, spans, settled. Never held during a
driver call or a user's function, so that host functions can take it."""


class Params:
    """Memory for the parameters of one launch, all of 8 bytes, and the array of pointers to them."""

    __slots__ = ("address", "data", "keep")

    def __init__(self) -> None:
        values = (ctypes.c_uint64 * MAX_PARAMS)()
        base = ctypes.addressof(values)
        pointers = (ctypes.c_uint64 * MAX_PARAMS)(*range(base, base + 8 * MAX_PARAMS, 8))
        self.data = memoryview(values).cast("B")
        self.address = ctypes.addressof(pointers)
        self.keep = values, pointers

    def pack(self, *words: int) -> int:
        """Put unsigned words there; the address of the pointers."""
        struct.pack_into(f"<{len(words)}Q", self.data, 0, *words)
        return self.address


class Block:
    """Fault records (pinned) and launch words (of the device) for so many launches, each used by one at a time."""

    __slots__ = ("address", "faults", "live", "used", "words")

    def __init__(self, device: CudaDevice, slots: int = BLOCK_SLOTS) -> None:
        nbytes = slots * FAULT_WORDS * 8
        self.address = device.pinned.take(nbytes)
        ctypes.memset(self.address, 0, nbytes)
        self.faults = words_at(self.address, nbytes)
        self.words = device.heap.take(slots * LAUNCH_BYTES)
        self.used = 0
        self.live = 0


class Slot:
    """One launch's fault record and launch words."""

    __slots__ = ("at", "block")

    def __init__(self, block: Block, index: int) -> None:
        self.block = block
        self.at = index * FAULT_WORDS

    @property
    def fault_address(self) -> int:
        return self.block.address + 8 * self.at

    @property
    def words_address(self) -> int:
        return self.block.words + self.at // FAULT_WORDS * LAUNCH_BYTES

    def failed(self) -> bool:
        return self.block.faults[self.at] != 0

    def collect(self, op: str, sequence: int) -> FaultRecord | None:
        """The fault recorded here, which is cleared."""
        faults, at = self.block.faults, self.at
        if not faults[at]:
            return None
        kind, program, place, got, limit, address, slot = faults[at + 1 : at + 8]
        faults[at] = 0
        return FaultRecord(FaultKind(kind), op, sequence, program, place, got, limit, address, slot)


class HostWork:
    """A function that runs in stream order on a thread of the NVIDIA driver; `error` is what it raised."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # the thread is not ours: nothing may escape
            self.error = error

    def collect(self, op: str, sequence: int) -> FaultRecord | None:
        error, self.error = self.error, None
        return None if error is None else FaultRecord(FaultKind.CALLBACK, op, sequence, error=error)


class Printer:
    """A print buffer in pinned memory, and what hands its records on."""

    __slots__ = ("_header", "address")

    def __init__(self, device: CudaDevice) -> None:
        self.address = device.pinned.take(PRINT_HEADER_BYTES + PRINT_BYTES)
        self._header = words_at(self.address, PRINT_HEADER_BYTES)
        self._reset(PRINT_HEADER_BYTES + PRINT_BYTES)

    def _reset(self, nbytes: int) -> None:
        ctypes.memset(self.address, 0xFF, nbytes)
        self._header[0], self._header[1] = PRINT_BYTES, 0

    def drain(self, sink: PrintSink) -> None:
        written = self._header[1]
        size = PRINT_HEADER_BYTES + min(written, PRINT_BYTES)
        data = ctypes.string_at(self.address, size)
        self._reset(size)
        for record in print_records(memoryview(data)):
            sink(*record)
        if written > PRINT_BYTES:
            sink(-1, -1, b"... output beyond the print buffer was lost")


class Op(ABC):
    """One operation, as enqueued or as recorded in a graph.

    `issue` calls the driver and returns what `collect` and `release` need once it has run; neither of those calls
    the driver. An op may be issued any number of times.
    """

    __slots__ = ("name",)

    may_block = False  # may wait for something that is not in its stream
    touches_host = False  # pageable memory may change while it runs, or its order with such changes counts
    launches = False  # a kernel launch, which needs no marker of its own
    always_runs = False  # also on a failed stream

    def __init__(self, name: str) -> None:
        self.name = name

    def ready(self) -> bool:
        """Whether it can be issued already."""
        return True

    @abstractmethod
    def issue(self, target: Target) -> Any: ...

    def failed(self, issued: Any) -> bool:
        """Whether it is known to have failed; for what follows in the same graph."""
        return False

    def over(self, issued: Any) -> bool:
        """Whether it is really over once the stream has passed it."""
        return True

    def collect(self, issued: Any, sequence: int, *, skipped: bool) -> FaultRecord | None:
        """It has run: its fault, and what is left to do on the host (not if it counts as skipped)."""
        return None

    def release(self, issued: Any) -> None:
        """It will not run again."""
        return None


class _Skipped(Op):
    """Stands for an operation that was not issued."""

    __slots__ = ()

    def issue(self, target: Target) -> Any:
        return None


class _Broken(Op):
    """Stands for an operation from the backlog that the driver refused."""

    __slots__ = ()

    def issue(self, target: Target) -> Any:
        return None

    def collect(self, issued: Any, sequence: int, *, skipped: bool) -> FaultRecord | None:
        return FaultRecord(FaultKind.DEVICE, self.name, sequence, error=issued)


class Prepared(Op):
    """What is the same for every launch with the same options, made once. Issued: the launch's slot."""

    __slots__ = ("abort", "options", "plain", "timeout_ns")

    launches = True

    def __init__(self, options: LaunchOptions, abort: int, timeout_ns: int) -> None:
        super().__init__(options.name)
        self.options = options
        self.abort = abort
        self.timeout_ns = timeout_ns
        self.plain = options.on_print is None and not options.cooperative

    def issue(self, target: Target) -> Any:
        raise InternalError("Prepared is issued by CudaStream.launch")

    def collect(self, issued: Any, sequence: int, *, skipped: bool) -> FaultRecord | None:
        record: FaultRecord | None = issued.collect(self.name, sequence)
        return record

    def release(self, issued: Any) -> None:
        issued.block.live -= 1


class Target(ABC):
    """Where operations are issued: a stream, or a graph that is being made."""

    device: CudaDevice
    api: CudaApi
    cu: Any
    params: Params
    in_graph: bool

    @abstractmethod
    def slot(self) -> Slot: ...

    @abstractmethod
    def scratch(self, nbytes: int) -> int:
        """Memory of the device, aligned to 256, for one launch after the other."""

    @abstractmethod
    def printer(self) -> Printer: ...

    @abstractmethod
    def host(self, function: Callable[[], None]) -> HostWork:
        """Run `function` in stream order, unless something before it failed."""

    @abstractmethod
    def may_read_host_now(self) -> bool:
        """Whether pageable memory holds now what it will hold when the operation runs."""

    @abstractmethod
    def sequence(self) -> int:
        """Number of the operation that is being issued."""


class _Span:
    """Operations (first, last] count as skipped because `first` failed; last is None until the fault is taken."""

    __slots__ = ("first", "last", "record")

    def __init__(self, first: int, record: FaultRecord) -> None:
        self.first, self.record = first, record
        self.last: int | None = None

    def covers(self, sequence: int) -> bool:
        return self.first <= sequence and (self.last is None or sequence <= self.last)


class CudaStream(StreamHandle, Target):
    """See the module docstring. `submit` order: number, then issue or backlog, then marker, all under `lock`."""

    __slots__ = (
        "api", "backlog", "block", "blocks", "capture", "closed", "cu", "destroyed", "device", "issued", "lock",
        "marked", "name", "number", "params", "pending", "print_buffer", "retired", "scratch_memory", "settled",
        "spans", "submitted", "unclean", "unmarked", "word", "word_address",
    )  # fmt: skip

    in_graph = False

    def __init__(self, device: CudaDevice, priority: int, number: int) -> None:
        self.device = device
        self.api = device.api
        self.number = number
        self.cu = self.api.create_stream(priority)
        self.word_address = device.pinned.take(64)
        self.word = words_at(self.word_address, 8)
        self.word[0] = 0
        self.params = Params()
        self.lock = threading.RLock()  # protects what follows up to `unmarked`; held while operations are issued
        self.capture: list[Op] | None = None
        self.closed = False
        self.destroyed = False
        self.submitted = self.issued = self.marked = 0
        self.name = ""  # of the last operation
        self.backlog: deque[tuple[int, Op]] = deque()
        self.block: Block | None = None
        self.blocks: deque[Block] = deque()
        self.scratch_memory: tuple[int, int] = (0, 0)  # bytes, address
        self.retired: list[tuple[int, int]] = []  # (last operation that may use it, scratch address)
        self.print_buffer: Printer | None = None
        self.unmarked = 0  # operations issued since the last marker
        # Under `state`; the issuer appends to `pending` without it.
        self.pending: deque[tuple[int, Op, Any]] = deque()
        self.spans: list[_Span] = []
        self.settled = 0
        self.unclean = 0  # operations in backlog and pending that touch pageable memory

    def __repr__(self) -> str:
        return f"CudaStream({self.number})"

    # ------------------------------------------------------------------------------------------------ enqueue

    def submit(self, op: Op, *, awaited: bool = False) -> Ticket:
        """Enqueue or record; called with the device's context current. `awaited`: somebody is about to wait."""
        with self.lock:
            if self.capture is not None:
                self.capture.append(op)
                return Ticket(self, -1, op.name)
            self.usable()
            self.look()
            sequence = self.submitted + 1
            self._unclean(op, 1)
            if self.backlog or self.issued - self.word[0] >= DEPTH or not op.ready():
                self.backlog.append((sequence, op))
                self.device.pump.add_backlog(self)
            else:
                try:
                    self._issue(sequence, op, awaited)
                except BaseException:
                    self._unclean(op, -1)
                    raise
            self.submitted = sequence
            self.name = op.name
        return Ticket(self, sequence, op.name)

    def launch(self, module: Any, grid: Grid, args: bytes, prepared: Prepared, *, awaited: bool) -> Ticket | None:
        """A launch of a kernel without scratch or output, to a stream that takes it at once: what `submit` does for
        a `Launch`, without objects. None when it is not so simple, or wrong: the long way sees to it."""
        n0, n1, n2 = grid
        programs = n0 * n1 * n2
        n = module.n_bytes
        waits = module.waits
        if not (0 < programs <= module.most and n0 > 0 and n1 > 0 and len(args) == n):
            return None
        with self.lock:
            seen = self.word[0]
            if seen > self.settled:
                self.settle(seen)
            block = self.block
            if (
                self.capture is not None
                or self.closed
                or self.backlog
                or self.issued - seen >= DEPTH
                or self.failed
                or block is None
                or block.used == BLOCK_SLOTS
                or self.api.current_context() != self.device.context_number
            ):
                return None
            if waits and self.marked < self.issued:
                self._mark()
            used = block.used
            params = self.params
            data = params.data
            data[:n] = args
            HIDDEN.pack_into(
                data, n, n0, n1, n2, prepared.abort, block.address + used * FAULT_WORDS * 8, prepared.timeout_ns,
                block.words + used * LAUNCH_BYTES, 0, 0, 0,
            )  # fmt: skip
            self.api.launch(
                module.function, programs, module.threads, module.shared, self.cu, params.address,
                waits and programs > 1,
            )  # fmt: skip
            block.used = used + 1
            block.live += 1
            sequence = self.submitted = self.issued = self.submitted + 1
            self.name = prepared.name
            self.pending.append((sequence, prepared, Slot(block, used)))
            self.unmarked += 1
            if awaited or self.unmarked >= MARK_EVERY:
                self._mark()
        return Ticket(self, sequence, prepared.name)

    def _unclean(self, op: Op, change: int) -> None:
        if op.touches_host:
            with state:
                self.unclean += change

    def _issue(self, sequence: int, op: Op, awaited: bool = False) -> None:
        if self.failed and not op.always_runs:
            self.pending.append((sequence, _Skipped(op.name), None))
        else:
            if op.may_block and self.marked < self.issued:
                self._mark()
            self.issued = sequence  # `sequence()` is asked during the issue
            try:
                issued = op.issue(self)
            except BaseException:
                self.issued = sequence - 1
                raise
            self.pending.append((sequence, op, issued))
        self.issued = sequence
        self.unmarked += 1
        if awaited or not op.launches or self.unmarked >= MARK_EVERY:
            self._mark()

    def _mark(self) -> None:
        self.api.write_value(self.cu, self.word_address, self.issued, 64)
        self.marked = self.issued
        self.unmarked = 0

    def flush(self) -> bool:
        """Issue what the backlog holds, as far as possible; whether something is left. The pump calls it."""
        with self.lock:
            self.look()
            while self.backlog and self.issued - self.word[0] < DEPTH and self.backlog[0][1].ready():
                sequence, op = self.backlog.popleft()
                try:
                    self._issue(sequence, op)
                except (CudaError, PeertileError) as error:
                    if isinstance(error, CudaError) and error.sticky:
                        raise
                    self.issued = sequence
                    self.pending.append((sequence, _Broken(op.name), self.device.translate(error)))
            if self.marked < self.issued and not self.destroyed:
                self._mark()
            if self.closed and not self.backlog:
                self._destroy()
            return bool(self.backlog)

    def want(self, sequence: int) -> None:
        """Somebody waits for this operation: see to it that a marker comes."""
        with self.lock:
            if self.marked < sequence <= self.issued and not self.destroyed:
                self._mark()

    def usable(self) -> None:
        if self.closed:
            raise UsageError("stream: expected a live stream, got one that was destroyed")

    def close(self) -> None:
        with self.lock:
            self.usable()
            self.closed = True
            if not self.backlog:
                self._destroy()

    def _destroy(self) -> None:
        if not self.destroyed:
            if self.marked < self.issued:
                self._mark()
            self.destroyed = True
            self.api.destroy_stream(self.cu)

    # ------------------------------------------------------------------------------------------------- target

    def sequence(self) -> int:
        return self.issued

    def slot(self) -> Slot:
        block = self.block
        if block is None or block.used == BLOCK_SLOTS:
            if block is not None:
                self.blocks.append(block)
            if self.blocks and self.blocks[0].live == 0:
                block = self.blocks.popleft()
            else:
                block = Block(self.device)
            block.used = 0
            # In stream order: the launches that used the words before have ended by then.
            self.api.fill(block.words, 0, 4, BLOCK_SLOTS * LAUNCH_BYTES // 4, self.cu)
            self.block = block
        slot = Slot(block, block.used)
        block.used += 1
        block.live += 1
        return slot

    def scratch(self, nbytes: int) -> int:
        have, address = self.scratch_memory
        if nbytes <= have:
            return address
        for last, old in [r for r in self.retired if r[0] <= self.settled]:
            self.retired.remove((last, old))
            self.device.heap.give(old)
        if have:
            self.retired.append((self.issued, address))
        size = 1 << max(nbytes - 1, (1 << 20) - 1).bit_length()
        self.scratch_memory = size, self.device.heap.take(size)
        return self.scratch_memory[1]

    def printer(self) -> Printer:
        if self.print_buffer is None:
            self.print_buffer = Printer(self.device)
        return self.print_buffer

    def may_read_host_now(self) -> bool:
        return self.unclean <= 1  # the one is the operation itself

    def host(self, function: Callable[[], None]) -> HostWork:
        work = HostWork()
        sequence = self.issued

        def run() -> None:
            self.settle(sequence - 1)  # this runs, so all before has run
            # What is not settled even so is a wait that is being ended at its bound.
            if not self.failed and self.settled == sequence - 1:
                work.run(function)

        self.api.host_function(self.cu, run)
        return work

    # ------------------------------------------------------------------------------------------------- status

    @property
    def failed(self) -> bool:
        return bool(self.spans) and self.spans[-1].last is None

    def look(self) -> None:
        """Take note of what has run."""
        seen = self.word[0]
        if seen > self.settled:
            self.settle(seen)

    def settle(self, through: int) -> None:
        """The stream has passed all operations up to `through`: take note of their faults, let go of what they
        held."""
        with state:
            pending = self.pending
            while pending and pending[0][0] <= through and pending[0][1].over(pending[0][2]):
                sequence, op, issued = pending.popleft()
                record = op.collect(issued, sequence, skipped=self.failed)
                op.release(issued)
                if record is not None and not self.failed:
                    self.spans.append(_Span(sequence, record))
                if op.touches_host:
                    self.unclean -= 1
                self.settled = sequence

    def span(self, sequence: int) -> FaultRecord | None:
        """The fault that an operation failed or was skipped by."""
        with state:
            span = next((s for s in reversed(self.spans) if s.covers(sequence)), None)
        return None if span is None else span.record

    def status(self, sequence: int) -> Status:
        """Of an operation that has run."""
        if not self.spans:
            return Status.DONE
        record = self.span(sequence)
        if record is None:
            return Status.DONE
        return Status.FAULTED if record.sequence == sequence else Status.SKIPPED

    def done(self, sequence: int) -> bool:
        """Whether an operation is known to have run."""
        if sequence <= self.settled:
            return True
        self.look()
        return sequence <= self.settled

    def fault(self, sequence: int, name: str) -> FaultRecord | None:
        record = self.span(sequence) if self.done(sequence) else None
        if record is None or record.sequence == sequence:
            return record
        return FaultRecord(FaultKind.SKIPPED, name, sequence, cause=record)

    def take_fault(self) -> FaultRecord | None:
        with self.lock:
            self.look()
            with state:
                if not self.failed:
                    return None
                span = self.spans[-1]
                span.last = self.submitted
                return span.record

    def names_under_way(self) -> str | None:
        """The operation at the head of the queue, which is where the device was."""
        with state:
            return self.pending[0][1].name if self.pending else None

    def lose(self, error: DeviceFault) -> None:
        """The device is lost: what has not run by now never will."""
        self.look()
        with state:
            pending, self.pending = self.pending, deque()
            names = [(sequence, op.name) for sequence, op, _ in pending]
            names += [(sequence, op.name) for sequence, op in self.backlog]
            self.backlog.clear()
            if names and not self.failed:
                sequence, name = names[0]
                self.spans.append(_Span(sequence, FaultRecord(FaultKind.DEVICE, name, sequence, error=error)))
            self.settled = max(self.submitted, self.settled, names[-1][0] if names else 0)
