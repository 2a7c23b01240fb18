"""Completion without a thread per future: one thread, a table of words, and a park when nothing is awaited.

To be told of completion a future takes a *slot*: a 32-bit word that its stream writes after the work. The thread
`peertile-reactor` looks at the slot at the head of each stream (streams run in order, so no other can be due)
and wakes its future. Between looks it sleeps in the driver on the oldest piece of work. With nothing armed it
parks on a lock and costs nothing.

A stream that fails never writes; therefore the thread also asks the driver about whatever it sees no progress
of, and the future reads the fault. Futures that got a host callback instead of a slot are asked about as well: a
failed stream never calls back.

`wake` functions come from event loops. They are called once, from here or from the driver's thread; they may
not call the driver. Lock: `_lock` guards the queues and the slots; nothing is called with it held.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from peertile.errors import PeertileError
from peertile.runtime.driver import Status, Ticket

if TYPE_CHECKING:
    from peertile.runtime.context import ExecutionContext
    from peertile.runtime.device import Device
    from peertile.runtime.launched import Launched

__all__ = ["SLOTS", "Path", "Reactor", "reactor", "watch"]

SLOTS = 1 << 14
"""Futures of one device that can be awaited through slots at the same time; further ones get callbacks, each of which
costs a hand-over of the interpreter between threads. A slot is a word of device memory."""

_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 2e-3
_UNKNOWN_LIMIT = 4


class _Slots:
    """The words of one device."""

    def __init__(self, device: Device, count: int) -> None:
        self.device = device
        self.address = device.driver.allocate(4 * count)
        ctypes.memset(self.address, 0, 4 * count)
        self.words = (ctypes.c_uint32 * count).from_address(self.address)
        self.free = deque(range(count))
        self.epochs = [0] * count


class Path(Enum):
    """How a watched submission is reported."""

    SLOT = "slot"
    CALLBACK = "callback"


class Watch:
    """One submission that somebody waits for. `wake` is None once it was called or is not wanted any more."""

    __slots__ = ("driver", "epoch", "path", "slot", "slots", "stream_id", "ticket", "wake")

    def __init__(self, context: ExecutionContext | Launched, wake: Callable[[], None]) -> None:
        self.driver = context.driver
        self.stream_id = context.stream.id
        self.wake: Callable[[], None] | None = wake
        self.path = Path.CALLBACK
        self.slots: _Slots | None = None
        self.slot = -1
        self.epoch = 0
        assert context.last is not None
        self.ticket: Ticket = context.last

    def fire(self) -> None:
        """Wake the waiter, once. From any thread."""
        wake, self.wake = self.wake, None
        if wake is not None:
            wake()

    def cancel(self) -> None:
        """Nobody waits any more. The slot stays taken until its word is written."""
        self.wake = None


class Reactor:
    """See the module docstring. `slots` per device; 0 leaves callbacks alone."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.slot_count = slots
        self._lock = threading.RLock()
        self._armed: dict[int, deque[Watch]] = {}
        self._tables: dict[int, _Slots] = {}
        self._wakeup = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._parked = False
        self._stopping = False

    # ---------------------------------------------------------------- arming

    def watch(self, context: ExecutionContext | Launched, wake: Callable[[], None], *, force_callback: bool) -> Watch:
        """Call `wake` once the submission has left its stream."""
        watch = Watch(context, wake)
        driver, stream = context.driver, context.stream
        slots = None if force_callback else self._take_slot(context.device, watch)
        if slots is not None:
            watch.path = Path.SLOT
            watch.ticket = driver.write_value(
                stream.handle, slots.address + 4 * watch.slot, watch.epoch, 32, name="completion"
            )
        else:
            watch.ticket = driver.callback(stream.handle, watch.fire, name="completion")
        with self._lock:
            self._armed.setdefault(watch.stream_id, deque()).append(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="peertile-reactor", daemon=True)
                self._thread.start()
            if self._parked:
                self._parked = False
                self._wakeup.release()
        return watch

    def _take_slot(self, device: Device, watch: Watch) -> _Slots | None:
        if not self.slot_count or 32 not in device.capabilities.value_widths:
            return None
        if not device.capabilities.host_addressable:
            return None
        with self._lock:
            table = self._tables.get(id(device))
            if table is None:
                table = self._tables[id(device)] = _Slots(device, self.slot_count)
            if not table.free:
                return None
            watch.slot = table.free.popleft()
            watch.slots = table
            watch.epoch = table.epochs[watch.slot] = table.epochs[watch.slot] % 0xFFFFFFFF + 1
            return table

    def forget(self, device: Device) -> None:
        """The device is about to be closed: no word of it is looked at from here on, unless work is pending (and
        then it will not be closed)."""
        due: list[Watch] = []
        with self._lock:
            for queue in self._armed.values():
                while queue and queue[0].driver is device.driver and self._is_due(queue[0], probe=True):
                    due.append(queue.popleft())
            if not any(queue and queue[0].driver is device.driver for queue in self._armed.values()):
                self._tables.pop(id(device), None)
        for watch in due:
            watch.fire()

    @property
    def armed(self) -> int:
        """Submissions being watched."""
        with self._lock:
            return sum(len(queue) for queue in self._armed.values())

    @property
    def is_parked(self) -> bool:
        """Whether the thread sleeps until something is armed (or was never started)."""
        return self._thread is None or self._parked

    # ---------------------------------------------------------------- the thread

    def _serve(self) -> None:
        sleep_s = _FIRST_SLEEP_S
        while not self._stopping:
            due, oldest = self._look(probe=sleep_s > _UNKNOWN_LIMIT * _FIRST_SLEEP_S)
            for watch in due:
                watch.fire()
            if due:
                sleep_s = _FIRST_SLEEP_S
            elif oldest is None:
                self._wakeup.acquire()
                sleep_s = _FIRST_SLEEP_S
            else:
                self._doze(oldest, sleep_s)
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def _look(self, *, probe: bool) -> tuple[list[Watch], Watch | None]:
        """Watches that are due, taken off their queues, and one that is not. Parks when there is none of either."""
        due: list[Watch] = []
        oldest: Watch | None = None
        with self._lock:
            for stream_id, queue in list(self._armed.items()):
                while queue and self._is_due(queue[0], probe):
                    watch = queue.popleft()
                    if watch.slots is not None:
                        watch.slots.free.append(watch.slot)
                    due.append(watch)
                if not queue:
                    del self._armed[stream_id]
                elif oldest is None:
                    oldest = queue[0]
            if not due and oldest is None:
                self._parked = True
        return due, oldest

    @staticmethod
    def _is_due(watch: Watch, probe: bool) -> bool:
        if watch.slots is not None and watch.slots.words[watch.slot] == watch.epoch:
            return True
        if watch.slots is not None and not probe:
            return False
        try:
            return watch.driver.query(watch.ticket) is not Status.PENDING
        except PeertileError:  # the device was closed under the waiter, who has to be told
            return True

    @staticmethod
    def _doze(watch: Watch, seconds: float) -> None:
        try:
            watch.driver.wait(watch.ticket, seconds)
        except PeertileError:
            threading.Event().wait(seconds)

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._wakeup.release()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)


class _Shared:
    """The reactor of this process, made at its first use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reactor: Reactor | None = None


_shared = _Shared()


def reactor() -> Reactor:
    """The reactor of this process."""
    found = _shared.reactor
    if found is None:
        with _shared.lock:
            found = _shared.reactor
            if found is None:
                found = _shared.reactor = Reactor()
    return found


def watch(context: ExecutionContext | Launched, wake: Callable[[], None], *, force_callback: bool) -> Watch:
    """Call `wake`, from some thread, once the submission has left its stream."""
    return reactor().watch(context, wake, force_callback=force_callback)


def _after_fork() -> None:
    # The thread is the parent's; the child's devices are unusable, so nothing will be armed either.
    _shared.lock = threading.Lock()
    _shared.reactor = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
