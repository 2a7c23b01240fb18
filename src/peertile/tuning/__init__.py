"""Autotuning: which of several ways of doing something is the fastest here, decided once for all ranks of a group.

`rules.py` says who wins, from figures alone; `outputs.py` whether a candidate is right; `session.py` measures, in step
with the other ranks; `store.py` keeps what was found; `autotune.py` is what users call.
"""

from peertile.tuning.rules import Rules
from peertile.tuning.session import Decision

__all__ = ["Decision", "Rules"]
