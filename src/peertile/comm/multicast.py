"""The multicast mapping of a symmetric heap: made by all ranks together, or by none, with the reason.

Where the fabric has no multicast, or the user did not ask for it, the heap goes without: operations on multicast
tensors are then loops over the ranks' parts, with the same results. `SymmetricHeap.multicast_path` has the reason.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from peertile.runtime.driver import ShareHandle, ShareKind

if TYPE_CHECKING:
    from peertile.comm.group import Group

__all__ = ["MulticastMapping", "MulticastPath", "agree_on_multicast"]


class MulticastPath(NamedTuple):
    """How operations on multicast tensors of a heap are done. `reason`: why not by the fabric, "" if so."""

    hardware: bool
    reason: str

    def __str__(self) -> str:
        return "fabric" if self.hardware else f"software: {self.reason}"


def agree_on_multicast(reasons: list[str], devices: list[tuple[int, str]], kind: ShareKind) -> str:
    """Why these ranks cannot have a mapping; "" if they can. The same on every rank, from the same facts.

    `reasons[r]` is what rank r says of itself, `devices[r]` its process and hardware.
    """
    for rank, reason in enumerate(reasons):
        if reason:
            return reason if len(set(reasons)) == 1 else f"rank {rank}: {reason}"
    if len(reasons) == 1:
        return "one rank needs none"
    if kind not in (ShareKind.FABRIC, ShareKind.FD):
        return f"memory shared by {kind.value} cannot be bound to it"
    hardware = [device for _, device in devices]
    if len(set(hardware)) < len(hardware):
        return "two ranks share a GPU"
    return ""


class MulticastMapping:
    """One address that reaches `nbytes` of every rank's segment. Collective; made as a whole or not at all."""

    def __init__(self, group: Group, objects: Any, segment: Any, nbytes: int, kind: ShareKind) -> None:
        self._group = group
        self._objects = objects
        self._object: Any = None
        self.address = 0
        try:
            self._make(segment, nbytes, kind)
        except BaseException:
            self._give_back()
            raise

    def _make(self, segment: Any, nbytes: int, kind: ShareKind) -> None:
        group, objects = self._group, self._objects
        share = ShareHandle(kind, b"", ())
        with group.collective("multicast: create"):
            if group.rank == 0:
                self._object = objects.create(nbytes, group.size, kind)
                share = objects.export(self._object)
        shares = group.exchange(share.payload, "multicast: exchange", fds=share.fds)
        # Every rank got a descriptor of its own for the one object; this rank needs one of them, or none.
        payload, fds = shares[0]
        left = {fd for _, found in shares for fd in found}
        try:
            with group.collective("multicast: import"):
                if group.rank != 0:
                    left.difference_update(fds)
                    self._object = objects.import_(ShareHandle(kind, payload, fds), nbytes)
        finally:
            for fd in left:
                os.close(fd)
        # Each step ends when all ranks have made it: all devices are added before any memory is bound, and nobody
        # uses the address before every rank has mapped.
        with group.collective("multicast: add the device"):
            objects.add_device(self._object)
        with group.collective("multicast: bind"):
            objects.bind(self._object, segment)
        with group.collective("multicast: map"):
            self.address = objects.map(self._object)

    def release(self) -> None:
        """Collective: no rank takes it apart while another may still write through it. Then unmapped, unbound and
        released, the importers' objects before the one they were imported from."""
        group = self._group
        if group.failure() is None:
            group.barrier("multicast: release")
        if group.rank != 0:
            self._give_back()
        try:
            if group.failure() is None:
                group.barrier("multicast: imports are released")
        finally:
            self._give_back()

    def _give_back(self) -> None:
        known, self._object = self._object, None
        self.address = 0
        if known is not None:
            self._objects.free(known)
