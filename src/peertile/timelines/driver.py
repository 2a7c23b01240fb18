"""A driver's device while a timeline is recorded: its class is one that notes what it is asked to do, and asks the
driver's own. Changes no result.

The class of the object is exchanged, not the object: who holds the device (streams, pools, a reactor) goes on with the
same one, and while nothing is recorded there is nothing in the way, not even a test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

from peertile.memory_model import Cmp
from peertile.runtime.driver import (
    DriverDevice,
    EventHandle,
    FaultRecord,
    GraphExecHandle,
    Grid,
    LaunchOptions,
    LoadableBinary,
    ModuleHandle,
    PreparedLaunch,
    Status,
    StreamHandle,
    Ticket,
)
from peertile.timelines.events import Kind
from peertile.timelines.record import Recorder

__all__ = ["unwatch", "watch"]

_Base: Any = DriverDevice


def _own(driver: Any) -> Any:
    """The calls of the driver's own class, which a call that is under way still finds when another thread ends the
    timeline."""
    try:
        return super(Watched, driver)
    except TypeError:
        return driver


class Watched(_Base):  # type: ignore[misc]
    """Mixed into the class of a device. Calls of a driver to itself are not noted a second time."""

    recorder: Recorder

    # ------------------------------------------------------------------------------------------------ operations

    def copy(
        self, stream: StreamHandle, dst: int, src: int, nbytes: int, *, name: str = "copy", on_caller: bool = False
    ) -> Ticket:
        call: Callable[[], Ticket] = functools.partial(
            _own(self).copy, stream, dst, src, nbytes, name=name, on_caller=on_caller
        )
        return self.recorder.operation(Kind.COPY, stream, name, call, {"bytes": nbytes}, on_caller=on_caller)

    def fill(
        self, stream: StreamHandle, dst: int, pattern: int, width: int, count: int, *, name: str = "fill",
        on_caller: bool = False,
    ) -> Ticket:  # fmt: skip
        call: Callable[[], Ticket] = functools.partial(
            _own(self).fill, stream, dst, pattern, width, count, name=name, on_caller=on_caller
        )
        return self.recorder.operation(Kind.FILL, stream, name, call, {"bytes": width * count}, on_caller=on_caller)

    def write_value(
        self, stream: StreamHandle, address: int, value: int, width: int, *, name: str = "write_value"
    ) -> Ticket:
        call: Callable[[], Ticket] = functools.partial(_own(self).write_value, stream, address, value, width, name=name)
        return self.recorder.operation(Kind.WRITE, stream, name, call, self.recorder.word_info(address, value))

    def wait_value(
        self, stream: StreamHandle, address: int, value: int, width: int, cmp: Cmp, *, timeout_ns: int,
        signed: bool = False, abort_address: int = 0, name: str = "wait_value",
    ) -> Ticket:  # fmt: skip
        call: Callable[[], Ticket] = functools.partial(
            _own(self).wait_value, stream, address, value, width, cmp, timeout_ns=timeout_ns, signed=signed,
            abort_address=abort_address, name=name,
        )  # fmt: skip
        return self.recorder.operation(Kind.WAIT, stream, name, call, self.recorder.word_info(address, value))

    def wait_event(self, stream: StreamHandle, event: EventHandle) -> Ticket:
        call: Callable[[], Ticket] = functools.partial(_own(self).wait_event, stream, event)
        return self.recorder.operation(Kind.EVENT, stream, "event wait", call, {})

    def callback(self, stream: StreamHandle, function: Callable[[], None], *, name: str = "callback") -> Ticket:
        call: Callable[[Callable[[], None]], Ticket] = functools.partial(_own(self).callback, stream, name=name)
        return self.recorder.host_function(stream, name, function, call)

    def last_ticket(self, stream: StreamHandle) -> Ticket:
        return self.recorder.last(_own(self).last_ticket(stream))

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> Status:
        call: Callable[[], Status] = functools.partial(_own(self).wait, ticket, timeout_s)
        return self.recorder.waited(ticket, call)

    # ------------------------------------------------------------------------------------------------ launches

    def load_module(self, binary: LoadableBinary) -> ModuleHandle:
        module: ModuleHandle = _own(self).load_module(binary)
        self.recorder.loaded(module, binary)
        return module

    @property
    def links(self) -> None:
        """What does all of a launch in native code would not be seen here."""
        return None

    def launch(
        self, stream: StreamHandle, module: ModuleHandle, grid: Grid, args: bytes, options: LaunchOptions, *,
        on_caller: bool = False,
    ) -> Ticket:  # fmt: skip
        base: Any = _own(self)

        def call(args: bytes) -> Ticket:
            ticket: Ticket = base.launch(stream, module, grid, args, options, on_caller=on_caller)
            return ticket

        return self.recorder.launch(stream, module, grid, args, options.name, call, on_caller=on_caller)

    def launch_sync(
        self, stream: StreamHandle, module: ModuleHandle, grid: Grid, args: bytes, options: LaunchOptions
    ) -> FaultRecord | None:
        base: Any = _own(self)

        def call(args: bytes) -> FaultRecord | None:
            record: FaultRecord | None = base.launch_sync(stream, module, grid, args, options)
            return record

        return self.recorder.launch(stream, module, grid, args, options.name, call, runs=True)

    def launch_prepared(self, stream: StreamHandle, prepared: PreparedLaunch, args: bytes) -> Ticket:
        call: Callable[[bytes], Ticket] = functools.partial(_own(self).launch_prepared, stream, prepared)
        return self.recorder.launch(stream, prepared.module, prepared.grid, args, prepared.options.name, call)

    def enqueue(self, stream: StreamHandle, prepared: PreparedLaunch, args: bytes) -> int:
        call: Callable[[bytes], int] = functools.partial(_own(self).enqueue, stream, prepared)
        return self.recorder.launch(stream, prepared.module, prepared.grid, args, prepared.options.name, call)

    def launch_many(self, stream: StreamHandle, launches: Sequence[tuple[PreparedLaunch, bytes]]) -> Sequence[int]:
        return [self.enqueue(stream, prepared, args) for prepared, args in launches]

    def run_prepared(self, stream: StreamHandle, prepared: PreparedLaunch, args: bytes) -> FaultRecord | None:
        call: Callable[[bytes], FaultRecord | None] = functools.partial(_own(self).run_prepared, stream, prepared)
        name = prepared.options.name
        return self.recorder.launch(stream, prepared.module, prepared.grid, args, name, call, runs=True)

    # ------------------------------------------------------------------------------------------------ graphs

    def launch_graph(
        self, stream: StreamHandle, graph: GraphExecHandle, *, name: str = "graph", on_caller: bool = False
    ) -> Ticket:
        call: Callable[[], Ticket] = functools.partial(
            _own(self).launch_graph, stream, graph, name=name, on_caller=on_caller
        )
        return self.recorder.operation(Kind.GRAPH, stream, name, call, {}, on_caller=on_caller)

    def run_graph(self, stream: StreamHandle, graph: GraphExecHandle, *, name: str = "graph") -> FaultRecord | None:
        call: Callable[[], FaultRecord | None] = functools.partial(_own(self).run_graph, stream, graph, name=name)
        return self.recorder.operation(Kind.GRAPH, stream, name, call, {}, runs=True)

    # ------------------------------------------------------------------------------------------------ its end

    def destroy_stream(self, stream: StreamHandle) -> None:
        self.recorder.forget(stream)
        _own(self).destroy_stream(stream)

    def close(self) -> None:
        self.recorder.closing()
        _own(self).close()


@functools.cache
def _watched(base: type[DriverDevice]) -> type:
    return type(f"Watched{base.__name__}", (Watched, base), {})


_PLAIN: Final = "timeline_plain_class"


def watch(driver: DriverDevice, recorder: Recorder) -> None:
    """From now on `recorder` is told."""
    plain = type(driver)
    driver.__dict__[_PLAIN] = plain
    driver.__dict__["recorder"] = recorder
    driver.__class__ = _watched(plain)


def unwatch(driver: DriverDevice) -> None:
    """As it was. The recorder stays where calls that are under way look for it."""
    driver.__class__ = driver.__dict__.pop(_PLAIN)
