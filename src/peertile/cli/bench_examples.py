"""How long the kernels of the examples take to compile, each in a fresh process without the disk cache. No limit is
asserted; the worst kernel is named. Examples are part of the source tree: an installed package has none to measure."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from peertile import compiler
from peertile.comm.supervisor import Output, launch
from peertile.errors import UsageError
from peertile.testing.measure import Figure

__all__ = ["bench_examples"]

EXAMPLES: Final = Path(__file__).parents[3] / "examples"
LIMIT_MS: Final = 1500.0
_RANKS: Final = 2  # what talks to a peer compiles to something else alone
_LACKS: Final = 2  # the status of an example whose data are not installed, which it says


def bench_examples(folder: Path = EXAMPLES) -> list[Figure]:
    """For each example the milliseconds of its kernel that takes longest, on the rank where it took longer; then the
    longest of all, which has the limit."""
    figures = []
    for path in sorted(folder.glob("*.py")):
        kernels = compiled_by(path)
        if kernels:
            name, ms = max(kernels, key=lambda kernel: kernel[1])
            figures.append(Figure(f"compile.example.{path.stem}.{name}", ms, "ms", len(kernels)))
    if not figures:
        return []
    worst = max(figures, key=lambda figure: figure.median)
    longest = worst.name.replace("compile.example.", "compile.longest_of_examples.")
    return [*figures, Figure(longest, worst.median, "ms", 1, limit=LIMIT_MS)]


def compiled_by(path: Path) -> list[tuple[str, float]]:
    """Each kernel that an example compiles on each of its ranks, with the milliseconds it took."""
    with tempfile.TemporaryDirectory(prefix="peertile-bench-") as folder:
        command = [sys.executable, "-m", "peertile.cli.bench_examples", str(path), folder]
        env = {**os.environ, "PEERTILE_CACHE_MAX_MB": "0"}
        report = launch(command, _RANKS, env=env, output=Output(stdout_to_stderr=True), timeout_s=120.0)
        if report.status == _LACKS:
            return []
        if report.status != 0:
            raise UsageError(f"bench compile: expected {path.name} to end with status 0, got {report.status}")
        found = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
    return [(name, ms) for rank in found for name, ms in rank]


def _main(path: str, folder: str) -> None:
    """One rank: run the example, with a clock around the compiler."""
    found: list[tuple[str, float]] = []
    compile_function = compiler.compile_function

    def timed(fn: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        compiled = compile_function(fn, name, *args, **kwargs)
        found.append((name, (time.perf_counter() - start) * 1e3))
        return compiled

    compiler.compile_function = timed  # where `direct` looks it up at each compilation
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
