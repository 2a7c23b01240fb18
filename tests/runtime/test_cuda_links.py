"""Launches that native code leases, posts and notes in one go: the same as in Python, on every way through them.

Kernels are stood in for by Python functions on the memory that they are given. The feeder is awake without a thread, so
that every launch is posted, and made when somebody looks at the stream; or asleep, so that every one is made by its
caller.
"""

import contextlib
import ctypes
import gc
import random
import sys
import threading
from collections import Counter

import numpy as np
import pytest
from tests.runtime import fake_cuda
from tests.runtime.fake_cuda import FakeCuda

import peertile as pt
import peertile.language as T
from peertile.backends.binary import Compiled, Place
from peertile.backends.cuda.binary import CudaBinary
from peertile.backends.cuda.layout import LaunchLayout
from peertile.errors import ArgumentError, DeviceFault, KernelAssert, LeaseError, UsageError
from peertile.kept_launch import KeptLaunch
from peertile.kernel import KernelFunction
from peertile.launch import LaunchOp
from peertile.runtime.device import Device
from peertile.runtime.driver import FaultKind
from peertile.runtime.drivers import cuda_feeder
from peertile.runtime.drivers.cuda import CudaDriver
from peertile.runtime.drivers.cuda_feeder import Ring
from peertile.runtime.drivers.cuda_native import Lane
from peertile.runtime.drivers.cuda_native_feeding import Feeding
from peertile.runtime.future import DeviceFuture
from peertile.runtime.launched import Launched
from peertile.runtime.lease import claims_lock
from peertile.runtime.linking import LinkCode, Links

N = 4
STEP = 1


@pt.kernel
def add(z: T.Exclusive, x: T.Shared):
    z.store(z.load() + x.load_like(z))


@pt.kernel
def double(z: T.Exclusive, x: T.Shared):
    z.store(x.load_like(z) * 2)


@pt.kernel
def fail(z: T.Exclusive, x: T.Shared):
    T.device_assert(T.program_id(0) < 0, "not this one")
    z.store(x.load_like(z))


def stepping(tile):
    return tile + STEP


@pt.kernel
def stepped(z: T.Exclusive, x: T.Shared):
    z.store(stepping(x.load_like(z)))


def _ints(address):
    return (ctypes.c_int32 * N).from_address(address)


def _each(change):
    def run(program, words):
        z, x = _ints(words[0]), _ints(words[3])
        z[:] = [change(a, b) for a, b in zip(z, x, strict=True)]

    return run


def _fails(program, words):
    record = (ctypes.c_int64 * 8).from_address(words[6 + 4] & ~7)
    record[1:4] = [FaultKind.ASSERT, program, 0]
    record[0] = 2


KERNELS = {
    "add": _each(lambda a, b: a + b), "double": _each(lambda a, b: 2 * b), "stepped": _each(lambda a, b: b + 1),
    "fail": _fails,
}  # fmt: skip


class Compiler:
    """Kernels by their names."""

    def compile_function(self, fn, name, unsafe, types, consts, grid_rank=1, groups=None):
        places = (Place(None, "not this one", "", "assert"),)
        binary = CudaBinary("cuda:sm_90", name, b"", 0, False, places, 6, {}, layout=LaunchLayout(6))
        return Compiled(binary, False, None, (), {}, dict)


class Watched:
    """A device of the stand-in, and what its links said."""

    def __init__(self, patch, awake):
        patch.setattr(cuda_feeder, "LEAST_CORES", 1)
        for name in KERNELS:
            patch.setitem(fake_cuda.KERNELS, name, KERNELS[name])
            patch.setitem(fake_cuda.SLOTS, name, 16)
        self.device = Device(CudaDriver(api=FakeCuda()).open())
        self.device.compiler = Compiler()
        self.driver = self.device.driver
        self.driver.feeder.words[Feeding.AWAKE] = int(awake)
        self.driver.feeder.wake = lambda: None
        self.codes = Counter()
        self.awake = awake
        self.driver._make_links()
        self.links = links = self.driver.links

        def counted(function):
            def call(*given):
                code = function(*given)
                self.codes[code] += 1
                return code

            return call

        def resubmit(*given):
            future = links.resubmit(*given)
            self.codes[LinkCode.REFUSED if future is None else LinkCode.DONE] += 1
            return future

        self.driver._links = Links(counted(links.link), counted(links.post), links.push, resubmit)

    def stream(self, name):
        stream = self.device.stream(name)
        handle, ring = stream.handle, Ring()
        handle.lane[Lane.RING] = ring.address
        assert self.driver.feeder.add(handle.lane_memory, handle.lane_address, ring)
        handle.ring = ring
        handle.lane[Lane.FEEDER] = self.driver.feeder.address
        return stream

    def ints(self, value):
        return pt.full((N,), value, pt.i32)

    def done(self):
        """How many launches were linked since the last question."""
        done = self.codes[LinkCode.DONE] + self.codes[LinkCode.LOOK] + self.codes[LinkCode.LEASED]
        self.codes.clear()
        return done


@pytest.fixture(params=["awake", pytest.param("asleep", marks=pytest.mark.slow)])
def watched(request, monkeypatch):
    with monkeypatch.context() as patch:
        found = Watched(patch, request.param == "awake")
        pt.use_device(found.device)
        try:
            stream = found.stream("first")
            z, x = found.ints(0), found.ints(1)
            for kernel in (add, double, fail):  # known from here on
                kernel(z.partition(N), x)._prepare()
            for _ in range(2):  # the stream has its slots
                add(z.partition(N), x).submit(stream).wait(20)
            found.codes.clear()
            yield found, stream
        finally:
            pt.use_device(None)


def held(storage):
    return [(lease.name, lease.left, lease.size) for lease in storage.leases]


def test_operations_of_a_chain_are_linked_and_do_what_they_say(watched):
    found, stream = watched
    z, x, y = found.ints(0), found.ints(1), found.ints(0)
    part, other = z.partition(N), y.partition(N)
    for kernel, *rest in ((add, part, x), (double, other, z), (add, part, y)):
        kernel(*rest)._prepare()
    op = add(part, x)
    for k in range(60):
        make = (lambda *_: double(other, z)) if k % 2 else (lambda *_: add(part, y))
        op = op.then(make)
    assert op.submit(stream).wait(20) == (other, z)
    assert found.done() == 60
    expect_z, expect_y = 1, 0
    for k in range(60):
        if k % 2:
            expect_y = 2 * expect_z % 2**32
        else:
            expect_z = (expect_z + expect_y) % 2**32
    assert z.numpy().view(np.uint32).tolist() == [expect_z] * N
    assert y.numpy().view(np.uint32).tolist() == [expect_y] * N
    pt.live_submissions()
    assert held(z.storage) == held(x.storage) == held(y.storage) == []


def test_operations_of_a_zip_and_submitted_ones_are_linked(watched):
    found, stream = watched
    z, x = found.ints(0), found.ints(1)
    part = z.partition(N)
    add(part, x).submit(stream).wait(20)
    found.done()
    assert pt.zip(*[add(part, x) for _ in range(40)]).submit(stream).wait(20) == ((part, x),) * 40
    assert found.done() == 40
    futures = [add(part, x).submit(stream) for _ in range(100)]
    assert found.done() == 100
    assert all(future.wait(20) == (part, x) for future in futures)
    assert z.numpy().tolist() == [141] * N
    pt.live_submissions()
    assert held(z.storage) == held(x.storage) == []


def refused(call):
    with pytest.raises((LeaseError, UsageError, ArgumentError)) as caught:
        call()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("linked", [True, False])
def test_what_another_stream_uses_is_refused_in_the_middle_of_a_chain(watched, linked):
    found, stream = watched
    if not linked:
        found.driver._links = None
    other = found.stream("other")
    z, x, y = found.ints(0), found.ints(1), found.ints(0)
    add(z.partition(N), x).submit(stream).wait(20)
    word = pt.zeros(1, pt.u32)
    pt.op.wait_eq(word, 1, timeout_s=60).submit(other)
    add(y.partition(N), x).submit(other)
    op = add(z.partition(N), x).then(lambda *_: add(z.partition(N), x)).then(lambda *_: add(y.partition(N), x))
    kind, text = refused(lambda: op.submit(stream))
    assert kind is LeaseError
    assert text.startswith("lease: add on first (")
    assert "would write a tensor i32[4], but add on other (" in text
    ctypes.c_uint32.from_address(word.address).value = 1
    other.sync(20)
    stream.sync(20)
    assert z.numpy().tolist() == [3] * N  # what came before it was enqueued, and runs
    assert y.numpy().tolist() == [1] * N
    pt.live_submissions()
    assert held(z.storage) == held(y.storage) == []


@pytest.mark.parametrize("linked", [True, False])
def test_memory_that_is_closed_or_lent_out_is_refused(watched, linked):
    found, stream = watched
    if not linked:
        found.driver._links = None
    z, x, y = found.ints(0), found.ints(1), found.ints(1)
    part = z.partition(N)
    for t in (x, y):
        add(part, t).submit(stream).wait(20)
    stream.sync(20)
    view = z.view()
    said = [refused(lambda: add(part, x).submit(stream)), refused(lambda: pt.zip(add(part, x)).submit(stream))]
    assert {text.partition(", made at")[0].partition(") ")[2] for _, text in said} == {
        "would write a tensor i32[4], but a view of it"
    }
    del view, said
    op = add(part, x).then(lambda *_: add(part, y))
    one, both = add(part, y), pt.zip(add(part, x), add(part, y))
    y.storage.close("freed")
    expected = (UsageError, "add: a tensor i32[4] was freed; use it before that")
    assert [refused(lambda op=op: op.submit(stream)) for op in (op, one, both)] == [expected] * 3
    stream.sync(20)
    # Of a zip, those before the one that is refused may run.
    assert z.numpy().tolist() in ([3] * N, [4] * N)
    pt.live_submissions()
    assert held(z.storage) == held(x.storage) == []


def test_a_kept_launch_is_linked_under_one_lease(watched):
    found, stream = watched
    other = found.stream("other")
    z, x = found.ints(0), found.ints(1)
    kept = KeptLaunch(add(z.partition(N), x))
    for _ in range(2):
        kept.submit(stream, None, 7).wait(20)
    found.done()
    many = [kept.submit(stream, None, 7) for _ in range(50)]
    assert found.awake is (found.done() >= 40)  # now and then the stream lets go of what is over first
    assert {future._context.kept for future in many} <= {kept._standing, None}  # None: over already
    assert [future.wait(20) for future in many] == [7] * 50
    table = found.device.leases
    table.release((table.acquire("other", other, None, (x.write_use(),)),))  # it rests
    kept.submit(stream, None, 7).wait(20)  # something has changed: another look
    found.done()
    kept.submit(stream, None, 7).wait(20)
    assert found.awake is (found.done() == 1)
    lease = table.acquire("other", other, None, (x.write_use(),))
    with pytest.raises(LeaseError, match=r"lease: add on first .* would read a tensor i32.* but other on other"):
        kept.submit(stream, None, 7)
    table.release((lease,))
    view = z.view()
    with pytest.raises(LeaseError, match="but a view of it"):
        kept.submit(stream, None, 7)
    del view
    gc.collect()
    kept.submit(stream, None, 7).wait(20)
    x.storage.close("freed")
    with pytest.raises(UsageError, match=r"add: a tensor i32.4. was freed; use it before that"):
        kept.submit(stream, None, 7)
    assert z.numpy().tolist() == [55] * N
    del kept, many
    pt.live_submissions()
    assert held(z.storage) == []


def test_an_operation_is_used_once(watched):
    found, stream = watched
    z, x = found.ints(0), found.ints(1)
    again = add(z.partition(N), x)
    op = add(z.partition(N), x).then(lambda *_: again).then(lambda *_: again)
    expected = (UsageError, "add: an op is used once, and this one was; build a new one by calling again")
    assert refused(lambda: op.submit(stream)) == expected
    assert refused(lambda: again.submit(stream)) == expected
    stream.sync(20)
    assert z.numpy().tolist() == [2] * N


def test_an_exception_midway_leaves_what_was_enqueued(watched):
    found, stream = watched
    z, x = found.ints(0), found.ints(1)
    part = z.partition(N)

    def stop(*_):
        raise RuntimeError("stop")

    op = add(part, x).then(lambda *_: add(part, x)).then(stop).then(lambda *_: add(part, x))
    with pytest.raises(RuntimeError, match="stop"):
        op.submit(stream)
    assert held(z.storage) != []  # until the stream has passed them
    stream.sync(20)
    assert z.numpy().tolist() == [2] * N
    pt.live_submissions()
    assert held(z.storage) == held(x.storage) == []


@pytest.mark.parametrize("at", [1, 7, 40])
@pytest.mark.parametrize("as_zip", [True, False])
def test_a_fault_is_told_of_the_operation_that_failed(watched, at, as_zip):
    found, stream = watched
    z, x = found.ints(0), found.ints(1)
    part = z.partition(N)

    def make(k):
        return (fail if k == at else add)(part, x)

    for k in (0, at):  # known from here on
        make(k)._prepare()
    if as_zip:
        op = pt.zip(*[make(k) for k in range(50)])
    else:
        op = make(0)
        for k in range(1, 50):
            op = op.then(lambda *_, k=k: make(k))
    future = op.submit(stream)
    with pytest.raises(KernelAssert) as caught:
        future.wait(20)
    assert caught.value.op == "fail"
    assert "not this one" in str(caught.value)
    assert found.done() > 20
    assert add(part, x).submit(stream).wait(20) == (part, x)
    future = fail(part, x).submit(stream)
    behind = add(part, x).submit(stream)
    with pytest.raises(DeviceFault, match="add did not run because fail failed"):
        behind.wait(20)
    with pytest.raises(KernelAssert):
        future.wait(20)


def test_a_chain_in_a_capture_is_recorded_and_runs_nothing(watched):
    found, stream = watched
    z, x = found.ints(0), found.ints(1)
    part = z.partition(N)
    with pt.capture(stream, "chain") as scope:
        scope.record(add(part, x).then(lambda *_: add(part, x)))
        scope.record(pt.zip(add(part, x), add(part, x)))
        kind, text = refused(lambda: add(part, x).submit(stream))
    assert kind is UsageError
    assert text.startswith("add: nested execution inside the capture of chain; ")
    assert found.codes == {}
    assert z.numpy().tolist() == [0] * N
    for _ in range(2):
        scope.graph.launch().submit(stream).wait(20)
    assert z.numpy().tolist() == [8] * N


def test_a_stream_of_another_device_is_refused(watched):
    found, _ = watched
    z, x = found.ints(0), found.ints(1)
    other = Device(CudaDriver(api=FakeCuda(devices=2)).open(1))
    foreign = other.stream("foreign")
    expected = (
        ArgumentError, "add: expected a stream of cuda:0, got foreign of cuda:1; run it on its own device"
    )  # fmt: skip
    assert refused(lambda: add(z.partition(N), x).submit(foreign)) == expected
    pt.live_submissions()
    assert held(z.storage) == []


def test_links_wait_for_whoever_holds_a_lock(watched):
    found, stream = watched
    z, x = found.ints(0), found.ints(1)
    part = z.partition(N)
    add(part, x).submit(stream).wait(20)
    for lock in (claims_lock, stream.handle.lock):
        found.done()
        taken, let_go = threading.Event(), threading.Event()

        def hold(lock=lock, taken=taken, let_go=let_go):
            with lock:
                taken.set()
                assert let_go.wait(20)

        holder = threading.Thread(target=hold)
        holder.start()
        assert taken.wait(20)
        submitter = threading.Thread(target=lambda: add(part, x).submit(stream))
        submitter.start()
        submitter.join(0.02)
        assert submitter.is_alive()  # it waits, as Python does
        let_go.set()
        submitter.join(20)
        holder.join(20)
        assert found.codes == {LinkCode.REFUSED: 1}
    stream.sync(20)
    assert z.numpy().tolist() == [3] * N


def test_a_kernel_whose_outside_may_change_is_looked_at(watched, monkeypatch):
    found, stream = watched
    z, x = found.ints(0), found.ints(1)
    part = z.partition(N)
    stepped(part, x).submit(stream).wait(20)
    before = stepped.compile_count
    found.done()
    kept = KeptLaunch(stepped(part, x))
    for _ in range(2):
        stepped(part, x).submit(stream).wait(20)
        kept.submit(stream, None, 7).wait(20)
    assert stepped.compile_count == before
    assert found.done() > 0
    monkeypatch.setattr(sys.modules[__name__], "STEP", 2)
    kept.submit(stream, None, 7).wait(20)
    assert stepped.compile_count == before + 1
    monkeypatch.setattr(sys.modules[__name__], "STEP", 3)
    stepped(part, x).submit(stream).wait(20)
    assert stepped.compile_count == before + 2
    changed = (lambda: kept.submit(stream, None, 7)), (lambda: stepped(part, x).submit(stream))
    for again, other in zip(changed, (double, fail), strict=True):
        for _ in range(2):
            stepped(part, x).submit(stream).wait(20)
            kept.submit(stream, None, 7).wait(20)
        before = stepped.compile_count
        monkeypatch.setattr(stepping, "__code__", other.fn.__code__)  # as a notebook does that loads a module again
        again().wait(20)
        assert stepped.compile_count == before + 1
    monkeypatch.delattr(sys.modules[__name__], "STEP")
    assert found.codes[LinkCode.REFUSED] > 0


def test_links_keep_no_object_and_lose_none(watched):
    found, stream = watched
    z, x = found.ints(0), found.ints(1)
    part = z.partition(N)
    add(part, x).submit(stream).wait(20)
    ready = add(part, x)._ready
    uses = add(part, x).uses
    kept = KeptLaunch(add(part, x))
    kept.submit(stream, None, 7).wait(20)
    watch = [
        part, x, z, stream, stream.handle, add, ready, ready.prepared, ready.args, ready.maker, *uses, z.storage,
        True, False, LaunchOp, KernelFunction, found.device, kept, kept.launch, kept._standing, kept._standing.lease,
        Launched, DeviceFuture, KeptLaunch,
    ]  # fmt: skip

    def burst():
        op = add(part, x)
        for _ in range(30):
            op = op.then(lambda *_: add(part, x))
        op.submit(stream).wait(20)
        pt.zip(*[add(part, x) for _ in range(30)]).submit(stream).wait(20)
        for _ in range(30):
            add(part, x).submit(stream)
            kept.submit(stream, None, 7)
        stream.sync(20)
        pt.live_submissions()
        gc.collect()
        return [sys.getrefcount(thing) for thing in watch], len(gc.get_objects())

    for _ in range(3):
        burst()
    counts, objects = burst()
    for _ in range(5):
        last, objects_then = burst()
    # Of objects that others use too, a few come and go; a reference for each launch would be hundreds.
    assert [abs(a - b) < 40 for a, b in zip(counts, last, strict=True)] == [True] * len(watch)
    assert abs(objects_then - objects) < 200


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_are_the_same_with_links_and_without(watched, seed):
    found, stream = watched
    outcomes = []
    links = found.driver._links
    for linked in (True, False):
        found.driver._links = links if linked else None
        found.done()
        rng = random.Random(seed)
        other = found.stream("other")
        tensors = [found.ints(k) for k in range(5)]
        parts = [t.partition(N) for t in tensors]
        log, views = [], []
        for _ in range(60):
            own, both = rng.choice([(stream, (0, 1, 2)), (other, (3, 4, 2))])  # the last is read alone
            log.append(_turn(rng, own, [tensors[k] for k in both], [parts[k] for k in both[:2]], views))
        for s in (stream, other):
            s.sync(20)
        views.clear()
        pt.live_submissions()
        log += [t.numpy().tolist() for t in tensors] + [held(t.storage) for t in tensors]
        outcomes.append((log, found.done()))
    assert outcomes[0][0] == outcomes[1][0]
    assert outcomes[0][1] > 20
    assert outcomes[1][1] == 0


def in_driver():
    """Whether the stand-in of the driver is running, which is Python, where the driver's own functions never are."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != fake_cuda.__file__:
        frame = frame.f_back
    return frame is not None


def test_finalisers_that_run_in_between(watched):
    """Collection may start at any allocation, and run code that submits, lets go of memory and gives leases back."""
    found, stream = watched
    other = found.stream("other")
    z, y, x, one = (found.ints(k) for k in (0, 0, 1, 1))
    part, late = z.partition(N), y.partition(N)
    kept = KeptLaunch(add(part, x))
    count, spare = Counter(), [found.ints(3) for _ in range(420)]

    class Circle:
        def __init__(self):
            self.me, self.memory = self, spare.pop()

        def __del__(self):
            if in_driver():
                return
            with contextlib.suppress(UsageError):  # inside a closure nothing may be submitted
                add(late, one).submit(other)
                count["late"] += 1
            pt.live_submissions()

    def make(*_):
        Circle()
        return add(part, x)

    for _ in range(2):
        make().submit(stream).wait(20)
    found.done()
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(10):
            op = make()
            for _ in range(10):
                op = op.then(make)
            op.submit(stream)
            pt.zip(*[make() for _ in range(10)]).submit(stream)
            for _ in range(10):
                make().submit(stream)
                Circle()
                kept.submit(stream, None, 7)
        stream.sync(20)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    for s in (stream, other):
        s.sync(20)
    assert z.numpy().tolist() == [2 + 310 + 100] * N
    assert y.numpy().tolist() == [count["late"]] * N
    assert count["late"] > 100
    assert found.done() > 100
    del kept
    pt.live_submissions()
    assert held(z.storage) == held(y.storage) == held(x.storage) == []


def test_threads_that_submit_on_streams_of_their_own(watched):
    found, stream = watched
    streams = [stream, found.stream("second"), found.stream("third")]
    ones = [found.ints(1) for _ in streams]
    totals = [found.ints(0) for _ in streams]
    errors = []

    def work(k):
        try:
            pt.use_device(found.device)
            part, x = totals[k].partition(N), ones[k]
            for _ in range(60):
                op = add(part, x).then(lambda *_: add(part, x))
                op.submit(streams[k])
                pt.zip(add(part, x), add(part, x)).submit(streams[k])
                add(part, x).submit(streams[k])
            streams[k].sync(20)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    assert [t.numpy().tolist() for t in totals] == [[300] * N] * len(streams)
    assert found.done() > 0
    pt.live_submissions()
    assert [held(x.storage) for x in ones] == [[]] * len(streams)


def _turn(rng, stream, tensors, parts, views):
    """Something to do; what came of it."""

    def make():
        a, b = rng.choice([(0, 1), (0, 2), (1, 0), (1, 2)])
        return rng.choice([add, double])(parts[a], tensors[b])

    way = rng.random()
    count = rng.randrange(1, 9)
    try:
        if way < 0.3:
            op = make()
            for _ in range(count):
                op = op.then(lambda *_: make())
            op.submit(stream)
        elif way < 0.5 and not views:  # of a zip that is refused, what comes before may run, or not
            pt.zip(*[make() for _ in range(count)]).submit(stream)
        elif way < 0.8:
            for _ in range(count):
                make().submit(stream)
        elif way < 0.85:
            views.append(rng.choice(tensors).view())
        elif way < 0.9:
            views.clear()
        else:
            stream.sync(20)
    except (LeaseError, UsageError) as error:
        return type(error).__name__, str(error).partition(" (")[0]
    return "fine"
