"""The `peertile` command: one file per subcommand, joined here. No work of its own."""

from __future__ import annotations

import sys

import typer

from peertile.cli.bench import bench
from peertile.cli.cache import cache
from peertile.cli.check import check
from peertile.cli.info import info
from peertile.cli.inspect import inspect
from peertile.cli.run import run
from peertile.errors import PeertileError

__all__ = ["app", "main"]

USAGE_STATUS = 2  # what typer uses for wrong arguments

app = typer.Typer(
    name="peertile",
    help="Tile programs that compute and communicate across devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (run, check, info, inspect, bench):
    app.command()(command)
app.add_typer(cache, name="cache")


def main() -> None:
    """Entry point. An error of ours is one message on standard error, not a traceback."""
    try:
        app()
    except PeertileError as error:
        print(f"peertile: {error}", file=sys.stderr)
        sys.exit(USAGE_STATUS)
