"""What the host runtime's tests share: streams that are held up and let go, without any sleep."""

import contextlib
from contextlib import contextmanager

import pytest

import peertile as pt
from peertile import config as settings
from peertile.runtime import reactor as reactors
from peertile.runtime import stream as streams


@pytest.fixture
def hold(request):
    """`with hold(stream): …`: everything enqueued on the stream inside stays pending until the block ends. A GPU loads no
    code meanwhile, so a module's `load_kernels` runs those that it launches there."""
    load = getattr(request.module, "load_kernels", None)
    if load is not None and pt.current_device().driver.kind is pt.DriverKind.CUDA:
        load()
    release = pt.current_device().stream("release")

    @contextmanager
    def holding(*streams):
        words = [pt.zeros(1, pt.u32) for _ in streams]
        held = [pt.op.wait_eq(w, 1, timeout_s=60).submit(s) for w, s in zip(words, streams, strict=True)]
        try:
            yield
        finally:
            for word in words:
                pt.op.set_signal(word, 1).sync_on(release)
            for future in held:
                future.wait(60)

    return holding


PATHS = {
    "spin": {"spin_budget_us": 2_000_000, "host_sync": None, "slots": 8},
    "reactor": {"spin_budget_us": 0, "host_sync": None, "slots": 8},
    "slots exhausted": {"spin_budget_us": 0, "host_sync": None, "slots": 0},
    "callback": {"spin_budget_us": 0, "host_sync": "block", "slots": 8},
}


@pytest.fixture(params=list(PATHS))
def completion_path(request, monkeypatch):
    """Each way in which a future learns of completion, forced by configuration."""
    forced = dict(PATHS[request.param])
    fresh = reactors.Reactor(forced.pop("slots"))
    monkeypatch.setattr(reactors._shared, "reactor", fresh)
    config = settings.config()
    monkeypatch.setattr(settings, "_current", config._replace(**forced))
    yield request.param
    fresh.stop()


@pytest.fixture(autouse=True)
def nothing_in_flight():
    """Whatever a test does, nothing of it is running or leaked afterwards. (What tests of other folders in the same
    process have left is not its doing.)"""
    pt.live_submissions()
    others = set(streams._live.streams)
    leaked = pt.leaked_submissions()
    yield
    for stream in set(streams._live.streams) - others:
        with contextlib.suppress(pt.DeviceFault):  # a test that leaves a fault behind has looked at it already
            stream.sync(5)
    pt.live_submissions()
    assert set(streams._live.streams) - others == set()
    assert pt.leaked_submissions() == leaked
