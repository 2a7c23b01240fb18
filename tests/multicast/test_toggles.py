"""Alias fences on the simulated machine: each one left out is reported, wherever it stands; with all of them, nothing.

The kernel goes through both addresses of the memory in every phase: it writes its part by the ordinary address,
load-reduces and stores by the multicast one, and reads its part by the ordinary one again. Between a write by one
address and an access by the other there is a fence on the way if and only if nothing is reported.
"""

import itertools

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.checker.program import ProgramCase
from peertile.ir import ops
from peertile.ir.core import walk
from peertile.sim.explore import explore
from peertile.sim.verdicts import Race
from peertile.testing.fences import copy_kernel

pytestmark = [pytest.mark.feature("M1", "sim"), pytest.mark.feature("K14", "sim"), pytest.mark.feature("M6", "sim")]
N = 8


@pt.kernel
def phases(x: T.Multicast, own: T.Peer, ready: T.Signal, N: T.Const[int]):
    own.local.store((0,), T.full((N,), (own.rank + 1).astype(T.f32), T.f32))
    ready.notify()  # a fence in front: the ordinary store is published to the multicast address
    ready.wait()  # and one behind
    share = x.partition((N,))
    total = share.multimem_load_reduce((0,), T.add)
    ready.notify()
    ready.wait()
    if x.rank == 0:
        share.multimem_store((0,), total)
    ready.notify()  # a fence in front: the multicast store is published to the ordinary address
    ready.wait()  # and one behind
    own.local.store((0,), own.local.load((0,), (N,)) + 1.0)


def program(group):
    with pt.SymmetricHeap(group, 1 << 16) as heap:
        ready = heap.signal(slots=1)
        x = heap.multicast((N,), pt.f32)
        group.barrier()
        phases.grid(1)(x, x, ready, N=N).sync()
        n = group.size
        assert x.numpy().tolist() == [n * (n + 1) / 2 + 1] * N
        group.barrier()


def without(left_out):
    """The kernel without the fences of these positions, in program order."""

    def change(kernel):
        kernel = copy_kernel(kernel)
        fences = [op for op in walk(kernel.body) if isinstance(op, ops.FenceAlias)]
        assert len(fences) == 6
        for k in left_out:
            fences[k].parent.ops.remove(fences[k])
        return kernel

    return change


def verdicts(left_out, schedules=4):
    return explore(ProgramCase(program, 2, change=without(left_out)), schedules).verdicts


# Fences 0 and 1 are around the first exchange (in front of its notify, behind its wait), 2 and 3 around the second,
# 4 and 5 around the third.
SETTINGS = [tuple(k for k in range(6) if bits[k]) for bits in itertools.product([0, 1], repeat=6)]


def is_ordered(left_out):
    """(0 or 1) and 2 and 4.

    What was written by the ordinary address is known to the multicast one by a fence anywhere on the way, the
    writer's or the reader's. What was done by the multicast address is known to others by a fence behind it, of the
    one who did it: the load-reduce before it is overwritten (2), the store before it is read (4).
    """
    there = [k not in left_out for k in range(6)]
    return (there[0] or there[1]) and there[2] and there[4]


@pytest.mark.sentence("MM-15")
@pytest.mark.parametrize("left_out", [s for s in SETTINGS if len(s) < 2], ids=str)
def test_one_fence_left_out_is_reported_when_the_formula_says(left_out):
    found = verdicts(left_out)
    assert (not found) is is_ordered(left_out), [str(v) for v in found]


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [s for s in SETTINGS if len(s) >= 2], ids=str)
def test_every_setting_of_the_fences_agrees_with_the_formula(left_out):
    found = verdicts(left_out, 2)
    assert (not found) is is_ordered(left_out), [str(v) for v in found]


def test_the_report_names_the_missing_fence():
    (verdict,) = verdicts((4,))[:1]
    assert isinstance(verdict, Race)
    assert without_places(str(verdict)) == (
        "race: two accesses of x.data of rank 1 (own of rank 1), elements [0:8], are not ordered\n"
        "  program 0 of phases on rank 0 writes (weak, multicast proxy) x.data of rank 1 [0:8]\n"
        "        share.multimem_store((0,), total)\n"
        "  program 0 of phases on rank 1 reads (weak) own of rank 1 [0:8]\n"
        "        own.local.store((0,), own.local.load((0,), (N,)) + 1.0)\n"
        "  missing: no fence between the multicast and the generic proxy lies on the way from the first access to the "
        "second, which are ordered otherwise\n"
        "  repair: let the notify or the wait between them belong to a kernel with a multicast parameter, which fences, "
        "or put T.unsafe.fence_alias() before the release or behind the acquire\n"
        "  replay: --seed 0 or --choices z0"
    )


def without_places(text):
    """Without files, lines and carets."""
    return "\n".join(t for t in text.split("\n") if "test_toggles.py" not in t and set(t) - set(" ^"))


# ---------------------------------------------------------------- one program alone, unsafe


@pt.kernel(unsafe=True)
def alone(x: T.Multicast, own: T.Peer, FENCES: T.Const[tuple], N: T.Const[int]):
    share = x.partition((N,))
    own.local.store((0,), T.full((N,), 3.0, T.f32))
    if FENCES[0]:
        T.unsafe.fence_alias()
    share.multimem_store((0,), share.multimem_load_reduce((0,), T.add) + 1.0)
    if FENCES[1]:
        T.unsafe.fence_alias()
    own.local.store((0,), own.local.load((0,), (N,)) * 2.0)


@pytest.mark.parametrize("fences", list(itertools.product([False, True], repeat=2)), ids=str)
def test_one_program_needs_a_fence_at_every_crossing(fences):
    def program(group):
        with pt.SymmetricHeap(group, 1 << 16) as heap:
            x = heap.multicast((N,), pt.f32)
            alone.grid(1)(x, x, FENCES=fences, N=N).sync()
            assert np.array_equal(x.numpy(), np.full(N, 8.0, np.float32))

    found = explore(ProgramCase(program, 1), 2).verdicts
    assert (not found) is all(fences), [str(v) for v in found]
