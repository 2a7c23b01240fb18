"""ruff and mypy find nothing; run here so that one command tells everything."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.fail(f"{' '.join(command)}\n{done.stdout}", pytrace=False)


def test_ruff_check_is_clean() -> None:
    run("ruff", "check", "--no-cache", ".")


def test_ruff_format_would_change_nothing() -> None:
    run("ruff", "format", "--no-cache", "--check", ".")


@pytest.mark.slow
@pytest.mark.timeout(310)
def test_mypy_is_clean() -> None:
    run("mypy")
