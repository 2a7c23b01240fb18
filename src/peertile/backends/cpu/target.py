"""Which processor to compile for: name, features, vector width. Detects the host without llvmlite.

The host is described by what the operating system says, since a cache hit must be found without loading
LLVM; the LLVM name of the host is asked for only when something is compiled (`jit.py`).
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from peertile.config import config

__all__ = ["AARCH64", "CpuTarget", "host_arch", "host_target", "named_target"]


class CpuTarget(NamedTuple):
    """A processor. `cpu` is an LLVM name, or "host". `features` are LLVM feature names that code may rely on.

    `identity` tells two hosts apart in a cache key; it is empty for a named processor.
    """

    cpu: str
    arch: str
    features: frozenset[str]
    vector_bits: int
    identity: str = ""

    @property
    def key(self) -> str:
        """What of the target decides about the code."""
        return f"{self.arch}/{self.cpu}/{','.join(sorted(self.features))}/{self.vector_bits}/{self.identity}"

    @property
    def triple(self) -> str:
        return f"{self.arch}-unknown-linux-gnu"

    @property
    def is_x86(self) -> bool:
        return self.arch == "x86_64"

    @property
    def soft_half(self) -> bool:
        """Whether f16 has to be converted by integer instructions."""
        return self.is_x86 and "f16c" not in self.features

    def lanes(self, bits: int) -> int:
        """Elements of `bits` in one vector register."""
        return max(self.vector_bits // bits, 1)


# Names that /proc/cpuinfo and LLVM spell differently; the others are equal.
_CPUINFO: Final = {
    "avx512_bf16": "avx512bf16",
    "avx512_fp16": "avx512fp16",
    "avx512_vnni": "avx512vnni",
    "avx512_vbmi2": "avx512vbmi2",
    "avx_vnni": "avxvnni",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    "asimd": "neon",
    "asimdhp": "fullfp16",
}
_KNOWN: Final = frozenset(
    {
        "fma", "avx", "avx2", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512bf16",
        "avx512fp16", "avx512vnni", "avx512vbmi", "avx512vbmi2", "avxvnni", "sse4.1", "sse4.2", "neon", "fullfp16",
    }
)  # fmt: skip
_AVX2: Final = frozenset({"sse4.1", "sse4.2", "avx", "avx2", "fma", "f16c"})
_AVX512: Final = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_ZEN4: Final = _AVX512 | {"avx512bf16", "avx512vnni", "avx512vbmi", "avx512vbmi2"}
_NAMED: Final = {
    "x86-64": ("x86_64", frozenset[str]()),
    "x86-64-v2": ("x86_64", frozenset({"sse4.1", "sse4.2"})),
    "x86-64-v3": ("x86_64", _AVX2),
    "haswell": ("x86_64", _AVX2),
    "znver1": ("x86_64", _AVX2),
    "znver2": ("x86_64", _AVX2),
    "znver3": ("x86_64", _AVX2),
    "x86-64-v4": ("x86_64", _AVX512),
    "skylake-avx512": ("x86_64", _AVX512),
    "icelake-server": ("x86_64", _AVX512 | {"avx512vnni", "avx512vbmi", "avx512vbmi2"}),
    "sapphirerapids": ("x86_64", _ZEN4),
    "znver4": ("x86_64", _ZEN4),
    "znver5": ("x86_64", _ZEN4),
    "generic": ("aarch64", frozenset({"neon"})),
    "neoverse-n1": ("aarch64", frozenset({"neon", "fullfp16"})),
    "neoverse-v1": ("aarch64", frozenset({"neon", "fullfp16"})),
    "apple-m1": ("aarch64", frozenset({"neon", "fullfp16"})),
}


def _vector_bits(features: frozenset[str]) -> int:
    return 512 if "avx512f" in features else 256 if "avx2" in features else 128


def named_target(cpu: str) -> CpuTarget:
    """The target with an LLVM name. A name that is not in our table is taken to be of the host's
    architecture, with its base features only; LLVM refuses names that it does not know."""
    arch, features = _NAMED.get(cpu, (host_arch(), frozenset[str]()))
    return CpuTarget(cpu, arch, features, _vector_bits(features))


AARCH64: Final = CpuTarget("generic", "aarch64", frozenset({"neon"}), 128)
"""Not the host anywhere in our tests: its text and assembly are read, for the orders that x86 hides."""


def host_arch() -> str:
    """LLVM's name of this machine's architecture."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


@cache
def _detect() -> CpuTarget:
    arch = host_arch()
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        lines = []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", fields.get("Features", ""))
    features = frozenset(_CPUINFO.get(f, f) for f in flags.split()) & _KNOWN
    if arch == "aarch64":
        features |= {"neon"}
    # Clock and bogomips change between runs of one machine; these do not.
    stable = [fields.get(k, "") for k in ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")]
    import hashlib  # takes 2 ms, which `import peertile` does not pay

    identity = hashlib.sha256("|".join([*stable, flags]).encode()).hexdigest()[:16]
    return CpuTarget("host", arch, features, _vector_bits(features), identity)


def host_target() -> CpuTarget:
    """This machine, or what PEERTILE_CPU_TARGET names."""
    name = config().cpu_target
    return _detect() if name is None or name == "host" else named_target(name)
