"""Standing leases: held only while their operation runs, refused as any other lease, gone with their owner."""

import gc
import threading
import weakref

import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import LeaseError, UsageError
from peertile.kept_launch import KeptLaunch
from peertile.runtime.standing import Resting, Standing
from peertile.runtime.stream import Stream

pytestmark = pytest.mark.any_device


@pt.kernel
def double(z: T.Exclusive, x: T.Shared):
    z.store(x.load_like(z) * 2)


@pytest.fixture
def streams():
    device = pt.current_device()
    return device.stream("a"), device.stream("b")


@pytest.fixture
def table():
    return pt.current_device().leases


def standing(stream, *tensors):
    return Standing("repeated", stream, tuple(t.write_use() for t in tensors))


@pytest.mark.feature("H11", "cpu")
def test_while_it_rests_another_stream_uses_the_memory(streams, table):
    a, b = streams
    x, y = pt.zeros(4, pt.f32), pt.zeros(4, pt.f32)
    kept = standing(a, x, y)
    for _ in range(3):
        assert kept.enter(None)
        assert kept.leave()
        other = table.acquire("other", b, None, (x.write_use(),))
        table.release((other,))


@pytest.mark.feature("H11", "cpu")
@pytest.mark.parametrize("before", [0, 1, 2])
def test_while_it_is_held_another_stream_is_refused(streams, table, before):
    a, b = streams
    x = pt.zeros(4, pt.f32)
    kept = standing(a, x)
    for _ in range(before):
        assert kept.enter(None)
        assert kept.leave()
    assert kept.enter(None)
    with pytest.raises(LeaseError) as caught:
        table.acquire("other", b, None, (x.write_use(),))
    assert str(caught.value) == (
        "lease: other on b (an unknown line) would write a tensor f32[4], but repeated on a (an unknown line) still "
        "writes it; wait for that operation, order the streams with an event, or run both on one stream"
    )
    assert kept.leave()
    table.release((table.acquire("other", b, None, (x.write_use(),)),))


@pytest.mark.feature("H11", "cpu")
@pytest.mark.parametrize("before", [0, 1])
def test_it_is_refused_while_another_stream_uses_the_memory(streams, table, before):
    a, b = streams
    x, y = pt.zeros(4, pt.f32), pt.zeros(4, pt.f32)
    kept = standing(a, x, y)
    for _ in range(before):
        assert kept.enter(None)
        assert kept.leave()
    other = table.acquire("other", b, None, (y.write_use(),))
    with pytest.raises(LeaseError) as caught:
        kept.enter(None)
    assert str(caught.value) == (
        "lease: repeated on a (an unknown line) would write a tensor f32[4], but other on b (an unknown line) still "
        "writes it; wait for that operation, order the streams with an event, or run both on one stream"
    )
    table.release((table.acquire("third", b, None, (x.write_use(),)),))  # nothing of it stays behind
    table.release((other,))
    assert kept.enter(None)
    assert kept.leave()


def test_memory_that_was_closed_is_refused_however_often_it_was_used(streams):
    x = pt.zeros(4, pt.f32)
    kept = standing(streams[0], x)
    for _ in range(2):
        assert kept.enter(None)
        assert kept.leave()
    x.storage.close("freed")
    with pytest.raises(UsageError) as caught:
        kept.enter(None)
    assert str(caught.value) == "repeated: a tensor f32[4] was freed; use it before that"


def test_memory_that_is_lent_out_is_refused(streams):
    x = pt.zeros(4, pt.f32)
    kept = standing(streams[0], x)
    assert kept.enter(None)
    assert kept.leave()
    view = x.view()
    with pytest.raises(LeaseError) as caught:
        kept.enter(None)
    start, _, end = str(caught.value).partition(f", made at {__file__}:")
    assert start == "lease: repeated on a (an unknown line) would write a tensor f32[4], but a view of it"
    assert end.partition(", ")[2] == "is still held; let go of it first, or write through it"
    del view, caught  # its traceback has the borrow
    assert kept.enter(None)
    assert kept.leave()


@pytest.mark.native_only
def test_two_threads_do_not_hold_it_at_once(streams):
    kept = standing(streams[0], pt.zeros(4, pt.f32))
    assert kept.enter(None)
    found = []
    other = threading.Thread(target=lambda: found.append(kept.enter(None)))
    other.start()
    other.join(20)
    assert found == [False]
    assert kept.leave()


def test_later_work_of_its_stream_that_took_its_place_does_not_lose_it(streams, table):
    a, b = streams
    x = pt.zeros(4, pt.f32)
    use = x.write_use()
    kept = Standing("repeated", a, (use,))
    assert kept.enter(None)
    assert kept.leave()
    table.release((table.acquire("later", a, None, (use,)),))
    assert kept.enter(None)
    with pytest.raises(LeaseError):
        table.acquire("other", b, None, (use.again(),))
    assert kept.leave()


def test_its_memory_goes_with_its_owner(streams):
    x = pt.zeros(4, pt.f32)
    kept = standing(streams[0], x)
    assert kept.enter(None)
    assert kept.leave()
    storage = weakref.ref(x.storage)
    gc.disable()
    try:
        del x, kept
        assert storage() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------- of what is enqueued


@pytest.fixture
def doubling(streams):
    """A launch that is kept, compiled, and its tensors."""
    x, z = pt.full(8, 3, pt.f32), pt.zeros(8, pt.f32)
    kept = KeptLaunch(double(z.partition(8), x))
    kept.submitted(streams[0], None).wait(20)
    return kept, x, z


def text_of(use, stream, table):
    with pytest.raises(LeaseError) as caught:
        table.acquire("other", stream, None, (use,))
    return str(caught.value)


@pytest.mark.feature("H11", "cpu")
@pytest.mark.parametrize("launches", [1, 3])
def test_what_is_enqueued_keeps_it_until_the_stream_is_past_the_last(streams, table, hold, doubling, launches):
    a, b = streams
    kept, x, z = doubling
    with hold(a):
        made = [kept.submitted(a, None) for _ in range(launches)]
        assert text_of(z.write_use(), b, table) == (
            "lease: other on b (an unknown line) would write a tensor f32[8], but double on a (an unknown line) still "
            "writes it; wait for that operation, order the streams with an event, or run both on one stream"
        )
        assert "still reads it" in text_of(x.write_use(), b, table)
        event = a.record()
        b.wait(event)
        table.release((table.acquire("behind", b, None, (z.write_use(),)),))  # ordered behind all of them
        kept.submitted(a, None)
        assert "still writes it" in text_of(z.write_use(), b, table)  # and not behind this one
    assert all(launched.wait(20) is None for launched in made)
    a.sync(20)
    table.release((table.acquire("other", b, None, (z.write_use(),)),))
    assert z.numpy().tolist() == [6.0] * 8


def test_what_is_enqueued_keeps_it_though_its_owner_is_gone(streams, table, hold, doubling):
    a, b = streams
    _, x, z = doubling
    kept = KeptLaunch(double(z.partition(8), x))
    with hold(a):
        kept.submitted(a, None)
        del kept
        gc.collect()
        assert "still writes it" in text_of(z.write_use(), b, table)
    a.sync(20)
    table.release((table.acquire("other", b, None, (z.write_use(),)),))
    assert z.storage.leases == []  # then it is gone as well, and it had taken the place of the fixture's


def test_later_work_that_took_its_place_is_refused_and_let_go_of_in_order(streams, table, hold, doubling):
    a, b = streams
    kept, x, z = doubling
    use = kept.launch.bound.uses[0]
    with hold(a):
        kept.submitted(a, None)
        later = table.acquire("later", a, None, (use,))
        kept.submitted(a, None)  # while the first is under way, what is left of its lease stays
        kept.submitted(a, None)
        for tensor in (x, z):
            assert "but double on a" in text_of(tensor.write_use(), b, table)
        table.release((later,))
    a.sync(20)
    for tensor in (x, z):
        table.release((table.acquire("other", b, None, (tensor.write_use(),)),))
    with hold(a):  # a lease again that launches share
        first, second = kept.submitted(a, None), kept.submitted(a, None)
        assert first.kept is second.kept is not None
        assert "still writes it" in text_of(z.write_use(), b, table)
    a.sync(20)


def test_a_replay_under_way_is_told_of_by_its_own_name(streams, table, hold, doubling):
    a, b = streams
    _, x, z = doubling
    graph = double(z.partition(8), x).graph_on(a, "g")
    with hold(a):
        graph.launch().submit(a)
        reader = table.acquire("reader", b, None, x.shared_argument().uses)
        graph.launch().submit(a)  # the first keeps its lease, and this has one of its own
        assert [lease.name for lease in z.storage.leases if type(lease) is Resting] == ["g (replay 1)"]
        table.release((reader,))
    a.sync(20)


def test_a_replay_that_no_stream_took_on_leaves_nothing_behind(streams, table, doubling, monkeypatch):
    a, b = streams
    _, x, z = doubling
    graph = double(z.partition(8), x).graph_on(a)
    graph.launch().submit(a).wait(20)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "admit", stop)
    with pytest.raises(KeyboardInterrupt):
        graph.launch().submit(a)
    monkeypatch.undo()
    table.release((table.acquire("other", b, None, (z.write_use(),)),))
    graph.launch().submit(a).wait(20)


def test_a_launch_that_was_not_enqueued_leaves_nothing_behind(streams, table, doubling, monkeypatch):
    a, b = streams
    kept, _, z = doubling
    driver = pt.current_device().driver

    def refuse(*_):
        raise UsageError("refused")

    monkeypatch.setattr(driver, "enqueue", refuse, raising=False)
    with pytest.raises(UsageError, match="refused"):
        kept.submitted(a, None)
    monkeypatch.undo()
    a.sync(20)
    table.release((table.acquire("other", b, None, (z.write_use(),)),))
    kept.submitted(a, None).wait(20)
    assert z.numpy().tolist() == [6.0] * 8


@pytest.mark.parametrize("what", ["kept launch", "graph"])
def test_a_submission_that_is_interrupted_behind_its_enqueuing_keeps_its_lease_until_it_is_over(
    streams, table, hold, doubling, monkeypatch, what
):
    a, b = streams
    kept, x, z = doubling
    driver, graph = pt.current_device().driver, double(z.partition(8), x).graph_on(a, "g")
    submit, name = {
        "kept launch": (lambda: kept.submitted(a, None), "enqueue"),
        "graph": (lambda: graph.launch().submit(a), "launch_graph"),
    }[what]
    submit().wait(20)
    enqueue = getattr(driver, name)

    def interrupted(*args, **kwargs):
        enqueue(*args, **kwargs)
        raise KeyboardInterrupt

    with hold(a):
        monkeypatch.setattr(driver, name, interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            submit()
        monkeypatch.undo()
        gc.collect()
        assert "still writes it" in text_of(z.write_use(), b, table)
        submit()  # behind it, on the same lease
        (lease,) = {id(lease): lease for lease in z.storage.leases if not lease.is_done()}.values()
        assert type(lease) is Resting
    a.sync(20)
    table.release((table.acquire("other", b, None, (z.write_use(),)),))
    assert z.numpy().tolist() == [6.0] * 8
