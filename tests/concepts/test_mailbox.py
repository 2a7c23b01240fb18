"""The proof of docs/concepts/mailbox.md, step by step: on every schedule of small cases, and against a model of its own.

The simulated machine runs the compiled kernels. It reports every race of a program on any one schedule of it (see
tests/sim/test_truth.py), so a case is one run where only races matter, and all runs that differ where values and
progress do. The model at the end knows nothing of kernels, clocks or words: it walks through all interleavings of the
steps as the page states them.
"""

import itertools
import random
from functools import cache

import numpy as np
import pytest
from tests.frontend.helpers import build
from tests.sim.kernels import SHARED, exclusive

import peertile as pt
import peertile.language as T
from peertile.comm.links import Links
from peertile.dtypes import f32, i64
from peertile.errors import CompileError, LaunchError
from peertile.ir import ops
from peertile.ir.core import walk
from peertile.ir.types import Access, Link, MailboxType, Partition, SymmetricType, ViewType
from peertile.meaning import PerRank, new_mailbox
from peertile.memory_model import Order, Scope
from peertile.passes.pipeline import run_pipeline
from peertile.sim.explore import exhaust, explore
from peertile.sim.runs import Case, kernel_case
from peertile.sim.verdicts import VerdictKind

DEPTHS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)]
"""Depth and posts ahead."""


def sums(out, box, R):
    acc = T.zeros((1,), T.i64)
    for k in T.static_range(R):
        box.post(T.full((1,), box.rank * 100 + k, T.i64))
        for source, part in box.collect(sources=True):
            acc += part * (source + 1) * (k + 1)
    out.store(acc)


def sums_ahead(out, box, R):
    acc = T.zeros((1,), T.i64)
    box.post(T.full((1,), box.rank * 100, T.i64))
    for k in T.static_range(1, R):
        box.post(T.full((1,), box.rank * 100 + k, T.i64))
        for source, part in box.collect(sources=True):
            acc += part * (source + 1) * k
    for source, part in box.collect(sources=True):
        acc += part * (source + 1) * R
    out.store(acc)


@cache
def compiled(depth, ahead, acknowledged, rounds):
    t = MailboxType(i64, (1,), depth, acknowledged, linked=True, posts_ahead=ahead)
    out = ViewType(i64, 1, Access.READ_WRITE, partition=Partition((1,)))
    body = sums if ahead == 1 else sums_ahead
    return run_pipeline(build(body, {"R": rounds}, out=out, box=t), posts_ahead=ahead), t


def mailbox_case(links: Links, depth: int, ahead: int, rounds: int, *, launches=1, programs=1, without=None) -> Case:
    """Sums of some rounds over `links`, looked at on every rank at the end; `without` one of its acknowledgements."""
    words = [links.words(r, depth, ahead) for r in range(links.size)]
    if without is not None:
        source, destination = without
        words[source][destination] &= ~int(Link.SENDS_ACKNOWLEDGED)
        words[destination][source] &= ~int(Link.RECEIVES_ACKNOWLEDGED)
    kernel, t = compiled(depth, ahead, bool(links.acknowledged(depth, ahead)), rounds)
    outs: list[PerRank] = []

    def args():
        outs.append(PerRank([np.full(programs, -1, np.int64) for _ in range(links.size)]))
        table = PerRank([np.array(w, np.uint64) for w in words])
        return [outs[-1], new_mailbox(t, links.size, programs, links=table)]

    def right(machine) -> None:
        for rank, found in enumerate(outs[-1]):
            sources = [s for s in range(links.size) if (s, rank) in links.pairs]
            expected = sum((s * 100 + k) * (s + 1) * (k + 1) for s in sources for k in range(rounds))
            assert found.tolist() == [expected] * programs, (sorted(links.pairs), depth, ahead, rank)

    case = kernel_case(kernel, programs, args, ranks=links.size, launches=launches)
    if without is None:
        case.after = right
    return case


def graphs(size: int) -> list[Links]:
    pairs = list(itertools.product(range(size), repeat=2))
    return [Links.of(size, [p for k, p in enumerate(pairs) if bits >> k & 1]) for bits in range(1 << len(pairs))]


def is_right_on_every_schedule(case: Case, limit: int = 2000) -> None:
    report = exhaust(case, limit)
    assert report.clean, str(report.verdicts[0])
    assert report.complete


# ---------------------------------------------------------------- on every schedule


@pytest.mark.sentence("MB-1", "MB-2", "MB-3", "MB-8", "MB-21", "MB-23")
@pytest.mark.parametrize(("depth", "ahead"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("rounds", [3, pytest.param(4, marks=pytest.mark.long)])
def test_every_graph_of_two_ranks_is_right_in_every_schedule(depth, ahead, rounds):
    for links in graphs(2):
        is_right_on_every_schedule(mailbox_case(links, depth, ahead, rounds))


@pytest.mark.sentence("MB-1", "MB-2", "MB-3", "MB-8", "MB-21", "MB-23")
@pytest.mark.parametrize(("depth", "ahead"), [(1, 1), (2, 1), (2, 2)])
def test_graphs_of_three_ranks_are_right_in_every_schedule(depth, ahead, seed):
    chosen = random.Random(seed)
    for links in (Links.ring(3), Links.broadcast(3, 1), Links.all_to_all(3), *chosen.sample(graphs(3), 4)):
        is_right_on_every_schedule(mailbox_case(links, depth, ahead, 2))


@pytest.mark.sentence("MB-1", "MB-3")
@pytest.mark.parametrize(("depth", "ahead"), [(1, 1), (2, 1), (2, 2)])
def test_rounds_go_on_in_the_next_launch_in_every_schedule(depth, ahead):
    """A rank may be a launch ahead: the slots and words of the one before are still in use."""
    for links in (Links.all_to_all(2), Links.ring(2), Links.broadcast(2)):
        is_right_on_every_schedule(mailbox_case(links, depth, ahead, 2, launches=2))


@pytest.mark.sentence("MB-1", "MB-2")
def test_channels_of_several_programs_are_apart_in_every_schedule():
    is_right_on_every_schedule(mailbox_case(Links.all_to_all(2), 2, 1, 2, programs=2))


# ---------------------------------------------------------------- which acknowledgements are needed


def needs_what_it_has(links: Links, depth: int, ahead: int) -> None:
    """No race with the acknowledgements of MB-8, and one without any single one of them."""
    rounds = depth + ahead + 1
    report = explore(mailbox_case(links, depth, ahead, rounds), 1, shrinks=0)
    assert report.clean, str(report.verdicts[0])
    for link in links.acknowledged(depth, ahead):
        report = explore(mailbox_case(links, depth, ahead, rounds, without=link), 1, shrinks=0)
        assert [v.kind for v in report.verdicts] == [VerdictKind.RACE], (sorted(links.pairs), depth, ahead, link)


@pytest.mark.sentence("MB-8")
@pytest.mark.parametrize(("depth", "ahead"), DEPTHS)
def test_a_link_of_two_ranks_is_acknowledged_if_and_only_if_it_would_race(depth, ahead):
    for links in graphs(2):
        needs_what_it_has(links, depth, ahead)


@pytest.mark.sentence("MB-8")
@pytest.mark.parametrize(("depth", "ahead"), DEPTHS)
def test_a_link_of_three_ranks_is_acknowledged_if_and_only_if_it_would_race(depth, ahead, seed):
    for links in (Links.ring(3), *random.Random(seed).sample(graphs(3), 3)):
        needs_what_it_has(links, depth, ahead)


@pytest.mark.long
@pytest.mark.sentence("MB-8")
@pytest.mark.parametrize(("depth", "ahead"), DEPTHS)
def test_every_graph_of_three_ranks_has_the_acknowledgements_that_it_needs(depth, ahead):
    for links in graphs(3):
        needs_what_it_has(links, depth, ahead)


# ---------------------------------------------------------------- the steps as they are compiled


def one_round(out, x, box):
    box.post(x.load((0,), (16,)))
    for part in box.collect():
        out.store(part)


def field_of(view) -> str | None:
    """The field of the mailbox that a view of one rank's part belongs to."""
    op = view.op
    while isinstance(op, ops.PeerView):
        op = op.operands[0].op
    return op.attrs["field"] if isinstance(op, ops.Field) else None


def steps(kernel) -> list[str]:
    """What is done to the memory of the mailbox, in program order."""
    found = []
    for op in walk(kernel.body):
        field = field_of(op.operands[0]) if op.operands else None
        if isinstance(op, ops.Check) and op.kind is ops.CheckKind.SIGNATURE:
            found.append("compare signatures")
        elif field is not None and isinstance(op, ops.Load | ops.Store | ops.WordLoad | ops.WordStore | ops.Wait):
            order = op.attrs.get("order", Order.WEAK)
            if order is not Order.WEAK:
                assert op.attrs["scope"] is Scope.SYSTEM
            if isinstance(op, ops.Wait):
                assert op.attrs.get("order", Order.ACQUIRE) is Order.ACQUIRE
            found.append(f"{op.NAME} {order.value} {field}")
    return found


ROUND_NUMBER = "word_load weak arrived"
TILE = ["store weak data", "word_store weak signatures"]
COLLECTED = ["wait acquire arrived", "word_load weak signatures", "compare signatures", "load weak data"]


@pytest.mark.sentence("MB-1", "MB-2", "MB-3")
@pytest.mark.parametrize("acknowledged", [False, True])
def test_a_round_is_the_steps_of_the_page_in_their_order(acknowledged):
    box = MailboxType(f32, (16,), 1 if acknowledged else 2, acknowledged)
    kernel = run_pipeline(build(one_round, out=exclusive(16), x=SHARED, box=box))
    assert steps(kernel) == [
        ROUND_NUMBER,
        *(["wait acquire freed"] if acknowledged else []),
        *TILE,
        "word_store release arrived",  # in a loop over the other ranks
        *TILE,
        "word_store weak arrived",  # its own, last
        ROUND_NUMBER,
        *COLLECTED,
        *(["word_store release freed"] if acknowledged else []),
    ]


# ---------------------------------------------------------------- a collect waits for all


def meets(out, x, box, HOW):
    """Reads what the others have written before their post, whatever it does with their tiles."""
    x.local.store((0,), T.full((1,), x.rank + 1, T.i64))
    box.post(T.zeros((1,), T.i64))
    if HOW == "skips all":
        for source, part in box.collect(sources=True):
            if source < 99:
                continue
            out.store(part)
    elif HOW == "uses its own":
        for source, part in box.collect(sources=True):
            if source == x.rank:
                out.store(part)
    else:
        for _ in box.collect():
            pass
    acc = T.zeros((1,), T.i64)
    for r in T.ranks():
        acc += x.at(r).load((0,), (1,))
    out.store(acc)


@pytest.mark.sentence("MB-4")
@pytest.mark.parametrize("how", ["skips all", "uses its own", "drops all"])
def test_behind_a_collect_all_sources_have_posted_whatever_became_of_their_tiles(how):
    t = MailboxType(i64, (1,), 2, False)
    out = ViewType(i64, 1, Access.READ_WRITE, partition=Partition((1,)))
    given = {"out": out, "x": SymmetricType(i64, 1), "box": t}
    kernel = run_pipeline(build(meets, {"HOW": how}, **given))
    outs: list[PerRank] = []

    def zeros():
        return PerRank([np.zeros(1, np.int64) for _ in range(3)])

    def args():
        outs.append(zeros())
        return [outs[-1], zeros(), new_mailbox(t, 3, 1)]

    case = kernel_case(kernel, 1, args, ranks=3)
    report = explore(case, 10, shrinks=0)
    assert report.clean, str(report.verdicts[0])
    assert all(found.tolist() == [6] for found in outs[-1])


# ---------------------------------------------------------------- what the host adds


@pt.kernel
def post_once(z: T.Exclusive, box: T.Mailbox):
    box.post(z.load())
    total = T.zeros(z.tile_shape, z.dtype)
    for part in box.collect():
        total += part
    z.store(total)


@pytest.mark.any_device
@pytest.mark.sentence("MB-7")
def test_the_depth_is_2_unless_one_is_given():
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        assert heap.mailbox(tile=8, dtype=pt.f32, programs=1).depth == 2
        for depth in (1, 2, 4, 8):
            assert heap.mailbox(tile=8, dtype=pt.f32, programs=1, depth=depth).depth == depth


@pytest.mark.native_only
@pytest.mark.sentence("MB-11")
def test_programs_of_a_mailbox_that_do_not_all_fit_are_refused_with_the_number_that_does():
    n = 1 << 14
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 21) as heap:
        box, z = heap.mailbox(tile=1, dtype=pt.u8, programs=n, depth=1), pt.full((n,), 7, pt.u8)
        with pytest.raises(LaunchError) as caught:
            post_once(z.partition(1), box).sync()
        assert str(caught.value) == (
            "post_once: its 16384 programs wait for each other and must be resident at once, cpu:0 holds 8192 of them; "
            "use a grid of at most 8192 programs"
        )
        assert (z.numpy() == 7).all()


@pytest.mark.any_device
@pytest.mark.sentence("B7")
def test_a_mailbox_is_not_captured():
    with pt.SymmetricHeap(pt.init(), size_bytes=1 << 20) as heap:
        outside = heap.mailbox(tile=8, dtype=pt.f32, programs=1)

        @pt.kernel
        def captures(z: T.Exclusive):
            outside.post(z.load())
            for part in outside.collect():
                z.store(part)

        with pytest.raises(CompileError) as caught:
            captures(pt.zeros(8, pt.f32).partition(8)).sync()
        assert caught.value.message == (
            "`outside`, captured from outside the kernel: expected a constant, got Mailbox; pass it as a parameter of the "
            "kernel"
        )


# ---------------------------------------------------------------- a model of its own


def program_of(links: Links, rank: int, depth: int, ahead: int, rounds: int, acknowledged) -> list[tuple]:
    """The steps of one rank: ("freed", d, n), ("write", d, e), ("arrived", s, n), ("read", s, e), ("free", s, n)."""
    to = [d for d in range(links.size) if (rank, d) in links.pairs and d != rank]
    of = [s for s in range(links.size) if (s, rank) in links.pairs and s != rank]
    found: list[tuple] = []

    def post(e):
        found.extend(("freed", d, e - depth + 1) for d in to if (rank, d) in acknowledged and e >= depth)
        found.extend(("write", d, e) for d in to)  # and the epoch behind it: nobody reads the slot before that
        found.append(("posted", rank, e + 1))

    def collect(e):
        for s in of:
            found.extend((("arrived", s, e + 1), ("read", s, e)))
        found.extend(("free", s, e + 1) for s in of if (s, rank) in acknowledged)

    for e in range(rounds + ahead - 1):
        if e < rounds:
            post(e)
        if e >= ahead - 1:
            collect(e - ahead + 1)
    return found


class Model:
    """Every reachable state of the programs of all ranks, by program counters."""

    def __init__(self, links: Links, depth: int, ahead: int, rounds: int, acknowledged) -> None:
        self.programs = [program_of(links, r, depth, ahead, rounds, acknowledged) for r in range(links.size)]
        self.done = [list(itertools.accumulate(p, self._more, initial={})) for p in self.programs]
        self.depth = depth
        self.overwritten, self.stuck, self.lead = False, False, 0
        self._walk()

    @staticmethod
    def _more(before: dict, step: tuple) -> dict:
        """How far a program has come behind one more step: how many rounds, of each kind and with each rank."""
        kind, other, number = step
        return {**before, (kind, other): number + 1 if kind in ("write", "read") else number}

    def _walk(self) -> None:
        ranks = range(len(self.programs))
        start = (0,) * len(self.programs)
        todo, seen = [start], {start}
        while todo:
            at = todo.pop()
            come = [self.done[r][at[r]] for r in ranks]
            able = []
            for r in ranks:
                if at[r] == len(self.programs[r]):
                    continue
                kind, other, number = self.programs[r][at[r]]
                theirs = come[other]
                if kind == "freed" and theirs.get(("free", r), 0) < number:
                    continue
                if kind == "arrived" and theirs.get(("write", r), 0) < number:
                    continue
                if kind == "write" and theirs.get(("read", r), 0) < number - self.depth + 1:
                    self.overwritten = True
                able.append(r)
            posted = [c.get(("posted", r), 0) for r, c in enumerate(come)]
            for r, s in itertools.permutations(ranks, 2):
                self.lead = max(self.lead, posted[r] - come[s].get(("read", r), 0))
            self.stuck |= not able and any(at[r] < len(self.programs[r]) for r in ranks)
            for r in able:
                after = (*at[:r], at[r] + 1, *at[r + 1 :])
                if after not in seen:
                    seen.add(after)
                    todo.append(after)


@pytest.mark.sentence("MB-8")
@pytest.mark.parametrize(("depth", "ahead"), DEPTHS)
def test_the_model_overwrites_a_slot_if_and_only_if_an_acknowledgement_of_the_page_is_missing(depth, ahead, seed):
    rounds = depth + 2 * ahead
    three = [g for g in graphs(3) if 0 < len(g.pairs) < 5 and not any(s == d for s, d in g.pairs)]
    for links in (*graphs(2), *random.Random(seed).sample(three, 2)):
        needed = links.acknowledged(depth, ahead)
        model = Model(links, depth, ahead, rounds, needed)
        assert not model.overwritten
        assert not model.stuck
        for link in needed:
            assert Model(links, depth, ahead, rounds, needed - {link}).overwritten, (sorted(links.pairs), link)


@pytest.mark.sentence("MB-24")
def test_with_fewer_slots_than_posts_ahead_the_model_comes_to_a_stop():
    links = Links.ring(2)
    assert Model(links, 1, 2, 4, links.pairs).stuck
    assert not Model(links, 2, 2, 4, links.pairs).stuck


@pytest.mark.parametrize(("size", "rounds"), [(2, 5), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_all_to_all_the_fastest_rank_is_two_rounds_ahead_of_what_the_slowest_has_read_and_never_three(size, rounds):
    assert Model(Links.all_to_all(size), 2, 1, rounds, frozenset()).lead == 2
