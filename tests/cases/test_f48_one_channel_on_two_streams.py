"""One set of signal words used by two streams at once is refused, naming both; two sets are fine."""

import pytest
from host_cases import device, holding

import peertile as pt
import peertile.language as T
from peertile.errors import LeaseError

pytestmark = pytest.mark.any_device


@pt.kernel
def meet(ready: T.Signal, out: T.Peer):
    ready.notify()
    ready.wait()
    out.local.store((T.program_id(0),), T.full((1,), 1, T.i32))


@pytest.mark.sentence("SG-31")
@pytest.mark.sentence("MM-33")
@pytest.mark.feature("H7", "cpu")
def test_a_channel_that_is_busy_on_another_stream_is_refused():
    a, b = device().stream("a"), device().stream("b")
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        one, two, out = heap.signal(slots=1), heap.signal(slots=1), heap.zeros((1,), pt.i32)
        meet.grid(1)(two, out).sync()
        with holding(a):
            first = meet.grid(1)(one, out).submit(a)
            with pytest.raises(LeaseError) as caught:
                meet.grid(1)(one, out).submit(b)
            assert "meet on b (" in str(caught.value)
            assert "but meet on a (" in str(caught.value)
            assert "still uses it as a channel" in str(caught.value)
            meet.grid(1)(two, out).submit(b).wait(20)
        first.wait(20)
