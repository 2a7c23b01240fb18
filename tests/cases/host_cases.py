"""What the cases of the host runtime share: kernels, and streams that are held up and let go without a sleep."""

from contextlib import contextmanager

import peertile as pt
import peertile.language as T

__all__ = ["add", "device", "holding", "values"]


@pt.kernel
def add(z: T.Exclusive, x: T.Shared, y: T.Shared):
    z.store(x.load_like(z) + y.load_like(z))


def device():
    return pt.current_device()


def values(tensor):
    return tensor.numpy().tolist()


@contextmanager
def holding(*streams):
    """What is enqueued on the streams inside stays pending until the block ends. A GPU loads no code meanwhile: kernels
    that are launched inside are run once in front of it."""
    release = device().stream("release")
    words = [pt.zeros(1, pt.u32) for _ in streams]
    held = [pt.op.wait_eq(w, 1, timeout_s=20).submit(s) for w, s in zip(words, streams, strict=True)]
    try:
        yield
    finally:
        for word in words:
            pt.op.set_signal(word, 1).sync_on(release)
        for future in held:
            future.wait(20)
