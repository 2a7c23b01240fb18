"""What the simulator makes of a kernel: the way of a compilation up to the passes, then a translation to Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, cast

from peertile.backends.binary import Binary, Compiled, Place
from peertile.frontend.build import build_kernel
from peertile.ir.core import Kernel
from peertile.ir.text import print_kernel
from peertile.ir.types import Type
from peertile.ir.verify import OrderFault
from peertile.passes.pipeline import run_pipeline
from peertile.sim.translate import Translation, translate

__all__ = ["SimBinary", "compile_function"]


@dataclass(frozen=True, slots=True, eq=False)
class SimBinary:
    """A kernel for the sim driver. `types` are those of its parameters; None: it takes the argument block as words.

    `order_faults` are the rules of memory order that it breaks: recorded, so that the race itself can be shown."""

    entry: str
    translation: Translation
    waits: bool
    places: tuple[Place, ...] = ()
    types: tuple[Type, ...] | None = None
    order_faults: tuple[OrderFault, ...] = ()
    slots: tuple[int, ...] = ()
    """Parameters whose slots are program indices: their launches have one grid on all ranks."""
    target: str = "sim"
    payload: bytes = b""
    scratch_bytes: int = 0
    n_slots: int = 0
    text: dict[str, str] = field(default_factory=dict)


def compile_function(
    fn: FunctionType,
    name: str,
    unsafe: bool,
    types: dict[str, Type],
    consts: dict[str, Any],
    grid_rank: int = 1,
    groups: dict[str, int] | None = None,
    change: Callable[[Kernel], Kernel] | None = None,
) -> Compiled:
    """As `peertile.compiler.compile_function`, for the simulator. Rules of memory order do not refuse a kernel.

    `change` gets the kernel behind the passes and gives the one that runs: how mutants of it are made."""
    kernel = build_kernel(fn, types, consts, unsafe=unsafe, name=name, grid_rank=grid_rank, groups=groups)
    source = print_kernel(kernel)
    broken: list[OrderFault] = []
    kernel = run_pipeline(kernel, broken=broken)
    return compiled(kernel if change is None else change(kernel), types, source, tuple(broken))


def compiled(kernel: Kernel, types: dict[str, Type], source: str = "", faults: tuple[OrderFault, ...] = ()) -> Compiled:
    """A kernel that has been through the passes, with what its launches need."""
    translation = translate(kernel)
    index = {parameter: k for k, parameter in enumerate(types)}
    slots = tuple(sorted(index[p] for p in kernel.facts.get("program_slots", ())))
    parameters = tuple(v.type for v in kernel.params)
    binary = SimBinary(kernel.name, translation, kernel.waits, translation.places, parameters, faults, slots)

    def stages() -> dict[str, str]:
        return {"ir": source, "lowered": print_kernel(kernel), "python": translation.text}

    return Compiled.of(kernel, types, cast(Binary, binary), stages)
