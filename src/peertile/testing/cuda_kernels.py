"""The kernels of the driver conformance suite for GPUs, in CUDA C, compiled by nvcc: no Triton and no compiler of ours.

They keep the launch layout of `backends/cuda/layout.py` by hand, so that a driver is tested alone, and so that a
change of the layout on one side alone fails here. nvcc is needed, a GPU is not.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from peertile.backends.cuda.binary import CudaBinary
from peertile.backends.cuda.layout import LaunchLayout
from peertile.errors import UnsupportedError
from peertile.testing.driver_suite import SuiteKernels

__all__ = ["EXTRA", "LONG_SLOTS", "SOURCE", "compile_cubin", "cuda_kernels", "extra_kernel", "suite_kernels"]

LONG_SLOTS: Final = 450

SOURCE: Final = """
typedef long long i64;
typedef unsigned long long u64;

#define HIDDEN i64 grid0, i64 grid1, i64 grid2, int *abort_word, i64 *fault, u64 timeout, u64 *words, u64 *print, \\
    char *scratch, char *profile
#define PROGRAM (i64)blockIdx.x
#define FIRST (threadIdx.x == 0)

__device__ void record(i64 *fault, i64 kind, i64 place, i64 got, i64 limit, i64 address, i64 slot) {
    if (atomicCAS_system((u64 *)fault, 0ull, 1ull) != 0) return;
    fault[1] = kind; fault[2] = PROGRAM; fault[3] = place; fault[4] = got; fault[5] = limit; fault[6] = address;
    fault[7] = slot;
    __threadfence_system();
    *(volatile i64 *)fault = 2;
}

__device__ u64 now() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
__device__ u64 load64(const void *p) {
    u64 v; asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v;
}
__device__ unsigned load32(const void *p) {
    unsigned v; asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
__device__ void store64(void *p, u64 v) {
    asm volatile("st.release.sys.global.b64 [%0], %1;" :: "l"(p), "l"(v) : "memory");
}

// Whether a round of polling has to end: aborted, another program faulted, or the bound is reached.
__device__ bool leave(u64 begin, int *abort_word, i64 *fault, u64 timeout, i64 place, i64 seen, i64 expected,
                      i64 address, i64 slot) {
    if (load32(abort_word)) { record(fault, 5, place, seen, expected, address, slot); return true; }
    if (load64(fault)) return true;
    if (now() - begin < timeout) return false;
    record(fault, 4, place, seen, expected, address, slot);
    return true;
}

__device__ bool wait64(u64 *word, i64 expected, int *abort_word, i64 *fault, u64 timeout, i64 place, i64 slot,
                       u64 *value) {
    for (u64 begin = now();;) {
        *value = load64(word);
        if ((i64)(*value - (u64)expected) >= 0) return true;
        if (leave(begin, abort_word, fault, timeout, place, *value, expected, (i64)word, slot)) return false;
    }
}

extern "C" __global__ void suite_add(i64 *X, i64 *Y, i64 *Z, HIDDEN) {
    if (FIRST) Z[PROGRAM] = X[PROGRAM] + Y[PROGRAM];
}

extern "C" __global__ void suite_fail(u64 *Count, i64 which, HIDDEN) {
    if (!FIRST) return;
    atomicAdd(Count, 1ull);
    if (PROGRAM == which) record(fault, 1, 4, 70, 64, 0, 0);
}

extern "C" __global__ void suite_work(u64 *Out, i64 count, HIDDEN) {
    if (!FIRST) return;
    u64 h = PROGRAM;
    for (i64 i = 0; i < count; i++) h = (h * 6364136223846793005ull + 1442695040888963407ull) ^ (u64)i;
    Out[PROGRAM] = h;
}

extern "C" __global__ void suite_scratch(i64 *Out, HIDDEN) {
    if (!FIRST) return;
    volatile i64 *mine = (volatile i64 *)(scratch + 4096 * PROGRAM);
    mine[0] = PROGRAM;
    mine[511] = PROGRAM;
    Out[PROGRAM] = mine[0] + mine[511] + ((i64)mine & 63);
}

extern "C" __global__ void suite_hello(HIDDEN) {
    if (!FIRST || !print) return;
    u64 at = atomicAdd(print + 1, 24ull);
    if (at + 24 > print[0]) return;
    char *r = (char *)(print + 2) + at;
    *(i64 *)r = PROGRAM;
    *(int *)(r + 8) = 3;
    *(int *)(r + 12) = 5;
    const char *text = "hello";
    for (int k = 0; k < 5; k++) r[16 + k] = text[k];
}

extern "C" __global__ void suite_barrier(u64 *Out, HIDDEN) {
    if (!FIRST) return;
    i64 n = grid0 * grid1 * grid2;
    u64 seen;
    __threadfence();
    atomicAdd(words, 1ull);
    if (!wait64(words, n, abort_word, fault, timeout, 0, 0, &seen)) return;
    atomicAdd(words + 1, 1ull);
    if (!wait64(words + 1, n, abort_word, fault, timeout, 0, 0, &seen)) return;
    Out[PROGRAM] = load64(words);
}

extern "C" __global__ void suite_await(u64 *Word, i64 expected, u64 *Out, HIDDEN) {
    u64 seen;
    if (FIRST && wait64(Word, expected, abort_word, fault, timeout, 2, 9, &seen)) Out[PROGRAM] = seen;
}

extern "C" __global__ void suite_await32(unsigned *Word, i64 expected, u64 *Out, HIDDEN) {
    if (!FIRST) return;
    for (u64 begin = now();;) {
        unsigned v = load32(Word);
        if ((int)(v - (unsigned)expected) >= 0) { Out[PROGRAM] = v; return; }
        if (leave(begin, abort_word, fault, timeout, 2, v, expected, (i64)Word, 9)) return;
    }
}

extern "C" __global__ void suite_ping(u64 *Mine, u64 *Theirs, i64 rounds, HIDDEN) {
    u64 seen;
    if (!FIRST) return;
    for (i64 k = 1; k <= rounds; k++) {
        store64(Theirs, k);
        if (!wait64(Mine, k, abort_word, fault, timeout, 0, 0, &seen)) return;
    }
}

extern "C" __global__ void suite_suspend(u64 *Word, u64 *Out, HIDDEN) {
    if (!FIRST) return;
    for (u64 begin = now();;) {
        u64 v = load64(Word);
        if (v) { Out[PROGRAM] = v; return; }
        if (leave(begin, abort_word, fault, timeout, 0, 0, 0, (i64)Word, 0)) return;
    }
}

// Beyond the suite.

extern "C" __global__ void extra_nothing(HIDDEN) {}

struct Slots { i64 value[450]; };

extern "C" __global__ void extra_long(const __grid_constant__ Slots slots, HIDDEN) {
    i64 sum = 0;
    if (!FIRST) return;
    for (int k = 1; k < 450; k++) sum += k * slots.value[k];
    ((i64 *)slots.value[0])[PROGRAM] = sum;
}

extern "C" __global__ void extra_illegal(i64 *Nowhere, HIDDEN) { Nowhere[PROGRAM] = 1; }

extern "C" __global__ void extra_shared(i64 *Out, HIDDEN) {
    extern __shared__ i64 tile[];
    i64 last = 200 * 1024 / 8 - 1;
    tile[last - threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (FIRST) Out[PROGRAM] = tile[last - 31];
}
"""

EXTRA: Final = {
    "extra_nothing": (0, 0),
    "extra_long": (LONG_SLOTS, 0),
    "extra_illegal": (1, 0),
    "extra_shared": (1, 200 * 1024),
}
"""Kernels beside the suite: (slots, bytes of dynamic shared memory)."""


@functools.cache
def compile_cubin(arch: str = "sm_90") -> bytes:
    """All kernels as one cubin; about 2 s. UnsupportedError without nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise UnsupportedError("nvcc: expected on the PATH, found none; install the CUDA toolkit")
    with tempfile.TemporaryDirectory(prefix="peertile-nvcc-") as folder:
        source, cubin = Path(folder) / "suite.cu", Path(folder) / "suite.cubin"
        source.write_text(SOURCE)
        command = [nvcc, "-cubin", f"-arch={arch}", "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise UnsupportedError(f"nvcc: failed on the suite's kernels:\n{done.stderr}")
        return cubin.read_bytes()


def _binary(
    payload: bytes, target: str, entry: str, n_slots: int, *, waits: bool = False, scratch: int = 0, shared: int = 0
) -> CudaBinary:
    return CudaBinary(
        target, entry, payload, scratch, waits, (), n_slots, {}, 1, shared, LaunchLayout(n_slots, (), (), scratch, 256)
    )


def suite_kernels(payload: bytes, target: str = "cuda") -> SuiteKernels:
    """The suite's kernels, all from one payload that has their entry points."""
    return SuiteKernels(
        add=_binary(payload, target, "suite_add", 3),
        fail=_binary(payload, target, "suite_fail", 2),
        work=_binary(payload, target, "suite_work", 2),
        scratch=_binary(payload, target, "suite_scratch", 1, scratch=4096),
        hello=_binary(payload, target, "suite_hello", 0),
        barrier=_binary(payload, target, "suite_barrier", 1, waits=True),
        await_word=_binary(payload, target, "suite_await", 3, waits=True),
        await_word32=_binary(payload, target, "suite_await32", 3, waits=True),
        ping=_binary(payload, target, "suite_ping", 3, waits=True),
        suspend=_binary(payload, target, "suite_suspend", 2, waits=True),
    )


def cuda_kernels(arch: str = "sm_90") -> SuiteKernels:
    """Compile all of them for `arch`."""
    return suite_kernels(compile_cubin(arch), f"cuda:{arch}")


def extra_kernel(payload: bytes, entry: str, target: str = "cuda") -> CudaBinary:
    """One of EXTRA."""
    slots, shared = EXTRA[entry]
    return _binary(payload, target, entry, slots, shared=shared)
