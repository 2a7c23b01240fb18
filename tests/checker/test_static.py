"""What the compiler refuses without running anything, under the checker: rules of memory order are told first, and the
program runs; everything else is the verdict of the rank that gets the error."""

import pytest
from tests.kernel.test_safety import REFUSED, acquiring_wait, empty_release, narrow_store, relaxed_wait, unmarked

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.sim.verdicts import VerdictKind


def place(kernel, text: str) -> str:
    """`file:line` of the last line of a kernel that has `text`."""
    code = kernel.fn.__code__
    with open(code.co_filename) as file:
        lines = file.read().split("\n")
    end = max(line for *_, line in code.co_lines() if line is not None)
    (*_, found) = [k for k in range(code.co_firstlineno, end + 1) if text in lines[k - 1]]
    return f"{code.co_filename}:{found}"


def launching(kernel):
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            out, words = pt.zeros((1,), pt.i32), heap.zeros((8,), pt.i32)
            kernel(out.partition(1), words).sync()

    return main


@pytest.mark.feature("S3", "sim")
@pytest.mark.parametrize(("kernel", "text"), [(relaxed_wait, "T.relaxed"), (empty_release, "T.release")])
def test_a_broken_rule_of_order_is_told_with_its_line_and_the_program_runs(kernel, text: str) -> None:
    report = check(launching(kernel), 1, schedules=1)
    message = REFUSED[kernel].split(": ", 1)[1]
    assert report.order_faults == {place(kernel, text): message}
    assert not report.clean
    assert str(report).startswith(
        f"{message}\n  {place(kernel, text)}\n  the compiler refuses this without running it\n"
    )
    kinds = [verdict.kind for verdict in report.verdicts]
    assert kinds == ([VerdictKind.DEADLOCK] if kernel is relaxed_wait else [])
    assert ("main: no schedule showed a fault on 1 rank" in str(report)) == (kernel is empty_release)


@pytest.mark.feature("S3", "sim")
@pytest.mark.parametrize(("kernel", "text"), [(narrow_store, "T.st"), (unmarked, "T.unsafe.token")])
def test_what_does_not_compile_is_the_verdict_of_its_rank(kernel, text: str) -> None:
    (verdict,) = check(launching(kernel), 1, schedules=1).verdicts
    assert verdict.kind is VerdictKind.HOST
    first, *rest = str(verdict).split("\n")
    assert first == f"host: rank 0 raised CompileError: {REFUSED[kernel]}"
    assert f"  {place(kernel, text)} in {kernel.name}" in rest


@pytest.mark.feature("S3", "sim")
def test_a_kernel_that_keeps_the_rules_has_nothing_to_tell() -> None:
    report = check(launching(acquiring_wait), 1, schedules=3)
    assert report.clean, str(report)


@pt.kernel
def mixes(out: T.Exclusive, words: T.Peer):
    T.st(words, 1, (0,), rank=1 - words.rank, order=T.release)
    T.atom_add(words, 1, (0,), rank=1 - words.rank)
    out.store(T.full((1,), 1, T.i32))


@pytest.mark.feature("S3", "sim")
def test_a_word_that_is_stored_and_added_to_is_reported_where_the_verifier_cannot_know() -> None:
    (verdict,) = check(launching(mixes), 2, schedules=3).verdicts
    assert verdict.kind is VerdictKind.WORD
    assert "it is written by stores and by adds" in str(verdict)
