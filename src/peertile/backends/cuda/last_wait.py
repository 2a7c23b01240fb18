"""Where a program has no wait left, and lets the next launch begin.

A kernel that waits for peers may not let the next one in at its beginning: what is resident early takes places that
another stream's programs may need, which somebody waits for (see `Launch.lets_in`). Behind its last wait a program ends
by itself, whatever others do. Once all programs of a grid are that far, or have ended, the next one may be put where
there is room: it could be there as well a moment later, once this one has ended, so that nobody is kept out who would
not be anyhow, and no two launches wait for each other that did not before. What it does there is to wait until all of
this one has ended and is visible (`ptx.follow`), which every kernel does that is launched this way; so it does not
matter what this one still stores. The next launch's way to the multiprocessors then overlaps this one's last stores.
Whether that is a gain depends on both launches, so the driver says it: see `Launch.lets_in`.

In a loop that is the last trip. A loop that may be left early, or that polls, is passed as a whole.
"""

from __future__ import annotations

from peertile.backends.cuda import ptx
from peertile.backends.cuda.state import Emitter
from peertile.ir import ops
from peertile.ir.core import Block, Effect, Kernel, Op, walk

__all__ = ["last_waits", "let_in"]


_ALWAYS = "tl.full((), True, tl.int1)"


def last_waits(kernel: Kernel) -> dict[Op | Block, tuple[ops.For, ...]]:
    """The ops behind which, and the blocks at whose beginning, a program has no wait left, if these loops, from the
    outermost on, are in their last trip."""
    found: dict[Op | Block, tuple[ops.For, ...]] = {}
    if kernel.waits:
        _find(kernel.body, (), found)
    return found


def _find(block: Block, loops: tuple[ops.For, ...], found: dict[Op | Block, tuple[ops.For, ...]]) -> None:
    waiting = [op for op in block.ops if Effect.WAIT in op.effects]
    if not waiting:
        found[block] = loops
        return
    last = waiting[-1]
    if isinstance(last, ops.If) and any(map(_goes_on, last.blocks)):
        for arm in last.blocks:
            _find(arm, loops, found)
    elif isinstance(last, ops.For) and not _is_left_early(last):
        _find(last.blocks[0], (*loops, last), found)
    else:
        found[last] = loops


def _goes_on(block: Block) -> bool:
    """Whether a program accesses memory in there behind its last wait, or without one."""
    for op in reversed(block.ops):
        if Effect.WAIT in op.effects:
            return isinstance(op, ops.For) or (isinstance(op, ops.If) and any(map(_goes_on, op.blocks)))
        if op.effects & {Effect.READ, Effect.WRITE}:
            return True
    return False


def _is_left_early(loop: ops.For) -> bool:
    return any(isinstance(op, ops.Break) and ops.enclosing_loop(op) is loop for op in walk(loop.blocks[0]))


def let_in(e: Emitter, at: Op | Block) -> None:
    """Lets the next launch begin here, if this is such a place."""
    if at in e.last_waits:
        last = " & ".join(e.last_trips[f] for f in e.last_waits[at]) or _ALWAYS
        e.w.line(e.call_ptx(ptx.let_in(), last, "_launched"))
