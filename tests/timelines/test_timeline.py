"""Timelines on any device: what they hold, on one rank and on two, and that a program is as it was afterwards."""

import functools
import json
import os
import threading
import time
import warnings

import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import ArgumentError, KernelAssert, UsageError
from peertile.timelines import record
from peertile.timelines.clocks import Clock
from peertile.timelines.events import Kind
from peertile.timelines.marks import MarkBuffer
from peertile.timelines.timeline import Recording
from peertile.timelines.trace import arrows_of, read_timeline, to_trace

pytestmark = pytest.mark.any_device
HERE = __file__


@pt.kernel
def add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


@pt.kernel
def count(z: T.Exclusive):
    z.store(z.load() + 1)


@pt.kernel
def positive(z: T.Exclusive, x: T.Shared):
    T.assert_(T.min(x.load_like(z), axis=0) > 0, "x must be positive")
    z.store(x.load_like(z))


@pt.kernel
def meet(out: T.Peer, ready: T.Signal):
    ready.notify()
    ready.wait()
    i = T.program_id(0)
    out.local.store((i,), out.local.load((i,), (1,)) + 1)


def of(timeline, *kinds):
    return [event for event in timeline.events if event.kind in kinds]


def names(timeline, *kinds):
    return [event.name for event in of(timeline, *kinds)]


@pytest.mark.feature("U5", "cpu")
def test_a_timeline_has_launches_programs_copies_and_host_functions():
    x, z = pt.ones(12, pt.f32), pt.zeros(12, pt.f32)
    with pt.timeline() as t:
        add(z.partition(4), x, x).sync()
        add(z.partition(4), x, x).submit().wait()
        pt.op.copy(x, to=z).sync()
        pt.op.fill(z, 5).sync()
        pt.op.host(lambda: None).sync()
    assert names(t, Kind.LAUNCH) == ["add", "add"]
    assert sorted(names(t, Kind.PROGRAM)) == sorted([f"add {k}" for k in range(3)] * 2)
    assert names(t, Kind.COPY, Kind.FILL, Kind.HOST) == ["copy", "fill", "host function <lambda>"]
    assert t.part.dropped == 0
    for launch, after in zip(of(t, Kind.LAUNCH), [*of(t, Kind.LAUNCH)[1:], *of(t, Kind.COPY)], strict=True):
        own = [e for e in of(t, Kind.PROGRAM) if e.track == f"{launch.track}: programs"]
        inside = [e for e in own if launch.begin_ns <= e.begin_ns <= e.end_ns <= launch.end_ns]
        assert len(inside) == 3
        assert launch.end_ns <= after.begin_ns + 1_000_000  # on whatever stream that was
    assert z.numpy().tolist() == [5] * 12


@pytest.mark.native_only
def test_what_the_host_did_names_the_line_of_the_program():
    x = pt.ones(4, pt.f32)
    with pt.timeline() as t:
        pt.op.fill(x, 1).submit().wait()
    assert names(t, Kind.SUBMIT) == ["fill"]
    line = test_what_the_host_did_names_the_line_of_the_program.__code__.co_firstlineno + 4
    assert {event.info["at"] for event in t.events} == {f"{HERE}:{line}"}
    assert all(event.track.startswith("host: ") for event in of(t, Kind.SUBMIT, Kind.SYNC))


def two_ranks(group, path):
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        out, ready = heap.zeros((2,), pt.f32), heap.signal(slots=2)
        meet.grid(2)(out, ready).load()
        group.barrier("both have loaded what they launch")
        with pt.timeline(path) as t:
            meet.grid(2)(out, ready).load()
            group.barrier("and what is launched for the timeline")
            meet.grid(2)(out, ready).sync()
        group.barrier("both have written")
        assert out.local.numpy().tolist() == [1, 1]
        return t.part.rank, [event.kind for event in t.events]


@pytest.mark.feature("U5", "cpu")
def test_ranks_write_one_file_with_arrows_from_releases_to_the_waits_that_they_ended(tmp_path):
    path = tmp_path / "two.json"
    found = pt.spawn(two_ranks, 2, args=(str(path),), model=pt.RankModel.THREADS)
    assert [rank for rank, _ in found] == [0, 1]
    for _, kinds in found:
        assert (kinds.count(Kind.PROGRAM), kinds.count(Kind.NOTIFY)) == (2, 2)
    parts = read_timeline(str(path))
    assert [part.rank for part in parts] == [0, 1]
    arrows = arrows_of(parts)
    assert sorted((a.source, a.target) for a in arrows) == [(0, 1)] * 2 + [(1, 0)] * 2
    for arrow in arrows:
        assert "ready" in arrow.wait.name
        assert "ready" in arrow.notify.name
        assert arrow.notify.begin_ns <= arrow.wait.end_ns
        assert arrow.notify.info["program"] == arrow.wait.info["program"]
        assert arrow.wait.info["at"] == f"{HERE}:{meet.fn.__code__.co_firstlineno + 3}"
    trace = json.loads(path.read_text())
    again = to_trace(parts)
    for one in (again, trace):
        one["traceEvents"].sort(key=json.dumps)
    assert again == trace
    flows = [event for event in trace["traceEvents"] if event["ph"] in "sf"]
    assert len(flows) == 8
    assert {event["id"] for event in flows} == {1, 2, 3, 4}
    assert list(tmp_path.iterdir()) == [path]


def test_a_kernel_that_fails_leaves_what_it_did():
    x, z = pt.zeros(8, pt.f32), pt.zeros(8, pt.f32)
    with pytest.raises(KernelAssert), pt.timeline() as t:
        positive(z.partition(4), x).sync()
    assert names(t, Kind.LAUNCH) == ["positive"]
    add(z.partition(4), x, x).sync()


@pytest.mark.native_only
def test_a_graph_is_one_event_for_each_replay_and_goes_on_after_the_timeline():
    z = pt.zeros(8, pt.f32)
    stream = pt.current_device().stream("graphs")
    with pt.timeline() as t:
        graph = count(z.partition(4)).graph_on(stream)
        for _ in range(3):
            graph.launch().sync_on(stream)
    assert names(t, Kind.GRAPH) == [f"{graph.name} (replay {k})" for k in (1, 2, 3)]
    assert len(of(t, Kind.PROGRAM)) == 6
    graph.launch().sync_on(stream)
    with pt.timeline() as later:
        graph.launch().sync_on(stream)
    assert z.numpy().tolist() == [5] * 8
    assert names(later, Kind.GRAPH) == [f"{graph.name} (replay 5)"]
    assert len(of(later, Kind.PROGRAM)) == 2


@pytest.mark.native_only
def test_nothing_is_left_of_it_and_a_kernel_is_compiled_for_it_once():
    @pt.kernel
    def double(z: T.Exclusive, x: T.Shared):
        z.store(x.load_like(z) * 2)

    x, z = pt.ones(8, pt.f32), pt.zeros(8, pt.f32)
    device = pt.current_device()
    plain = type(device.driver)
    op = double(z.partition(4), x)
    op.sync()
    assert not op.compiled().is_marked
    for _ in range(2):
        with pt.timeline():
            assert double(z.partition(4), x).compiled().is_marked
            double(z.partition(4), x).sync()
    again = double(z.partition(4), x)
    assert again.compiled() is op.compiled()
    again.sync()
    assert double.compile_count == 2
    assert type(device.driver) is plain
    assert device.compiler is None


@pytest.mark.native_only
def test_timelines_may_overlap_and_each_has_what_happened_in_it():
    x = pt.zeros(4, pt.f32)
    outer = pt.timeline()
    with outer:
        pt.op.fill(x, 1).sync()
        with pt.timeline() as inner:
            pt.op.fill(x, 2).sync()
        pt.op.fill(x, 3).sync()
    assert (len(of(outer, Kind.FILL)), len(of(inner, Kind.FILL))) == (3, 1)


@pytest.mark.native_only
def test_what_a_device_with_a_doubtful_clock_did_is_kept(monkeypatch):
    second = 1_000_000_000
    monkeypatch.setattr(Clock, "compare", lambda clock: setattr(clock, "error_ns", 2 * second))
    monkeypatch.setattr(Clock, "to_host", lambda clock, ns: time.monotonic_ns() - second)
    z = pt.zeros(4, pt.f32)
    with pt.timeline() as t:
        count(z.partition(4)).submit().wait()
    assert names(t, Kind.LAUNCH) == ["count"]
    assert t.part.error_ns == 2 * second


@pytest.mark.native_only
def test_the_newest_events_are_kept_and_the_others_counted():
    x = pt.zeros(4, pt.f32)
    with pt.timeline(events=6) as t:
        for _ in range(20):
            pt.op.fill(x, 1).sync()
    assert len(t.events) == 6
    assert t.part.dropped >= 34
    assert max(event.end_ns for event in t.events) == t.events[-1].end_ns


@pytest.mark.native_only
def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ArgumentError) as refused:
        pt.timeline(tmp_path)
    assert str(refused.value) == (f"timeline(path): expected a file in a folder that is there, got {str(tmp_path)!r}")
    with pytest.raises(ArgumentError) as refused:
        pt.timeline(3)
    assert str(refused.value) == "timeline(path): expected a path of a file, got 3"
    with pytest.raises(ArgumentError) as refused:
        pt.timeline(None, "cpu")
    assert str(refused.value) == ("timeline(devices): expected devices, got 'cpu'; pt.current_device() is one")
    with pytest.raises(ArgumentError) as refused:
        pt.timeline(events=0)
    assert str(refused.value) == "timeline(events): expected an integer >= 1, got 0"
    t = pt.timeline()
    with t, pytest.raises(UsageError) as early:
        _ = t.events
    assert str(early.value) == ("timeline: expected one that has ended, got one that is recorded; leave its with block")
    with pytest.raises(UsageError) as again, t:
        pass
    assert str(again.value) == (
        "timeline: expected a new one, got one that was recorded before; call pt.timeline again"
    )


@pytest.mark.native_only
@pytest.mark.cpu_only
def test_a_device_that_is_closed_meanwhile_leaves_what_it_did():
    device = pt.open_device(pt.DriverKind.CPU)
    with pt.timeline(None, device) as t:
        pt.op.full(4, 1, pt.f32, device=device).sync()
        device.close()
    assert names(t, Kind.FILL) == ["full"]
    assert device.is_closed


@pytest.mark.native_only
def test_the_end_of_an_inner_timeline_waits_for_what_it_began(monkeypatch):
    x = pt.zeros(4, pt.f32)
    go_on = threading.Event()
    end = Recording.end
    monkeypatch.setattr(Recording, "end", lambda self, bound_s: (go_on.set(), end(self, bound_s))[1])
    with pt.timeline() as outer:
        with pt.timeline() as inner:
            pt.op.host(lambda: go_on.wait(5)).submit()
            future = pt.op.fill(x, 1).submit()
        assert sorted(names(inner, Kind.HOST, Kind.FILL)) == ["fill", "host function <lambda>"]
        future.wait()
    assert sorted(names(outer, Kind.HOST, Kind.FILL)) == ["fill", "host function <lambda>"]


@pytest.mark.native_only
@pytest.mark.cpu_only
def test_an_inner_timeline_tells_what_has_not_ended_too():
    x = pt.zeros(4, pt.f32)
    go_on = threading.Event()
    with pt.timeline() as outer:
        inner = Recording((pt.current_device(),), 100)
        stream = pt.current_device().stream("side")
        pt.current_device().driver.callback(stream.handle, lambda: go_on.wait(5))
        future = pt.op.fill(x, 1).submit(stream)
        fills = [event for event in inner.end(0.0).events if event.kind is Kind.FILL]
        go_on.set()
        future.wait()
    assert [event.info.get("unfinished") for event in fills] == [True]
    assert [event.info.get("unfinished") for event in of(outer, Kind.FILL)] == [None]


@pytest.mark.native_only
@pytest.mark.cpu_only
def test_streams_of_several_devices_are_told_apart():
    one, two = (pt.open_device(pt.DriverKind.CPU, k) for k in range(2))
    with pt.timeline(None, one, two) as t:
        for device in (one, two):
            pt.op.full(4, 1, pt.f32, device=device).sync_on(device.stream("side"))
    assert [event.track for event in of(t, Kind.FILL)] == ["cpu:0 side", "cpu:1 side"]
    assert t.part.device == "cpu:0, cpu:1"
    one.close()
    two.close()


@pytest.mark.native_only
def test_a_stream_that_is_gone_is_still_told_of():
    x = pt.zeros(4, pt.f32)
    with pt.timeline() as t:
        future = pt.op.fill(x, 1).submit(pt.current_device().stream("short"))
        future.wait()
        del future
        pt.current_device().stream("another")  # which destroys those that nobody has any more
        pt.op.fill(x, 2).sync()
    assert len(of(t, Kind.FILL)) == 2
    assert not any(event.info.get("unfinished") for event in t.events)


@pytest.mark.native_only
@pytest.mark.parametrize("begins_inside", [False, True])
def test_a_launch_that_is_made_on_one_side_of_its_beginning_or_end_and_run_on_the_other(begins_inside):
    @pt.kernel
    def triple(z: T.Exclusive):
        z.store(z.load() * 3)

    z = pt.ones(8, pt.f32)
    before = triple(z.partition(4))
    with pt.timeline() as t:
        inside = triple(z.partition(4))
        if not begins_inside:
            before.sync()
    inside.sync()
    assert len(of(t, Kind.PROGRAM)) == (0 if begins_inside else 2)
    assert not triple(z.partition(4)).compiled().is_marked
    with pt.timeline() as t:
        triple(z.partition(4)).sync()
    assert len(of(t, Kind.PROGRAM)) == 2
    assert z.numpy().tolist() == [9 if begins_inside else 27] * 8


@pytest.mark.native_only
@pytest.mark.cpu_only
def test_a_timeline_that_waits_for_its_end_lets_others_begin():
    """What it waits for may come from a rank of the same process that is about to begin its own."""
    one, two = (pt.open_device(pt.DriverKind.CPU, k) for k in range(2))
    begun = threading.Event()

    def other():
        with pt.timeline(None, two):
            begun.set()

    found = []
    later = threading.Timer(0.02, other)
    stream = one.stream("waits")
    with pt.timeline(None, one):
        one.driver.callback(stream.handle, lambda: found.append(begun.wait(2)))
        later.start()
    assert found == [True]
    later.join()
    one.close()
    two.close()


@pytest.mark.native_only
@pytest.mark.cpu_only
def test_a_call_that_is_under_way_when_the_timeline_ends_goes_on():
    device = pt.open_device(pt.DriverKind.CPU)
    stream = device.stream("side")
    with pt.timeline(None, device) as t:
        driver = device.driver
        calls = [driver.callback, driver.last_ticket, driver.wait]
    ran = []
    callback, last, wait = calls
    wait(callback(stream.handle, lambda: ran.append(1)))
    wait(last(stream.handle))
    assert (ran, t.events) == ([1], [])
    device.close()


@pytest.mark.native_only
@pytest.mark.cpu_only
def test_a_device_is_recorded_once_and_a_closed_one_not_at_all():
    device = pt.open_device(pt.DriverKind.CPU)
    with pt.timeline(None, device, device) as t:
        pt.op.full(4, 1, pt.f32, device=device).sync()
    assert names(t, Kind.FILL) == ["full"]
    device.close()
    with pytest.raises(UsageError) as refused, pt.timeline(None, device):
        pass
    assert str(refused.value) == "timeline: expected an open device, got cpu:0, which is closed"


@pytest.mark.native_only
@pytest.mark.cpu_only
def test_a_launch_whose_marks_did_not_fit_has_ended_all_the_same(monkeypatch):
    monkeypatch.setattr(record, "MarkBuffer", functools.partial(MarkBuffer, marks=8))
    device = pt.open_device(pt.DriverKind.CPU)
    z = pt.op.full(64, 0, pt.f32, device=device).sync()
    with pt.timeline(None, device) as t:
        count(z.partition(1)).sync()
    assert t.part.dropped >= 100
    assert names(t, Kind.LAUNCH) == ["count"]
    assert not any(event.info.get("unfinished") for event in of(t, Kind.LAUNCH))
    device.close()


@pytest.mark.native_only
@pytest.mark.cpu_only
def test_a_forked_child_leaves_the_timeline_to_its_parent(tmp_path):
    path = tmp_path / "t.json"
    with pt.timeline(path) as t, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        child = os.fork()
    if child == 0:
        os._exit(repr(t) != "<Timeline, not over>")
    assert os.waitpid(child, 0)[1] == 0
    assert path.exists()
    assert t.events == []


@pytest.mark.native_only
def test_a_device_file_is_not_replaced():
    with pytest.raises(ArgumentError) as refused:
        pt.timeline(os.devnull)
    assert str(refused.value) == f"timeline(path): expected a file in a folder that is there, got {os.devnull!r}"
