"""Timelines of a GPU whose NVIDIA driver is a stand-in: its own clock, and marks in memory that the host cannot see."""

import struct
import time

import pytest
from tests.runtime import fake_cuda
from tests.runtime.fake_cuda import CLOCK_BEGAN, FakeCuda

import peertile as pt
from peertile.backends.binary import Place
from peertile.backends.cuda.binary import CudaBinary
from peertile.backends.cuda.layout import LaunchLayout
from peertile.backends.marks import HEAD_WORDS, MARK, PLACE_BIT, RECORD_WORDS, MarkHead, MarkRecord
from peertile.ir.ops import Moment
from peertile.runtime.device import Device
from peertile.runtime.driver import LaunchOptions
from peertile.runtime.drivers.cuda import CudaDriver
from peertile.source import Loc
from peertile.timelines.events import Kind
from peertile.timelines.marks import MarkBuffer

PLACES = tuple(Place(Loc("k.py", line), "", what, MARK) for line, what in ((1, ""), (2, "ready"), (3, "")))
BINARY = CudaBinary("cuda", "marked", b"python", 0, False, PLACES, 3, {}, 1, 0, LaunchLayout(3))


def mark(buffer, tag, number, program, address=0, value=0):
    """As a kernel does."""
    word = fake_cuda._get
    if not word(buffer, MarkHead.OPEN):
        return
    count = word(buffer, MarkHead.COUNT)
    fake_cuda._put(buffer, MarkHead.COUNT, count + 1)
    at = buffer + 8 * (HEAD_WORDS + RECORD_WORDS * (count & word(buffer, MarkHead.MASK)))
    words = (time.monotonic_ns() + CLOCK_BEGAN, tag, number, program, address, value, 17)
    for k, value in enumerate(words, MarkRecord.TIME):
        fake_cuda._put(at, k, value)
    fake_cuda._put(at, MarkRecord.NUMBER, count + 1)


def moment(which, place):
    return list(Moment).index(which) | place << PLACE_BIT


def kernel(p, w):
    mark(w[1], moment(Moment.BEGIN, 0), w[2], p)
    mark(w[1], moment(Moment.WAIT, 1), w[2], p, w[0], 5)
    mark(w[1], moment(Moment.WAITED, 1), w[2], p, w[0], 5)
    if p != w[0]:
        mark(w[1], moment(Moment.END, 2), w[2], p)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setitem(fake_cuda.KERNELS, "marked", kernel)
    monkeypatch.setitem(fake_cuda.SLOTS, "marked", 13)
    device = Device(CudaDriver(api=FakeCuda()).open())
    yield device
    device.close()


def run(device, stream, never_ends=99):
    module = device.driver.load_module(BINARY)
    args = struct.pack("<q", never_ends) + device.marks
    device.driver.launch(stream.handle, module, (3, 1, 1), args, LaunchOptions("marked", 10**9))
    stream.sync()


def test_programs_of_a_gpu_are_told_by_the_hosts_clock(device):
    stream = device.stream("side")
    begin = time.monotonic_ns()
    with pt.timeline(None, device) as t:
        run(device, stream)
    end = time.monotonic_ns()
    programs = [event for event in t.events if event.kind is Kind.PROGRAM]
    assert sorted(event.name for event in programs) == ["marked 0", "marked 1", "marked 2"]
    assert {event.track for event in programs} == {"side: programs"}
    waits = [event for event in t.events if event.kind is Kind.WAIT]
    assert {(e.name, e.info["at"], e.info["value"]) for e in waits} == {("wait for ready", "k.py:2", 5)}
    (launch,) = [event for event in t.events if event.kind is Kind.LAUNCH]
    assert launch.begin_ns == min(event.begin_ns for event in programs)
    assert launch.end_ns == max(event.end_ns for event in programs)
    assert t.part.clock.startswith("the device's, within ")
    error = float(t.part.clock.split()[3]) * 1000
    assert all(begin - error <= event.begin_ns <= event.end_ns <= end + error for event in t.events)
    assert {event.info["where"] for event in programs} == {17}


@pytest.mark.slow
def test_a_program_that_has_not_ended_is_told_of(device):
    with pt.timeline(None, device) as t:
        run(device, device.stream("side"), never_ends=1)
    unfinished = {event.name for event in t.events if event.info.get("unfinished")}
    assert unfinished == {"marked", "marked 1"}


@pytest.mark.slow
def test_streams_for_the_comparison_of_clocks_are_given_back(device, monkeypatch):
    kept, kind = set(), type(device.driver)
    create, destroy = kind.create_stream, kind.destroy_stream

    def created(driver, *args):
        stream = create(driver, *args)
        kept.add(stream)
        return stream

    monkeypatch.setattr(kind, "create_stream", created)
    monkeypatch.setattr(kind, "destroy_stream", lambda driver, stream: (kept.discard(stream), destroy(driver, stream)))
    x = pt.op.full(4, 1, pt.f32, device=device).sync()
    left = []
    for _ in range(2):
        with pt.timeline(None, device):
            pt.op.fill(x, 2).sync()
        left.append(len(kept))
    assert left[0] == left[1]


def test_the_oldest_marks_give_way_and_are_counted(device):
    buffer = MarkBuffer(device.driver, marks=8)
    mark(buffer.address, 0, 1, 0)  # it is closed
    buffer.open(is_open=True)
    for k in range(3):
        mark(buffer.address, 0, 1, k)
    rows, lost = buffer.take()
    assert ([row[MarkRecord.PROGRAM] for row in rows.tolist()], lost) == ([0, 1, 2], 0)
    for k in range(3, 15):
        mark(buffer.address, 0, 1, k)
    rows, lost = buffer.take()
    assert ([row[MarkRecord.PROGRAM] for row in rows.tolist()], lost) == (list(range(7, 15)), 4)
    assert (len(buffer.take()[0]), buffer.take()[1]) == (0, 0)
    buffer.open(is_open=False)
    mark(buffer.address, 0, 1, 0)
    assert len(buffer.take()[0]) == 0


def test_a_mark_that_is_overwritten_while_it_is_read_is_lost(device, monkeypatch):
    buffer = MarkBuffer(device.driver, marks=8)
    buffer.open(is_open=True)
    for k in range(8):
        mark(buffer.address, 0, 1, k)
    fetch = buffer._fetch

    def overwriting(first, count):
        fake_cuda._put(buffer.address, MarkHead.COUNT, 9)
        fake_cuda._put(buffer.address + 8 * HEAD_WORDS, MarkRecord.PROGRAM, 100)
        fetch(first, count)

    monkeypatch.setattr(buffer, "_fetch", overwriting)
    rows, lost = buffer.take()
    assert ([row[MarkRecord.PROGRAM] for row in rows.tolist()], lost) == (list(range(1, 8)), 1)


def test_a_mark_that_is_being_written_is_read_the_next_time(device):
    buffer = MarkBuffer(device.driver, marks=8)
    buffer.open(is_open=True)
    for k in range(2):
        mark(buffer.address, 0, 1, k)
    late = buffer.address + 8 * (HEAD_WORDS + RECORD_WORDS)
    fake_cuda._put(late, MarkRecord.NUMBER, 0)
    assert [row[MarkRecord.PROGRAM] for row in buffer.take()[0].tolist()] == [0]
    fake_cuda._put(late, MarkRecord.NUMBER, 2)
    assert [row[MarkRecord.PROGRAM] for row in buffer.take()[0].tolist()] == [1]
