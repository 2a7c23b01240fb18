"""`peertile run`: statuses, output, Ctrl-C, and what is left (nothing)."""

import json
import os
import signal
import subprocess
import sys

import pytest

from peertile.cli.main import main

TIMEOUT_S = 60
HEAD = "import os, sys, threading\nfrom peertile.comm.launcher import init, program, run\n"


@pytest.fixture
def write(tmp_path):
    def write(body):
        path = tmp_path / "program.py"
        path.write_text(HEAD + body)
        return str(path)

    return write


def command(*arguments):
    return [sys.executable, "-m", "peertile", *arguments]


def peertile(*arguments):
    done = subprocess.run(
        command(*arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.feature("U2", "cpu")
def test_ranks_get_their_number_and_the_arguments(write):
    path = write("group = init()\nos.write(1, f'{group.rank}/{group.size} {sys.argv[1:]}\\n'.encode())\n")
    status, out, err = peertile("run", path, "--ranks", "2", "--", "-x", "two words")
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [f"{rank}/2 ['-x', 'two words']" for rank in range(2)]


@pytest.mark.slow
def test_one_rank_is_the_default(write):
    assert peertile("run", write("print(init().size)")) == (0, "1\n", "")


@pytest.mark.sentence("PR-1")
@pytest.mark.slow
def test_a_program_that_calls_run_joins_the_ranks_of_the_command(write):
    path = write("run(lambda group: group.print('size', group.size), ranks=2)\n")
    assert peertile("run", path, "-n", "2") == (0, "size 2\n", "")


@pytest.mark.slow
def test_labels(write):
    path = write("group = init()\ngroup.barrier()\nprint('here')\n")
    status, out, _ = peertile("run", path, "--ranks", "2", "--labels")
    assert (status, sorted(out.splitlines())) == (0, ["[rank 0] here", "[rank 1] here"])


FAILS = """
group = init()
if group.rank == 1:
    raise ValueError("bad input")
group.barrier("never")
"""


@pytest.mark.slow
def test_the_ranks_that_failed_are_shown_the_first_one_first(write):
    status, _, err = peertile("run", write(FAILS), "--ranks", "2")
    assert status == 1
    table = err[err.index("ranks that failed") :].splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table if line.startswith("│")]
    assert cells == [
        ["1", "1", "ValueError: bad input (first)"],
        ["0", "1", "PeerFailed: rank 1 failed: ValueError: bad input"],
    ]


@pytest.mark.slow
def test_brackets_and_colons_of_a_cause_are_no_markup(write):
    status, _, err = peertile("run", write(FAILS.replace("bad input", "[4] [/red] :x:")), "--ranks", "2")
    assert status == 1
    assert "│    1 │      1 │ ValueError: [4] [/red] :x: (first)" in err


@pytest.mark.slow
def test_json_is_all_that_is_on_standard_output(write):
    status, out, err = peertile("run", write("print('text')\n" + FAILS), "--ranks", "2", "--json")
    assert status == 1
    assert json.loads(out) == {
        "status": 1,
        "first_failure": 1,
        "ranks": [
            {"rank": 0, "status": 1, "cause": "PeerFailed: rank 1 failed: ValueError: bad input"},
            {"rank": 1, "status": 1, "cause": "ValueError: bad input"},
        ],
    }
    assert "text\n" in err


@pytest.mark.sentence("PR-35")
@pytest.mark.slow
@pytest.mark.feature("S5", "cpu")
def test_ctrl_c_ends_all_ranks(write):
    path = write("""
group = init()
group.barrier()
group.print("ready")
if group.rank:
    group.barrier("never")
threading.Event().wait()
""")
    process = subprocess.Popen(
        command("run", path, "--ranks", "3"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=20)  # its end means that no rank is left: they share its output
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nonexistent.py"], "run: PROGRAM: expected a Python file, got '/nonexistent.py', which is not a file"),
    ],
)
def test_refusals_are_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["peertile", "run", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert (caught.value.code, *capsys.readouterr()) == (2, "", f"peertile: {message}\n")


@pytest.mark.slow
def test_a_wrong_number_of_ranks_is_a_usage_error():
    status, out, err = peertile("run", __file__, "--ranks", "0")
    assert (status, out) == (2, "")
    assert "--ranks" in err
