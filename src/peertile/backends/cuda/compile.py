"""Entry points of the cuda backend: a kernel to Triton source, and to a binary. Needs triton, never a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from peertile.backends.cuda.binary import CudaBinary
from peertile.backends.cuda.divided import divided
from peertile.backends.cuda.emit import Emitted, emit_kernel
from peertile.backends.cuda.kept import compile_kept
from peertile.backends.cuda.layout import LaunchLayout
from peertile.backends.cuda.target import CudaOptions, capability
from peertile.backends.cuda.triton_compile import Compiled, PassFailure, compile_source, disassemble
from peertile.errors import CompileError
from peertile.ir.core import Kernel

__all__ = ["MAX_SHARED_BYTES", "compile_kernel", "lower_to_text", "sass"]

MAX_SHARED_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
"""Most dynamic shared memory of a program, by compute capability: what the driver refuses to go beyond."""

_OTHER_WARPS = (4, 1, 8, 2)


def lower_to_text(kernel: Kernel, arch: str = "sm_90", *, options: CudaOptions | None = None) -> str:
    """The Triton source of an expanded, verified kernel. Needs no triton."""
    return emit_kernel(kernel, arch, options).source


def compile_kernel(
    kernel: Kernel, arch: str = "sm_90", *, options: CudaOptions | None = None, keep: bool = False
) -> CudaBinary:
    """A binary of an expanded, verified kernel for GPUs of `arch`. With `keep` its machine code comes from the cache if
    it is there, and then its `text` is the source alone; else it is put there.

    CompileError, at the user's line, for what the architecture lacks, for what Triton or the assembler refuse, and
    for tiles that need more shared memory than a program can have.
    """
    options = options or CudaOptions()
    limit = MAX_SHARED_BYTES[capability(arch)]
    compiling: _Compiling = compile_kept if keep else compile_source
    emitted, compiled = _compiled(kernel, arch, options, compiling)
    # Stages are a hint: fewer of them where the tiles leave no room for more.
    while compiled.shared_bytes > limit and options.num_stages is None and emitted.num_stages > 1:
        emitted = emit_kernel(kernel, arch, replace(options, num_stages=emitted.num_stages - 1))
        compiled = compiling(emitted, arch, options)
    if compiled.shared_bytes > limit:
        raise CompileError(
            f"shared memory: the tiles of kernel {kernel.name} need {compiled.shared_bytes} bytes with "
            f"{emitted.num_stages} stages, and {arch} has {limit} for a program; use smaller tiles or fewer stages",
            kernel.loc,
        )
    return CudaBinary(
        target=f"cuda:{arch}",
        entry=compiled.entry,
        payload=compiled.cubin,
        scratch_bytes=compiled.scratch_bytes,
        waits=emitted.waits,
        places=emitted.places,
        n_slots=emitted.n_slots,
        text=compiled.stages,
        num_warps=compiled.num_warps,
        shared_bytes=compiled.shared_bytes,
        overlap=emitted.overlap,
        tells=emitted.waits,
        layout=_layout(emitted, compiled.scratch_bytes, compiled.scratch_align),
    )


_Compiling = Callable[[Emitted, str, CudaOptions], Compiled]


def _compiled(kernel: Kernel, arch: str, options: CudaOptions, compiling: _Compiling) -> tuple[Emitted, Compiled]:
    """At the number of warps that suits the kernel; where Triton's passes break down at it, at another one.

    Triton 3.6 loses an operation in some chains of sorts and folds ("operation destroyed but still has uses"), and has
    an assertion that fails for gathers from less than a warp's elements. Both depend on how many warps share a tile.
    """
    in_groups = divided(kernel, arch, options)
    if in_groups is not options:
        with contextlib.suppress(PassFailure):
            emitted = emit_kernel(kernel, arch, in_groups)
            return emitted, compiling(emitted, arch, in_groups)
    try:
        emitted = emit_kernel(kernel, arch, options)
        return emitted, compiling(emitted, arch, options)
    except PassFailure as error:
        if options.num_warps is not None:  # asked for
            raise
        first = error
    for warps in _OTHER_WARPS:
        if warps != emitted.num_warps:
            chosen = replace(options, num_warps=warps)
            with contextlib.suppress(PassFailure):
                other = emit_kernel(kernel, arch, chosen)
                return other, compiling(other, arch, chosen)
    raise first


def _layout(emitted: Emitted, scratch_bytes: int, scratch_align: int) -> LaunchLayout:
    return LaunchLayout(
        emitted.n_slots,
        tuple(n.slot for n in emitted.narrow if not n.is_stride),
        tuple(n.slot for n in emitted.narrow if n.is_stride),
        scratch_bytes,
        scratch_align,
    )


def sass(binary: CudaBinary) -> str:
    """The machine code of a binary as text."""
    return disassemble(binary.payload)
