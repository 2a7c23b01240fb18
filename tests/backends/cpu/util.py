"""Builds small kernels by hand, compiles them and runs the object in this thread through ctypes. No driver."""

import ctypes
from dataclasses import dataclass, field

import numpy as np

from peertile.backends.cpu import jit
from peertile.backends.cpu.compile import compile_kernel
from peertile.dtypes import DType, b1, f32, from_numpy, i64
from peertile.ir import ops
from peertile.ir.core import Block, Builder, Kernel, Value
from peertile.ir.types import (
    Access,
    ObjectType,
    Partition,
    PointerType,
    Space,
    SymmetricType,
    TileType,
    ViewType,
)
from peertile.memory_model import Cmp

INDEX = TileType(i64)


def exclusive(dtype, tile, *, unit=True, persistent=False, swizzle=1, divisible=()):
    rank = len(tile)
    return ViewType(
        dtype, rank, Access.READ_WRITE, Space.LOCAL, Partition(tuple(tile), persistent, swizzle),
        (False,) * (rank - 1) + (unit,), 0, divisible,
    )  # fmt: skip


def shared(dtype, rank, *, unit=True, divisible=()):
    return ViewType(
        dtype, rank, Access.READ, Space.LOCAL, None, (False,) * (rank - 1) + (unit,), 0, divisible
    )  # fmt: skip


def device_view(dtype, rank, space=Space.DEVICE):
    return ViewType(dtype, rank, Access.READ_WRITE, space, None, (False,) * (rank - 1) + (True,))


class K:
    """A kernel under construction: parameters by name, ops by short methods."""

    def __init__(self, name="kernel", unsafe=False, grid_rank=1, **params):
        self.block = Block(list(params.values()), list(params))
        self.kernel = Kernel(name, tuple(params), self.block, unsafe, grid_rank)
        self.b = Builder(self.block)
        self.p = dict(zip(params, self.block.args, strict=True))

    def __getattr__(self, name):
        try:
            return self.__dict__["p"][name]
        except KeyError:
            raise AttributeError(name) from None

    def value(self, cls, operands, t, **attrs):
        return self.b.value(cls, operands, t, **attrs)

    def const(self, v, dtype=None):
        if dtype is None:
            dtype = b1 if isinstance(v, bool) else i64 if isinstance(v, int) else f32
        return self.value(ops.Const, (), TileType(dtype), value=v)

    def full(self, v, dtype, shape):
        return self.broadcast(self.const(v, dtype), shape)

    def pid(self, axis=0):
        return self.value(ops.ProgramId, (), INDEX, axis=axis)

    def tile_index(self, view, linear=None):
        linear = self.pid() if linear is None else linear
        return self.b.emit(ops.TileIndex, (view, linear), (INDEX,) * view.type.rank).results

    def load(self, view, index, shape, padding=ops.Padding.ZERO):
        index = [self.const(i) if isinstance(i, int) else i for i in index]
        return self.value(
            ops.Load, (view, *index), TileType(view.type.dtype, tuple(shape)), padding=padding, bounds=ops.Bounds.PROVEN
        )

    def store(self, view, tile, index):
        index = [self.const(i) if isinstance(i, int) else i for i in index]
        self.b.emit(ops.Store, (view, tile, *index), bounds=ops.Bounds.PROVEN)

    def unary(self, fn, x):
        return self.value(ops.UnaryOp, (x,), x.type, fn=fn)

    def binary(self, fn, a, b):
        return self.value(ops.BinaryOp, (a, b), a.type, fn=fn)

    def compare(self, fn, a, b):
        return self.value(ops.CompareOp, (a, b), a.type.with_dtype(b1), fn=fn)

    def select(self, c, a, b):
        return self.value(ops.Select, (c, a, b), a.type)

    def cast(self, x, dtype, **attrs):
        return self.value(ops.Cast, (x,), x.type.with_dtype(dtype), **attrs)

    def broadcast(self, x, shape):
        return self.value(ops.Broadcast, (x,), TileType(x.type.dtype, tuple(shape)))

    def reshape(self, x, shape):
        return self.value(ops.Reshape, (x,), TileType(x.type.dtype, tuple(shape)))

    def permute(self, x, axes):
        return self.value(
            ops.Permute, (x,), TileType(x.type.dtype, tuple(x.type.shape[a] for a in axes)), axes=tuple(axes)
        )

    def reduce(self, fn, x, axis):
        s = x.type.shape
        return self.value(ops.Reduce, (x,), TileType(x.type.dtype, s[:axis] + s[axis + 1 :]), fn=fn, axis=axis)

    def mma(self, a, b, acc):
        return self.value(ops.Mma, (a, b, acc), acc.type)

    def add(self, a, b):
        return self.binary(ops.Binary.ADD, a, b)

    def sub(self, a, b):
        return self.binary(ops.Binary.SUB, a, b)

    def mul(self, a, b):
        return self.binary(ops.Binary.MUL, a, b)

    def exp(self, x):
        return self.unary(ops.Unary.EXP, x)

    def loop(self, lo, hi, inits, body, step=1):
        """for i in range(lo, hi, step): carried = body(i, carried); body must end the block or give values."""
        lo, hi, step = (self.const(v) if isinstance(v, int) else v for v in (lo, hi, step))
        block = Block([lo.type, *[v.type for v in inits]])
        with self.b.at(block):
            out = body(block.args[0], block.args[1:])
            if out is not None:
                self.b.emit(ops.Continue, out)
        return self.b.emit(ops.For, (lo, hi, step, *inits), [v.type for v in inits], [block]).results

    def forever(self, inits, body, result_types=()):
        block = Block([v.type for v in inits])
        with self.b.at(block):
            out = body(block.args)
            if out is not None:
                self.b.emit(ops.Continue, out)
        return self.b.emit(ops.Loop, inits, result_types, [block]).results

    def when(self, condition, then, otherwise=None, types=()):
        blocks = []
        for arm in (then, otherwise or (lambda: ())):
            block = Block()
            with self.b.at(block):
                out = arm()
                if out is not None:
                    self.b.emit(ops.Yield, out)
            blocks.append(block)
        return self.b.emit(ops.If, (condition,), types, blocks).results

    def done(self):
        self.b.emit(ops.Return)
        return self.kernel


def _words_of_view(array):
    item = array.itemsize
    return [array.ctypes.data, *array.shape, *(s // item for s in array.strides)]


def _scalar_word(value, dtype: DType):
    data = np.array(value, dtype.numpy).tobytes().ljust(8, b"\0")
    if dtype.name in ("i8", "i16", "i32"):
        return int(value)
    return int.from_bytes(data, "little", signed=True)


@dataclass
class Symmetric:
    """A symmetric object: one array per rank; `rank` is ours."""

    arrays: list
    rank: int = 0
    table: np.ndarray = field(default=None)

    def words(self):
        a = self.arrays[0]
        bases = [x.ctypes.data for x in self.arrays]
        self.table = np.array([self.rank, len(bases), *bases], np.int64)
        return [self.table.ctypes.data, 0, *a.shape, *(s // a.itemsize for s in a.strides)]


def _words(value, t):
    if isinstance(t, TileType):
        return [_scalar_word(value, t.dtype)]
    if isinstance(t, PointerType):
        return [value.ctypes.data if isinstance(value, np.ndarray) else int(value)]
    if isinstance(t, ViewType):
        assert from_numpy(value.dtype) == t.dtype, (value.dtype, t)
        return _words_of_view(value)
    if isinstance(t, SymmetricType):
        return value.words()
    assert isinstance(t, ObjectType)
    return [w for name, field_type in t.fields.items() for w in _words(value[name], field_type)]


class Context:
    """A LaunchContext with its fault record and launch words."""

    def __init__(self, grid):
        grid = (*grid, 1, 1)[:3]
        self.fault = np.zeros(16, np.int64)
        self.words = np.zeros(8, np.uint64)
        self.abort = np.zeros(1, np.int32)
        self.print = np.zeros(2 + 4096, np.int64)
        self.print[0] = 4096 * 8
        self.raw = np.zeros(32, np.int64)
        self.raw[:4] = [*grid, int(np.prod(grid))]
        self.raw[4:10] = [
            self.abort.ctypes.data, self.fault.ctypes.data, 10**9, 0, self.words.ctypes.data, self.print.ctypes.data,
        ]  # fmt: skip


def aligned(nbytes):
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


class Loaded:
    """A compiled kernel ready to be called."""

    def __init__(self, kernel: Kernel, target=None):
        self.kernel = kernel
        self.binary = compile_kernel(kernel, target)
        e = self.binary.entry
        if self.binary.waits:
            names = [f"{e}_start", f"{e}_frame_size", f"{e}_promise_offset"]
        else:
            names = [f"{e}_range"]
        self.symbols = jit.load_object(self.binary.payload, names)
        if not self.binary.waits:
            self.range = ctypes.CFUNCTYPE(
                None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
            )(self.symbols[f"{e}_range"])

    def block(self, values):
        words = [w for v, p in zip(values, self.kernel.params, strict=True) for w in _words(v, p.type)]
        assert len(words) == self.binary.n_slots
        return np.array([w & (1 << 64) - 1 for w in words], np.uint64)

    def run(self, values, grid):
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        ctx = Context(grid)
        args = self.block(values)
        if not self.binary.waits:
            scratch = aligned(self.binary.scratch_bytes)
            self.range(args.ctypes.data, ctx.raw.ctypes.data, 0, int(np.prod(grid)), scratch.ctypes.data)
            return ctx
        Executor(self, [(args, ctx)]).run()
        return ctx


def run(kernel, values, grid=1, target=None):
    """Compile and run a kernel; gives its context."""
    return Loaded(kernel, target).run(values, grid)


class Executor:
    """Runs the programs of one waiting kernel, for one or more launches (ranks), in turn on this thread."""

    def __init__(self, loaded: Loaded, launches):
        e = loaded.binary.entry
        i64_, p = ctypes.c_int64, ctypes.c_void_p
        self.frame_size = ctypes.CFUNCTYPE(i64_)(loaded.symbols[f"{e}_frame_size"])()
        self.promise = ctypes.CFUNCTYPE(i64_)(loaded.symbols[f"{e}_promise_offset"])()
        self.start = ctypes.CFUNCTYPE(None, p, p, i64_, p, p)(loaded.symbols[f"{e}_start"])
        self.loaded = loaded
        self.launches = launches
        self.suspensions = 0

    def run(self, max_rounds=100000, on_round=None):
        programs = []
        for args, ctx in self.launches:
            for program in range(int(ctx.raw[3])):
                frame = aligned(self.frame_size)
                scratch = aligned(self.loaded.binary.scratch_bytes)
                call = (args.ctypes.data, ctx.raw.ctypes.data, program, scratch.ctypes.data, frame.ctypes.data)
                self.start(*call)
                programs.append((frame, scratch, ctx, program))
        rounds = 0
        while programs:
            rounds += 1
            assert rounds < max_rounds, "no progress"
            if on_round is not None:
                on_round(rounds)
            programs = [p for p in programs if self._step(*p)]

    def _step(self, frame, scratch, ctx, program):
        words = frame.view(np.int64)
        if words[0] == 0:
            return False
        poll = words[self.promise // 8 : self.promise // 8 + 8]
        if ctx.abort[0] or ctx.fault[0]:
            poll[6] = 1
        elif poll[0] == 0 or satisfied(poll):
            poll[6] = 0
        else:
            return True
        self.suspensions += 1
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(words[0]))(frame.ctypes.data)
        return bool(words[0])


def satisfied(poll):
    bits, signed = int(poll[3]) & 255, int(poll[3]) >> 8
    kind = (ctypes.c_int32 if signed else ctypes.c_uint32) if bits == 32 else (
        ctypes.c_int64 if signed else ctypes.c_uint64
    )  # fmt: skip
    seen, expected = kind.from_address(int(poll[0])).value, kind(int(poll[1])).value
    cmp = list(Cmp)[int(poll[2])]
    if cmp is Cmp.AT_LEAST:
        return (seen - expected) % (1 << bits) < 1 << (bits - 1)
    return {
        Cmp.EQ: seen == expected, Cmp.NE: seen != expected, Cmp.GE: seen >= expected,
        Cmp.LE: seen <= expected, Cmp.GT: seen > expected, Cmp.LT: seen < expected,
    }[cmp]  # fmt: skip


__all__ = ["Executor", "K", "Loaded", "Symmetric", "Value", "device_view", "exclusive", "run", "shared"]
