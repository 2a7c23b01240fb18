"""The marks of the tests, read from their AST: which feature or sentence each test claims. Imports no test."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"


@dataclass(frozen=True, order=True)
class Mark:
    """One `@pytest.mark.<name>(*args)` on one test."""

    name: str
    args: tuple[str, ...]
    file: str
    test: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.test}: {self.name}({', '.join(self.args)})"


def _marks(decorators: list[ast.expr], name: str) -> Iterator[tuple[tuple[str, ...], int]]:
    for node in decorators:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != name:
            continue
        if ast.unparse(node.func.value) in ("pytest.mark", "mark"):
            yield tuple(str(ast.literal_eval(arg)) for arg in node.args), node.lineno


def _module_marks(tree: ast.Module) -> list[ast.expr]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets):
            return node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
    return []


def _tests(body: list[ast.stmt], outer: list[ast.expr]) -> Iterator[tuple[str, list[ast.expr]]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _tests(node.body, [*outer, *node.decorator_list])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node.name, [*outer, *node.decorator_list]


@functools.cache
def _files(folder: Path, root: Path) -> list[tuple[str, list[tuple[str, list[ast.expr]]]]]:
    """Every file of tests with its tests and their decorators; read once, whatever is asked of it."""
    found = []
    for path in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(path.read_text(), str(path))
        found.append((str(path.relative_to(root)), list(_tests(tree.body, _module_marks(tree)))))
    return found


def marked(name: str) -> set[tuple[str, str]]:
    """Tests, as (file, test), with a mark that takes nothing, `@pytest.mark.<name>`."""
    return {
        (file, test)
        for file, tests in _files(TESTS, ROOT)
        for test, decorators in tests
        if any(ast.unparse(node) in (f"pytest.mark.{name}", f"mark.{name}") for node in decorators)
    }


def marks(name: str) -> list[Mark]:
    """Every mark called `name` in the tests, sorted; a mark on a class or a module counts for each test in it."""
    found = []
    for file, tests in _files(TESTS, ROOT):
        for test, decorators in tests:
            for args, line in _marks(decorators, name):
                found.append(Mark(name, args, file, test, line))
    return sorted(found)
