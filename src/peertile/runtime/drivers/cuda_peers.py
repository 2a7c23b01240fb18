"""What the devices of one process share because of their ranks: the host's abort words, as kernels read them.

A group's abort word lies in memory of the host that several processes map. Its page is registered with the NVIDIA
driver once in a process and stays so until the last device that polls it is closed, with the context that it was
registered in: a device may be closed before its peers of the same process have stopped polling.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from peertile.errors import UnsupportedError
from peertile.runtime.drivers.cuda_api import CudaApi, CudaError, PointerKind

__all__ = ["PAGE_BYTES", "HostPages", "Poller"]

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Poller(Protocol):
    """What a page needs of a device; its context is current in every call."""

    api: CudaApi
    handle: Any
    name: str


@dataclass(slots=True)
class _Page:
    owner: Poller
    context: Any  # of the owner, held as long as the page is registered
    users: list[Poller] = field(default_factory=list)


class HostPages:
    """The registered pages of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the table; held during calls of the NVIDIA driver
        self._pages: dict[int, _Page] = {}

    def take(self, device: Poller, address: int) -> int:
        """Where programs of `device` see a word of the host at `address`. UnsupportedError if its page cannot be
        pinned. May wait for running work, the first time."""
        page = address & -PAGE_BYTES
        with self._lock:
            known = self._pages.get(page)
            if known is None:
                if device.api.pointer_kind(address) is not PointerKind.PAGEABLE:
                    return address
                self._register(device, page, address)
                known = self._pages[page] = _Page(device, device.api.retain_context(device.handle))
            if device not in known.users:
                known.users.append(device)
            return device.api.host_device_pointer(page) + address - page

    def _register(self, device: Poller, page: int, address: int) -> None:
        try:
            device.api.register_host(page, PAGE_BYTES)
        except CudaError as error:
            if error.sticky:
                raise
            raise UnsupportedError(
                f"abort word: expected an address that {device.name} can read, got {address:#x} in memory of the "
                f"host that cannot be pinned ({error})"
            ) from error

    def leave(self, device: Poller) -> None:
        """The device is idle and being closed: pages that nobody else polls are given back."""
        with self._lock:
            for page, known in list(self._pages.items()):
                if device in known.users:
                    known.users.remove(device)
                if not known.users:
                    del self._pages[page]
                    api = known.owner.api
                    api.push_context(known.context)
                    try:
                        api.unregister_host(page)
                    finally:
                        api.pop_context()
                        api.release_context(known.owner.handle)
