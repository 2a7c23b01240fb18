"""The passes between frontend and backend, in order, with the reason wherever order matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from peertile.ir.core import Kernel, walk
from peertile.ir.verify import OrderFault, order_faults
from peertile.ir.verify import verify as verify_kernel
from peertile.passes.bounds import decide_bounds
from peertile.passes.mailbox import expand_mailboxes
from peertile.passes.mailbox_rules import check_mailbox_rules
from peertile.passes.multicast import expand_multicast
from peertile.passes.order import order_memory
from peertile.passes.peer_atomics import note_peer_atomics
from peertile.passes.polls import suspend_polls
from peertile.passes.protocols import expand_signals
from peertile.passes.simplify import simplify

__all__ = ["run_pipeline"]

_PASSES: Final[tuple[Callable[[Kernel], Kernel], ...]] = (
    # Mailboxes and signals before bounds: what the protocols emit is in bounds by the protocol, or
    # carries its own checks, and must not be counted among the user's accesses.
    expand_mailboxes,
    expand_signals,
    # After the protocols, whose waits suspend by themselves: only loops written by hand are left to find.
    suspend_polls,
    # Bounds before simplification: provenance is read from the shapes that the frontend writes, and
    # the checks that it adds are then folded and shared like everything else.
    decide_bounds,
    # Behind bounds, which are decided for the multicast object as a whole, and hold for every rank's part.
    expand_multicast,
    simplify,
    # Behind simplify, which takes out accesses that nobody reaches.
    note_peer_atomics,
    # Last, since its facts name ops.
    order_memory,
)

_EXPANSIONS: Final = frozenset({expand_mailboxes, expand_signals, suspend_polls, expand_multicast})
"""Passes that change a kernel by ops which they put in or take out, and most kernels have nothing for them."""
_FACTS: Final = frozenset({note_peer_atomics, order_memory})
"""Passes that write down facts and leave the ops alone."""


def run_pipeline(
    kernel: Kernel,
    *,
    verify: bool = True,
    broken: list[OrderFault] | None = None,
    residual_checks: bool = True,
    posts_ahead: int = 1,
) -> Kernel:
    """Takes what a frontend made to what a backend or the evaluator takes; works in place.

    `verify`: run the verifier before the first pass and after every one that changed the kernel. `broken`: let a
    kernel that breaks the rules of memory order pass, and put down here which, each once (for the checker).
    `residual_checks=False`: an access whose bounds need a check in the kernel is an error. `posts_ahead`: rounds of a
    mailbox that may be posted and not collected.
    """
    order_rules = broken is None
    if verify:
        verify_kernel(kernel, order_rules=order_rules)
        _put_down(kernel, broken)
    # Before anything is rewritten: the rules speak of the user's operations.
    check_mailbox_rules(kernel, posts_ahead=posts_ahead)
    done: set[str] = set()
    for run in _PASSES:
        before = list(walk(kernel.body)) if verify and run in _EXPANSIONS else None
        kernel = decide_bounds(kernel, residual=residual_checks) if run is decide_bounds else run(kernel)
        done.add(run.__name__)
        if verify and run not in _FACTS and (before is None or before != list(walk(kernel.body))):
            verify_kernel(
                kernel,
                expanded="expand_multicast" in done,
                bounds_known="decide_bounds" in done,
                order_rules=order_rules,
            )
            _put_down(kernel, broken)
    return kernel


def _put_down(kernel: Kernel, broken: list[OrderFault] | None) -> None:
    """What the verifier would refuse here, and no pass before has shown."""
    if broken is not None:
        known = {(fault.loc, fault.message) for fault in broken}
        broken += [fault for fault in order_faults(kernel) if (fault.loc, fault.message) not in known]
