"""The flag is waited for by ordinary loads, the payload is read by the copy engine: crossing to it needs a fence."""

import pytest

from peertile.sim.explore import explore
from peertile.sim.scripts import Cell, script_case
from peertile.sim.verdicts import Race


@pytest.mark.sentence("MM-30")
@pytest.mark.sentence("MM-31")
@pytest.mark.parametrize("fence", [True, False])
def test_a_bulk_read_needs_a_proxy_fence_after_the_wait(fence: bool) -> None:
    x, flag = Cell("x"), Cell("flag")

    def writer(p):
        p.write(x)
        yield from p.put(flag, 1)

    def reader(p):
        yield from p.wait(flag, 1)
        if fence:
            p.proxy_fence()
        p.bulk_wait(p.bulk(x, writes=False))

    report = explore(script_case([(1, writer), (0, reader)]), 50)
    assert report.clean == fence
    if not fence:
        verdict = report.verdicts[0]
        assert isinstance(verdict, Race)
        assert "bulk proxy" in str(verdict)
