"""Puts this folder on the path: what the cases share is in `case_ranks`, which imports no pytest."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
