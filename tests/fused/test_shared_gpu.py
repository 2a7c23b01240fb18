"""Ranks that share a GPU: each loads its kernels before any of them runs one that waits for the others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = {
    "product + all-reduce": ["gemm_reduce_flagged"],
    "product + reduce-scatter": ["gemm_scatter"],
    "causal ring attention": ["ring_attend"],
    "experts": ["dispatch", "combine"],
}


@pytest.mark.needs("triton")
@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", KERNELS)
def test_all_ranks_of_a_gpu_have_loaded_a_kernel_before_one_runs_it(name, tmp_path):
    """Their shapes differ, and so do their kernels: a load that came later would wait for a kernel that waits for it."""
    env = {
        **os.environ, "PEERTILE_DEVICE": "cuda", "PEERTILE_REHEARSE": "sm_90", "PEERTILE_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE)]),
    }  # fmt: skip
    command = [sys.executable, str(HERE / "shared_gpu.py"), name, "3"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = [f"{what} {kernel}" for kernel in KERNELS[name] for what in ("load", "run") for _ in range(3)]
    assert done.stdout.splitlines() == wanted
