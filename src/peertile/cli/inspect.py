"""`peertile inspect FILE:KERNEL`: what a kernel was compiled to, stage by stage."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from peertile.errors import ArgumentError
from peertile.inspection import Signature, describe, load_kernel

__all__ = ["Stage", "inspect"]


class Stage(Enum):
    """What can be shown: of every target the first three, of cpu llvm and asm, of GPUs the rest."""

    SOURCE = "source"
    IR = "ir"
    LOWERED = "lowered"
    LLVM = "llvm"
    ASM = "asm"
    TRITON = "triton"
    TTIR = "ttir"
    TTGIR = "ttgir"
    LLIR = "llir"
    PTX = "ptx"
    SASS = "sass"


def inspect(
    target: Annotated[str, typer.Argument(help="FILE.py:KERNEL")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="One NAME=VALUE per parameter: x=f32[1000], z=f32[1000]/256, B=64, n=3, box=bf16[4096]."),
    ] = None,
    stage: Annotated[Stage, typer.Option(help="What to show.")] = Stage.IR,
    arch: Annotated[
        str | None, typer.Option(help="Compile for GPUs of this architecture, such as sm_90; no GPU is needed.")
    ] = None,
    cubin: Annotated[Path | None, typer.Option(help="With --arch: write the binary to this file too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every stage and the bounds counts as JSON.")] = False,
) -> None:
    """Show a kernel's tile IR, LLVM IR, assembly, Triton source, PTX or SASS, and how its bounds are known."""
    kernel = load_kernel(target)
    result = describe(kernel, Signature.parse(kernel, arguments or []), arch)
    if cubin is not None:
        if arch is None:
            raise ArgumentError("--cubin: expected an architecture with it, got none; add --arch sm_90")
        cubin.write_bytes(result.payload)
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
        return
    console = Console()
    console.print(kernel.name, style="bold", end="  ", markup=False)
    console.print(f"bounds: {result.bounds}", markup=False)
    text = result.stages.get(stage.value)
    if text is None:
        where = "cpu" if arch is None else arch
        raise ArgumentError(f"--stage: expected one of {', '.join(result.stages)} for {where}, got {stage.value}")
    if console.is_terminal:
        python = stage in (Stage.SOURCE, Stage.TRITON)
        console.print(Syntax(text, "python" if python else "llvm", word_wrap=False))
    else:
        print(text)
