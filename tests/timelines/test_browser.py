"""The picture in a real browser. A tier of its own."""

from pathlib import Path

import pytest
from tests.browsers import drawn

from peertile.timelines.events import Event, Kind, Part
from peertile.timelines.picture import page


@pytest.mark.long
@pytest.mark.feature("U5", "cpu")
def test_a_browser_draws_rows_waits_and_arrows(tmp_path: Path) -> None:
    info = {"program": 0, "launch": 1, "word": "w", "value": 1}
    zero = [
        Event(Kind.LAUNCH, "side", "meet", 0, 9000, {}), Event(Kind.PROGRAM, "side: programs", "meet 0", 100, 8900, info),
        Event(Kind.WAIT, "side: programs", "wait for ready", 500, 8000, info),
    ]  # fmt: skip
    one = [Event(Kind.NOTIFY, "side: programs", "notify ready", 7000, 7000, info)]
    target = tmp_path / "page.html"
    target.write_text(page("two ranks", [Part(0, events=zero), Part(1, events=one)]))
    dom = drawn(target, 600)
    assert dom.count('class="arrow"') == 1
    assert "wait for ready: 7.50 us" in dom
