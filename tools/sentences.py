"""docs/reference/sentences.md: each numbered sentence of the concepts, and the tests that check it.

    python tools/sentences.py --write    # write the page
    python tools/sentences.py --check    # status 1 if it is stale

A sentence is a line of docs/concepts that begins with its id in bold, **MM-12**; a test claims it with
`@pytest.mark.sentence("MM-12")`. A sentence that only says what a word means has nothing to check; it is in DEFINES.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tools.marks import marks  # noqa: E402 - a script finds its own package only now
from tools.pages import Page, main  # noqa: E402

CONCEPTS = ROOT / "docs" / "concepts"
DEFINES = {"MM-1": "access", "MM-2": "agent", "MM-7": "proxy"}
"""Sentences that promise nothing, but define a word that others use."""
SENTENCE = re.compile(r"^(?:- )?\*\*([A-Z]{1,2}-?\d+)\*\* (.+)$", re.MULTILINE)


def sentences() -> dict[str, tuple[str, str]]:
    """Id of each sentence: its file and its text."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(CONCEPTS.glob("*.md")):
        for id, text in SENTENCE.findall(path.read_text()):
            if id in found:
                raise ValueError(f"{path.name}: sentence {id} is already in {found[id][0]}; ids are unique")
            found[id] = (path.name, text)
    return found


def wrong_claims() -> list[str]:
    """Marks that name no sentence."""
    known = sentences()
    return [f"{m}: no such sentence in docs/concepts" for m in marks("sentence") if not {*m.args} <= set(known)]


def open_sentences() -> list[str]:
    """Sentences that no test checks, though they promise something."""
    claimed = {id for mark in marks("sentence") for id in mark.args}
    return [id for id in sentences() if id not in claimed and id not in DEFINES]


def render() -> str:
    """The page."""
    known = sentences()
    tests: dict[str, list[str]] = {id: [] for id in known}
    for mark in marks("sentence"):
        for id in mark.args:
            tests.setdefault(id, []).append(f"[`{mark.test}`](../../{mark.file})")
    defining = sum(id in DEFINES for id in known)
    left = open_sentences()
    lines = [
        "# Sentences and their tests",
        "",
        f"The concepts pages number what they promise. Of {len(known)} sentences {defining} define a word; "
        + (f"{len(left)} of the others have no test yet." if left else "each of the others has a test."),
        "",
        "| sentence | page | tests |",
        "| --- | --- | --- |",
    ]
    for id, (file, _) in known.items():
        shown = ", ".join(tests[id]) or (f"defines a word: {DEFINES[id]}" if id in DEFINES else "none yet")
        lines.append(f"| {id} | [{file.removesuffix('.md')}](../concepts/{file}) | {shown} |")
    return "\n".join(lines)


PAGES = (Page("docs/reference/sentences.md", render),)

if __name__ == "__main__":
    main(PAGES)
