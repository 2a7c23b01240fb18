"""Where operations go: policies, streams, host signals on streams."""

import threading

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import ArgumentError, DeviceFault, WaitTimeout
from peertile.runtime.stream import _live

pytestmark = pytest.mark.any_device


@pt.kernel
def add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


def values(tensor):
    return tensor.numpy().tolist()


def where(policy=None):
    return pt.op.with_context(lambda context: pt.op.value(context.stream)).schedule(policy).wait()


@pytest.mark.parametrize("how", ["submit", "sync_on", "async_on"])
@pytest.mark.parametrize("make", [lambda z, x: add(z.partition(4), x, x), lambda z, x: pt.op.fill(z, 2)])
def test_what_is_no_stream_is_refused_and_the_operation_still_runs(make, how):
    x, z = pt.ones((8,), pt.f32), pt.zeros((8,), pt.f32)
    op = make(z, x)
    with pytest.raises(ArgumentError) as caught:
        getattr(op, how)("a")
    assert str(caught.value) == f"{op.name}.{how}: stream: expected a Stream, as Device.stream gives, got 'a'"
    op.sync()
    assert values(z) == [2.0] * 8


def test_a_stream_ends_with_its_work_once_nobody_has_it():
    device = pt.current_device()
    x, z = pt.ones((64,), pt.f32), pt.zeros((64,), pt.f32)
    for k in range(40):
        stream = device.stream(f"stream {k}")
        add(z.partition(16), x, x).submit(stream).wait()
        del stream
    assert sum("stream" in thread.name for thread in threading.enumerate()) < 20
    assert len({s.name for s in _live.streams if s.device is device and s.name.startswith("stream ")}) < 3


@pytest.mark.feature("H7", "cpu")
def test_round_robin_over_four_streams_by_default():
    device = pt.open_device(ordinal=2)
    pt.use_device(device)
    try:
        seen = [where() for _ in range(8)]
        assert seen[:4] == list(device.policy.streams)
        assert seen[4:] == seen[:4]
        assert len(set(seen)) == 4
        device.policy = pt.SingleStream(seen[2])
        assert [where() for _ in range(3)] == [seen[2]] * 3
        assert where(pt.RoundRobin(device, streams=2)) not in seen
    finally:
        pt.use_device(None)


def test_what_is_no_policy_is_refused_where_it_is_given():
    op = pt.op.value(3)
    with pytest.raises(ArgumentError) as caught:
        op.schedule(pt.current_device().default_stream)
    assert str(caught.value) == (
        "value.schedule: policy: expected a SchedulingPolicy or None, got Stream; to name a stream use submit"
    )
    assert op.schedule().wait() == 3


@pytest.mark.feature("H7", "cpu")
def test_policies_are_anything_with_stream_for_and_differ_per_device():
    device, other = pt.current_device(), pt.open_device(ordinal=1)
    mine, theirs = device.stream("mine"), other.stream("theirs")

    class Always:
        def __init__(self, *streams):
            self.streams = {s.device: s for s in streams}

        def stream_for(self, op):
            return self.streams[op.device]

    always = Always(mine, theirs)
    policy = pt.PerDevice({other: always})
    assert where(policy) in device.policy.streams
    assert (
        pt.op.with_context(lambda c: pt.op.value(c.stream, device=other), device=other).schedule(policy).wait()
        is theirs
    )
    assert where(always) is mine
    del theirs, always, policy
    other.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: pt.RoundRobin(d, streams=0), "streams: expected an integer >= 1, got 0"),
        (lambda d: pt.RoundRobin(d, priority=7), "priority: expected {} to {} on {}, got 7"),
    ],
)
def test_wrong_policies_are_refused(make, message):
    device = pt.current_device()
    with pytest.raises(ArgumentError) as caught:
        make(device)
    assert str(caught.value) == message.format(*sorted(device.capabilities.stream_priorities), device.name)


def test_streams_run_at_the_same_time():
    """Two chains that can only end together: each sets what the other waits for."""
    device = pt.current_device()
    a, b = pt.zeros(1, pt.u32), pt.zeros(1, pt.u32)
    one = pt.op.set_signal(a, 1).then(lambda: pt.op.wait_eq(b, 1, timeout_s=20)).submit(device.stream())
    two = pt.op.set_signal(b, 1).then(lambda: pt.op.wait_eq(a, 1, timeout_s=20)).submit(device.stream())
    one.wait(), two.wait()


def test_sync_on_an_idle_stream_runs_on_the_calling_thread():
    stream = pt.current_device().stream("never served")
    before = {t.name for t in threading.enumerate() if "stream" in t.name}
    x, z = pt.ones(4, pt.f32), pt.zeros(4, pt.f32)
    add(z.partition(4), x, x).then(lambda z, *_: add(z, x, x)).sync_on(stream)
    assert values(z) == [2] * 4
    assert {t.name for t in threading.enumerate() if "stream" in t.name} - before == set()


@pytest.mark.native_only
def test_waiting_for_a_stream_tells_of_faults_and_has_a_bound(hold):
    stream = pt.current_device().stream("s")
    x = pt.zeros(4, pt.f32)
    with hold(stream):
        pt.op.fill(x, 1).submit(stream)
        assert not stream.is_idle()
        with pytest.raises(WaitTimeout, match=r"s: expected to be idle within 0\.01 s, fill is still running"):
            stream.sync(0.01)

    def breaks():
        raise ValueError("on the driver's thread")

    pt.op.host(breaks).submit(stream)
    with pytest.raises(DeviceFault, match="ValueError: on the driver's thread"):
        stream.sync(20)
    stream.sync(20)
    pt.op.fill(x, 2).sync_on(stream)
    assert values(x) == [2] * 4


# ---------------------------------------------------------------- host signals


@pytest.mark.feature("D5", "cpu")
@pytest.mark.parametrize("dtype", [pt.u32, pt.i32])
def test_a_signal_set_on_one_stream_lets_another_go_on(dtype):
    device = pt.current_device()
    word, x = pt.zeros(2, dtype), pt.zeros(4, pt.f32)
    value = 0xFFFFFFFE
    future = pt.op.wait_eq(word, value, timeout_s=20).then(lambda: pt.op.fill(x, 1)).submit(device.stream())
    assert not future.is_done()
    pt.op.set_signal(word, value).sync_on(device.stream())
    future.wait()
    assert values(x) == [1] * 4
    assert word.numpy().view(np.uint32).tolist() == [value, 0]


@pytest.mark.feature("D5", "cpu")
@pytest.mark.parametrize("dtype", [pt.u64, pt.i64])
def test_waits_of_64_bits_are_an_option(dtype):
    big = (1 << 63) + 5
    word = pt.asarray(np.array([big], np.uint64).view(np.uint64 if dtype is pt.u64 else np.int64))
    pt.op.wait_eq(word, big, width=64).sync()
    with pytest.raises(WaitTimeout) as caught:
        pt.op.wait_eq(word, 5, width=64, timeout_s=0.01).sync()
    assert (caught.value.expected, caught.value.seen) == (5, big)


@pytest.mark.feature("D5", "cpu")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pt.op.set_signal(pt.zeros(1, pt.f32), 1), "set_signal: expected a tensor of i32 or u32, got f32"),
        (lambda: pt.op.set_signal(pt.zeros(1, pt.u64), 1), "set_signal: expected a tensor of i32 or u32, got u64"),
        (lambda: pt.op.set_signal(pt.zeros(0, pt.u32), 1), "set_signal: expected a tensor with at least one element, got shape (0,)"),
        (lambda: pt.op.set_signal(pt.zeros(4, pt.u32)[::2], 1), "set_signal: expected a contiguous tensor, got strides (2,)"),
        (lambda: pt.op.set_signal(pt.zeros(1, pt.u32), -1), "set_signal: expected an unsigned 32-bit value, got -1"),
        (lambda: pt.op.set_signal(pt.zeros(1, pt.u32), 1 << 32), "set_signal: expected an unsigned 32-bit value, got 4294967296"),
        (lambda: pt.op.set_signal(np.zeros(1, np.uint32), 1), "set_signal: expected a tensor, got ndarray"),
        (lambda: pt.op.wait_eq(pt.zeros(1, pt.u32), 1, width=64), "wait_eq: expected a tensor of i64 or u64, got u32"),
        (lambda: pt.op.wait_eq(pt.zeros(1, pt.u64), 1), "wait_eq: expected a tensor of i32 or u32, got u64"),
        (lambda: pt.op.wait_eq(pt.zeros(1, pt.u32), 1, width=16), "wait_eq: expected a width of 32 or 64 bits, got 16"),
        (lambda: pt.op.wait_eq(pt.zeros(1, pt.u32), 1, timeout_s=0), "wait_eq: expected a timeout_s > 0, got 0"),
    ],
)  # fmt: skip
def test_signals_are_checked_before_the_driver(make, message):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.feature("D5", "cpu")
def test_a_signal_of_another_device_is_refused():
    other = pt.open_device(ordinal=1)
    stream = other.stream("theirs")
    word = pt.zeros(1, pt.u32)
    with pytest.raises(ArgumentError) as caught:
        pt.op.set_signal(word, 1).sync_on(stream)
    here = pt.current_device().name
    assert (
        str(caught.value) == f"set_signal: expected a stream of {here}, got theirs of cpu:1; run it on its own device"
    )
    del stream
    other.close()


@pytest.mark.feature("D5", "cpu")
def test_the_watchdog_releases_the_stream_and_fails_the_op_and_what_follows():
    stream = pt.current_device().stream()
    word, x = pt.full(1, 3, pt.u32), pt.zeros(4, pt.f32)
    future = pt.op.wait_eq(word, 7, timeout_s=0.02).then(lambda: pt.op.fill(x, 1)).submit(stream)
    with pytest.raises(WaitTimeout) as caught:
        future.wait(20)
    assert str(caught.value) == "wait_eq: nothing came within 0.02 s; expected 7, last seen 3 in wait_eq"
    # What the hardware has been given behind the wait it runs, and the host counts as skipped.
    assert values(x) in ([[0] * 4] if pt.current_device().target is None else [[0] * 4, [1] * 4])
    pt.op.fill(x, 2).sync_on(stream)
    assert values(x) == [2] * 4


def test_signals_are_nodes_of_graphs():
    stream = pt.current_device().stream()
    word, x = pt.zeros(1, pt.u32), pt.zeros(4, pt.f32)
    op = pt.op.wait_eq(word, 1).then(lambda: pt.op.fill(x, 5)).then(lambda: pt.op.set_signal(word, 2))
    graph = op.graph_on(stream)
    for _ in range(3):
        pt.op.fill(x, 0).sync()
        future = graph.launch().submit(stream)
        pt.op.set_signal(word, 1).sync_on(pt.current_device().default_stream)
        future.wait()
        assert (values(x), values(word)) == ([5] * 4, [2])


@pytest.mark.feature("H3", "cpu")
@pytest.mark.parametrize(("steps", "on_caller"), [(0, True), (2, True), (3, False), (10, False)])
def test_of_a_long_chain_the_stream_runs_while_the_rest_is_enqueued(steps, on_caller):
    stream = pt.current_device().stream()
    x = pt.zeros(4, pt.f32)
    op = pt.op.with_context(lambda context: pt.op.value(context.on_caller))
    for k in range(steps):
        op = op.then(lambda seen, k=k: pt.op.fill(x, k).map(lambda: seen))
    assert op.sync_on(stream) is on_caller
    ops = [pt.op.fill(x, k) for k in range(steps)]
    assert pt.zip(pt.op.with_context(lambda context: pt.op.value(context.on_caller)), *ops).sync_on(stream)[0] is (
        on_caller
    )
    assert values(x)[0] == max(steps - 1, 0)
