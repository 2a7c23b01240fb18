"""Ways of small all-reduces on two GPUs: words a thread, programs, tiles, cooperative launches or not. Each is checked.

`f_sweep.py [--ranks 2] SIZE ...`, with F_WORDS (words a thread), F_LAUNCH, F_TILES in the environment.
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
WORDS = int(os.environ.get("F_WORDS", "1"))
os.environ["PEERTILE_CACHE_DIR"] = os.environ.get("F_CACHE", "/tmp/f-cache") + f"-{WORDS}{os.environ.get('F_LAUNCH', '')}"

import bench_cuda_collectives as bench  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

import peertile as pt  # noqa: E402
import peertile.backends.cuda.emit as emit  # noqa: E402
import peertile.runtime.drivers.cuda_api as cuda_api  # noqa: E402
import peertile.runtime.drivers.cuda_launches as cuda_launches  # noqa: E402
import peertile.runtime.drivers.cuda_ops as cuda_ops  # noqa: E402
from peertile.ir import ops  # noqa: E402
from peertile.ir.core import walk  # noqa: E402
from peertile.library.cuda_collectives import GpuPlans, Shape, heap_bytes  # noqa: E402
from peertile.library.reductions import ReduceOp  # noqa: E402
from peertile.library.selection import Algorithm  # noqa: E402

plain_tuned = emit.tuned


def tuned(kernel: Any, options: Any) -> tuple[int, int]:
    warps, stages = plain_tuned(kernel, options)
    if any(isinstance(op, ops.TileLoad | ops.TileStore) for op in walk(kernel.body)):
        warps = max(1, warps // WORDS)
    return warps, stages


emit.tuned = tuned

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


def rank_main(group: pt.Group, sizes: list[int]) -> None:
    b = bench.Bench(group, True)
    begin = time.monotonic()
    limit = float(os.environ.get("F_LIMIT", "60"))
    with pt.SymmetricHeap(group, size_bytes=heap_bytes(group.size, bench.PROGRAMS) + (1 << 20)) as heap:
        plans = GpuPlans(heap, bench.PROGRAMS)
        for nbytes in sizes:
            if any(group.exchange(b"1" if time.monotonic() - begin > limit else b"", "late")):
                break
            count = nbytes // 2
            everybody = [b.random(count, r, nbytes) for r in range(group.size)]
            want = sum(e.astype(np.float32) for e in everybody).astype(ml_dtypes.bfloat16)
            x, out = pt.asarray(everybody[group.rank], pt.bf16), pt.empty((count,), pt.bf16)
            words = nbytes // 4
            candidates = {}
            for tile in map(int, os.environ.get("F_TILES", "32 64 128 256 512 1024").split()):
                for programs in dict.fromkeys((-(-words // tile), 132, 264, 528)):
                    tiles = -(-words // tile)
                    if programs > min(tiles, bench.PROGRAMS) or tile > words or tiles > 4 * programs or nbytes > 1 << 20:
                        continue

                    def make(shape: Shape = Shape(bench.FLAGGED, programs, tile)) -> Any:
                        pt.op.fill(out, float("nan")).sync()
                        run = b.ours(lambda: lambda: [plans.all_reduce(shape, x, out, ReduceOp.SUM)], bench.calls_of(nbytes))
                        bench.verify(b, out.numpy(), want)
                        return run

                    candidates[f"{tile}x{programs}"] = make
            for tile in map(int, os.environ.get("F_FILLED", "32 64 128 256 512 1024").split()):
                tiles = -(-words // 2 // tile)
                for programs in dict.fromkeys((tiles, 132, 264, 528)):
                    if programs > min(tiles, bench.PROGRAMS) or tile > words // 2 or tiles > 64 * programs:
                        continue

                    def make_filled(shape: Shape = Shape(Algorithm.FILLED, programs, tile)) -> Any:
                        pt.op.fill(out, float("nan")).sync()
                        run = b.ours(lambda: lambda: [plans.all_reduce(shape, x, out, ReduceOp.SUM)], bench.calls_of(nbytes))
                        bench.verify(b, out.numpy(), want)
                        return run

                    candidates[f"filled {tile}x{programs}"] = make_filled
            found = b.compare(candidates, nbytes)
            if group.rank == 0:
                bench.say(words_a_thread=WORDS, launch=HOW, bytes=nbytes, us=found,
                          s=round(time.monotonic() - begin, 1))
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
