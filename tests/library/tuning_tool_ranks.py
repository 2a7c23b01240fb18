"""Rank functions of the tests of the tool that tunes collectives for GPUs. No pytest here."""

import sys
from pathlib import Path

import peertile as pt
from peertile.library.cuda_collectives import Family, GpuPlans, Room, Shape, heap_bytes
from peertile.library.reductions import ReduceOp
from peertile.library.selection import Algorithm

RIGHT, ALSO = Shape(Algorithm.FILLED, 4, 64), Shape(Algorithm.PUSHED, 4, 128)
WRONG, ALONE = Shape(Algorithm.FLAGGED, 4, 64), Shape(Algorithm.FLAGGED, 4, 128)


def tool():
    """The tool as a module; whoever imports it first keeps its own environment."""
    return sys.modules.get("tune_cuda_collectives") or __import__("tune_cuda_collectives")


def measured(group):
    """A right way, one that folds by another operation, one that a rank does not take part in, and a right one."""
    cases = sys.modules["collective_cases"]
    b = cases.Bench(group, True)
    said = []
    room = Room(64, 2048)
    heap_size = heap_bytes(group.size, 8) + heap_bytes(group.size, 8, room) + (1 << 20)
    with pt.SymmetricHeap(group, size_bytes=heap_size) as heap:
        plans, roomy = GpuPlans(heap, 8), GpuPlans(heap, 8, room=room)
        group.on_recover(plans.recover)
        group.on_recover(roomy.recover)

        class Odd(cases.Case):
            def launch(self, shape):
                if shape is WRONG:
                    return self.plans.all_reduce(shape, self.x, self.out, ReduceOp.MAX)
                if shape is ALONE and group.rank == 1:
                    return pt.op.fill(self.out, 0.0)
                return super().launch(shape)

        case = Odd(b, plans, Family.ALL_REDUCE, 2048, {room: roomy})
        case.calls = 2
        ways = {"filled 512 x 4": RIGHT, "wrong": WRONG, "alone": ALONE, "pushed 256 x 4": ALSO}
        ways["filled 512 x 2, 64 slots"] = cases.Roomy(Algorithm.FILLED, 2, 64, room)
        found, dropped = tool().measure(b, case, ways, said.append)
        group.forget_recover(plans.recover)
        group.forget_recover(roomy.recover)
    return found, dropped, said, Path(tool().__file__).name


def sayable(group):
    """Which ways a row of the table leads to."""
    with pt.SymmetricHeap(group, size_bytes=heap_bytes(group.size, 8) + (1 << 20)) as heap:
        plans = GpuPlans(heap, 8)
        asked = [
            Shape(Algorithm.PUSHED, 4, 2048), Shape(Algorithm.PUSHED, 3, 2048), Shape(Algorithm.FILLED, 4, 1024),
            Shape(Algorithm.FLAGGED, 8, 64), sys.modules["collective_cases"].Roomy(Algorithm.FILLED, 4, 1024, Room(32)),
        ]  # fmt: skip
        return [tool().sayable(plans, Family.ALL_REDUCE, 1 << 20, shape) for shape in asked]
