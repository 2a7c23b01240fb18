"""Dispatch of rows to experts over the ranks of a group, and their combination: `Experts(group, ...)`.

Each is one lazy operation and one launch on every rank, without a meeting on the host. All communication is in
`experts_kernels.py`, in the public language; this file checks arguments and builds launches.
"""

from __future__ import annotations

from dataclasses import dataclass

from peertile.comm.group import Group
from peertile.comm.symmetric import SymmetricHeap, SymmetricTensor
from peertile.dtypes import DType, f32, i32, i64, u64
from peertile.errors import ArgumentError, UsageError
from peertile.library import experts_kernels
from peertile.library.fused_base import FLOATS, MOST_WORKERS, FusedBase, check_count, check_shape, power_of_two
from peertile.runtime.op import DeviceOp
from peertile.runtime.tensor import Tensor

__all__ = ["Dispatched", "Experts"]

CHOICES = 128
"""That are looked at together, at most, where a row has no more."""
COUNTED = 1024
"""Pairs of a choice and an expert that are looked at together, at most."""
SUMMED = 4096
"""Counts of programs by expert that are one tile, at most; four of them are added in one trip to memory."""
SENT_BYTES = {False: 1024, True: 8192}
"""Bytes of a row that are moved at a time; on a GPU four rows of so many are what a program has under way."""
FETCHED = {False: 512, True: 2048}
"""Columns of a row that are fetched for a combination at a time."""
ADDED = {False: 128, True: 4096}
"""Columns of a row whose results are added together before they are sent; with half of them it took 731 us."""
AHEAD = 1
"""Pieces that a program has sent before it folds one: two H200 took 460 us for 4096 rows of 7168 so, 466 with four."""
GPU_PROGRAMS = 2
"""Programs for each multiprocessor, so that one's loads are under way while another looks up where its rows go."""
MOST_PLACES = 1 << 31
"""On a rank: a word names two of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Dispatched:
    """What a dispatch left on this rank."""

    rows: SymmetricTensor
    """[experts of this rank · places, width]: `places` rows for each expert, by the rank and then by the row that they
    came from. Nothing is written behind the first `counts` of an expert."""
    counts: Tensor
    """[experts of this rank, 1] i64: rows that each expert got."""
    ids: Tensor
    """[rows · top_k]: the choices, of this rank's rows."""


class Experts(FusedBase):
    """Experts spread over the ranks of `where`, a group or a symmetric heap; rank r has number r L to r L + L - 1, for
    L = ⌈experts / ranks⌉.

    Collective: every rank makes it, calls it and closes it in the same order; it is a context manager. A rank has up
    to `rows` rows of `width` elements of `dtype` (f32, f16 or bf16), each with `top_k` choices. `places` is how many
    rows an expert takes from all ranks together: what goes beyond is left out, the last ranks' last rows first, the
    same on every run. By default there is a place for every row that there can be, and nothing is left out.

    A row that chose several experts of a rank goes there once and is copied there. With `partials`, f32, f16 or bf16,
    results come back once as well: each rank adds what its experts made of a row, in f32, and sends the sum in that
    type. Without it every result comes as it is, and they are added in the order of the choices.

    Memory on every rank: L · places · width elements; places is ranks · rows by default. With `partials` ranks · rows ·
    width more.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.experts import Experts
    >>> x = pt.asarray(np.array([[1.0], [2.0], [3.0]], np.float32))
    >>> ids, weights = pt.asarray(np.array([[1], [0], [1]])), pt.ones((3, 1), pt.f32)
    >>> with Experts(pt.init(), experts=2, rows=3, width=1, top_k=1, dtype=pt.f32) as experts:
    ...     sent = experts.dispatch(x, ids).sync()
    ...     counts, got = sent.counts.numpy().ravel().tolist(), sent.rows.numpy().reshape(2, 3)[1, :2].tolist()
    ...     back = experts.combine(sent, weights).sync().numpy().ravel().tolist()
    >>> counts, got, back
    ([1, 2], [1.0, 3.0], [1.0, 2.0, 3.0])
    """

    def __init__(
        self,
        where: Group | SymmetricHeap,
        *,
        experts: int,
        rows: int,
        width: int,
        top_k: int,
        dtype: DType,
        places: int | None = None,
        partials: DType | None = None,
        workers: int | None = None,
    ) -> None:
        size = where.size if isinstance(where, Group) else where.group.size
        self.experts = check_count("Experts: experts", experts)
        self.rows = check_count("Experts: rows", rows)
        self.width = check_count("Experts: width", width)
        self.top_k = check_count("Experts: top_k", top_k)
        if top_k > experts:
            raise ArgumentError(f"Experts: top_k: expected at most {experts}, the number of experts, got {top_k}")
        if dtype not in FLOATS:
            raise ArgumentError(f"Experts: dtype: expected f32, f16 or bf16, got {dtype!r}")
        if partials is not None and partials not in FLOATS:
            raise ArgumentError(f"Experts: partials: expected f32, f16, bf16 or None, got {partials!r}")
        self.dtype, self.partials = dtype, partials
        self.keeps_all = places is None
        self.places = size * rows if places is None else check_count("Experts: places", places)
        self.on_rank = -(-experts // size)
        """Experts of a rank; the last ranks may have fewer."""
        held = self.on_rank * self.places
        if held >= MOST_PLACES:
            raise ArgumentError(
                f"Experts: places: expected fewer than {MOST_PLACES} on a rank, got {held}: {self.places} for each "
                f"of its {self.on_rank} experts; make the communicator with fewer"
            )
        self._wide = wide = power_of_two(size * self.on_rank)
        self._choices = choices = power_of_two(top_k)
        """Words of a row's choices."""
        words = 8 * rows * choices * (2 + size) + 16 * size * MOST_WORKERS * (CHOICES + choices)
        across = -(-width // ADDED[False])
        pieces = size * (rows * across + MOST_WORKERS)
        added = 0 if partials is None else size * rows * width * partials.itemsize + (12 * choices + 8) * pieces
        super().__init__(
            where,
            staging_bytes=held * width * dtype.itemsize + 4 * (MOST_WORKERS + 2 * size) * wide + words + added
            + 40 * size * MOST_WORKERS + (1 << 14),
            movers=0,
            workers=workers,
            agreed=(experts, rows, width, top_k, places, dtype.name, partials and partials.name),
            crowd=GPU_PROGRAMS,
        )  # fmt: skip
        # So few rows in a tile that there is one for every program, where there are as many.
        spread = power_of_two(-(-rows // self.programs))
        self._tile = max(1, min(CHOICES // choices, COUNTED // (wide * choices), spread))
        tiles = -(-rows // self._tile)
        self._listed = -(-tiles // self.programs) * self._tile * choices
        """Words of a program's choices, at most."""
        heap = self.heap
        with self._making():
            self._rows = self._own(heap.empty((held, width), dtype))
            self._counts = self._own(heap.zeros((2 * size, wide), i32))
            self._tallies = self._own(heap.empty((self.programs, wide), i32))
            self._places = self._own(heap.empty((rows * choices,), i64))
            self._sources = self._own(heap.empty((rows * choices,), i64))
            self._copies = self._own(heap.empty((size * self.programs * self._listed,), i64))
            self._copied = self._own(heap.empty((size, self.programs), i64))
            self._ready = self._own(heap.zeros((2, size), u64), is_words=True)
            self._done = self._own(heap.signal(slots=self.programs))
            if partials is not None:
                across = -(-width // ADDED[self._on_gpu])
                self._pieces = pieces = -(-rows * across // self.programs)
                """Pieces of a program, at most."""
                told = size * self.programs * pieces
                self._given = self._own(heap.empty((told * choices,), i64))
                self._factors = self._own(heap.empty((told * choices,), f32))
                self._comes = self._own(heap.empty((told,), i64))
                self._lengths = self._own(heap.empty((2 * size, self.programs), i64))
                self._parts = self._own(heap.empty((size * rows, width), partials))
                self._arrived = self._own(heap.zeros((size, self.programs), i64), is_words=True)
                self._calls = self._own(heap.zeros((self.programs,), i64), is_words=True)
        self._last: Dispatched | None = None

    def dispatch(self, x: Tensor, ids: Tensor) -> DeviceOp[Dispatched]:
        """Every row of x to the experts that it chose.

        x [rows, width] of the communicator's dtype, up to as many rows as it was made for, and as each rank likes,
        0 too; ids [rows, top_k] i32 or i64 without gaps, read when the operation runs: different numbers of experts,
        or -1 for no expert. A number beyond the experts ends the launch with KernelAssert, and so does, where nothing
        is to be left out, a row that chose one expert so often that there is no place.

        The next dispatch overwrites what this one left.
        """
        name = "dispatch"
        self._check_open(name)
        check_shape(f"{name}: x", x, self.device, (self.dtype,), ("rows", self.width))
        if x.shape[0] > self.rows:
            raise ArgumentError(
                f"{name}: x: expected at most {self.rows} rows, got {x.shape[0]}; make the communicator with more rows"
            )
        check_shape(f"{name}: ids", ids, self.device, (i32, i64), (x.shape[0], self.top_k))
        if not ids.is_contiguous:
            raise ArgumentError(
                f"{name}: ids: expected a tensor without gaps, got strides {ids.strides}; copy it first"
            )
        flat = ids.reshape(ids.size)
        received = self.device.empty((self.on_rank, 1), i64)
        sent = self._last = Dispatched(self._rows, received, flat)
        launch = experts_kernels.dispatch(
            received.partition((1, 1)).persistent(programs=self.programs), x, ids, self._rows, self._counts,
            self._tallies, self._places, self._sources, self._copies, self._copied, self._ready, self._turn, self._done,
            self.experts, self.places, self._number(name) & 0xFFFFFF, self._listed, L=self.on_rank, K=self.top_k,
            KEEPS_ALL=self.keeps_all, BR=self._tile, KP=self._choices, EP=self._wide,
            BS=max(1, min(64, SUMMED // self._wide)),
            BH=min(power_of_two(self.width), SENT_BYTES[self._on_gpu] // self.dtype.itemsize),
        )  # fmt: skip
        return self._met(launch).map(lambda *_: sent)

    def combine(
        self,
        sent: Dispatched,
        weights: Tensor,
        y: SymmetricTensor | None = None,
        out: Tensor | None = None,
    ) -> DeviceOp[Tensor]:
        """out[t] = Σ_k weights[t, k] · (what the expert of choice k made of row t), in the order of the choices; with
        `partials` of each rank alone, this one first, then those behind it, and around.

        `sent` is what the last dispatch gave; weights [rows, top_k] f32 without gaps. y [experts of a rank · places,
        columns], symmetric and f32, f16 or bf16, holds what the experts made of their rows, each in its place:
        `sent.rows` itself, changed in place, unless given. out [rows, columns] of y's dtype; sums are f32. A choice
        of no expert, or one that was left out, adds nothing. A y with more columns than `width` has no `partials`.
        """
        name = "combine"
        self._check_open(name)
        if not isinstance(sent, Dispatched) or sent is not self._last:
            raise UsageError(f"{name}: sent: expected what the last dispatch gave; another dispatch has overwritten it")
        made = sent.rows if y is None else y
        if not isinstance(made, SymmetricTensor) or made.heap.group is not self.group:
            raise ArgumentError(
                f"{name}: y: expected a symmetric tensor of the group, got {type(made).__name__}; heap.empty makes one"
            )
        check_shape(f"{name}: y", made.local, self.device, FLOATS, (self.on_rank * self.places, "columns"))
        count, columns = sent.ids.size // self.top_k, made.shape[1]
        check_shape(f"{name}: weights", weights, self.device, (f32,), (count, self.top_k))
        if not weights.is_contiguous:
            raise ArgumentError(
                f"{name}: weights: expected a tensor without gaps, got strides {weights.strides}; copy it first"
            )
        z = self.device.empty((count, columns), made.dtype) if out is None else out
        check_shape(f"{name}: out", z, self.device, (made.dtype,), (count, columns))
        if self.partials is not None and columns <= self.width:
            wide = min(power_of_two(columns), ADDED[self._on_gpu])
            launch = experts_kernels.combine_summed(
                z.partition((1, wide)).persistent(programs=self.programs), made, weights, self._hello, self._places,
                self._given, self._factors, self._comes, self._lengths,
                self._seen_as(self._parts, self.partials, (self._parts.shape[0], columns)), self._arrived, self._calls,
                self._number(name, columns), self._pieces, self.rows, AHEAD, K=self.top_k, KP=self._choices,
                ACROSS=-(-columns // wide),
            )  # fmt: skip
            return self._met(launch).map(lambda *_: z)
        launch = experts_kernels.combine(
            z.partition((1, min(power_of_two(columns), FETCHED[self._on_gpu]))).persistent(programs=self.programs),
            made, weights.reshape(weights.size), self._hello, self._places, self._done, self._number(name, columns),
            K=self.top_k, KP=self._choices,
        )  # fmt: skip
        return self._met(launch).map(lambda *_: z)
