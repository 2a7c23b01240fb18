"""`peertile cache`: list, clear, path."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peertile import config as settings
from peertile.cli import cache as command
from peertile.cli.main import app
from peertile.errors import ArgumentError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "one").write_bytes(b"x" * 10)
    (folder / "two").write_bytes(b"y" * 5)
    use(monkeypatch, folder)
    return folder


def use(monkeypatch, folder):
    found = settings.read_config({"PEERTILE_CACHE_DIR": str(folder)})
    monkeypatch.setattr(command, "config", lambda: found)


def run(*arguments, **options):
    return CliRunner().invoke(app, ["cache", *arguments], **options)


def test_list(folder):
    found = json.loads(run("list", "--json").stdout)
    assert (found["folder"], found["total_bytes"]) == (str(folder), 15)
    assert [(file["name"], file["size_bytes"]) for file in found["files"]] == [("ab/one", 10), ("two", 5)]
    assert "2 files, 0.0 MiB" in run("list", env={"COLUMNS": "200"}).stdout


def test_clear_asks_first(folder):
    assert run("clear", input="n\n").exit_code == 1
    assert len(command.entries(folder)) == 2
    assert run("clear", input="y\n").stdout.endswith("deleted 2 files, 0.0 MiB\n")
    assert command.entries(folder) == []


def test_clear_as_json_does_not_ask(folder):
    assert json.loads(run("clear", "--json").stdout) == {"folder": str(folder), "deleted": 2, "deleted_bytes": 15}
    assert run("clear", "--yes").stdout == "deleted 0 files, 0.0 MiB\n"


@pytest.mark.parametrize("place", [Path.home(), Path.cwd(), Path("/")])
def test_clear_refuses_a_folder_that_holds_more_than_the_cache(place, monkeypatch):
    use(monkeypatch, place)
    error = run("clear", "--yes").exception
    assert type(error) is ArgumentError
    assert str(error) == (
        f"PEERTILE_CACHE_DIR: expected a folder for the cache alone, got {str(place)!r}, which holds the home folder "
        "or the current one; delete by hand what should go"
    )


def test_path(folder):
    assert run("path").stdout == f"{folder}\n"
    assert json.loads(run("path", "--json").stdout) == {"folder": str(folder)}


def test_a_cache_that_does_not_exist_is_empty(tmp_path, monkeypatch):
    use(monkeypatch, tmp_path / "never")
    assert json.loads(run("list", "--json").stdout)["files"] == []
