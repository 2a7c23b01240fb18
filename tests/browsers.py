"""Headless Chromium, where the machine has one, for tests of pages."""

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def drawn(page: Path, height: int) -> str:
    """The elements of a page once a browser has read it; a picture of so many pixels in height must come of it, too."""
    found = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
    if found is None:
        pytest.fail(f"expected one of {', '.join(BROWSERS)}: apt-get install chromium-headless-shell")
    common = [found, "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size=1600,{height}"]
    dom = subprocess.run([*common, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=60)
    assert dom.returncode == 0, dom.stderr
    picture = page.with_suffix(".png")
    subprocess.run([*common, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=60, check=True)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 5000
    return dom.stdout
