"""Tile IR to one Triton kernel: the source, its parameters, and which user line each source line stands for.

The parameters are the argument block itself, slot by slot, followed by `HIDDEN`: every one is 8 bytes wide, so that
a launch copies the block and adds the rest. A unit stride is passed like any other and not used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from peertile.backends.binary import Place
from peertile.backends.cuda import (
    accesses,
    arith,
    casts,
    memory,
    multicast,
    pieces,
    pointers,
    ptx,
    shape,
    views,
    words,
)
from peertile.backends.cuda.control import emit_body
from peertile.backends.cuda.last_wait import last_waits
from peertile.backends.cuda.library import closure
from peertile.backends.cuda.spelling import MEMORY, REGISTER, SIGNATURE, UNSIGNED, power_of_two_part
from peertile.backends.cuda.state import Emitter, Narrow, Record, Root, Symmetric, View
from peertile.backends.cuda.target import CudaOptions, capability, check_dtype, most_registers, tuned
from peertile.dtypes import DType
from peertile.errors import InternalError
from peertile.ir import ops
from peertile.ir.core import Kernel, walk
from peertile.ir.types import (
    ObjectType,
    PointerType,
    SymmetricType,
    TileType,
    TokenType,
    Type,
    ViewType,
)
from peertile.source import Loc

__all__ = ["HIDDEN", "Emitted", "Parameter", "emit_kernel"]

HIDDEN: Final = (
    ("_grid0", "i64"), ("_grid1", "i64"), ("_grid2", "i64"), ("_abort", "*i32"), ("_fault", "*i64"),
    ("_timeout", "i64"), ("_launch", "*u64"), ("_print", "*u64"),
)  # fmt: skip
"""What every kernel takes after its argument block: grid extents, address of the abort word (i32, never 0), address
of the fault record, wait timeout in ns, address of the launch words (u64[8]), address of the print buffer or 0."""

_RULES: Final = (accesses, arith, casts, memory, multicast, pieces, pointers, shape, views, words)
"""Imported for what they register."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter: its name, Triton's type, and a power of two that its value is a multiple of."""

    name: str
    type: str
    divisibility: int = 1


@dataclass(slots=True)
class Emitted:
    """Triton source of a kernel. `lines[k]` is the place that line k + 1 of `source` stands for."""

    source: str
    entry: str
    parameters: tuple[Parameter, ...]
    places: tuple[Place, ...]
    lines: tuple[Loc | None, ...]
    narrow: tuple[Narrow, ...]
    num_warps: int
    num_stages: int
    waits: bool
    n_slots: int
    narrow_floats: bool
    """Whether the kernel has fp8 anywhere."""
    overlap: bool = False
    """Whether the kernel waits by itself for the launch in front of it."""
    max_registers: int | None = None
    """A bound on the registers of a thread."""
    ptx_version: int | None = None
    """The least version of PTX that the kernel needs beyond what every toolkit has: 91 for 9.1."""


def emit_kernel(kernel: Kernel, arch: str = "sm_90", options: CudaOptions | None = None) -> Emitted:
    """The Triton source of an expanded, verified kernel. CompileError, with the user's line, for what `arch` lacks."""
    options = options or CudaOptions()
    capability(arch)
    warps, stages = tuned(kernel, options)
    e = Emitter(kernel, arch, options, warps, stages)
    e.narrow_floats = _check_types(kernel, arch)
    entry = e.names.fresh(kernel.name, "kernel")
    parameters = _parameters(e)
    e.w.at(kernel.loc)
    e.w.open()
    _program(e)
    _unpack(e)
    memory.read_tables(e)
    memory.plan_accesses(e)
    shape.plan_agreements(e)
    # Descriptors are made before: nobody else looks at them, and making them takes microseconds.
    overlap = options.overlap and _may_overlap(kernel, arch)
    if overlap and not kernel.waits:
        e.w.line(e.call_ptx(ptx.follow()))
    if kernel.waits:
        if overlap:
            e.w.line(e.call_ptx(ptx.follow_waiting(), "_fault"))
            e.last_waits |= last_waits(kernel)
            e.w.line("_launched = _fault")
        e.w.line(e.call_ptx(ptx.begun(), "_fault", "_program"))
        e.w.line("_fault = (_fault.to(tl.int64) & -8).to(tl.pointer_type(tl.int64))")
    checks = any(isinstance(op, ops.Check) for op in walk(kernel.body))
    if checks:
        e.w.line(e.call_ptx(ptx.faults()))
    emit_body(e)
    if checks:
        e.w.line(e.call_ptx(ptx.report(), "_fault", "_program"))
    e.w.close()
    made = _assemble(e, entry, parameters, warps, stages)
    return replace(made, overlap=overlap, max_registers=most_registers(kernel, warps))


def _may_overlap(kernel: Kernel, arch: str) -> bool:
    """What is printed is taken by the host in between."""
    return capability(arch) >= 90 and not any(isinstance(op, ops.Print) for op in walk(kernel.body))


def _check_types(kernel: Kernel, arch: str) -> bool:
    """CompileError for a dtype that `arch` lacks; whether any is fp8."""
    narrow = False
    for name, value in zip(kernel.param_names, kernel.params, strict=True):
        for dtype in _dtypes(value.type):
            check_dtype(dtype, arch, kernel.loc, f"parameter {name}")
            narrow |= dtype.is_float and dtype.bits == 8
    for op in walk(kernel.body):
        for value in op.results:
            for dtype in _dtypes(value.type):
                check_dtype(dtype, arch, op.loc, op.NAME)
                narrow |= dtype.is_float and dtype.bits == 8
    return narrow


def _dtypes(t: Type) -> list[DType]:
    if isinstance(t, ObjectType):
        return [d for f in t.fields.values() for d in _dtypes(f)]
    return [t.dtype] if isinstance(t, TileType | ViewType | SymmetricType | PointerType) else []


# ---------------------------------------------------------------- parameters


def _parameters(e: Emitter) -> list[Parameter]:
    """Parameters in order of the argument block, and the values of the kernel's parameters over them."""
    found: list[Parameter] = []
    for name, value in zip(e.kernel.param_names, e.kernel.params, strict=True):
        e.values[value] = _bind(e, name, value.type, found, (name,))
    e.n_slots = len(found)
    return [*found, *(Parameter(name, t) for name, t in HIDDEN)]


def _bind(e: Emitter, name: str, t: Type, found: list[Parameter], root: Root) -> Any:
    if isinstance(t, ObjectType):
        return Record({f: _bind(e, f"{name}_{f}", ft, found, (*root, f)) for f, ft in t.fields.items()})
    if isinstance(t, ViewType):
        first = len(found)
        pointer = _add(e, found, name, f"*{SIGNATURE[t.dtype.name]}", t.align)
        extents, strides = _extents_and_strides(e, found, pointer, t)
        slots = tuple(range(first + 1, len(found)))
        return View(t, pointer, extents, strides, root, slots)
    if isinstance(t, SymmetricType):
        table = _add(e, found, f"{name}_table", "*i64", 8)
        offset = _add(e, found, f"{name}_offset", "i64", t.align)
        first = len(found)
        extents, strides = _extents_and_strides(e, found, name, t)
        # Two symmetric parameters may be one object; fields of communication objects are their own.
        own = root if len(root) > 1 else ("peer",)
        return Symmetric(t, table, offset, extents, strides, own, tuple(range(first, len(found))))
    if isinstance(t, PointerType):
        return _pointer(e, found, name, t)
    if isinstance(t, TileType):
        return _scalar(e, found, name, t)
    if isinstance(t, TokenType):
        return None
    raise InternalError(f"cuda backend: no parameter of type {t}")


def _add(e: Emitter, found: list[Parameter], name: str, type: str, divisibility: int = 1) -> str:
    name = e.names.fresh(name, "p")
    found.append(Parameter(name, type, power_of_two_part(max(divisibility, 1))))
    return name


def _extents_and_strides(
    e: Emitter, found: list[Parameter], name: str, t: ViewType | SymmetricType
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    extents = tuple(_add(e, found, f"{name}_n{k}", "i64", t.divisible[k]) for k in range(t.rank))
    # Every stride but the unit one is a multiple of each axis' promise.
    common = max((power_of_two_part(d) for d in t.divisible), default=1)
    strides = []
    for k in range(t.rank):
        stride = _add(e, found, f"{name}_s{k}", "i64", 1 if t.unit_stride[k] else common)
        strides.append("1" if t.unit_stride[k] else stride)
    return extents, tuple(strides)


def _pointer(e: Emitter, found: list[Parameter], name: str, t: PointerType) -> Any:
    name = _add(e, found, name, f"*{SIGNATURE[t.dtype.name]}", t.dtype.itemsize)
    return Unpack(name, name)


def _scalar(e: Emitter, found: list[Parameter], name: str, t: TileType) -> Any:
    if REGISTER[t.dtype.name] == "tl.int64":
        name = _add(e, found, name, "i64")
        return Unpack(name, name)
    raw = _add(e, found, f"{name}_bits", "i64")
    return Unpack(name, _decoded(raw, t.dtype))


@dataclass(frozen=True, slots=True)
class Unpack:
    """A parameter that the head of the kernel turns into a variable `name`."""

    name: str
    text: str


def _decoded(raw: str, dtype: DType) -> str:
    """A scalar from the low bytes of its slot."""
    if dtype.is_bool:
        return f"({raw} & 1) != 0"
    if dtype.is_int:
        return f"{raw}.to({REGISTER[dtype.name]})"
    bits = UNSIGNED[dtype.bits]
    return f"{raw}.to({bits}).to({MEMORY[dtype.name]}, bitcast=True)"


def _unpack(e: Emitter) -> None:
    def visit(value: Any) -> Any:
        if isinstance(value, Record):
            return Record({name: visit(f) for name, f in value.fields.items()})
        if not isinstance(value, Unpack):
            return value
        from_name = value.text if value.text == value.name else e.let(value.name, value.text)
        return e.expr(from_name)

    for value in e.kernel.params:
        e.values[value] = visit(e.values[value])


def _program(e: Emitter) -> None:
    """The linear index of the program (axis 0 changes fastest) and its coordinates. Launches are always 1-d on the
    device, whose other axes end at 65535."""
    e.w.line("_program = tl.program_id(0).to(tl.int64)")
    if e.kernel.grid_rank == 1:
        return
    names = ["_program0 = _program % _grid0", "_program1 = _program // _grid0"]
    if e.kernel.grid_rank == 3:
        names[1] = "_program1 = _program // _grid0 % _grid1"
        names.append("_program2 = _program // (_grid0 * _grid1)")
    for line in names:
        e.w.line(line)
    e.program_ids = tuple(f"_program{k}" for k in range(e.kernel.grid_rank))


# ---------------------------------------------------------------- assembly


def _assemble(e: Emitter, entry: str, parameters: list[Parameter], warps: int, stages: int) -> Emitted:
    functions = closure(e.called)
    body = "\n".join(e.w.lines)
    head = ['"""Emitted by peertile: do not edit."""', "import triton", "import triton.language as tl"]
    if "libdevice." in body or any("libdevice." in text for text in functions.values()):
        head.append("from triton.language.extra import libdevice")
    for text in functions.values():
        head += ["", "", *text.rstrip("\n").split("\n")]
    head += ["", "", "@triton.jit", f"def {entry}("]
    head += [f"    {p.name}," for p in parameters]
    head.append("):")
    lines = [*head, *e.w.lines]
    locs: list[Loc | None] = [*(None for _ in head), *e.w.locs]
    return Emitted(
        source="\n".join(lines) + "\n",
        entry=entry,
        parameters=tuple(parameters),
        places=tuple(e.places),
        lines=tuple(locs),
        narrow=tuple(dict.fromkeys(e.narrow)),
        num_warps=warps,
        num_stages=stages,
        waits=e.kernel.waits,
        n_slots=e.n_slots,
        narrow_floats=e.narrow_floats,
        ptx_version=e.ptx_version,
    )
