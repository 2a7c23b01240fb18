"""The picture in a real browser: headless Chromium, where the machine has one. A tier of its own."""

import shutil
import subprocess
from pathlib import Path

import pytest

from peertile.timelines.events import Event, Kind, Part
from peertile.timelines.picture import page

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
    if found is None:
        pytest.fail(f"expected one of {', '.join(BROWSERS)}: apt-get install chromium-headless-shell")
    return found


@pytest.mark.long
@pytest.mark.feature("U5", "cpu")
def test_a_browser_draws_rows_waits_and_arrows(tmp_path: Path) -> None:
    info = {"program": 0, "launch": 1, "word": "w", "value": 1}
    zero = [
        Event(Kind.LAUNCH, "side", "meet", 0, 9000, {}), Event(Kind.PROGRAM, "side: programs", "meet 0", 100, 8900, info),
        Event(Kind.WAIT, "side: programs", "wait for ready", 500, 8000, info),
    ]  # fmt: skip
    one = [Event(Kind.NOTIFY, "side: programs", "notify ready", 7000, 7000, info)]
    target, picture = tmp_path / "page.html", tmp_path / "page.png"
    target.write_text(page("two ranks", [Part(0, events=zero), Part(1, events=one)]))
    common = [browser(), "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1600,600"]
    dom = subprocess.run(
        [*common, "--dump-dom", target.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    assert dom.stdout.count('class="arrow"') == 1
    assert "wait for ready: 7.50 us" in dom.stdout
    subprocess.run([*common, f"--screenshot={picture}", target.as_uri()], capture_output=True, timeout=60, check=True)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 5000
