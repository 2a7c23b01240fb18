"""Sentences of docs/concepts/signals.md that no other test shows: who writes a word, what counts, what a channel is."""

import itertools

import numpy as np
import pytest
from tests.frontend.helpers import build, error, scalar

import peertile as pt
import peertile.language as T
from peertile.errors import ArgumentError, LeaseError
from peertile.ir import ops
from peertile.ir.core import walk
from peertile.ir.types import CounterType, SignalType
from peertile.meaning import FaultKind, new_counter, new_signal, run_grid
from peertile.memory_model import Order, Rmw
from peertile.passes.pipeline import run_pipeline

RANKS, SLOTS = 3, 4


def compiled(fn, **given):
    return run_pipeline(build(fn, **given))


# ---------------------------------------------------------------- words of a signal


def tells(s, slot, to, who):
    if s.rank == who:
        s[slot].notify(to=to)


def arrived(signal):
    return np.stack([np.array(words) for words in signal["arrived"]])  # [destination, slot, source]


@pytest.mark.sentence("SG-1", "MM-40")
def test_a_notify_adds_one_to_the_word_of_its_slot_source_and_destination_and_to_no_other(rng):
    kernel = compiled(tells, slot=scalar(), to=scalar(), who=scalar())
    signal = new_signal(RANKS, SLOTS)
    assert [words.shape for words in signal["arrived"]] == [(SLOTS, RANKS)] * RANKS
    expected = arrived(signal)
    for _ in range(40):
        slot, to, who = (int(rng.integers(bound)) for bound in (SLOTS, RANKS, RANKS))
        assert run_grid(kernel, 1, [signal, slot, to, who], ranks=RANKS).faults == []
        expected[to, slot, who] += 1
        np.testing.assert_array_equal(arrived(signal), expected)
    assert expected.any()


def everything(s, n, k):
    s.notify()
    s.wait()
    s[k].notify(to=n)
    s.wait(n, slot=k)


@pytest.mark.sentence("SG-1", "MM-40")
def test_every_write_to_the_words_of_a_signal_is_a_release_in_the_column_of_the_writer():
    kernel = compiled(everything)
    stores = [op for op in walk(kernel.body) if isinstance(op, ops.WordStore) and op.attrs["order"] is Order.RELEASE]
    assert stores
    for op in stores:
        *_, source = op.operands
        assert isinstance(source.op, ops.Rank)
    assert not any(isinstance(op, ops.WordRmw | ops.TileAtomic) for op in walk(kernel.body))


def hears(s, slot, source, who):
    if s.rank == who:
        s.wait(source, slot=slot)


@pytest.mark.sentence("SG-7")
def test_a_source_that_is_ahead_satisfies_as_many_waits_as_it_has_notified():
    notify, wait = (compiled(f, slot=scalar(), who=scalar(), **g) for f, g in (
        (tells, {"to": scalar()}), (hears, {"source": scalar()})))  # fmt: skip
    for start in (0, (1 << 64) - 2):
        signal = new_signal(2, 1, start)
        for _ in range(5):
            assert run_grid(notify, 1, [signal, 0, 0, 1], ranks=2).faults == []
        for _ in range(5):
            assert run_grid(wait, 1, [signal, 0, 1, 0], ranks=2).faults == []
        (found,) = run_grid(wait, 1, [signal, 0, 1, 0], ranks=2).faults
        assert (found.kind, found.rank) == (FaultKind.DEADLOCK, 0)


@pt.kernel
def compares(out: T.Exclusive, seen: T.Shared, expected: T.Shared):
    out.store(T.where(T.at_least(seen.load_like(out), expected.load_like(out)), 1, 0).astype(T.i32))


@pytest.mark.any_device
@pytest.mark.sentence("SG-6", "SG-7")
def test_ahead_is_told_from_behind_up_to_2_to_the_63_epochs_wherever_they_begin(rng):
    n = 1 << 10
    expected = rng.integers(0, 1 << 64, n, np.uint64)
    expected[:4] = 0, (1 << 64) - 1, 1 << 63, (1 << 63) - 1
    ahead = rng.integers(0, 1 << 63, n, np.uint64) >> rng.integers(0, 63, n, np.uint64)
    ahead[:3], ahead[-1] = (0, 1, (1 << 63) - 1), (1 << 63) - 1
    for seen, right in ((expected + ahead, 1), (expected - np.maximum(ahead, 1), 0)):
        out = pt.full((n,), 7, pt.i32)
        compares(out.partition(256), pt.asarray(seen), pt.asarray(expected)).sync()
        assert (out.numpy() == right).all()


# ---------------------------------------------------------------- counters


def adds(c, n, to):
    c.add(n, to=to, slot=0)


def counts(c, n, who):
    if c.rank == who:
        c.wait(n, slot=0)


@pytest.mark.sentence("SG-12", "SG-11")
def test_what_was_counted_in_one_launch_is_not_counted_again_in_the_next(rng):
    add, wait = compiled(adds, to=scalar()), compiled(counts, who=scalar())
    for start in (0, (1 << 64) - 3):
        counter, open_ = new_counter(RANKS, 1, start), 0
        for _ in range(12):
            n = int(rng.integers(1, 4))
            assert run_grid(add, 1, [counter, n, 1], ranks=RANKS).faults == []
            open_ += n * RANKS
            take = int(rng.integers(0, open_ + 1))
            assert run_grid(wait, 1, [counter, take, 1], ranks=RANKS).faults == []
            open_ -= take
        (found,) = run_grid(wait, 1, [counter, open_ + 1, 1], ranks=RANKS).faults
        assert (found.kind, found.rank) == (FaultKind.DEADLOCK, 1)


@pytest.mark.sentence("MM-41", "SG-13")
def test_the_words_of_a_counter_are_only_added_to():
    def kernel(c, n, k):
        c.add(n, to=k)
        c.wait(n)
        c[k].add(2, to=0)
        c.wait(3, slot=k)

    built = compiled(kernel)
    updates = [op for op in walk(built.body) if isinstance(op, ops.WordRmw)]
    assert {(op.rmw, op.order) for op in updates} == {(Rmw.ADD, Order.RELEASE)}
    count = [op for op in walk(built.body) if isinstance(op, ops.Field) and op.attrs["field"] == "count"]
    written = {id(op.operands[0]) for op in walk(built.body) if isinstance(op, ops.WordStore | ops.Store)}
    views = {id(v) for op in count for v in reaches(built, op.results[0])}
    assert views
    assert written  # how many were counted is stored, in words of its own
    assert not written & views


def reaches(kernel, value):
    """The views that are made of a field, and the field."""
    found = [value]
    for op in walk(kernel.body):
        if isinstance(op, ops.PeerView) and any(op.operands[0] is v for v in found):
            found += op.results
    return found


@pt.kernel
def meet(ready: T.Signal):
    ready.notify()
    ready.wait()


@pt.kernel
def total(tally: T.Counter):
    tally.add(1, to=0)


@pytest.mark.any_device
@pytest.mark.sentence("SG-13")
def test_a_counter_is_no_signal_and_a_signal_no_counter():
    assert SignalType() != CounterType()
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 16) as heap:
        signal, counter = heap.signal(slots=1), heap.counter(slots=1)
        for call, message in (
            (lambda: meet.grid(1)(counter), "ready: expected a signal (T.Signal), got a counter"),
            (lambda: total.grid(1)(signal), "tally: expected a counter (T.Counter), got a signal"),
        ):
            with pytest.raises(ArgumentError) as caught:
                call()
            assert str(caught.value) == message

    def stores(c):
        c.notify()

    def sums(s):
        s.add(1, to=0)

    assert error(stores).message == "the counter `c` has no `.notify`"
    assert error(sums).message == "the signal `s` has no `.add`"


# ---------------------------------------------------------------- channels


MAKE = (
    lambda heap, size: heap.signal(size),
    lambda heap, size: heap.counter(size),
    lambda heap, size: heap.barrier(size),
    lambda heap, size: heap.mailbox(tile=8, dtype=pt.f32, programs=size % 9 + 1, depth=1),
)


@pt.kernel
def posts(z: T.Exclusive, box: T.Mailbox):
    box.post(z.load())
    for part in box.collect():
        z.store(part)


@pt.kernel
def syncs(b: T.Barrier):
    b.sync()


USES = {
    "signal": (MAKE[0], lambda ready, z: meet.grid(1)(ready)),
    "counter": (MAKE[1], lambda tally, z: total.grid(1)(tally)),
    "barrier": (MAKE[2], lambda b, z: syncs.grid(1)(b)),
    "mailbox": (MAKE[3], lambda box, z: posts(z.partition(8), box)),
}


@pytest.mark.any_device
@pytest.mark.sentence("SG-31", "MM-33", "MB-10")
@pytest.mark.parametrize("name", USES)
def test_a_channel_of_any_kind_is_leased_to_one_launch_at_a_time(name):
    make, use = USES[name]
    device = pt.current_device()
    a, b, release = (device.stream(n) for n in ("a", "b", "release"))
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 18) as heap:
        channel, other = make(heap, 4), make(heap, 4)
        z, y, w = (pt.zeros((8,), pt.f32) for _ in range(3))
        word = pt.zeros(1, pt.u32)
        use(other, w).sync()  # a GPU loads no code while a stream waits
        held = pt.op.wait_eq(word, 1, timeout_s=20).submit(a)
        try:
            first = use(channel, z).submit(a)
            with pytest.raises(LeaseError) as caught:
                use(channel, y).submit(b)
            assert "as a channel" in str(caught.value)
            assert " on a (" in str(caught.value)
            use(other, w).submit(b).wait(20)
        finally:
            pt.op.set_signal(word, 1).sync_on(release)
            held.wait(20)
        first.wait(20)
        use(channel, y).sync_on(b)


def places(channel):
    """Where the words of a channel lie: (first byte, behind the last)."""
    shared = [(s.address, s.address + s.nbytes) for s in channel.storages]
    return shared + [(t.address, t.address + 8 * int(np.prod(t.shape))) for t in channel._own]


@pytest.mark.native_only
@pytest.mark.any_device
@pytest.mark.sentence("SG-30")
def test_no_two_channels_share_a_byte(rng):
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        kept = []
        for _ in range(25):
            if kept and rng.random() < 0.3:
                heap.free(kept.pop(int(rng.integers(len(kept)))))
            size = int(rng.choice([1, 32, 33, 64, 65, rng.integers(1, 200)]))  # at and around whole lines too
            kept.append(MAKE[int(rng.integers(4))](heap, size))
        found = [(place, k) for k, channel in enumerate(kept) for place in places(channel)]
        for ((a, a_end), i), ((b, b_end), k) in itertools.combinations(found, 2):
            assert a_end <= b or b_end <= a, (type(kept[i]), type(kept[k]))
