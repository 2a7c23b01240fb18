"""One launch of a kernel as an operation: checks, the block of arguments, the driver, and how its fault is told.

What a launch is made of was bound before (`binding.py`); kernels make launches (`kernel.py`), and nothing here knows
how one is compiled.
"""

from __future__ import annotations

import copy
import math
import struct
import time
import zlib
from collections.abc import Generator, Sequence
from typing import Any, Protocol

from peertile.binding import Bound, Grid, GroupLike, LazyArgument, Ready, Specialization
from peertile.config import config
from peertile.errors import (
    ArgumentError,
    DeviceFault,
    FaultPlace,
    KernelAssert,
    LaunchError,
    OutOfBounds,
    PeertileError,
    SignatureMismatch,
    UnsupportedError,
    UsageError,
    WaitTimeout,
)
from peertile.ir.types import MailboxType, PointerType, ViewType
from peertile.language.annotations import KernelParam, Role
from peertile.printing import sink_for
from peertile.runtime.argument import Argument, Use, pack_words
from peertile.runtime.context import ExecutionContext, execution, explain, outside_execution
from peertile.runtime.device import Device
from peertile.runtime.driver import FaultKind, FaultRecord, LaunchOptions, ModuleHandle, PreparedLaunch
from peertile.runtime.future import DeviceFuture, submitted
from peertile.runtime.launched import Launched
from peertile.runtime.lease import Lease
from peertile.runtime.linking import LinkCode
from peertile.runtime.op import DeviceOp
from peertile.runtime.site import Site, call_site
from peertile.runtime.stream import Stream, check_stream
from peertile.source import Loc

__all__ = ["NO_BULK", "DeferredLaunchOp", "Kernel", "LaunchOp", "loaded"]


class Kernel(Protocol):
    """What a launch needs of its kernel."""

    name: str
    params: tuple[KernelParam, ...]

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any], grid: Grid | None) -> tuple[tuple[Any, ...], Bound]: ...
    def specialize(self, bound: Bound) -> Specialization: ...
    def known(self, bound: Bound) -> Specialization | None:
        """The specialisation, if it was compiled before."""

    def remember(self, key: tuple[Any, ...], ready: Ready) -> None:
        """Keep what a launch with the same arguments need not find out again."""


def loaded(spec: Specialization, device: Device) -> ModuleHandle:
    module = spec.modules.get(device.serial)
    if module is None:
        module = spec.modules[device.serial] = device.driver.load_module(spec.binary)
    return module


NO_BULK = "without bulk copies"
"""At the end of a specialisation's key: for arguments that `Binary.fits` refused."""
_PREPARED_GRIDS = 1024
_TIMED_LAUNCHES = 8
"""Launches of a specialisation that are timed: enough to know it, few enough to cost nothing."""
_TRY_NS = 500_000
"""A launch that took less than this with all hand-overs may be tried on the thread of an event loop."""
_MOST_BRIEF_NS = 20_000
"""What a launch takes whatever its kernel does, at most: on a GPU, where both ways cross a bus, about 16 us."""
_UNKNOWN_NS = 1 << 62
_DONE = int(LinkCode.DONE)


def _ns_beyond_brief(ns_per_program: float, grid: Grid, device: Device) -> int:
    """What an await may spin for, of a launch over `grid`: the kernel. The launch itself, and the news of its end, take
    what they take either way."""
    n0, n1, n2 = grid
    brief = device.brief_ns
    return int(ns_per_program * n0 * n1 * n2) - (brief if brief < _MOST_BRIEF_NS else _MOST_BRIEF_NS)


class LaunchOp(DeviceOp[tuple[Any, ...]]):
    """A lazy launch. Its result is the tuple of its arguments, in the form they were given."""

    __slots__ = ("_bound", "_key", "_ready", "given", "kernel", "uses")

    def __init__(
        self, kernel: Kernel, given: tuple[Any, ...], bound: Bound | None, uses: Sequence[Use],
        ready: Ready | None = None, key: tuple[Any, ...] | None = None,
    ) -> None:  # fmt: skip
        """`ready`, and no binding, where a launch with the same arguments was made before; else `key` is what such a
        launch would be found by."""
        # As DeviceOp.__init__ does, without the call: building an op is counted in nanoseconds.
        self._spent = False
        self._site = call_site(4)
        self.kernel = kernel
        self.given = given
        self.uses = uses
        self._bound = bound
        self._ready = ready
        self._key = key

    @property
    def bound(self) -> Bound:
        """Its arguments and their parameters."""
        bound = self._bound
        if bound is None:
            assert self._ready is not None
            _, bound = self.kernel.bind(self.given, {}, self._ready.prepared.grid)
            self._bound = bound
        return bound

    @property
    def name(self) -> str:
        """Names the operation in errors."""
        return self.kernel.name

    @property
    def device(self) -> Device:
        """The device it runs on."""
        bound = self._bound
        if bound is not None:
            return bound.device
        device: Device = self.uses[0].storage.device
        return device

    @property
    def arity(self) -> int | None:
        """Number of results: one for each parameter."""
        return len(self.kernel.params)

    @property
    def is_unit(self) -> bool:
        """Whether `Graph.update` takes it."""
        return True

    def compiled(self) -> Specialization:
        """The specialisation that this launch uses, compiled now if need be; runs nothing."""
        return self.kernel.specialize(self.bound)

    def renew(self) -> None:
        """The device compiles kernels otherwise than when this launch was bound: it is compiled anew when it runs."""
        bound = copy.copy(self.bound)  # another thread may be about to compile by the one there is
        key, target = list(bound.key), bound.device.target
        if key[-1] is NO_BULK:
            key.pop()
        if bound.compiler is not None or target is not None:
            key.pop()
        bound.compiler = compiler = bound.device.compiler
        now = target if compiler is None else compiler
        bound.key = tuple(key) if now is None else (*key, now)
        bound.spec = bound.packed = self._ready = None
        self._bound = bound

    def load(self) -> None:
        """Compile and load what this launch runs, now; run nothing. As `KernelFunction.warm_up` with its arguments."""
        self._prepare()

    def preferred_stream(self) -> Stream | None:
        """Where its channel was used last, else where something it uses is still in use."""
        busy = False
        for use in self.uses:
            storage = use.storage
            if use.channel and storage.channel_stream is not None:
                return storage.channel_stream
            if storage.claims:
                busy = True
        return self.device.leases.conflicting_stream(self.uses) if busy else None

    def _expected_ns(self) -> int:
        ready = self._ready
        spec = self.kernel.known(self.bound) if ready is None else ready.spec
        if spec is None or spec.binary.waits:
            return _UNKNOWN_NS
        if spec.ns_per_program is not None:
            grid = (self.bound.grid or (1, 1, 1)) if ready is None else ready.prepared.grid
            return _ns_beyond_brief(spec.ns_per_program, grid, self.device)
        return 0 if spec.most_ns < _TRY_NS else _UNKNOWN_NS

    def __await__(self) -> Generator[Any, Any, tuple[Any, ...]]:
        # As any operation does, without its calls, where it is known to be brief: see `is_brief`.
        ready = self._ready
        if ready is not None and self._bound is None and not self._spent and execution.inside is None:
            ns = ready.prepared.expected_ns
            if ns is None:
                ns = self._expected_ns()
                if ready.spec.timed >= _TIMED_LAUNCHES:  # what is measured later changes little
                    ready.prepared.expected_ns = ns
            settings = config()
            budget_us = settings.spin_budget_us
            if ns <= budget_us * 1000 and budget_us > 0 and settings.host_sync is None:
                self._spent = True
                return self._run_to_end(self.uses[0].storage.device.policy.stream_for(self))
        return (yield from super().__await__())

    def _took(self, ns: int) -> None:
        spec = self.kernel.known(self.bound) if self._ready is None else self._ready.spec
        if spec is not None:
            spec.most_ns = min(spec.most_ns, ns)

    def _prepare(self) -> Ready:
        """All checks of a launch, and what the driver needs. Changes nothing on the device."""
        ready = self._ready
        if ready is None or (ready.spec.may_change and not ready.spec.captures.is_current()):
            ready = self._ready = self._made_ready()
        return ready

    def _made_ready(self) -> Ready:
        if self.bound.compiler is not self.bound.device.compiler:
            self.renew()
        kernel, bound = self.kernel, self.bound
        spec = bound.spec
        if spec is None or not spec.captures.is_current():
            spec = bound.spec = kernel.specialize(bound)
        device, group = bound.device, bound.group
        args = bound.packed
        if args is None:
            args = _pack(kernel.name, spec, bound)
            if device.target is not None and not spec.binary.fits(args):
                bound.key = (*bound.key, NO_BULK)
                spec = bound.spec = kernel.specialize(bound)
                args = _pack(kernel.name, spec, bound)
            bound.packed = args
        grid = bound.grid
        assert grid is not None
        prepared = spec.prepared.get((grid, device.serial, 0 if group is None else group.serial))
        if prepared is None:
            prepared = _prepared(kernel.name, spec, device, group, grid)
        if self._key is not None and group is None and not spec.compiled.has_mailbox:
            made = Ready(spec, prepared, args, (_explain, spec, None, kernel.name, None), bound.compiler)
            kernel.remember(self._key, made)
        return Ready(spec, prepared, args, (_explain, spec, bound, kernel.name, group), bound.compiler)

    def _submitted(self, stream: Stream) -> tuple[ExecutionContext | Launched, tuple[Any, ...]]:
        if stream.device is not self.device:
            return super()._submitted(stream)
        return self.submitted_at(stream, self._site), self.given

    def submit(self, stream: Stream | None = None) -> DeviceFuture[tuple[Any, ...]]:
        """Enqueue on `stream` (default: the device's policy says which) and return at once."""
        if type(stream) is not Stream or self._spent or execution.inside is not None or stream.recording is not None:
            return super().submit(stream)
        # As any operation does, without its calls.
        self._spent = True
        return submitted(self.submitted_at(stream, self._site), self.given, stream)

    def submitted_at(self, stream: Stream, site: Site | None) -> ExecutionContext | Launched:
        """Enqueue on a stream of its device that is not being captured; `site` made it. For whoever keeps a launch and
        submits it again and again: it is not spent by this."""
        bound = self._bound
        if bound is not None and bound.group is not None:
            bound.group.check()
        ready = self._ready
        if ready is None or (ready.spec.may_change and not ready.spec.captures.is_current()):
            ready = self._ready = self._made_ready()
        driver = stream.device.driver
        links = driver.links
        launched = Launched(self.kernel.name, stream, site, self.uses, ready.maker)
        stream.admit(launched)
        try:
            code = 0 if links is None else links.post(launched, self)
            if code == _DONE:
                return launched
            if code == LinkCode.LOOK:
                driver.linked(stream.handle)
                return launched
            if code == LinkCode.REFUSED:
                device = self.device
                if device is not stream.device:
                    raise ArgumentError(
                        f"{self.name}: expected a stream of {device.name}, got {stream.name} of {stream.device.name}; "
                        "run it on its own device"
                    )
                device.leases.claim(launched)
            launched.sequence = driver.enqueue(stream.handle, ready.prepared, ready.args)
        except BaseException:
            launched.abandon()
            raise
        return launched

    def sync_on(self, stream: Stream) -> tuple[Any, ...]:
        """Run on `stream` and wait for the end; on an idle stream the calling thread does the work."""
        if execution.inside is not None:
            outside_execution(self.kernel.name)
        if type(stream) is not Stream:
            check_stream(f"{self.kernel.name}.sync_on", stream)
        if self._spent:
            self._spend()
        self._spent = True
        return self._run_to_end(stream)

    def _run_to_end(self, stream: Stream) -> tuple[Any, ...]:
        device = self.device
        if stream.recording is not None or stream.device is not device:
            return super()._run_to_end(stream)
        # The shortest way: what the general one does, without a context, since nothing stays in flight.
        bound = self._bound
        if bound is not None and bound.group is not None:
            bound.group.check()
        ready = self._prepare()
        spec, prepared, args = ready.spec, ready.prepared, ready.args
        leases = device.leases
        lease = Lease(self.kernel.name, stream, self._site, self.uses)
        leases.claim(lease)
        try:
            if spec.timed < _TIMED_LAUNCHES:
                start = time.perf_counter_ns()
                record = device.driver.run_prepared(stream.handle, prepared, args)
                ns = time.perf_counter_ns() - start
                spec.took(ns, math.prod(prepared.grid))
                if ns < device.brief_ns:
                    device.brief_ns = ns
            else:
                record = device.driver.run_prepared(stream.handle, prepared, args)
        except BaseException:
            # Interrupted, the launch may go on in its stream: it owns what it uses until that is over.
            context = ExecutionContext(self.kernel.name, stream, on_caller=True)
            context.leases.append(lease)
            context.retain(ready.maker)
            context.abandon()
            raise
        leases.release((lease,))
        if record is not None:
            raise _explain(record, *ready.maker[1:])
        return self.given

    def _enter(self, context: ExecutionContext) -> tuple[Any, ...]:
        # As any operation does, without its calls, where a launch with the same arguments was made before.
        if self._spent or self._bound is not None or self.uses[0].storage.device is not context.device:
            return super()._enter(context)
        self._spent = True
        return self._execute(context)

    def _execute(self, context: ExecutionContext) -> tuple[Any, ...]:
        bound = self._bound
        if bound is not None and bound.group is not None:
            context.require(bound.group.check)
        ready = self._ready
        if ready is None or (ready.spec.may_change and not ready.spec.captures.is_current()):
            ready = self._ready = self._made_ready()
        if context.recording is None and not context.on_caller:
            # As `lease` does first, without the call: links of a chain mostly use what the one before them did.
            leases = context.leases
            lease: Lease | None = leases[-1] if leases and not context.gives_up_leases else None
            if lease is None or not context.device.leases.again(lease, self.kernel.name, self._site, self.uses):
                lease = context.lease(self.uses, self.kernel.name, self._site)
            context.launch(ready.prepared, ready.args, lease, ready.maker)
            return self.given
        lease = context.lease(self.uses, self.kernel.name, self._site)
        context.keep_launch(ready.maker)
        if context.on_caller:
            driver = context.driver
            start = time.perf_counter_ns()
            record = driver.run_prepared(context.handle, ready.prepared, ready.args)
            ready.spec.took(time.perf_counter_ns() - start, math.prod(ready.prepared.grid))
            context.give_back(lease)
            if record is not None:
                raise _explain(record, *ready.maker[1:])
        else:
            context.launch(ready.prepared, ready.args, lease, ready.maker)
        return self.given


class DeferredLaunchOp(LaunchOp):
    """A launch with arguments that are operations themselves: bound when they have run, on the same stream."""

    __slots__ = ("_args", "_grid", "_kwargs")
    _enter = DeviceOp._enter
    submit = DeviceOp.submit
    __await__ = DeviceOp.__await__

    def __init__(self, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Grid | None) -> None:
        self._spent = False
        self._site = call_site(4)
        self.kernel = kernel
        self._ready = self._key = None
        self._args = args
        self._kwargs = kwargs
        self._grid = grid
        first: Device | None = None
        for op in self._lazy():
            if first is None:
                first = op.device
            elif op.device is not first:
                raise ArgumentError(
                    f"{kernel.name}: expected arguments of one device, got operations on {first.name} and "
                    f"{op.device.name}; copy to one device"
                )
        for op in self._lazy():
            op._spend()

    def _lazy(self) -> list[DeviceOp[Any]]:
        return [v for v in (*self._args, *self._kwargs.values()) if isinstance(v, DeviceOp)]

    @property
    def device(self) -> Device:
        return self._lazy()[0].device

    def compiled(self) -> Specialization:
        raise UsageError(f"{self.kernel.name}: its arguments have not run, so their types are not known; sync it first")

    def preferred_stream(self) -> Stream | None:
        return next((s for s in (op.preferred_stream() for op in self._lazy()) if s is not None), None)

    def _expected_ns(self) -> int:
        return _UNKNOWN_NS

    def _took(self, ns: int) -> None:
        """What the arguments took is in it: it says nothing about the launch."""

    def _run_to_end(self, stream: Stream) -> tuple[Any, ...]:
        return DeviceOp._run_to_end(self, stream)

    def _submitted(self, stream: Stream) -> tuple[ExecutionContext | Launched, tuple[Any, ...]]:
        return DeviceOp._submitted(self, stream)

    def _execute(self, context: ExecutionContext) -> tuple[Any, ...]:
        def done(value: Any) -> Any:
            return value._execute(context) if isinstance(value, DeviceOp) else value

        args = [done(v) for v in self._args]
        kwargs = {name: done(v) for name, v in self._kwargs.items()}
        try:
            self.given, self._bound = self.kernel.bind(args, kwargs, self._grid)
            self.uses = self._bound.uses
        except LazyArgument:
            raise ArgumentError(
                f"{self.kernel.name}: an argument is an operation whose result is an operation; use then"
            ) from None
        return super()._execute(context)


def _prepared(name: str, spec: Specialization, device: Device, group: GroupLike | None, grid: Grid) -> PreparedLaunch:
    """What the driver keeps of launches over `grid`; asked for once, or again after a thousand other grids."""
    module = spec.modules.get(device.serial) or loaded(spec, device)
    key = 0 if group is None else group.serial
    options = spec.options.get(key)
    if options is None:
        options = spec.options[key] = LaunchOptions(
            name,
            int(config().wait_timeout_s * 1e9),
            group.abort_address if group is not None else 0,
            spec.binary.waits,
            sink_for(spec.binary.places, group.rank if group is not None else None),
        )
    prepared = device.driver.prepare_launch(module, grid, options)
    if len(spec.prepared) >= _PREPARED_GRIDS:
        spec.prepared.clear()
    spec.prepared[grid, device.serial, key] = prepared
    return prepared


def _pack(name: str, spec: Specialization, bound: Bound) -> bytes:
    """The words of all arguments, after the checks that a launch makes of them."""
    uses, arguments = bound.uses, bound.arguments
    for use in uses:
        if use.exclusive and len(uses) > 1:
            _check_exclusive(name, bound, use)
    # S1: relations between extents that the bounds pass left to the launcher.
    for lhs, lhs_axis, lhs_size, rhs, rhs_axis, rhs_size in spec.extent_checks:
        need, have = -(-arguments[lhs].extents[lhs_axis] // lhs_size), -(-arguments[rhs].extents[rhs_axis] // rhs_size)
        if need > have:
            _refuse_extents(name, spec, bound)
    if spec.compiled.program_slots:
        _check_slots(name, spec, bound)
    if spec.compiled.whole_tiles:
        _check_whole_tiles(name, spec, bound)
    if spec.compiled.peer_atomics:
        _check_peer_atomics(name, spec, bound)
    if spec.has_pointers:
        for argument in arguments:
            if type(argument.type) is PointerType and argument.keep is not None:
                argument.keep.check_launch(name)
    marks = bound.device.marks if spec.is_marked else b""
    if not spec.compiled.has_mailbox:
        return b"".join([*[a.words for a in arguments], marks])
    number = _signature(name, bound, spec.compiled.steering)
    signature = struct.pack("<q", number)
    for argument in arguments:
        labels = getattr(argument.keep, "labels", None)
        if labels is not None:
            # The host writes there now, before the leases of the launch are taken, which look at it too.
            for use in argument.uses:
                use.storage.check_alive(name)
            labels.note(number, _label(name, bound))
    return b"".join(a.words + signature if isinstance(a.type, MailboxType) else a.words for a in arguments) + marks


def _label(name: str, bound: Bound) -> str:
    """A launch in the words of a person, as short as it may be told from another."""
    assert bound.grid is not None
    programs = bound.grid[0] * bound.grid[1] * bound.grid[2]
    return f"{name} over {programs} program{'s' if programs != 1 else ''}"


def _mismatch(record: FaultRecord, bound: Bound, name: str) -> str:
    """Who posted what, as far as the tables of the launch's mailboxes know."""
    here = _label(name, bound)
    for argument in bound.arguments:
        labels = getattr(argument.keep, "labels", None)
        found = labels.find(record.got) if labels is not None else None
        if found is not None:
            rank, label = found
            if label == here:
                label += " with other scalars, constants or extents"
            return f"rank {rank} posted from {label}, this rank runs {here}"
    return f"a peer posted from another kernel, grid or arguments (signature {record.got:#08x}); this rank runs {here}"


def _check_exclusive(name: str, bound: Bound, use: Use) -> None:
    """S2: the bytes of an exclusive argument are used by no other argument of the launch."""
    low, high = use.low, use.high
    itself = True
    for other in bound.uses:
        # By address, not by storage: memory of somebody else's may be wrapped twice.
        if other.high <= low or high <= other.low or low == high or other.low == other.high:  # nothing has no place
            continue
        if other is use and itself:  # a second time it is the same partition, given twice
            itself = False
            continue
        names = [p.name for p in bound.params if p.role is not Role.CONST]
        owners = [(n, u) for n, argument in zip(names, bound.arguments, strict=True) for u in argument.uses]
        mine = next(n for n, u in owners if u is use)
        theirs = next(n for n, u in owners if u is other and n != mine)
        if _lie_apart(*(bound.arguments[names.index(n)] for n in (mine, theirs))):
            continue
        raise LaunchError(
            f"{name}: exclusive argument {mine} overlaps {theirs} in {use.storage.name}; "
            "pass separate tensors, or disjoint slices"
        )


def _lie_apart(x: Argument, y: Argument) -> bool:
    """Whether two views have no byte in common though their ranges overlap, as other columns of the same rows: both
    have the same longest stride, and within it the rest of one lies behind that of the other."""
    first, second = _pitch(x), _pitch(y)
    if first is None or second is None or first[1] != second[1]:
        return False
    behind = (second[0] - first[0]) % first[1]
    return first[2] <= behind and behind + second[2] <= first[1]


def _pitch(argument: Argument) -> tuple[int, int, int] | None:
    """Where a view begins, its longest stride, and what it spans but for that axis, in bytes; None where it has no axis
    or one without strides of its own."""
    t, rank = argument.type, len(argument.extents)
    if not isinstance(t, ViewType):
        return None
    start, *numbers = struct.unpack(f"<{1 + 2 * rank}q", argument.words)
    size = t.dtype.itemsize
    axes = sorted((size * stride, n) for n, stride in zip(argument.extents, numbers[rank:], strict=True))
    if not axes or axes[0][0] <= 0:
        return None
    return start, axes[-1][0], size + sum(stride * (n - 1) for stride, n in axes[:-1])


def _refuse_extents(name: str, spec: Specialization, bound: Bound) -> None:
    """LaunchError for the first check of extents that does not hold."""
    for check in spec.compiled.checks:
        lhs, rhs = bound.arguments[check.lhs].extents, bound.arguments[check.rhs].extents
        have, need = -(-rhs[check.rhs_axis] // check.rhs_size), -(-lhs[check.lhs_axis] // check.lhs_size)
        if need > have:
            names = [p.name for p in bound.params if p.role is not Role.CONST]
            left, right = names[check.lhs], names[check.rhs]
            raise LaunchError(
                f"{name}: {check.description}: {right} axis {check.rhs_axis} has {have} tiles of {check.rhs_size} "
                f"(extent {rhs[check.rhs_axis]}), but {need} are used, as {left} axis {check.lhs_axis} has "
                f"{need} tiles of {check.lhs_size} (extent {lhs[check.lhs_axis]}); pass tensors whose extents agree"
            )


def _check_whole_tiles(name: str, spec: Specialization, bound: Bound) -> None:
    """A multicast access clips nothing: every tile of its partition lies inside as a whole."""
    for whole in spec.compiled.whole_tiles:
        extent = bound.arguments[whole.param].extents[whole.axis]
        if extent % whole.size == 0 and (extent or not whole.some):
            continue
        param = [p for p in bound.params if p.role is not Role.CONST][whole.param].name
        got = f"got {extent}" if extent else "got an empty one"
        raise LaunchError(
            f"{name}: the multicast {param}: expected an extent of axis {whole.axis} of whole tiles of {whole.size}, "
            f"{got}; a partly overlapping tile is not clipped, so pad the tensor or choose a smaller tile"
        )


def _check_slots(name: str, spec: Specialization, bound: Bound) -> None:
    """A program of a signal or counter takes the slot of its own index unless it names one: all must exist."""
    assert bound.grid is not None
    programs = bound.grid[0] * bound.grid[1] * bound.grid[2]
    for k in spec.compiled.program_slots:
        slots = bound.arguments[k].slots
        if slots is not None and programs > slots:
            param = [p for p in bound.params if p.role is not Role.CONST][k]
            raise LaunchError(
                f"{name}: the grid has {programs} programs, each with the slot of its index, but the "
                f"{param.role.value} {param.name} has {slots} slots; make it with slots={programs}, launch fewer "
                f"programs, or name the slot with {param.name}[k]"
            )


def _check_peer_atomics(name: str, spec: Specialization, bound: Bound) -> None:
    """P2: between every pair of devices that reach the memory, an atomic on it is atomic. Always so on one device."""
    for k in spec.compiled.peer_atomics:
        argument = bound.arguments[k]
        owners = (argument.keep, *(use.storage.owner for use in argument.uses))
        if all(getattr(owner, "peer_atomics", True) for owner in owners):
            continue
        param = [p for p in bound.params if p.role is not Role.CONST][k]
        raise UnsupportedError(
            f"{name}: the {param.role.value} {param.name} is updated by atomics: expected devices whose atomics reach "
            "each other's memory, got a pair that has no native peer atomics (`peertile info` shows which); let each "
            "rank store to words of its own and signal, or fold in a collective"
        )


def _explain(
    record: FaultRecord, spec: Specialization, bound: Bound | None, op: str, group: GroupLike | None
) -> PeertileError:
    """The user's error for a device's fault record; marks the group broken, so that no peer waits in vain."""
    error = _explain_alone(record, spec, bound, op, group)
    if group is not None and group.failure() is None:
        group.fail(f"{type(error).__name__}: {error.message if isinstance(error, DeviceFault) else error}")
    return error


def _explain_alone(
    record: FaultRecord, spec: Specialization, bound: Bound | None, op: str, group: GroupLike | None
) -> PeertileError:
    if record.kind is FaultKind.ABORTED and group is not None:
        failure = group.failure()
        if failure is not None:
            return failure
    rank = group.rank if group is not None else None
    if record.kind is FaultKind.SKIPPED or record.error is not None:
        return explain(record, op if record.kind is FaultKind.SKIPPED else None)
    place = spec.binary.places[record.place] if 0 <= record.place < len(spec.binary.places) else None
    loc: Loc | None = place.loc.user if place is not None and place.loc is not None else None
    where = FaultPlace(rank, record.program if record.program >= 0 else None, loc)
    text = place.message if place is not None else ""
    if record.kind is FaultKind.ASSERT:
        return KernelAssert(f"assertion failed: {text}", op=op, place=where)
    if record.kind is FaultKind.BOUNDS:
        return OutOfBounds(OutOfBounds.text(text, record.got, record.limit), op=op, place=where)
    if record.kind is FaultKind.SIGNATURE:
        assert bound is not None, "launches with mailboxes are not remembered"
        return SignatureMismatch(
            f"mailbox: {_mismatch(record, bound, op)}; launch the same kernel with the same grid and scalars on every "
            "rank",
            op=op,
            place=where,
        )
    if record.kind is FaultKind.WAIT_TIMEOUT:
        what = (place.what if place is not None else "") or "a word"
        return WaitTimeout(
            f"wait for {what}, slot {record.slot}: nothing came within {config().wait_timeout_s:g} s; {record.waited}",
            op=op,
            place=where,
            slot=record.slot,
            expected=record.limit,
            seen=record.got,
        )
    return DeviceFault(f"{record.kind.name.lower()}: {record.error or 'no further detail'}", op=op, place=where)


def _signature(name: str, bound: Bound, steering: frozenset[str] | None) -> int:
    """24 bits that differ between launches that do not match: kernel, grid, scalars and extents."""
    state = zlib.crc32(name.encode())
    state = zlib.crc32(struct.pack("<3q", *(bound.grid or (0, 0, 0))), state)
    runtime = (p for p in bound.params if p.role is not Role.CONST)
    for param, argument in zip(runtime, bound.arguments, strict=True):
        if steering is not None and param.name not in steering:
            continue
        if argument.extents:
            state = zlib.crc32(pack_words(argument.extents), state)
        elif param.role is Role.SCALAR:
            state = zlib.crc32(argument.words, state)
    for const in bound.consts.items():
        state = zlib.crc32(repr(const).encode(), state)
    # Zero is what fresh words hold, so it stands for nobody.
    return (state ^ state >> 24) & 0xFFFFFF or 1
