"""Which addresses this process may load and store. Asks the kernel's list of mappings; changes nothing."""

from __future__ import annotations

__all__ = ["is_mapped"]

_MAPS = "/proc/self/maps"


def is_mapped(address: int, nbytes: int) -> bool:
    """Whether every byte of the range may be loaded and stored; True where the system keeps no such list."""
    try:
        with open(_MAPS, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return True
    end = address + nbytes
    for line in lines:
        extent, rights, *_ = line.split(None, 2)
        low, high = (int(text, 16) for text in extent.split("-"))
        # Mappings are listed by rising address, so a range over several is followed from one to the next.
        if low <= address < high:
            if not rights.startswith("rw"):
                return False
            if end <= high:
                return True
            address = high
    return False
