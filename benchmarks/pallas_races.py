"""The same push all-reduce under two race detectors, side by side: peertile's checker and JAX's Pallas TPU interpreter.

    JAXPYTHON benchmarks/pallas_races.py jax jax.json            # a Python that has jax; it prints the races itself
    python benchmarks/pallas_races.py peertile peertile.json     # a Python that has peertile
    python benchmarks/pallas_races.py record benchmarks/records/DATE-pallas-MACHINE.json jax.json peertile.json

The program, on 3 ranks, in rounds: every rank pushes a tile to each peer's inbox, waits for all, folds what came,
pushes the result to everybody, waits for all, and says that it has read. A tile is 8 x 128 numbers. Variants leave
out one wait each. Neither part knows of the other; both print what they found, and the time for each access of a tile.
"""

# ruff: noqa: ANN001, ANN202
# The bodies of Pallas kernels: their arguments have no types that could be named without importing jax at the top.

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

RANKS, TILE = 3, 1024
VARIANTS = ("right", "no wait for the parts", "no wait for the results")
ROUNDS = (4, 40, 400)
PATIENCE_S = 15.0
"""No longer run is begun after one that took this long."""


def accesses(rounds: int) -> int:
    """Tiles read and written by all ranks: a push reads one and writes one; the fold reads `RANKS` parts and writes the
    result; the result is pushed to the peers; the gathered results are read."""
    peers = RANKS - 1
    return rounds * RANKS * (2 * peers + 1 + RANKS + 1 + 2 * peers + RANKS)


# ---------------------------------------------------------------- JAX


def run_jax() -> dict:
    import os

    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={RANKS}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.sharding import Mesh, PartitionSpec

    def kernel(rounds: int, variant: str):
        def body(x, out, inbox, acc, send, part, result, read, start):
            me = lax.axis_index("r")

            def others(f):
                for k in range(1, RANKS):
                    f(k, lax.rem(me + k, RANKS))

            def tell(semaphore, to):
                pl.semaphore_signal(semaphore, 1, device_id=to, device_id_type=pl.DeviceIdType.LOGICAL)

            def one(_, carry):
                others(lambda k, to: tell(read, to))
                pl.semaphore_wait(read, RANKS - 1)
                copies = []

                def push(k, to):
                    copy = pltpu.make_async_remote_copy(
                        src_ref=x.at[to], dst_ref=inbox.at[me], send_sem=send, recv_sem=part,
                        device_id=to, device_id_type=pl.DeviceIdType.LOGICAL,
                    )  # fmt: skip
                    copy.start()
                    copies.append(copy)

                others(push)
                inbox[me] = x[me]
                for copy in copies:
                    copy.wait_send()
                    if variant != VARIANTS[1]:
                        copy.wait_recv()
                total = inbox[0]
                for r in range(1, RANKS):
                    total = total + inbox[r]
                acc[...] = total
                copies.clear()

                def show(k, to):
                    copy = pltpu.make_async_remote_copy(
                        src_ref=acc, dst_ref=out.at[me], send_sem=send, recv_sem=result,
                        device_id=to, device_id_type=pl.DeviceIdType.LOGICAL,
                    )  # fmt: skip
                    copy.start()
                    copies.append(copy)

                others(show)
                out[me] = acc[...]
                for copy in copies:
                    copy.wait_send()
                    if variant != VARIANTS[2]:
                        copy.wait_recv()
                whole = out[0]
                for r in range(1, RANKS):
                    whole = whole + out[r]
                return carry + whole[0, 0]

            others(lambda k, to: tell(start, to))
            pl.semaphore_wait(start, RANKS - 1)
            lax.fori_loop(0, rounds, one, jnp.float32(0))

        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct((RANKS, 8, TILE // 8), jnp.float32),
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
            scratch_shapes=[
                pltpu.VMEM((RANKS, 8, TILE // 8), jnp.float32), pltpu.VMEM((8, TILE // 8), jnp.float32),
                *[pltpu.SemaphoreType.DMA] * 3, *[pltpu.SemaphoreType.REGULAR] * 2,
            ],
            interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"),
            compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
        )  # fmt: skip

    mesh = Mesh(jax.devices()[:RANKS], ("r",))
    spec = PartitionSpec("r")

    def call(rounds: int, variant: str) -> tuple[bool, list[float]]:
        def local(x):
            return kernel(rounds, variant)(x)

        f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        x = jnp.ones((RANKS * RANKS, 8, TILE // 8), jnp.float32)
        times = []
        for _ in range(3 if rounds < 100 else 2):
            start = time.perf_counter()
            jax.block_until_ready(f(x))
            times.append(time.perf_counter() - start)
        found = bool(interpreter.races.races_found)
        pltpu.reset_tpu_interpret_mode_state()
        return found, times[1:]

    # `races_found` says that there is one; which accesses, with their stacks, goes to standard output.
    found = {}
    for variant in VARIANTS:
        try:
            found[variant] = call(2, variant)[0]
        except Exception as error:
            found[variant] = f"{type(error).__name__}: {str(error)[:200]}"
    per_access = {}
    for rounds in ROUNDS:
        start = time.perf_counter()
        _, times = call(rounds, VARIANTS[0])
        per_access[accesses(rounds)] = statistics.median(times) / accesses(rounds) * 1e6
        if time.perf_counter() - start > PATIENCE_S:
            break
    return {"jax": jax.__version__, "found": found, "us_per_access": per_access}


# ---------------------------------------------------------------- peertile


def run_peertile() -> dict:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from benchmarks.pallas_races_kernel import case

    from peertile.sim.explore import explore

    found = {}
    for variant in VARIANTS:
        report = explore(case(VARIANTS.index(variant), 2, RANKS, TILE), 50)
        found[variant] = bool(report.verdicts)
        if report.verdicts:
            print(f"{variant}:\n{report.verdicts[0]}\n", file=sys.stderr)
    per_access = {}
    for rounds in ROUNDS:
        made = case(0, rounds, RANKS, TILE)
        times = []
        for seed in range(4):
            start = time.perf_counter()
            outcome = made.run(seed=seed)
            times.append(time.perf_counter() - start)
            assert outcome.verdict is None, outcome.verdict
        per_access[accesses(rounds)] = statistics.median(times[1:]) / accesses(rounds) * 1e6
    return {"found": found, "us_per_access": per_access}


def make_record(jax_file: str, peertile_file: str) -> dict:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from peertile.cli.bench import record
    from peertile.testing.measure import Figure

    theirs, ours = (json.loads(Path(f).read_text()) for f in (jax_file, peertile_file))
    figures = []
    for count, own in ours["us_per_access"].items():
        other = theirs["us_per_access"].get(count)
        name = None if other is None else "jax pallas interpret mode, detect_races"
        figures.append(
            Figure(f"races.push_all_reduce.after_{count}", own, "us", 3, baseline=name, baseline_median=other)
        )
    data = record(figures, "python benchmarks/pallas_races.py, both parts")
    data["versions"]["jax"] = theirs["jax"]
    data["found"] = {
        variant: {"peertile": ours["found"][variant], "jax": theirs["found"][variant]} for variant in VARIANTS
    }
    return data


if __name__ == "__main__":
    part, target = sys.argv[1:3]
    if part == "jax":
        result = run_jax()
    elif part == "peertile":
        result = run_peertile()
    else:
        result = make_record(*sys.argv[3:5])
    Path(target).write_text(json.dumps(result, indent=2) + "\n")
