"""Futures: submission at the first poll, every way of completion, asyncio and trio, faults, drops, cancellation."""

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest
import trio

import peertile as pt
import peertile.language as T
from peertile import config as settings
from peertile.errors import DeviceFault, KernelAssert, OutOfBounds, UsageError, WaitTimeout
from peertile.runtime import reactor as reactors

pytestmark = pytest.mark.any_device


@pt.kernel
def add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


@pt.kernel
def positive(z: T.Exclusive, x: T.Shared):
    T.assert_(T.min(x.load_like(z), axis=0) > 0, "x must be positive")
    z.store(x.load_like(z))


@pt.kernel
def pick(z: T.Exclusive, x: T.Shared, index: T.i64):
    z.store(x.load((index,), (4,)))


def doubled(x):
    z = pt.empty(x.shape, x.dtype)
    return add(z.partition(4), x, x).map(lambda z, *_: z.unpartition())


def load_kernels():
    x = pt.ones(4, pt.f32)
    pt.zip(
        doubled(x), positive(pt.zeros(4, pt.f32).partition(4), x), pick(pt.zeros(4, pt.f32).partition(4), x, 0)
    ).sync()


def values(tensor):
    return tensor.numpy().tolist()


LOOPS = {"asyncio": lambda main: asyncio.run(main()), "trio": lambda main: trio.run(main)}


@pytest.fixture(params=["asyncio", pytest.param("trio", marks=pytest.mark.native_only)])
def run(request):
    return LOOPS[request.param]


# ---------------------------------------------------------------- the same suite on every path


@pytest.mark.native_only
@pytest.mark.feature("H8", "cpu")
def test_awaiting_gives_the_result_on_every_path(completion_path, run):
    async def main():
        x = pt.ones(8, pt.f32)
        for _ in range(5):
            x = await doubled(x)
        future = doubled(x).schedule()
        assert not future.is_submitted
        return await future, await future

    one, two = run(main)
    assert one is two
    assert values(one) == [64] * 8


@pytest.mark.native_only
@pytest.mark.feature("H8", "cpu")
def test_many_awaits_at_once_on_every_path(completion_path):
    async def main():
        return await asyncio.gather(*(awaited(doubled(pt.full(4, k, pt.f32))) for k in range(60)))

    async def awaited(op):
        return await op

    assert [values(t)[0] for t in asyncio.run(main())] == [2 * k for k in range(60)]


@pytest.mark.native_only
@pytest.mark.feature("H9", "cpu")
def test_a_fault_reaches_the_awaiting_future_on_every_path(completion_path, run, hold):
    stream, other = pt.current_device().stream(), pt.current_device().stream()
    bad, good = pt.full(4, -1, pt.f32), pt.ones(4, pt.f32)

    async def main():
        with hold(stream):
            first = positive(pt.zeros(4, pt.f32).partition(4), bad).submit(stream)
            later = doubled(good).submit(stream)
        with pytest.raises(KernelAssert, match="x must be positive"):
            await first
        with pytest.raises(DeviceFault) as caught:
            await later
        assert str(caught.value) == "add did not run because positive failed in add"
        assert values(await doubled(good)) == [2] * 4
        assert values(await doubled(good).schedule(pt.SingleStream(other))) == [2] * 4
        assert values(await doubled(good).schedule(pt.SingleStream(stream))) == [2] * 4

    run(main)


@pytest.mark.native_only
@pytest.mark.feature("H10", "cpu")
def test_a_cancelled_await_neither_cancels_nor_waits_on_every_path(completion_path, run, hold):
    stream = pt.current_device().stream()
    out = pt.zeros(4, pt.f32)

    async def asyncio_main():
        with hold(stream):
            future = pt.op.fill(out, 3).submit(stream)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(awaited(future), 0.01)
        await future
        return values(out)

    async def trio_main():
        with hold(stream):
            future = pt.op.fill(out, 3).submit(stream)
            with trio.move_on_after(0.01) as scope:
                await future
            assert scope.cancelled_caught
        await future
        return values(out)

    async def awaited(future):
        await future

    if completion_path != "spin":  # a spin holds the loop: there is nothing that could cancel it
        assert run(asyncio_main if run is LOOPS["asyncio"] else trio_main) == [3] * 4


@pytest.mark.native_only
@pytest.mark.feature("H8", "cpu")
def test_a_loop_of_ones_own_polls(completion_path, hold):
    stream = pt.current_device().stream()

    async def main():
        return values(await doubled(pt.ones(4, pt.f32)).schedule(pt.SingleStream(stream)))

    def drive(coroutine):
        for _ in range(10_000_000):
            assert coroutine.send(None) is None

    with hold(pt.current_device().stream()), pytest.raises(StopIteration) as caught:
        drive(main())
    assert caught.value.value == [2] * 4


@pytest.mark.native_only  # under the checker an await never runs its operation itself
def test_what_is_brief_runs_on_the_thread_that_awaits_it(monkeypatch, run):
    x, z = pt.ones(4, pt.f32), pt.zeros(4, pt.f32)
    op = add(z.partition(4), x, x)
    op.sync()
    again = add(z.partition(4), x, x)
    monkeypatch.setattr(again.compiled(), "ns_per_program", 1.0)
    monkeypatch.setattr("peertile.runtime.op.DeviceFuture", None)

    async def main():
        await again
        with pytest.raises(UsageError) as caught:
            await again
        return str(caught.value)

    assert run(main) == "add: an op is used once, and this one was; build a new one by calling again"
    assert values(z) == [2] * 4


def test_an_await_weighs_a_kernel_without_what_any_launch_takes(monkeypatch):
    """Which is more than the budget for spinning on a GPU, where every await would be handed over then."""
    x, z = pt.ones(4, pt.f32), pt.zeros(4, pt.f32)
    op = add(z.partition(4), x, x)
    for _ in range(8):
        add(z.partition(4), x, x).sync()
    spec = op.compiled()
    monkeypatch.setattr(spec, "ns_per_program", 30_000.0)
    monkeypatch.setattr(op.device, "brief_ns", 16_000)
    assert op._expected_ns() == 14_000
    monkeypatch.setattr(spec, "ns_per_program", 300_000.0)
    monkeypatch.setattr(op.device, "brief_ns", 300_000)  # nothing briefer was seen
    assert op._expected_ns() == 280_000
    op.sync()


@pytest.mark.native_only
def test_how_long_a_kernel_takes_is_weighed_once(monkeypatch, run):
    """Over a grid, and once enough launches were timed: then nothing but the budget decides."""
    x, z = pt.ones(12, pt.f32), pt.zeros(12, pt.f32)  # a grid that no other test has
    for _ in range(8):
        add(z.partition(4), x, x).sync()
    spec = add(z.partition(4), x, x).compiled()
    monkeypatch.setattr("peertile.runtime.op.DeviceFuture", None)
    monkeypatch.setattr(spec, "ns_per_program", 1.0)

    async def awaited():
        await add(z.partition(4), x, x)

    run(awaited)
    monkeypatch.setattr(spec, "ns_per_program", 1e9)
    run(awaited)
    monkeypatch.setattr(settings, "_current", settings.config()._replace(spin_budget_us=0))
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        run(awaited)
    assert values(z) == [2] * 12


def test_an_error_at_submission_is_what_the_await_raises(run):
    def breaks(_):
        raise KeyError("closure")

    async def main():
        future = doubled(pt.ones(4, pt.f32)).map(breaks).schedule()
        for _ in range(2):
            with pytest.raises(KeyError):
                await future

    run(main)


def test_awaiting_inside_a_closure_is_refused(run):
    inner = pt.op.value(1).schedule()

    async def main():
        with pytest.raises(UsageError, match="nested execution inside the closure of map"):
            await pt.op.value(1).map(lambda n: inner.__await__().send(None))
        return await inner

    assert run(main) == 1


@pytest.mark.native_only
def test_two_loops_in_two_threads_share_the_reactor(completion_path):
    got = []

    def work(k):
        async def main():
            x = pt.full(4, k, pt.f32)
            for _ in range(20):
                x = await pt.op.dup(x)
            got.append(values(x)[0])

        (asyncio.run if k % 2 else lambda c: trio.run(lambda: c))(main())

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert sorted(got) == [0, 1, 2, 3]


# ---------------------------------------------------------------- futures by themselves


@pytest.mark.slow
@pytest.mark.feature("H1", "cpu")
def test_nothing_is_submitted_before_the_first_poll():
    x = pt.zeros(4, pt.f32)
    future = pt.op.fill(x, 1).schedule()
    del future
    gc.collect()
    assert pt.live_submissions(pt.current_device()) == 0
    future = pt.op.fill(x, 2).schedule()
    assert (values(x), future.is_submitted, future.is_done(), future.stream) == ([0] * 4, False, False, None)
    future.poll()
    assert future.is_submitted
    assert future.stream in pt.current_device().policy.streams
    future.wait(20)
    assert (values(x), future.is_done(), future.poll()) == ([2] * 4, True, True)


@pytest.mark.native_only
def test_waiting_has_a_bound_and_can_be_taken_up_again(hold):
    stream = pt.current_device().stream()
    with hold(stream):
        future = pt.op.value(pt.ones(2, pt.f32)).then(pt.op.dup).submit(stream)
        with pytest.raises(WaitTimeout) as caught:
            future.wait(0.01)
        assert str(caught.value) == "value: expected to complete within 0.01 s, still running; wait longer in value"
    assert values(future.wait(20)) == [1, 1]


@pytest.mark.slow
@pytest.mark.feature("H10", "cpu")
def test_a_dropped_future_keeps_memory_and_leases_until_the_work_is_over(hold):
    device = pt.current_device()
    stream = device.stream()
    gc.collect()
    before = device.memory().in_use
    x = pt.ones(1000, pt.f32)
    gone = weakref.ref(x.storage)
    with hold(stream):
        future = doubled(x).then(doubled).submit(stream)
        del future, x
        gc.collect()
        assert gone() is not None
        assert pt.live_submissions(pt.current_device()) >= 2
    stream.sync()
    assert device.memory().in_use == before
    gc.collect()
    assert gone() is None


@pytest.mark.feature("H9", "cpu")
def test_the_fault_of_a_dropped_future_is_not_lost(hold):
    stream = pt.current_device().stream()
    bad = pt.full(4, -1, pt.f32)
    with hold(stream):
        positive(pt.zeros(4, pt.f32).partition(4), bad).submit(stream)
    with pytest.raises(DeviceFault) as caught:
        doubled(pt.ones(4, pt.f32)).sync_on(stream)
    assert str(caught.value) == "add did not run because positive failed in add"
    assert values(doubled(pt.ones(4, pt.f32)).sync_on(stream)) == [2] * 4


@pytest.mark.feature("H9", "cpu")
def test_the_fault_names_the_op_that_failed_among_many_of_one_submission(hold):
    stream = pt.current_device().stream()
    x = pt.ones(8, pt.f32)

    def third(t):
        return pick(pt.empty(4, pt.f32).partition(4), t, 9).map(lambda z, *_: z.unpartition())

    with hold(stream):
        future = doubled(x).then(doubled).then(third).then(doubled).then(doubled).submit(stream)
        after = pt.op.fill(x, 5).submit(stream)
    with pytest.raises(OutOfBounds) as caught:
        future.wait()
    assert caught.value.op == "pick"
    assert "got 9, limit 2" in str(caught.value)
    with pytest.raises(DeviceFault) as caught:
        after.wait()
    assert str(caught.value) == "fill did not run because pick failed in fill"
    # What a GPU was given before the fault was known may have run, and counts as not run all the same.
    assert values(x) in ([[1] * 8] if stream.device.capabilities.host_addressable else [[1] * 8, [5] * 8])


@pytest.mark.feature("H9", "cpu")
def test_a_wait_that_times_out_fails_its_future_and_other_devices_go_on():
    other = pt.open_device(ordinal=1)
    word = pt.zeros(1, pt.u32)
    future = pt.op.wait_eq(word, 1, timeout_s=0.05).submit()
    x = other.asarray(np.ones(4, np.float32))
    assert values(pt.op.dup(x).sync()) == [1] * 4
    with pytest.raises(WaitTimeout) as caught:
        future.wait()
    assert str(caught.value) == "wait_eq: nothing came within 0.05 s; expected 1, last seen 0 in wait_eq"
    assert (caught.value.expected, caught.value.seen) == (1, 0)
    del x
    other.close()


@pytest.mark.native_only
@pytest.mark.feature("H8", "cpu")
def test_the_reactor_parks_and_slots_come_back(monkeypatch):
    fresh = reactors.Reactor(8)
    monkeypatch.setattr(reactors._shared, "reactor", fresh)
    device = pt.current_device()
    streams = [device.stream() for _ in range(3)]
    fired = []
    for k in range(300):
        future = pt.op.fill(pt.zeros(4, pt.f32), k).submit(streams[k % 3])
        done = threading.Event()
        watch = reactors.watch(future._context, done.set, force_callback=k % 7 == 0)
        if k % 5 == 0:
            watch.cancel()
        else:
            fired.append(done)
        if k % 11 == 0:
            future = None
    assert all(done.wait(20) for done in fired)
    for _ in range(20_000):
        if fresh.is_parked:
            break
        streams[0].is_idle()
        os.sched_yield()
    assert fresh.is_parked
    assert fresh.armed == 0
    tables = list(fresh._tables.values())
    assert len(tables) == device.capabilities.host_addressable  # elsewhere the host does not see the words of slots
    assert all(sorted(table.free) == list(range(8)) for table in tables)
    fresh.stop()


@pytest.mark.slow
@pytest.mark.feature("H10", "cpu")
def test_ten_thousand_futures_in_flight_leave_memory_flat(hold):
    device = pt.current_device()
    streams = [device.stream() for _ in range(4)]
    out = [pt.zeros(4, pt.f32) for _ in range(4)]

    async def main():
        with hold(*streams):
            tasks = [
                asyncio.ensure_future(awaited(pt.op.fill(out[k % 4], k).schedule(pt.SingleStream(streams[k % 4]))))
                for k in range(10_000)
            ]
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    async def awaited(future):
        await future

    before = device.memory().in_use
    asyncio.run(main())
    gc.collect()
    assert device.memory().in_use <= before + 4 * reactors.SLOTS + 4096
    assert [values(t)[0] for t in out] == [9996, 9997, 9998, 9999]


# ---------------------------------------------------------------- exit and fork


def child(code):
    head = "import numpy as np, peertile as pt, os, sys\n"
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.native_only
@pytest.mark.feature("H10", "cpu")
def test_the_interpreter_ends_quietly_with_work_in_flight_and_objects_alive():
    done = child(
        """
        import asyncio
        word = pt.zeros(1, pt.u32)
        x = pt.ones(1000, pt.f32)
        future = pt.op.wait_eq(word, 1, timeout_s=30).then(lambda: pt.op.dup(x)).submit()
        view = x.view(); graph = pt.op.dup(x).graph_on(pt.current_device().stream())
        async def waits():
            await asyncio.wait_for(asyncio.shield(hang(future)), 0.05)
        async def hang(f): await f
        try: asyncio.run(waits())
        except TimeoutError: pass
        print("over")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


@pytest.mark.slow
@pytest.mark.native_only
@pytest.mark.feature("H10", "cpu")
def test_a_forked_child_is_told_and_frees_nothing():
    done = child(
        """
        x = pt.full(4, 3, pt.f32)
        y = pt.op.dup(x).shared(); y.sync()
        import warnings; warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        pid = os.fork()
        if pid == 0:
            try:
                pt.op.fill(x, 1).sync()
            except pt.UsageError as error:
                print(error, flush=True)
            del x, y
            import gc; gc.collect()
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), x.numpy().tolist())
        """
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "runtime was initialised before fork; use spawn", "0 [3.0, 3.0, 3.0, 3.0]",
    ]  # fmt: skip


@pytest.mark.feature("H10", "cpu")
def test_submissions_without_work_do_not_hide_later_ones(hold):
    stream = pt.current_device().stream()
    for count in (15, 16, 17, 40):
        for _ in range(count):
            pt.op.value(1).submit(stream)
        before = pt.live_submissions()
        with hold(stream):
            assert pt.live_submissions() == before + 1
            future = pt.op.zeros(4, pt.f32).submit(stream)
            assert pt.live_submissions() == before + 2
        future.wait()
    assert pt.live_submissions() == before
