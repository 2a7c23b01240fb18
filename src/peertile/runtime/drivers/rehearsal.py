"""GPUs that are not there: kernels are compiled for them and run on this processor.

With `PEERTILE_REHEARSE=sm_90` a program for GPUs runs on a machine without any. Whatever asks what the device is gets
told of the GPU: its kind, its architecture, its number of multiprocessors, how many programs of a kernel it holds. So
the same kernels are chosen and compiled as on the GPU (and kept, `peertile cache fill`), and their results come from
the cpu backend. What it cannot show: speed, memory that the host cannot address, and what the driver of CUDA does.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from peertile.backends.rehearsed import Rehearsed, programs_at_once
from peertile.errors import ArgumentError, LaunchError
from peertile.runtime.driver import DriverKind, Grid, LaunchOptions, LoadableBinary, ModuleHandle
from peertile.runtime.drivers.cpu import CpuDevice, CpuDriver
from peertile.runtime.drivers.cpu_handles import CpuModule, as_own

__all__ = ["RehearsalDevice", "RehearsalDriver"]

DEVICES: Final = 8
MULTIPROCESSORS: Final = {
    "sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_103": 148, "sm_120": 188,
}  # fmt: skip
"""Of the largest GPU of each architecture that is sold: A100, A40, L40S, H100 and H200, B200, B300, RTX PRO 6000."""


class RehearsalDevice(CpuDevice):
    """One such device; see DriverDevice for what each function means."""

    kind = DriverKind.CUDA

    def __init__(
        self, ordinal: int, *, arch: str, multiprocessors: int, threads: int, spins: int, memory_limit: int,
        poison: bool,
    ) -> None:  # fmt: skip
        super().__init__(ordinal, threads=threads, spins=spins, memory_limit=memory_limit, poison=poison)
        self.arch = arch
        self._name = f"cuda:{ordinal}"
        self._sharers = 1
        self.capabilities = self.capabilities._replace(
            name=f"a rehearsal for {arch} on {self.capabilities.name}", executors=multiprocessors
        )

    def enter_group(self, abort_address: int, sharers: int) -> None:
        super().enter_group(abort_address, sharers)
        self._sharers = max(sharers, self._sharers)

    def load_module(self, binary: LoadableBinary) -> ModuleHandle:
        if not isinstance(binary, Rehearsed) or binary.gpu is None:
            raise ArgumentError(f"binary: expected one that was compiled for a rehearsal, got one for {binary.target}")
        module = as_own(super().load_module(binary), CpuModule, "module")
        module.limit = min(module.limit, programs_at_once(binary.gpu) * self.capabilities.executors)
        return module

    def max_resident(self, module: ModuleHandle) -> int:
        return super().max_resident(module) // self._sharers

    def _programs(self, module: CpuModule, grid: Grid, options: LaunchOptions) -> int:
        programs = super()._programs(module, grid, options)
        limit = module.limit // self._sharers
        if (module.waits or options.cooperative) and programs > limit:
            raise LaunchError(
                f"{options.name}: its {programs} programs wait for each other and must be resident at once, "
                f"{self._name} holds {limit} of them for each of the {self._sharers} ranks of this process on it; use "
                f"a grid of at most {limit} programs"
            )
        return programs


class RehearsalDriver(CpuDriver):
    """Opens them: `said` is an architecture, or ARCH:MULTIPROCESSORS."""

    kind = DriverKind.CUDA

    def __init__(self, said: str) -> None:
        super().__init__(devices=DEVICES)
        arch, _, number = said.partition(":")
        if arch not in MULTIPROCESSORS:
            raise ArgumentError(f"PEERTILE_REHEARSE: expected one of {', '.join(MULTIPROCESSORS)}, got {arch!r}")
        multiprocessors = int(number) if number else MULTIPROCESSORS[arch]
        self._make = partial(RehearsalDevice, arch=arch, multiprocessors=multiprocessors)
