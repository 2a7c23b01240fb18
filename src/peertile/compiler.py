"""The whole way from a Python function to a binary. Loaded at the first compilation; runs nothing.

frontend (AST -> IR) -> passes, verified after each that changes something -> backend -> Binary. The cuda backend is
loaded when something is compiled for a GPU; triton when it compiles.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import FunctionType
from typing import Any

from peertile.backends.binary import Binary, Compiled
from peertile.backends.cpu.compile import compile_kernel
from peertile.backends.cpu.jit import stages as cpu_stages
from peertile.backends.cpu.target import host_target
from peertile.config import config
from peertile.frontend.build import build_kernel
from peertile.ir.core import Kernel
from peertile.ir.text import print_kernel
from peertile.ir.types import Type
from peertile.ir.verify import verify
from peertile.passes.marks import mark_moments
from peertile.passes.pipeline import run_pipeline

__all__ = ["compile_function"]


def compile_function(
    fn: FunctionType,
    name: str,
    unsafe: bool,
    types: dict[str, Type],
    consts: dict[str, Any],
    grid_rank: int = 1,
    groups: dict[str, int] | None = None,
    arch: str | None = None,
    descriptors: bool = True,
    marks: bool = False,
) -> Compiled:
    """Compile `fn` for these parameter types and constants. CompileError with the source line and a caret.

    For this processor, or for GPUs of `arch` ("sm_90"); `descriptors=False` keeps bulk copies out of GPU code.
    `marks`: for a timeline, as `passes/marks.py` says.
    """
    kernel = build_kernel(fn, types, consts, unsafe=unsafe, name=name, grid_rank=grid_rank, groups=groups)
    source = print_kernel(kernel)
    kernel = run_pipeline(kernel, verify=config().verify_passes)
    if marks:
        mark_moments(kernel)
        if config().verify_passes:
            verify(kernel, expanded=True, bounds_known=True)
    binary, texts = _cpu(kernel) if arch is None else _cuda(kernel, arch, descriptors)

    def stages() -> dict[str, str]:
        return {"ir": source, "lowered": print_kernel(kernel), **texts()}

    return Compiled.of(kernel, types, binary, stages)


_Made = tuple[Binary, Callable[[], dict[str, str]]]


def _cpu(kernel: Kernel) -> _Made:
    binary = compile_kernel(kernel)

    def texts() -> dict[str, str]:
        llvm = binary.text["llvm"]
        return {"llvm": llvm, **cpu_stages(llvm, host_target())}

    return binary, texts


def _cuda(kernel: Kernel, arch: str, descriptors: bool) -> _Made:
    backend: Any = importlib.import_module("peertile.backends.cuda.compile")
    target: Any = importlib.import_module("peertile.backends.cuda.target")
    options = target.CudaOptions(descriptors=descriptors)
    binary: Binary = backend.compile_kernel(kernel, arch, options=options, keep=True)

    def texts() -> dict[str, str]:
        # The cache keeps machine code; the stages are for people, and made again when somebody looks.
        whole = binary if "ptx" in binary.text else backend.compile_kernel(kernel, arch, options=options)
        return {**whole.text, "sass": backend.sass(binary)}

    return binary, texts
