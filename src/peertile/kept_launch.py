"""A launch that its owner keeps and runs again and again, as a communicator does: what each one would find out anew is
found out once. It is made by whoever has a launch (`launch.py`), and knows nothing of what the launch does.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TypeVar

from peertile.errors import PeertileError
from peertile.launch import LaunchOp
from peertile.runtime.context import ExecutionContext
from peertile.runtime.future import DeviceFuture, submitted
from peertile.runtime.launched import Launched
from peertile.runtime.site import Site
from peertile.runtime.standing import Standing
from peertile.runtime.stream import Stream
from peertile.timelines.upper import renew

__all__ = ["KeptLaunch"]

T = TypeVar("T")

_kept: weakref.WeakValueDictionary[int, KeptLaunch] = weakref.WeakValueDictionary()
"""Of this process, by their ids: who keeps a launch does not look at how its kernel is compiled now. Other threads may
keep more while this is looked through, which a set of weak references does not bear."""


class KeptLaunch:
    """A launch that its owner keeps and runs again and again: what `sync_on` finds out anew each time is kept, too."""

    __slots__ = ("__weakref__", "_standing", "launch")

    def __init__(self, launch: LaunchOp) -> None:
        self.launch = launch
        self._standing: Standing | None = None
        _kept[id(self)] = self

    def run(self, stream: Stream, site: Site | None) -> None:
        """As `sync_on` of a new launch with these arguments, made at `site`. The stream is not being captured."""
        launch, standing = self.launch, self._standing
        bound = launch.bound
        if standing is None or standing.lease.stream is not stream:
            standing = self._standing = Standing(launch.kernel.name, stream, bound.uses)
        group = bound.group
        if group is not None:
            group.check()
        ready = launch._prepare()
        if not standing.enter(site):
            launch._site = site
            launch._run_to_end(stream)
            return
        try:
            record = bound.device.driver.run_prepared(stream.handle, ready.prepared, ready.args)
        except BaseException:
            # Interrupted, the launch may go on in its stream: it owns what it uses until that is over.
            self._standing = None
            context = ExecutionContext(launch.kernel.name, stream, on_caller=True)
            context.leases.append(standing.lease)
            context.retain(ready.maker)
            context.abandon()
            raise
        if not standing.leave():
            self._standing = None
        if record is not None:
            raise ready.maker[0](record, *ready.maker[1:])

    @staticmethod
    def renew_all(device: object) -> None:
        """A device compiles kernels otherwise from now on. Loaded at once: later it would wait for what runs."""
        for reference in _kept.valuerefs():
            kept = reference()
            if kept is not None and kept.launch.device is device:
                kept.launch.renew()
                with contextlib.suppress(PeertileError):  # its memory is gone, say: who launches it is told
                    kept.launch.load()

    def submit(self, stream: Stream, site: Site | None, result: T) -> DeviceFuture[T]:
        """The future of `submitted`, with this result."""
        links = stream.device.driver.links
        if links is not None:
            bound = self.launch._bound
            if bound is not None and bound.group is not None:
                bound.group.check()
            future: DeviceFuture[T] | None = links.resubmit(self, stream, site, result)
            if future is not None:
                return future
        return submitted(self.submitted(stream, site), result, stream)

    def submitted(self, stream: Stream, site: Site | None) -> ExecutionContext | Launched:
        """As `LaunchOp.submitted_at`: launches that follow each other share one lease, as long as nobody else uses what
        they do, and each keeps it until it is over."""
        launch, standing = self.launch, self._standing
        bound = launch._bound or launch.bound
        if standing is None or standing.lease.stream is not stream:
            standing = self._standing = Standing(launch.kernel.name, stream, bound.uses)
        group = bound.group
        if group is not None:
            group.check()
        ready = launch._ready
        if ready is None or (ready.spec.may_change and not ready.spec.captures.is_current()):
            ready = launch._ready = launch._made_ready()
        launched = Launched(launch.kernel.name, stream, site, bound.uses, ready.maker)
        standing.submit(launched, stream.device.driver.enqueue, ready.prepared, ready.args)
        return launched


renew.append(KeptLaunch.renew_all)
