"""Graphs: capture, scopes, replay, updates, ownership, what cannot be captured."""

import gc
import threading

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import DeviceFault, KernelAssert, LeaseError, UnsupportedError, UsageError

pytestmark = pytest.mark.any_device


@pt.kernel
def add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


@pt.kernel
def positive(z: T.Exclusive, x: T.Shared):
    T.assert_(T.min(x.load_like(z), axis=0) > 0, "x must be positive")
    z.store(x.load_like(z))


@pt.kernel
def exchange(out: T.Peer, ready: T.Signal):
    ready.notify()
    ready.wait()
    i = T.program_id(0)
    out.local.store((i,), out.local.load((i,), (1,)) + 1)


def doubled(x):
    z = pt.empty(x.shape, x.dtype)
    return add(z.partition(4), x, x).map(lambda z, *_: z.unpartition())


def values(tensor):
    return tensor.numpy().tolist()


@pytest.fixture
def stream():
    return pt.current_device().stream("graphs")


@pytest.mark.feature("H12", "cpu")
def test_a_captured_chain_is_replayed_with_new_inputs(stream):
    x = pt.zeros(8, pt.f32)
    graph = doubled(x).then(doubled).graph_on(stream)
    out = graph.take_output()
    pt.op.fill(out, -1).sync()
    assert (graph.nodes, graph.replays, values(out)) == (2, 0, [-1] * 8)  # nothing has run
    for k in range(5):
        graph.update(pt.op.copy(np.full(8, k, np.float32), to=x))
        graph.launch().sync_on(graph.stream)
        assert values(out) == [4 * k] * 8
    assert graph.replays == 5
    with pytest.raises(UsageError) as caught:
        graph.take_output()
    assert str(caught.value) == f"{graph.name}: its output was taken before; keep what take_output returned"


@pytest.mark.feature("H12", "cpu")
def test_a_scope_records_one_by_one(stream):
    x = pt.ones(4, pt.f32)
    with pt.capture(stream, "three steps") as scope:
        y = scope.record(doubled(x))
        pair = scope.record(pt.zip(doubled(y), pt.op.fill(x, 7)))
        with pytest.raises(UsageError) as caught:
            _ = scope.graph
        assert str(caught.value) == "three steps: expected a capture that has ended; leave the with block first"
        with pytest.raises(UsageError) as caught:
            pt.op.fill(x, 1).sync()
        assert str(caught.value) == (
            "fill: nested execution inside the capture of three steps; record the operation with `record` of the scope "
            "that pt.capture gives, or run it before or after"
        )
    with pytest.raises(UsageError) as caught:
        scope.record(pt.op.fill(x, 1))
    assert str(caught.value) == "three steps: its capture is not open; record inside the with block"
    scope.graph.launch().sync_on(stream)
    assert (values(pair[0]), values(x)) == ([4] * 4, [7] * 4)


@pytest.mark.feature("H12", "cpu")
def test_a_capture_always_ends(stream):
    x = pt.ones(4, pt.f32)

    def breaks(_):
        raise KeyError("closure")

    with pytest.raises(KeyError):
        doubled(x).map(breaks).graph_on(stream)

    def record_and_break():
        with pt.capture(stream) as scope:
            scope.record(doubled(x))
            raise KeyError("block")

    with pytest.raises(KeyError):
        record_and_break()
    assert stream.recording is None
    assert pt.current_device().open_captures == 0
    assert values(doubled(x).sync_on(stream)) == [2] * 4


@pytest.mark.feature("H12", "cpu")
def test_a_graph_owns_what_it_was_recorded_with(stream):
    def make():
        b = pt.full(4, 5, pt.f32)
        out = pt.zeros(4, pt.f32)
        return pt.op.copy(b, to=out).then(lambda: pt.op.copy(np.full(4, 3, np.float32))).graph_on(stream), out

    graph, out = make()
    copied = graph.take_output()
    gc.collect()
    junk = [pt.full(4, 9, pt.f32) for _ in range(50)]
    graph.launch().sync_on(stream)
    assert (values(out), values(copied), len(junk)) == ([5] * 4, [3] * 4, 50)


@pytest.mark.feature("H12", "cpu")
def test_a_buffer_that_was_closed_ends_its_graphs(stream):
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        b, out = heap.zeros((4,), pt.f32), pt.zeros(4, pt.f32)
        graph = pt.op.copy(b.local, to=out).graph_on(stream)
        graph.launch().sync_on(stream)
        heap.free(b)
        with pytest.raises(UsageError) as caught:
            graph.launch().sync_on(stream)
        assert str(caught.value) == (f"{graph.name} (replay 2): tensor f32[4] was freed; use it before that")


@pytest.mark.feature("H12", "cpu")
def test_a_launch_shares_ownership_of_the_graph(stream, hold):
    x, out = pt.full(4, 2, pt.f32), pt.zeros(4, pt.f32)
    graph = pt.op.copy(x, to=out).graph_on(stream)
    with hold(stream):
        future = graph.launch().submit(stream)
        another = graph.launch()
        del graph, x
        gc.collect()
    future.wait()
    pt.op.fill(out, 0).sync()
    another.sync()
    assert values(out) == [2] * 4


@pytest.mark.feature("H12", "cpu")
def test_replays_take_leases_on_the_stream_that_launches(stream, hold):
    other = pt.current_device().stream("other")
    x, y = pt.ones(4, pt.f32), pt.zeros(4, pt.f32)
    graph = add(y.partition(4), x, x).graph_on(stream, "the graph")
    pt.op.fill(x, 2).sync_on(other)  # recording takes no lease
    for _ in range(2):
        graph.launch().sync_on(stream)
    with hold(stream):
        future = graph.launch().submit(stream)
        for conflict, verb in ((pt.op.fill(x, 7), "write"), (pt.op.copy(y), "read")):
            with pytest.raises(LeaseError) as caught:
                conflict.sync_on(other)
            assert f" would {verb} a tensor f32[4], but the graph (replay 3) on graphs (" in str(caught.value)
        with pytest.raises(LeaseError):
            graph.launch().sync_on(other)
        del x
        gc.collect()
        graph.update(pt.op.fill(y, 1))
    future.wait()
    assert values(y) == [1] * 4
    graph.launch().sync_on(other)
    assert values(y) == [4] * 4


@pytest.mark.native_only
@pytest.mark.feature("H12", "cpu")
def test_several_captures_and_graphs_side_by_side():
    device = pt.current_device()
    results = {}

    def work(k):
        stream = device.stream()
        x = pt.full(4, k, pt.f32)
        graph = doubled(x).then(doubled).graph_on(stream)
        out = graph.take_output()
        for _ in range(20):
            graph.launch().sync_on(stream)
        results[k] = values(out)[0]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert results == {k: 4 * k for k in range(6)}


@pytest.mark.feature("H12", "cpu")
@pytest.mark.parametrize(
    ("op", "why"),
    [
        (lambda x, g: pt.op.copy(x).map(len), "a closure would see host memory that nothing has written yet"),
        (lambda x, g: g.launch(), "a graph cannot be part of another one; record its operations instead"),
    ],
)
def test_what_cannot_be_captured_is_refused_when_recorded(stream, op, why):
    x = pt.ones(4, pt.f32)
    inner = doubled(x).graph_on(stream)
    with pytest.raises(UnsupportedError) as caught:
        op(x, inner).graph_on(stream, "outer")
    assert str(caught.value).endswith(f": cannot be captured into outer: {why}")
    assert values(doubled(x).sync_on(stream)) == [2] * 4


def test_a_shared_operation_belongs_to_one_side_of_a_capture(stream, hold):
    x = pt.ones(4, pt.f32)
    shared = doubled(x).shared()
    graph = pt.zip(shared.clone().then(doubled), shared.clone()).graph_on(stream)
    assert graph.nodes == 2
    with pytest.raises(UsageError, match="was recorded into"):
        shared.sync()
    ran = doubled(x).shared()
    ran.sync()
    again = ran.then(doubled).graph_on(stream)
    out = again.take_output()
    again.launch().sync()
    assert values(out) == [4] * 4
    pending = doubled(x).shared()
    other = pt.current_device().stream()
    with hold(other):
        pending.submit(other)
        with pytest.raises(UnsupportedError, match="it was started outside and is not over; sync it first"):
            pending.then(doubled).graph_on(stream)


def test_only_unit_operations_update_a_graph(stream):
    graph = doubled(pt.ones(4, pt.f32)).graph_on(stream)
    with pytest.raises(UsageError) as caught:
        graph.update(pt.op.zeros(4, pt.f32))
    assert str(caught.value) == (
        "update: expected a launch, copy or fill into what the graph uses, got zeros; sync other operations"
    )


@pytest.mark.feature("H9", "cpu")
def test_a_fault_in_a_replay_names_the_node_and_the_graph_can_go_on(stream):
    x, y = pt.full(4, 1, pt.f32), pt.zeros(4, pt.f32)
    graph = doubled(x).then(lambda t: positive(y.partition(4), t)).graph_on(stream)
    graph.launch().sync_on(stream)
    pt.op.fill(x, -1).sync()
    for _ in range(2):
        with pytest.raises(KernelAssert) as caught:
            graph.launch().sync_on(stream)
        assert caught.value.op == "positive"
    future = graph.launch().submit(stream)
    after = pt.op.fill(y, 9).submit(stream)
    with pytest.raises(KernelAssert):
        future.wait()
    with pytest.raises(DeviceFault, match="fill did not run because positive"):
        after.wait()
    pt.op.fill(x, 3).sync()
    graph.launch().sync_on(stream)
    assert values(y) == [6] * 4


def test_replays_in_any_order_are_right(stream):
    ws = pt.zeros(4, pt.f32)
    x = pt.ones(4, pt.f32)

    def step(by):
        temporary = pt.empty(4, pt.f32)
        return (
            pt.op.fill(temporary, by).then(lambda: pt.op.fill(ws, 0)).then(lambda: add(ws.partition(4), x, temporary))
        )

    g1, g2 = step(3).graph_on(stream), step(5).graph_on(stream)
    got = []
    for graph in (g1, g2, g2, g1):
        graph.launch().sync_on(stream)
        got.append(values(ws)[0])
    assert got == [4, 6, 6, 4]


@pytest.mark.feature("H16", "cpu")
def test_memory_allocated_in_a_capture_is_the_graphs(stream):
    device = pt.current_device()
    gc.collect()
    before = device.memory().in_use
    for _ in range(50):
        graph = pt.op.full(1000, 3, pt.f32).graph_on(stream)
        out = graph.take_output()
        graph.launch().sync_on(stream)
        graph.launch().sync_on(stream)
        assert values(out)[0] == 3
        del graph, out
    gc.collect()
    assert device.memory().in_use == before


def test_a_graph_collected_inside_a_capture_is_destroyed_later(stream):
    device = pt.current_device()
    old = doubled(pt.ones(4, pt.f32)).graph_on(stream)
    circle = [old]
    circle.append(circle)
    x = pt.ones(4, pt.f32)
    with pt.capture(stream) as scope:
        del old, circle
        gc.collect()
        assert device._graveyard
        scope.record(doubled(x))
    assert not device._graveyard
    assert scope.graph.nodes == 1


@pytest.mark.feature("H12", "cpu")
def test_channels_in_graphs_count_on_from_replay_to_replay(stream):
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        ready = heap.signal(slots=2)
        out = heap.zeros((2,), pt.i32)
        graph = exchange.grid(2)(out, ready).graph_on(stream)
        exchange.grid(2)(out, ready).sync()
        for _ in range(5):
            graph.launch().sync_on(stream)
        exchange.grid(2)(out, ready).sync()
        assert values(out.local) == [7, 7]
        del graph


@pytest.mark.native_only
def test_a_stream_that_is_captured_takes_no_other_work(stream):
    x = pt.ones(4, pt.f32)
    errors = []
    with pt.capture(stream, "busy") as scope:

        def elsewhere():
            try:
                doubled(x).sync_on(stream)
            except UsageError as error:
                errors.append(str(error))

        worker = threading.Thread(target=elsewhere)
        worker.start()
        worker.join(20)
        scope.record(doubled(x))
    assert errors == ["add: graphs is being captured; end the capture first, or use another stream"]
    assert scope.graph.nodes == 1


@pytest.mark.feature("H12", "cpu")
def test_replays_on_one_stream_share_a_lease_that_others_see(stream, hold, monkeypatch):
    other = pt.current_device().stream("other")
    x, z = pt.ones(4, pt.f32), pt.zeros(4, pt.f32)
    graph = add(z.partition(4), x, x).graph_on(stream, "sums")
    graph.launch().sync_on(stream)
    graph.launch().submit(stream).wait(20)
    table, entered = type(pt.current_device().leases), []
    claim = table.claim
    monkeypatch.setattr(table, "claim", lambda self, lease: entered.append(lease.name) or claim(self, lease))
    for _ in range(3):
        graph.launch().sync_on(stream)
        graph.launch().submit(stream).wait(20)
    assert entered == []
    with hold(stream):
        entered.clear()
        futures = [graph.launch().submit(stream) for _ in range(2)]
        assert entered == []
        with pytest.raises(LeaseError) as caught:
            pt.op.fill(z, 7).submit(other)
        assert "but sums (replay 10) on graphs (" in str(caught.value)
        with pytest.raises(LeaseError, match=r"sums \(replay 11\) on other .* but sums \(replay 10\) on graphs"):
            graph.launch().submit(other)
    for future in futures:
        future.wait(20)
    pt.op.fill(x, 2).sync_on(other)  # between replays the memory is anybody's
    graph.launch().sync_on(other)
    graph.launch().sync_on(stream)
    assert values(z) == [4.0] * 4
    view = z.view()
    for run in ("sync_on", "submit"):
        with pytest.raises(LeaseError, match="but a view of it"):
            getattr(graph.launch(), run)(stream)
    del view
    gc.collect()
    pt.op.fill(x, 3).sync_on(stream)
    graph.launch().sync_on(stream)
    assert values(z) == [6.0] * 4
    del graph, futures, future, caught
    gc.collect()
    pt.live_submissions()
    assert z.storage.leases == x.storage.leases == []
