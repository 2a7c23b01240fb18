"""The mailbox protocol on graphs of links, in the evaluator under adversarial schedules.

Every graph of every depth gives right sums under schedules that let some programs run far ahead; and where an
acknowledgement that is needed is taken away, some schedule gives a wrong one, so none is there for nothing.
"""

import itertools
import random

import numpy as np
import pytest
from tests.frontend.helpers import build

import peertile.language as T
from peertile.comm.links import Links
from peertile.dtypes import i64
from peertile.ir.text import parse_kernel, print_kernel
from peertile.ir.types import Access, Link, MailboxType, Partition, ViewType
from peertile.meaning import PerRank, Schedule, new_mailbox, run_grid
from peertile.passes.pipeline import run_pipeline

PROGRAMS = 2
ROUNDS = 6


def sums(out, box):
    acc = T.zeros((1,), T.i64)
    for k in T.range(6):
        box.post(T.full((1,), box.rank * 100 + k, T.i64))
        for source, part in box.collect(sources=True):
            acc += part * (source + 1) * (k + 1)
    out.store(acc)


def sums_ahead(out, box):
    acc = T.zeros((1,), T.i64)
    box.post(T.full((1,), box.rank * 100, T.i64))
    for k in T.range(1, 6):
        box.post(T.full((1,), box.rank * 100 + k, T.i64))
        for source, part in box.collect(sources=True):
            acc += part * (source + 1) * k
    for source, part in box.collect(sources=True):
        acc += part * (source + 1) * 6
    out.store(acc)


def kernel_for(depth, ahead, acknowledged):
    t = MailboxType(i64, (1,), depth, acknowledged, linked=True, posts_ahead=ahead)
    out = ViewType(i64, 1, Access.READ_WRITE, partition=Partition((1,)))
    return run_pipeline(build(sums if ahead == 1 else sums_ahead, out=out, box=t)), t


def run_once(kernel, t, links, words, schedule, seed):
    """What every rank summed, and the faults."""
    n = links.size
    outs = [np.zeros(PROGRAMS, np.int64) for _ in range(n)]
    table = PerRank([np.array(w, np.uint64) for w in words])
    box = new_mailbox(t, n, PROGRAMS, links=table)
    outcome = run_grid(kernel, PROGRAMS, [PerRank(outs), box], ranks=n, schedule=schedule, seed=seed)
    return outs, outcome.faults


def expected(links, rank):
    return sum(
        (s * 100 + k) * (s + 1) * (k + 1) for s in range(links.size) if (s, rank) in links.pairs for k in range(ROUNDS)
    )


GRAPHS = {
    "ring": lambda n: Links.ring(n),
    "broadcast": lambda n: Links.broadcast(n, n - 1),
    "chain": lambda n: Links.of(n, [(r, r + 1) for r in range(n - 1)]),
    "pair": lambda n: Links.among(n, {0, n - 1}),
    "nothing": lambda n: Links.of(n, []),
}


@pytest.mark.slow
@pytest.mark.sentence("MB-8")
@pytest.mark.parametrize("ahead", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", GRAPHS)
def test_sums_are_right_under_skewed_schedules(name, ahead, seed):
    for depth in (1, 2, 4):
        if depth < ahead:
            continue
        for n in (1, 2, 3):
            links = GRAPHS[name](n)
            kernel, t = kernel_for(depth, ahead, bool(links.acknowledged(depth, ahead)))
            words = [links.words(r, depth, ahead) for r in range(n)]
            for turn in range(1):
                outs, faults = run_once(kernel, t, links, words, Schedule.SKEWED, seed + turn)
                assert faults == []
                for rank in range(n):
                    assert set(outs[rank].tolist()) == {expected(links, rank)}, (name, depth, n, rank)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_random_graphs(size, seed):
    chosen = random.Random(seed)
    pairs = list(itertools.product(range(size), repeat=2))
    for _ in range(6):
        links = Links.of(size, [p for p in pairs if chosen.random() < 0.5])
        depth = chosen.choice((1, 2, 4))
        kernel, t = kernel_for(depth, 1, bool(links.acknowledged(depth)))
        words = [links.words(r, depth) for r in range(size)]
        outs, faults = run_once(kernel, t, links, words, Schedule.SKEWED, chosen.randrange(1 << 30))
        assert faults == []
        for rank in range(size):
            assert set(outs[rank].tolist()) == {expected(links, rank)}, sorted(links.pairs)


NEEDED = [("ring", 3, 2, 1), ("broadcast", 2, 4, 1), ("chain", 3, 2, 1), ("pair", 2, 1, 1), ("ring", 2, 2, 2)]


@pytest.mark.sentence("MB-8")
@pytest.mark.parametrize(("name", "n", "depth", "ahead"), NEEDED)
def test_an_acknowledgement_that_is_taken_away_is_missed(name, n, depth, ahead):
    links = GRAPHS[name](n)
    assert links.acknowledged(depth, ahead)
    kernel, t = kernel_for(depth, ahead, False)
    mask = int(Link.SENDS | Link.RECEIVES)
    words = [[w & mask for w in links.words(r, depth, ahead)] for r in range(n)]
    for seed in range(200):
        outs, _ = run_once(kernel, t, links, words, Schedule.SKEWED, seed)
        if any(set(outs[r].tolist()) != {expected(links, r)} for r in range(n)):
            return
    raise AssertionError("no schedule read a slot that had been written again")


def test_the_type_of_a_linked_mailbox_goes_through_text():
    for t in (
        MailboxType(i64, (4,), 2, True, linked=True),
        MailboxType(i64, (4,), 4, False, linked=True, posts_ahead=2),
        MailboxType(i64, (4, 2), 2, True, posts_ahead=2),
    ):
        text = f"kernel @k(%box: {t}) {{\n  return()\n}}\n"
        kernel = parse_kernel(text)
        assert kernel.params[0].type == t
        assert print_kernel(kernel) == text
