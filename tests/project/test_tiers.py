"""What tests/conftest.py promises: tiers deselect and never skip, the seed repeats a run, nothing is left behind."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import subprocess, sys
import pytest

def test_quick(): ...
@pytest.mark.slow
def test_slow(): ...
@pytest.mark.long
def test_long(): ...
@pytest.mark.long
def test_long_too(): ...
@pytest.mark.cuda
def test_gpu(device): ...
@pytest.mark.cuda2
def test_two_gpus(): ...
@pytest.mark.feature("K1", "cpu")
@pytest.mark.sentence("MM-1")
def test_marked(device): assert device in ("cpu", "cuda")
def test_seed(seed, rng): assert (seed, rng.integers(1 << 30)) == (0, 0)
def test_leaves_a_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
"""


@pytest.fixture
def tree(tmp_path) -> Path:
    """A project of its own with our conftest and our options."""
    (tmp_path / "tests").mkdir()
    text = (ROOT / "tests" / "conftest.py").read_text()
    assert "GRACE_S = 5.0" in text
    (tmp_path / "tests" / "conftest.py").write_text(text.replace("GRACE_S = 5.0", "GRACE_S = 0.5"))  # waited out below
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests" / "test_them.py").write_text(TESTS)
    return tmp_path


def pytest_run(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PEERTILE_TEST", "PYTEST"))}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])  # for what conftest takes from tools
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=60, check=False)


def names(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"^tests/test_them\.py::test_(\w+) PASSED", done.stdout, re.MULTILINE)


QUIETLY = ("-k", "not leaves and not seed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"quick", "slow", "marked"}),
        (("-m", "not slow and not long"), {"quick", "marked"}),
        (("-m", "long"), {"long", "long_too"}),
        (("-m", "slow"), {"slow"}),
        (("--device", "cuda"), {"gpu", "two_gpus"}),
        (("--device", "cuda", "-m", "cuda"), {"gpu"}),
        (("tests/test_them.py::test_long",), {"long"}),
        (("tests/test_them.py::test_quick", "tests"), {"quick", "slow", "marked"}),
        (("tests/test_them.py::test_long", "tests"), {"quick", "slow", "marked", "long"}),
    ],
    ids=lambda value: " ".join(value) or "suite" if isinstance(value, tuple) else "",
)
def test_a_tier_selects_its_tests_and_skips_none(tree, options, expected) -> None:
    done = pytest_run(tree, *QUIETLY, *options)
    assert (done.returncode, set(names(done))) == (0, expected), done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.slow
def test_the_seed_is_printed_and_repeats_order_and_numbers(tree) -> None:
    runs = [pytest_run(tree, "-k", "not leaves", "--seed", seed) for seed in ("1", "1", "2", "3")]
    assert all("peertile: --device cpu --seed" in done.stdout for done in runs)
    assert all(f"repeat with --seed {seed}" in done.stdout for done, seed in zip(runs, "1123", strict=True))
    failures = [re.search(r"assert \((\d+), .*", done.stdout) for done in runs]
    assert all(failures)
    shown = [match[0] for match in failures if match]
    assert shown[0] == shown[1] != shown[2]
    orders = [names(done) for done in runs]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) > 1


@pytest.mark.slow
def test_workers_of_one_run_agree_about_the_order(tree) -> None:
    done = pytest_run(tree, *QUIETLY, "-n", "2")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


@pytest.mark.slow
def test_a_process_left_behind_fails_the_run(tree) -> None:
    done = pytest_run(tree, "-k", "leaves")
    assert done.returncode == 1, done.stdout
    (pid,) = re.findall(r"process (\d+) is left: .*time\.sleep\(60\)", done.stdout)
    os.kill(int(pid), 9)


@pytest.mark.slow
def test_a_segment_left_behind_fails_the_run(tree) -> None:
    name = f"peertile-test-{os.getpid()}"
    (tree / "tests" / "test_them.py").write_text(
        f"from pathlib import Path\ndef test_leaves(): Path('/dev/shm/{name}').touch()\n"
    )
    done = pytest_run(tree)
    Path("/dev/shm", name).unlink()
    assert done.returncode == 1, done.stdout
    assert f"segment /dev/shm/{name} is left" in done.stdout


@pytest.mark.slow
def test_the_quick_tier_draws_a_few_cases_of_a_test_with_many_by_the_seed(tree) -> None:
    (tree / "tests" / "test_them.py").write_text(
        'import pytest\n@pytest.mark.parametrize("n", range(20))\ndef test_many(n): ...\n'
        '@pytest.mark.parametrize("n", range(2))\ndef test_few(n): ...\n'
    )
    quick = ("-m", "not slow and not long")
    runs = [set(re.findall(r"::(test_\w+\[\d+\]) PASSED", pytest_run(tree, *quick, "--seed", s).stdout)) for s in "112"]
    few = {"test_few[0]", "test_few[1]"}
    assert all(few <= run and len(run - few) == 2 for run in runs)
    assert runs[0] == runs[1] != runs[2]
    assert "22 passed" in pytest_run(tree).stdout
    assert "20 passed" in pytest_run(tree, *quick, "-k", "many").stdout  # asked for by name: all of them


@pytest.mark.slow
def test_what_passed_in_runs_that_are_named_goes_last_case_by_case(tree) -> None:
    (tree / "tests" / "test_them.py").write_text(
        'import pytest\n@pytest.mark.parametrize("n", range(6))\ndef test_case(n): ...\n'
    )
    for run, told in (
        ("one", {0: "passed", 1: "failed", 3: "passed", 4: "passed"}),
        ("two", {1: "passed", 4: "failed"}),
    ):
        lines = [
            json.dumps({"test": f"tests/test_them.py::test_case[{n}]", "when": "call", "outcome": outcome})
            for n, outcome in told.items()
        ]
        (tree / run).write_text("".join(f"{line}\n" for line in lines))
    done = pytest_run(tree, "--unseen-first", "--seen=one", "--seen=two")
    order = [int(n) for n in re.findall(r"test_case\[(\d)\] PASSED", done.stdout)]
    assert (set(order[:3]), set(order[3:])) == ({2, 4, 5}, {0, 1, 3}), done.stdout + done.stderr
