"""Tests of the cuda backend that compile need triton, which is an optional extra: without it they are deselected,
with one line that says so. No test here needs a GPU."""

import importlib.util

import pytest

NEEDS = "triton_needed"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("triton") is not None:
        return
    out = [item for item in items if NEEDS in getattr(item, "fixturenames", ())]
    if not out:
        return
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"{len(out)} tests of the cuda backend need triton: pip install 'peertile[cuda]'")


@pytest.fixture(scope="session")
def triton_needed() -> None:
    """A test with this fixture compiles; it is deselected where triton is not installed, and fails if it is named."""
    assert importlib.util.find_spec("triton") is not None, "triton is not installed: pip install 'peertile[cuda]'"
