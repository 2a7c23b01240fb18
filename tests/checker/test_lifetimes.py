"""Memory that is given back while it may still be in use: judged by what orders it, whatever came first in a schedule;
checked against the paths of every small program."""

import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.checker.program import ProgramCase
from peertile.sim.explore import explore
from peertile.sim.verdicts import VerdictKind

Program = Callable[[pt.Group], None]


@pt.kernel(unsafe=True)
def read_far(p: T.Pointer, out: T.Pointer):
    """Reads memory that nothing keeps alive: a pointer holds no lease on what it points to."""
    at = T.iota(16)
    tile, _ = T.unsafe.load_ptr(p + at, order=T.weak)
    T.unsafe.store_ptr(out + at, tile, order=T.weak)


def read_later(x: pt.Tensor, out: pt.Tensor) -> Any:
    far = pt.pointer(int(x.address), pt.f32, 16)
    return read_far.grid(1)(far, out.pointer()).submit(pt.current_device().stream("reads"))


def behind_barriers(group: pt.Group) -> None:
    """The kernel may have ended by then in every schedule of a device that is fast."""
    x, out = pt.zeros((16,), pt.f32), pt.zeros((16,), pt.f32)
    future = read_later(x, out)
    for _ in range(3):
        group.barrier("a turn")
    del x
    future.wait()


def behind_other_work(group: pt.Group) -> None:
    x, out = pt.zeros((16,), pt.f32), pt.zeros((16,), pt.f32)
    future = read_later(x, out)
    pt.asarray(np.ones(4, np.float32)).numpy()
    del x
    future.wait()


def pooled(group: pt.Group) -> None:
    """The block is kept by the pool for whoever asks next."""
    pt.current_device().pool.release_threshold = 1 << 16
    x, out = pt.zeros((16,), pt.f32), pt.zeros((16,), pt.f32)
    future = read_later(x, out)
    group.barrier("a turn")
    del x
    future.wait()


def heap_object(group: pt.Group) -> None:
    with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
        x, out = heap.zeros((16,), pt.f32), pt.zeros((16,), pt.f32)
        future = read_later(x.local, out)
        heap.free(x)
        future.wait()


def heap_closed(group: pt.Group) -> None:
    out = pt.zeros((16,), pt.f32)
    with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
        future = read_later(heap.zeros((16,), pt.f32).local, out)
    future.wait()


def waits_first(group: pt.Group) -> None:
    x, out = pt.zeros((16,), pt.f32), pt.zeros((16,), pt.f32)
    read_later(x, out).wait()
    del x


def heap_waits_first(group: pt.Group) -> None:
    out = pt.zeros((16,), pt.f32)
    with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
        x, y = heap.zeros((16,), pt.f32), heap.zeros((16,), pt.f32)
        read_later(x.local, out).wait()
        heap.free(x)
        read_later(y.local, out).wait()


EARLY = (behind_barriers, behind_other_work, pooled, heap_object, heap_closed)


@pytest.mark.parametrize("program", EARLY, ids=lambda p: p.__name__)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.feature("C5", "sim")
def test_memory_freed_too_early_is_reported_on_every_schedule(program: Program, ranks: int) -> None:
    for seed in range(12):
        report = explore(ProgramCase(program, ranks), 1, seed=seed, shrinks=0)
        assert [verdict.kind for verdict in report.verdicts] == [VerdictKind.LIFETIME], seed
        assert report.unconfirmed == 0
    report = check(program, ranks, exhaustive=True)
    assert [verdict.kind for verdict in report.verdicts] == [VerdictKind.LIFETIME]


@pytest.mark.parametrize("program", [waits_first, heap_waits_first], ids=lambda p: p.__name__)
@pytest.mark.feature("C5", "sim")
def test_memory_freed_behind_its_last_use_is_no_fault(program: Program) -> None:
    report = check(program, 2, schedules=20)
    assert report.clean, str(report)


def place(text: str) -> str:
    """`file:line` of the only line that begins with `text`."""
    with open(__file__) as file:
        (found,) = [k for k, told in enumerate(file, 1) if told.strip().startswith(text)]
    return f"{__file__}:{found}"


@pytest.mark.feature("C5", "sim")
def test_a_kernel_that_reads_a_closed_heap_is_a_use_after_free() -> None:
    def main(group: pt.Group) -> None:
        out = pt.zeros((16,), pt.f32)
        with pt.SymmetricHeap(group, size_bytes=1 << 13) as heap:
            address = int(heap.zeros((16,), pt.f32).local.address)
        read_far.grid(1)(pt.pointer(address, pt.f32, 16), out.pointer()).sync()

    (verdict,) = check(main, 1, schedules=1).verdicts
    assert verdict.headline == (
        "use after free: memory behind p of rank 0 was freed by the host of rank 0 at "
        + place("with pt.SymmetricHeap(group, size_bytes=1 << 13)")
    )


@pytest.mark.feature("C5", "sim")
def test_the_report_says_who_may_still_use_it() -> None:
    def main(group: pt.Group) -> None:
        x, out = pt.zeros((16,), pt.f32), pt.zeros((16,), pt.f32)
        future = read_later(x, out)
        pt.asarray(np.ones(4, np.float32)).numpy()  # by now it may have ended
        del x  # too early
        future.wait()

    verdicts = [v for seed in range(12) for v in explore(ProgramCase(main, 1), 1, seed=seed, shrinks=0).verdicts]
    assert len(verdicts) == 12
    after, early = sorted({str(verdict).rpartition("\n")[0] for verdict in verdicts}, key=len)
    freed = f"by the host of rank 0 at {place('del x  # too early')}"
    rest = (
        "  program 0 of read_far on rank 0 reads (weak) memory behind p of rank 0{}\n"
        f"      {place('tile, _ = T.unsafe.load_ptr')} in read_far\n"
        "        tile, _ = T.unsafe.load_ptr(p + at, order=T.weak)\n"
        "                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        f"    launched at {place('return read_far.grid(1)')}\n"
        "  repair: free it after the last use has completed"
    )
    assert after == f"use after free: memory behind p of rank 0 was freed {freed}\n{rest.format('')}"
    assert early == (
        f"use after free: memory behind p of rank 0 is freed {freed} while it may still be in use\n"
        f"{rest.format(' [0:16]')}"
    )


# ---------------------------------------------------------------- every program of a few steps


Step = tuple[str, int]
Steps = Sequence[Step]


def is_early(ranks: Sequence[Steps]) -> bool:
    """Whether some launch on a rank's memory has no path to the step that frees it: a path leads along a host, from a
    launch to a wait for it, or for a later one, as they are on one stream, and from the n-th barrier to the others'."""
    edges: dict[tuple[object, ...], set[tuple[object, ...]]] = {}

    def edge(a: tuple[object, ...], b: tuple[object, ...]) -> None:
        edges.setdefault(a, set()).add(b)

    freed: dict[int, tuple[object, ...]] = {}
    launches = []
    for rank, steps in enumerate(ranks):
        turn, kernel = 0, None
        for k, (what, target) in enumerate(steps):
            here: tuple[object, ...] = (rank, k)
            if k:
                edge((rank, k - 1), here)
            if what == "barrier":
                edge(here, ("all", turn))
                edge(("all", turn), (rank, k + 1))
                turn += 1
            elif what == "launch":
                edge(here, ("kernel", rank, k))
                if kernel is not None:
                    edge(kernel, ("kernel", rank, k))
                kernel = ("kernel", rank, k)
                launches.append((kernel, target))
            elif what == "wait" and kernel is not None:
                edge(kernel, here)
            elif what == "free":
                freed[rank] = here
    return any(target in freed and freed[target] not in _reached(edges, kernel) for kernel, target in launches)


def _reached(edges: dict[tuple[object, ...], set[tuple[object, ...]]], start: tuple[object, ...]) -> set[object]:
    todo, found = [start], set()
    while todo:
        for following in edges.get(todo.pop(), ()):
            if following not in found:
                found.add(following)
                todo.append(following)
    return found


def as_program(ranks: Sequence[Steps]) -> Program:
    def main(group: pt.Group) -> None:
        x, out = pt.zeros((16,), pt.f32), pt.zeros((16,), pt.f32)
        shared = [
            pt.pointer(struct.unpack("<q", told)[0], pt.f32, 16)
            for told in group.exchange(struct.pack("<q", int(x.address)), "addresses")
        ]
        stream, futures = pt.current_device().stream("reads"), []
        for what, target in ranks[group.rank]:
            if what == "barrier":
                group.barrier("a turn")
            elif what == "launch":
                futures.append(read_far.grid(1)(shared[target], out.pointer()).submit(stream))
            elif what == "wait" and futures:
                futures[-1].wait()
            elif what == "free":
                pt.current_device().driver.free(int(x.address))
        for future in futures:
            future.wait()
        group.barrier("the end")

    return main


def random_steps(random: Random) -> list[list[Step]]:
    """Two ranks that meet equally often, where each may free its memory once."""
    barriers = random.randint(0, 2)
    ranks = []
    for _ in range(2):
        steps: list[Step] = [("barrier", 0)] * barriers
        for _ in range(random.randint(1, 2)):
            steps.insert(random.randint(0, len(steps)), ("launch", random.randrange(2)))
        for _ in range(random.randint(0, 2)):
            steps.insert(random.randint(0, len(steps)), ("wait", 0))
        if random.random() < 0.5:
            steps.insert(random.choice([random.randint(0, len(steps)), len(steps)]), ("free", 0))
        ranks.append(steps)
    return ranks


def judged(random: Random, *, exhaustive: bool) -> bool:
    """Whether the program was wrong; the checker has to say the same."""
    steps = random_steps(random)
    report = check(as_program(steps), 2, schedules=3, seed=random.randrange(1000), exhaustive=exhaustive)
    expected = [VerdictKind.LIFETIME] if is_early(steps) else []
    assert [verdict.kind for verdict in report.verdicts] == expected, (steps, str(report))
    assert expected or not exhaustive or report.exploration.complete
    return bool(expected)


@pt.kernel
def write_peer(x: T.Peer, last: T.i64):
    x.at(1 - x.rank).store((last,), T.full((64,), 1.0, T.f32))


@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.parametrize("elements", [1 << 10, 1 << 31])
@pytest.mark.feature("C5", "sim")
def test_memory_of_a_heap_is_there_on_every_rank_once_one_rank_has_it(elements: int, exhaustive: bool) -> None:
    """A rank that is ahead writes the part of one that has not come out of the allocation yet. The larger tensor has
    2^33 bytes, with nothing behind them."""

    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=4 * elements + (1 << 20)) as heap:
            for _ in range(2):
                x = heap.empty((elements,), pt.f32)
                write_peer.grid(1)(x, elements // 64 - 1).sync()
                group.barrier("written")
                assert x.local[elements - 64 :].numpy().sum() == 64
                heap.free(x)

    report = check(main, 2, schedules=20, exhaustive=exhaustive)
    assert report.clean, str(report)


@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.feature("C5", "sim")
def test_memory_is_freed_too_early_where_no_path_leads_from_a_use_to_it(exhaustive: bool, seed: int) -> None:
    random = Random(seed)
    found = [judged(random, exhaustive=exhaustive) for _ in range(30)]
    assert 0 < sum(found) < 30


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("exhaustive", [False, True])
def test_memory_is_freed_too_early_in_many_programs(exhaustive: bool, seed: int) -> None:
    random = Random(seed)
    for _ in range(3000):
        judged(random, exhaustive=exhaustive)
