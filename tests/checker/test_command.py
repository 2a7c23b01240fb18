"""`peertile check FILE` as a shell runs it: what it prints, and its exit status."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def checked(path: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "peertile", "check", str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.long  # tests/checker/test_racy.py checks the same in this process, in the suite
@pytest.mark.feature("C1", "sim")
@pytest.mark.parametrize("name", sorted(path.stem for path in (EXAMPLES / "racy").glob("*.py")))
def test_a_racy_file_exits_with_one_and_its_repaired_twin_with_nothing(name: str) -> None:
    done = checked(EXAMPLES / "racy" / f"{name}.py")
    assert done.returncode == (0 if name.endswith("_fixed") else 1), done.stdout + done.stderr
    assert done.stderr == ""
    assert ("no fault found on " in done.stdout) == name.endswith("_fixed")
    assert ("\n  replay: --seed " in done.stdout) != name.endswith("_fixed")


@pytest.mark.long
@pytest.mark.feature("C1", "sim")
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_every_correct_example_passes_on_three_ranks_and_a_hundred_schedules(name: str) -> None:
    done = checked(EXAMPLES / f"{name}.py", "--ranks", "3", "--schedules", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"examples/{name}.py: no fault found on 3 ranks\n\ncovered: 100 random schedules from seed 0" in done.stdout
