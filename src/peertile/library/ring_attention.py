"""Attention over the ranks of a group, each holding a stretch of the sequence: `RingAttention(group).attention(...)`.

One lazy operation and one launch on every rank, without a meeting on the host. All communication is in
`ring_attention_kernels.py`, in the public language; this file checks arguments and builds launches.
"""

from __future__ import annotations

from collections.abc import Sequence

from peertile.comm.group import Group
from peertile.comm.symmetric import SymmetricHeap
from peertile.dtypes import f32, i64, u8
from peertile.errors import ArgumentError
from peertile.library import ring_attention_kernels
from peertile.library.fused_base import FLOATS, FusedBase, check_count, check_shape, check_tile, power_of_two
from peertile.runtime.driver import DriverKind
from peertile.runtime.op import DeviceOp
from peertile.runtime.tensor import Tensor

__all__ = ["RingAttention"]

WIDEST_HEAD = 512
"""Elements of the widest head: a program holds queries, sums, and a block of keys and of values."""
MOVED_ROWS = 16
"""Rows of a tile that is moved."""


class RingAttention(FusedBase):
    """Attention over the ranks of `where`, a group or a symmetric heap: blocks of keys and values go round.

    Collective: every rank makes it, calls it and closes it in the same order; it is a context manager. Each rank's
    heap holds `staging_bytes` for two blocks of keys and values, and as many for sums between steps: never the whole
    sequence. `movers` programs move blocks while `workers` others compute (default: what the device gives).
    `tile` is how many queries, and keys, are taken at a time, at most.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.ring_attention import RingAttention
    >>> x = pt.asarray(np.eye(4, dtype=np.float32).reshape(1, 4, 4))
    >>> with RingAttention(pt.init(), staging_bytes=1 << 16) as ring:
    ...     ring.attention(x, x, x, causal=True).sync().numpy()[0, 0].tolist()
    [1.0, 0.0, 0.0, 0.0]
    """

    def __init__(
        self,
        where: Group | SymmetricHeap,
        *,
        staging_bytes: int = 16 << 20,
        movers: int = 1,
        workers: int | None = None,
        tile: tuple[int, int] | None = None,
    ) -> None:
        self.tile = check_tile("RingAttention", tile, 2)
        check_count("RingAttention: staging_bytes", staging_bytes)
        check_count("RingAttention: movers", movers)
        super().__init__(
            where,
            staging_bytes=2 * staging_bytes + (1 << 16),
            movers=movers,
            workers=workers,
            agreed=(staging_bytes, tile),
        )
        self.staging_bytes = staging_bytes
        # Blocks of keys reach behind the last row of a shorter part: into rows that count for nothing, but are read.
        with self._making():
            self._slots = self._own(self.heap.zeros((staging_bytes,), u8))
            self._sums = self._own(self.heap.empty((staging_bytes,), u8))
            self._arrived = self._own(self.heap.zeros((movers,), i64), is_words=True)
            self._free = self._own(self.heap.signal(slots=movers * (self.workers + 1)))

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        *,
        causal: bool = False,
        scale: float | None = None,
        rows: Sequence[int] | None = None,
    ) -> DeviceOp[Tensor]:
        """out = softmax(scale · q Kᵀ) V for each head, K and V the keys and values of all ranks, in rank order.

        q and out [heads, tokens, dim]; k and v [groups, tokens, dim], groups a divisor of heads (heads share them in
        order); f32, f16 or bf16, one dtype, sums f32; dim up to 512. `rows` says how many tokens each rank has, where
        not all have the same; 0 is fine. `causal`: a query sees keys up to its own place in the whole sequence.
        `scale` is 1/√dim by default. ArgumentError for what does not fit together, or into the staging.

        Heads, groups and dim are the same on every rank. With `causal` ranks at the end have more to do.

        >>> import numpy as np, peertile as pt
        >>> from peertile.library.ring_attention import RingAttention
        >>> q, kv = pt.zeros((2, 3, 8), pt.f32), pt.ones((1, 3, 8), pt.f32)
        >>> with RingAttention(pt.init(), staging_bytes=1 << 16) as ring:
        ...     float(ring.attention(q, kv, kv).sync().numpy().sum())
        48.0
        """
        name = "attention"
        self._check_open(name)
        check_shape(f"{name}: q", q, self.device, FLOATS, ("heads", "tokens", "dim"))
        heads, tokens, dim = q.shape
        check_shape(f"{name}: k", k, self.device, (q.dtype,), ("groups", tokens, dim))
        check_shape(f"{name}: v", v, self.device, (q.dtype,), k.shape)
        groups = k.shape[0]
        if not 1 <= dim <= WIDEST_HEAD:
            raise ArgumentError(f"{name}: q: expected heads of 1 to {WIDEST_HEAD} elements, got {dim}")
        if groups == 0 or heads % groups:
            raise ArgumentError(
                f"{name}: k: expected a number of heads that divides the {heads} of q, got {groups}; "
                "heads of q share those of k and v in order"
            )
        if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
            raise ArgumentError(f"{name}: scale: expected a number, got {scale!r}")
        shares = self._shares(f"{name}: rows", rows, tokens)
        longest = max(max(shares), 1)
        o = self.device.empty(q.shape, q.dtype) if out is None else out
        check_shape(f"{name}: out", o, self.device, (q.dtype,), q.shape)
        on_gpu = self.device.driver.kind is DriverKind.CUDA
        wide = max(power_of_two(dim), 16 if on_gpu else 2)
        most = self.tile or (64, 64 if on_gpu else 128)
        bq, bk = (max(min(power_of_two(longest), n), 16 if on_gpu else 1) for n in most)
        blocks, sums = (4 * groups, longest, dim), (heads, longest, 2 * wide)
        for shape, dtype, what in ((blocks, q.dtype, "two blocks of keys and values"), (sums, f32, "sums")):
            need = shape[0] * shape[1] * shape[2] * dtype.itemsize
            if need > self.staging_bytes:
                raise ArgumentError(
                    f"{name}: expected {what} to fit into {self.staging_bytes} bytes of staging, got {need}; "
                    f"make the communicator with staging_bytes={need}"
                )
        launch = ring_attention_kernels.ring_attend(
            o.partition((1, bq, wide)).persistent(programs=self.programs, spare=self.movers), q, k, v, self._hello,
            self._seen_as(self._slots, q.dtype, blocks), self._seen_as(self._sums, f32, sums), self._arrived,
            self._free, self._turn, self._starts(shares), float(dim) ** -0.5 if scale is None else float(scale),
            self._number(shares, heads, groups, dim), BK=bk, CAUSAL=bool(causal), MOVERS=self.movers,
            MR=min(MOVED_ROWS, power_of_two(longest), bk),
        )  # fmt: skip
        return self._met(launch).map(lambda *_: o)
