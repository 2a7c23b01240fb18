"""The text form of tile IR: printing and parsing. No meaning, no verification (see `ir.verify`).

::

    kernel @scale(%z: view<f32, 1, read_write, tile=[256]>, %x: view<f32, 1, read>) {
      %0 = program_id() : i64
      %i = tile_index(%z, %0) : i64
      %1 = load(%x, %i, padding=Padding.nan) : f32[256]
      %acc = for(%lo, %hi, %step, %1) : f32[256] (%k: i64, %a: f32[256]) {
        continue(%a)
      }
      store(%z, %acc, %i)
      return()
    }

An attribute is printed unless it has its default. An enum is written `Class.value`, a float by the
shortest digits that give it back. The text is deterministic, and with locations
(`loc("file":line:col-end "function" at …)` after each op) it is all that a backend may depend on,
so it serves as a key of the binary cache. `parse_kernel(print_kernel(k))` prints the same text.
"""

from __future__ import annotations

import json
import math
import re
from enum import Enum
from typing import Any, Final, NoReturn

from peertile.dtypes import ALL_DTYPES, DType
from peertile.errors import CompileError
from peertile.ir import ops
from peertile.ir.core import Block, Kernel, Op, Value
from peertile.ir.types import (
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
    TokenType,
    TransferType,
    Type,
    ViewType,
)
from peertile.memory_model import Cmp, Order, Proxy, Rmw, Scope
from peertile.source import Loc

__all__ = ["parse_kernel", "print_kernel"]

_ENUMS: Final[dict[str, type[Enum]]] = {
    e.__name__: e
    for e in (
        ops.Bounds, ops.Padding, ops.Unary, ops.Binary, ops.Compare, ops.Fold, ops.Rounding, ops.CheckKind,
        ops.Precision, ops.Moment, Cmp, Order, Proxy, Rmw, Scope, Access, Space,
    )
}  # fmt: skip
_DTYPES: Final = {d.name: d for d in ALL_DTYPES}
_OBJECTS: Final[dict[str, Type]] = {
    "signal": SignalType(), "counter": CounterType(), "barrier": BarrierType(), "token": TokenType(),
    "transfer": TransferType(),
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


# ---------------------------------------------------------------- printing


def print_kernel(kernel: Kernel, locations: bool = False) -> str:
    """The text of `kernel`, ending in a newline; with `locations`, where each op was written."""
    return _Printer(locations).kernel(kernel)


class _Printer:
    def __init__(self, locations: bool) -> None:
        self.locations = locations
        self.names: dict[Value, str] = {}
        self.taken: set[str] = set()
        self.count = 0
        self.lines: list[str] = []

    def kernel(self, kernel: Kernel) -> str:
        params = ", ".join(
            f"{self.define(value, name)}: {value.type}"
            for name, value in zip(kernel.param_names, kernel.params, strict=True)
        )
        flags = (" unsafe" if kernel.unsafe else "") + (f" grid={kernel.grid_rank}" if kernel.grid_rank != 1 else "")
        self.lines.append(f"kernel @{kernel.name}({params}){flags}{self.loc(kernel.loc)} {{")
        self.ops(kernel.body, 1)
        self.lines.append("}")
        return "\n".join(self.lines) + "\n"

    def define(self, value: Value, hint: str) -> str:
        """A name of its own for `value`; a taken hint gets a number, so the name comes back as hint."""
        if _NAME.match(hint):
            name, n = hint, 0
            while name in self.taken:
                n += 1
                name = f"{hint}_{n}"
        else:
            name = str(self.count)
            self.count += 1
        self.taken.add(name)
        self.names[value] = f"%{name}"
        return f"%{name}"

    def name(self, value: Value) -> str:
        # A value that is not visible is printed all the same: broken IR must be printable.
        return self.names.get(value, f"%<invisible {value.hint or value.index}>")

    def ops(self, block: Block, depth: int) -> None:
        for op in block.ops:
            self.op(op, depth)

    def op(self, op: Op, depth: int) -> None:
        inside = [self.name(v) for v in op.operands]
        # In the order of the declaration, whoever made the op; unknown ones last, since broken IR must print.
        for name in (*(n for n in op.ATTRS if n in op.attrs), *(n for n in op.attrs if n not in op.ATTRS)):
            value, default = op.attrs[name], op.ATTRS.get(name, ...)
            if default is ... or not _same(value, default):
                inside.append(f"{name}={_attr(value)}")
        text = f"{op.NAME}({', '.join(inside)})"
        types = ", ".join(str(v.type) for v in op.results)
        result_names = [self.define(v, v.hint) for v in op.results] if not op.blocks else []
        tail = f" : {types}" if types else ""
        indent = "  " * depth
        if not op.blocks:
            head = f"{', '.join(result_names)} = " if result_names else ""
            self.lines.append(f"{indent}{head}{text}{tail}{self.loc(op.loc)}")
            return
        at = len(self.lines)
        self.lines.append("")
        first = self.block(op.blocks[0], depth)
        for block in op.blocks[1:]:
            args = self.block_head(block)
            self.lines.append(f"{indent}}} else {args}{{")
            self.ops(block, depth + 1)
        # Names of results are given after those of the blocks, in the order in which a parser meets uses.
        names = [self.define(v, v.hint) for v in op.results]
        head = f"{', '.join(names)} = " if names else ""
        self.lines[at] = f"{indent}{head}{text}{tail} {first}{{"
        self.lines.append(f"{indent}}}{self.loc(op.loc)}")

    def block_head(self, block: Block) -> str:
        args = ", ".join(f"{self.define(a, a.hint)}: {a.type}" for a in block.args)
        return f"({args}) " if args else ""

    def block(self, block: Block, depth: int) -> str:
        head = self.block_head(block)
        self.ops(block, depth + 1)
        return head

    def loc(self, loc: Loc | None) -> str:
        if loc is None or not self.locations:
            return ""
        parts = []
        here: Loc | None = loc
        while here is not None:
            end = f"-{here.end_col}" if here.end_col is not None else ""
            function = f" {json.dumps(here.function)}" if here.function else ""
            parts.append(f"{json.dumps(here.file)}:{here.line}:{here.col}{end}{function}")
            here = here.inlined_at
        return f" loc({' at '.join(parts)})"


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _attr(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.value}"
    if isinstance(value, DType):
        return value.name
    if isinstance(value, float):
        # Integral floats keep their point, so that the parser knows them from ints.
        return repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_attr(v) for v in value)}]"
    return f"<{type(value).__name__} {value!r}>"


# ---------------------------------------------------------------- parsing

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<value>%[A-Za-z0-9_]+)
      | (?P<symbol>@[A-Za-z_][A-Za-z0-9_.<>]*)
      | (?P<number>-?(?:0[xX][0-9a-fA-F]+(?:\.[0-9a-fA-F]*)?(?:[pP][+-]?\d+)?|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|inf\b))
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<mark>[-(){}\[\]<>:,=.])
    """,
    re.VERBOSE,
)


def parse_kernel(text: str) -> Kernel:
    """The kernel that `text` describes. CompileError with line and column where it cannot be read."""
    return _Parser(text).kernel()


class _Parser:
    """Recursive descent over tokens (kind, text, offset)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        self.at = 0
        self.scope: dict[str, Value] = {}
        pos = 0
        while pos < len(text):
            m = _TOKEN.match(text, pos)
            if m is None:
                self.fail(f"unknown character {text[pos]!r}", pos)
            if m.lastgroup != "space":
                self.tokens.append((str(m.lastgroup), m.group(), pos))
            pos = m.end()
        self.tokens.append(("end", "the end of the text", len(text)))

    def fail(self, message: str, pos: int | None = None) -> NoReturn:
        if pos is None:
            pos = self.tokens[self.at][2]
        line = self.text.count("\n", 0, pos) + 1
        start = self.text.rfind("\n", 0, pos) + 1
        end = self.text.find("\n", pos)
        source = self.text[start : end if end >= 0 else len(self.text)]
        raise CompileError(
            f"IR text, line {line}, column {pos - start}: {message}\n  {source}\n  {' ' * (pos - start)}^"
        )

    # -- tokens

    def peek(self, text: str) -> bool:
        return self.tokens[self.at][1] == text and self.tokens[self.at][0] != "string"

    def accept(self, text: str) -> bool:
        if self.peek(text):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(f"expected {text!r}, got {self.tokens[self.at][1]!r}")

    def take(self, kind: str, role: str) -> str:
        found, text, _ = self.tokens[self.at]
        if found != kind:
            self.fail(f"expected {role}, got {text!r}")
        self.at += 1
        return text

    def integer(self) -> int:
        text = self.take("number", "an integer")
        try:
            return int(text, 0)
        except ValueError:
            self.at -= 1
            self.fail(f"expected an integer, got {text!r}")

    def int_list(self) -> tuple[int, ...]:
        self.expect("[")
        found = []
        while not self.accept("]"):
            found.append(self.integer())
            if not self.peek("]"):
                self.expect(",")
        return tuple(found)

    # -- kernel, blocks, ops

    def kernel(self) -> Kernel:
        self.expect("kernel")
        name = self.take("symbol", "the name of the kernel")[1:]
        body = Block()
        names = self.args(body) if self.peek("(") else []
        unsafe, grid_rank = False, 1
        while not (self.peek("{") or self.peek("loc")):
            if self.accept("unsafe"):
                unsafe = True
            elif self.accept("grid"):
                self.expect("=")
                grid_rank = self.integer()
            else:
                self.fail(f"expected unsafe, grid=… or '{{', got {self.tokens[self.at][1]!r}")
        loc = self.loc()
        self.ops(body)
        if self.tokens[self.at][0] != "end":
            self.fail(f"expected the end, got {self.tokens[self.at][1]!r}")
        return Kernel(name, tuple(names), body, unsafe, grid_rank, loc)

    def args(self, block: Block) -> list[str]:
        """`(%a: type, …)` as arguments of `block`, visible from here on; returns their names."""
        self.expect("(")
        names = []
        while not self.accept(")"):
            at = self.at
            name = self.take("value", "an argument")[1:]
            self.expect(":")
            value = Value(self.any_type(), block, len(block.args), "" if name.isdigit() else name)
            block.args.append(value)
            self.bind(name, value, at)
            names.append(name)
            if not self.peek(")"):
                self.expect(",")
        return names

    def bind(self, name: str, value: Value, at: int) -> None:
        """Makes `value` known as `name`, which stands at token `at`."""
        if name in self.scope:
            self.at = at
            self.fail(f"%{name} is defined twice")
        self.scope[name] = value

    def ops(self, block: Block) -> None:
        self.expect("{")
        outer = dict(self.scope)
        while not self.accept("}"):
            block.append(self.op())
        self.scope = outer

    def op(self) -> Op:
        names: list[tuple[str, int]] = []
        while self.tokens[self.at][0] == "value":
            names.append((self.tokens[self.at][1][1:], self.at))
            self.at += 1
            if not self.accept(","):
                self.expect("=")
                break
        opcode = self.take("name", "an op")
        cls = ops.BY_NAME.get(opcode)
        if cls is None:
            self.at -= 1
            self.fail(f"unknown op {opcode!r}")
        operands, attrs = self.operands(cls)
        types: list[Type] = []
        if self.accept(":"):
            types.append(self.any_type())
            while self.accept(","):
                types.append(self.any_type())
        if len(types) != len(names):
            self.fail(f"{opcode}: expected {len(names)} result types, got {len(types)}")
        blocks: list[Block] = []
        while len(blocks) < cls.N_BLOCKS:
            if blocks:
                self.expect("else")
            block = Block()
            outer = dict(self.scope)
            if self.peek("("):
                self.args(block)
            self.ops(block)
            self.scope = outer
            blocks.append(block)
        op = cls(operands, types, attrs, blocks, self.loc())
        for (name, at), value in zip(names, op.results, strict=True):
            value.hint = "" if name.isdigit() else name
            self.bind(name, value, at)
        return op

    def operands(self, cls: type[Op]) -> tuple[list[Value], dict[str, Any]]:
        self.expect("(")
        operands: list[Value] = []
        attrs: dict[str, Any] = {}
        while not self.accept(")"):
            if self.tokens[self.at][0] == "value":
                name = self.tokens[self.at][1][1:]
                if name not in self.scope:
                    self.fail(f"%{name} is not defined here")
                operands.append(self.scope[name])
                self.at += 1
            else:
                name = self.take("name", "an operand or an attribute")
                if name not in cls.ATTRS:
                    self.at -= 1
                    self.fail(f"{cls.NAME} has no attribute {name!r}; it has {', '.join(cls.ATTRS) or 'none'}")
                self.expect("=")
                attrs[name] = self.attr()
            if not self.peek(")"):
                self.expect(",")
        return operands, attrs

    def attr(self) -> Any:
        kind, text, _ = self.tokens[self.at]
        if kind == "string":
            self.at += 1
            return json.loads(text)
        if kind == "number":
            self.at += 1
            return _number(text)
        if self.accept("["):
            found = []
            while not self.accept("]"):
                found.append(self.attr())
                if not self.peek("]"):
                    self.expect(",")
            return tuple(found)
        name = self.take("name", "a value")
        words = {"none": None, "true": True, "false": False, "nan": math.nan, **_DTYPES}
        if name in words:
            return words[name]
        if name not in _ENUMS:
            self.at -= 1
            self.fail(f"expected a value, got {name!r}")
        self.expect(".")
        # Padding.inf looks like a number.
        member = self.tokens[self.at][1]
        self.at += 1
        try:
            return _ENUMS[name](member)
        except ValueError:
            self.at -= 1
            self.fail(f"{name} has no member {member!r}; it has {', '.join(str(m.value) for m in _ENUMS[name])}")

    def loc(self) -> Loc | None:
        if not self.accept("loc"):
            return None
        self.expect("(")
        chain: list[tuple[str, int, int, int | None, str]] = []
        while True:
            file = json.loads(self.take("string", "a file name"))
            self.expect(":")
            line = self.integer()
            self.expect(":")
            # "4-20" is read as the numbers 4 and -20.
            col, end = self.integer(), None
            if self.tokens[self.at][0] == "number":
                end = -self.integer()
            function = json.loads(self.take("string", "a name")) if self.tokens[self.at][0] == "string" else ""
            chain.append((file, line, col, end, function))
            if not self.accept("at"):
                break
        self.expect(")")
        loc: Loc | None = None
        for file, line, col, end, function in reversed(chain):
            loc = Loc(file, line, col, end, function, loc)
        return loc

    # -- types

    def any_type(self) -> Type:
        name = self.take("name", "a type")
        if name in _DTYPES:
            return TileType(_DTYPES[name], self.int_list() if self.peek("[") else ())
        if name in _OBJECTS:
            return _OBJECTS[name]
        if name == "view":
            return self.view_type()
        if name == "symmetric":
            return self.symmetric_type()
        if name == "ptr":
            return self.pointer_type()
        if name == "mailbox":
            return self.mailbox_type()
        if name == "multicast":
            return self.multicast_type()
        self.at -= 1
        self.fail(f"unknown type {name!r}")

    def dtype(self) -> DType:
        name = self.take("name", "a dtype")
        if name not in _DTYPES:
            self.at -= 1
            self.fail(f"unknown dtype {name!r}; expected one of {', '.join(_DTYPES)}")
        return _DTYPES[name]

    def access(self) -> Access:
        name = self.take("name", "read, write or read_write")
        try:
            return Access(name)
        except ValueError:
            self.at -= 1
            self.fail(f"expected read, write or read_write, got {name!r}")

    def view_type(self) -> ViewType:
        dtype, rank, access = self.memory_head()
        space, tile, persistent, swizzle, spare = Space.LOCAL, None, False, 1, 0
        single: tuple[bool, ...] = ()
        promises: dict[str, Any] = {}
        while self.accept(","):
            word = self.take("name", "a property of the view")
            if word in ("device", "peer", "local"):
                space = Space(word)
            elif word == "persistent":
                persistent = True
            elif word == "tile":
                self.expect("=")
                tile = self.int_list()
            elif word == "swizzle":
                self.expect("=")
                swizzle = self.integer()
            elif word == "spare":
                self.expect("=")
                spare = self.integer()
            elif word == "single":
                self.expect("=")
                single = tuple(map(bool, self.int_list()))
            else:
                self.promise(word, promises)
        self.expect(">")
        partition = None if tile is None else Partition(tile, persistent, swizzle, spare, single)
        return ViewType(dtype, rank, access, space, partition, **promises)

    def symmetric_type(self) -> SymmetricType:
        dtype, rank, access = self.memory_head()
        promises: dict[str, Any] = {}
        while self.accept(","):
            self.promise(self.take("name", "a property of the object"), promises)
        self.expect(">")
        return SymmetricType(dtype, rank, access, **promises)

    def memory_head(self) -> tuple[DType, int, Access]:
        self.expect("<")
        dtype = self.dtype()
        self.expect(",")
        rank = self.integer()
        self.expect(",")
        return dtype, rank, self.access()

    def promise(self, word: str, promises: dict[str, Any]) -> None:
        if word not in ("unit", "align", "divisible"):
            self.at -= 1
            self.fail(f"unknown property {word!r}")
        self.expect("=")
        if word == "align":
            promises["align"] = self.integer()
        elif word == "unit":
            promises["unit_stride"] = tuple(bool(n) for n in self.int_list())
        else:
            promises["divisible"] = self.int_list()

    def pointer_type(self) -> PointerType:
        self.expect("<")
        dtype, space = self.dtype(), Space.DEVICE
        shape: tuple[int, ...] = ()
        while self.accept(","):
            if self.peek("["):
                shape = self.int_list()
            else:
                space = Space(self.take("name", "a space"))
        self.expect(">")
        return PointerType(dtype, shape, space)

    def multicast_type(self) -> MulticastType:
        self.expect("<")
        dtype = self.dtype()
        self.expect(",")
        rank = self.integer()
        promises: dict[str, Any] = {}
        while self.accept(","):
            word = self.take("name", "a property of the object")
            if word in ("hardware", "pointer"):
                promises[word] = True
            else:
                self.promise(word, promises)
        self.expect(">")
        return MulticastType(dtype, rank, **promises)

    def mailbox_type(self) -> MailboxType:
        self.expect("<")
        dtype, shape = self.dtype(), self.int_list()
        self.expect(",")
        self.expect("depth")
        self.expect("=")
        depth = self.integer()
        words: dict[str, bool] = {}
        ahead = 1
        while self.accept(","):
            word = self.take("name", "acknowledged, linked or ahead")
            if word == "ahead":
                self.expect("=")
                ahead = self.integer()
            elif word in ("acknowledged", "linked"):
                words[word] = True
            else:
                self.at -= 1
                self.fail(f"expected acknowledged, linked or ahead, got {word!r}")
        self.expect(">")
        return MailboxType(dtype, shape, depth, "acknowledged" in words, "linked" in words, ahead)


def _number(text: str) -> int | float:
    if "x" in text.lower():
        return float.fromhex(text) if "." in text or "p" in text.lower() else int(text, 0)
    if text.lstrip("-") == "inf" or "." in text or "e" in text.lower():
        return float(text)
    return int(text)
