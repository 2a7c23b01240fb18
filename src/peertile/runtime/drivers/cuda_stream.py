"""A stream of the cuda driver: sequence numbers, completion, faults, and the operations that are still under way.

Completion. A pinned word of the stream holds the number of the last operation known to have run: *markers* (stream
value writes) store it. A marker follows every operation but kernel launches, whose next marker comes with the next
other operation, with the 32nd launch, before anything that may block, or when somebody asks. So a chain of launches
costs one marker for 32, and a wait for a launch never waits for an operation behind it that may block. Kernels that may
block and *tell* when they begin (all that are compiled from the language) need no marker in front of them: between two
of them it would take the GPU about as long as a small one of them.

Launches without output are made by native code (`cuda_native.py`), which shares the words of the stream's *lane*, and
are kept track of in runs, not one by one.

Failing. The host sees a fault when it sees that the operation has run. Operations enqueued after that are not run.
Those that were enqueued before *may have run* on the GPU, which no flag can stop: they are reported SKIPPED all the
same, and what they wrote counts as undefined. Host callbacks and copies into pageable memory are really skipped.

Depth. The NVIDIA driver blocks a caller with about a thousand operations pending, for ever if the stream waits for
that caller; with functions of the host among them, with a few dozen. So beyond `DEPTH` operations, or `HOST_DEPTH` that
call the host, wait in a backlog, which the device's pump enqueues as others complete.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from peertile.backends.cpu.target import host_arch
from peertile.errors import DeviceFault, PeertileError, UsageError
from peertile.runtime.driver import (
    PRINT_HEADER_BYTES,
    FaultKind,
    FaultRecord,
    PrintSink,
    Status,
    StreamHandle,
    Ticket,
    print_records,
)
from peertile.runtime.drivers.cuda_api import CudaApi, CudaError, LaunchConfig
from peertile.runtime.drivers.cuda_feeder import AFTER, NEVER, Ring
from peertile.runtime.drivers.cuda_launches import (
    BLOCK_SLOTS,
    FAULT_WORDS,
    LAUNCH_BYTES,
    Block,
    CudaLaunch,
    Launches,
    Slot,
)
from peertile.runtime.drivers.cuda_memory import words_at
from peertile.runtime.drivers.cuda_native import CLOSELY, FAILED, LONG_WAY, TELLING, Lane
from peertile.runtime.drivers.cuda_native_feeding import Feeding
from peertile.runtime.drivers.cuda_waits import STREAM_WAITS

if TYPE_CHECKING:
    from peertile.runtime.drivers.cuda import CudaDevice

__all__ = ["LOOK_MASK", "CudaStream", "HostWork", "Op", "Params", "Printer", "Target", "state"]

DEPTH: Final = 256
HOST_DEPTH: Final = 8
MARK_EVERY: Final = 32
MAX_PARAMS: Final = 4096
_ISSUED, _MARKED, _USED, _POSTED = int(Lane.ISSUED), int(Lane.MARKED), int(Lane.USED), int(Lane.POSTED)
_TELLING, _TOLD_DONE = int(Lane.TELLING), int(Lane.TOLD_DONE)
_IN_ORDER = host_arch() == "x86_64"
LOOK_MASK: Final = MARK_EVERY - 1
"""Launches take note of what has run when their number has none of these bits: as often as markers come."""
HIDDEN: Final = struct.Struct("<10Q")
"""The words after the argument block, see backends/cuda/layout.py."""
PRINT_BYTES: Final = (1 << 20) - PRINT_HEADER_BYTES

Call = Callable[[int, int, bytes, int], int]
"""A function of native code that launches."""

state: Final = threading.RLock()
"""Protects what the host knows of the operations of every stream: pending, spans, settled. Never held during a
driver call or a user's function, so that host functions can take it."""


class Params:
    """Memory for the parameters of one launch, all of 8 bytes, and the array of pointers to them."""

    __slots__ = ("address", "data", "data_address", "keep")

    def __init__(self) -> None:
        values = (ctypes.c_uint64 * MAX_PARAMS)()
        base = self.data_address = ctypes.addressof(values)
        pointers = (ctypes.c_uint64 * MAX_PARAMS)(*range(base, base + 8 * MAX_PARAMS, 8))
        self.data = memoryview(values).cast("B")
        self.address = ctypes.addressof(pointers)
        self.keep = values, pointers

    def pack(self, *words: int) -> int:
        """Put unsigned words there; the address of the pointers."""
        struct.pack_into(f"<{len(words)}Q", self.data, 0, *words)
        return self.address


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
    calls_host = False  # may run a function of the host
    always_runs = False  # also on a failed stream
    waits_in_stream = False  # a wait of the stream itself, which the pump ends at its bound

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


class Target(ABC):
    """Where operations are issued: a stream, or a graph that is being made."""

    device: CudaDevice
    api: CudaApi
    cu: Any
    params: Params
    in_graph: bool
    lets_in = 0
    """Bits that tell a kernel that waits when it may let the next launch begin."""

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
        "api", "backlog", "block", "blocks", "calls", "capture", "closed", "config", "cu", "destroyed", "device",
        "host_threads", "lane", "lane_address", "lane_memory", "lock", "name", "number", "params", "pending",
        "print_buffer", "retired", "ring", "run", "settled", "spans", "unclean", "word", "word_address",
    )  # fmt: skip

    in_graph = False

    def __init__(self, device: CudaDevice, priority: int, number: int) -> None:
        self.device = device
        self.api = device.api
        self.host_threads = device.api.host_threads
        self.number = number
        self.cu = self.api.create_stream(priority)
        self.word_address = device.pinned.take(64)
        self.word = words_at(self.word_address, 8)
        self.word[0] = 0
        self.params = Params()
        words = Lane.COUNT + 2 * TELLING
        self.lane_memory = (ctypes.c_int64 * (words + 8))()
        unaligned = ctypes.addressof(self.lane_memory)
        self.lane_address = -(-unaligned // 64) * 64
        first = (self.lane_address - unaligned) // 8
        self.lane = memoryview(self.lane_memory).cast("B").cast("q")[first : first + words]
        values = {
            Lane.STREAM: int(self.cu), Lane.CONTEXT: device.context_number, Lane.WORD: self.word_address,
            Lane.PARAMS: self.params.data_address, Lane.POINTERS: self.params.address, Lane.DEPTH: 0,
            Lane.TOLD: self.lane_address + 8 * Lane.COUNT, Lane.MARK_EVERY: MARK_EVERY,
            Lane.CLOSELY: AFTER if device.feeder.serves else NEVER,
        }  # fmt: skip
        *entries, values[Lane.LAUNCH_EX] = self.api.entries()
        values |= {Lane(Lane.LAUNCH_KERNEL + k): address for k, address in enumerate(entries)}
        self.config = LaunchConfig(int(self.cu))
        values[Lane.CONFIG] = self.config.address
        for index, value in values.items():
            self.lane[index] = value
        self.lock = threading.RLock()  # protects what follows up to `run`; held while operations are issued
        self.ring: Ring | None = None  # where launches wait for the device's feeder, once it looks after the stream
        self.capture: list[Op] | None = None
        self.closed = False
        self.destroyed = False
        self.name = ""  # of the last operation
        self.backlog: deque[tuple[int, Op]] = deque()
        self.block: Block | None = None
        self.blocks: deque[Block] = deque()
        self.retired: list[tuple[int, int]] = []  # (last operation that may use it, scratch address)
        self.print_buffer: Printer | None = None
        self.run: Launches | None = None  # the last entry of `pending`, while launches may be added to it
        # Under `state`; the issuer appends to `pending`, and to the run, without it.
        self.pending: deque[tuple[int, Op, Any] | Launches] = deque()
        self.spans: list[_Span] = []
        self.settled = 0
        self.unclean = 0  # operations in backlog and pending that touch pageable memory
        self.calls = 0  # operations under way that call the host

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
            self.drain()
            self.look()
            sequence = self.submitted + 1
            self._unclean(op, 1)
            if self.backlog or not self._takes(op):
                self.backlog.append((sequence, op))
                self.gate()
                self.device.pump.add_backlog(self)
            else:
                try:
                    self._issue(sequence, op, awaited)
                except BaseException:
                    self._unclean(op, -1)
                    raise
            self.name = op.name
        return Ticket(self, sequence, op.name)

    @property
    def submitted(self) -> int:
        """Number of the last operation."""
        backlog = self.backlog
        try:
            return backlog[-1][0] if backlog else max(self.lane[_POSTED], self.lane[_ISSUED])
        except IndexError:  # the pump was faster
            return self.lane[_ISSUED]

    def drain(self) -> None:
        """Have all launches made that are posted: `lock` is held, and nothing is posted meanwhile."""
        lane = self.lane
        posted = self.ring is not None and (lane[Lane.HEAD] != lane[Lane.DONE] or lane[Lane.JAM])
        if posted and self.device.native.feed(self.lane_address):
            self._unjam()

    def _unjam(self) -> None:
        """The NVIDIA driver refused a launch that was posted: it fails, and those behind it do not run."""
        lane = self.lane
        error = self.api.refused(lane[Lane.ERROR])
        first, last = lane[_ISSUED] + 1, lane[_POSTED]
        run, self.run = self.run, None
        names = [launch.name for launch in run.ops[len(run.ops) - (last - first + 1) :]] if run is not None else []
        if run is not None:
            del run.ops[len(run.ops) - len(names) :]
        lane[Lane.DONE] = lane[Lane.HEAD]
        lane[Lane.JAM] = 0
        lane[_ISSUED] = last
        told = self.device.translate(error)
        for k, name in enumerate(names):
            self.pending.append((first + k, _Broken(name) if k == 0 else _Skipped(name), None if k else told))
        if error.sticky:
            self.device.failed_call(error)
        else:
            self._mark()

    def gate(self) -> None:
        """Let native code launch, or not: called whenever something changes that this depends on."""
        with state:
            lost = self.device.lost is not None
            shut = lost or self.closed or self.failed or self.capture is not None or bool(self.backlog)
            self.lane[Lane.DEPTH] = 0 if shut or self.block is None else DEPTH

    @property
    def issued(self) -> int:
        """Number of the last operation that the NVIDIA driver was given."""
        return self.lane[_ISSUED]

    @property
    def marked(self) -> int:
        """Number of the last operation that a marker follows."""
        return self.lane[_MARKED]

    def launch(self, launch: CudaLaunch, args: bytes, call: Call, last: int) -> int:
        """A launch by native code, `call(lane, plan, args, last)`: its number, or LONG_WAY when it is not so simple or
        wrong, and the long way sees to it. What `submit` does for a `Launch`, without objects."""
        with self.lock:
            if self.run is None and self._open_run() is None:
                return LONG_WAY
            return self.launched(call(self.lane_address, launch.address, args, last), launch, args, None)

    def launched(self, sequence: int, launch: CudaLaunch, args: bytes, call: Call | None) -> int:
        """Take note of a launch that native code made, or not, by its answer; `lock` is held. The same answer, plain.
        With `call` and no run to add it to, try in one."""
        run = self.run
        if run is None:
            run = self._open_run()
            if run is None or call is None:
                return LONG_WAY
            sequence = call(self.lane_address, launch.address, args, 0)
        if sequence > 0:
            run.ops.append(launch)
            self.name = launch.name
            if sequence > CLOSELY:
                sequence -= CLOSELY
                self._feed()
                self.drain()
            if not sequence & LOOK_MASK:
                self.look()
        elif sequence == FAILED:
            raise self.api.refused(self.lane[Lane.ERROR])
        return sequence

    def linked(self) -> None:
        """Native code posted a launch: see to it that somebody makes it, and take note of what has run."""
        with self.lock:
            if self.ring is not None and not self.device.feeder.words[Feeding.AWAKE]:
                self._feed()
                self.drain()
            self.look()

    def _feed(self) -> None:
        """Launches follow each other closely: let the device's feeder make them."""
        feeder = self.device.feeder
        if self.ring is None and feeder.serves:
            ring = Ring()
            self.lane[Lane.RING] = ring.address
            if feeder.add(self.lane_memory, self.lane_address, ring):
                self.ring = ring
                self.lane[Lane.FEEDER] = feeder.address
            else:
                self.lane[Lane.CLOSELY] = NEVER
        if self.ring is not None:
            feeder.wake()

    def launch_chain(
        self, launches: Sequence[tuple[CudaLaunch, bytes]], call: Callable[[int, list[int], list[bytes], int], int]
    ) -> tuple[int, int]:
        """As many of the first of the launches as native code makes in one go: the first one's number, how many."""
        plans, blocks = [launch.address for launch, _ in launches], [args for _, args in launches]
        with self.lock:
            self.look()
            run = self.run or self._open_run()
            if run is None:
                return 0, 0
            first = self.submitted + 1
            self.lane[Lane.ERROR] = 0
            made = call(self.lane_address, plans, blocks, 0)
            if made:
                run.ops += [launch for launch, _ in launches[:made]]
                self.name = launches[made - 1][0].name
            if self.lane[Lane.JAM]:
                self.drain()
            elif made < len(launches) and self.lane[Lane.ERROR]:
                raise self.api.refused(self.lane[Lane.ERROR])
            if len(launches) >= AFTER:
                self._feed()
            if self.ring is not None and not self.device.feeder.words[Feeding.AWAKE]:
                self.drain()
            return first, made

    def _open_run(self) -> Launches | None:
        """Launches that native code makes from here on; None where it makes none."""
        if self.block is None or not self.lane[Lane.DEPTH]:
            return None
        run = self.run = Launches(self.issued + 1, self.block, self.lane[_USED])
        self.pending.append(run)
        return run

    def _unclean(self, op: Op, change: int) -> None:
        if op.touches_host:
            with state:
                self.unclean += change

    def _takes(self, op: Op) -> bool:
        """Whether it can be enqueued now, and its caller is surely not blocked."""
        if self.issued - self.word[0] >= DEPTH or (op.calls_host and self.calls >= HOST_DEPTH):
            return False
        return op.ready() and (not op.waits_in_stream or STREAM_WAITS.may_begin(self.device.context_number))

    def _issue(self, sequence: int, op: Op, awaited: bool = False) -> None:
        lane = self.lane
        self.run = None
        if self.failed and not op.always_runs:
            self.pending.append((sequence, _Skipped(op.name), None))
        else:
            if op.may_block and self.marked < self.issued:
                self._mark()
            lane[_ISSUED] = sequence  # `sequence()` is asked during the issue
            try:
                issued = op.issue(self)
            except BaseException:
                lane[_ISSUED] = sequence - 1
                raise
            self.pending.append((sequence, op, issued))
        lane[_ISSUED] = sequence
        if awaited or not op.launches or sequence - self.marked >= MARK_EVERY:
            self._mark()

    def _mark(self) -> None:
        issued = self.issued
        self.api.write_value(self.cu, self.word_address, issued, 64)
        self.lane[_MARKED] = issued

    def flush(self) -> bool:
        """Issue what the backlog holds, as far as possible; whether something is left. The pump calls it."""
        with self.lock:
            self.drain()
            self.look()
            while self.backlog and self._takes(self.backlog[0][1]):
                sequence, op = self.backlog[0]
                try:
                    self._issue(sequence, op)
                except (CudaError, PeertileError) as error:
                    if isinstance(error, CudaError) and error.sticky:
                        raise
                    self.lane[_ISSUED] = sequence
                    self.pending.append((sequence, _Broken(op.name), self.device.translate(error)))
                if self.backlog:  # unless the device was lost meanwhile
                    self.backlog.popleft()
            if self.marked < self.issued and not self.destroyed:
                self._mark()
            if self.closed and not self.backlog:
                self._destroy()
            self.gate()
            return bool(self.backlog)

    def want(self, sequence: int) -> None:
        """Somebody waits for this operation: see to it that a marker comes."""
        with self.lock:
            self.drain()
            if self.marked < sequence <= self.issued and not self.destroyed:
                self._mark()

    def usable(self) -> None:
        if self.closed:
            raise UsageError("stream: expected a live stream, got one that was destroyed")

    def close(self) -> None:
        with self.lock:
            self.usable()
            self.drain()
            self.closed = True
            self.gate()
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
        lane, block = self.lane, self.block
        if block is None or lane[_USED] == BLOCK_SLOTS:
            if block is not None:
                self.blocks.append(block)
            if self.blocks and self.blocks[0].live == 0:
                block = self.blocks.popleft()
                ctypes.memset(block.address, 0, BLOCK_SLOTS * FAULT_WORDS * 8)  # launches told here that they began
            else:
                block = Block(self.device)
            lane[Lane.FAULTS], lane[Lane.WORDS], lane[_USED] = block.address, block.words, 0
            lane[Lane.SLOTS] = BLOCK_SLOTS
            # In stream order: the launches that used the words before have ended by then.
            self.api.fill(block.words, 0, 4, BLOCK_SLOTS * LAUNCH_BYTES // 4, self.cu)
            if self.block is None:
                self.block = block
                self.gate()
            self.block = block
        slot = Slot(block, lane[_USED])
        lane[_USED] += 1
        block.live += 1
        return slot

    def scratch(self, nbytes: int) -> int:
        lane = self.lane
        have, address = lane[Lane.SCRATCH_BYTES], lane[Lane.SCRATCH]
        if nbytes <= have:
            turn = lane[Lane.TURN]
            lane[Lane.TURN] = 1 - turn
            return address + turn * have
        for last, old in [r for r in self.retired if r[0] <= self.settled]:
            self.retired.remove((last, old))
            self.device.heap.give(old)
        if have:
            self.retired.append((self.issued, address))
        size = 1 << max(nbytes - 1, (1 << 20) - 1).bit_length()
        lane[Lane.SCRATCH] = address = self.device.heap.take(2 * size)
        lane[Lane.SCRATCH_BYTES], lane[Lane.TURN] = size, 1
        return address

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
            self.count_call(-1)

        self.api.host_function(self.cu, run)
        self.count_call(1)
        return work

    def count_call(self, change: int) -> None:
        """One more operation that calls the host is under way, or one has done so. From any thread."""
        with state:
            self.calls += change

    # ------------------------------------------------------------------------------------------------- status

    @property
    def failed(self) -> bool:
        return bool(self.spans) and self.spans[-1].last is None

    def settle_last(self, sequence: int) -> bool:
        """Whether nothing but this launch was open, and it has run without a fault: the rule where each is waited for,
        and what `done` finds out at greater length."""
        with state:
            run, pending = self.run, self.pending
            if run is None or self.spans or not pending or pending[0] is not run or run.first != sequence:
                return False
            if len(run.ops) != 1 or self.word[0] < sequence or run.block.faults[run.at * FAULT_WORDS]:
                return False
            run.ops.clear()
            run.first += 1
            run.at += 1
            self.settled = sequence
            return True

    def look(self) -> None:
        """Take note of what has run."""
        lane = self.lane
        # Python's own load is not ordered before those of the faults, but by processors that keep loads in order.
        plain = lane[_TELLING] == lane[_TOLD_DONE] and _IN_ORDER
        seen = self.word[0] if plain else self.device.native.seen(self.lane_address)
        if seen > self.settled:
            self.settle(seen)

    def settle(self, through: int) -> None:
        """The stream has passed all operations up to `through`: take note of their faults, let go of what they
        held."""
        with state:
            pending = self.pending
            while pending:
                head = pending[0]
                if isinstance(head, Launches):
                    for sequence, record in head.take(through):
                        if not self.failed:
                            self._fail(_Span(sequence, record))
                    # It may have begun behind operations that are settled, and nothing be in it yet.
                    self.settled = max(self.settled, head.first - 1)
                    if head.first <= head.last or head is self.run:
                        break
                    pending.popleft()
                    head.close()
                    continue
                sequence, op, issued = head
                if sequence > through or not op.over(issued):
                    break
                pending.popleft()
                record_ = op.collect(issued, sequence, skipped=self.failed)
                op.release(issued)
                if record_ is not None and not self.failed:
                    self._fail(_Span(sequence, record_))
                if op.touches_host:
                    self.unclean -= 1
                self.settled = sequence

    def _fail(self, span: _Span) -> None:
        if span.record.kind is FaultKind.WAIT_TIMEOUT:
            span.record = replace(span.record, note=self.device.held_up())
        self.spans.append(span)
        self.gate()

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
                self.gate()
                return span.record

    def names_under_way(self) -> str | None:
        """The operation at the head of the queue, which is where the device was."""
        with state:
            for entry in self.pending:
                if not isinstance(entry, Launches):
                    return entry[1].name
                if entry.ops:
                    return entry.ops[0].name
        return None

    def lose(self, error: DeviceFault) -> None:
        """The device is lost: what has not run by now never will."""
        self.look()
        with state:
            pending, self.pending, self.calls = self.pending, deque(), 0
            names: list[tuple[int, str]] = []
            for entry in pending:
                if isinstance(entry, Launches):
                    names += [(entry.first + k, launch.name) for k, launch in enumerate(entry.ops)]
                else:
                    names.append((entry[0], entry[1].name))
            self.run = None
            names += [(sequence, op.name) for sequence, op in self.backlog]
            self.backlog.clear()
            if names and not self.failed:
                sequence, name = names[0]
                self._fail(_Span(sequence, FaultRecord(FaultKind.DEVICE, name, sequence, error=error)))
            self.settled = max(self.submitted, self.settled, names[-1][0] if names else 0)
            self.gate()
