"""Launches of the cuda driver that a thread of its own makes: posting one, and making those that were posted.

Of a launch that follows others closely, the part of the NVIDIA driver is as long as all of ours. So while the device's
feeder is awake (`cuda_feeder.py`), a launch is posted in its stream's ring, which takes some 50 ns, and the feeder
makes it, while the thread that posted it prepares the next one. Order is that of the ring: whoever does anything else
on the stream makes what was posted first (`settled`), taking turns with the feeder by the lane's BUSY word.

    posting:  slot, HEAD + 1, then AWAKE is looked at again     sleeping: AWAKE = 0, then all HEADs are looked at again
so at least one of the two sees the other; whoever finds the feeder asleep makes the launch itself, though not at once:
the interpreter lock has to be let go of first, since a launch may wait for a host function that needs it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

from peertile.backends.cpu.target import host_arch

__all__ = ["LINGER_NS", "RING_SLOTS", "SLOT_BYTES", "Feeding", "feeding_text"]

RING_SLOTS: Final = 256
SLOT_BYTES: Final = 512
"""The address of the plan, the bytes of arguments, the arguments."""
_PAUSE: Final = {
    "x86_64": ("call void @llvm.x86.sse2.pause()", "declare void @llvm.x86.sse2.pause()"),
    "aarch64": ("call void @llvm.aarch64.hint(i32 1)", "declare void @llvm.aarch64.hint(i32)"),
}
LINGER_NS: Final = 200_000
"""The feeder goes to sleep when nothing was posted for so long: waking it costs the poster a system call."""
_FUTEX: Final = {"x86_64": 202, "aarch64": 98}
_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129


class Feeding(IntEnum):
    """Words of a feeder. The addresses of its lanes follow at LANES."""

    AWAKE = 0
    STOP = 1
    COUNT = 2
    CALLS = 3  # how often it was called awake; it sleeps on the low half of this word
    LANES = 4


def feeding_text(lane: Any, plan: Any, closely: int) -> str:
    """LLVM text of `settled`, `cuda_post`, `cuda_feed` and `cuda_serve`; `lane` and `plan` are the words' names, and
    `closely` is added to the number of a launch that the feeder will not make."""

    def at(name: str, base: str, index: int) -> str:
        return f"  %{name} = getelementptr i64, ptr %{base}, i64 {int(index)}\n"

    def word(name: str, base: str, index: int) -> str:
        return f"{at(name + '.p', base, index)}  %{name} = load i64, ptr %{name}.p\n"

    pause, declared = _PAUSE.get(host_arch(), ("", ""))
    futex = _FUTEX.get(host_arch(), 202)
    return f"""
{declared}
; Whether nothing is posted any more that was not made, after making it; not if one was refused.
define internal i1 @settled(ptr %lane) {{
entry:
{word("head", "lane", lane.HEAD)}{at("done.p", "lane", lane.DONE)}
  %done = load atomic i64, ptr %done.p acquire, align 8
  %jam.p = getelementptr i64, ptr %lane, i64 {int(lane.JAM)}
  %posted = icmp ne i64 %head, %done
  br i1 %posted, label %make, label %look
make:
  %made = call i64 @cuda_feed(ptr %lane)
  br label %look
look:
  %jam = load atomic i64, ptr %jam.p acquire, align 8
  %fine = icmp eq i64 %jam, 0
  ret i1 %fine
}}

; The number of the launch, posted (plus `closely` where the feeder has gone to sleep); 0 if it cannot be posted, and
; nothing has changed.
define i64 @cuda_post(ptr %lane, ptr %plan, ptr %args, i64 %given) {{
entry:
{word("feeder", "lane", lane.FEEDER)}
  %has.none = icmp eq i64 %feeder, 0
  br i1 %has.none, label %no, label %has
has:
  %awake.ptr = inttoptr i64 %feeder to ptr
  %awake = load atomic i64, ptr %awake.ptr seq_cst, align 8
  %asleep = icmp eq i64 %awake, 0
  br i1 %asleep, label %no, label %look
look:
{word("head", "lane", lane.HEAD)}{at("done.p", "lane", lane.DONE)}
  %done = load atomic i64, ptr %done.p acquire, align 8
{word("issued", "lane", lane.ISSUED)}{word("posted", "lane", lane.POSTED)}{word("used", "lane", lane.USED)}
{word("slots", "lane", lane.SLOTS)}{word("depth", "lane", lane.DEPTH)}{word("have", "lane", lane.SCRATCH_BYTES)}
{word("jam", "lane", lane.JAM)}{word("seen.at", "lane", lane.WORD)}{word("ring", "lane", lane.RING)}
{word("need", "plan", plan.SCRATCH_BYTES)}{word("nbytes", "plan", plan.N_BYTES)}
  %seen.ptr = inttoptr i64 %seen.at to ptr
  %seen = load atomic i64, ptr %seen.ptr acquire, align 8
  %queued = sub i64 %head, %done
  %idle = icmp eq i64 %queued, 0
  %before = select i1 %idle, i64 %issued, i64 %posted
  %under.way = sub i64 %before, %seen
  %deep = icmp sge i64 %under.way, %depth
  %taken = add i64 %used, %queued
  %full = icmp sge i64 %taken, %slots
  %round = icmp sge i64 %queued, {RING_SLOTS}
  %small = icmp ugt i64 %need, %have
  %short = icmp slt i64 %given, %nbytes
  %large = icmp sgt i64 %nbytes, {SLOT_BYTES - 16}
  %jammed = icmp ne i64 %jam, 0
  %no.1 = or i1 %deep, %full
  %no.2 = or i1 %no.1, %round
  %no.3 = or i1 %no.2, %small
  %no.4 = or i1 %no.3, %short
  %no.5 = or i1 %no.4, %large
  %no.6 = or i1 %no.5, %jammed
  br i1 %no.6, label %no, label %check
check:
  %fits = call i1 @fits(ptr %plan, ptr %args)
  br i1 %fits, label %put, label %no
put:
  %index = and i64 %head, {RING_SLOTS - 1}
  %offset = mul i64 %index, {SLOT_BYTES}
  %entry.at = add i64 %ring, %offset
  %entry.p = inttoptr i64 %entry.at to ptr
  %plan.i = ptrtoint ptr %plan to i64
  store i64 %plan.i, ptr %entry.p
  %entry.size = getelementptr i64, ptr %entry.p, i64 1
  store i64 %nbytes, ptr %entry.size
  %entry.args = getelementptr i64, ptr %entry.p, i64 2
  call void @llvm.memcpy.p0.p0.i64(ptr %entry.args, ptr %args, i64 %nbytes, i1 false)
  %sequence = add i64 %before, 1
  store i64 %sequence, ptr %posted.p
  %head.next = add i64 %head, 1
  store atomic i64 %head.next, ptr %head.p seq_cst, align 8
  %still = load atomic i64, ptr %awake.ptr seq_cst, align 8
  %slept = icmp eq i64 %still, 0
  %told = add i64 %sequence, {closely}
  %result = select i1 %slept, i64 %told, i64 %sequence
  ret i64 %result
no:
  ret i64 0
}}

define i64 @cuda_feed(ptr %lane) {{
entry:
{at("busy.p", "lane", lane.BUSY)}{at("done.p", "lane", lane.DONE)}{at("head.p", "lane", lane.HEAD)}
{at("jam.p", "lane", lane.JAM)}{word("ring", "lane", lane.RING)}
  br label %take
take:
  %pair = cmpxchg ptr %busy.p, i64 0, i64 1 acquire monotonic
  %mine = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %mine, label %begin, label %again
again:
  {pause}
  br label %take
begin:
  %entered = call i1 @enter(ptr %lane)
  br label %next
next:
  %done = load i64, ptr %done.p
  %head = load atomic i64, ptr %head.p acquire, align 8
  %jam = load i64, ptr %jam.p
  %none = icmp eq i64 %done, %head
  %jammed = icmp ne i64 %jam, 0
  %over = or i1 %none, %jammed
  br i1 %over, label %end, label %make
make:
  %index = and i64 %done, {RING_SLOTS - 1}
  %offset = mul i64 %index, {SLOT_BYTES}
  %entry.at = add i64 %ring, %offset
  %entry.p = inttoptr i64 %entry.at to ptr
  %plan = load ptr, ptr %entry.p
  %size.p = getelementptr i64, ptr %entry.p, i64 1
  %size = load i64, ptr %size.p
  %args = getelementptr i64, ptr %entry.p, i64 2
  %answer = call i64 @launch(ptr %lane, ptr %plan, ptr %args, i64 %size, i64 0, i1 true)
  %ok = icmp sgt i64 %answer, 0
  br i1 %ok, label %made, label %refused
made:
  %done.next = add i64 %done, 1
  store atomic i64 %done.next, ptr %done.p release, align 8
  br label %next
refused:
  store atomic i64 1, ptr %jam.p release, align 8
  br label %end
end:
  %found = phi i64 [%jam, %next], [1, %refused]
  call void @leave(ptr %lane, i1 %entered)
  store atomic i64 0, ptr %busy.p release, align 8
  ret i64 %found
}}

; Whether something is posted on a lane, which is made.
define internal i1 @round(ptr %feeder) {{
entry:
{at("count.p", "feeder", Feeding.COUNT)}
  %count = load atomic i64, ptr %count.p acquire, align 8
  br label %next
next:
  %k = phi i64 [0, %entry], [%k.next, %one.done]
  %found = phi i1 [false, %entry], [%found.next, %one.done]
  %more = icmp slt i64 %k, %count
  br i1 %more, label %one, label %end
one:
  %at = add i64 %k, {int(Feeding.LANES)}
  %lane.p = getelementptr i64, ptr %feeder, i64 %at
  %lane.i = load atomic i64, ptr %lane.p acquire, align 8
  %lane = inttoptr i64 %lane.i to ptr
{at("head.p", "lane", lane.HEAD)}{at("done.p", "lane", lane.DONE)}{at("jam.p", "lane", lane.JAM)}
  %head = load atomic i64, ptr %head.p seq_cst, align 8
  %done = load atomic i64, ptr %done.p acquire, align 8
  %jam = load atomic i64, ptr %jam.p acquire, align 8
  %posted = icmp ne i64 %head, %done
  %whole = icmp eq i64 %jam, 0
  %due = and i1 %posted, %whole
  br i1 %due, label %make, label %one.done
make:
  %made = call i64 @cuda_feed(ptr %lane)
  br label %one.done
one.done:
  %found.next = or i1 %found, %due
  %k.next = add i64 %k, 1
  br label %next
end:
  ret i1 %found
}}

declare i64 @syscall(i64, ...)

; Wake the feeder, if it sleeps.
define i64 @cuda_call_feeder(ptr %feeder) {{
{at("calls.p", "feeder", Feeding.CALLS)}
  %before = atomicrmw add ptr %calls.p, i64 1 seq_cst
  %rc = call i64 (i64, ...) @syscall(i64 {futex}, ptr %calls.p, i64 {_WAKE_PRIVATE}, i64 1, i64 0, i64 0, i64 0)
  ret i64 0
}}

; Until it is stopped.
define i64 @cuda_serve(ptr %feeder) {{
entry:
{at("stop.p", "feeder", Feeding.STOP)}{at("calls.p", "feeder", Feeding.CALLS)}
  br label %rest
rest:
  %served = phi i64 [0, %entry], [%served.now, %slept], [%served, %rested]
  %calls = load atomic i64, ptr %calls.p seq_cst, align 8
  %called = icmp ne i64 %calls, %served
  %stop.now = load atomic i64, ptr %stop.p seq_cst, align 8
  %no.stop = icmp eq i64 %stop.now, 0
  br i1 %no.stop, label %due, label %done
due:
  br i1 %called, label %wake, label %rested
rested:
  %low = trunc i64 %calls to i32
  %slept.rc = call i64 (i64, ...) @syscall(i64 {futex}, ptr %calls.p, i64 {_WAIT_PRIVATE}, i32 %low, i64 0, i64 0,
                                           i64 0)
  br label %rest
wake:
  %served.now = phi i64 [%calls, %due], [%served.now, %sleep]
  store atomic i64 1, ptr %feeder seq_cst, align 8
  %begin = call i64 @now()
  br label %look
look:
  %since = phi i64 [%begin, %wake], [%since, %quiet], [%since, %clock], [%later, %worked]
  %k = phi i64 [0, %wake], [%k.next, %quiet], [0, %clock], [0, %worked]
  %found = call i1 @round(ptr %feeder)
  br i1 %found, label %worked, label %idle
worked:
  %later = call i64 @now()
  br label %look
idle:
  {pause}
  %k.next = add i64 %k, 1
  %tired = icmp sge i64 %k.next, 64
  br i1 %tired, label %clock, label %quiet
quiet:
  br label %look
clock:
  %time = call i64 @now()
  %spent = sub i64 %time, %since
  %stop = load atomic i64, ptr %stop.p acquire, align 8
  %long = icmp sge i64 %spent, {LINGER_NS}
  %ended = icmp ne i64 %stop, 0
  %sleepy = or i1 %long, %ended
  br i1 %sleepy, label %sleep, label %look
sleep:
  store atomic i64 0, ptr %feeder seq_cst, align 8
  %late = call i1 @round(ptr %feeder)
  %go.on = xor i1 %ended, true
  %again = and i1 %late, %go.on
  br i1 %again, label %wake, label %slept
slept:
  br label %rest
done:
  ret i64 0
}}
"""
