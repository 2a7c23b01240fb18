"""Which processor to compile for: name, features, vector width. Detects the host without llvmlite.

The host is described by what the operating system says, since a cache hit must be found without loading
LLVM; the LLVM name of the host is asked for only when something is compiled (`jit.py`).
"""

from __future__ import annotations

import platform
import sys
from functools import cache
from typing import Final, NamedTuple

from peertile.config import config
from peertile.errors import ArgumentError

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
        return f"{self.triple}/{self.cpu}/{','.join(sorted(self.features))}/{self.vector_bits}/{self.identity}"

    @property
    def triple(self) -> str:
        if sys.platform == "darwin":  # object files of its own form, and names that begin with an underscore
            return f"{'arm64' if self.arch == 'aarch64' else self.arch}-apple-macosx11.0.0"
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


# Names that the system and LLVM spell differently; the others are equal.
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
    "avx1.0": "avx",
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

# LLVM ends the process when it meets a name that is none, or a processor without 64-bit instructions: so only names
# that are known to be safe get there. These have no features in our table; code for them uses the base set.
_OTHERS: Final = {
    "x86_64": frozenset(
        {
            "nocona", "core2", "penryn", "nehalem", "westmere", "sandybridge", "ivybridge", "broadwell", "skylake",
            "cascadelake", "cooperlake", "cannonlake", "icelake-client", "tigerlake", "rocketlake", "alderlake",
            "raptorlake", "meteorlake", "graniterapids", "bonnell", "silvermont", "goldmont", "goldmont-plus",
            "tremont", "gracemont", "k8", "opteron", "athlon64", "amdfam10", "barcelona", "btver1", "btver2",
            "bdver1", "bdver2", "bdver3", "bdver4",
        }
    ),
    "aarch64": frozenset(
        {
            "cortex-a53", "cortex-a55", "cortex-a57", "cortex-a72", "cortex-a76", "cortex-a78", "neoverse-e1",
            "neoverse-n2", "neoverse-v2", "apple-m2", "apple-m3", "ampere1", "a64fx",
        }
    ),
}  # fmt: skip


def _vector_bits(features: frozenset[str]) -> int:
    return 512 if "avx512f" in features else 256 if "avx2" in features else 128


def named_target(cpu: str) -> CpuTarget:
    """The target with an LLVM name, with the base features alone where our table says no more."""
    if cpu in _NAMED:
        arch, features = _NAMED[cpu]
    else:
        known = [arch for arch, names in _OTHERS.items() if cpu in names]
        if not known:
            raise ArgumentError(
                "cpu: expected host or the LLVM name of a 64-bit processor, "
                f"such as {', '.join(_EXAMPLES)}, got {cpu!r}"
            )
        arch, features = known[0], frozenset()
    return CpuTarget(cpu, arch, features, _vector_bits(features))


_EXAMPLES: Final = ("x86-64-v3", "znver4", "neoverse-n1")

AARCH64: Final = CpuTarget("generic", "aarch64", frozenset({"neon"}), 128)
"""Not the host anywhere in our tests: its text and assembly are read, for the orders that x86 hides."""


def host_arch() -> str:
    """LLVM's name of this machine's architecture."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def _sysctl(name: str) -> str:
    """What macOS says of itself; "" if it does not."""
    import ctypes  # not on the way of the others

    size, text = ctypes.c_size_t(4096), ctypes.create_string_buffer(4096)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), text, ctypes.byref(size), None, ctypes.c_size_t(0))
    return "" if failed else text.value.decode(errors="replace")


def _fields() -> dict[str, str]:
    """What the system says of its first processor, by the names of Linux."""
    if sys.platform == "darwin":
        # Every one of their processors of this architecture has half precision; they list no features by name.
        flags = "asimd asimdhp" if host_arch() == "aarch64" else ""
        for name in ("features", "leaf7_features"):
            flags += " " + _sysctl(f"machdep.cpu.{name}").lower()
        return {"model": _sysctl("machdep.cpu.brand_string"), "flags": flags.strip()}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = file.read().split("\n\n", 1)[0].splitlines()
    except OSError:
        lines = []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


@cache
def _detect() -> CpuTarget:
    arch, fields = host_arch(), _fields()
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
    if name is None or name == "host":
        return _detect()
    try:
        target = named_target(name)
    except ArgumentError as error:
        raise ArgumentError(f"PEERTILE_CPU_TARGET: {str(error).removeprefix('cpu: ')}") from None
    if target.arch != host_arch():
        raise ArgumentError(
            f"PEERTILE_CPU_TARGET: expected a processor of this machine's architecture, {host_arch()}, got {name!r}, "
            f"which is {target.arch}"
        )
    return target
