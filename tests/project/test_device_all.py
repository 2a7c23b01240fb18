"""The one command for a GPU (benchmarks/device/all.py): what hangs is ended, kernels come and go, new tests run first."""

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tools.runs import recorded

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("device_all", ROOT / "benchmarks" / "device" / "all.py")
assert SPEC is not None
assert SPEC.loader is not None
everything = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(everything)


@pytest.fixture
def run(tmp_path):
    return everything.Run(argparse.Namespace(out=tmp_path, seconds=60.0, cache="", rehearse=None))


@pytest.mark.slow
def test_a_command_that_does_not_end_is_ended_with_what_it_started(run) -> None:
    child = "import time; print('child', flush=True); time.sleep(100)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    begin = time.monotonic()
    status, text = run.do("log", [sys.executable, "-c", parent], 3)
    assert (status, text.splitlines()[0]) == (None, "child")
    assert time.monotonic() - begin < 20
    assert run.do("log", [sys.executable, "-c", "print('next'); raise SystemExit(3)"], 30) == (3, "next\n")


def test_kernels_of_an_archive_are_known_and_the_others_are_packed(tmp_path) -> None:
    elsewhere, here, again = (tmp_path / name for name in ("elsewhere", "here", "again"))
    elsewhere.mkdir()
    (elsewhere / "a.kernel").write_bytes(b"a")
    (elsewhere / ".lock-a").write_bytes(b"")
    assert everything.unpack(tmp_path / "missing", here) == set()
    known = everything.unpack(elsewhere, here)
    assert known == {"a.kernel"}
    (here / "cubins" / "b.kernel").write_bytes(b"b")
    assert everything.pack(here / "cubins", known, tmp_path / "new.tar.xz") == 1
    assert everything.unpack(tmp_path / "new.tar.xz", again) == {"b.kernel"}
    assert (again / "cubins" / "b.kernel").read_bytes() == b"b"


@pytest.mark.slow
@pytest.mark.needs("cuda")  # what --device cuda imports
def test_tests_that_no_recorded_run_has_passed_go_first() -> None:
    command = [
        sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--device", "cuda",
        "--gpus", "1", "--unseen-first", "tests/kernel/test_folds.py", "tests/kernel/test_accumulate.py",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    # Its status is 1 where another test makes a segment of shared memory meanwhile, which it takes for one left over.
    assert done.returncode in (0, 1), done.stderr
    tests = [line.partition("[")[0].partition("::") for line in done.stdout.splitlines() if "::" in line]
    _, passed = recorded()["cuda"]
    known = [(file, test) in passed for file, _, test in tests]
    assert len(known) > 20
    assert known == sorted(known)
