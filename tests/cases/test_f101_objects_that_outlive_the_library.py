"""The interpreter ends quietly whatever is alive: tensors, views, graphs, futures, work in flight. What a closed
device is asked for is an error."""

import subprocess
import sys
import textwrap

import pytest

import peertile as pt
from peertile.errors import LaunchError, UsageError

HEAD = "import peertile as pt\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "x = pt.zeros(1000, pt.f32); v = x.view(); f = x.share()",
        "x = pt.zeros(4, pt.f32); g = pt.op.dup(x).graph_on(pt.current_device().stream()); o = g.take_output()",
        "w = pt.zeros(1, pt.u32); f = pt.op.wait_eq(w, 1).then(lambda: pt.op.dup(w)).submit()",
        "d = pt.open_device(ordinal=1); t = d.empty(10, pt.f32); s = d.stream(); d.close(); del t",
        "heap = pt.SymmetricHeap(pt.init(), size_bytes=1 << 16); t = heap.zeros((4,), pt.f32)",
        """
        import asyncio
        w = pt.zeros(1, pt.u32)
        async def main():
            task = asyncio.ensure_future(wait(pt.op.wait_eq(w, 1).schedule()))
            await asyncio.sleep(0.01)
            task.cancel()
        async def wait(future):
            await future
        asyncio.run(main())
        """,
    ],
)
def test_the_interpreter_ends_quietly(code):
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_closed_device_says_so_and_a_busy_one_stays_open():
    device = pt.open_device(ordinal=1)
    x = device.empty(4, pt.f32)
    word = device.empty(1, pt.u32)
    pt.op.fill(word, 0).sync()
    future = pt.op.wait_eq(word, 1).submit(device.stream())
    with pytest.raises(LaunchError) as caught:
        device.close()
    assert str(caught.value) == "cpu:1: cannot close while operations are pending; sync its streams first"
    pt.op.set_signal(word, 1).sync_on(device.default_stream)
    future.wait(20)
    del future
    device.close()
    with pytest.raises(UsageError) as caught:
        device.empty(4, pt.f32)
    assert str(caught.value) == "cpu:1 was closed; open a new device"
    with pytest.raises(UsageError) as caught:
        x.numpy()
    assert str(caught.value) == "driver: expected an open device, got cpu:1, which was closed"
