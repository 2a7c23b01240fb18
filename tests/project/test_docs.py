"""The code of README.md and docs/ runs as printed, and prints what the page says."""

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tools import blocks, docs

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {ROOT / page.path for page in docs.PAGES}
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").rglob("*.md")) - GENERATED)]
PROGRAMS = [
    pytest.param(
        program,
        id=f"{path.relative_to(ROOT)}:{program.name}",
        marks=[
            pytest.mark.slow,
            pytest.mark.gpus(program.ranks or 1),
            *([pytest.mark.cpu_only] if "ctypes.data" in program.code else []),  # memory of the host, on the host
        ],
    )
    for path in PAGES
    for program in blocks.programs(path)
]


def run(program: blocks.Program, folder: Path, device: str) -> subprocess.CompletedProcess[str]:
    (folder / program.name).write_text(program.code)
    start = [sys.executable, program.name]
    if program.ranks is not None:
        start = [sys.executable, "-m", "peertile", "run", program.name, "--ranks", str(program.ranks)]
        start += ["--device", device]
    env = os.environ | {"PEERTILE_WAIT_TIMEOUT_S": "20"}
    return subprocess.run(start, cwd=folder, env=env, capture_output=True, text=True, timeout=90, check=False)


CONSOLES = [
    pytest.param(block.code, id=f"{path.relative_to(ROOT)}:{block.line}", marks=pytest.mark.slow)
    for path in PAGES
    for block in blocks.blocks(path)
    if block.info == "console"
]


@pytest.mark.parametrize("code", CONSOLES)
def test_console_shows_what_the_command_prints(code) -> None:
    command, _, expected = code.partition("\n")
    name, *arguments = shlex.split(command.removeprefix("$ "))
    assert name == "peertile"
    start = [sys.executable, "-m", "peertile", *arguments]
    done = subprocess.run(start, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected.strip()


def test_discovery_finds_the_pages() -> None:
    assert {"README.md", "first-kernel.md", "memory-model.md"} <= {path.name for path in PAGES}
    assert len(PROGRAMS) >= 8


@pytest.mark.any_device
@pytest.mark.native_only
@pytest.mark.feature("U4", "cpu")
@pytest.mark.parametrize("program", PROGRAMS)
def test_code_of_a_page_runs_and_prints_what_the_page_says(program, device, tmp_path) -> None:
    done = run(program, tmp_path, device)
    assert done.returncode == 0, done.stdout + done.stderr
    if program.output is not None:
        shown = done.stdout.replace(f"{tmp_path}/", "").splitlines()
        assert [line.rstrip() for line in shown] == [line.rstrip() for line in program.output.splitlines()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_that_is_not_run_still_parses(path) -> None:
    for block in blocks.blocks(path):
        if block.info.startswith("python"):
            ast.parse(block.code)


def test_a_fence_says_what_is_done_with_its_code(tmp_path) -> None:
    page = tmp_path / "a-page.md"
    page.write_text(
        "```python\nx = 1\n```\n```python ranks=2\ny = 2\n```\n```text output\nhello\n```\n```python\nz = 3\n```\n"
        "```python notest: needs a GPU\nw = 4\n```\n"
    )
    assert blocks.programs(page) == [
        blocks.Program("a_page_example.py", "x = 1\n\nz = 3\n", None, None),
        blocks.Program("a_page_example1.py", "y = 2\n", 2, "hello\n"),
    ]


@pytest.mark.parametrize("info", ["python notest", "python notest:", "python ranks=x", "pycon", "text python"])
def test_a_fence_that_gives_no_reason_is_refused(tmp_path, info) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```{info}\nx = 1\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:1: expected"):
        blocks.programs(page)
