"""Random kernels on the cpu target and in the numpy meaning give the same memory.

Integers wrap and are exact, so any difference is a fault of lowering: order, hazards, positions, scratch.
"""

import random

import numpy as np
import pytest
from tests.backends.cpu.util import INDEX, K, exclusive, run, shared

from peertile.dtypes import f32, i8, i32, i64
from peertile.ir import ops
from peertile.ir.ops import Binary, Compare, Fold, Unary
from peertile.ir.types import TileType
from peertile.ir.verify import verify
from peertile.meaning import run_grid

SHAPES = [(64,), (64,), (4, 16), (16, 4), (16, 16), (16, 16), (8, 8), (16,), (1, 64), (8, 1), (2, 4, 8), (1, 1)]
DTYPES = [i32, i32, i32, i8, i64, f32]
BINARY = [Binary.ADD, Binary.SUB, Binary.MUL, Binary.MIN, Binary.MAX, Binary.XOR, Binary.AND, Binary.QUOT, Binary.MOD]
FLOAT_BINARY = [Binary.MIN, Binary.MAX]
FOLDS = [Fold.ADD, Fold.MAX, Fold.MIN, Fold.XOR, Fold.MUL]


class Maker:
    """Builds one random kernel over two read and two written views."""

    def __init__(self, seed):
        self.r = random.Random(seed)
        self.k = K(
            "fuzz", x=shared(i32, 2), y=shared(i32, 1), z=exclusive(i32, (16, 16)), w=exclusive(i32, (64,)), n=INDEX
        )
        self.values = []
        self.scalars = [self.k.p["n"], self.k.pid()]
        self.body(self.r.randint(8, 18), 2)
        self.store()
        self.kernel = self.k.done()

    def body(self, length, depth):
        saved = len(self.values), len(self.scalars)
        for _ in range(length):
            self.step(depth)
        return saved

    def index(self):
        k, r = self.k, self.r
        if r.random() < 0.8 or not self.scalars:
            return k.const(r.randint(0, 1))
        return k.binary(Binary.AND, r.choice(self.scalars), k.const(1))

    def pick(self, shape=None, dtype=None):
        """A value of the shape and dtype if there is one (mostly), else one made to fit."""
        found = [v for v in self.values if shape in (None, v.type.shape) and dtype in (None, v.type.dtype)]
        if found and self.r.random() < 0.9:
            return self.r.choice(found[-self.r.choice([2, 12]) :])
        shape, dtype = shape or self.r.choice(SHAPES), dtype or self.r.choice(DTYPES)
        return self.fit(self.load(), shape, dtype)

    def load(self):
        k, r = self.k, self.r
        if r.random() < 0.4:
            return k.load(k.p["w"], [self.index()], (64,))
        if r.random() < 0.6:
            return k.load(k.p["z"], [self.index(), self.index()], r.choice([(4, 16), (16, 4), (8, 8), (16, 16)]))
        if r.random() < 0.3:
            return k.load(k.p["y"], [self.index()], (r.choice([16, 64]),))
        return k.load(k.p["x"], [self.index(), self.index()], r.choice([(4, 16), (16, 4), (8, 8), (16, 16), (1, 8)]))

    def fit(self, v, shape, dtype):
        """v brought to a shape and dtype by reductions, reshapes and broadcasts."""
        k = self.k
        if v.type.dtype != dtype:
            v = k.cast(v, dtype)
        want = int(np.prod(shape))
        while v.type.numel > want:
            axis = max(range(v.type.rank), key=lambda a: v.type.shape[a])
            v = k.reduce(self.fold(dtype), v, axis)
        if v.type.rank == 0:
            return k.broadcast(v, shape)
        if v.type.numel == want:
            return k.reshape(v, shape)
        flat = k.reshape(v, (v.type.numel, 1))
        wide = k.broadcast(flat, (v.type.numel, want // v.type.numel))
        return k.reshape(wide, shape)

    def fold(self, dtype):
        return self.r.choice([Fold.MAX, Fold.MIN] if dtype.is_float else FOLDS)

    def step(self, depth):
        r, k = self.r, self.k
        kind = r.choice("bbbucrppsssslllltFFFIIL" if depth else "bbbucrppsssslllt")
        if kind == "b":
            a = self.pick()
            b = self.pick(a.type.shape, a.type.dtype)
            self.values.append(k.binary(r.choice(FLOAT_BINARY if a.type.dtype.is_float else BINARY), a, b))
        elif kind == "u":
            a = self.pick()
            fns = [Unary.NEG, Unary.ABS] if a.type.dtype.is_float else [Unary.NEG, Unary.ABS, Unary.NOT]
            self.values.append(k.unary(r.choice(fns), a))
        elif kind == "c":
            a = self.pick()
            b = self.pick(a.type.shape, a.type.dtype)
            c = k.compare(r.choice([Compare.LT, Compare.EQ, Compare.GE]), a, b)
            self.values.append(k.select(c, b, a))
        elif kind == "r":
            a = self.pick()
            axis = r.randrange(a.type.rank)
            v = k.reduce(self.fold(a.type.dtype), a, axis)
            if v.type.rank:
                self.values.append(v)
            elif v.type.dtype == i64:
                self.scalars.append(v)
        elif kind == "p":
            a = self.pick()
            axes = list(range(a.type.rank))
            r.shuffle(axes)
            self.values.append(k.permute(a, axes))
        elif kind == "s":
            self.store()
        elif kind == "l":
            self.values.append(self.load())
        elif kind == "t":
            self.values.append(self.pick(r.choice(SHAPES), r.choice(DTYPES)))
        elif kind == "F":
            self.loop(depth - 1)
        elif kind == "I":
            self.branch(depth - 1)
        elif kind == "L":
            self.forever(depth - 1)

    def store(self):
        k, r = self.k, self.r
        if r.random() < 0.2:  # over what it was loaded from, element by element or not
            at = [self.index(), self.index()]
            v = k.load(k.p["z"], at, (16, 16))
            if r.random() < 0.7:
                v = k.permute(v, (1, 0))
            k.store(k.p["z"], k.add(v, self.pick((16, 16), i32)), at)
            return
        if r.random() < 0.5:
            k.store(k.p["w"], self.pick((64,), i32), [self.index()])
        else:
            shape = r.choice([(16, 16), (16, 16), (4, 16), (16, 4), (8, 8)])
            k.store(k.p["z"], self.pick(shape, i32), [self.index(), self.index()])

    def nested(self, length, depth):
        """Ops of a nested block; gives what it made, which is not visible outside."""
        values, scalars = self.values, self.scalars
        self.values, self.scalars = list(values), list(scalars)
        self.body(length, depth)
        made = self.values, self.scalars
        self.values, self.scalars = values, scalars
        return made

    def carried(self):
        count = self.r.randint(0, 2)
        first = self.pick()
        alike = [self.pick(first.type.shape, first.type.dtype) for _ in range(count)]
        return [first, *alike, self.pick(), self.k.const(self.r.randint(0, 3))]

    def next(self, types, made, args=()):
        """Values for the carried types: what the block made, or anything that fits."""
        out = []
        if args and self.r.random() < 0.3:  # hand the carried values on in another order
            by_type = {t: [a for a in args if a.type == t] for t in types}
            for t in types:
                by_type[t] = by_type[t][1:] + by_type[t][:1]
                out.append(by_type[t][0])
            return out
        for t in types:
            found = [v for v in made[0] + made[1] if v.type == t]
            if found and self.r.random() < 0.8:
                out.append(self.r.choice(found))
            elif t == INDEX:
                out.append(self.k.const(self.r.randint(0, 5)))
            else:
                out.append(self.pick(t.shape, t.dtype))
        return out

    def loop(self, depth):
        r, k = self.r, self.k
        inits = self.carried()
        types = [v.type for v in inits]

        def body(i, args):
            values, scalars = self.values, self.scalars
            self.values, self.scalars = [*values, *args[:-1]], [*scalars, i, args[-1]]
            made = self.nested(r.randint(1, 5), depth)
            self.values, self.scalars = made[0], made[1]
            if r.random() < 0.4:
                c = k.compare(Compare.GT, i, k.const(r.randint(0, 2)))
                leave = r.choice([ops.Break, ops.Continue])

                def go():
                    inner = self.nested(r.randint(0, 2), 0)
                    k.b.emit(leave, self.next(types, inner))

                k.when(c, go)
            out = self.next(types, made, args)
            self.values, self.scalars = values, scalars
            return out

        hi = k.binary(Binary.AND, r.choice(self.scalars), k.const(3))
        results = k.loop(0, hi, inits, body)
        self.values += results[:-1]
        self.scalars.append(results[-1])

    def forever(self, depth):
        r, k = self.r, self.k
        inits = self.carried()
        types = [v.type for v in inits]
        results = [TileType(r.choice(DTYPES), r.choice(SHAPES)) for _ in range(r.randint(0, 2))]
        limit = r.randint(0, 2)

        def body(args):
            values, scalars = self.values, self.scalars
            *tiles, _, trip = args
            self.values = [*values, *tiles]
            made = self.nested(r.randint(1, 4), depth)
            self.values, self.scalars = made
            k.when(
                k.compare(Compare.GE, trip, k.const(limit)),
                lambda: k.b.emit(ops.Break, self.next(results, made)) and None,
            )
            out = [*self.next(types, made, args[:-1]), k.add(trip, k.const(1))]
            self.values, self.scalars = values, scalars
            return out

        self.values += k.forever([*inits, k.const(0)], body, results)

    def branch(self, depth):
        r, k = self.r, self.k
        types = [TileType(r.choice(DTYPES), r.choice(SHAPES)) for _ in range(r.randint(0, 2))]
        if self.values and r.random() < 0.7:
            types.append(r.choice(self.values).type)

        def arm():
            made = self.nested(r.randint(0, 4), depth)
            return self.next(types, made)

        c = k.compare(Compare.LT, r.choice(self.scalars), k.const(r.randint(0, 3)))
        self.values += k.when(c, arm, arm, types)


def check(seed):
    kernel = Maker(seed).kernel
    verify(kernel)
    rng = np.random.default_rng(seed)
    x = rng.integers(-100, 100, (25, 30)).astype(np.int32)
    y = rng.integers(-100, 100, 90).astype(np.int32)
    z = rng.integers(-100, 100, (27, 29)).astype(np.int32)
    w = rng.integers(-100, 100, 100).astype(np.int32)
    ours, theirs = (z.copy(), w.copy()), (z.copy(), w.copy())
    n = int(rng.integers(0, 4))
    run(kernel, [x, y, *ours, n])
    assert run_grid(kernel, 1, [x, y, *theirs, n]).faults == []
    for a, b in zip(ours, theirs, strict=True):
        assert (a == b).all(), seed


@pytest.mark.slow
@pytest.mark.parametrize("block", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 8))])
def test_random_kernels(block):
    for seed in range(block * 3, block * 3 + 3):
        check(seed)


@pytest.mark.long
@pytest.mark.parametrize("block", range(40))
def test_many_random_kernels(block):
    for seed in range(1000 + block * 50, 1050 + block * 50):
        check(seed)
