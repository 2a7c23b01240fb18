"""bench_cuda_collectives.py with the bound of warps that f_run.py chose."""

import f_sweep  # noqa: F401 - patches
import bench_cuda_collectives as bench
import sys

if __name__ == "__main__":
    bench.main(sys.argv[1:])
