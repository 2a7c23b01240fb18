"""The state of emitting one kernel: names, values, functions in use, places, hazards. Ops register elsewhere.

A tile or scalar is an expression: the name of a variable, or a literal. A view is the names of its pointer,
extents and strides. Values of tokens are nothing: program order and barriers already give what tokens ask for.

Hazards: Triton orders the accesses of one thread only, while tile IR promises program order for the whole program,
so two conflicting accesses get a block barrier between them (`before_read`, `before_write`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from peertile.backends.binary import Place
from peertile.backends.cuda import ptx
from peertile.backends.cuda.library import FUNCTIONS
from peertile.backends.cuda.spelling import MEMORY, REGISTER, Names, bits_of, from_bits, literal, shape_text
from peertile.backends.cuda.target import CudaOptions
from peertile.backends.cuda.writer import Writer
from peertile.dtypes import DType
from peertile.errors import CompileError, InternalError
from peertile.ir import ops
from peertile.ir.core import Block, Kernel, Op, Value, walk
from peertile.ir.types import PointerType, Space, SymmetricType, TileType, TokenType, TransferType, Type, ViewType
from peertile.memory_model import Order, Rmw, Scope

__all__ = [
    "LAUNCH_WORDS",
    "LOWERINGS",
    "RAW",
    "Access",
    "Emitter",
    "Expr",
    "Narrow",
    "Ranks",
    "Record",
    "Root",
    "Symmetric",
    "View",
    "lowers",
    "tile_of",
]

Rule = Callable[["Emitter", Any], None]
LOWERINGS: Final[dict[type[Op], Rule]] = {}
Root = tuple[Any, ...]
"""What memory an access touches, as far as may be told apart."""

RAW: Final[Root] = ("raw",)
"""Raw pointers may touch anything."""

LAUNCH_WORDS: Final[Root] = ("launch words",)


def lowers(*classes: type[Op]) -> Callable[[Rule], Rule]:
    """Registers the lowering of ops."""

    def register(rule: Rule) -> Rule:
        for cls in classes:
            LOWERINGS[cls] = rule
        return rule

    return register


@dataclass(frozen=True, slots=True)
class Expr:
    """A tile, scalar or pointer: `text` is a name, or a literal where `is_literal`."""

    text: str
    is_literal: bool = False


@dataclass(frozen=True, slots=True)
class Narrow:
    """What a launch must satisfy for a descriptor: this extent in 1 … 2^31-1, this stride in 1 … 2^38."""

    slot: int
    is_stride: bool


@dataclass(frozen=True, slots=True)
class View:
    """A view: `pointer` names a typed pointer; extents and strides are names or literals. `slots` are the
    positions of extents and strides in the argument block, where the view is a parameter."""

    type: ViewType
    pointer: str
    extents: tuple[str, ...]
    strides: tuple[str, ...]
    root: Root
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Symmetric:
    """A symmetric object."""

    type: SymmetricType
    table: str
    offset: str
    extents: tuple[str, ...]
    strides: tuple[str, ...]
    root: Root
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ranks:
    """What was read of a table of ranks: this rank, their number, where the memory of the first two begins. A table
    has room for two bases, also where there is one rank."""

    table: str
    rank: str
    size: str
    base0: str
    base1: str

    def base(self, rank: str, *, literal: bool) -> str:
        """Where the memory of a rank begins; of the first two without another look at memory."""
        if literal and int(rank) < 2:
            return self.base1 if int(rank) else self.base0
        later = f"tl.load({self.table} + 2 + {rank}, mask={rank} > 1, other=0)"
        return f"tl.where({rank} == 0, {self.base0}, tl.where({rank} == 1, {self.base1}, {later}))"


@dataclass(frozen=True, slots=True)
class Record:
    """A communication object: its fields."""

    fields: dict[str, Any]


@dataclass(slots=True)
class Access:
    """Accesses since the last barrier: roots read, and roots written with the kind of atomic (None: a store). And roots
    written before barriers that had no fence for bulk copies."""

    read: set[Root] = field(default_factory=set)
    written: set[tuple[Root, Rmw | None]] = field(default_factory=set)
    unfenced: set[Root] = field(default_factory=set)

    def copy(self) -> Access:
        return Access(set(self.read), set(self.written), set(self.unfenced))

    def join(self, other: Access) -> None:
        self.read |= other.read
        self.written |= other.written
        self.unfenced |= other.unfenced

    def conflicts_with_read(self, root: Root) -> bool:
        return any(_meet(root, r) for r in self.unfenced.union(r for r, _ in self.written))

    def conflicts_with_write(self, root: Root, kind: Rmw | None) -> bool:
        # Atomics of one kind on one place commute: they need no order among themselves.
        if any(_meet(root, r) and (kind is None or kind is not k or kind is Rmw.XCHG) for r, k in self.written):
            return True
        return any(_meet(root, r) for r in self.read)


def _meet(a: Root, b: Root) -> bool:
    return a == b or RAW in (a, b)


def tile_of(value: Value) -> TileType:
    """The type of a tile or scalar."""
    assert isinstance(value.type, TileType), value
    return value.type


@dataclass(slots=True)
class Own:
    """A word that a variable holds: `first`, of the ops of the kernel's own block, has the first `use`."""

    first: Op
    use: Op
    name: str = ""


class Emitter:
    """Everything that the rules share. `emit.py` drives it."""

    def __init__(self, kernel: Kernel, arch: str, options: CudaOptions, num_warps: int, num_stages: int) -> None:
        self.kernel = kernel
        self.arch = arch
        self.options = options
        self.num_warps = num_warps
        self.num_stages = num_stages
        self.lanes = 32 * num_warps
        self.w = Writer()
        self.names = Names(FUNCTIONS)
        self.values: dict[Value, Any] = {}
        self.called: dict[str, str] = {}
        self.places: list[Place] = []
        self.access = Access()
        self.narrow: list[Narrow] = []
        self.frames: list[Any] = []
        self.descriptors: dict[Op, Any] = {}
        self.planned: dict[Value, list[tuple[Op, tuple[int, ...], TileType]]] = {}
        """Accesses through descriptors that are yet to be made, by view."""
        self.fences_bulk = False
        """Whether bulk copies fetch what peers store: what was waited for must be seen by their proxy too."""
        self.awaits_bulk = False
        """Whether bulk copies store what others see: they have to end before it is released."""
        self.settled: set[Op] = set()
        """Comparisons and assertions that a wait has made already."""
        self.own: dict[Root, Own] = {}
        """Words that only this program uses and that a variable holds."""
        self.once: set[Op] = set()
        """Stores to a view that nothing else touches, each to a tile of its own: they meet no other access."""
        self.reread: dict[Op, str] = {}
        """Loads of a tile that is loaded twice, and how the cache is told."""
        self.last_waits: dict[Op | Block, tuple[Op, ...]] = {}
        """Where no wait is left, in the last trips of these loops, and the next launch may begin."""
        self.last_trips: dict[Op, str] = {}
        """Whether a loop that is being emitted is in its last trip."""
        self.n_slots = 0
        self.ranks: dict[str, Ranks] = {}
        """What the head of the kernel read, by table."""
        self.narrow_floats = False
        self.ptx_version: int | None = None
        """The least version of PTX that the kernel needs beyond what every toolkit has: 91 for 9.1."""
        self.bulk_buffers = 0
        self.judges = False
        """Whether the kernel has a register for what all its threads agree on."""
        self.used = {value for op in walk(kernel.body) for value in op.operands}
        self.program_ids: tuple[str, ...] = ("_program",)
        self.is_flat = False
        """Whether this is the body of a loop whose loads Triton makes ahead, across the ends of the loop inside."""
        self.leaves = False
        """Whether the program has an early end, hence a flag `_alive`."""
        # A fence must be executed by every thread that makes ordered accesses after it.
        self.elected_fences = not any(
            isinstance(
                op, ops.PtrLoad | ops.PtrStore | ops.PtrRmw | ops.PtrCas | ops.TileAtomic | ops.TileLoad | ops.TileStore
            )
            and op.attrs["order"] is not Order.WEAK
            for op in walk(kernel.body)
        )

    # ------------------------------------------------------------ text

    def call(self, name: str, *args: str) -> str:
        """A call of a library function."""
        if name not in FUNCTIONS:
            raise InternalError(f"cuda backend: there is no library function {name}")
        self.called.setdefault(name, "")
        return f"{name}({', '.join(args)})"

    def call_ptx(self, function: ptx.Function, *args: str) -> str:
        """A call of a function made by `ptx`."""
        name, text = function
        self.called[name] = text
        return f"{name}({', '.join(args)})"

    def let(self, hint: str, text: str) -> str:
        """A new variable."""
        name = self.names.fresh(hint)
        self.w.line(f"{name} = {text}")
        return name

    def let_own(self, base: str, text: str) -> str:
        """A new variable that is not of the user's making."""
        name = self.names.own(base)
        self.w.line(f"{name} = {text}")
        return name

    def fail(self, op: Op, message: str) -> CompileError:
        return CompileError(message, op.loc)

    def place(self, op: Op, kind: str, message: str = "", what: str = "") -> str:
        """The number under which a fault at `op` is recorded."""
        self.places.append(Place(op.loc, message, what, kind))
        return str(len(self.places) - 1)

    # ------------------------------------------------------------ values

    def expr(self, text: str, is_literal: bool = False) -> Expr:
        return Expr(text, is_literal)

    def set(self, value: Value, text: str) -> None:
        """`value` is what the variable `text` holds."""
        self.values[value] = Expr(text)

    def define(self, value: Value, text: str) -> str:
        """A variable for `value`."""
        name = self.let(value.hint, text)
        self.values[value] = Expr(name)
        return name

    def alias(self, value: Value, of: Value) -> None:
        self.values[value] = self.values[of]

    def text(self, value: Value) -> str:
        """The expression of a value; a literal stays one. For places where the other side fixes the type."""
        expr = self.values[value]
        assert isinstance(expr, Expr), value
        return expr.text

    def is_literal(self, value: Value) -> bool:
        expr = self.values[value]
        return isinstance(expr, Expr) and expr.is_literal

    def typed(self, value: Value) -> str:
        """The expression of a value, of exactly its dtype."""
        expr = self.values[value]
        assert isinstance(expr, Expr), value
        if not expr.is_literal:
            return expr.text
        return f"tl.full((), {expr.text}, {REGISTER[tile_of(value).dtype.name]})"

    def variable(self, value: Value) -> str:
        """A variable that holds the value: functions may look at its dtype."""
        expr = self.values[value]
        assert isinstance(expr, Expr), value
        if not expr.is_literal:
            return expr.text
        name = self.let(value.hint or "c", self.typed(value))
        # Not remembered: this place may be inside a block, the next use outside.
        return name

    def view(self, value: Value) -> View:
        view = self.values[value]
        assert isinstance(view, View), value
        return view

    def constant(self, value: int | float | bool, dtype: DType, shape: tuple[int, ...] = ()) -> str:
        """A typed constant."""
        text = literal(value, dtype)
        if text is None:
            return from_bits(bits_of(value, dtype), dtype, shape)
        return f"tl.full({shape_text(shape)}, {text}, {REGISTER[dtype.name]})"

    def zero(self, t: Type) -> str:
        """Something of type `t`, for variables that are set before they are read."""
        if isinstance(t, TileType):
            return self.constant(False if t.dtype.is_bool else 0 if t.dtype.is_int else 0.0, t.dtype, t.shape)
        assert isinstance(t, PointerType)
        return f"tl.full({shape_text(t.shape)}, 0, tl.int64).to({self.pointer_type(t.dtype)})"

    def pointer_type(self, dtype: DType) -> str:
        return f"tl.pointer_type({MEMORY[dtype.name]})"

    # ------------------------------------------------------------ memory order within the program

    def barrier(self, *, of_writes: bool = False) -> None:
        """All threads of the program meet, and what they did so far is ordered before what they do next. `of_writes`:
        before what they write, which no bulk copy fetches yet; its fence waits until all that was stored has arrived,
        over the link too."""
        if self.awaits_bulk:
            self.w.line(self.call_ptx(ptx.await_bulk()))
        if self.is_flat:  # its bulk copies fetch what nobody writes
            self.w.line(self.call_ptx(ptx.meet()))
            self.access = Access(unfenced=self.access.unfenced)
            return
        self.w.line("tl.debug_barrier()")
        if of_writes and self.fences_bulk:
            self.access = Access(unfenced=self.access.unfenced.union(r for r, _ in self.access.written))
        else:
            self.met()

    def met(self) -> None:
        """The threads have just met in some other way."""
        if self.fences_bulk:
            self.w.line(self.call_ptx(ptx.fence_bulk()))
        self.access = Access()

    def before_read(self, root: Root) -> None:
        if self.access.conflicts_with_read(root):
            self.barrier()
        self.access.read.add(root)

    def before_write(self, root: Root, kind: Rmw | None = None, *, in_bulk: bool = False) -> None:
        unfenced = in_bulk and any(_meet(root, r) for r in self.access.unfenced)
        if unfenced or self.access.conflicts_with_write(root, kind):
            self.barrier(of_writes=not in_bulk)
        self.access.written.add((root, kind))

    def scope(self, scope: Scope | None, space: Space) -> Scope:
        """The scope to emit: what peers can see is ordered at system scope whatever was asked."""
        assert scope is not None
        return Scope.SYSTEM if space is Space.PEER else scope

    # ------------------------------------------------------------ walking

    def op(self, op: Op) -> None:
        if op in self.settled:
            return
        rule = LOWERINGS.get(type(op))
        if rule is None:
            raise InternalError(f"cuda backend: no lowering for {op.NAME}")
        self.w.at(op.loc)
        rule(self, op)

    def tokens(self, values: Iterable[Value]) -> None:
        for v in values:
            if isinstance(v.type, TokenType | TransferType):
                self.values[v] = None
