"""Messages with file descriptors, also where a process can open no more of them."""

import os
import resource
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from peertile.comm.frames import LOST, NO_ROOM, Reader, close_all, frame, send_some

PROGRAM = """
import os, resource, sys
import peertile as pt

group = pt.init()
kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]  # numbers below the bound that have nothing to do with us
group.barrier("before")
if group.rank in {short!r}:
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + {more}, 4096))
try:
    with pt.SymmetricHeap(group, 1 << 16) as heap:
        heap.zeros((4,), pt.f32)
    sys.stderr.write("no error")
except (pt.AllocationError, pt.PeerFailed) as error:
    print(f"{{group.rank}} {{type(error).__name__}}: {{error}}\\n", end="", flush=True)
    raise
"""


@contextmanager
def room_for(count):
    """This process can open so many more descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free, number = [], 0
    while len(free) < count + 1:
        if not os.path.exists(f"/proc/self/fd/{number}"):
            free.append(number)
        number += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("room", [0, 1])
def test_lost_descriptors_are_told_and_those_of_other_messages_are_not_taken_for_them(room):
    a, b = socket.socketpair()
    with a, b, open(os.devnull, "rb") as null, open(__file__, "rb") as here:
        reader, messages = Reader(b), []
        send_some(a, frame("none"))
        send_some(a, frame("two", (1, 2)), (null.fileno(), null.fileno()))
        send_some(a, frame("one", (1,)), (here.fileno(),))
        with room_for(room):
            while len(messages) < 2:
                messages += reader.read()
        while len(messages) < 3:
            messages += reader.read()
        assert messages[:2] == [("none", ()), ("two", (LOST, LOST))]
        text, (fd,) = messages[2]
        assert (text, os.path.sameopenfile(fd, here.fileno())) == ("one", True)
        close_all((LOST, fd))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("short", "more"), [((1,), 1), ((1,), 2), ((0,), 2), ((0,), 4), ((0, 1, 2), 3)])
@pytest.mark.feature("D2", "cpu")
def test_ranks_that_can_open_no_more_files_say_so(short, more, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(short=short, more=more))
    command = [sys.executable, "-m", "peertile", "run", str(path), "--ranks", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = sorted(ended.stdout.splitlines())
    assert [line.partition(" ")[0] for line in said] == ["0", "1", "2"], ended.stderr
    assert all(NO_ROOM in line or "Too many open files" in line for line in said), said


STAYS = """
import os, resource, sys, time
from pathlib import Path
import peertile as pt

group, folder = pt.init(), Path({folder!r})
group.barrier("before")
if group.rank == {short}:
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + {more}, 4096))
try:
    pt.SymmetricHeap(group, 1 << 16)
except (pt.AllocationError, pt.PeerFailed) as error:
    said = type(error).__name__
(folder / str(group.rank)).write_text(said) if group.rank != {short} else print(said, flush=True)
end = time.monotonic() + 20  # nobody leaves before all have been told: that it ends would tell them, too
while len(list(folder.iterdir())) < 2 and time.monotonic() < end:
    os.sched_yield()
assert len(list(folder.iterdir())) == 2
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("short", "more"), [(1, 1), (1, 2), (0, 2)])
@pytest.mark.feature("D2", "cpu")
def test_who_goes_on_without_descriptors_keeps_nobody_waiting(short, more, tmp_path):
    folder = tmp_path / "told"
    folder.mkdir()
    path = tmp_path / "program.py"
    path.write_text(STAYS.format(short=short, more=more, folder=str(folder)))
    command = [sys.executable, "-m", "peertile", "run", str(path), "--ranks", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stderr
    assert {end.read_text() for end in folder.iterdir()} <= {"PeerFailed", "AllocationError"}


JOINS = """
import os, resource, sys
import peertile as pt
from peertile.comm import rendezvous

def none_left():
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, 4096))

class Reader(rendezvous.Reader):
    def read(self):
        none_left()
        return super().read()

class Coordinator(rendezvous.Coordinator):
    def __init__(self, *given):
        super().__init__(*given)
        none_left()

if os.environ["RANK"] == "{short}":
    if {short} == 0:
        rendezvous.Coordinator = Coordinator
    else:
        rendezvous.Reader = Reader
try:
    pt.init().barrier("together")
except pt.PeertileError as error:
    print(f"{{os.environ['RANK']}} {{type(error).__name__}}: {{error}}\\n", end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.feature("D2", "cpu")
def test_a_rank_that_lacks_descriptors_to_join_tells_the_others_why(short, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(JOINS.format(short=short))
    command = [sys.executable, "-m", "peertile", "run", str(path), "--ranks", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = sorted(ended.stdout.splitlines())
    if short == 0:  # which hosts the rendezvous: once it has given up itself there is room again for some of the others
        host = "rank 0, which hosts the rendezvous: " + NO_ROOM
        refused = [f"{rank} WaitTimeout: rank {rank} cannot join: {host}" for rank in range(3)]
        heard = [
            f"{rank} PeerFailed: rank {other} failed: it could not join: {host}"
            for rank in (1, 2)
            for other in range(3)
        ]
        assert said[0] == refused[0], ended.stderr
        assert len(said) == 3
        assert set(said) <= {*refused, *heard}, ended.stderr
        return
    expected = [f"{rank} PeerFailed: rank 1 failed: it could not join: {NO_ROOM}" for rank in range(3)]
    expected[1] = f"1 AllocationError: rank 1 cannot join: {NO_ROOM}"
    assert said == expected, ended.stderr
