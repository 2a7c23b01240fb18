"""`peertile info`: what it finds, and that each probe's failure is an answer and not a crash."""

import json
import os

import pytest
from typer.testing import CliRunner

import peertile as pt
from peertile.cli import info
from peertile.cli.main import app_of
from peertile.config import VARIABLES


def test_json_holds_everything(monkeypatch, tmp_path):
    monkeypatch.setenv("PEERTILE_CACHE_MAX_MB", "512")
    found = json.loads(CliRunner().invoke(app_of(["info"]), ["info", "--json"]).stdout)
    assert found.keys() == {"platform", "python", "packages", "cpu", "cache", "environment", "probes"}
    assert [variable["name"] for variable in found["environment"]] == [variable.name for variable in VARIABLES]
    now = {variable["name"]: variable["value"] for variable in found["environment"]}
    assert now["PEERTILE_CACHE_MAX_MB"] == "512"
    assert found["packages"]["numpy"] is not None
    assert found["cpu"]["cores"] == os.cpu_count()
    works = {probe["name"]: probe["works"] for probe in found["probes"]}
    assert works["cpu"]
    assert works["ranks as processes"]


def test_tables_name_what_works_and_why_not():
    out = CliRunner().invoke(app_of(["info"]), ["info"], env={"COLUMNS": "200"}).stdout
    assert "not part of this version" in out
    assert all(variable.name in out for variable in VARIABLES)


def test_tables_show_brackets(monkeypatch):
    found = info.collect()
    found["probes"] = [{"name": "a [/b]", "works": False, "why": "pip install 'peertile[cuda]'"}]
    monkeypatch.setattr(info, "collect", lambda: found)
    out = CliRunner().invoke(app_of(["info"]), ["info"], env={"COLUMNS": "200"}).stdout
    assert "│ a [/b] │ no    │ pip install 'peertile[cuda]' │" in out


@pytest.mark.cuda
@pytest.mark.feature("D6", "cuda")
def test_of_gpus_it_names_each_and_how_memory_gets_from_one_to_another():
    found = json.loads(CliRunner().invoke(app_of(["info"]), ["info", "--json"]).stdout)
    probes = {probe["name"]: probe for probe in found["probes"]}
    device = pt.current_device()
    assert probes["cuda"]["works"]
    assert probes["cuda"]["why"].count(f"({device.target}, ") >= 1
    assert "CUDA " in probes["cuda"]["why"]
    for path in ("fd", "ipc", "fabric"):
        kind = pt.ShareKind(path)
        assert probes[f"gpu memory by {path}"]["works"] == (kind in device.capabilities.shares), path


def by_name():
    return {probe.name: (probe.works, probe.why) for probe in info.probes()}


@pytest.mark.feature("D6", "cpu")
def test_without_llvmlite_cpu_does_not_work(monkeypatch):
    monkeypatch.setattr(info, "find_spec", lambda name: None)
    assert by_name()["cpu"] == (False, "ImportError: llvmlite is not installed")


def test_on_another_processor_cpu_does_not_work(monkeypatch):
    monkeypatch.setattr(info.platform, "machine", lambda: "sparc")
    assert by_name()["cpu"] == (False, "ImportError: no code for sparc; x86-64 and aarch64 are supported")


def test_without_shared_memory_ranks_are_threads(monkeypatch):
    def create(ranks, *, shared):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(info.Segment, "create", create)
    assert by_name()["ranks as processes"] == (False, "OSError: [Errno 28] No space left on device")
    assert by_name()["ranks as threads"][0]


def test_a_package_that_is_not_there_has_no_version():
    assert info._version("no-such-package-anywhere") is None


def test_cpu_without_a_table_of_the_kernel(tmp_path):
    assert info._cpu(tmp_path / "nothing")["features"] == []


def test_cpu_from_a_table_of_the_kernel(tmp_path):
    table = tmp_path / "cpuinfo"
    table.write_text("processor\t: 0\nmodel name\t: Example CPU\nflags\t\t: fpu avx2 fma\n\nmodel name\t: other\n")
    found = info._cpu(table)
    assert (found["name"], found["features"]) == ("Example CPU", ["avx2", "fma"])
