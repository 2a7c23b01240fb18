"""Messages over a unix socket: pickled objects with file descriptors. Both ends are the same user's.

A frame is the length of the body, the number of descriptors, and the body; the descriptors travel
with its first byte. Nothing here knows what the messages mean.
"""

from __future__ import annotations

import array
import os
import pickle
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["LOST", "MAX_FDS", "NO_ROOM", "Reader", "Received", "close_all", "frame", "send_some"]

MAX_FDS = 250  # Linux passes at most 253 descriptors with one message
LOST = -1
"""In place of a descriptor that came when this process could open no more: the system has dropped it."""
NO_ROOM = "this process can open no more file descriptors; raise its bound (`ulimit -n`), or close files"
Received = tuple[Any, tuple[int, ...]]  # a message and the descriptors that came with it
_HEAD = struct.Struct("=II")


def frame(message: object, fds: Sequence[int] = ()) -> memoryview:
    """The bytes of one message."""
    body = pickle.dumps(message, protocol=5)
    return memoryview(_HEAD.pack(len(body), len(fds)) + body)


def send_some(connection: socket.socket, data: memoryview, fds: Sequence[int] = ()) -> int:
    """Sends what fits and says how much that was. The descriptors have gone with the first byte."""
    if fds and sys.platform != "linux":
        data = data[: _HEAD.size]  # macOS refuses descriptors with more than the other end has room for at the moment
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return connection.sendmsg([data], rights, getattr(socket, "MSG_NOSIGNAL", 0))


def close_all(fds: Iterable[int]) -> None:
    """Ends received descriptors that nobody will use."""
    for fd in fds:
        if fd != LOST:
            os.close(fd)


class Reader:
    """Cuts what arrives on a socket into messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._data = bytearray()
        self._fds: list[int] = []
        self._cut_off = 0  # bytes of all frames before `_data`
        self._dropped: list[int] = []  # where frames begin whose descriptors were dropped

    def read(self) -> list[Received] | None:
        """At least one message; None at the end of the connection. A socket that does not block raises
        BlockingIOError instead of waiting, and nothing is lost."""
        messages: list[Received] = []
        while not messages:
            room = socket.CMSG_SPACE(4 * MAX_FDS)
            data, rights, flags, _ = self._socket.recvmsg(1 << 16, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
            fds: list[int] = []
            for level, kind, body in rights:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds += array.array("i", body[: len(body) - len(body) % 4])
            if not hasattr(socket, "MSG_CMSG_CLOEXEC"):
                for fd in fds:
                    os.set_inheritable(fd, False)
            if not data:
                return None
            self._data += data
            if flags & socket.MSG_CTRUNC:
                # Nothing is read beyond what was sent together with descriptors: the last frame has lost them.
                close_all(fds)
                self._dropped.append(self._cut_off + self._last_begin())
            else:
                self._fds += fds
            while (message := self._cut()) is not None:
                messages.append(message)
        return messages

    def _last_begin(self) -> int:
        """Where in the data the last frame begins, whole or not."""
        begin = end = 0
        while end < len(self._data):
            begin = end
            if len(self._data) < begin + _HEAD.size:
                break
            end = begin + _HEAD.size + _HEAD.unpack_from(self._data, begin)[0]
        return begin

    def _cut(self) -> Received | None:
        if len(self._data) < _HEAD.size:
            return None
        length, count = _HEAD.unpack_from(self._data)
        end = _HEAD.size + length
        if len(self._data) < end:
            return None
        message = pickle.loads(bytes(memoryview(self._data)[_HEAD.size : end]))
        del self._data[:end]
        begin, self._cut_off = self._cut_off, self._cut_off + end
        if begin in self._dropped:
            self._dropped.remove(begin)
            return message, (LOST,) * count
        fds = tuple(self._fds[:count])
        del self._fds[:count]
        return message, fds
