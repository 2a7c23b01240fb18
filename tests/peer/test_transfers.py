"""put and get, flagged transfers, polls, fences, split barriers and remote atomics on native ranks."""

import itertools

import pytest
import transfer_ranks

import peertile as pt
import peertile.language as T
from peertile.config import config
from peertile.errors import ArgumentError, OutOfBounds, WaitTimeout
from peertile.frontend.build import build_kernel
from peertile.ir.types import SymmetricType

pytestmark = pytest.mark.any_device

THREADS = pytest.param(pt.RankModel.THREADS, id="threads")


def models(ranks):
    """In both process models, with that many ranks or as many as a parameter says."""
    marks = [pytest.mark.slow, pytest.mark.gpus(ranks)]
    return pytest.mark.parametrize(
        "model", [THREADS, pytest.param(pt.RankModel.PROCESSES, marks=marks, id="processes")]
    )


def spawn(function, ranks, *args, model=pt.RankModel.THREADS):
    return pt.spawn(function, ranks, args, model=model, timeout_s=100)


@pytest.mark.sentence("SG-14")
@pytest.mark.feature("P3", "cpu")
@pytest.mark.feature("P11", "cpu")
@models("ranks")
@pytest.mark.parametrize("ranks", [2, 3])
def test_views_of_any_size_and_start_are_put_and_signalled_zero_bytes_too(ranks, model):
    assert all(spawn(transfer_ranks.views_are_put, ranks, transfer_ranks.SIZES, model=model))


@pytest.mark.feature("P3", "cpu")
@pytest.mark.parametrize("ranks", [1, 3])
def test_views_are_got(ranks):
    assert all(spawn(transfer_ranks.views_are_got, ranks))


@pytest.mark.feature("P3", "cpu")
@pytest.mark.parametrize(("wait", "quiet"), [(True, False), (False, False), (False, True)])
def test_tiles_are_put_with_tails_and_handles(wait, quiet):
    assert all(spawn(transfer_ranks.tiles_are_put, 3, wait, quiet))


@pytest.mark.feature("P11", "cpu")
@pytest.mark.parametrize("dtype", ["f32", "i32", "u32", "f16", "bf16", "i16", "u8"])
def test_flagged_tiles_of_every_width(dtype):
    assert all(spawn(transfer_ranks.flagged_sums, 2, dtype, 1, 3))


@pytest.mark.feature("P11", "cpu")
@models("ranks")
@pytest.mark.parametrize("ranks", [1, 4])
def test_flagged_epochs_wrap(ranks, model):
    assert all(spawn(transfer_ranks.flagged_sums, ranks, "f32", 2**32 - 20, 40, model=model))


@pytest.mark.native_only
@pytest.mark.feature("P11", "cpu")
@models("ranks")
@pytest.mark.parametrize("dtype", ["u32", "u64"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_filled_tiles_are_taken_once_and_leave_their_places_empty(ranks, dtype, model):
    assert all(spawn(transfer_ranks.filled_sums, ranks, dtype, 9, model=model))


@pytest.mark.native_only
def test_a_word_that_looks_empty_is_sent_as_its_neighbour():
    assert all(spawn(transfer_ranks.full_word, 2))


@pytest.mark.feature("P5", "cpu")
@pytest.mark.parametrize("order", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_wait_any_goes_on_with_whoever_is_there(order):
    assert spawn(transfer_ranks.firsts, 3, order)[0] == order[0] * 10 + order[1]


@pytest.mark.sentence("SG-25")
@pytest.mark.feature("P7", "cpu")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_split_barrier_is_a_barrier(ranks):
    assert spawn(transfer_ranks.splits, ranks, 20) == [ranks] * ranks


@pytest.mark.slow
@pytest.mark.sentence("MM-26")
@pytest.mark.feature("P8", "cpu")
@pytest.mark.parametrize("ranks", [2, 3])
def test_relaxed_words_with_a_fence_on_both_sides(ranks):
    assert spawn(transfer_ranks.fences, ranks, 200) == [0] * ranks


KINDS = ("add", "min", "max", "umin", "umax", "and", "or", "xor", "xchg")
INTEGERS = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
FLOATS = ("f16", "bf16", "f32", "f64")
COMBINATIONS = [*itertools.product(INTEGERS, KINDS), *itertools.product(FLOATS, ("addf", "min", "max", "xchg"))]


@pytest.mark.slow
@pytest.mark.feature("P10", "cpu")
@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=() if d in ("i32", "u8", "f32") else pytest.mark.slow) for d in INTEGERS + FLOATS]
)
def test_every_kind_of_remote_atomic(dtype):
    cases = [c for c in COMBINATIONS if c[0] == dtype]
    assert all(spawn(transfer_ranks.combines, 2, cases))


@pytest.mark.sentence("SG-15")
@pytest.mark.feature("P6", "cpu")
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_stream_writes_the_slots_of_a_signal(ranks):
    assert all(spawn(transfer_ranks.stream_writes, ranks))


# ---------------------------------------------------------------- what goes wrong


@pytest.fixture
def heap():
    """A heap of this process alone, whose group is whole again afterwards."""
    group = pt.init()
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as made:
        yield made
        if group.failure() is not None:
            group.recover()


@pt.kernel
def put_to(x: T.Shared, p: T.Peer, rank: T.i64):
    T.put(x.load((0,), (16,)), p, rank=rank)


@pt.kernel
def put_all(x: T.Shared, p: T.Peer):
    T.put(x, p)


@pytest.mark.sentence("BD-30")
@pytest.mark.feature("P3", "cpu")
@pytest.mark.parametrize("rank", [-1, 1, 7])
def test_a_rank_out_of_range_is_caught(rank, heap):
    p = heap.zeros((16,), pt.f32)
    with pytest.raises(OutOfBounds, match=f"peer rank out of range: got {rank}, limit 1"):
        put_to.grid(1)(pt.ones((16,), pt.f32), p, rank).sync()
    assert not p.numpy().any()


def test_views_of_different_extents_are_not_put(heap):
    p = heap.zeros((16,), pt.f32)
    with pytest.raises(OutOfBounds, match=r"T.put: extents of axis 0 of `x` and `p` differ: got 15, limit 16"):
        put_all.grid(1)(pt.ones((15,), pt.f32), p).sync()
    assert not p.numpy().any()


def test_the_word_of_a_slot_is_checked(heap):
    ready = heap.signal(slots=4)
    with pytest.raises(ArgumentError, match="slot: expected 0 to 3, got 4"):
        ready.next_word(4, 0)
    with pytest.raises(ArgumentError, match="to: expected a rank from 0 to 0, got 1"):
        ready.next_word(0, 1)


@pt.kernel
def every_comparison(words: T.Peer, out: T.Peer, epoch: T.u32):
    """Waits that are satisfied already; the last one only because its comparison wraps."""
    T.st(out, T.wait_eq(words, 5, (0,)), (0,))
    T.st(out, T.wait_ne(words, 6, (0,)), (1,))
    T.st(out, T.wait_ge(words, 5, (0,)), (2,))
    T.st(out, T.wait_le(words, 5, (0,)), (3,))
    T.st(out, T.wait_gt(words, 4, (0,)), (4,))
    T.st(out, T.wait_lt(words, 6, (0,)), (5,))
    T.st(out, T.wait_at_least(words, epoch, (0,)), (6,))


@pytest.mark.sentence("MM-47")
@pytest.mark.feature("P5", "cpu")
@pytest.mark.parametrize("epoch", [5, 0, (1 << 32) - 2])
def test_every_comparison_of_a_wait_gives_what_it_saw(epoch, heap):
    words, out = heap.zeros((1,), pt.u32), heap.zeros((7,), pt.u32)
    words.copy_from([5])
    every_comparison.grid(1)(words, out, epoch).sync()
    assert out.numpy().tolist() == [5] * 7


@pt.kernel
def any_of(words: T.Peer):
    T.wait_any((words, 1, (0,)), (words, 2, (1,)))


@pt.kernel
def flagged_never(words: T.Peer):
    T.print_("got", T.take_flagged(words, (16,), epoch=3, dtype=T.f32))


@pt.kernel
def filled_never(words: T.Peer):
    T.print_("got", T.take_filled(words, (16,)))


@pt.kernel
def polls_for_ever(words: T.Peer):
    while T.ld(words, (0,), order=T.acquire) == 0:
        pass


@pytest.mark.sentence("PR-30")
@pytest.mark.native_only
@pytest.mark.sentence("MM-75")
@pytest.mark.feature("P5", "cpu")
@pytest.mark.parametrize("kernel", [any_of, flagged_never, filled_never, polls_for_ever], ids=lambda k: k.name)
def test_every_wait_is_bounded(kernel, heap, monkeypatch):
    monkeypatch.setattr("peertile.config._current", config()._replace(wait_timeout_s=0.2))
    words = heap.zeros((16,), pt.u64)
    if kernel is filled_never:
        words.copy_from([2**64 - 1] * 16)
    with pytest.raises(WaitTimeout, match=kernel.name) as caught:
        kernel.grid(1)(words).sync()
    assert caught.value.place.loc.line > 0


@pytest.mark.sentence("MM-91")
@pytest.mark.feature("P2", "cpu")
def test_a_narrow_atomic_on_a_peer_is_widened_with_a_note():
    def kernel(p):
        p.at(0).atomic_add((0,), T.ones((16,), T.f32), scope=T.device)

    built = build_kernel(kernel, {"p": SymmetricType(pt.f32, 1)})
    (note,) = built.facts["notes"]
    assert note.endswith("atomic on `p`: scope device widened to system, as every atomic on peer memory")
