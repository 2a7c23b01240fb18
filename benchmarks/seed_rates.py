"""How often one schedule shows a fault, over many seeds: 1 where happens-before decides, less where values steer.

python benchmarks/seed_rates.py > benchmarks/records/DATE-seeds-MACHINE.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.checker.sim_seeds import CERTAIN, STEERED, rate  # noqa: E402 - found only now

from peertile.cli.bench import record  # noqa: E402
from peertile.testing.measure import Figure  # noqa: E402

SEEDS = 200

if __name__ == "__main__":
    kinds = {"happens_before": CERTAIN, "steered": STEERED}
    figures = [
        Figure(f"seeds.{kind}.{name}", 100 * rate(make(), SEEDS), "percent", SEEDS)
        for kind, programs in kinds.items()
        for name, make in programs.items()
    ]
    print(json.dumps(record(figures, "python benchmarks/seed_rates.py"), indent=2))
