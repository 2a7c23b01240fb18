"""Puts this folder on the path: `layer_values` is shared by the tests here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
