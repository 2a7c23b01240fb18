"""Random kernels with known answers' accuracy, to compare a backend with the meaning of the ops.

`random_kernel(seed)` is deterministic. Every program of a kernel writes only its own tile, words and
(commutative, integer) atomic updates, so any order of programs gives one answer. Values carry a bound
of their magnitude and of how far a right target may be off: 0 while only operations were used whose
result is fixed to the bit (integers, and float operations that round once), more after exp, sums,
products of matrices. What jumps (comparisons, floor, float to integer) takes fixed values only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from peertile.dtypes import ALL_DTYPES, DType, b1, f32, i32, i64
from peertile.ir import ops
from peertile.ir.core import Block, Builder, Kernel, Op, Value
from peertile.ir.ops import Binary, Compare, Padding
from peertile.ir.types import (
    BOOL,
    INDEX,
    Access,
    BarrierType,
    CounterType,
    MailboxType,
    MulticastType,
    Partition,
    PointerType,
    SignalType,
    Space,
    SymmetricType,
    TileType,
    Type,
    ViewType,
)
from peertile.meaning import PerRank, new_barrier, new_counter, new_mailbox, new_signal
from peertile.memory_model import Order, Rmw, Scope
from peertile.testing.program_exchange import LINE
from peertile.testing.program_memory import CELLS, OWN_ROWS, POINTED, POINTED_DTYPES
from peertile.testing.program_multicast import MULTICAST_DTYPES, Multicasts, rows_of_multicast
from peertile.testing.program_values import INTS, LIMIT, MATH, V

__all__ = ["RandomKernel", "arrays_of", "differences", "random_kernel"]


_FORMS: Final = {
    "persistent": 0.2, "waits": 0.2, "unsafe": 0.25, "programs": 0.15, "ranks": 0.25, "prints": 0.1,
}  # fmt: skip
"""Forms that not every kernel takes, and how many do."""
_MULTICAST: Final = 0.6
"""How many kernels of several ranks have a multicast object."""
DEPTH: Final = 3
"""Loops and branches inside each other."""


class RandomKernel(NamedTuple):
    """A kernel as a frontend would give it (passes have not run), and how to run it."""

    kernel: Kernel
    grid: int
    make_args: Callable[[], list[Any]]
    """Fresh arguments, the same ones at each call; outputs are among them."""
    tolerance: dict[int, float]
    """For each argument that is written: how far an element may be from the meaning's; 0 means equal."""
    ranks: int = 1
    """With more than one, arrays among the arguments are a `PerRank`."""


def differences(program: RandomKernel, found: Sequence[Any], expected: Sequence[Any]) -> list[str]:
    """What is wrong with the arguments `found` after a run, against `expected`; empty if nothing is."""
    texts = []
    for k, tolerance in program.tolerance.items():
        t = program.kernel.params[k].type
        assert isinstance(t, ViewType | PointerType | SymmetricType | MulticastType)
        name = program.kernel.param_names[k]
        for rank, (one, other) in enumerate(zip(arrays_of(found[k]), arrays_of(expected[k]), strict=True)):
            a, b = np.asarray(one), np.asarray(other)
            if t.dtype.is_float:
                a, b = a.astype(np.float64), b.astype(np.float64)
                wrong = ~((np.abs(a - b) <= tolerance) | (np.isnan(a) & np.isnan(b)))
            else:
                wrong = a != b
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                where = f"rank {rank}: {name}" if program.ranks > 1 else name
                text = f"expected {b[at]} within {tolerance}, got {a[at]} ({wrong.sum()} wrong)"
                texts.append(f"{where}{list(at)}: {text}")
    return texts


def arrays_of(x: Any) -> Sequence[Any]:
    """The arrays of an argument, of each rank."""
    if isinstance(x, dict):
        x = x["data"]
    return x if isinstance(x, PerRank) else (x,)


def random_kernel(seed: int, *, alone: bool = False) -> RandomKernel:
    """The kernel of `seed`. `alone`: one that needs nobody else, on one rank, whose programs do not wait, print or
    use pointers, and whose tiles are accessed without an order; for what runs programs one after another."""
    return _Maker(seed, alone).make()


class _Maker(Multicasts):
    def __init__(self, seed: int, alone: bool) -> None:
        # The body needs the types of the parameters, which are drawn first.
        super().__init__(seed, Builder(Block()))
        self.seed = seed
        self.params: list[tuple[str, Type, Callable[[np.random.Generator], Any]]] = []
        self.tolerance: dict[str, float] = {}
        self.step = 1
        self.dense: set[str] = set()
        """Inputs without gaps."""
        self.word_bound = 4.0
        """Magnitude of this program's word, where it is a float."""
        forms = frozenset(k for k, p in _FORMS.items() if self.r.random() < p)
        self._forms = forms & {"persistent"} if alone else forms | {"ordered"}
        self.ranks = self.r.choice([1, 2, 2, 3]) if "ranks" in self._forms else 1

    @property
    def forms(self) -> frozenset[str]:
        return self._forms

    # -- parameters and the frame of the kernel

    def make(self) -> RandomKernel:
        r = self.r
        tile = r.choice([(16,), (32,), (4, 8), (8, 8), (16, 16)])
        extents = tuple(r.randint(1, 3) * n - r.choice([0, 0, r.randrange(n)]) for n in tile)
        self.tile, self.extents = tile, extents
        self.grid = prod(-(-n // t) for n, t in zip(extents, tile, strict=True))
        persistent = "persistent" in self.forms
        if persistent:
            self.grid = r.randint(1, self.grid)
        out = r.choice([*MATH, *INTS, b1])
        partition = Partition(tile, persistent, r.choice([1, 1, 2]))
        self.param("z", ViewType(out, len(tile), Access.READ_WRITE, Space.LOCAL, partition), self.array(out, extents))
        # A second output for what is not fixed to the bit, with an index from the first one's partition.
        d = r.choice(MATH)
        self.param("y", ViewType(d, len(tile), Access.READ_WRITE), self.array(d, extents))
        for k in range(r.randint(1, 3)):
            d = r.choice(ALL_DTYPES)
            self.param(f"x{k}", ViewType(d, len(tile)), self.array(d, extents, strided=True))
            if self.step == 1:
                self.dense.add(f"x{k}")
        self.words = r.choice([i32, i64, f32])
        self.param("w", ViewType(self.words, 1, Access.READ_WRITE), self.array(self.words, (self.grid + 3,)))
        self.param("a", ViewType(i32, 1, Access.READ_WRITE, Space.DEVICE), self.array(i32, (29,)))
        d = r.choice([*INTS, *MATH])
        shape = (self.grid * OWN_ROWS, CELLS)
        self.param("s", ViewType(d, 2, Access.READ_WRITE, Space.DEVICE), self.array(d, shape))
        self.tolerance["s"] = 0.0
        self.common()
        self.param("n", INDEX, lambda g: int(g.integers(0, 6)))
        self.param("f", TileType(f32), lambda g: float(np.float32(g.uniform(-2, 2))))
        self.param("c", BOOL, lambda g: bool(g.integers(0, 2)))
        body = Block([t for _, t, _ in self.params], [name for name, _, _ in self.params])
        self.named = dict(zip((name for name, _, _ in self.params), body.args, strict=True))
        self.b = Builder(body)
        self.body()
        self.b.emit(ops.Return)
        names = tuple(name for name, _, _ in self.params)
        kernel = Kernel(f"random_{self.seed}", names, body, unsafe="unsafe" in self.forms)
        tolerance = {names.index(n): e for n, e in sorted(self.tolerance.items())}
        return RandomKernel(kernel, self.grid, self.args, tolerance, self.ranks)

    def common(self) -> None:
        """What programs and ranks share, where this kernel has it."""
        r, grid, ranks = self.r, self.grid, self.ranks
        if "unsafe" in self.forms:
            d = r.choice(POINTED_DTYPES)
            self.param("q", PointerType(d), self.array(d, (grid * POINTED,)))
            self.tolerance["q"] = 0.0
        if "programs" in self.forms:
            d = r.choice([*INTS, *MATH])
            self.param("h", ViewType(d, 2, Access.READ_WRITE, Space.DEVICE), self.array(d, (grid, LINE)))
            self.tolerance["h"] = 0.0
        if "ranks" in self.forms:
            d = r.choice(POINTED_DTYPES)
            self.param("m", SymmetricType(d, 2), self.array(d, (grid * ranks, LINE)))
            self.tolerance["m"] = 0.0
            box = MailboxType(r.choice(ALL_DTYPES), (LINE,), r.choice([2, 4]), False)
            self.param("box", box, lambda g: new_mailbox(box, ranks, grid))
            self.param("signal", SignalType(), lambda g: new_signal(ranks, grid))
            self.param("counter", CounterType(), lambda g: new_counter(ranks, grid))
            self.param("barrier", BarrierType(), lambda g: new_barrier(ranks, grid))
        # Of its own: whether there is one changes nothing about kernels without.
        if "ranks" in self.forms and random.Random(f"multicast {self.seed}").random() < _MULTICAST:
            d = r.choice(MULTICAST_DTYPES)
            make = self.array(d, (grid * rows_of_multicast(ranks), LINE))
            parts = (lambda g: PerRank([make(g) for _ in range(ranks)])) if ranks > 1 else make
            self.param("mc", MulticastType(d, 2, (False, True)), lambda g: {"data": parts(g), "window": 0})
            self.tolerance["mc"] = 0.0

    def param(self, name: str, t: Type, make: Callable[[np.random.Generator], Any]) -> None:
        self.params.append((name, t, make))

    def args(self) -> list[Any]:
        g = np.random.default_rng(self.seed)
        scalars = {"n", "f", "c"}  # equal on all ranks, since they decide which way a program goes
        made = []
        for name, t, make in self.params:
            array = isinstance(t, ViewType | PointerType | SymmetricType) and self.ranks > 1
            assert array or name in scalars or self.ranks == 1 or not isinstance(t, TileType)
            made.append(PerRank([make(g) for _ in range(self.ranks)]) if array else make(g))
        return made

    def array(
        self, d: DType, extents: tuple[int, ...], strided: bool = False
    ) -> Callable[[np.random.Generator], npt.NDArray[Any]]:
        step = self.step = self.r.choice([1, 1, 2]) if strided else 1

        def make(g: np.random.Generator) -> npt.NDArray[Any]:
            shape = (*extents[:-1], extents[-1] * step)
            if d.is_float:
                eighths = g.integers(-32, 32, shape) / 8
                x: npt.NDArray[Any] = np.where(g.integers(0, 2, shape), eighths, g.uniform(-4, 4, shape))
                x = x.astype(np.float32)
            elif d.is_bool:
                x = g.integers(0, 2, shape)
            else:
                wide = g.integers(d.min, d.max, shape, d.numpy, endpoint=True)
                x = np.where(g.integers(0, 2, shape), wide, (wide % d.numpy.type(10)).astype(d.numpy))
            return np.ascontiguousarray(x.astype(d.numpy))[..., ::step]

        return make

    def body(self) -> None:
        r = self.r
        self.program = self.b.value(ops.ProgramId, (), INDEX)
        index = self.b.emit(ops.TileIndex, (self.named["z"], self.program), [INDEX] * len(self.tile)).results
        for name in self.named:
            if name[0] in "xyz":
                self.pool.append(self.load(self.named[name], index))
        self.pool.append(V(self.named["f"], 2.0))
        self.pool.append(self.broadcast(V(self.named["f"], 2.0), self.tile))
        self.pool.append(self.broadcast(V(self.named["n"]), self.tile))
        self.statements(r.randint(5, 16))
        if "unsafe" in self.forms:
            for _ in range(r.randint(3, 8)):
                v = self.pointed()
                if v is not None:
                    self.pool.append(v)
        exchanges = self.exchanges()
        if exchanges:
            self.together(exchanges)
        if r.random() < 0.2:
            self.leave_early()
        self.store_tile(index)
        if "persistent" in self.forms:
            self.store_others()
        elif r.random() < 0.3:
            # What was stored is read again.
            self.pool.append(self.load(self.named["z"], index, self.tolerance["z"]))
            self.statements(2)
            self.store_tile(index)
        self.store_rough(index)
        self.store_word()
        self.update()

    def leave_early(self) -> None:
        self.leave_if(self.named["c"], ops.Return)

    def store_tile(self, index: Sequence[Value]) -> None:
        t = self.named["z"].type
        assert isinstance(t, ViewType)
        v = self.convert(self.of_shape(self.tile), t.dtype)
        self.b.emit(ops.Store, (self.named["z"], v.value, *index))
        self.tolerance["z"] = max(self.tolerance.get("z", 0.0), v.error)

    def store_others(self) -> None:
        """The tiles that fall to this program of a partition with more tiles than programs."""
        z = self.named["z"]
        total = self.index(1)
        for axis, size in enumerate(self.tile):
            tiles = self.emit(ops.NumTiles, (z,), INDEX, axis=axis, size=size)
            total = self.emit(ops.BinaryOp, (total, tiles), INDEX, fn=Binary.MUL)
        step = self.emit(ops.NumPrograms, (), INDEX)
        first = self.emit(ops.BinaryOp, (self.program, step), INDEX, fn=Binary.ADD)
        block = Block([INDEX])

        def run() -> None:
            index = self.b.emit(ops.TileIndex, (z, block.args[0]), [INDEX] * len(self.tile)).results
            names = [n for n in self.named if n[0] == "x"]
            self.pool.append(self.load(self.named[self.r.choice(names)], index))
            self.pool.append(V(block.args[0]))
            self.statements(self.r.randint(1, 4))
            self.store_tile(index)
            self.b.emit(ops.Continue)

        self.scoped(block, run)
        self.b.emit(ops.For, (first, total, step), [], (block,))

    def store_rough(self, index: Sequence[Value]) -> None:
        t = self.named["y"].type
        assert isinstance(t, ViewType)
        n = prod(self.tile)
        rough = [v for v in self.pool if v.error > 0 and (v.type.numel == n or v.type.is_scalar)]
        v = self.r.choice(rough) if rough else self.of_shape(self.tile)
        if v.type.numel == n:
            v = V(self.emit(ops.Reshape, (v.value,), v.type.with_shape(self.tile)), v.magnitude, v.error)
        v = self.convert(self.broadcast(v, self.tile), t.dtype)
        self.b.emit(ops.Store, (self.named["y"], v.value, *index))
        self.tolerance["y"] = v.error

    def store_word(self) -> None:
        v = self.convert(self.of_shape(()), self.words)
        self.b.emit(ops.WordStore, (self.named["w"], v.value, self.program), order=Order.WEAK, scope=None)
        self.tolerance["w"] = v.error

    def update(self) -> None:
        v = self.convert(self.of_shape((16,)), i32)
        # One kind per kernel: different kinds do not commute.
        fn = self.r.choice([Rmw.ADD, Rmw.AND, Rmw.OR, Rmw.XOR, Rmw.MIN, Rmw.MAX, Rmw.UMIN, Rmw.UMAX])
        index = self.index(self.r.randrange(2))
        self.b.emit(ops.TileAtomic, (self.named["a"], v.value, index), rmw=fn, scope=Scope.DEVICE)
        self.tolerance["a"] = 0.0

    def load(self, view: Value, index: Sequence[Value], error: float = 0.0) -> V:
        t = view.type
        assert isinstance(t, ViewType)
        choices = [Padding.ZERO, Padding.ZERO]
        if t.dtype.is_float:
            choices += [Padding.NEG_ZERO]
        if t.dtype in MATH:
            choices += [Padding.INF, Padding.NEG_INF, Padding.NAN]
        padding = self.r.choice(choices)
        if t.access is Access.READ and self.r.random() < 0.35:
            value = self.load_through(view, padding)
        else:
            value = self.emit(ops.Load, (view, *index), TileType(t.dtype, self.tile), padding=padding)
        bound = 2 * LIMIT[t.dtype.name] if t.dtype.is_float and view is self.named["z"] else 4.0
        v = V(value, bound if t.dtype.is_float else 0.0, error if t.dtype.is_float else 0.0)
        if padding is Padding.INF:
            return self.binary_exact(Binary.MIN, v, self.const(bound, v.type), bound)
        if padding is Padding.NEG_INF:
            return self.binary_exact(Binary.MAX, v, self.const(-bound, v.type), bound)
        if padding is Padding.NAN:
            number = self.emit(ops.CompareOp, (value, value), v.type.with_dtype(b1), fn=Compare.EQ)
            return V(self.emit(ops.Select, (number, value, self.const(1, v.type).value), v.type), bound, v.error)
        return v

    def load_through(self, view: Value, padding: Padding) -> Value:
        """A tile of a view of an input: a slice, a permutation, a reshape, or chosen slices of one of these."""
        r = self.r
        extents = list(self.extents)
        whole = {self.named[name] for name in self.dense}
        for _ in range(r.randint(1, 2)):
            kinds = ["slice", "permute", *(["reshape"] if view in whole else [])]
            kind = r.choice(kinds)
            t = view.type
            assert isinstance(t, ViewType)
            plain = ViewType(t.dtype, t.rank, t.access, t.space)
            if kind == "permute":
                axes = tuple(r.sample(range(t.rank), t.rank))
                view = self.b.value(ops.ViewPermute, (view,), plain, axes=axes)
                extents = [extents[k] for k in axes]
            elif kind == "reshape":
                extents.reverse()
                view = self.b.value(ops.ViewReshape, (view, *map(self.index, extents)), plain)
            else:
                starts = [r.randrange(n + 1) for n in extents]
                steps = [r.choice([1, 1, 2, 3]) for _ in extents]
                most = [-(-(n - a) // s) for n, a, s in zip(extents, starts, steps, strict=True)]
                extents = [r.randint(0, n) for n in most]
                numbers = map(self.index, [*starts, *extents, *steps])
                view = self.b.value(ops.ViewSlice, (view, *numbers), plain)
        t = view.type
        assert isinstance(t, ViewType)
        tile = TileType(t.dtype, self.tile)
        index = [self.index(r.randrange(max(-(-n // size), 1))) for n, size in zip(extents, self.tile, strict=True)]
        if r.random() < 0.4:
            axis = r.randrange(t.rank)
            line = TileType(r.choice([i32, i64]), (self.tile[axis],))
            shift = self.const(r.randint(-3, 3), line).value
            places = self.emit(ops.Iota, (), line)
            chosen = self.emit(ops.BinaryOp, (places, shift), line, fn=r.choice([Binary.ADD, Binary.XOR]))
            del index[axis]
            return self.emit(ops.Gather, (view, chosen, *index), tile, axis=axis, padding=padding)
        return self.emit(ops.Load, (view, *index), tile, padding=padding)

    def word(self) -> V | None:
        load = ops.WordLoad
        v = self.b.value(load, (self.named["w"], self.program), TileType(self.words), order=Order.WEAK, scope=None)
        return V(v, self.word_bound if self.words.is_float else 0.0)

    def update_word(self) -> V | None:
        """An atomic update of this program's own word: nobody else's comes between."""
        d = self.words
        kinds = [Rmw.ADDF, Rmw.MIN, Rmw.MAX, Rmw.XCHG] if d.is_float else [k for k in Rmw if k is not Rmw.ADDF]
        v, kind = self.convert(self.fixed(()), d), self.r.choice(kinds)
        if d.is_float:
            v = self.plus_one(self.clamp(v, 3.0))  # no zeros of both signs
        order = self.r.choice([Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL])
        old = self.b.value(
            ops.WordRmw,
            (self.named["w"], v.value, self.program),
            TileType(d),
            rmw=kind,
            order=order,
            scope=Scope.DEVICE,
        )
        before = self.word_bound
        self.word_bound = before + v.magnitude if kind is Rmw.ADDF else max(before, v.magnitude)
        return V(old, before if d.is_float else 0.0)

    def moving(self) -> list[Callable[[], V | None]]:
        nested = [self.counted, self.polled, self.branch] if self.fixed_only < DEPTH else []
        return [*super().moving(), *nested]

    def more(self) -> list[Callable[[], V | None]]:
        return [*super().more(), self.word, self.update_word]

    # -- control flow

    def carried(self) -> list[V]:
        """Values that a loop may carry: fixed to the bit, so that no error grows from trip to trip."""
        found = [v for v in self.pool if not v.error and v.type.numel <= 256]
        return self.r.sample(found, min(len(found), self.r.randint(1, 3)))

    def trip(self, carried: Sequence[V], n: int) -> list[V]:
        """Statements of one trip; the next values of the same types, in the same bounds."""
        self.pool += carried
        self.statements(n)
        next_values = []
        for v in carried:
            new = self.turned(v) if v.type.rank == 2 and self.r.random() < 0.4 else self.of_type(v.type)
            next_values.append(self.clamp(new, v.magnitude) if v.dtype in MATH else new if v.dtype.bits > 1 else v)
        return [v if w.dtype.is_float and w.dtype not in MATH else w for v, w in zip(carried, next_values, strict=True)]

    def turned(self, v: V) -> V:
        """A carried tile, turned: a square one takes the place of the one it is made of."""
        rows, columns = v.type.shape
        turned = V(self.emit(ops.Permute, (v.value,), v.type.with_shape((columns, rows)), axes=(1, 0)), v.magnitude)
        if rows == columns:
            return turned
        return V(self.emit(ops.Reshape, (turned.value,), v.type), v.magnitude)

    def scoped(self, block: Block, run: Callable[[], None]) -> None:
        """Builds `block`; values made in it are forgotten after, and all it uses is fixed."""
        pool, self.pool = self.pool, list(self.pool)
        self.fixed_only += 1
        with self.b.at(block):
            run()
        self.fixed_only -= 1
        self.pool = pool

    def counted(self) -> V | None:
        """A `for` with carried values, and sometimes a way out."""
        start = self.carried()
        if not start:
            return None
        types = [v.type for v in start]
        block = Block([INDEX, *types])
        lo, step = self.index(self.r.randint(0, 2)), self.index(self.r.randint(1, 2))
        hi = self.r.choice([self.named["n"], self.index(self.r.randint(0, 4))])

        def run() -> None:
            carried = [V(a, v.magnitude) for a, v in zip(block.args[1:], start, strict=True)]
            self.pool.append(V(block.args[0]))
            if self.r.random() < 0.4:
                self.way_out([v.value for v in carried])
            end = self.r.choice([ops.Continue] * 5 + [ops.Break])
            self.b.emit(end, [v.value for v in self.trip(carried, self.r.randint(1, 4))])

        self.scoped(block, run)
        initial = [v.value for v in start]
        results = self.b.emit(ops.For, (lo, hi, step, *initial), types, (block,)).results
        self.pool += [V(x, v.magnitude) for x, v in zip(results, start, strict=True)]
        return None

    def way_out(self, values: Sequence[Value]) -> None:
        cls: type[Op] = self.r.choice([ops.Break, ops.Break, ops.Continue, ops.Continue, ops.Return])
        if cls is ops.Return and self.exchanges():
            return  # others would wait for this program
        self.leave_if(self.condition(()).value, cls, () if cls is ops.Return else values)

    def polled(self) -> V | None:
        """A `loop` with a counter that ends it."""
        start = self.carried()
        types = [v.type for v in start]
        block = Block([INDEX, *types])
        limit = self.index(self.r.randint(1, 4))

        def run() -> None:
            carried = [V(a, v.magnitude) for a, v in zip(block.args[1:], start, strict=True)]
            over = self.emit(ops.CompareOp, (block.args[0], limit), BOOL, fn=Compare.GE)
            self.leave_if(over, ops.Break, [v.value for v in carried])
            count = self.emit(ops.BinaryOp, (block.args[0], self.index(1)), INDEX, fn=Binary.ADD)
            self.b.emit(ops.Continue, [count, *(v.value for v in self.trip(carried, self.r.randint(1, 3)))])

        self.scoped(block, run)
        results = self.b.emit(ops.Loop, (self.index(0), *(v.value for v in start)), types, (block,)).results
        self.pool += [V(x, v.magnitude) for x, v in zip(results, start, strict=True)]
        return None

    def branch(self) -> V | None:
        """An `if` whose arms give values of the same types."""
        start = self.carried()
        blocks = Block(), Block()
        for block in blocks:

            def run() -> None:
                self.b.emit(ops.Yield, [v.value for v in self.trip(start, self.r.randint(1, 3))])

            self.scoped(block, run)
        results = self.b.emit(ops.If, (self.condition(()).value,), [v.type for v in start], blocks).results
        self.pool += [V(x, v.magnitude) for x, v in zip(results, start, strict=True)]
        return None
