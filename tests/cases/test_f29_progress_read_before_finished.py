"""Progress and "finished" are two words: who reads progress first may take an old one for the final one."""

import pytest

from peertile.memory_model import Order
from peertile.sim.explore import exhaust
from peertile.sim.scripts import Cell, script_case


def finals(finished_first: bool) -> set[int]:
    head, retired = Cell("head"), Cell("retired")
    seen: set[int] = set()

    def writer(p):
        yield from p.put(head, 1)
        yield from p.put(head, 2)
        yield from p.put(retired, 1)

    def reader(p):
        if finished_first:
            done = yield from p.get(retired)
            at = yield from p.get(head)
        else:
            at = yield from p.get(head)
            done = yield from p.get(retired)
        if done:
            seen.add(at)

    assert exhaust(script_case([writer, reader])).complete
    return seen


@pytest.mark.parametrize("order", [Order.RELEASE])
def test_only_one_order_of_the_two_reads_is_right(order: Order) -> None:
    assert finals(finished_first=False) == {0, 1, 2}
    assert finals(finished_first=True) == {2}
