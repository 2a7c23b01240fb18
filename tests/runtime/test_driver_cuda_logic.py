"""The cuda driver over a stand-in for the NVIDIA driver: everything that it decides itself, without a GPU."""

import ctypes
import os
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.runtime import fake_cuda
from tests.runtime.cuda_suite import CudaSuite
from tests.runtime.fake_cuda import SUITE, FakeCuda

from peertile.backends.cuda.layout import LaunchContext
from peertile.errors import (
    AllocationError,
    ArgumentError,
    DeviceFault,
    LaunchError,
    UnsupportedError,
    UsageError,
)
from peertile.memory_model import Cmp
from peertile.runtime.driver import FaultKind, LaunchOptions, ShareKind, Status, Ticket
from peertile.runtime.drivers import cuda, cuda_feeder, cuda_stream
from peertile.runtime.drivers.cuda import CudaDriver
from peertile.runtime.drivers.cuda_native import Lane
from peertile.runtime.drivers.cuda_ops import LETS_IN, LETS_IN_AT_LAST, Launch
from peertile.runtime.drivers.cuda_segments import Segments
from peertile.runtime.drivers.cuda_waits import STREAM_WAITS
from peertile.testing.cuda_kernels import extra_kernel
from peertile.testing.driver_suite import args, holding, options, raises, read_words, words

SECOND = 1_000_000_000


@pytest.fixture(scope="module")
def shared_device():
    device = CudaDriver(api=FakeCuda()).open()
    yield device
    device.close()


class StandInSuite(CudaSuite):
    @pytest.fixture
    def kernels(self):
        return SUITE

    @pytest.fixture
    def extra(self):
        return lambda entry: extra_kernel(b"python", entry)


class TestSuiteOverStandIn(StandInSuite):
    @pytest.fixture
    def device(self, shared_device):
        return shared_device


@pytest.fixture(scope="module")
def fed_device():
    """Its feeder is woken by every launch that follows another one, whatever the host has."""
    with pytest.MonkeyPatch.context() as patch:
        with pytest.MonkeyPatch.context() as other:
            other.setattr(cuda_feeder, "LEAST_CORES", 1)
            device = CudaDriver(api=FakeCuda()).open()
        patch.setattr(cuda_stream, "AFTER", 0)
        yield device
        device.close()


class TestSuiteWithFeeder(StandInSuite):
    @pytest.fixture
    def device(self, fed_device):
        return fed_device


@pytest.fixture
def fake():
    return FakeCuda()


@pytest.fixture
def device(fake):
    device = CudaDriver(api=fake).open()
    yield device
    device.close()


def launch_of(device, entry, *values, grid=(1, 1, 1)):
    """(module, grid, args) of one of the kernels beside the suite."""
    return device.load_module(extra_kernel(b"python", entry)), grid, args(*values)


# ---------------------------------------------------------------- launches


def test_parameters_are_those_of_the_launch_layout(device, fake, monkeypatch):
    seen = []

    def launch(function, blocks, threads, shared, stream, params, cooperative, overlap=False):
        pointers = struct.unpack("<13Q", ctypes.string_at(params, 8 * 13))
        seen.append((blocks, threads, b"".join(ctypes.string_at(p, 8) for p in pointers), cooperative))

    s = device.create_stream()
    module = device.load_module(SUITE.add)
    monkeypatch.setattr(fake, "launch", launch)
    o = options("add", timeout_s=2)
    for _ in range(2):  # the long way, then the short one
        device.launch(s, module, (2, 3, 4), args(5, -6, 7), o)
    for k, (blocks, threads, data, cooperative) in enumerate(seen):
        fault, launch_words = s.block.address + 128 * k, s.block.words + 64 * k
        context = LaunchContext((2, 3, 4), device.zero_word, fault, 2 * SECOND, launch_words)
        assert data == SUITE.add.layout.pack(args(5, -6, 7), context)
        assert (blocks, threads, cooperative) == (24, 32, False)


def test_native_code_launches_all_but_the_first_of_a_stream(device, fake):
    s = device.create_stream()
    out = words(device, s, [0, 0, 0, 1, 1, 1, 2, 2, 2])
    add = device.prepare_launch(device.load_module(SUITE.add), (3, 1, 1), options("add"))
    for _ in range(5):
        assert device.run_prepared(s, add, args(out + 24, out + 48, out)) is None
    assert read_words(device, s, out, 3) == [3] * 3
    assert fake.native_launches == 4
    with raises(ArgumentError, "add: expected an argument block of 24 bytes, got 8"):
        device.launch_prepared(s, add, args(1))


def test_a_small_kernel_that_waits_lets_the_next_small_one_begin_in_a_graph():
    def launch(programs, waits=True, overlap=True):
        module = SimpleNamespace(waits=waits, overlap=overlap, limit=64, n_bytes=0)
        return Launch(module, (programs, 1, 1), programs, b"", options("k"), 0)

    small, large = launch(16), launch(17)  # four of the small ones are resident together
    assert small.lets_in(small) == LETS_IN
    assert small.lets_in(launch(16, waits=False)) == LETS_IN
    assert not small.lets_in(large)  # it would take places that others' programs may need
    assert not large.lets_in(small)
    assert not launch(16, waits=False).lets_in(small)  # it lets everybody in by itself
    assert not small.lets_in(launch(16, overlap=False))
    assert not small.lets_in(SimpleNamespace())


def test_who_needs_all_places_is_let_in_once_nobody_waits_any_more():
    def launch(programs, waits=True, overlap=True):
        module = SimpleNamespace(waits=waits, overlap=overlap, limit=64, n_bytes=0)
        return Launch(module, (programs, 1, 1), programs, b"", options("k"), 0)

    small, whole = launch(16), launch(56)
    assert small.lets_in(whole) == whole.lets_in(whole) == LETS_IN_AT_LAST
    assert whole.lets_in(launch(1000, waits=False)) == LETS_IN_AT_LAST
    # Two of the others would share a place, and others stay empty.
    assert not whole.lets_in(launch(55))
    assert not whole.lets_in(small)
    assert not whole.lets_in(launch(64, overlap=False))
    assert not launch(64, waits=False).lets_in(whole)


def test_a_chain_longer_than_a_block_and_than_the_queue_runs_in_order(device, fake):
    s = device.create_stream()
    at = words(device, s, [1, 1, 0])
    # Each adds the first word to the third, so every one has to have run.
    add = device.prepare_launch(device.load_module(SUITE.add), (1, 1, 1), options("add"))
    first = device.last_ticket(s).sequence
    numbers = device.launch_many(s, [(add, args(at, at + 16, at + 16))] * 700)
    assert list(numbers) == list(range(first + 1, first + 701))
    assert device.wait(device.last_ticket(s)) is Status.DONE
    assert read_words(device, s, at + 16, 1) == [700]
    assert device.completed(s) >= numbers[-1]
    assert device.is_sound(s, numbers[-1])
    assert not device.is_sound(s, device.last_ticket(s).sequence + 1)
    assert fake.native_launches > 256


def test_a_fault_in_a_chain_is_that_of_its_launch(device):
    s = device.create_stream()
    count = words(device, s, [0])
    fail = device.prepare_launch(device.load_module(SUITE.fail), (2, 1, 1), options("fail"))
    device.wait(device.launch_prepared(s, fail, args(count, -1)))
    numbers = device.launch_many(s, [(fail, args(count, 1 if k == 20 else -1)) for k in range(40)])
    ticket = device.last_ticket(s)
    assert device.wait(ticket) is Status.SKIPPED
    assert not device.is_sound(s, numbers[19])  # something failed on this stream: every one is asked about
    record = device.take_fault(s)
    assert (record.kind, record.op, record.sequence, record.program) == (FaultKind.ASSERT, "fail", numbers[20], 1)
    assert device.run_prepared(s, fail, args(count, -1)) is None  # the stream goes on
    assert list(device.launch_many(s, [])) == []


def test_a_chain_that_is_captured_has_no_numbers(device):
    s = device.create_stream()
    count = words(device, s, [0])
    fail = device.prepare_launch(device.load_module(SUITE.fail), (2, 1, 1), options("fail"))
    device.begin_capture(s)
    assert list(device.launch_many(s, [(fail, args(count, -1))] * 3)) == [-1] * 3
    graph = device.instantiate(device.end_capture(s))
    assert device.run_graph(s, graph) is None
    assert read_words(device, s, count, 1) == [6]


def test_the_nodes_of_a_graph_are_asked_where_one_has_failed(device, monkeypatch):
    s = device.create_stream()
    count = words(device, s, [0])
    fail = device.prepare_launch(device.load_module(SUITE.fail), (2, 1, 1), options("fail"))
    asked = []
    collect = Launch.collect
    monkeypatch.setattr(
        Launch,
        "collect",
        lambda op, issued, sequence, **more: asked.append(op.name) or collect(op, issued, sequence, **more),
    )
    for bad, number in ((-1, 0), (1, 3)):
        device.begin_capture(s)
        device.launch_many(s, [(fail, args(count, bad if k == 1 else -1)) for k in range(3)])
        graph = device.instantiate(device.end_capture(s))
        asked.clear()
        record = device.run_graph(s, graph)
        assert len(asked) == number  # each node takes as long to ask as a small kernel
        assert (record is None) == (bad == -1)
    assert (record.kind, record.op, record.node) == (FaultKind.ASSERT, "fail (node 1 of graph)", 1)


def test_a_launch_that_the_driver_refuses_natively_is_an_error(device, fake):
    s = device.create_stream()
    count = words(device, s, [0])
    fail = device.prepare_launch(device.load_module(SUITE.fail), (1, 1, 1), options("fail"))
    device.run_prepared(s, fail, args(count, -1))
    with pytest.MonkeyPatch.context() as patch:
        refusal = fake.error("LAUNCH_OUT_OF_RESOURCES", "cuLaunchKernel")

        def refuse(*values):
            raise refusal

        patch.setattr(fake, "launch", refuse)
        for launch in (device.run_prepared, device.launch_prepared, lambda *a: device.launch_many(s, [a[1:]] * 2)):
            with pytest.raises(LaunchError, match="LAUNCH_OUT_OF_RESOURCES"):
                launch(s, fail, args(count, -1))
    assert device.run_prepared(s, fail, args(count, -1)) is None
    assert read_words(device, s, count, 1) == [2]


def test_kernels_that_wait_are_cooperative_if_they_have_more_than_one_program(device, fake, monkeypatch):
    seen = []
    launch = fake.launch
    monkeypatch.setattr(fake, "launch", lambda *a: (seen.append(a[6]), launch(*a)))
    s = device.create_stream()
    out = words(device, s, [0] * 4)
    module = device.load_module(SUITE.barrier)
    for n in (1, 4):
        assert device.launch_sync(s, module, (n, 1, 1), args(out), options("barrier")) is None
    assert seen == [False, True]


def test_a_chain_of_launches_has_one_marker_for_32(device, fake):
    s = device.create_stream()
    module, grid, block = launch_of(device, "extra_nothing")
    fake.calls.clear()
    for _ in range(96):
        ticket = device.launch(s, module, grid, block, options("nothing"))
    assert fake.calls.count("write_value") == 3
    assert device.wait(ticket) is Status.DONE


def test_launch_words_are_zero_again_when_slots_are_reused(device):
    s = device.create_stream()
    out = words(device, s, [0] * 3)
    module = device.load_module(SUITE.barrier)
    for _ in range(200):
        assert device.launch_sync(s, module, (3, 1, 1), args(out), options("barrier")) is None
    assert read_words(device, s, out, 3) == [3] * 3
    assert len(s.blocks) <= 1  # two blocks of 64 slots in turn


def test_shared_memory_above_48_kib_is_allowed_and_above_the_device_refused(device, fake):
    device.load_module(extra_kernel(b"python", "extra_shared"))
    assert fake.allowed == ("extra_shared", 200 * 1024)
    fake.attributes["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"] = 101376
    small = CudaDriver(api=fake).open()
    message = (
        "extra_shared: its programs need 204800 bytes of shared memory, cuda:0 has 101376 for each; use smaller tiles "
        "or fewer stages"
    )
    with raises(LaunchError, message):
        small.load_module(extra_kernel(b"python", "extra_shared"))
    small.close()


def test_multiprocessors_of_kernels_that_wait_keep_room_for_what_ends_the_wait(device, fake):
    device.load_module(SUITE.add)
    device.load_module(SUITE.await_word)
    assert fake.sharing == ["peertile_wait", "suite_await"]


def test_a_kernel_for_another_architecture_is_refused(device):
    for target in ("cuda:sm_100", "cuda:sm_80", "cuda:sm_100a"):
        message = f"binary: extra_nothing was compiled for {target}, and cuda:0 is an sm_90; compile it for sm_90"
        with raises(UnsupportedError, message):
            device.load_module(extra_kernel(b"python", "extra_nothing", target))
    device.load_module(extra_kernel(b"python", "extra_nothing", "cuda:sm_90"))


def test_a_kernel_for_another_target_is_refused(device):
    class Cpu:
        target = "cpu"

    with raises(ArgumentError, "binary: expected one for cuda, got one for cpu"):
        device.load_module(Cpu())


def test_launches_that_wait_are_refused_while_launches_block(fake, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    device = CudaDriver(api=fake).open()
    s = device.create_stream()
    message = (
        "barrier: it waits, and with CUDA_LAUNCH_BLOCKING=1 its launch would not return before what it waits for is "
        "launched; unset that variable"
    )
    with raises(LaunchError, message):
        device.launch(s, device.load_module(SUITE.barrier), (1, 1, 1), args(0), options("barrier"))
    device.close()


def test_a_refused_launch_leaves_the_stream_usable(device, fake):
    s = device.create_stream()
    module, grid, block = launch_of(device, "extra_nothing")
    fake.refuse["launch"] = fake.error("INVALID_VALUE", "cuLaunchKernel")
    with raises(LaunchError, "cuda:0: cuLaunchKernel: text of invalid_value (CUDA_ERROR_INVALID_VALUE)"):
        device.launch(s, module, grid, block, options("nothing"))
    assert device.last_ticket(s).sequence == 0
    assert device.launch_sync(s, module, grid, block, options("nothing")) is None


def test_a_launch_refused_from_the_backlog_is_its_fault(device, fake):
    s = device.create_stream()
    module, grid, block = launch_of(device, "extra_nothing")
    with holding(device, s):
        for _ in range(400):  # beyond the depth that is given to the NVIDIA driver
            ticket = device.launch(s, module, grid, block, options("nothing"))
        fake.refuse["launch"] = fake.error("INVALID_VALUE", "cuLaunchKernel")
    assert device.wait(ticket) is Status.SKIPPED
    fault = device.take_fault(s)
    assert (fault.kind, fault.op) == (FaultKind.DEVICE, "nothing")
    assert isinstance(fault.error, LaunchError)


def test_the_context_of_the_caller_is_current_again_after_each_call(device, fake):
    fake.push_context(77)
    s = device.create_stream()
    device.wait(device.fill(s, device.allocate(8), 0, 8, 1))
    with pytest.raises(ArgumentError):
        device.copy(s, 0, 0, -1)
    assert fake.current_context() == 77
    fake.pop_context()


# ---------------------------------------------------------------- a lost device


def test_an_illegal_address_fails_its_operation_and_loses_the_device(fake):
    device = CudaDriver(api=fake).open()
    a, b = device.create_stream(), device.create_stream()
    module, grid, block = launch_of(device, "extra_illegal", 0)
    before = device.fill(a, device.allocate(8), 0, 8, 1)
    assert device.wait(before) is Status.DONE
    bad = device.launch(a, module, grid, block, options("bad"))
    behind = device.launch(a, module, grid, block, options("behind"))
    text = (
        "cuda:0 is lost: text of illegal_address (CUDA_ERROR_ILLEGAL_ADDRESS); it was in bad. Nothing runs on it any "
        "more in this process; end the process and start again"
    )
    assert device.wait(bad, 10) is Status.FAULTED
    assert device.query(before) is Status.DONE
    fault = device.fault(bad)
    assert (fault.kind, fault.op) == (FaultKind.DEVICE, "bad")
    assert isinstance(fault.error, DeviceFault)
    assert fault.error.message == text
    assert device.wait(behind) is Status.SKIPPED
    assert device.fault(behind).cause == fault
    assert device.take_fault(a) == fault
    for call in (
        lambda: device.allocate(8),
        lambda: device.fill(b, 0, 0, 1, 1),
        lambda: device.launch_sync(b, module, grid, block, options("late")),
        lambda: device.create_stream(),
    ):
        with raises(DeviceFault, text):
            call()
    device.memory_stats()
    device.free(12345)  # as garbage collection does
    device.close()


def test_a_device_lost_during_a_call_says_so_at_that_call(fake):
    device = CudaDriver(api=fake).open()
    s = device.create_stream()
    a = device.allocate(8)
    fake.refuse["fill"] = fake.error("ECC_UNCORRECTABLE", "cuMemsetAsync")
    text = (
        "cuda:0 is lost: text of ecc_uncorrectable (CUDA_ERROR_ECC_UNCORRECTABLE). Nothing runs on it any more in "
        "this process; end the process and start again"
    )
    for _ in range(2):
        with raises(DeviceFault, text):
            device.fill(s, a, 0, 1, 1)
    device.close()


# ---------------------------------------------------------------- value waits


def signal(device, stream, value):
    """A word that streams wait for themselves: not in a pool."""
    _, address = device.create_segment(64)
    device.wait(device.fill(stream, address, value, 8, 1))
    return address


def test_a_wait_that_ends_at_its_bound_puts_the_word_back(device):
    s = device.create_stream()
    for cmp, value in ((Cmp.EQ, 9), (Cmp.AT_LEAST, 9)):
        a = signal(device, s, 3)
        assert device.wait(device.wait_value(s, a, value, 64, cmp, timeout_ns=1000)) is Status.FAULTED
        assert device.take_fault(s).got == 3
        assert read_words(device, s, a, 1) == [3]


def test_the_bound_counts_from_when_the_stream_has_come_to_the_wait(device):
    s = device.create_stream()
    a = signal(device, s, 3)
    with holding(device, s):
        ticket = device.wait_value(s, a, 4, 64, Cmp.EQ, timeout_ns=1)
        assert device.wait(ticket, 0.02) is Status.PENDING
    assert device.wait(ticket) is Status.FAULTED


def test_an_abort_word_in_memory_of_the_host_is_registered_once(device, fake):
    page = ctypes.create_string_buffer(3 * 4096)
    abort = ctypes.c_int32.from_address(ctypes.addressof(page) // 4096 * 4096 + 4096)
    s = device.create_stream()
    a = signal(device, s, 3)
    address = ctypes.addressof(abort)
    tickets = [
        device.wait_value(t, a, 4, 64, cmp, timeout_ns=20 * SECOND, abort_address=address)
        for t, cmp in ((s, Cmp.EQ), (device.create_stream(), Cmp.GT))
    ]
    abort.value = 1
    for ticket in tickets:
        assert device.wait(ticket, 5) is Status.FAULTED
        assert device.fault(ticket).kind is FaultKind.ABORTED
    assert fake.calls.count("register_host") == 1


def test_code_is_loaded_when_no_stream_waits_so_that_a_wait_can_end_at_its_bound(device, fake, monkeypatch):
    """A load takes the whole context until all in it has ended: also from the thread that ends waits at their bound."""
    s = device.create_stream()
    a = signal(device, s, 3)
    begin = time.monotonic_ns()
    ticket = device.wait_value(s, a, 4, 64, Cmp.EQ, timeout_ns=SECOND // 10)
    found = []
    load = fake.load_module
    monkeypatch.setattr(fake, "load_module", lambda image: found.append(time.monotonic_ns()) or load(image))
    device.load_module(extra_kernel(b"python", "extra_nothing"))
    assert len(found) == 1
    assert found[0] - begin >= SECOND // 10  # not before the wait had come to its bound
    assert device.wait(ticket, 5) is Status.FAULTED
    assert device.take_fault(s).got == 3


def test_waits_that_come_while_a_load_is_out_of_patience_stay_in_their_backlog_and_block_nobody(device, monkeypatch):
    """Least of all the thread that ends waits at their bound, which enqueues what backlogs hold."""
    monkeypatch.setattr(STREAM_WAITS, "_patience_s", 0.0)
    s, t = device.create_stream(), device.create_stream()
    a, b = signal(device, s, 3), signal(device, t, 5)
    first = device.wait_value(s, a, 4, 64, Cmp.EQ, timeout_ns=SECOND // 5)
    loader = threading.Thread(target=device.load_module, args=(extra_kernel(b"python", "extra_nothing"),), daemon=True)
    loader.start()
    end = time.monotonic() + 5
    while STREAM_WAITS.may_begin(device.context_number) and time.monotonic() < end:
        pass
    second = device.wait_value(t, b, 4, 64, Cmp.EQ, timeout_ns=1000)
    assert device.query(first) is Status.PENDING
    assert len(t.backlog) == 1
    assert device.wait(first, 5) is Status.FAULTED
    assert device.wait(second, 5) is Status.FAULTED
    loader.join(5)
    assert not loader.is_alive()
    assert (device.take_fault(s).got, device.take_fault(t).got) == (3, 5)


def test_no_stream_begins_to_wait_while_code_is_loaded(device, fake, monkeypatch):
    s = device.create_stream()
    a = signal(device, s, 3)
    within, go_on, waits = threading.Event(), threading.Event(), fake.wait_value
    load, order = fake.load_module, []

    def slow(image):
        within.set()
        assert go_on.wait(20)
        order.append("loaded")
        return load(image)

    monkeypatch.setattr(fake, "load_module", slow)
    monkeypatch.setattr(fake, "wait_value", lambda *a, **more: (order.append("waits"), waits(*a, **more))[1])
    loader = threading.Thread(target=lambda: device.load_module(extra_kernel(b"python", "extra_nothing")))
    waiter = threading.Thread(target=lambda: device.wait_value(s, a, 4, 64, Cmp.EQ, timeout_ns=20 * SECOND))
    loader.start()
    assert within.wait(20)
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    go_on.set()
    for thread in (loader, waiter):
        thread.join(20)
    assert order == ["loaded", "waits"]
    device.write_value(device.create_stream(), a, 4, 64)
    assert device.wait(device.last_ticket(s), 5) is Status.DONE


def test_code_is_unloaded_another_time_while_a_stream_waits(device, fake, monkeypatch):
    s = device.create_stream()
    a = signal(device, s, 3)
    unloaded = []
    monkeypatch.setattr(fake, "unload_module", unloaded.append)
    one, two = (device.load_module(extra_kernel(image, "extra_nothing")) for image in (b"python 1", b"python 2"))
    ticket = device.wait_value(s, a, 4, 64, Cmp.EQ, timeout_ns=20 * SECOND)
    device.unload_module(one)
    assert unloaded == []
    device.write_value(device.create_stream(), a, 4, 64)
    assert device.wait(ticket, 5) is Status.DONE
    device.unload_module(two)
    assert len(unloaded) == 2


def test_what_held_a_wait_up_goes_with_its_record(device, monkeypatch):
    s = device.create_stream()
    a = signal(device, s, 3)
    for note in ("", "meanwhile something else was going on"):
        monkeypatch.setattr(device, "held_up", lambda note=note: note)
        assert device.wait(device.wait_value(s, a, 4, 64, Cmp.EQ, timeout_ns=1000)) is Status.FAULTED
        assert device.take_fault(s).note == note


def test_a_host_function_behind_a_failed_wait_does_not_run(device):
    s = device.create_stream()
    a = signal(device, s, 3)
    called = []
    device.wait_value(s, a, 4, 64, Cmp.EQ, timeout_ns=1000)
    ticket = device.callback(s, lambda: called.append(1))
    assert device.wait(ticket) is Status.SKIPPED
    assert called == []


# ---------------------------------------------------------------- copies


def test_calls_of_the_host_behind_a_wait_do_not_block_their_caller(device, fake):
    streams, word = [device.create_stream() for _ in range(4)], words(device, device.create_stream(), [0])
    ran, tickets = [], []
    for stream in streams:
        device.wait_value(stream, word, 1, 64, Cmp.EQ, timeout_ns=20 * SECOND)
    for k in range(200):
        tickets.append(device.callback(streams[k % 4], lambda k=k: ran.append(k)))
    assert fake.pending_calls <= 4 * cuda_stream.HOST_DEPTH
    device.write_value(device.create_stream(), word, 1, 64)
    assert all(device.wait(ticket) is Status.DONE for ticket in tickets)
    assert sorted(ran) == list(range(200))
    assert all([k for k in ran if k % 4 == s] == list(range(s, 200, 4)) for s in range(4))
    assert [stream.calls for stream in streams] == [0] * 4


def test_long_copies_of_pageable_memory_go_in_pieces(device, monkeypatch):
    monkeypatch.setattr(cuda, "_CHUNK", 4096)
    s = device.create_stream()
    data = os.urandom(4096 * 5 + 100)
    source = ctypes.create_string_buffer(data, len(data))
    back = ctypes.create_string_buffer(len(data))
    a = device.allocate(len(data))
    device.wait(device.copy(s, a, ctypes.addressof(source), len(data)))
    device.wait(device.copy(s, ctypes.addressof(back), a, len(data)))
    assert back.raw == data
    ctypes.memset(back, 0, len(data))
    with holding(device, s):
        ticket = device.copy(s, ctypes.addressof(back), a, len(data))
        assert device.query(ticket) is Status.PENDING
    assert device.wait(ticket) is Status.DONE
    assert back.raw == data


def test_a_copy_reads_the_host_when_it_runs_if_something_before_may_write_there(device):
    s = device.create_stream()
    host = ctypes.c_int64(1)
    a, b = words(device, s, [5]), words(device, s, [0])
    with holding(device, s):
        device.copy(s, ctypes.addressof(host), a, 8)
        device.copy(s, b, ctypes.addressof(host), 8)
    assert read_words(device, s, b, 1) == [5]


def test_copies_between_addresses_of_the_host_run_in_order(device):
    s = device.create_stream()
    a, b = ctypes.c_int64(1), ctypes.c_int64(2)
    with holding(device, s):
        ticket = device.copy(s, ctypes.addressof(b), ctypes.addressof(a), 8)
        assert b.value == 2
    device.wait(ticket)
    assert b.value == 1


# ---------------------------------------------------------------- memory, segments


def test_out_of_memory_says_how_much_was_asked_used_and_free(fake):
    device = CudaDriver(api=fake, memory_limit=1 << 20).open()
    device.allocate(1 << 19)
    message = (
        "memory of cuda:0: asked for 1048576 bytes, 524288 of 1048576 are in use, 524288 are free; free some tensors "
        "or use smaller ones"
    )
    with raises(AllocationError, message):
        device.allocate(1 << 20)
    device.close()
    large = CudaDriver(api=fake).open()
    message = (
        f"memory of cuda:0: asked for {7 << 30} bytes, 0 of {8 << 30} are in use, {6 << 30} are free (other programs "
        "and libraries share the device); free some tensors or use smaller ones"
    )
    with raises(AllocationError, message):
        large.allocate(7 << 30)
    large.close()


def test_the_device_knows_which_others_it_cannot_reach(monkeypatch):
    fake = FakeCuda(devices=4)
    monkeypatch.setattr(fake, "can_access_peer", lambda device, peer: peer == 1)
    monkeypatch.setattr(fake, "native_peer_atomics", lambda device, peer: peer == 1)
    device = CudaDriver(api=fake).open()
    assert device.identity == f"cuda:{'00' * 16}"
    assert device.capabilities.unreachable == {f"cuda:{'02' * 16}", f"cuda:{'03' * 16}"}
    assert device.capabilities.peer_atomics  # not asked of those out of reach
    device.close()


def test_the_device_knows_what_it_can_access(device):
    a, pinned = device.allocate(1 << 20), device.allocate_host(100)
    host = ctypes.create_string_buffer(100)
    assert device.accessible(a, 1 << 20)
    assert device.accessible(pinned, 100)
    assert not device.accessible(a, 1 << 30)
    assert not device.accessible(ctypes.addressof(host), 100)
    device.free_host(pinned)


@pytest.mark.parametrize("kind", [ShareKind.FD, ShareKind.FABRIC])
def test_another_process_maps_the_same_memory(kind):
    fake = FakeCuda()
    fake.fabric = True
    device = CudaDriver(api=fake).open()
    assert device.capabilities.shares == (ShareKind.FABRIC, ShareKind.FD, ShareKind.IPC)
    s = device.create_stream()
    segment, address = device.create_segment(10_000, kind)
    share = device.export_segment(segment)
    other = Segments()  # what another process would have
    received = share.with_fds(tuple(os.dup(fd) for fd in share.fds))
    imported = other.import_(device, received)
    for fd in received.fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    there = other.map(imported)
    assert there != address
    device.wait(device.fill(s, address, 5, 8, 1250))
    assert read_words(device, s, there, 1250) == [5] * 1250
    device.free_segment(segment)
    assert read_words(device, s, there, 1) == [5]
    other.unmap(imported)
    other.free(imported)
    device.close()


def test_two_devices_of_a_process_map_a_segment_at_one_address():
    fake = FakeCuda(devices=2)
    driver = CudaDriver(api=fake)
    a, b = driver.open(0), driver.open(1)
    segment, address = a.create_segment(100)
    again = b.import_segment(a.export_segment(segment))
    assert b.map_segment(again) == address
    assert fake.blocks[address][2] == {0, 1}
    b.free_segment(again)
    a.free_segment(segment)
    ipc, _ = a.create_segment(100, ShareKind.IPC)
    message = (
        "share: an ipc segment is mapped by one device of a process, and cuda:0 has it already; make the segment with "
        "kind fd to map it on cuda:1 as well"
    )
    with raises(UnsupportedError, message):
        b.import_segment(a.export_segment(ipc))
    a.close()
    b.close()


def test_a_kind_of_sharing_that_does_not_work_here_is_refused(device):
    assert device.capabilities.shares == (ShareKind.FD, ShareKind.IPC)
    with raises(UnsupportedError, "segment: cuda:0 cannot share memory by fabric here; it can by fd, ipc"):
        device.create_segment(100, ShareKind.FABRIC)


def test_a_segment_freed_while_work_runs_is_unmapped_later(device, fake):
    s = device.create_stream()
    segment, address = device.create_segment(100)
    with holding(device, s):
        device.free_segment(segment)
        assert address in fake.blocks
    device.wait(device.last_ticket(s))
    for stream in device._streams:
        device.wait(device.last_ticket(stream))
    device.create_segment(100)
    assert address not in fake.blocks or fake.calls.count("unmap") == 2  # it, and the segment that held the stream


# ---------------------------------------------------------------- opening


def test_what_is_too_old_is_refused_with_what_to_install(fake):
    fake.version = 12020
    message = "cuda: the NVIDIA driver supports CUDA 12.2, peertile needs 12.4; install a newer NVIDIA driver"
    with raises(UnsupportedError, message):
        CudaDriver(api=fake).open()
    fake.version = 13000
    fake.attributes |= {"COMPUTE_CAPABILITY_MAJOR": 7, "COMPUTE_CAPABILITY_MINOR": 5}
    with raises(UnsupportedError, "cuda: Fake GPU is an sm_75, peertile needs sm_80 or newer"):
        CudaDriver(api=fake).open()


def test_an_ordinal_that_does_not_exist_is_refused(fake):
    with raises(ArgumentError, "ordinal: expected 0 to 0, got 1"):
        CudaDriver(api=fake).open(1)


def test_a_priority_out_of_range_is_refused(device):
    device.create_stream(-5)
    with raises(ArgumentError, "priority: expected -5 (greatest) to 0 (least), got 1"):
        device.create_stream(1)


def test_a_closed_device_says_so(fake):
    device = CudaDriver(api=fake).open()
    device.close()
    with raises(UsageError, "driver: expected an open device, got cuda:0, which was closed"):
        device.create_stream()
    device.free(1)


def test_many_threads_may_use_one_stream(device):
    s = device.create_stream()
    count = device.load_module(SUITE.fail)
    c = words(device, s, [0])
    errors = []

    def work():
        try:
            for _ in range(50):
                device.wait(device.launch(s, count, (1, 1, 1), args(c, -1), options("count")))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert errors == []
    assert read_words(device, s, c, 1) == [200]


FORKED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from tests.runtime.fake_cuda import FakeCuda
from peertile.errors import UsageError
from peertile.runtime.drivers.cuda import CudaDriver
from peertile.runtime.drivers.cuda_native import Lane

driver = CudaDriver(api=FakeCuda())
device = driver.open()
address = device.allocate(100)
read, write = os.pipe()
if os.fork() == 0:
    said = []
    for call in (lambda: device.create_stream(), driver.open, driver.device_count, lambda: device.allocate(1)):
        try:
            call()
        except UsageError as error:
            said.append(str(error))
    device.free(address)
    os.write(write, "|".join(said).encode())
    os._exit(0)
os.wait()
print(os.read(read, 10000).decode())
"""


@pytest.mark.slow
def test_a_forked_process_is_told_to_spawn():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "|".join(["runtime was initialised before fork; use spawn"] * 4), done.stderr


def test_print_options_are_handed_over_once_for_each_launch(device):
    s = device.create_stream()
    got = []
    module = device.load_module(SUITE.hello)
    o = LaunchOptions("hello", SECOND, on_print=lambda *record: got.append(record))
    for _ in range(3):
        device.launch(s, module, (2, 1, 1), b"", o)
    device.wait(device.last_ticket(s))
    assert sorted(got) == [(0, 3, b"hello")] * 3 + [(1, 3, b"hello")] * 3


# ---------------------------------------------------------------- the feeder


def posted(device, s, launch, block, count):
    """The numbers of so many launches, one by one; most of them go through the feeder."""
    return [device.enqueue(s, launch, block) for _ in range(count)]


def test_the_feeder_makes_launches_in_order(fed_device):
    device, s = fed_device, fed_device.create_stream()
    at = words(device, s, [1, 0])
    add = device.prepare_launch(device.load_module(SUITE.add), (1, 1, 1), options("add"))
    first = device.last_ticket(s).sequence
    numbers = posted(device, s, add, args(at, at + 8, at + 8), 1500)
    end = time.monotonic() + 20
    while s.lane[Lane.HEAD] <= 100 and time.monotonic() < end:
        # On a busy host the feeder slept so far, or the stand-in was behind by more than is let in flight.
        device.wait(device.last_ticket(s), 20)
        numbers += posted(device, s, add, args(at, at + 8, at + 8), 200)
    numbers += device.launch_many(s, [(add, args(at, at + 8, at + 8))] * 300)
    assert numbers == list(range(first + 1, first + 1 + len(numbers)))
    assert device.last_ticket(s).sequence == numbers[-1]
    assert device.wait(device.last_ticket(s), 20) is Status.DONE
    assert read_words(device, s, at + 8, 1) == [len(numbers)]
    assert s.lane[Lane.HEAD] > 100
    assert s.lane[Lane.HEAD] == s.lane[Lane.DONE]


def test_what_is_posted_comes_before_everything_else_on_the_stream(fed_device):
    device, s = fed_device, fed_device.create_stream()
    at = words(device, s, [1, 0])
    add = device.prepare_launch(device.load_module(SUITE.add), (1, 1, 1), options("add"))
    for n in range(1, 30):
        posted(device, s, add, args(at, at + 8, at + 8), 20)
        device.fill(s, at + 8, 7 * n, 8, 1)
        posted(device, s, add, args(at, at + 8, at + 8), 3)
        assert read_words(device, s, at + 8, 1) == [7 * n + 3]
        assert device.run_prepared(s, add, args(at, at + 8, at + 8)) is None
    assert read_words(device, s, at + 8, 1) == [7 * 29 + 4]


def test_a_launch_that_the_driver_refuses_in_the_feeder_fails_and_those_behind_it_do_not_run(fed_device, monkeypatch):
    device, s = fed_device, fed_device.create_stream()
    api = device.api
    at = words(device, s, [1, 0])
    add = device.prepare_launch(device.load_module(SUITE.add), (1, 1, 1), options("add"))
    posted(device, s, add, args(at, at + 8, at + 8), 40)
    assert device.wait(device.last_ticket(s), 20) is Status.DONE
    real, count = api.launch, 0

    def launch(*given):
        nonlocal count
        count += 1
        if count == 15:
            raise api.error("LAUNCH_OUT_OF_RESOURCES", "cuLaunchKernel")
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(api, "launch", launch)
        numbers, refused = [], None
        try:
            numbers = posted(device, s, add, args(at, at + 8, at + 8), 40)
        except LaunchError as error:  # made by the caller, as the feeder was asleep
            refused = error
        if refused is None:
            tickets = [Ticket(s, number, "add") for number in numbers]
            assert device.wait(tickets[-1], 20) is Status.SKIPPED
            statuses = [device.query(t) for t in tickets]
            assert statuses[:14] == [Status.DONE] * 14
            assert statuses[14] is Status.FAULTED
            assert set(statuses[15:]) == {Status.SKIPPED}
            record = device.fault(tickets[14])
            assert record.kind is FaultKind.DEVICE
            assert "OUT_OF_RESOURCES" in str(record.error)
            assert device.take_fault(s) is not None
    assert device.wait(device.last_ticket(s), 20) is not Status.PENDING
    before = read_words(device, s, at + 8, 1)
    posted(device, s, add, args(at, at + 8, at + 8), 10)
    assert read_words(device, s, at + 8, 1) == [before[0] + 10]


def test_the_feeder_serves_streams_beside_each_other(fed_device):
    device = fed_device
    streams = [device.create_stream() for _ in range(4)]
    add = device.prepare_launch(device.load_module(SUITE.add), (1, 1, 1), options("add"))
    places = [words(device, s, [1, 0]) for s in streams]

    def submit(s, at):
        posted(device, s, add, args(at, at + 8, at + 8), 300)

    threads = [threading.Thread(target=submit, args=pair) for pair in zip(streams, places, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [read_words(device, s, at + 8, 1) for s, at in zip(streams, places, strict=True)] == [[300]] * 4
    for s in streams:
        device.destroy_stream(s)


# ---------------------------------------------------------------- launches that tell when they begin


@pytest.mark.parametrize("fed", [False, True])
def test_a_launch_that_tells_when_it_begins_needs_no_marker_in_front_of_it(device, fed_device, monkeypatch, fed):
    device = fed_device if fed else device
    api, s = device.api, device.create_stream()
    kernel = fake_cuda.KERNELS["suite_await"]

    def told(p, w):
        fake_cuda._put(w[3 + 4], 8, 1)
        yield from kernel(p, w)

    monkeypatch.setitem(fake_cuda.KERNELS, "suite_await", told)
    at = words(device, s, [1, 0, 0, 0])
    add = device.prepare_launch(device.load_module(SUITE.add), (1, 1, 1), options("add"))
    telling = device.load_module(replace(SUITE.await_word, tells=True))
    wait = device.prepare_launch(telling, (1, 1, 1), options("wait", timeout_s=20))
    device.run_prepared(s, add, args(at, at + 8, at + 8))
    host = device.create_stream()
    for n in range(1, 101):  # more than are noted at a time
        for _ in range(3):
            number = device.enqueue(s, add, args(at, at + 8, at + 8))
        api.calls.clear()
        blocked = device.enqueue(s, wait, args(at + 16, n, at + 24))
        assert device.wait(Ticket(s, number, "add"), 10) is Status.DONE
        assert device.query(Ticket(s, blocked, "wait")) is Status.PENDING
        device.fill(host, at + 16, n, 8, 1)
        assert device.wait(Ticket(s, blocked, "wait"), 10) is Status.DONE
    assert read_words(device, s, at + 8, 1) == [301]


def test_launches_that_tell_follow_each_other_without_markers(fake, monkeypatch):
    monkeypatch.setattr(cuda_feeder, "LEAST_CORES", 1 << 30)
    device = CudaDriver(api=fake).open()
    s = device.create_stream()
    at = words(device, s, [5, 0])
    kernel = fake_cuda.KERNELS["suite_await"]
    monkeypatch.setitem(fake_cuda.KERNELS, "suite_await", lambda p, w: fake_cuda._put(w[7], 8, 1) or kernel(p, w))
    for tells, most in ((False, 25), (True, 0)):
        module = device.load_module(replace(SUITE.await_word, tells=tells))
        wait = device.prepare_launch(module, (1, 1, 1), options("wait"))
        device.run_prepared(s, wait, args(at, 5, at + 8))
        before = fake.calls.count("write_value")
        for _ in range(20):
            device.enqueue(s, wait, args(at, 5, at + 8))
        assert most - 10 < fake.calls.count("write_value") - before <= most
        assert device.wait(device.last_ticket(s), 10) is Status.DONE
    device.close()


@pytest.mark.parametrize(
    ("named", "told"),
    [
        (None, ""),
        ("", "; CUDA_VISIBLE_DEVICES is '': leave it out, or name GPUs that exist"),
        ("7", "; CUDA_VISIBLE_DEVICES is '7': leave it out, or name GPUs that exist"),
    ],
)
def test_where_no_gpu_is_left_to_see_that_is_what_is_said(named, told, monkeypatch):
    nothing = SimpleNamespace(cuInit=lambda flags: (SimpleNamespace(name="CUDA_ERROR_NO_DEVICE"),))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", nothing)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # which it sets
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    with pytest.raises(UnsupportedError) as caught:
        CudaDriver()
    assert str(caught.value) == f"cuda: expected a GPU, the NVIDIA driver finds none{told}"
