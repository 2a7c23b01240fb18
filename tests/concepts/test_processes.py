"""Sentences of docs/concepts/processes.md that no other test shows: memory that one rank lacks, offsets, waiting."""

import os
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.comm.supervisor import launch
from peertile.config import config
from peertile.errors import AllocationError, PeertileError, WaitTimeout
from peertile.runtime import registry

HEAP = 1 << 20


def spawn(function, ranks, *args, model=pt.RankModel.THREADS):
    return pt.spawn(function, ranks, args, model=model, timeout_s=100)


class Lacking:
    """The device of a rank, which has no memory any more."""

    def __init__(self, device):
        self._device = device

    def __getattr__(self, name):
        return getattr(self._device, name)

    def asarray(self, source):
        raise AllocationError("no room on this rank")


CHANNELS = {
    "signal": lambda heap: heap.signal(slots=3),
    "counter": lambda heap: heap.counter(slots=3),
    "barrier": lambda heap: heap.barrier(programs=3),
    "mailbox": lambda heap: heap.mailbox(tile=8, dtype=pt.f32, programs=3, links=pt.Links.ring(heap.group.size)),
}


@pytest.mark.native_only
@pytest.mark.any_device
@pytest.mark.sentence("PR-22")
@pytest.mark.parametrize("name", CHANNELS)
def test_where_one_rank_lacks_memory_every_rank_raises_and_nothing_of_the_object_is_left(name):
    def lacks(group):
        with pt.SymmetricHeap(group, size_bytes=HEAP) as heap:
            device, before = heap.device, list(heap._arena.free)
            if group.rank == 1:
                heap.device = Lacking(device)
            with pytest.raises(PeertileError) as caught:
                CHANNELS[name](heap)
            heap.device = device
            assert heap._arena.free == before
            assert heap._objects == {}
            assert heap._channels == []
            assert group.failure() is None
            CHANNELS[name](heap)  # and there is room again
        return type(caught.value).__name__, str(caught.value)

    there = ("PeerFailed", "rank 1 failed: AllocationError: no room on this rank")
    assert spawn(lacks, 3) == [there, ("AllocationError", "no room on this rank"), there]


OBJECTS = (
    lambda heap, size: heap.empty((size,), pt.u8),
    lambda heap, size: heap.signal(size % 7 + 1),
    lambda heap, size: heap.mailbox(tile=16, dtype=pt.f32, programs=size % 5 + 1),
)


@pytest.mark.any_device
@pytest.mark.sentence("PR-21")
@pytest.mark.parametrize("ranks", [1, 3])
def test_objects_lie_at_the_same_multiple_of_256_bytes_on_every_rank(ranks, seed):
    def allocates(group):
        """Offsets in this rank's heap of objects of random sizes, some of which are given back in between."""
        chosen = np.random.default_rng(seed)  # the same calls on every rank
        found, kept = [], []
        with pt.SymmetricHeap(group, size_bytes=HEAP) as heap:
            for _ in range(12):
                kind = chosen.integers(4)
                if kind == 3:
                    if kept:
                        heap.free(kept.pop(int(chosen.integers(len(kept)))))
                    continue
                item = OBJECTS[kind](heap, int(chosen.integers(1, 2000)))
                kept.append(item)
                found += [storage.address - heap.bases[group.rank] for storage in item.storages]
                assert all(storage.address % 256 == 0 for storage in item.storages)
        return found

    first, *others = spawn(allocates, ranks)
    assert first
    assert all(offset % 256 == 0 for offset in first)
    assert all(other == first for other in others)


# ---------------------------------------------------------------- where ranks come from


@pytest.mark.sentence("PR-4")
def test_the_launcher_picks_a_port_that_is_free(tmp_path, capfd):
    path = tmp_path / "plain.py"
    path.write_text(
        "import os, socket\nport = int(os.environ['MASTER_PORT'])\n"
        "if os.environ['RANK'] == '0':\n    socket.create_server(('127.0.0.1', port)).close()\nos.write(1, b'%d\\n' % port)"
    )
    report = launch([sys.executable, str(path)], 2, timeout_s=60)
    assert report.status == 0
    ports = capfd.readouterr().out.split()
    assert len(ports) == 2
    assert len(set(ports)) == 1


@pytest.mark.sentence("PR-1")
@pytest.mark.parametrize(("gpus", "local_rank", "ordinal"), [(4, 0, 0), (4, 3, 3), (4, 6, 2), (1, 5, 0)])
def test_a_rank_works_on_the_device_of_its_number_on_its_host(gpus, local_rank, ordinal, monkeypatch):
    opened = []
    monkeypatch.setattr(registry, "_registry", registry._Registry())
    monkeypatch.setattr("peertile.config._current", config()._replace(device="cuda"))
    monkeypatch.setattr(registry, "_cuda", lambda: SimpleNamespace(device_count=lambda: gpus))
    monkeypatch.setattr(registry, "open_device", lambda kind, number: opened.append((kind, number)) or "the device")
    registry.place_rank(local_rank)
    assert registry.current_device() == "the device"
    assert opened == [(pt.DriverKind.CUDA, ordinal)]


# ---------------------------------------------------------------- waiting


@pt.kernel
def waits(word: T.Peer):
    T.wait_eq(word.local, T.i32(1), index=(0,))


@pytest.mark.native_only
@pytest.mark.sentence("PR-12")
@pytest.mark.sentence("PR-30")
def test_a_thread_that_waits_sleeps_and_its_wait_ends_at_the_bound_of_the_configuration(monkeypatch):
    bound = 0.4
    monkeypatch.setattr("peertile.config._current", config()._replace(wait_timeout_s=bound))
    group = pt.init()
    with pt.SymmetricHeap(group, size_bytes=HEAP) as heap:
        word = heap.zeros((1,), pt.i32)
        launched = waits.grid(3)(word)
        start, used = time.monotonic(), time.process_time()
        with pytest.raises(WaitTimeout):
            launched.sync()
        waited, used = time.monotonic() - start, time.process_time() - used
        group.recover()
    assert waited >= bound
    assert used < waited / 2


@pt.kernel
def rounds(x: T.Peer, ready: T.Signal, ROUNDS: T.Const[int]):
    """Each rank waits for all others in every round."""
    for k in T.range(ROUNDS):
        T.st(x.local, k + 1, (0,), order=T.weak)
        ready.notify()
        ready.wait()
        for r in T.peers():
            T.assert_(T.ld(x.at(r), (0,), order=T.weak) == k + 1, "a rank is in another round")
        ready.notify()
        ready.wait()


@pytest.mark.native_only
@pytest.mark.sentence("PR-12")
def test_more_ranks_than_cores_make_progress():
    def meets(group):
        with pt.SymmetricHeap(group, size_bytes=HEAP) as heap:
            x, ready = heap.zeros((1,), pt.i64), heap.signal(slots=1)
            rounds.grid(1)(x, ready, ROUNDS=20).sync()
        return True

    assert all(spawn(meets, max(6, min(2 * (os.cpu_count() or 1), 12))))
