"""Everything that one GPU can show, in one command: `PYTHONPATH=src:. python3 benchmarks/device/all.py --out FOLDER`.

Runs one behind the other, each with a bound and a log of its own in the folder:

- `suite`: every test that one GPU can run (`pytest --device cuda --gpus 1`); tests that need more are deselected. With
  `--gpus 2` each test has two, and every one of the `--workers`, which should be fewer then, a context on both. What no
  recorded run has passed goes first. Leaves `suite.outcomes`, for tools/runs.py;
- `programs`: random programs against their meaning (check_cuda_programs.py);
- `memcheck`: each example of one rank under compute-sanitizer, which has to find nothing;
- `blocking`: which calls on the host wait for a running kernel (check_cuda_blocking.py);
- `ranks`: examples of two ranks whose processes share the GPU.

Names of parts on the command line choose some. `--cubins` names an archive or a folder of kernels compiled elsewhere
(`peertile cache fill`, or a rehearsal: `pytest --device cuda --rehearse sm_90 --kernel-cache DIR`), and what had to be
compiled beside is kept in `new-cubins.tar.xz`. `--rehearse sm_90` fills such a folder with all that this
command needs, on a machine without a GPU. `facts.json` says what a record has to say of the machine. A test that
hangs costs its worker and no more; a part that does not end is ended with all that it has started. Prints a line for
each part and what failed; status 1 if anything did, or was cut off.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = (
    "digits_data_parallel", "multicast_handshake", "handshake", "decode_loop", "serve_digits", "pipelines", "two_shot",
    "allreduce", "graph_loop", "matmul", "vector_add",
)  # fmt: skip
"""Those of which the least was known come first; `embed` needs published weights."""
TOGETHER = ("allreduce", "two_shot", "handshake", "multicast_handshake")
TEST_S = 75
GONE_S = 90
"""A test that Python can still interrupt ends after TEST_S; one that it cannot takes its worker down after GONE_S."""


class Run:
    """The folder, the end of the time, and the environment of what is started."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.end = time.monotonic() + options.seconds
        self.cache = Path(options.cache or self.out / "cache").resolve()
        self.here: dict[str, str] = {**os.environ, "PEERTILE_CACHE_DIR": str(self.cache), "PYTHONUNBUFFERED": "1"}
        # Kernels that were compiled elsewhere are found by what compiled them: an assembler named here is another one.
        for name in ("TRITON_PTXAS_PATH", "PEERTILE_REHEARSE"):
            self.here.pop(name, None)
        if options.rehearse:
            self.here["PEERTILE_REHEARSE"] = options.rehearse
        self.here["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])

    @property
    def left(self) -> float:
        return max(self.end - time.monotonic(), 1.0)

    def do(self, log: str, command: list[str], bound_s: float, **extra: str) -> tuple[int | None, str]:
        """Status of a command, None if it did not end in time, and what it printed; it goes with all it has started."""
        path = self.out / log
        begin = path.stat().st_size if path.exists() else 0
        with path.open("ab") as file:
            child = subprocess.Popen(
                command, cwd=ROOT, env=self.here | extra, stdout=file, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            status: int | None = None
            try:
                status = child.wait(min(bound_s, self.left))
            except subprocess.TimeoutExpired:
                end(child)
        return status, path.read_bytes()[begin:].decode(errors="replace")


def end(child: subprocess.Popen[bytes]) -> None:
    """Ctrl-C first, so that pytest says what it has; then the whole session of processes."""
    for number, grace in ((signal.SIGINT, 8), (signal.SIGKILL, 8)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
            return


def about_gpus() -> list[str]:
    """The files of tests with marks that let one run on a GPU: the others would only be read, by every worker."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if re.search(r"any_device|mark\.cuda", f.read_text())]


def suite(run: Run) -> str | None:
    options = run.options
    rehearse = ["--rehearse", options.rehearse] if options.rehearse else []
    seen = [f"--seen={path.resolve()}" for path in options.seen]
    status, text = run.do(
        "suite.log",
        [
            sys.executable, "-m", "pytest", "--device", "cuda", "--gpus", str(options.gpus), "-n", str(options.workers),
            "--dist", "worksteal", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-p", "no:benchmark",
            "--unseen-first", *seen,
            "--timeout", str(TEST_S), "-o", f"faulthandler_timeout={GONE_S}", "-o", "faulthandler_exit_on_timeout=true",
            "--seed", str(options.seed), "--kernel-cache", str(run.cache),
            "--outcomes", str(run.out / "suite.outcomes"), "--durations", "25", *rehearse, *options.tests,
        ],
        run.left - 12,
    )  # fmt: skip
    said = re.findall(r"^=* ?(\d+ (?:passed|failed).* in [0-9.]+s.*)$", text, re.MULTILINE)
    print(f"suite: status {status}: {said[-1] if said else 'no summary'}")
    for line in re.findall(r"^(?:FAILED|ERROR) .*$", text, re.MULTILINE):
        print("  " + line[:240])
    return None if status == 0 else "suite"


def programs(run: Run) -> str | None:
    options = run.options
    status, text = run.do(
        "programs.log",
        [
            sys.executable, "benchmarks/device/check_cuda_programs.py", "--count", str(options.programs),
            "--size", "20", "--workers", str(options.program_workers), "--seconds", f"{run.left - 5:.0f}",
        ],
        run.left,
    )  # fmt: skip
    told = re.findall(r"^(?:programs of one rank.*|seed \d+: .*|  \w.* \d+(?: s with.*)?)$", text, re.MULTILINE)
    print("\n".join([f"programs: status {status}", *("  " + line[:240] for line in told)]))
    return None if status == 0 else "programs"


def memcheck(run: Run) -> str | None:
    """First without the sanitizer, under which a compiler takes minutes: then every kernel is in the cache."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    wrong = []

    def check(name: str) -> None:
        program = [sys.executable, "-m", "peertile", "run", f"examples/{name}.py", "--ranks", "1", "--device", "cuda"]
        begin = time.monotonic()
        before, _ = run.do(f"memcheck-{name}.log", program, 60)
        if run.options.rehearse:
            print(f"memcheck: {name}: status {before} alone")
            return
        status, text = run.do(
            f"memcheck-{name}.log",
            [
                sanitizer, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9",
                "--target-processes", "all", *program,
            ],
            200,
        )  # fmt: skip
        found = re.findall(r"ERROR SUMMARY: .*", text)
        print(
            f"memcheck: {name}: status {before} alone, {status} checked, {time.monotonic() - begin:.0f} s, "
            f"{found[-1] if found else 'no summary'}"
        )
        if (before, status) != (0, 0) or not found or found[-1] != "ERROR SUMMARY: 0 errors":
            wrong.append(name)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, run.options.examples))
    return f"memcheck ({', '.join(wrong)})" if wrong else None


def blocking(run: Run) -> str | None:
    status, text = run.do("blocking.log", [sys.executable, "benchmarks/device/check_cuda_blocking.py"], 100)
    waits = re.findall(r"^(.*?) {2,}.* ms {2}waits for the kernel$", text, re.MULTILINE)
    print(f"blocking: status {status}, {len(waits)} calls wait for a running kernel: {', '.join(waits)}")
    return None if status == 0 else "blocking"


def ranks(run: Run) -> str | None:
    wrong = []
    for name in TOGETHER:
        command = [sys.executable, "-m", "peertile", "run", f"examples/{name}.py", "--ranks", "2", "--device", "cuda"]
        begin = time.monotonic()
        status, text = run.do(f"ranks-{name}.log", command, 60)
        print(f"ranks: {name}: status {status}, {time.monotonic() - begin:.0f} s: {(text.strip() or '-')[-160:]!r}")
        if status != 0:
            wrong.append(name)
    return f"ranks ({', '.join(wrong)})" if wrong else None


PARTS: dict[str, Callable[[Run], str | None]] = {
    "suite": suite, "programs": programs, "memcheck": memcheck, "blocking": blocking, "ranks": ranks,
}  # fmt: skip


def watch(out: Path, over: threading.Event) -> None:
    """What the machine has left, every few seconds: when a run was slow or failed, this says why."""
    ask = ["nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader"]
    begin = time.monotonic()
    with (out / "state.log").open("w") as file:
        while not over.wait(10):
            memory = re.findall(
                r"^(?:MemTotal|MemAvailable|Shmem):.*$", Path("/proc/meminfo").read_text(), re.MULTILINE
            )
            gpu = (
                subprocess.run(ask, capture_output=True, text=True, check=False).stdout if shutil.which(ask[0]) else ""
            )
            load = Path("/proc/loadavg").read_text()
            file.write(" | ".join([f"{time.monotonic() - begin:.0f} s", gpu.strip(), *memory, load.strip()]) + "\n")
            file.flush()


def unpack(what: Path, cache: Path) -> set[str]:
    """Kernels compiled elsewhere, into the cache; the names of all that are there then."""
    kernels = cache / "cubins"
    kernels.mkdir(parents=True, exist_ok=True)
    if what.is_dir():
        shutil.copytree(what, kernels, dirs_exist_ok=True)
    elif what.exists():
        subprocess.run(["tar", "-xf", str(what), "-C", str(cache)], check=True)
    return {file.name for file in kernels.glob("*.kernel")}


def pack(kernels: Path, known: set[str], path: Path) -> int:
    """An archive of the kernels beside the `known` ones; how many they are."""
    new = [file for file in kernels.glob("*.kernel") if file.name not in known]
    with tarfile.open(path, "w:xz", preset=1) as archive:
        for file in new:
            archive.add(file, f"cubins/{file.name}")
    return len(new)


def facts(begin: datetime.datetime) -> dict[str, object]:
    """What a record says of the run, but for its figures."""
    versions = {"python": platform.python_version()}
    for name in ("peertile", "numpy", "triton", "cuda-bindings", "cuda-core", "torch", "cupy-cuda13x", "pytest"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    asked = subprocess.run(ask, capture_output=True, text=True, check=False).stdout if shutil.which(ask[0]) else ""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "date": begin.isoformat(timespec="seconds"),
        "command": "python3 benchmarks/device/all.py " + " ".join(sys.argv[1:]),
        "machine": {
            "cpu": model[1] if model else platform.machine(), "cores": os.cpu_count(),
            "gpus": asked.splitlines(), "os": platform.system(), "kernel": platform.release(),
        },
        "versions": versions,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=900.0, help="bound of the whole")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8), help="of the suite")
    parser.add_argument("--gpus", type=int, default=1, help="of each test of the suite")
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--program-workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=20261130, help="of the suite; kernels follow from it in part")
    parser.add_argument("--cache", default="", help="folder of the kernels; a fresh one by default")
    parser.add_argument("--cubins", type=Path, help="kernels that were compiled elsewhere")
    parser.add_argument("--examples", nargs="*", default=EXAMPLES, help="of memcheck")
    parser.add_argument("--rehearse", metavar="ARCH", help="without a GPU: compile for ARCH, run on cpu")
    parser.add_argument("--seen", nargs="*", type=Path, default=(), help="outcomes of runs whose passes go last")
    parser.add_argument("--tests", nargs="*", default=about_gpus(), help="of the suite; all by default")
    options = parser.parse_args()
    if options.rehearse and not options.parts:
        options.parts = ["suite", "programs", "memcheck"]
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"expected parts of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options)
    known: set[str] = set()
    (options.out / "facts.json").write_text(json.dumps(facts(datetime.datetime.now(datetime.UTC)), indent=1) + "\n")
    if options.cubins is not None:
        known = unpack(options.cubins, run.cache)
        print(f"{len(known)} kernels were compiled elsewhere", flush=True)
    wrong: list[str] = []

    def part(name: str) -> None:
        begin = time.monotonic()
        failed = PARTS[name](run)
        print(f"{name} took {time.monotonic() - begin:.0f} s", flush=True)
        if failed is not None:
            wrong.append(failed)

    over = threading.Event()
    watching = threading.Thread(target=watch, args=(options.out, over))
    watching.start()
    # Not at the same time: where some 20 processes made their contexts at once, the driver took 40 s for each and then
    # said that it had no memory, with 2 of 140 GB in use.
    for name in options.parts or PARTS:
        part(name)
    over.set()
    watching.join()
    print(f"{pack(run.cache / 'cubins', known, options.out / 'new-cubins.tar.xz')} kernels were compiled here")
    print(f"failed or cut off: {', '.join(wrong)}" if wrong else "all parts are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
