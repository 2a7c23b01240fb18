"""The collectives of the library on the simulated machine: no false report, and right values."""

import importlib.util
import pkgutil
import random
from pathlib import Path

import numpy as np
import pytest
from tests.checker.library_programs import MORE, gpu_moves, gpu_plan, values
from tests.fused.fused_programs import SMALL

import peertile as pt
import peertile.library
from peertile.checker.check import check
from peertile.checker.program import ProgramCase
from peertile.kernel import KernelFunction
from peertile.library import cuda_collectives, cuda_kernels
from peertile.library.collectives import Collectives
from peertile.library.cuda_collectives import GpuPlans, Shape, heap_bytes
from peertile.library.reductions import ReduceOp
from peertile.library.selection import GPU_ONLY, Algorithm
from peertile.sim.explore import explore

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = [
    *(f"all_reduce {a.value}" for a in Algorithm if a not in GPU_ONLY | {Algorithm.MULTIMEM}),
    "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "barrier", "all_gather_v",
]  # fmt: skip


def size_of(name: str) -> int:
    """Elements: several tiles and chunks where the algorithm allows them."""
    return {"all_reduce one_shot": 400, "all_reduce flagged": 200}.get(name, 6000)


def collective(name: str, n: int = 100, programs: int | None = 2, turns: int = 2):
    """A program that makes a collective `turns` times, the input written anew in between."""

    def main(group) -> None:
        size, me = group.size, group.rank
        with Collectives(group, programs=programs, slot_bytes=4096) as c:
            for turn in range(turns):
                mine, all_of = values(me + turn, n), [values(r + turn, n) for r in range(size)]
                x = pt.asarray(mine)
                if name.startswith("all_reduce"):
                    out = c.all_reduce(x, algorithm=Algorithm(name.split()[1])).sync().numpy()
                    assert np.array_equal(out, sum(all_of))
                elif name == "reduce_scatter":
                    out = c.reduce_scatter(pt.asarray(np.tile(mine, size))).sync().numpy()
                    assert np.array_equal(out.ravel(), sum(all_of))
                elif name == "all_gather":
                    out = c.all_gather(x).sync().numpy()
                    assert np.array_equal(out.ravel(), np.concatenate(all_of))
                elif name == "all_to_all":
                    out = c.all_to_all(pt.asarray(np.tile(mine, size))).sync().numpy()
                    assert np.array_equal(out.ravel(), np.concatenate(all_of))
                elif name == "broadcast":
                    out = c.broadcast(x, root=size - 1).sync().numpy()
                    assert np.array_equal(out, all_of[-1])
                elif name == "reduce":
                    c.reduce(x, root=0).sync()
                elif name == "barrier":
                    c.barrier().sync()
                else:
                    counts = [n + r for r in range(size)]
                    c.all_gather_v(pt.asarray(values(me, counts[me])), counts).sync()

    return main


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.feature("A1", "sim")
def test_collectives_are_clean_on_two_ranks(name: str) -> None:
    report = check(collective(name), 2, schedules=2)
    assert report.clean, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [n for n in MORE if not n.startswith("for GPUs")])
@pytest.mark.feature("A1", "sim")
@pytest.mark.feature("A2", "sim")
@pytest.mark.feature("A4", "sim")
def test_the_other_kernels_are_clean(name: str, ranks: int) -> None:
    report = check(MORE[name], ranks, schedules=2)
    assert report.clean, str(report)


@pytest.mark.slow
def test_every_kernel_of_the_library_is_in_a_program_that_is_checked(monkeypatch) -> None:
    """What benchmarks/many_schedules.py runs on many schedules: these programs, and the examples."""
    launched: set[str] = set()
    call, grid = KernelFunction.__call__, KernelFunction.grid

    def seen(kernel: KernelFunction) -> None:
        launched.add(f"{kernel.fn.__module__}.{kernel.fn.__name__}")

    def calling(kernel, *arguments, **options):
        seen(kernel)
        return call(kernel, *arguments, **options)

    def laid_out(kernel, *extents):
        seen(kernel)
        return grid(kernel, *extents)

    monkeypatch.setattr(KernelFunction, "__call__", calling)
    monkeypatch.setattr(KernelFunction, "grid", laid_out)
    programs = [*MORE.values(), *SMALL.values(), *(collective(name) for name in NAMES), EXAMPLES / "decode_loop.py"]
    for program in [*programs, EXAMPLES / "embed.py"]:
        report = check(program, 2, schedules=1)
        assert report.clean, str(report)
    every = set()
    for module in pkgutil.iter_modules(peertile.library.__path__, "peertile.library."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, KernelFunction):
                every.add(f"{value.fn.__module__}.{value.fn.__name__}")
    assert len(every) > 60
    assert every - launched == set()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("algorithm", "tile"), [("flagged", 32), ("filled", 16), ("filled", 64), ("pushed", 32)])
def test_kernels_for_gpus_are_clean(algorithm: str, tile: int, ranks: int) -> None:
    """A filled tile of 64 is all of a launch, and so is a quarter of it."""
    report = check(gpu_plan(Algorithm(algorithm), tile), ranks, schedules=2)
    assert report.clean, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("algorithm", ["flagged", "pushed"])
def test_kernels_for_gpus_that_move_are_clean(algorithm: str, ranks: int) -> None:
    report = check(gpu_moves(Algorithm(algorithm), 32), ranks, schedules=2)
    assert report.clean, str(report)


def gpu_turns(tile: int, launches: int):
    """The same all-reduce by filled places again and again."""

    def main(group) -> None:
        size = group.size
        with pt.SymmetricHeap(group, size_bytes=heap_bytes(size, 4) + (1 << 16)) as heap:
            plans, x, out = GpuPlans(heap, 4), pt.asarray(values(group.rank, 60)), pt.zeros((60,), pt.f32)
            for _ in range(launches):
                plans.all_reduce(Shape(Algorithm.FILLED, 2, tile), x, out, ReduceOp.SUM).sync()

    return main


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "launches", "slots"), [(16, 12, 8), (16, 20, 16), (4, 4, 8), (2, 3, 8), (1, 2, 8)])
def test_filled_places_of_any_number_of_slots_are_clean(tile: int, launches: int, slots: int, monkeypatch) -> None:
    """Of so many that all slots come again, in launches of one turn, of four, eight and fifteen."""
    monkeypatch.setattr(cuda_collectives, "SHORT_SLOTS", 2 * slots)
    report = check(gpu_turns(tile, launches), 2, schedules=2)
    assert report.clean, str(report)


def gpu_mixed(seed: int):
    """All-reduces by filled places, cut in any way: launches of one turn and of several follow each other."""
    draw = random.Random(seed).choice
    ways = [(draw((16, 32, 8, 4, 2)), draw((1, 2, 4)), draw((True, False))) for _ in range(9)]

    def main(group) -> None:
        size = group.size
        with pt.SymmetricHeap(group, size_bytes=heap_bytes(size, 4) + (1 << 16)) as heap:
            plans, x, out = GpuPlans(heap, 4), pt.asarray(values(group.rank, 60)), pt.zeros((60,), pt.f32)
            for tile, programs, in_place in ways:
                shape = Shape(Algorithm.FILLED, programs, tile)
                plans.all_reduce(shape, None if in_place else x, out, ReduceOp.MAX).sync()

    return main


@pytest.mark.slow
@pytest.mark.parametrize("slots", [8, 16])
@pytest.mark.parametrize("first", [0, *(pytest.param(k, marks=pytest.mark.long) for k in (8, 16, 24, 32))])
def test_launches_of_one_turn_and_of_several_leave_places_empty_for_each_other(first, slots, monkeypatch) -> None:
    monkeypatch.setattr(cuda_collectives, "SHORT_SLOTS", 2 * slots)
    monkeypatch.setattr(cuda_collectives, "LONG_SLOTS", 2 * slots)
    for seed in range(first, first + 8):
        report = check(gpu_mixed(seed), 2, schedules=2)
        assert report.clean, f"{seed}: {report}"


FENCES = {
    "before the only turn of a launch": ("    order_emptied(e, S)\n    #", "    #", 16, 10),
    "once in half of the slots": ("(S // 2 - 1)", "(S - 1)", 16, 10),
    "in the first of several turns": ("(e == first) |", "(e != first) &", 4, 4),
    "in all the turns behind it": ("| (e & (S // 4 - 1) == 0)", "", 1, 1),
    "once in a quarter of the slots": ("(S // 4 - 1)", "(S - 1)", 1, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("fence", FENCES)
def test_no_fence_of_filled_places_can_be_left_out(fence: str, tmp_path, monkeypatch) -> None:
    """Without it a place may be emptied after it was filled again, and its reader waits for what was lost."""
    text, instead, tile, launches = FENCES[fence]
    source = Path(cuda_kernels.__file__).read_text()
    assert text in source
    path = tmp_path / "without.py"
    path.write_text(source.replace(text, instead))
    spec = importlib.util.spec_from_file_location("without_a_fence", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(cuda_collectives, "kernels", module)
    monkeypatch.setattr(cuda_collectives, "SHORT_SLOTS", 16)
    report = explore(ProgramCase(gpu_turns(tile, launches), 2), 2, shrinks=0)  # who would read the shortest schedule?
    assert not report.clean
    assert "two stores to it are not ordered" in str(report.verdicts[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_collectives_are_clean_on_three_ranks(name: str) -> None:
    report = check(collective(name), 3, schedules=12 if name != "all_reduce flagged" else 2)
    assert report.clean, str(report)
    assert report.exploration.unconfirmed == 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_collectives_are_clean_on_many_schedules(name: str, ranks: int) -> None:
    report = check(collective(name, size_of(name), turns=4), ranks, schedules=1000)
    assert report.clean, str(report)
