"""Imports only point down, never in a circle, never late; heavy packages stay where they belong."""

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from tools import floors

ROOT = Path(__file__).resolve().parents[2]

# Neither is free: together they cost more than all of peertile may.
NEVER_ON_IMPORT = {"asyncio", "llvmlite", "ml_dtypes", "multiprocessing", "rich", "sklearn", "torch", "triton", "typer"}


@pytest.fixture(scope="module")
def found_imports() -> list[floors.Import]:
    """Read when the first test asks, not when every worker collects."""
    return floors.imports()


@pytest.fixture
def own(found_imports: list[floors.Import]) -> list[floors.Import]:
    return [found for found in found_imports if found.own]


@pytest.fixture
def foreign(found_imports: list[floors.Import]) -> list[floors.Import]:
    return [found for found in found_imports if not found.own]


def test_every_module_belongs_to_a_floor() -> None:
    assert [module for module in floors.modules() if floors.folder_of(module) is None] == []


@pytest.mark.slow
def test_discovery_finds_the_package(own) -> None:
    assert {"", "errors", "ir.core", "ir.ops"} <= set(floors.modules())
    assert len(own) > 10


def test_imports_point_to_lower_floors_or_to_the_own_folder(own) -> None:
    wrong = []
    for found in own:
        source, target = floors.folder_of(found.module), floors.folder_of(found.target)
        if source is None or target is None or (source != target and target.step >= source.step):
            wrong.append(str(found))
    assert wrong == []


def test_backends_do_not_import_each_other(own) -> None:
    def target(module: str) -> str:
        parts = module.split(".")
        return parts[1] if len(parts) > 2 and parts[0] == "backends" else ""

    pairs = [(found, target(found.module), target(found.target)) for found in own]
    assert [str(found) for found, one, other in pairs if one and other and one != other] == []


def test_imports_make_no_circle(own) -> None:
    graph: dict[str, set[str]] = {module: set() for module in floors.modules()}
    for found in own:
        if not found.typing_only and found.target != found.module:
            graph[found.module].add(found.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_own_module_is_imported_late(own) -> None:
    assert [str(found) for found in own if found.deferred] == []


@pytest.mark.slow
def test_heavy_packages_are_imported_by_their_owners_alone(foreign) -> None:
    wrong = []
    for found in foreign:
        owners, in_functions = floors.HEAVY.get(found.target.split(".")[0], (None, False))
        if owners is None or found.typing_only:
            continue
        allowed = any(f"{found.module}.".startswith(owner) if owner.endswith(".") else found.module == owner
                      for owner in owners)  # fmt: skip
        if not allowed or (in_functions and not found.deferred):
            wrong.append(str(found))
    assert wrong == []


def test_import_peertile_brings_nothing_heavy() -> None:
    code = "import sys, peertile, peertile.language; print(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert sorted(NEVER_ON_IMPORT & set(done.stdout.split())) == []


def test_the_command_loads_what_was_asked_for_and_no_more() -> None:
    heavy = ("peertile.checker", "peertile.sim", "peertile.compiler", "peertile.backends.cuda", "peertile.cli.bench")
    code = (
        "import sys; from peertile.cli.main import app_of; app_of(['run'])\n"
        f"print([name for name in sys.modules if name.startswith({heavy})])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_architecture_shows_the_floors_as_they_are() -> None:
    assert f"```text\n{floors.table()}\n```" in (ROOT / "ARCHITECTURE.md").read_text()


def test_what_tests_share_has_a_name_of_its_own() -> None:
    """Folders of tests are put on the path together: of two modules of one name the second would never be found."""
    shared: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        on_path = (
            "sys.path.insert" in (path.parent / "conftest.py").read_text()
            if (path.parent / "conftest.py").exists()
            else False
        )
        if on_path and not path.name.startswith(("test_", "conftest", "__init__")):
            shared.setdefault(path.stem, []).append(str(path.relative_to(ROOT)))
    assert [paths for paths in shared.values() if len(paths) > 1] == []
