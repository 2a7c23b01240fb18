"""The disk cache: hits, single flight, corruption, size bound, disks that refuse."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.backends.cpu.util import K, exclusive

import peertile.backends.cache as cache_module
from peertile.backends.cache import SUFFIX, CacheStats, DiskCache, key_of
from peertile.backends.cpu.compile import compile_kernel
from peertile.backends.cpu.target import named_target
from peertile.dtypes import f32


@pytest.mark.feature("H17", "cpu")
def test_an_entry_is_made_once_and_found_by_another_process(tmp_path):
    made = []

    def make():
        made.append(1)
        return b"code"

    first = DiskCache(tmp_path, 1 << 20)
    assert [first.get("k", make) for _ in range(3)] == [b"code"] * 3
    assert first.stats == CacheStats(hits=2, misses=1)
    other = DiskCache(tmp_path, 1 << 20)
    assert other.get("k", make) == b"code"
    assert other.stats == CacheStats(hits=1)
    assert len(made) == 1


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 100])
@pytest.mark.feature("H17", "cpu")
def test_a_damaged_entry_is_made_again(tmp_path, damage):
    cache = DiskCache(tmp_path, 1 << 20)
    cache.get("k", lambda: b"code")
    (tmp_path / ("k" + SUFFIX)).write_bytes(damage)
    assert cache.get("k", lambda: b"again") == b"again"
    assert cache.stats == CacheStats(misses=2, corrupt=1)
    assert cache.get("k", lambda: b"never") == b"again"


def test_one_flipped_bit_is_damage(tmp_path):
    cache = DiskCache(tmp_path, 1 << 20)
    cache.get("k", lambda: b"code" * 100)
    path = tmp_path / ("k" + SUFFIX)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    assert cache.get("k", lambda: b"again") == b"again"


@pytest.mark.feature("H17", "cpu")
def test_threads_that_ask_at_once_wait_for_the_one_that_makes(tmp_path):
    cache = DiskCache(tmp_path, 1 << 20)
    inside, go_on = threading.Event(), threading.Event()
    made, results = [], []

    def make():
        made.append(1)
        inside.set()
        assert go_on.wait(30)
        return b"code"

    threads = [threading.Thread(target=lambda: results.append(cache.get("k", make))) for _ in range(4)]
    threads[0].start()
    assert inside.wait(30)
    for t in threads[1:]:
        t.start()
    while cache.stats.joins < 3:
        pass
    go_on.set()
    for t in threads:
        t.join(30)
    assert results == [b"code"] * 4
    assert len(made) == 1


MAKES = """
import sys
from pathlib import Path
from peertile.backends.cache import DiskCache

def make():
    print("making", flush=True)
    assert sys.stdin.readline() == "go on\\n"
    return b"code"

print(DiskCache(Path(sys.argv[1]), 1 << 20).get("k", make), flush=True)
"""


def maker(folder):
    return subprocess.Popen(
        [sys.executable, "-c", MAKES, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def never():
    raise AssertionError("made twice")


def asks(cache, make, results):
    """A thread that asks `cache`."""
    thread = threading.Thread(target=lambda: results.append(cache.get("k", make)))
    thread.start()
    return thread


@pytest.fixture
def waits(monkeypatch):
    """Set once somebody has found the lock taken."""
    waiting = threading.Event()
    pause = time.sleep
    monkeypatch.setattr(cache_module.time, "sleep", lambda s: (waiting.set(), pause(s))[1])
    return waiting


@pytest.mark.feature("H17", "cpu")
def test_processes_that_ask_at_once_wait_for_the_one_that_makes(tmp_path, waits):
    with maker(tmp_path) as other:
        assert other.stdout.readline() == "making\n"
        cache, results = DiskCache(tmp_path, 1 << 20), []
        thread = asks(cache, never, results)
        assert waits.wait(30)
        assert other.communicate("go on\n", timeout=30)[0] == "b'code'\n"
        thread.join(30)
    assert results == [b"code"]
    assert cache.stats == CacheStats(hits=1)
    assert [path.name for path in tmp_path.iterdir()] == ["k" + SUFFIX]  # no lock is left


@pytest.mark.feature("H17", "cpu")
def test_what_a_process_was_making_when_it_was_killed_is_made_by_who_waits(tmp_path, waits):
    with maker(tmp_path) as other:
        assert other.stdout.readline() == "making\n"
        cache, results = DiskCache(tmp_path, 1 << 20), []
        thread = asks(cache, lambda: b"ours", results)
        assert waits.wait(30)
        other.kill()
        thread.join(30)
    assert results == [b"ours"]
    assert cache.stats == CacheStats(misses=1)


@pytest.mark.feature("H17", "cpu")
def test_the_wait_for_another_process_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_OTHERS_S", 0.02)
    with maker(tmp_path) as other:
        assert other.stdout.readline() == "making\n"
        assert DiskCache(tmp_path, 1 << 20).get("k", lambda: b"ours") == b"ours"
        other.communicate("go on\n", timeout=30)


def test_an_interrupted_wait_for_another_process_leaves_nothing_open(tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    with maker(tmp_path) as other:
        assert other.stdout.readline() == "making\n"
        before = set(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(cache_module.time, "sleep", interrupt)
            with pytest.raises(KeyboardInterrupt):
                DiskCache(tmp_path, 1 << 20).get("k", never)
        assert set(os.listdir("/proc/self/fd")) == before
        other.communicate("go on\n", timeout=30)


def test_a_child_that_was_forked_while_an_entry_was_made_keeps_nobody_waiting(tmp_path):
    lock, held = tmp_path / ".lock-k", []

    def make():
        (locked,) = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == str(lock)]
        held.append(os.dup(int(locked)))  # what a child has: the same open file
        held.append(os.open(lock, os.O_RDWR))  # and one who waits
        return b"code"

    assert DiskCache(tmp_path, 1 << 20).get("k", make) == b"code"
    cache_module.fcntl.flock(held[1], cache_module.fcntl.LOCK_EX | cache_module.fcntl.LOCK_NB)
    for fd in held:
        os.close(fd)


def test_without_locks_between_processes_each_makes_its_own(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache_module.fcntl, "flock", refuse)
    assert DiskCache(tmp_path / "a", 1 << 20).get("k", lambda: b"ours") == b"ours"
    monkeypatch.setattr(cache_module, "fcntl", None)
    assert DiskCache(tmp_path / "b", 1 << 20).get("k", lambda: b"ours") == b"ours"


def test_a_failure_reaches_all_who_asked_and_is_not_kept(tmp_path):
    cache = DiskCache(tmp_path, 1 << 20)

    def fail():
        raise RuntimeError("no code")

    with pytest.raises(RuntimeError, match=r"^no code$"):
        cache.get("k", fail)
    assert cache.get("k", lambda: b"code") == b"code"


@pytest.mark.feature("H17", "cpu")
def test_what_was_used_longest_ago_goes_first(tmp_path):
    cache = DiskCache(tmp_path, 400)
    for n in range(3):
        cache.get(f"k{n}", lambda: b"x" * 90)
        os.utime(tmp_path / f"k{n}{SUFFIX}", (1000 + n, 1000 + n))
    cache.get("k0", lambda: b"never")  # now the newest
    cache.get("k3", lambda: b"x" * 90)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"k{n}{SUFFIX}" for n in (0, 2, 3)]
    assert cache.stats.evicted == 1


def test_the_folder_is_looked_at_once_in_a_64th_of_the_bound_and_the_bound_is_kept(tmp_path, monkeypatch):
    looks = []
    scan = os.scandir
    monkeypatch.setattr(cache_module.os, "scandir", lambda folder: (looks.append(1), scan(folder))[1])
    cache, bound = DiskCache(tmp_path, 64_000), 64_000
    for n in range(800):  # of 100 bytes each
        cache.get(f"k{n}", lambda: b"x" * 68)
        # listdir, as `iterdir` looks by scandir, too, from Python 3.14 on
        assert n % 50 or sum((tmp_path / name).stat().st_size for name in os.listdir(tmp_path)) <= bound
    assert 70 <= len(looks) <= 90
    assert cache.stats.evicted > 150
    for n in range(100):  # processes that make one entry each look as often
        DiskCache(tmp_path, bound).get(f"new{n}", lambda n=n: b"%068d" % n)
    assert 75 <= len(looks) <= 105
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= bound


def test_an_entry_beyond_the_bound_is_not_kept(tmp_path):
    cache = DiskCache(tmp_path, 100)
    assert cache.get("k", lambda: b"x" * 1000) == b"x" * 1000
    assert list(tmp_path.iterdir()) == []


def test_abandoned_temporary_files_are_deleted(tmp_path):
    old, new = tmp_path / ".making-old", tmp_path / ".making-new"
    old.write_bytes(b"")
    new.write_bytes(b"")
    os.utime(old, (1000, 1000))
    DiskCache(tmp_path, 1000).get("k", lambda: b"code")
    assert not old.exists()
    assert new.exists()


def test_a_bound_of_zero_turns_the_disk_off(tmp_path):
    cache = DiskCache(tmp_path / "none", 0)
    assert [cache.get("k", lambda: b"code") for _ in range(2)] == [b"code"] * 2
    assert not (tmp_path / "none").exists()
    assert cache.stats == CacheStats(misses=2)


def test_a_folder_that_cannot_be_made_is_no_failure(tmp_path):
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "folder", 1 << 20)
    assert cache.get("k", lambda: b"code") == b"code"


def test_keys_tell_parts_and_their_borders_apart():
    keys = {key_of(p) for p in [("ab", "c"), ("a", "bc"), ("abc",), ("c", "ab"), ()]}
    assert len(keys) == 5


# ---------------------------------------------------------------- kernels


def vector_add(tile=64):
    k = K("add", z=exclusive(f32, (tile,)))
    i = k.tile_index(k.z)
    t = k.load(k.z, i, (tile,))
    k.store(k.z, k.add(t, t), i)
    return k.done()


def test_equal_kernels_share_an_entry_and_targets_do_not(tmp_path):
    cache = DiskCache(tmp_path, 1 << 20)
    first, second = compile_kernel(vector_add(), cache=cache), compile_kernel(vector_add(), cache=cache)
    assert first == second
    assert cache.stats == CacheStats(hits=1, misses=1)
    other = compile_kernel(vector_add(), named_target("x86-64-v3"), cache)
    assert other.entry != first.entry
    assert compile_kernel(vector_add(128), cache=cache).entry != first.entry
    assert cache.stats == CacheStats(hits=1, misses=3)


_WITHOUT_LLVM = """
import sys
from pathlib import Path
from peertile.backends.cache import DiskCache
from peertile.backends.cpu.compile import compile_kernel
from tests.backends.test_cache import vector_add
before = set(sys.modules)
cache = DiskCache(Path(sys.argv[1]), 1 << 20)
compile_kernel(vector_add(), cache=cache)
print(cache.stats.hits, "llvmlite.binding" in set(sys.modules) - before)
"""


@pytest.mark.slow
def test_a_hit_loads_no_llvm(tmp_path):
    compile_kernel(vector_add(), cache=DiskCache(tmp_path, 1 << 20))
    out = subprocess.run(
        [sys.executable, "-c", _WITHOUT_LLVM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert out.stdout.split() == ["1", "False"]
