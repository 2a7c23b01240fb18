"""What the handles of the cpu driver are: modules, events and graphs, and how an operation's header is made.

Streams are in `cpu_stream.py`, segments in `cpu_memory.py`.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeVar

from peertile.errors import ArgumentError
from peertile.runtime.driver import EventHandle, GraphExecHandle, GraphHandle, ModuleHandle, Ticket
from peertile.runtime.drivers.cpu_layout import CACHE_LINE, C, Kind
from peertile.runtime.drivers.cpu_stream import ARGS_AT, Operation, PythonWork, pack, words_at

__all__ = ["CpuEvent", "CpuGraph", "CpuGraphExec", "CpuModule", "as_own", "check_word", "operation"]


class CpuModule(ModuleHandle):
    """A loaded kernel. Its native words and its code stay: a late worker may still look at them."""

    __slots__ = ("address", "limit", "name", "stride", "waits")

    def __init__(self, address: int, name: str, *, waits: bool, stride: int, limit: int) -> None:
        self.address = address
        self.name = name
        self.waits = waits
        self.stride = stride
        self.limit = limit


class CpuEvent(EventHandle):
    """The last record: which operation, and where its time is."""

    __slots__ = ("stamp", "ticket")

    def __init__(self) -> None:
        self.ticket: Ticket | None = None
        self.stamp: ctypes.c_int64 | None = None


class CpuGraph(GraphHandle):
    __slots__ = ("nodes",)

    def __init__(self, nodes: tuple[Operation, ...]) -> None:
        self.nodes = nodes


class CpuGraphExec(GraphExecHandle):
    """Operations written out in native memory, and the table of their addresses."""

    __slots__ = ("arena_bytes", "count", "header", "memory", "nodes", "python", "table")

    def __init__(self, nodes: tuple[Operation, ...]) -> None:
        self.nodes: tuple[Operation, ...] | None = nodes
        self.arena_bytes = max((n.arena_bytes for n in nodes), default=0)
        self.python = any(n.python is not None for n in nodes)
        sizes = [(ARGS_AT + len(n.args) + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE for n in nodes]
        table = (len(nodes) * 8 + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
        memory = ctypes.create_string_buffer(table + sum(sizes) + CACHE_LINE)
        base = ctypes.addressof(memory)
        self.table = (base + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
        words = words_at(self.table, max(table, 8))
        at = self.table + table
        for k, (node, size) in enumerate(zip(nodes, sizes, strict=True)):
            ctypes.memmove(at, node.header + node.args, ARGS_AT + len(node.args))
            if node.args:
                words_at(at, ARGS_AT)[C.ARGS] = at + ARGS_AT
            words[k] = at
            at += size
        self.memory: object = memory
        self.count = len(nodes)
        self.header = pack(Kind.GRAPH, (self.table, self.count))


_T = TypeVar("_T")


def as_own(handle: object, cls: type[_T], role: str) -> _T:
    if not isinstance(handle, cls):
        raise ArgumentError(f"{role}: expected a handle of the cpu driver, got {type(handle).__name__}")
    return handle


def operation(name: str, kind: Kind, *words: int, keep: Any = None, python: PythonWork | None = None) -> Operation:
    return Operation(name, pack(kind, words, python=python is not None), b"", keep, python, 0)


def check_word(address: int, width: int) -> None:
    if width not in (32, 64):
        raise ArgumentError(f"width: expected 32 or 64 bits, got {width}")
    if address % (width // 8):
        raise ArgumentError(f"address: expected one aligned to {width // 8} bytes, got {address:#x}")
