"""What programs show a person: progress bars and tables, on one rank. rich is imported at first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from peertile.comm.group import Group
from peertile.errors import ArgumentError
from peertile.runtime.checks import check_integer, check_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["plain", "progress", "report"]


@contextmanager
def progress(group: Group, label: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A progress bar of `total` steps, shown by rank 0; call what it gives with (steps done, note).

    Without a terminal it prints a line at every tenth of the way.

    >>> import peertile as pt
    >>> with pt.progress(pt.init(), "training", 2) as bar:
    ...     bar(1, "loss 0.5")
    training: 1 of 2, loss 0.5
    """
    if not isinstance(group, Group):
        raise ArgumentError(f"progress(group): expected a group, as pt.init() gives, got {group!r}")
    check_text("progress(label)", label)
    check_integer("progress(total)", total)
    if group.rank != 0:
        yield lambda done, note: None
        return
    if not sys.stdout.isatty():
        step = max(total // 10, 1)

        def line(done: int, note: str) -> None:
            if done % step == 0 or done == total:
                print(f"{label}: {done} of {total}, {note}", flush=True)

        yield line
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.description}", markup=False), BarColumn(),
        TextColumn("{task.completed}/{task.total} {task.fields[note]}", markup=False), TimeElapsedColumn(),
    ) as bar:  # fmt: skip
        task = bar.add_task(label, total=total, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)


def report(title: str, rows: Mapping[str, str]) -> None:
    """A two-column table on standard output.

    >>> import peertile as pt
    >>> pt.report("result", {"accuracy": "0.97"})  # doctest: +SKIP
    """
    check_text("report(title)", title)
    wrong = not isinstance(rows, Mapping) or not all(isinstance(text, str) for row in rows.items() for text in row)
    if wrong:
        raise ArgumentError(f"report(rows): expected a mapping of strings to strings, got {rows!r}")
    from rich.table import Table

    table = Table(title=title, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    plain().print(table)


def plain(*, stderr: bool = False) -> Console:
    """A console that shows texts as they are, [brackets] too."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False)
