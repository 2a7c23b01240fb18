"""Code blocks of the documentation: what their fence says is done with them. Runs nothing.

| fence | what the tests do |
| --- | --- |
| ```python | joins the file's other plain blocks into one program, which is run |
| ```python ranks=2 | is a program of its own, run by `peertile run --ranks 2` |
| ```python notest: why | only parsed; the reason is required |
| ```text output | must be what the python block before it printed |
| ```console | one command, `$ peertile …`, and what it prints |
| ```bash, ```text | shown, not run |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = {"", "bash", "console", "json", "llvm", "mermaid", "text", "toml"}


@dataclass
class Block:
    """One fenced block. `output` is what it must print, None where the page does not say."""

    info: str
    code: str
    line: int
    output: str | None = None


@dataclass
class Program:
    """Code to run: the plain blocks of a file, or one block with a number of ranks."""

    name: str
    code: str
    ranks: int | None
    output: str | None


def blocks(path: Path) -> list[Block]:
    """Every fenced block of a page."""
    text = path.read_text()
    return [Block(m["info"].strip(), m["code"], text.count("\n", 0, m.start()) + 1) for m in FENCE.finditer(text)]


def programs(path: Path) -> list[Program]:
    """What there is to run on a page; ValueError for a fence that says nothing we know."""
    joined: list[Block] = []
    found = []
    last: Block | None = None
    for block in blocks(path):
        where = f"{path.name}:{block.line}"
        kind, _, rest = block.info.partition(" ")
        if kind == "python":
            last = block
            if match := re.fullmatch(r"ranks=(\d)", rest):
                found.append((int(match[1]), [block]))
            elif not rest:
                joined.append(block)
            elif not re.fullmatch(r"notest: \S.*", rest):
                raise ValueError(f"{where}: expected python, python ranks=N or python notest: why, got {block.info}")
        elif block.info == "text output":
            if last is None or last.output is not None:
                raise ValueError(f"{where}: expected a python block before its output")
            last.output = block.code
        elif kind not in SHOWN or rest:
            raise ValueError(f"{where}: expected one of {', '.join(sorted(SHOWN))}, got {block.info}")
    parts = ([(None, joined)] if joined else []) + found
    return [
        Program(
            f"{path.stem.lower().replace('-', '_')}_example{k or ''}.py",
            "\n".join(block.code for block in group),
            ranks,
            "".join(b.output or "" for b in group) if any(b.output is not None for b in group) else None,
        )
        for k, (ranks, group) in enumerate(parts)
    ]
