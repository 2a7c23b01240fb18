"""The conformance suite as the cuda driver keeps it, for a GPU and for a stand-in.

Three tests say less than those of the protocol: a fault stops what is enqueued after the host has seen it, while what
was enqueued before may run and is reported as skipped; and loading a module may wait for kernels that run. One needs a
kernel with as many slots as its block. Others are about the memory that operations take.
"""

import ctypes

from peertile.errors import ArgumentError
from peertile.memory_model import Cmp
from peertile.runtime.driver import FaultKind, Status
from peertile.testing.cuda_kernels import LONG_SLOTS
from peertile.testing.driver_suite import DriverSuite, args, options, raises, read_words, words

SECOND = 1_000_000_000


class CudaSuite(DriverSuite):
    def test_creating_allocating_and_freeing_do_not_wait_for_running_work(self, device, kernels):
        s = device.create_stream()
        w, out = words(device, s, [0]), words(device, s, [0])
        kernel = device.load_module(kernels.await_word)
        ticket = device.launch(s, kernel, (1, 1, 1), args(w, 1, out), options("spin"))
        device.free(device.allocate(100))
        late = device.create_stream()
        segment, _ = device.create_segment(100)
        device.free_segment(segment)
        device.create_event()
        device.write_value(late, w, 1, 64)
        assert device.wait(ticket) is Status.DONE

    def test_words_of_segments_and_pinned_words_are_waited_for_by_the_stream(self, device):
        s, other = device.create_stream(), device.create_stream()
        segment, address = device.create_segment(4096)
        pinned = device.allocate_host(64)
        ctypes.memset(pinned, 0, 64)
        for word in (address + 128, pinned):
            for width, value in ((64, 1 << 40), (32, (1 << 31) + 5)):
                for cmp in (Cmp.EQ, Cmp.AT_LEAST):
                    assert device.wait(device.fill(s, word, 0, 8, 1)) is Status.DONE
                    start = value - 1 if width == 32 else 0  # a wait of 32 bits wraps at 2^31
                    device.wait(device.write_value(other, word, start, width))
                    ticket = device.wait_value(s, word, value, width, cmp, timeout_ns=20 * SECOND)
                    assert device.query(ticket) is Status.PENDING
                    device.write_value(other, word, value, width)
                    assert device.wait(ticket) is Status.DONE
                    assert read_words(device, other, word, 1) == [value]
            assert device.wait(device.fill(s, word, 3, 8, 1)) is Status.DONE
            ticket = device.wait_value(s, word, 4, 64, Cmp.EQ, timeout_ns=2_000_000, name="wait for 4")
            assert device.wait(ticket) is Status.FAULTED
            fault = device.take_fault(s)
            assert fault is not None
            assert (fault.kind, fault.op, fault.got, fault.limit) == (FaultKind.WAIT_TIMEOUT, "wait for 4", 3, 4)
            assert (fault.address, fault.program, fault.place) == (word, -1, -1)
            assert read_words(device, s, word, 1) == [3]  # put back
            abort = words(device, other, [0])
            ticket = device.wait_value(s, word, 4, 64, Cmp.EQ, timeout_ns=20 * SECOND, abort_address=abort)
            device.write_value(other, abort, 1, 32)
            assert device.wait(ticket) is Status.FAULTED
            fault = device.take_fault(s)
            assert fault is not None
            assert fault.kind is FaultKind.ABORTED
        device.free_host(pinned)
        device.free_segment(segment)

    def test_pageable_memory_is_for_copies_alone(self, device):
        s = device.create_stream()
        host = (ctypes.c_int64 * 8)()
        at = ctypes.addressof(host)
        what = f"expected memory of a device, a segment, or pinned memory of the host, got {at:#x}, which is pageable"
        word = f"address: {what} or nobody's; put the word into memory of the device or of allocate_host"
        with raises(ArgumentError, word):
            device.write_value(s, at, 1, 64)
        with raises(ArgumentError, word):
            device.wait_value(s, at, 1, 64, Cmp.EQ, timeout_ns=1)
        with raises(ArgumentError, f"dst: {what} or nobody's; fill an array of the host there, or allocate_host"):
            device.fill(s, at, 1, 8, 8)
        a = words(device, s, range(8))
        assert device.wait(device.copy(s, at, a, 64)) is Status.DONE
        assert list(host) == list(range(8))

    def test_a_fault_stops_its_stream_until_it_is_taken(self, device, kernels):
        s = device.create_stream()
        fail = device.load_module(kernels.fail)
        c = words(device, s, [0, 0])
        before = device.fill(s, c, 100, 8, 1)
        bad = device.launch(s, fail, (8, 1, 1), args(c, 5), options("bad"))
        after = device.fill(s, c + 8, 7, 8, 1, name="after")
        assert device.wait(after) is Status.SKIPPED
        assert (device.query(before), device.query(bad)) == (Status.DONE, Status.FAULTED)
        fault = device.fault(bad)
        assert fault is not None
        assert (fault.kind, fault.op, fault.sequence) == (FaultKind.ASSERT, "bad", bad.sequence)
        assert (fault.program, fault.place, fault.got, fault.limit, fault.node) == (5, 4, 70, 64, -1)
        skipped = device.fault(after)
        assert skipped is not None
        assert (skipped.kind, skipped.op, skipped.cause) == (FaultKind.SKIPPED, "after", fault)
        late = device.fill(s, c, 1, 8, 1)  # the fault has been seen: this one does not run
        assert device.take_fault(s) == fault
        assert device.take_fault(s) is None
        assert device.wait(late) is Status.SKIPPED
        assert read_words(device, s, c, 2)[0] == 108
        assert (device.query(bad), device.query(after)) == (Status.FAULTED, Status.SKIPPED)
        assert device.fault(before) is None

    def test_a_fault_in_a_graph_names_its_node(self, device, kernels):
        s = device.create_stream()
        fail = device.load_module(kernels.fail)
        c = words(device, s, [0, 0])
        called = []
        device.begin_capture(s)
        device.fill(s, c, 40, 8, 1)
        device.launch(s, fail, (2, 1, 1), args(c, 1), options("bad"))
        device.fill(s, c + 8, 7, 8, 1)
        device.callback(s, lambda: called.append(1))  # functions of the host do not run behind a fault
        graph = device.instantiate(device.end_capture(s))
        for on_caller in (False, True):
            ticket = device.launch_graph(s, graph, name="step", on_caller=on_caller)
            assert device.wait(ticket) is Status.FAULTED
            fault = device.take_fault(s)
            assert fault is not None
            assert (fault.op, fault.node, fault.program) == ("bad (node 1 of step)", 1, 1)
            assert read_words(device, s, c, 2)[0] == 42
        assert called == []

    def test_long_argument_blocks_arrive_whole(self, device, kernels, extra):
        s = device.create_stream()
        kernel = device.load_module(extra("extra_long"))
        out = words(device, s, [0, 0])
        block = args(out, *range(1000, 999 + LONG_SLOTS))
        for _ in range(2):
            assert device.launch_sync(s, kernel, (2, 1, 1), block, options("long")) is None
        expected = sum(k * (999 + k) for k in range(1, LONG_SLOTS))
        assert read_words(device, s, out, 2) == [expected] * 2
        message = f"long: expected an argument block of {8 * LONG_SLOTS} bytes, got 8"
        with raises(ArgumentError, message):
            device.launch(s, kernel, (1, 1, 1), args(0), options("long"))
