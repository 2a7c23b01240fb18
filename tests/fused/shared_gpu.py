"""Run by test_shared_gpu.py as a rehearsal of a GPU: prints the loads and the runs of a program's fused kernels in their
order, by ranks that are threads on one device."""

import sys

import fused_programs

import peertile as pt
from peertile.runtime.drivers import rehearsal
from peertile.runtime.drivers.rehearsal import RehearsalDevice

KERNELS = ("gather_gemm", "gemm_scatter", "gemm_reduce", "gemm_reduce_flagged", "dispatch", "combine", "ring_attend")
EVENTS: list[str] = []


def noted(method: str, what: str, entry) -> None:
    call = getattr(RehearsalDevice, method)

    def wrapped(device, *arguments):
        if entry(arguments) in KERNELS:
            EVENTS.append(f"{what} {entry(arguments)}")
        return call(device, *arguments)

    setattr(RehearsalDevice, method, wrapped)


def main(name: str, ranks: int) -> None:
    rehearsal.DEVICES = 1
    noted("load_module", "load", lambda arguments: arguments[0].gpu.entry)
    for method in ("enqueue", "run_prepared"):
        noted(method, "run", lambda arguments: arguments[1].options.name)
    program = fused_programs.PROGRAMS[name]
    assert all(pt.spawn(lambda group: program(group, turns=1), ranks, model=pt.RankModel.THREADS, timeout_s=100))
    print("\n".join(EVENTS))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
