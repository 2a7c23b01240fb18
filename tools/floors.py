"""The floors of peertile as data, and what the AST of `src/peertile` says about them. Imports nothing of ours.

`tests/project/test_floors.py` holds the code to it; ARCHITECTURE.md shows `table()` and is held to that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "peertile"


@dataclass(frozen=True)
class Folder:
    """A folder of the package, or the loose modules that stand for one: `parts` are their dotted names."""

    name: str
    step: int
    parts: tuple[str, ...]
    holds: str


# A module imports from folders of a lower step, or from its own. Two folders of one step never meet. `floor` is for
# people; the step decides, since floors 2, 3, 5 and 7 have an order inside.
FLOORS: tuple[tuple[str, tuple[Folder, ...]], ...] = (
    (
        "F0 words",
        (
            Folder(
                "words",
                0,
                ("errors", "source", "dtypes", "memory_model", "config"),
                "exceptions, places in source, element types, order / scope / proxy, environment variables",
            ),
        ),
    ),
    ("F1 IR", (Folder("ir", 10, ("ir",), "types, ops and their rules, builder, text form, verifier"),)),
    (
        "F2 making IR",
        (
            Folder("language", 20, ("language",), "the words a kernel is written in: signature, docstring, formula"),
            Folder("frontend", 21, ("frontend",), "Python AST to IR: inference, inlining, errors with a caret"),
            Folder("passes", 21, ("passes",), "IR to IR: bounds, order, protocols, simplification"),
        ),
    ),
    (
        "F3 meaning and lowering",
        (
            Folder("meaning", 30, ("meaning",), "the numpy meaning of every op, the oracle of differential tests"),
            Folder("backends", 30, ("backends",), "IR to native code (cpu: LLVM), the cache of binaries"),
            Folder("sim", 31, ("sim",), "the simulated machine: memory, clocks, schedules, verdicts, exploration"),
        ),
    ),
    (
        "F4 runtime",
        (
            Folder(
                "runtime",
                40,
                ("runtime",),
                "driver protocol and drivers, device, stream, event, buffer, tensor, partition, lease, lazy op",
            ),
            Folder("timelines", 45, ("timelines",), "what ranks did and when: recording, trace files, pictures"),
        ),
    ),
    (
        "F5 joining",
        (
            Folder(
                "kernel",
                50,
                (
                    "kernel",
                    "binding",
                    "recognise",
                    "native_calls",
                    "launch",
                    "kept_launch",
                    "captures",
                    "compiler",
                    "direct",
                    "creation",
                    "op",
                    "inspection",
                    "printing",
                ),
                "specialise, compile, pack arguments, launch; lazy and eager constructors; stages",
            ),
            Folder("vmm", 52, ("vmm",), "physical memory, addresses and mappings by hand"),
            Folder("comm", 51, ("comm",), "group, symmetric heap, peer views, signals, counters, barriers, mailboxes"),
        ),
    ),
    (
        "F6 library",
        (
            Folder("tuning", 59, ("tuning",), "which of several ways is the fastest here, one answer for all ranks"),
            Folder("library", 60, ("library",), "programs written in the public language only"),
            Folder("torch", 61, ("torch",), "the library on torch tensors and torch process groups, with gradients"),
        ),
    ),
    (
        "F7 edges",
        (
            Folder("checker", 69, ("checker",), "unchanged programs, hosts and kernels, on the simulated machine"),
            Folder("testing", 70, ("testing",), "the test kit that is shipped: driver conformance, oracles"),
            Folder("cli", 71, ("cli",), "the `peertile` command"),
            Folder("peertile", 72, ("", "__main__"), "the public names, exported once"),
        ),
    ),
)
FOLDERS = tuple(folder for _, folders in FLOORS for folder in folders)

# Third-party packages that cost more than they may on the way to `import peertile`, and who may import them: the
# modules (or folders, with a dot at the end), and whether only inside a function.
HEAVY: dict[str, tuple[tuple[str, ...], bool]] = {
    "llvmlite": (("backends.cpu.jit",), True),
    "ml_dtypes": (("dtypes",), True),
    "rich": (("cli.",), False),
    "typer": (("cli.",), False),
    "cuda": ((), True),
    "torch": (("torch",), False),
    "triton": (("backends.cuda.triton_compile",), True),
}


@dataclass(frozen=True)
class Import:
    """One import statement of the package. `module` and `target` are names below `peertile`, "" for the package."""

    module: str
    target: str
    line: int
    deferred: bool
    """Inside a function: it runs late."""
    typing_only: bool
    """Under `if TYPE_CHECKING`: it never runs."""
    own: bool

    def __str__(self) -> str:
        return f"{self.module or '__init__'}:{self.line} imports {self.target or 'peertile'}"


def modules() -> dict[str, Path]:
    """Every module of the package by its name below `peertile`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def folder_of(module: str) -> Folder | None:
    """The folder that `module` belongs to."""
    for folder in FOLDERS:
        for part in folder.parts:
            if module == part or (part and module.startswith(part + ".")):
                return folder
    return None


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
"""Where the nodes of a syntax tree keep statements, and what holds some."""


def _statements(
    node: ast.AST, deferred: bool = False, typing_only: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    # Statements alone: an expression holds no import, and is most of a tree.
    for child in (inner for field in _BODIES for inner in getattr(node, field, ())):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, deferred, typing_only
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _statements(child, True, typing_only)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            yield from _statements(ast.Module(child.body, []), deferred, True)
            yield from _statements(ast.Module(child.orelse, []), deferred, typing_only)
        else:
            yield from _statements(child, deferred, typing_only)


def imports() -> list[Import]:
    """Every import statement of the package, own modules resolved to the module that is named."""
    known = modules()
    found = []
    for module, path in known.items():
        is_package = path.name == "__init__.py"
        for node, deferred, typing_only in _statements(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                base = node.module or ""
                if node.level:
                    here = ["peertile", *module.split(".")] if module else ["peertile"]
                    kept = here[: len(here) - node.level + is_package]
                    base = ".".join([*kept, base]) if base else ".".join(kept)
                targets = [f"{base}.{alias.name}" for alias in node.names]
            for target in targets:
                own = target.split(".")[0] == "peertile"
                name = target.removeprefix("peertile").removeprefix(".") if own else target
                if own and name not in known:  # `from module import name`: the module is what is imported
                    name = name.rpartition(".")[0]
                found.append(Import(module, name, node.lineno, deferred, typing_only, own))
    return found


def table() -> str:
    """The floors as the text that ARCHITECTURE.md shows."""
    width = max(len(folder.name) for folder in FOLDERS)
    lines = []
    for title, folders in FLOORS:
        lines.append(title)
        for folder in folders:
            loose = [part for part in folder.parts if part != folder.name and not part.startswith("_") and part]
            names = f" ({', '.join(folder.parts)})" if loose else ""
            lines.append(f"  {folder.name:{width}}  {folder.holds}{names}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
