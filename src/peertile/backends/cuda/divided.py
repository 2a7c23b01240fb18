"""Which loops are divided among groups of warps without being asked for it. Compiles nothing and does not load Triton.

A loop over two products, of which the second takes what came of the first, as in attention, has nothing to multiply
while its weights are formed. Divided, one group of warps loads and two have half of the rows each, so that one forms
weights while the other multiplies; put in order (`ahead.py`), each does both at once. Causal attention over 16384
tokens (16 heads of 128, one H200) takes 1,693 us so, where cuDNN takes 1,894 in the same run; in another run it took
1,746 us, 2,270 as Triton leaves the divided loop, and cuDNN 1,976. How Triton divides loops is young, and one product
that it divided came out wrong, so nothing is divided but what was tried: this shape, by this version of it.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from peertile.backends.cuda.target import CudaOptions, capability
from peertile.ir import ops
from peertile.ir.core import Kernel, walk
from peertile.ir.types import TileType

__all__ = ["can_divide", "divided"]

BY: Final = (3, 6)
"""The version of Triton that was found to divide them right."""
ARCH: Final = 90
TILE: Final = (128, 128)
"""Of both products' results."""
BUFFERS: Final = 2
WARPS: Final = 4
"""Of a group."""


@functools.cache
def can_divide(arch: str | None) -> bool:
    """Whether such a loop is divided for GPUs of `arch`, by the triton that is installed."""
    if arch is None or capability(arch) != ARCH:
        return False
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return False
    found = re.search(r"^__version__ = ['\"](\d+)\.(\d+)", Path(spec.origin).read_text(), re.MULTILINE)
    return found is not None and (int(found[1]), int(found[2])) == BY


def divided(kernel: Kernel, arch: str, options: CudaOptions) -> CudaOptions:
    """The options that divide the kernel's loop, where it is one of those that were tried and nobody said how many
    warps it has; else `options`."""
    if options.specialize is not None or options.num_warps is not None or not can_divide(arch) or kernel.waits:
        return options
    body = list(walk(kernel.body))
    products = [op for op in body if isinstance(op, ops.Mma)]
    if len(products) != 2 or any(isinstance(op, ops.Check) for op in body):
        return options
    loops = [op for op in body if isinstance(op, ops.For) and any(p.parent in op.blocks for p in products)]
    if len(loops) != 1 or loops[0].attrs["stages"] != BUFFERS or any(p.parent not in loops[0].blocks for p in products):
        return options
    return replace(options, num_warps=WARPS, specialize=True) if all(map(_was_tried, products)) else options


def _was_tried(product: ops.Mma) -> bool:
    t, factor = product.result.type, product.operands[0].type
    return isinstance(t, TileType) and isinstance(factor, TileType) and t.shape == TILE and factor.dtype.bits == 16
