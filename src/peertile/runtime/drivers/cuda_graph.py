"""Graphs of the cuda driver. A capture records operations as they are; `instantiate` issues them to an NVIDIA graph.

The stream of the user never enters a capture of the NVIDIA driver, so nothing that other threads do can break one,
and every executable graph has fault records, launch words, scratch and staging of its own.

A node that faults does not stop the nodes behind it: see `cuda_stream.py`. Host functions behind it do not run.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from peertile.runtime.driver import FaultRecord, GraphExecHandle, GraphHandle
from peertile.runtime.drivers.cuda_launches import FAULT_WORDS, LAUNCH_BYTES, Block, Slot
from peertile.runtime.drivers.cuda_ops import Launch, node_of
from peertile.runtime.drivers.cuda_stream import CudaStream, HostWork, Op, Params, Printer, Target

if TYPE_CHECKING:
    from peertile.runtime.drivers.cuda import CudaDevice

__all__ = ["CudaGraph", "CudaGraphExec", "LaunchGraph"]


class CudaGraph(GraphHandle):
    __slots__ = ("nodes",)

    def __init__(self, nodes: tuple[Op, ...]) -> None:
        self.nodes = nodes


class CudaGraphExec(GraphExecHandle, Target):
    """An executable graph and what its nodes need. `cu` is the stream that it is captured on."""

    in_graph = True

    def __init__(self, device: CudaDevice, nodes: tuple[Op, ...], cu: Any) -> None:
        self.device = device
        self.api = device.api
        self.cu = cu
        self.params = Params()
        self.nodes: list[tuple[Op, Any]] = []
        self.keys: list[int] = []
        self.scratch_memory: list[int] = []
        self.printers: list[Printer] = []
        self.may_block = any(op.may_block for op in nodes)
        self.touches_host = any(op.touches_host for op in nodes)
        self.live = True
        self.block = Block(device, max(len(nodes), 1))
        self.exec: Any = None
        self.api.begin_capture(cu)
        try:
            if self.may_block:  # barriers count in launch words; each replay starts from zero
                self.api.fill(self.block.words, 0, 4, max(len(nodes), 1) * LAUNCH_BYTES // 4, cu)
            for op, follower in zip_longest(nodes, nodes[1:]):
                self.lets_in = op.lets_in(follower) if isinstance(op, Launch) and follower is not None else 0
                self.nodes.append((op, op.issue(self)))
        finally:
            graph = self.api.end_capture(cu)
        self.tells_in_slots = all(
            issued[1] is None if isinstance(op, Launch) else type(op).collect is Op.collect for op, issued in self.nodes
        )
        """Whether there is nothing to collect where no slot has a fault."""
        try:
            self.exec = self.api.instantiate(graph)
        finally:
            self.api.destroy_graph(graph)

    def sequence(self) -> int:
        return -1

    def slot(self) -> Slot:
        slot = Slot(self.block, self.block.used)
        self.block.used += 1
        self.block.live += 1
        return slot

    def scratch(self, nbytes: int) -> int:
        self.scratch_memory.append(self.device.heap.take(nbytes))
        return self.scratch_memory[-1]

    def printer(self) -> Printer:
        self.printers.append(Printer(self.device))
        return self.printers[-1]

    def may_read_host_now(self) -> bool:
        return False

    def host(self, function: Callable[[], None]) -> HostWork:
        work = HostWork()
        before = len(self.nodes)

        def run() -> None:
            if not any(op.failed(issued) for op, issued in self.nodes[:before]):
                work.run(function)

        self.keys.append(self.api.host_function(self.cu, run, once=False))
        return work

    def collect(self, name: str, sequence: int, *, skipped: bool) -> FaultRecord | None:
        """The first fault of a replay; all are cleared."""
        states = self.block.faults[: FAULT_WORDS * self.block.used : FAULT_WORDS]
        if self.tells_in_slots and not any(states):  # all at once: a call for each node takes longer than its kernel
            return None
        first = None
        for k, (op, issued) in enumerate(self.nodes):
            record = op.collect(issued, sequence, skipped=skipped)
            if record is not None and first is None:
                first = node_of(record, k, name)
        return first

    def destroy(self) -> None:
        self.live = False
        self.api.destroy_exec(self.exec)
        for key in self.keys:
            self.api.forget(key)
        for op, issued in self.nodes:
            op.release(issued)
        for address in self.scratch_memory:
            self.device.heap.give(address)
        for printer in self.printers:
            self.device.pinned.give(printer.address)
        self.device.heap.give(self.block.words)
        self.device.pinned.give(self.block.address)
        self.nodes.clear()


class LaunchGraph(Op):
    """One replay."""

    __slots__ = ("calls_host", "graph", "may_block", "touches_host")

    def __init__(self, name: str, graph: CudaGraphExec) -> None:
        super().__init__(name)
        self.graph = graph
        self.may_block = graph.may_block
        self.touches_host = graph.touches_host
        self.calls_host = bool(graph.keys)

    @property
    def launches(self) -> bool:  # type: ignore[override]
        return not self.touches_host

    def issue(self, target: Target) -> Any:
        target.api.launch_graph(self.graph.exec, target.cu)
        if not self.calls_host:
            return None
        assert isinstance(target, CudaStream)
        target.count_call(1)
        return target

    def collect(self, issued: Any, sequence: int, *, skipped: bool) -> FaultRecord | None:
        return self.graph.collect(self.name, sequence, skipped=skipped)

    def release(self, issued: Any) -> None:
        if issued is not None:
            issued.count_call(-1)
