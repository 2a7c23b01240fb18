"""Ordinary kernels are typed: a type checker in its strict mode has nothing to say about them."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def check(source: Path, cache: Path) -> str:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(cache), str(source)]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=240, check=False)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kernels_pass_a_strict_type_checker_and_mistakes_do_not(tmp_path):
    assert check(HERE / "typed_kernels.py", tmp_path / "cache") == ""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import peertile.language as T\n\n\n"
        "def kernel(z: T.Exclusive, x: T.Shared) -> None:\n"
        '    z.store(x.load((0,), (16,)) + "one")\n'
        "    z.lod()\n"
        "    T.exp(z)\n"
    )
    said = check(wrong, tmp_path / "cache")
    for text in (
        'wrong.py:5: error: Unsupported operand types for + ("Tile" and "str")',
        'wrong.py:6: error: "Exclusive" has no attribute "lod"',
        'wrong.py:7: error: Argument 1 to "exp" has incompatible type "Exclusive"',
    ):
        assert text in said
