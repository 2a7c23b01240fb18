"""The allocator of the cpu driver."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peertile.errors import AllocationError
from peertile.runtime.drivers.cpu_memory import Heap


def heap(limit=1 << 40):
    return Heap(limit, poison=False, device="cpu:0")


@given(st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 30)), max_size=60))
def test_blocks_never_overlap_and_everything_comes_back(steps):
    h = heap()
    live = {}
    for size, victim in steps:
        address = h.allocate(size)
        assert address % 64 == 0
        assert all(address + size <= a or a + n <= address for a, n in live.items())
        live[address] = max(size, 1)
        if victim < len(live):
            gone = list(live)[victim]
            h.free(gone)
            del live[gone]
    assert h.stats().allocations == len(live)
    for address in live:
        h.free(address)
    assert h.stats().in_use == 0
    # Free blocks have grown together again: an arena's worth fits without a new arena.
    reserved = h.stats().reserved
    if reserved:
        h.free(h.allocate(64 << 20))
        assert h.stats().reserved == reserved
    h.release()


def test_the_smallest_block_that_fits_is_taken():
    h = heap()
    big, _, small, _ = (h.allocate(n) for n in (4096, 64, 1024, 64))
    h.free(big)
    h.free(small)
    assert h.allocate(1000) == small
    assert h.allocate(1088) == big
    h.release()


def test_free_does_not_block_while_the_lock_is_held():
    # Garbage collection may run anywhere, also inside allocate, in the same thread.
    h = heap()
    address = h.allocate(128)
    with h._lock:
        h.free(address)
    assert h.stats().in_use == 0
    assert h.allocate(128) == address
    h.release()


def test_large_free_arenas_are_kept_up_to_a_bound():
    h = heap()
    addresses = [h.allocate(1 << 30) for _ in range(4)]
    for a in addresses:
        h.free(a)
    assert h.stats().reserved == 1 << 30
    h.release()


def test_more_than_the_system_has_is_an_allocation_error():
    h = heap(limit=1 << 62)
    with pytest.raises(AllocationError) as caught:
        h.allocate(1 << 60)
    assert str(caught.value) == (
        "memory of cpu:0: asked for 1152921504606846976 bytes, 0 of 4611686018427387904 are in use, "
        "4611686018427387904 are free; free some tensors or use smaller ones"
    )
    h.release()


def test_threads_may_allocate_and_free_at_the_same_time():
    h = heap()

    def use():
        for k in range(300):
            h.free(h.allocate(k * 37))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert h.stats().in_use == 0
    assert h.stats().allocations == 0
    h.release()
