"""Matrix products: which kernel and tile a product wants, by a committed table of measured winners, and the call.

`products.json` holds, for each architecture and type, tiles by the number of rows; `benchmarks/device/tune_gemm.py`
measures candidates for it. Nothing is measured here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from peertile.dtypes import DType, f32
from peertile.errors import ArgumentError
from peertile.ir.ops import Precision
from peertile.library import gemm
from peertile.runtime.driver import DriverKind
from peertile.runtime.op import DeviceOp
from peertile.runtime.tensor import Tensor

__all__ = ["Way", "choose_product", "matmul"]


@dataclass(frozen=True, slots=True)
class Way:
    """A tile of the result, the inner extent that is loaded at a time, buffers of the loop, shares of the inner axis,
    whether programs go through several tiles, and whether the second factor is wanted by columns."""

    tile: tuple[int, int]
    inner: int
    stages: int
    split: int = 1
    is_persistent: bool = True
    by_columns: bool = False


@cache
def _rows(arch: str, dtype: str) -> tuple[tuple[float, Way], ...]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name("products.json").read_text(encoding="utf-8"))
    of_arch = table.get(arch) or table["cpu" if arch == "cpu" else "gpu"]
    found = of_arch.get(dtype) or of_arch["any"]
    return tuple(
        (
            float("inf") if row["rows"] is None else row["rows"],
            Way(
                tuple(row["tile"]), row["inner"], row["stages"], row.get("split", 1), row.get("persistent", True),
                row.get("by_columns", False),
            ),
        )
        for row in found
    )  # fmt: skip


def choose_product(arch: str, dtype: str, rows: int) -> Way:
    """The measured winner for a product with so many rows; `dtype` is that of the factors, or "tf32".

    >>> choose_product("sm_90", "bf16", 16).tile
    (16, 64)
    """
    return next(way for bound, way in _rows(arch, dtype) if rows <= bound)


FEW_ROWS = 8
"""Rows of tiles that are walked column by column where `rows_together` was not found to be faster: on cores, and of
factors of other than 16 bits (8192^3 of fp8 is as fast with 16 in two runs, 0.98 of cuBLAS)."""


@lru_cache(maxsize=64)
def rows_together(tile: tuple[int, int], programs: int) -> int:
    """Rows of tiles that a GPU walks column by column, so that the programs that run at once read the least of both
    factors: as many elements of rows as of columns, or nearly so.

    >>> rows_together((128, 256), 132), rows_together((256, 128), 132)
    (16, 8)
    """
    return 1 << round(math.log2(programs * tile[1] / tile[0]) / 2)


HALF_COST = 0.54
"""Time of a tile of half the columns, in those of a whole one: 128 x 128 x 64 beside 128 x 256 x 64 on an H200."""
WORTH_A_TAIL = 0.97


@lru_cache(maxsize=4096)
def _tailed(m: int, n: int, tile: tuple[int, int], programs: int) -> tuple[int, float]:
    """Rows of tiles at the end that are better halved, and how long the program with the most to do takes then, in
    times of a tile."""
    rows, columns, halves = -(-m // tile[0]), -(-n // tile[1]), -(-n // (tile[1] // 2))

    def longest(small: int) -> float:
        whole, more = divmod((rows - small) * columns, programs)
        half, rest = divmod(small * halves, programs)
        # Programs 0 … more - 1 have a whole tile more; the half ones are dealt from program `more` on, and round.
        loads = [(whole + (p < more)) + HALF_COST * (half + ((p - more) % programs < rest)) for p in range(programs)]
        return max(loads)

    best = min(range(min(rows, 16) + 1), key=longest)
    return (best, longest(best)) if longest(best) < WORTH_A_TAIL * longest(0) else (0, longest(0))


def tail_rows(m: int, n: int, tile: tuple[int, int], programs: int) -> int:
    """Rows at the end of a product [m, n] that are better cut into tiles of half the columns, by how long the program
    with the most to do takes; 0 where that gains less than 3 %.

    >>> tail_rows(2048, 5120, (128, 256), 132), tail_rows(4096, 4096, (128, 256), 132)
    (384, 0)
    """
    return min(_tailed(m, n, tile, programs)[0] * tile[0], m)


SIDE = 64
"""Columns that a wide tile has beyond a plain one, in a panel of their own: 320 columns are no power of two."""
WIDE = 32, 7
"""Inner extent and buffers of the loop of a wide tile; beside them shared memory has room for a store of SIDE columns.
With 6 buffers 2048 x 5120 x 8192 takes an H200 250.9 us, not 246.9; with 3 of 64 it took 261.4 beside 239.5 with 6."""
WIDE_COST = 1.22, 215
"""Time of a tile of 128 x (256 + SIDE), in those of 128 x 256: this, and so much divided by the inner extent, since a
tile's loads do not begin before the last one ends. An H200 takes 124 to 126 us at 8192, where a plain one takes 100."""
WORTH_WIDE = 0.985
WIDE_WITHIN = 3, 4096
"""Turns that plain tiles take, at most, and the least inner extent, where wide ones were found to be faster: an H200
takes 249.9 us of 255.2 for 2048 x 5120 x 8192, and 125.9 of 157.4 for half the rows. With many turns it is power that
counts, and not how full the last one is: 8192 x 5120 x 8192 takes 1014 us and 991."""


def first_panel(n: int, width: int, side: int) -> int:
    """Columns of the first of two panels of n columns, of as many tiles of `width` and of `side` columns; 0 where no
    two have as many.

    >>> first_panel(5120, 256, 64), first_panel(4096, 256, 64)
    (4096, 0)
    """
    across = -(-n // (width + side))
    return across * width if n - across * width > (across - 1) * side else 0


@lru_cache(maxsize=4096)
def wide_columns(m: int, n: int, k: int, tile: tuple[int, int], programs: int) -> int:
    """Columns of the first panel of a product [m, n] that is better made in wide tiles, over an inner extent of k; 0
    where nothing is gained, or where the rest of the columns has not as many tiles.

    >>> wide_columns(1024, 5120, 8192, (128, 256), 132), wide_columns(8192, 5120, 8192, (128, 256), 132)
    (4096, 0)
    """
    first = first_panel(n, tile[1], SIDE)
    if not first:
        return 0
    plain = _tailed(m, n, tile, programs)[1]
    if plain >= WIDE_WITHIN[0] or k < WIDE_WITHIN[1]:
        return 0
    tiles = -(-m // tile[0]) * (first // tile[1])
    longest = -(-tiles // programs) * (WIDE_COST[0] + WIDE_COST[1] / k)
    return first if longest < WORTH_WIDE * plain else 0


def matmul(
    a: Tensor, b: Tensor, out: Tensor | None = None, *, precision: Precision = Precision.IEEE
) -> DeviceOp[Tensor]:
    """a @ b for a [m, k] and b [k, n] of one dtype; the result [m, n] is `out`, or a new tensor of the factors' dtype.

    Sums are f32. f32 factors are multiplied exactly, or with 10 bits of mantissa under `T.Precision.TF32`. The result
    is the same on every run. ArgumentError for shapes, dtypes or devices that do not fit together.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.products import matmul
    >>> x = pt.asarray(np.eye(16, dtype=np.float32) * 2)
    >>> float(matmul(x, x).sync().numpy()[3, 3])
    4.0
    """
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise ArgumentError(f"matmul: expected a [m, k] and b [k, n], got {list(a.shape)} and {list(b.shape)}")
    if a.dtype != b.dtype or not a.dtype.is_float or a.dtype.bits == 64:
        raise ArgumentError(f"matmul: expected factors of one float type up to f32, got {a.dtype} and {b.dtype}")
    m, n = a.shape[0], b.shape[1]
    device = a.device
    c = device.empty((m, n), a.dtype) if out is None else out
    if c.shape != (m, n):
        raise ArgumentError(f"matmul: expected out [{m}, {n}], got {list(c.shape)}")
    tf32 = precision is Precision.TF32 and a.dtype == f32
    way = choose_product(device.target or "cpu", "tf32" if tf32 else a.dtype.name, m)
    consts: dict[str, Any] = {"BK": way.inner, "STAGES": way.stages, "TF32": tf32}
    if way.by_columns and b.strides[0] != 1:
        return _with_columns(a, b, c, way, consts)
    return _launched(a, b, c, way, consts)


def _launched(a: Tensor, b: Tensor, c: Tensor, way: Way, consts: dict[str, Any]) -> DeviceOp[Tensor]:
    op: DeviceOp[Any]
    if way.split > 1:
        shares = a.device.empty((way.split, *c.shape), f32)
        first = gemm.gemm_part(shares.partition((1, *way.tile)), a, b, **consts)
        rows = min(way.tile[0], 16)
        op = first.then(lambda *_: gemm.gemm_fold(c.partition((rows, 256)), shares, S=way.split))
    elif way.is_persistent:
        m, n = c.shape
        programs = c.device.persistent_programs
        on_gpu = c.device.driver.kind is DriverKind.CUDA
        together = rows_together(way.tile, programs) if on_gpu and a.dtype.itemsize == 2 else FEW_ROWS
        tail = tail_rows(m, n, way.tile, programs) if on_gpu and way.tile[1] >= 256 else 0
        wide = wide_columns(m, n, a.shape[1], way.tile, programs) if _may_be_wide(a, b, way) else 0
        if wide:
            panels = [
                part.partition((way.tile[0], width)).persistent(programs=programs, swizzle=together)
                for part, width in ((c[:, :wide], way.tile[1]), (c[:, wide:], SIDE))
            ]
            op = gemm.gemm_wide(*panels, a, b[:, :wide], b[:, wide:], BK=WIDE[0], STAGES=WIDE[1])
        elif tail:
            half = (way.tile[0], way.tile[1] // 2)
            cut = [
                part.partition(tile).persistent(programs=programs, swizzle=together)
                for part, tile in ((c[: m - tail], way.tile), (c[m - tail :], half))
            ]
            op = gemm.gemm_tailed(*cut, a[: m - tail], a[m - tail :], b, **consts)
        else:
            op = gemm.gemm_persistent(c.partition(way.tile).persistent(swizzle=together), a, b, **consts)
    else:
        op = gemm.gemm(c.partition(way.tile), a, b, **consts)
    return op.map(lambda *_: c)


def may_be_wide(target: str | None, dtype: DType, tile: tuple[int, int]) -> bool:
    """Whether wide tiles were measured there, for such factors and in place of such tiles."""
    return target == "sm_90" and dtype.itemsize == 2 and tile == (128, 256)


def _may_be_wide(a: Tensor, b: Tensor, way: Way) -> bool:
    """As may_be_wide, of factors that lie by rows, both."""
    by_rows = a.strides[1] == b.strides[1] == 1
    return by_rows and may_be_wide(a.device.target, a.dtype, way.tile)


def _with_columns(a: Tensor, b: Tensor, c: Tensor, way: Way, consts: dict[str, Any]) -> DeviceOp[Tensor]:
    """Through a copy of b by columns: moving it costs n k, multiplying m n k."""
    turned = a.device.empty((b.shape[1], b.shape[0]), b.dtype)
    moved = gemm.turn(turned.partition((64, 64)), b)
    return moved.then(lambda *_: _launched(a, turned.permute(1, 0), c, way, consts))
