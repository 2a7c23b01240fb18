"""What a rehearsal makes of a kernel: the binary for a GPU, and the one of this processor that runs in its place.

A rehearsal is a run of a program for GPUs on a machine that has none (runtime/drivers/rehearsal.py). No compiling here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

from peertile.backends.binary import Binary
from peertile.backends.cuda.binary import CudaBinary

__all__ = ["Rehearsed", "programs_at_once", "rehearsed", "resources"]


@dataclass(frozen=True, slots=True)
class Rehearsed(Binary):
    """A binary for this processor; `gpu` is what would run on the device that is rehearsed for."""

    gpu: CudaBinary | None = None

    def fits(self, args: bytes) -> bool:
        """As the binary for the GPU says, so that kernels without bulk copies are compiled where it would ask."""
        return self.gpu is None or self.gpu.fits(args)


def rehearsed(here: Binary, gpu: CudaBinary) -> Rehearsed:
    """The pair."""
    return Rehearsed(**{field.name: getattr(here, field.name) for field in fields(Binary)}, gpu=gpu)


class Resources(NamedTuple):
    """What a program takes of a multiprocessor."""

    registers: int
    """Of each thread."""
    shared_bytes: int
    """Beside what the launch asks for."""


def resources(cubin: bytes, entry: str) -> Resources:
    """Read from the sections of an ELF file, as ptxas writes them."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + k * size) for k in range(count)]
    strings = headers[names][4]
    registers = shared = 0
    for name, _, _, _, offset, nbytes, *_ in headers:
        start = strings + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        if text == f".nv.shared.{entry}":
            shared = nbytes
        elif text == ".nv.info":
            registers = max(registers, _registers(cubin[offset : offset + nbytes]))
    return Resources(registers, shared)


_SIZED, _REGCOUNT = 0x04, 0x2F


def _registers(info: bytes) -> int:
    """The most of any function: an attribute is its format, its number, and two bytes: a value, or the size of one."""
    most = at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            if attribute == _REGCOUNT:
                most = max(most, struct.unpack_from("<I", info, at + 4)[0])
            at += value
    return most


class _Limits(NamedTuple):
    """Of a multiprocessor."""

    warps: int
    programs: int
    shared_bytes: int


_LIMITS: Final = {
    "sm_80": _Limits(64, 32, 164 << 10), "sm_86": _Limits(48, 16, 100 << 10), "sm_89": _Limits(48, 24, 100 << 10),
    "sm_90": _Limits(64, 32, 228 << 10), "sm_100": _Limits(64, 32, 228 << 10), "sm_103": _Limits(64, 32, 228 << 10),
    "sm_120": _Limits(48, 24, 100 << 10),
}  # fmt: skip
_REGISTERS, _WARP_GRAIN, _RESERVED, _SHARED_GRAIN = 1 << 16, 256, 1024, 128


def programs_at_once(binary: CudaBinary) -> int:
    """Programs of a kernel that a multiprocessor holds, by the rules of CUDA's occupancy calculator."""
    limits = _LIMITS[binary.target.partition(":")[2]]
    used = resources(binary.payload, binary.entry)
    warps = binary.num_warps
    of_warp = -(-max(used.registers, 1) * 32 // _WARP_GRAIN) * _WARP_GRAIN
    shared = -(-(used.shared_bytes + binary.shared_bytes + _RESERVED) // _SHARED_GRAIN) * _SHARED_GRAIN
    # Registers are handed out by four schedulers, each to whole warps.
    by_registers = _REGISTERS // 4 // of_warp * 4 // warps
    return min(limits.warps // warps, limits.programs, limits.shared_bytes // shared, by_registers)
