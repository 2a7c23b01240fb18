"""Kernels and rank functions of the peer memory tests. No pytest here: every rank imports this."""

import os
import signal
import time

import numpy as np

import peertile as pt
import peertile.language as T
from peertile.errors import DeviceFault, PeertileError, SymmetryError


@pt.kernel
def box_sum(out: T.Exclusive, x: T.Shared, box: T.Mailbox):
    for tile in out.tiles():
        box.post(x.load_like(tile))
        acc = T.zeros(tile.tile_shape, out.dtype)
        for part in box.collect():
            acc += part
        tile.store(acc)


@pt.kernel
def gather(out: T.Peer, x: T.Peer[T.read], ready: T.Signal, B: T.Const[int]):
    """Every rank reads every peer's vector and writes it to its own row."""
    ready.notify()
    ready.wait()
    for r in T.ranks():
        out.local.store((r, 0), T.reshape(x.at(r).load((0,), (B,)), (1, B)))
    ready.notify()
    ready.wait()


@pt.kernel
def count(out: T.Exclusive, tally: T.Counter, rounds: T.i32):
    """Everyone adds 1 at rank 0 each round; rank 0 waits for all of them."""
    me, n = T.rank(), T.num_ranks()
    for _ in T.range(rounds):
        tally.add(1, to=0)
        if me == 0:
            tally.wait(n)
    out.store(T.full((1,), n, T.i64))


@pt.kernel
def meet(out: T.Exclusive, x: T.Peer, b: T.Barrier, rounds: T.i32):
    """A barrier over all programs of all ranks between writing and reading a neighbour's words."""
    me, n = x.rank, x.num_ranks
    p = T.program_id(0)
    total = T.i64(0)
    for k in T.range(rounds):
        x.local.store((p,), T.full((1,), me * 1000 + p * 10 + k, T.i64))
        b.sync_all()
        other = (me + 1) % n
        q = (p + 1) % T.num_programs(0)
        got = T.reshape(x.at(other).load((q,), (1,)), (1, 1))
        total += T.sum(T.sum(got, axis=1), axis=0)
        b.sync_all()
    out.store(T.full((1,), total, T.i64))


@pt.kernel
def grid_barrier(out: T.Exclusive, words: T.Peer):
    """Each program publishes its index and, after a barrier of the launch, reads the next program's."""
    p, n = T.program_id(0), T.num_programs(0)
    words.local.store((p,), T.full((1,), p, T.i64))
    T.sync_programs()
    out.store(words.local.load(((p + 1) % n,), (1,)))


@pt.kernel
def wait_for(out: T.Exclusive, ready: T.Signal):
    """Waits for every peer, and tells nobody."""
    ready.wait()
    out.store(T.full((1,), 1, T.i32))


@pt.kernel
def put_next(x: T.Peer, ready: T.Signal, B: T.Const[int]):
    """Pushes this rank's row into the next rank's, then signals that rank alone."""
    me, n = x.rank, x.num_ranks
    to = (me + 1) % n
    mine = x.local.load((0, 0), (1, B))
    x.at(to).store((1, 0), mine)
    if n > 1:
        ready.notify(to=to)
        ready.wait((me + n - 1) % n)


def vector(rank, n, dtype=np.float32):
    return np.random.default_rng(1000 + rank).integers(-30, 30, n).astype(dtype)  # sums are exact in bf16


def box_sums(group, n, programs, depth, rounds, dtype_name="f32", tile=64):
    dtype = getattr(pt, dtype_name)
    with pt.SymmetricHeap(group, size_bytes=8 << 20) as heap:
        box = heap.mailbox(tile=tile, dtype=dtype, programs=programs, depth=depth)
        x = pt.asarray(vector(group.rank, n), dtype)
        expected = sum(vector(r, n) for r in range(group.size))
        for _ in range(rounds):
            y = pt.full((n,), 77, dtype)
            box_sum(y.partition(tile).persistent(programs=programs), x, box).sync()
            np.testing.assert_array_equal(y.numpy().astype(np.float64), expected)
    return True


def gathers(group, size):
    with pt.SymmetricHeap(group, size_bytes=8 << 20) as heap:
        x, out = heap.empty((size,), pt.i32), heap.zeros((group.size, size), pt.i32)
        ready = heap.signal(slots=4)
        for round_ in range(3):
            x.copy_from(vector(group.rank, size, np.int32) + round_)
            group.barrier("filled")
            gather.grid(1)(out, x, ready, B=size).sync()
            expected = np.stack([vector(r, size, np.int32) + round_ for r in range(group.size)])
            np.testing.assert_array_equal(out.numpy(), expected)
            group.barrier("read")
    return True


def gathers_over(group, path):
    """What neighbours hold, through memory that travelled in the way that is forced; what it says if it cannot."""
    try:
        heap = pt.SymmetricHeap(group, size_bytes=8 << 20, path=path)
    except PeertileError as error:
        return type(error).__name__, str(error)
    with heap:
        x, out = heap.empty((100,), pt.i32), heap.zeros((group.size, 100), pt.i32)
        ready = heap.signal(slots=4)
        x.copy_from(vector(group.rank, 100, np.int32))
        group.barrier("filled")
        gather.grid(1)(out, x, ready, B=128).sync()
        np.testing.assert_array_equal(out.numpy(), np.stack([vector(r, 100, np.int32) for r in range(group.size)]))
        group.barrier("read")
        return heap._memory.path.value


def counts(group, rounds):
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        tally = heap.counter(slots=1)
        out = pt.zeros((1,), pt.i64)
        for _ in range(2):
            count(out.partition(1), tally, rounds).sync()
        group.barrier("all added")
    return int(out.numpy()[0])


@pt.kernel
def adds_and_waits(out: T.Exclusive, tally: T.Counter, n: T.i64, m: T.i64):
    tally.add(n, to=tally.rank)
    tally.wait(m)
    out.store(T.ones((1,), T.i64))


def negative_counts(group):
    """What a counter does with numbers that are only known when it runs."""
    said = []
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        tally, out = heap.counter(slots=1), pt.zeros((1,), pt.i64)
        for n, m in ((3, 3), (-1, 0), (0, -2), (2, 2)):
            try:
                adds_and_waits(out.partition(1), tally, n, m).sync()
                said.append("ran")
            except PeertileError as error:
                said.append(str(error).partition(" (")[0])
                group.recover()
    return said


def meets(group, programs, rounds):
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        x = heap.zeros((programs,), pt.i64)
        b = heap.barrier(programs=programs)
        out = pt.zeros((programs,), pt.i64)
        meet(out.partition(1), x, b, rounds).sync()
        other = (group.rank + 1) % group.size
        expected = [sum(other * 1000 + (p + 1) % programs * 10 + k for k in range(rounds)) for p in range(programs)]
        assert out.numpy().tolist() == expected
    return True


def puts(group, size):
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        x = heap.zeros((2, size), pt.f32)
        ready = heap.signal(slots=1)
        rows = np.zeros((2, size), np.float32)
        rows[0] = vector(group.rank, size)
        x.copy_from(rows)
        group.barrier("filled")
        put_next.grid(1)(x, ready, B=size).sync()
        got = x.numpy()[1]
        np.testing.assert_array_equal(got, vector((group.rank - 1) % group.size, size))
        group.barrier("read")
    return True


def told(error):
    """What a test compares of an error: its type and the first line of its message."""
    return type(error).__name__, str(error).splitlines()[0]


def wait_until_failed(group, bound_s=20.0):
    """Poll, bounded, until the group has failed."""
    end = time.monotonic() + bound_s
    while group.failure() is None:
        assert time.monotonic() < end, "the group did not fail in time"
        time.sleep(0.002)


def fails_then_recovers(group, how):
    """One good round, one in which rank 1 fails in the middle, and after recovery a good one again."""
    n = 4096
    with pt.SymmetricHeap(group, size_bytes=8 << 20) as heap:
        box = heap.mailbox(tile=256, dtype=pt.f32, programs=4)
        x = pt.asarray(vector(group.rank, n))
        expected = sum(vector(r, n) for r in range(group.size))

        def round_():
            y = pt.full((n,), float("nan"), pt.f32)
            box_sum(y.partition(256).persistent(programs=4), x, box).sync()
            np.testing.assert_array_equal(y.numpy(), expected)

        round_()
        group.barrier("the good round is over on every rank")
        error = None
        try:
            if how == "exception" and group.rank == 1:
                raise ValueError("the data of rank 1 is bad")
            if how == "timeout" and group.rank == group.size - 1:
                wait_until_failed(group)  # never posts: the others' waits end at their bound
                group.check()
            round_()
        except (PeertileError, ValueError) as caught:
            error = caught
            if not isinstance(caught, PeertileError):
                group.fail(f"{type(caught).__name__}: {caught}")
        assert error is not None
        wait_until_failed(group)
        # A launch on a broken group is refused before anything runs.
        try:
            round_()
        except DeviceFault as refused:
            second = told(refused)
        group.recover()
        round_()
        round_()
    return told(error), second


def times_out(group):
    """A kernel of rank 0 waits for signals that nobody sends."""
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        ready = heap.signal(slots=1)
        out = pt.zeros((1,), pt.i32)
        try:
            if group.rank == 0:
                wait_for(out.partition(1), ready).sync()
            else:
                wait_until_failed(group)
                group.check()
        except PeertileError as error:
            seen = (type(error).__name__, str(error), getattr(error, "slot", None), getattr(error, "expected", None))
        group.recover()
    return seen


def dies(group, victim, folder):
    """Rounds without end, until `victim` kills itself. Each of the others leaves in `folder` how many seconds later it
    heard of it."""
    killed = os.path.join(folder, "killed")
    with pt.SymmetricHeap(group, size_bytes=8 << 20) as heap:
        box = heap.mailbox(tile=256, dtype=pt.f32, programs=4)
        x, y = pt.asarray(vector(group.rank, 4096)), pt.empty((4096,), pt.f32)
        for k in range(100_000):
            if group.rank == victim and k == 20:
                with open(killed, "w") as file:
                    file.write(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                box_sum(y.partition(256).persistent(programs=4), x, box).sync()
            except PeertileError:
                now = time.monotonic()
                with open(killed) as file, open(os.path.join(folder, str(group.rank)), "w") as told:
                    told.write(repr(now - float(file.read())))
                raise


def two_in_flight(group):
    """Both launches are enqueued before either is waited for, and they wait for each other's signals."""
    device = pt.current_device()
    a, b = device.stream("a"), device.stream("b")
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        words = heap.zeros((2,), pt.i32)
        first = ping.grid(1)(words, 0, 1).submit(a)
        second = ping.grid(1)(words, 1, 0).submit(b)
        second.wait()
        first.wait()
        return words.numpy().tolist()


@pt.kernel
def ping(words: T.Peer, mine: T.i64, theirs: T.i64):
    T.st(words.local, T.i32(1), index=(mine,), order=T.release)
    T.wait_eq(words.local, T.i32(1), index=(theirs,))


def different_kernels(group):
    """Ranks that run different grids on one mailbox find out, whoever looks first."""
    with pt.SymmetricHeap(group, size_bytes=8 << 20) as heap:
        box = heap.mailbox(tile=64, dtype=pt.f32, programs=4)
        programs = 2 if group.rank == 0 else 4
        x, y = pt.zeros((256,), pt.f32), pt.zeros((256,), pt.f32)
        try:
            box_sum(y.partition(64).persistent(programs=programs), x, box).sync()
        except PeertileError as error:
            seen = told(error)
        wait_until_failed(group)
        group.recover()
    return seen


def unequal_sizes(group):
    try:
        pt.SymmetricHeap(group, size_bytes=(1 + group.rank) << 20)
    except PeertileError as error:
        return told(error)
    return None


def unequal_tensors(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        try:
            heap.empty((16 + group.rank,), pt.f32)
        except PeertileError as error:
            return told(error)
    return None


def unequal_kinds(group, left, right):
    """Rank 0 asks for one kind of object, the others for another; what each was told, and whether the heap goes on."""
    kinds = {
        "zeros": lambda heap: heap.zeros((4,), pt.f32),
        "empty": lambda heap: heap.empty((8,), pt.f32),
        "signal": lambda heap: heap.signal(slots=4),
        "counter": lambda heap: heap.counter(slots=4),
        "barrier": lambda heap: heap.barrier(programs=4),
        "mailbox": lambda heap: heap.mailbox(tile=4, dtype=pt.f32, programs=1),
    }
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        for first, second in ((left, right), (right, left)):
            try:
                kinds[first if group.rank == 0 else second](heap)
            except SymmetryError:
                pass
            else:
                return "not told"
            x = heap.zeros((3,), pt.f32)
            assert group.exchange(b"%d" % x.offset, "offset") == [b"0"] * group.size
            heap.free(x)
    return "told, and in step"


def frees_in_another_order(group):
    """Two tensors that look alike: were it not seen, later objects would lie at different places."""
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        first, second = heap.zeros((4,), pt.f32), heap.zeros((4,), pt.f32)
        try:
            heap.free(first if group.rank == 0 else second)
        except PeertileError as error:
            seen = told(error)
        first.copy_from(np.ones(4, np.float32))  # nothing was freed
        second.copy_from(np.ones(4, np.float32))
        heap.free(first)
        heap.free(second)
        assert heap.zeros((4,), pt.f32).offset == first.offset
    return seen


def used_after_the_end(group, freed):
    """What each use of an object says once it was freed, or its heap closed: never an access of memory that is gone."""
    heap = pt.SymmetricHeap(group, size_bytes=1 << 20)
    x, ready, box = heap.zeros((64,), pt.f32), heap.signal(slots=1), heap.mailbox(tile=4, dtype=pt.f32, programs=1)
    other = x.at((group.rank + 1) % group.size)
    tile, out = pt.ones(4, pt.f32), pt.empty((4,), pt.f32)
    if freed:
        for item in (x, ready, box):
            heap.free(item)
    else:
        heap.close()
    said = []
    for use in (
        lambda: box_sum(out.partition(4), tile, box).sync(),  # a launch that the mailbox has not seen before
        lambda: other.numpy(),
        lambda: other.copy_from(np.ones(64, np.float32)),
        lambda: x.at((group.rank + 2) % group.size),
        lambda: np.from_dlpack(x.local),
        lambda: ready.reset(),
        lambda: box.reset(),
        lambda: ready.next_word(0, 0),
    ):
        try:
            use()
        except PeertileError as error:
            said.append(str(error).replace(f"of rank {(group.rank + 1) % group.size}", "of the next rank"))
    heap.close()
    return said


def heap_too_small(group):
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        heap.empty((1000,), pt.f32)
        try:
            heap.empty((20_000,), pt.f32)
        except PeertileError as error:
            return told(error)
    return None


def reuse_after_free(group):
    """Freed bytes are given again, at the same offset on every rank, and start with zeros where asked."""
    with pt.SymmetricHeap(group, size_bytes=1 << 16) as heap:
        a = heap.empty((1000,), pt.f32)
        a.copy_from(np.full(1000, 9.0, np.float32))
        offset = a.offset
        heap.free(a)
        b = heap.zeros((500,), pt.f32)
        assert b.offset == offset
        assert not b.numpy().any()
        try:
            a.numpy()
        except PeertileError as error:
            return told(error)
    return None


def sub_group_sums(group):
    """Overlapping groups work side by side, each with its own heap and words."""
    evens = group.subgroup(tuple(range(0, group.size, 2)))
    ends = group.subgroup((0, group.size - 1))
    results = []
    for sub in (evens, ends):
        if sub is not None:
            results.append(box_sums(sub, 300, 2, 2, 2))
    return results
