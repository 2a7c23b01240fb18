"""`peertile inspect FILE:KERNEL`: what a kernel was compiled to, stage by stage."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from peertile.inspection import Signature, describe, load_kernel

__all__ = ["Stage", "inspect"]


class Stage(Enum):
    """What can be shown."""

    SOURCE = "source"
    IR = "ir"
    LOWERED = "lowered"
    LLVM = "llvm"
    ASM = "asm"


def inspect(
    target: Annotated[str, typer.Argument(help="FILE.py:KERNEL")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="One NAME=VALUE per parameter: x=f32[1000], z=f32[1000]/256, B=64, n=3, box=bf16[4096]."),
    ] = None,
    stage: Annotated[Stage, typer.Option(help="What to show.")] = Stage.IR,
    as_json: Annotated[bool, typer.Option("--json", help="Print every stage and the bounds counts as JSON.")] = False,
) -> None:
    """Show a kernel's tile IR, LLVM IR or assembly, and how its bounds are known."""
    kernel = load_kernel(target)
    result = describe(kernel, Signature.parse(kernel, arguments or []))
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
        return
    console = Console()
    console.print(f"[bold]{kernel.name}[/bold]  bounds: {result.bounds}")
    text = result.stages[stage.value]
    if console.is_terminal:
        console.print(Syntax(text, "python" if stage is Stage.SOURCE else "llvm", word_wrap=False))
    else:
        print(text)
