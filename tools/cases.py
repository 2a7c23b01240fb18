"""docs/reference/cases.md: failures seen in the field, and the tests that show each of them, found by their names.

    python tools/cases.py --write | --check

A test belongs to case 24 if its name begins with `test_f24_`, or that of its file does. In `tests/cases/test_sim_*.py`
the decorator of a test says what the checker has to say: `faulty(VerdictKind.RACE, …)` or `silent(…)`.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tools.pages import Page, main  # noqa: E402 - a script finds its own package only now

TABLE = ROOT / "tools" / "cases.toml"
_NUMBERS = re.compile(r"^test_((?:f\d+_)+)")


@dataclass(frozen=True)
class Shown:
    """One test of a case: what is expected of the checker, if its decorator says so."""

    numbers: tuple[int, ...]
    name: str
    file: Path
    verdict: str = ""


def parts() -> list[tuple[str, dict[int, str]]]:
    """Title and cases of each part of the table."""
    data = tomllib.loads(TABLE.read_text())
    return [(part["title"], {int(number): str(text) for number, text in part["cases"]}) for part in data["part"]]


def _numbers(name: str) -> tuple[int, ...]:
    found = _NUMBERS.match(name)
    return tuple(int(part[1:]) for part in found[1].strip("_").split("_")) if found else ()


def _verdict(node: ast.FunctionDef) -> str:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name):
            if decorator.func.id == "silent":
                return "silent"
            if decorator.func.id == "faulty" and decorator.args and isinstance(decorator.args[0], ast.Attribute):
                return decorator.args[0].attr.lower().replace("_", " ")
    return ""


def tests() -> list[Shown]:
    """Every test of a case, in the order of files and lines."""
    found = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        of_file = _numbers(file.name)
        text = file.read_text()
        if not of_file and "def test_f" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                numbers = _numbers(node.name) or of_file
                if numbers:
                    found.append(Shown(numbers, node.name, file.relative_to(ROOT), _verdict(node)))
    return found


def unknown() -> list[str]:
    """Tests of cases that the table does not have, and cases without a test."""
    cases = {number for _, part in parts() for number in part}
    shown = {number for test in tests() for number in test.numbers}
    return [f"tests name case {n}, tools/cases.toml does not" for n in sorted(shown - cases)] + [
        f"case {n} has no test" for n in sorted(cases - shown)
    ]


def _sentence(name: str) -> str:
    text = re.sub(r"^test_(?:f\d+_)*", "", name).replace("_", " ")
    return text[:1].upper() + text[1:]


def render() -> str:
    """The page."""
    by_case: dict[int, list[Shown]] = {}
    for test in tests():
        for number in test.numbers:
            by_case.setdefault(number, []).append(test)
    total = sum(len(part) for _, part in parts())
    judged = sum(1 for _, part in parts() for n in part if any(t.verdict or _simulated(t) for t in by_case.get(n, [])))
    lines = [
        "# Failures seen in the field",
        "",
        "Ways in which programs on several devices, and the runtimes under them, have gone wrong, each restated small",
        "enough for ranks on a laptop.",
        f"{total} cases; {judged} of them run under `peertile check`'s machine, the rest on the targets.",
        "Where a verdict stands before a test, the checker reports a fault of that kind, or nothing at all (silent).",
        "Hardware that tile programs do not see, as lanes and parts of blocks, is restated at the level of programs.",
    ]
    for title, part in parts():
        lines += ["", f"## {title}", ""]
        for number, text in part.items():
            lines.append(f"- **F{number:02}** {text}.")
            for test in by_case.get(number, []):
                verdict = f"{test.verdict}: " if test.verdict else ""
                lines.append(f"  - {verdict}{_sentence(test.name)} (`{test.file}`)")
    return "\n".join(lines)


def _simulated(test: Shown) -> bool:
    text = (ROOT / test.file).read_text()
    return "peertile.sim" in text or "peertile.checker" in text


PAGES = (Page("docs/reference/cases.md", render),)

if __name__ == "__main__":
    main(PAGES)
