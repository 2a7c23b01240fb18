"""The event loop of a simulated rank: asyncio whose clock, completions and connections are the machine's.

A loop with nothing to run parks its host thread like any other wait, so a schedule decides who goes on, and a loop
that nobody will ever wake is part of a deadlock. Connections run over a network of the machine, which all its ranks
share: what is written arrives in an order, and in pieces, that the schedule chooses. Nothing real is opened, and
what asyncio has beyond that is refused by name.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from peertile.checker.host_calls import REAL_WORLD, HostCalls
from peertile.runtime.drivers.sim import SimDevice
from peertile.runtime.reactor import Reactor, Watch
from peertile.sim.clocks import Clock
from peertile.sim.machine import Task

if TYPE_CHECKING:
    from peertile.runtime.context import ExecutionContext
    from peertile.runtime.launched import Launched

    _Policy = asyncio.DefaultEventLoopPolicy
else:
    # From Python 3.14 on the public name warns that policies will go. As long as there are any, new loops come of one.
    _Policy = getattr(asyncio.events, "_BaseDefaultEventLoopPolicy", None) or asyncio.DefaultEventLoopPolicy

__all__ = ["Network", "RankLoop", "RankPolicy", "RankReactor"]

Address = tuple[str, int]
LOCAL: Final = "127.0.0.1"
FIRST_PORT: Final = 49152
FREE_ROUNDS: Final = 16
"""How often a loop may go round without a wait before others go on, too."""
HIGH_WATER: Final = 1 << 16
"""Bytes on their way to the other end from which a writer is asked to pause."""

_REFUSED: Final = (
    "run_in_executor", "getaddrinfo", "getnameinfo", "create_unix_server", "create_unix_connection",
    "create_datagram_endpoint", "connect_accepted_socket", "connect_read_pipe", "connect_write_pipe", "subprocess_exec",
    "subprocess_shell", "start_tls", "sendfile", "sock_recv", "sock_recv_into", "sock_sendall", "sock_connect",
    "sock_accept", "sock_sendfile", "add_reader", "add_writer", "remove_reader", "remove_writer",
)  # fmt: skip


class Network:
    """Who listens on which port: one network for all ranks of a machine, as of one computer."""

    def __init__(self) -> None:
        self.servers: dict[int, RankServer] = {}
        self._ports = iter(range(FIRST_PORT, 1 << 16))

    def bind(self, server: RankServer, port: int) -> int:
        """A port of the server's own."""
        if not port:
            port = next(p for p in self._ports if p not in self.servers)
        elif port in self.servers:
            raise OSError(errno.EADDRINUSE, f"error while attempting to bind on address ('{LOCAL}', {port})")
        self.servers[port] = server
        return port


class _Selector:
    """What asyncio's loop asks for events."""

    def __init__(self, loop: RankLoop) -> None:
        self._loop = loop
        self._rounds = 0

    def select(self, timeout: float | None) -> Sequence[Any]:
        """Lets others go on; with nothing to do, until something arrives or `timeout` seconds are over."""
        loop = self._loop
        if (timeout is None or timeout > 0) and not loop.is_woken and not loop.ready_ends():
            self._rounds = 0
            loop.calls.pause(loop.waiters, timeout, loop.describe)
        else:
            self._rounds += 1
            if self._rounds > FREE_ROUNDS:  # tasks that ask again and again let others go on
                loop.calls.ask()
        loop.is_woken = False
        return loop.arrivals()

    def close(self) -> None:
        """Nothing was opened."""


class RankLoop(asyncio.BaseEventLoop):
    """An event loop of one rank. `inbox` holds the ends of connections that something has arrived at."""

    def __init__(self, calls: HostCalls, network: Network) -> None:
        super().__init__()
        self.calls = calls
        self.network = network
        self.waiters: list[Task] = []
        self.inbox: list[_End] = []
        self.is_woken = False
        self._selector = _Selector(self)
        self.ends: list[_End] = []
        calls.host.machine.is_wild = True

    def _write_to_self(self) -> None:
        """Wakes the loop, from whoever calls."""
        self.is_woken = True
        self.calls.host.machine.wake_all(self.waiters)

    def close(self) -> None:
        super().close()
        for end in self.ends:  # nothing real is left open, whatever became of the program
            end.abandon()

    def _process_events(self, event_list: Sequence[Callable[[], None]]) -> None:
        for event in event_list:
            self.call_soon(event)

    def ready_ends(self) -> list[_End]:
        """Ends that something can arrive at."""
        return [end for end in self.inbox if not end.is_paused]

    def arrivals(self) -> list[Callable[[], None]]:
        """What arrives now: from one of the ends that something is on its way to, as the schedule has it."""
        ready = self.ready_ends()
        if not ready:
            return []
        chooser = self.calls.host.machine.chooser
        end = ready[chooser.value(len(ready)) if len(ready) > 1 else 0]
        return [end.deliver]

    def arrived(self, end: _End) -> None:
        """Something is on its way to `end`."""
        if end not in self.inbox:
            self.inbox.append(end)
        self._write_to_self()

    def describe(self) -> str:
        """What the tasks of the loop wait for."""
        waiting = []
        for task in asyncio.all_tasks(self):
            frames = task.get_stack(limit=1)
            at = f" at {frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else ""
            coroutine = cast(Coroutine[Any, Any, Any], task.get_coro())
            waiting.append(f"{getattr(coroutine, '__qualname__', task.get_name())}{at}")
        count = "1 task waits" if len(waiting) == 1 else f"{len(waiting)} tasks wait"
        return f"its event loop; {count}: {', '.join(sorted(waiting))}"

    # ---------------------------------------------------------------- connections

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: Any = None, port: int | None = None,
        *, sock: Any = None, ssl: Any = None, start_serving: bool = True, **options: Any,
    ) -> RankServer:  # fmt: skip
        self._plain("loop.create_server", sock, ssl)
        return RankServer(self, protocol_factory, port or 0)

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: Any = None, port: int | None = None,
        *, sock: Any = None, ssl: Any = None, **options: Any,
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:  # fmt: skip
        self._plain("loop.create_connection", sock, ssl)
        server = self.network.servers.get(port or 0)
        if server is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed ('{host}', {port})")
        protocol = protocol_factory()
        mine, theirs = _End(self, protocol), _End(server.loop, None)
        mine.peer, theirs.peer = theirs, mine
        name, theirs_name = (LOCAL, self.calls.host.entry + 1), (LOCAL, port or 0)
        mine.names, theirs.names = (name, theirs_name), (theirs_name, name)
        mine.send(partial(theirs.accept, server))
        protocol.connection_made(mine)
        return mine, protocol

    def _plain(self, what: str, sock: Any, ssl: Any) -> None:
        for role, value in (("sock", sock), ("ssl", ssl)):
            if value is not None:
                self.calls.refuse(f"{what}({role}=)", REAL_WORLD)

    def add_signal_handler(  # type: ignore[override]  # the same, without variadic generics
        self, sig: int, callback: Callable[..., Any], *args: Any
    ) -> None:
        """Called, as a task's callbacks are, once the rank sends itself the signal: nobody else does."""
        self.calls.handlers[int(sig)] = lambda number, frame: self.call_soon_threadsafe(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self.calls.handlers.pop(int(sig), None) is not None


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: RankLoop, *args: Any, **options: Any) -> Any:
        self.calls.refuse(f"loop.{name}", REAL_WORLD)

    return refuse


for _name in _REFUSED:
    setattr(RankLoop, _name, _refused(_name))


class _Socket:
    """What a server shows of its socket."""

    def __init__(self, name: Address) -> None:
        self._name = name

    def getsockname(self) -> Address:
        return self._name


class RankServer(asyncio.AbstractServer):
    """A listening port of the machine's network."""

    def __init__(self, loop: RankLoop, factory: Callable[[], asyncio.BaseProtocol], port: int) -> None:
        self.loop = loop
        self.factory = factory
        self.port = loop.network.bind(self, port)
        self.sockets: tuple[_Socket, ...] = (_Socket((LOCAL, self.port)),)
        self._closed = loop.create_future()

    def close(self) -> None:
        if self.loop.network.servers.get(self.port) is self:
            del self.loop.network.servers[self.port]
        self.sockets = ()
        if not self._closed.done():
            self._closed.set_result(None)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.loop

    def is_serving(self) -> bool:
        return bool(self.sockets)

    async def start_serving(self) -> None:
        """It serves from the beginning."""

    async def serve_forever(self) -> None:
        try:
            await self.loop.create_future()
        finally:
            self.close()

    async def wait_closed(self) -> None:
        await self._closed


class _End(asyncio.Transport):
    """One end of a connection: what was sent to it and has not arrived yet, in order."""

    def __init__(self, loop: RankLoop, protocol: asyncio.BaseProtocol | None) -> None:
        super().__init__()
        self.loop = loop
        loop.ends.append(self)
        self.protocol = protocol
        self.peer: _End
        self.names: tuple[Address, Address]
        self.incoming: deque[tuple[bytes | Callable[[], None], Clock]] = deque()
        self.pending_bytes = 0
        self.is_paused = False
        self._closing = False
        self._is_asked_to_pause = False

    # ---------------------------------------------------------------- sending

    def send(self, what: bytes | Callable[[], None]) -> None:
        """On its way to the other end: data, or what happens there when it arrives."""
        peer = self.peer
        host = self.loop.calls.host
        clock: Clock = {} if peer.loop.calls.host is host else host.release(None)
        peer.incoming.append((what, clock))
        if isinstance(what, bytes):
            peer.pending_bytes += len(what)
            if peer.pending_bytes > HIGH_WATER and not self._is_asked_to_pause:
                self._is_asked_to_pause = True
                cast(asyncio.Protocol, self.protocol).pause_writing()
        if not peer.loop.is_closed():
            peer.loop.arrived(peer)

    def write(self, data: Any) -> None:
        if data and not self._closing:
            self.send(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._closing:
            self.send(self.peer.ended)

    def get_write_buffer_size(self) -> int:
        return self.peer.pending_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The network has one limit for all."""

    # ---------------------------------------------------------------- arriving

    def accept(self, server: RankServer) -> None:
        """The server's side of a new connection begins."""
        self.protocol = server.factory()
        self.protocol.connection_made(self)

    def deliver(self) -> None:
        """What was sent first arrives; of data, all that is there or a first part of it."""
        loop = self.loop
        if not self.incoming or self.is_paused:
            return
        what, clock = self.incoming.popleft()
        host = loop.calls.host
        host.acquire(clock)
        if isinstance(what, bytes):
            if len(what) > 1 and host.machine.chooser.value(2):
                half = len(what) // 2
                self.incoming.appendleft((what[half:], clock))
                what = what[:half]
            self.pending_bytes -= len(what)
            peer = self.peer
            if peer._is_asked_to_pause and self.pending_bytes <= HIGH_WATER // 4:
                peer._is_asked_to_pause = False
                peer.loop.call_soon_threadsafe(cast(asyncio.Protocol, peer.protocol).resume_writing)
            if not self._closing:
                cast(asyncio.Protocol, self.protocol).data_received(what)
        else:
            what()
        if self.incoming:
            loop.arrived(self)
        elif self in loop.inbox:
            loop.inbox.remove(self)

    def ended(self) -> None:
        """The other end writes no more."""
        if not self._closing and not cast(asyncio.Protocol, self.protocol).eof_received():
            self.close()

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False
        if self.incoming:
            self.loop.arrived(self)

    def is_reading(self) -> bool:
        return not self.is_paused and not self._closing

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        if self._closing:
            return
        if not self.peer._closing:
            self.send(self.peer.ended)
        self._closing = True
        if self.protocol is not None and not self.loop.is_closed():
            self.loop.call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def abandon(self) -> None:
        """Its loop was closed: nothing happens here any more."""
        self._closing = True

    def is_closing(self) -> bool:
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sockname": self.names[0], "peername": self.names[1]}.get(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self.protocol is not None
        return self.protocol


class RankPolicy(_Policy):
    """Gives loops of one rank to whoever asks asyncio for one."""

    def __init__(self, calls: HostCalls, network: Network) -> None:
        super().__init__()
        self._calls = calls
        self._network = network

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return RankLoop(self._calls, self._network)


class RankReactor(Reactor):
    """Tells of completions without a thread: the machine calls when an operation has left its stream."""

    def __init__(self) -> None:
        super().__init__(slots=0)

    def watch(self, context: ExecutionContext | Launched, wake: Callable[[], None], *, force_callback: bool) -> Watch:
        found = Watch(context, wake)
        driver = context.driver
        assert isinstance(driver, SimDevice)
        driver.when_over(found.ticket, found.fire)
        return found
