"""Memory of the cpu driver: its allocator, and what streams take and give back."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peertile.errors import AllocationError
from peertile.memory_model import Cmp
from peertile.runtime.driver import Status
from peertile.runtime.drivers.cpu import CpuDriver
from peertile.runtime.drivers.cpu_memory import Heap
from peertile.testing.cpu_kernels import cpu_kernels
from peertile.testing.driver_suite import args, options, words


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


def test_a_destroyed_stream_s_memory_goes_to_the_next_one():
    device = CpuDriver(threads=2).open()
    add = device.load_module(cpu_kernels().add)
    block = words(device, device.create_stream(), [1])
    addresses = set()
    for k in range(50):
        stream = device.create_stream()
        addresses.add(stream.address)
        event = device.create_event()
        if k % 2:  # with a thread of its own, or without
            device.launch(stream, add, (1, 1, 1), args(block, block, block), options("add"))
        ticket = device.record_event(stream, event)
        assert device.wait(ticket) is Status.DONE
        thread = stream.thread
        device.destroy_stream(stream)
        assert device.query(device.event_ticket(event)) is Status.DONE  # the event outlives its stream
        device.destroy_event(event)
        del stream, ticket, event
        if thread is not None:
            thread.join(10)
        del thread
    assert len(addresses) <= 3
    device.close()


def test_a_stream_that_is_waited_for_outlives_its_destruction():
    device = CpuDriver(threads=2).open()
    a, b, free = (device.create_stream() for _ in range(3))
    word = words(device, free, [0])
    device.wait_value(a, word, 1, 64, Cmp.EQ, timeout_ns=10**10)
    event = device.create_event()
    device.record_event(a, event)
    behind = device.wait_event(b, event)
    device.destroy_stream(a)
    device.destroy_event(event)
    del a, event
    fresh = [device.create_stream() for _ in range(3)]  # none of them may be given its memory
    assert device.query(behind) is Status.PENDING
    device.write_value(free, word, 1, 64)
    assert device.wait(behind, 10) is Status.DONE
    del fresh
    device.close()
