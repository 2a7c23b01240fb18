"""How operations ask a driver to do a launch and its bookkeeping in one go, where the driver can. Decides nothing.

`Links` is what a driver offers; without it, or where it refuses, an operation does the same in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peertile.runtime.context import ExecutionContext
    from peertile.runtime.launched import Launched
    from peertile.runtime.site import Site
    from peertile.runtime.stream import Stream

__all__ = ["LinkCode", "Links", "kinds", "when_linked"]


class LinkCode(IntEnum):
    """What a link says."""

    REFUSED = 0
    """Nothing was done."""
    DONE = 1
    LOOK = 2
    """Done, and the driver wants to take note of what has run (`DriverDevice.linked`)."""
    LEASED = 3
    """The lease is entered and the operation spent, but the launch is still to be enqueued."""


class Links:
    """Functions of native code, which run with the interpreter lock and take no other."""

    __slots__ = ("link", "post", "push", "resubmit")

    def __init__(
        self,
        link: Callable[[ExecutionContext, Any, bool], int],
        post: Callable[[Launched, Any], int],
        push: Callable[[Any, Any, bytes], int],
        resubmit: Callable[[Any, Stream, Site | None, Any], Any],
    ) -> None:
        self.link = link
        """(context, operation, whether it is spent): lease and enqueue an operation on the context's stream, and note
        it there. Refuses anything but a launch that is spent or not, as is said."""
        self.post = post
        """(submission, operation): the same for one that is its own submission, which is in flight already."""
        self.push = push
        """(stream handle, prepared launch, arguments): enqueue alone; the launch's number, or 0."""
        self.resubmit = resubmit
        """(kept launch, stream, site, result): enqueue it once more under its lease, without another look at storages
        where nothing has changed. The future, or None where nothing was done."""


class _Kinds:
    """The classes of higher floors that native code knows instances of."""

    __slots__ = ("kept", "launch", "specialization")

    def __init__(self) -> None:
        self.launch: type | None = None
        self.kept: type | None = None
        self.specialization: type | None = None


kinds = _Kinds()
when_linked: list[Callable[[], None]] = []
"""Called once links are there: for what goes with them on higher floors."""
