"""`peertile bench`: what is promised of a figure, and what a child that measures is given. Nothing here is timed."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from peertile.cli import bench, bench_compute, bench_examples
from peertile.cli.main import app_of
from peertile.testing.measure import Figure


def calls(**seconds):
    return dict.fromkeys(["peertile", *seconds])


def test_a_limit_is_what_the_baseline_took_over_the_speed_that_is_wanted(monkeypatch):
    monkeypatch.setattr(
        bench_compute, "interleaved", lambda *_, **__: {"peertile": 0.002, "numpy": 0.0026, "torch": 0.0022}
    )
    fast, slow = bench_compute._against("add", calls(numpy=0, torch=0), 5, {"numpy": 1.2, "torch": 1.2})
    assert (fast.name, fast.median, fast.baseline, fast.baseline_median) == ("add.numpy", 2.0, "numpy", 2.6)
    assert (fast.limit, fast.holds) == (pytest.approx(2.6 / 1.2), True)
    assert (slow.limit, slow.holds) == (pytest.approx(2.2 / 1.2), False)
    assert (fast.as_dict()["met"], slow.as_dict()["met"]) == (True, False)


def test_a_baseline_without_a_promise_has_no_limit(monkeypatch):
    monkeypatch.setattr(bench_compute, "interleaved", lambda *_, **__: {"peertile": 0.002, "numpy": 0.001})
    (figure,) = bench_compute._against("chain", calls(numpy=0), 5, {"torch": 3.0})
    assert (figure.limit, figure.holds) == (None, None)
    assert "met" not in figure.as_dict()


def test_alone_there_is_one_figure_without_a_baseline(monkeypatch):
    monkeypatch.setattr(bench_compute, "interleaved", lambda *_, **__: {"peertile": 0.002})
    assert bench_compute._against("matmul", calls(), 5, {}) == [Figure("matmul", 2.0, "ms", 5)]


def test_every_library_gets_the_threads_and_its_own_best_kernels(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("OPENBLAS_L2_SIZE", "512")
    found = bench_compute.child_environment(2)
    assert not {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"} & set(found)
    names = ("PEERTILE_CPU_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    assert [found[name] for name in names] == ["2"] * 4


def test_a_child_prints_figures_that_the_parent_reads(monkeypatch):
    figure = {"name": "add.64MiB.1t.numpy", "median": 3.0, "unit": "ms", "repetitions": 5, "limit": 4.0}
    done = subprocess.CompletedProcess([], 0, "chatter\n" + json.dumps([figure]) + "\n")
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda command, **options: asked.append((command, options)) or done)
    assert bench_compute.measured_in_child("add", 1) == [Figure("add.64MiB.1t.numpy", 3.0, "ms", 5, limit=4.0)]
    ((command, options),) = asked
    assert command == [sys.executable, "-m", "peertile.cli.bench_compute", "add", "1"]
    assert options["env"]["PEERTILE_CPU_THREADS"] == "1"


EXAMPLE = """
import peertile as pt
import peertile.language as T

@pt.kernel
def double(z: T.Exclusive, x: T.Shared):
    z.store(x.load_like(z) * 2)

@pt.program
def main(group):
    x, z = pt.ones(64, pt.f32), pt.empty((64,), pt.f32)
    double(z.partition(64), x).sync()

if __name__ == "__main__":
    pt.run(main)
"""


@pytest.mark.slow
def test_the_kernel_that_takes_longest_is_named(tmp_path):
    (tmp_path / "doubling.py").write_text(EXAMPLE)
    one, longest = bench_examples.bench_examples(tmp_path)
    assert (one.name, one.repetitions) == ("compile.example.doubling.double", 2)
    assert (longest.name, longest.limit) == ("compile.longest_of_examples.doubling.double", 1500.0)
    assert longest.median == one.median > 0


def test_without_examples_there_are_no_figures(tmp_path):
    assert bench_examples.bench_examples(tmp_path) == []


def test_the_table_shows_names_whole(monkeypatch):
    figure = Figure("a_name.of_many.characters_that_is.wider_than_its_column [x]", 1.0, "us", 3)
    monkeypatch.setitem(bench.BENCHMARKS, "launch", lambda: [figure])
    out = CliRunner().invoke(app_of(["bench"]), ["bench", "launch"], env={"COLUMNS": "60"}).stdout
    rows = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert "".join(rows).replace(" ", "") == figure.name.replace(" ", "")
