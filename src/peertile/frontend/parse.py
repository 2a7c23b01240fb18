"""The source of a function as an AST with the file's own lines and columns. No meaning.

The whole file is parsed and the function found in it by its first line, rather than dedenting an excerpt:
so columns are right for indented and nested kernels too, and a string that spans lines stays as it was.
"""

from __future__ import annotations

import ast
import linecache
import threading
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Final

from peertile.errors import CompileError
from peertile.source import Loc

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
    lines = linecache.getlines(code.co_filename, fn.__globals__)
    if not lines:
        raise CompileError(
            f"`{fn.__name__}`: its source cannot be read from {code.co_filename}; "
            "define kernels in a file or a notebook cell, not through exec",
            loc,
        )
    try:
        node = _functions("".join(lines)).get((code.co_name, code.co_firstlineno))
    except SyntaxError:
        node = None
    except (RecursionError, MemoryError):
        raise CompileError(
            f"`{fn.__name__}`: {code.co_filename} cannot be parsed: an expression in it nests too deeply for Python's "
            "parser; name parts of it",
            loc,
        ) from None
    if node is None:
        raise CompileError(
            f"`{fn.__name__}`: its source was not found at {code.co_filename}:{code.co_firstlineno}; "
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
