"""The kernels of the driver conformance suite for the cpu target, written as LLVM IR by hand.

They keep the kernel ABI without the compiler, so that a driver is tested alone, and so that a change of the ABI on
one side alone fails here.
"""

from __future__ import annotations

from dataclasses import dataclass

from peertile.backends.cpu import jit
from peertile.testing.driver_suite import SuiteKernels

__all__ = ["HandBinary", "cpu_kernels", "plain_kernel", "waiting_kernel"]


@dataclass(frozen=True)
class HandBinary:
    """A compiled kernel, as far as a driver looks at one."""

    entry: str
    payload: bytes
    waits: bool
    scratch_bytes: int = 0
    target: str = "cpu"


def plain_kernel(entry: str, body: str, scratch_bytes: int = 0) -> HandBinary:
    """A kernel that does not wait. `body` runs with %p (program), %args, %ctx and %scratch, and goes to %next."""
    text = f"""
define void @{entry}_range(ptr %args, ptr %ctx, i64 %begin, i64 %end, ptr %scratch) {{
entry:
  br label %head
head:
  %p = phi i64 [ %begin, %entry ], [ %p1, %next ]
  %more = icmp slt i64 %p, %end
  br i1 %more, label %body, label %exit
body:
{body}
next:
  %p1 = add i64 %p, 1
  br label %head
exit:
  ret void
}}
"""
    return HandBinary(entry, jit.compile_text(text), waits=False, scratch_bytes=scratch_bytes)


_COROUTINE = """
declare token @llvm.coro.id(i32, ptr, ptr, ptr)
declare ptr @llvm.coro.begin(token, ptr)
declare i64 @llvm.coro.size.i64()
declare i8 @llvm.coro.suspend(token, i1)
declare ptr @llvm.coro.free(token, ptr)
declare void @llvm.coro.end(ptr, i1, token)

define i64 @{entry}_frame_size() {{
  %size = alloca i64
  call void @{entry}_start(ptr null, ptr null, i64 -1, ptr null, ptr %size)
  %s = load i64, ptr %size
  %t = add i64 %s, 63
  %u = and i64 %t, -64
  ret i64 %u
}}

define i64 @{entry}_promise_offset() {{
  ret i64 64
}}

define void @{entry}_start(ptr %args, ptr %ctx, i64 %p, ptr %scratch, ptr %memory) presplitcoroutine {{
entry:
  %promise = alloca [8 x i64], align 64
  %id = call token @llvm.coro.id(i32 64, ptr %promise, ptr null, ptr null)
  %asked = icmp eq i64 %p, -1
  br i1 %asked, label %size, label %begin
size:
  %bytes = call i64 @llvm.coro.size.i64()
  store i64 %bytes, ptr %memory
  ret void
begin:
  %frame = call ptr @llvm.coro.begin(token %id, ptr %memory)
  %poll.expected = getelementptr i64, ptr %promise, i64 1
  %poll.cmp = getelementptr i64, ptr %promise, i64 2
  %poll.width = getelementptr i64, ptr %promise, i64 3
  %poll.start = getelementptr i64, ptr %promise, i64 4
  %poll.place = getelementptr i64, ptr %promise, i64 5
  %poll.outcome = getelementptr i64, ptr %promise, i64 6
  %poll.slot = getelementptr i64, ptr %promise, i64 7
  br label %body
body:
{body}
finish:
  %last = call i8 @llvm.coro.suspend(token none, i1 true)
  switch i8 %last, label %end [ i8 0, label %trap i8 1, label %cleanup ]
trap:
  unreachable
cleanup:
  %gone = call ptr @llvm.coro.free(token %id, ptr %frame)
  br label %end
end:
  call void @llvm.coro.end(ptr %frame, i1 false, token none)
  ret void
}}
"""


def wait(name: str, word: str, expected: str, then: str, *, width: int = 64, place: int = 0, slot: str = "0") -> str:
    """Text that waits until the word is AT_LEAST `expected` and goes to `then`; it begins at label `name`."""
    return f"""  br label %{name}
{name}:
  %{name}.v = load atomic i{width}, ptr {word} acquire, align {width // 8}
  %{name}.e = trunc i64 {expected} to i{width}
  %{name}.d = sub i{width} %{name}.v, %{name}.e
  %{name}.ok = icmp sge i{width} %{name}.d, 0
  br i1 %{name}.ok, label %{then}, label %{name}.no
{name}.no:
  %{name}.a = ptrtoint ptr {word} to i64
  store i64 %{name}.a, ptr %promise
  store i64 {expected}, ptr %poll.expected
  store i64 0, ptr %poll.cmp
  store i64 {width}, ptr %poll.width
  store i64 0, ptr %poll.start
  store i64 {place}, ptr %poll.place
  store i64 {slot}, ptr %poll.slot
  %{name}.s = call i8 @llvm.coro.suspend(token none, i1 false)
  switch i8 %{name}.s, label %end [ i8 0, label %{name}.back i8 1, label %cleanup ]
{name}.back:
  %{name}.o = load i64, ptr %poll.outcome
  %{name}.go = icmp eq i64 %{name}.o, 0
  br i1 %{name}.go, label %{name}, label %finish
""".replace(f"trunc i64 {expected} to i64", f"add i64 {expected}, 0")


def waiting_kernel(entry: str, body: str, scratch_bytes: int = 0) -> HandBinary:
    """A kernel that waits: `body` as for plain kernels, plus `wait`; it ends by going to %finish."""
    text = _COROUTINE.format(entry=entry, body=body)
    return HandBinary(entry, jit.compile_text(text), waits=True, scratch_bytes=scratch_bytes)


def _args(*names: str) -> str:
    """Loads of the argument slots: pointers for names that begin with a capital, i64 otherwise."""
    lines = []
    for k, name in enumerate(names):
        kind = "ptr" if name[0].isupper() else "i64"
        lines.append(f"  %{name}.at = getelementptr i64, ptr %args, i64 {k}")
        lines.append(f"  %{name} = load {kind}, ptr %{name}.at")
    return "\n".join(lines) + "\n"


def _context(**words: int) -> str:
    lines = []
    for name, word in words.items():
        kind = "ptr" if name[0].isupper() else "i64"
        lines.append(f"  %{name}.at = getelementptr i64, ptr %ctx, i64 {word}")
        lines.append(f"  %{name} = load {kind}, ptr %{name}.at")
    return "\n".join(lines) + "\n"


_ADD = (
    _args("X", "Y", "Z")
    + """
  %x.at = getelementptr i64, ptr %X, i64 %p
  %y.at = getelementptr i64, ptr %Y, i64 %p
  %z.at = getelementptr i64, ptr %Z, i64 %p
  %x = load i64, ptr %x.at
  %y = load i64, ptr %y.at
  %z = add i64 %x, %y
  store i64 %z, ptr %z.at
  br label %next
"""
)

_FAIL = (
    _args("Count", "which")
    + _context(Fault=5)
    + """
  %old = atomicrmw add ptr %Count, i64 1 seq_cst
  %bad = icmp eq i64 %p, %which
  br i1 %bad, label %fail, label %next
fail:
  %won = cmpxchg ptr %Fault, i64 0, i64 1 seq_cst seq_cst
  %first = extractvalue { i64, i1 } %won, 1
  br i1 %first, label %write, label %next
write:
  %f1 = getelementptr i64, ptr %Fault, i64 1
  store i64 1, ptr %f1
  %f2 = getelementptr i64, ptr %Fault, i64 2
  store i64 %p, ptr %f2
  %f3 = getelementptr i64, ptr %Fault, i64 3
  store i64 4, ptr %f3
  %f4 = getelementptr i64, ptr %Fault, i64 4
  store i64 70, ptr %f4
  %f5 = getelementptr i64, ptr %Fault, i64 5
  store i64 64, ptr %f5
  store atomic i64 2, ptr %Fault release, align 8
  br label %next
"""
)

_WORK = (
    _args("Out", "count")
    + """
  br label %spin
spin:
  %i = phi i64 [ 0, %body ], [ %i1, %spin ]
  %h = phi i64 [ %p, %body ], [ %h3, %spin ]
  %h1 = mul i64 %h, 6364136223846793005
  %h2 = add i64 %h1, 1442695040888963407
  %h3 = xor i64 %h2, %i
  %i1 = add i64 %i, 1
  %again = icmp slt i64 %i1, %count
  br i1 %again, label %spin, label %store
store:
  %at = getelementptr i64, ptr %Out, i64 %p
  store i64 %h3, ptr %at
  br label %next
"""
)

_SCRATCH = (
    _args("Out")
    + """
  %last = getelementptr i64, ptr %scratch, i64 511
  store i64 %p, ptr %scratch
  store i64 %p, ptr %last
  %a = load volatile i64, ptr %scratch
  %b = load volatile i64, ptr %last
  %s = add i64 %a, %b
  %low = ptrtoint ptr %scratch to i64
  %off = and i64 %low, 63
  %t = add i64 %s, %off
  %at = getelementptr i64, ptr %Out, i64 %p
  store i64 %t, ptr %at
  br label %next
"""
)

_PRINT = (
    _context(Print=9)
    + """
  %used = getelementptr i64, ptr %Print, i64 1
  %off = atomicrmw add ptr %used, i64 24 seq_cst
  %past = add i64 %off, 24
  %cap = load i64, ptr %Print
  %fits = icmp ule i64 %past, %cap
  br i1 %fits, label %put, label %next
put:
  %records = getelementptr i8, ptr %Print, i64 16
  %at = getelementptr i8, ptr %records, i64 %off
  store i64 %p, ptr %at
  %place = getelementptr i8, ptr %at, i64 8
  store i32 3, ptr %place
  %size = getelementptr i8, ptr %at, i64 12
  store i32 5, ptr %size
  %text = getelementptr i8, ptr %at, i64 16
  store [5 x i8] c"hello", ptr %text
  br label %next
"""
)

# Every program adds one to a word of the launch and waits for all, twice; what it sees after goes to out[p].
_BARRIER = (
    _args("Out")
    + _context(n=3, Words=8)
    + """
  %w1 = getelementptr i64, ptr %Words, i64 1
  %old = atomicrmw add ptr %Words, i64 1 acq_rel
"""
    + wait("first", "%Words", "%n", "second.begin")
    + """second.begin:
  %old1 = atomicrmw add ptr %w1, i64 1 acq_rel
"""
    + wait("second", "%w1", "%n", "after")
    + """after:
  %at = getelementptr i64, ptr %Out, i64 %p
  %seen = load atomic i64, ptr %Words acquire, align 8
  store i64 %seen, ptr %at
  br label %finish
"""
)

_AWAIT = (
    _args("Word", "expected", "Out")
    + wait("poll", "%Word", "%expected", "after", place=2, slot="9")
    + """after:
  %at = getelementptr i64, ptr %Out, i64 %p
  store i64 %poll.v, ptr %at
  br label %finish
"""
)

_AWAIT32 = (
    _args("Word", "expected", "Out")
    + wait("poll", "%Word", "%expected", "after", place=2, slot="9", width=32)
    + """after:
  %at = getelementptr i64, ptr %Out, i64 %p
  %wide = zext i32 %poll.v to i64
  store i64 %wide, ptr %at
  br label %finish
"""
)

# Rounds of: raise the other's word, wait for mine.
_PING = (
    _args("Mine", "Theirs", "rounds")
    + """
  br label %round
round:
  %i = phi i64 [ 1, %body ], [ %i1, %got ]
  store atomic i64 %i, ptr %Theirs release, align 8
"""
    + wait("poll", "%Mine", "%i", "got")
    + """got:
  %i1 = add i64 %i, 1
  %more = icmp sle i64 %i1, %rounds
  br i1 %more, label %round, label %finish
"""
)

# Suspends with nothing to wait for until the word is set: a loop of the unsafe tier. Its bound counts from the first
# suspension, so the start is cleared once: frames are memory that other launches have used.
_SUSPEND = (
    _args("Word", "Out")
    + """
  store i64 0, ptr %poll.start
  br label %look
look:
  %v = load atomic i64, ptr %Word acquire, align 8
  %set = icmp ne i64 %v, 0
  br i1 %set, label %done, label %again
again:
  store i64 0, ptr %promise
  %s = call i8 @llvm.coro.suspend(token none, i1 false)
  switch i8 %s, label %end [ i8 0, label %back i8 1, label %cleanup ]
back:
  %o = load i64, ptr %poll.outcome
  %go = icmp eq i64 %o, 0
  br i1 %go, label %look, label %finish
done:
  %at = getelementptr i64, ptr %Out, i64 %p
  store i64 %v, ptr %at
  br label %finish
"""
)


def cpu_kernels() -> SuiteKernels:
    """Compile all of them; about 0.2 s."""
    return SuiteKernels(
        add=plain_kernel("suite_add", _ADD),
        fail=plain_kernel("suite_fail", _FAIL),
        work=plain_kernel("suite_work", _WORK),
        scratch=plain_kernel("suite_scratch", _SCRATCH, scratch_bytes=4096),
        hello=plain_kernel("suite_hello", _PRINT),
        barrier=waiting_kernel("suite_barrier", _BARRIER, scratch_bytes=40),
        await_word=waiting_kernel("suite_await", _AWAIT),
        await_word32=waiting_kernel("suite_await32", _AWAIT32),
        ping=waiting_kernel("suite_ping", _PING),
        suspend=waiting_kernel("suite_suspend", _SUSPEND),
    )
