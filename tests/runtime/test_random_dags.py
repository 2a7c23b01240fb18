"""Random graphs of operations over random streams, with drops, cancellations, exceptions and collections at the
await points, give the values of a sequential run, or the one stated error. Freed memory is poisoned."""

import asyncio
import contextlib
import gc
import random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import peertile as pt
import peertile.language as T
from peertile import config as configuration
from peertile.errors import DeviceFault, LeaseError
from peertile.runtime.drivers.cpu import CpuDriver
from peertile.runtime.reactor import SLOTS

pytestmark = [pytest.mark.any_device, pytest.mark.native_only]

N, TENSORS, STREAMS = 64, 5, 3


@pt.kernel
def add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


@pt.kernel
def scale(z: T.Exclusive, by: T.f32):
    z.store(z.load() * by)


@pt.kernel
def small(z: T.Exclusive):
    T.assert_(T.max(z.load(), axis=0) < 0, "this value is never negative")
    z.store(z.load())


class Step(NamedTuple):
    """What happens next: one operation, how it is ordered, and what becomes of its future."""

    kind: str  # add, scale, fill, copy, temporary, fault
    to: int
    a: int
    b: int
    stream: int
    ordered_by: str  # event, await, nothing
    fate: str  # await, drop, cancel, keep, sync, raise
    shared: bool
    collect: bool


index = st.integers(0, TENSORS - 1)
steps = st.builds(
    Step,
    st.sampled_from(["add", "add", "scale", "fill", "copy", "temporary", "graph"]),
    index,
    index,
    index,
    st.integers(0, STREAMS - 1),
    st.sampled_from(["event", "await", "nothing"]),
    st.sampled_from(["await", "drop", "cancel", "keep", "sync", "raise"]),
    st.booleans(),
    st.booleans(),
)
PATHS = {
    "spin": {"spin_budget_us": 2_000_000, "host_sync": None},
    "default": {"spin_budget_us": 20, "host_sync": None},
    "reactor": {"spin_budget_us": 0, "host_sync": None},
    "callback": {"spin_budget_us": 0, "host_sync": "block"},
}
"""How a future learns of completion: each of the three ways forced, and the two first as they come."""
LONG_PIECES, LONG_EACH = 20, 1000


class Boom(Exception):
    """Raised in closures."""


class World:
    """Tensors on a poisoned device, the same numbers in numpy, and what is in flight."""

    def __init__(self, device):
        self.device = device
        self.streams = device.policy.streams[:STREAMS]
        self.tensors = [pt.full(N, k + 1, pt.f32) for k in range(TENSORS)]
        self.numbers = [np.full(N, k + 1, np.float32) for k in range(TENSORS)]
        self.last = [[] for _ in range(TENSORS)]  # futures that use tensor k
        self.kept = []
        self.refused = 0

    def operation(self, step):
        """The operation of a step, which tensors it uses, and its effect in numpy."""
        t, n = self.tensors, self.numbers
        to, a, b = step.to, step.a, step.b
        if step.kind == "add" and to not in (a, b):
            return add(t[to].partition(16), t[a], t[b]), (to, a, b), lambda: n[to].__setitem__(slice(None), n[a] + n[b])
        if step.kind == "copy" and to != a:
            return pt.op.copy(t[a], to=t[to]), (to, a), lambda: n[to].__setitem__(slice(None), n[a])
        if step.kind == "temporary" and to != a:  # through memory that nobody but the submission holds
            op = pt.op.dup(t[a]).then(lambda x: add(pt.empty(N, pt.f32).partition(16), x, x))
            return (
                op.then(lambda z, *_: pt.op.copy(z.unpartition(), to=t[to])),
                (to, a),
                lambda: n[to].__setitem__(slice(None), n[a] + n[a]),
            )
        if step.kind == "graph" and to != a:
            graph = pt.op.dup(t[a]).then(lambda x: pt.op.copy(x, to=t[to])).graph_on(self.streams[step.stream])
            return graph.launch(), (to, a), lambda: n[to].__setitem__(slice(None), n[a])
        if step.kind == "scale":
            return scale(t[to].partition(16), 0.5), (to,), lambda: n[to].__imul__(np.float32(0.5))
        return pt.op.fill(t[to], a), (to,), lambda: n[to].fill(a)

    async def order(self, step, used):
        """See to it that the step's stream is behind everything that uses the same tensors."""
        stream = self.streams[step.stream]
        for k in used:
            for future in self.last[k]:
                if future.stream is stream or future.is_done():
                    continue
                if step.ordered_by == "await":
                    await awaited(future, step.collect)
                else:
                    stream.wait(future.stream.record())

    async def take(self, step):
        op, used, effect = self.operation(step)
        if step.ordered_by != "nothing":
            await self.order(step, used)
        if step.shared:
            op = op.shared()
        if step.fate == "raise":
            op = op.map(self.boom)
        stream = self.streams[step.stream]
        try:
            future = op.schedule(pt.SingleStream(stream))
            try:
                future.poll()
            except LeaseError:
                # Nothing ordered it, and the other work was still running. Order it, and do it again.
                self.refused += 1
                again = step._replace(ordered_by="event")
                await self.order(again, used)
                op, used, effect = self.operation(again)
                future = op.schedule(pt.SingleStream(stream))
                future.poll()
        except Boom:
            effect()  # the closure failed, what was enqueued before it did not
            await self.settle(stream)
            return
        effect()
        for k in used:
            self.last[k] = [f for f in self.last[k] if not f.is_done()] + [future]
        if step.collect:
            gc.collect()
        if step.fate == "await":
            await awaited(future, step.collect)
        elif step.fate == "sync":
            future.wait(30)
        elif step.fate == "cancel":
            task = asyncio.ensure_future(awaited(future))
            del future
            await asyncio.sleep(0)
            if step.collect:
                gc.collect()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif step.fate == "keep":
            self.kept.append(future)

    @staticmethod
    def boom(*_):
        raise Boom

    async def settle(self, stream):
        stream.sync(30)

    async def run(self, plan):
        for step in plan:
            await self.take(step)
        for future in self.kept:
            await future
        for stream in self.streams:
            stream.sync(30)


async def awaited(future, collect=False):
    """The future's result; with a collection before, while it is awaited (another task's turn) and after."""
    if not collect:
        return await future
    gc.collect()
    asyncio.get_running_loop().call_soon(gc.collect)
    result = await future
    gc.collect()
    return result


@pytest.fixture(scope="module")
def device():
    device = pt.Device(CpuDriver(threads=2, poison=True).open(5))
    gc.collect()
    gc.freeze()  # what was there before is not looked at again: a collection takes a tenth of the time
    yield device
    gc.unfreeze()
    device.close()


def check(device, plan, path):
    before = configuration.config()
    configuration._current = before._replace(**PATHS[path])
    pt.use_device(device)
    try:
        gc.collect()
        start = device.memory().in_use
        world = World(device)
        asyncio.run(world.run(plan))
        for tensor, numbers in zip(world.tensors, world.numbers, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), numbers)
        assert pt.live_submissions(pt.current_device()) == 0
        del world, tensor
        gc.collect()
        assert device.memory().in_use - start <= 4 * SLOTS + 64  # the reactor's words, once
        assert pt.leaked_submissions() == 0
    finally:
        pt.use_device(None)
        configuration._current = before


def dags(examples):
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
    )


plans = given(st.lists(steps, min_size=1, max_size=14))
forced = pytest.mark.parametrize("path", PATHS)


@pytest.mark.feature("H10", "cpu")
@pytest.mark.feature("H8", "cpu")
@forced
@dags(8)
@plans
def test_some_random_dags_give_the_values_of_a_sequential_run(device, path, plan):
    check(device, plan, path)


@pytest.mark.slow
@forced
@dags(150)
@plans
def test_random_dags_give_the_values_of_a_sequential_run(device, path, plan):
    check(device, plan, path)


def plan_of(seed):
    """A plan that the seed gives, as `steps` draws them: quicker than hypothesis, which shrinks where this cannot."""
    draw = random.Random(seed)
    kinds = ["add", "add", "scale", "fill", "copy", "temporary", "graph"]
    orders, fates = ["event", "await", "nothing"], ["await", "drop", "cancel", "keep", "sync", "raise"]
    return [
        Step(
            draw.choice(kinds),
            *(draw.randrange(TENSORS) for _ in range(3)),
            draw.randrange(STREAMS),
            draw.choice(orders),
            draw.choice(fates),
            draw.random() < 0.5,
            draw.random() < 0.5,
        )
        for _ in range(draw.randint(1, 14))
    ]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("piece", range(LONG_PIECES))
def test_very_many_random_dags_give_the_values_of_a_sequential_run(device, piece):
    paths = sorted(PATHS)
    for seed in range(piece * LONG_EACH, (piece + 1) * LONG_EACH):
        try:
            check(device, plan_of(seed), paths[seed % len(paths)])
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.feature("H9", "cpu")
@dags(20)
@given(st.lists(steps, min_size=1, max_size=10), st.integers(0, 9), st.sampled_from(sorted(PATHS)))
def test_a_fault_anywhere_is_the_one_error_and_streams_go_on(device, plan, at, path):
    before = configuration.config()
    configuration._current = before._replace(**PATHS[path])
    pt.use_device(device)
    try:
        world = World(device)

        async def main():
            for k, step in enumerate(plan):
                if k == min(at, len(plan) - 1):
                    used = (step.to,)
                    await world.order(step._replace(ordered_by="event"), used)
                    future = small(world.tensors[step.to].partition(16)).submit(world.streams[step.stream])
                    world.kept.append(future)
                    world.last[step.to].append(future)
                await world.take(step._replace(fate="await" if step.fate == "raise" else step.fate))
            await asyncio.gather(*(awaited(f) for f in world.kept))

        with pytest.raises(DeviceFault) as caught:
            asyncio.run(main())
        assert "this value is never negative" in str(caught.value) or "because small failed" in str(caught.value)
        for _ in range(2 * STREAMS):  # a fault is told once on each stream that it reached
            for stream in world.streams:
                with contextlib.suppress(DeviceFault):
                    stream.sync(30)
        for stream in world.streams:
            pt.op.fill(world.tensors[0], 7).sync_on(stream)
        assert (world.tensors[0].numpy() == 7).all()
        assert pt.live_submissions(pt.current_device()) == 0
    finally:
        pt.use_device(None)
        configuration._current = before
