"""Puts this folder on the path: the functions that started ranks run are in `torch_ranks`, which imports no pytest."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
