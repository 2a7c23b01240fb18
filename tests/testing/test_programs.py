"""The generator of random kernels: they verify, run, and mean the same before and after the passes."""

from collections import Counter

import numpy as np
import pytest

from peertile.ir import ops
from peertile.ir.core import walk
from peertile.ir.text import parse_kernel, print_kernel
from peertile.ir.verify import verify
from peertile.meaning import Schedule, run_grid
from peertile.passes.pipeline import run_pipeline
from peertile.testing.programs import RandomKernel, arrays_of, differences, random_kernel


def run(program: RandomKernel, kernel, **options) -> list:
    args = program.make_args()
    assert run_grid(kernel, program.grid, args, ranks=program.ranks, **options).faults == []
    return args


def check(seed: int) -> None:
    program = random_kernel(seed)
    verify(program.kernel)
    text = print_kernel(program.kernel)
    assert print_kernel(parse_kernel(text)) == text
    # What the meaning does not know is expanded first, where there is any.
    plain = not any(isinstance(op, (*ops.EXPANDED, *ops.MULTICAST)) for op in walk(program.kernel.body))
    expected = run(program, program.kernel if plain else run_pipeline(parse_kernel(text)))
    found = run(program, run_pipeline(parse_kernel(text)), schedule=Schedule.RANDOM, seed=seed)
    exact = program._replace(tolerance=dict.fromkeys(program.tolerance, 0.0))
    assert differences(exact, found, expected) == []
    for k in program.tolerance:
        for array in arrays_of(expected[k]):
            assert np.isfinite(array.astype(np.float64)).all()


@pytest.mark.sentence("MM-10")
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(k, marks=pytest.mark.slow) for k in range(12, 60))])
def test_passes_keep_the_meaning(seed: int) -> None:
    check(seed)


@pytest.mark.long
@pytest.mark.parametrize("start", range(0, 5000, 250))
def test_passes_keep_the_meaning_of_many(start: int) -> None:
    for seed in range(start, start + 250):
        check(seed)


def test_a_seed_gives_one_kernel() -> None:
    a, b = random_kernel(7), random_kernel(7)
    assert print_kernel(a.kernel) == print_kernel(b.kernel)
    assert all(np.array_equal(x, y) for x, y in zip(a.make_args(), b.make_args(), strict=True))


def test_kernels_cover_the_ops() -> None:
    seen = Counter(type(op) for seed in range(150) for op in walk(random_kernel(seed).kernel.body))
    wanted = {
        ops.Const, ops.UnaryOp, ops.BinaryOp, ops.CompareOp, ops.Select, ops.Fma, ops.Cast, ops.Bitcast, ops.Broadcast,
        ops.Reshape, ops.Permute, ops.Reduce, ops.Mma,
        ops.ReduceWith, ops.ScanWith, ops.Sort, ops.Take, ops.Extract, ops.Insert, ops.Iota, ops.WordRmw,
        ops.Load, ops.Store, ops.TileAtomic, ops.WordLoad, ops.WordStore,
        ops.TileIndex, ops.ProgramId, ops.For, ops.Loop, ops.If, ops.Yield, ops.Continue, ops.Break, ops.Return,
    }  # fmt: skip
    assert wanted <= set(seen)
    assert min(seen[cls] for cls in wanted) >= 10


def test_differences_are_named() -> None:
    program = random_kernel(3)
    expected = program.make_args()
    found = program.make_args()
    k = program.kernel.param_names.index("a")
    found[k][5] += 1
    assert differences(program, found, expected) == [
        f"a[5]: expected {expected[k][5]} within 0.0, got {found[k][5]} (1 wrong)"
    ]
