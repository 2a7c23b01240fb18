"""Computes virtual tiles at positions: the innermost part of every tile loop.

A position is one coordinate per axis, each `base + offset + step · lane`. At most one axis has step 1 (the
vector axis); where none has, the element is one scalar. A batch holds the vectors of one unrolled trip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from peertile.backends.cpu.arith import splat
from peertile.backends.cpu.convert import Batch, constant
from peertile.backends.cpu.nodes import (
    BufferNode,
    ElementNode,
    IotaNode,
    LoadNode,
    MapNode,
    Node,
    ScalarNode,
    TakeNode,
    resolve,
)
from peertile.backends.cpu.nodes import View as RunView
from peertile.backends.cpu.text import LLVM, MEMORY, Function, add, is_literal, mul, splat_literal, vector
from peertile.dtypes import DType, i16, i64
from peertile.ir.ops import Padding

__all__ = ["ORIGIN", "Coordinate", "Evaluator", "Mode", "Position", "TileAccess", "counted_loop", "element_type"]


@dataclass(frozen=True, slots=True)
class Coordinate:
    """`base + offset + step · lane` (base: an i64 register or literal)."""

    base: str
    offset: int = 0
    step: int = 0


Position = tuple[Coordinate, ...]
MAX_TRIP = 4096
"""More elements than any trip has along the vector axis."""
ORIGIN = Coordinate("0")
_LINE = 64
"""Bytes of a cache line."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How memory is accessed. `inside`: every tile of a view is wholly inside it and its vector axis has
    stride 1. `stream`: stores go around the caches, those to tiles that say so."""

    inside: bool
    stream: bool = False


class Host(Protocol):
    """What the evaluator needs from the lowering."""

    f: Function

    def alias(self, root: str) -> str: ...

    def scratch_alias(self) -> str: ...

    @property
    def dummy(self) -> str: ...


@dataclass(eq=False, slots=True)
class TileAccess:
    """A tile of a view with the address of its first element, computed in front of the loops. `ahead`: while it is
    read, what lies that many elements further (i64 register) is fetched into the caches. `streams`: around the caches
    is a way for stores to it."""

    view: RunView
    shape: tuple[int, ...]
    origin: tuple[str, ...]
    base: str
    ahead: str | None = None
    streams: bool = False

    @property
    def element(self) -> str:
        return MEMORY[self.view.type.dtype.name]


def element_type(dtype: DType, lanes: int) -> str:
    """The register type of `lanes` elements."""
    return vector(LLVM[dtype.name], lanes)


def _padding(padding: Padding, dtype: DType) -> str:
    if padding is Padding.ZERO:
        value: float = 0.0
    else:
        value = float({"neg_zero": "-0.0", "nan": "nan", "inf": "inf", "neg_inf": "-inf"}[padding.value])
    if not dtype.is_float:
        return "0"
    from_literal = constant(value, dtype, 1)
    return from_literal


def iota_constant(lanes: int, element: str, start: int = 0) -> str:
    return "<" + ", ".join(f"{element} {start + k}" for k in range(lanes)) + ">"


class Evaluator:
    """Evaluates nodes inside one loop body. Values are kept for the body only."""

    def __init__(self, host: Host, lanes: int, mode: Mode, tiles: dict[int, TileAccess]) -> None:
        self.host = host
        self.f = host.f
        self.lanes = lanes
        self.mode = mode
        self.tiles = tiles
        self._values: dict[tuple[int, Position], str] = {}
        self._rows: dict[tuple[int, Position], str] = {}
        self._splats: dict[tuple[int, str], str] = {}
        self._limits: dict[tuple[int, Position], str] = {}

    def values(self, node: Node, positions: list[Position]) -> Batch:
        """One register per position: a vector if the positions have a vector axis, else a scalar."""
        node = resolve(node)
        key = id(node)
        missing = [p for p in dict.fromkeys(positions) if (key, p) not in self._values]
        if missing:
            width = self.lanes if any(c.step for c in missing[0]) else 1
            for p, value in zip(missing, self._compute(node, missing, width), strict=True):
                self._values[key, p] = value
        return [self._values[key, p] for p in positions]

    def _compute(self, node: Node, positions: list[Position], width: int) -> Batch:
        if isinstance(node, ElementNode):
            return node.emit(width, [self.values(c, positions) for c in node.children])
        if isinstance(node, MapNode):
            inner = [tuple(ORIGIN if a is None else p[a] for a in node.axes) for p in positions]
            values = self.values(node.child, inner)
            if width > 1 and not any(c.step for c in inner[0]):
                return [self._splat(node.dtype, width, v) for v in values]
            return values
        if isinstance(node, ScalarNode):
            return [self._splat(node.dtype, width, node.register)] * len(positions)
        if isinstance(node, IotaNode):
            return [self._iota(node.dtype, p[0], width) for p in positions]
        if isinstance(node, BufferNode):
            return [self._from_scratch(node, p, width) for p in positions]
        if isinstance(node, TakeNode):
            return self._take(node, positions, width)
        assert isinstance(node, LoadNode), type(node)
        tile = self.tiles[id(node)]
        if self.mode.inside:
            return [self._load_inside(tile, p, width) for p in positions]
        return [self._load_edge(tile, node.padding, p, width) for p in positions]

    # ------------------------------------------------------------ leaves

    def _splat(self, dtype: DType, width: int, register: str) -> str:
        if width == 1:
            return register
        if not register.startswith("%"):
            return splat_literal(register, LLVM[dtype.name], width)
        key = (width, register)
        if key not in self._splats:
            self._splats[key] = splat(self.f, dtype, width, register)
        return self._splats[key]

    def _iota(self, dtype: DType, c: Coordinate, width: int) -> str:
        start = add(self.f, c.base, c.offset)
        if dtype.bits < 64 and not is_literal(start):
            start = self.f.value(f"trunc i64 {start} to {LLVM[dtype.name]}")
        if width == 1:
            return start
        t = element_type(dtype, width)
        lanes = iota_constant(width, LLVM[dtype.name])
        if start == "0":
            return self.f.value(f"add {t} zeroinitializer, {lanes}")
        return self.f.value(f"add {t} {self._splat(dtype, width, start)}, {lanes}")

    def scratch_address(self, node: BufferNode, p: Position) -> tuple[str, int]:
        """Address of the first lane and the step between lanes, in elements."""
        step = 0
        fixed = 0
        offset = "0"
        for c, stride in zip(p, node.strides, strict=True):
            fixed += c.offset * stride
            if c.step:
                step = stride
            if c.base != "0":
                offset = add(self.f, offset, mul(self.f, c.base, stride))
        element = MEMORY[node.dtype.name]
        address = node.address
        if offset != "0":
            address = self.f.value(f"getelementptr inbounds {element}, ptr {address}, i64 {offset}")
        if fixed:
            address = self.f.value(f"getelementptr inbounds {element}, ptr {address}, i64 {fixed}")
        return address, step

    def _from_scratch(self, node: BufferNode, p: Position, width: int) -> str:
        address, step = self.scratch_address(node, p)
        element = MEMORY[node.dtype.name]
        alias = self.host.scratch_alias()
        if width == 1 or step == 1:
            raw = self.f.value(
                f"load {vector(element, width)}, ptr {address}, align {node.dtype.itemsize}{alias}"
            )  # fmt: skip
        else:
            raw = self._gather(element, node.dtype, address, str(step), width, None, "poison", alias)
        return self.from_memory(node.dtype, raw, width)

    def _take(self, node: TakeNode, positions: list[Position], width: int) -> Batch:
        f, source, index = self.f, node.source, resolve(node.index)
        element, v = MEMORY[node.dtype.name], vector("i64", width)
        found = []
        for p, register in zip(positions, self.values(index, positions), strict=True):
            t = element_type(index.dtype, width)
            if index.dtype.bits < 64:
                extend = "sext" if index.dtype.is_signed else "zext"
                register = f.value(f"{extend} {t} {register} to {v}")
            mask = splat_literal(str(source.shape[node.axis] - 1), "i64", width)
            register = f.value(f"and {v} {register}, {mask}")
            stride = splat_literal(str(source.strides[node.axis]), "i64", width)
            offset = f.value(f"mul {v} {register}, {stride}")
            fixed = tuple(ORIGIN if k == node.axis else c for k, c in enumerate(p))
            address, step = self.scratch_address(source, fixed)
            if width == 1:
                address = f.value(f"getelementptr inbounds {element}, ptr {address}, i64 {offset}")
                raw = f.value(f"load {element}, ptr {address}, align {node.dtype.itemsize}")
            else:
                if step:
                    lanes = "<" + ", ".join(f"i64 {k * step}" for k in range(width)) + ">"
                    offset = f.value(f"add {v} {offset}, {lanes}")
                addresses = f.value(f"getelementptr inbounds {element}, ptr {address}, {v} {offset}")
                raw = self._gather_at(element, node.dtype, addresses, width, None, "poison", self.host.scratch_alias())
            found.append(self.from_memory(node.dtype, raw, width))
        return found

    def from_memory(self, dtype: DType, raw: str, width: int) -> str:
        if dtype.is_bool:
            return self.f.value(f"icmp ne {vector('i8', width)} {raw}, {'zeroinitializer' if width > 1 else '0'}")
        return raw

    def to_memory(self, dtype: DType, value: str, width: int) -> str:
        if dtype.is_bool:
            return self.f.value(f"zext {vector('i1', width)} {value} to {vector('i8', width)}")
        return value

    # ------------------------------------------------------------ views

    def _row(self, tile: TileAccess, p: Position) -> str:
        """Address of the tile's element at `p` with the vector axis at 0."""
        fixed = tuple(ORIGIN if c.step else c for c in p)
        key = (id(tile), fixed)
        if key not in self._rows:
            offset = "0"
            for c, stride in zip(fixed, tile.view.strides, strict=True):
                index = add(self.f, c.base, c.offset)
                offset = add(self.f, offset, mul(self.f, index, stride))
            address = tile.base
            if offset != "0":
                address = self.f.value(f"getelementptr {tile.element}, ptr {address}, i64 {offset}")
            self._rows[key] = address
        return self._rows[key]

    def _along(self, tile: TileAccess, p: Position) -> str:
        """Address of the first lane where the vector axis has stride 1."""
        address = self._row(tile, p)
        for c in p:
            if c.step:
                if c.base != "0":
                    address = self.f.value(f"getelementptr {tile.element}, ptr {address}, i64 {c.base}")
                if c.offset:
                    address = self.f.value(f"getelementptr {tile.element}, ptr {address}, i64 {c.offset}")
        return address

    def _load_inside(self, tile: TileAccess, p: Position, width: int) -> str:
        address = self._along(tile, p)
        dtype = tile.view.type.dtype
        alias = self.host.alias(tile.view.root)
        t = vector(tile.element, width)
        if tile.ahead is not None and width > 1:
            self._fetch(tile, address, sum(c.offset for c in p if c.step) * dtype.itemsize, width * dtype.itemsize)
        return self.from_memory(
            dtype, self.f.value(f"load {t}, ptr {address}, align {dtype.itemsize}{alias}"), width
        )  # fmt: skip

    def _fetch(self, tile: TileAccess, address: str, offset: int, nbytes: int) -> None:
        """Fetch ahead of a vector of `nbytes` at `offset` of its trip: every line once."""
        if offset % _LINE and offset // _LINE == (offset + nbytes - 1) // _LINE:
            return
        there = self.f.value(f"getelementptr {tile.element}, ptr {address}, i64 {tile.ahead}")
        self.f.emit(f"call void @llvm.prefetch.p0(ptr {there}, i32 0, i32 3, i32 1)")

    def _vector_axis(self, p: Position) -> int:
        return next(k for k, c in enumerate(p) if c.step)

    def count(self, tile: TileAccess, p: Position) -> str:
        """How many lanes from the first on are inside the view (i64, may be negative or beyond the lanes);
        for a scalar position, positive if it is inside."""
        f = self.f
        inside: str | None = None
        count = "1"
        for k, c in enumerate(p):
            index = add(f, add(f, tile.origin[k], c.base), c.offset)
            if c.step:
                count = f.value(f"sub i64 {tile.view.extents[k]}, {index}")
            else:
                ok = f.value(f"icmp slt i64 {index}, {tile.view.extents[k]}")
                inside = ok if inside is None else f.value(f"and i1 {inside}, {ok}")
        if inside is None:
            return count
        return f.value(f"select i1 {inside}, i64 {count}, i64 0")

    def _mask(self, tile: TileAccess, p: Position, width: int) -> str:
        """Which lanes at `p` are inside the view. Counted once for all columns of the trip; 16 bits hold any
        number of lanes there, which makes one short compare for each."""
        axis = self._vector_axis(p)
        first = tuple(Coordinate(c.base, 0, c.step) if c.step else c for c in p)
        key = (id(tile), first)
        if key not in self._limits:
            f, count = self.f, self.count(tile, first)
            count = f.value(f"call i64 @llvm.smax.i64(i64 {count}, i64 0)")
            count = f.value(f"call i64 @llvm.smin.i64(i64 {count}, i64 {MAX_TRIP})")
            short = f.value(f"trunc i64 {count} to i16")
            self._limits[key] = splat(f, i16, width, short)
        lanes = iota_constant(width, "i16", p[axis].offset)
        return self.f.value(f"icmp slt {vector('i16', width)} {lanes}, {self._limits[key]}")

    def _load_edge(self, tile: TileAccess, padding: Padding, p: Position, width: int) -> str:
        f, dtype = self.f, tile.view.type.dtype
        element, alias = tile.element, self.host.alias(tile.view.root)
        fill = _padding(padding, dtype)
        if width == 1:
            address = self._row(tile, p)
            count = self.count(tile, p)
            inside = f.value(f"icmp sgt i64 {count}, 0")
            # A load that must not happen reads scratch instead: no branch inside the loop.
            address = f.value(f"select i1 {inside}, ptr {address}, ptr {self.host.dummy}")
            raw = f.value(f"load {element}, ptr {address}, align {dtype.itemsize}{alias}")
            raw = f.value(f"select i1 {inside}, {element} {raw}, {element} {fill}")
            return self.from_memory(dtype, raw, 1)
        mask = self._mask(tile, p, width)
        axis = self._vector_axis(p)
        stride = tile.view.strides[axis]
        splat_fill = splat_literal(fill, element, width)
        if stride == "1":
            t = vector(element, width)
            raw = f.value(
                f"call {t} @llvm.masked.load.v{width}{_suffix(element)}.p0(ptr align {dtype.itemsize} "
                f"{self._along(tile, p)}, <{width} x i1> {mask}, {t} {splat_fill}){alias}"
            )
        else:
            raw = self._gather(element, dtype, self._strided(tile, p, axis), stride, width, mask, splat_fill, alias)
        return self.from_memory(dtype, raw, width)

    def _strided(self, tile: TileAccess, p: Position, axis: int) -> str:
        index = add(self.f, p[axis].base, p[axis].offset)
        offset = mul(self.f, index, tile.view.strides[axis])
        if offset == "0":
            return self._row(tile, p)
        return self.f.value(f"getelementptr {tile.element}, ptr {self._row(tile, p)}, i64 {offset}")

    def _addresses(self, element: str, address: str, stride: str, width: int) -> str:
        if is_literal(stride):
            offsets = "<" + ", ".join(f"i64 {k * int(stride)}" for k in range(width)) + ">"
        else:
            step = splat(self.f, i64, width, stride)
            offsets = self.f.value(f"mul {vector('i64', width)} {step}, {iota_constant(width, 'i64')}")
        return self.f.value(f"getelementptr {element}, ptr {address}, <{width} x i64> {offsets}")

    def _gather(
        self, element: str, dtype: DType, address: str, stride: str, width: int,
        mask: str | None, fill: str, alias: str,
    ) -> str:  # fmt: skip
        addresses = self._addresses(element, address, stride, width)
        return self._gather_at(element, dtype, addresses, width, mask, fill, alias)

    def _gather_at(
        self, element: str, dtype: DType, addresses: str, width: int, mask: str | None, fill: str, alias: str
    ) -> str:
        mask = splat_literal("true", "i1", width) if mask is None else mask
        t = vector(element, width)
        return self.f.value(
            f"call {t} @llvm.masked.gather.v{width}{_suffix(element)}.v{width}p0(<{width} x ptr> align "
            f"{dtype.itemsize} {addresses}, <{width} x i1> {mask}, {t} {fill}){alias}"
        )

    def store_tile(self, tile: TileAccess, p: Position, value: str, width: int) -> None:
        """Store one vector (or scalar) of a tile, clipped at the view's edge unless everything is inside."""
        f, dtype, element = self.f, tile.view.type.dtype, tile.element
        raw = self.to_memory(dtype, value, width)
        alias = self.host.alias(tile.view.root)
        t = vector(element, width)
        if self.mode.inside:
            streams = self.mode.stream and tile.streams
            hint = f"align {width * dtype.itemsize}, !nontemporal !2" if streams else f"align {dtype.itemsize}"
            f.emit(f"store {t} {raw}, ptr {self._along(tile, p)}, {hint}{alias}")
            return
        if width == 1:
            count = self.count(tile, p)
            inside = f.value(f"icmp sgt i64 {count}, 0")
            address = f.value(f"select i1 {inside}, ptr {self._row(tile, p)}, ptr {self.host.dummy}")
            f.emit(f"store {element} {raw}, ptr {address}, align {dtype.itemsize}")
            return
        mask = self._mask(tile, p, width)
        axis = self._vector_axis(p)
        stride = tile.view.strides[axis]
        if stride == "1":
            f.emit(
                f"call void @llvm.masked.store.v{width}{_suffix(element)}.p0({t} {raw}, ptr align {dtype.itemsize} "
                f"{self._along(tile, p)}, <{width} x i1> {mask}){alias}"
            )
            return
        addresses = self._addresses(element, self._strided(tile, p, axis), stride, width)
        f.emit(
            f"call void @llvm.masked.scatter.v{width}{_suffix(element)}.v{width}p0({t} {raw}, <{width} x ptr> align "
            f"{dtype.itemsize} {addresses}, <{width} x i1> {mask}){alias}"
        )

    def store_scratch(self, node: BufferNode, p: Position, value: str, width: int) -> None:
        """Store one vector (or scalar) of a tile in scratch."""
        address, step = self.scratch_address(node, p)
        raw = self.to_memory(node.dtype, value, width)
        element = MEMORY[node.dtype.name]
        t = vector(element, width)
        if width > 1 and step != 1:
            addresses, mask = self._addresses(element, address, str(step), width), splat_literal("true", "i1", width)
            self.f.emit(
                f"call void @llvm.masked.scatter.v{width}{_suffix(element)}.v{width}p0({t} {raw}, <{width} x ptr> "
                f"align {node.dtype.itemsize} {addresses}, <{width} x i1> {mask}){self.host.scratch_alias()}"
            )
            return
        self.f.emit(f"store {t} {raw}, ptr {address}, align {node.dtype.itemsize}{self.host.scratch_alias()}")


def _suffix(element: str) -> str:
    return {"half": "f16", "float": "f32", "double": "f64"}.get(element, element)


def counted_loop(
    f: Function, n: int, step: int, inits: list[tuple[str, str]],
    body: Callable[[str, list[str]], list[str]],
) -> list[str]:  # fmt: skip
    """for i in range(0, n, step) around `body(i, carried)`, whose results are carried; n is a multiple of step.
    `inits` are (type, value); one trip needs no loop."""
    if n == step:
        return body("0", [value for _, value in inits])
    header = f.block("loop")
    source = f.br(header)
    f.place(header)
    index = f.phi(header, "i64")
    index.add("0", source)
    phis = []
    for t, value in inits:
        phi = f.phi(header, t)
        phi.add(value, source)
        phis.append(phi)
    results = body(index.name, [p.name for p in phis])
    following = f.value(f"add nuw nsw i64 {index.name}, {step}")
    more = f.value(f"icmp ult i64 {following}, {n}")
    done = f.block("done")
    latch = f.cond_br(more, header, done)
    index.add(following, latch)
    for phi, value in zip(phis, results, strict=True):
        phi.add(value, latch)
    f.place(done)
    return results
