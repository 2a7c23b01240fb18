"""The memory of a symmetric heap: one segment on every rank, each mapped on all, made and given back collectively.

Which way the segments travel (`ShareKind`) is chosen once for all ranks: PEERTILE_USE_VMM on GPUs, then the argument,
then the first of `PREFERENCE` that every rank's device can. What was forced never falls back to another.

Nobody goes on with a part of it: where a step fails on one rank, every rank raises, and what was made is given back.
Imports go before what they were imported from. Offsets and objects in the memory are symmetric.py's.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from peertile.comm.multicast import MulticastMapping, MulticastPath, agree_on_multicast
from peertile.config import config
from peertile.errors import ArgumentError, PeertileError, SymmetryError, UnsupportedError
from peertile.runtime.driver import DriverKind, SegmentHandle, ShareHandle, ShareKind

if TYPE_CHECKING:
    from peertile.comm.group import Group
    from peertile.runtime.device import Device

__all__ = ["PREFERENCE", "PeerMemory", "RankFacts", "check_reach", "choose_path"]

PREFERENCE: Final = (ShareKind.FABRIC, ShareKind.FD, ShareKind.IPC, ShareKind.LOCAL)
"""Best first."""
_VMM: Final = (ShareKind.FABRIC, ShareKind.FD)


class RankFacts(NamedTuple):
    """What the other ranks have to know of one rank's device."""

    pid: int
    device: str  # the same text for the same hardware
    shares: tuple[str, ...]
    peer_atomics: bool
    wanted: tuple[str, ...]  # paths that may be taken, in order; more than one only where the choice is free
    multicast: str  # why it has no multicast of the fabric, "" if it has
    unreachable: tuple[str, ...] = ()  # devices whose memory it cannot load and store

    def pack(self) -> bytes:
        """As bytes that travel."""
        return json.dumps(self).encode()

    @staticmethod
    def unpack(data: bytes) -> RankFacts:
        """The inverse of `pack`."""
        pid, device, shares, peer_atomics, wanted, multicast, unreachable = json.loads(data)
        return RankFacts(pid, device, tuple(shares), peer_atomics, tuple(wanted), multicast, tuple(unreachable))


def _wanted(device: Device, path: ShareKind | None) -> tuple[ShareKind, ...]:
    use_vmm = config().use_vmm if device.driver.kind is DriverKind.CUDA else None
    if use_vmm is not None:
        return _VMM if use_vmm else (ShareKind.IPC,)
    return PREFERENCE if path is None else (path,)


def choose_path(facts: list[RankFacts]) -> ShareKind:
    """The way that all ranks take. SymmetryError if they want different things, UnsupportedError if one cannot."""
    wishes = {f.wanted for f in facts}
    if len(wishes) > 1:
        texts = "; ".join(f"rank {r}: {' or '.join(f.wanted)}" for r, f in enumerate(facts))
        raise SymmetryError(
            f"ranks disagree about the memory path: {texts}. path= and PEERTILE_USE_VMM must be the same on every rank"
        )
    wanted = facts[0].wanted
    for name in wanted:
        if all(name in f.shares for f in facts):
            return ShareKind(name)
    unable = next(r for r, f in enumerate(facts) if not any(name in f.shares for name in wanted))
    raise UnsupportedError(
        f"SymmetricHeap: memory path: expected {' or '.join(wanted)}, which rank {unable} on {facts[unable].device} "
        f"cannot share by; it can by {' or '.join(facts[unable].shares)}. `peertile info` says why; leave path= and "
        "PEERTILE_USE_VMM out to let every rank agree on one that works"
    )


def check_reach(facts: list[RankFacts]) -> None:
    """UnsupportedError, the same on every rank, where one's kernels cannot load and store the memory of another."""
    for rank, own in enumerate(facts):
        for peer, other in enumerate(facts):
            if other.device in own.unreachable:
                raise UnsupportedError(
                    "SymmetricHeap: expected devices that load and store each other's memory, got rank "
                    f"{rank} on {own.device}, which cannot reach rank {peer} on {other.device}. `peertile info` shows "
                    "which pairs can; make heaps of subgroups of such ranks"
                )


class PeerMemory:
    """`nbytes` on every rank of the group. `bases[r]` is where rank r's begins in this process."""

    def __init__(self, group: Group, device: Device, nbytes: int, path: ShareKind | None) -> None:
        if path is not None and not isinstance(path, ShareKind):
            names = ", ".join(f"ShareKind.{member.name}" for member in ShareKind)
            raise ArgumentError(f"SymmetricHeap(path): expected {names} or None, got {path!r}")
        self.group = group
        self.bases = [0] * group.size
        self._driver = device.driver
        self._segments: list[SegmentHandle | None] = [None] * group.size
        objects = device.driver.multicast_objects()
        mine = RankFacts(
            os.getpid(),
            device.driver.identity,
            tuple(kind.value for kind in device.capabilities.shares),
            device.capabilities.peer_atomics,
            tuple(kind.value for kind in _wanted(device, path)),
            objects if isinstance(objects, str) else "",
            tuple(sorted(device.capabilities.unreachable)),
        )
        payloads = [mine.pack()] if group.size == 1 else group.exchange(mine.pack(), "SymmetricHeap: devices")
        self.facts = [RankFacts.unpack(payload) for payload in payloads]
        check_reach(self.facts)
        self.path = choose_path(self.facts)
        sharers = sum((f.pid, f.device) == (mine.pid, mine.device) for f in self.facts)
        reason = agree_on_multicast(
            [f.multicast for f in self.facts], [(f.pid, f.device) for f in self.facts], self.path
        )
        self.multicast_path = MulticastPath(not reason, reason)
        self._mapping: MulticastMapping | None = None
        try:
            with group.collective("SymmetricHeap: allocate"):
                self._driver.enter_group(group.abort_address, sharers)
                if not reason:
                    nbytes = objects.aligned_size(nbytes, group.size, self.path)
                segment, base = self._driver.create_shared(nbytes, self.path)
                self._segments[group.rank] = segment
                self.bases[group.rank] = base
                share = self._driver.export_segment(segment) if group.size > 1 else None
            if share is not None:
                self._map_peers(share)
            if not reason:
                self._map_multicast(objects, segment, nbytes)
        except BaseException:
            self._give_back()
            raise

    def _map_multicast(self, objects: Any, segment: SegmentHandle, nbytes: int) -> None:
        """The mapping, or, where the system refuses it to one rank, none on any: operations are loops then."""
        try:
            self._mapping = MulticastMapping(self.group, objects, segment, nbytes, self.path)
        except (PeertileError, OSError) as error:
            self.multicast_path = MulticastPath(False, str(error).partition("\n")[0])

    @property
    def window(self) -> int | None:
        """Where the multicast mapping begins in this process, if there is one."""
        return None if self._mapping is None else self._mapping.address

    @property
    def peer_atomics(self) -> bool:
        """Whether read-modify-writes on the memory of every rank are atomic for all of them."""
        return len({f.device for f in self.facts}) == 1 or all(f.peer_atomics for f in self.facts)

    def _map_peers(self, share: ShareHandle) -> None:
        group = self.group
        left: set[int] = set()
        try:
            with group.collective("SymmetricHeap: map"):
                shares = group.exchange(share.payload, "SymmetricHeap: exchange", fds=share.fds)
                left.update(fd for _, fds in shares for fd in fds)
                for rank, (payload, fds) in enumerate(shares):
                    if rank == group.rank:
                        continue
                    left.difference_update(fds)  # the import takes them over, also where it fails
                    imported = self._driver.import_segment(ShareHandle(share.kind, payload, fds))
                    self._segments[rank] = imported
                    self.bases[rank] = self._driver.map_segment(imported)
        finally:
            for fd in left:
                os.close(fd)

    def release(self) -> None:
        """Collective. What was imported goes first, on every rank; only then what it was imported from. On a group that
        has failed nobody is waited for."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.release()
        self._free_imports()
        try:
            if self.group.size > 1 and self.group.failure() is None:
                self.group.barrier("SymmetricHeap.close: imports are released")
        finally:
            self._give_back()

    def _free_imports(self) -> None:
        for rank, segment in enumerate(self._segments):
            if segment is not None and rank != self.group.rank:
                self._segments[rank] = None
                self._driver.free_segment(segment)

    def _give_back(self) -> None:
        with contextlib.suppress(PeertileError):  # the own segment goes in any case
            self._free_imports()
        own = self._segments[self.group.rank]
        if own is not None:
            self._segments[self.group.rank] = None
            self._driver.free_segment(own)
