"""docs/reference/mma.md: which matrix products each processor has, and how.

python tools/products.py --write | --check
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.pages import Page, main

from peertile.backends.cpu.products import Support, product
from peertile.backends.cuda.products import ARCHES, gpu_product
from peertile.dtypes import ALL_DTYPES, DType, f32
from peertile.ir.ops import MMA_TYPES, Precision

LEVELS: Final[dict[str, frozenset[str]]] = {
    "x86-64, AVX2": frozenset({"avx2", "fma", "f16c"}),
    "x86-64, AVX-512": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni"}),
    "x86-64, AVX-512 BF16": frozenset(
        {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "avx512bf16"}
    ),
    "aarch64": frozenset({"neon"}),
}
"""Processors by the features that decide."""


def _row(d: DType, precision: Precision) -> str:
    name = d.name if precision is Precision.IEEE else f"{d.name}, {precision.value}"
    accumulator = MMA_TYPES.get(d.name, ("–",))[0]
    cells = []
    for features in LEVELS.values():
        found = product(d, precision, features)
        cells.append(f"{found.support.value}: {found.how}" if found.support is not Support.REFUSED else "refused")
    return f"| {name} | {accumulator} | {' | '.join(cells)} |"


def _gpu_row(d: DType, precision: Precision) -> str:
    name = d.name if precision is Precision.IEEE else f"{d.name}, {precision.value}"
    cells, batched = [], []
    for arch in ARCHES:
        found = gpu_product(d, precision, arch)
        if found is None:
            cells.append("refused")
            continue
        cells.append(f"{'native' if found.is_native else 'emulated'}: {found.how}")
        batched.append("refused" if found.batched is None else found.batched)
    return f"| {name} | {' | '.join(cells)} | {', '.join(dict.fromkeys(batched))} |"


def render() -> str:
    """The page."""
    rows = [_row(d, Precision.IEEE) for d in ALL_DTYPES if d.name in MMA_TYPES]
    rows.insert([d.name for d in ALL_DTYPES if d.name in MMA_TYPES].index("f32") + 1, _row(f32, Precision.TF32))
    refused = ", ".join(f"`{d.name}`" for d in ALL_DTYPES if d.name not in MMA_TYPES)
    return "\n".join(
        [
            "# Matrix products by processor",
            "",
            "What `T.mma` does with each type of its factors; the sum is of the type in the second column.",
            "Native: the processor has multiply-adds of the type.",
            "Emulated: the factors are converted, exactly, to a type that it has them of.",
            "Two factors and a sum may have one leading batch axis, whatever the type.",
            "",
            f"| factors | sum | {' | '.join(LEVELS)} |",
            f"| --- | --- |{' --- |' * len(LEVELS)}",
            *rows,
            "",
            f"Factors of {refused} are refused by name, and so is `T.Precision.TF32` of anything but `f32`.",
            "Each entry is run, or seen to be refused, by `tests/kernel/test_mma.py`.",
            "",
            "## GPUs",
            "",
            "With Triton 3.6, by architecture; the last column is what a product with a batch axis uses.",
            "A result of fewer than 64 rows takes `mma.sync` on every architecture.",
            "",
            f"| factors | {' | '.join(ARCHES)} | batched |",
            f"| --- |{' --- |' * len(ARCHES)} --- |",
            *[_gpu_row(d, Precision.IEEE) for d in ALL_DTYPES if d.name in MMA_TYPES],
            _gpu_row(f32, Precision.TF32),
            "",
            "Each entry is compiled, and its instruction found, by `tests/backends/cuda/test_products.py`.",
        ]
    )


PAGES = (Page("docs/reference/mma.md", render),)

if __name__ == "__main__":
    main(PAGES)
