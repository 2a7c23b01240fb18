"""The `peertile` command: one file per subcommand, joined here. No work of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Annotated, Final

import typer

from peertile.errors import PeertileError

__all__ = ["COMMANDS", "app_of", "main"]

USAGE_STATUS = 2  # what typer uses for wrong arguments

COMMANDS: Final = ("run", "check", "timeline", "info", "inspect", "bench", "cache")
"""Each is what has its name in the module of that name."""


def app_of(names: Iterable[str]) -> typer.Typer:
    """The command with these subcommands."""
    app = typer.Typer(
        name="peertile",
        help="Tile programs that compute and communicate across devices.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name in names:
        command = getattr(importlib.import_module(f"peertile.cli.{name}"), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command()(command)
    app.callback()(_common)  # so that one subcommand alone is called by its name, too
    return app


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"peertile {sys.modules['peertile'].__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point. An error of ours is one message on standard error, not a traceback."""
    # What is not asked for is not loaded: `run` needs neither the checker nor a compiler, and its ranks wait for it.
    asked = [name for name in sys.argv[1:2] if name in COMMANDS]
    try:
        app_of(asked or COMMANDS)()
    except PeertileError as error:
        print(f"peertile: {error}", file=sys.stderr)
        sys.exit(USAGE_STATUS)
