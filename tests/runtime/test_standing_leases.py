"""Standing leases: held only while their operation runs, refused as any other lease, gone with their owner."""

import gc
import threading
import weakref

import pytest

import peertile as pt
from peertile.errors import LeaseError, UsageError
from peertile.runtime.standing import Standing

pytestmark = pytest.mark.any_device


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
