"""Mutants of the library's collectives: what all interleavings call wrong is reported, and nothing else is."""

import pytest
from tests.checker.configurations import COLLECTIVES, by_name

import peertile as pt
import peertile.language as T
from peertile.testing.mutation import Configuration, judge, mutations, truth

QUICK = ("barrier", pytest.param("all_reduce symmetric one_shot, 40", marks=pytest.mark.slow))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
@pytest.mark.feature("C2", "sim")
@pytest.mark.feature("C3", "sim")
def test_mutants_that_are_wrong_are_reported_and_no_others(name: str) -> None:
    found = [judge(mutation, reaching, 20, 400) for mutation, reaching in mutations(by_name(name)[:1])]
    assert found
    assert [str(j.mutation) for j in found if not j.complete] == []
    assert [str(j.mutation) for j in found if j.missed] == []
    assert [str(j.mutation) for j in found if j.false_report] == []
    assert sum(j.wrong is not None for j in found) >= len(found) // 2


@pytest.mark.long
@pytest.mark.parametrize("configuration", COLLECTIVES, ids=lambda c: c.name)
def test_no_interleaving_of_a_collective_is_at_fault(configuration: Configuration) -> None:
    found = truth(configuration.case(), 400)
    assert found.verdict is None, str(found.verdict)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_at_least_99_percent_of_the_wrong_mutants_of_all_collectives_are_reported() -> None:
    """The record in benchmarks/records has the same run, with every mutant by name."""
    found = [judge(mutation, reaching, 50, 400) for mutation, reaching in mutations(COLLECTIVES) if reaching]
    wrong = [j for j in found if j.wrong is not None]
    missed = [str(j.mutation) for j in wrong if j.missed]
    assert len(missed) <= len(wrong) // 100, missed
    assert [str(j.mutation) for j in found if j.false_report] == []


# ---------------------------------------------------------------- the tool itself


@pt.kernel
def swap(out: T.Exclusive, x: T.Peer, ready: T.Signal):
    x.local.store((0,), T.full((16,), 1.0, T.f32))
    ready.notify()
    ready.wait()
    out.store(x.at(1 - x.rank).load((0,), (16,)))


def once(group) -> None:
    with pt.SymmetricHeap(group, 1 << 14) as heap:
        x, out = heap.zeros((16,), pt.f32), pt.zeros((16,), pt.f32)
        swap(out.partition(16), x, heap.signal(slots=1)).sync()


@pytest.mark.slow
def test_a_mutant_says_what_was_done_where_and_what_came_of_it() -> None:
    found = {str(m): judge(m, reaching, 5, 100) for m, reaching in mutations([Configuration("once", once)])}
    assert list(found) == [
        f"swap: {change} word_store 0: ready.notify()" for change in ("weaken", "delete", "drop", "device", "program")
    ] + [f"swap: {change} wait 1: ready.wait()" for change in ("weaken", "delete", "drop", "device", "program")]
    # One round: a wait that does not count on is all that is left to lack, and nothing comes after it.
    verdicts = {name.partition(":")[2]: (j.wrong, j.reported) for name, j in found.items()}
    assert all(reported is not None for _, reported in verdicts.values())
    configuration, headline = verdicts[" delete word_store 0: ready.notify()"][0]
    assert configuration == "once"
    assert headline.startswith("deadlock: 4 agents wait")
    assert "race: two accesses of" in verdicts[" weaken wait 1: ready.wait()"][0][1]


@pytest.mark.slow
def test_truth_says_when_it_has_not_seen_all_interleavings() -> None:
    case = by_name("barrier")[0].case()
    assert truth(case, 2).complete is False
    assert truth(case).complete is True
    assert truth(case).runs > 2
