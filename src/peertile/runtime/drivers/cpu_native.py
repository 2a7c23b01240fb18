"""The native runtime of the cpu driver: what runs without the interpreter lock. Emits text; loads nothing itself.

Bottom up: `cpu_native_polling.py`, `cpu_native_programs.py`, `cpu_native_streams.py`, `cpu_native_python.py`.

Three kinds of threads run it: a *caller* (a Python thread in `run_inline` or `host_wait`), a stream's own thread
(`stream_loop`) and the workers of a device (`worker_loop`). A stream is run by one thread at a time, whoever holds
S.RUNNER; all progress is in the stream, so that another thread can go on where one left off. The design:

- Programs are claimed in chunks from one word, {epoch | chunks left}. The caller takes part and completion counts
  programs, so a worker that is late or asleep never delays a launch. A worker reads what a job is only after it
  has claimed a chunk of it: from then on the job cannot end without that chunk.
- Programs that wait are coroutines. An executor starts all programs that nobody has claimed, then goes round
  those it started, testing the polled words itself and resuming the satisfied ones. So a launch needs no thread
  per program, and any number of executors (also one) makes progress.
- When nothing can run: pause, then yield, then sleep for a growing time. Not on a futex: the words polled are
  many, and are stored to by kernels of other processes that know nothing of who sleeps. The sleep is at most a
  sixteenth of the time waited so far (50 us to 1 ms), so it costs a long wait 6 % and a short one nothing.
- Lost wake-ups: whoever goes to sleep announces it (seq_cst) and looks again; whoever has news publishes it
  (seq_cst) and then looks for sleepers.

Deadlines are CLOCK_MONOTONIC in ns; a call with one returns SLICE soon after it, except while a single chunk of
a plain kernel or one copy runs.
"""

from __future__ import annotations

from peertile.runtime.drivers.cpu_emit import Module
from peertile.runtime.drivers.cpu_native_polling import emit_polling
from peertile.runtime.drivers.cpu_native_programs import emit_programs
from peertile.runtime.drivers.cpu_native_python import emit_entries
from peertile.runtime.drivers.cpu_native_streams import emit_streams

__all__ = ["native_module"]


def native_module() -> Module:
    """All functions, for this platform. The text of the module is the key of its cached object."""
    m = Module()
    emit_polling(m)
    emit_programs(m)
    emit_streams(m)
    emit_entries(m)
    return m
