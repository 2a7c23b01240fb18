"""What each rank launches on a mailbox: a table of signature and name in symmetric memory, for error messages.

A mailbox word carries 24 bits of signature, enough to see that two launches do not match and too little to say
what the other one was. Each rank writes its own table from the host, before it launches; a rank that meets a
foreign signature reads everybody's. How bytes get to and from those tables is the caller's affair: loads and stores
where the host may access the memory of devices, copies elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peertile.runtime.ordering import in_order

__all__ = ["NBYTES", "Labels"]

ENTRIES = 32
ENTRY_BYTES = 96
NBYTES = ENTRIES * ENTRY_BYTES
"""Bytes on every rank."""


class Labels:
    """The tables of all ranks, as mapped here. The last `ENTRIES` different launches of a rank are known."""

    __slots__ = ("_addresses", "_known", "_rank", "_read", "_write")

    def __init__(
        self,
        addresses: Sequence[int],
        rank: int,
        read: Callable[[int, int], bytes],
        write: Callable[[int, bytes], object],
    ) -> None:
        self._read = read  # (address, bytes) -> what is there
        self._write = write
        self._addresses = tuple(addresses)
        self._rank = rank
        self._known: dict[int, int] = {}

    def note(self, signature: int, label: str) -> None:
        """Tell everybody what this rank means by `signature`."""
        if signature in self._known:
            return
        entry = len(self._known) % ENTRIES
        self._known[signature] = entry
        text = label.encode()[: ENTRY_BYTES - 9]
        at = self._addresses[self._rank] + entry * ENTRY_BYTES
        # The signature last: a reader that finds it finds the text of it, or of the one before in the worst case.
        self._write(at + 8, text.ljust(ENTRY_BYTES - 8, b"\0"))
        in_order()
        self._write(at, signature.to_bytes(8, "little"))

    def find(self, signature: int) -> tuple[int, str] | None:
        """(rank, what it launches) of the first other rank that has noted `signature`; else of this one; else None."""
        order = [r for r in range(len(self._addresses)) if r != self._rank] + [self._rank]
        for rank in order:
            table = self._read(self._addresses[rank], NBYTES)
            for entry in range(ENTRIES):
                at = entry * ENTRY_BYTES
                if signature and int.from_bytes(table[at : at + 8], "little") == signature:
                    in_order()  # the text is looked at behind the signature
                    text = self._read(self._addresses[rank] + at + 8, ENTRY_BYTES - 8)
                    return rank, text.rstrip(b"\0").decode(errors="replace")
        return None
