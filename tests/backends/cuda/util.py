"""What the tests of the cuda backend share: a builder of kernels, kernels by text, and what PTX says."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from peertile.backends.cuda.triton_compile import triton_version
from peertile.dtypes import DType, b1, i32
from peertile.errors import VerifyError
from peertile.ir import ops
from peertile.ir.core import Block, Builder, Kernel, Value
from peertile.ir.ops import Binary, Compare, Fold, Rounding, Unary
from peertile.ir.text import parse_kernel
from peertile.ir.types import INDEX, Access, Space, TileType, Type, ViewType
from peertile.ir.verify import verify

PROVEN = ops.Bounds.PROVEN
N = 128
"""Elements of the tiles in kernels with every function."""
MODES = 10
"""Most tiles that `casts` writes for one dtype: each rounding, saturating and not."""


class K:
    """Builds one kernel op by op: `k.x` is the parameter x."""

    def __init__(self, name: str, *, unsafe: bool = False, grid_rank: int = 1, **params: Type) -> None:
        body = Block(list(params.values()), list(params))
        self.kernel = Kernel(name, tuple(params), body, unsafe=unsafe, grid_rank=grid_rank)
        self.b = Builder(body)
        self.params = dict(zip(params, body.args, strict=True))

    def __getattr__(self, name: str) -> Value:
        return self.params[name]

    def op(self, cls: type[ops.Op], *operands: Value, results: tuple[Type, ...] = (), **attrs: Any) -> ops.Op:
        return self.b.emit(cls, operands, results, **attrs)

    def v(self, cls: type[ops.Op], *operands: Value, t: Type, **attrs: Any) -> Value:
        return self.b.value(cls, operands, t, **attrs)

    def const(self, value: Any, t: TileType = INDEX) -> Value:
        return self.v(ops.Const, t=t, value=value)

    def full(self, value: Any, t: TileType) -> Value:
        scalar = self.const(value, TileType(t.dtype))
        return self.v(ops.Broadcast, scalar, t=t) if t.shape else scalar

    def try_(self, cls: type[ops.Op], *operands: Value, results: tuple[Type, ...], **attrs: Any) -> ops.Op | None:
        """The op, or None where its own rule forbids it."""
        op = cls(operands, results, attrs)
        try:
            op.verify()
        except VerifyError:
            return None
        return self.b.add(op)

    def load(self, view: Value, *index: Value, t: TileType, **attrs: Any) -> Value:
        return self.v(ops.Load, view, *index, t=t, bounds=PROVEN, **attrs)

    def store(self, view: Value, tile: Value, *index: Value) -> None:
        self.op(ops.Store, view, tile, *index, bounds=PROVEN)

    def done(self) -> Kernel:
        self.b.emit(ops.Return)
        verify(self.kernel, expanded=True)
        return self.kernel


def view(
    dtype: DType, rank: int = 1, access: Access = Access.READ_WRITE, space: Space = Space.LOCAL, **facts: Any
) -> ViewType:
    """A row-major view."""
    facts = {"unit_stride": (*[False] * (rank - 1), True) if rank else (), "align": 64} | facts
    return ViewType(dtype, rank, access, space, **facts)


def parsed(text: str) -> Kernel:
    kernel = parse_kernel(text)
    verify(kernel, expanded=True)
    return kernel


def body_of(source: str, name: str) -> str:
    """The statements of the kernel in emitted source."""
    return source.split(f"def {name}(\n", 1)[1].split("):\n", 1)[1]


def multiplies(ptx: str, instruction: str, arch: str) -> bool:
    """Whether a product is made by that instruction, which is what Triton 3.6 makes; a newer one may have put it on the
    tensor cores of the newest architectures."""
    newer = tuple(map(int, triton_version().split(".")[:2])) > (3, 6) and arch in ("sm_100", "sm_103")
    return any(word in ptx for word in (instruction, *(("mma.sync", "tcgen05.mma") if newer else ())))


def memory_ops(ptx: str) -> list[str]:
    """Ordered accesses, fences and block barriers of PTX, in order; weak accesses and shared memory left out."""
    found = []
    for line in ptx.splitlines():
        text = re.sub(r"^\s*(?:@!?%?\w+\s+)?", "", line)
        m = re.match(
            r"((?:ld|st)\.(?:relaxed|acquire|release)[\w.]*|(?:atom|red)\.[\w.]+|fence\.[\w.]+|bar(?:rier)?\.[\w.]+)",
            text,
        )
        if m is not None and "shared" not in m[1]:
            found.append(m[1])
    return found


# ---------------------------------------------------------------- kernels with every function


def elementwise(d):
    t, bools = TileType(d, (N,)), TileType(b1, (N,))
    k = K(f"elementwise_{d}", x=view(d), y=view(d), z=view(d), c=view(b1))
    x, y = k.load(k.x, k.const(0), t=t), k.load(k.y, k.const(0), t=t)
    results = [(k.try_(ops.UnaryOp, x, results=(t,), fn=fn), k.z) for fn in Unary]
    results += [(k.try_(ops.BinaryOp, x, y, results=(t,), fn=fn), k.z) for fn in Binary]
    results += [(k.try_(ops.CompareOp, x, y, results=(bools,), fn=fn), k.c) for fn in Compare]
    results += [(k.try_(ops.Fma, x, y, x, results=(t,)), k.z)]
    equal = k.v(ops.CompareOp, x, y, t=bools, fn=Compare.EQ)
    results += [(k.op(ops.Select, equal, x, y, results=(t,)), k.z)]
    folds = [k.try_(ops.Reduce, x, results=(TileType(d),), fn=fn, axis=0) for fn in Fold]
    results += [(k.op(ops.Broadcast, f.result, results=(t,)), k.z) for f in folds if f is not None]
    for n, (op, out) in enumerate(results):
        if op is not None:
            k.store(out, op.result, k.const(n))
    return k.done()


def casts(d, targets):
    k = K(f"cast_{d}", x=view(d), **{f"to_{o}": view(o) for o in targets})
    x = k.load(k.x, k.const(0), t=TileType(d, (N,)))
    modes = [(r, s) for r in (Rounding if d.is_float else [Rounding.DEFAULT]) for s in (False, True)]
    for o in targets:
        for i, (rounding, saturate) in enumerate(modes):
            tile = k.v(ops.Cast, x, t=TileType(o, (N,)), rounding=rounding, saturate=saturate)
            k.store(k.params[f"to_{o}"], tile, k.const(i))
    return k.done()


def pieces_of(d):
    """Pieces of tiles, sorting and scans of one dtype: parameters x, i (i32), z, w (i32), n (i64)."""
    t, others = TileType(d, (4, 16)), TileType(i32, (4, 16))
    k = K(f"pieces_{d}", x=view(d), i=view(i32), z=view(d), w=view(i32), n=INDEX)
    x = k.v(ops.Reshape, k.load(k.x, k.const(0), t=TileType(d, (64,))), t=t)
    index = k.v(ops.Reshape, k.load(k.i, k.const(0), t=TileType(i32, (64,))), t=others)
    piece = k.v(ops.Extract, x, k.n, k.const(1), t=TileType(d, (2, 4)))
    tiles = [k.v(ops.Take, x, index, t=t, axis=axis) for axis in (0, 1)]
    tiles.append(k.v(ops.Insert, x, piece, k.const(1), k.n, t=t))
    for axis, descending in ((0, False), (1, True)):
        op = k.op(ops.Sort, x, index, results=(t, others), axis=axis, descending=descending)
        tiles.append(op.results[0])
        moved = k.v(ops.Reshape, op.results[1], t=TileType(i32, (64,)))
        k.store(k.w, moved, k.const(axis))
    for n, tile in enumerate(tiles):
        k.store(k.z, k.v(ops.Reshape, tile, t=TileType(d, (64,))), k.const(n))
    return k.done()


# ---------------------------------------------------------------- numbers

TOLERANCE = {"f16": 2e-3, "bf16": 1.6e-2, "f32": 1e-5, "f64": 1e-12}


def numbers(rng, d, n=N):
    """Random values of a dtype, its ends and specials among them."""
    if d.is_bool:
        return rng.integers(0, 2, n).astype(bool)
    if d.is_int:
        x = rng.integers(d.min, d.max, n, dtype=d.numpy, endpoint=True)
        x = np.where(rng.integers(0, 3, n) == 0, rng.integers(0, 20, n).astype(d.numpy), x)
        x[:8] = [0, d.max, d.min, 1, d.max, d.min, 0, 3]
        if d.is_signed:
            x[8:12] = [-1, d.min, -1, d.min]
        return rng.permutation(x)
    x = rng.standard_normal(n) * np.exp2(rng.integers(-10, 10, n))
    x[:16] = [0, -0.0, 1, np.inf, -np.inf, np.nan, 2.5, -3.5, 300, -300, 7e4, -7e4, 3e9, -3e9, 1e19, -1e19]
    with np.errstate(all="ignore"):
        return (x.astype(np.float32) if d.bits < 32 else x).astype(d.numpy)


def same(got, want, d, tolerance=None):
    if not d.is_float:
        return got == want
    a, b = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(all="ignore"):
        near = np.abs(a - b) <= (TOLERANCE.get(d.name, 0) if tolerance is None else tolerance) * np.abs(b)
    return (a == b) | (np.isnan(a) & np.isnan(b)) | near
