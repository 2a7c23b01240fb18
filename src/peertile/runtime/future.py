"""A submitted or scheduled operation that can be awaited, under asyncio, trio or any loop that polls.

    UNPOLLED ──first poll──> SUBMITTED ──last ticket not pending──> DONE
       nothing is enqueued       dropping the future neither cancels nor waits

An await spins on the stream for `PEERTILE_SPIN_BUDGET_US`, then hands over to the reactor (`reactor.py`) or, with
`PEERTILE_HOST_SYNC`, to a host callback. Neither asyncio nor trio is imported here: only a program that has
imported one can be running its loop.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from peertile.config import config
from peertile.errors import PeertileError, UsageError
from peertile.runtime.checks import not_pickled
from peertile.runtime.context import ExecutionContext, execution, outside_execution, refuse_recorded
from peertile.runtime.reactor import watch

if TYPE_CHECKING:
    from peertile.runtime.launched import Launched
    from peertile.runtime.op import DeviceOp
    from peertile.runtime.schedule import SchedulingPolicy
    from peertile.runtime.stream import Stream

__all__ = ["DeviceFuture", "is_brief", "submitted"]

T = TypeVar("T")


_SPIN_BEHIND = 32
"""Submissions on the stream from which on an await does not spin. Some may be over: they are let go of from 16 on."""


class DeviceFuture(Generic[T]):
    """An operation on its way: made by `op.schedule(policy)` (not submitted before the first poll) and by
    `op.submit(stream)` (submitted). Await it, or `wait()` for it on a thread; either any number of times.

    Dropping it neither cancels nor waits: the submission owns what it uses until the device is done.

    >>> import peertile as pt
    >>> future = pt.op.full((3,), 7, pt.i32).schedule()
    >>> future.is_submitted
    False
    >>> future.wait().numpy().tolist()
    [7, 7, 7]
    """

    __slots__ = ("__weakref__", "_context", "_error", "_op", "_policy", "_result", "_stream")
    __reduce_ex__ = not_pickled

    def __init__(self, op: DeviceOp[T], policy: SchedulingPolicy | None, stream: Stream | None) -> None:
        self._op: DeviceOp[T] | None = op
        self._policy = policy
        self._stream = stream
        self._context: ExecutionContext | Launched | None = None
        self._result: T = cast("T", None)
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "done" if self.is_done() else "submitted" if self.is_submitted else "not submitted"
        return f"<DeviceFuture {state}>"

    @property
    def is_submitted(self) -> bool:
        """Whether the operation was handed to a stream (or failed on the way)."""
        return self._op is None

    @property
    def stream(self) -> Stream | None:
        """Where it runs; None before the first poll."""
        return None if self._op is not None else self._stream

    def is_done(self) -> bool:
        """Whether the work has left its stream, however it ended; submits and blocks nothing."""
        if self._op is not None:
            return False
        return self._context is None or self._context.is_done()

    def poll(self) -> bool:
        """Submit if that was not done yet; then whether the work is done. Never blocks."""
        self._submit()
        return self.is_done()

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until the work is done and return the result. DeviceFault if it failed, WaitTimeout at the bound."""
        if self._op is not None:
            self._submit()
        context = self._context
        if context is not None:
            error: BaseException | None = context.wait(timeout_s)
            if error is not None:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._result

    def _submit(self) -> None:
        """Enqueue. What goes wrong now is what waiting for the future raises."""
        op = self._op
        if op is None:
            return
        if execution.inside is not None:
            outside_execution(op.name)
        self._enqueue(op)

    def _enqueue(self, op: DeviceOp[T]) -> None:
        stream = self._stream
        if stream is None:
            stream = self._stream = op._pick(self._policy)
        if stream.recording is not None:
            refuse_recorded(op.name, stream)
        self._op = None
        try:
            self._context, self._result = op._submitted(stream)
        except BaseException as error:
            self._error = error
            raise

    def _outcome(self) -> T:
        context = self._context
        if context is not None:
            error: BaseException | None = context.finish()
            if error is not None:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._result

    def _run_now(self, op: DeviceOp[T]) -> T:
        """Submit and finish on this thread."""
        outside_execution(op.name)
        self._stream = self._stream or op._pick(self._policy)
        self._op = None
        try:
            self._result = op._run_to_end(self._stream)
        except BaseException as error:
            self._error = error
            raise
        return self._result

    # ---------------------------------------------------------------- await

    def __await__(self) -> Generator[Any, Any, T]:
        op = self._op
        if op is not None:
            if is_brief(op):
                return self._run_now(op)
            self._submit()
        settings = config()
        start = time.perf_counter_ns()
        context = self._context
        if context is not None and not context.is_done():
            if not _spin(context, settings.spin_budget_us if settings.host_sync is None else 0):
                yield from _suspend(context, force_callback=settings.host_sync is not None)
            if op is not None:
                op._took(time.perf_counter_ns() - start)
        return self._outcome()


def is_brief(op: DeviceOp[Any]) -> bool:
    """Whether it is known to fit the budget for spinning: on an idle stream it costs less to run it on the thread that
    awaits it than to hand it over to another."""
    settings = config()
    budget_us = settings.spin_budget_us if settings.host_sync is None else 0
    return budget_us > 0 and op._expected_ns() <= budget_us * 1000


_new: Any = object.__new__


def submitted(submission: ExecutionContext | Launched, result: T, stream: Stream) -> DeviceFuture[T]:
    """The future of what was enqueued. As the constructor does, without its call."""
    future: DeviceFuture[T] = _new(DeviceFuture)
    future._op = future._policy = future._error = None
    future._stream = stream
    future._context = submission
    future._result = result
    return future


def _spin(context: ExecutionContext | Launched, budget_us: int) -> bool:
    """Ask again and again for a while; whether the work is done. Not behind a long queue, where it cannot be soon:
    ten thousand futures that spin one after the other would hold up their loop."""
    if len(context.stream.inflight) > _SPIN_BEHIND:
        return context.is_done()
    end = time.perf_counter_ns() + budget_us * 1000
    while True:
        if context.is_done():
            return True
        if time.perf_counter_ns() >= end:
            return False


def _suspend(context: ExecutionContext | Launched, *, force_callback: bool) -> Generator[Any, Any, None]:
    """Give the loop its thread back until the work is done."""
    if context.last is None:  # everything that is pending belongs to others
        return
    asyncio, trio = sys.modules.get("asyncio"), sys.modules.get("trio")
    if asyncio is not None and _in_asyncio(asyncio):
        yield from _suspend_asyncio(asyncio, context, force_callback)
    elif trio is not None and _in_trio(trio):
        yield from _suspend_trio(trio, context, force_callback)
    else:
        done = threading.Event()
        watcher = watch(context, done.set, force_callback=force_callback)
        try:
            while not done.is_set():
                yield None  # a loop that we do not know: it asks again when it likes
        finally:
            watcher.cancel()


def _in_asyncio(asyncio: Any) -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


def _in_trio(trio: Any) -> bool:
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True


def _suspend_asyncio(
    asyncio: Any, context: ExecutionContext | Launched, force_callback: bool
) -> Generator[Any, Any, None]:
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    watcher = watch(
        context, _waker(loop, _method(loop, "call_soon_threadsafe"), resolve), force_callback=force_callback
    )
    try:
        yield from future.__await__()
    finally:
        watcher.cancel()


def _suspend_trio(trio: Any, context: ExecutionContext | Launched, force_callback: bool) -> Generator[Any, Any, None]:
    lowlevel = trio.lowlevel
    task, token = lowlevel.current_task(), lowlevel.current_trio_token()
    waiting = True

    def resume() -> None:
        if waiting:
            lowlevel.reschedule(task)

    watcher = watch(context, _waker(token, _method(token, "run_sync_soon"), resume), force_callback=force_callback)

    def abort(raise_cancel: object) -> Any:
        nonlocal waiting
        waiting = False
        return lowlevel.Abort.SUCCEEDED

    try:
        yield from lowlevel.wait_task_rescheduled(abort).__await__()
        waiting = False
    finally:
        waiting = False
        watcher.cancel()


class _Wakes:
    """Wakes tasks of one loop from other threads: many at a time cost one message to the loop. A loop that was closed
    has nobody left to wake."""

    __slots__ = ("_is_posted", "_pending", "_post")

    def __init__(self, post: Callable[[Callable[[], None]], object]) -> None:
        self._post = post
        self._pending: deque[Callable[[], None]] = deque()
        self._is_posted = False

    def add(self, function: Callable[[], None]) -> None:
        """Run `function` in the loop, soon. From any thread."""
        self._pending.append(function)
        if not self._is_posted:  # else the message that is on its way finds this one as well
            self._is_posted = True
            try:
                self._post(self._drain)
            except RuntimeError:  # asyncio: the loop is closed; trio's RunFinishedError is one too
                self._pending.clear()

    def _drain(self) -> None:
        self._is_posted = False  # first: what is added from here on posts a message of its own
        pending = self._pending
        while pending:
            pending.popleft()()


_wakes: weakref.WeakKeyDictionary[Any, _Wakes] = weakref.WeakKeyDictionary()


def _method(loop: Any, name: str) -> Callable[[Callable[[], None]], object]:
    """A method of a loop that does not keep the loop alive: what is kept for a loop must end with it."""
    reference = weakref.ref(loop)

    def post(function: Callable[[], None]) -> object:
        alive = reference()
        return None if alive is None else getattr(alive, name)(function)

    return post


def _waker(loop: Any, post: Callable[[Callable[[], None]], object], function: Callable[[], None]) -> Callable[[], None]:
    """What a reactor or a driver calls to run `function` in its loop. Called in the loop."""
    found = _wakes.get(loop)
    if found is None:
        found = _wakes[loop] = _Wakes(post)
    return partial(found.add, function)


def spent_error(name: str) -> PeertileError:
    """What a second execution raises."""
    return UsageError(f"{name}: an op is used once, and this one was; build a new one by calling again")
