"""A small structured writer of LLVM IR text, for the native runtime of the cpu driver. No kernels are written with it.

Values are SSA names with Python operators; `Var` is a mutable local (an alloca, which LLVM turns into registers);
`if_`, `otherwise` and `loop` are context managers, so that emitted functions read like the C they replace. Memory
is addressed in 8-byte words. Text, because llvmlite's builder lacks several ordered operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Function", "Module", "Value", "Var"]

Operand = "Value | Var | int"


class Value:
    """An SSA value. Arithmetic and comparisons are signed unless the method says otherwise."""

    __slots__ = ("f", "text", "type")

    def __init__(self, f: Function, type: str, text: str) -> None:
        self.f, self.type, self.text = f, type, text

    def _bin(self, op: str, other: Value | Var | int) -> Value:
        return self.f.emit(self.type, f"{op} {self.type} {self.text}, {self.f.value(other, self.type).text}")

    def _cmp(self, op: str, other: Value | Var | int) -> Value:
        return self.f.emit("i1", f"icmp {op} {self.type} {self.text}, {self.f.value(other, self.type).text}")

    def __add__(self, other: Value | Var | int) -> Value:
        return self._bin("add", other)

    def __sub__(self, other: Value | Var | int) -> Value:
        return self._bin("sub", other)

    def __mul__(self, other: Value | Var | int) -> Value:
        return self._bin("mul", other)

    def __and__(self, other: Value | Var | int) -> Value:
        return self._bin("and", other)

    def __or__(self, other: Value | Var | int) -> Value:
        return self._bin("or", other)

    def __lshift__(self, other: Value | Var | int) -> Value:
        return self._bin("shl", other)

    def __rshift__(self, other: Value | Var | int) -> Value:
        return self._bin("lshr", other)

    def __floordiv__(self, other: Value | Var | int) -> Value:
        """Unsigned quotient."""
        return self._bin("udiv", other)

    def __lt__(self, other: Value | Var | int) -> Value:
        return self._cmp("slt", other)

    def __le__(self, other: Value | Var | int) -> Value:
        return self._cmp("sle", other)

    def __gt__(self, other: Value | Var | int) -> Value:
        return self._cmp("sgt", other)

    def __ge__(self, other: Value | Var | int) -> Value:
        return self._cmp("sge", other)

    def eq(self, other: Value | Var | int) -> Value:
        return self._cmp("eq", other)

    def ne(self, other: Value | Var | int) -> Value:
        return self._cmp("ne", other)

    def ult(self, other: Value | Var | int) -> Value:
        return self._cmp("ult", other)

    def min(self, other: Value | Var | int) -> Value:
        other = self.f.value(other, self.type)
        return (self < other).select(self, other)

    def max(self, other: Value | Var | int) -> Value:
        other = self.f.value(other, self.type)
        return (self > other).select(self, other)

    def select(self, yes: Value | Var | int, no: Value | Var | int, type: str = "i64") -> Value:
        a, b = self.f.value(yes, type), self.f.value(no, type)
        return self.f.emit(a.type, f"select i1 {self.text}, {a.type} {a.text}, {a.type} {b.text}")

    def to(self, type: str, *, signed: bool = False) -> Value:
        """Convert to another integer width, or between ptr and i64."""
        if type == self.type:
            return self
        if "ptr" in (type, self.type):
            op = "inttoptr" if type == "ptr" else "ptrtoint"
        elif int(type[1:]) < int(self.type[1:]):
            op = "trunc"
        else:
            op = "sext" if signed else "zext"
        return self.f.emit(type, f"{op} {self.type} {self.text} to {type}")


class Var:
    """A mutable local of a function."""

    __slots__ = ("f", "slot", "type")

    def __init__(self, f: Function, type: str, slot: str) -> None:
        self.f, self.type, self.slot = f, type, slot

    @property
    def v(self) -> Value:
        return self.f.emit(self.type, f"load {self.type}, ptr {self.slot}")

    def set(self, value: Value | Var | int) -> None:
        self.f.line(f"store {self.type} {self.f.value(value, self.type).text}, ptr {self.slot}")

    def add(self, value: Value | Var | int) -> None:
        self.set(self.v + value)


class Branch:
    """What `if_` gives: `with branch.otherwise():` must follow it at once."""

    def __init__(self, f: Function, end: str) -> None:
        self.f, self.end = f, end

    @contextmanager
    def otherwise(self) -> Iterator[None]:
        tail = [f"  br label %{self.end}", f"{self.end}:"]
        if self.f.lines[-2:] != tail:
            raise AssertionError("otherwise() must follow its if_ at once")
        del self.f.lines[-2:]
        yield
        self.f.lines += tail


class Function:
    """One function while it is written. `linkage` is "internal" unless Python or a kernel calls it."""

    def __init__(self, module: Module, name: str, result: str, params: dict[str, str], linkage: str) -> None:
        self.module, self.name, self.result = module, name, result
        self.params = params
        self.linkage = linkage
        self.lines: list[str] = []
        self.allocas: list[str] = []
        self._count = 0
        self._loops: list[tuple[str, str]] = []

    def __getitem__(self, param: str) -> Value:
        return Value(self, self.params[param], f"%{param}")

    def _new(self, stem: str) -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def line(self, text: str) -> None:
        self.lines.append("  " + text)

    def emit(self, type: str, text: str) -> Value:
        name = "%" + self._new("t")
        self.line(f"{name} = {text}")
        return Value(self, type, name)

    def value(self, x: Value | Var | int, type: str = "i64") -> Value:
        if isinstance(x, Value):
            return x
        if isinstance(x, Var):
            return x.v
        return Value(self, type, "null" if type == "ptr" else str(int(x)))

    def var(self, type: str, initial: Value | Var | int) -> Var:
        slot = "%" + self._new("v")
        self.allocas.append(f"  {slot} = alloca {type}")
        var = Var(self, type, slot)
        var.set(initial)
        return var

    def buffer(self, words: int) -> Value:
        """Address of memory on the stack."""
        slot = "%" + self._new("b")
        self.allocas.append(f"  {slot} = alloca [{words} x i64]")
        return Value(self, "ptr", slot)

    # memory: `word` counts 8-byte words from `base` ----------------------------------------------------------

    def at(self, base: Value | Var, word: Value | Var | int) -> Value:
        b, w = self.value(base), self.value(word)
        return self.emit("ptr", f"getelementptr i64, ptr {b.text}, i64 {w.text}")

    def offset(self, base: Value | Var, nbytes: Value | Var | int) -> Value:
        b, n = self.value(base), self.value(nbytes)
        return self.emit("ptr", f"getelementptr i8, ptr {b.text}, i64 {n.text}")

    def load(self, base: Value | Var, word: Value | Var | int = 0, type: str = "i64", order: str = "") -> Value:
        align = {"i64": 8, "ptr": 8, "i32": 4, "i16": 2, "i8": 1}[type]
        atomic, suffix = ("atomic ", f" {order}") if order else ("", "")
        return self.emit(type, f"load {atomic}{type}, ptr {self.at(base, word).text}{suffix}, align {align}")

    def store(
        self,
        base: Value | Var,
        word: Value | Var | int,
        value: Value | Var | int,
        type: str = "i64",
        order: str = "",
    ) -> None:
        x = self.value(value, type)
        align = {"i64": 8, "ptr": 8, "i32": 4, "i16": 2, "i8": 1}[x.type]
        atomic, suffix = ("atomic ", f" {order}") if order else ("", "")
        self.line(f"store {atomic}{x.type} {x.text}, ptr {self.at(base, word).text}{suffix}, align {align}")

    def rmw(
        self, op: str, base: Value | Var, word: int, value: Value | Var | int, type: str = "i64", order: str = "seq_cst"
    ) -> Value:
        x = self.value(value, type)
        return self.emit(type, f"atomicrmw {op} ptr {self.at(base, word).text}, {type} {x.text} {order}")

    def cas(
        self, base: Value | Var, word: int, expected: Value | Var | int, new: Value | Var | int, type: str = "i64"
    ) -> Value:
        """i1: whether the word was `expected` and is now `new` (sequentially consistent; acquire if not)."""
        e, n = self.value(expected, type), self.value(new, type)
        pair = self.emit(
            "pair",
            f"cmpxchg ptr {self.at(base, word).text}, {type} {e.text}, {type} {n.text} seq_cst acquire",
        )
        return self.emit("i1", f"extractvalue {{ {type}, i1 }} {pair.text}, 1")

    def copy_bytes(self, dst: Value, src: Value, nbytes: Value) -> None:
        self.line(f"call void @llvm.memmove.p0.p0.i64(ptr {dst.text}, ptr {src.text}, i64 {nbytes.text}, i1 false)")

    # calls ---------------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Value | Var | int) -> Value:
        """Call a function of the module or one that it declares."""
        result, params = self.module.signatures[name]
        values = [self.value(a, t) for a, t in zip(args, params, strict=True)]
        return self._call(f"@{name}", "", result, values)

    def call_address(self, address: Value | Var, result: str, *args: Value | Var, convention: str = "") -> Value:
        a = self.value(address)
        return self._call(a.to("ptr").text, convention, result, [self.value(x) for x in args])

    def _call(self, callee: str, convention: str, result: str, values: list[Value]) -> Value:
        text = f"call {convention + ' ' if convention else ''}{result} {callee}("
        text += ", ".join(f"{v.type} {v.text}" for v in values) + ")"
        if result == "void":
            self.line(text)
            return Value(self, "void", "")
        return self.emit(result, text)

    # control flow --------------------------------------------------------------------------------------------

    def _label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    def _dead(self) -> None:
        """After a jump: what follows in the same Python block is unreachable, but must stay well-formed."""
        self._label(self._new("dead"))

    @contextmanager
    def if_(self, condition: Value) -> Iterator[Branch]:
        then, other, end = self._new("then"), self._new("else"), self._new("end")
        self.line(f"br i1 {condition.text}, label %{then}, label %{other}")
        self._label(then)
        yield Branch(self, end)
        self.line(f"br label %{end}")
        self._label(other)
        self.line(f"br label %{end}")
        self._label(end)

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Runs until `stop()`, `stop_if()` or `ret()`."""
        head, exit_ = self._new("loop"), self._new("exit")
        self.line(f"br label %{head}")
        self._label(head)
        self._loops.append((head, exit_))
        yield
        self._loops.pop()
        self.line(f"br label %{head}")
        self._label(exit_)

    @contextmanager
    def range(self, count: Value | Var | int) -> Iterator[Value]:
        """for i in range(count); `again()` is not allowed inside."""
        n = self.value(count)
        i = self.var("i64", 0)
        with self.loop():
            index = i.v
            self.stop_if(index >= n)
            yield index
            i.set(index + 1)

    def stop(self) -> None:
        self.line(f"br label %{self._loops[-1][1]}")
        self._dead()

    def stop_if(self, condition: Value) -> None:
        go_on = self._new("on")
        self.line(f"br i1 {condition.text}, label %{self._loops[-1][1]}, label %{go_on}")
        self._label(go_on)

    def again(self) -> None:
        self.line(f"br label %{self._loops[-1][0]}")
        self._dead()

    def ret(self, value: Value | Var | int | None = None) -> None:
        self.line("ret void" if value is None else f"ret {self.result} {self.value(value, self.result).text}")
        self._dead()

    def text(self) -> str:
        params = ", ".join(f"{t} %{n}" for n, t in self.params.items())
        head = f"define {self.linkage + ' ' if self.linkage else ''}{self.result} @{self.name}({params}) nounwind {{"
        return "\n".join([head, "entry:", *self.allocas, *self.lines, "  unreachable", "}"])


class Module:
    """Functions and declarations that make up one module of text."""

    def __init__(self) -> None:
        self.signatures: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._declared: list[str] = []
        self._functions: list[Function] = []

    def declare(self, name: str, result: str, *params: str) -> None:
        self.signatures[name] = (result, params)
        self._declared.append(f"declare {result} @{name}({', '.join(params)})")

    def define(self, name: str, result: str, params: str = "", *, exported: bool = False) -> Function:
        """Begin a function; `params` is like "ptr job, i64 i"."""
        pairs = [p.split() for p in params.split(",") if p]
        f = Function(self, name, result, {n: t for t, n in pairs}, "" if exported else "internal")
        self.signatures[name] = (result, tuple(t for t, _ in pairs))
        self._functions.append(f)
        return f

    @property
    def exports(self) -> list[str]:
        return [f.name for f in self._functions if not f.linkage]

    def text(self) -> str:
        return "\n".join([*self._declared, *(f.text() for f in self._functions), ""])
