"""A submission that everybody forgot still writes: another stream may not read what it writes."""

import pytest

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.errors import LeaseError


@pt.kernel
def wait_then_write(z: T.Exclusive, ready: T.Signal):
    ready.wait()
    z.store(T.full((16,), 7.0, T.f32))


@pt.kernel
def tell(ready: T.Signal):
    ready.notify()


@pt.kernel
def twice(z: T.Exclusive, x: T.Shared):
    z.store(x.load_like(z) * 2.0)


def test_a_conflicting_access_is_refused_and_one_stream_is_ordered() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            ready = heap.signal(slots=1)
            if group.rank == 1:
                group.barrier("submitted")
                tell.grid(1)(ready).sync()
            else:
                x, y = pt.zeros((16,), pt.f32), pt.zeros((16,), pt.f32)
                one, two = pt.current_device().stream("one"), pt.current_device().stream("two")
                wait_then_write(x.partition(16), ready).submit(one)
                with pytest.raises(LeaseError, match=r"wait_then_write on one .*still writes it"):
                    twice(y.partition(16), x).submit(two)
                later = twice(y.partition(16), x).submit(one)
                group.barrier("submitted")
                later.wait()
                assert y.numpy().tolist() == [14.0] * 16
            group.barrier("over")

    assert check(main, 2, schedules=20).clean
