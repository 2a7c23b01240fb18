"""What a process started by `spawn` runs: one function as one rank. Read launcher.py first."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from peertile.comm.launcher import init, lifeline, loading, report_failure
from peertile.comm.lifeline import FunctionTask, Lifeline, Raised, Returned
from peertile.errors import ArgumentError, InternalError, UsageError

__all__ = ["main"]

MAIN = "__peertile_main__"  # the parent's __main__, under a name that does not start it again


def main() -> None:
    """Receives the task, joins the group, runs the function, and sends back what came of it."""
    line = lifeline()
    if line is None:
        raise UsageError("peertile.comm.child: expected to be started by pt.spawn, got no lifeline")
    messages = line.receive()
    if messages is None:
        raise SystemExit(1)  # the parent is gone
    task = messages[0]
    if not isinstance(task, FunctionTask):
        raise InternalError(f"spawn: expected a task, got {type(task).__name__}")
    try:
        with loading():
            function, args = _load(task)
        value = function(init(), *args)
        line.send(Returned(_pickled_result(task.name, value)))
    except BaseException as error:
        report_failure(error)
        _send_error(line, error)
        raise


def _load(task: FunctionTask) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    sys.path[:], sys.argv[:] = task.path, task.argv  # modules may read both while they are imported
    found: Any = _module(task)
    for part in task.name.split("."):
        found = getattr(found, part)
    return found, pickle.loads(task.arguments)


def _module(task: FunctionTask) -> ModuleType:
    """The module by its name if that leads to the same file, else by its file."""
    name = MAIN if task.module == "__main__" else task.module
    if name != MAIN:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            if task.file is None or (spec is not None and spec.origin == task.file):
                return importlib.import_module(name)
    if task.file is None:
        raise ArgumentError(f"spawn({task.name}): expected a module in a file, got {task.module}")
    spec = importlib.util.spec_from_file_location(name, task.file)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"spawn({task.name}): expected a Python file, got {os.fspath(task.file)}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if name == MAIN:
        sys.modules["__main__"] = module  # pickled arguments name it so
    spec.loader.exec_module(module)
    return module


def _pickled_result(name: str, value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # a class of the user may do anything when it is pickled
        raise ArgumentError(
            f"spawn({name}): result: expected a value that can be pickled, got {type(value).__name__} ({error})"
        ) from None


def _send_error(line: Lifeline, error: BaseException) -> None:
    data: bytes | None = None
    with contextlib.suppress(Exception):  # a class of the user may do anything when it is pickled
        data = pickle.dumps(error)
        pickle.loads(data)
    line.send(Raised(data, "".join(traceback.format_exception(error))))
