"""Symmetric heap, signals, counters, barriers and mailboxes on native ranks: processes and threads."""

import numpy as np
import peer_ranks
import pytest

import peertile as pt
from peertile.errors import ArgumentError, LaunchError, PeerFailed, UsageError

pytestmark = pytest.mark.any_device

THREADS = pytest.param(pt.RankModel.THREADS, id="threads")


def both(ranks):
    """In both process models, with that many ranks or as many as a parameter says."""
    processes = pytest.param(pt.RankModel.PROCESSES, marks=pytest.mark.gpus(ranks), id="processes")
    return pytest.mark.parametrize("model", [processes, THREADS])


def spawn(function, ranks, *args, model=pt.RankModel.THREADS):
    return pt.spawn(function, ranks, args, model=model, timeout_s=100)


@pytest.mark.feature("P9", "cpu")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_mailbox_sums(ranks, depth):
    assert all(spawn(peer_ranks.box_sums, ranks, 1000, 4, depth, 3))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["i32", "i64", "f64", "bf16", "f16"])
def test_mailbox_of_every_kind_of_element(dtype):
    assert all(spawn(peer_ranks.box_sums, 3, 333, 2, 2, 2, dtype))


@pytest.mark.slow
@pytest.mark.feature("D2", "cpu")
@pytest.mark.gpus("ranks")
@pytest.mark.parametrize("ranks", [2, 4])
def test_mailbox_sums_over_processes(ranks):
    assert all(spawn(peer_ranks.box_sums, ranks, 5000, 8, 2, 5, model=pt.RankModel.PROCESSES))


@pytest.mark.sentence("SG-2")
@pytest.mark.sentence("SG-3")
@pytest.mark.sentence("MM-11")
@pytest.mark.sentence("MM-12")
@pytest.mark.feature("P6", "cpu")
@pytest.mark.feature("P1", "cpu")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_signals_gather(ranks):
    assert all(spawn(peer_ranks.gathers, ranks, 128))


@pytest.mark.slow
@pytest.mark.sentence("SG-10")
@pytest.mark.sentence("SG-11")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_counter_counts_many_to_one(ranks):
    assert spawn(peer_ranks.counts, ranks, 50) == [ranks] * ranks


def test_a_counter_never_goes_back():
    said = ["ran", *(f"assertion failed: `tally.{word}`: n: a counter only grows" for word in ("add", "wait")), "ran"]
    assert spawn(peer_ranks.negative_counts, 1) == [said]


@pytest.mark.sentence("SG-22")
@pytest.mark.sentence("SG-23")
@pytest.mark.feature("P7", "cpu")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_barrier_over_all_programs_of_all_ranks(ranks):
    assert all(spawn(peer_ranks.meets, ranks, 5, 4))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_put_to_one_peer_with_its_signal(ranks):
    assert all(spawn(peer_ranks.puts, ranks, 256))


@pytest.mark.native_only
@pytest.mark.sentence("PR-11")
@pytest.mark.sentence("SG-20")
def test_thousands_of_programs_pass_a_barrier_of_their_launch():
    group = pt.init()
    n = 4096
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        words = heap.zeros((n,), pt.i64)
        out = pt.full((n,), -1, pt.i64)
        peer_ranks.grid_barrier(out.partition(1), words).sync()
        assert out.numpy().tolist() == [(p + 1) % n for p in range(n)]


def test_two_launches_in_flight_wait_for_each_other():
    assert spawn(peer_ranks.two_in_flight, 1) == [[1, 1]]


@pytest.mark.sentence("MB-14")
@pytest.mark.sentence("PR-32")
@pytest.mark.sentence("PR-34")
@pytest.mark.sentence("SG-32")
@pytest.mark.feature("S5", "cpu")
@both("ranks")
@pytest.mark.parametrize("ranks", [2, 3])
def test_exception_in_rank_1_reaches_the_others_and_recovery_gives_right_sums(ranks, model):
    results = spawn(peer_ranks.fails_then_recovers, ranks, "exception", model=model)
    cause = "rank 1 failed: ValueError: the data of rank 1 is bad"
    assert results[1][0] == ("ValueError", "the data of rank 1 is bad")
    assert all(results[rank][0] == ("PeerFailed", cause) for rank in range(ranks) if rank != 1)
    assert all(second == ("PeerFailed", cause) for _, second in results)


@pytest.mark.sentence("MB-14")
@pytest.mark.slow
@pytest.mark.native_only
@both("ranks")
@pytest.mark.parametrize("ranks", [2, 3])
def test_wait_timeout_in_mid_round_reaches_every_rank_and_recovery_gives_right_sums(ranks, model, monkeypatch):
    if model is pt.RankModel.THREADS:
        monkeypatch.setattr("peertile.config._current", short_waits())
    else:
        monkeypatch.setenv("PEERTILE_WAIT_TIMEOUT_S", "1")
    results = spawn(peer_ranks.fails_then_recovers, ranks, "timeout", model=model)
    *kinds, last = [error[0] for error, _ in results]
    assert last == "PeerFailed"
    assert set(kinds) <= {"WaitTimeout", "PeerFailed"}
    assert "WaitTimeout" in kinds


def short_waits():
    from peertile.config import config

    return config()._replace(wait_timeout_s=1.0)


@pytest.mark.sentence("PR-31")
def test_wait_timeout_names_rank_program_line_slot_expected_and_seen(monkeypatch):
    monkeypatch.setattr("peertile.config._current", short_waits())
    results = spawn(peer_ranks.times_out, 2)
    kind, text, slot, expected = results[0]
    assert (kind, slot, expected) == ("WaitTimeout", 0, 1)
    first, *rest = text.splitlines()
    assert first.startswith(
        "wait for ready, slot 0: nothing came within 1 s; expected 1, last seen 0 (rank 0, program 0, "
    )
    assert first.endswith(" in wait_for")
    assert "ready.wait()" in "\n".join(rest)
    assert results[1][0] == "PeerFailed"
    assert results[1][1].startswith("rank 0 failed: WaitTimeout: wait for ready, slot 0")


@pytest.mark.native_only
@pytest.mark.sentence("PR-32")
@pytest.mark.slow
@pytest.mark.gpus("ranks")
@pytest.mark.parametrize("ranks", [2, 3])
def test_killed_rank_is_named_within_five_seconds(ranks, tmp_path):
    with pytest.raises(PeerFailed) as caught:
        spawn(peer_ranks.dies, ranks, 1, str(tmp_path), model=pt.RankModel.PROCESSES)
    assert caught.value.rank == 1
    assert "SIGKILL" in caught.value.cause
    # From the death to the error: how long processes take to start and to end is not the ranks' doing.
    late = {rank: float((tmp_path / str(rank)).read_text()) for rank in range(ranks) if rank != 1}
    assert max(late.values()) < 5


@pytest.mark.sentence("MM-46")
@pytest.mark.native_only
def test_ranks_with_different_grids_on_one_mailbox_are_told():
    results = spawn(peer_ranks.different_kernels, 2)
    assert {kind for kind, _ in results} <= {"SignatureMismatch", "PeerFailed"}
    assert "SignatureMismatch" in {kind for kind, _ in results}


@pytest.mark.sentence("PR-20")
@pytest.mark.feature("D2", "cpu")
def test_ranks_that_disagree_about_a_heap_or_tensor_all_raise():
    text = "ranks disagree about SymmetricHeap: rank 0: 'size_bytes=1048576'; rank 1: 'size_bytes=2097152'. "
    assert spawn(peer_ranks.unequal_sizes, 2) == [("SymmetryError", text + "It must be the same on every rank")] * 2
    text = "ranks disagree about SymmetricHeap allocation: rank 0: 'tensor f32[16]'; rank 1: 'tensor f32[17]'. "
    assert spawn(peer_ranks.unequal_tensors, 2) == [("SymmetryError", text + "It must be the same on every rank")] * 2


@pytest.mark.parametrize(
    ("left", "right"),
    [("zeros", "signal"), ("empty", "mailbox"), ("signal", "mailbox"), ("counter", "zeros"), ("barrier", "mailbox")],
)
def test_ranks_that_ask_for_different_kinds_of_objects_all_raise_and_stay_in_step(left, right):
    assert spawn(peer_ranks.unequal_kinds, 3, left, right) == ["told, and in step"] * 3


def test_objects_that_look_alike_are_freed_in_the_same_order_or_not_at_all():
    text = (
        "ranks disagree about SymmetricHeap.free: rank 0: \"free ['tensor f32[4] at 0']\"; "
        "rank 1: \"free ['tensor f32[4] at 512']\". It must be the same on every rank"
    )
    assert spawn(peer_ranks.frees_in_another_order, 2) == [("SymmetryError", text)] * 2


@pytest.mark.parametrize(("freed", "how"), [(True, "freed"), (False, "closed with its heap")])
def test_an_object_that_has_ended_is_never_touched_again(freed, how):
    said = spawn(peer_ranks.used_after_the_end, 3, freed)
    assert said[0] == said[1] == said[2]
    assert said[0] == [
        f"{use} was {how}; use it before that"
        for use in (
            "box_sum: mailbox f32[4] x 1 x 2",
            "Tensor.numpy: tensor f32[64] of the next rank",
            "Tensor.copy_from: tensor f32[64] of the next rank",
            "SymmetricTensor.at: tensor f32[64]",
            "Tensor.__dlpack__: tensor f32[64]",
            "Signal.reset: signal words [1, 3]",
            "Mailbox.reset: mailbox f32[4] x 1 x 2",
            "Signal.next_word: signal words [1, 3]",
        )
    ]


def test_heap_too_small_says_what_was_asked_used_and_free():
    message = (
        "SymmetricHeap: tensor f32[20000] asks for 80000 bytes, 4352 of 65536 are in use and 60928 fit at most; "
        "make the heap larger"
    )
    assert spawn(peer_ranks.heap_too_small, 2) == [("AllocationError", message)] * 2


def test_freed_objects_are_reused_and_refused():
    assert (
        spawn(peer_ranks.reuse_after_free, 2)
        == [("UsageError", "Tensor.numpy: tensor f32[1000] was freed; use it before that")] * 2
    )


@pytest.mark.feature("D8", "cpu")
def test_overlapping_subgroups():
    results = spawn(peer_ranks.sub_group_sums, 4)
    assert [len(r) for r in results] == [2, 0, 1, 1]


@pytest.mark.sentence("PR-23")
def test_heap_after_close_is_refused():
    group = pt.init()
    heap = pt.SymmetricHeap(group, size_bytes=1 << 16)
    x = heap.empty((16,), pt.f32)
    heap.close()
    heap.close()
    with pytest.raises(UsageError, match=r"^tensor f32\[4\]: the symmetric heap was closed; allocate before that$"):
        heap.empty((4,), pt.f32)
    with pytest.raises(
        UsageError, match=r"^Tensor.numpy: tensor f32\[16\] was closed with its heap; use it before that$"
    ):
        x.numpy()


@pytest.mark.sentence("PR-13")
def test_more_programs_than_can_be_resident_is_refused_with_the_number():
    group = pt.init()
    with pt.SymmetricHeap(group, size_bytes=1 << 24) as heap:
        n = 1 << 20
        words = heap.zeros((n,), pt.i64)
        out = pt.zeros((n,), pt.i64)
        with pytest.raises(LaunchError, match="1048576 programs"):
            peer_ranks.grid_barrier(out.partition(1), words).sync()
        assert not out.numpy().any()


@pytest.mark.sentence("MB-7")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda h: h.mailbox(tile=100, dtype=pt.f32, programs=4), "tile: expected tile extents that are powers of two, got 100 in (100,)"),
        (lambda h: h.mailbox(tile=64, dtype=pt.f32, programs=4, depth=3), "depth: expected a power of two, got 3"),
        (lambda h: h.mailbox(tile=64, dtype=pt.f32, programs=0), "programs: expected an integer >= 1, got 0"),
        (lambda h: h.signal(slots=-1), "slots: expected an integer >= 1, got -1"),
        (lambda h: h.empty((1, 2, 3, 4, 5), pt.f32), "shape: expected 1 to 4 axes, got 5 in (1, 2, 3, 4, 5); reshape it first"),
        (lambda h: h.zeros((4,), pt.f32).at(3), "rank: expected an integer from 0 to 0, got 3"),
        (lambda h: h.zeros((4,), pt.f32).at("a"), "rank: expected an integer from 0 to 0, got 'a'"),
        (lambda h: h.zeros(3, "f32"), "dtype: expected a peertile dtype such as pt.f32, got 'f32'"),
        (lambda h: h.mailbox(tile=64, dtype="f32", programs=4), "dtype: expected a peertile dtype such as pt.f32, got 'f32'"),
        (lambda h: h.mailbox(tile="a", dtype=pt.f32, programs=4), "tile: expected tile extents that are powers of two, got 'a' in ('a',)"),
        (lambda h: h.mailbox(tile=64, dtype=pt.f32, programs="4"), "programs: expected an integer >= 1, got '4'"),
        (lambda h: h.mailbox(tile=64, dtype=pt.f32, programs=4, depth="a"), "depth: expected an integer, got 'a'"),
        (lambda h: h.mailbox(tile=64, dtype=pt.f32, programs=4, posts_ahead=1.5), "posts_ahead: expected an integer, got 1.5"),
        (lambda h: h.mailbox(tile=64, dtype=pt.f32, programs=4, links=3), "links: expected pt.Links or None, got 3"),
        (lambda h: h.mailbox(tile=64, dtype=pt.f32, programs=4, links=pt.Links(1, [(0, 1)])), "pairs: expected ranks 0 to 0, got [(0, 1)]"),
        (lambda h: h.mailbox(tile=64, dtype=pt.f32, programs=4, links=pt.Links("1", [])), "size: expected an integer >= 1, got '1'"),
        (lambda h: h.counter(True), "slots: expected an integer >= 1, got True"),
        (lambda h: h.free(3), "free: expected an object of a symmetric heap, got 3"),
        (lambda h: pt.SymmetricHeap(None, 1), "SymmetricHeap(group): expected a group, as pt.init() gives, got None"),
        (lambda h: pt.SymmetricHeap(pt.init(), size_bytes=True), "size_bytes: expected an integer >= 1, got True"),
        (lambda h: pt.SymmetricHeap(pt.init(), size_bytes="1"), "size_bytes: expected an integer >= 1, got '1'"),
        (lambda h: pt.Links.ring("2"), "size: expected an integer >= 1, got '2'"),
        (lambda h: pt.Links.ring(0), "size: expected an integer >= 1, got 0"),
        (lambda h: pt.Links.ring(2, 0.5), "step: expected an integer, got 0.5"),
        (lambda h: pt.Links.all_to_all(0), "size: expected an integer >= 1, got 0"),
        (lambda h: pt.Links.broadcast(2, "a"), "root: expected an integer from 0 to 1, got 'a'"),
        (lambda h: pt.Links.among(2, 3), "members: expected ranks, got 3"),
        (lambda h: pt.Links.among(2, ["a"]), "members: expected an integer, got 'a'"),
        (lambda h: pt.Links.of(2, 3), "pairs: expected pairs (source, destination) of ranks, got 3"),
        (lambda h: pt.Links.of(2, [3]), "pairs: expected pairs (source, destination) of ranks, got [3]"),
        (lambda h: pt.Links.of(2, [("0", "1")]), "pairs: expected pairs (source, destination) of ranks, got [('0', '1')]"),
    ],
)  # fmt: skip
def test_bad_arguments_of_the_heap(make, message):
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        in_use = heap._arena.in_use
        with pytest.raises(ArgumentError) as caught:
            make(heap)
        assert str(caught.value) == message
        if "rank" not in message:
            assert heap._arena.in_use == in_use


def test_peer_views_of_the_host_see_what_kernels_wrote():
    group = pt.init()
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        x = heap.zeros((8,), pt.f32)
        x.copy_from(np.arange(8, dtype=np.float32))
        assert x.at(0).numpy().tolist() == list(range(8))


def test_slices_of_a_symmetric_tensor_are_those_of_the_own_part():
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        x = heap.zeros((3, 4), pt.i32)
        x[1:, 1:3].copy_from(np.ones((2, 2), np.int32))
        assert x.numpy().tolist() == [[0] * 4, [0, 1, 1, 0], [0, 1, 1, 0]]
        with pytest.raises(ArgumentError, match=r"^index: expected up to 2 slices, got 1$"):
            x[1]
