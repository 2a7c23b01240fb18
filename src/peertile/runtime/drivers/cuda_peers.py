"""What the devices of one process share because of their ranks: abort words of the host, and loaded kernels.

A group's abort word lies in memory of the host that several processes map. Its page is registered with the NVIDIA
driver once in a process and stays so until the last device that polls it is closed, with the context that it was
registered in: a device may be closed before its peers of the same process have stopped polling.

Loading a kernel waits for what runs in its context. Two ranks on one GPU have one context, so the second would wait
for the first, which is in the kernel already and waits for the second: a kernel is loaded once for both.
That helps nothing where a rank has to load one kernel while another waits for it in a second one, and no load can be
made early enough, as nobody knows here what ranks will run. The bound of the wait ends it; its error says what it was.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from peertile.errors import UnsupportedError
from peertile.runtime.drivers.cuda_api import CudaApi, CudaError, PointerKind
from peertile.runtime.drivers.cuda_waits import STREAM_WAITS

__all__ = ["LONG_LOAD_S", "PAGE_BYTES", "HostPages", "Poller", "SharedModules"]

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
LONG_LOAD_S: Final = 1.0
"""A load of code that takes longer waits for something: by itself it takes milliseconds."""


class Poller(Protocol):
    """What a page needs of a device; its context is current in every call."""

    api: CudaApi
    handle: Any
    name: str
    context_number: int


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


_Key = tuple[int, str, bytes]  # context, entry, cubin


@dataclass(slots=True)
class _Loaded:
    module: Any
    function: Any
    users: Counter[int] = field(default_factory=Counter)  # by identity of the device: how often it has loaded it


@dataclass(frozen=True, slots=True)
class _Load:
    entry: str
    place: str
    begun: float
    ended: float | None = None


class SharedModules:
    """The loaded kernels of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: dict[int, _Load] = {}  # by thread
        self._long: _Load | None = None  # the last one that took long
        self._lock = threading.Lock()  # protects the tables; never held during a call of the NVIDIA driver
        self._loading: dict[int, threading.Lock] = {}  # by context: held while a kernel is loaded there
        self._loaded: dict[_Key, _Loaded] = {}
        self._keys: dict[int, _Key] = {}  # by number of the module
        self._late: dict[int, list[Any]] = {}  # by context: modules that nobody uses, to be unloaded

    def load(self, device: Poller, payload: bytes, entry: str) -> tuple[Any, Any]:
        """(module, function) in the current context, which is that of `device`."""
        key = device.context_number, entry, payload
        with self._lock:
            loading = self._loading.setdefault(device.context_number, threading.Lock())
            known = self._found(key, device)
        if known is None:
            with loading:
                with self._lock:
                    known = self._found(key, device)
                if known is None:
                    self._unload_late(device)
                    with self._watched(device, entry), STREAM_WAITS.alone(device.context_number):
                        module = device.api.load_module(payload)
                        known = _Loaded(module, device.api.function(module, entry), Counter({id(device): 1}))
                    with self._lock:
                        self._loaded[key] = known
                        self._keys[int(module)] = key
        return known.module, known.function

    @contextlib.contextmanager
    def _watched(self, device: Poller, entry: str) -> Iterator[None]:
        thread, load = threading.get_ident(), _Load(entry, device.name, self._clock())
        with self._lock:
            self._under_way[thread] = load
        try:
            yield
        finally:
            ended = self._clock()
            with self._lock:
                del self._under_way[thread]
                if ended - load.begun >= LONG_LOAD_S:
                    self._long = replace(load, ended=ended)

    def held_up(self) -> str:
        """About a load that waits for running kernels, or did so a moment ago, for the error of a wait that has reached
        its bound; empty where there is none. The end of the wait lets the load go on, so it may have ended since."""
        now = self._clock()
        with self._lock:
            loads = [*self._under_way.values(), *([self._long] if self._long is not None else [])]
        for load in loads:
            if now - load.begun >= LONG_LOAD_S and now - (load.ended or now) <= LONG_LOAD_S:
                return (
                    f"meanwhile {load.entry} was being loaded for a rank on {load.place}, which cannot end while "
                    "another kernel runs on that GPU; give each rank a GPU of its own, or load kernels before, with "
                    "KernelFunction.warm_up"
                )
        return ""

    def _found(self, key: _Key, device: Poller) -> _Loaded | None:
        known = self._loaded.get(key)
        if known is not None:
            known.users[id(device)] += 1
        return known

    def unload(self, device: Poller, module: Any) -> None:
        """Undo one `load` by `device`."""
        with self._lock:
            key = self._keys[int(module)]
            known = self._loaded[key]
            known.users[id(device)] -= 1
            last = not +known.users
            if last:
                self._forget(key, known)
                self._late.setdefault(device.context_number, []).append(module)
        if last:
            self._unload_late(device)

    def _unload_late(self, device: Poller) -> None:
        """Unload what nobody uses any more, now or, if a stream of the context waits, another time."""
        while STREAM_WAITS.take(device.context_number):
            try:
                with self._lock:
                    late = self._late.get(device.context_number)
                    module = late.pop() if late else None
                if module is None:
                    return
                device.api.unload_module(module)
            finally:
                STREAM_WAITS.give(device.context_number)

    def leave(self, device: Poller) -> None:
        """The device is idle and being closed: what nobody else uses is unloaded."""
        with self._lock:
            mine = [(k, v) for k, v in self._loaded.items() if id(device) in v.users]
            for key, known in mine:
                del known.users[id(device)]
                if not +known.users:
                    self._forget(key, known)
        for _, known in mine:
            if not +known.users:
                device.api.unload_module(known.module)
        self._unload_late(device)

    def _forget(self, key: _Key, known: _Loaded) -> None:
        del self._loaded[key]
        del self._keys[int(known.module)]
