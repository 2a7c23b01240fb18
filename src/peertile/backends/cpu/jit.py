"""LLVM for the cpu target: text to object code, object code to addresses. The only module that imports llvmlite.

Knows nothing of tile IR or launches. llvmlite is imported at the first compilation or load, not before.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any, Final

from peertile.backends.cpu.target import CpuTarget, host_arch
from peertile.errors import UnsupportedError

__all__ = ["compile_for", "compile_text", "host_cpu", "host_features", "llvmlite_version", "load_object", "stages"]

_lock: Final = threading.Lock()  # guards first use; llvmlite itself serialises every LLVM call
_names: Final = itertools.count()
_loaded: Final[list[Any]] = []  # resource trackers: code stays mapped as long as threads may run it, to the end
_state: dict[str, Any] = {}


def _llvm() -> Any:
    with _lock:
        if "llvm" not in _state:
            try:
                import llvmlite.binding as llvm  # type: ignore[import-untyped]
            except ImportError as error:
                raise _no_llvmlite(error) from error
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            _state["llvm"] = llvm
        return _state["llvm"]


def _no_llvmlite(error: ImportError) -> UnsupportedError:
    return UnsupportedError(
        f"cpu: the Python package llvmlite cannot be imported ({error}); install it, as `pip install peertile` does"
    )


def llvmlite_version() -> str:
    try:
        import llvmlite
    except ImportError as error:
        raise _no_llvmlite(error) from error
    return str(llvmlite.__version__)


def host_cpu() -> str:
    """LLVM's name of this processor."""
    return str(_llvm().get_host_cpu_name())


def host_features() -> str:
    """LLVM's feature string of this processor."""
    return str(_llvm().get_host_cpu_features().flatten())


def compile_text(text: str, *, cpu: str | None = None, level: int = 1) -> bytes:
    """Object code of a module of LLVM IR text, optimised at `level` (coroutines are split at every level)."""
    llvm = _llvm()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(
        cpu=cpu or host_cpu(),
        features=host_features() if cpu is None else "",
        opt=2,
        reloc="pic",
        codemodel="default",
    )
    module = llvm.parse_assembly(text)
    module.triple = target.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=level))
    builder.getModulePassManager().run(module, builder)
    return bytes(machine.emit_object(module))


def _machine(target: CpuTarget) -> Any:
    llvm = _llvm()
    if target.arch != host_arch():
        with _lock:
            llvm.initialize_all_targets()
            llvm.initialize_all_asmprinters()
    found = llvm.Target.from_triple(target.triple)
    host = target.cpu == "host"
    return found.create_target_machine(
        cpu=host_cpu() if host else target.cpu,
        features=host_features() if host else "",
        opt=2,
        reloc="pic",
        codemodel="default",
    )


def _optimised(text: str, target: CpuTarget) -> tuple[Any, Any]:
    """Module and target machine. Vectors are explicit in our text and loops are unrolled where it pays, so the
    vectorisers and the unroller only cost time."""
    llvm = _llvm()
    machine = _machine(target)
    module = llvm.parse_assembly(text)
    module.triple = target.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_unrolling = False
    options.loop_interleaving = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module, machine


PASSES: Final = "O1, no unrolling, cg 2"
"""What decides about the code beside text and target; part of the cache key."""


def compile_for(text: str, target: CpuTarget) -> bytes:
    """Object code of a kernel's module for `target`."""
    module, machine = _optimised(text, target)
    return bytes(machine.emit_object(module))


def stages(text: str, target: CpuTarget) -> dict[str, str]:
    """The optimised module and its assembly, for people."""
    module, machine = _optimised(text, target)
    return {"optimised": str(module), "asm": str(machine.emit_assembly(module))}


def load_object(payload: bytes, symbols: Iterable[str]) -> dict[str, int]:
    """Addresses of `symbols` of an object, linked against this process. The code is never unmapped."""
    llvm = _llvm()
    with _lock:
        if "lljit" not in _state:
            # JITLink places all sections of an object next to each other. LLVM's older linker (RuntimeDyld) places
            # each near the last of its kind, and where large tensors lie between them an offset of 32 bits does not
            # reach: it ends the process.
            _state["lljit"] = llvm.create_lljit_compiler(use_jit_link=True)
    library = llvm.JITLibraryBuilder().add_object_img(payload).add_current_process()
    names = list(symbols)
    for name in names:
        library.export_symbol(name)
    tracker = library.link(_state["lljit"], f"peertile.{next(_names)}")
    _loaded.append(tracker)
    return {name: int(tracker[name]) for name in names}
