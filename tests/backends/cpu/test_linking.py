"""Object code is linked into a process whose memory is full of holes and of large tensors."""

import ctypes
import mmap
import random

from peertile.backends.cpu import jit

TEXT = """
@table = private constant [LENGTH x i64] zeroinitializer
define i64 @far(i64 %x) uwtable {
  %at = getelementptr [LENGTH x i64], ptr @table, i64 0, i64 %x
  %value = load i64, ptr %at
  %sum = add i64 %value, %x
  ret i64 %sum
}
"""
SIZES = (1 << 12, 3 << 30, 1 << 33)
NO_RESERVE = 0x4000


def test_code_and_constants_of_an_object_are_within_reach_of_each_other_wherever_large_tensors_lie():
    draw = random.Random(1)
    payloads = [jit.compile_text(TEXT.replace("LENGTH", str(length)), level=0) for length in (64, 700, 3000)]
    between: list[mmap.mmap] = []
    for _ in range(400):
        if draw.random() < 0.3:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
            between.append(mmap.mmap(-1, draw.choice(SIZES), flags=flags, prot=mmap.PROT_READ))
        if len(between) > 40:
            between.pop(draw.randrange(len(between))).close()
        far = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(jit.load_object(draw.choice(payloads), ["far"])["far"])
        assert far(7) == 7
    for mapping in between:
        mapping.close()
