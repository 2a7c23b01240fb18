"""The tree of errors, what they carry, and what cannot be proven to be over."""

import gc

import pytest

import peertile as pt
from peertile import errors
from peertile.errors import UsageError
from peertile.runtime import stream as streams

TREE = {
    "DeviceFault": ["PeertileError"],
    "WaitTimeout": ["DeviceFault", "TimeoutError"],
    "KernelAssert": ["DeviceFault"],
    "OutOfBounds": ["DeviceFault"],
    "PeerFailed": ["DeviceFault"],
    "SignatureMismatch": ["DeviceFault"],
    "LeaseError": ["PeertileError"],
    "CompileError": ["PeertileError"],
    "LaunchError": ["PeertileError"],
    "SymmetryError": ["PeertileError"],
    "UnsupportedError": ["PeertileError"],
    "AllocationError": ["PeertileError"],
}


@pytest.mark.feature("H18", "cpu")
@pytest.mark.parametrize("name", TREE)
def test_every_error_is_in_one_tree_and_has_a_public_name(name):
    error = getattr(errors, name)
    assert getattr(pt, name) is error
    for base in TREE[name]:
        assert issubclass(error, getattr(errors, base, TimeoutError))
    assert issubclass(error, errors.PeertileError)


@pytest.mark.feature("H18", "cpu")
def test_a_peer_s_failure_carries_its_rank_and_its_cause():
    error = pt.PeerFailed(3, "KernelAssert: no")
    assert (error.rank, error.cause) == (3, "KernelAssert: no")
    assert str(error) == "rank 3 failed: KernelAssert: no"


class Boom(Exception):
    """Raised in the middle of a submission."""


class Breaks(pt.DeviceOp):
    """Enqueues, then fails on a device whose driver refuses to say how far it is."""

    def __init__(self, tensor, monkeypatch):
        super().__init__()
        self.tensor, self.monkeypatch = tensor, monkeypatch

    @property
    def device(self):
        return self.tensor.device

    def execute(self, context):
        context.run(pt.op.fill(self.tensor, 3))

        def refuse(stream):
            raise UsageError("driver: expected an open device, got cpu:0, which was closed")

        self.monkeypatch.setattr(type(self.device.driver), "last_ticket", lambda driver, stream: refuse(stream))
        raise Boom


@pytest.mark.feature("H10", "cpu")
def test_what_cannot_be_proven_to_be_over_is_kept_for_ever_and_counted(monkeypatch):
    device = pt.current_device()
    stream = device.stream("broken")
    x = pt.zeros(1000, pt.f32)
    before, storage = pt.leaked_submissions(), x.storage
    gc.collect()  # what tracebacks of tests before this one hold
    in_use = device.memory().in_use
    with monkeypatch.context() as patch, pytest.raises(Boom):
        Breaks(x, patch).sync_on(stream)
    try:
        assert pt.leaked_submissions() == before + 1
        del x
        gc.collect()
        assert device.memory().in_use == in_use  # its memory is still its own
        assert [lease.name for lease in storage.leases] == ["fill"]
    finally:
        leaked = streams._live.leaked.pop()
        leaked.release()
        stream.sync()


@pytest.mark.feature("H8", "cpu")
def test_settings_are_read_once(monkeypatch):
    from peertile.config import config

    before = config()
    monkeypatch.setenv("PEERTILE_SPIN_BUDGET_US", "12345")
    monkeypatch.setenv("PEERTILE_HOST_SYNC", "block")
    assert config() is before


@pytest.mark.feature("H7", "cpu")
def test_priorities_are_those_that_the_device_has():
    device = pt.current_device()
    least, greatest = device.capabilities.stream_priorities
    for priority in range(min(least, greatest), max(least, greatest) + 1):
        assert pt.RoundRobin(device, 1, priority=priority).streams[0].priority == priority
    with pytest.raises(pt.ArgumentError) as caught:
        device.stream("urgent", greatest - 1 if greatest < least else greatest + 1)
    assert "priority: expected" in str(caught.value)
