"""Tile IR to Python: one generator function per kernel, so that a schedule costs little more than its accesses.

Integers and bools of shape () are Python numbers, wrapped as their type says; everything else is what the
evaluator in `peertile.meaning` makes of it, whose functions the code calls. The code yields before every
operation on memory that has an order; a true value says that the program is parked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from peertile.backends.binary import Place
from peertile.errors import InternalError
from peertile.ir import ops
from peertile.ir.core import Block, Kernel, Op, Value, walk
from peertile.ir.ops import Binary, Compare, Unary
from peertile.ir.types import PointerType, SymmetricType, TileType, ViewType
from peertile.meaning.registry import MEANINGS
from peertile.meaning.tiles import delinearize
from peertile.memory_model import Order, Proxy
from peertile.sim import moves
from peertile.sim.loops import TRIES
from peertile.sim.polls import polling
from peertile.sim.sites import Site, Verb

__all__ = ["Translation", "translate"]


@dataclass(frozen=True, eq=False)
class Translation:
    """A kernel as the machine runs it: `start(program, arguments)` gives the generator. `text` is its source."""

    kernel: Kernel
    start: Callable[..., Any]
    places: tuple[Place, ...]
    text: str
    unsafe: bool
    proxies: bool = False
    """Whether anything goes through a proxy other than the generic one."""


_PADDING: Final = {
    ops.Padding.ZERO: 0.0,
    ops.Padding.NEG_ZERO: -0.0,
    ops.Padding.NAN: np.nan,
    ops.Padding.INF: np.inf,
    ops.Padding.NEG_INF: -np.inf,
}


class _Ids:
    """What meanings of values may ask of a program; ids are translated, so nothing."""

    ids = (0, 0, 0)


def translate(kernel: Kernel) -> Translation:
    """Python for an expanded kernel with its bounds decided."""
    return _Translator(kernel).run()


def _int(t: Any) -> TileType | None:
    """The type if it is an integer of shape ()."""
    return t if isinstance(t, TileType) and t.is_scalar and t.dtype.is_int else None


def _native(t: Any) -> bool:
    """Whether values of the type are Python numbers."""
    return isinstance(t, TileType) and t.is_scalar and (t.dtype.is_int or t.dtype.is_bool)


def _quot(a: int, b: int) -> int:
    if b == 0:
        return 0
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def _rem(a: int, b: int) -> int:
    return a - b * _quot(a, b)


def _fold(combine: Callable[..., Any], tiles: Sequence[Any], axis: int, backwards: bool | None) -> Sequence[Any]:
    """As the evaluator folds (`backwards` None) or scans: from the first element to the last, or the other way.

    Lane by lane, since `combine` is code about scalars, which branches on them.
    """
    slices = [np.moveaxis(x, axis, 0) for x in tiles]
    count, shape = len(slices[0]), slices[0].shape[1:]
    lanes = [s.reshape(count, -1) for s in slices]
    order = range(count - 1, -1, -1) if backwards else range(count)
    scanned = [np.empty(s.shape, s.dtype) for s in lanes]
    for lane in range(lanes[0].shape[1]):
        columns = [_numbers(s[:, lane]) for s in lanes]
        total: Sequence[Any] = [column[order[0]] for column in columns]
        for k in order:
            if k != order[0]:
                total = combine(*total, *(column[k] for column in columns))
            for into, value in zip(scanned, total, strict=True):
                into[k, lane] = value
    if backwards is None:
        return [s[order[-1]].reshape(shape)[()] for s in scanned]
    return [np.moveaxis(s.reshape(count, *shape), 0, axis) for s in scanned]


def _numbers(column: Any) -> Any:
    """Elements as code about scalars has them: Python's numbers for integers and booleans, else numpy's."""
    return column.tolist() if column.dtype.kind in "iub" else column


def _tile_index(view: Any, linear: int) -> Any:
    partition = view.type.partition
    tiles = [-(-n // size) for n, size in zip(view.extents, partition.tile_shape, strict=True)]
    index = delinearize(linear, tiles, partition.swizzle)
    return tuple(index) if len(index) != 1 else index[0]


class _Translator:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.used = {value for op in walk(kernel.body) for value in op.operands}
        self.lines: list[str] = []
        self.depth = 1
        self.names: dict[Value, str] = {}
        self.scope: dict[str, Any] = {
            "np": np, "QUOT": _quot, "REM": _rem, "TILE_INDEX": _tile_index, "IDS": _Ids(), "moves": moves,
            "FOLD": _fold,
        }  # fmt: skip
        self.places: list[Place] = []
        self.proxies = False
        self.loops: list[tuple[Op, list[str], list[str], int | None]] = []
        self.carried: dict[Op, Sequence[Value]] = {}
        """What a loop that polls carries from trip to trip, and uses, beside tokens and its counter."""
        self.roots: dict[Value, str] = dict(zip(kernel.params, kernel.param_names, strict=True))

    def run(self) -> Translation:
        params = [self.name(v) for v in self.kernel.params]
        self.block(self.kernel.body)
        body = "\n".join(self.lines)
        text = f"def start(P, {', '.join(params)}):\n{body}\n    return\n    yield\n"
        code = compile(text, f"<simulated {self.kernel.name}>", "exec")
        exec(code, self.scope)
        start = self.scope["start"]
        return Translation(self.kernel, start, tuple(self.places), text, self.kernel.unsafe, self.proxies)

    # ---------------------------------------------------------------- names

    def name(self, value: Value) -> str:
        found = self.names.get(value)
        if found is None:
            found = self.names[value] = f"v{len(self.names)}"
        return found

    def args(self, values: Sequence[Value]) -> list[str]:
        return [self.name(v) for v in values]

    def constant(self, value: Any, prefix: str = "k") -> str:
        name = f"{prefix}{len(self.scope)}"
        self.scope[name] = value
        return name

    def emit(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def root(self, value: Value) -> str:
        """The object in the words of the kernel."""
        seen = 0
        suffix = ""
        while value not in self.roots and value.op is not None and value.op.operands and seen < 50:
            op = value.op
            if isinstance(op, ops.Field):
                suffix = f".{op.attrs['field']}{suffix}"
            value = op.operands[0]
            seen += 1
        if value.op is not None and isinstance(value.op, ops.LaunchWords):
            return "launch words"
        return self.roots.get(value, value.hint or "memory") + suffix

    def site(self, op: Op, verb: Verb, target: Value) -> str:
        t = target.type
        size = t.dtype.itemsize if isinstance(t, ViewType | PointerType | SymmetricType) else 1
        order = op.attrs.get("order", Order.WEAK)
        scope = op.attrs.get("scope")
        name = self.root(target)
        if isinstance(t, PointerType):
            name = f"memory behind {name}"
        signed = t.dtype.bits if isinstance(t, ViewType | PointerType) and t.dtype.is_int and t.dtype.min < 0 else 0
        proxy = op.attrs.get("proxy", Proxy.GENERIC)
        self.proxies = self.proxies or proxy is not Proxy.GENERIC
        tells = isinstance(op, ops.Wait) and op.result in self.used
        return self.constant(Site(verb, name, size, order, scope, op.loc, proxy, signed=signed, tells=tells), "S")

    @staticmethod
    def _access(op: Op, method: str) -> str:
        """The beginning of a call of an access without order, up to its place."""
        return f"P.{method}(" if op.attrs.get("proxy", Proxy.GENERIC) is Proxy.GENERIC else f"P.through(P.{method}, "

    def place(self, op: Op, kind: str, message: str, what: str = "") -> int:
        self.places.append(Place(op.loc, message, what, kind))
        return len(self.places) - 1

    # ---------------------------------------------------------------- blocks

    def block(self, block: Block) -> None:
        start = len(self.lines)
        for op in block.ops:
            self.op(op)
        if len(self.lines) == start:
            self.emit("pass")

    def inner(self, block: Block) -> None:
        self.depth += 1
        self.block(block)
        self.depth -= 1

    def assign(self, targets: Sequence[str], values: Sequence[str]) -> None:
        pairs = [(a, b) for a, b in zip(targets, values, strict=True) if a != b]
        if pairs:
            self.emit(f"{', '.join(a for a, _ in pairs)} = {', '.join(b for _, b in pairs)}")

    def op(self, op: Op) -> None:
        method = getattr(self, f"_{type(op).__name__}", None)
        if method is not None:
            method(op)
        else:
            self.by_meaning(op)

    def by_meaning(self, op: Op) -> None:
        meaning = MEANINGS.get(type(op))
        if meaning is None or meaning.steps or not op.results:
            raise InternalError(f"{op.NAME} cannot be simulated: it has no meaning on values")
        call = f"{self.constant(meaning.fn, 'M')}(IDS, {self.constant(op, 'O')}"
        for v in op.operands:
            call += f", {self.boxed(v)}"
        call += ")"
        if len(op.results) == 1:
            self.emit(f"{self.name(op.result)} = {self.unboxed(op.result, call)}")
            return
        self.emit(f"{', '.join(self.args(op.results))} = {call}")
        for v in op.results:
            if _native(v.type):
                self.emit(f"{self.name(v)} = {self.unboxed(v, self.name(v))}")

    def boxed(self, v: Value) -> str:
        """An operand as the evaluator takes it."""
        if _native(v.type):
            assert isinstance(v.type, TileType)
            return f"{self.constant(v.type.dtype.numpy.type, 'T')}({self.name(v)})"
        return self.name(v)

    def unboxed(self, v: Value, text: str) -> str:
        t = v.type
        if _native(t):
            assert isinstance(t, TileType)
            return f"bool({text})" if t.dtype.is_bool else f"int({text})"
        return text

    def wrap(self, t: TileType, name: str) -> None:
        """Keeps an integer that was computed exactly within its type."""
        d = t.dtype
        mask = (1 << d.bits) - 1
        if d.min == 0:
            self.emit(f"if not 0 <= {name} <= {mask}: {name} &= {mask}")
        else:
            half = 1 << d.bits - 1
            self.emit(f"if not {-half} <= {name} < {half}: {name} = (({name} + {half}) & {mask}) - {half}")

    # ---------------------------------------------------------------- values

    def _Const(self, op: Op) -> None:
        t = op.result.type
        if _native(t):
            self.emit(f"{self.name(op.result)} = {op.attrs['value']!r}")
        else:
            assert isinstance(t, TileType)
            value = np.asarray(op.attrs["value"]).astype(t.dtype.numpy)[()]
            self.emit(f"{self.name(op.result)} = {self.constant(value)}")

    def _ProgramId(self, op: Op) -> None:
        self.emit(f"{self.name(op.result)} = P.ids[{op.attrs['axis']}]")

    def _NumPrograms(self, op: Op) -> None:
        self.emit(f"{self.name(op.result)} = P.grid[{op.attrs['axis']}]")

    def _Rank(self, op: Op) -> None:
        self.emit(f"{self.name(op.result)} = {self.name(op.operands[0])}.rank")

    def _NumRanks(self, op: Op) -> None:
        self.emit(f"{self.name(op.result)} = len({self.name(op.operands[0])}.views)")

    def _Extent(self, op: Op) -> None:
        self.emit(f"{self.name(op.result)} = {self.name(op.operands[0])}.extents[{op.attrs['axis']}]")

    def _NumTiles(self, op: Op) -> None:
        size = op.attrs["size"]
        x = f"{self.name(op.operands[0])}.extents[{op.attrs['axis']}]"
        self.emit(f"{self.name(op.result)} = -(-{x} // {size})")

    def _TileIndex(self, op: Op) -> None:
        view, linear = self.args(op.operands)
        self.emit(f"{', '.join(self.args(op.results))} = TILE_INDEX({view}, {linear})")

    def _UnaryOp(self, op: Op) -> None:
        t = op.result.type
        if _native(t) and isinstance(t, TileType) and t.dtype.is_bool and op.attrs["fn"] is Unary.NOT:
            self.emit(f"{self.name(op.result)} = not {self.name(op.operands[0])}")
        else:
            self.by_meaning(op)

    def _BinaryOp(self, op: Op) -> None:
        t, fn = op.result.type, op.attrs["fn"]
        r, a, b = self.name(op.result), *self.args(op.operands)
        assert isinstance(t, TileType)
        if _int(t):
            exact = {
                Binary.ADD: f"{a} + {b}", Binary.SUB: f"{a} - {b}", Binary.MUL: f"{a} * {b}",
                Binary.QUOT: f"QUOT({a}, {b})", Binary.FLOORDIV: f"{a} // {b} if {b} else 0",
            }.get(fn)  # fmt: skip
            inside = {
                Binary.MOD: f"{a} % {b} if {b} else {a}", Binary.REM: f"REM({a}, {b})",
                Binary.MIN: f"{a} if {a} < {b} else {b}", Binary.MAX: f"{a} if {a} > {b} else {b}",
                Binary.AND: f"{a} & {b}", Binary.OR: f"{a} | {b}", Binary.XOR: f"{a} ^ {b}",
            }.get(fn)  # fmt: skip
            if exact is not None:
                self.emit(f"{r} = {exact}")
                self.wrap(t, r)
                return
            if inside is not None:
                self.emit(f"{r} = {inside}")
                return
        elif _native(t) and fn in (Binary.AND, Binary.OR, Binary.XOR):
            self.emit(f"{r} = {a} {({Binary.AND: '&', Binary.OR: '|', Binary.XOR: '^'})[fn]} {b}")
            return
        elif t.dtype.name in ("f32", "f64"):
            symbol = {Binary.ADD: "+", Binary.SUB: "-", Binary.MUL: "*", Binary.DIV: "/"}.get(fn)
            if symbol is not None:
                self.emit(f"{r} = {a} {symbol} {b}")
                return
        self.by_meaning(op)

    def _CompareOp(self, op: Op) -> None:
        t, fn = op.operands[0].type, op.attrs["fn"]
        r, a, b = self.name(op.result), *self.args(op.operands)
        if not _native(t):
            self.by_meaning(op)
            return
        assert isinstance(t, TileType)
        if fn is Compare.AT_LEAST:
            bits = t.dtype.bits
            self.emit(f"{r} = ({a} - {b}) & {(1 << bits) - 1} < {1 << bits - 1}")
        else:
            symbol = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}[fn.value]
            self.emit(f"{r} = {a} {symbol} {b}")

    def _Select(self, op: Op) -> None:
        t = op.result.type
        if isinstance(t, TileType) and t.is_scalar:
            c, a, b = self.args(op.operands)
            self.emit(f"{self.name(op.result)} = {a} if {c} else {b}")
        else:
            self.by_meaning(op)

    def _Cast(self, op: Op) -> None:
        src, dst = op.operands[0].type, op.result.type
        assert isinstance(src, TileType)
        assert isinstance(dst, TileType)
        r, a = self.name(op.result), self.name(op.operands[0])
        if _native(src) and _native(dst) and not op.attrs["saturate"]:
            if dst.dtype.is_bool:
                self.emit(f"{r} = {a} != 0")
            else:
                self.emit(f"{r} = int({a})" if src.dtype.is_bool else f"{r} = {a}")
                if not src.dtype.is_bool and not (dst.dtype.min <= src.dtype.min and src.dtype.max <= dst.dtype.max):
                    self.wrap(dst, r)
        else:
            self.by_meaning(op)

    def _Bitcast(self, op: Op) -> None:
        src, dst = op.operands[0].type, op.result.type
        if _int(src) and _int(dst):
            assert isinstance(dst, TileType)
            self.emit(f"{self.name(op.result)} = {self.name(op.operands[0])}")
            self.wrap(dst, self.name(op.result))
        else:
            self.by_meaning(op)

    def _Broadcast(self, op: Op) -> None:
        source = op.operands[0].op
        t = op.result.type
        if isinstance(source, ops.Const) and isinstance(t, TileType):
            full = np.full(t.shape, np.asarray(source.attrs["value"]).astype(t.dtype.numpy)[()], t.dtype.numpy)
            full.flags.writeable = False
            self.emit(f"{self.name(op.result)} = {self.constant(full)}")
        else:
            self.by_meaning(op)

    # ---------------------------------------------------------------- views

    def _PeerView(self, op: Op) -> None:
        x, rank = self.args(op.operands)
        site = self.site(op, Verb.READS, op.operands[0])
        self.emit(f"{self.name(op.result)} = P.peer({site}, {x}, {rank})")

    def _ViewStride(self, op: Op) -> None:
        self.emit(f"{self.name(op.result)} = moves.view_stride({self.name(op.operands[0])}, {op.attrs['axis']})")

    def _ViewSlice(self, op: Op) -> None:
        self._derive(op, "sliced", self._tuple(op.operands[1:]))

    def _ViewPermute(self, op: Op) -> None:
        self._derive(op, "permuted", repr(tuple(op.attrs["axes"])))

    def _ViewReshape(self, op: Op) -> None:
        self._derive(op, "reshaped", self._tuple(op.operands[1:]))

    def _derive(self, op: Op, function: str, numbers: str) -> None:
        view, t = self.name(op.operands[0]), self.constant(op.result.type)
        self.emit(f"{self.name(op.result)} = moves.{function}({view}, {t}, {numbers})")

    def _Field(self, op: Op) -> None:
        self.emit(f"{self.name(op.result)} = {self.name(op.operands[0])}[{op.attrs['field']!r}]")

    def _LaunchWords(self, op: Op) -> None:
        self.emit(f"{self.name(op.result)} = P.launch.words()")

    def _tuple(self, values: Sequence[Value]) -> str:
        return "(" + "".join(f"{n}, " for n in self.args(values)) + ")"

    def _Load(self, op: Op) -> None:
        t = op.result.type
        assert isinstance(t, TileType)
        site = self.site(op, Verb.READS, op.operands[0])
        padding = np.asarray(_PADDING[op.attrs["padding"]]).astype(t.dtype.numpy)[()]
        index = self._tuple(op.operands[1:])
        view = self.name(op.operands[0])
        rest = f"{site}, {view}, {index}, {self.constant(t.shape)}, {self.constant(padding)})"
        call = self._access(op, "load") + rest
        self.emit(f"{self.name(op.result)} = {self.unboxed(op.result, call + '[()]') if not t.shape else call}")

    def _Store(self, op: Op) -> None:
        view, tile = self.args(op.operands[:2])
        t = op.operands[1].type
        assert isinstance(t, TileType)
        site = self.site(op, Verb.WRITES, op.operands[0])
        values = f"np.asarray({self.boxed(op.operands[1])})" if not t.shape else tile
        index = self._tuple(op.operands[2:])
        self.emit(self._access(op, "store") + f"{site}, {view}, {index}, {values}, {self.constant(t.shape)})")

    def _Gather(self, op: Op) -> None:
        view, chosen = self.args(op.operands[:2])
        t = op.result.type
        assert isinstance(t, TileType)
        site = self.site(op, Verb.READS, op.operands[0])
        padding = self.constant(np.asarray(_PADDING[op.attrs["padding"]]).astype(t.dtype.numpy)[()])
        index = self._tuple(op.operands[2:])
        self.emit(
            f"{self.name(op.result)} = moves.gather(P, {site}, {view}, {chosen}, {index}, {op.attrs['axis']}, "
            f"{self.constant(t.shape)}, {padding})"
        )

    def _Scatter(self, op: Op) -> None:
        view, tile, chosen = self.args(op.operands[:3])
        site = self.site(op, Verb.WRITES, op.operands[0])
        index = self._tuple(op.operands[3:])
        self.emit(f"moves.scatter(P, {site}, {view}, {tile}, {chosen}, {index}, {op.attrs['axis']})")

    def _TileLoad(self, op: Op) -> None:
        t = op.result.type
        assert isinstance(t, TileType)
        view, site = self.name(op.operands[0]), self.site(op, Verb.READS, op.operands[0])
        self.emit(f"P.at = {view}.object; P.site = {site}")
        self.emit("yield")
        call = f"moves.tile_load(P, {site}, {view}, {self._tuple(op.operands[1:])}, {self.constant(t.shape)})"
        self.emit(f"{self.name(op.result)} = {self.unboxed(op.result, call + '[()]') if not t.shape else call}")

    def _TileStore(self, op: Op) -> None:
        self._tile_write(op, "tile_store")

    def _AsyncStore(self, op: Op) -> None:
        source, part = "", op.operands[1].op
        if op.attrs["copies"] and isinstance(part, ops.Load):
            site = self.site(part, Verb.READS, part.operands[0])
            source = f", ({site}, {self.name(part.operands[0])}, {self._tuple(part.operands[1:])})"
        self._tile_write(op, "async_store", source)

    def _tile_write(self, op: Op, function: str, more: str = "") -> None:
        view, tile = self.args(op.operands[:2])
        t = op.operands[1].type
        assert isinstance(t, TileType)
        site = self.site(op, Verb.WRITES, op.operands[0])
        if "order" in op.attrs:
            self.emit(f"P.at = {view}.object; P.site = {site}")
            self.emit("yield")
        values = f"np.asarray({self.boxed(op.operands[1])})" if not t.shape else tile
        index, shape = self._tuple(op.operands[2:]), self.constant(t.shape)
        result = f"{self.name(op.result)} = " if op.results else ""
        self.emit(f"{result}moves.{function}(P, {site}, {view}, {index}, {values}, {shape}{more})")

    def _WaitTransfer(self, op: Op) -> None:
        self.emit(f"moves.wait_transfers(P, {self._tuple(op.operands)})")

    def _WaitAny(self, op: Op) -> None:
        assert isinstance(op, ops.WaitAny)
        site = self.site(op, Verb.WAITS, op.operands[0])
        place = self.place(op, "wait", "", op.attrs["what"] or self.root(op.operands[0]))
        words = "".join(
            f"({self.name(view)}, {self.name(expected)}, {self._tuple(k)}), " for view, expected, k in op.words()
        )
        r = self.name(op.result)
        self.emit(f"P.wait_place = {place}")
        self.emit(f"P.at = None; P.site = {site}")
        self.emit("yield")
        call = f"moves.wait_any(P, {site}, {self.constant(op.attrs['cmp'])}, ({words}))"
        self.emit(f"while ({r} := {call}) is None: yield True")

    def _ReduceWith(self, op: Op) -> None:
        self._fold_with(op, None)

    def _ScanWith(self, op: Op) -> None:
        self._fold_with(op, bool(op.attrs["reverse"]))

    def _fold_with(self, op: Op, backwards: bool | None) -> None:
        """A fold by a function of the kernel's, which becomes one of Python's."""
        block = op.blocks[0]
        self.emit(f"def F({', '.join(self.args(block.args))}):")
        self.depth += 1
        for v in block.args:
            if _native(v.type):
                self.emit(f"{self.name(v)} = {self.unboxed(v, self.name(v))}")
        for inner in block.ops[:-1]:
            self.op(inner)
        self.emit(f"return ({''.join(self.boxed(v) + ', ' for v in block.ops[-1].operands)})")
        self.depth -= 1
        tiles = "".join(f"{self.boxed(v)}, " for v in op.operands)
        call = f"FOLD(F, ({tiles}), {op.attrs['axis']}, {backwards})"
        self.emit(f"{''.join(n + ', ' for n in self.args(op.results))} = {call}")
        for v in op.results:
            if _native(v.type):
                self.emit(f"{self.name(v)} = {self.unboxed(v, self.name(v))}")

    def _TileAtomic(self, op: Op) -> None:
        view, tile = self.args(op.operands[:2])
        t = op.operands[1].type
        assert isinstance(t, TileType)
        site = self.site(op, Verb.UPDATES, op.operands[0])
        self.emit(f"P.at = {view}.object; P.site = {site}")
        self.emit("yield")
        values = f"np.asarray({self.boxed(op.operands[1])})" if not t.shape else tile
        index, shape, rmw = self._tuple(op.operands[2:]), self.constant(t.shape), self.constant(op.attrs["rmw"])
        self.emit(f"P.tile_atomic({site}, {view}, {index}, {values}, {shape}, {rmw})")

    def _WordLoad(self, op: Op) -> None:
        view, r = self.name(op.operands[0]), self.name(op.result)
        site = self.site(op, Verb.READS, op.operands[0])
        index = self._tuple(op.operands[1:])
        if op.attrs["order"] is Order.WEAK:
            self.emit(f"{r} = {self._access(op, 'word_load')}{site}, {view}, {index})")
            return
        self.emit(f"w = P.word({site}, {view}, {index})")
        self.emit("yield")
        self.emit(f"{r} = P.load_word({site}, w)")

    def _WordStore(self, op: Op) -> None:
        view, value = self.args(op.operands[:2])
        site = self.site(op, Verb.WRITES, op.operands[0])
        index = self._tuple(op.operands[2:])
        if op.attrs["order"] is Order.WEAK:
            self.emit(f"{self._access(op, 'word_store')}{site}, {view}, {index}, {value})")
            return
        self.emit(f"w = P.word({site}, {view}, {index})")
        self.emit("yield")
        self.emit(f"P.store_word({site}, w, {value})")

    def _WordRmw(self, op: Op) -> None:
        view, value = self.args(op.operands[:2])
        site = self.site(op, Verb.UPDATES, op.operands[0])
        self.emit(f"w = P.word({site}, {view}, {self._tuple(op.operands[2:])})")
        self.emit("yield")
        self.emit(f"{self.name(op.result)} = P.rmw_word({site}, w, {value}, {self.constant(op.attrs['rmw'])})")

    def _Wait(self, op: Op) -> None:
        view, expected = self.args(op.operands[:2])
        site = self.site(op, Verb.WAITS, op.operands[0])
        cmp = self.constant(op.attrs["cmp"])
        place = self.place(op, "wait", "", op.attrs["what"] or self.root(op.operands[0]))
        self.emit(f"P.wait_place = {place}")
        self.emit(f"w = P.word({site}, {view}, {self._tuple(op.operands[2:])})")
        self.emit(f"P.expected = ({cmp}, {expected})")
        self.emit("yield")
        self.emit(f"while P.blocked({site}, w, {cmp}, {expected}): yield True")
        self.emit(f"{self.name(op.result)} = P.pass_wait({site}, w, {cmp}, {expected})")

    def _Fence(self, op: Op) -> None:
        site = self.constant(Site(Verb.UPDATES, "fence", 1, Order.ACQ_REL, op.attrs["scope"], op.loc), "S")
        self.emit(f"P.fence({self.constant(op.attrs['scope'])}, {site})")

    def _FenceAlias(self, op: Op) -> None:
        self.emit("P.cross()")
        for token, given in zip(op.results, op.operands, strict=True):
            self.emit(f"{self.name(token)} = {self.name(given)}")

    def _Suspend(self, op: Op) -> None:
        self.emit("P.at = P.site = None")  # what comes next touches nothing
        self.emit("yield")

    # ---------------------------------------------------------------- pointers

    def _NewToken(self, op: Op) -> None:
        self.emit(f"{self.name(op.result)} = P.new_token()")

    def _JoinTokens(self, op: Op) -> None:
        self.emit(f"{self.name(op.result)} = P.join_tokens({self._tuple(op.operands)})")

    def _PtrOffset(self, op: Op) -> None:
        p, offset = self.args(op.operands)
        t = op.result.type
        assert isinstance(t, PointerType)
        size = t.dtype.itemsize
        if t.shape:
            self.emit(f"{self.name(op.result)} = {p} + {offset}.astype(np.int64) * {size}")
        else:
            self.emit(f"{self.name(op.result)} = {p} + {offset} * {size}")

    def _PtrBroadcast(self, op: Op) -> None:
        t = op.result.type
        assert isinstance(t, PointerType)
        p = self.name(op.operands[0])
        self.emit(f"{self.name(op.result)} = np.broadcast_to(np.asarray({p}, np.int64), {self.constant(t.shape)})")

    def _Unicast(self, op: Op) -> None:
        self.emit(f"{self.name(op.result)} = {self.name(op.operands[0])}")

    def _pointer(self, op: Op, verb: Verb, method: str, values: Sequence[Value], results: str, extra: str = "") -> None:
        t = op.operands[0].type
        assert isinstance(t, PointerType)
        site = self.site(op, verb, op.operands[0])
        tail = op.operands[1 + len(values) :]
        mask = self.name(tail[0]) if op.attrs["masked"] else "None"
        token = self.name(tail[-1]) if op.attrs["ordered"] else "None"
        dtype, shape = self.constant(t.dtype), self.constant(t.shape)
        given = "".join(f"{n}, " for n in self.args(values))
        if op.attrs["order"] is not Order.WEAK:
            self.emit(f"P.aim({site}, {dtype}, {self.name(op.operands[0])})")
            self.emit("yield")
        call = f"P.{method}({site}, {dtype}, {shape}, {self.name(op.operands[0])}, {given}{mask}, {token}{extra})"
        self.emit(f"{results} = {call}")

    def _PtrLoad(self, op: Op) -> None:
        self._pointer(op, Verb.READS, "ptr_load", op.operands[1:2], ", ".join(self.args(op.results)))

    def _PtrStore(self, op: Op) -> None:
        self._pointer(op, Verb.WRITES, "ptr_store", op.operands[1:2], self.name(op.result))

    def _PtrRmw(self, op: Op) -> None:
        rmw = f", {self.constant(op.attrs['rmw'])}"
        self._pointer(op, Verb.UPDATES, "ptr_rmw", op.operands[1:2], ", ".join(self.args(op.results)), rmw)

    def _PtrCas(self, op: Op) -> None:
        self._pointer(op, Verb.UPDATES, "ptr_cas", op.operands[1:3], ", ".join(self.args(op.results)))

    # ---------------------------------------------------------------- checks, output

    def _Check(self, op: Op) -> None:
        kind, message = op.attrs["kind"].value, op.attrs["message"]
        place = self.place(op, kind, message)
        site = self.constant(Site(Verb.READS, "check", 1, loc=op.loc), "S")
        numbers = "".join(f", {n}" for n in self.args(op.operands[1:]))
        self.emit(f"if not {self.name(op.operands[0])}: P.fail({site}, {kind!r}, {message!r}, {place}{numbers})")

    def _Print(self, op: Op) -> None:
        types = "; ".join(str(v.type) for v in op.operands)
        place = self.place(op, "print", op.attrs["prefix"], types)
        values = "".join(f"{self.boxed(v)}, " for v in op.operands)
        self.emit(f"P.print({place}, {op.attrs['prefix']!r}, ({values}))")

    def _Mark(self, op: Op) -> None:
        """Nothing: the machine knows what its programs do."""

    # ---------------------------------------------------------------- control flow

    def _enter(self, op: Op, inits: Sequence[Value], args: Sequence[Value]) -> list[str]:
        names = self.args(args)
        self.assign(names, self.args(inits))
        return names

    def _polling(self, op: Op, rest: Sequence[Value], counted: str) -> int | None:
        """The number of a loop that polls, entered here. `rest`: what it carries."""
        found = polling(op, rest)
        if found is None:
            return None
        number = len(self.scope)
        free = "None" if found.free is None else self._tuple(found.free)
        self.emit(f"P.enter_loop({number}, {self._tuple(found.moving)}, {free}, {counted})")
        self.carried[op] = found.moving
        return number

    def _For(self, op: Op) -> None:
        lo, hi, step = self.args(op.operands[:3])
        iv, *rest = op.blocks[0].args
        carried = self._enter(op, op.operands[3:], rest)
        results = self.args(op.results)
        polls = self._polling(op, rest, f"len(range({lo}, {hi}, {step})) <= {TRIES}")
        self.emit(f"for {self.name(iv)} in range({lo}, {hi}, {step}):")
        self.loops.append((op, carried, results, polls))
        self.inner(op.blocks[0])
        self.loops.pop()
        if results:
            self.emit("else:")
            self.depth += 1
            self.assign(results, carried)
            self.emit("pass")
            self.depth -= 1

    def _Loop(self, op: Op) -> None:
        carried = self._enter(op, op.operands, op.blocks[0].args)
        polls = self._polling(op, op.blocks[0].args, "False")
        self.emit("while True:")
        self.loops.append((op, carried, self.args(op.results), polls))
        self.inner(op.blocks[0])
        self.loops.pop()

    def _If(self, op: Op) -> None:
        self.emit(f"if {self.name(op.operands[0])}:")
        self.inner(op.blocks[0])
        self.emit("else:")
        self.inner(op.blocks[1])

    def _Yield(self, op: Op) -> None:
        assert op.parent is not None
        owner = op.parent.parent
        assert owner is not None
        self.assign(self.args(owner.results), self.args(op.operands))

    def _Continue(self, op: Op) -> None:
        loop, carried, _, polls = self.loops[-1]
        self.assign(carried, self.args(op.operands))
        if polls is not None:
            site = self.constant(Site(Verb.READS, "loop", 1, loc=loop.loc), "S")
            self.emit(f"if P.back_edge({site}, {polls}, {self._tuple(self.carried[loop])}): yield True")
        self.emit("continue")

    def _Break(self, op: Op) -> None:
        _, _, results, _ = self.loops[-1]
        self.assign(results, self.args(op.operands))
        self.emit("break")

    def _Return(self, op: Op) -> None:
        self.emit("return")
