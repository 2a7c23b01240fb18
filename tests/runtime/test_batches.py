"""Launches of a zip reach the driver together: nobody can tell but by the time it takes."""

import pytest

import peertile as pt
import peertile.language as T
from peertile.errors import KernelAssert, LeaseError

pytestmark = pytest.mark.any_device

N = 16


@pt.kernel
def bump(z: T.Exclusive, by: T.f32):
    z.store(z.load() * 2 + by)


@pt.kernel
def below(z: T.Exclusive, limit: T.f32):
    T.assert_(T.max(z.load(), axis=0) < limit, "below the limit")
    z.store(z.load() + 1)


def load_kernels():
    z = pt.zeros(N, pt.f32)
    pt.zip(bump(z.partition(N), 1), below(z.partition(N), 10.0)).sync()


def bumps(z, *values):
    return [bump(z.partition(N), v) for v in values]


def expected(start, *values):
    for v in values:
        start = start * 2 + v
    return [start] * N


@pytest.mark.feature("H3", "cpu")
@pytest.mark.parametrize("count", [1, 3, 7, 8, 9, 16, 20])
def test_a_zip_of_launches_runs_in_order(count):
    z = pt.zeros(N, pt.f32)
    values = [k % 3 for k in range(count)]
    pt.zip(*bumps(z, *values)).sync()
    assert z.numpy().tolist() == expected(0, *values)
    z = pt.zeros(N, pt.f32)
    pt.zip(*bumps(z, *values)).submit().wait()
    assert z.numpy().tolist() == expected(0, *values)


@pytest.mark.feature("H3", "cpu")
def test_other_operations_in_a_zip_keep_their_place():
    z, y = pt.zeros(N, pt.f32), pt.zeros(N, pt.f32)
    op = pt.zip(
        *bumps(z, 1, 2),
        pt.op.copy(z, to=y),
        *bumps(z, 3),
        pt.op.fill(z, 7),
        pt.zip(*bumps(z, 1), *bumps(y, 1)),
        *bumps(z, 1),
    )
    op.submit().wait()
    assert z.numpy().tolist() == expected(7, 1, 1)
    assert y.numpy().tolist() == expected(0, 1, 2, 1)


class Looks(pt.DeviceOp):
    """Code of the user's in the middle of a zip: whatever was put before it has been enqueued."""

    def __init__(self, device, seen):
        super().__init__()
        self.on, self.seen = device, seen

    @property
    def device(self):
        return self.on

    def execute(self, context):
        self.seen.append((context.stream.record().ticket.sequence, len(context.batch)))


def test_code_of_the_user_s_finds_everything_before_it_enqueued(hold):
    device = pt.current_device()
    stream = device.stream()
    z, seen = pt.zeros(N, pt.f32), []
    with hold(stream):
        start = stream.record().ticket.sequence
        op = pt.zip(
            *bumps(z, 1, 1, 1),
            Looks(device, seen),
            *bumps(z, 1, 1),
            pt.op.with_context(lambda context: Looks(device, seen)),
            *bumps(z, 1),
            pt.op.value(0).map(lambda _: seen.append((stream.record().ticket.sequence, 0))),
        )
        future = op.submit(stream)
    future.wait()
    assert seen == [(start + 4, 0), (start + 7, 0), (start + 9, 0)]


@pytest.mark.feature("H9", "cpu")
@pytest.mark.parametrize("at", [0, 5, 8, 11])
def test_a_fault_among_many_is_told_by_the_launch_that_failed(at):
    z, ok = pt.zeros(N, pt.f32), pt.zeros(N, pt.f32)
    ops = [below((z if k == at else ok).partition(N), -1.0 if k == at else 100.0) for k in range(12)]
    with pytest.raises(KernelAssert) as caught:
        pt.zip(*ops).submit().wait()
    assert "below the limit" in str(caught.value)
    (ran,) = set(ok.numpy().tolist())
    # What a GPU was given before the fault was known may have run, and counts as not run all the same.
    assert at <= ran <= (at if pt.current_device().capabilities.host_addressable else 11)


@pytest.mark.feature("H11", "cpu")
def test_a_refusal_in_the_middle_leaves_what_came_before_owned_and_the_rest_not(hold):
    device = pt.current_device()
    a, b = device.stream("a"), device.stream("b")
    z, taken = pt.zeros(N, pt.f32), pt.zeros(N, pt.f32)
    with hold(a):
        pt.op.fill(taken, 1).submit(a)
        with pytest.raises(LeaseError):
            pt.zip(*bumps(z, 1, 1), *bumps(taken, 1), *bumps(z, 1)).submit(b)
    b.sync()
    pt.live_submissions()
    assert not z.storage.leases
    assert z.numpy().tolist() in ([0] * N, expected(0, 1, 1))  # what had reached the driver ran


@pytest.mark.feature("H12", "cpu")
def test_a_zip_is_captured_node_by_node():
    stream = pt.current_device().stream()
    z = pt.zeros(N, pt.f32)
    graph = pt.zip(*bumps(z, *[1] * 11)).graph_on(stream)
    assert graph.nodes == 11
    graph.launch().sync_on(stream)
    graph.launch().submit(stream).wait()
    assert z.numpy().tolist() == expected(0, *[1] * 22)


@pytest.mark.feature("H13", "cpu")
def test_giving_up_protection_gives_up_none_of_other_submissions(hold):
    device = pt.current_device()
    a, b = device.stream("a"), device.stream("b")
    z = pt.zeros(N, pt.f32)
    part = z.partition(N)
    with hold(a):
        future = bump(part, 1).submit(a)
        bump(part, 1).async_on(a)
        with pytest.raises(LeaseError) as caught:
            bump(part, 1).submit(b)
        assert "but bump on a" in str(caught.value)
    future.wait()
    a.sync()
    assert z.numpy().tolist() == expected(0, 1, 1)
