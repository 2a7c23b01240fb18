"""The racy examples: every fault is reported with the right objects, every repaired twin is silent."""

from pathlib import Path

import pytest

from peertile.checker.check import check
from peertile.sim.verdicts import VerdictKind

RACY = Path(__file__).parents[2] / "examples" / "racy"

EXPECTED = {
    "barrier_without_sync": (VerdictKind.RACE, "x of rank", "fill on rank"),
    "collective_mismatch": (
        VerdictKind.COLLECTIVE,
        "SymmetryError: ranks disagree about SymmetricHeap allocation",
        "f32[65]",
    ),
    "counting": (VerdictKind.RACE, "x of rank 0", "collect on rank"),
    "early_reuse": (VerdictKind.RACE, "x of rank", "Tensor.copy_from"),
    "equality_wait": (VerdictKind.DEADLOCK, "words[0] on rank", " eq ", "written last by program 0 of rounds"),
    "freed_too_early": (VerdictKind.LIFETIME, "x of rank 0", "twice on rank 0", "the host of rank 0"),
    "lost_notify": (VerdictKind.DEADLOCK, "ready.arrived[0, 1] on rank 0 at_least 1", "nobody has written it"),
    "lost_reset": (VerdictKind.RACE, "flag of rank 1", "stream 1 of rank 1 fills", "send on rank 0"),
    "missing_acquire": (VerdictKind.RACE, "x of rank 1, elements [0:64]", "it is relaxed and no fence follows"),
    "missing_alias_fence": (
        VerdictKind.RACE,
        "x.data of rank 0",
        "no fence between the generic and the multicast proxy lies on the way",
    ),
    "missing_token": (VerdictKind.RACE, "memory behind p of rank 0", "no path of tokens leads"),
    "missing_wait": (VerdictKind.RACE, "out of rank", "swap on rank"),
    "mixed_word": (VerdictKind.WORD, "words[0] on rank 0", "by stores and by adds", "on rank 1", "on rank 2"),
    "more_than_fits": (VerdictKind.LAUNCH, "LaunchError", "must be resident at once"),
    "narrow_scope": (VerdictKind.RACE, "flag of rank 1, elements [0], are", "the device scope", "does not include"),
    "never_written": (VerdictKind.NEVER_WRITTEN, "x of rank 0 [64:128]", "out.store(x.load_like(out) * 2.0)"),
    "out_of_bounds": (VerdictKind.KERNEL, "element index 0 of `x` out of range: got 8, limit 8", "scatter on rank 1"),
    "stale_argument": (VerdictKind.RACE, "x of rank", "swap on rank 0", "swap on rank 1"),
    "two_streams": (VerdictKind.LAUNCH, "LeaseError", "meet on second", "meet on first", "as a channel"),
    "wrong_epoch": (VerdictKind.RACE, "x of rank 1, elements [64:128]", "acquired nothing that includes it"),
}


def test_every_racy_example_has_a_repaired_twin_and_an_expectation() -> None:
    names = {path.stem for path in RACY.glob("*.py")}
    assert names == set(EXPECTED) | {f"{name}_fixed" for name in EXPECTED}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.feature("C2", "sim")
@pytest.mark.feature("C3", "sim")
@pytest.mark.feature("C4", "sim")
@pytest.mark.feature("C5", "sim")
def test_a_fault_is_reported(name: str) -> None:
    report = check(RACY / f"{name}.py", schedules=20)
    (verdict,) = report.verdicts
    kind, *texts = EXPECTED[name]
    assert verdict.kind is kind
    for text in texts:
        assert text in str(verdict)
    again = check(RACY / f"{name}.py", choices=verdict.replay.choices)
    assert again.verdicts[0].key == verdict.key


STEERED = {"equality_wait"}
"""Values decide what happens: only some schedules show the fault. Their rates are in test_seeds.py."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in STEERED])
def test_the_verdict_does_not_depend_on_the_seed(name: str) -> None:
    kinds = set()
    for seed in range(0, 5000, 1000):
        report = check(RACY / f"{name}.py", schedules=1, seed=seed)
        kinds |= {verdict.kind for verdict in report.verdicts} or {None}
    assert kinds == {EXPECTED[name][0]}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize(("first", "schedules"), [(0, 8), pytest.param(8, 12, marks=pytest.mark.slow)])
@pytest.mark.feature("C1", "sim")
def test_a_repaired_twin_is_silent(name: str, first: int, schedules: int) -> None:
    report = check(RACY / f"{name}_fixed.py", schedules=schedules, seed=first)
    assert report.clean, str(report)
    assert report.exploration.schedules == schedules
    assert report.exploration.unconfirmed == 0


@pytest.mark.long
@pytest.mark.parametrize("name", EXPECTED)
def test_a_repaired_twin_is_silent_on_many_schedules(name: str) -> None:
    report = check(RACY / f"{name}_fixed.py", schedules=1000)
    assert report.clean, str(report)
