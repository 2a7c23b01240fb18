"""A value is put at one rank and a flag at another; who sees the flag reads the value through the third. Order for
one destination alone is not enough, order for all is."""

import pytest

from peertile.memory_model import Order
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case


@pytest.mark.parametrize("quiet", [True, False])
def test_order_towards_all_is_needed(quiet: bool) -> None:
    x, y = Cell("x", rank=1), Cell("y", rank=2)

    def first(p):
        p.write(x)
        if quiet:
            p.fence()
        yield from p.put(y, 1, Order.RELAXED)

    def third(p):
        yield from p.wait(y, 1)
        assert p.read(x) == 1

    assert explore(script_case([(0, first), (2, third)], ranks=3), 50).clean == quiet
