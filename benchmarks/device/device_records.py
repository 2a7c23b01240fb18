"""What every record of a run on devices says of the machine; the figures are the run's own business."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

import peertile as pt

Json = dict[str, Any]
LIBRARIES = ("torch", "triton")


def record(command: str, start: datetime.datetime, figures: list[Json], notes: str) -> Json:
    """A record as benchmarks/records/README.md describes it."""
    gpus = []
    if os.environ.get("PEERTILE_DEVICE") == "cuda":
        count = int(pt.current_device().driver.api.device_count())  # type: ignore[attr-defined]
        gpus = [pt.open_device(pt.DriverKind.CUDA, k).capabilities.name for k in range(count)]
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    versions = {"peertile": pt.__version__, "python": platform.python_version(), "numpy": np.__version__}
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            versions[name] = str(importlib.import_module(name).__version__)
    return {
        "schema": 1, "date": start.isoformat(timespec="seconds"), "command": command,
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "memory_bytes": pages * size, "gpus": gpus,
                    "os": platform.system(), "kernel": platform.release()},
        "versions": versions, "figures": figures, "notes": notes,
    }  # fmt: skip


def write(path: Path, made: Json) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"record": str(path), "figures": len(made["figures"])}), flush=True)
