"""What the cases share: ranks as threads, and a heap of this process alone. No pytest here."""

import contextlib

import peertile as pt


def spawn(function, ranks, *args):
    return pt.spawn(function, ranks, args, model=pt.RankModel.THREADS, timeout_s=60)


@contextlib.contextmanager
def alone(size_bytes=1 << 20):
    """A heap of this process alone, whose group is whole again afterwards."""
    group = pt.init()
    with pt.SymmetricHeap(group, size_bytes) as heap:
        yield heap
        if group.failure() is not None:
            group.recover()


def told(error):
    return type(error).__name__, str(error).splitlines()[0]
