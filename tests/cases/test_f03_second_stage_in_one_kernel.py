"""A reduced shard is gathered by a peer in the same kernel: the barrier between the two stages has to release and
acquire. That the input came from an earlier kernel does not help the shard."""

import pytest

from peertile.memory_model import Order
from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Race


def two_stages(release: Order, acquire: Order):
    shards = [Cell(f"shard {r}", rank=r) for r in range(2)]
    words = [Cell(f"word of {r}", rank=r) for r in range(2)]

    def rank(r):
        def run(p):
            p.write(shards[r])
            yield from p.put(words[1 - r], 1, release)
            yield from p.wait(words[r], 1, order=acquire)
            for shard in shards:
                p.read(shard)

        return run

    return script_case([(0, rank(0)), (1, rank(1))])


@pytest.mark.parametrize(
    ("release", "acquire"),
    [(Order.RELAXED, Order.ACQUIRE), (Order.RELEASE, Order.RELAXED), (Order.RELAXED, Order.RELAXED)],
)
def test_a_relaxed_barrier_between_the_stages_races(release: Order, acquire: Order) -> None:
    verdict = explore(two_stages(release, acquire), 5).verdicts[0]
    assert isinstance(verdict, Race)
    assert verdict.later.object.startswith("shard")


def test_release_and_acquire_are_enough() -> None:
    assert explore(two_stages(Order.RELEASE, Order.ACQUIRE), 50).clean
