"""Which way the memory of a heap travels: what every rank can, what is forced, and what is said when it cannot be."""

import pytest

import peertile as pt
from peertile.comm.memory import PREFERENCE, RankFacts, check_reach, choose_path
from peertile.errors import ArgumentError, SymmetryError, UnsupportedError

FREE = tuple(kind.value for kind in PREFERENCE)


def facts(*shares, wanted=FREE, device="cuda:aa", atomics=True):
    return RankFacts(1, device, shares, atomics, wanted, "none here")


def test_facts_survive_their_way():
    there = facts("fd", "ipc", wanted=("fabric", "fd"))._replace(unreachable=("cuda:bb", "cuda:cc"))
    assert RankFacts.unpack(there.pack()) == there


@pytest.mark.feature("D3", "cpu")
@pytest.mark.parametrize(
    ("ranks", "path"),
    [
        ((("fabric", "fd", "ipc"), ("fabric", "fd", "ipc")), "fabric"),
        ((("fabric", "fd", "ipc"), ("fd", "ipc")), "fd"),
        ((("fd", "ipc"), ("ipc",)), "ipc"),
        ((("local",), ("local",)), "local"),
    ],
)
def test_the_best_way_that_all_can_is_taken(ranks, path):
    assert choose_path([facts(*shares) for shares in ranks]) is pt.ShareKind(path)


def test_f72_a_peer_that_cannot_be_reached_is_named_when_the_heap_is_made():
    """Four GPUs in two islands; every rank says the same, and a heap of one island is made."""
    islands = [("cuda:aa", "cuda:bb"), ("cuda:cc", "cuda:dd")]
    ranks = [
        facts("fd", device=device)._replace(unreachable=islands[1 - k])
        for k, island in enumerate(islands)
        for device in island
    ]
    with pytest.raises(UnsupportedError) as caught:
        check_reach(ranks)
    assert str(caught.value) == (
        "SymmetricHeap: expected devices that load and store each other's memory, got rank 0 on cuda:aa, which cannot "
        "reach rank 2 on cuda:cc. `peertile info` shows which pairs can; make heaps of subgroups of such ranks"
    )
    for part in (ranks[:2], ranks[2:], ranks[1:2]):
        check_reach(part)


def test_what_is_forced_does_not_fall_back():
    with pytest.raises(UnsupportedError) as caught:
        choose_path([facts("fd", "ipc", wanted=("fabric",)), facts("fabric", "fd", wanted=("fabric",))])
    assert str(caught.value) == (
        "SymmetricHeap: memory path: expected fabric, which rank 0 on cuda:aa cannot share by; it can by fd or ipc. "
        "`peertile info` says why; leave path= and PEERTILE_USE_VMM out to let every rank agree on one that works"
    )


def test_ranks_that_force_different_ways_are_told():
    with pytest.raises(SymmetryError) as caught:
        choose_path([facts("fd", "ipc", wanted=("fd",)), facts("fd", "ipc", wanted=("ipc",))])
    assert str(caught.value) == (
        "ranks disagree about the memory path: rank 0: fd; rank 1: ipc. path= and PEERTILE_USE_VMM must be the same on "
        "every rank"
    )


def test_a_path_is_a_share_kind():
    with pytest.raises(ArgumentError) as caught:
        pt.SymmetricHeap(pt.init(), 4096, path="fd")
    assert str(caught.value) == (
        "SymmetricHeap(path): expected ShareKind.FD, ShareKind.IPC, ShareKind.FABRIC, ShareKind.LOCAL or None, got 'fd'"
    )


def one_path(group, path):
    try:
        with pt.SymmetricHeap(group, 4096, path=pt.ShareKind(path)) as heap:
            return heap._memory.path.value
    except UnsupportedError as error:
        return str(error).partition(";")[0]


def test_a_way_that_the_device_lacks_is_refused_on_every_rank_and_the_group_goes_on():
    def both(group):
        return one_path(group, "ipc"), one_path(group, "fd")

    results = pt.spawn(both, 2, model=pt.RankModel.THREADS, timeout_s=30)
    refusal = "SymmetricHeap: memory path: expected ipc, which rank 0 on cpu:0 cannot share by"
    assert results == [(refusal, "fd")] * 2


def disagree(group):
    try:
        pt.SymmetricHeap(group, 4096, path=None if group.rank else pt.ShareKind.FD)
    except SymmetryError as error:
        return str(error)


def test_ranks_that_ask_for_different_ways_all_raise():
    said = pt.spawn(disagree, 2, model=pt.RankModel.THREADS, timeout_s=30)
    assert said[0] == said[1]
    assert said[0].startswith("ranks disagree about the memory path: rank 0: fd; rank 1: fabric or fd or ipc or local.")


@pytest.mark.parametrize(
    ("ranks", "atomic"),
    [
        ([("cuda:aa", True), ("cuda:bb", True)], True), ([("cuda:aa", True), ("cuda:bb", False)], False),
        ([("cuda:aa", False), ("cuda:aa", False)], True), ([("cuda:aa", False)], True),
    ],
)  # fmt: skip
def test_a_counter_needs_atomics_that_reach_every_other_device(ranks, atomic):
    with pt.SymmetricHeap(pt.init(), 1 << 16) as heap:
        heap._memory.facts = [facts("fd", device=device, atomics=native) for device, native in ranks]
        assert heap._memory.peer_atomics is atomic
        if atomic:
            assert heap.counter(slots=1).slots == 1
            return
        with pytest.raises(UnsupportedError) as caught:
            heap.counter(slots=1)
        assert str(caught.value) == (
            "SymmetricHeap.counter: expected GPUs whose atomics reach each other's memory, got a pair that has no "
            "native peer atomics; use a signal, whose words are stored, not added to"
        )


def test_an_allocation_that_ranks_disagree_about_takes_nothing_on_any():
    def main(group):
        found = []
        for disagrees in (False, True):
            with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
                if disagrees:
                    with pytest.raises(SymmetryError, match="ranks disagree about SymmetricHeap allocation"):
                        heap.empty((64 + 64 * group.rank,), pt.f32)
                first = heap.empty((64,), pt.f32)
                found.append((first.local.address - heap.bases[group.rank], heap._arena.in_use))
        return found

    for before, after in pt.spawn(main, 2, model=pt.RankModel.THREADS, timeout_s=60):
        assert before == after
