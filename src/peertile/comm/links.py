"""Link graphs of mailboxes: who sends to whom, and whether receivers must acknowledge.

An acknowledgement on the link s → d is needed iff depth < w · (1 + hops(d → s)), where w is the number
of posts ahead and hops the shortest way back in the link graph (infinite: always). The host computes
it once, when a mailbox is made. The proof is in docs/concepts/mailbox.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import index
from typing import NamedTuple

from peertile.errors import ArgumentError
from peertile.ir.types import Link
from peertile.runtime.checks import check_integer

__all__ = ["Links", "acknowledgement_needed"]


class Links(NamedTuple):
    """Directed links between `size` ranks, as (source, destination) pairs.

    A pair (r, r) says that rank r collects its own tile too; it costs nothing.
    """

    size: int
    pairs: frozenset[tuple[int, int]]

    @staticmethod
    def all_to_all(size: int) -> Links:
        """Every rank sends to every rank, itself included."""
        check_integer("size", size, 1)
        return Links(size, frozenset((s, d) for s in range(size) for d in range(size)))

    @staticmethod
    def ring(size: int, step: int = 1) -> Links:
        """Rank r sends to r + step, round the ring. Nobody collects its own tile, unless it is alone."""
        check_integer("size", size, 1)
        check_integer("step", step, None)
        return Links(size, frozenset((r, (r + step) % size) for r in range(size)))

    @staticmethod
    def broadcast(size: int, root: int = 0) -> Links:
        """`root` sends to every rank, itself included; nobody else sends."""
        check_integer("size", size, 1)
        check_integer("root", root, 0, size - 1)
        return Links(size, frozenset((root, d) for d in range(size)))

    @staticmethod
    def among(size: int, members: Iterable[int]) -> Links:
        """All-to-all between `members` alone; the others post and collect nothing, but take part in the launch."""
        check_integer("size", size, 1)
        try:
            chosen = sorted({check_integer("members", member, None) for member in members})
        except TypeError:
            raise ArgumentError(f"members: expected ranks, got {members!r}") from None
        if not all(0 <= r < size for r in chosen):
            raise ArgumentError(f"members: expected ranks 0 to {size - 1}, got {chosen}")
        return Links(size, frozenset((s, d) for s in chosen for d in chosen))

    @staticmethod
    def of(size: int, pairs: Iterable[tuple[int, int]]) -> Links:
        """Any pairs (source, destination)."""
        check_integer("size", size, 1)
        try:
            found = frozenset((index(s), index(d)) for s, d in pairs)
        except (TypeError, ValueError):
            raise ArgumentError(f"pairs: expected pairs (source, destination) of ranks, got {pairs!r}") from None
        wrong = sorted(p for p in found if not all(0 <= r < size for r in p))
        if wrong:
            raise ArgumentError(f"pairs: expected ranks 0 to {size - 1}, got {wrong}")
        return Links(size, found)

    def hops(self, start: int, goal: int) -> float:
        """Links on the shortest way from `start` to `goal`; infinity if there is none."""
        distance = {start: 0}
        queue = deque([start])
        while queue:
            here = queue.popleft()
            if here == goal:
                return distance[here]
            for s, d in self.pairs:
                if s == here and d not in distance:
                    distance[d] = distance[here] + 1
                    queue.append(d)
        return float("inf")

    def acknowledged(self, depth: int, posts_ahead: int = 1) -> frozenset[tuple[int, int]]:
        """The links whose receivers must give slots back before they are written again."""
        if depth < posts_ahead:
            raise ArgumentError(f"depth: expected at least posts_ahead = {posts_ahead}, got {depth}")
        return frozenset((s, d) for s, d in self.pairs if s != d and depth < posts_ahead * (1 + self.hops(d, s)))

    def words(self, rank: int, depth: int, posts_ahead: int = 1) -> list[int]:
        """What `rank` has with each rank, as `ir.types.Link`."""
        acknowledged = self.acknowledged(depth, posts_ahead)
        found = []
        for other in range(self.size):
            out, back = (rank, other), (other, rank)
            word = Link.SENDS * (out in self.pairs) | Link.RECEIVES * (back in self.pairs)
            word |= Link.SENDS_ACKNOWLEDGED * (out in acknowledged)
            word |= Link.RECEIVES_ACKNOWLEDGED * (back in acknowledged)
            found.append(int(word))
        return found


def acknowledgement_needed(links: Links, depth: int, posts_ahead: int = 1) -> bool:
    """Whether any link needs acknowledgements at this depth."""
    return bool(links.acknowledged(depth, posts_ahead))
