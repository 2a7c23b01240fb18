"""How a simulated device behaves where the model leaves it open: what bounds it, and what makes its host wait.

Every one of these is something that real devices do some of the time. A program that is right is right under all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["USUAL", "Conditions", "Overlap"]


class Overlap(Enum):
    """Whether two kernels of one device, on different streams, run at the same time."""

    ALWAYS = "always"
    CHOSEN = "chosen"
    """The schedule says, each time: a program may rely neither on it nor on its absence."""
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Conditions:
    """`queue`: how many operations a stream takes before the host that enqueues another has to wait (None: any
    number). `blocking_launches`: a launch returns when its kernel has ended, as with CUDA_LAUNCH_BLOCKING.
    `syncing_allocations`: to allocate, to free and to make a stream waits until the device is idle."""

    overlap: Overlap = Overlap.ALWAYS
    queue: int | None = None
    blocking_launches: bool = False
    syncing_allocations: bool = False

    def described(self) -> str:
        """The conditions in words, for what a report says it covered."""
        parts = {
            Overlap.ALWAYS: "kernels of one device on different streams run side by side",
            Overlap.CHOSEN: "kernels of one device on different streams run side by side or one by one",
            Overlap.NEVER: "kernels of one device run one by one",
        }[self.overlap]
        if self.queue is not None:
            parts += f"; a stream takes {self.queue} operations"
        if self.blocking_launches:
            parts += "; launches return when their kernel has ended"
        if self.syncing_allocations:
            parts += "; allocating and freeing wait for the device to be idle"
        return parts


USUAL: Final = Conditions()
"""A device as most are: nothing is bounded, and nothing waits that need not."""
