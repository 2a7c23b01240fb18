"""docs/features.md: which promised feature works where, from the marks of the tests and the records of their runs.

    python tools/features.py --write     # write the page
    python tools/features.py --check     # status 1 if it is stale

A cell is claimed by `@pytest.mark.feature("K1", "cpu")` on a test, and by a test with such a mark that passed unchanged
on another device in a recorded run (tools/runs.py); rows, reasons and notes are in features.toml.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tools.marks import Mark, marked, marks  # noqa: E402 - a script finds its own package only now
from tools.pages import Page, main  # noqa: E402
from tools.runs import recorded  # noqa: E402

TARGETS = ("cpu", "sim", "cuda")
TABLE = ROOT / "tools" / "features.toml"


@dataclass(frozen=True)
class Row:
    """One promised feature."""

    id: str
    title: str
    na: dict[str, str] = field(default_factory=dict)
    note: dict[str, str] = field(default_factory=dict)


def sections() -> list[tuple[str, list[Row]]]:
    """Title and rows of each section of the table."""
    data = tomllib.loads(TABLE.read_text())
    return [(f"{part['key']}. {part['title']}", [Row(**row) for row in part["rows"]]) for part in data["section"]]


def rows() -> dict[str, Row]:
    """Every row by its id."""
    return {row.id: row for _, group in sections() for row in group}


def wrong_claims() -> list[str]:
    """Marks that name no row, no target, or a cell that cannot be."""
    known = rows()
    wrong = []
    for mark in marks("feature"):
        if len(mark.args) != 2 or mark.args[0] not in known or mark.args[1] not in TARGETS:
            wrong.append(f"{mark}: expected a row of tools/features.toml and one of {', '.join(TARGETS)}")
        elif mark.args[1] in known[mark.args[0]].na:
            wrong.append(f"{mark}: this cell is not applicable: {known[mark.args[0]].na[mark.args[1]]}")
    return wrong


def claims_here() -> list[Mark]:
    """What the marks claim; on tests that CI cannot run, as far as they passed in a recorded run."""
    elsewhere = marked("cuda") | marked("cuda2")
    passed = {test for _, tests in recorded().values() for test in tests}
    return [m for m in marks("feature") if (m.file, m.test) not in elsewhere or (m.file, m.test) in passed]


def claims_of_runs() -> list[Mark]:
    """What tests that claim a cell of cpu claim on other devices, since they passed there."""
    found = [mark for mark in marks("feature") if len(mark.args) == 2 and mark.args[1] == "cpu"]
    table = rows()
    return [
        replace(mark, args=(mark.args[0], device))
        for device, (_, tests) in recorded().items()
        for mark in found
        if (mark.file, mark.test) in tests and mark.args[0] in table and device not in table[mark.args[0]].na
    ]


def cell(row: Row, target: str, claims: list[Mark]) -> str:
    """What a cell says: its tests, the reason why it cannot be, or that it is open."""
    if target in row.na:
        return f"n/a: {row.na[target]}"
    tests = sorted({(mark.file, mark.test) for mark in claims if mark.args == (row.id, target)})
    if not tests:
        return "open"
    file, test = tests[0]
    text = f"[`{test}`](../{file})" + (f" and {len(tests) - 1} more" if len(tests) > 1 else "")
    return f"{text} ({row.note[target]})" if target in row.note else text


def render() -> str:
    """The page."""
    claims = claims_here() + claims_of_runs()
    runs = [f"[{name}](../benchmarks/records/{name}) of {device}" for device, (name, _) in sorted(recorded().items())]
    said = (
        [
            f"What a test claims on cpu it claims on a device where it passed unchanged: {', '.join(runs)}.",
            "Every case of it that ran there passed; a run that was cut off, as its record says, ran only some.",
        ]
        if runs
        else []
    )
    done = {target: sum(any(m.args == (r, target) for m in claims) for r in rows()) for target in TARGETS}
    lines = [
        "# Features",
        "",
        "What peertile promises, row by row, and where each promise is kept.",
        "A cell names a test that claims it; *open* means that no test does yet.",
        "A row is finished when all three targets are claimed or not applicable.",
        "A claim covers what its tests show: a row may be claimed while parts of it are still being built,"
        " and the tests say how far it goes.",
        *said,
        "",
        f"Of {len(rows())} rows, claimed on " + ", ".join(f"{target}: {count}" for target, count in done.items()) + ".",
        "",
    ]
    for title, group in sections():
        lines += [f"## {title}", "", "| row | feature | cpu | sim | cuda |", "| --- | --- | --- | --- | --- |"]
        for row in group:
            cells = " | ".join(cell(row, target, claims) for target in TARGETS)
            lines.append(f"| {row.id} | {row.title} | {cells} |")
        lines.append("")
    return "\n".join(lines)


PAGES = (Page("docs/features.md", render),)

if __name__ == "__main__":
    main(PAGES)
