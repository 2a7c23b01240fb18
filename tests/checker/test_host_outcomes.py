"""Exhaustive exploration of whole programs: hosts that launch, wait, meet and ask whether their work is over. Whatever a
random schedule shows, it has shown too."""

from random import Random

import pytest

import peertile as pt
import peertile.language as T
from peertile.checker.program import ProgramCase
from peertile.sim.choices import RandomChooser
from peertile.sim.explore import exhaust


@pt.kernel
def put(flag: T.Peer, VALUE: T.Const[int]):
    T.st(flag, T.i32(VALUE), (flag.rank,), rank=1 - flag.rank, order=T.relaxed)


@pt.kernel
def see(flag: T.Peer, out: T.Peer, AT: T.Const[int]):
    T.st(out, T.ld(flag, (1 - flag.rank,), order=T.relaxed), (AT,), order=T.relaxed)


def program(ranks, outcomes: set):
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            flag, out = heap.zeros((2,), pt.i32), heap.zeros((4,), pt.i32)
            stream, futures, told = pt.current_device().stream("work"), [], []
            puts = sees = 0
            for step in ranks[group.rank]:
                if step == "meet":
                    group.barrier("a turn")
                elif step == "put":
                    puts += 1
                    futures.append(put.grid(1)(flag, VALUE=puts).submit(stream))
                elif step == "see":
                    futures.append(see.grid(1)(flag, out, AT=sees).submit(stream))
                    sees += 1
                elif step == "ask" and futures:
                    told.append(futures[-1].is_done())
                elif step == "wait" and futures:
                    futures[-1].wait()
            for future in futures:
                future.wait()
            told += out.numpy()[:sees].tolist()
            everybody = group.exchange(repr(told).encode(), "results")
            if group.rank == 0:
                outcomes.add(tuple(everybody))

    return main


def random_ranks(random: Random) -> list[list[str]]:
    meets = random.randint(0, 1)
    ranks = []
    for _ in range(2):
        steps = ["meet"] * meets
        for _ in range(random.randint(1, 2)):
            steps.insert(random.randint(0, len(steps)), random.choice(["put", "see"]))
        for _ in range(random.randint(0, 2)):
            steps.insert(random.randint(0, len(steps)), random.choice(["ask", "ask", "wait"]))
        ranks.append(steps)
    return ranks


def covers(ranks, runs: int) -> int:
    """How many outcomes there are."""
    every: set = set()
    report = exhaust(ProgramCase(program(ranks, every), 2), 3000)
    assert report.clean, (ranks, str(report.verdicts[0]))
    assert report.complete, ranks
    shown: set = set()
    case = ProgramCase(program(ranks, shown), 2)
    for seed in range(runs):
        assert case.run(RandomChooser(seed)).verdict is None
    assert shown <= every, (ranks, "missed", shown - every)
    return len(every)


@pytest.mark.feature("C8", "sim")
def test_a_host_that_asks_gets_every_answer() -> None:
    assert covers([["put", "ask", "ask"], []], 20) == 3  # it was over at the first, at the second, or at neither
    assert covers([["see", "ask"], ["put"]], 40) == 4


@pytest.mark.feature("C8", "sim")
def test_a_host_that_asks_for_ever_lets_others_go_on() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            flag = heap.zeros((2,), pt.i32)
            future = put.grid(1)(flag, VALUE=1).submit(pt.current_device().stream("work"))
            while not future.is_done():
                pass

    report = exhaust(ProgramCase(main, 2), 3000)
    assert report.clean, str(report.verdicts[0])
    assert report.complete


@pytest.mark.slow
def test_what_random_schedules_show_of_hosts_is_found(seed: int) -> None:
    random = Random(seed)
    for _ in range(5):
        covers(random_ranks(random), 60)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_what_many_random_schedules_show_of_hosts_is_found(seed: int) -> None:
    random = Random(seed)
    for _ in range(300):
        covers(random_ranks(random), 100)
