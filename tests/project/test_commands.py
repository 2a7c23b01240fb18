"""The commands that README.md prints are the ones that are meant and the ones that .ci/run runs."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAIN_JOB = "python -m pip install '.[examples]' && peertile run examples/digits_data_parallel.py --ranks 4"
TESTS = "python -m pip install '.[test]' && python -m pytest -n auto"


@pytest.mark.feature("U1", "cpu")
def test_readme_prints_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"^```bash\n(.+)\n```$", text, re.MULTILINE) == [MAIN_JOB, TESTS]
    assert (ROOT / "examples" / "digits_data_parallel.py").exists()


def test_ci_runs_the_readme_command_in_strict_mode() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert script.count(f"<<'COMMAND'\n{TESTS}\nCOMMAND\n") == 1
    assert "set -euo pipefail" in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True, timeout=10)


def test_ci_finds_the_closing_line_of_pytest() -> None:
    pattern = re.search(r"grep -E '([^']+)'", (ROOT / ".ci" / "run").read_text())
    assert pattern is not None
    lines = (
        "==== 3 failed, 210 passed, 2 deselected in 41.20s ====\n= 1 passed in 0.01s =\n2 passed in 0.01s\n"
        "= 1 error in 0.10s =\n= 5 deselected in 1.00s =\n==== 800 passed, 3 deselected in 65.01s (0:01:05) ====\n"
    )
    done = subprocess.run(
        ["grep", "-cE", pattern[1]], input=lines, capture_output=True, text=True, check=True, timeout=10
    )
    assert done.stdout == "6\n"


def test_ci_prints_the_closing_line_last_and_leaves_nothing(tmp_path) -> None:
    """The script itself, with stand-ins for what takes minutes: python3, pip and pytest."""
    tools = tmp_path / "bin"
    tools.mkdir()
    fake = tools / "python3"
    fake.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f'  "-m venv "*) mkdir -p "$3/bin" && cp "{fake}" "$3/bin/python" ;;\n'
        '  "-m pip install .[test]") echo installed ;;\n'
        '  "-m pytest -n auto") echo "= 1 failed, 2 passed in 0.50s ="; echo after; exit 1 ;;\n'
        '  *) echo "unexpected: $*"; exit 9 ;;\nesac\n'
    )
    fake.chmod(0o755)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "TMPDIR": str(temporary)}
    done = subprocess.run([ROOT / ".ci" / "run"], env=env, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "installed", "= 1 failed, 2 passed in 0.50s =", "after", "= 1 failed, 2 passed in 0.50s =",
    ]  # fmt: skip
    assert done.stderr == ""
    assert list(temporary.iterdir()) == []
