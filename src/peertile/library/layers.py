"""Layers of neural networks as lazy operations: linear maps, norms, softmax, gated units, lookups, pooling.

Each function checks its arguments, chooses tiles and gives a `DeviceOp` whose result is the output: `out`, or a new
tensor that is allocated at once and written when the operation runs. Tensors are f32, f16 or bf16; everything is
computed in f32 and rounded once, and has the same bits on every run. All arithmetic is in layer_kernels.py, in the
public language; nothing here waits, copies, or holds weights. Attention and what belongs to it is in attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from math import prod
from typing import Any

from peertile.dtypes import DType, bf16, f16, f32, i32, i64
from peertile.errors import ArgumentError
from peertile.library import layer_kernels as kernels
from peertile.library.products import choose_product
from peertile.op import value
from peertile.runtime.device import Device
from peertile.runtime.driver import DriverKind
from peertile.runtime.op import DeviceOp
from peertile.runtime.tensor import Tensor

__all__ = [
    "Activation",
    "WeightLayout",
    "embedding",
    "layer_norm",
    "linear",
    "mean_pool",
    "rms_norm",
    "softmax",
    "swiglu",
]

FLOATS = (f32, f16, bf16)
INDICES = (i32, i64)
ROW_ELEMENTS = 4096
"""Elements of a tile of rows: a GPU program keeps them in registers, a core in its first cache."""
LONE_ROW = 1024
"""Elements of a row of f32 from which on a program of a GPU has one alone. RMSNorm of 16384 rows of 1024 takes an H200
33.2 us so, and 34.2 with four rows a program, as its end waits for the last of fewer and longer ones. Of bf16, which
has less to load for each thread then, it takes 20.8 and 18.0 us."""
AGAIN_FROM = 2048
"""Elements of a row of f32 from which on a GPU loads it twice for RMSNorm, and does not hold it in between: 16384 rows
of 2048, 4096, 8192 and 16384 take an H200 64.0, 126.1, 250.8 and 499.8 us so, and 66.2, 128.5, 255.0 and 516.3 held."""
AGAIN_NARROW = (4096, 16384)
"""From and to how many elements, padded, a row of 16 bits is loaded twice there, where nothing is added and the gain is
as narrow: 16384 rows of 4096, 8192 and 16384 take an H200 64.0, 125.6 and 255.5 us so, and 65.4, 127.8 and 259.2 held.
"""
EARLY_BYTES = (1 << 12, 1 << 15)
"""From and to how many bytes of a row its gain, of its type, is loaded before it is folded there, if nothing is added:
16384 rows of 2048 bf16 take an H200 33.0 us so, and 33.5 otherwise; of 1024, four a program, 18.1 and 17.8. The threads
of a longer row have no registers for it."""
NARROW_ROW, NARROW_ROWS, NARROW_FROM = 1024, 8, 4096
"""Elements of a short row of 16 bits, padded, so many of which RMSNorm gives a program there, if there are enough rows:
4096 and 16384 of them take an H200 5.6 and 17.6 us so, with the gain early and one quotient, 5.7 and 17.9 without, and
6.0 and 17.7 with half as many a program."""
WIDEST_ROW = 1 << 17
"""Elements of the widest row that one program owns."""


class Activation(Enum):
    """What is applied to a linear map: x, max(x, 0), x Φ(x) by erf, x σ(x)."""

    NONE = "none"
    RELU = "relu"
    GELU = "gelu"
    SILU = "silu"


class WeightLayout(Enum):
    """How the weights of a linear map lie: [inputs, outputs], or [outputs, inputs] as torch keeps them."""

    IN_OUT = "in_out"
    OUT_IN = "out_in"


# -------------------------------------------------------------------- checks


def check_tensor(
    layer: str, role: str, t: Any, dtypes: Sequence[DType], axes: Sequence[str | int], device: Device | None = None
) -> Tensor:
    """`t`, a tensor of one of `dtypes` on `device` whose axes are as said: a number is an extent, a name any."""
    if not isinstance(t, Tensor):
        raise ArgumentError(f"{layer}: {role}: expected a tensor, got {type(t).__name__}; pt.asarray makes one")
    if t.dtype not in dtypes:
        raise ArgumentError(f"{layer}: {role}: expected {' or '.join(d.name for d in dtypes)}, got {t.dtype}")
    fits = len(t.shape) == len(axes) and all(
        isinstance(want, str) or want == got for want, got in zip(axes, t.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(axis) for axis in axes)
        raise ArgumentError(f"{layer}: {role}: expected [{wanted}], got {list(t.shape)}")
    if device is not None and t.device is not device:
        raise ArgumentError(f"{layer}: {role}: expected a tensor of {device.name}, got one of {t.device.name}")
    return t


def output(layer: str, out: Any, shape: tuple[int, ...], dtype: DType, device: Device) -> Tensor:
    """`out` checked, or a new tensor."""
    return device.empty(shape, dtype) if out is None else check_tensor(layer, "out", out, (dtype,), shape, device)


def as_rows(layer: str, role: str, t: Any, device: Device | None = None) -> Tensor:
    """A float tensor as a matrix of its last axis; of more than two axes it has to be without gaps."""
    tensor = check_tensor(layer, role, t, FLOATS, t.shape if isinstance(t, Tensor) else (), device)
    if len(tensor.shape) == 2:
        return tensor
    if len(tensor.shape) > 2 and not tensor.is_contiguous:
        raise ArgumentError(
            f"{layer}: {role}: expected a matrix, or more axes without gaps, got strides {tensor.strides} "
            f"for {list(tensor.shape)}; pt.dup makes a copy without gaps"
        )
    return tensor.reshape(prod(tensor.shape[:-1]), tensor.shape[-1])


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def check_epsilon(layer: str, epsilon: Any) -> float:
    """A number that is not negative."""
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not epsilon >= 0:
        raise ArgumentError(f"{layer}: epsilon: expected a number >= 0, got {epsilon!r}")
    return float(epsilon)


def _is_f32_on_gpu(z: Tensor) -> bool:
    return z.device.target is not None and z.dtype.itemsize == 4


def _whole_rows(layer: str, z: Tensor) -> Any:
    """A matrix in tiles of whole rows."""
    rows, width = z.shape
    if width > WIDEST_ROW:
        raise ArgumentError(f"{layer}: x: expected rows of at most {WIDEST_ROW} elements, got {width}")
    high = max(1, min(power_of_two(rows), ROW_ELEMENTS // power_of_two(width)))
    if _is_f32_on_gpu(z) and width >= LONE_ROW:
        high = 1
    return z.partition((high, None))


# -------------------------------------------------------------------- linear


@lru_cache(maxsize=1024)
def _linear_way(rows: int, columns: int, inner: int, programs: int) -> tuple[tuple[int, int], int]:
    """Tile and inner extent for a product on cpu: the fewest padded multiply-adds of the busiest thread.

    The weights say how much slower a small tile is for each multiply-add: 128 x 128 with 128 inside was the fastest
    or within 4 % of it for K and N of 384 to 1536 on a Zen 5; a tile of few rows reads the second factor more often.
    """

    def cost(bm: int, bn: int) -> float:
        tiles = -(-rows // bm) * -(-columns // bn)
        slower = {128: 1.0, 64: 1.08, 32: 1.2, 16: 1.4, 8: 1.8, 4: 3.0, 2: 5.0, 1: 8.0}[bm]
        return -(-tiles // programs) * bm * bn * slower * {128: 1.0, 64: 1.05, 32: 1.2}[bn]

    tile = min(((bm, bn) for bm in (128, 64, 32, 16, 8, 4, 2, 1) for bn in (128, 64, 32)), key=lambda t: cost(*t))
    depth = min((128, 64, 32), key=lambda bk: -(-inner // bk) * bk * {128: 1.0, 64: 1.05, 32: 1.15}[bk])
    return tile, depth


ROW_TILE_BYTES = 16384
"""Of a weight in a program's hands at a time, where a GPU multiplies it by one row."""
ROW_PROGRAMS = 256


def _row_way(columns: int, element_bytes: int, is_by_columns: bool) -> tuple[tuple[int, int], int, int]:
    """Tile, inner extent and stages for one row on a GPU, by what was fastest or nearly so for K and N of 896 to 16384
    on an H200: programs for every multiprocessor, few columns each, and what they read next on its way."""
    most = 8 if is_by_columns else 128 // element_bytes
    wide = max(8, min(most, power_of_two(columns // ROW_PROGRAMS + 1) // 2))
    return (1, wide), ROW_TILE_BYTES // element_bytes // wide, 3 if wide < 32 or element_bytes < 4 else 1


FEW_TILES = (((64, 128), 16, 64), ((64, 64), 32, 64), ((16, 64), 32, 64), ((16, 32), 64, 32), ((16, 16), 64, 0))
"""Tiles for f32 on a GPU, the inner extent of each, and how many of them make it worth while."""


def _f32_way(rows: int, columns: int) -> tuple[tuple[int, int], int]:
    """Tile and inner extent for f32 on a GPU: the largest that keeps its multiprocessors busy. What this gives was the
    fastest of them, on an H200, for 16 and 256 rows with K and N of 384 to 1536, and for 4096."""
    return next(
        (tile, depth) for tile, depth, least in FEW_TILES if -(-rows // tile[0]) * -(-columns // tile[1]) >= least
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = Activation.NONE,
    layout: WeightLayout = WeightLayout.IN_OUT,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> DeviceOp[Tensor]:
    """out = activation(x @ weight + bias) + residual, in one kernel.

    x [..., inputs]; weight [inputs, outputs] of the same dtype, or [outputs, inputs] with `WeightLayout.OUT_IN`; bias
    [outputs] of any float type; residual and out [..., outputs] of x's dtype. Sums are f32. ArgumentError for what
    does not fit together.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.layers import Activation, linear
    >>> x = pt.asarray(np.array([[1.0, -2.0]], np.float32))
    >>> w = pt.asarray(np.eye(2, dtype=np.float32))
    >>> linear(x, w, activation=Activation.RELU).sync().numpy().tolist()
    [[1.0, 0.0]]
    """
    if not isinstance(activation, Activation):
        raise ArgumentError(f"linear: activation: expected an Activation, got {activation!r}")
    if not isinstance(layout, WeightLayout):
        raise ArgumentError(f"linear: layout: expected a WeightLayout, got {layout!r}")
    rows = as_rows("linear", "x", x)
    device, inputs = x.device, x.shape[-1]
    if layout is WeightLayout.IN_OUT:
        w = check_tensor("linear", "weight", weight, (x.dtype,), (inputs, "outputs"), device)
    else:
        w = check_tensor("linear", "weight", weight, (x.dtype,), ("outputs", inputs), device).permute(1, 0)
    outputs = w.shape[1]
    shape = (*x.shape[:-1], outputs)
    if bias is not None:
        check_tensor("linear", "bias", bias, FLOATS, (outputs,), device)
    if residual is not None:
        check_tensor("linear", "residual", residual, (x.dtype,), shape, device)
    y = output("linear", out, shape, x.dtype, device)
    flat = as_rows("linear", "out", y)
    if not y.size:
        return value(y, device=device)
    kernel = kernels.linear
    part: Any
    if device.driver.kind is DriverKind.CUDA and rows.shape[0] == 1:
        tile, depth, stages = _row_way(outputs, x.dtype.bits // 8, w.strides[0] == 1)
        kernel, part = kernels.linear_row, flat.partition(tile)
    elif device.driver.kind is DriverKind.CUDA and x.dtype is f32:
        (tile, depth), stages = _f32_way(rows.shape[0], outputs), 3
        part = flat.partition(tile).persistent(swizzle=8)
    elif device.driver.kind is DriverKind.CUDA:
        way = choose_product(device.target or "gpu", x.dtype.name, rows.shape[0])
        tile, depth, stages = way.tile, way.inner, way.stages
        part = flat.partition(tile).persistent(swizzle=8) if way.is_persistent else flat.partition(tile)
    else:
        tile, depth = _linear_way(rows.shape[0], outputs, inputs, device.persistent_programs)
        stages, part = 1, flat.partition(tile).persistent()
    more = rows if residual is None else as_rows("linear", "residual", residual)
    op = kernel(
        part, rows, w, w if bias is None else bias, more,
        BK=depth, STAGES=stages, ACTIVATION=activation.value, BIASED=bias is not None, ADDED=residual is not None,
    )  # fmt: skip
    return op.map(lambda *_: y)


# -------------------------------------------------------------------- rows


def softmax(x: Tensor, *, out: Tensor | None = None) -> DeviceOp[Tensor]:
    """out[…, i] = e^x[…, i] / Σ_j e^x[…, j] over the last axis, relative to the greatest element of the row.

    x [..., width] f32, f16 or bf16, width up to 131072; out has its shape and dtype. A row of -inf alone gives NaN.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.layers import softmax
    >>> softmax(pt.asarray(np.zeros((1, 4), np.float32))).sync().numpy().tolist()
    [[0.25, 0.25, 0.25, 0.25]]
    """
    rows = as_rows("softmax", "x", x)
    z = output("softmax", out, x.shape, x.dtype, x.device)
    if not z.size:
        return value(z, device=x.device)
    part = _whole_rows("softmax", as_rows("softmax", "out", z))
    return kernels.softmax(part, rows).map(lambda *_: z)


def layer_norm(
    x: Tensor,
    gain: Tensor,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-5,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> DeviceOp[Tensor]:
    """out = (u - mean u) / √(var u + epsilon) · gain + bias for each row of u = x + residual (Ba et al., 2016).

    x, residual and out [..., width] of one dtype; gain and bias [width] of any float type; width up to 131072. The
    variance is that of the row (divided by width), formed from differences to the mean.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.layers import layer_norm
    >>> x, ones = pt.asarray(np.array([[1.0, 3.0]], np.float32)), pt.ones((2,), pt.f32)
    >>> layer_norm(x, ones, epsilon=0.0).sync().numpy().tolist()
    [[-1.0, 1.0]]
    """
    epsilon = check_epsilon("layer_norm", epsilon)
    rows, more, z = _norm_arguments("layer_norm", x, gain, residual, out)
    if bias is not None:
        check_tensor("layer_norm", "bias", bias, FLOATS, x.shape[-1:], x.device)
    if not z.size:
        return value(z, device=x.device)
    op = kernels.layer_norm(
        _whole_rows("layer_norm", as_rows("layer_norm", "out", z)), rows, more, gain, gain if bias is None else bias,
        epsilon, ADDED=residual is not None, BIASED=bias is not None,
    )  # fmt: skip
    return op.map(lambda *_: z)


def rms_norm(
    x: Tensor,
    gain: Tensor,
    *,
    epsilon: float = 1e-6,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> DeviceOp[Tensor]:
    """out = u / √(mean u² + epsilon) · gain for each row of u = x + residual (Zhang and Sennrich, 2019).

    x, residual and out [..., width] of one dtype; gain [width] of any float type; width up to 131072.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.layers import rms_norm
    >>> x, ones = pt.asarray(np.array([[2.0, -2.0]], np.float32)), pt.ones((2,), pt.f32)
    >>> rms_norm(x, ones, epsilon=0.0).sync().numpy().tolist()
    [[1.0, -1.0]]
    """
    epsilon = check_epsilon("rms_norm", epsilon)
    rows, more, z = _norm_arguments("rms_norm", x, gain, residual, out)
    if not z.size:
        return value(z, device=x.device)
    flat, again, early, many = as_rows("rms_norm", "out", z), False, False, False
    part = _whole_rows("rms_norm", flat)
    if z.device.target is not None:
        width, size = power_of_two(x.shape[-1]), z.dtype.itemsize
        lean = residual is None and gain.dtype.itemsize == size
        early = lean and EARLY_BYTES[0] <= width * size <= EARLY_BYTES[1]
        again = x.shape[-1] >= AGAIN_FROM if size == 4 else lean and AGAIN_NARROW[0] <= width <= AGAIN_NARROW[1]
        many = size == 2 and lean and width == NARROW_ROW and flat.shape[0] >= NARROW_FROM
        if many:
            part = flat.partition((NARROW_ROWS, None))
    op = kernels.rms_norm(
        part, rows, more, gain, epsilon, ADDED=residual is not None, AGAIN=again, EARLY=early or many, SCALED=many
    )
    return op.map(lambda *_: z)


def _norm_arguments(layer: str, x: Any, gain: Any, residual: Any, out: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of x, rows of the residual (of x, unread, where there is none), and the output."""
    rows = as_rows(layer, "x", x)
    check_tensor(layer, "gain", gain, FLOATS, x.shape[-1:], x.device)
    more = rows
    if residual is not None:
        more = as_rows(layer, "residual", check_tensor(layer, "residual", residual, (x.dtype,), x.shape, x.device))
    return rows, more, output(layer, out, x.shape, x.dtype, x.device)


def swiglu(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> DeviceOp[Tensor]:
    """out = gate · σ(gate) · up (Shazeer, 2020). All [..., width] of one dtype; halves of one matrix are views of it.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.layers import swiglu
    >>> both = pt.asarray(np.array([[0.0, 100.0, 7.0, 2.0]], np.float32))
    >>> swiglu(both[:, :2], both[:, 2:]).sync().numpy().tolist()
    [[0.0, 200.0]]
    """
    rows = as_rows("swiglu", "gate", gate)
    other = as_rows("swiglu", "up", check_tensor("swiglu", "up", up, (gate.dtype,), gate.shape, gate.device))
    z = output("swiglu", out, gate.shape, gate.dtype, gate.device)
    if not z.size:
        return value(z, device=gate.device)
    flat = as_rows("swiglu", "out", z)
    columns = min(power_of_two(flat.shape[1]), 1024)
    part = flat.partition((min(power_of_two(flat.shape[0]), ROW_ELEMENTS // columns), columns))
    return kernels.swiglu(part, rows, other).map(lambda *_: z)


# -------------------------------------------------------------------- lookups and pooling


def embedding(table: Tensor, ids: Tensor, *, out: Tensor | None = None) -> DeviceOp[Tensor]:
    """out[i] = table[ids[i]]. table [rows, width] f32, f16 or bf16; ids [count] i32 or i64; out [count, width].

    An id that names no row ends the launch with KernelAssert.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.layers import embedding
    >>> table = pt.asarray(np.arange(6, dtype=np.float32).reshape(3, 2))
    >>> embedding(table, pt.asarray(np.array([2, 0]))).sync().numpy().tolist()
    [[4.0, 5.0], [0.0, 1.0]]
    """
    check_tensor("embedding", "table", table, FLOATS, ("rows", "width"))
    check_tensor("embedding", "ids", ids, INDICES, ("count",), table.device)
    z = output("embedding", out, (ids.shape[0], table.shape[1]), table.dtype, table.device)
    if not z.size:
        return value(z, device=table.device)
    columns = min(power_of_two(z.shape[1]), 512)
    part = z.partition((min(power_of_two(z.shape[0]), 8), columns))
    return kernels.embedding(part, table, ids).map(lambda *_: z)


def mean_pool(
    x: Tensor,
    mask: Tensor,
    *,
    normalise: bool = True,
    epsilon: float = 1e-12,
    out: Tensor | None = None,
) -> DeviceOp[Tensor]:
    """out[b] = the mean of the rows x[b, t] with mask[b, t] != 0, divided by max(its length, epsilon).

    x [batch, tokens, width]; mask [batch, tokens] i32 or i64; out [batch, width] of x's dtype. Without `normalise`
    it is the mean itself. What the mask leaves out may be anything, NaN too. Where it leaves out all, 0.

    >>> import numpy as np, peertile as pt
    >>> from peertile.library.layers import mean_pool
    >>> x = pt.asarray(np.array([[[3.0, 4.0], [9.0, 9.0]]], np.float32))
    >>> mean_pool(x, pt.asarray(np.array([[1, 0]]))).sync().numpy().astype(float).round(6).tolist()
    [[0.6, 0.8]]
    """
    epsilon = check_epsilon("mean_pool", epsilon)
    check_tensor("mean_pool", "x", x, FLOATS, ("batch", "tokens", "width"))
    check_tensor("mean_pool", "mask", mask, INDICES, x.shape[:2], x.device)
    batch, _, width = x.shape
    z = output("mean_pool", out, (batch, width), x.dtype, x.device)
    if not z.size:
        return value(z, device=x.device)
    if width > WIDEST_ROW:
        raise ArgumentError(f"mean_pool: x: expected rows of at most {WIDEST_ROW} elements, got {width}")
    op = kernels.mean_pool(
        z.partition((1, None)), x, mask, epsilon, BT=max(1, min(16, ROW_ELEMENTS // power_of_two(width))),
        UNIT=bool(normalise),
    )  # fmt: skip
    return op.map(lambda *_: z)
