"""`peertile cache`: list, clear, path."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peertile import config as settings
from peertile.cli import cache as command
from peertile.cli.main import app_of
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
    return CliRunner().invoke(app_of(["cache"]), ["cache", *arguments], **options)


def test_list(folder):
    found = json.loads(run("list", "--json").stdout)
    assert (found["folder"], found["total_bytes"]) == (str(folder), 15)
    assert [(file["name"], file["size_bytes"]) for file in found["files"]] == [("ab/one", 10), ("two", 5)]
    assert "2 files, 0.0 MiB" in run("list", env={"COLUMNS": "200"}).stdout


def test_list_shows_what_was_used_last_unless_asked_for_all(folder, monkeypatch):
    os.utime(folder / "two", (1, 1))
    monkeypatch.setattr(command, "SHOWN", 1)
    lines = [line.strip() for line in run("list", env={"COLUMNS": "200"}).stdout.splitlines()]
    assert any("ab/one" in line for line in lines)
    assert lines[-1] == "1 others; --all lists them"
    assert not any("two" in line for line in lines)
    assert "two" in run("list", "--all", env={"COLUMNS": "200"}).stdout
    assert len(json.loads(run("list", "--json").stdout)["files"]) == 2


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


PROGRAM = """
import numpy as np, peertile as pt
from peertile.cli.bench_kernels import vector_add
device = pt.current_device()
assert (device.name, device.target, device.persistent_programs) == ("cuda:0", "sm_90", 10)
x = pt.asarray(np.arange(1000, dtype=np.float32))
z = pt.empty((1000,), pt.f32)
vector_add(z.partition(256), x, x).sync()
assert np.array_equal(z.numpy(), 2 * x.numpy())
"""


@pytest.mark.slow
@pytest.mark.needs("triton")
@pytest.mark.feature("H17", "cuda")
def test_fill_compiles_for_a_gpu_what_a_program_needs_and_another_cache_serves_it(tmp_path, monkeypatch, capfd):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    use(monkeypatch, tmp_path / "here")
    monkeypatch.setenv("PEERTILE_CACHE_DIR", str(tmp_path / "here"))
    options = ("fill", "--arch", "sm_90", "--multiprocessors", "10")
    done = run(*options, "--into", str(tmp_path / "there"), "--json", str(program))
    assert done.exit_code == 0, capfd.readouterr().err
    said = json.loads(done.stdout)
    (made,) = (tmp_path / "there" / "cubins").iterdir()
    size = made.stat().st_size
    assert said == {"folder": str(tmp_path / "there"), "arch": "sm_90", "kernels": 1, "bytes": size, "status": 0}
    # Once more: what the program needs is said and copied, though nothing had to be compiled.
    done = run(*options, "--into", str(tmp_path / "again"), str(program))
    assert done.stdout == f"1 kernels for sm_90, {size / 2**20:.1f} MiB, in {tmp_path / 'again'}\n"
    assert [path.name for path in (tmp_path / "again" / "cubins").iterdir()] == [made.name]
    # Another process, with that folder alone, and from another place: nothing is compiled, and triton is not loaded.
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text(PROGRAM + "import sys; assert 'triton' not in sys.modules")
    use(monkeypatch, tmp_path / "there")
    monkeypatch.setenv("PEERTILE_CACHE_DIR", str(tmp_path / "there"))
    done = run(*options, str(elsewhere))
    assert done.exit_code == 0, capfd.readouterr().err
    assert done.stdout == f"1 kernels for sm_90, {size / 2**20:.1f} MiB, in {tmp_path / 'there'}\n"
    assert [path.name for path in (tmp_path / "there" / "cubins").iterdir()] == [made.name]


def test_fill_needs_a_program_that_starts_and_passes_on_how_it_ends(folder, monkeypatch):
    assert str(run("fill", "--arch", "sm_90").exception) == (
        "peertile cache fill: expected a program, as a .py file or a command, got none"
    )
    assert str(run("fill", "--arch", "sm_90", "no-such-program").exception) == (
        "peertile cache fill: 'no-such-program' cannot be started: No such file or directory"
    )
    assert str(run("fill", "--arch", "volta", "true").exception) == (
        "PEERTILE_REHEARSE: expected an architecture as sm_90, or with the number of multiprocessors as sm_90:132, "
        "got 'volta'"
    )
    assert str(run("fill", "--arch", "90", "true").exception) == (
        "PEERTILE_REHEARSE: expected an architecture as sm_90, or with the number of multiprocessors as sm_90:132, "
        "got '90'"
    )
    done = run("fill", "--arch", "sm_90", "sh", "-c", "exit 3")
    assert done.exit_code == 3
    assert done.stdout == f"0 kernels for sm_90, 0.0 MiB, in {folder}\n"
    assert done.stderr == "the program ended with status 3: kernels that it did not reach are missing\n"
