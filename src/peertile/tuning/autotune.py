"""`autotune`: a function of a candidate and arguments that becomes a function of the arguments. Measures nothing
itself (`session.py` does), and nothing at all but at the first call for a key.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from peertile.backends.cpu.target import host_target
from peertile.comm.group import Group
from peertile.errors import ArgumentError
from peertile.kernel import KernelFunction
from peertile.runtime.checks import check_callable
from peertile.runtime.context import outside_execution
from peertile.runtime.op import DeviceOp
from peertile.runtime.registry import current_device
from peertile.tuning.outputs import kernel_outputs, tensors_of
from peertile.tuning.rules import Rules
from peertile.tuning.session import Decision, Session
from peertile.tuning.store import Question, Store, source_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Autotuned", "autotune"]

C = TypeVar("C")


class Autotuned(Generic[C]):
    """An operation that knows several ways and takes the fastest. Made by `autotune`.

    Calling it gives the lazy operation of the winner for these arguments. The first call for a key measures: it runs
    candidates on these arguments, whose contents it puts back, and takes up to the budget of its rules.
    """

    def __init__(
        self,
        function: Callable[..., DeviceOp[Any]] | KernelFunction,
        candidates: Sequence[C] | Callable[..., Sequence[C]],
        key: Callable[..., Any],
        *,
        reference: Callable[..., Any] | None,
        group: Group | Callable[..., Group | None] | None,
        rules: Rules,
        name: str | None,
        folder: str | Path | None,
        clock: Callable[[], float],
    ) -> None:
        self.function = function
        self.name = name or f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
        self.rules = rules
        self._candidates = candidates
        self._key = key
        self._reference = reference
        self._group = group
        self._store = Store(folder)
        self._clock = clock
        # Held by a decision without a group, so that threads measure a key once. Ranks that are threads share this
        # object and decide together, each with its own group: those hold no lock.
        self._lock = threading.Lock()
        self._alone: dict[Any, tuple[Decision, C]] = {}
        self._by_group: weakref.WeakKeyDictionary[Group, dict[Any, tuple[Decision, C]]] = weakref.WeakKeyDictionary()
        functools.update_wrapper(self, function, updated=())  # not the attributes of a kernel

    def __repr__(self) -> str:
        return f"<autotuned {self.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> DeviceOp[Any]:
        return self._made(self._decide(args, kwargs)[1], args, kwargs)

    def decide(self, *args: Any, **kwargs: Any) -> Decision:
        """Which candidate calls like this one take, and why; measured now if it is not known. Collective over the
        group until it is known."""
        return self._decide(args, kwargs)[0]

    def forget(self, *args: Any, **kwargs: Any) -> None:
        """Forget the decision for calls like this one, on disk too: the next one measures. Call it on every rank."""
        group = self._group_of(args, kwargs)
        key = repr(self._key(*args, **kwargs))
        self._known(group).pop(key, None)
        if group is None or group.rank == 0:
            _, names = self._listed(args, kwargs)
            self._store.forget(self._question(key, names, group))

    # ---------------------------------------------------------------- inside

    def _made(self, candidate: C, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeviceOp[Any]:
        if isinstance(self.function, KernelFunction):
            if not isinstance(candidate, Mapping):
                raise ArgumentError(
                    f"autotune({self.name}): candidates: expected mappings of the kernel's parameters, as "
                    f"{{'BLOCK': 64}}, got {candidate!r}"
                )
            return self.function(*args, **kwargs, **candidate)
        return self.function(candidate, *args, **kwargs)

    def _decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Decision, C]:
        group = self._group_of(args, kwargs)
        key = repr(self._key(*args, **kwargs))
        known = self._known(group)
        found = known.get(key)
        if found is not None:
            return found
        outside_execution(f"autotune({self.name})")
        if group is not None:
            found = known[key] = self._measured(key, group, args, kwargs)
            return found
        with self._lock:
            found = known.get(key)
            if found is None:
                found = known[key] = self._measured(key, None, args, kwargs)
            return found

    def _measured(
        self, key: str, group: Group | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Decision, C]:
        candidates, names = self._listed(args, kwargs)
        reference = None if self._reference is None else functools.partial(self._reference, *args, **kwargs)
        session = Session(
            self.name,
            names,
            self._question(key, names, group),
            lambda k: self._made(candidates[k], args, kwargs),
            kernel_outputs if isinstance(self.function, KernelFunction) else lambda result: result,
            reference,
            tensors_of(args, kwargs),
            group,
            self._store,
            self.rules,
            self._clock,
        )
        decision = session.decide()
        return decision, candidates[decision.index]

    def _known(self, group: Group | None) -> dict[Any, tuple[Decision, C]]:
        return self._alone if group is None else self._by_group.setdefault(group, {})

    def _group_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Group | None:
        group = self._group if isinstance(self._group, Group | None) else self._group(*args, **kwargs)
        if group is not None and not isinstance(group, Group):
            raise ArgumentError(f"autotune({self.name}): group: expected a Group or None, got {group!r}")
        return group

    def _listed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[C], list[str]]:
        """The candidates and what they are called, the same in every process."""
        given = self._candidates(*args, **kwargs) if callable(self._candidates) else self._candidates
        if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given:
            raise ArgumentError(f"autotune({self.name}): candidates: expected at least one, in a list, got {given!r}")
        names = [_name_of(candidate) for candidate in given]
        twice = next((name for k, name in enumerate(names) if name in names[:k]), None)
        if twice is not None:
            raise ArgumentError(f"autotune({self.name}): candidates: expected each one once, got {twice} twice")
        unstable = next((name for name in names if " at 0x" in name), None)
        if unstable is not None:
            raise ArgumentError(
                f"autotune({self.name}): candidates: expected a repr that is the same in every process, by which "
                f"decisions are kept, got {unstable}; use plain values, enums, dataclasses or functions of a module"
            )
        return given, names

    def _question(self, key: str, names: Sequence[str], group: Group | None) -> Question:
        functions: list[Callable[..., Any] | None] = [self.function, self._reference]
        if not callable(self._candidates):
            functions += [c for c in self._candidates if callable(c)]
        device = current_device()
        return {
            "name": self.name,
            "key": key,
            "candidates": list(names),
            "source": source_of(functions),
            "rules": repr(self.rules),
            "target": f"{device.driver.kind.value} {device.target or ''} {device.capabilities.executors}",
            "machine": host_target().key,
            "ranks": 1 if group is None else group.size,
            "model": "alone" if group is None else group.model.value,
        }


def _name_of(candidate: Any) -> str:
    module, name = getattr(candidate, "__module__", None), getattr(candidate, "__qualname__", None)
    return f"{module}.{name}" if callable(candidate) and module and name else repr(candidate)


def autotune(
    *,
    candidates: Sequence[C] | Callable[..., Sequence[C]],
    key: Callable[..., Any],
    reference: Callable[..., Any] | None = None,
    group: Group | Callable[..., Group | None] | None = None,
    rules: Rules | None = None,
    name: str | None = None,
    folder: str | Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[Callable[..., DeviceOp[Any]] | KernelFunction], Autotuned[C]]:
    """Make `function(candidate, *args)`, which returns an operation, into `function(*args)`, which takes the fastest
    candidate for `key(*args)`. A kernel takes mappings of its parameters as candidates.

    candidates: a list, or a function of the arguments that gives one; the first listed wins a tie. key: what the
    decision depends on, shapes and dtypes mostly; its repr is compared, and is the same on every rank. reference: a
    function of the arguments that gives what is right, as arrays or as an operation; without it the first candidate
    that works is the reference. group: the ranks that run it together, or a function of the arguments that gives them;
    all of them take one winner, and the first call for a key is collective. folder: where decisions are kept, by
    default in PEERTILE_CACHE_DIR. clock: seconds.

    An operation must be repeatable: candidates run many times on the arguments of the first call. What they held is put
    back in the end. A candidate that fails or differs on any rank is out on every rank. ArgumentError for arguments
    that do not fit, UnsupportedError if no candidate is left, PeerFailed if a rank ends meanwhile.

    >>> import numpy as np, peertile as pt
    >>> from peertile.cli.bench_kernels import vector_add
    >>> @pt.autotune(candidates=[256, 1024], key=lambda z, x, y: z.shape)
    ... def add(tile, z, x, y):
    ...     return vector_add(z.partition(tile), x, y).map(lambda *_: z)
    >>> x = pt.ones(1000, pt.f32)
    >>> add(pt.empty(1000, pt.f32), x, x).sync().numpy().max()
    np.float32(2.0)
    """
    check_callable("autotune: key", key)
    check_callable("autotune: clock", clock)
    if reference is not None:
        check_callable("autotune: reference", reference)
    if not (group is None or isinstance(group, Group) or callable(group)):
        raise ArgumentError(f"autotune: group: expected a Group, a function that gives one, or None, got {group!r}")
    if rules is not None and not isinstance(rules, Rules):
        raise ArgumentError(f"autotune: rules: expected peertile.tuning.Rules, got {rules!r}")

    def decorate(function: Callable[..., DeviceOp[Any]] | KernelFunction) -> Autotuned[C]:
        check_callable("autotune: function", function)
        return Autotuned(
            function,
            candidates,
            key,
            reference=reference,
            group=group,
            rules=rules or Rules(),
            name=name,
            folder=folder,
            clock=clock,
        )

    return decorate
