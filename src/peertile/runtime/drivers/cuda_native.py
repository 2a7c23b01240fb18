"""Launches of the cuda driver in native code: one crossing for a launch, for a chain of them, or for one and its end.

A launch through Python bindings costs several times what the NVIDIA driver takes. Here a few functions in LLVM text,
compiled by `backends/cpu/jit.py`, fill the parameters and call `cuLaunchKernel` themselves. They do what
`cuda_stream.py` does for a launch without output, and refuse (the answer 0, nothing changed) whatever is less simple:
a stream that is behind or takes no launches now, a full block of slots, scratch memory that is too small, an argument
block that is too short. They take no lock: the caller holds the stream's lock. Errors of the NVIDIA driver come back as
its number.

Python calls them as its own builtins: through ctypes a call would cost as much as a fifth of a launch. They let go of
the interpreter lock meanwhile, since a launch may wait for a host function that needs it.

Two records of 8-byte words are shared with Python: the `Lane` of a stream and the `Plan` of a kernel over a grid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Final

from peertile.backends.cpu import jit
from peertile.runtime.drivers.cpu_native_python import builtin
from peertile.runtime.drivers.cuda_native_feeding import feeding_text
from peertile.runtime.drivers.object_files import kept_object

__all__ = ["CLOSELY", "FAILED", "LONG_WAY", "TELLING", "Lane", "Native", "Plan", "native"]

NEAR_TICKS: Final = 150_000
"""Two launches in fewer ticks than this (some 60 us) follow each other closely."""
TELLING: Final = 64
"""Launches under way that tell when they begin; beyond, markers are written for them."""
CLOSELY: Final = 1 << 60
"""Added to the number of a launch where the feeder is wanted for those to come."""
LONG_WAY: Final = 0
"""Answer: not launched, since it is not so simple."""
FAILED: Final = -1
"""Answer: the NVIDIA driver refused; the number of its error is in the lane."""


class Lane(IntEnum):
    """Words of a stream. Eight share a line of the cache: what the thread that posts writes, what the one that makes
    launches writes, and what hardly changes stand apart, since a line that two threads write goes to and fro."""

    # Hardly changes.
    STREAM = 0
    CONTEXT = 1  # that must be current
    LAUNCH_KERNEL = 2  # addresses of functions of the NVIDIA driver
    LAUNCH_COOPERATIVE = 3
    WRITE_VALUE = 4
    CURRENT_CONTEXT = 5
    PUSH_CONTEXT = 6
    POP_CONTEXT = 7
    LAUNCH_EX = 8
    CONFIG = 9  # address of a CUlaunchConfig whose one attribute lets a kernel start before the one in front has ended
    PARAMS = 10  # address of the parameters
    POINTERS = 11  # address of the array of pointers to them
    MARK_EVERY = 12
    TOLD = 13  # address of pairs: launches that tell when they begin; see TELLING
    CLOSELY = 14  # from which streak on the feeder is wanted
    WORD = 15  # address of the number of the last operation known to have run
    FAULTS = 16  # address of the fault records of the current block
    WORDS = 17  # address of its launch words
    SLOTS = 18
    SCRATCH = 19  # address of the stream's scratch memory
    SCRATCH_BYTES = 20  # of each half
    DEPTH = 21  # most operations under way; 0 while the stream takes no launches this way
    FEEDER = 22  # address of the words of the device's feeder (`cuda_feeder.py`); 0: it has none
    RING = 23  # address of the launches that wait for the feeder
    JAM = 24  # the NVIDIA driver refused one: nothing is made any more until Python has seen to it
    # Written by whoever makes launches.
    ISSUED = 32
    MARKED = 33
    USED = 34  # slots of the block that are taken
    TURN = 35  # which half of the scratch memory is next: two launches that overlap do not share one
    ERROR = 36
    FOUND = 37  # where the current context is asked into
    DONE = 38  # how many of the posted launches were made
    TELLING = 39  # how many pairs (address of the word, number of the operation that has ended by then) were noted
    BUSY = 40  # somebody is making them
    # Written by whoever posts them, or looks at what has run.
    HEAD = 48  # how many were posted
    POSTED = 49  # number of the last one
    LAST = 50  # when the last launch was made, in ticks of the processor
    STREAK = 51  # launches that came shortly after the one in front
    TOLD_DONE = 56  # how many of the pairs are over
    SEEN = 57  # number of the last operation that is known to have run by them
    COUNT = 64


class Plan(IntEnum):
    """Words of a kernel over a grid with its options. Pairs (slot, most) follow at CHECKS: what bulk copies take."""

    FUNCTION = 0
    N_BYTES = 1
    THREADS = 2
    SHARED = 3
    WAITS = 4
    PROGRAMS = 5
    GRID0 = 6
    GRID1 = 7
    GRID2 = 8
    ABORT = 9
    TIMEOUT = 10
    COOPERATIVE = 11
    SCRATCH_BYTES = 12
    OVERLAP = 13
    TELLS = 14
    N_CHECKS = 15
    CHECKS = 16


def _word(name: str, base: str, index: int) -> str:
    return f"  {name}.p = getelementptr i64, ptr {base}, i64 {int(index)}\n  {name} = load i64, ptr {name}.p"


def _words(base: str, **names: int) -> str:
    return "\n".join(_word(f"%{name}", base, index) for name, index in names.items())


def _text() -> str:
    hidden = [
        "%n0", "%n1", "%n2", "%abort", "%fault", "%timeout", "%launch", "0", "%scratch", "0",
    ]  # fmt: skip
    stores = []
    for k, value in enumerate(hidden):
        stores.append(f"  %hidden{k} = getelementptr i8, ptr %tail, i64 {8 * k}\n  store i64 {value}, ptr %hidden{k}")
    fill = "\n".join(stores)
    return f"""
declare i32 @clock_gettime(i32, ptr)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare i64 @llvm.readcyclecounter()

; Marks: what was issued has run once the word says so. The answer is the error.
define internal i32 @mark(ptr %lane) {{
{_words("%lane", stream=Lane.STREAM, word=Lane.WORD, issued=Lane.ISSUED, function=Lane.WRITE_VALUE)}
  %write = inttoptr i64 %function to ptr
  %rc = call i32 %write(i64 %stream, i64 %word, i64 %issued, i32 0)
  %marked.p = getelementptr i64, ptr %lane, i64 {int(Lane.MARKED)}
  store i64 %issued, ptr %marked.p
  %rc64 = zext i32 %rc to i64
  %error.p = getelementptr i64, ptr %lane, i64 {int(Lane.ERROR)}
  store i64 %rc64, ptr %error.p
  ret i32 %rc
}}

; Makes the stream's context current; whether it was not. Left as it was found: other libraries look at it.
define internal i1 @enter(ptr %lane) {{
{_words("%lane", context=Lane.CONTEXT, current=Lane.CURRENT_CONTEXT, push=Lane.PUSH_CONTEXT)}
  %found.p = getelementptr i64, ptr %lane, i64 {int(Lane.FOUND)}
  %ask = inttoptr i64 %current to ptr
  %asked = call i32 %ask(ptr %found.p)
  %found = load i64, ptr %found.p
  %other = icmp ne i64 %found, %context
  br i1 %other, label %change, label %done
change:
  %push.f = inttoptr i64 %push to ptr
  %pushed = call i32 %push.f(i64 %context)
  br label %done
done:
  ret i1 %other
}}

define internal void @leave(ptr %lane, i1 %entered) {{
{_words("%lane", pop=Lane.POP_CONTEXT)}
  br i1 %entered, label %change, label %done
change:
  %pop.f = inttoptr i64 %pop to ptr
  %found.p = getelementptr i64, ptr %lane, i64 {int(Lane.FOUND)}
  %popped = call i32 %pop.f(ptr %found.p)
  br label %done
done:
  ret void
}}

define i64 @cuda_launch(ptr %lane, ptr %plan, ptr %args, i64 %have, i64 %awaited) {{
  %ready = call i1 @settled(ptr %lane)
  br i1 %ready, label %go, label %jammed
go:
  %entered = call i1 @enter(ptr %lane)
  %answer = call i64 @launch(ptr %lane, ptr %plan, ptr %args, i64 %have, i64 %awaited, i1 false)
  call void @leave(ptr %lane, i1 %entered)
  %last.p = getelementptr i64, ptr %lane, i64 {int(Lane.LAST)}
  %last = load i64, ptr %last.p
  %now = call i64 @llvm.readcyclecounter()
  store i64 %now, ptr %last.p
  %passed = sub i64 %now, %last
  %near = icmp ult i64 %passed, {NEAR_TICKS}
  %streak.p = getelementptr i64, ptr %lane, i64 {int(Lane.STREAK)}
  %streak = load i64, ptr %streak.p
  %longer = add i64 %streak, 1
  %streak.next = select i1 %near, i64 %longer, i64 0
  store i64 %streak.next, ptr %streak.p
  ret i64 %answer
jammed:
  ret i64 {LONG_WAY}
}}

define i64 @cuda_enqueue(ptr %lane, ptr %plan, ptr %args, i64 %have, i64 %awaited) {{
  %answer = call i64 @cuda_launch(ptr %lane, ptr %plan, ptr %args, i64 %have, i64 %awaited)
{_words("%lane", streak=Lane.STREAK, closely=Lane.CLOSELY)}
  %long = icmp sge i64 %streak, %closely
  %made = icmp sgt i64 %answer, 0
  %wanted = and i1 %long, %made
  %told = add i64 %answer, {CLOSELY}
  %result = select i1 %wanted, i64 %told, i64 %answer
  ret i64 %result
}}

; Whether every word of the arguments that the plan has a bound for is from 1 to that.
define internal i1 @fits(ptr %plan, ptr %args) {{
entry:
{_words("%plan", nchecks=Plan.N_CHECKS)}
  br label %check
check:
  %k = phi i64 [0, %entry], [%k.next, %checked]
  %more = icmp slt i64 %k, %nchecks
  br i1 %more, label %one, label %yes
one:
  %at = mul i64 %k, 2
  %at.slot = add i64 %at, {int(Plan.CHECKS)}
  %at.most = add i64 %at, {int(Plan.CHECKS) + 1}
  %slot.p = getelementptr i64, ptr %plan, i64 %at.slot
  %slot = load i64, ptr %slot.p
  %most.p = getelementptr i64, ptr %plan, i64 %at.most
  %most = load i64, ptr %most.p
  %value.p = getelementptr i64, ptr %args, i64 %slot
  %value = load i64, ptr %value.p, align 1
  %low = icmp slt i64 %value, 1
  %high = icmp sgt i64 %value, %most
  %outside = or i1 %low, %high
  br i1 %outside, label %no, label %checked
checked:
  %k.next = add i64 %k, 1
  br label %check
yes:
  ret i1 true
no:
  ret i1 false
}}

define internal i64 @launch(ptr %lane, ptr %plan, ptr %args, i64 %given, i64 %awaited, i1 %forced) {{
entry:
{
        _words(
            "%lane",
            stream=Lane.STREAM,
            word=Lane.WORD,
            issued=Lane.ISSUED,
            faults=Lane.FAULTS,
            blockwords=Lane.WORDS,
            used=Lane.USED,
            slots=Lane.SLOTS,
            params=Lane.PARAMS,
            pointers=Lane.POINTERS,
            memory=Lane.SCRATCH,
            turn=Lane.TURN,
            config=Lane.CONFIG,
            ex=Lane.LAUNCH_EX,
            have=Lane.SCRATCH_BYTES,
            plain=Lane.LAUNCH_KERNEL,
            together=Lane.LAUNCH_COOPERATIVE,
            depth=Lane.DEPTH,
            every=Lane.MARK_EVERY,
        )
    }
{
        _words(
            "%plan",
            kernel=Plan.FUNCTION,
            nbytes=Plan.N_BYTES,
            threads=Plan.THREADS,
            shared=Plan.SHARED,
            waits=Plan.WAITS,
            programs=Plan.PROGRAMS,
            n0=Plan.GRID0,
            n1=Plan.GRID1,
            n2=Plan.GRID2,
            abort=Plan.ABORT,
            timeout=Plan.TIMEOUT,
            cooperative=Plan.COOPERATIVE,
            need=Plan.SCRATCH_BYTES,
            overlap=Plan.OVERLAP,
            tells=Plan.TELLS,
        )
    }
  %word.ptr = inttoptr i64 %word to ptr
  %seen = load atomic i64, ptr %word.ptr acquire, align 8
  %under.way = sub i64 %issued, %seen
  %deep.0 = icmp sge i64 %under.way, %depth
  %free = xor i1 %forced, true
  %deep = and i1 %deep.0, %free
  %full = icmp sge i64 %used, %slots
  %small = icmp ugt i64 %need, %have
  %short = icmp slt i64 %given, %nbytes
  %no.0 = or i1 %short, %deep
  %no.a = or i1 %no.0, %full
  %no.b = or i1 %no.a, %small
  br i1 %no.b, label %long, label %check
check:
  %fits = call i1 @fits(ptr %plan, ptr %args)
  br i1 %fits, label %before, label %long
before:
  ; A marker before what may block, so that a wait for an earlier operation never waits for it; or it tells itself
  ; when it begins, which takes the GPU no time.
  %marked.p = getelementptr i64, ptr %lane, i64 {int(Lane.MARKED)}
  %marked = load i64, ptr %marked.p
  %behind = icmp slt i64 %marked, %issued
  %may.block = icmp ne i64 %waits, 0
  %blocking = and i1 %behind, %may.block
  %telling.p = getelementptr i64, ptr %lane, i64 {int(Lane.TELLING)}
  %telling = load i64, ptr %telling.p
  %told.done.p = getelementptr i64, ptr %lane, i64 {int(Lane.TOLD_DONE)}
  %told.done = load atomic i64, ptr %told.done.p acquire, align 8
  %telling.now = sub i64 %telling, %told.done
  %has.room = icmp slt i64 %telling.now, {TELLING}
  %can.tell = icmp ne i64 %tells, 0
  %tell.it = and i1 %can.tell, %has.room
  %tell = and i1 %blocking, %tell.it
  %no.tell = xor i1 %tell, true
  %mark.first = and i1 %blocking, %no.tell
  br i1 %mark.first, label %first, label %fill
first:
  %first.rc = call i32 @mark(ptr %lane)
  %first.bad = icmp ne i32 %first.rc, 0
  br i1 %first.bad, label %failed, label %fill
fill:
  %fault.offset = mul i64 %used, 128
  %record = add i64 %faults, %fault.offset
  ; The lowest bit asks the kernel to tell: see `begun` in backends/cuda/ptx.py.
  %tell.bit = zext i1 %tell to i64
  %fault = or i64 %record, %tell.bit
  %launch.offset = mul i64 %used, 64
  %launch = add i64 %blockwords, %launch.offset
  %half = mul i64 %turn, %have
  %scratch = add i64 %memory, %half
  %has.scratch = icmp ne i64 %need, 0
  %flip = zext i1 %has.scratch to i64
  %turn.next = xor i64 %turn, %flip
  store i64 %turn.next, ptr %turn.p
  %params.ptr = inttoptr i64 %params to ptr
  call void @llvm.memcpy.p0.p0.i64(ptr %params.ptr, ptr %args, i64 %nbytes, i1 false)
  %tail = getelementptr i8, ptr %params.ptr, i64 %nbytes
{fill}
  %programs32 = trunc i64 %programs to i32
  %threads32 = trunc i64 %threads to i32
  %shared32 = trunc i64 %shared to i32
  %as.one = icmp ne i64 %cooperative, 0
  br i1 %as.one, label %all, label %not.all
not.all:
  %early = icmp ne i64 %overlap, 0
  br i1 %early, label %before.end, label %each
before.end:
  %config.ptr = inttoptr i64 %config to ptr
  store i32 %programs32, ptr %config.ptr
  %config.threads = getelementptr i8, ptr %config.ptr, i64 12
  store i32 %threads32, ptr %config.threads
  %config.shared = getelementptr i8, ptr %config.ptr, i64 24
  store i32 %shared32, ptr %config.shared
  %ex.f = inttoptr i64 %ex to ptr
  %ex.rc = call i32 %ex.f(i64 %config, i64 %kernel, i64 %pointers, i64 0)
  br label %launched
all:
  %all.f = inttoptr i64 %together to ptr
  %all.rc = call i32 %all.f(i64 %kernel, i32 %programs32, i32 1, i32 1, i32 %threads32, i32 1, i32 1, i32 %shared32,
                            i64 %stream, i64 %pointers)
  br label %launched
each:
  %each.f = inttoptr i64 %plain to ptr
  %each.rc = call i32 %each.f(i64 %kernel, i32 %programs32, i32 1, i32 1, i32 %threads32, i32 1, i32 1, i32 %shared32,
                              i64 %stream, i64 %pointers, i64 0)
  br label %launched
launched:
  %rc = phi i32 [%all.rc, %all], [%each.rc, %each], [%ex.rc, %before.end]
  %rc64 = zext i32 %rc to i64
  %error.p = getelementptr i64, ptr %lane, i64 {int(Lane.ERROR)}
  store i64 %rc64, ptr %error.p
  %refused = icmp ne i32 %rc, 0
  br i1 %refused, label %failed, label %count
count:
  br i1 %tell, label %note, label %counted
note:
  %pair = and i64 %telling, {TELLING - 1}
  %pair.offset = mul i64 %pair, 16
{_word("%told", "%lane", Lane.TOLD)}
  %pair.at = add i64 %told, %pair.offset
  %pair.p = inttoptr i64 %pair.at to ptr
  %begun = add i64 %record, 64
  store i64 %begun, ptr %pair.p
  %pair.number = getelementptr i64, ptr %pair.p, i64 1
  store i64 %issued, ptr %pair.number
  %telling.next = add i64 %telling, 1
  store atomic i64 %telling.next, ptr %telling.p release, align 8
  br label %counted
counted:
  %used.next = add i64 %used, 1
  store i64 %used.next, ptr %used.p
  %sequence = add i64 %issued, 1
  store i64 %sequence, ptr %issued.p
  %marked.now = load i64, ptr %marked.p
  %unmarked = sub i64 %sequence, %marked.now
  %many = icmp sge i64 %unmarked, %every
  %wanted = icmp ne i64 %awaited, 0
  %mark.now = or i1 %many, %wanted
  br i1 %mark.now, label %last, label %done
last:
  %last.rc = call i32 @mark(ptr %lane)
  %last.bad = icmp ne i32 %last.rc, 0
  br i1 %last.bad, label %failed, label %done
done:
  ret i64 %sequence
long:
  ret i64 {LONG_WAY}
failed:
  ret i64 {FAILED}
}}

; How many of `count` launches were made; the lane's error says whether the next one failed or takes the long way.
define i64 @cuda_chain(ptr %lane, ptr %plans, ptr %blocks, ptr %sizes, i64 %count, i64 %awaited) {{
entry:
  %error.p = getelementptr i64, ptr %lane, i64 {int(Lane.ERROR)}
  %ready = call i1 @settled(ptr %lane)
  br i1 %ready, label %go, label %jammed
jammed:
  ret i64 0
go:
  store i64 0, ptr %error.p
  %entered = call i1 @enter(ptr %lane)
  br label %next
next:
  %k = phi i64 [0, %go], [%k.next, %made]
  %more = icmp slt i64 %k, %count
  br i1 %more, label %make, label %done
make:
  %plan.p = getelementptr ptr, ptr %plans, i64 %k
  %plan = load ptr, ptr %plan.p
  %args.p = getelementptr ptr, ptr %blocks, i64 %k
  %args = load ptr, ptr %args.p
  %size.p = getelementptr i64, ptr %sizes, i64 %k
  %size = load i64, ptr %size.p
  %k.next = add i64 %k, 1
  %is.last = icmp eq i64 %k.next, %count
  %last = zext i1 %is.last to i64
  %mark = and i64 %last, %awaited
  %answer = call i64 @launch(ptr %lane, ptr %plan, ptr %args, i64 %size, i64 %mark, i1 false)
  %ok = icmp sgt i64 %answer, 0
  br i1 %ok, label %made, label %done
made:
  br label %next
done:
  %made.count = phi i64 [%k, %next], [%k, %make]
  call void @leave(ptr %lane, i1 %entered)
  ret i64 %made.count
}}

define internal i64 @now() {{
  %time = alloca [2 x i64]
  %rc = call i32 @clock_gettime(i32 1, ptr %time)
  %s = load i64, ptr %time
  %ns.p = getelementptr i64, ptr %time, i64 1
  %ns = load i64, ptr %ns.p
  %s.ns = mul i64 %s, 1000000000
  %sum = add i64 %s.ns, %ns
  ret i64 %sum
}}

; The number of the last operation that is known to have run. With the interpreter lock, hence by one at a time.
define i64 @cuda_seen(ptr %lane) {{
entry:
{_words("%lane", word=Lane.WORD, told=Lane.TOLD)}
  %word.ptr = inttoptr i64 %word to ptr
  %marked = load atomic i64, ptr %word.ptr acquire, align 8
  %telling.p = getelementptr i64, ptr %lane, i64 {int(Lane.TELLING)}
  %telling = load atomic i64, ptr %telling.p acquire, align 8
  %done.p = getelementptr i64, ptr %lane, i64 {int(Lane.TOLD_DONE)}
  %seen.p = getelementptr i64, ptr %lane, i64 {int(Lane.SEEN)}
  br label %next
next:
  %done = load i64, ptr %done.p
  %seen = load i64, ptr %seen.p
  %more = icmp slt i64 %done, %telling
  br i1 %more, label %one, label %end
one:
  %pair = and i64 %done, {TELLING - 1}
  %offset = mul i64 %pair, 16
  %pair.at = add i64 %told, %offset
  %pair.p = inttoptr i64 %pair.at to ptr
  %begun.i = load i64, ptr %pair.p
  %number.p = getelementptr i64, ptr %pair.p, i64 1
  %number = load i64, ptr %number.p
  %old = icmp sge i64 %marked, %number
  br i1 %old, label %over, label %look
look:
  %begun.p = inttoptr i64 %begun.i to ptr
  %begun = load atomic i64, ptr %begun.p acquire, align 8
  %has.begun = icmp ne i64 %begun, 0
  br i1 %has.begun, label %note, label %end
note:
  store i64 %number, ptr %seen.p
  br label %over
over:
  %done.next = add i64 %done, 1
  store atomic i64 %done.next, ptr %done.p release, align 8
  br label %next
end:
  %further = icmp sgt i64 %marked, %seen
  %known = select i1 %further, i64 %marked, i64 %seen
  ret i64 %known
}}

; Whether the stream has passed `sequence`, after at most `ns`.
define i64 @cuda_spin(ptr %lane, i64 %sequence, i64 %ns) {{
entry:
{_word("%word", "%lane", Lane.WORD)}
  %word.ptr = inttoptr i64 %word to ptr
  %begin = call i64 @now()
  br label %look
look:
  %k = phi i64 [0, %entry], [%k.next, %again], [0, %clock]
  %seen = load atomic i64, ptr %word.ptr acquire, align 8
  %passed = icmp sge i64 %seen, %sequence
  br i1 %passed, label %yes, label %again
again:
  %k.next = add i64 %k, 1
  %tired = icmp sge i64 %k.next, 64
  br i1 %tired, label %clock, label %look
clock:
  %time = call i64 @now()
  %spent = sub i64 %time, %begin
  %late = icmp sge i64 %spent, %ns
  br i1 %late, label %no, label %look
yes:
  ret i64 1
no:
  ret i64 0
}}

define i64 @cuda_run(ptr %lane, ptr %plan, ptr %args, i64 %have, i64 %ns) {{
  %sequence = call i64 @cuda_launch(ptr %lane, ptr %plan, ptr %args, i64 %have, i64 1)
  %streak.p = getelementptr i64, ptr %lane, i64 {int(Lane.STREAK)}
  store i64 0, ptr %streak.p
  %ok = icmp sgt i64 %sequence, 0
  br i1 %ok, label %spin, label %done
spin:
  %passed = call i64 @cuda_spin(ptr %lane, i64 %sequence, i64 %ns)
  br label %done
done:
  ret i64 %sequence
}}
"""


_ENTRIES: Final[dict[str, tuple[str, str | None]]] = {
    "cuda_enqueue": ("ppbi", "cuda_post"),
    "cuda_run": ("ppbi", None),
    "cuda_spin": ("pii", None),
    "cuda_feed": ("p", None),
    "cuda_serve": ("p", None),
    "cuda_call_feeder": ("p", None),
}
"""Functions that Python calls without the interpreter lock, with their arguments: an address, a bytes object (its
address and its length), an integer; and what is tried first with the lock, all but the last argument: not 0 is its
answer."""

_MOST_OF_A_CHAIN: Final = 256


def _doors() -> str:
    """The entries from Python. Only functions of CPython's stable ABI are used."""
    text = """
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyBytes_AsString(ptr)
declare i64 @PyBytes_Size(ptr)
declare ptr @PyErr_Occurred()
declare i64 @PyList_Size(ptr)
declare ptr @PyList_GetItem(ptr, i64)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
"""
    for name, (codes, first) in _ENTRIES.items():
        lines, values = [], []
        for k, code in enumerate(codes):
            lines += [f"  %at{k} = getelementptr ptr, ptr %args, i64 {k}", f"  %o{k} = load ptr, ptr %at{k}"]
            if code == "b":
                lines += [
                    f"  %v{k} = call ptr @PyBytes_AsString(ptr %o{k})", f"  %n{k} = call i64 @PyBytes_Size(ptr %o{k})"
                ]  # fmt: skip
                values += [f"ptr %v{k}", f"i64 %n{k}"]
                continue
            lines.append(f"  %i{k} = call i64 @PyLong_AsLongLong(ptr %o{k})")
            if code == "i":
                values.append(f"i64 %i{k}")
            else:
                lines.append(f"  %v{k} = inttoptr i64 %i{k} to ptr")
                values.append(f"ptr %v{k}")
        before = "  br label %without"
        if first is not None:
            before = f"""  %quick = call i64 @{first}({", ".join(values[:-1])})
  %was.quick = icmp ne i64 %quick, 0
  br i1 %was.quick, label %at.once, label %without
at.once:
  %quick.object = call ptr @PyLong_FromLongLong(i64 %quick)
  ret ptr %quick.object"""
        text += f"""
define ptr @python_{name}(ptr %self, ptr %args, i64 %count) {{
{chr(10).join(lines)}
  %wrong = call ptr @PyErr_Occurred()
  %raised = icmp ne ptr %wrong, null
  br i1 %raised, label %bad, label %good
bad:
  ret ptr null
good:
{before}
without:
  %thread = call ptr @PyEval_SaveThread()
  %answer = call i64 @{name}({", ".join(values)})
  call void @PyEval_RestoreThread(ptr %thread)
  %object = call ptr @PyLong_FromLongLong(i64 %answer)
  ret ptr %object
}}
"""
    most = _MOST_OF_A_CHAIN
    return f"""{text}
; (lane): as cuda_seen.
define ptr @python_cuda_seen(ptr %self, ptr %args, i64 %count) {{
  %lane.o = load ptr, ptr %args
  %lane.i = call i64 @PyLong_AsLongLong(ptr %lane.o)
  %lane = inttoptr i64 %lane.i to ptr
  %answer = call i64 @cuda_seen(ptr %lane)
  %object = call ptr @PyLong_FromLongLong(i64 %answer)
  ret ptr %object
}}

; (lane, [address of a plan], [argument block], awaited): as cuda_chain, of the first {most} launches of the lists.
define ptr @python_cuda_chain(ptr %self, ptr %args, i64 %count) {{
entry:
  %plans = alloca [{most} x i64]
  %blocks = alloca [{most} x ptr]
  %sizes = alloca [{most} x i64]
  %lane.o = load ptr, ptr %args
  %list.p = getelementptr ptr, ptr %args, i64 1
  %list = load ptr, ptr %list.p
  %bytes.p = getelementptr ptr, ptr %args, i64 2
  %bytes = load ptr, ptr %bytes.p
  %awaited.p = getelementptr ptr, ptr %args, i64 3
  %awaited.o = load ptr, ptr %awaited.p
  %lane.i = call i64 @PyLong_AsLongLong(ptr %lane.o)
  %lane = inttoptr i64 %lane.i to ptr
  %awaited = call i64 @PyLong_AsLongLong(ptr %awaited.o)
  %all = call i64 @PyList_Size(ptr %list)
  %few = icmp slt i64 %all, {most}
  %n = select i1 %few, i64 %all, i64 {most}
  br label %next
next:
  %k = phi i64 [0, %entry], [%k.next, %one]
  %more = icmp slt i64 %k, %n
  br i1 %more, label %one, label %taken
one:
  %plan.o = call ptr @PyList_GetItem(ptr %list, i64 %k)
  %plan = call i64 @PyLong_AsLongLong(ptr %plan.o)
  %block.o = call ptr @PyList_GetItem(ptr %bytes, i64 %k)
  %block = call ptr @PyBytes_AsString(ptr %block.o)
  %size = call i64 @PyBytes_Size(ptr %block.o)
  %plan.at = getelementptr i64, ptr %plans, i64 %k
  store i64 %plan, ptr %plan.at
  %block.at = getelementptr ptr, ptr %blocks, i64 %k
  store ptr %block, ptr %block.at
  %size.at = getelementptr i64, ptr %sizes, i64 %k
  store i64 %size, ptr %size.at
  %k.next = add i64 %k, 1
  br label %next
taken:
  %wrong = call ptr @PyErr_Occurred()
  %raised = icmp ne ptr %wrong, null
  br i1 %raised, label %bad, label %good
bad:
  ret ptr null
good:
  br label %post
post:
  %p = phi i64 [0, %good], [%p.next, %posted]
  %left = icmp slt i64 %p, %n
  br i1 %left, label %try, label %rest
try:
  %p.plan.at = getelementptr ptr, ptr %plans, i64 %p
  %p.plan = load ptr, ptr %p.plan.at
  %p.block.at = getelementptr ptr, ptr %blocks, i64 %p
  %p.block = load ptr, ptr %p.block.at
  %p.size.at = getelementptr i64, ptr %sizes, i64 %p
  %p.size = load i64, ptr %p.size.at
  %quick = call i64 @cuda_post(ptr %lane, ptr %p.plan, ptr %p.block, i64 %p.size)
  %was.quick = icmp ne i64 %quick, 0
  %p.next = add i64 %p, 1
  br i1 %was.quick, label %posted, label %rest
posted:
  br label %post
rest:
  %made = phi i64 [%p, %post], [%p, %try]
  %all.posted = icmp sge i64 %made, %n
  br i1 %all.posted, label %out, label %direct
direct:
  %thread = call ptr @PyEval_SaveThread()
  %plans.rest = getelementptr ptr, ptr %plans, i64 %made
  %blocks.rest = getelementptr ptr, ptr %blocks, i64 %made
  %sizes.rest = getelementptr i64, ptr %sizes, i64 %made
  %n.rest = sub i64 %n, %made
  %more.made = call i64 @cuda_chain(ptr %lane, ptr %plans.rest, ptr %blocks.rest, ptr %sizes.rest, i64 %n.rest,
                                    i64 %awaited)
  call void @PyEval_RestoreThread(ptr %thread)
  br label %out
out:
  %direct.made = phi i64 [0, %rest], [%more.made, %direct]
  %answer = add i64 %made, %direct.made
  %object = call ptr @PyLong_FromLongLong(i64 %answer)
  ret ptr %object
}}
"""


class Native:
    """The functions, as builtins of Python. The lists of a chain stay as they are while it is submitted: the caller
    made them."""

    def __init__(self, symbols: dict[str, int]) -> None:
        self.launch: Callable[[int, int, bytes, int], int] = builtin("cuda_launch", symbols["python_cuda_enqueue"])
        """(lane, plan, arguments, awaited): the number of the launch, perhaps plus CLOSELY, LONG_WAY or FAILED."""
        self.run: Callable[[int, int, bytes, int], int] = builtin("cuda_run", symbols["python_cuda_run"])
        """(lane, plan, arguments, ns): the same, after at most `ns` of waiting for its end."""
        self.spin: Callable[[int, int, int], int] = builtin("cuda_spin", symbols["python_cuda_spin"])
        """(lane, sequence, ns): whether the stream has passed `sequence`, after at most `ns`."""
        self.chain: Callable[[int, list[int], list[bytes], int], int] = builtin(
            "cuda_chain", symbols["python_cuda_chain"]
        )
        """(lane, plans, argument blocks, awaited): how many of the first launches were made."""
        self.feed: Callable[[int], int] = builtin("cuda_feed", symbols["python_cuda_feed"])
        """(lane): make what was posted; 0, or 1 if the NVIDIA driver refused one."""
        self.serve: Callable[[int], int] = builtin("cuda_serve", symbols["python_cuda_serve"])
        """(words of a feeder): make what is posted on any of its lanes whenever it is called, until it is stopped."""
        self.seen: Callable[[int], int] = builtin("cuda_seen", symbols["python_cuda_seen"])
        """(lane): the number of the last operation that is known to have run."""
        self.call_feeder: Callable[[int], int] = builtin("cuda_call_feeder", symbols["python_cuda_call_feeder"])
        """(words of a feeder): wake it."""
        self.post = symbols["cuda_post"]
        """Address of a function of native code, with the interpreter lock: (lane, plan, arguments, bytes of them): the
        number of the launch, perhaps plus CLOSELY, or LONG_WAY."""


_lock: Final = threading.Lock()
_made: list[Native] = []


def native() -> Native:
    """The functions; compiled, or read from the disk, at the first call of a process."""
    with _lock:
        if not _made:
            names = [f"python_{name}" for name in (*_ENTRIES, "cuda_chain", "cuda_seen")] + ["cuda_post"]
            text = _text() + feeding_text(Lane, Plan, CLOSELY) + _doors()
            _made.append(Native(jit.load_object(kept_object("cuda-runtime", text), names)))
        return _made[0]
