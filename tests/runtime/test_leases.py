"""Leases, events, borrows: overlaps between streams are refused at once, ordered work is not."""

import gc
import threading

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import ArgumentError, LeaseError, UsageError
from peertile.runtime.lease import LeaseTable

pytestmark = pytest.mark.any_device


@pt.kernel
def add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


@pt.kernel
def announce(ready: T.Signal, out: T.Peer):
    out.local.store((T.program_id(0),), T.full((1,), 1, T.i32))
    ready.notify()
    ready.wait()


def values(tensor):
    return tensor.numpy().tolist()


@pytest.fixture
def streams():
    device = pt.current_device()
    return device.stream("a"), device.stream("b")


def refused(call):
    with pytest.raises(LeaseError) as caught:
        call()
    return str(caught.value)


HERE = __file__


def load_kernels():
    for n in (4, 8):
        x = pt.ones(n, pt.f32)
        add(pt.zeros(n, pt.f32).partition(n), x, x).sync()
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        announce.grid(4)(heap.signal(slots=4), heap.zeros((4,), pt.i32)).sync()


@pytest.mark.feature("U3", "cpu")
@pytest.mark.feature("H11", "cpu")
def test_an_overlap_names_both_operations_streams_and_lines(streams, hold):
    a, b = streams
    x = pt.zeros(8, pt.f32)
    with hold(a):
        first = pt.op.fill(x[0:4], 1)
        line = first._site[0].co_firstlineno  # of this function
        first.submit(a)
        text = refused(lambda: pt.op.fill(x[3:8], 2).sync_on(b))
        start, _, rest = text.partition(" would write a tensor f32[8], but fill on a (")
        assert start.startswith(f"lease: fill on b ({HERE}:")
        where, _, rest = rest.partition(") still writes it; ")
        assert where == f"{HERE}:{line + 6}"
        assert rest == "wait for that operation, order the streams with an event, or run both on one stream"
        pt.op.fill(x[4:8], 3).sync_on(b)  # other bytes
        pt.op.fill(x[0:8], 4).submit(a)  # the same stream
        refused(lambda: pt.op.copy(x).sync_on(b))
        refused(lambda: add(pt.zeros(8, pt.f32).partition(8), x, x).sync_on(b))
    a.sync()
    pt.op.fill(x, 5).sync_on(b)
    assert values(x) == [5] * 8


@pytest.mark.feature("H11", "cpu")
def test_reads_share_and_a_write_waits_for_none_of_them(streams, hold):
    a, b = streams
    x = pt.ones(4, pt.f32)
    with hold(a):
        reading = pt.op.dup(x).submit(a)
        assert values(pt.op.dup(x).sync_on(b)) == [1] * 4
        assert "would write a tensor f32[4], but dup on a" in refused(lambda: pt.op.fill(x, 2).sync_on(b))
    assert values(reading.wait()) == [1] * 4


@pytest.mark.feature("H11", "cpu")
def test_an_event_orders_work_of_two_streams(streams, hold):
    a, b = streams
    c = pt.current_device().stream("c")
    x = pt.zeros(4, pt.f32)
    with hold(a):
        pt.op.fill(x, 1).submit(a)
        event = a.record()
        pt.op.fill(x, 2).submit(a)
        b.wait(event)
        # b is behind the first fill and not behind the second.
        refused(lambda: pt.op.copy(x).submit(b))
        b.wait(a.record(event))
        pt.op.fill(x, 3).submit(b)
        c.wait(b.record())  # through b, c is behind a as well
        future = pt.op.copy(x).submit(c)
        assert not event.is_done()
    assert future.wait(20).tolist() == [3] * 4
    event.sync(20)
    assert event.is_done()


@pytest.mark.feature("H11", "cpu")
def test_events_mean_their_last_record_and_one_per_stream_is_needed(streams, hold):
    a, b = streams
    c = pt.current_device().stream("c")
    event = pt.Event(pt.current_device())
    with pytest.raises(UsageError) as caught:
        b.wait(event)
    assert str(caught.value) == "event: expected an event that was recorded, got one never recorded; record it first"
    x, y, z = pt.zeros(4, pt.f32), pt.zeros(4, pt.f32), pt.zeros(4, pt.f32)
    with hold(a):
        pt.op.fill(x, 1).submit(a)
        pt.op.fill(y, 2).submit(b)
        for stream in (a, b):
            stream.record(event)
        c.wait(event)  # which means b alone now
        refused(lambda: add(z.partition(4), x, y).submit(c))
        c.wait(a.record())
        future = add(z.partition(4), x, y).submit(c)
    future.wait(20)
    assert values(z) == [3] * 4


@pytest.mark.slow
@pytest.mark.feature("H11", "cpu")
def test_leases_outlive_forgotten_futures_and_errors(streams, hold):
    a, b = streams
    x = pt.zeros(4, pt.f32)

    def breaks():
        raise KeyError("midway")

    with hold(a):
        with pytest.raises(KeyError):
            pt.op.fill(x, 1).map(breaks).submit(a)
        gc.collect()
        assert "but fill on a" in refused(lambda: pt.op.copy(x).sync_on(b))
        later = pt.op.copy(x).map(lambda t: t).schedule(pt.SingleStream(a))
    assert later.wait().tolist() == [1] * 4
    pt.op.fill(x, 2).sync_on(b)


@pytest.mark.feature("H7", "cpu")
def test_an_op_that_may_choose_follows_what_it_needs(streams, hold):
    a, _ = streams
    x = pt.zeros(4, pt.f32)
    with hold(a):
        pt.op.fill(x, 3).submit(a)
        z = pt.zeros(4, pt.f32)
        future = add(z.partition(4), x, x).submit()
        assert future.stream is a
    future.wait()
    assert values(z) == [6] * 4


@pytest.mark.feature("H7", "cpu")
def test_a_channel_is_on_one_stream_at_a_time(streams, hold):
    a, b = streams
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        ready, second = heap.signal(slots=4), heap.signal(slots=4)
        out = heap.zeros((4,), pt.i32)
        with hold(a):
            first = announce.grid(4)(ready, out).submit(a)
            text = refused(lambda: announce.grid(4)(ready, out).submit(b))
            assert "announce on b" in text
            assert "would use as a channel signal words" in text
            assert "but announce on a" in text
            assert "still uses it as a channel" in text
            refused(lambda: announce.grid(4)(ready, out).schedule(pt.SingleStream(b)).wait())
            assert announce.grid(4)(second, out).submit(b).wait(20)  # another channel
            follows = announce.grid(4)(ready, out).submit()
            assert follows.stream is a
        first.wait()
        follows.wait()
        announce.grid(4)(ready, out).sync_on(b)  # idle: the host knows that all is over
        assert values(out) == [1] * 4


# ---------------------------------------------------------------- borrows


@pytest.mark.slow
@pytest.mark.feature("H11", "cpu")
def test_exclusive_use_needs_bytes_that_nobody_borrows():
    x, y = pt.zeros(8, pt.f32), pt.ones(8, pt.f32)
    view = x[0:4].view()
    text = refused(lambda: add(x.partition(8), y, y).sync())
    assert " would write a tensor f32[8], but a view of it, made at " in text
    assert text.endswith(", is still held; let go of it first, or write through it")
    refused(lambda: pt.op.fill(x, 1).sync())
    refused(lambda: x.copy_from(np.ones(8)))
    add(x[4:8].partition(4), y, y).sync()  # other bytes
    add(view.partition(4), y, y).sync()  # through the view
    inner = view[0:2].view()
    refused(pt.op.fill(view, 7).sync)
    pt.op.fill(inner, 8).sync()  # what it was made of does not count
    assert values(x) == [8, 8, 2, 2, 2, 2, 2, 2]
    part = view[1:3]
    del view, inner
    refused(lambda: pt.op.fill(x, 1).sync())  # a slice of a view is that view
    del part
    add(x.partition(8), y, y).sync()


@pytest.mark.slow
@pytest.mark.feature("H11", "cpu")
def test_a_frozen_share_is_read_only_and_keeps_its_values():
    x, y = pt.ones(4, pt.f32), pt.zeros(4, pt.f32)
    frozen = x.share()
    text = refused(lambda: pt.op.fill(x, 2).sync())
    assert "but a frozen share of it, made at" in text
    for write in (lambda t: t.partition(4), lambda t: t.copy_from([1] * 4), lambda t: pt.op.fill(t, 1)):
        with pytest.raises(ArgumentError, match="got a frozen share"):
            write(frozen)
    add(y.partition(4), frozen, x).sync()
    assert values(y) == [2] * 4
    del frozen
    pt.op.fill(x, 2).sync()


@pytest.mark.slow
@pytest.mark.feature("H11", "cpu")
def test_what_submissions_and_graphs_hold_is_no_borrow(streams, hold):
    a, _ = streams
    x, y = pt.zeros(4, pt.f32), pt.ones(4, pt.f32)
    with hold(a):
        add(x.view().partition(4), y, y.share()).submit(a)
        gc.collect()
        add(x.partition(4), y, y).submit(a)
        pt.op.fill(y, 3).submit(a)
    a.sync()
    graph = add(x.view().partition(4), y.share(), y).graph_on(a)
    refused(lambda: pt.op.fill(y, 4).sync())  # its untaken output is the user's to take
    graph.take_output()
    pt.op.fill(y, 4).sync()
    graph.launch().sync_on(a)
    assert values(x) == [8] * 4


def test_partition_does_not_consume():
    x, y = pt.zeros(4, pt.f32), pt.ones(4, pt.f32)
    cut = x.partition(4)
    add(x.partition(2), y, y).sync()
    add(cut, y, y).sync()
    assert cut.unpartition() is x


# ---------------------------------------------------------------- the host


@pytest.mark.native_only
@pytest.mark.feature("H11", "cpu")
def test_the_host_waits_for_what_it_reads_and_writes(streams, hold):
    a, _ = streams
    x = pt.zeros(4, pt.f32)
    word = pt.zeros(1, pt.u32)
    pt.op.wait_eq(word, 1).then(lambda: pt.op.fill(x, 5)).submit(a)
    got = []
    reader = threading.Thread(target=lambda: got.append(values(x)))
    reader.start()
    assert got == []
    pt.op.set_signal(word, 1).sync()
    reader.join(20)
    assert got == [[5] * 4]
    pt.op.fill(x, 6).submit(a)
    x.copy_from(np.full(4, 7))
    assert values(x) == [7] * 4


def test_a_refused_op_leaves_no_lease_behind(streams, hold):
    a, b = streams
    x, y = pt.zeros(4, pt.f32), pt.zeros(4, pt.f32)
    with hold(a):
        pt.op.fill(x, 1).submit(a)
        refused(lambda: pt.op.copy(x, to=y).sync_on(b))
        assert not y.storage.leases
        pt.op.fill(y, 2).sync_on(b)


def test_release_twice_is_harmless():
    table = LeaseTable()
    stream = pt.current_device().default_stream
    lease = table.acquire("one", stream, None, (pt.zeros(4, pt.f32).write_use(),))
    table.release((lease,))
    table.release((lease,))
