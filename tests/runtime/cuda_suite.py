"""The conformance suite as the cuda driver keeps it, for a GPU and for a stand-in.

Two tests say less than those of the protocol: a fault stops what is enqueued after the host has seen it, while what
was enqueued before may run and is reported as skipped. One needs a kernel with as many slots as its block.
"""

from peertile.errors import ArgumentError
from peertile.runtime.driver import FaultKind, Status
from peertile.testing.cuda_kernels import LONG_SLOTS
from peertile.testing.driver_suite import DriverSuite, args, options, raises, read_words, words


class CudaSuite(DriverSuite):
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
