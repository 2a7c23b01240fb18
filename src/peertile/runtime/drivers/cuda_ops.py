"""The operations of the cuda driver: how each is issued to a stream or a graph, and what is left once it has run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from peertile.errors import ArgumentError
from peertile.memory_model import Cmp
from peertile.runtime.driver import EventHandle, FaultKind, FaultRecord, Grid, LaunchOptions, ModuleHandle
from peertile.runtime.drivers.cuda_api import CudaError
from peertile.runtime.drivers.cuda_ptx import FILL_THREADS
from peertile.runtime.drivers.cuda_stream import HIDDEN, CudaStream, Op, Target

if TYPE_CHECKING:
    from peertile.backends.cuda.layout import LaunchLayout

__all__ = [
    "LETS_IN",
    "LETS_IN_AT_LAST",
    "MAX_NS",
    "CallBack",
    "CopyIn",
    "CopyOut",
    "CudaEvent",
    "CudaModule",
    "DeviceCopy",
    "Fill",
    "HostCopy",
    "Launch",
    "Nothing",
    "Record",
    "RecordEvent",
    "WaitEvent",
    "WaitWord",
    "WriteValue",
    "holds",
    "low_bits",
]  # fmt: skip

_CMP_INDEX: Final = {cmp: k for k, cmp in enumerate(Cmp)}
MAX_NS: Final = 1 << 61  # as good as for ever, and no sum with the clock overflows
LETS_IN: Final = 2  # in the address of a fault record: see `ptx.follow_waiting`
LETS_IN_AT_LAST: Final = 4  # see `ptx.let_in`
ROOM: Final = 4
NEARLY_ALL: Final = 7 / 8


def low_bits(value: int, width: int) -> int:
    """The low `width` bits as an unsigned number."""
    return value & ((1 << width) - 1)


def extended(value: int, width: int, *, signed: bool) -> int:
    """The low `width` bits as a number; 64 bits always as a signed one, as records hold them."""
    value = low_bits(value, width)
    return value - (1 << width) if value >> (width - 1) and (signed or width == 64) else value


def holds(word: int, value: int, width: int, cmp: Cmp, *, signed: bool) -> bool:
    """Whether `word cmp value`, as a wait compares."""
    if cmp is Cmp.AT_LEAST:
        return low_bits(word - value, width) >> (width - 1) == 0
    a, b = low_bits(word, width), low_bits(value, width)
    if signed:
        top = 1 << (width - 1)
        a, b = a ^ top, b ^ top
    match cmp:
        case Cmp.EQ:
            return a == b
        case Cmp.NE:
            return a != b
        case Cmp.GE:
            return a >= b
        case Cmp.LE:
            return a <= b
        case Cmp.GT:
            return a > b
        case _:
            return a < b


def _move(dst: int, src: int, nbytes: int) -> None:
    ctypes.memmove(dst, src, nbytes)


class Nothing(Op):
    """A fill, copy or launch of nothing."""

    __slots__ = ()

    def issue(self, target: Target) -> Any:
        return None


class DeviceCopy(Op):
    """Between two addresses that the device can access."""

    __slots__ = ("dst", "nbytes", "src")

    def __init__(self, name: str, dst: int, src: int, nbytes: int) -> None:
        super().__init__(name)
        self.dst, self.src, self.nbytes = dst, src, nbytes

    def issue(self, target: Target) -> Any:
        target.api.copy(self.dst, self.src, self.nbytes, target.cu)
        return None


class _Staged(DeviceCopy):
    """Through a block of pinned memory. Issued: (its address, host work, where to give it back)."""

    __slots__ = ()

    touches_host = True

    def failed(self, issued: Any) -> bool:
        return issued[1] is not None and issued[1].error is not None

    def collect(self, issued: Any, sequence: int, *, skipped: bool) -> FaultRecord | None:
        work = issued[1]
        return None if work is None else work.collect(self.name, sequence)

    def release(self, issued: Any) -> None:
        issued[2].give(issued[0])


class CopyIn(_Staged):
    """From pageable memory."""

    __slots__ = ()

    calls_host = True

    def issue(self, target: Target) -> Any:
        pinned = target.device.pinned
        block = pinned.take(self.nbytes)
        work = None
        if target.may_read_host_now():
            ctypes.memmove(block, self.src, self.nbytes)
        else:
            work = target.host(partial(_move, block, self.src, self.nbytes))
        target.api.copy(self.dst, block, self.nbytes, target.cu)
        return block, work, pinned


class CopyOut(_Staged):
    """To pageable memory. In a stream the last leg is made when the host takes note that the copy has run."""

    __slots__ = ()

    def issue(self, target: Target) -> Any:
        pinned = target.device.pinned
        block = pinned.take(self.nbytes)
        target.api.copy(block, self.src, self.nbytes, target.cu)
        work = None
        if target.in_graph:
            work = target.host(partial(_move, self.dst, block, self.nbytes))
        return block, work, pinned

    def collect(self, issued: Any, sequence: int, *, skipped: bool) -> FaultRecord | None:
        block, work, _ = issued
        if work is not None:
            return super().collect(issued, sequence, skipped=skipped)
        if not skipped:
            ctypes.memmove(self.dst, block, self.nbytes)
        return None


class HostCopy(DeviceCopy):
    """Between two addresses of the host."""

    __slots__ = ()

    touches_host = calls_host = True

    def issue(self, target: Target) -> Any:
        return target.host(partial(_move, self.dst, self.src, self.nbytes))

    def failed(self, issued: Any) -> bool:
        return issued.error is not None

    def collect(self, issued: Any, sequence: int, *, skipped: bool) -> FaultRecord | None:
        record: FaultRecord | None = issued.collect(self.name, sequence)
        return record


class CallBack(Op):
    """A function of the user."""

    __slots__ = ("function",)

    touches_host = calls_host = True

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        super().__init__(name)
        self.function = function

    def issue(self, target: Target) -> Any:
        return target.host(self.function)

    def failed(self, issued: Any) -> bool:
        return issued.error is not None

    def collect(self, issued: Any, sequence: int, *, skipped: bool) -> FaultRecord | None:
        record: FaultRecord | None = issued.collect(self.name, sequence)
        return record


class Fill(Op):
    __slots__ = ("count", "dst", "pattern", "width")

    def __init__(self, name: str, dst: int, pattern: int, width: int, count: int) -> None:
        super().__init__(name)
        value = low_bits(pattern, 8 * width)
        while width > 1 and value & ((1 << 4 * width) - 1) == value >> 4 * width:
            width, count, value = width // 2, 2 * count, value >> 4 * width
        self.dst, self.pattern, self.width, self.count = dst, value, width, count

    def issue(self, target: Target) -> Any:
        if self.width < 8:
            target.api.fill(self.dst, self.pattern, self.width, self.count, target.cu)
            return None
        blocks = min(-(-self.count // FILL_THREADS), 4 * target.device.capabilities.executors)
        params = target.params.pack(self.dst, self.pattern, self.count)
        function = target.device.kernels["peertile_fill64"]
        target.api.launch(function, blocks, FILL_THREADS, 0, target.cu, params, False)
        return None


def _taken(call: Callable[[], None]) -> bool:
    """Whether a stream takes an operation on a word. Pools are asked about before; managed memory, and what else the
    driver refuses, shows here."""
    try:
        call()
    except CudaError as error:
        if error.name != "CUDA_ERROR_INVALID_VALUE":
            raise
        return False
    return True


class WriteValue(Op):
    """A store of a word: by the stream itself, or by a kernel of one thread (in a graph, and where `by_kernel`)."""

    __slots__ = ("address", "by_kernel", "value", "width")

    def __init__(self, name: str, address: int, value: int, width: int, *, by_kernel: bool) -> None:
        super().__init__(name)
        self.address, self.value, self.width = address, low_bits(value, width), width
        self.by_kernel = by_kernel

    def issue(self, target: Target) -> Any:
        if not target.in_graph and not self.by_kernel:
            self.by_kernel = not _taken(lambda: target.api.write_value(target.cu, self.address, self.value, self.width))
        if target.in_graph or self.by_kernel:
            params = target.params.pack(self.address, self.value, self.width)
            target.api.launch(target.device.kernels["peertile_write"], 1, 1, 0, target.cu, params, False)
        return None


class WaitWord(Op):
    """A bounded wait on a word.

    In a stream, EQ and AT_LEAST are waits of the stream itself: they take no multiprocessor, and the device's pump
    ends them at the bound or on abort (issued: its watch). Everything else, and a wait on memory that the stream
    cannot read itself (`by_kernel`), is a kernel of one thread that polls (issued: its slot); it occupies a place
    that a launch of all multiprocessors may be waiting for.
    """

    __slots__ = ("abort", "address", "by_kernel", "cmp", "signed", "timeout_ns", "value", "waits_in_stream", "width")

    may_block = True
    touches_host = True

    def __init__(
        self, name: str, address: int, value: int, width: int, cmp: Cmp, timeout_ns: int, abort: int, *, signed: bool,
        by_kernel: bool,
    ) -> None:  # fmt: skip
        super().__init__(name)
        self.address, self.width, self.cmp, self.signed = address, width, cmp, signed
        self.by_kernel = by_kernel
        self.waits_in_stream = not by_kernel and cmp in (Cmp.EQ, Cmp.AT_LEAST)
        self.value = value
        self.timeout_ns = min(timeout_ns, MAX_NS)
        self.abort = abort

    def issue(self, target: Target) -> Any:
        if not target.in_graph and self.waits_in_stream:
            value, equal = low_bits(self.value, self.width), self.cmp is Cmp.EQ
            assert isinstance(target, CudaStream)
            # Known before it is enqueued: what takes the whole context lets it end first (cuda_waits).
            watch = target.device.pump.watch(target, target.sequence(), self)
            taken = False
            try:
                taken = _taken(lambda: target.api.wait_value(target.cu, self.address, value, self.width, equal=equal))
            finally:
                if not taken:  # else the pump would end a wait that nobody enqueued
                    target.device.pump.forget(watch)
            if taken:
                return watch
        slot = target.slot()
        expected = extended(self.value, self.width, signed=self.signed)
        params = target.params.pack(
            self.address, low_bits(expected, 64), _CMP_INDEX[self.cmp], self.width, 0 if self.signed else 1 << 63,
            self.timeout_ns, self.abort or target.device.zero_word, slot.fault_address,
        )  # fmt: skip
        target.api.launch(target.device.kernels["peertile_wait"], 1, 1, 0, target.cu, params, False)
        return slot

    def over(self, issued: Any) -> bool:
        return not getattr(issued, "releasing", False)

    def failed(self, issued: Any) -> bool:
        failed: bool = issued.failed()
        return failed

    def collect(self, issued: Any, sequence: int, *, skipped: bool) -> FaultRecord | None:
        record: FaultRecord | None = issued.collect(self.name, sequence)
        return record

    def release(self, issued: Any) -> None:
        block = getattr(issued, "block", None)
        if block is not None:
            block.live -= 1


# ---------------------------------------------------------------- events


class Record:
    """One record of an event. The NVIDIA event goes back to the device when nothing means this record any more."""

    __slots__ = ("cu", "issued", "sequence", "spare", "stream")

    def __init__(self, stream: CudaStream, cu: Any, spare: Any) -> None:
        self.stream = stream
        self.cu = cu
        self.spare = spare
        self.sequence = 0
        self.issued = False

    def __del__(self) -> None:
        self.spare.append(self.cu)


class CudaEvent(EventHandle):
    """What it means is its last record: earlier waits keep theirs."""

    __slots__ = ("record",)

    def __init__(self) -> None:
        self.record: Record | None = None


class RecordEvent(Op):
    __slots__ = ("record",)

    always_runs = True

    def __init__(self, record: Record) -> None:
        super().__init__("event record")
        self.record = record

    def issue(self, target: Target) -> Any:
        target.api.record_event(self.record.cu, target.cu)
        self.record.issued = True
        return None


class WaitEvent(Op):
    __slots__ = ("record",)

    may_block = True
    touches_host = True

    def __init__(self, record: Record) -> None:
        super().__init__("event wait")
        self.record = record

    def ready(self) -> bool:
        return self.record.issued

    def issue(self, target: Target) -> Any:
        if target is not self.record.stream:
            target.api.wait_event(target.cu, self.record.cu)
        return None

    def over(self, issued: Any) -> bool:
        source, at = self.record.stream, self.record.sequence
        source.settle(at)  # this has run, so that has
        return source.settled >= at

    def collect(self, issued: Any, sequence: int, *, skipped: bool) -> FaultRecord | None:
        cause = self.record.stream.span(self.record.sequence)
        return None if cause is None else FaultRecord(FaultKind.SKIPPED, self.name, sequence, cause=cause)


# ---------------------------------------------------------------- launches


class CudaModule(ModuleHandle):
    """A loaded kernel and the facts of its launches."""

    __slots__ = (
        "function", "layout", "limit", "module", "n_bytes", "name", "overlap", "scratch", "shared", "tells",
        "threads", "waits",
    )  # fmt: skip

    def __init__(
        self, module: Any, function: Any, name: str, threads: int, shared: int, layout: LaunchLayout, *,
        waits: bool, limit: int, overlap: bool = False, tells: bool = False,
    ) -> None:  # fmt: skip
        self.module = module
        self.function = function
        self.name = name
        self.threads = threads
        self.shared = shared
        self.layout = layout
        self.n_bytes = 8 * layout.n_slots
        self.scratch = layout.scratch_per_program
        self.waits = waits
        self.limit = limit
        self.overlap = overlap
        self.tells = tells


class Launch(Op):
    """A kernel. Issued: (its slot, the host work that hands over what it printed)."""

    __slots__ = (
        "abort", "args", "calls_host", "cooperative", "grid", "may_block", "module", "options", "programs",
        "touches_host",
    )  # fmt: skip

    def __init__(
        self, module: CudaModule, grid: Grid, programs: int, args: bytes, options: LaunchOptions, abort: int
    ) -> None:
        super().__init__(options.name)
        if len(args) < module.n_bytes:  # what is beyond, no kernel looks at
            raise ArgumentError(
                f"{options.name}: expected an argument block of {module.n_bytes} bytes, got {len(args)}"
            )
        self.module, self.grid, self.programs, self.args = module, grid, programs, args
        self.options = options
        self.abort = abort
        # One program is resident as soon as it runs.
        self.cooperative = (module.waits or options.cooperative) and programs > 1
        self.may_block = module.waits
        self.touches_host = self.calls_host = options.on_print is not None

    @property
    def launches(self) -> bool:  # type: ignore[override]
        return not self.touches_host

    def issue(self, target: Target) -> Any:
        module, options = self.module, self.options
        slot = target.slot()
        try:
            printer = target.printer() if options.on_print is not None else None
            params = target.params
            n = module.n_bytes
            params.data[:n] = self.args[:n]
            HIDDEN.pack_into(
                params.data, n, *self.grid, self.abort, slot.fault_address | target.lets_in,
                min(options.wait_timeout_ns, MAX_NS),
                slot.words_address, 0 if printer is None else printer.address,
                target.scratch(module.scratch * self.programs) if module.scratch else 0, 0,
            )  # fmt: skip
            target.api.launch(
                module.function, self.programs, module.threads, module.shared, target.cu, params.address,
                self.cooperative, module.overlap and (target.in_graph or not module.waits),
            )  # fmt: skip
        except BaseException:
            slot.block.live -= 1
            raise
        work = None
        if printer is not None:
            buffer, sink = printer, options.on_print
            assert sink is not None
            work = target.host(lambda: buffer.drain(sink))
        return slot, work

    def lets_in(self, follower: Op) -> int:
        """Bits of whether the next launch may begin before this one, which waits for peers, has ended.

        While it waits: both are so small that there is room for as much again, since what is resident early takes
        places that other streams' programs may need for these to end. Once no program waits any more that is no matter,
        but one that does not need nearly all places there are is not let in: where programs of this one have ended two
        of it would share a multiprocessor, and others have none. Of H200s two take 55.0 us for 55.5 for an all-reduce
        of 16 MiB, and 12.3 for 12.1 for an all-gather of 4, of half as many programs as there is room for.
        """
        if not (self.module.waits and isinstance(follower, Launch) and follower.module.overlap):
            return 0
        small = all(ROOM * launch.programs <= launch.module.limit for launch in (self, follower))
        whole = follower.programs >= NEARLY_ALL * follower.module.limit
        return (LETS_IN if small else 0) | (LETS_IN_AT_LAST if whole else 0)

    def failed(self, issued: Any) -> bool:
        slot, work = issued
        return slot.failed() or (work is not None and work.error is not None)

    def collect(self, issued: Any, sequence: int, *, skipped: bool) -> FaultRecord | None:
        slot, work = issued
        record: FaultRecord | None = slot.collect(self.name, sequence)
        if work is not None:
            second: FaultRecord | None = work.collect(self.name, sequence)
            record = record or second
        return record

    def release(self, issued: Any) -> None:
        issued[0].block.live -= 1


def node_of(record: FaultRecord, node: int, graph: str) -> FaultRecord:
    """The fault of a graph's node as the fault of the graph."""
    return replace(record, op=f"{record.op} (node {node} of {graph})", node=node)
