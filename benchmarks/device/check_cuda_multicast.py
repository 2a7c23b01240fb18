"""Multicast operations on GPUs without a multicast object: the software path, its values and its speed.

`PYTHONPATH=src python3 benchmarks/device/check_cuda_multicast.py [tests] [example] [figures]`

The package's own tests of multicast tensors on two GPUs, the handshake with its procedure, and an all-reduce in one
address against NCCL, captured in graphs, on fresh random bf16 that is checked against the sum first. Every step is a
process of its own with a bound. No multicast object is made: the vetoes are set, and the opt-in is not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("PEERTILE_DEVICE", "cuda")
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ.pop("PEERTILE_MULTICAST", None)

KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
PYTEST = [sys.executable, "-m", "pytest", "--device", "cuda", "-q", "-p", "no:cacheprovider"]
RUN = [sys.executable, "-m", "peertile", "run", "--ranks", "2", "--device", "cuda"]
STEPS = {
    "tests": ([*PYTEST, "tests/multicast"], 150),
    "example": ([*RUN, "examples/multicast_handshake.py"], 60),
    "figures": ([sys.executable, __file__, "--figures"], 90),
}


def figures(group: Any) -> None:
    """Every rank: the software all-reduce and NCCL's, taking turns."""
    import ml_dtypes
    import numpy as np
    from bench_cuda_collectives import Bench, calls_of, verify

    import peertile as pt
    from peertile.library.multimem import MulticastCollectives

    b = Bench(group, plain=False)
    with pt.SymmetricHeap(group, size_bytes=max(SIZES) + 64 * MIB) as heap:
        for nbytes in SIZES:
            count = nbytes // 2
            everybody = [b.random(count, r, nbytes) for r in range(group.size)]
            want = sum(e.astype(np.float32) for e in everybody).astype(ml_dtypes.bfloat16)
            x = heap.multicast((count,), pt.bf16)
            c = MulticastCollectives(heap, programs=min(132, max(1, nbytes // (4 * KIB))))
            x.copy_from(everybody[group.rank])
            group.barrier("filled")
            c.all_reduce(x).sync_on(b.stream)
            verify(b, x.numpy(), want)
            torch = b.torch
            values = torch.from_numpy(everybody[group.rank].astype(np.float32)).cuda().bfloat16()
            calls = calls_of(nbytes)
            candidates = {
                "peertile": lambda: b.ours(lambda: lambda: [c.all_reduce(x)], calls),  # noqa: B023
                "nccl": lambda: b.theirs(lambda: torch.distributed.all_reduce(values), calls),  # noqa: B023
            }
            found = b.compare(candidates, nbytes)
            if group.rank == 0:
                print(json.dumps({"all_reduce": nbytes, "us": found, "path": str(heap.multicast_path)}), flush=True)
            heap.free(x)
    b.torch.cuda.synchronize()
    group.barrier("end")
    group.close()
    sys.stdout.flush()
    os._exit(0)  # not through the finalisers of two libraries on one GPU


def main(names: list[str]) -> None:
    status = 0
    for name in names or STEPS:
        command, bound = STEPS[name]
        begin = time.monotonic()
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=bound, check=False)
            code: int | str = done.returncode
        except subprocess.TimeoutExpired:
            code = "no end within the bound"
        print(json.dumps({"step": name, "status": code, "s": round(time.monotonic() - begin, 1)}), flush=True)
        status |= code != 0
    sys.exit(status)


if __name__ == "__main__":
    if "--figures" in sys.argv:
        import peertile

        os.environ.setdefault("PEERTILE_BENCH_PORT", "29763")
        peertile.run(figures, ranks=2)
    else:
        main(sys.argv[1:])
