"""Ways of all-reduces on two GPUs, each checked and timed: `f_sweep.py SIZE ...`, with F_CAP (most warps), F_LAUNCH,
F_JUDGE=0, F_WARM=1 (only compiles), F_LIMIT in the environment.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(Path(__file__).parent)]
CAP = int(os.environ.get("F_CAP", "4"))  # most warps of a kernel that polls places that fill
os.environ["PEERTILE_CACHE_DIR"] = os.environ.get("F_CACHE", "/tmp/f-cache") + f"-{CAP}{'e' * (os.environ.get('F_LAUNCH') in ('early', 'both'))}{os.environ.get('F_JUDGE', '')}{os.environ.get('F_EARLY', '')}"

import bench_cuda_collectives as bench  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

import peertile as pt  # noqa: E402
import peertile.backends.cuda.emit as emit  # noqa: E402
import peertile.backends.cuda.shape as shape_rules  # noqa: E402
import peertile.backends.cuda.target as target  # noqa: E402
import peertile.runtime.drivers.cuda_api as cuda_api  # noqa: E402
import peertile.runtime.drivers.cuda_launches as cuda_launches  # noqa: E402
import peertile.runtime.drivers.cuda_ops as cuda_ops  # noqa: E402
from peertile.library.cuda_collectives import GpuPlans, Shape, heap_bytes  # noqa: E402
from peertile.library.reductions import ReduceOp  # noqa: E402
from peertile.library.selection import Algorithm  # noqa: E402

target.FILLED_WARPS = CAP
if os.environ.get("F_EARLY") == "0":
    plain_may = emit._may_overlap
    emit._may_overlap = lambda kernel, arch: not kernel.waits and plain_may(kernel, arch)
if os.environ.get("F_JUDGE") == "0":
    shape_rules.plan_agreements = lambda e: None

# F_LAUNCH: "" as the package does; "plain": never cooperative; "early": plain, and a launch may begin while the one in
# front of it ends; "both": cooperative and early.
HOW = os.environ.get("F_LAUNCH", "")
if HOW:
    plain_launch, plain_op, plain_words = cuda_api.CudaApi.launch, cuda_ops.Launch.__init__, cuda_launches.CudaLaunch.__init__

    def launch_init(self: Any, *args: Any, **more: Any) -> None:
        plain_op(self, *args, **more)
        self.cooperative = False

    def words_init(self: Any, *args: Any, **more: Any) -> None:
        plain_words(self, *args, **more)
        self.words[cuda_launches.Plan.COOPERATIVE] = 0

    def launch(self: Any, f: Any, n: int, t: int, s: int, st: Any, p: int, cooperative: bool, early: bool = False) -> Any:
        if not (HOW == "both" and early and n > 1):
            return plain_launch(self, f, n, t, s, st, p, cooperative, early)
        attributes = (ctypes.c_uint32 * 36)(6, 0, 1)
        attributes[18], attributes[20] = 2, 1
        words = (ctypes.c_uint32 * 14)(n, 1, 1, t, 1, 1, s, 0)
        pointers = (ctypes.c_uint64 * 2).from_address(ctypes.addressof(words) + 32)
        pointers[0], pointers[1] = int(st), ctypes.addressof(attributes)
        words[12] = 2
        code = self._library.cuLaunchKernelEx(
            ctypes.c_void_p(ctypes.addressof(words)), ctypes.c_void_p(int(f)), ctypes.c_void_p(p), None
        )
        if code:
            raise RuntimeError(f"cuLaunchKernelEx: {code}")
        return None

    cuda_ops.Launch.__init__ = launch_init
    cuda_launches.CudaLaunch.__init__ = words_init
    cuda_api.CudaApi.launch = launch
    if HOW in ("early", "both"):
        emit._may_overlap = lambda kernel, arch: True


def ways(nbytes: int) -> dict[str, Shape]:
    """Names and shapes of the candidates of a size."""
    found: dict[str, Shape] = {}
    words = nbytes // 8
    for tile in (64, 128, 256, 512, 1024):
        tiles = -(-words // tile)
        if tile <= words and tiles <= bench.PROGRAMS and nbytes >= 32 * tile:
            found[f"filled {8 * tile} x {tiles}"] = Shape(Algorithm.FILLED, tiles, tile)
        elif tile >= 256 and tiles > bench.PROGRAMS:
            found[f"filled {8 * tile} x 264"] = Shape(Algorithm.FILLED, 264, tile)
    if not any(name.startswith("filled") for name in found):
        found[f"filled {nbytes} x 1"] = Shape(Algorithm.FILLED, 1, words)
    if nbytes <= 1 << 18:
        for tile in (64, 128, 256) if nbytes > 1024 else (256,):
            if -(-nbytes // 4 // tile) <= bench.PROGRAMS:
                found[f"flagged {4 * tile} x {-(-nbytes // 4 // tile)}"] = Shape(bench.FLAGGED, bench.PROGRAMS, tile)
    if nbytes >= 1 << 20:
        for size in (8192, 16384):
            found[f"pushed {size} x 264"] = Shape(bench.PUSHED, 264, size // 2)
    return found


def rank_main(group: pt.Group, sizes: list[int]) -> None:
    b = bench.Bench(group, True)
    begin = time.monotonic()
    limit = float(os.environ.get("F_LIMIT", "60"))
    warm = os.environ.get("F_WARM") == "1"
    with pt.SymmetricHeap(group, size_bytes=heap_bytes(group.size, bench.PROGRAMS) + (1 << 20)) as heap:
        plans = GpuPlans(heap, bench.PROGRAMS)
        number = 0
        for nbytes in sizes:
            if any(group.exchange(b"1" if time.monotonic() - begin > limit else b"", "late")):
                break
            count = nbytes // 2
            if warm:
                x, out = pt.zeros((count,), pt.bf16), pt.zeros((count,), pt.bf16)
                for shape in ways(nbytes).values():
                    number += 1
                    if number % group.size == group.rank:
                        plans.all_reduce(shape, x, out, ReduceOp.SUM).compiled()
                continue
            everybody = [b.random(count, r, nbytes) for r in range(group.size)]
            want = sum(e.astype(np.float32) for e in everybody).astype(ml_dtypes.bfloat16)
            x, out = pt.asarray(everybody[group.rank], pt.bf16), pt.empty((count,), pt.bf16)
            candidates = {}
            for name, shape in ways(nbytes).items():

                def make(shape: Shape = shape) -> Any:
                    pt.op.fill(out, float("nan")).sync()
                    run = b.ours(lambda: lambda: [plans.all_reduce(shape, x, out, ReduceOp.SUM)], bench.calls_of(nbytes))
                    bench.verify(b, out.numpy(), want)
                    return run

                candidates[name] = make
            found = b.compare(candidates, nbytes)
            if group.rank == 0:
                short = {k: v if isinstance(v, float) else str(v)[:160] for k, v in found.items()}
                bench.say(cap=CAP, launch=HOW, bytes=nbytes, us=short, s=round(time.monotonic() - begin, 1))
    group.barrier("end")
    group.close()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    sizes = [int(a) for a in sys.argv[1:]]
    pt.run(entry(sizes), ranks=2)


def entry(sizes: list[int]) -> Any:
    def go(group: pt.Group) -> None:
        rank_main(group, sizes)

    return go


if __name__ == "__main__":
    main()
