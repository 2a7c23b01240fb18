"""The page in a real browser. A tier of its own."""

from pathlib import Path

import pytest
from tests.browsers import drawn

from peertile.checker.check import check

RACY = Path(__file__).parents[2] / "examples" / "racy"


@pytest.mark.long
@pytest.mark.feature("C7", "sim")
@pytest.mark.parametrize("name", ["missing_acquire", "lost_notify"])
def test_a_browser_draws_the_page_with_its_marks(name: str, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    report = check(RACY / f"{name}.py", schedules=3, traced=True)
    target.write_text(report.page())
    dom = drawn(target, 1200)
    assert dom.count('class="fault"') >= 2
    assert report.verdicts[0].headline.split(",")[0] in dom
