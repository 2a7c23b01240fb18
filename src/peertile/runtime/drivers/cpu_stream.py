"""A stream of the cpu driver, seen from Python: its native structure, operation slots, thread and faults.

How operations run is in `cpu_native.py`. Here: what a slot holds until its operation is over (names, objects that
must stay alive, Python functions), and which operations failed or were skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from peertile.errors import AllocationError, UsageError
from peertile.runtime.driver import (
    HOST_WAIT_SLICE_NS,
    FaultKind,
    FaultRecord,
    Grid,
    LaunchOptions,
    ModuleHandle,
    PreparedLaunch,
    Status,
    StreamHandle,
    Ticket,
)
from peertile.runtime.drivers.cpu_layout import (
    ARGS,
    CACHE_LINE,
    COMMAND_WORDS,
    EXECUTOR_BYTES,
    STREAM_BYTES,
    C,
    Context,
    Exec,
    Fault,
    Kind,
    Result,
    S,
)
from peertile.runtime.drivers.cpu_library import Native
from peertile.runtime.drivers.cpu_memory import map_anonymous, unmap

__all__ = ["Arenas", "CpuLaunch", "CpuStream", "Operation", "PythonWork", "pack", "words_at"]

HEADER: Final = struct.Struct(f"<{ARGS}q")
COMMAND_BYTES: Final = COMMAND_WORDS * 8
ARGS_AT: Final = ARGS * 8
INLINE_ARGS: Final = COMMAND_BYTES - ARGS_AT
_SLAB, _LARGEST_SLAB = 64, 4096  # operation slots made at a time
_PRUNE_AT: Final = 32  # launches hold nothing but their module: letting go of what is over need not be at once
_FAILED, _SUBMITTED = (
    int(S.FAILED),
    int(S.SUBMITTED),
)  # indexing with a member of an enumeration costs twice as much


def words_at(address: int, nbytes: int) -> memoryview:
    """Native memory as signed 8-byte words; nobody frees it when the view goes."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B").cast("q")


def signed(value: int) -> int:
    """The low 64 bits as a signed number."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def pack(kind: Kind, words: tuple[int, ...], *, python: bool = False) -> bytes:
    """An operation's header: `words` go where C.A and the following are."""
    return HEADER.pack(0, 0, kind, 1 if python else 0, *words, *(0,) * (ARGS - 4 - len(words)))


class Slot:
    """Native memory of one operation."""

    __slots__ = ("address", "data", "words")

    def __init__(self, address: int) -> None:
        self.address = address
        self.data = memoryview((ctypes.c_char * COMMAND_BYTES).from_address(address)).cast("B")
        self.words = self.data.cast("q")


PythonWork = Callable[[], None]
"""What the stream's thread calls for an operation."""


class Operation(NamedTuple):
    """An enqueued operation, as kept until it is over; also a node of a graph."""

    name: str
    header: bytes
    args: bytes
    keep: Any  # objects that must outlive it
    python: PythonWork | None
    arena_bytes: int


class CpuLaunch(PreparedLaunch):
    """A prepared launch. `header` is an operation's, without what differs: the block of arguments and the frames.

    It is also what is kept of such a launch until it is over, as an `Operation` is of others.
    """

    __slots__ = ("arena_bytes", "header", "is_plain", "name", "programs")

    def __init__(
        self, module: ModuleHandle, grid: Grid, options: LaunchOptions, header: bytes, programs: int, arena_bytes: int
    ) -> None:
        super().__init__(module, grid, options)
        self.name = options.name
        self.header = header
        self.programs = programs
        self.arena_bytes = arena_bytes
        self.is_plain = options.on_print is None  # else Python empties a buffer behind every launch


class Entry(NamedTuple):
    """What is kept of an enqueued operation. `held` are objects that must outlive it: its own and a large block of
    arguments; `nodes` those of a graph."""

    name: str
    held: Any
    python: PythonWork | None
    nodes: tuple[Operation, ...] | None


_Pending = tuple[int, Slot, Entry | CpuLaunch]
"""(sequence, slot, what is kept). A bare tuple, as one is made for each launch."""


class _Span:
    """Operations (first, last] were skipped because `first` failed; last is None until the fault is taken."""

    __slots__ = ("first", "last", "record")

    def __init__(self, first: int, record: FaultRecord) -> None:
        self.first, self.record = first, record
        self.last: int | None = None

    def covers(self, sequence: int) -> bool:
        return self.first <= sequence and (self.last is None or sequence <= self.last)


class Arenas:
    """Native memory that the streams of a device take and give back: frames and scratch of waiting launches, the
    streams' own structures, slots of operations. None of it is unmapped before the device is closed: a worker that is
    late may still store the time into the context of a launch that is over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects both lists
        self._free: list[tuple[int, int]] = []  # (size, address)
        self._all: list[tuple[int, int]] = []
        # Given back by finalisers, where no lock may be taken: appending to a deque and popping from it are atomic.
        self._returned: deque[tuple[int, int]] = deque()
        self.structures: deque[int] = deque()
        self.slabs: deque[tuple[int, int]] = deque()  # (address, slots)
        self.printers: deque[int] = deque()

    def take(self, nbytes: int) -> tuple[int, int]:
        size = 1 << max(nbytes - 1, (1 << 20) - 1).bit_length()
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            for k, (have, _) in enumerate(self._free):
                if size <= have <= 4 * size:
                    return self._free.pop(k)
            address = map_anonymous(size)
            if not address:
                raise AllocationError(
                    f"frames of waiting programs: the system has no {size} bytes; use a smaller grid or smaller tiles"
                )
            self._all.append((size, address))
            return size, address

    def give(self, arena: tuple[int, int]) -> None:
        self._returned.append(arena)

    def release(self) -> None:
        with self._lock:
            for size, address in self._all:
                unmap(address, size)
            self._all, self._free = [], []
            self._returned.clear()


class CpuStream(StreamHandle):
    """See the module docstring. Lock order: `lock` is never held while anything runs or sleeps."""

    __slots__ = (
        "__weakref__",
        "address",
        "arena",
        "arenas",
        "callback_error",
        "capture",
        "closed",
        "completed_at",
        "inline_lock",
        "inline_name",
        "inline_nodes",
        "inline_slot",
        "lock",
        "native",
        "number",
        "pending",
        "print_address",
        "retired",
        "slabs",
        "slots",
        "spans",
        "thread",
        "words",
    )

    def __init__(self, native: Native, device_address: int, arenas: Arenas, number: int) -> None:
        self.arenas = arenas
        self.slabs: list[tuple[int, int]] = []
        nbytes = STREAM_BYTES + EXECUTOR_BYTES
        try:
            self.address = arenas.structures.popleft()
            ctypes.memset(self.address, 0, STREAM_BYTES)  # the executor's scratch behind it is as good as new
        except IndexError:
            self.address = map_anonymous(nbytes)
        if not self.address:
            raise AllocationError(f"stream: the system has no {nbytes} bytes; destroy some streams")
        self.native = native
        self.number = number
        self.words = words_at(self.address, STREAM_BYTES)
        self.completed_at = self.address + 8 * S.COMPLETED
        self.lock = threading.Lock()  # protects slots, pending, spans, arena, capture and thread
        self.inline_lock = threading.Lock()  # held by the thread that uses inline_slot
        self.pending: deque[_Pending] = deque()
        self.slots: deque[Slot] = deque()
        self.spans: list[_Span] = []
        self.capture: list[Operation] | None = None
        self.thread: threading.Thread | None = None
        self.closed = False
        self.callback_error: BaseException | None = None
        self.arena: tuple[int, int] = (0, 0)
        self.retired: list[tuple[int, tuple[int, int]]] = []  # (last operation that may use it, arena)
        self.print_address = 0
        self.inline_name = ""  # what the last inline operation was called, and its nodes if it was a graph
        self.inline_nodes: tuple[Operation, ...] | None = None
        self._more_slots()
        self.inline_slot = self.slots.popleft()
        dummy = self.slots.popleft().address  # the queue starts behind an operation that is over
        self.words[S.TAIL] = self.words[S.CURSOR] = dummy
        self.words[S.DEVICE] = device_address
        self.words[S.CONTEXT + Context.FAULT] = self.address + 8 * S.FAULT
        self.words[S.CONTEXT + Context.WORDS] = self.address + 8 * S.WORDS
        self.words[S.EXECUTOR + Exec.LIST] = self.address + STREAM_BYTES + 2 * CACHE_LINE

    def __repr__(self) -> str:
        return f"CpuStream({self.number})"

    def __del__(self) -> None:
        """Nothing can reach the stream any more: no handle, no ticket, no event, no wait of another stream, and not its
        thread, which has ended. Its memory is for the next one."""
        with contextlib.suppress(AttributeError, TypeError):  # not made to the end, or the modules are gone
            if self.closed and self.completed() >= self.words[_SUBMITTED]:
                self.arenas.structures.append(self.address)
                self.arenas.slabs.extend(self.slabs)
                if self.print_address:
                    self.arenas.printers.append(self.print_address)
                for arena in (self.arena, *(arena for _, arena in self.retired)):
                    if arena[0]:
                        self.arenas.give(arena)

    # ------------------------------------------------------------------------------------------------ enqueue

    def _more_slots(self) -> None:
        try:
            base, count = self.arenas.slabs.popleft()
            ctypes.memset(base, 0, count * COMMAND_BYTES)
        except IndexError:
            # As many again as there are: a stream that ten thousand operations wait on asks the system seldom.
            count = min(max(_SLAB, sum(n for _, n in self.slabs)), _LARGEST_SLAB)
            base = map_anonymous(count * COMMAND_BYTES)
        if not base:
            raise AllocationError(f"stream: the system has no {count * COMMAND_BYTES} bytes for operations")
        self.slabs.append((base, count))
        self.slots.extend(Slot(base + k * COMMAND_BYTES) for k in range(count))

    def _prune(self) -> None:
        """Let go of what is over. Its slot is free once the operation behind it is over, too: until then the
        runner may still look at its `next`."""
        completed = self.completed()
        if self.words[_FAILED]:
            self.note_fault()
        pending = self.pending
        while len(pending) > 1 and pending[1][0] <= completed:
            self.slots.append(pending.popleft()[1])
        if pending and pending[0][0] <= completed:
            sequence, slot, entry = pending[0]
            if type(entry) is Entry:
                pending[0] = sequence, slot, Entry(entry.name, None, None, None)

    def settle(self) -> None:
        """Let go of what is over."""
        with self.lock:
            self._prune()

    def arena_for(self, nbytes: int) -> int:
        """Address of at least `nbytes` for frames; called with `lock` held."""
        if nbytes > self.arena[0]:
            new = self.arenas.take(nbytes)
            if self.arena[0]:
                self.retired.append((self.words[S.SUBMITTED], self.arena))
            self.arena = new
        # A launch on the thread of its caller took its frames when its number was not known yet.
        if self.retired and not self.inline_lock.locked():
            completed = self.completed()
            for last, arena in [r for r in self.retired if r[0] <= completed]:
                self.retired.remove((last, arena))
                self.arenas.give(arena)
        return self.arena[1]

    def write(self, slot: Slot, op: Operation) -> Any:
        """Put an operation into a slot; the result must stay alive until it is over. Called with `lock` held."""
        slot.data[:ARGS_AT] = op.header
        if op.arena_bytes:
            slot.words[C.ARENA] = self.arena_for(op.arena_bytes)
        if not op.args:
            return op.keep
        size = len(op.args)
        if size <= INLINE_ARGS:
            slot.data[ARGS_AT : ARGS_AT + size] = op.args
            slot.words[C.ARGS] = slot.address + ARGS_AT
            return op.keep
        buffer = ctypes.create_string_buffer(op.args, size)
        slot.words[C.ARGS] = ctypes.addressof(buffer)
        return op.keep, buffer

    def enqueue(self, op: Operation, nodes: tuple[Operation, ...] | None = None) -> Ticket:
        with self.lock:
            if self.capture is not None:
                self.capture.append(op)
                return Ticket(self, -1, op.name)
            self._usable()
            self._prune()
            slot = self._fresh_slot()
            keep = self.write(slot, op)
            if self.thread is None:
                self._start()
            sequence = self.native.submit(self.address, slot.address)
            self.pending.append((sequence, slot, Entry(op.name, keep, op.python, nodes)))
        return Ticket(self, sequence, op.name)

    def enqueue_launch(self, launch: CpuLaunch, args: bytes) -> int:
        """`enqueue_launches` of one: its sequence number."""
        with self.lock:
            if self.closed or self.thread is None:
                self._usable()
                self._start()
            pending = self.pending
            if len(pending) >= _PRUNE_AT:
                self._prune()
            slot = self.slots.popleft() if self.slots else self._fresh_slot()
            arena = self.arena_for(launch.arena_bytes) if launch.arena_bytes else 0
            sequence: int = self.native.submit_launch(self.address, slot.address, launch.header, args, arena)
            pending.append((sequence, slot, launch))
        return sequence

    def enqueue_launches(self, launches: Sequence[tuple[CpuLaunch, bytes]]) -> Sequence[int]:
        """Enqueue launches whose blocks of arguments fit a slot. The stream is not being captured."""
        submit, address, pending, slots = self.native.submit_launch, self.address, self.pending, self.slots
        with self.lock:
            if self.closed or self.thread is None:
                self._usable()
                self._start()
            if len(pending) >= _PRUNE_AT:
                self._prune()
            sequences = []
            for launch, args in launches:
                slot = slots.popleft() if slots else self._fresh_slot()
                arena = self.arena_for(launch.arena_bytes) if launch.arena_bytes else 0
                sequence = submit(address, slot.address, launch.header, args, arena)
                pending.append((sequence, slot, launch))
                sequences.append(sequence)
        return sequences

    def run_inline(self, op: Operation, nodes: tuple[Operation, ...] | None = None) -> Ticket | None:
        """Run an operation on this thread if the stream is idle: its finished ticket, or None if it is not."""
        if not self.inline_lock.acquire(blocking=False):
            return None
        keep = None
        try:
            with self.lock:
                self._usable()
                keep = self.write(self.inline_slot, op)
            self.inline_name, self.inline_nodes = op.name, nodes
            result = self.native.run_inline(self.address, self.inline_slot.address, HOST_WAIT_SLICE_NS)
            if result == Result.BUSY:
                return None
            sequence = self.inline_slot.words[C.SEQ]
            if result in (Result.SLICE, Result.NEEDS_THREAD):
                self.go_on(sequence)
            elif result == Result.FAULTED:
                with self.lock:
                    self.note_fault()
            return Ticket(self, sequence, op.name)
        except BaseException:
            self.hand_over(op.name, keep, nodes)
            raise
        finally:
            self.inline_lock.release()

    def go_on(self, sequence: int) -> None:
        """Finish an inline operation whose first slice is over."""
        while self.native.host_wait(self.address, sequence, HOST_WAIT_SLICE_NS, 1) != Result.DONE:
            pass  # back in Python now and then, so that signals are seen
        with self.lock:
            self.note_fault()

    def hand_over(self, name: str, keep: Any, nodes: tuple[Operation, ...] | None = None) -> None:
        """After an exception (Ctrl-C): if the inline operation is not over, the stream's thread finishes it and
        owns its slot."""
        with self.lock:
            slot = self.inline_slot
            if self.words[S.CURRENT] != slot.address:
                return
            self.inline_slot = self._fresh_slot()
            self.retired = [(max(last, slot.words[C.SEQ]), arena) for last, arena in self.retired]
            # The stream was idle, so nothing is pending before this operation; something may be behind it.
            self.pending.appendleft((slot.words[C.SEQ], slot, Entry(name, keep, None, nodes)))
            if self.thread is None:
                self._start()
            self.native.wake_stream(self.address)

    def _fresh_slot(self) -> Slot:
        if not self.slots:
            self._more_slots()
        return self.slots.popleft()

    def _usable(self) -> None:
        if self.closed:
            raise UsageError("stream: expected a live stream, got one that was destroyed")

    # ------------------------------------------------------------------------------------------------- thread

    def _start(self) -> None:
        self.thread = threading.Thread(target=self._serve, name=f"peertile-stream-{self.number}", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        self.words[S.TID] = threading.get_native_id()
        held = 0
        while self.native.stream_loop(self.address, held) == Result.PYTHON:
            work = self._work()
            failed = 0
            callback_threads.add(threading.get_ident())
            try:
                work()
            except BaseException as error:
                self.callback_error = error
                failed = 1
            finally:
                callback_threads.discard(threading.get_ident())
                del work  # what it holds must not wait for the next one
            self.words[S.PYTHON_FAILED] = failed
            held = 1

    def _work(self) -> PythonWork:
        """What Python is asked to do for the operation at hand."""
        current = words_at(self.words[S.CURRENT], COMMAND_BYTES)
        with self.lock:
            self._prune()  # else a long queue of callbacks is gone through from its beginning for each of them
            entry = next(kept for sequence, _, kept in self.pending if sequence == current[C.SEQ])
        assert type(entry) is Entry  # a launch of CpuLaunch has no work in Python
        work = entry.python if entry.nodes is None else entry.nodes[self.words[S.NODE]].python
        assert work is not None
        return work

    def stop(self) -> None:
        """Let the thread end once the queue is empty; nothing can be enqueued any more."""
        with self.lock:
            self.closed = True
            ctypes.c_int32.from_address(self.address + 8 * S.STOP).value = 1
            self.native.wake_stream(self.address)

    # ------------------------------------------------------------------------------------------------- status

    def completed(self) -> int:
        """Number of the last operation that is over; what it wrote, and whether it failed, is seen from here on."""
        return self.native.acquired(self.completed_at)

    def query(self, ticket: Ticket) -> Status:
        sequence = ticket.sequence
        if sequence > self.completed():
            return Status.PENDING
        if not self.spans and not self.words[_FAILED]:
            return Status.DONE
        with self.lock:
            span = self._span(sequence)
        if span is None:
            return Status.DONE
        return Status.FAULTED if span.first == sequence else Status.SKIPPED

    def fault(self, sequence: int, name: str) -> FaultRecord | None:
        if sequence > self.completed():
            return None
        with self.lock:
            span = self._span(sequence)
        if span is None:
            return None
        if span.first == sequence:
            return span.record
        return FaultRecord(FaultKind.SKIPPED, name, sequence, cause=span.record)

    def take_fault(self) -> FaultRecord | None:
        with self.lock:
            record = self.note_fault()
            if record is not None:
                self.spans[-1].last = self.native.take_fault(self.address)
            return record

    def _span(self, sequence: int) -> _Span | None:
        self.note_fault()
        return next((s for s in reversed(self.spans) if s.covers(sequence)), None)

    def note_fault(self) -> FaultRecord | None:
        """The fault that the stream is failed by now, remembered; called with `lock` held."""
        if not self.words[_FAILED]:
            return None
        failed = self.native.acquired(self.address + 8 * S.FAILED)
        if self.spans and self.spans[-1].first == failed:
            return self.spans[-1].record
        record = self._record(failed)
        self.spans.append(_Span(failed, record))
        return record

    def _record(self, sequence: int) -> FaultRecord:
        entry = next((kept for number, _, kept in self.pending if number == sequence), None)
        nodes: tuple[Operation, ...] | None = None
        if entry is None:
            name, nodes = self.inline_name, self.inline_nodes
        else:
            name = entry.name
            if type(entry) is Entry:
                nodes = entry.nodes
        words = self.words[S.FAULT : S.FAULT + 16]
        node = words[Fault.NODE]
        if nodes is not None:
            name = f"{nodes[node].name} (node {node} of {name})"
        kind = FaultKind(words[Fault.KIND])
        record = FaultRecord(
            kind=kind,
            op=name,
            sequence=sequence,
            program=words[Fault.PROGRAM],
            place=words[Fault.PLACE],
            got=words[Fault.GOT],
            limit=words[Fault.LIMIT],
            address=words[Fault.ADDRESS],
            slot=words[Fault.SLOT],
            node=node,
        )
        if kind is FaultKind.CALLBACK:
            error, self.callback_error = self.callback_error, None
            return replace(record, error=error)
        if kind is FaultKind.DEVICE:
            text = f"scratch memory: the system has no {record.limit} bytes for {name}; use smaller tiles"
            return replace(record, error=AllocationError(text))
        if kind is FaultKind.SKIPPED:
            source = streams_by_address.get(words[Fault.SOURCE])
            cause = source.fault(words[Fault.SOURCE_SEQ], "") if source is not None else None
            return replace(record, cause=cause)
        return record


callback_threads: Final[set[int]] = set()
"""Threads that are inside a host callback now."""

streams_by_address: Final[weakref.WeakValueDictionary[int, CpuStream]] = weakref.WeakValueDictionary()
"""Streams of all open devices: a fault that crosses streams names its source by address. An operation that waits for
another stream keeps that stream alive until its fault has been read."""
