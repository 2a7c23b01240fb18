"""Small kernels of the cuda driver itself, as PTX that every supported GPU's driver compiles when a device is opened.

Every parameter is 8 bytes wide, as in compiled kernels. They do what the driver's own calls cannot: a bounded wait
with any comparison, a store and a wait inside a graph, a fill with an 8-byte pattern, a compare-and-swap, a look at
the clock.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FILL_THREADS", "NAMES", "PTX"]

NAMES: Final = ("peertile_wait", "peertile_write", "peertile_swap", "peertile_fill64", "peertile_clock")
FILL_THREADS: Final = 256

_WAIT: Final = """
// (address, expected, cmp, bits, flip, timeout ns, abort, fault): one thread polls. `expected` is extended like the
// word: by sign if flip is 0, else flip is 2^63 and comparisons are unsigned. `cmp` is the index in memory_model.Cmp.
.visible .entry peertile_wait(
    .param .u64 a_address, .param .u64 a_expected, .param .u64 a_cmp, .param .u64 a_bits, .param .u64 a_flip,
    .param .u64 a_timeout, .param .u64 a_abort, .param .u64 a_fault
)
{
    .reg .pred wide, is, q, ok, skip;
    .reg .b32 narrow, stop, count, shift;
    .reg .b64 address, expected, cmp, bits, flip, timeout, abort, fault;
    .reg .b64 word, low, diff, a, b, begin, now, claim, kind, none;
    ld.param.u64 address, [a_address];
    ld.param.u64 expected, [a_expected];
    ld.param.u64 cmp, [a_cmp];
    ld.param.u64 bits, [a_bits];
    ld.param.u64 flip, [a_flip];
    ld.param.u64 timeout, [a_timeout];
    ld.param.u64 abort, [a_abort];
    ld.param.u64 fault, [a_fault];
    setp.eq.u64 wide, bits, 64;
    cvt.u32.u64 shift, bits;
    sub.u32 shift, 64, shift;
    mov.u64 begin, %globaltimer;
LOOK:
    mov.u32 count, 16;
AGAIN:
    @wide ld.acquire.sys.global.b64 word, [address];
    @!wide ld.acquire.sys.global.b32 narrow, [address];
    @!wide cvt.s64.s32 word, narrow;
    cvt.u64.u32 low, narrow;
    setp.ne.and.u64 q, flip, 0, !wide;
    @q mov.b64 word, low;
    sub.s64 diff, word, expected;
    shl.b64 diff, diff, shift;
    xor.b64 a, word, flip;
    xor.b64 b, expected, flip;
    setp.eq.u64 is, cmp, 0;
    setp.ge.and.s64 ok, diff, 0, is;
    setp.eq.u64 is, cmp, 1;
    setp.eq.and.s64 q, a, b, is;
    or.pred ok, ok, q;
    setp.eq.u64 is, cmp, 2;
    setp.ne.and.s64 q, a, b, is;
    or.pred ok, ok, q;
    setp.eq.u64 is, cmp, 3;
    setp.ge.and.s64 q, a, b, is;
    or.pred ok, ok, q;
    setp.eq.u64 is, cmp, 4;
    setp.le.and.s64 q, a, b, is;
    or.pred ok, ok, q;
    setp.eq.u64 is, cmp, 5;
    setp.gt.and.s64 q, a, b, is;
    or.pred ok, ok, q;
    setp.eq.u64 is, cmp, 6;
    setp.lt.and.s64 q, a, b, is;
    or.pred ok, ok, q;
    @ok bra DONE;
    sub.u32 count, count, 1;
    setp.ne.u32 skip, count, 0;
    @skip bra AGAIN;
    mov.b64 kind, 5;
    ld.relaxed.sys.global.b32 stop, [abort];
    setp.ne.u32 skip, stop, 0;
    @skip bra FAIL;
    mov.b64 kind, 4;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, begin;
    setp.ge.u64 skip, now, timeout;
    @skip bra FAIL;
    nanosleep.u32 200;
    bra LOOK;
FAIL:
    atom.acquire.sys.global.cas.b64 claim, [fault], 0, 1;
    setp.ne.u64 skip, claim, 0;
    @skip bra DONE;
    mov.b64 none, -1;
    st.global.b64 [fault + 8], kind;
    st.global.b64 [fault + 16], none;
    st.global.b64 [fault + 24], none;
    st.global.b64 [fault + 32], word;
    st.global.b64 [fault + 40], expected;
    st.global.b64 [fault + 48], address;
    mov.b64 none, 0;
    st.global.b64 [fault + 56], none;
    mov.b64 claim, 2;
    st.release.sys.global.b64 [fault], claim;
DONE:
    ret;
}
"""

_CLOCK: Final = """
// (address): the clock that kernels see, in ns
.visible .entry peertile_clock(.param .u64 a_address)
{
    .reg .b64 address, now;
    ld.param.u64 address, [a_address];
    mov.u64 now, %globaltimer;
    st.release.sys.global.b64 [address], now;
    ret;
}
"""

_WRITE: Final = """
// (address, value, bits)
.visible .entry peertile_write(.param .u64 a_address, .param .u64 a_value, .param .u64 a_bits)
{
    .reg .pred wide;
    .reg .b32 narrow;
    .reg .b64 address, value, bits;
    ld.param.u64 address, [a_address];
    ld.param.u64 value, [a_value];
    ld.param.u64 bits, [a_bits];
    setp.eq.u64 wide, bits, 64;
    cvt.u32.u64 narrow, value;
    fence.acq_rel.sys;
    @wide st.release.sys.global.b64 [address], value;
    @!wide st.release.sys.global.b32 [address], narrow;
    ret;
}
"""

_SWAP: Final = """
// (address, expected, value, bits)
.visible .entry peertile_swap(
    .param .u64 a_address, .param .u64 a_expected, .param .u64 a_value, .param .u64 a_bits
)
{
    .reg .pred wide;
    .reg .b32 expected32, value32, old32;
    .reg .b64 address, expected, value, bits, old;
    ld.param.u64 address, [a_address];
    ld.param.u64 expected, [a_expected];
    ld.param.u64 value, [a_value];
    ld.param.u64 bits, [a_bits];
    setp.eq.u64 wide, bits, 64;
    cvt.u32.u64 expected32, expected;
    cvt.u32.u64 value32, value;
    @wide atom.acq_rel.sys.global.cas.b64 old, [address], expected, value;
    @!wide atom.acq_rel.sys.global.cas.b32 old32, [address], expected32, value32;
    ret;
}
"""

_FILL: Final = """
// (address, pattern, count): count words of 8 bytes
.visible .entry peertile_fill64(.param .u64 a_address, .param .u64 a_pattern, .param .u64 a_count)
{
    .reg .pred more;
    .reg .b32 block, threads, thread, blocks;
    .reg .b64 address, pattern, count, k, wide, step;
    ld.param.u64 address, [a_address];
    ld.param.u64 pattern, [a_pattern];
    ld.param.u64 count, [a_count];
    mov.u32 block, %ctaid.x;
    mov.u32 blocks, %nctaid.x;
    mov.u32 threads, %ntid.x;
    mov.u32 thread, %tid.x;
    cvt.u64.u32 wide, thread;
    mul.wide.u32 k, block, threads;
    add.u64 k, k, wide;
    mul.wide.u32 step, blocks, threads;
HEAD:
    setp.lt.u64 more, k, count;
    @!more bra END;
    shl.b64 wide, k, 3;
    add.u64 wide, wide, address;
    st.global.b64 [wide], pattern;
    add.u64 k, k, step;
    bra HEAD;
END:
    ret;
}
"""

PTX: Final = ".version 7.0\n.target sm_70\n.address_size 64\n" + _WAIT + _CLOCK + _WRITE + _SWAP + _FILL
