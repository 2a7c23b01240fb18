"""What a kernel may not contain, each refused by name with the line, and names that mean nothing."""

import ast
import linecache
import os
import sys
import textwrap
from importlib.machinery import SourceFileLoader
from types import FunctionType

import numpy as np
import pytest
from tests.frontend.helpers import build, error, own, refuses, shared, underlined

import peertile.language as T
from peertile.captures import snapshot
from peertile.direct import fingerprint
from peertile.errors import CompileError
from peertile.frontend.build import build_kernel
from peertile.ir import ops
from peertile.ir.core import walk

TABLE = [1, 2, 3]
SIZES = (64, 128)
SCALE = 2.5


def compiled(body: str, params: str = "z, x, n") -> FunctionType:
    """A kernel from text, with a source that errors can show."""
    text = f"def kernel({params}):\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n"
    name = f"<kernel {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope = {"T": T, "np": np, "TABLE": TABLE, "SIZES": SIZES, "SCALE": SCALE}
    exec(compile(text, name, "exec"), scope)
    return scope["kernel"]


REFUSED = [
    ("try:\n    pass\nfinally:\n    pass", "try; a kernel has no exceptions: check with T.assert_", "try:"),
    ("raise ValueError", "raise; use T.assert_(False, message)", "raise ValueError"),
    ("assert n > 0", "assert; use T.assert_ at run time, or T.static_assert at compile time", "assert n > 0"),
    ("def f():\n    pass", "nested function; define the helper outside the kernel", "def f():"),
    ("async def f():\n    pass", "async function; define a plain helper outside the kernel", "async def f():"),
    ("class A:\n    pass", "class; define it outside the kernel", "class A:"),
    ("import os", "import; import at the top of the module", "import os"),
    ("from os import path", "import; import at the top of the module", "from os import path"),
    ("del n", "del; values need no deleting", "del n"),
    ("global SCALE", "global; a kernel writes no Python variables outside it: pass a tensor", "global SCALE"),
    ("v: int = 3", "annotated assignment; assign without a type, or write T.f32(value)", "v: int = 3"),
    ("match n:\n    case 1:\n        pass", "match; use if and elif", "match n:"),
    ("f = lambda: 1", "lambda; write a function with def outside the kernel and call it", "lambda: 1"),
    ("v = [i for i in SIZES]", "list comprehension; write a for loop", "[i for i in SIZES]"),
    ("v = {i for i in SIZES}", "set comprehension; write a for loop", "{i for i in SIZES}"),
    ("v = {i: i for i in SIZES}", "dict comprehension; write a for loop", "{i: i for i in SIZES}"),
    ("v = sum(i for i in SIZES)", "generator expression; write a for loop", "(i for i in SIZES)"),
    ("v = {1: 2}", "dict; pass values as parameters, or use a tuple", "{1: 2}"),
    ("v = {1, 2}", "set; use a tuple", "{1, 2}"),
    ("v = [1, 2]", "list; use a tuple, or a tile for numbers", "[1, 2]"),
    ("if (v := n) > 0:\n    pass", "assignment expression (:=); assign in a statement of its own", "v := n"),
    ("v = max(*SIZES)", "star argument; write the arguments one by one", "*SIZES"),
    ("v = T.zeros(**SIZES)", "** argument; write the arguments one by one", "SIZES"),
    ("a, *b = SIZES", "star target; name each part", "a, *b"),
    ("for k in T.range(3):\n    pass\nelse:\n    pass",
     "else of a loop; keep a flag and test it behind the loop", "pass"),
    ("v = b'x'", "the constant b'x'; numbers, text, True, False and None are supported", "b'x'"),
    ("with open('f') as f:\n    pass", None, "open('f')"),
    ("with x as f:\n    pass", "with on the shared parameter `x`; only `with box.round() as r:` is", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message", "under"), REFUSED, ids=[r[0].split("\n")[0] for r in REFUSED])
def test_unsupported_syntax_is_refused_by_name(body, message, under):
    found = error(compiled(body))
    if message is None:
        assert found.message == (
            "open: cannot be called inside a kernel; use the host: a kernel reads and writes memory only"
        )
    else:
        assert found.message == f"unsupported in a kernel: {message}"
    assert underlined(found) == under


CALLS = [
    ("print(n)", "print: cannot be called inside a kernel; use T.print_"),
    ("v = input()", "input: cannot be called inside a kernel; use a parameter of the kernel"),
    ("v = zip(SIZES)", "zip: cannot be called inside a kernel; use T.range or T.static_range, and the index"),
    ("v = max(n, 3)", "max: expected compile-time values, got i64; use T.maximum (of two) or T.max (along an axis)"),
    ("v = abs(n)", "abs: expected compile-time values, got i64; use T.abs"),
    ("v = int(n)", "int: expected compile-time values, got i64; use .astype(T.i64)"),
    ("v = float(n)", "float: expected compile-time values, got i64; use .astype(T.f32)"),
    ("for k in range(n):\n    pass",
     "range: expected ints known at compile time, which are unrolled; use T.range for run-time values"),
    ("v = dict()",
     "`dict` cannot be called inside a kernel: expected a word of peertile.language, a dtype, or a plain Python "
     "function with source"),
    ("v = np.exp(n)",
     "`exp` cannot be called inside a kernel: expected a word of peertile.language, a dtype, or a plain Python "
     "function with source; write T.exp"),
    ("v = np.matmul(n, n)",
     "`matmul` cannot be called inside a kernel: expected a word of peertile.language, a dtype, or a plain Python "
     "function with source; write T.mma(a, b, acc)"),
    ("v = T.Exclusive()", "T.Exclusive: an annotation of kernel parameters cannot be called inside a kernel"),
    ("v = n()", "call: expected a function, got i64"),
    ("v = min(1, 'a')", "min: '<' not supported between instances of 'str' and 'int'"),
    ("v = T.zeros()", "T.zeros: missing argument `shape`; expected shape, dtype"),
    ("v = T.zeros(1, T.f32, 3)", "T.zeros: expected at most 2 positional arguments (shape, dtype), got 3"),
    ("v = T.zeros(1, kind=3)", "T.zeros: expected shape, dtype, got the keyword `kind`"),
    ("v = T.zeros(1, shape=2)", "T.zeros: `shape` is given twice, by position and by name"),
    ("z.store()", "T.ExclusiveTile.store: missing argument `tile`; expected tile"),
    ("z.store(1.0, 2.0)", "T.ExclusiveTile.store: expected at most 1 positional arguments (tile), got 2"),
    ("v = T.f32()", "T.f32(...): expected one number or tile, got 0 arguments"),
    ("v = T.f32('a')", "T.f32(...): expected a number or a tile, got the str 'a'"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), CALLS, ids=[c[0] for c in CALLS])
def test_calls_that_a_kernel_cannot_make(body, message):
    assert error(compiled(body)).message == message


NAMES = [
    ("v = sise", "`sise` is not defined"),
    ("v = SIZE", "`SIZE` is not defined; did you mean `SIZES`?"),
    ("v = T.zeroes(64)", "`peertile.language` has no `zeroes`; did you mean `zeros`?"),
    ("v = T.arange(64)", "`peertile.language` has no `arange`; write T.iota(n)"),
    ("v = T.dot(n, n)", "`peertile.language` has no `dot`; write T.mma(a, b, acc)"),
    ("v = T.uint16", "`peertile.language` has no `uint16`; write T.u16"),
    ("v = T.unknown", "`peertile.language` has no `unknown`"),
    ("v = n.sum()", "i64 has no `.sum`; write T.sum(tile)"),
    ("v = n.to(T.f32)", "i64 has no `.to`; write tile.astype(dtype)"),
    ("v = n.unknown", "i64 has no `.unknown`"),
    ("v = T.Padding.ZEROS", "Padding has no member `ZEROS`; did you mean `ZERO`?"),
    ("v = T.f32.width", "`.width` of f32: not available inside a kernel"),
    ("v = T.f32.max", "f32.max: only integer dtypes have it; write float('inf')"),
    ("v = T.Shared.load", "T.Shared is an annotation of kernel parameters; inside a kernel use the parameter itself"),
    ("v = x.lode((0,), (64,))", "the shared parameter `x` has no `.lode`; did you mean `load`?"),
    ("v = n.shapes", "i64 has no `.shapes`; did you mean `shape`?"),
    ("v = SIZES.count(3)", "a tuple of 2 has no `.count`"),
    ("v = TABLE[0]",
     "`TABLE`, captured from outside the kernel: expected a constant, got a list, which can change between launches; "
     "make it a tuple, or pass it as an argument"),
    ("if n > 0:\n    pass\nv = late\nlate = 1",
     "`late` has no value here: it is assigned at line 5, which has not run on this path; assign it before"),
    ("v = SIZES[2]", "index of a tuple: expected -2 to 1, got 2"),
    ("v = SIZES[n]",
     "index of a tuple: expected an int known at compile time, got the run-time value i64; make it T.Const[int]"),
    ("v = x[0]",
     "`x[...]`: memory is not indexed; load a tile with x.load(...), or one element with T.ld"),
    ("z[0] = 1.0", "assignment to an index: memory is written with z.store(tile), and tiles are immutable"),
    ("z[0] += 1.0", "assignment to an index: memory is written with z.store(tile), and tiles are immutable"),
    ("z.v = 1.0", "assignment to an attribute: a kernel assigns to names only; memory is written with store"),
    ("a, b = n", "unpacking: expected a tuple of 2, got i64"),
    ("a, b, c = SIZES", "unpacking: expected a tuple of 3, got a tuple of 2"),
    ("return n", "return: a kernel returns nothing, got i64; store it with z.store(tile)"),
    ("T.range(3)", "unused result: a range does nothing by itself; write `for k in ...:`"),
    ("z.store", "unused result: the method ExclusiveTile.store (not called); call it with ()"),
    ("v = f'{n}'",
     "f-string: expected compile-time values, got i64; give T.print_ the value as an argument of its own"),
    ("T.static_assert(n > 0)",
     "T.static_assert: expected a compile-time condition, got bool; use T.assert_"),
    ("T.static_assert(SIZES[0] == 1, 'one')", "T.static_assert: one"),
    ("T.static_assert(SIZES[0] == 1)", "T.static_assert: the condition is false"),
    ("T.assert_(x.load((0,), (64,)) > 0)", "T.assert_: expected a bool scalar, got a tile bool[64]; reduce it with T.all"),
    ("T.assert_(n > 0, n)", "T.assert_: message: expected a str known at compile time, got i64"),
    ("T.print_(n, 'is n')",
     "T.print_: expected text in front of the values, got the str 'is n' behind one; use two calls"),
    ("v = T.program_id(3)", "T.program_id: axis: expected 0, 1 or 2, got 3"),
    ("T.unsafe.token()",
     "T.unsafe.token in the kernel `kernel`, which is not unsafe; mark it @pt.kernel(unsafe=True), or use T.Peer, "
     "signals or a mailbox"),
    ("v = T.rank()",
     "T.rank(): expected one group in play, got none: no parameter is T.Peer, T.Signal, T.Counter, T.Barrier or "
     "T.Mailbox; add one"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), NAMES, ids=[c[0].replace("\n", "; ") for c in NAMES])
def test_names_and_uses_that_mean_nothing(body, message):
    assert error(compiled(body)).message == message


def test_an_error_shows_the_line_and_a_caret():
    def kernel(z, x):
        z.store(x.load_like(z) + nothing)  # noqa: F821

    line = kernel.__code__.co_firstlineno + 1
    assert str(error(kernel)) == "\n".join(
        [
            "`nothing` is not defined",
            f"  {__file__}:{line} in kernel",
            "    z.store(x.load_like(z) + nothing)  # noqa: F821",
            "                             ^^^^^^^",
        ]
    )


def test_columns_count_characters_in_lines_with_other_letters():
    def kernel(z, x):
        "äöü"
        z.store(nothing)  # noqa: F821

    assert underlined(error(kernel)) == "nothing"


def test_constants_are_captured_and_recorded():
    def kernel(z, x):
        z.store(x.load((0,), (SIZES[0],)) * SCALE)

    captures = build(kernel).facts["captures"]
    prefix = f"{__name__}.{kernel.__qualname__}"
    assert captures == {f"{prefix}:SIZES": SIZES, f"{prefix}:SCALE": SCALE}


def test_closure_variables_are_constants():
    def make(width):
        def kernel(z, x):
            z.store(x.load((0,), (width,)))

        return kernel

    build(make(64))
    refuses(
        make([64]),
        "`width`, captured from outside the kernel: expected a constant, got a list, which can change between "
        "launches; make it a tuple, or pass it as an argument",
        "width",
    )


def test_constants_may_be_none():
    def kernel(z, x, bias):
        t = x.load_like(z)
        z.store(t if bias is None else t + bias)

    types = {"z": own(), "x": shared()}
    assert len(build_kernel(kernel, types, {"bias": None}).body.ops) == 5
    assert len(build_kernel(kernel, types, {"bias": 2}).body.ops) == 8


def test_constants_may_be_text_tuples_and_dtypes():
    def kernel(z, x, mode, shape, dtype):
        if mode == "wide" and "x" in ("x", "y"):
            z.store(x.load((0,), shape).astype(dtype).astype(z.dtype))

    build(kernel, {"mode": "wide", "shape": (64,), "dtype": T.f64})


def test_missing_and_unknown_arguments_of_a_kernel():
    def kernel(z, N):
        pass

    with pytest.raises(CompileError, match="kernel `kernel`: missing argument `N`"):
        build_kernel(kernel, {"z": own()})
    with pytest.raises(CompileError, match="kernel `kernel`: expected N, z, got `M`"):
        build_kernel(kernel, {"z": own()}, {"N": 1, "M": 2})


def test_functions_without_source_are_refused():
    scope = {}
    exec("def kernel(z):\n    pass", scope)
    message = (
        "`kernel`: its source cannot be read from <string>; define kernels in a file or a notebook cell, "
        "not through exec"
    )
    assert error(scope["kernel"]).message == message


def test_helpers_without_source_are_refused_where_they_are_called():
    scope = {}
    exec("def helper(t):\n    return t", scope)
    helper = scope["helper"]
    assert helper.__module__ is None

    def kernel(z, x):
        z.store(helper(x.load_like(z)))

    message = "`helper`: its source cannot be read from <string>; define kernels in a file or a notebook cell, not through exec"
    refuses(kernel, message, "helper(x.load_like(z))")
    assert snapshot(kernel).is_current()
    assert fingerprint(kernel) is not None


TOO_DEEP = (
    "expression nests too deeply: expected at most 200 operations in one expression, each on the result of the one "
    "before, got more; name parts of it"
)


def test_an_expression_has_a_depth_that_is_refused_with_its_line():
    build(compiled("z.store(x.load_like(z)" + " + 1.0" * 190 + ")"))
    found = error(compiled("t = x.load_like(z)\nz.store(t" + " + 1.0" * 900 + ")"))
    assert found.message == TOO_DEEP
    assert found.loc.line == 3
    assert underlined(found) == "t" + " + 1.0" * 701
    assert error(compiled("v = " + "-" * 900 + "n")).message == TOO_DEEP
    assert error(compiled("v = n" + ".astype(T.i64)" * 300)).message == TOO_DEEP


@pytest.mark.slow
def test_blocks_and_expressions_that_python_cannot_hold_together_are_refused():
    body, pad = "", ""
    for k in range(90):
        body += f"{pad}if n > {k}:\n"
        pad += " "
    found = error(compiled(f"{body}{pad}z.store(x.load_like(z){' + 1.0' * 190})"))
    assert found.message == (
        "this statement nests too deeply: blocks, helpers and expressions inside each other, beyond what Python's stack "
        "holds; name parts of its expressions, or call fewer helpers inside each other"
    )


@pytest.mark.parametrize("kind", [RecursionError, MemoryError])
def test_a_file_too_deep_for_pythons_parser_is_refused(kind, monkeypatch):
    fn = compiled(f"v = '{kind.__name__}'")

    def parse(text):
        raise kind

    monkeypatch.setattr("peertile.frontend.parse.ast.parse", parse)
    found = error(fn)
    assert found.message == (
        f"`kernel`: {fn.__code__.co_filename} cannot be parsed: an expression in it nests too deeply for Python's parser; "
        "name parts of it"
    )
    assert found.loc.line == 1


def test_a_changed_file_is_noticed():
    fn = compiled("pass")
    name = fn.__code__.co_filename
    lines = ["x = 1\n"]
    linecache.cache[name] = (6, None, lines, name)
    message = (
        f"`kernel`: what was imported is not at {name}:1; the file has changed since it was imported: import it again"
    )
    assert error(fn).message == message


def test_a_kernel_that_is_imported_again_has_its_new_text(tmp_path):
    path = tmp_path / "reloaded.py"

    def written(value: str) -> FunctionType:
        path.write_text(f"def scale():\n    return {value}\n\n\ndef kernel(z):\n    z.store(z.load() * scale())\n")
        scope = {"T": T}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        return scope["kernel"]

    def numbers(fn: FunctionType) -> set[float]:
        return {op.attrs["value"] for op in walk(build(fn).body) if isinstance(op, ops.Const)}

    old = written("2.5")
    assert numbers(old) == {2.5}
    kept = linecache.cache[str(path)]
    new = written("7.25")
    assert numbers(old) == {2.5}  # it goes on with the text that it was compiled from
    assert linecache.cache[str(path)] == kept
    assert numbers(new) == {7.25}
    message = (
        f"`scale`: what was imported is not at {path}:1; the file has changed since it was imported: import it again"
    )
    assert error(old).message == message


def test_code_that_a_hook_at_import_made_is_not_compared_with_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of the hook, which the file's own loader would find

    class Hook(SourceFileLoader):
        def source_to_code(self, data, path, *, _optimize=-1):
            return compile(data.replace(b"+ 1.5", b"+ 2.5 "), path, "exec")

    def imported(loader) -> FunctionType:
        scope = {"__loader__": loader}
        exec(loader.get_code("m"), scope)
        return scope["kernel"]

    path = tmp_path / "m.py"
    path.write_text("def kernel(z):\n    z.store(z.load() + 1.5)\n")
    build(imported(Hook("m", str(path))))
    build(imported(SourceFileLoader("m", str(path))))
    os.utime(path, (1, 1))  # as a copy that keeps dates
    fn = imported(SourceFileLoader("m", str(path)))
    fn.__code__ = fn.__code__.replace(co_consts=(None, 3.5))
    assert error(fn).message.startswith(f"`kernel`: what was imported is not at {path}:1;")


def test_two_groups_in_play_are_named():
    def kernel(z, p, words, s):
        z.store(T.rank().astype(T.f32))

    message = (
        "T.rank(): expected one group in play, got 2 (group 0: `p`, `s`; group 1: `words`); ask an object, as in x.rank"
    )
    refuses(kernel, message, "T.rank()", groups={"p": 0, "words": 1, "s": 0})
    build(kernel, groups={"p": 0, "words": 0, "s": 0})
    build(kernel)


def test_pointers_need_an_unsafe_kernel():
    def kernel(ptr):
        pass

    message = (
        "parameter `ptr`: T.Pointer is a raw address, which only unsafe kernels take; mark the kernel "
        "@pt.kernel(unsafe=True), or take T.Shared, T.Exclusive or T.Peer"
    )
    refuses(kernel, message)


def test_every_statement_of_python_is_either_handled_or_refused():
    from peertile.frontend import statements

    known = set(statements._HANDLERS) | set(statements._REFUSED)
    missing = [c.__name__ for c in ast.stmt.__subclasses__() if c not in known and c.__name__ not in LATER]
    assert missing == []


def test_every_expression_of_python_is_either_handled_or_refused():
    from peertile.frontend import expressions

    known = set(expressions._HANDLERS) | set(expressions._REFUSED)
    inside = {"FormattedValue"}  # only ever part of an f-string
    old = {"Num", "Str", "Bytes", "NameConstant", "Ellipsis"}  # what Constant replaced
    missing = [
        c.__name__ for c in ast.expr.__subclasses__() if c not in known and c.__name__ not in inside | old | LATER
    ]
    assert missing == []


LATER = {"TypeAlias", "TemplateStr", "Interpolation"}
"""Syntax of later Pythons: refused by its node's name."""
