"""The source of a function as an AST with the file's own lines and columns. No meaning.

The whole file is parsed and the function found in it by its first line, rather than dedenting an excerpt:
so columns are right for indented and nested kernels too, and a string that spans lines stays as it was.
"""

from __future__ import annotations

import ast
import linecache
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType
from typing import Any, Final

from peertile.errors import CompileError
from peertile.source import IMPORTED_NS, Loc

__all__ = ["ParsedFunction", "assigned_names", "parse_function"]


@dataclass(frozen=True, slots=True)
class ParsedFunction:
    """A function's AST, the file it is from, and that file's lines."""

    node: ast.FunctionDef
    file: str
    lines: tuple[str, ...]

    def loc(self, node: ast.AST, inlined_at: Loc | None = None) -> Loc:
        """The place of `node`; AST columns count UTF-8 bytes, a Loc's count characters."""
        line = getattr(node, "lineno", self.node.lineno)
        col, end = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", None)
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        if getattr(node, "end_lineno", line) != line:
            end = len(text.rstrip().encode())
        if not text.isascii():
            raw = text.encode()
            col = len(raw[:col].decode(errors="replace"))
            end = len(raw[:end].decode(errors="replace")) if end is not None else None
        return Loc(self.file, line, col, end, self.node.name, inlined_at)


_parsing = threading.Lock()
"""Python 3.11 counts the depth of what it parses for all threads together, and two at once confuse it: SystemError,
`AST constructor recursion depth mismatch`."""


@lru_cache(maxsize=64)
def _functions(text: str) -> dict[tuple[str, int], ast.FunctionDef]:
    """Every function definition of a file by name and first line (its first decorator's, as in code objects)."""
    found = {}
    with _parsing:
        parsed = ast.parse(text)
    for node in ast.walk(parsed):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name, first] = node
    return found


@lru_cache(maxsize=64)
def _codes(text: str, file: str) -> dict[tuple[str, int], CodeType]:
    """The code object of every function of a file, by name and first line."""
    found = {}
    with _parsing:
        pending = [compile(text, file, "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        found[code.co_name, code.co_firstlineno] = code
        pending += [const for const in code.co_consts if isinstance(const, CodeType)]
    return found


def _content(code: CodeType) -> Iterator[Any]:
    """What a function does and where its lines are; code objects themselves change as they run."""
    yield code.co_code, code.co_names, code.co_varnames, list(code.co_lines())
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield tuple(_content(const))
        else:  # a set that was read from a file of bytecode may be in another order
            yield type(const), sorted(map(repr, const)) if isinstance(const, frozenset) else repr(const)


def _is_as_imported(code: CodeType, text: str) -> bool:
    """Whether this text of a file that was written since this package was imported has the function as it was imported.

    Otherwise the binary of another text would be kept under the key of this code, for later runs too. A file that is
    older has not changed since.
    """
    found = _codes(text, code.co_filename).get((code.co_name, code.co_firstlineno))
    return found is not None and list(_content(found)) == list(_content(code))


def _is_hooked(fn: FunctionType) -> bool:
    """Whether a hook at import, as pytest's, may have made other code of the text than Python does: it cannot be
    compared."""
    loader = fn.__globals__.get("__loader__")
    own = getattr(loader, "source_to_code", None)
    return loader is not None and getattr(own, "__func__", None) is not SourceFileLoader.source_to_code


def _written_ns(file: str) -> int:
    """When a file was written, or put there with an older date, last; 0 for what is no file, as a notebook's cell."""
    try:
        state = os.stat(file)
    except OSError:
        return 0
    return max(state.st_mtime_ns, state.st_ctime_ns)


def _found_in(lines: list[str], code: CodeType, is_compared: bool) -> ast.FunctionDef | None:
    text = "".join(lines)
    try:
        node = _functions(text).get((code.co_name, code.co_firstlineno))
        return node if node is None or not is_compared or _is_as_imported(code, text) else None
    except SyntaxError:
        return None


def _found(fn: FunctionType) -> tuple[ast.FunctionDef | None, list[str]]:
    """The function in its file, and that file's lines.

    First in the text that is known, perhaps from before an edit: a program that goes on running meanwhile compiles for
    new types what it has imported. Only where that is another text, before a reload, is the file looked at again.
    """
    file = fn.__code__.co_filename
    is_newer = _written_ns(file) > IMPORTED_NS
    is_compared = is_newer and not _is_hooked(fn)
    if is_newer and not is_compared:
        linecache.checkcache(file)
    lines = linecache.getlines(file, fn.__globals__)
    node = _found_in(lines, fn.__code__, is_compared)
    if node is None and is_compared:
        linecache.checkcache(file)
        lines = linecache.getlines(file, fn.__globals__)
        node = _found_in(lines, fn.__code__, is_compared)
    return node, lines


def parse_function(fn: FunctionType) -> ParsedFunction:
    """The AST of `fn`; CompileError where its source cannot be had or is no plain `def`."""
    code = fn.__code__
    loc = Loc(code.co_filename, code.co_firstlineno, function=fn.__name__)
    if fn.__name__ == "<lambda>" or code.co_name == "<lambda>":
        raise CompileError("lambda: expected a function written with def; give it a name", loc)
    if code.co_flags & (0x20 | 0x80 | 0x100 | 0x200):
        raise CompileError(
            f"`{fn.__name__}`: expected a plain function, got a generator or a coroutine; "
            "a kernel and its helpers neither yield nor await",
            loc,
        )
    try:
        node, lines = _found(fn)
    except (RecursionError, MemoryError):
        raise CompileError(
            f"`{fn.__name__}`: {code.co_filename} cannot be parsed: an expression in it nests too deeply for Python's "
            "parser; name parts of it",
            loc,
        ) from None
    if not lines:
        raise CompileError(
            f"`{fn.__name__}`: its source cannot be read from {code.co_filename}; "
            "define kernels in a file or a notebook cell, not through exec",
            loc,
        )
    if node is None:
        raise CompileError(
            f"`{fn.__name__}`: what was imported is not at {code.co_filename}:{code.co_firstlineno}; "
            "the file has changed since it was imported: import it again",
            loc,
        )
    return ParsedFunction(node, code.co_filename, tuple(lines))


_OTHER_SCOPES: Final = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""What has names of its own; refused in a kernel anyway."""


@lru_cache(maxsize=1024)
def assigned_names(node: ast.AST) -> dict[str, int]:
    """Names that the statements in `node` bind, in order, each with the line of its first binding.

    Of a function: of its body, not its own name. Not to be changed by the caller.
    """
    names: dict[str, int] = {}
    # Not by recursion: how deep an expression may be is for the evaluation to say, with its line.
    pending = list(ast.iter_child_nodes(node))[::-1]
    while pending:
        here = pending.pop()
        if isinstance(here, ast.Name) and isinstance(here.ctx, ast.Store):
            names.setdefault(here.id, here.lineno)
        if not isinstance(here, _OTHER_SCOPES):
            pending += list(ast.iter_child_nodes(here))[::-1]
    return names
