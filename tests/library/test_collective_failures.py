"""A rank that dies, or leaves on an exception, in the middle of each collective: the others hear of it, in time."""

import ast
import os
import re
import subprocess
import sys

import library_ranks as ranks
import pytest

import peertile as pt
from peertile.library.collectives import Collectives

WITHIN_S = 5.0
"""From the kill to the exception of every other rank, on a machine that is busy. The wait bound is much longer."""

PROGRAM = """
import sys
import peertile as pt
from peertile.library.collectives import Collectives
import library_ranks as ranks

if __name__ == "__main__":
    pt.run(ranks.dies, int(sys.argv[3]), args=(1, sys.argv[1], sys.argv[2]))
"""


def test_every_collective_is_among_those_that_are_interrupted():
    with pt.SymmetricHeap(pt.init(), size_bytes=48 << 20) as heap, Collectives(heap) as comm:
        assert set(ranks.every_collective(comm)) == set(ranks.COLLECTIVES)
    public = {name for name in vars(Collectives) if not name.startswith("_")} - {"close", "forget"}
    assert public == {kind.split()[0] for kind in ranks.COLLECTIVES}


@pytest.mark.slow
@pytest.mark.any_device
@pytest.mark.native_only
@pytest.mark.gpus("world")
@pytest.mark.feature("A1", "cpu")
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.cuda2), 3])
@pytest.mark.parametrize("kind", ranks.COLLECTIVES)
def test_a_rank_killed_during_a_collective_fails_every_other_rank_in_time(kind, world, tmp_path):
    """SIGKILL while the ranks call it again and again. That nothing is left behind is checked after every run."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder = os.path.dirname(ranks.__file__)
    done = subprocess.run(
        [sys.executable, program, kind, tmp_path, str(world)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 128 + 9, done.stderr
    for rank in {0, world - 1} - {1}:
        name, failed, text, late = ast.literal_eval((tmp_path / str(rank)).read_text())
        assert (name, failed) == ("PeerFailed", 1)
        # The connection that breaks tells as much as the launcher that has waited for the process.
        assert re.fullmatch(r"rank 1 failed: (killed by SIGKILL|its process \d+ ended without leaving the group)", text)
        assert late < WITHIN_S


@pytest.mark.slow
@pytest.mark.feature("A1", "cpu")
def test_an_exception_in_one_rank_during_each_collective_reaches_the_others_and_recovery_works():
    victim = 1
    for rank, found in enumerate(
        pt.spawn(ranks.raises_in_each, 3, (victim,), model=pt.RankModel.THREADS, timeout_s=100)
    ):
        for kind in ranks.COLLECTIVES:
            if rank == victim:
                assert found[kind] == ("Boom", None, kind)
            else:
                assert found[kind] == ("PeerFailed", victim, f"rank {victim} failed: Boom: {kind}")


def test_a_communicator_that_does_not_fit_leaves_the_heap_as_it_was():
    failed = pt.spawn(ranks.too_small_for_a_communicator, 2, model=pt.RankModel.THREADS)
    assert failed[0] == failed[1]
    assert min(failed[0].values()) > 1


def test_a_communicator_may_be_closed_after_its_heap_and_does_not_disturb_recovery():
    assert pt.spawn(ranks.outlives_its_heap, 2, model=pt.RankModel.THREADS) == ["UsageError"] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.all_reduce([1.0]), "all_reduce: x: expected a Tensor or SymmetricTensor, got list"),
        (lambda c: c.all_gather(None), "all_gather: x: expected a Tensor or SymmetricTensor, got NoneType"),
        (lambda c: c.broadcast(3), "broadcast: x: expected a Tensor or SymmetricTensor, got int"),
        (
            lambda c: c.all_reduce(pt.ones(3, pt.f32), algorithm="ring"),
            "all_reduce: algorithm: expected an Algorithm or None, got 'ring'",
        ),
        (
            lambda c: c.all_gather_v(pt.ones(3, pt.f32), 3),
            "all_gather_v: counts: expected 1 integers >= 0, one for each rank, got 3",
        ),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(call, message):
    with Collectives(pt.init()) as comm, pytest.raises(pt.ArgumentError, match="^" + re.escape(message) + "$"):
        call(comm)
