"""What the ranks of a job see, and how the job ends, when a process dies, leaves, or loses its launcher.

Programs are started as `launch` and a stand-in for torchrun do it. Every wait here is bounded; nothing sleeps.
"""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import comm_ranks
import pytest

from peertile.comm.launcher import spawn
from peertile.comm.rendezvous import serve
from peertile.comm.supervisor import JobReport, Output, RankEnd, free_port, launch
from peertile.errors import ArgumentError, PeerFailed, UsageError

TIMEOUT_S = 60  # what can take longer than a second says so itself
SLOW = partial(pytest.param, marks=pytest.mark.slow)
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
LEFT = "left the group: its program ended normally"


def write(folder, body):
    path = Path(folder) / "program.py"
    path.write_text(
        "import os, signal, sys, threading, time\nfrom peertile.comm.launcher import init, program, run, spawn\n" + body
    )
    return str(path)


def plain(folder, body):
    """A program that does not use peertile: it starts quickly."""
    path = Path(folder) / "plain.py"
    path.write_text(body)
    return str(path)


def start(path, ranks, **options):
    return launch([sys.executable, path], ranks, timeout_s=TIMEOUT_S, **options)


def causes(report):
    return {end.rank: (end.status, end.cause) for end in report.ends}


def torchrun(path, ranks, port, *, only=None, **variables):
    """Starts ranks, or `only` one of them, as torchrun does: its variables, one job id, one port."""
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
    common |= {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}
    return [
        subprocess.Popen(
            [sys.executable, path],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | variables,
            **PIPES,
        )
        for rank in (range(ranks) if only is None else [only])
    ]


def ends(processes):
    """(status, stdout, stderr) of each; nothing is left, whatever happens."""
    try:
        found = []
        for process in processes:
            out, err = process.communicate(timeout=TIMEOUT_S)
            found.append((process.returncode, out, err))
        return found
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def last_line(text):
    return text.strip().rpartition("\n")[2]


# A rank fails


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "victim"), [(2, 1), SLOW(2, 0), SLOW(4, 0), SLOW(4, 1)])
@pytest.mark.feature("S5", "cpu")
def test_a_killed_rank_ends_the_waits_of_the_others(ranks, victim, tmp_path):
    path = write(
        tmp_path,
        f"""
group = init()
began = time.monotonic()
try:
    group.barrier("all have joined")
    if group.rank == {victim}:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier("never")
except Exception as error:
    assert time.monotonic() - began < 5
    pid = group.pids[{victim}]
    assert str(error) == f"rank {victim} failed: its process {{pid}} ended without leaving the group"
    assert str(group.failure()) == str(error)
    assert [state.name for state in group.states()][{victim}] == "DEAD" or {victim} == 0
    sys.exit(7)
""",
    )
    report = start(path, ranks)
    expected = dict.fromkeys(range(ranks), (7, "exited with status 7"))
    expected[victim] = (137, "ended by SIGKILL")
    assert causes(report) == expected
    assert report.status in (7, 137)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, SLOW(0)])
def test_an_uncaught_exception_reaches_the_others_and_the_launcher(victim, tmp_path, capfd):
    path = write(
        tmp_path,
        f"""
group = init()
if group.rank == {victim}:
    raise ValueError("bad input")
group.barrier("never")
""",
    )
    report = start(path, 3)
    text = f"PeerFailed: rank {victim} failed: ValueError: bad input"
    expected = dict.fromkeys(range(3), (1, text))
    expected[victim] = (1, "ValueError: bad input")
    assert causes(report) == expected
    assert report.status == 1
    assert (report.first_failure.rank, report.first_failure.cause) == (victim, "ValueError: bad input")
    assert report.summary().splitlines()[0] == f"rank {victim} ended with status 1: ValueError: bad input"
    assert capfd.readouterr().err.count("Traceback") >= 1


@pytest.mark.slow
def test_the_status_is_that_of_the_rank_that_failed_first(tmp_path):
    path = write(
        tmp_path,
        """
@program
def main(group):
    if group.rank == 1:
        sys.exit(3)
    group.barrier("never")
run(main)
""",
    )
    report = start(path, 3)
    assert (report.status, report.first_failure.rank) == (3, 1)
    assert causes(report)[0] == (1, "PeerFailed: rank 1 failed: SystemExit: 3")


@pytest.mark.slow
def test_a_rank_that_ends_normally_does_not_end_the_job(tmp_path):
    path = write(
        tmp_path,
        """
group = init()
part = group.subgroup([1, 2])
if group.rank == 0:
    sys.exit()
print(part.rank)
""",
    )
    assert start(path, 3).status == 0


@pytest.mark.slow
@pytest.mark.parametrize("leaver", [0, 1])
def test_who_waits_for_a_rank_that_left_is_told_so(leaver, tmp_path):
    path = write(
        tmp_path,
        f"""
group = init()
if group.rank == {leaver}:
    sys.exit()
try:
    group.barrier("never")
except Exception as error:
    assert str(error).startswith("rank {leaver} failed: {LEFT}"), error
    sys.exit(5)
""",
    )
    report = start(path, 3)
    expected = dict.fromkeys(range(3), (5, "exited with status 5"))
    expected[leaver] = (0, "ended normally")
    assert causes(report) == expected


MEET = """
from peertile.comm.control import RankState

def until_rank_0_has_left():
    end = time.monotonic() + 30
    while group.states()[0] is not RankState.LEFT:
        assert time.monotonic() < end
        os.sched_yield()

group = init()
pair = group.subgroup([1, 2])
"""


def meeting(folder, body):
    """How three ranks end that run `body`, two of them with a group of their own."""
    return causes(start(write(folder, MEET + body), 3))


def test_who_knocks_as_rank_0_leaves_does_not_end_the_rendezvous():
    server = serve(free_port(), "knocks", 2, 5)
    try:
        server._unlist()
        server._accept()  # what was seen in the same look at the sockets
        assert not server.finished
    finally:
        server.linger(0)
    assert server.finished


@pytest.mark.slow
@pytest.mark.sentence("PR-5")
def test_the_others_meet_after_the_rank_that_hosts_the_rendezvous_has_left(tmp_path):
    ended = meeting(
        tmp_path,
        """
if group.rank == 0:
    sys.exit()
until_rank_0_has_left()
for k in range(20):
    assert pair.exchange(bytes([group.rank, k]), "after") == [bytes([1, k]), bytes([2, k])]
""",
    )
    assert ended == dict.fromkeys(range(3), (0, "ended normally"))


@pytest.mark.slow
def test_a_second_job_on_the_port_begins_while_the_first_still_meets(tmp_path):
    ended = meeting(
        tmp_path,
        """
if group.rank != 0:
    until_rank_0_has_left()
    pair.barrier("rank 0 is on its way into the next job")
group.close()
again = init()
assert again is not group
assert again.exchange(bytes([again.rank]), "again") == [b"\\0", b"\\1", b"\\2"]
""",
    )
    assert ended == dict.fromkeys(range(3), (0, "ended normally"))


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_leave_and_join_again_need_not_be_equally_quick(tmp_path, late):
    path = write(
        tmp_path,
        f"""
group = init()
for turn in range(8):
    assert group.exchange(bytes([group.rank, turn]), "turn") == [bytes([rank, turn]) for rank in range(3)]
    if group.rank == {late}:
        end = time.monotonic() + 0.03
        while time.monotonic() < end:
            os.sched_yield()
    group.close()
    group = init()
if group.rank == 0:  # of the jobs before nothing is left
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("peertile-coordinator") <= 2 and names.count("peertile-monitor") == 1, names
""",
    )
    assert causes(start(path, 3)) == dict.fromkeys(range(3), (0, "ended normally"))


@pytest.mark.slow
@pytest.mark.sentence("PR-5")
def test_who_still_meets_when_the_host_of_the_rendezvous_stays_no_longer_is_told(tmp_path):
    ended = meeting(
        tmp_path,
        """
import peertile.comm.launcher as launcher
launcher._HOST_LINGER_S = 0.05
if group.rank == 0:
    sys.exit()
end = time.monotonic() + 30
try:
    while time.monotonic() < end:
        pair.barrier("again")
except Exception as error:
    said = "left the group: its program ended normally, and it hosted the rendezvous"
    assert str(error) == f"rank 0 failed: {said}", error
    sys.exit(7)
""",
    )
    assert ended == {
        0: (0, "ended normally"),
        1: (7, "exited with status 7"),
        2: (7, "exited with status 7"),
    }


@pytest.mark.slow
def test_a_rank_that_waits_elsewhere_is_ended_after_the_grace(tmp_path):
    path = write(
        tmp_path,
        """
group = init()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
group.barrier("ready")
if group.rank == 1:
    os._exit(9)
threading.Event().wait()
""",
    )
    report = start(path, 3, grace_s=0.5)
    assert (report.status, report.first_failure.rank) == (9, 1)
    assert causes(report) == {
        0: (137, "ended by SIGKILL"),
        1: (9, "exited with status 9"),
        2: (137, "ended by SIGKILL"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("looks", [True, False], ids=["waitid", "no waitid"])
def test_children_of_a_rank_that_failed_are_ended_too(tmp_path, monkeypatch, looks):
    if not looks:
        monkeypatch.delattr(os, "waitid")
    path = plain(
        tmp_path,
        """
import os, subprocess, sys
read, write = os.pipe()
child = [sys.executable, "-c", "import os, threading; os.write(1, b'x'); threading.Event().wait()"]
subprocess.Popen(child, stdout=write)
os.read(read, 1)
os._exit(4)
""",
    )
    read, end = os.pipe()  # open in every descendant of the launcher that inherits standard error
    saved = os.dup(2)
    try:
        os.dup2(end, 2)
        report = start(path, 2)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(end)
    assert report.status == 4
    with os.fdopen(read) as pipe:
        assert pipe.read() == ""  # its end: nobody has it any more


# The launcher and the time limit


@pytest.mark.slow
def test_a_killed_launcher_takes_its_ranks_along(tmp_path):
    path = write(
        tmp_path,
        """
group = init()
group.barrier("all are here")
group.print("ready")
threading.Event().wait()
""",
    )
    code = f"import sys; from peertile.comm.supervisor import launch; launch([sys.executable, {path!r}], 2)"
    process = subprocess.Popen([sys.executable, "-c", code], **PIPES)
    assert process.stdout.readline() == "ready\n"
    process.kill()
    _, err = process.communicate(timeout=20)  # until the last rank, too, has closed its output
    assert err.count("peertile: the launcher of this rank is gone, so the rank ends") == 2


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_ranks(number, status, tmp_path):
    path = write(
        tmp_path,
        """
group = init()
group.barrier("all are here")
group.print("ready")
group.barrier("never") if group.rank else threading.Event().wait()
""",
    )
    code = (
        f"import sys; from peertile.comm.supervisor import launch; r = launch([sys.executable, {path!r}], 3); "
        "print(sorted(e.status for e in r.ends)); sys.exit(r.status)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], **PIPES, process_group=0)
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == status, err
    assert len(json.loads(out)) == 3
    assert 0 not in json.loads(out)
    assert err.count("KeyboardInterrupt") >= (1 if number == signal.SIGINT else 0)


SPAWNS = """
def main(group):
    group.barrier("all are here")
    group.print("ready") if group.rank == 0 else None
    group.barrier("never", timeout_s=20) if group.rank else sys.exit({status}) if {status} else threading.Event().wait(20)

if __name__ == "__main__":
    {before}
    try:
        spawn(main, 2)
    except BaseException as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "before", "ends"),
    [
        (signal.SIGTERM, "pass", (-signal.SIGTERM, "")),
        # nohup has it ignored, and all that it starts
        (signal.SIGHUP, "signal.signal(signal.SIGHUP, signal.SIG_DFL)", (-signal.SIGHUP, "")),
        (signal.SIGTERM, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))", (0, "SystemExit 5\n")),
        (signal.SIGINT, "pass", (0, "KeyboardInterrupt \n")),
    ],
)
def test_a_signal_to_who_spawns_ranks_is_its_own_once_they_have_ended(number, before, ends, tmp_path):
    path = write(tmp_path, SPAWNS.format(before=before, status=0))
    process = subprocess.Popen([sys.executable, path], **PIPES)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == ends, err


@pytest.mark.slow
def test_a_rank_that_ends_with_the_status_of_ctrl_c_is_a_rank_that_failed(tmp_path):
    path = write(tmp_path, SPAWNS.format(before="pass", status=130))
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (ended.returncode, ended.stdout) == (0, "ready\nPeerFailed rank 0 failed: SystemExit: 130\n")


@pytest.mark.slow
def test_a_hangup_that_is_ignored_ends_nothing(tmp_path):
    path = write(tmp_path, "group = init()\ngroup.print('ready')\nsys.stdin.readline()\n")
    code = (
        f"import signal, sys; from peertile.comm.supervisor import launch; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        f"sys.exit(launch([sys.executable, {path!r}], 1).status)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], **PIPES)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate("go on\n", timeout=20)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.slow
def test_ctrl_c_ends_ranks_that_are_threads(tmp_path):
    path = write(
        tmp_path,
        """
from peertile.comm.group import RankModel
def main(group):
    group.barrier()
    group.print("ready")
    try:
        group.barrier("never", timeout_s=20) if group.rank < 2 else threading.Event().wait(20)
    finally:
        group.print("over")
run(main, ranks=3, model=RankModel.THREADS)
""",
    )
    process = subprocess.Popen([sys.executable, path], **PIPES)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (-signal.SIGINT, "over\n")
    assert last_line(err) == "KeyboardInterrupt"


def test_a_job_may_have_a_time_limit(tmp_path):
    path = plain(tmp_path, "import threading; threading.Event().wait()")
    report = launch([sys.executable, path], 2, timeout_s=0.3)
    assert report.timed_out
    assert causes(report) == dict.fromkeys(range(2), (143, "ended by SIGTERM"))


def test_labels_name_the_rank_of_each_line(tmp_path, capfd):
    path = plain(tmp_path, "import sys; print('one\\ntwo'); print('oops', file=sys.stderr)")
    report = start(path, 2, output=Output(labels=True))
    assert report.status == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] one", "[rank 0] two", "[rank 1] one", "[rank 1] two"]
    assert sorted(err.splitlines()) == ["[rank 0] oops", "[rank 1] oops"]


def test_labels_that_nobody_reads_hold_no_rank_up(tmp_path, monkeypatch, capfd):
    path = plain(tmp_path, "while True: print('x' * 9999)")
    read, write = os.pipe()
    os.close(read)
    with io.TextIOWrapper(io.FileIO(write, "w"), write_through=True) as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        report = launch([sys.executable, path], 1, timeout_s=TIMEOUT_S, output=Output(labels=True))
    assert causes(report) == {0: (1, "exited with status 1")}
    assert "[rank 0] BrokenPipeError: [Errno 32] Broken pipe" in capfd.readouterr().err


def test_labels_show_what_the_terminal_cannot_write(tmp_path, monkeypatch):
    path = plain(tmp_path, "import sys; sys.stdout.buffer.write('caf\\u00e9\\n'.encode())")
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    report = launch([sys.executable, path], 1, timeout_s=TIMEOUT_S, output=Output(labels=True))
    assert (report.status, shown.buffer.getvalue()) == (0, b"[rank 0] caf\\xe9\n")


def test_a_job_needs_a_rank():
    with pytest.raises(ArgumentError) as caught:
        launch(["true"], 0)
    assert str(caught.value) == "number of ranks: expected at least 1, got 0"


def test_a_command_that_does_not_exist_leaves_nothing():
    with pytest.raises(FileNotFoundError):
        launch(["/nonexistent/program"], 2)


def test_the_first_failure_is_one_that_no_other_rank_caused():
    blames, origin = RankEnd(0, 1, "PeerFailed: …", peer=2), RankEnd(2, 1, "ValueError: x")
    stopped = RankEnd(1, 143, "ended by SIGTERM", stopped=True)
    report = JobReport(1, (blames, stopped, origin))
    assert report.first_failure is origin
    assert JobReport(1, (blames, stopped)).first_failure is blames
    assert JobReport(0, (RankEnd(0, 0, "ended normally"),)).first_failure is None


# Other launchers, and ranks that do not come


@pytest.mark.sentence("PR-1")
@pytest.mark.slow
@pytest.mark.any_device
@pytest.mark.native_only
@pytest.mark.feature("D1", "cpu")
def test_ranks_of_torchrun_join(tmp_path):
    path = write(
        tmp_path,
        """
group = init()
if group.rank == 0:
    import socket
    socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))).close()  # torchrun's own store fits beside it
print(group.exchange(b"%d" % group.rank, "ranks"), group.local_rank)
""",
    )
    expected = [(0, f"[b'0', b'1', b'2'] {rank}\n", "") for rank in range(3)]
    assert ends(torchrun(path, 3, free_port())) == expected


@pytest.mark.slow
def test_two_jobs_on_one_port_are_apart_by_their_ids(tmp_path):
    path = write(tmp_path, "group = init()\nprint(group.exchange(os.environ['JOB'].encode(), 'job'))\n")
    port = free_port()
    jobs = [torchrun(path, 2, port, TORCHELASTIC_RUN_ID=name, JOB=name) for name in "ab"]
    expected = [(0, "[b'a', b'a']\n", "")] * 2 + [(0, "[b'b', b'b']\n", "")] * 2
    assert ends(jobs[0] + jobs[1]) == expected


@pytest.mark.slow
@pytest.mark.feature("S5", "cpu")
def test_ranks_that_do_not_join_are_named(tmp_path):
    path = write(tmp_path, "print('started', flush=True)\ninit()")
    port = free_port()
    patient = torchrun(path, 4, port, only=2, PEERTILE_WAIT_TIMEOUT_S="20")
    assert patient[0].stdout.readline() == "started\n"
    found = ends(patient + torchrun(path, 4, port, only=0, PEERTILE_WAIT_TIMEOUT_S="0.5"))
    text = "ranks 1, 3 of 4 did not join within 0.5 s (PEERTILE_WAIT_TIMEOUT_S)"
    for rank, (status, _, err) in zip((2, 0), found, strict=True):
        assert (status, last_line(err)) == (1, f"peertile.errors.WaitTimeout: rank {rank} cannot join: {text}")


@pytest.mark.slow
def test_a_missing_rank_0_is_named(tmp_path):
    path = write(tmp_path, "init(port=8361)")
    ((_, _, err),) = ends(torchrun(path, 2, free_port(), only=1, PEERTILE_WAIT_TIMEOUT_S="0.3"))
    assert last_line(err) == (
        "peertile.errors.WaitTimeout: rank 1: rank 0 did not open the rendezvous on port 8361 within 0.3 s "
        "(PEERTILE_WAIT_TIMEOUT_S); was it started, with the same port?"
    )


@pytest.mark.slow
def test_a_rank_that_comes_twice_is_refused(tmp_path):
    path = write(tmp_path, "group = init()\nprint('in', flush=True)\nsys.stdin.read()\n")
    port = free_port()
    job = torchrun(path, 2, port)
    assert [process.stdout.readline() for process in job] == ["in\n", "in\n"]
    # Rank 0 last: once it has ended it waits for the others, whose input ends when they are waited for.
    found = ends(torchrun(path, 2, port, only=1) + job[::-1])
    assert last_line(found[0][2]) == (
        f"peertile.errors.SymmetryError: rank 1 cannot join: rank 1 has joined this job already as process {job[1].pid}"
    )
    assert found[1:] == [(0, "", "")] * 2


@pytest.mark.slow
def test_ranks_that_disagree_about_their_number_are_refused(tmp_path):
    path = write(tmp_path, "rank = int(os.environ['R'])\ninit(rank=rank, ranks=2 + rank, port=int(os.environ['P']))\n")
    port = str(free_port())
    processes = [subprocess.Popen([sys.executable, path], env=os.environ | {"R": r, "P": port}, **PIPES) for r in "01"]
    text = "ranks disagree about the number of ranks: rank 0: 2; rank 1: 3"
    for rank, (status, _, err) in enumerate(ends(processes)):
        assert (status, last_line(err)) == (1, f"peertile.errors.SymmetryError: rank {rank} cannot join: {text}")


@pytest.mark.slow
def test_a_port_in_use_by_another_job_is_refused():
    port = free_port()
    server = serve(port, "one", 2, 0.2)
    with pytest.raises(UsageError) as caught:
        serve(port, "one", 2, 0.2)
    assert str(caught.value) == (
        f"rendezvous on port {port}: another job of this user is using it (Address already in use); "
        "pass another port= to init, or set PEERTILE_MASTER_PORT"
    )
    server.join(5)


# Programs that start their own ranks


@pytest.mark.slow
def test_run_executes_the_program_again_for_each_rank(tmp_path):
    path = write(
        tmp_path,
        """
@program
def main(group):
    return group.exchange(sys.argv[1].encode(), "arguments")

if __name__ == "__main__":
    os.write(1, f"{run(main, ranks=3)}\\n".encode())  # whole lines, whatever the buffering
""",
    )
    done = subprocess.run([sys.executable, path, "hi"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert sorted(done.stdout.splitlines()) == ["None"] + ["[b'hi', b'hi', b'hi']"] * 3


@pytest.mark.slow
def test_run_exits_with_the_status_of_the_first_failure(tmp_path):
    path = write(
        tmp_path,
        """
@program
def main(group):
    if group.rank == 1:
        raise ValueError("no")
    group.barrier("never")

run(main, ranks=2)
""",
    )
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "rank 1 ended with status 1: ValueError: no\n"
        "rank 0 ended with status 1: PeerFailed: rank 1 failed: ValueError: no\n"
    )


@pytest.mark.slow
def test_functions_of_the_main_program_can_be_spawned(tmp_path):
    path = write(
        tmp_path,
        """
class Box:
    def __init__(self, value):
        self.value = value

def work(group, box):
    return Box(group.rank + box.value)

if __name__ == "__main__":
    print([type(b) is Box and b.value for b in spawn(work, 2, (Box(10),))])
""",
    )
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.stdout, done.stderr) == ("[10, 11]\n", "")


@pytest.mark.slow
def test_a_spawned_rank_that_is_killed_is_named():
    with pytest.raises(PeerFailed) as caught:
        spawn(comm_ranks.killed, 3, (1,), timeout_s=TIMEOUT_S)
    assert str(caught.value) == "rank 1 failed: ended by SIGKILL"


@pytest.mark.slow
@pytest.mark.parametrize("order", ["collect", "exit"])
def test_f101_ends_are_clean_when_groups_outlive_their_peers(order, tmp_path):
    path = write(
        tmp_path,
        f"""
group = init()
kept = [group, group.subgroup([0, 1])]
group.barrier()
if {order!r} == "collect":
    del kept
""",
    )
    for status, out, err in ends(torchrun(path, 2, free_port())):
        assert (status, out, err) == (0, "", "")


@pytest.mark.slow
@pytest.mark.feature("D1", "cpu")
def test_a_program_that_spawns_wherever_it_is_imported_does_not_start_ranks_without_an_end(tmp_path):
    path = write(tmp_path, "def main(group):\n    pass\n\nspawn(main, 2)\n")
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert re.fullmatch(
        r"peertile\.errors\.PeerFailed: rank [01] failed: UsageError: spawn: called while a rank imports the program "
        r"that has spawned it; call it under `if __name__ == \"__main__\":`",
        last,
    ), ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs a socket that keeps writes apart")
@pytest.mark.feature("D1", "cpu")
def test_what_a_rank_says_of_an_uncaught_exception_does_not_mix_with_what_others_say(tmp_path):
    path = write(tmp_path, "init()\ntry:\n    [][0]\nexcept IndexError:\n    raise ValueError('bad data')\n")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ended = subprocess.run([sys.executable, path], stderr=theirs, timeout=TIMEOUT_S)
        ours.setblocking(False)
        text = ours.recv(1 << 16).decode()
        with pytest.raises(BlockingIOError):
            ours.recv(1)
    assert ended.returncode == 1
    assert text.startswith("Traceback (most recent call last):\n")
    assert "IndexError: list index out of range\n\nDuring handling of the above exception, another" in text
    assert text.endswith("ValueError: bad data\n")
