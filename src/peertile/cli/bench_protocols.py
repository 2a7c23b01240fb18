"""Small programs of two ranks, one for each protocol of signals, words and mailboxes in the library: what
`peertile bench checker` and its tests run in every order that differs. Each looks at its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from peertile.comm.symmetric import SymmetricHeap
from peertile.creation import asarray, zeros
from peertile.dtypes import DType, f32, u64
from peertile.library.collectives import Collectives
from peertile.library.cuda_collectives import GpuPlans, Shape, heap_bytes
from peertile.library.experts import Experts
from peertile.library.fused import FusedProducts
from peertile.library.multimem import MulticastCollectives
from peertile.library.reductions import ReduceOp
from peertile.library.ring_attention import RingAttention
from peertile.library.selection import GPU_ONLY, Algorithm

__all__ = ["TURNS", "Program", "protocols", "with_collectives"]

Program = Callable[[Any], None]
Collective = Callable[[Collectives, int, int], None]
TURNS: Final = 2
"""Calls of each collective, one behind the other: what is kept between two is part of a protocol."""


def protocols() -> dict[str, Program]:
    """By name, every protocol of the library."""
    found = {name: with_collectives(call, TURNS) for name, call in _collectives().items()}
    return found | _gpu_kernels() | _multicast() | _fused()


def with_collectives(call: Collective, turns: int = 1, programs: int = 1) -> Program:
    """A program that makes `turns` calls with one communicator."""

    def main(group: Any) -> None:
        with Collectives(group, programs=programs, slot_bytes=4096) as c:
            for turn in range(turns):
                call(c, group.rank, turn)

    return main


def _vector(me: int, turn: int, n: int = 40) -> Any:
    return asarray(np.full(n, 1.0 + me + turn, np.float32))


def _collectives() -> dict[str, Collective]:
    def all_reduce(algorithm: Algorithm, n: int) -> Collective:
        def call(c: Collectives, me: int, turn: int) -> None:
            out = c.all_reduce(_vector(me, turn, n), algorithm=algorithm).sync().numpy()
            assert np.array_equal(out, np.full(n, 3.0 + 2 * turn))

        return call

    def in_place(algorithm: Algorithm) -> Collective:
        def call(c: Collectives, me: int, turn: int) -> None:
            x = _vector(me, turn)
            assert np.array_equal(c.all_reduce(x, x, algorithm=algorithm).sync().numpy(), np.full(40, 3.0 + 2 * turn))

        return call

    here = [a for a in Algorithm if a not in GPU_ONLY | {Algorithm.MULTIMEM}]
    found = {f"all_reduce.{a.value}": all_reduce(a, 2 if a is Algorithm.FLAGGED else 40) for a in here}
    found |= {f"all_reduce.{a.value}.in_place": in_place(a) for a in here if a is not Algorithm.FLAGGED}
    found["all_reduce.two_shot.pipelined"] = all_reduce(Algorithm.TWO_SHOT, 200)
    found |= {
        "barrier": lambda c, me, turn: c.barrier().sync(),
        "reduce_scatter": lambda c, me, turn: _ignore(c.reduce_scatter(_vector(me, turn)).sync()),
        "all_gather": lambda c, me, turn: _ignore(c.all_gather(_vector(me, turn)).sync()),
        "all_to_all": lambda c, me, turn: _ignore(c.all_to_all(_vector(me, turn)).sync()),
        "broadcast": lambda c, me, turn: _ignore(c.broadcast(_vector(me, turn), root=turn % 2).sync()),
        "reduce": lambda c, me, turn: _ignore(c.reduce(_vector(me, turn), root=turn % 2).sync()),
        "all_to_all_v": lambda c, me, turn: _ignore(c.all_to_all_v(_vector(me, turn), [20, 20], [20, 20]).sync()),
    }
    return found


def _ignore(_: Any) -> None:
    """For calls whose values are looked at elsewhere."""


# ---------------------------------------------------------------- kernels for GPUs, multicast


def _rows(n: int) -> np.ndarray:
    """What two ranks have for two ranks: [whose, for whom, element]."""
    return np.arange(4 * n, dtype=np.float32).reshape(2, 2, n)


def _gpu_kernels() -> dict[str, Program]:
    def program(algorithm: Algorithm, tile: int, call: Callable[[GpuPlans, Shape, int], None]) -> Program:
        def main(group: Any) -> None:
            with SymmetricHeap(group, size_bytes=heap_bytes(2, 1) + (1 << 16)) as heap:
                call(GpuPlans(heap, 1), Shape(algorithm, 1, tile), group.rank)

        return main

    def all_reduce(n: int, turns: int) -> Callable[[GpuPlans, Shape, int], None]:
        def call(plans: GpuPlans, shape: Shape, me: int) -> None:
            for turn in range(turns):
                out = zeros((n,), f32)
                plans.all_reduce(shape, _vector(me, turn, n), out, ReduceOp.SUM).sync()
                assert np.array_equal(out.numpy(), np.full(n, 3.0 + 2 * turn))

        return call

    def reduce_scatter(n: int) -> Callable[[GpuPlans, Shape, int], None]:
        def call(plans: GpuPlans, shape: Shape, me: int) -> None:
            out = zeros((n,), f32)
            plans.reduce_scatter(shape, asarray(_rows(n)[me].reshape(-1)), out, ReduceOp.SUM).sync()
            assert np.array_equal(out.numpy(), _rows(n)[:, me].sum(0))

        return call

    def gather(n: int, each: bool) -> Callable[[GpuPlans, Shape, int], None]:
        def call(plans: GpuPlans, shape: Shape, me: int) -> None:
            given, out = _rows(n)[me] if each else _rows(n)[me, :1], zeros((2 * n,), f32)
            plans.gather(shape, asarray(given.reshape(-1)), out, each=each).sync()
            assert np.array_equal(out.numpy(), _rows(n)[:, me if each else 0].reshape(-1))

        return call

    flagged, filled, pushed = Algorithm.FLAGGED, Algorithm.FILLED, Algorithm.PUSHED
    found = {
        "gpu.all_reduce.flagged": program(flagged, 2, all_reduce(2, 1)),
        "gpu.all_reduce.filled": program(filled, 2, all_reduce(2, 1)),
        "gpu.all_reduce.pushed": program(pushed, 32, all_reduce(8, TURNS)),
    }
    for algorithm, n in ((flagged, 1), (pushed, 4)):
        found[f"gpu.reduce_scatter.{algorithm.value}"] = program(algorithm, n, reduce_scatter(n))
        found[f"gpu.all_gather.{algorithm.value}"] = program(algorithm, n, gather(n, each=False))
        found[f"gpu.all_to_all.{algorithm.value}"] = program(algorithm, n, gather(n, each=True))
    return found


def _multicast() -> dict[str, Program]:
    def program(call: Callable[[MulticastCollectives, Any, Any, int], None]) -> Program:
        def main(group: Any) -> None:
            with SymmetricHeap(group, size_bytes=1 << 20) as heap:
                many = MulticastCollectives(heap, programs=1)
                x, words = heap.multicast((8,), f32), heap.multicast((1,), u64)
                x.copy_from(np.full(8, 1.0 + group.rank, np.float32))
                words.copy_from(np.zeros(1, np.uint64))
                group.barrier("written")
                call(many, x, words, group.rank)
                group.barrier("done")

        return main

    def all_reduce(many: MulticastCollectives, x: Any, words: Any, me: int) -> None:
        many.all_reduce(x).sync()
        assert np.array_equal(x.numpy(), np.full(8, 3.0))

    def reduce_scatter(many: MulticastCollectives, x: Any, words: Any, me: int) -> None:
        part = zeros((4,), f32)
        many.reduce_scatter(part, x).sync()
        assert np.array_equal(part.numpy(), np.full(4, 3.0))

    def all_gather(many: MulticastCollectives, x: Any, words: Any, me: int) -> None:
        many.all_gather(x, _vector(me, 0, 4)).sync()
        assert np.array_equal(x.numpy(), np.repeat(np.array([1, 2], np.float32), 4))

    def signal(many: MulticastCollectives, x: Any, words: Any, me: int) -> None:
        many.signal(words, me + 1, 0, add=True).sync()
        many.heap.group.barrier("told")
        assert words.numpy().tolist() == [3]

    calls = (all_reduce, reduce_scatter, all_gather, signal)
    return {f"multicast.{call.__name__}": program(call) for call in calls}


# ---------------------------------------------------------------- products, attention, experts


def _fused() -> dict[str, Program]:
    def products(call: Callable[[FusedProducts, int], None], **options: Any) -> Program:
        def main(group: Any) -> None:
            with FusedProducts(group, workers=1, tile=(2, 4, 4), staging_bytes=1 << 14, **options) as c:
                call(c, group.rank)

        return main

    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(9, dtype=np.float32).reshape(3, 3)

    def gathered(c: FusedProducts, me: int) -> None:
        out = zeros((4, 3), f32)
        c.all_gather_matmul(asarray(a + me), asarray(b), out, rows=[2, 2]).sync()
        assert np.array_equal(out.numpy(), np.concatenate([a, a + 1]) @ b)

    def scattered(c: FusedProducts, me: int) -> None:
        out = zeros((1, 3), f32)
        c.matmul_reduce_scatter(asarray(a + me), asarray(b), out, rows=[1, 1], inner=[3, 3]).sync()
        assert np.array_equal(out.numpy(), (a @ b + (a + 1) @ b)[me : me + 1])

    def reduced(c: FusedProducts, me: int) -> None:
        out = zeros((1, 3), f32)
        c.matmul_all_reduce(asarray(a[:1] + me), asarray(b), out, inner=[3, 3]).sync()
        assert np.array_equal(out.numpy(), a[:1] @ b + (a[:1] + 1) @ b)

    def attention(group: Any) -> None:
        q = np.ones((1, 2, 4), np.float32)
        with RingAttention(group, staging_bytes=1 << 14, workers=1, tile=(2, 4)) as attend:
            out = zeros((1, 2, 4), f32)
            attend.attention(asarray(q), asarray(q), asarray(q * (1 + group.rank)), out, rows=[2, 2]).sync()
            assert np.allclose(out.numpy(), np.full((1, 2, 4), 1.5))

    def experts(k: int, partials: DType | None = None) -> Callable[[Any], None]:
        """Each rank has k experts, and each row chooses those of one rank."""

        def main(group: Any) -> None:
            me = group.rank
            with Experts(
                group, experts=2 * k, rows=2, width=2, top_k=k, dtype=f32, partials=partials, workers=1
            ) as moe:
                x = np.arange(4, dtype=np.float32).reshape(2, 2) + 4 * me
                sent = moe.dispatch(asarray(x), asarray(np.arange(2 * k).reshape(2, k))).sync()
                assert sent.counts.numpy()[:, 0].tolist() == [2] * k
                out = zeros((2, 2), f32)
                moe.combine(sent, asarray(np.ones((2, k), np.float32)), out=out).sync()
                assert np.array_equal(out.numpy(), k * x)

        return main

    return {
        "fused.all_gather_product": products(gathered),
        "fused.product_reduce_scatter": products(scattered),
        "fused.product_all_reduce": products(reduced),
        "fused.product_all_reduce.flagged": products(reduced, flagged=True),
        "fused.ring_attention": attention,
        "fused.experts": experts(1),
        "fused.experts.copied": experts(2),
        "fused.experts.added_first": experts(2, f32),
    }
