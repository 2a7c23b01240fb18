"""Triton source to a cubin, ahead of time and without a GPU. The only module that imports triton.

The source lies in a real file, named by its content, so that Triton's line numbers, profilers and people can all
look at it. Errors of Triton and of the assembler come back as `CompileError` at the user's line, through the line
table that `emit` made.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import io
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from peertile.backends.cuda.ahead import put_in_order
from peertile.backends.cuda.emit import Emitted
from peertile.backends.cuda.target import CudaOptions, capability
from peertile.config import config
from peertile.errors import CompileError, InternalError, UnsupportedError
from peertile.source import Loc

__all__ = [
    "Compiled",
    "PassFailure",
    "compile_source",
    "disassemble",
    "loaded",
    "triton_options",
    "triton_version",
    "written",
]

MINIMUM = (3, 4)
NATIVE_FP8 = 89
ORDERED_BY = (3, 6)
"""The version of Triton whose divided loops are known well enough to be put in order."""
_PTXAS_LINE = re.compile(r"^ptxas\S* (\S+), line (\d+); *(?:error|fatal) *: *(.*)$", re.MULTILINE)
_PTXAS_ERROR = re.compile(r"^ptxas.*?(?:error|fatal) *: *(.*)$", re.MULTILINE)
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"')


class PassFailure(CompileError):
    """A pass of Triton broke down. That can be a fault of the pass, at one number of warps and not at another."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What Triton made of one kernel."""

    entry: str
    cubin: bytes
    shared_bytes: int
    scratch_bytes: int
    scratch_align: int
    num_warps: int
    stages: dict[str, str]


def _triton() -> Any:
    # By name: type checkers need not have it, and what it exports is untyped anyhow.
    try:
        triton: Any = importlib.import_module("triton")
    except ImportError as error:
        raise UnsupportedError(
            "cuda: kernels are compiled by triton, which is not installed; pip install 'peertile[cuda]'"
        ) from error
    if _version(triton.__version__) < MINIMUM:
        raise UnsupportedError(
            f"cuda: expected triton {'.'.join(map(str, MINIMUM))} or newer, got {triton.__version__}; "
            "pip install -U triton"
        )
    return triton


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text)[:2])


def triton_version() -> str:
    """Version of the installed triton; UnsupportedError, saying what to install, if there is none that fits."""
    version: str = _triton().__version__
    return version


def source_path(source: str, entry: str) -> Path:
    """Where the source of a kernel lies: one file for each content."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:24]
    return config().cache_dir / "triton-source" / f"{entry[:60]}_{digest}.py"


def written(source: str, entry: str) -> Path:
    path = source_path(source, entry)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may write the same content at the same time: the last rename wins, all are equal.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(source)
        os.replace(file.name, path)
    return path


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_peertile_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # No bytecode beside the source: the cache holds what it was told to hold.
    saved, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = saved
    return module


def compile_source(emitted: Emitted, arch: str, options: CudaOptions) -> Compiled:
    """A cubin for `arch`; CompileError at the user's line where Triton or ptxas refuse."""
    if emitted.narrow_floats and capability(arch) < NATIVE_FP8:
        # Triton keeps one table of fp8 conversions for a process, made for the first architecture that needs it.
        # This process is for GPUs that convert natively; others get a process of their own.
        return _in_a_process(emitted, arch, options)
    return compile_here(emitted, arch, options)


def _in_a_process(emitted: Emitted, arch: str, options: CudaOptions) -> Compiled:
    _triton()
    sent = pickle.dumps((sys.path, str(config().cache_dir), emitted, arch, options))
    done = subprocess.run([sys.executable, "-c", _CHILD], input=sent, capture_output=True, check=False, timeout=600)
    try:
        answer = pickle.loads(done.stdout)
    except (pickle.UnpicklingError, EOFError):
        text = _short(done.stderr.decode(errors="replace"))
        raise InternalError(f"cuda backend: the compiling process ended with {done.returncode}: {text}") from None
    if isinstance(answer, Compiled):
        return answer
    kind, message, loc = answer
    raise kind(message, loc)


def answer_parent(emitted: Emitted, arch: str, options: CudaOptions) -> None:
    """What the compiling process does: a pickled answer to standard output."""
    answer: Any
    try:
        answer = compile_here(emitted, arch, options)
    except CompileError as error:
        answer = (type(error), error.message, error.loc)
    sys.stdout.buffer.write(pickle.dumps(answer))


_CHILD = """
import os, pickle, sys
path, cache, *request = pickle.loads(sys.stdin.buffer.read())
sys.path[:] = path
os.environ["PEERTILE_CACHE_DIR"] = cache
from peertile.backends.cuda.triton_compile import answer_parent
answer_parent(*request)
"""


def compile_here(emitted: Emitted, arch: str, options: CudaOptions) -> Compiled:
    """`compile_source` in this process."""
    triton = _triton()
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability(arch), 32)
    path = written(emitted.source, emitted.entry)
    function = getattr(loaded(path), emitted.entry)
    signature = {p.name: p.type for p in emitted.parameters}
    attributes = {
        (k,): [["tt.divisibility", p.divisibility]] for k, p in enumerate(emitted.parameters) if p.divisibility > 1
    }
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs={}, attrs=attributes)
    said = _Said()
    try:
        with _compiling, _triton_cache(triton, options), _small_numbers_kept(), said.captured():
            kernel = triton.compile(source, target=target, options=triton_options(emitted, options))
    except Exception as error:
        raise _translated(error, said.text, emitted, path, arch) from error
    metadata = kernel.metadata
    return Compiled(
        entry=metadata.name,
        cubin=kernel.asm["cubin"],
        shared_bytes=metadata.shared,
        scratch_bytes=getattr(metadata, "global_scratch_size", 0),
        scratch_align=getattr(metadata, "global_scratch_align", 1),
        num_warps=metadata.num_warps,
        stages={"triton": emitted.source} | {k: str(kernel.asm[k]) for k in ("ttir", "ttgir", "llir", "ptx")},
    )


class _Said:
    """What the compiler printed: MLIR names the line of an error on the process's standard error, nowhere else."""

    def __init__(self) -> None:
        self.text = ""

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Within the context, standard output is dropped and standard error kept; it is passed on if nothing failed."""
        sys.stderr.flush()
        saved = os.dup(2)
        failed = True
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    yield
                failed = False
            finally:
                os.dup2(saved, 2)
                os.close(saved)
                file.seek(0)
                self.text = file.read().decode(errors="replace")
        if self.text and not failed:
            sys.stderr.write(self.text)


@contextlib.contextmanager
def _triton_cache(triton: Any, options: CudaOptions) -> Iterator[None]:
    """Triton's own cache, beside ours and not in the user's home; others for what is put in order on its way.

    Triton names its entries by the content of its whole installation, which takes half a second of hashing in each
    process. In a cache that is ours alone, the files' sizes and times tell as much. It knows nothing of how loops are
    put in order, so each way of doing that has a cache of its own.
    """
    hashed = _hashers()
    for module, _ in hashed:
        module.triton_key = _installation
    try:
        ordered = bool(options.specialize) and _version(triton.__version__) == ORDERED_BY
        with contextlib.ExitStack() as stack:
            stack.enter_context(triton.knobs.cache.scope())
            triton.knobs.cache.dir = str(config().cache_dir / (f"triton-{_way()}" if ordered else "triton"))
            if ordered:
                stack.enter_context(triton.knobs.runtime.scope())
                triton.knobs.runtime.add_stages_inspection_hook = _with_order
            yield
    finally:
        for module, function in hashed:
            module.triton_key = function


class _Compiling:
    """One thread after the other: what Triton is told, and where standard output and error go meanwhile, is the whole
    process's. At its end each takes back what it found, and with others in between that would be theirs, for ever."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Also of a process that was forked, in which no other thread runs."""
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


_compiling = _Compiling()
os.register_at_fork(after_in_child=_compiling.begin)


@functools.cache
def _way() -> str:
    """Which way of putting loops in order this is."""
    return hashlib.sha256(Path(__file__).with_name("ahead.py").read_bytes()).hexdigest()[:12]


def _with_order(backend: Any, stages: dict[str, Any], options: Any, language: Any, capability: Any) -> None:
    """Called by Triton with what it is going to do: its loops in groups are put in order before they become code."""
    divide = stages["ttgir"]

    def in_order(module: Any, metadata: Any) -> Any:
        found = divide(module, metadata)
        text = str(found)
        ordered = put_in_order(text)
        return found if ordered is text else _parsed(ordered, found)

    stages["ttgir"] = in_order


def _parsed(text: str, instead: Any) -> Any:
    """The module of a text; where Triton does not take it, `instead`."""
    ir: Any = importlib.import_module("triton._C.libtriton").ir
    with tempfile.TemporaryDirectory(prefix="peertile-") as folder:
        path = Path(folder, "ordered.ttgir")
        path.write_text(text)
        try:
            module = ir.parse_mlir_module(str(path), instead.context)
        except RuntimeError:
            return instead
    module.context = instead.context
    return module


@functools.cache
def _hashers() -> tuple[tuple[Any, Any], ...]:
    """Triton's modules that ask for the content of the installation, and what they ask."""
    modules: list[Any] = [importlib.import_module(f"triton.{name}") for name in ("runtime.cache", "compiler.compiler")]
    return tuple((module, module.triton_key) for module in modules if callable(getattr(module, "triton_key", None)))


@functools.cache
def _installation() -> str:
    """Which triton this is."""
    triton: Any = _triton()
    folder = Path(triton.__file__).parent
    stats = [(path, path.stat()) for path in (Path(triton.__file__), *sorted((folder / "_C").glob("libtriton*")))]
    return " ".join((triton.__version__, *(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)))


@contextlib.contextmanager
def _small_numbers_kept() -> Iterator[None]:
    """Triton 3.4 has no option for it: whatever is compiled, it has its functions take small numbers for zero."""
    compiler = importlib.import_module("triton.backends.nvidia.compiler")
    own = compiler.nvidia
    if "enable_reflect_ftz" not in compiler.CUDAOptions.__dataclass_fields__:
        kept = {**vars(own), "set_nvvm_reflect_ftz": lambda module: None}
        compiler.nvidia = SimpleNamespace(**kept)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        compiler.nvidia = own  # type: ignore[attr-defined]


def triton_options(emitted: Emitted, options: CudaOptions) -> dict[str, Any]:
    """What Triton is told about a kernel beside its source."""
    return {
        "num_warps": emitted.num_warps,
        "num_stages": emitted.num_stages,
        "maxnreg": options.max_registers or emitted.max_registers,
        # a * b + c is two roundings unless fma was asked for, and small numbers are not flushed to zero.
        "enable_fp_fusion": False,
        "enable_reflect_ftz": False,
        # What the kernel's own instructions need, where that is more than the assembler's default.
        **({} if emitted.ptx_version is None else {"ptx_version": emitted.ptx_version}),
    }


# ---------------------------------------------------------------- errors


def _translated(error: Exception, said: str, emitted: Emitted, path: Path, arch: str) -> CompileError:
    name = type(error).__name__
    if name == "PTXASError":
        return _assembler_error(str(error), emitted, path, arch)
    if hasattr(error, "node"):
        return CompileError(
            f"triton refused the kernel for {arch}: {_reason(error)} (emitted source: {path})",
            _loc_of_node(error, emitted),
        )
    # Passes report on standard error, as path:line:column: error: text.
    found = re.search(rf"{re.escape(str(path))}:(\d+):\d+: error: (.*)", said)
    loc = _loc_at(emitted, int(found[1])) if found is not None else _loc_at(emitted, len(emitted.lines))
    first = re.search(r"^(?:LLVM ERROR: |.*: error: |Unsupported)(.*)$", said, re.MULTILINE)
    reason = first[0].split(": error: ")[-1] if first is not None else f"{name}: {_short(str(error))}"
    kind = PassFailure if "PassManager::run failed" in str(error) else CompileError
    return kind(f"triton failed on the kernel for {arch}: {reason} (emitted source: {path})", loc)


def _reason(error: BaseException) -> str:
    """The innermost message: Triton wraps one error around another for each call that it inlines."""
    inner = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    text = getattr(inner, "error_message", None) or (str(inner) if inner is not error else "")
    return _short(text) or _short(str(error))


def _short(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _loc_of_node(error: Exception, emitted: Emitted) -> Loc | None:
    """The outermost error is about the kernel itself; its line counts from the kernel's decorator."""
    line = getattr(getattr(error, "node", None), "lineno", None)
    if line is None:
        return None
    head = next(k for k, text in enumerate(emitted.source.splitlines()) if text == f"def {emitted.entry}(")
    return _loc_at(emitted, head + line)


def _loc_at(emitted: Emitted, line: int) -> Loc | None:
    """The user's place for line `line` (from 1) of the source, or for the closest line before it that has one."""
    for k in range(min(line, len(emitted.lines)) - 1, -1, -1):
        if emitted.lines[k] is not None:
            return emitted.lines[k]
    return next((loc for loc in emitted.lines if loc is not None), None)


def _assembler_error(text: str, emitted: Emitted, path: Path, arch: str) -> CompileError:
    """ptxas names a line of the PTX, whose `.loc` lines name lines of our source."""
    found = _PTXAS_LINE.search(text)
    first = _PTXAS_ERROR.search(text)
    loc, message = None, first[1].strip() if first is not None else _short(text)
    if found is not None:
        message = found[3].strip()
        loc = _loc_of_ptx(Path(found[1]), int(found[2]), emitted, path)
    if loc is None:
        loc = _loc_at(emitted, len(emitted.lines))
    if emitted.ptx_version is not None and "Unsupported .version" in text:
        needed = f"{emitted.ptx_version // 10}.{emitted.ptx_version % 10}"
        message += (
            f"; bulk copies to a multicast address need PTX {needed}, which ptxas of CUDA 13.1 and newer takes: "
            "install nvidia-cuda-nvcc>=13.1 and name its ptxas in TRITON_PTXAS_PATH (TRITON_PTXAS_BLACKWELL_PATH from "
            "sm_100 on)"
        )
    return CompileError(f"the assembler (ptxas) refused the kernel for {arch}: {message} (emitted source: {path})", loc)


def _loc_of_ptx(ptx: Path, line: int, emitted: Emitted, path: Path) -> Loc | None:
    try:
        lines = ptx.read_text().splitlines()
    except OSError:
        return None
    ptx.unlink(missing_ok=True)  # Triton leaves it behind after an error
    files = {m[1]: m[2] for m in map(_FILE.match, lines) if m is not None}
    for text in reversed(lines[:line]):
        found = _LOC.match(text)
        # A function of the library has lines of its own; the call is at the kernel's line before it.
        if found is not None and files.get(found[1], path.name).endswith(path.name):
            at = int(found[2]) - 1
            if at < len(emitted.lines) and emitted.lines[at] is not None:
                return emitted.lines[at]
    return None


# ---------------------------------------------------------------- inspection


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin, by the tools that come with triton."""
    _triton()
    text: str = importlib.import_module("triton.tools.disasm").get_sass(cubin)
    return text
