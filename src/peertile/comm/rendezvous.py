"""How the ranks of a job reach the coordinator: over a socket of this host, or directly as threads.

Process model: rank 0 runs the coordinator on a thread behind a unix socket; every rank, rank 0 too,
holds one connection and one thread that is blocked in receiving. The socket's name is abstract on
Linux (no file), elsewhere a file in the folder for temporary ones, gone when rank 0 leaves. It carries
the user, the port and the job, so it never meets the TCP store that torchrun puts on the same port.
Thread model: all ranks call the coordinator under one lock.

Nothing here knows what a collective means; read coordinator.py first. Messages are pickled: both ends
run as the same user on this host (asked of the system), so that no trust is added.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from peertile.comm.control import ControlBlock, Segment
from peertile.comm.coordinator import Arrive, Coordinator, Fail, Leave, Outcome, Reply, Request, broken, name_ranks
from peertile.comm.frames import LOST, NO_ROOM, Reader, Received, close_all, frame, send_some
from peertile.errors import AllocationError, PeerFailed, SymmetryError, UnsupportedError, UsageError, WaitTimeout

__all__ = ["Link", "LocalHub", "LocalLink", "Server", "SocketLink", "connect", "serve"]

_LINGER_S = 0.5  # a job that cannot start tells ranks that come late why, for so long
_NO_ROOM_S = 0.05  # between two looks at who calls, while there are no file descriptors
_ANSWER_MARGIN_S = 5.0  # the coordinator ends calls on time; beyond this it is itself stuck
_PATH_BYTES = 103  # of a socket that is a file; on Linux it is none
_LOCAL_PEERCRED = 0, 1, 76  # macOS: level, option, bytes of its answer: a version, the user, groups


class Hello(NamedTuple):
    """First message of a connection."""

    rank: int
    size: int
    pid: int


class Welcome(NamedTuple):
    """Every rank has joined. Carries the control segment."""

    pids: tuple[int, ...]


class Refused(NamedTuple):
    """This rank cannot join; `disagreed` tells SymmetryError from WaitTimeout."""

    text: str
    disagreed: bool


class Unwelcome(NamedTuple):
    """A rank was welcomed, but cannot take part, and is about to end: `text` says why."""

    text: str


class Goodbye(NamedTuple):
    """Rank 0 ends normally and takes the coordinator with it."""


class Link(Protocol):
    """A rank's connection to the coordinator."""

    segment: Segment
    pids: tuple[int, ...]
    tickets: Iterator[int]  # numbers for requests, one series for all groups of this rank
    closed: bool

    def call(self, request: Arrive, fds: Sequence[int]) -> tuple[Reply, list[int]]:
        """Arrives and waits for the reply, bounded; received descriptors belong to the caller."""

    def tell(self, request: Request) -> None:
        """One way: never waits, never fails."""

    def watch(self, block: ControlBlock, host: int) -> None:
        """Names a group's block, to be failed for rank `host` if the coordinator dies: nobody else could then."""

    def close(self) -> None:
        """Leaves the job without waiting for anybody. Closing twice is fine."""


class LocalHub:
    """The coordinator of ranks that are threads of this process; with one rank, a job of its own."""

    def __init__(self, size: int) -> None:
        # Protects the coordinator. Nothing else is taken while it is held; deliveries only put into queues.
        self._lock = threading.Lock()
        self.segment = Segment.create(size, shared=False)
        self.pids = (os.getpid(),) * size
        self._waiting: dict[tuple[int, int], SimpleQueue[tuple[Reply, list[int]]]] = {}
        self._coordinator = Coordinator(self.pids, self.segment, self._deliver, os.close)

    def _deliver(self, rank: int, reply: Reply, fds: tuple[int, ...]) -> None:
        waiting = self._waiting.pop((rank, reply.ticket), None)
        if waiting is not None:
            copies = _duplicates(fds)
            waiting.put(_lacking(reply) if copies is None else (reply, list(copies)))

    def call(self, rank: int, request: Arrive, fds: Sequence[int]) -> tuple[Reply, list[int]]:
        answer: SimpleQueue[tuple[Reply, list[int]]] = SimpleQueue()
        with self._lock:
            self._waiting[rank, request.ticket] = answer
            try:
                copies = _duplicates(fds)
                if copies is None:
                    raise AllocationError(NO_ROOM)
                self._coordinator.handle(rank, request, tuple(copies), time.monotonic())
            except Exception as error:
                self._deliver(rank, broken(request, error), ())
                if isinstance(error, AllocationError):
                    self._coordinator.handle(rank, _out_of(request, error), (), time.monotonic())
        try:
            return answer.get(timeout=request.timeout_s)
        except Empty:
            with self._lock:
                self._coordinator.expire(time.monotonic() + 1e-3)  # this call's own bound has passed for certain
            return answer.get(timeout=_ANSWER_MARGIN_S)
        except BaseException:
            with self._lock:
                self._waiting.pop((rank, request.ticket), None)
            raise

    def tell(self, rank: int, request: Request) -> None:
        with self._lock:
            self._coordinator.handle(rank, request, (), time.monotonic())


class LocalLink:
    """A thread rank's link: the hub and its number."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self.segment = hub.segment
        self.pids = hub.pids
        self.tickets: Iterator[int] = itertools.count()
        self.closed = False

    def call(self, request: Arrive, fds: Sequence[int]) -> tuple[Reply, list[int]]:
        return self._hub.call(self._rank, request, fds)

    def tell(self, request: Request) -> None:
        self._hub.tell(self._rank, request)

    def watch(self, block: ControlBlock, host: int) -> None:
        """The coordinator of threads lives as long as they do."""

    def close(self) -> None:
        self.closed = True
        self._hub.tell(self._rank, Leave())


class Server:
    """Rank 0's rendezvous: one thread that accepts the ranks and drives the coordinator.

    It serves until the last rank has left, since other ranks meet each other here after rank 0 is done. Rank 0 gives
    up the address when it leaves, so that its process can open another job there, and waits at its end (`linger`).
    """

    def __init__(self, listener: socket.socket, size: int, timeout_s: float) -> None:
        self._listener = listener
        self._size = size
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._coordinator: Coordinator | None = None
        self._refusal: Refused | None = None
        self._over = False
        self._unlisted = threading.Event()  # the address is free again
        self._bell, self._heard = socket.socketpair()  # rung by the process at its end
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._heard, selectors.EVENT_READ, self._stop)
        self._thread = threading.Thread(target=self._run, name="peertile-coordinator", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def left(self, timeout_s: float) -> None:
        """Rank 0 has left: returns when the address is free, the other ranks are still served."""
        self._unlisted.wait(timeout_s)

    def linger(self, timeout_s: float) -> None:
        """The process is about to end: the others get until `timeout_s` to leave, and then hear of it."""
        with contextlib.suppress(KeyboardInterrupt):  # nobody is kept by it
            self._thread.join(timeout_s)
        with contextlib.suppress(OSError):
            self._bell.send(b"!")
        self._thread.join(_ANSWER_MARGIN_S)

    @property
    def finished(self) -> bool:
        """Whether the last rank has left, or nobody could join."""
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """In a forked child: closes the inherited sockets. The selector is left alone, it is the parent's too."""
        self._listener.close()
        self._bell.close()
        self._heard.close()
        for peer in self._peers.values():
            peer.socket.close()

    def _run(self) -> None:
        try:
            while not self._over:
                for key, _ in self._selector.select(self._wait_s()):
                    if isinstance(key.data, _Peer):
                        self._serve(key.data)
                    else:
                        key.data()
                self._expire()
            self._flush()
        finally:
            _close(self._listener)
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._bell.close()
            self._selector.close()
            self._unlisted.set()

    def _wait_s(self) -> float | None:
        deadline = self._deadline if self._coordinator is None else self._coordinator.next_deadline()
        return None if deadline is None else max(deadline - time.monotonic(), 0.0)

    def _expire(self) -> None:
        now = time.monotonic()
        if self._coordinator is not None:
            self._coordinator.expire(now)
        elif self._refusal is not None:
            self._over = self._over or now >= self._deadline
        elif now >= self._deadline:
            missing = [rank for rank in range(self._size) if rank not in self._peers]
            bound = f"{self._timeout_s:g} s (PEERTILE_WAIT_TIMEOUT_S)"
            self._refuse(f"{name_ranks(missing)} of {self._size} did not join within {bound}", disagreed=False)

    def _refuse(self, text: str, *, disagreed: bool) -> None:
        """The job cannot start: those who have joined hear it now, late ones for a while longer."""
        self._refusal = Refused(text, disagreed)
        self._deadline = time.monotonic() + _LINGER_S
        for peer in self._peers.values():
            peer.send(self._refusal)

    def _stop(self) -> None:
        self._over = True

    def _unlist(self) -> None:
        self._selector.unregister(self._listener)
        _close(self._listener)
        self._unlisted.set()

    def _accept(self) -> None:
        if self._unlisted.is_set():
            return  # rank 0 has left in the same breath
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return  # whoever called has hung up
        except OSError as error:
            if self._coordinator is None and self._refusal is None:
                self._refuse(f"rank 0, which hosts the rendezvous: {error}", disagreed=False)
            time.sleep(_NO_ROOM_S)  # whoever called is still there, and would be seen at once again
            return
        if not _same_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, _Peer(connection, self._selector))

    def _serve(self, peer: _Peer) -> None:
        peer.flush()
        for message, fds in peer.receive():
            if isinstance(message, Hello):
                self._join(peer, message)
            elif isinstance(message, Unwelcome):
                self._exclude(peer, message.text)
            elif peer.rank is not None and self._coordinator is not None:
                self._handle(self._coordinator, peer.rank, message, fds)
                if isinstance(message, Leave) and peer.rank == 0:
                    self._unlist()
        if peer.ended:
            self._selector.unregister(peer.socket)
            peer.socket.close()
            if peer.rank is not None and self._peers.get(peer.rank) is peer:
                del self._peers[peer.rank]
                if self._coordinator is not None:
                    self._coordinator.lose(peer.rank, f"its process {peer.pid} ended without leaving the group")
                    self._over = not self._peers

    def _handle(self, coordinator: Coordinator, rank: int, message: Request, fds: tuple[int, ...]) -> None:
        """One message. What goes wrong with it is told to the rank that sent it: this thread serves all ranks."""
        try:
            if LOST in fds:
                close_all(fds)
                raise AllocationError(NO_ROOM)
            coordinator.handle(rank, message, fds, time.monotonic())
        except Exception as error:
            if isinstance(message, Arrive):
                self._deliver(rank, broken(message, error), ())
                if isinstance(error, AllocationError):
                    coordinator.handle(rank, _out_of(message, error), (), time.monotonic())
            else:
                coordinator.lose(rank, f"the rendezvous could not handle its message {message!r}: {error}")

    def _join(self, peer: _Peer, hello: Hello) -> None:
        other = self._peers.get(hello.rank)
        if self._refusal is None and hello.size != self._size:
            sizes = f"rank 0: {self._size}; rank {hello.rank}: {hello.size}"
            self._refuse(f"ranks disagree about the number of ranks: {sizes}", disagreed=True)
        if self._refusal is not None:
            peer.send(self._refusal)
        elif other is not None or self._coordinator is not None:
            who = f" as process {other.pid}" if other is not None else ""
            peer.send(Refused(f"rank {hello.rank} has joined this job already{who}", disagreed=True))
        else:
            peer.rank, peer.pid = hello.rank, hello.pid
            self._peers[hello.rank] = peer
            if len(self._peers) == self._size:
                try:
                    self._start()
                except (OSError, AllocationError) as error:
                    self._refuse(f"rank 0, which hosts the rendezvous: {error}", disagreed=False)

    def _start(self) -> None:
        pids = tuple(self._peers[rank].pid for rank in range(self._size))
        segment = Segment.create(self._size, shared=True)
        assert segment.fd is not None
        self._coordinator = Coordinator(pids, segment, self._deliver, os.close)
        for peer in self._peers.values():
            if not peer.send(Welcome(pids), (segment.fd,)):
                self._exclude(peer, f"rank 0, which hosts the rendezvous: {NO_ROOM}")
        segment.close_fd()

    def _exclude(self, peer: _Peer, why: str) -> None:
        """The others hear why a rank does not take part, and not only that its process ends because of that."""
        if peer.rank is not None and self._coordinator is not None:
            self._coordinator.lose(peer.rank, f"it could not join: {why}")

    def _deliver(self, rank: int, reply: Reply, fds: tuple[int, ...]) -> None:
        peer = self._peers.get(rank)
        if peer is not None:
            peer.send(reply, fds)

    def _flush(self) -> None:
        """What is still to be sent goes out, within a bound: then the sockets close."""
        for peer in self._peers.values():
            if self._coordinator is not None:
                peer.send(Goodbye())
            peer.socket.settimeout(1.0)
            peer.flush()


def _duplicates(fds: Sequence[int]) -> list[int] | None:
    """A copy of each; None where this process can open no more."""
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError:
        close_all(copies)
        return None
    return copies


def _out_of(request: Arrive, error: AllocationError) -> Fail:
    """For the other ranks: they are in that call, or will be, and are not to wait for who is out of it."""
    return Fail(request.group, request.generation, f"{request.call}: {error}")


def _lacking(reply: Reply) -> tuple[Reply, list[int]]:
    """What a rank is told whose descriptors got lost on their way."""
    return Reply(reply.ticket, Outcome.LACKING, text=f"file descriptors of other ranks: {NO_ROOM}"), []


class _Peer:
    """The coordinator's end of one connection. Never blocks: what does not fit waits in a queue."""

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self.socket = connection
        self.rank: int | None = None
        self.pid = 0
        self.ended = False
        self._writing = False
        self._selector = selector
        self._reader = Reader(connection)
        self._out: deque[tuple[memoryview, tuple[int, ...]]] = deque()

    def receive(self) -> list[Received]:
        try:
            messages = self._reader.read()
        except BlockingIOError:
            return []
        except OSError:
            messages = None
        if messages is None:
            self.ended = True
            return []
        return messages

    def send(self, message: object, fds: tuple[int, ...] = ()) -> bool:
        """False where it was told instead that this process can open no more descriptors."""
        copies = _duplicates(fds)
        is_whole = copies is not None
        if copies is None:
            if isinstance(message, Reply):
                message, copies = _lacking(message)
            else:
                message, copies = Refused(f"rank 0, which hosts the rendezvous: {NO_ROOM}", False), []
        self._out.append((frame(message, copies), tuple(copies)))
        self.flush()
        return is_whole

    def flush(self) -> None:
        try:
            while self._out:
                data, fds = self._out.popleft()
                try:
                    sent = send_some(self.socket, data, fds)
                except BlockingIOError:
                    self._out.appendleft((data, fds))
                    break
                for fd in fds:
                    os.close(fd)
                if sent < len(data):
                    self._out.appendleft((data[sent:], ()))
        except OSError:
            self._out.clear()  # the reading side sees the end of the connection
        if bool(self._out) != self._writing:
            self._writing = not self._writing
            with contextlib.suppress(KeyError, ValueError):
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._writing else 0)
                self._selector.modify(self.socket, events, self)


class SocketLink:
    """A rank's end of the connection: callers send, one thread receives and wakes them."""

    def __init__(self, connection: socket.socket, reader: Reader, early: list[Received]) -> None:
        (welcome, fds), *self._early = early  # rank 0 may have said more in the same breath
        self.segment = Segment.attach(fds[0])
        self.pids: tuple[int, ...] = welcome.pids
        self.tickets: Iterator[int] = itertools.count()
        self.server: Server | None = None
        self._watched: list[tuple[ControlBlock, int]] = []
        self._socket = connection
        self._reader = reader
        self._send_lock = threading.Lock()  # protects the sending side; nothing is taken while it is held
        self._waiting: dict[int, SimpleQueue[tuple[Reply, list[int]] | None]] = {}
        self._end: str | None = None  # why the coordinator is gone
        self.closed = False
        # A bound for sending alone: the receiving thread stays blocked as long as nothing comes.
        bound = struct.pack("ll", int(_ANSWER_MARGIN_S), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        self._thread = threading.Thread(target=self._run, name="peertile-monitor", daemon=True)
        self._thread.start()

    def call(self, request: Arrive, fds: Sequence[int]) -> tuple[Reply, list[int]]:
        answer: SimpleQueue[tuple[Reply, list[int]] | None] = SimpleQueue()
        self._waiting[request.ticket] = answer
        try:
            # Registered first, looked at second: either the end is seen here or `_run` wakes this call with None.
            # Not looked at again: the reply may be there although the coordinator has left since.
            if self._end is not None:
                raise PeerFailed(0, self._end)
            if not self._send(request, tuple(fds)):
                raise WaitTimeout(
                    f"{request.call}: rank 0 took no message for {_ANSWER_MARGIN_S:g} s; is its process stopped?"
                )
            got = answer.get(timeout=request.timeout_s + _ANSWER_MARGIN_S)
        except Empty:
            raise WaitTimeout(
                f"{request.call}: rank 0, which hosts the rendezvous, did not answer within "
                f"{request.timeout_s + _ANSWER_MARGIN_S:g} s; is its process stopped?"
            ) from None
        finally:
            self._waiting.pop(request.ticket, None)
        if got is None:
            raise PeerFailed(0, self._end or "the connection ended")
        return got

    def tell(self, request: Request) -> None:
        if self._end is None and not self.closed:
            self._send(request, ())

    def watch(self, block: ControlBlock, host: int) -> None:
        self._watched.append((block, host))

    def _send(self, message: object, fds: tuple[int, ...]) -> bool:
        """False when it could not be sent in time; a connection that has ended is the reader's to report."""
        data = frame(message, fds)
        with self._send_lock:
            while data:
                try:
                    data = data[send_some(self._socket, data, fds) :]
                except BlockingIOError:
                    return False
                except OSError:
                    return True
                fds = ()
        return True

    def _run(self) -> None:
        messages: list[Received] | None = self._early
        left = False
        while messages is not None:
            for message, fds in messages:
                if isinstance(message, Goodbye):
                    left = True
                else:
                    self._answer(message, fds)
            try:
                messages = self._reader.read()
            except OSError:
                messages = None
        if left:
            self._end = "left the group: its program ended normally, and it hosted the rendezvous"
        else:
            self._end = f"its process {self.pids[0]} ended without leaving the group"
            if not self.closed:
                for block, host in self._watched:
                    block.fail(host, self._end)
        for answer in list(self._waiting.values()):
            answer.put(None)

    def _answer(self, reply: Reply, fds: tuple[int, ...]) -> None:
        answer = self._waiting.get(reply.ticket)
        if answer is None:  # the caller was interrupted
            close_all(fds)
        elif LOST in fds:
            close_all(fds)
            answer.put(_lacking(reply))
        else:
            answer.put((reply, list(fds)))

    def close(self) -> None:
        if self.closed:
            return
        self.tell(Leave())
        self.closed = True
        if self.server is not None:
            self.server.left(_ANSWER_MARGIN_S)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        self._socket.close()

    @property
    def finished(self) -> bool:
        """Whether nothing of the job is open here any more."""
        return self.closed and (self.server is None or self.server.finished)

    def linger(self, timeout_s: float) -> None:
        """This process ends: ranks that meet each other at its rendezvous get until `timeout_s` to leave too."""
        if self.server is not None:
            self.server.linger(timeout_s)

    def abandon(self) -> None:
        """In a forked child: drops what it inherited, so that the end of the parent is seen by its peers."""
        self._socket.close()
        if self.server is not None:
            self.server.abandon()


def serve(port: int, job: str, size: int, timeout_s: float) -> Server:
    """Opens the rendezvous of a job on this host. Rank 0 calls it before `connect`."""
    address = _address(port, job)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if isinstance(address, str):
            _remove_stale(address)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"rendezvous on port {port}: another job of this user is using it ({error.strerror}); "
            f"pass another port= to init, or set PEERTILE_MASTER_PORT"
        ) from None
    listener.listen(size + 8)
    return Server(listener, size, timeout_s)


def connect(port: int, job: str, rank: int, size: int, timeout_s: float) -> SocketLink:
    """Joins the job: waits, bounded, until every rank has joined."""
    deadline = time.monotonic() + timeout_s
    connection = _dial(_address(port, job), port, rank, timeout_s, deadline)
    if not _same_user(connection):  # anybody may take a name first, and what he says would be unpickled here
        connection.close()
        raise UsageError(
            f"rank {rank}: the rendezvous on port {port} is another user's; pass another port= to init, or set "
            "PEERTILE_MASTER_PORT"
        )
    reader = Reader(connection)
    try:
        connection.settimeout(max(deadline - time.monotonic(), 0) + _ANSWER_MARGIN_S)
        connection.sendall(frame(Hello(rank, size, os.getpid())))
        messages = reader.read()
    except TimeoutError:
        connection.close()
        raise WaitTimeout(f"rank {rank}: rank 0 opened the rendezvous but did not answer; is it stopped?") from None
    except OSError:
        messages = None
    if not messages:
        connection.close()
        raise PeerFailed(0, "its process ended while the ranks were joining")
    message, fds = messages[0]
    if isinstance(message, Refused):
        connection.close()
        text = f"rank {rank} cannot join: {message.text}"
        raise SymmetryError(text) if message.disagreed else WaitTimeout(text)
    if LOST in fds:
        with contextlib.suppress(OSError):
            connection.sendall(frame(Unwelcome(NO_ROOM)))
        connection.close()
        raise AllocationError(f"rank {rank} cannot join: {NO_ROOM}")
    connection.settimeout(None)
    return SocketLink(connection, reader, messages)


def _dial(address: bytes | str, port: int, rank: int, timeout_s: float, deadline: float) -> socket.socket:
    """A connection to rank 0, which may not have opened the rendezvous yet. Nothing announces an abstract
    socket, so this polls: from 1 ms to 50 ms apart, until the deadline."""
    pause = 0.001
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
            return connection
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError):
            connection.close()
        if time.monotonic() + pause > deadline:
            raise WaitTimeout(
                f"rank {rank}: rank 0 did not open the rendezvous on port {port} within {timeout_s:g} s "
                f"(PEERTILE_WAIT_TIMEOUT_S); was it started, with the same port?"
            )
        time.sleep(pause)
        pause = min(pause * 2, 0.05)


def _address(port: int, job: str) -> bytes | str:
    if not hasattr(socket, "AF_UNIX"):
        raise UnsupportedError(
            f"several ranks as processes: expected Linux or macOS, got {sys.platform}; use RankModel.THREADS"
        )
    if len(job) > 32:  # the name of a unix socket has about 100 bytes
        job = _digest(job)
    name = f"peertile-{os.geteuid()}-{port}-{job}"
    if sys.platform == "linux":
        return b"\0" + name.encode()
    import tempfile

    path = os.path.join(tempfile.gettempdir(), f"peertile-{_digest(name)}")
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise UnsupportedError(
            f"rendezvous: expected a path of at most {_PATH_BYTES} bytes for its socket, as this system bounds them, "
            f"got {path}; let TMPDIR name a folder with a shorter one"
        )
    return path


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _close(listener: socket.socket) -> None:
    """No more calls are taken, and where sockets are files, this one's goes first: once nobody answers there, a new job
    takes the path."""
    name = listener.getsockname() if listener.fileno() >= 0 else ""
    if isinstance(name, str) and name:
        with contextlib.suppress(OSError):
            os.unlink(name)
    listener.close()


def _remove_stale(path: str) -> None:
    """Where sockets are files: one that nobody answers was left by a job that was killed."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
    except OSError:
        pass
    finally:
        probe.close()


def _same_user(connection: socket.socket) -> bool:
    if sys.platform == "linux":
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    else:
        _, uid = struct.unpack_from("2i", connection.getsockopt(*_LOCAL_PEERCRED))
    return bool(uid == os.geteuid())  # what the system tells of the other end is the effective one, too
