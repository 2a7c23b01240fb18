"""Lazy device operations and how they combine. A little long: what a method of an operation makes is an operation.
Nothing runs until one is executed, once.

    READY ──sync, submit, schedule, await, capture──> SPENT        a second execution is a UsageError
      └───then, map, zip, shared, …: moved into another op──> SPENT

Execution goes through an `ExecutionContext` (context.py). Closures run while the operation is being submitted, on
the submitting thread and under its execution lock: they see handles, not finished data. Results are unpacked
into closures: a tuple gives an argument for each item, None gives none, anything else gives one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple, cast, overload

from peertile.errors import ArgumentError, PeertileError, UsageError
from peertile.runtime.checks import not_pickled
from peertile.runtime.context import ExecutionContext, execution, explain, outside_execution, refuse_recorded
from peertile.runtime.driver import FaultKind
from peertile.runtime.future import DeviceFuture, is_brief, spent_error, submitted
from peertile.runtime.launched import Launched
from peertile.runtime.linking import LinkCode
from peertile.runtime.once import Shared
from peertile.runtime.recording import Recording
from peertile.runtime.site import Site, call_site
from peertile.runtime.stream import Stream, check_stream

if TYPE_CHECKING:
    from peertile.runtime.device import Device
    from peertile.runtime.schedule import SchedulingPolicy

__all__ = [
    "Chain",
    "DeviceOp",
    "ExecutionContext",
    "FunctionOp",
    "Graph",
    "GraphLaunchOp",
    "SharedOp",
    "ZipOp",
    "unpacked",
    "zip",
]

T = TypeVar("T")
U = TypeVar("U")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
Ts = TypeVarTuple("Ts")

_new: Any = object.__new__
_UNKNOWN_NS = 1 << 62

_OVERLAP_AT = 4
"""Operations from which on `sync` enqueues them: their stream then runs them while this thread makes the next one
ready. Fewer run on the thread that waits for them anyway, which wakes no other."""


class DeviceOp(Generic[T]):
    """A lazy operation on a device, used once; `T` is what executing it gives.

    `sync()` runs it and waits; `await op` does so without blocking the loop; `schedule(policy)` gives a future
    that submits at its first poll; `submit(stream)` enqueues now; `graph_on(stream)` records it for replay.

    To write one's own: derive, set `name` and `device`, and define `execute(context)`, which registers what it uses
    (`context.retain`, `context.lease`) before it enqueues, and runs other operations with `context.run(op)`.

    >>> import peertile as pt
    >>> pt.op.ones((2,), pt.f32).map(lambda x: x.shape).sync()
    (2,)
    """

    __slots__ = ("__weakref__", "_site", "_spent")
    __reduce_ex__ = not_pickled

    def __init__(self) -> None:
        self._spent = False
        self._site: Site | None = call_site(2)

    @property
    def name(self) -> str:
        """Names the operation in errors."""
        return type(self).__name__

    @property
    def device(self) -> Device:
        """The device it runs on."""
        raise NotImplementedError(f"{type(self).__name__}: define the property device")

    @property
    def arity(self) -> int | None:
        """Number of results, where it is known before the operation runs."""
        return None

    @property
    def is_unit(self) -> bool:
        """Whether it only does something to what exists (a launch, a copy, a fill): what `Graph.update` takes."""
        return False

    def execute(self, context: ExecutionContext) -> T:
        """Enqueue on the context's stream and return the result's handles. Called once."""
        raise NotImplementedError(f"{type(self).__name__}: define execute(context)")

    def preferred_stream(self) -> Stream | None:
        """The stream that holds what the operation needs; None where any will do."""
        return None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{', spent' if self._spent else ''}>"

    # ---------------------------------------------------------------- execution

    def _execute(self, context: ExecutionContext) -> T:
        if context.batch:
            context.flush()
        return self.execute(context)

    def _expected_ns(self) -> int:
        """How long it takes, where that was measured before; very long where it was not."""
        return _UNKNOWN_NS

    def _took(self, ns: int) -> None:
        """It took no longer than this, hand-overs between threads included."""

    def _spend(self) -> None:
        if self._spent:
            raise spent_error(self.name)
        self._spent = True

    def _enter(self, context: ExecutionContext) -> T:
        """Execute inside another operation's execution."""
        self._spend()
        if self.device is not context.device:
            raise ArgumentError(
                f"{self.name}: expected a stream of {self.device.name}, got {context.stream.name} of "
                f"{context.device.name}; run it on its own device"
            )
        return self._execute(context)

    def _start(self, context: ExecutionContext, doing: str = "the execution of another operation") -> T:
        """Execute as the outermost operation, under the thread's execution lock. The op is spent already."""
        if self.device is not context.device:
            raise ArgumentError(
                f"{self.name}: expected a stream of {self.device.name}, got {context.stream.name} of "
                f"{context.device.name}; run it on its own device"
            )
        before = execution.inside
        execution.inside = doing
        try:
            return self._execute(context)
        finally:
            execution.inside = before

    @property
    def _operations(self) -> int:
        """How many operations it consists of, at least: from a few on, the stream runs while they are enqueued."""
        return 1

    def _pick(self, policy: SchedulingPolicy | None) -> Stream:
        stream: Stream = (policy or self.device.policy).stream_for(self)
        return stream

    def sync(self) -> T:
        """Run on a stream of the device's scheduling policy and wait for the end."""
        if execution.inside is not None:
            outside_execution(self.name)
        return self.sync_on(self._pick(None))

    def sync_on(self, stream: Stream) -> T:
        """Run on `stream` and wait for the end; on an idle stream the calling thread does the work, of a chain of four
        or more operations the stream's own thread, while this one enqueues the rest."""
        outside_execution(self.name)
        check_stream(f"{self.name}.sync_on", stream)
        self._spend()
        return self._run_to_end(stream)

    def _run_to_end(self, stream: Stream) -> T:
        """What `sync_on` does with an op that is spent already."""
        context = ExecutionContext(self.name, stream, on_caller=self._operations < _OVERLAP_AT)
        try:
            result = self._start(context)
            context.seal()
            error = context.wait()
        except BaseException:
            context.abandon()
            raise
        if error is not None:
            raise error
        return result

    def _submitted(self, stream: Stream) -> tuple[ExecutionContext | Launched, T]:
        """Enqueue, on a stream that is not being captured: the submission, and the result's handles. The op is spent
        already."""
        context = ExecutionContext(self.name, stream, on_caller=False)
        stream.admit(context)
        try:
            result = self._start(context)
            context.seal()
        except BaseException:
            context.abandon()
            raise
        return context, result

    def submit(self, stream: Stream | None = None) -> DeviceFuture[T]:
        """Enqueue on `stream` (default: the device's policy says which) and return at once."""
        if execution.inside is not None:
            outside_execution(self.name)
        if stream is not None and type(stream) is not Stream:
            check_stream(f"{self.name}.submit", stream)
        if self._spent:
            self._spend()
        self._spent = True
        if stream is None:
            stream = self._pick(None)
        if stream.recording is not None:
            refuse_recorded(self.name, stream)
        submission, result = self._submitted(stream)
        return submitted(submission, result, stream)

    def schedule(self, policy: SchedulingPolicy | None = None) -> DeviceFuture[T]:
        """A future that submits at its first poll, where `policy` (default: the device's) says."""
        if policy is not None and not hasattr(policy, "stream_for"):
            raise ArgumentError(
                f"{self.name}.schedule: policy: expected a SchedulingPolicy or None, got {type(policy).__name__}; to "
                "name a stream use submit"
            )
        self._spend()
        return DeviceFuture(self, policy, None)

    def __await__(self) -> Generator[Any, Any, T]:
        self._spend()
        return self._awaited() if is_brief(self) else DeviceFuture(self, None, None).__await__()

    def _awaited(self) -> Generator[Any, Any, T]:
        """As awaiting a future that runs it now, without the future."""
        if execution.inside is not None:
            outside_execution(self.name)
        return self._run_to_end(self._pick(None))
        yield  # a generator, though nothing is waited for

    def async_on(self, stream: Stream) -> T:
        """Unsafe: enqueue on `stream` and return the result with all protection given up.

        Nothing keeps memory, modules or leases after the return: the caller must keep every object that the
        operation uses alive, and everything else away from it, until the stream has been waited for.
        """
        outside_execution(self.name)
        check_stream(f"{self.name}.async_on", stream)
        self._spend()
        context = ExecutionContext(self.name, stream, on_caller=False)
        context.gives_up_leases = True
        try:
            return self._start(context)
        finally:
            context.seal()
            context.release()

    # ---------------------------------------------------------------- combinators

    @overload
    def then(self: DeviceOp[tuple[*Ts]], closure: Callable[[*Ts], DeviceOp[U]]) -> DeviceOp[U]: ...
    @overload
    def then(self: DeviceOp[None], closure: Callable[[], DeviceOp[U]]) -> DeviceOp[U]: ...
    @overload
    def then(self, closure: Callable[[T], DeviceOp[U]]) -> DeviceOp[U]: ...
    def then(self, closure: Callable[..., DeviceOp[U]]) -> DeviceOp[U]:
        """Then the operation that `closure` makes of the results: on the same stream, in order.

        The closure may not execute other operations: that is a UsageError.
        """
        return self._extended(_THEN, closure)

    @overload
    def then_unchecked(self: DeviceOp[tuple[*Ts]], closure: Callable[[*Ts], DeviceOp[U]]) -> DeviceOp[U]: ...
    @overload
    def then_unchecked(self: DeviceOp[None], closure: Callable[[], DeviceOp[U]]) -> DeviceOp[U]: ...
    @overload
    def then_unchecked(self, closure: Callable[[T], DeviceOp[U]]) -> DeviceOp[U]: ...
    def then_unchecked(self, closure: Callable[..., DeviceOp[U]]) -> DeviceOp[U]:
        """Unsafe: `then` whose closure may execute other operations.

        The caller sees to it that they touch nothing that this operation's stream is still using: leases refuse
        what they can see, and the results of `async_on` they cannot.
        """
        return self._extended(Step.THEN_UNCHECKED, closure)

    @overload
    def map(self: DeviceOp[tuple[*Ts]], closure: Callable[[*Ts], U]) -> DeviceOp[U]: ...
    @overload
    def map(self: DeviceOp[None], closure: Callable[[], U]) -> DeviceOp[U]: ...
    @overload
    def map(self, closure: Callable[[T], U]) -> DeviceOp[U]: ...
    def map(self, closure: Callable[..., U]) -> DeviceOp[U]:
        """The same work with `closure(results)` as the result; handles, not finished data."""
        return self._extended(_MAP, closure)

    @overload
    def inspect(self: DeviceOp[tuple[*Ts]], closure: Callable[[*Ts], object]) -> DeviceOp[tuple[*Ts]]: ...
    @overload
    def inspect(self: DeviceOp[None], closure: Callable[[], object]) -> DeviceOp[None]: ...
    @overload
    def inspect(self, closure: Callable[[T], object]) -> DeviceOp[T]: ...
    def inspect(self, closure: Callable[..., object]) -> DeviceOp[Any]:
        """The same work and results; `closure` sees them on the way."""
        return self._extended(Step.INSPECT, closure)

    def _extended(self, step: Step, closure: Callable[..., Any]) -> DeviceOp[Any]:
        if not callable(closure):
            raise ArgumentError(f"{step.value}: expected a function, got {type(closure).__name__}")
        self._spend()
        return Chain(self, [(step, closure)])

    def shared(self) -> SharedOp[T]:
        """An operation that runs once, whoever gets there first, and may be used any number of times, from any
        thread. A use on another stream is ordered behind it by an event; a failure reaches every use."""
        self._spend()
        return SharedOp(Shared(self))

    @overload
    def unzip(self: DeviceOp[tuple[A, B]]) -> tuple[DeviceOp[A], DeviceOp[B]]: ...
    @overload
    def unzip(self: DeviceOp[tuple[A, B, C]]) -> tuple[DeviceOp[A], DeviceOp[B], DeviceOp[C]]: ...
    @overload
    def unzip(self, count: int | None = None) -> tuple[DeviceOp[Any], ...]: ...
    def unzip(self, count: int | None = None) -> tuple[DeviceOp[Any], ...]:
        """An operation for each of the results; the work is done once. `count` where it cannot be known."""
        known = self.arity if count is None else count
        if known is None:
            raise ArgumentError(f"unzip: {self.name} does not know its number of results; write unzip(n)")
        shared = self.shared()
        return tuple(_PartOp(shared, k, known) for k in range(known))

    # ---------------------------------------------------------------- graphs

    def graph_on(self, stream: Stream, name: str | None = None) -> Graph[T]:
        """Record the operation on `stream` as a graph. Nothing runs; its outputs are unwritten until a launch."""
        outside_execution(self.name)
        self._spend()
        recording = Recording(name, stream)
        recording.begin()
        try:
            context = ExecutionContext(self.name, stream, on_caller=False, recording=recording)
            result = self._start(context, f"the capture of {self.name}")
        except BaseException:
            recording.drop()
            raise
        recording.end()
        return Graph(recording, result)


def unpacked(closure: Callable[..., U], result: Any) -> U:
    """`closure` called with a result, unpacked."""
    if type(result) is tuple:
        return closure(*result)
    if result is None:
        return closure()
    return closure(result)


class Step(Enum):
    """What a chain does with the results so far."""

    THEN = "then"
    THEN_UNCHECKED = "then_unchecked"
    MAP = "map"
    INSPECT = "inspect"


# Looking a member or its value up costs as much as a call, and a chain does for each of its steps.
_THEN, _THEN_UNCHECKED, _MAP, _INSPECT = Step.THEN, Step.THEN_UNCHECKED, Step.MAP, Step.INSPECT


_DONE, _LOOK = int(LinkCode.DONE), int(LinkCode.LOOK)


def _linked(context: ExecutionContext, op: Any, code: int) -> Any:
    """What is left to do of a launch that a link took on, and its result."""
    if code == _LOOK:
        context.driver.linked(context.handle)
    else:
        ready = op._ready
        context.enqueue_leased(ready.prepared, ready.args, ready.maker)
    return op.given


class Chain(DeviceOp[T]):
    """An operation and the steps behind it, in one list: chains of any length need no recursion."""

    __slots__ = ("_source", "_steps")

    def __init__(self, source: DeviceOp[Any], steps: list[tuple[Step, Callable[..., Any]]]) -> None:
        super().__init__()
        self._source = source
        self._steps = steps

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def device(self) -> Device:
        return self._source.device

    def preferred_stream(self) -> Stream | None:
        return self._source.preferred_stream()

    @property
    def _operations(self) -> int:
        return self._source._operations + len(self._steps)

    def _extended(self, step: Step, closure: Callable[..., Any]) -> DeviceOp[Any]:
        if not callable(closure):
            raise ArgumentError(f"{step.value}: expected a function, got {type(closure).__name__}")
        if self._spent:
            self._spend()
        self._spent = True
        self._steps.append((step, closure))  # this chain is spent, so the list can move on
        # As the constructor does, without its calls.
        chain: Chain[Any] = _new(Chain)
        chain._spent = False
        chain._site = self._site
        chain._source = self._source
        chain._steps = self._steps
        return chain

    def _submitted(self, stream: Stream) -> tuple[ExecutionContext | Launched, T]:
        for step, _ in self._steps:
            if step is not _MAP:
                return super()._submitted(stream)
        # Nothing else is enqueued: the source is the submission.
        submission, result = self._source._submitted(stream)
        before = execution.inside
        execution.inside = "the closure of map"
        try:
            for _, closure in self._steps:
                if submission.host_pending:
                    submission.settle_host()
                result = unpacked(closure, result)
        finally:
            execution.inside = before
        return submission, cast("T", result)

    def _execute(self, context: ExecutionContext) -> T:
        result: Any = self._source._execute(context)
        links = context.links()
        link = None if links is None else links.link
        inside = execution
        before = label = inside.inside
        try:
            for step, closure in self._steps:
                if context.batch:
                    context.flush()
                if context.host_pending:
                    context.settle_host()
                now = (
                    "the closure of then" if step is _THEN
                    else None if step is _THEN_UNCHECKED
                    else "the closure of map" if step is _MAP
                    else "the closure of inspect"
                )  # fmt: skip
                if now is not label:
                    inside.inside = label = now
                value: Any = closure(*result) if type(result) is tuple else unpacked(closure, result)
                if step is _THEN and link is not None and (code := link(context, value, False)):
                    result = value.given if code == _DONE else _linked(context, value, code)
                    continue  # still inside, as far as anybody can tell: no code but ours has run
                if label is not before:
                    inside.inside = label = before
                if step is _MAP:
                    result = value
                elif step is not _INSPECT:
                    if not isinstance(value, DeviceOp):
                        raise ArgumentError(
                            f"{step.value}: expected the closure to return an operation, got {type(value).__name__}; "
                            "use map for a plain value"
                        )
                    result = value._enter(context)
        finally:
            if label is not before:
                inside.inside = before
        return cast("T", result)


class ZipOp(DeviceOp[T]):
    """Operations in order on one stream; the result is the tuple of theirs."""

    __slots__ = ("_ops",)

    def __init__(self, ops: tuple[DeviceOp[Any], ...]) -> None:
        super().__init__()
        if not ops:
            raise ArgumentError("zip: expected at least one operation, got none")
        for op in ops:
            if not isinstance(op, DeviceOp):
                raise ArgumentError(f"zip: expected operations, got {type(op).__name__}")
            if op.device is not ops[0].device:
                raise ArgumentError(
                    f"zip: expected operations of one device, got {ops[0].device.name} and {op.device.name}"
                )
        for op in ops:
            op._spend()
        self._ops = ops

    @property
    def name(self) -> str:
        return self._ops[0].name

    @property
    def device(self) -> Device:
        return self._ops[0].device

    @property
    def arity(self) -> int | None:
        return len(self._ops)

    def preferred_stream(self) -> Stream | None:
        return next((s for s in (op.preferred_stream() for op in self._ops) if s is not None), None)

    @property
    def _operations(self) -> int:
        return sum([op._operations for op in self._ops])

    def _execute(self, context: ExecutionContext) -> T:
        outermost = context.gather()
        links = context.links()
        if links is None:
            results = tuple([op._execute(context) for op in self._ops])
        else:
            link, found = links.link, []
            for op in self._ops:
                code = link(context, op, True)
                found.append(
                    op._execute(context) if not code
                    else op.given if code == _DONE  # type: ignore[attr-defined]
                    else _linked(context, op, code)
                )  # fmt: skip
            results = tuple(found)
        if outermost:
            context.gathers = False
            context.flush()
        return cast("T", results)


class FunctionOp(DeviceOp[T]):
    """An operation given by a function of the execution context: what `pt.op` makes."""

    __slots__ = ("_device", "_function", "_is_unit", "_name")

    def __init__(
        self, name: str, device: Device, function: Callable[[ExecutionContext], T], *, is_unit: bool = False
    ) -> None:
        super().__init__()
        self._name = name
        self._device = device
        self._function = function
        self._is_unit = is_unit

    @property
    def name(self) -> str:
        return self._name

    @property
    def device(self) -> Device:
        return self._device

    @property
    def is_unit(self) -> bool:
        return self._is_unit

    def _execute(self, context: ExecutionContext) -> T:
        context.site = self._site
        return self._function(context)


# -------------------------------------------------------------------- shared


class SharedOp(DeviceOp[T]):
    """What `op.shared()` gives: executed once, usable many times. `clone()` is another handle on the same work."""

    __slots__ = ("_shared",)

    def __init__(self, shared: Shared[T]) -> None:
        super().__init__()
        self._shared = shared

    @property
    def name(self) -> str:
        """Names the operation in errors."""
        return self._shared.op.name

    @property
    def device(self) -> Device:
        """The device it runs on."""
        return self._shared.op.device

    @property
    def arity(self) -> int | None:
        """Number of results, where it is known before the operation runs."""
        return self._shared.op.arity

    def preferred_stream(self) -> Stream | None:
        producer = self._shared.producer
        return self._shared.op.preferred_stream() if producer is None else producer.stream

    def _spend(self) -> None:
        """Never: that is what sharing is for."""

    def clone(self) -> SharedOp[T]:
        """Another handle, for another task or thread."""
        return SharedOp(self._shared)

    def _execute(self, context: ExecutionContext) -> T:
        return self._shared.use(context)


class _PartOp(DeviceOp[Any]):
    """One of the results of an operation."""

    __slots__ = ("_count", "_index", "_whole")

    def __init__(self, whole: SharedOp[Any], index: int, count: int) -> None:
        super().__init__()
        self._whole = whole
        self._index = index
        self._count = count

    @property
    def name(self) -> str:
        return self._whole.name

    @property
    def device(self) -> Device:
        return self._whole.device

    def preferred_stream(self) -> Stream | None:
        return self._whole.preferred_stream()

    def _execute(self, context: ExecutionContext) -> Any:
        results = self._whole._execute(context)
        if not isinstance(results, tuple) or len(results) != self._count:
            got = len(results) if isinstance(results, tuple) else type(results).__name__
            raise UsageError(f"unzip: expected {self._count} results of {self.name}, got {got}")
        return results[self._index]


# -------------------------------------------------------------------- graphs


class Graph(Generic[T]):
    """Recorded work, replayed as one operation: made by `op.graph_on(stream)` or `pt.capture(stream)`.

    Addresses are baked in: to give it other inputs, copy into the tensors it was recorded with (`update`). It owns
    what it uses; each replay leases that on the stream it is launched on.

    >>> import numpy as np, peertile as pt
    >>> x, y = pt.zeros((2,), pt.f32), pt.empty((2,), pt.f32)
    >>> graph = pt.op.copy(x, to=y).graph_on(pt.current_device().stream("replays"))
    >>> graph.update(pt.op.copy(np.float32([1, 2]), to=x))
    >>> graph.launch().sync_on(graph.stream)
    >>> y.numpy().tolist(), graph.replays
    ([1.0, 2.0], 1)
    """

    __slots__ = ("_has_output", "_output", "_recording")

    def __init__(self, recording: Recording, output: T) -> None:
        self._recording = recording
        self._output: T | None = output
        self._has_output = True

    def __repr__(self) -> str:
        return f"<Graph {self.name}, {self.nodes} nodes, {self.replays} replays>"

    @property
    def name(self) -> str:
        """Names it in errors."""
        return self._recording.name

    @property
    def stream(self) -> Stream:
        """The stream it was recorded on; updates go there."""
        return self._recording.stream

    @property
    def nodes(self) -> int:
        """Number of recorded operations."""
        return self._recording.nodes

    @property
    def replays(self) -> int:
        """Number of launches so far."""
        return self._recording.replays

    def take_output(self) -> T:
        """The results of the recorded operation, once. They are unwritten until the first launch is over."""
        if not self._has_output:
            raise UsageError(f"{self.name}: its output was taken before; keep what take_output returned")
        self._has_output = False
        output, self._output = self._output, None
        return cast("T", output)

    def update(self, op: DeviceOp[Any]) -> None:
        """Run a launch, copy or fill on the graph's stream, hence before the next launch *on that stream*."""
        if not isinstance(op, DeviceOp) or not op.is_unit:
            got = op.name if isinstance(op, DeviceOp) else type(op).__name__
            raise UsageError(
                f"update: expected a launch, copy or fill into what the graph uses, got {got}; sync other operations"
            )
        op.submit(self.stream)

    def launch(self) -> DeviceOp[None]:
        """An operation that replays the graph. It shares ownership: the graph may be dropped meanwhile."""
        return GraphLaunchOp(self._recording)


class GraphLaunchOp(DeviceOp[None]):
    """One replay."""

    __slots__ = ("_recording",)

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    @property
    def name(self) -> str:
        return self._recording.name

    @property
    def device(self) -> Device:
        return self._recording.stream.device

    def preferred_stream(self) -> Stream | None:
        return self._recording.stream

    def _run_to_end(self, stream: Stream) -> None:
        recording = self._recording
        device = recording.stream.device
        if stream.recording is not None or stream.device is not device:
            return super()._run_to_end(stream)
        # The shortest way: what the general one does, without a context, since nothing stays in flight.
        for check in recording.checks:
            check()
        assert recording.handle is not None
        replay = recording.replays + 1
        name = f"{recording.name} (replay {replay})"
        standing = recording.standing_on(stream)
        if not standing.enter(self._site, name):
            return super()._run_to_end(stream)
        try:
            record = device.driver.run_graph(stream.handle, recording.handle, name=name)
        except BaseException:
            # Interrupted, the replay may go on in its stream: it owns what it uses until that is over.
            recording.standing = None
            context = ExecutionContext(name, stream, on_caller=True)
            context.leases.append(standing.lease)
            context.retain(recording)
            context.abandon()
            raise
        recording.replays = replay
        standing.leave()
        if record is not None:
            raise explain(record, name) if record.kind is FaultKind.SKIPPED else _explain_node(record, recording)
        return None

    def _submitted(self, stream: Stream) -> tuple[ExecutionContext | Launched, None]:
        recording = self._recording
        device = recording.stream.device
        if stream.device is not device:
            return super()._submitted(stream)
        for check in recording.checks:
            check()
        assert recording.handle is not None
        replay = recording.replays + 1
        name = f"{recording.name} (replay {replay})"
        launched = Launched(name, stream, self._site, recording.uses, (_explain_node, recording))
        recording.standing_on(stream).submit(launched, recording.enqueue, recording.handle, name)
        recording.replays = replay
        return launched, None

    def _execute(self, context: ExecutionContext) -> None:
        recording = self._recording
        context.refuse_capture(recording.name, "a graph cannot be part of another one; record its operations instead")
        for check in recording.checks:
            check()
        assert recording.handle is not None
        replay = recording.replays + 1
        name = f"{recording.name} (replay {replay})"
        lease = context.lease(recording.uses, name, self._site)
        context.keep.append(recording)
        ticket = context.driver.launch_graph(context.handle, recording.handle, name=name, on_caller=context.on_caller)
        context.note(ticket, lease, (_explain_node, recording))
        recording.replays = replay


def _explain_node(record: Any, recording: Recording) -> PeertileError:
    error = recording.explain(record)
    return error if isinstance(error, PeertileError) else explain(record)


@overload
def zip(a: DeviceOp[A], /) -> DeviceOp[tuple[A]]: ...
@overload
def zip(a: DeviceOp[A], b: DeviceOp[B], /) -> DeviceOp[tuple[A, B]]: ...
@overload
def zip(a: DeviceOp[A], b: DeviceOp[B], c: DeviceOp[C], /) -> DeviceOp[tuple[A, B, C]]: ...
@overload
def zip(a: DeviceOp[A], b: DeviceOp[B], c: DeviceOp[C], d: DeviceOp[D], /) -> DeviceOp[tuple[A, B, C, D]]: ...
@overload
def zip(*ops: DeviceOp[Any]) -> DeviceOp[tuple[Any, ...]]: ...
def zip(*ops: DeviceOp[Any]) -> DeviceOp[Any]:
    """Operations in order on one stream, as one; the result is the tuple of their results.

    >>> import peertile as pt
    >>> a, b = pt.zip(pt.op.ones((2,), pt.f32), pt.op.zeros((3,), pt.f32)).sync()
    >>> a.shape, b.shape
    ((2,), (3,))
    """
    return ZipOp(ops)
