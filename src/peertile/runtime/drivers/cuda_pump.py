"""The helper thread of a cuda device: issues backlogs, and ends waits of streams at their bound or on abort.

A wait of a stream cannot be cancelled: it ends when its word satisfies it. So at the bound the pump notes the fault,
stores the awaited value, and once the stream has gone on puts back what it saw, unless somebody wrote meanwhile. For
those microseconds another waiter can see a value that nobody sent: it is the price of a wait that takes no
multiprocessor, and by then the operation has failed. The thread sleeps while there is nothing to look after.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING, Final

from peertile.errors import DeviceFault
from peertile.runtime.driver import FaultKind, FaultRecord
from peertile.runtime.drivers.cuda_api import CudaApi, CudaError, PointerKind
from peertile.runtime.drivers.cuda_memory import SideStream, words_at
from peertile.runtime.drivers.cuda_ops import WaitWord, extended, holds, low_bits
from peertile.runtime.drivers.cuda_stream import CudaStream, Params
from peertile.runtime.drivers.cuda_waits import STREAM_WAITS

if TYPE_CHECKING:
    from peertile.runtime.drivers.cuda import CudaDevice

__all__ = ["Pump", "Watch"]

_BACKLOG_S: Final = 1e-4
_LONGEST_S: Final = 5e-3
_SHORTEST_S: Final = 2e-4
_RELEASE_S: Final = 2.0


class Watch:
    """One wait of a stream on a word. The time counts from when the stream has come to it."""

    __slots__ = ("begun", "fault", "host_abort", "op", "releasing", "sequence", "stream")

    def __init__(self, stream: CudaStream, sequence: int, op: WaitWord, *, host_abort: bool) -> None:
        self.stream = stream
        self.sequence = sequence
        self.op = op
        self.host_abort = host_abort
        self.begun: int | None = None
        self.fault: FaultRecord | None = None
        self.releasing = False  # the word may hold a value that nobody sent

    def failed(self) -> bool:
        return self.fault is not None

    def collect(self, op: str, sequence: int) -> FaultRecord | None:
        return self.fault

    @property
    def over(self) -> bool:
        return self.sequence <= max(self.stream.word[0], self.stream.settled)


class Pump:
    """See the module docstring. `step` does one round, for tests too."""

    def __init__(self, device: CudaDevice, api: CudaApi, priority: int) -> None:
        self._device = device
        self._api = api
        self._side = SideStream(api, priority)
        self._address = device.pinned.take(64)
        self._words = words_at(self._address, 64)
        self._params = Params()
        self._condition = threading.Condition()  # protects the lists
        self._watches: list[Watch] = []
        self._backlogs: list[CudaStream] = []
        self._thread: threading.Thread | None = None
        self._stop = False
        STREAM_WAITS.add(device.context_number, self.is_waiting)

    def add_backlog(self, stream: CudaStream) -> None:
        with self._condition:
            if stream not in self._backlogs:
                self._backlogs.append(stream)
                self._wake()

    def watch(self, stream: CudaStream, sequence: int, op: WaitWord) -> Watch:
        host = bool(op.abort) and self._api.pointer_kind(op.abort) is PointerKind.PINNED
        watch = Watch(stream, sequence, op, host_abort=host)
        STREAM_WAITS.begin(self._device.context_number, lambda: self._add(watch))
        return watch

    def _add(self, watch: Watch) -> None:
        with self._condition:
            self._watches.append(watch)
            self._wake()

    def forget(self, watch: Watch) -> None:
        """Its wait was not enqueued after all."""
        with self._condition:
            if watch in self._watches:
                self._watches.remove(watch)

    def is_waiting(self) -> bool:
        """Whether a stream waits on a word, and may need this thread to end that at its bound."""
        if self._device.lost is not None:
            return False
        with self._condition:
            return any(not watch.over for watch in self._watches)

    def _wake(self) -> None:
        if self._thread is None and not self._stop:
            name = f"peertile-{self._device.name}-pump"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._condition.notify()

    def stop(self) -> None:
        """End the thread; nothing is pending any more."""
        STREAM_WAITS.remove(self._device.context_number, self.is_waiting)
        with self._condition:
            self._stop = True
            self._condition.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
        self._api.destroy_stream(self._side.cu)

    def _run(self) -> None:
        self._api.set_context(self._device.context)
        while True:
            with self._condition:
                while not (self._stop or self._watches or self._backlogs):
                    self._condition.wait()
                if self._stop:
                    return
            try:
                pause = self.step()
            except CudaError as error:
                self._device.failed_call(error)
                pause = _LONGEST_S
            with self._condition:
                if not self._stop:
                    self._condition.wait(pause)

    def step(self) -> float:
        """Look after everything once; seconds until the next look."""
        with self._condition:
            backlogs, watches = list(self._backlogs), list(self._watches)
        if self._device.lost is not None:
            with self._condition:
                self._backlogs.clear()
                self._watches.clear()
            return _LONGEST_S
        pause = _LONGEST_S
        for stream in backlogs:
            if stream.flush():
                pause = _BACKLOG_S
            else:
                with self._condition:
                    if not stream.backlog:
                        self._backlogs.remove(stream)
        for watch in watches:
            pause = min(pause, self._look(watch))
            if watch.over:
                self.forget(watch)
        return pause

    # ------------------------------------------------------------------------------------------------ waits

    def _look(self, watch: Watch) -> float:
        if watch.over or watch.fault is not None:
            return _LONGEST_S
        if watch.begun is None:
            if watch.stream.word[0] < watch.sequence - 1:
                return _LONGEST_S
            watch.begun = time.monotonic_ns()
        op = watch.op
        kind = FaultKind.WAIT_TIMEOUT
        left = op.timeout_ns - (time.monotonic_ns() - watch.begun)
        if self._aborted(watch):
            kind = FaultKind.ABORTED
        elif left > 0:
            return min(max(left / 4e9, _SHORTEST_S), _LONGEST_S)
        seen = self._read(op.address, op.width)
        if not holds(seen, op.value, op.width, op.cmp, signed=op.signed):
            self._release(watch, kind, seen)
        return _SHORTEST_S

    def _aborted(self, watch: Watch) -> bool:
        abort = watch.op.abort
        if not abort:
            return False
        if watch.host_abort:
            return ctypes.c_int32.from_address(abort).value != 0
        return self._read(abort, 32) != 0

    def _read(self, address: int, width: int) -> int:
        """The word now, by a stream that nothing holds up."""
        with self._side.lock:
            self._words[0] = 0
            self._api.copy(self._address, address, width // 8, self._side.cu)
            self._side.settle()
            return low_bits(self._words[0], width)

    def _release(self, watch: Watch, kind: FaultKind, seen: int) -> None:
        op = watch.op
        watch.releasing = True
        watch.fault = FaultRecord(
            kind, op.name, watch.sequence,
            got=extended(seen, op.width, signed=op.signed),
            limit=extended(op.value, op.width, signed=op.signed),
            address=op.address,
        )  # fmt: skip
        try:
            self._force(watch, low_bits(op.value, op.width), seen)
        finally:
            watch.releasing = False
        if not watch.over:
            error = DeviceFault(
                f"{op.name}: the stream did not go on within {_RELEASE_S:g} s after its wait was satisfied at the "
                "bound; the device does not respond", op=op.name,
            )  # fmt: skip
            self._device.lose(error)

    def _force(self, watch: Watch, forced: int, seen: int) -> None:
        """Satisfy the wait, let the stream pass, and put back what was there."""
        op = watch.op
        with self._side.lock:
            self._api.write_value(self._side.cu, op.address, forced, op.width)
            self._side.settle()
            end = time.monotonic() + _RELEASE_S
            while not watch.over and time.monotonic() < end:
                time.sleep(1e-5)
            params = self._params.pack(op.address, forced, seen, op.width)
            self._api.launch(self._device.kernels["peertile_swap"], 1, 1, 0, self._side.cu, params, False)
            self._side.settle()
