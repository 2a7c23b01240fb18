"""Generated pages: where each lies, what makes it, and the command line that the generators share."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Page:
    """A page of the documentation whose text is made by `render`."""

    path: str
    render: Callable[[], str]

    @property
    def text(self) -> str:
        """The page as it should be, with the line that says who made it."""
        head, _, body = self.render().partition("\n")
        script = f"tools/{Path(inspect.getfile(self.render)).name}"
        return f"{head}\n\n<!-- made by {script}: do not edit -->\n{body.rstrip()}\n"

    @property
    def stale(self) -> bool:
        """Whether the file differs from what it should be."""
        file = ROOT / self.path
        return not file.exists() or file.read_text() != self.text

    def write(self) -> None:
        file = ROOT / self.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.text)


def main(pages: Sequence[Page]) -> None:
    """`--write` or `--check` for `pages`."""
    parser = argparse.ArgumentParser()
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", action="store_true", help="write the pages")
    group.add_argument("--check", action="store_true", help="status 1 if a page is stale")
    options = parser.parse_args()
    stale = [page for page in pages if page.stale]
    for page in stale:
        if options.write:
            page.write()
        print(f"{'written' if options.write else 'stale'}: {page.path}")
    sys.exit(1 if options.check and stale else 0)
