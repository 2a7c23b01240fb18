"""One program fences for all: fences are cumulative, so it works if the others have met it before the fence, and
not if they meet after it."""

import pytest

from peertile.memory_model import Order, Rmw, Scope
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case


def block(fence_after_meeting: bool):
    lanes = [Cell(f"lane {k}", rank=1) for k in range(2)]
    count, flag = Cell("count"), Cell("flag", rank=1)

    def meet(p):
        yield from p.add(count, 1, Order.ACQ_REL, Scope.DEVICE, Rmw.ADD)
        yield from p.wait(count, 2, scope=Scope.DEVICE)

    def lane(k):
        def run(p):
            p.write(lanes[k])
            if k == 0 and not fence_after_meeting:
                p.fence()
            yield from meet(p)
            if k == 0:
                if fence_after_meeting:
                    p.fence()
                yield from p.put(flag, 1, Order.RELAXED)

        return run

    def reader(p):
        yield from p.wait(flag, 1)
        for cell in lanes:
            p.read(cell)

    return script_case([(0, lane(0)), (0, lane(1)), (1, reader)])


@pytest.mark.parametrize("fence_after_meeting", [True, False])
def test_the_fence_must_come_after_the_others_have_been_met(fence_after_meeting: bool) -> None:
    assert explore(block(fence_after_meeting), 50).clean == fence_after_meeting
