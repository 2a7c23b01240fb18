"""The only proxy fence is inside a loop over tiles; without tiles what was written before the loop is not ordered
before the bulk store that follows."""

import pytest

from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case


@pytest.mark.parametrize("fence_after", [True, False])
@pytest.mark.parametrize("tiles", [0, 3])
def test_the_path_without_trips_needs_its_fence(tiles: int, fence_after: bool) -> None:
    stage = Cell("stage", start=None)

    def program(p):
        p.write(stage, 0)
        for _ in range(tiles):
            p.write(stage, p.read(stage) + 1)
            p.proxy_fence()
        if fence_after:
            p.proxy_fence()
        p.bulk_wait(p.bulk(stage, writes=False))

    assert explore(script_case([program]), 3).clean == (tiles > 0 or fence_after)


@pytest.mark.parametrize("wait", [True, False])
def test_what_a_bulk_copy_wrote_is_read_after_its_completion(wait: bool) -> None:
    tile = Cell("tile")

    def program(p):
        copy = p.bulk(tile, writes=True)
        if wait:
            p.bulk_wait(copy)
        p.read(tile)

    assert explore(script_case([program]), 3).clean == wait
