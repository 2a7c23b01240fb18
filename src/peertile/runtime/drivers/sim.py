"""The sim driver: devices of a simulated machine. Everything runs on one thread, when the machine is asked to.

Two ways to use it. Under the checker host threads are tasks of the machine, and a wait parks them. Otherwise a
call that waits runs the machine until what it waits for has happened; timeouts pass when nothing else can.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Final

from peertile.errors import AllocationError, ArgumentError, LaunchError, UsageError
from peertile.memory_model import Cmp
from peertile.runtime.driver import (
    Capabilities,
    Driver,
    DriverDevice,
    DriverKind,
    EventHandle,
    FaultKind,
    FaultRecord,
    GraphExecHandle,
    GraphHandle,
    Grid,
    LaunchOptions,
    LoadableBinary,
    MemoryStats,
    ModuleHandle,
    SegmentHandle,
    ShareHandle,
    ShareKind,
    Status,
    StreamHandle,
    Ticket,
    check_fill,
)
from peertile.runtime.drivers.sim_stream import (
    Action,
    Make,
    SimEvent,
    SimGraph,
    SimGraphExec,
    SimGraphLaunch,
    SimLaunch,
    SimModule,
    SimStream,
    WaitEvent,
    WaitValue,
    as_own,
    captured_arguments,
)
from peertile.sim import engine
from peertile.sim.binary import SimBinary
from peertile.sim.cells import Cell, open_access
from peertile.sim.choices import ReplayChooser
from peertile.sim.hosts import Call, Host
from peertile.sim.machine import Machine
from peertile.sim.memory import Object
from peertile.sim.report import freed_in_use
from peertile.sim.streams import ANYTHING, Operation, Reach
from peertile.sim.trace import Work
from peertile.sim.verdicts import Waiter
from peertile.sim.words import Rule

__all__ = ["SimDevice", "SimDriver", "SimSegment"]

_RESIDENT: Final = 1024
_MEMORY: Final = 1 << 40


class SimSegment(SegmentHandle):
    """Storage that other devices of the machine can map: one object, over once nobody holds it any more."""

    __slots__ = ("address", "freed", "target")

    def __init__(self, target: Object) -> None:
        self.nbytes = target.nbytes
        self.target = target
        self.address = target.base
        self.freed = False
        target.holders += 1


class SimDevice(DriverDevice):
    """The device of one rank of a machine; see DriverDevice for what each function means."""

    kind = DriverKind.SIM

    def __init__(self, machine: Machine, ordinal: int) -> None:
        self.machine = machine
        self.ordinal = ordinal
        self._name = f"sim:{ordinal}"
        self._closed = False
        self._in_callback = False
        self._streams: list[SimStream] = []
        self._numbers = itertools.count()
        self._live: dict[int, Object] = {}
        self._in_use = self._peak = 0
        if machine.outside is None and machine.host is None and not machine.judge:
            machine.outside = Host(machine, 0)
        resident = machine.resident if machine.resident is not None else _RESIDENT
        self.capabilities = Capabilities(
            name="simulated device",
            memory_bytes=_MEMORY,
            executors=1,
            resident_programs=resident,
            stream_priorities=(0, 0),
            peer_atomics=True,
            value_widths=frozenset({32, 64}),
            host_addressable=False,
            shares=(ShareKind.LOCAL,),
            multicast=False,
        )

    def _enter(self) -> None:
        if self._in_callback:
            raise UsageError(
                "driver: expected a call from outside host callbacks, got a runtime call inside a completion "
                "callback; hand the work to another thread"
            )
        if self._closed:
            raise UsageError(f"driver: expected an open device, got {self._name}, which was closed")

    def close(self) -> None:
        self._enter()
        if any(stream.busy is not None or stream.queue for stream in self._streams):
            raise LaunchError(f"{self._name}: cannot close while operations are pending; sync its streams first")
        self._closed = True

    # ------------------------------------------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> int:
        self._enter()
        if nbytes < 0:
            raise ArgumentError(f"nbytes: expected an integer >= 0, got {nbytes}")
        if self._in_use + nbytes > _MEMORY:
            raise AllocationError(
                f"{self._name}: asked for {nbytes} bytes, {self._in_use} are in use and {_MEMORY - self._in_use} free"
            )
        self._settle()
        made = self.machine.memory.make(nbytes, self.ordinal, "memory")
        self._live[made.base] = made
        self._in_use += nbytes
        self._peak = max(self._peak, self._in_use)
        return made.base

    def free(self, address: int) -> None:
        made = self._live.pop(address, None)
        if made is None or self._closed:
            return
        self._settle()
        by = self._by()
        self._check_over(made, made.shadow.cells(), by)
        made.freed_by = by
        self._in_use -= made.nbytes

    def _check_over(self, made: Object, cells: Iterable[Cell], by: str) -> None:
        """That memory is given back behind every access of it, whatever came first in this schedule.

        Not where the collector frees it while another rank's host runs, nor out of a callback: with whose knowledge it
        is freed cannot be said there, and a later access is reported all the same."""
        machine = self.machine
        host = machine.host
        if not machine.judge or machine.stopping or not isinstance(host, Host) or host.rank != self.ordinal:
            return
        found = open_access(cells, host.clock)
        if found is not None:
            machine.suspect(freed_in_use(made, *found, by))

    def _by(self) -> str:
        place = self.machine.where() if self.machine.where is not None else ""
        return f"the host of rank {self.ordinal}{place and f' at {place}'}"

    def _settle(self) -> None:
        """Waits until the device is idle, where the conditions say that this call does."""
        machine = self.machine
        host = machine.host
        if host is None or machine.stopping or not machine.conditions.syncing_allocations:
            return
        for stream in self._streams:
            while stream.busy is not None or stream.queue:
                operation = stream.queue[-1] if stream.queue else stream.busy
                assert operation is not None
                what = f"an allocation that waits for {operation.name} on {stream.where()}"
                host.block(operation.waiters, lambda what=what: Waiter(host.where(), what))

    def lend(self, address: int, nbytes: int) -> None:
        target, offset = self.machine.memory.at(address)
        target.lend(offset, nbytes)

    def take_back(self, address: int, nbytes: int) -> None:
        target, offset = self.machine.memory.at(address)
        by = self._by()
        if nbytes:
            self._check_over(target, target.shadow.box((offset, (), nbytes)).cells, by)
        target.take_back(offset, nbytes, by)

    def memory_stats(self) -> MemoryStats:
        self._enter()
        return MemoryStats(self._in_use, self._peak, self._in_use, _MEMORY, len(self._live))

    # ---------------------------------------------------------------------------------------------- segments

    def create_segment(self, nbytes: int) -> tuple[SegmentHandle, int]:
        self._enter()
        if nbytes <= 0:
            raise ArgumentError(f"nbytes: expected an integer > 0, got {nbytes}")
        made = self.machine.memory.make(nbytes, self.ordinal, "symmetric memory", zeroed=True)
        return SimSegment(made), made.base

    def export_segment(self, segment: SegmentHandle) -> ShareHandle:
        self._enter()
        own = self._segment(segment)
        return ShareHandle(ShareKind.LOCAL, own.address.to_bytes(8, "little"))

    def import_segment(self, share: ShareHandle) -> SegmentHandle:
        self._enter()
        target, _ = self.machine.memory.at(int.from_bytes(share.payload, "little"))
        return SimSegment(target)

    def map_segment(self, segment: SegmentHandle) -> int:
        self._enter()
        return self._segment(segment).address

    def unmap_segment(self, segment: SegmentHandle) -> None:
        self._enter()
        self._segment(segment)

    def free_segment(self, segment: SegmentHandle) -> None:
        self._enter()
        own = self._segment(segment)
        own.freed = True
        target = own.target
        target.holders -= 1
        if not target.holders:
            by = self._by()
            self._check_over(target, target.shadow.cells(), by)
            target.freed_by = by

    @staticmethod
    def _segment(segment: SegmentHandle) -> SimSegment:
        own = as_own(segment, SimSegment, "segment")
        if own.freed:
            raise UsageError("segment: expected a live segment, got one that was freed")
        return own

    # --------------------------------------------------------------------------------------- streams, events

    def create_stream(self, priority: int = 0) -> StreamHandle:
        self._enter()
        if priority != 0:
            raise ArgumentError(f"priority: expected 0 (sim streams have no priorities), got {priority}")
        self._settle()
        number = next(self._numbers)
        name = "the default stream" if number == 0 else f"stream {number}"
        stream = SimStream(self.machine, self.ordinal, number, name)
        self._streams.append(stream)
        return stream

    def destroy_stream(self, stream: StreamHandle) -> None:
        self._enter()
        as_own(stream, SimStream, "stream").closed = True

    def last_ticket(self, stream: StreamHandle) -> Ticket:
        self._enter()
        own = as_own(stream, SimStream, "stream")
        operation = own.operations.get(own.submitted)
        return Ticket(own, own.submitted, operation.name if operation is not None else "")

    def create_event(self) -> EventHandle:
        self._enter()
        return SimEvent()

    def destroy_event(self, event: EventHandle) -> None:
        self._enter()
        own = as_own(event, SimEvent, "event")
        own.ticket = own.operation = None

    def record_event(self, stream: StreamHandle, event: EventHandle) -> Ticket:
        self._enter()
        own, queue = as_own(event, SimEvent, "event"), as_own(stream, SimStream, "stream")
        if queue.capture is not None:
            raise UsageError("record_event: expected a stream that runs, got one that is being captured")
        stamp: list[int] = []
        machine = self.machine

        def record(_stream: SimStream, _operation: Operation) -> None:
            stamp.append(machine.now_ns + machine.steps)

        own.ticket = queue.put(Make("event record", lambda: Action("event record", record, ())))
        own.operation = queue.operations[own.ticket.sequence]
        own.stamp = stamp
        return own.ticket

    def wait_event(self, stream: StreamHandle, event: EventHandle) -> Ticket:
        self.event_ticket(event)
        own, queue = as_own(event, SimEvent, "event"), as_own(stream, SimStream, "stream")
        if queue.capture is not None:
            raise UsageError("wait_event: expected a stream that runs, got one that is being captured")
        assert own.ticket is not None
        source, target = as_own(own.ticket.stream, SimStream, "stream"), own.operation
        assert target is not None
        return queue.put(Make("event wait", lambda: WaitEvent("event wait", source, target)))

    def event_ticket(self, event: EventHandle) -> Ticket:
        self._enter()
        ticket = as_own(event, SimEvent, "event").ticket
        if ticket is None:
            raise UsageError("event: expected an event that was recorded, got one never recorded; record it first")
        return ticket

    def elapsed_ns(self, start: EventHandle, end: EventHandle) -> int:
        times = []
        for role, event in (("start", start), ("end", end)):
            self.event_ticket(event)
            own = as_own(event, SimEvent, role)
            if not own.stamp:
                raise UsageError(f"{role}: expected an event that has run, got one still pending; wait for it first")
            times.append(own.stamp[0])
        return times[1] - times[0]

    # --------------------------------------------------------------------------------------------- completion

    @staticmethod
    def _ran(ticket: Ticket) -> SimStream:
        stream = as_own(ticket.stream, SimStream, "ticket")
        if ticket.sequence < 0:
            raise UsageError(f"ticket: {ticket.name} was captured and does not run by itself; launch the graph")
        return stream

    def _known(self, stream: SimStream, sequence: int) -> None:
        """The host has learned that the operation is over: what it did happens before what the host does next."""
        host = self.machine.host or self.machine.outside
        operation = stream.operations.get(sequence)
        if host is not None and operation is not None and operation.after is not None:
            host.acquire(operation.after)

    def query(self, ticket: Ticket) -> Status:
        self._enter()
        stream = self._ran(ticket)
        result = stream.result(ticket.sequence)
        machine = self.machine
        host = machine.host
        if host is not None and machine.stopping:
            host.went_on()
        elif host is not None:
            if result.status is Status.PENDING:
                host.step(Call.ASKS)  # who asks again and again lets others go on
            if machine.asked_of is not None:
                machine.asked_of(self.ordinal, host)
        if result.status is not Status.PENDING:
            self._known(stream, ticket.sequence)
        return result.status

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> Status:
        self._enter()
        stream = self._ran(ticket)
        result = stream.result(ticket.sequence)
        machine = self.machine
        host = machine.host
        if machine.stopping:
            if host is not None:
                host.went_on()
            return result.status
        if host is not None:
            host.step(Call.WAITS)
            if result.status is Status.PENDING:
                operation = stream.operations[ticket.sequence]
                timer = None
                if timeout_s is not None:  # of the program's own: it passes once nobody can go on
                    timer = machine.timer(int(timeout_s * 1e9), lambda: machine.wake_all(operation.waiters))
                host.block(operation.waiters, lambda: Waiter(host.where(), f"{operation.name} on {stream.where()}"))
                if timer is not None:
                    machine.cancel(timer)
        elif result.status is Status.PENDING:
            expired: list[bool] = []
            if timeout_s is not None:
                machine.timer(int(timeout_s * 1e9), lambda: expired.append(True))
            machine.loop(lambda: result.status is not Status.PENDING or bool(expired))
        if result.status is not Status.PENDING:
            self._known(stream, ticket.sequence)
        return result.status

    def when_over(self, ticket: Ticket, call: Callable[[], None]) -> None:
        """Calls `call`, from the machine, once the operation is not pending: at once if it is not."""
        self._enter()
        stream = self._ran(ticket)
        if stream.result(ticket.sequence).status is Status.PENDING:
            stream.operations[ticket.sequence].calls.append(call)
        else:
            call()

    def fault(self, ticket: Ticket) -> FaultRecord | None:
        self._enter()
        return self._ran(ticket).result(ticket.sequence).record

    def take_fault(self, stream: StreamHandle) -> FaultRecord | None:
        self._enter()
        return as_own(stream, SimStream, "stream").take()

    # --------------------------------------------------------------------------------------------- operations

    def _told(self, name: str) -> str:
        """An operation of a stream as reports name it: with the line of the program that enqueued it."""
        place = self.machine.where() if self.machine.where is not None else ""
        return f"{name} at {place}" if place else name

    def _action(
        self, stream: StreamHandle, name: str, function: Callable[[SimStream, Operation], FaultRecord | None],
        *addresses: int, work: Work = Work.OTHER,
    ) -> Ticket:  # fmt: skip
        found = [self.machine.memory.find(address) for address in addresses]
        reach: Reach = tuple(place[0].base for place in found if place is not None) if addresses else ANYTHING
        return as_own(stream, SimStream, "stream").put(Make(name, lambda: Action(name, function, reach, work)))

    def copy(
        self, stream: StreamHandle, dst: int, src: int, nbytes: int, *, name: str = "copy", on_caller: bool = False
    ) -> Ticket:
        self._enter()
        if nbytes < 0:
            raise ArgumentError(f"nbytes: expected an integer >= 0, got {nbytes}")
        machine = self.machine
        told = self._told(name)

        def copy(s: SimStream, _: Operation) -> None:
            engine.copy(machine, s, told, dst, src, nbytes)

        return self._action(stream, name, copy, dst, src, work=Work.COPY)

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
        machine = self.machine
        told = self._told(name)

        def fill(s: SimStream, _: Operation) -> None:
            engine.fill(machine, s, told, dst, one, count)

        return self._action(stream, name, fill, dst, work=Work.FILL)

    def write_value(
        self, stream: StreamHandle, address: int, value: int, width: int, *, name: str = "write_value"
    ) -> Ticket:
        self._enter()
        _check_word(address, width)
        machine = self.machine
        told = self._told(name)

        def write(s: SimStream, _: Operation) -> None:
            engine.write_value(machine, s, told, address, value, width)

        return self._action(stream, name, write, address, work=Work.WRITE)

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
        _check_word(address, width)
        machine = self.machine
        return as_own(stream, SimStream, "stream").put(
            Make(
                name,
                lambda: WaitValue(machine, name, address, value, width, cmp, timeout_ns, signed, abort_address),
            )
        )

    def callback(self, stream: StreamHandle, function: Callable[[], None], *, name: str = "callback") -> Ticket:
        self._enter()

        def call(_stream: SimStream, operation: Operation) -> FaultRecord | None:
            if self.machine.show is not None:
                self.machine.show(self.ordinal)
            self._in_callback = True
            try:
                function()
            except Exception as error:
                return FaultRecord(FaultKind.CALLBACK, name, operation.sequence, error=error)
            finally:
                self._in_callback = False
            return None

        return self._action(stream, name, call, work=Work.HOST)

    # ------------------------------------------------------------------------------------------------ modules

    def load_module(self, binary: LoadableBinary) -> ModuleHandle:
        self._enter()
        if not isinstance(binary, SimBinary):
            raise ArgumentError(f"binary: expected one for sim, got one for {binary.target}")
        return SimModule(binary, self.capabilities.resident_programs)

    def unload_module(self, module: ModuleHandle) -> None:
        self._enter()
        as_own(module, SimModule, "module")

    def max_resident(self, module: ModuleHandle) -> int:
        self._enter()
        return as_own(module, SimModule, "module").limit

    # ----------------------------------------------------------------------------------------------- launches

    def _check_grid(self, module: SimModule, grid: Grid, options: LaunchOptions) -> None:
        n0, n1, n2 = grid
        if n0 < 0 or n1 < 0 or n2 < 0:
            raise ArgumentError(f"grid of {options.name}: expected three integers >= 0, got {grid}")
        n, limit = n0 * n1 * n2, self.capabilities.resident_programs
        if (module.binary.waits or options.cooperative) and n > limit:
            raise LaunchError(
                f"{options.name}: its {n} programs wait for each other and must be resident at once, {self._name} "
                f"holds {limit} of them; use a grid of at most {limit} programs"
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
        self._enter()
        own = as_own(module, SimModule, "module")
        self._check_grid(own, grid, options)
        machine, rank = self.machine, self.ordinal
        place = machine.where() if machine.where is not None else ""
        queue = as_own(stream, SimStream, "stream")
        make = Make(options.name, lambda: SimLaunch(machine, rank, own, grid, args, options, place))
        if queue.capture is not None:
            make.arguments = captured_arguments(machine, own, args)
        ticket = queue.put(make)
        if machine.conditions.blocking_launches and machine.host is not None and ticket.sequence > 0:
            host, operation = machine.host, queue.operations[ticket.sequence]
            if queue.result(ticket.sequence).status is Status.PENDING and not machine.stopping:
                what = f"its launch of {options.name} on {queue.where()}, which returns when the kernel has ended"
                host.block(operation.waiters, lambda: Waiter(host.where(), what))
        return ticket

    def launch_sync(
        self, stream: StreamHandle, module: ModuleHandle, grid: Grid, args: bytes, options: LaunchOptions
    ) -> FaultRecord | None:
        self._enter()
        queue = as_own(stream, SimStream, "stream")
        self._check_grid(as_own(module, SimModule, "module"), grid, options)
        if queue.capture is not None:
            raise UsageError(f"{options.name}: expected a stream that runs, got one that is being captured")
        ticket = self.launch(stream, module, grid, args, options)
        self.wait(ticket)
        record = queue.result(ticket.sequence).record
        if record is not None:
            queue.take()
        return record

    # ------------------------------------------------------------------------------------------------- graphs

    def begin_capture(self, stream: StreamHandle) -> None:
        self._enter()
        queue = as_own(stream, SimStream, "stream")
        if queue.capture is not None:
            raise UsageError("begin_capture: expected a stream that is not being captured, got one that is")
        queue.capture = []

    def end_capture(self, stream: StreamHandle) -> GraphHandle:
        self._enter()
        queue = as_own(stream, SimStream, "stream")
        if queue.capture is None:
            raise UsageError("end_capture: expected a stream that is being captured, got one that is not")
        nodes, queue.capture = tuple(queue.capture), None
        return SimGraph(nodes)

    def instantiate(self, graph: GraphHandle) -> GraphExecHandle:
        self._enter()
        return SimGraphExec(as_own(graph, SimGraph, "graph").nodes)

    def destroy_graph(self, graph: GraphExecHandle) -> None:
        self._enter()
        as_own(graph, SimGraphExec, "graph").nodes = None

    def launch_graph(
        self, stream: StreamHandle, graph: GraphExecHandle, *, name: str = "graph", on_caller: bool = False
    ) -> Ticket:
        self._enter()
        own, queue = as_own(graph, SimGraphExec, "graph"), as_own(stream, SimStream, "stream")
        nodes = own.nodes
        if nodes is None:
            raise UsageError("graph: expected a live graph, got one that was destroyed")
        if queue.capture is not None:
            raise UsageError("launch_graph: expected a stream that runs, got one that is being captured")
        return queue.put(Make(name, lambda: SimGraphLaunch(name, nodes)))


def _check_word(address: int, width: int) -> None:
    if width not in (32, 64):
        raise ArgumentError(f"width: expected 32 or 64 bits, got {width}")
    if address % (width // 8):
        raise ArgumentError(f"address: expected one aligned to {width // 8} bytes, got {address:#x}")


class SimDriver(Driver):
    """Opens devices of one machine. Without one it makes a machine that judges nothing and takes the first choice
    everywhere: a plain device on one thread."""

    kind = DriverKind.SIM

    def __init__(self, machine: Machine | None = None, *, devices: int = 8, chooser: Any = None) -> None:
        if machine is None:
            machine = Machine(
                chooser or ReplayChooser(()), ranks=devices, judge=False, rule=Rule.READS_FROM, stale=False,
                max_steps=1 << 60,
            )  # fmt: skip
        self.machine = machine
        self._devices = devices

    def device_count(self) -> int:
        return self._devices

    def open(self, ordinal: int = 0) -> DriverDevice:
        if not 0 <= ordinal < self._devices:
            raise ArgumentError(f"ordinal: expected 0 to {self._devices - 1}, got {ordinal}")
        return SimDevice(self.machine, ordinal)
