"""Whether shared staging is written through the caches or around them: measured while collectives run.

Between cores that share a cache, what one has written reaches the other fastest through it. Between cores that
share none, each line is fetched out of the other's cache, at a fraction of the speed of memory, and going around
the caches is two to three times faster. Which it is, is not visible in a virtual machine, and can change while a
program runs. Peers cannot tell the two apart, so each rank decides for itself; ranks that make the same calls try
both at the same calls, and so see what the others' choice does, too. No communication here, and no clock.
"""

from __future__ import annotations

__all__ = ["AGAIN", "EACH", "Staging"]

EACH = 2
"""Calls of a trial for each way; the fastest counts, so that one disturbance decides nothing."""
AGAIN = 128
"""Calls from one trial to the next: the wrong way is taken in 2 of them."""


class Staging:
    """The decision for calls of one size.

    >>> staging = Staging()
    >>> for ns in (90, 80, 40, 41):  # two calls through the caches, two around them
    ...     _ = staging.begin()
    ...     staging.took(ns)
    >>> staging.around, staging.begin()
    (True, True)
    """

    __slots__ = ("_call", "_fastest", "around")

    def __init__(self) -> None:
        self.around = False
        """What was faster when last tried."""
        self._call = 0
        self._fastest = [0, 0]

    def begin(self) -> bool:
        """Whether the call that begins goes around the caches. Each is followed by `took`."""
        call = self._call
        return call >= EACH if call < 2 * EACH else self.around

    def took(self, ns: int) -> None:
        """How long the call took that began last."""
        call = self._call
        if call < 2 * EACH:
            way = int(call >= EACH)
            self._fastest[way] = ns if call % EACH == 0 else min(ns, self._fastest[way])
            if call == 2 * EACH - 1:
                self.around = self._fastest[1] < self._fastest[0]
        self._call = (call + 1) % AGAIN
