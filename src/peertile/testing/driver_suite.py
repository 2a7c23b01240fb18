"""Conformance suite of the driver protocol: one test for each thing that `runtime/driver.py` promises.

A test file derives a class from `DriverSuite` and gives two pytest fixtures, `device` (an open device of the driver
under test) and `kernels` (a `SuiteKernels` for its target). Nothing here imports pytest, sleeps, or touches device
memory except through the driver. A stream is held up by a value wait and let go by a value write of another.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from peertile.errors import ArgumentError, LaunchError, UsageError
from peertile.memory_model import Cmp
from peertile.runtime.driver import (
    DriverDevice,
    FaultKind,
    GraphHandle,
    LaunchOptions,
    LoadableBinary,
    Status,
    StreamHandle,
    Ticket,
)

__all__ = ["DriverSuite", "SuiteKernels", "holding", "raises", "read_words", "words"]

_SECOND = 1_000_000_000


@dataclass(frozen=True)
class SuiteKernels:
    """Kernels that the suite launches; p is the program, words are i64. Those of the second group wait."""

    add: LoadableBinary  # (X, Y, Z): Z[p] = X[p] + Y[p]
    fail: LoadableBinary  # (Count, which): adds 1 to Count; program `which` fails an assert (place 4, got 70, limit 64)
    work: LoadableBinary  # (Out, count): `count` steps of arithmetic, then Out[p] = the result
    scratch: LoadableBinary  # (Out): writes p to both ends of 4096 bytes of scratch; Out[p] = their sum + misalignment
    hello: LoadableBinary  # (): prints "hello" at place 3

    barrier: LoadableBinary  # (Out): two barriers over the grid; Out[p] = arrivals seen after them
    await_word: LoadableBinary  # (Word, expected, Out): wait Word at least expected (place 2, slot 9); Out[p] = Word
    await_word32: LoadableBinary  # the same with an i32 word
    ping: LoadableBinary  # (Mine, Theirs, rounds): for i in 1..rounds: Theirs = i; wait Mine at least i
    suspend: LoadableBinary  # (Word, Out): suspends until Word is not 0; Out[p] = Word


@contextmanager
def raises(kind: type[Exception], message: str) -> Iterator[None]:
    """The block raises `kind` with exactly this message."""
    try:
        yield
    except kind as error:
        if str(error) != message:
            raise AssertionError(f"expected {message!r}, got {str(error)!r}") from error
    else:
        raise AssertionError(f"expected {kind.__name__}: {message}")


def words(device: DriverDevice, stream: StreamHandle, values: Sequence[int]) -> int:
    """Address of new device memory that holds `values` as i64."""
    host = (ctypes.c_int64 * max(len(values), 1))(*values)
    address = device.allocate(8 * len(values))
    device.wait(device.copy(stream, address, ctypes.addressof(host), 8 * len(values)))
    return address


def read_words(device: DriverDevice, stream: StreamHandle, address: int, count: int) -> list[int]:
    """`count` i64 of device memory."""
    host = (ctypes.c_int64 * count)()
    assert device.wait(device.copy(stream, ctypes.addressof(host), address, 8 * count)) is Status.DONE
    return list(host)


@contextmanager
def holding(device: DriverDevice, stream: StreamHandle) -> Iterator[Ticket]:
    """What is enqueued on the stream inside the block does not run before the block ends. Gives the wait."""
    other = device.create_stream()
    # A word of a segment, as signals are: on a GPU the wait then occupies no multiprocessor.
    segment, word = device.create_segment(64)
    held = device.wait_value(stream, word, 1, 64, Cmp.EQ, timeout_ns=30 * _SECOND, name="hold")
    try:
        yield held
    finally:
        device.wait(device.write_value(other, word, 1, 64))
        device.wait(held, 5)
        device.free_segment(segment)


def options(name: str, *, timeout_s: float = 20, abort: int = 0) -> LaunchOptions:
    return LaunchOptions(name, int(timeout_s * 1e9), abort)


def args(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


class DriverSuite:
    """See the module docstring."""

    REPEATS = 4
    """Of large launches one after the other, for what comes out at times; a device without threads needs one."""

    # ------------------------------------------------------------------------------------------------ memory

    def test_allocations_are_aligned_and_do_not_overlap(self, device: DriverDevice) -> None:
        sizes = [1, 64, 65, 0, 1000, 1 << 20]
        blocks = sorted((device.allocate(n), n) for n in sizes)
        assert all(address % 64 == 0 for address, _ in blocks)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(blocks))

    def test_statistics_follow_allocation_and_free(self, device: DriverDevice) -> None:
        before = device.memory_stats()
        address = device.allocate(1 << 20)
        during = device.memory_stats()
        device.free(address)
        after = device.memory_stats()
        assert during.in_use - before.in_use >= 1 << 20
        assert during.allocations == before.allocations + 1
        assert during.free == during.limit - during.in_use
        assert (after.in_use, after.allocations) == (before.in_use, before.allocations)
        assert after.peak >= during.in_use
        assert after.reserved >= after.in_use

    def test_freed_memory_is_used_again(self, device: DriverDevice) -> None:
        reserved = None
        for _ in range(50):
            device.free(device.allocate(8 << 20))
            reserved = reserved or device.memory_stats().reserved
        assert device.memory_stats().reserved == reserved

    def test_negative_size_is_refused(self, device: DriverDevice) -> None:
        with raises(ArgumentError, "nbytes: expected an integer >= 0, got -1"):
            device.allocate(-1)

    # ------------------------------------------------------------------------------------------ copy and fill

    def test_copies_run_in_stream_order(self, device: DriverDevice) -> None:
        s = device.create_stream()
        a, b = words(device, s, [1, 2, 3]), words(device, s, [0, 0, 0])
        device.copy(s, b, a, 24)
        device.copy(s, a + 8, b, 16)
        assert read_words(device, s, a, 3) == [1, 1, 2]

    def test_a_copy_of_nothing_completes(self, device: DriverDevice) -> None:
        s = device.create_stream()
        assert device.wait(device.copy(s, 0, 0, 0)) is Status.DONE

    def test_fill_repeats_patterns_of_each_width(self, device: DriverDevice) -> None:
        s = device.create_stream()
        pattern = 0x1122334455667788
        for width in (1, 2, 4, 8):
            for count in (0, 1, 3, 16, 37):
                a = device.allocate(512)
                device.fill(s, a, 0, 1, 512)
                device.fill(s, a + 8, pattern, width, count)
                data = struct.pack("<64q", *read_words(device, s, a, 64))
                one = (pattern & ((1 << 8 * width) - 1)).to_bytes(width, "little")
                assert data == bytes(8) + one * count + bytes(504 - width * count)

    def test_fill_takes_negative_patterns(self, device: DriverDevice) -> None:
        s = device.create_stream()
        a = device.allocate(16)
        device.fill(s, a, -2, 8, 2)
        assert read_words(device, s, a, 2) == [-2, -2]

    def test_fill_of_an_odd_width_is_refused(self, device: DriverDevice) -> None:
        s = device.create_stream()
        with raises(ArgumentError, "width: expected 1, 2, 4 or 8 bytes, got 3"):
            device.fill(s, 0, 0, 3, 1)

    # ---------------------------------------------------------------------------------------- streams, events

    def test_streams_run_at_the_same_time(self, device: DriverDevice) -> None:
        a, b, free = device.create_stream(), device.create_stream(), device.create_stream()
        w = words(device, free, [0, 0])
        device.wait_value(a, w, 1, 64, Cmp.EQ, timeout_ns=20 * _SECOND)
        last = device.write_value(a, w + 8, 1, 64)
        device.write_value(b, w, 1, 64)
        device.wait_value(b, w + 8, 1, 64, Cmp.EQ, timeout_ns=20 * _SECOND)
        assert device.wait(device.last_ticket(b)) is Status.DONE
        assert device.wait(last) is Status.DONE

    def test_creating_allocating_and_freeing_do_not_wait_for_running_work(
        self, device: DriverDevice, kernels: SuiteKernels
    ) -> None:
        # Case F50: a kernel spins until a later one lets it go.
        s = device.create_stream()
        w, out = words(device, s, [0]), words(device, s, [0])
        kernel = device.load_module(kernels.await_word)
        ticket = device.launch(s, kernel, (1, 1, 1), args(w, 1, out), options("spin"))
        device.free(device.allocate(100))
        late = device.create_stream()
        device.load_module(kernels.add)
        segment, _ = device.create_segment(100)
        device.free_segment(segment)
        device.create_event()
        device.write_value(late, w, 1, 64)
        assert device.wait(ticket) is Status.DONE

    def test_an_event_orders_two_streams(self, device: DriverDevice) -> None:
        a, b = device.create_stream(), device.create_stream()
        x, y = words(device, a, [1]), words(device, a, [0])
        event = device.create_event()
        with holding(device, a):
            device.fill(a, x, 7, 8, 1)
            device.record_event(a, event)
            device.wait_event(b, event)
            copied = device.copy(b, y, x, 8)
            assert device.query(copied) is Status.PENDING
        assert device.wait(copied) is Status.DONE
        assert read_words(device, b, y, 1) == [7]

    def test_a_wait_means_the_record_enqueued_last_before_it(self, device: DriverDevice) -> None:
        # Case F54 and its reverse: a later record on a fast stream neither satisfies nor delays an earlier wait.
        slow, fast, third = device.create_stream(), device.create_stream(), device.create_stream()
        event = device.create_event()
        with holding(device, slow):
            device.record_event(slow, event)
            waited = device.wait_event(third, event)
            assert device.wait(device.record_event(fast, event)) is Status.DONE
            assert device.query(waited) is Status.PENDING
            assert device.wait(device.wait_event(fast, event)) is Status.DONE
        assert device.wait(waited) is Status.DONE

    def test_an_event_never_recorded_is_an_error(self, device: DriverDevice) -> None:
        # Case F53.
        s = device.create_stream()
        event = device.create_event()
        message = "event: expected an event that was recorded, got one never recorded; record it first"
        with raises(UsageError, message):
            device.wait_event(s, event)
        with raises(UsageError, message):
            device.event_ticket(event)

    def test_events_measure_time(self, device: DriverDevice) -> None:
        s = device.create_stream()
        start, end = device.create_event(), device.create_event()
        with holding(device, s):
            device.record_event(s, start)
            with raises(UsageError, "start: expected an event that has run, got one still pending; wait for it first"):
                device.elapsed_ns(start, start)
        device.wait(device.record_event(s, end))
        assert 0 <= device.elapsed_ns(start, end) < 20 * _SECOND
        assert device.elapsed_ns(start, start) == 0

    def test_a_ticket_is_pending_until_its_operation_has_run(self, device: DriverDevice) -> None:
        s = device.create_stream()
        with holding(device, s):
            ticket = device.fill(s, device.allocate(8), 0, 8, 1)
            assert device.query(ticket) is Status.PENDING
            assert device.wait(ticket, timeout_s=0.001) is Status.PENDING
            assert device.fault(ticket) is None
        assert device.wait(ticket) is Status.DONE
        assert device.query(ticket) is Status.DONE
        assert device.fault(ticket) is None

    def test_the_last_ticket_is_that_of_the_whole_stream(self, device: DriverDevice) -> None:
        s = device.create_stream()
        assert device.query(device.last_ticket(s)) is Status.DONE
        ticket = device.fill(s, device.allocate(8), 0, 8, 1, name="zero")
        assert device.last_ticket(s) == ticket
        assert device.wait(device.last_ticket(s)) is Status.DONE

    def test_a_destroyed_stream_still_runs_what_it_has(self, device: DriverDevice) -> None:
        s, other = device.create_stream(), device.create_stream()
        a = words(device, other, [0])
        with holding(device, s):
            ticket = device.fill(s, a, 5, 8, 1)
            device.destroy_stream(s)
        assert device.wait(ticket) is Status.DONE
        assert read_words(device, other, a, 1) == [5]
        with raises(UsageError, "stream: expected a live stream, got one that was destroyed"):
            device.fill(s, a, 5, 8, 1)

    def test_thousands_of_operations_can_be_pending(self, device: DriverDevice) -> None:
        s = device.create_stream()
        a = device.allocate(8 * 3000)
        with holding(device, s):
            for k in range(3000):
                device.fill(s, a + 8 * k, k, 8, 1)
        assert read_words(device, s, a, 3000) == list(range(3000))

    def test_operations_may_run_on_the_caller(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        s = device.create_stream()
        x, y, z = (words(device, s, v) for v in ([1, 2], [10, 20], [0, 0]))
        assert device.query(device.fill(s, x, 3, 8, 2, on_caller=True)) in (Status.DONE, Status.PENDING)
        add = device.load_module(kernels.add)
        ticket = device.launch(s, add, (2, 1, 1), args(x, y, z), options("add"), on_caller=True)
        assert device.wait(ticket) is Status.DONE
        assert device.wait(device.copy(s, x, z, 16, on_caller=True)) is Status.DONE
        assert read_words(device, s, x, 2) == [13, 23]

    def test_closing_with_pending_work_is_refused(self, device: DriverDevice) -> None:
        s = device.create_stream()
        with holding(device, s):
            name = f"{device.kind.value}:{device.ordinal}"
            with raises(LaunchError, f"{name}: cannot close while operations are pending; sync its streams first"):
                device.close()
        assert device.wait(device.last_ticket(s)) is Status.DONE

    # --------------------------------------------------------------------------------------------- value ops

    def test_value_waits_compare_as_asked(self, device: DriverDevice) -> None:
        s = device.create_stream()
        cases = [
            # width, word, value, signed, the comparisons that hold
            (64, 5, 5, False, "at_least eq ge le"),
            (64, 6, 5, False, "at_least ne ge gt"),
            (64, 5, 6, False, "ne le lt"),
            (64, -1, 1, False, "ne ge gt"),  # 2^64 - 1 as a plain number, but one step behind when it wraps
            (64, -1, 1, True, "ne le lt"),
            (64, 1, -1, False, "at_least ne le lt"),
            (64, -(1 << 63), (1 << 63) - 1, False, "at_least ne ge gt"),
            (64, -(1 << 63), (1 << 63) - 1, True, "at_least ne le lt"),
            (32, 5, 5, False, "at_least eq ge le"),
            (32, 0x80000000, 0x7FFFFFFF, False, "at_least ne ge gt"),
            (32, 0x80000000, 0x7FFFFFFF, True, "at_least ne le lt"),
            (32, 1, 0xFFFFFFFF, False, "at_least ne le lt"),
            (32, 1, -1, False, "at_least ne le lt"),
            (32, 1, -1, True, "at_least ne ge gt"),
            (32, 0x1_0000_0005, 5, False, "at_least eq ge le"),  # the word beside it is not looked at
        ]
        for width, word, value, signed, holds in cases:
            a = words(device, s, [word])
            for cmp in Cmp:
                device.wait_value(s, a, value, width, cmp, timeout_ns=1, signed=signed)
                status = device.wait(device.last_ticket(s))
                expected = Status.DONE if cmp.value in holds.split() else Status.FAULTED
                assert status is expected, (width, word, value, signed, cmp)
                device.take_fault(s)

    def test_value_writes_keep_to_their_width(self, device: DriverDevice) -> None:
        s = device.create_stream()
        a = words(device, s, [-1, -1, -1])
        device.write_value(s, a, 7, 32)
        device.write_value(s, a + 8, 1 << 63, 64)
        device.write_value(s, a + 20, -2, 32)
        low = struct.unpack("<6I", struct.pack("<3q", *read_words(device, s, a, 3)))
        assert low == (7, 0xFFFFFFFF, 0, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE)

    def test_a_value_wait_is_bounded(self, device: DriverDevice) -> None:
        s = device.create_stream()
        a = words(device, s, [3])
        device.wait_value(s, a, 4, 64, Cmp.EQ, timeout_ns=2_000_000, name="wait for 4")
        ticket = device.last_ticket(s)
        assert device.wait(ticket) is Status.FAULTED
        fault = device.fault(ticket)
        assert fault is not None
        assert (fault.kind, fault.op, fault.got, fault.limit) == (FaultKind.WAIT_TIMEOUT, "wait for 4", 3, 4)
        assert (fault.address, fault.program, fault.place) == (a, -1, -1)

    def test_a_value_wait_leaves_on_abort(self, device: DriverDevice) -> None:
        s, other = device.create_stream(), device.create_stream()
        a, abort = words(device, s, [3]), words(device, s, [0])
        ticket = device.wait_value(s, a, 4, 64, Cmp.EQ, timeout_ns=20 * _SECOND, abort_address=abort)
        device.write_value(other, abort, 1, 32)
        assert device.wait(ticket) is Status.FAULTED
        fault = device.fault(ticket)
        assert fault is not None
        assert fault.kind is FaultKind.ABORTED

    def test_value_operations_check_width_and_alignment(self, device: DriverDevice) -> None:
        s = device.create_stream()
        with raises(ArgumentError, "width: expected 32 or 64 bits, got 16"):
            device.write_value(s, 0, 0, 16)
        with raises(ArgumentError, "address: expected one aligned to 8 bytes, got 0x1004"):
            device.wait_value(s, 0x1004, 0, 64, Cmp.EQ, timeout_ns=1)

    # --------------------------------------------------------------------------------------------- callbacks

    def test_callbacks_run_in_stream_order(self, device: DriverDevice) -> None:
        s = device.create_stream()
        a = words(device, s, [0])
        host = ctypes.c_int64(-1)
        seen: list[int] = []
        with holding(device, s):
            device.callback(s, lambda: seen.append(host.value))
            device.fill(s, a, 9, 8, 1)
            device.copy(s, ctypes.addressof(host), a, 8)
            device.callback(s, lambda: seen.append(host.value))
            last = device.callback(s, lambda: seen.append(threading.get_ident()))
            assert seen == []
        assert device.wait(last) is Status.DONE
        assert seen[:2] == [-1, 9]
        assert seen[2] != threading.get_ident()

    def test_a_callback_may_not_call_the_driver(self, device: DriverDevice) -> None:
        # Case F51.
        s, other = device.create_stream(), device.create_stream()
        a = words(device, s, [0])
        ticket = device.callback(s, lambda: device.wait(device.fill(other, a, 1, 8, 1)) and None, name="on done")
        assert device.wait(ticket) is Status.FAULTED
        fault = device.fault(ticket)
        assert fault is not None
        assert (fault.kind, fault.op) == (FaultKind.CALLBACK, "on done")
        assert isinstance(fault.error, UsageError)
        assert str(fault.error) == (
            "driver: expected a call from outside host callbacks, got a runtime call inside a completion callback; "
            "hand the work to another thread"
        )
        assert read_words(device, other, a, 1) == [0]

    def test_what_a_callback_raises_is_its_fault(self, device: DriverDevice) -> None:
        s = device.create_stream()
        error = ValueError("no")

        def fail() -> None:
            raise error

        ticket = device.callback(s, fail)
        assert device.wait(ticket) is Status.FAULTED
        fault = device.fault(ticket)
        assert fault is not None
        assert fault.error is error

    # -------------------------------------------------------------------------------------------- plain kernels

    def test_every_program_of_a_grid_runs_once(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        s = device.create_stream()
        add, count = device.load_module(kernels.add), device.load_module(kernels.fail)
        for n in (1, 2, 3, 64, 1000, 70_001):
            x, y = words(device, s, range(n)), words(device, s, range(0, 10 * n, 10))
            z, c = words(device, s, [0] * n), words(device, s, [0])
            for _ in range(3):  # the first launch of a module may take another way than later ones
                device.launch(s, add, (n, 1, 1), args(x, y, z), options("add"))
                device.launch(s, count, (n, 1, 1), args(c, -1), options("count"))
            assert read_words(device, s, z, n) == [11 * k for k in range(n)]
            assert read_words(device, s, c, 1) == [3 * n]

    def test_a_grid_with_three_axes_has_their_product_of_programs(
        self, device: DriverDevice, kernels: SuiteKernels
    ) -> None:
        s = device.create_stream()
        count = device.load_module(kernels.fail)
        c = words(device, s, [0])
        device.launch(s, count, (3, 5, 7), args(c, -1), options("count"))
        device.launch(s, count, (3, 0, 7), args(c, -1), options("count"))
        assert device.launch_sync(s, count, (1, 2, 1), args(c, -1), options("count")) is None
        assert read_words(device, s, c, 1) == [107]

    def test_a_negative_grid_is_refused(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        s = device.create_stream()
        count = device.load_module(kernels.fail)
        for run in (device.launch, device.launch_sync):
            with raises(ArgumentError, "grid of count: expected three integers >= 0, got (-1, -1, 1)"):
                run(s, count, (-1, -1, 1), b"", options("count"))

    def test_launches_of_two_streams_do_not_mix(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        streams = [device.create_stream() for _ in range(4)]
        work = device.load_module(kernels.work)
        n, steps = 200, 300
        outs = [words(device, s, [0] * n) for s in streams]
        for _ in range(20):
            for s, out in zip(streams, outs, strict=True):
                device.launch(s, work, (n, 1, 1), args(out, steps), options("work"))
        results = [read_words(device, s, out, n) for s, out in zip(streams, outs, strict=True)]
        assert all(r == results[0] for r in results)
        assert len(set(results[0])) == n

    def test_scratch_is_private_and_aligned(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        s = device.create_stream()
        scratch = device.load_module(kernels.scratch)
        out = words(device, s, [0] * 5000)
        for _ in range(self.REPEATS):
            assert device.launch_sync(s, scratch, (5000, 1, 1), args(out), options("scratch")) is None
        assert read_words(device, s, out, 5000) == [2 * p for p in range(5000)]

    def test_long_argument_blocks_arrive_whole(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        s = device.create_stream()
        add = device.load_module(kernels.add)
        x, y, z = (words(device, s, [v]) for v in (1, 2, 0))
        block = args(x, y, z, *range(1000))
        assert device.launch_sync(s, add, (1, 1, 1), block, options("add")) is None
        assert device.wait(device.launch(s, add, (1, 1, 1), block, options("add"))) is Status.DONE
        assert read_words(device, s, z, 1) == [3]

    def test_output_is_handed_over_after_the_launch(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        s = device.create_stream()
        hello = device.load_module(kernels.hello)
        got: list[tuple[int, int, bytes]] = []
        o = LaunchOptions("hello", _SECOND, on_print=lambda *record: got.append(record))
        for _ in range(2):
            assert device.launch_sync(s, hello, (3, 1, 1), b"", o) is None
        device.wait(device.launch(s, hello, (1, 1, 1), b"", o))
        assert sorted(got) == sorted([(p, 3, b"hello") for p in (0, 1, 2, 0, 1, 2, 0)])

    # -------------------------------------------------------------------------------------------- faults

    def test_a_fault_stops_its_stream_until_it_is_taken(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        s = device.create_stream()
        fail = device.load_module(kernels.fail)
        c = words(device, s, [0])
        before = device.fill(s, c, 100, 8, 1)
        bad = device.launch(s, fail, (8, 1, 1), args(c, 5), options("bad"))
        after = device.fill(s, c, 0, 8, 1, name="after")
        assert device.wait(after) is Status.SKIPPED
        assert (device.query(before), device.query(bad)) == (Status.DONE, Status.FAULTED)
        fault = device.fault(bad)
        assert fault is not None
        assert (fault.kind, fault.op, fault.sequence) == (FaultKind.ASSERT, "bad", bad.sequence)
        assert (fault.program, fault.place, fault.got, fault.limit, fault.node) == (5, 4, 70, 64, -1)
        skipped = device.fault(after)
        assert skipped is not None
        assert (skipped.kind, skipped.op, skipped.cause) == (FaultKind.SKIPPED, "after", fault)
        late = device.fill(s, c, 1, 8, 1)
        assert device.take_fault(s) == fault
        assert device.take_fault(s) is None
        assert device.wait(late) is Status.SKIPPED  # enqueued before the take
        assert read_words(device, s, c, 1) == [108]  # the other programs have run
        assert (device.query(bad), device.query(after)) == (Status.FAULTED, Status.SKIPPED)
        assert device.fault(before) is None

    def test_a_fault_of_a_synchronous_launch_is_returned_and_taken(
        self, device: DriverDevice, kernels: SuiteKernels
    ) -> None:
        s = device.create_stream()
        fail = device.load_module(kernels.fail)
        c = words(device, s, [0])
        for n in (1, 7, 7):
            fault = device.launch_sync(s, fail, (n, 1, 1), args(c, 0), options("bad"))
            assert fault is not None
            assert (fault.kind, fault.op, fault.program) == (FaultKind.ASSERT, "bad", 0)
        assert device.launch_sync(s, fail, (1, 1, 1), args(c, -1), options("good")) is None
        assert read_words(device, s, c, 1) == [16]

    def test_a_synchronous_launch_on_a_failed_stream_does_not_run(
        self, device: DriverDevice, kernels: SuiteKernels
    ) -> None:
        s, other = device.create_stream(), device.create_stream()
        fail = device.load_module(kernels.fail)
        c = words(device, s, [0])
        device.wait(device.launch(s, fail, (1, 1, 1), args(c, 0), options("bad")))
        fault = device.launch_sync(s, fail, (1, 1, 1), args(c, -1), options("good"))
        assert fault is not None
        assert fault.cause is not None
        assert (fault.kind, fault.op, fault.cause.op) == (FaultKind.SKIPPED, "good", "bad")
        assert read_words(device, other, c, 1) == [1]

    def test_a_fault_reaches_streams_that_wait_for_it(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        a, b, c = device.create_stream(), device.create_stream(), device.create_stream()
        fail = device.load_module(kernels.fail)
        x = words(device, a, [0])
        early, late = device.create_event(), device.create_event()
        device.record_event(a, early)
        bad = device.launch(a, fail, (1, 1, 1), args(x, 0), options("bad"))
        device.record_event(a, late)
        device.wait_event(b, late)
        dependent = device.fill(b, x, 50, 8, 1, name="dependent")
        device.wait_event(c, early)
        unrelated = device.fill(c, x + 0, 9, 8, 1)
        assert device.wait(dependent) is Status.SKIPPED
        assert device.wait(unrelated) is Status.DONE
        fault = device.fault(dependent)
        assert fault is not None
        assert fault.cause is not None
        assert (fault.cause.op, fault.cause.kind) == ("event wait", FaultKind.SKIPPED)
        assert fault.cause.cause == device.fault(bad)
        # Taking it here and there makes both streams run again, also over the old event.
        device.take_fault(a)
        device.take_fault(b)
        device.record_event(a, late)
        device.wait_event(b, late)
        assert device.wait(device.fill(b, x, 51, 8, 1)) is Status.DONE

    def test_a_taken_fault_is_still_seen_by_a_later_wait(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        a, b = device.create_stream(), device.create_stream()
        fail = device.load_module(kernels.fail)
        x = words(device, a, [0])
        event = device.create_event()
        device.launch(a, fail, (1, 1, 1), args(x, 0), options("bad"))
        device.wait(device.record_event(a, event))
        device.take_fault(a)
        assert device.wait(device.wait_event(b, event)) is Status.FAULTED
        fault = device.take_fault(b)
        assert fault is not None
        assert fault.cause is not None
        assert (fault.kind, fault.cause.op) == (FaultKind.SKIPPED, "bad") or fault.cause.cause is not None

    # ------------------------------------------------------------------------------------- waiting kernels

    def test_a_grid_barrier_passes_with_all_programs_resident(
        self, device: DriverDevice, kernels: SuiteKernels
    ) -> None:
        s = device.create_stream()
        barrier = device.load_module(kernels.barrier)
        assert device.max_resident(barrier) >= 1024
        assert device.capabilities.resident_programs >= device.max_resident(barrier)
        for n in (1, 2, 3, 100, 1024, device.max_resident(barrier)):
            out = words(device, s, [0] * n)
            for _ in range(self.REPEATS):
                assert device.launch_sync(s, barrier, (n, 1, 1), args(out), options("barrier")) is None
            device.launch(s, barrier, (n, 1, 1), args(out), options("barrier"))
            assert read_words(device, s, out, n) == [n] * n

    def test_more_programs_than_can_be_resident_are_refused(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        # Case F43.
        s = device.create_stream()
        barrier = device.load_module(kernels.barrier)
        fits = device.max_resident(barrier)
        name = f"{device.kind.value}:{device.ordinal}"
        for run in (device.launch, device.launch_sync):
            with raises(
                LaunchError,
                f"barrier: its {fits + 1} programs wait for each other and must be resident at once, {name} holds "
                f"{fits} of them; use a grid of at most {fits} programs",
            ):
                run(s, barrier, (fits + 1, 1, 1), args(0), options("barrier"))

    def test_kernels_of_two_streams_wait_for_each_other(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        a, b = device.create_stream(), device.create_stream()
        ping = device.load_module(kernels.ping)
        w = words(device, a, [0] * 32)
        first = device.launch(a, ping, (1, 1, 1), args(w, w + 128, 500), options("ping"))
        assert device.launch_sync(b, ping, (1, 1, 1), args(w + 128, w, 500), options("pong")) is None
        assert device.wait(first) is Status.DONE
        assert read_words(device, a, w, 17)[0::16] == [500, 500]

    def test_waits_in_kernels_are_wrap_safe(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        s = device.create_stream()
        for binary, bits in ((kernels.await_word, 64), (kernels.await_word32, 32)):
            kernel = device.load_module(binary)
            top, out = 1 << bits, words(device, s, [0])
            for expected in (top - 1, top // 2 - 1, 0):
                seen = (expected + 2) % top
                w = words(device, s, [seen - (1 << 64) if seen >> 63 else seen])
                block = args(w, expected - (1 << 64) if expected >> 63 else expected, out)
                assert device.launch_sync(s, kernel, (1, 1, 1), block, options("await")) is None
                assert read_words(device, s, out, 1)[0] % top == seen

    def test_a_word_written_while_kernels_poll_lets_them_go(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        a, b = device.create_stream(), device.create_stream()
        for binary, width in ((kernels.await_word, 64), (kernels.await_word32, 32)):
            kernel = device.load_module(binary)
            w, out = words(device, a, [0]), words(device, a, [0] * 50)
            ticket = device.launch(a, kernel, (50, 1, 1), args(w, 3, out), options("await"))
            for value in (1, 2, 3):
                device.write_value(b, w, value, width)
            assert device.wait(ticket) is Status.DONE
            assert read_words(device, a, out, 50) == [3] * 50

    def test_a_wait_that_ends_at_its_bound_says_who_waited_for_what(
        self, device: DriverDevice, kernels: SuiteKernels
    ) -> None:
        s = device.create_stream()
        for binary in (kernels.await_word, kernels.await_word32):
            kernel = device.load_module(binary)
            w, out = words(device, s, [1]), words(device, s, [-5] * 4)
            o = options("stuck", timeout_s=0.005)
            fault = device.launch_sync(s, kernel, (4, 1, 1), args(w, 3, out), o)
            assert fault is not None
            assert (fault.kind, fault.op) == (FaultKind.WAIT_TIMEOUT, "stuck")
            assert fault.program in range(4)
            assert (fault.place, fault.got, fault.limit) == (2, 1, 3)
            assert (fault.address, fault.slot) == (w, 9)
            assert read_words(device, s, out, 4) == [-5] * 4

    def test_the_abort_word_makes_all_programs_leave(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        a, b = device.create_stream(), device.create_stream()
        for binary in (kernels.await_word, kernels.suspend):
            kernel = device.load_module(binary)
            w, out, abort = words(device, a, [0]), words(device, a, [-5] * 40), words(device, a, [0])
            block = args(w, 3, out) if binary is kernels.await_word else args(w, out)
            ticket = device.launch(a, kernel, (40, 1, 1), block, options("doomed", abort=abort))
            device.write_value(b, abort, 1, 32)
            assert device.wait(ticket) is Status.FAULTED
            fault = device.take_fault(a)
            assert fault is not None
            assert (fault.kind, fault.op) == (FaultKind.ABORTED, "doomed")
            assert read_words(device, a, out, 40) == [-5] * 40

    def test_a_program_that_only_suspends_lets_others_run(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        a, b = device.create_stream(), device.create_stream()
        kernel = device.load_module(kernels.suspend)
        w, out = words(device, a, [0]), words(device, a, [0] * 3)
        ticket = device.launch(a, kernel, (3, 1, 1), args(w, out), options("loop"))
        device.write_value(b, w, 8, 64)
        assert device.wait(ticket) is Status.DONE
        assert read_words(device, a, out, 3) == [8, 8, 8]

    # ----------------------------------------------------------------------------------------- prepared launches

    def test_a_prepared_launch_runs_any_number_of_times_with_blocks_of_its_own(
        self, device: DriverDevice, kernels: SuiteKernels
    ) -> None:
        s, other = device.create_stream(), device.create_stream()
        add = device.load_module(kernels.add)
        x, y = words(device, s, [1, 2, 3]), words(device, s, [10, 20, 30])
        first, second, third = (words(device, s, [0] * 3) for _ in range(3))
        prepared = device.prepare_launch(add, (3, 1, 1), options("add"))
        with holding(device, s):  # both blocks are in flight at once
            tickets = [device.launch_prepared(s, prepared, args(x, y, z)) for z in (first, second)]
            assert [t.name for t in tickets] == ["add", "add"]
            assert tickets[1].sequence == tickets[0].sequence + 1
            assert device.wait(device.launch_prepared(other, prepared, args(x, x, third))) is Status.DONE
        assert device.wait(tickets[1]) is Status.DONE
        assert device.run_prepared(s, prepared, args(x, first, x)) is None
        assert [read_words(device, s, z, 3) for z in (first, second, third)] == [[11, 22, 33]] * 2 + [[2, 4, 6]]
        assert read_words(device, s, x, 3) == [12, 24, 36]

    def test_prepared_launches_of_large_blocks_of_waiting_kernels_and_of_printing_ones(
        self, device: DriverDevice, kernels: SuiteKernels
    ) -> None:
        s = device.create_stream()
        add, barrier, hello = (device.load_module(k) for k in (kernels.add, kernels.barrier, kernels.hello))
        x, out = words(device, s, [1]), words(device, s, [0] * 20)
        device.launch_prepared(
            s, device.prepare_launch(add, (1, 1, 1), options("add")), args(x, x, x, *[0] * 200)
        )  # more than fits a slot; the kernel looks at the first three alone
        meet = device.prepare_launch(barrier, (20, 1, 1), options("barrier"))
        device.launch_prepared(s, meet, args(out))
        assert device.run_prepared(s, meet, args(out)) is None
        said: list[bytes] = []
        printing = options("hello")._replace(on_print=lambda program, place, payload: said.append(payload))
        greet = device.prepare_launch(hello, (1, 1, 1), printing)
        assert device.wait(device.launch_prepared(s, greet, b"")) is Status.DONE
        assert device.run_prepared(s, greet, b"") is None
        assert said == [b"hello"] * 2
        assert read_words(device, s, x, 1) == [2]
        assert read_words(device, s, out, 20) == [20] * 20

    def test_many_launches_are_enqueued_in_order_between_others(
        self, device: DriverDevice, kernels: SuiteKernels
    ) -> None:
        s = device.create_stream()
        add = device.load_module(kernels.add)
        x, y = words(device, s, [1]), words(device, s, [1])
        double = device.prepare_launch(add, (1, 1, 1), options("double"))
        bump = device.prepare_launch(add, (1, 1, 1), options("bump"))
        assert list(device.launch_many(s, [])) == []
        last = device.fill(s, x, 3, 8, 1).sequence
        sequences = device.launch_many(s, [(double, args(x, x, x)), (bump, args(x, y, x))] * 50)
        assert list(sequences) == sorted(sequences)
        assert (len(sequences), sequences[0] > last) == (100, True)
        device.launch(s, add, (1, 1, 1), args(x, x, y), options("after"))
        value = 3
        for _ in range(50):
            value = (value * 2 + 1 + (1 << 63)) % (1 << 64) - (1 << 63)
        assert read_words(device, s, x, 1) == [value]

    def test_a_fault_among_many_launches_skips_those_behind_it(
        self, device: DriverDevice, kernels: SuiteKernels
    ) -> None:
        s = device.create_stream()
        count = device.prepare_launch(device.load_module(kernels.fail), (1, 1, 1), options("count"))
        c = words(device, s, [0])
        sequences = device.launch_many(s, [(count, args(c, 0 if k == 3 else -1)) for k in range(6)])
        last = device.last_ticket(s)
        assert device.wait(last) is Status.SKIPPED
        fault = device.take_fault(s)
        assert fault is not None
        assert (fault.kind, fault.op, fault.sequence) == (FaultKind.ASSERT, "count", sequences[3])
        again = device.run_prepared(s, count, args(c, 0))
        assert again is not None
        assert (again.kind, again.op) == (FaultKind.ASSERT, "count")
        assert device.run_prepared(s, count, args(c, -1)) is None

    def test_many_launches_are_nodes_of_a_capture(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        s = device.create_stream()
        add = device.prepare_launch(device.load_module(kernels.add), (1, 1, 1), options("add"))
        x, y = words(device, s, [1]), words(device, s, [1])
        device.begin_capture(s)
        assert list(device.launch_many(s, [(add, args(x, y, x))] * 3)) == [-1] * 3
        assert device.launch_prepared(s, add, args(x, y, x)).sequence == -1
        graph = device.instantiate(device.end_capture(s))
        for _ in range(2):
            assert device.run_graph(s, graph, name="four") is None
        assert read_words(device, s, x, 1) == [9]
        device.destroy_graph(graph)

    def test_a_fault_of_a_synchronous_replay_is_returned_and_taken(
        self, device: DriverDevice, kernels: SuiteKernels
    ) -> None:
        s = device.create_stream()
        fail = device.load_module(kernels.fail)
        c = words(device, s, [0])
        device.begin_capture(s)
        for k in range(3):
            device.launch(s, fail, (1, 1, 1), args(c, 0 if k == 1 else -1), options(f"node {k}"))
        graph = device.instantiate(device.end_capture(s))
        for _ in range(2):
            fault = device.run_graph(s, graph, name="replay")
            assert fault is not None
            assert (fault.kind, fault.op, fault.node) == (FaultKind.ASSERT, "node 1 (node 1 of replay)", 1)
        assert device.take_fault(s) is None
        device.destroy_graph(graph)

    def test_what_is_known_to_be_completed_is(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        s = device.create_stream()
        x = words(device, s, [0])
        before = device.last_ticket(s)
        assert device.wait(before) is Status.DONE
        with holding(device, s):
            held = device.fill(s, x, 1, 8, 1)
            assert device.completed(s) <= before.sequence
        assert device.wait(held) is Status.DONE
        assert device.completed(s) <= held.sequence

    # ------------------------------------------------------------------------------------------------- graphs

    def test_a_capture_runs_nothing_and_a_graph_runs_all_each_time(
        self, device: DriverDevice, kernels: SuiteKernels
    ) -> None:
        s, other = device.create_stream(), device.create_stream()
        add, barrier = device.load_module(kernels.add), device.load_module(kernels.barrier)
        x, y, z, out = (words(device, s, v) for v in ([1], [5], [0], [0] * 20))
        device.begin_capture(s)
        device.launch(s, add, (1, 1, 1), args(x, y, z), options("add"))
        device.copy(s, x, z, 8)
        captured = device.launch(s, barrier, (20, 1, 1), args(out), options("barrier"))
        graph = device.instantiate(device.end_capture(s))
        assert read_words(device, other, z, 1) == [0]
        with raises(UsageError, "ticket: barrier was captured and does not run by itself; launch the graph"):
            device.wait(captured)
        for k in range(4):
            ticket = device.launch_graph(s, graph, on_caller=k % 2 == 0)
            assert device.wait(ticket) is Status.DONE
        assert read_words(device, s, x, 1) == [21]
        assert read_words(device, s, out, 20) == [20] * 20
        device.destroy_graph(graph)
        with raises(UsageError, "graph: expected a live graph, got one that was destroyed"):
            device.launch_graph(s, graph)

    def test_captures_of_two_streams_are_separate(self, device: DriverDevice) -> None:
        a, b = device.create_stream(), device.create_stream()
        w = words(device, a, [0, 0])
        device.begin_capture(a)
        device.begin_capture(b)
        device.fill(a, w, 1, 8, 1)
        device.fill(b, w + 8, 2, 8, 1)
        ga, gb = device.instantiate(device.end_capture(a)), device.instantiate(device.end_capture(b))
        device.wait(device.launch_graph(a, gb))
        assert read_words(device, a, w, 2) == [0, 2]
        device.wait(device.launch_graph(a, ga))
        assert read_words(device, a, w, 2) == [1, 2]

    def test_a_fault_in_a_graph_names_its_node(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        s = device.create_stream()
        fail = device.load_module(kernels.fail)
        c = words(device, s, [0])
        device.begin_capture(s)
        device.fill(s, c, 40, 8, 1)
        device.launch(s, fail, (2, 1, 1), args(c, 1), options("bad"))
        device.fill(s, c, 0, 8, 1)
        graph = device.instantiate(device.end_capture(s))
        for on_caller in (False, True):
            ticket = device.launch_graph(s, graph, name="step", on_caller=on_caller)
            assert device.wait(ticket) is Status.FAULTED
            fault = device.take_fault(s)
            assert fault is not None
            assert (fault.op, fault.node, fault.program) == ("bad (node 1 of step)", 1, 1)
            assert read_words(device, s, c, 1) == [42]

    def test_a_graph_may_wait_print_and_call_back(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        s = device.create_stream()
        hello = device.load_module(kernels.hello)
        w = words(device, s, [0])
        log: list[object] = []
        device.begin_capture(s)
        device.write_value(s, w, 4, 64)
        device.wait_value(s, w, 4, 64, Cmp.AT_LEAST, timeout_ns=_SECOND)
        printing = LaunchOptions("hello", _SECOND, on_print=lambda *record: log.append(record))
        device.launch(s, hello, (1, 1, 1), b"", printing)
        device.callback(s, lambda: log.append("done"))
        graph = device.instantiate(device.end_capture(s))
        for on_caller in (False, True):
            assert device.wait(device.launch_graph(s, graph, on_caller=on_caller)) is Status.DONE
        assert log == [(0, 3, b"hello"), "done"] * 2

    def test_capture_calls_must_match(self, device: DriverDevice, kernels: SuiteKernels) -> None:
        s = device.create_stream()
        add = device.load_module(kernels.add)
        with raises(UsageError, "end_capture: expected a stream that is being captured, got one that is not"):
            device.end_capture(s)
        device.begin_capture(s)
        with raises(UsageError, "begin_capture: expected a stream that is not being captured, got one that is"):
            device.begin_capture(s)
        with raises(UsageError, "record_event: expected a stream that runs, got one that is being captured"):
            device.record_event(s, device.create_event())
        with raises(UsageError, "add: expected a stream that runs, got one that is being captured"):
            device.launch_sync(s, add, (1, 1, 1), args(0, 0, 0), options("add"))
        device.end_capture(s)
        assert device.wait(device.launch_graph(s, device.instantiate(_empty(device, s)))) is Status.DONE

    # ----------------------------------------------------------------------------------------------- segments

    def test_a_segment_is_zeroed_aligned_and_shared(self, device: DriverDevice) -> None:
        s = device.create_stream()
        segment, address = device.create_segment(10_000)
        assert segment.nbytes == 10_000
        assert address % 256 == 0
        assert read_words(device, s, address, 1250) == [0] * 1250
        again = device.import_segment(device.export_segment(segment))
        there = device.map_segment(again)
        assert there == device.map_segment(again)
        device.wait(device.fill(s, address, 77, 8, 1250))
        assert read_words(device, s, there, 1250) == [77] * 1250
        device.free_segment(segment)
        assert read_words(device, s, there, 1) == [77]  # the storage lives while somebody holds it
        device.unmap_segment(again)
        device.unmap_segment(again)
        device.free_segment(again)
        with raises(UsageError, "segment: expected a live segment, got one that was freed"):
            device.map_segment(again)

    def test_an_empty_segment_is_refused(self, device: DriverDevice) -> None:
        with raises(ArgumentError, "nbytes: expected an integer > 0, got 0"):
            device.create_segment(0)


def _empty(device: DriverDevice, stream: StreamHandle) -> GraphHandle:
    device.begin_capture(stream)
    return device.end_capture(stream)
