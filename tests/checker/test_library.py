"""The collectives of the library on the simulated machine: no false report, and right values."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import peertile as pt
from peertile.checker.check import check
from peertile.library import cuda_collectives, cuda_kernels
from peertile.library.collectives import Collectives
from peertile.library.cuda_collectives import GpuPlans, Shape, heap_bytes
from peertile.library.reductions import ReduceOp
from peertile.library.selection import GPU_ONLY, Algorithm

NAMES = [
    *(f"all_reduce {a.value}" for a in Algorithm if a not in GPU_ONLY | {Algorithm.MULTIMEM}),
    "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "barrier", "all_gather_v",
]  # fmt: skip


def size_of(name: str) -> int:
    """Elements: several tiles and chunks where the algorithm allows them."""
    return {"all_reduce one_shot": 400, "all_reduce flagged": 200}.get(name, 6000)


def values(rank: int, n: int) -> np.ndarray:
    return (np.arange(n) % 7 + rank).astype(np.float32)


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


def gpu_plan(algorithm: Algorithm, tile: int):
    """All-reduces by the kernels for GPUs, out of place and in place, one tile to a program and several."""

    def main(group) -> None:
        size = group.size
        with pt.SymmetricHeap(group, size_bytes=heap_bytes(size, 2) + (1 << 16)) as heap:
            plans, x, out = GpuPlans(heap, 2), pt.asarray(values(group.rank, 60)), pt.zeros((60,), pt.f32)
            for shape in (Shape(algorithm, 2, tile), Shape(algorithm, 2, tile // 4)):
                for _ in range(2):
                    plans.all_reduce(shape, x, out, ReduceOp.SUM).sync()
                    assert np.array_equal(out.numpy(), sum(values(r, 60) for r in range(size)))
                plans.all_reduce(shape, None, out, ReduceOp.MAX).sync()

    return main


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("algorithm", "tile"), [("flagged", 32), ("filled", 16), ("filled", 64), ("pushed", 32)])
def test_kernels_for_gpus_are_clean(algorithm: str, tile: int, ranks: int) -> None:
    """A filled tile of 64 is all of a launch, and so is a quarter of it: six of those use four places."""
    report = check(gpu_plan(Algorithm(algorithm), tile), ranks, schedules=2)
    assert report.clean, str(report)


def gpu_moves(algorithm: Algorithm, tile: int):
    """The other collectives by the kernels for GPUs, with tiles of two sizes one behind the other."""

    def main(group) -> None:
        size, me = group.size, group.rank
        with pt.SymmetricHeap(group, size_bytes=heap_bytes(size, 2) + (1 << 16)) as heap:
            plans, n = GpuPlans(heap, 2), 60
            rows = [values(r, size * n).reshape(size, n) for r in range(size)]
            x, whole, part = pt.asarray(rows[me].reshape(-1)), pt.zeros((size * n,), pt.f32), pt.zeros((n,), pt.f32)
            mine = pt.asarray(rows[me][0])
            for shape in (Shape(algorithm, 2, tile), Shape(algorithm, 2, tile // 4)):
                plans.reduce_scatter(shape, x, part, ReduceOp.SUM).sync()
                assert np.array_equal(part.numpy(), sum(r[me] for r in rows))
                plans.gather(shape, mine, whole, each=False).sync()
                assert np.array_equal(whole.numpy(), np.concatenate([r[0] for r in rows]))
                plans.gather(shape, x, whole, each=True).sync()
                assert np.array_equal(whole.numpy(), np.concatenate([r[me] for r in rows]))

    return main


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("algorithm", ["flagged", "pushed"])
def test_kernels_for_gpus_that_move_are_clean(algorithm: str, ranks: int) -> None:
    report = check(gpu_moves(Algorithm(algorithm), 32), ranks, schedules=2)
    assert report.clean, str(report)


FENCES = {
    "before the only turn of a launch": ("    order_emptied(e)\n    send_filled", "    send_filled", 64),
    "at the head of several turns": ("    T.sync_system()  # what the launches before emptied\n", "", 16),
    "in every second turn": ("        order_emptied(e)\n        e += 1", "        e += 1", 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("fence", FENCES)
def test_no_fence_of_filled_places_can_be_left_out(fence: str, tmp_path, monkeypatch) -> None:
    """Without it a place may be emptied after it was filled again, and its reader waits for what was lost."""
    text, instead, tile = FENCES[fence]
    source = Path(cuda_kernels.__file__).read_text()
    assert text in source
    path = tmp_path / "without.py"
    path.write_text(source.replace(text, instead))
    spec = importlib.util.spec_from_file_location("without_a_fence", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(cuda_collectives, "kernels", module)
    report = check(gpu_plan(Algorithm.FILLED, tile), 2, schedules=2)
    assert not report.clean
    assert "two stores to it are not ordered" in str(report)


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
