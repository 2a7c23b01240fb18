"""The page in a real browser: headless Chromium, where the machine has one. A tier of its own."""

import shutil
import subprocess
from pathlib import Path

import pytest

from peertile.checker.check import check

RACY = Path(__file__).parents[2] / "examples" / "racy"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
    if found is None:
        pytest.fail(f"expected one of {', '.join(BROWSERS)}: apt-get install chromium-headless-shell")
    return found


@pytest.mark.long
@pytest.mark.feature("C7", "sim")
@pytest.mark.parametrize("name", ["missing_acquire", "lost_notify"])
def test_a_browser_draws_the_page_with_its_marks(name: str, tmp_path: Path) -> None:
    target, picture = tmp_path / "page.html", tmp_path / "page.png"
    report = check(RACY / f"{name}.py", schedules=3, traced=True)
    target.write_text(report.page())
    common = [browser(), "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1600,1200"]
    dom = subprocess.run([*common, "--dump-dom", target.as_uri()], capture_output=True, text=True, timeout=60)
    assert dom.returncode == 0, dom.stderr
    assert dom.stdout.count('class="fault"') >= 2
    assert report.verdicts[0].headline.split(",")[0] in dom.stdout
    subprocess.run([*common, f"--screenshot={picture}", target.as_uri()], capture_output=True, timeout=60, check=True)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 5000
