"""Small programs with the kernels of the library that the programs of tests/fused, the collectives of test_library.py
and the examples leave out. No pytest here: they run as ranks, and on the simulated machine; each looks at its values."""

import math

import numpy as np

import peertile as pt
from peertile.ir.ops import Precision
from peertile.library import attention_kernels, gemm, gradients, layer_kernels, layers
from peertile.library.collectives import Collectives
from peertile.library.cuda_collectives import GpuPlans, Shape, heap_bytes
from peertile.library.fft import Fourier
from peertile.library.multimem import MulticastCollectives
from peertile.library.products import Way, matmul
from peertile.library.products import _launched as product_by
from peertile.library.reductions import ReduceOp
from peertile.library.selection import GPU_ONLY, Algorithm

__all__ = ["MORE", "gpu_moves", "gpu_plan", "values"]


def values(rank: int, n: int) -> np.ndarray:
    return (np.arange(n) % 7 + rank).astype(np.float32)


# ---------------------------------------------------------------- collectives


def in_place(algorithm: Algorithm, n: int):
    """All-reduces of a tensor into itself."""

    def main(group) -> None:
        with Collectives(group, programs=2, slot_bytes=4096) as c:
            for turn in range(2):
                x = pt.asarray(values(group.rank + turn, n))
                c.all_reduce(x, x, algorithm=algorithm).sync()
                assert np.array_equal(x.numpy(), sum(values(r + turn, n) for r in range(group.size)))

    return main


def symmetric(group) -> None:
    """Collectives of tensors of a heap, which peers read where they lie."""
    size, me, n = group.size, group.rank, 60
    with pt.SymmetricHeap(group, size_bytes=1 << 23) as heap, Collectives(heap, programs=2, slot_bytes=4096) as c:
        x, out = heap.zeros((n,), pt.f32), heap.zeros((n,), pt.f32)
        for turn, algorithm in enumerate((Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)):
            x.copy_from(values(me + turn, n))
            c.all_reduce(x, out, algorithm=algorithm).sync()
            assert np.array_equal(out.numpy(), sum(values(r + turn, n) for r in range(size)))
        rows = heap.zeros((size, n), pt.f32)
        rows.copy_from(np.stack([values(me + r, n) for r in range(size)]))
        part = c.reduce_scatter(rows).sync()
        assert np.array_equal(part.numpy().ravel(), sum(values(r + me, n) for r in range(size)))
        whole = c.all_gather(x).sync()
        assert np.array_equal(whole.numpy().ravel(), np.concatenate([values(r + 1, n) for r in range(size)]))


def traded(group) -> None:
    """All-to-all of different counts, nothing among them."""
    size, me = group.size, group.rank
    counts = [[(3 * r + 5 * to) % 4 * 5 for to in range(size)] for r in range(size)]  # from rank r to rank `to`
    with Collectives(group, programs=2, slot_bytes=4096) as c:
        for turn in range(2):
            mine = np.concatenate([values(me + to + turn, counts[me][to]) for to in range(size)])
            got = c.all_to_all_v(pt.asarray(mine), counts[me], [row[me] for row in counts]).sync().numpy()
            assert np.array_equal(got, np.concatenate([values(r + me + turn, counts[r][me]) for r in range(size)]))


def gpu_plan(algorithm: Algorithm, tile: int):
    """All-reduces by the kernels for GPUs, out of place and in place, one tile to a program and several."""

    def main(group) -> None:
        size = group.size
        with pt.SymmetricHeap(group, size_bytes=heap_bytes(size, 2) + (1 << 16)) as heap:
            plans, x, out = GpuPlans(heap, 2), pt.asarray(values(group.rank, 60)), pt.zeros((60,), pt.f32)
            for shape in (Shape(algorithm, 2, tile), Shape(algorithm, 2, tile // 4)):
                for _ in range(2):
                    plans.all_reduce(shape, x, out, ReduceOp.SUM).sync()
                    assert np.array_equal(out.numpy(), sum(values(r, 60) for r in range(size)))
                plans.all_reduce(shape, None, out, ReduceOp.MAX).sync()

    return main


def gpu_moves(algorithm: Algorithm, tile: int):
    """The other collectives by the kernels for GPUs, with tiles of two sizes one behind the other."""

    def main(group) -> None:
        size, me = group.size, group.rank
        with pt.SymmetricHeap(group, size_bytes=heap_bytes(size, 2) + (1 << 16)) as heap:
            plans, n = GpuPlans(heap, 2), 60
            rows = [values(r, size * n).reshape(size, n) for r in range(size)]
            x, whole, part = pt.asarray(rows[me].reshape(-1)), pt.zeros((size * n,), pt.f32), pt.zeros((n,), pt.f32)
            mine = pt.asarray(rows[me][0])
            for shape in (Shape(algorithm, 2, tile), Shape(algorithm, 2, tile // 4)):
                plans.reduce_scatter(shape, x, part, ReduceOp.SUM).sync()
                assert np.array_equal(part.numpy(), sum(r[me] for r in rows))
                plans.gather(shape, mine, whole, each=False).sync()
                assert np.array_equal(whole.numpy(), np.concatenate([r[0] for r in rows]))
                plans.gather(shape, x, whole, each=True).sync()
                assert np.array_equal(whole.numpy(), np.concatenate([r[me] for r in rows]))

    return main


def multicast(group) -> None:
    """Collectives over tensors that one address reaches everywhere."""
    size, me, n = group.size, group.rank, 16
    with pt.SymmetricHeap(group, size_bytes=1 << 20) as heap:
        many, x = MulticastCollectives(heap, programs=2), heap.multicast((n * size,), pt.f32)
        words = heap.multicast((2,), pt.u64)
        x.copy_from(values(me, n * size))
        words.copy_from(np.zeros(2, np.uint64))
        group.barrier("written")
        many.all_reduce(x).sync()
        total = sum(values(r, n * size) for r in range(size))
        assert np.array_equal(x.numpy(), total)
        part = pt.zeros((n,), pt.f32)
        many.reduce_scatter(part, x).sync()
        assert np.array_equal(part.numpy(), size * total[n * me : n * (me + 1)])
        many.all_gather(x, part).sync()
        assert np.array_equal(x.numpy(), size * total)
        if me == 0:
            many.signal(words, 7).sync()
        many.signal(words, me + 1, 1, add=True).sync()
        group.barrier("told")
        assert words.numpy().tolist() == [7, size * (size + 1) // 2]


# ---------------------------------------------------------------- one rank's kernels


def near(got, want) -> None:
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


def _normal(group, *shape) -> np.ndarray:
    return np.random.default_rng((group.rank, *shape)).standard_normal(shape).astype(np.float32)


def products(group) -> None:
    """Every way to multiply: tile by tile, in turns, with smaller tiles at the end, in shares, through a turned copy."""
    a, b = _normal(group, 6, 8), _normal(group, 8, 10)
    x, w, want = pt.asarray(a), pt.asarray(b), a.astype(np.float64) @ b
    consts = {"BK": 4, "STAGES": 2, "TF32": False}
    for way in (
        Way((4, 4), 4, 2, is_persistent=False), Way((4, 4), 4, 2), Way((4, 4), 4, 2, split=2),
    ):  # fmt: skip
        z = pt.zeros((6, 10), pt.f32)
        near(product_by(x, w, z, way, consts).sync().numpy(), want)
    z = pt.zeros((6, 10), pt.f32)
    cut = (z[:4].partition((2, 4)).persistent(programs=2), z[4:].partition((2, 2)).persistent(programs=2))
    gemm.gemm_tailed(*cut, x[:4], x[4:], w, **consts).sync()
    near(z.numpy(), want)
    z = pt.zeros((6, 10), pt.f32)
    panels = (z[:, :8].partition((4, 4)).persistent(programs=2), z[:, 8:].partition((4, 1)).persistent(programs=2))
    gemm.gemm_wide(*panels, x, w[:, :8], w[:, 8:], BK=4, STAGES=2).sync()
    near(z.numpy(), want)
    turned = pt.zeros((10, 8), pt.f32)
    gemm.turn(turned.partition((4, 4)), w).sync()
    assert np.array_equal(turned.numpy(), b.T)
    near(matmul(x, turned.permute(1, 0), precision=Precision.TF32).sync().numpy(), want)
    row = pt.zeros((1, 10), pt.f32)
    more = {"STAGES": 1, "ACTIVATION": "none", "BIASED": False, "ADDED": False}
    layer_kernels.linear_row(row.partition((1, 4)), x[:1], w, w, x[:1], BK=4, **more).sync()
    near(row.numpy(), want[:1])


def rows(group) -> None:
    """Softmax, transforms of rows, attention as GPUs have it."""
    x = _normal(group, 3, 8)
    weight = np.exp(x.astype(np.float64))
    near(layers.softmax(pt.asarray(x)).sync().numpy(), weight / weight.sum(1, keepdims=True))
    real, imag = Fourier(8).forward(pt.asarray(x), pt.asarray(x[::-1].copy())).sync()
    want = np.fft.fft(x + 1j * x[::-1].astype(np.float64))
    near(real.numpy(), want.real)
    near(imag.numpy(), want.imag)
    q, k, v = (_normal(group, 2, 4, 2 + s)[:, :, :2].copy() for s in range(3))  # [heads, tokens, 2]
    out = pt.zeros((4, 2, 2), pt.f32)
    flat = pt.asarray(q.reshape(8, 2))
    attention_kernels.attend_flat(
        out.partition((2, 1, None)).persistent(programs=2), flat, pt.asarray(k), pt.asarray(v),
        2**-0.5 / math.log(2), BK=2, CAUSAL=True,
    ).sync()  # fmt: skip
    score = np.where(np.tri(4) > 0, np.einsum("hsd,htd->hst", q, k) / 2**0.5, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    near(out.numpy(), np.einsum("hst,htd->shd", weight / weight.sum(-1, keepdims=True), v))


def gradients_of_layers(group) -> None:
    """What a linear map's gradients are made of, in f64."""
    x, w = _normal(group, 3, 5).astype(np.float64), _normal(group, 5, 4).astype(np.float64)
    a = pt.asarray(x)
    near(gradients.product(a, pt.asarray(w)).sync().numpy(), x @ w)
    near(gradients.column_sum(a).sync().numpy(), x.sum(0))
    sigma = 1 / (1 + np.exp(-x))
    near(gradients.activate(a, layers.Activation.SILU).sync().numpy(), x * sigma)
    slope = gradients.activation_gradient(pt.ones((3, 5), pt.f64), a, layers.Activation.SILU)
    near(slope.sync().numpy(), sigma * (1 + x * (1 - sigma)))
    near(gradients.add_bias(a, pt.asarray(w[:, 0].copy())).sync().numpy(), x + w[:, 0])


MORE = {
    **{
        f"all_reduce {a.value} in place": in_place(a, 4 if a is Algorithm.FLAGGED else 100)
        for a in Algorithm
        if a not in GPU_ONLY | {Algorithm.MULTIMEM}
    },
    "symmetric tensors": symmetric,
    "all_to_all_v": traded,
    **{
        f"for GPUs, {name} {tile}": gpu_plan(Algorithm(name), tile)
        for name, tile in (("flagged", 32), ("filled", 16), ("filled", 64), ("pushed", 32))
    },
    **{f"for GPUs, moves, {name}": gpu_moves(Algorithm(name), 32) for name in ("flagged", "pushed")},
    "multicast": multicast,
    "products": products,
    "rows": rows,
    "gradients": gradients_of_layers,
}
