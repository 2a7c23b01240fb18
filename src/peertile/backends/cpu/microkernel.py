"""Matrix multiply of static extents as LLVM IR text: register-blocked kernels, packing, cache blocking.

(API first; bodies follow.)
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MatmulPlan", "plan_matmul"]


@dataclass(frozen=True, slots=True)
class MatmulPlan:
    """How C[m, n] += A[m, k] @ B[k, n] is done, and the text of its functions (all `internal noinline`).

    The simple way: `call void @RUN(ptr C, i64 ldc, ptr A, i64 lda, ptr B, i64 ldb, ptr scratch)` with
    `scratch_bytes` (may be 0: pass null) of 64-byte aligned scratch does everything.

    The hoisting way, when A or B is used by several matmuls (same plan) or can be packed straight from its view:
        if packs_b:  call void @PACK_B(ptr dst, ptr B, i64 ldb)        dst: pack_b_bytes, 64-byte aligned
        if packs_a:  call void @PACK_A(ptr dst, ptr A, i64 lda)        dst: pack_a_bytes, 64-byte aligned
        call void @MATMUL(ptr C, i64 ldc, ptr A, i64 lda, ptr B, i64 ldb)
    where A is the packed A if packs_a (lda is ignored) and B the packed B if packs_b (ldb is ignored).

    A, B, C are row-major with unit column stride, row strides in elements, aligned to their element. C has the
    accumulator dtype (f32, f64 or i32 as in ir.ops.MMA_TYPES) and overlaps neither A, B nor the scratch.
    Names carry dtype and extents: equal plans have equal names and text, so emit one text per name.
    """

    dtype: str
    m: int
    n: int
    k: int
    text: str
    run_name: str
    matmul_name: str
    pack_a_name: str | None
    pack_b_name: str | None
    pack_a_bytes: int
    pack_b_bytes: int

    @property
    def packs_a(self) -> bool:
        return self.pack_a_name is not None

    @property
    def packs_b(self) -> bool:
        return self.pack_b_name is not None

    @property
    def scratch_bytes(self) -> int:
        """What RUN needs."""
        return self.pack_a_bytes + self.pack_b_bytes


def plan_matmul(dtype: str, m: int, n: int, k: int, features: frozenset[str], *, b_transposed: bool = False) -> MatmulPlan:
    """The plan for operands of `dtype` ("f32", "f64", "f16", "bf16", "f8e4m3", "f8e5m2", "i8", "u8") and
    power-of-two extents >= 1. With `b_transposed` B is given as its transpose, row-major [n, k] with row stride
    ldb (so that q @ k.T needs no transposed copy)."""
    raise NotImplementedError
