"""Matrix products fused with communication: all-gather + product, product + reduce-scatter, product + all-reduce.

Each is one lazy operation and one launch on every rank, without a meeting on the host; where a communicator of
collectives was given, a product + all-reduce of few rows on GPUs is two. All communication is in `fused_kernels.py`, in
the public language; this file checks arguments, cuts, and builds launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

from peertile.comm.group import Group
from peertile.comm.symmetric import SymmetricHeap
from peertile.dtypes import DType, f32, i64, u8, u32, u64
from peertile.errors import ArgumentError
from peertile.kernel import LaunchOp
from peertile.library import fused_kernels
from peertile.library.collectives import Collectives
from peertile.library.cuda_collectives import as_words
from peertile.library.fused_base import (
    FLOATS,
    GPU_MOVERS,
    MOST_WORKERS,
    FusedBase,
    check_count,
    check_shape,
    check_tile,
    power_of_two,
)
from peertile.library.products import (
    FEW_ROWS,
    SIDE,
    WIDE,
    WORTH_A_TAIL,
    choose_product,
    first_panel,
    matmul,
    may_be_wide,
    rows_together,
    wide_columns,
)
from peertile.op import copy
from peertile.runtime.op import DeviceOp
from peertile.runtime.tensor import Tensor

__all__ = ["FusedProducts"]

MOST_CHUNKS = 64
"""Chunks that the rows of one rank are sent in: each is announced, and waited for, by itself."""
MOST_TILES = 4096
"""Tiles of a product that are reduced in one launch: each has a word of a signal for each pair of ranks."""
MOST_WORDS = 1 << 17
"""Words of a part that travel with flags, at most, such as 32 rows of 8192 columns in pairs: with more the link is busy
for longer than a signal takes."""
LEAST_ON_GPU = 16
"""The smallest extent that tensor cores multiply."""
MOVED = {False: (8, 512), True: (8, 4096)}
"""Rows and columns of a tile that is moved; on a GPU it is what a program has under way."""
SENT_IN_A_TILE = 21
"""Elements of a tile of the result that a program computes while all movers together send a row: 2 inner / 285e9 s, at
2 inner / 6e12 s an element."""
HALF_TILE = 0.66
"""Time of a tile of half the columns at the end, in those of a whole one: 60 us of 90, by two H200."""
PAIRED_ON_GPU = False
"""Whether two GPUs compute a tile of the other's and one of their own in turn, as cores do. That begins each tile anew
and hides no more: a multiprocessor that sends a tile over the link fetches next to nothing meanwhile, and 41 us for the
next tile of an inner extent of 4096 become 54 to 58. 2048 x 8192 x 14336 takes two H200 717 us in two parts and 727 in
pairs, 2048 x 8192 x 4096 227 both ways."""
MOST_BEHIND = 64, 1 << 20
"""Rows, and bytes of the result, of a product + all-reduce up to which two GPUs are faster in two launches: a product
lets the next launch begin while it runs, and a small collective leaves room for that, so that neither waits for the
other's start, while a product that waits for its peer keeps the next one out. Two H200, 1, 4, 16 and 64 rows by 8192
columns: 20.2, 20.5, 21.8 and 26.0 us in two launches, 24.8, 24.9, 25.6 and 29.0 in one, at an inner extent of 4096;
57.1, 57.7, 58.8 and 63.9 beside 62.8, 63.1, 64.0 and 66.0 at 14336."""
MOVED_PER_S = 27e9
"""Bytes a second that a program moves to a peer while others multiply, by two H200: to 64 KiB under way at a time, in
bulk or not, memory and the link then answer late. Where nothing else runs it is 45e9."""
WIDE_MOVERS = 4
"""Programs of an all-gather + product in wide tiles that only move: what whole turns of the others leave of 132."""
MOVED_TOGETHER = 1 << 13
"""Elements of a piece that such a program moves, of four that are under way."""
WORTH_MOVING = 0.95
DEALT = (128, 256), (16, 2048)
"""A tile of a product whose parts lie in memory as threads have them, and its extents there."""
MOST_PART_MOVERS = 8
"""Of a product + reduce-scatter: with more it was not tried."""
LINK_PER_S = 366e9
MULTIPLIED_PER_S = 5.9e12
"""Operations a second of a program that multiplies, by an H200."""
WORTH_WAITING = 2048
"""Columns from which on a GPU computes longer on its own rows than those of one peer are under way, so that nothing is
gained by beginning with some of them: k rows take 2 k inner columns / 600e12 s, and 2 k inner / 330e9 s."""


@lru_cache(maxsize=1024)
def smaller_at_end(
    rows: tuple[int, int, int], across: tuple[int, int], most: int, programs: int, movers: int, wait: float, quick: bool
) -> int:
    """Rows of tiles at the end of an all-gather + product, up to `most`, that are better cut into tiles of half the
    columns, by how long the program with the most to do takes; 0 where that gains less than 3 %.

    `rows` of tiles: one's own for those that do not send, for all, and the others'; `across`: tiles in a row, and
    halves. The movers begin after `wait`, in times of a tile. Dealt as `gather_gemm` does.

    >>> smaller_at_end((8, 0, 8), (20, 40), 8, 132, 16, 0.66, True)
    3
    >>> smaller_at_end((16, 16, 32), (20, 40), 16, 132, 16, 2.6, False)
    0
    """

    def longest(small: int) -> float:
        loads = [wait * (p < movers) for p in range(programs)]

        def deal(start: int, tiles: int, cost: float, least: int = 0) -> int:
            """To the programs from `least` on, beginning with number `start` of them; who would be next."""
            own = programs - least
            whole, more = divmod(tiles, own)
            for k in range(own):
                loads[least + (start + k) % own] += cost * (whole + (k < more))
            return (start + tiles) % own

        if quick:
            at = deal(movers, rows[0] * across[0], 1.0)
        else:
            at = (deal(0, rows[0] * across[0], 1.0, movers) + movers) % programs
        for count in (rows[1], rows[2] - small):
            at = deal(at, count * across[0], 1.0)
        deal(at, small * across[1], HALF_TILE)
        return max(loads)

    best = min(range(min(rows[2], most, 16) + 1), key=longest)
    return best if longest(best) < WORTH_A_TAIL * longest(0) else 0


@lru_cache(maxsize=1024)
def worth_wide(rows: int, columns: int, inner: int, tile: tuple[int, int], programs: int) -> int:
    """Columns in the first panel of an all-gather + product of two ranks with `rows` each, by `columns` on each, that
    is better made in wide tiles (products.py); 0 where not, or where the other's rows would not be there in time: the
    first half of them behind one's own, the second half another half tile later.

    2048 x 10240 x 8192 takes an H200 that is its own peer 268 us so, 290 in plain tiles and halves of them, and cuBLAS
    241 for the product alone.

    >>> worth_wide(1024, 5120, 8192, (128, 256), 132), worth_wide(4096, 5120, 8192, (128, 256), 132)
    (4096, 0)
    """
    workers = programs - WIDE_MOVERS
    first = wide_columns(2 * rows, columns, inner, tile, workers)
    own = -(-rows // tile[0]) * (first // tile[1]) // workers * (2 * tile[0] * (tile[1] + SIDE) * inner)
    half = rows * inner * MULTIPLIED_PER_S / min(WIDE_MOVERS * MOVED_PER_S, LINK_PER_S)
    last = own + tile[0] * (tile[1] + SIDE) * inner
    return first if half <= own and 2 * half <= last else 0


@lru_cache(maxsize=1024)
def choose_movers(tiles: tuple[int, ...], programs: int, tile_s: float, nbytes: int) -> int:
    """Programs of a product + reduce-scatter that had better do nothing but move what the others compute, by how long
    the rank with the most to do takes; 0 where that gains less than 5 %, and every program sends its own tiles.

    `tiles` of each rank's rows, which take `tile_s` and travel as `nbytes`. A program that sends computes nothing
    meanwhile, so parts cost the time of the link; movers hide it, and cost where the others need a turn more.

    >>> choose_movers((256, 256), 132, 46e-6, 1 << 16), choose_movers((16, 16), 132, 46e-6, 1 << 16)
    (4, 0)
    """
    n, total = len(tiles), sum(tiles)
    alone = -(-total // programs) * tile_s + (total - min(tiles)) * nbytes / LINK_PER_S

    def moved(movers: int) -> float:
        workers, one = programs - movers, nbytes / min(MOVED_PER_S, LINK_PER_S / movers)
        there: dict[tuple[int, int], list[float]] = {}  # when the turns of a part have come, by who sends and who adds
        for source in range(n):
            dealt, free = 0, 0.0
            for d in range(1, n):
                to = (source + d) % n
                turns = there[source, to] = []
                for first in range(0, tiles[to], workers):
                    last = min(first + workers, tiles[to])
                    free = max(free, -(-(dealt + last) // workers) * tile_s) + -(-(last - first) // movers) * one
                    turns.append(free)
                dealt += tiles[to]
        ends = []
        for me in range(n):
            now = (total - tiles[me]) // workers * tile_s
            for k in range(-(-tiles[me] // workers)):
                now = max([now + tile_s, *(there[r, me][k] for r in range(n) if r != me)])
            ends.append(max(now, -(-total // workers) * tile_s))
        return max(ends)

    times = {
        m: moved(m)
        for m in range(1, min(MOST_PART_MOVERS, programs // 4) + 1)
        if programs % m == 0 and -(-max(tiles) // (programs - m)) <= fused_kernels.MOST_TURNS
    }
    best = min(times.values(), default=alone)
    # As many as cost nothing: what is there early need not be waited for.
    return max(m for m, t in times.items() if t <= 1.005 * best) if best < WORTH_MOVING * alone else 0


class FusedProducts(FusedBase):
    """Products over the ranks of `where`, a group or a symmetric heap, each a single launch (but see `collectives`).

    Collective, as `Collectives` is: every rank makes it, calls its methods and closes it in the same order; it is a
    context manager. `staging_bytes` hold what peers send in a call: the gathered rows, or the parts of a sum; each
    rank's heap has them twice, for calls that follow each other. `movers` programs of an all-gather begin with moving
    data while `workers` others compute (default: what the device gives).
    `partials` is the type that parts of a sum travel in: f32 by default; bf16 or f16 halve what is moved and round
    once for each rank, as a reduction of the product's own type would. `tile` (rows, columns, inner extent, at most)
    goes before the measured table. `flagged`: small parts of an all-reduce travel with a flag on each word
    (default: on GPUs, where a flight over the link costs more than twice the bytes). `collectives` of the same group:
    on GPUs a product of few rows whose parts travel in its own type is followed by an all-reduce of that communicator,
    which is faster there than both in one launch.

    Factors are f32, f16 or bf16, sums f32. Operations of one communicator run in order on one stream.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.fused import FusedProducts
    >>> x = pt.asarray(np.eye(4, dtype=np.float32))
    >>> with FusedProducts(pt.init(), staging_bytes=1 << 20) as products:
    ...     float(products.all_gather_matmul(x, x).sync().numpy().sum())
    4.0
    """

    def __init__(
        self,
        where: Group | SymmetricHeap,
        *,
        staging_bytes: int = 32 << 20,
        movers: int | None = None,
        workers: int | None = None,
        partials: DType = f32,
        tile: tuple[int, int, int] | None = None,
        flagged: bool | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        self.tile = check_tile("FusedProducts", tile, 3)
        check_count("FusedProducts: staging_bytes", staging_bytes)
        if movers is not None:
            check_count("FusedProducts: movers", movers)
        if partials not in FLOATS:
            raise ArgumentError(f"FusedProducts: partials: expected f32, f16 or bf16, got {partials!r}")
        group = where if isinstance(where, Group) else where.group
        if collectives is not None and (not isinstance(collectives, Collectives) or collectives.group is not group):
            got = "one of another group" if isinstance(collectives, Collectives) else type(collectives).__name__
            raise ArgumentError(f"FusedProducts: collectives: expected a Collectives of the same group, got {got}")
        size = group.size
        words = 8 * size * (MOST_CHUNKS + 5 * MOST_TILES) + 16 * size * MOST_WORDS + 8 * size * 2 * MOST_WORKERS
        words += 16 * GPU_MOVERS * (fused_kernels.MOST_TURNS + size)
        super().__init__(
            where, staging_bytes=2 * staging_bytes + words, movers=movers, workers=workers,
            agreed=(staging_bytes, partials.name, tile, flagged, collectives is not None),
        )  # fmt: skip
        self.staging_bytes = staging_bytes
        self.partials = partials
        self._collectives = collectives
        self._worth_waiting = WORTH_WAITING
        self._in_pairs = PAIRED_ON_GPU or not self._on_gpu
        self._deals = self._on_gpu
        self._wide: bool | None = None if self._on_gpu else False
        self._part_movers: int | None = None if self._on_gpu else 0
        with self._making():
            self._told = self._own(self.heap.zeros((2 * fused_kernels.MOST_TURNS, GPU_MOVERS), i64), is_words=True)
            self._landed = self._own(self.heap.zeros((2 * GPU_MOVERS, size), i64), is_words=True)
            self._calls = self._own(self.heap.zeros((self.programs, 4), i64), is_words=True)
            self._halves = self._own(self.heap.zeros((2, size), i64), is_words=True)
            self._begun = self._own(self.heap.zeros((2, size), u64), is_words=True)
            self._staging = self._own(self.heap.empty((2 * staging_bytes,), u8))
            self._arrived = self._own(self.heap.zeros((max(MOST_CHUNKS, self.programs) + 2, size), i64), is_words=True)
            self._paired = self._own(self.heap.zeros((self.programs, size), i64), is_words=True)
            self._parts = self._own(self.heap.signal(slots=MOST_TILES))
            self._flags = None
            if self._on_gpu if flagged is None else flagged:
                self._flags = self._own(self.heap.zeros((2 * size * MOST_WORDS,), u64), is_words=True)

    # ---------------------------------------------------------------- all-gather

    def all_gather_matmul(
        self, a: Tensor, b: Tensor, out: Tensor | None = None, *, rows: Sequence[int] | None = None
    ) -> DeviceOp[Tensor]:
        """out = (the rows of `a` of all ranks, in rank order) @ b, on every rank with its own b.

        a [m, k], b [k, columns], out [Σ m, columns] of one dtype. `rows` says how many rows each rank has, in rank
        order, where not all have the same; 0 is fine. b may differ from rank to rank, its shape not.
        ArgumentError for what does not fit together, or does not fit into the staging.

        >>> import numpy as np, peertile as pt
        >>> from peertile.library.fused import FusedProducts
        >>> a = pt.asarray(np.arange(4, dtype=np.float32).reshape(2, 2))
        >>> with FusedProducts(pt.init(), staging_bytes=1 << 20) as products:
        ...     products.all_gather_matmul(a, a, rows=[2]).sync().numpy().tolist()
        [[2.0, 3.0], [6.0, 11.0]]
        """
        name = "all_gather_matmul"
        self._check_open(name)
        self._factors(name, a, b)
        shares = self._shares(f"{name}: rows", rows, a.shape[0])
        total, me = sum(shares), self.group.rank
        c = self._output(name, out, (total, b.shape[1]), a)
        self._check_staging(name, total * a.shape[1] * a.dtype.itemsize, "the gathered rows")
        bm, bn, bk, stages = self._tiles(a, max(shares), b.shape[1], a.shape[1])
        columns = self._first_panel(a.dtype, shares, b.shape, (bm, bn))
        if columns:
            wide = self._wide_gather(name, a, b, c, shares, (bm, bn, bk, stages), columns)
            return self._met(wide).map(lambda *_: c)
        # Chunks are whole moved tiles, and no more of them than there are words.
        moved = MOVED[self._on_gpu]
        mr = min(moved[0], power_of_two(max(shares)), bm)
        chunk = max(power_of_two(-(-max(shares) // MOST_CHUNKS)), min(bm, power_of_two(max(shares))), mr)
        first = sum(shares[:me])
        last = first + shares[me]
        at_once = self._on_gpu and b.shape[1] >= self._worth_waiting * (self.group.size - 1)
        quick = all(self._turns_sending(rows, bm, bn) <= 1 for rows in shares)
        alone = last if quick else first + self._while_sending(shares[me], b.shape[1], bm, bn)
        # The last part to be computed may end in smaller tiles; no more of it than every rank has.
        small = 0
        if at_once and bn >= 256:
            most = min(total - max(shares), *(s for s in shares if s))
            wait = self._turns_sending(shares[me], bm, bn)
            across = (-(-b.shape[1] // bn), -(-b.shape[1] // (bn // 2)))
            rows_of = (-(-(alone - first) // bm), -(-(last - alone) // bm), -(-(total - shares[me]) // bm))
            small = bm * smaller_at_end(rows_of, across, most // bm, self.programs, self.movers, wait, quick)
        end = first if first else total
        parts = (
            (c[first:alone], 0 if quick else self.movers, bn),
            (c[alone:last], 0, bn),
            (c[last : total if first else total - small], 0, bn),
            (c[: first - small if first else 0], 0, bn),
            (c[end - small : end], 0, bn // 2 if small else bn),
        )
        cut = [
            part.partition((bm, wide)).persistent(programs=self.programs, swizzle=8, spare=spare)
            for part, spare, wide in parts
        ]
        launch = fused_kernels.gather_gemm(
            *cut, a, b, self._begun, self._seen_as(self._staging, a.dtype, (2 * total, a.shape[1])), self._arrived,
            self._calls, self._starts(shares), self._sign(name, shares, b.shape, a.dtype.name, bm, bn),
            end - small, CHUNK=chunk, MR=mr, MC=min(moved[1], power_of_two(a.shape[1])), MOVERS=self.movers, BK=bk,
            STAGES=stages, AT_ONCE=at_once, QUICK=quick, REST=alone < last, TAIL=small > 0,
        )  # fmt: skip
        return self._met(launch).map(lambda *_: c)

    def _wide_gather(
        self, name: str, a: Tensor, b: Tensor, c: Tensor, shares: tuple[int, ...], cut: tuple[int, int, int, int],
        columns: int,
    ) -> LaunchOp:  # fmt: skip
        """An all-gather + product in wide tiles, `columns` of b in the first panel, with programs that only move."""
        (bm, bn, bk, stages), side = cut, self._side(cut[1])
        if side == SIDE:
            bk, stages = WIDE
        rows, inner = a.shape
        first, end = self.group.rank * rows, b.shape[1]
        together = rows_together((bm, bn), self.programs - WIDE_MOVERS) if a.dtype.itemsize == 2 else FEW_ROWS
        parts = [
            c[top : top + rows, left:right]
            .partition((bm, width))
            .persistent(programs=self.programs, swizzle=together, spare=WIDE_MOVERS)
            for top in (first, rows - first)
            for left, right, width in ((0, columns, bn), (columns, end, side))
        ]
        # Eight pieces of a row, or nearly so: two groups of four, of which one is the first half.
        moved = min(MOVED_TOGETHER // 8, max(power_of_two(-(-inner // 8)), bk))
        return fused_kernels.gather_gemm_wide(
            *parts, a, b[:, :columns], b[:, columns:], self._begun,
            self._seen_as(self._staging, a.dtype, (2 * 2 * rows, inner)), self._halves, self._calls,
            self._sign(name, shares, b.shape, a.dtype.name, bm, bn, "wide"), BK=bk, STAGES=stages,
            MR=MOVED_TOGETHER // moved, MC=moved, MOVERS=WIDE_MOVERS,
        )  # fmt: skip

    def _side(self, width: int) -> int:
        """Columns that a wide tile has beyond `width`."""
        return max(width // 4, LEAST_ON_GPU if self._on_gpu else 1)

    def _first_panel(
        self, dtype: DType, shares: tuple[int, ...], factor: tuple[int, ...], tile: tuple[int, int]
    ) -> int:
        """Columns in the first panel of an all-gather + product with `factor` in wide tiles; 0 where others are better.
        How a factor lies is each rank's own affair, so it must not decide this."""
        if self.group.size != 2 or shares[0] != shares[1] or self.programs <= WIDE_MOVERS:
            return 0
        (inner, columns), rows = factor, shares[0]
        if not rows * inner:
            return 0
        if self._wide is not None:
            return first_panel(columns, tile[1], self._side(tile[1])) if self._wide else 0
        if self.tile is not None or not may_be_wide(self.device.target, dtype, tile):
            return 0
        return worth_wide(rows, columns, inner, tile, self.programs)

    def _turns_sending(self, rows: int, bm: int, bn: int) -> float:
        """Tiles that a program computes while a few others send so many rows."""
        return rows * (self.group.size - 1) * SENT_IN_A_TILE / (bm * bn)

    def _while_sending(self, rows: int, columns: int, bm: int, bn: int) -> int:
        """Own rows that the others compute meanwhile. The rest is for all of them."""
        if not self._on_gpu:
            return rows
        turns = self._turns_sending(rows, bm, bn)
        return min(rows, -(-int(turns * (self.programs - self.movers)) // -(-columns // bn)) * bm)

    # ---------------------------------------------------------------- reductions

    def matmul_reduce_scatter(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor | None = None,
        *,
        rows: Sequence[int] | None = None,
        inner: Sequence[int] | None = None,
    ) -> DeviceOp[Tensor]:
        """out = this rank's rows of the sum over the ranks of a @ b.

        a [m, k], b [k, columns] of one dtype, m and columns the same on every rank. Rank r gets `rows[r]` rows, in
        rank order (default: m / ranks each); out [rows[rank], columns] of the factors' dtype. `inner` says the k of
        each rank, where they differ; 0 is fine. Parts are added in rank order in f32: the same result on every
        run.

        >>> import numpy as np, peertile as pt
        >>> from peertile.library.fused import FusedProducts
        >>> a = pt.asarray(np.arange(4, dtype=np.float32).reshape(2, 2))
        >>> with FusedProducts(pt.init(), staging_bytes=1 << 20) as products:
        ...     products.matmul_reduce_scatter(a, a).sync().numpy().tolist()
        [[2.0, 3.0], [6.0, 11.0]]
        """
        name = "matmul_reduce_scatter"
        self._check_open(name)
        self._factors(name, a, b)
        m, columns, size = a.shape[0], b.shape[1], self.group.size
        if rows is None and m % size:
            raise ArgumentError(
                f"{name}: a: expected a number of rows that {size} ranks divide, got {m}; "
                "say with rows how many each rank gets"
            )
        shares = self._shares(f"{name}: rows", [m // size] * size if rows is None else rows, None)
        if sum(shares) != m:
            raise ArgumentError(f"{name}: rows: expected a sum of {m}, the rows of a, got {sum(shares)}")
        c = self._output(name, out, (shares[self.group.rank], columns), a)
        inners = self._shares(f"{name}: inner", inner, a.shape[1])
        bm, bn, bk, stages = self._tiles(a, max(shares), columns, max(inners))
        inbox = self._inbox(name, max(shares), columns, bm, bn)
        even = len(set(shares)) == 1
        movers = self._movers_of_parts(shares, columns, max(inners), bm, bn)
        sign = self._sign(name, shares, inners, columns, a.dtype.name, bm, bn, movers)
        if movers:
            moved = self._moved(a, b, c, shares, sign, movers, (bm, bn, bk, stages))
            return self._met(moved).map(lambda *_: c)
        cut = c.partition((bm, bn)).persistent(programs=self.programs, swizzle=8)
        if even and size == 2 and self._in_pairs and -(-shares[0] // bm) * -(-columns // bn) < fused_kernels.PAIRS:
            paired = fused_kernels.gemm_scatter_pairs(
                cut, a, b, self._begun, inbox, self._paired, self._calls, sign, BK=bk, STAGES=stages,
            )  # fmt: skip
            return self._met(paired).map(lambda *_: c)
        launch = fused_kernels.gemm_scatter(
            cut, a, b, self._begun, inbox, self._arrived, self._calls, self._starts(shares), sign, BK=bk,
            STAGES=stages, EVEN=even,
        )  # fmt: skip
        return self._met(launch).map(lambda *_: c)

    def _movers_of_parts(self, shares: tuple[int, ...], columns: int, inner: int, bm: int, bn: int) -> int:
        """Programs of a product + reduce-scatter that only move; 0 where all send what they compute."""
        nbytes = bm * bn * self.partials.itemsize
        if self._part_movers is not None or self.group.size == 1 or self.partials.itemsize != 2 or nbytes % 16:
            return self._part_movers or 0
        tiles = tuple(-(-rows // bm) * -(-columns // bn) for rows in shares)
        return choose_movers(tiles, self.programs, 2 * bm * bn * inner / MULTIPLIED_PER_S, nbytes)

    def _moved(
        self, a: Tensor, b: Tensor, c: Tensor, shares: tuple[int, ...], sign: int, movers: int,
        cut: tuple[int, int, int, int],
    ) -> LaunchOp:  # fmt: skip
        """A product + reduce-scatter with programs that only move."""
        (bm, bn, bk, stages), size = cut, self.group.size
        tiles = -(-max(shares) // bm) * -(-b.shape[1] // bn)
        words = bm * bn * self.partials.itemsize // 4
        together = rows_together((bm, bn), self.programs - movers) if a.dtype.itemsize == 2 else FEW_ROWS
        pr, pc = DEALT[1] if self._deals and (bm, bn) == DEALT[0] else (bm, bn)
        return fused_kernels.gemm_scatter_moved(
            c.partition((bm, bn)).persistent(programs=self.programs, swizzle=together, spare=movers), a, b, self._begun,
            self._seen_as(self._staging, self.partials, (2 * size * tiles * pr, pc)),
            self._seen_as(self._staging, u32, (2 * size * tiles, words)), self._told, self._landed, self._calls,
            self._starts(shares), sign, BK=bk, STAGES=stages,
            N=size, MOVERS=movers, PIECE=words // 4, EVEN=len(set(shares)) == 1 and shares[0] % bm == 0,
            TOGETHER=together, PR=pr, PC=pc,
        )  # fmt: skip

    def matmul_all_reduce(
        self, a: Tensor, b: Tensor, out: Tensor | None = None, *, inner: Sequence[int] | None = None
    ) -> DeviceOp[Tensor]:
        """out = the sum over the ranks of a @ b, the same bits on every rank.

        a [m, k], b [k, columns] of one dtype, m and columns the same on every rank; out [m, columns] of the factors'
        dtype. `inner` says the k of each rank, where they differ. Every part goes to every rank, which is for few
        rows: a step of decoding. For many rows a reduce-scatter moves less.

        >>> import numpy as np, peertile as pt
        >>> from peertile.library.fused import FusedProducts
        >>> a = pt.asarray(np.ones((1, 3), np.float32))
        >>> with FusedProducts(pt.init(), staging_bytes=1 << 20) as products:
        ...     products.matmul_all_reduce(a, a.permute(1, 0)).sync().numpy().tolist()
        [[3.0]]
        """
        name = "matmul_all_reduce"
        self._check_open(name)
        self._factors(name, a, b)
        m, columns = a.shape[0], b.shape[1]
        c = self._output(name, out, (m, columns), a)
        inners = self._shares(f"{name}: inner", inner, a.shape[1])
        behind = self._collectives
        if behind is not None and self._is_better_behind(c):
            # How an output lies is each rank's own affair, so it must not decide what is launched.
            whole = c if c.is_contiguous else self.device.empty(c.shape, c.dtype)
            summed = behind.all_reduce(whole, whole)  # now: a communicator that is closed is told of here, not half way
            done = matmul(a, b, whole).then(lambda *_: summed)
            return (done if whole is c else done.then(lambda *_: copy(whole, to=c))).map(lambda *_: c)
        bm, bn, bk, stages = self._tiles(a, m, columns, max(inners))
        packed = self.partials.itemsize == 2 and self.partials == a.dtype and columns % 2 == 0 and c.is_contiguous
        sign = self._sign(name, m, inners, columns, a.dtype.name, bm, bn, packed)
        width = columns // 2 if packed else columns
        if self._flags is not None and m * width <= MOST_WORDS and (packed or self.partials == f32):
            whole = as_words(c, rows=m) if packed else c
            op = fused_kernels.gemm_reduce_flagged(
                whole.partition((bm, bn // 2 if packed else bn)).persistent(programs=self.programs), a, b,
                self._begun, self._seen_as(self._flags, u64, (2 * self.group.size, m, width)), self._calls, sign,
                BK=bk, STAGES=stages, N=self.group.size, PACK=packed, DT=a.dtype,
            )  # fmt: skip
            return self._met(op).map(lambda *_: c)
        inbox = self._inbox(name, m, columns, bm, bn)
        launch = fused_kernels.gemm_reduce(
            c.partition((bm, bn)).persistent(programs=self.programs), a, b, self._begun, inbox, self._parts,
            self._calls, sign, BK=bk, STAGES=stages, ONCE=-(-m // bm) * -(-columns // bn) < self.programs,
        )  # fmt: skip
        return self._met(launch).map(lambda *_: c)

    def _is_better_behind(self, c: Tensor) -> bool:
        """Whether an all-reduce of the product `c` behind it is faster than in it. On a GPU that ranks share, what is
        loaded waits for what another rank runs, so that has to be one launch."""
        rows, nbytes = MOST_BEHIND
        fits = c.shape[0] <= rows and 0 < c.nbytes <= nbytes and self.partials == c.dtype
        return self._on_gpu and self.group.size > 1 and not self._is_shared and self.tile is None and fits

    # ---------------------------------------------------------------- arguments

    def _factors(self, name: str, a: Any, b: Any) -> None:
        check_shape(f"{name}: a", a, self.device, FLOATS, ("rows", "inner"))
        check_shape(f"{name}: b", b, self.device, (a.dtype,), (a.shape[1], "columns"))

    def _output(self, name: str, out: Any, shape: tuple[int, ...], a: Tensor) -> Tensor:
        if out is None:
            return self.device.empty(shape, a.dtype)
        return check_shape(f"{name}: out", out, self.device, (a.dtype,), shape)

    def _sign(self, *facts: object) -> int:
        """What all ranks have to agree on, in 24 bits; 0 stands for no call."""
        return self._number(*facts) & 0xFFFFFF or 1

    def _check_staging(self, name: str, need: int, what: str) -> None:
        if need > self.staging_bytes:
            raise ArgumentError(
                f"{name}: expected {what} to fit into {self.staging_bytes} bytes of staging, got {need}; "
                f"make the communicator with staging_bytes={need}"
            )

    def _inbox(self, name: str, rows: int, columns: int, bm: int, bn: int) -> Any:
        """The staging as [2 ranks, rows, columns] in whole tiles: of two calls, what every rank sends."""
        tiles = -(-rows // bm) * -(-columns // bn)
        if tiles > MOST_TILES:
            raise ArgumentError(
                f"{name}: expected a result of at most {MOST_TILES} tiles of {bm} x {bn} for a rank, got {tiles}; "
                "split the columns of b"
            )
        shape = (2 * self.group.size, max(-(-rows // bm), 1) * bm, max(-(-columns // bn), 1) * bn)
        self._check_staging(name, prod(shape) // 2 * self.partials.itemsize, "the parts of the sum")
        return self._seen_as(self._staging, self.partials, shape)

    def _tiles(self, a: Tensor, rows: int, columns: int, inner: int) -> tuple[int, int, int, int]:
        """Rows, columns and inner extent of a tile, and buffers: as measured for products, no larger than these."""
        way = choose_product(self.device.target or "cpu", a.dtype.name, rows)
        least = LEAST_ON_GPU if self._on_gpu else 1
        extents = zip(self.tile or (*way.tile, way.inner), (rows, columns, inner), strict=True)
        bm, bn, bk = (max(min(most, power_of_two(n)), least) for most, n in extents)
        return bm, bn, bk, way.stages
