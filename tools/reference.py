"""docs/reference: pages made from docstrings, tables and the exception tree; nothing in them is typed twice.

python tools/reference.py --write    # write the pages
python tools/reference.py --check    # status 1 if one is stale
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tools.pages import Page, main  # noqa: E402 - a script finds its own package only now

LANGUAGE = "peertile.language"
API = ("peertile", "peertile.op", "peertile.tuning", "peertile.vmm", "peertile.testing")


def public(module: str) -> dict[str, Any]:
    """The public names of `module` and what they are; {} where it exports none."""
    loaded = importlib.import_module(module)
    return {name: getattr(loaded, name) for name in sorted(getattr(loaded, "__all__", ()), key=str.lower)}


def is_constant(value: Any) -> bool:
    """A value whose meaning its type explains: an element type, a member of an enumeration."""
    return not (isinstance(value, type | types.ModuleType) or callable(value)) or (
        isinstance(value, Enum) or type(value).__name__ == "DType"
    )


def docstring(value: Any) -> str:
    """The docstring of `value`, of its type for a constant; "" where there is none of our own."""
    if is_constant(value):
        value = type(value)
    if isinstance(value, type) and "__doc__" not in vars(value):
        return ""
    text = inspect.getdoc(value) or ""
    # dataclass and enum make a docstring when there is none; it says nothing.
    if isinstance(value, type) and text.startswith(f"{value.__name__}("):
        return ""
    return text


def undocumented(module: str) -> list[str]:
    """Public names of `module`, and public members of its classes, without a docstring."""
    missing = []
    for name, value in public(module).items():
        if not docstring(value):
            missing.append(f"{module}.{name}")
        if isinstance(value, type):
            missing += [f"{module}.{name}.{m}" for m, text, _ in members(value) if not text]
    return missing


def signature(value: Any) -> str:
    """The call form of `value`; "" where it has none worth showing."""
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    # Annotations are text in our modules, and shown in quotes; defaults keep theirs.
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    text = re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", text)  # a member of an enumeration, by its name
    return text.removesuffix(" -> None")


def markdown(text: str) -> str:
    """A docstring as Markdown: a paragraph that ends in `::` introduces a block of code."""
    lines: list[str] = []
    code = False
    for line in text.splitlines():
        if code and line and not line.startswith(" "):
            while lines[-1] == "":
                lines.pop()
            lines += ["```", ""]
            code = False
        if code:
            lines.append(line.removeprefix("    "))
        elif line.endswith("::"):
            lines += [line.removesuffix(":"), "", "```python"]
            code = True
        else:
            lines.append(line)
    text = "\n".join(lines).replace("```python\n\n", "```python\n").rstrip()
    return f"{text}\n```" if code else text


def members(cls: type) -> Iterator[tuple[str, str, str]]:
    """Public methods and properties that `cls` itself defines: name, docstring, call form."""
    for name, value in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield name, inspect.getdoc(value.fget) or "", ""
        elif isinstance(value, classmethod | staticmethod):
            yield name, inspect.getdoc(value.__func__) or "", signature(getattr(cls, name))
        elif inspect.isfunction(value):
            text = signature(value)
            for self_form in ("(self, ", "(self"):
                if text.startswith(self_form):
                    text = "(" + text.removeprefix(self_form)
                    break
            yield name, inspect.getdoc(value) or "", text


def inherited(cls: type) -> tuple[list[type], list[tuple[str, str, str]]]:
    """Bases of `cls` that have a section of their own, and the members to list: those of bases without one too."""
    exported = [value for module in (LANGUAGE, *API) for value in public(module).values()]
    shown: list[type] = []
    listed = list(members(cls))
    for base in cls.__mro__[1:]:
        if not base.__module__.startswith("peertile") or any(issubclass(other, base) for other in shown):
            continue
        if base in exported:
            shown.append(base)
        else:
            known = {name for name, _, _ in listed}
            listed += [member for member in members(base) if member[0] not in known]
    return shown, listed


def entry(prefix: str, name: str, value: Any) -> list[str]:
    """The section of one name."""
    is_exception = isinstance(value, type) and issubclass(value, BaseException)
    shown = "" if isinstance(value, types.ModuleType) or is_exception else signature(value)
    if isinstance(value, type) and not is_exception:
        # A class that is not called by users says so in its docstring; its signature is still the truth.
        shown = shown if "__init__" in vars(value) or hasattr(value, "__dataclass_fields__") else ""
    lines = [f"### `{prefix}.{name}`", ""]
    if shown:
        lines += ["```text", f"{name}{shown}", "```", ""]
    lines += [markdown(docstring(value)), ""]
    if isinstance(value, type) and issubclass(value, Enum):
        lines += ["Members: " + ", ".join(f"`{member.name}`" for member in value) + ".", ""]
    elif isinstance(value, type) and not is_exception:
        shown_bases, listed = inherited(value)
        lines += [f"- all of `{base.__name__}`" for base in shown_bases]
        for member, text, form in listed:
            # Members show what they are; their examples are in the source.
            about = " ".join(text.partition("Example")[0].split())
            lines += [f"- `{member}{form}`: {about}"]
        lines += [""]
    return lines


def constants(prefix: str, names: dict[str, Any]) -> list[str]:
    """Names that are constants, by type."""
    by_type: dict[type, list[str]] = {}
    for name, value in names.items():
        by_type.setdefault(type(value), []).append(name)
    lines = []
    for kind, group in by_type.items():
        if kind.__module__ == "builtins":
            listed = ", ".join(f"`{prefix}.{name}` = `{names[name]!r}`" for name in group)
        else:
            listed = ", ".join(f"`{prefix}.{name}`" for name in group)
        about = "" if kind.__module__ == "builtins" else " " + " ".join((inspect.getdoc(kind) or "").split())
        lines += [f"**{kind.__name__}**: {listed}.{about}", ""]
    return lines


def module_page(title: str, intro: str, module: str, prefix: str) -> list[str]:
    names = public(module)
    values = {name: value for name, value in names.items() if is_constant(value)}
    rest = {name: value for name, value in names.items() if name not in values}
    lines = [title, "", intro, ""]
    if values:
        lines += ["### Constants", "", *constants(prefix, values)]
    for name, value in rest.items():
        lines += entry(prefix, name, value)
    return lines


def language() -> str:
    return "\n".join(
        module_page(
            "# Language",
            "The words that a kernel is written in, imported as `import peertile.language as T`."
            " They have a meaning inside a kernel only.",
            LANGUAGE,
            "T",
        )
    )


def api() -> str:
    lines = ["# Host interface", "", "The public names outside kernels, module by module."]
    for module in API:
        about = (inspect.getdoc(importlib.import_module(module)) or "").partition("\n")[0]
        prefix = "pt" if module == "peertile" else f"pt.{module.partition('.')[2]}"
        lines += ["", *module_page(f"## {module}", about, module, prefix)]
    return "\n".join(lines)


def environment() -> str:
    config = importlib.import_module("peertile.config")
    lines = [
        "# Environment variables",
        "",
        "Read once, when the process first needs one."
        " An explicit argument comes before the environment, and the environment before the default;"
        " a value that cannot be read is an `ArgumentError` naming the variable, what it takes and what it was.",
        "",
        "| name | values | default | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for v in config.VARIABLES:
        lines.append(f"| `{v.name}` | {v.values} | {v.default} | {v.meaning} |")
    return "\n".join(lines)


def errors() -> str:
    module = importlib.import_module("peertile.errors")
    tree = (module.__doc__ or "").partition("::\n\n")[2].partition("\n\n")[0]
    lines = [
        "# Errors",
        "",
        "Every exception that peertile raises on purpose is one of these, exported from `peertile`.",
        "A message states the role, what was expected, what was got, where, and what to do.",
        "",
        "```text",
        inspect.cleandoc(tree),
        "```",
        "",
    ]
    for name, cls in vars(module).items():
        if name in module.__all__:
            bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
            lines += [f"### `{name}`", "", f"Subclass of {bases}.", "", markdown(docstring(cls)), ""]
    return "\n".join(lines)


def ops() -> str:
    module = importlib.import_module("peertile.ir.ops")
    lines = [
        "# Ops of tile IR",
        "",
        "What the compiler works on between the frontend and a backend; `peertile inspect --stage ir` prints it."
        " Ops marked *Expanded* are rewritten into the others before any backend or evaluator sees them.",
        "",
        "| op | attributes | effects | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for cls in module.ALL_OPS:
        attributes = ", ".join(f"`{name}`" for name in cls.ATTRS) or "–"
        effects = ", ".join(sorted(effect.value for effect in cls.EFFECTS)) or "–"
        about = " ".join(docstring(cls).split()).replace("|", "\\|")
        lines.append(f"| `{cls.NAME}` | {attributes} | {effects} | {about} |")
    lines += ["", "## Functions and kinds", ""]
    for name, cls in vars(module).items():
        if isinstance(cls, type) and issubclass(cls, Enum) and cls.__module__ == module.__name__:
            about = docstring(cls)
            lines += [f"### `{name}`", "", *([about, ""] if about else [])]
            lines += ["Members: " + ", ".join(f"`{member.value}`" for member in cls) + ".", ""]
    return "\n".join(lines)


PAGES = (
    Page("docs/reference/language.md", language),
    Page("docs/reference/api.md", api),
    Page("docs/reference/environment.md", environment),
    Page("docs/reference/errors.md", errors),
    Page("docs/reference/ops.md", ops),
)

if __name__ == "__main__":
    main(PAGES)
