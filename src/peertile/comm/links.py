"""Link graphs of mailboxes: who sends to whom, and whether receivers must acknowledge.

An acknowledgement on the link s → d is needed iff depth < w · (1 + hops(d → s)), where w is the number
of posts ahead and hops the shortest way back in the link graph (infinite: always). The host computes
it once, when a mailbox is made. The proof is in docs/concepts/mailbox.md.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from peertile.errors import ArgumentError

__all__ = ["Links", "acknowledgement_needed"]


class Links(NamedTuple):
    """Directed links between `size` ranks, as (source, destination) pairs without self links."""

    size: int
    pairs: frozenset[tuple[int, int]]

    @staticmethod
    def all_to_all(size: int) -> Links:
        """Every rank sends to every other."""
        return Links(size, frozenset((s, d) for s in range(size) for d in range(size) if s != d))

    @staticmethod
    def ring(size: int) -> Links:
        """Rank r sends to r + 1, the last to the first."""
        return Links(size, frozenset((r, (r + 1) % size) for r in range(size) if size > 1))

    @staticmethod
    def broadcast(size: int, root: int = 0) -> Links:
        """`root` sends to every other rank."""
        if not 0 <= root < size:
            raise ArgumentError(f"root: expected 0 to {size - 1}, got {root}")
        return Links(size, frozenset((root, d) for d in range(size) if d != root))

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


def acknowledgement_needed(links: Links, depth: int, posts_ahead: int = 1) -> bool:
    """Whether any link needs acknowledgements at this depth."""
    if depth < posts_ahead:
        raise ArgumentError(f"depth: expected at least posts_ahead = {posts_ahead}, got {depth}")
    return any(depth < posts_ahead * (1 + links.hops(d, s)) for s, d in links.pairs)
