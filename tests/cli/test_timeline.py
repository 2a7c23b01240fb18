"""`peertile timeline`, and the timelines that `peertile run` and `peertile check` write."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peertile.cli.main import app_of
from peertile.errors import ArgumentError
from peertile.timelines.events import Event, Kind, Part
from peertile.timelines.trace import arrows_of, read_timeline, write_timeline

EXAMPLES = Path(__file__).parents[2] / "examples"
WAIT = Event(Kind.WAIT, "s: programs", "wait for ready", 2000, 6000, {"program": 3, "launch": 1, "at": "a.py:7"})
LAUNCH = Event(Kind.LAUNCH, "s", "meet", 1000, 7000, {"launch": 1, "programs": 4})


def command(*arguments):
    return CliRunner().invoke(app_of(["timeline"]), ["timeline", *map(str, arguments)])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "t.json"
    write_timeline(str(path), [Part(0, 1, "job", "cpu:0", "the host's", dropped=2, events=[LAUNCH, WAIT])])
    return path


def test_the_tables_say_what_each_rank_did(file):
    done = command(file)
    assert done.exit_code == 0
    assert "6.00 us in all" in done.stdout
    row = next(line for line in done.stdout.splitlines() if "6.00 us" in line and "│" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "0", "6.00 us", "0 ns", "0 ns", "0 ns", "0%", "1", "0", "2",
    ]  # fmt: skip
    assert "wait for ready" in done.stdout
    assert "a.py:7" in done.stdout


def test_the_summary_is_also_json_and_the_picture_a_page(file, tmp_path):
    picture, trace = tmp_path / "t.html", tmp_path / "again.json"
    done = command(file, "--json", "--longest", "0", "--html", picture, "--trace", trace, "--begin", "0.001")
    found = json.loads(done.stdout)
    assert (found["ns"], found["ranks"][0]["kernel_ns"], found["waits"]) == (6000, 6000, [])
    assert picture.read_text().startswith("<!DOCTYPE html>")
    assert read_timeline(str(trace))[0].events == read_timeline(str(file))[0].events


def test_what_cannot_be_is_refused(file, tmp_path):
    for arguments, message in (
        ((file, file), f"timeline: expected each rank once, got rank 0 again in {str(file)!r}"),
        (
            (file, "--html", tmp_path),
            f"timeline: --html: expected a file in a folder that is there, got {str(tmp_path)!r}",
        ),
        (
            (file, "--begin", 2, "--end", 1),
            "timeline: --end: expected more than --begin, which is 2 ms, got 1 ms",
        ),
        ((file, "--begin", "inf"), "timeline: --begin: expected a number of ms, got inf"),
        (
            (file, "--trace", os.devnull),
            f"timeline: --trace: expected a file in a folder that is there, got {os.devnull!r}",
        ),
        ((tmp_path / "no",), f"timeline: expected a file that a timeline was written to, got {str(tmp_path / 'no')!r}"),
    ):
        done = command(*arguments)
        assert isinstance(done.exception, ArgumentError)
        assert str(done.exception) == message


def peertile(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "peertile", *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=60, check=False, env={**os.environ, **env},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.feature("U5", "cpu")
def test_ranks_of_a_run_are_in_one_file(tmp_path):
    path = tmp_path / "run.json"
    done = peertile("run", EXAMPLES / "handshake.py", "--ranks", "2", "--timeline", path)
    assert done.returncode == 0, done.stderr
    parts = read_timeline(str(path))
    assert [(part.rank, part.ranks) for part in parts] == [(0, 2), (1, 2)]
    assert {arrow.target for arrow in arrows_of(parts) if arrow.source != arrow.target} == {0, 1}
    assert list(tmp_path.iterdir()) == [path]
    done = peertile("run", EXAMPLES / "vector_add.py", "--timeline", tmp_path)
    message = f"run: --timeline: expected a file in a folder that is there, got {str(tmp_path)!r}"
    assert (done.returncode, done.stderr) == (2, f"peertile: {message}\n")


KILLED = f"""
import os, signal, time
import peertile as pt
os.chdir("/")
group = pt.init()
x = pt.zeros(4, pt.f32)
pt.op.fill(x, 1).sync()
if group.rank == 1:
    while not os.path.exists(os.environ["PEERTILE_TIMELINE"] + ".rank1"):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.{signal.SIGKILL.name})
group.barrier("never")
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_what_it_had_done(tmp_path):
    program, path = tmp_path / "program.py", tmp_path / "run.json"
    program.write_text(KILLED)
    relative = os.path.relpath(path)
    assert peertile("run", program, "--ranks", "2", PEERTILE_TIMELINE=relative).returncode == 128 + signal.SIGKILL
    parts = read_timeline(str(path))
    assert [part.rank for part in parts] == [0, 1]
    assert all(any(event.name == "fill" for event in part.events) for part in parts)


@pytest.mark.slow
def test_a_process_of_its_own_writes_its_file(tmp_path):
    path = tmp_path / "own.json"
    done = subprocess.run(
        [sys.executable, EXAMPLES / "vector_add.py"], env={**os.environ, "PEERTILE_TIMELINE": str(path)}, timeout=60,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (part,) = read_timeline(str(path))
    assert any(event.kind is Kind.PROGRAM for event in part.events)
    assert list(tmp_path.iterdir()) == [path]


STARTS_RANKS = """
import peertile as pt
x = pt.zeros(4, pt.f32)  # in the process that starts the ranks, too
pt.run(lambda group: pt.op.fill(x, group.rank).sync(), ranks=2)
"""


@pytest.mark.slow
def test_ranks_that_a_program_starts_itself_are_in_one_file(tmp_path):
    program, path = tmp_path / "program.py", tmp_path / "run.json"
    program.write_text(STARTS_RANKS)
    done = subprocess.run(
        [sys.executable, program], env={**os.environ, "PEERTILE_TIMELINE": str(path)}, timeout=60, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [part.rank for part in read_timeline(str(path))] == [0, 1]
    assert sorted(tmp_path.iterdir()) == [program, path]


@pytest.mark.slow
def test_a_folder_that_is_not_there_is_told_of(tmp_path):
    path = tmp_path / "none" / "t.json"
    done = peertile("run", EXAMPLES / "vector_add.py", PEERTILE_TIMELINE=str(path))
    assert done.returncode == 1
    message = f"PEERTILE_TIMELINE: expected a file in a folder that is there, got {str(path)!r}"
    assert f"ArgumentError: {message}" in done.stderr


@pytest.mark.slow
@pytest.mark.feature("U5", "sim")
def test_the_schedule_of_a_fault_has_a_timeline(tmp_path):
    path = tmp_path / "check.json"
    done = peertile("check", EXAMPLES / "racy" / "lost_notify.py", "--schedules", "2", "--timeline", path)
    assert done.returncode == 1
    parts = read_timeline(str(path))
    assert [part.rank for part in parts] == [0, 1]
    never = [event for part in parts for event in part.events if event.info.get("unfinished")]
    assert any(event.kind is Kind.WAIT and "ready" in event.name for event in never)
    assert {part.clock for part in parts} == {"the simulated machine's, of which an event takes 1 us"}
