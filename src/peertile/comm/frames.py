"""Messages over a unix socket: pickled objects with file descriptors. Both ends are the same user's.

A frame is the length of the body, the number of descriptors, and the body; the descriptors travel
with its first byte. Nothing here knows what the messages mean.
"""

from __future__ import annotations

import array
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["MAX_FDS", "Reader", "Received", "frame", "send_some"]

MAX_FDS = 250  # Linux passes at most 253 descriptors with one message
Received = tuple[Any, tuple[int, ...]]  # a message and the descriptors that came with it
_HEAD = struct.Struct("=II")


def frame(message: object, fds: Sequence[int] = ()) -> memoryview:
    """The bytes of one message."""
    body = pickle.dumps(message, protocol=5)
    return memoryview(_HEAD.pack(len(body), len(fds)) + body)


def send_some(connection: socket.socket, data: memoryview, fds: Sequence[int] = ()) -> int:
    """Sends what fits and says how much that was. The descriptors have gone with the first byte."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return connection.sendmsg([data], rights, getattr(socket, "MSG_NOSIGNAL", 0))


class Reader:
    """Cuts what arrives on a socket into messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._data = bytearray()
        self._fds: list[int] = []

    def read(self) -> list[Received] | None:
        """At least one message; None at the end of the connection. A socket that does not block raises
        BlockingIOError instead of waiting, and nothing is lost."""
        messages: list[Received] = []
        while not messages:
            room = socket.CMSG_SPACE(4 * MAX_FDS)
            data, rights, _, _ = self._socket.recvmsg(1 << 16, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
            for level, kind, body in rights:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self._fds += array.array("i", body[: len(body) - len(body) % 4])
            if not data:
                return None
            self._data += data
            while (message := self._cut()) is not None:
                messages.append(message)
        return messages

    def _cut(self) -> Received | None:
        if len(self._data) < _HEAD.size:
            return None
        length, count = _HEAD.unpack_from(self._data)
        end = _HEAD.size + length
        if len(self._data) < end:
            return None
        message = pickle.loads(bytes(memoryview(self._data)[_HEAD.size : end]))
        del self._data[:end]
        fds = tuple(self._fds[:count])
        del self._fds[:count]
        return message, fds
