"""Run in a process of its own, where nothing was compiled before: what collectives, mailboxes, signals, counters and
barriers compile to for aarch64. Prints a line of JSON for each kernel: how often each order is in what we emit, in what
LLVM makes of it, and in the machine code.
"""

import json
import re

import library_ranks
import peer_ranks

import peertile as pt
from peertile import compiler
from peertile.backends.cpu import jit
from peertile.backends.cpu.compile import compile_kernel, lower_to_text
from peertile.backends.cpu.target import AARCH64

LLVM = {
    "loads that acquire": r"load atomic [^\n]* (?:acquire|seq_cst)",
    "stores that release": r"store atomic [^\n]* (?:release|seq_cst)",
    "changes that acquire": r"(?:atomicrmw|cmpxchg) [^\n]*(?:acquire|acq_rel|seq_cst)",
    "changes that release": r"(?:atomicrmw|cmpxchg) [^\n]*(?:release|acq_rel|seq_cst)",
    "fences": r"\bfence ",
}
CODE = {
    "loads that acquire": r"\bldap?r\b",
    "stores that release": r"\bstlr\b",
    "changes that acquire": r"\bldaxr\b",
    "changes that release": r"\bstlxr\b",
    "fences": r"\bdmb\b",
}


def counts(patterns, text):
    return {name: len(re.findall(pattern, text)) for name, pattern in patterns.items()}


def main():
    seen = {}

    def both(kernel):
        seen.setdefault(lower_to_text(kernel, AARCH64), kernel.name)
        return compile_kernel(kernel)

    compiler.compile_kernel = both
    for function, *args in (
        *((library_ranks.all_reduces, (100,), algorithm) for algorithm in library_ranks.CPU_ALGORITHMS),
        (library_ranks.moves, (100,)),
        (peer_ranks.box_sums, 64, 2, 2, 1),
        (peer_ranks.box_sums, 64, 2, 1, 1),
        (peer_ranks.gathers, 256),
        (peer_ranks.counts, 3),
        (peer_ranks.meets, 2, 3),
        (peer_ranks.puts, 256),
    ):
        pt.spawn(function, 2, tuple(args), model=pt.RankModel.THREADS, timeout_s=60)
    for text, name in seen.items():
        stages = jit.stages(text, AARCH64)
        made = [counts(LLVM, text), counts(LLVM, stages["optimised"]), counts(CODE, stages["asm"])]
        print(json.dumps([name, *made]))


if __name__ == "__main__":
    main()
