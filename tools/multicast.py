"""docs/reference/multicast.md: every element type, operation and reduction of multicast, with its instruction.

Made from the tables that the compiler refuses by and the functions that write its PTX, so that the page cannot say
anything else than they do; tests/backends/cuda/test_multicast.py holds both to what the assembler takes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.pages import Page, main

from peertile import dtypes
from peertile.backends.cuda import multimem
from peertile.ir.ops import BULK_REDUCTIONS, LOAD_REDUCTIONS, MULTICAST_DTYPES, REDUCTIONS
from peertile.memory_model import Order, Rmw, Scope

RUN = 256
"""Bytes of a row of the tile that the instructions are shown for."""


def instruction(function: tuple[str, str]) -> str:
    """The multimem instruction in the text of a function, without its order."""
    found = re.search(r"multimem[\w.:]*", function[1])
    assert found is not None
    return found[0].replace(".relaxed.sys", "")


def word(rmw: Rmw) -> str:
    """The reduction as it is written in a kernel."""
    return "T.add" if rmw in (Rmw.ADD, Rmw.ADDF) else f"T.Rmw.{rmw.name}"


def rows(title: str, table: dict[Rmw, frozenset[str]], make: object) -> list[str]:
    lines = [f"## {title}", "", "| element type | reduction | PTX |", "| --- | --- | --- |"]
    for name in MULTICAST_DTYPES:
        dtype = getattr(dtypes, name)
        for rmw in Rmw:
            if name in table.get(rmw, ()):
                lines.append(f"| {name} | `{word(rmw)}` | `{instruction(make(rmw, dtype))}` |")  # type: ignore[operator]
        missing = [word(r) for r in Rmw if r not in (Rmw.ADDF, Rmw.XCHG) and not _has(table, r, name, dtype)]
        if missing:
            lines.append(f"| {name} | refused: {', '.join(f'`{m}`' for m in missing)} | |")
    return [*lines, ""]


def _has(table: dict[Rmw, frozenset[str]], rmw: Rmw, name: str, dtype: dtypes.DType) -> bool:
    kind = Rmw.ADDF if dtype.is_float and rmw is Rmw.ADD else rmw
    return name in table.get(kind, ())


def page() -> str:
    order, scope = Order.RELAXED, Scope.SYSTEM

    def load(rmw: Rmw, dtype: dtypes.DType) -> tuple[str, str]:
        return multimem.load_reduce(rmw, dtype, order, scope, multimem.width(dtype, RUN))

    def update(rmw: Rmw, dtype: dtypes.DType) -> tuple[str, str]:
        return multimem.reduce(rmw, dtype, order, scope, multimem.width(dtype, RUN))

    def bulk(rmw: Rmw, dtype: dtypes.DType) -> tuple[str, str]:
        return multimem.bulk_copy(rmw, dtype, RUN)

    lines = [
        "# Multicast operations",
        "",
        "What each operation of `T.Multicast` takes, and the instruction that it becomes where the fabric has a "
        "mapping of the tensor (sm_90 and newer).",
        "On cpu, on the simulated machine and on GPUs without such a mapping it is a loop over the ranks' parts, with "
        "the same results and the same refusals.",
        "`u32` is `i32` bits: `T.Rmw.MIN` and `T.Rmw.MAX` compare it as signed; `u64` wraps and shares its bits with "
        "`i64`.",
        "Orders: load-reduce weak, relaxed, acquire; reduce relaxed, release; store weak, relaxed, release; each at "
        "system scope, but for weak, which has none.",
        "",
        *rows("Load-reduce", LOAD_REDUCTIONS, load),
        *rows("Reduce into every member", REDUCTIONS, update),
        "## Store",
        "",
        "| element type | PTX |",
        "| --- | --- |",
    ]
    for name in MULTICAST_DTYPES:
        dtype = getattr(dtypes, name)
        text = instruction(multimem.store(dtype, order, scope, multimem.width(dtype, RUN)))
        lines.append(f"| {name} | `{text}` |")
    lines += [
        "",
        "## Signals",
        "",
        "Release at system scope, of i32, u32, i64 and u64.",
        "",
        "| element type | store | add |",
        "| --- | --- | --- |",
    ]
    for name in ("i32", "u32", "i64", "u64"):
        dtype = getattr(dtypes, name)
        store, add = (instruction(multimem.signal(dtype, k)) for k in (False, True))
        lines.append(f"| {name} | `{store}` | `{add}` |")
    lines += [
        "",
        "## Bulk copies",
        "",
        f"PTX {multimem.BULK_PTX // 10}.{multimem.BULK_PTX % 10}: the assembler of CUDA 13.1 and newer.",
        f"Every element type is stored by `{instruction(multimem.bulk_copy(None, dtypes.f32, RUN))}`.",
        "",
        *rows("Bulk reductions", BULK_REDUCTIONS, bulk)[2:],
    ]
    return "\n".join(lines)


PAGES = (Page("docs/reference/multicast.md", page),)

if __name__ == "__main__":
    main(PAGES)
