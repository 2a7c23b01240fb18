"""`T.unsafe`: raw pointers and tokens, in kernels marked `unsafe=True`. Signatures and formulas; no bodies.

Only tokens order these operations: two of them with no chain of tokens between them are unordered, even on
one place. A weak access takes no scope; every other order needs one, system on peer memory.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import Any

from peertile.language.multicast import Multicast
from peertile.language.objects import Pointer
from peertile.language.tiles import Tile
from peertile.language.word import word
from peertile.memory_model import Order, Rmw, Scope

__all__ = [
    "atomic_cas", "atomic_rmw", "fence_alias", "join_tokens", "load_ptr", "multicast", "multicast_view", "store_ptr",
    "token", "unicast",
]  # fmt: skip


@word
def token() -> Any:
    """A token that orders nothing yet.

    Example::

        token = T.unsafe.token()
    """


@word
def join_tokens(*tokens: Any) -> Any:
    """A token after all of `tokens`.

    Example::

        T.unsafe.join_tokens(T.unsafe.token(), T.unsafe.token())
    """


@word
def fence_alias(token: Any = None) -> Any:
    """Orders what this program did through one address of some memory with what it does through another address of it:
    two mappings in one address space, or a multicast mapping and an ordinary one. It waits for no other program.

    With a token the accesses that it comes after are ordered, and the result is a token after the fence. PTX ISA,
    `fence.proxy.alias`.

    Example::

        token = T.unsafe.fence_alias(T.unsafe.token())
    """


@word
def multicast(pointer: Pointer) -> Pointer:
    """Says that `pointer` reaches corresponding memory of every rank. It makes no multicast mapping out of an ordinary
    address: one that is not a mapping, as `MulticastTensor.pointer()` gives it, is refused at the launch. Integers
    added to it keep it so. Ordinary loads, stores and atomics do not take it.

    Example::

        T.unsafe.multicast(mptr) + 64
    """


@word
def multicast_view(pointer: Pointer, extent: Any) -> Multicast:
    """The `extent` elements of every rank's memory from a multicast `pointer` on, as a T.Multicast of one axis.

    Example::

        view = T.unsafe.multicast_view(T.unsafe.multicast(mptr) + 64, 128)
        view.partition((64,)).multimem_store((0,), T.ones((64,), view.dtype))
    """


@word
def unicast(pointer: Pointer) -> Pointer:
    """Says that `pointer` reaches a peer's memory. Allocates, enables and grants nothing.

    Example::

        T.unsafe.unicast(ptr) + T.iota(64)
    """


@word
def load_ptr(
    pointer: Pointer, *, order: Order, scope: Scope | None = None, mask: Any = None, fill: Any = 0, token: Any = None
) -> tuple[Tile, Any]:
    """result[i] = *pointer[i], `fill` where the mask is false; and a token. Weak, relaxed or acquire.

    Example::

        value, token = T.unsafe.load_ptr(ptr + T.iota(64), order=T.weak, mask=T.iota(64) < n)
    """


@word
def store_ptr(
    pointer: Pointer,
    value: Any,
    *,
    order: Order,
    scope: Scope | None = None,
    mask: Any = None,
    token: Any = None,
) -> Any:
    """*pointer[i] = value[i] where the mask is true; the result is a token. Weak, relaxed or release.

    Example::

        token = T.unsafe.store_ptr(ptr, 1.0, order=T.release, scope=T.system)
    """


@word
def atomic_rmw(
    pointer: Pointer,
    rmw: Rmw,
    value: Any,
    *,
    order: Order,
    scope: Scope | None = None,
    mask: Any = None,
    token: Any = None,
) -> tuple[Tile, Any]:
    """old[i] = *pointer[i]; *pointer[i] = rmw(old[i], value[i]), atomically each; gives (old, token).

    Relaxed, acquire, release or acq_rel.

    Example::

        old, token = T.unsafe.atomic_rmw(ptr, T.Rmw.ADDF, 1.0, order=T.relaxed, scope=T.device)
    """


@word
def atomic_cas(
    pointer: Pointer,
    compare: Any,
    value: Any,
    *,
    order: Order,
    scope: Scope | None = None,
    mask: Any = None,
    token: Any = None,
) -> tuple[Tile, Any]:
    """old[i] = *pointer[i]; if its bits equal compare[i], *pointer[i] = value[i]; gives (old, token).

    Example::

        old, token = T.unsafe.atomic_cas(ptr, 0.0, 1.0, order=T.acq_rel, scope=T.system)
    """
