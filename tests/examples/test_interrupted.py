"""The main job when something goes wrong in the middle: a killed rank, an exception, Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow


def ranks_of(launcher):
    """Process of each rank that `launcher` started."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(parent) == launcher:
            rank = next((v for v in variables if v.startswith(b"RANK=")), None)
            if rank is not None:
                found[int(rank[5:])] = int(entry.name)
    return found


class Job:
    """The main job under `peertile run`, in the middle of its training."""

    def __init__(self, program=None, ranks=4):
        command = [sys.executable, "-m", "peertile", "run", str(program or EXAMPLES / "digits_data_parallel.py")]
        self.process = subprocess.Popen(
            [*command, "--ranks", str(ranks)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for line in self.process.stdout:
            if line.startswith("training: 4 of"):
                break
        else:
            pytest.fail(self.process.communicate(timeout=30)[1])
        self.ranks = ranks_of(self.process.pid)
        assert sorted(self.ranks) == list(range(ranks))

    def end(self):
        """(status, standard error, seconds until the launcher ended); nothing of the job is left."""
        begin = time.monotonic()
        _, errors = self.process.communicate(timeout=60)
        seconds = time.monotonic() - begin
        for pid in self.ranks.values():
            assert not Path(f"/proc/{pid}").exists()
        assert not [p.name for p in Path("/dev/shm").iterdir() if "peertile" in p.name]
        return self.process.returncode, errors, seconds


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank_is_reported_by_every_other_within_five_seconds(victim):
    job = Job()
    os.kill(job.ranks[victim], signal.SIGKILL)
    status, errors, seconds = job.end()
    assert status == 128 + signal.SIGKILL
    assert seconds < 5
    assert errors.count(f"peertile.errors.PeerFailed: rank {victim} failed: ") == 3


def test_exception_in_one_rank_is_reported_by_every_other(tmp_path):
    program = tmp_path / "broken.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import digits_data_parallel as job\n"
        "import peertile as pt\n"
        "communicate, calls = job.Model.communicate, []\n"
        "def broken(self, box):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 40 and pt.init().rank == 1:\n"
        "        raise ValueError('bad data')\n"
        "    communicate(self, box)\n"
        "job.Model.communicate = broken\n"
        "pt.run(job.main)\n"
    )
    job = Job(program)
    status, errors, _ = job.end()
    assert status == 1
    assert errors.count("peertile.errors.PeerFailed: rank 1 failed: ValueError: bad data") == 3
    assert "ValueError: bad data" in errors


def test_interrupt_ends_every_rank():
    job = Job()
    job.process.send_signal(signal.SIGINT)
    status, _, seconds = job.end()
    assert status == 130
    assert seconds < 8
