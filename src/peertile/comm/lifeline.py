"""The socket between a launcher and one of its ranks: causes go up, tasks go down, its end means the end.

The launcher holds one end, the rank the other, from before the rank's program starts. When the
launcher is gone, by SIGKILL too, the rank sees the end of the stream and ends itself. The kernel's
parent-death signal was not taken: it follows the thread that started the process, and Linux alone has it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

from peertile.comm.frames import Reader, frame, send_some

__all__ = ["VARIABLE", "FunctionTask", "Lifeline", "Raised", "Report", "Returned"]

VARIABLE = "PEERTILE_LIFELINE"


class Report(NamedTuple):
    """Why a rank ends with a failure; `peer` is the rank that it blames, if another."""

    cause: str
    peer: int | None


class FunctionTask(NamedTuple):
    """A function that a spawned rank runs: where it is defined, and its pickled arguments."""

    module: str
    file: str | None
    name: str
    path: tuple[str, ...]
    argv: tuple[str, ...]
    arguments: bytes


class Returned(NamedTuple):
    """The pickled result of a spawned rank."""

    value: bytes


class Raised(NamedTuple):
    """The exception of a spawned rank, pickled if it can be, and its traceback as text."""

    error: bytes | None
    traceback: str


class Lifeline:
    """One end of the socket. Sending never fails: if the other side is gone, nobody wants to hear it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = Reader(connection)
        self._lock = threading.Lock()  # protects the sending side; nothing is taken while it is held

    @classmethod
    def pair(cls) -> tuple[Lifeline, socket.socket]:
        """The launcher's end, and the socket that the rank inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    @staticmethod
    def variable(theirs: socket.socket) -> str:
        """What VARIABLE says. The inode too: a process that inherits the environment but not the socket, and has
        something else at that descriptor, is no rank of this launcher."""
        return f"{theirs.fileno()}:{os.fstat(theirs.fileno()).st_ino}"

    @classmethod
    def inherited(cls, env: MutableMapping[str, str]) -> Lifeline | None:
        """The rank's end, if a launcher of ours started this process. Taken out of `env`: it is for one process."""
        fd, _, inode = env.pop(VARIABLE, "").partition(":")
        if not fd.isdigit():
            return None
        try:
            found = os.fstat(int(fd))
        except OSError:
            return None
        if not stat.S_ISSOCK(found.st_mode) or str(found.st_ino) != inode:
            return None
        os.set_inheritable(int(fd), False)
        return cls(socket.socket(fileno=int(fd)))

    def send(self, message: object) -> None:
        data = frame(message)
        with self._lock, contextlib.suppress(OSError):
            while data:
                data = data[send_some(self._socket, data) :]

    def receive(self) -> list[Any] | None:
        """The next messages; None at the end."""
        try:
            messages = self._reader.read()
        except OSError:
            return None
        return None if messages is None else [message for message, _ in messages]

    def watch(self, on_end: Callable[[], None]) -> None:
        """Calls `on_end` on a thread of its own once the other side is gone."""

        def wait() -> None:
            while self.receive() is not None:
                pass
            on_end()

        threading.Thread(target=wait, name="peertile-lifeline", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def abandon(self) -> None:
        """In a forked child: drops the inherited socket without ending the parent's."""
        self._socket.close()
