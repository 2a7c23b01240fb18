"""Puts this folder on the path: the functions that ranks run are in `fused_programs`, which imports no pytest."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
