"""Streams, operations and handles of the sim driver: the states of tickets, faults that skip what follows, graphs.

The engine itself is `peertile.sim.streams`; what operations do to memory is `peertile.sim.engine`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from peertile.errors import ArgumentError, UsageError
from peertile.ir.types import ObjectType, PointerType, SymmetricType, TileType, Type, ViewType
from peertile.memory_model import Cmp, Order, Scope
from peertile.runtime.driver import (
    EventHandle,
    FaultKind,
    FaultRecord,
    GraphExecHandle,
    GraphHandle,
    Grid,
    LaunchOptions,
    ModuleHandle,
    Status,
    StreamHandle,
    Ticket,
)
from peertile.sim import engine
from peertile.sim.binary import SimBinary
from peertile.sim.launches import Launch
from peertile.sim.machine import Found, Machine
from peertile.sim.memory import FIRST_ADDRESS, Symmetric, View, scalar
from peertile.sim.program import Program, ProgramFault
from peertile.sim.sites import Site, Verb
from peertile.sim.streams import ANYTHING, Operation, Reach, Stream
from peertile.sim.trace import Deed, Work
from peertile.sim.verdicts import LaunchContract, StaleArgument, Waiter
from peertile.sim.words import Word

__all__ = ["SimEvent", "SimGraph", "SimGraphExec", "SimModule", "SimStream", "as_own"]

_T = TypeVar("_T")

_KINDS = {"assert": FaultKind.ASSERT, "bounds": FaultKind.BOUNDS, "signature": FaultKind.SIGNATURE}


def as_own(handle: object, cls: type[_T], role: str) -> _T:
    if not isinstance(handle, cls):
        raise ArgumentError(f"{role}: expected a handle of the sim driver, got {type(handle).__name__}")
    return handle


class Result:
    """How one enqueued operation stands."""

    __slots__ = ("record", "status")

    def __init__(self) -> None:
        self.status = Status.PENDING
        self.record: FaultRecord | None = None


class SimModule(ModuleHandle):
    __slots__ = ("binary", "limit")

    def __init__(self, binary: SimBinary, limit: int) -> None:
        self.binary = binary
        self.limit = limit


class SimEvent(EventHandle):
    __slots__ = ("operation", "stamp", "ticket")

    def __init__(self) -> None:
        self.ticket: Ticket | None = None
        self.operation: Operation | None = None
        self.stamp: list[int] = []


class Make:
    """How an operation is made, so that a graph can make it again and again."""

    __slots__ = ("arguments", "make", "name")

    def __init__(self, name: str, make: Callable[[], Operation]) -> None:
        self.name = name
        self.make = make
        self.arguments: Sequence[tuple[str, View]] = ()
        """What a captured launch uses, by name, as it was at the capture."""


class SimGraph(GraphHandle):
    __slots__ = ("nodes",)

    def __init__(self, nodes: tuple[Make, ...]) -> None:
        self.nodes = nodes


class SimGraphExec(GraphExecHandle):
    __slots__ = ("nodes",)

    def __init__(self, nodes: tuple[Make, ...]) -> None:
        self.nodes: tuple[Make, ...] | None = nodes


class SimStream(StreamHandle, Stream):
    """A stream with the states of its tickets. A failed stream skips everything until its fault is taken."""

    __slots__ = ("capture", "closed", "failed", "operations", "results", "skip_to", "submitted")

    def __init__(self, machine: Machine, rank: int, number: int, name: str) -> None:
        Stream.__init__(self, machine, rank, number, name)
        self.results: dict[int, Result] = {}
        self.operations: dict[int, Operation] = {}
        self.submitted = 0
        self.failed: FaultRecord | None = None
        self.skip_to: tuple[int, FaultRecord] | None = None
        self.capture: list[Make] | None = None
        self.closed = False

    def put(self, make: Make) -> Ticket:
        """Enqueue an operation, or record it."""
        if self.capture is not None:
            self.capture.append(make)
            return Ticket(self, -1, make.name)
        if self.closed:
            raise UsageError("stream: expected a live stream, got one that was destroyed")
        limit, host = self.machine.conditions.queue, self.machine.host
        while limit is not None and host is not None and len(self.queue) >= limit and not self.machine.stopping:
            what = f"room in the queue of {self.where()}, which holds {limit} operations, for {make.name}"
            host.block(self.queue[0].waiters, partial(Waiter, host.where(), what))
        operation = make.make()
        self.submitted += 1
        operation.sequence = self.submitted
        self.results[self.submitted] = Result()
        self.operations[self.submitted] = operation
        host = self.machine.host or self.machine.outside
        self.enqueue(operation, host.clock if host is not None else None)
        if host is not None:
            # What the host does after this call is not before the operation.
            host.release(None)
        return Ticket(self, self.submitted, make.name)

    def run(self) -> None:
        if self.busy is None and self.queue:
            operation = self.queue[0]
            cause = self.failed
            if cause is None and self.skip_to is not None and operation.sequence <= self.skip_to[0]:
                cause = self.skip_to[1]
            if cause is not None:
                self.queue.popleft()
                self.busy = operation
                result = self.results[operation.sequence]
                result.status = Status.SKIPPED
                result.record = FaultRecord(FaultKind.SKIPPED, operation.name, operation.sequence, cause=cause)
                operation.state = result.record
                super().finish(operation)
                return
        super().run()

    def finish(self, operation: Operation) -> None:
        result = self.results[operation.sequence]
        record = operation.state
        if isinstance(record, FaultRecord):
            result.status, result.record = Status.FAULTED, record
            self.failed = record
        else:
            result.status = Status.DONE
        super().finish(operation)

    def result(self, sequence: int) -> Result:
        found = self.results.get(sequence)
        if found is None:
            found = Result()
            found.status = Status.DONE
        if found.status is Status.PENDING and self.machine.stopping:
            # The run ended before the operation did: whoever still holds its ticket must not wait for it.
            found.status = Status.SKIPPED
            name = self.operations[sequence].name
            found.record = FaultRecord(FaultKind.ABORTED, name, sequence)
        return found

    def take(self) -> FaultRecord | None:
        record, self.failed = self.failed, None
        if record is not None:
            self.skip_to = (self.submitted, record)
        return record


# ---------------------------------------------------------------- operations


class Action(Operation):
    """An operation that is one call with the stream as its agent. What it returns, if a FaultRecord, is its fault."""

    __slots__ = ("function",)

    def __init__(
        self, name: str, function: Callable[[SimStream, Operation], FaultRecord | None], reach: Reach = ANYTHING,
        work: Work = Work.OTHER,
    ) -> None:  # fmt: skip
        super().__init__(name)
        self.function = function
        self.reach = reach
        self.work = work

    def start(self, stream: Stream) -> bool:
        assert isinstance(stream, SimStream)
        self.state = self.function(stream, self)
        return True


class WaitValue(Operation):
    """A stream waits for a word."""

    __slots__ = (
        "abort",
        "address",
        "cmp",
        "deadline",
        "machine",
        "signed",
        "site",
        "stream",
        "timeout_ns",
        "value",
        "width",
        "word",
    )

    def __init__(
        self, machine: Machine, name: str, address: int, value: int, width: int, cmp: Cmp, timeout_ns: int,
        signed: bool, abort: int,
    ) -> None:  # fmt: skip
        super().__init__(name)
        self.reach = (machine.memory.at(address)[0].base,)
        self.work = Work.WAIT
        self.machine = machine
        self.address = address
        self.value = value
        self.width = width
        self.cmp = cmp
        self.timeout_ns = timeout_ns
        self.signed = signed
        self.abort = abort
        self.site = Site(Verb.WAITS, "a word", width // 8, Order.ACQUIRE, Scope.SYSTEM, code=name)
        self.site.signed = width if signed else 0
        self.word: Word | None = None
        self.stream: SimStream | None = None
        self.deadline: int | None = None

    def start(self, stream: Stream) -> bool:
        assert isinstance(stream, SimStream)
        self.stream = stream
        machine = self.machine
        if self.word is None:
            self.word = engine.value_word(machine, stream, self.site, self.address, self.width)
            self.site.name = self.word.name
        word = self.word
        value = self.site.seen(self.value & ((1 << self.width) - 1))
        if engine.holds(word, self.cmp, self.value, self.width, self.signed):
            engine.strong(machine, stream, self.site, word, False)
            word.pass_wait(self.cmp, value, stream, self.site, machine.rule)
            if machine.trace is not None:
                what = f"waited for {word.spelled()} {self.cmp.value} {self.value}"
                machine.trace.add(stream, what, None, word.writes[-1].event, Deed.WAITED)
            self._over()
            return True
        if self.state is not None:
            return True
        word.waiters.append(stream)
        if self.deadline is None and not machine.ends_at_faults:
            self.deadline = machine.timer(self.timeout_ns, self._expire)
            machine.abortable.append(self)
        return False

    def _over(self) -> None:
        if self in self.machine.abortable:
            self.machine.abortable.remove(self)

    def _fault(self, kind: FaultKind) -> None:
        if self.stream is None or self.stream.busy is None:
            return
        assert self.word is not None
        self._over()
        seen = self.site.seen(self.word.value)
        self.state = FaultRecord(kind, self.name, self.sequence, got=seen, limit=self.value, address=self.address)
        self.machine.wake(self.stream)

    def _expire(self) -> None:
        self._fault(FaultKind.WAIT_TIMEOUT)

    def aborted(self) -> bool:
        """Whether its abort word is set; if so it leaves."""
        if not read_abort(self.machine, self.abort):
            return False
        self._fault(FaultKind.ABORTED)
        return True

    def waits(self, stream: Stream) -> Waiter | None:
        assert self.word is not None
        return Waiter(
            stream.where(), f"{self.name}: {self.word.spelled()} {self.cmp.value} {self.value}", str(self.word.value)
        )


def read_abort(machine: Machine, address: int) -> bool:
    """Whether the i32 at `address`, of the host or of a device, is not zero."""
    if not address:
        return False
    if address >= FIRST_ADDRESS:
        return engine.read_bytes(machine, address, 4) != b"\0\0\0\0"
    return ctypes.c_int32.from_address(address).value != 0


class WaitEvent(Operation):
    """A stream waits for an operation of another."""

    __slots__ = ("source", "target")

    def __init__(self, name: str, source: SimStream, target: Operation) -> None:
        super().__init__(name)
        self.reach = ()
        self.work = Work.EVENT
        self.source = source
        self.target = target

    def start(self, stream: Stream) -> bool:
        if self.target.after is None:
            self.target.waiters.append(stream)
            return False
        stream.acquire(self.target.after)
        record = self.source.result(self.target.sequence).record
        if record is not None:
            self.state = FaultRecord(FaultKind.SKIPPED, self.name, self.sequence, cause=record.cause or record)
        return True

    def waits(self, stream: Stream) -> Waiter | None:
        return Waiter(stream.where(), f"an event of {self.source.where()}")


class SimLaunch(Launch):
    """A launch of the driver: arguments from the block, faults as records, output to the sink."""

    __slots__ = ("block", "module", "options", "owner", "parked_programs")

    def __init__(
        self, machine: Machine, rank: int, module: SimModule, grid: Grid, block: bytes, options: LaunchOptions,
        place: str = "",
    ) -> None:  # fmt: skip
        super().__init__(machine, rank, module.binary.translation, grid, (), options.name)
        self.module = module
        self.block = block
        self.options = options
        self.place = place
        self.owner: SimGraphLaunch | None = None
        self.parked_programs: list[Program] = []

    def launched(self) -> str:
        return super().launched() if self.owner is None else f"captured at {self.place}" if self.place else ""

    def start(self, stream: Stream) -> bool:
        binary = self.module.binary
        translation = binary.translation
        names = translation.kernel.param_names if translation.kernel is not None else ()
        if binary.types is None:
            self.args = struct.unpack(f"<{len(self.block) // 8}q", self.block[: len(self.block) // 8 * 8])
        else:
            self.args = unpack_arguments(self.machine, names, binary.types, self.block)
        if binary.slots and self.machine.judge:
            self._compare_grids(names)
        if super().start(stream):
            self.completed()
            return True
        return False

    def _compare_grids(self, names: Sequence[str]) -> None:
        """Programs meet their counterparts of other ranks by index: the grids on one channel are equal."""
        for k in self.module.binary.slots:
            words = next((v for v in self.args[k].values() if isinstance(v, Symmetric)), None)
            if words is None:
                continue
            first = words.views[0]
            ledger = self.machine.channels.setdefault((first.object.base, first.offset), {})
            mine = ledger.setdefault(self.rank, [])
            mine.append(self)
            for others in ledger.values():
                other = others[len(mine) - 1] if len(others) >= len(mine) else self
                if other.grid == self.grid:
                    continue
                pair = sorted((self, other), key=lambda launch: launch.rank)
                texts = tuple(
                    f"rank {x.rank}: {x.name}, grid {spell_grid(x.grid)}{x.place and f', at {x.place}'}" for x in pair
                )
                raise Found(
                    LaunchContract(
                        message=f"launch {len(mine)} on `{names[k]}` has grid {spell_grid(pair[0].grid)} on rank "
                        f"{pair[0].rank} and {spell_grid(pair[1].grid)} on rank {pair[1].rank}",
                        launches=texts,
                        repair="launch with one grid on all ranks, as a program meets the program of its own index on "
                        "the others; or name the slots of the channel",
                    )
                )

    def finished(self, stream: Stream) -> None:
        if self.owner is not None:
            self.owner.node_ended(stream, self)
        else:
            stream.finish(self)

    def completed(self) -> None:
        machine = self.machine
        if self in machine.abortable:
            machine.abortable.remove(self)
        if self.options.on_print is not None:
            for program, place, _, values in self.output:
                self.options.on_print(program, place, b"".join(map(_record, values)))
        fault = self.failure
        if fault is not None and self.state is None:
            self.state = FaultRecord(
                _KINDS[fault.kind], self.name, self.sequence, fault.program.index, fault.place, fault.got, fault.limit
            )

    def fault(self, fault: ProgramFault) -> None:
        super().fault(fault)
        self.leave()

    def leave(self) -> None:
        """Programs that wait end here: after a fault or an abort nobody waits any longer."""
        programs, self.parked_programs = self.parked_programs, []
        for program in programs:
            if not program.done and not program.ready:
                self._drop(program)

    def _drop(self, program: Program) -> None:
        program.code.close()
        machine = self.machine
        if program in machine.tasks:
            machine.tasks.remove(program)
        program.finish()

    def parked(self, program: Program, site: Site, word: Word, cmp: Cmp, expected: Any) -> None:
        machine = self.machine
        if machine.ends_at_faults:
            return
        self.parked_programs.append(program)
        if self not in machine.abortable:
            machine.abortable.append(self)
        place, address, index = program.wait_place, word.home.base + word.offset, word.index
        slot = getattr(program, "slot", None) or (index[0] if index else 0)

        def expire() -> None:
            if program.done or program.ready or program not in self.parked_programs:
                return
            if self.state is None:
                self.state = FaultRecord(
                    FaultKind.WAIT_TIMEOUT, self.name, self.sequence, program.index, place, int(word.value),
                    int(expected), address, slot,
                )  # fmt: skip
            self.leave()

        machine.timer(self.options.wait_timeout_ns, expire)

    def aborted(self) -> bool:
        """Whether its abort word is set; if so its programs leave."""
        if not read_abort(self.machine, self.options.abort_address):
            return False
        if self.state is None:
            self.state = FaultRecord(FaultKind.ABORTED, self.name, self.sequence)
        self.leave()
        return True


def _record(values: Any) -> bytes:
    if isinstance(values, bytes):
        return values
    data: bytes = np.ascontiguousarray(values).tobytes()
    return data + bytes(-len(data) % 8)


class SimGraphLaunch(Operation):
    """A graph as one operation: its nodes in order; its fault names the node."""

    __slots__ = ("at", "node", "nodes")

    def __init__(self, name: str, nodes: Sequence[Make]) -> None:
        super().__init__(name)
        self.work = Work.GRAPH
        self.nodes = nodes
        self.at = 0
        self.node: Operation | None = None

    def start(self, stream: Stream) -> bool:
        while self.at < len(self.nodes):
            if self.node is None:
                make = self.nodes[self.at]
                if make.arguments and stream.machine.judge:
                    self._check_arguments(make)
                self.node = make.make()
                self.node.sequence = self.sequence
                if isinstance(self.node, SimLaunch):
                    self.node.owner = self
            if not self.node.start(stream):
                return False
            if self._next():
                return True
        return True

    def _check_arguments(self, make: Make) -> None:
        """What was captured must still be what it was."""
        for name, view in make.arguments:
            by = view.stale or view.object.freed_by
            if by is not None:
                raise Found(
                    StaleArgument(
                        graph=self.name,
                        node=f"{make.name} (node {self.at})",
                        argument=name,
                        message=f"its memory was given back by {by} after the capture",
                    )
                )

    def _next(self) -> bool:
        """Go on with the next node; True if this one failed."""
        node, self.node = self.node, None
        assert node is not None
        if isinstance(node.state, FaultRecord):
            r = node.state
            self.state = FaultRecord(
                r.kind, f"{node.name} (node {self.at} of {self.name})", self.sequence, r.program, r.place, r.got,
                r.limit, r.address, r.slot, self.at, r.cause, r.error,
            )  # fmt: skip
            return True
        self.at += 1
        return False

    def node_ended(self, stream: Stream, node: Operation) -> None:
        """A launch among the nodes has ended."""
        if self._next() or self.start(stream):
            stream.finish(self)

    def waits(self, stream: Stream) -> Waiter | None:
        return self.node.waits(stream) if self.node is not None else None


# ---------------------------------------------------------------- arguments


def unpack_arguments(machine: Machine, names: Sequence[str], types: Sequence[Type], block: bytes) -> list[Any]:
    """The run-time values of parameters from the words of an argument block."""
    words = struct.unpack(f"<{len(block) // 8}q", block)
    at = 0
    found = []
    for name, t in zip(names, types, strict=True):
        n = len(t.slots)
        found.append(_argument(machine, name, t, words[at : at + n], block[8 * at : 8 * (at + n)]))
        at += n
    return found


def captured_arguments(machine: Machine, module: SimModule, block: bytes) -> Sequence[tuple[str, View]]:
    """The views that a launch gets, by name."""
    binary = module.binary
    if binary.types is None or binary.translation.kernel is None:
        return ()
    found: list[tuple[str, View]] = []

    def add(name: str, value: Any) -> None:
        if isinstance(value, View):
            found.append((name, value))
        elif isinstance(value, Symmetric):
            found.extend((name, view) for view in value.views)
        elif isinstance(value, dict):
            for field, inner in value.items():
                add(f"{name}.{field}", inner)

    names = binary.translation.kernel.param_names
    for name, value in zip(names, unpack_arguments(machine, names, binary.types, block), strict=True):
        add(name, value)
    return found


def spell_grid(grid: Grid) -> str:
    """A grid for people: 4, or 4 x 2."""
    kept = list(grid)
    while len(kept) > 1 and kept[-1] == 1:
        kept.pop()
    return " x ".join(map(str, kept))


def _argument(machine: Machine, name: str, t: Type, words: Sequence[int], raw: bytes) -> Any:
    if isinstance(t, ObjectType):
        fields: dict[str, Any] = {}
        at = 0
        for field, ft in t.fields.items():
            n = len(ft.slots)
            fields[field] = _argument(machine, f"{name}.{field}", ft, words[at : at + n], raw[8 * at : 8 * (at + n)])
            at += n
        return fields
    if isinstance(t, SymmetricType):
        table, offset = words[:2]
        rank, size = struct.unpack("<2q", engine.read_bytes(machine, table, 16))
        bases = struct.unpack(f"<{size}q", engine.read_bytes(machine, table + 16, 8 * size))
        views = tuple(_view(machine, name, t.view, (base + offset, *words[2:])) for base in bases)
        return Symmetric(t, views, rank)
    if isinstance(t, ViewType):
        return _view(machine, name, t, words)
    if isinstance(t, PointerType):
        return words[0]
    assert isinstance(t, TileType)
    value = np.frombuffer(raw[: t.dtype.itemsize], t.dtype.numpy)[0]
    return scalar(value, t.dtype)


def _view(machine: Machine, name: str, t: ViewType, words: Sequence[int]) -> View:
    address, extents, strides = words[0], tuple(words[1 : 1 + t.rank]), tuple(words[1 + t.rank : 1 + 2 * t.rank])
    found = machine.memory.find(address)
    if found is None:
        raise ArgumentError(
            f"{name}: expected memory of a simulated device, got address {address:#x}; "
            "under the simulator host memory cannot be passed to a kernel"
        )
    target, offset = found
    size = t.dtype.itemsize
    key = (name, t, offset, extents, strides)
    view = target.views.get(key)
    if view is None:
        view = target.views[key] = View(t, target, offset, extents, tuple(s * size for s in strides), name)
        by = target.given_back(*view.ends()) if target.gone else None
        if by is not None:
            view.retire(by)
    return view
