"""The numpy meaning of every primitive op, and an evaluator that runs grids of programs with it."""

from peertile.meaning import accesses, control, folds, tiles, views  # the modules register the meanings
from peertile.meaning.faults import Fault, FaultKind, ProgramFault
from peertile.meaning.grid import Outcome, PerRank, Printed, Schedule, run_grid
from peertile.meaning.memory import Memory, NumpyMemory, ObjectRef, SymmetricRef, ViewRef
from peertile.meaning.objects import new_barrier, new_counter, new_mailbox, new_signal
from peertile.meaning.program import Event, EventKind, Program, run_program
from peertile.meaning.registry import MEANINGS, evaluates

__all__ = [
    "MEANINGS",
    "Event",
    "EventKind",
    "Fault",
    "FaultKind",
    "Memory",
    "NumpyMemory",
    "ObjectRef",
    "Outcome",
    "PerRank",
    "Printed",
    "Program",
    "ProgramFault",
    "Schedule",
    "SymmetricRef",
    "ViewRef",
    "accesses",
    "control",
    "evaluates",
    "folds",
    "new_barrier",
    "new_counter",
    "new_mailbox",
    "new_signal",
    "run_grid",
    "run_program",
    "tiles",
    "views",
]
