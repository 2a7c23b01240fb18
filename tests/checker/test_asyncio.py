"""Event loops on the machine: one for each rank, on its clock, woken by its completions, over a network of the
machine; and what a loop cannot do there is refused with its line."""

import asyncio
import contextlib
import os
import queue
import random
import signal
import threading
import time
import urllib.request

import numpy as np
import pytest

import peertile as pt
import peertile.language as T
from peertile.checker.check import check
from peertile.checker.program import CannotCheck
from peertile.sim.verdicts import VerdictKind
from peertile.testing.check import assert_clean


@pt.kernel
def add_one(z: T.Exclusive, x: T.Shared):
    z.store(x.load_like(z) + 1.0)


@pt.kernel
def never(word: T.Signal):
    word.wait()


def line(function, text: str) -> str:
    """`file:line` of the first line of `function` that contains `text`."""
    with open(__file__) as file:
        lines = file.read().split("\n")
    first = function.__code__.co_firstlineno
    return f"{__file__}:{next(k for k in range(first, len(lines) + 1) if text in lines[k - 1])}"


@pytest.mark.feature("C1", "sim")
def test_every_rank_has_a_loop_of_its_own() -> None:
    loops: dict[int, object] = {}

    def main(group) -> None:
        async def body() -> None:
            loops[group.rank] = asyncio.get_running_loop()
            for _ in range(3):
                await asyncio.sleep(0)
                group.barrier("others go on inside a coroutine of mine")
                assert asyncio.get_running_loop() is loops[group.rank]
                assert asyncio.current_task().get_name() == f"task of {group.rank}"

        async def named() -> None:
            await asyncio.create_task(body(), name=f"task of {group.rank}")

        asyncio.run(named())
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()

    before = asyncio.events._event_loop_policy
    assert_clean(main, 3, schedules=10)
    assert len(set(map(id, loops.values()))) == 3
    assert asyncio.events._event_loop_policy is before
    assert asyncio._get_running_loop() is None


@pytest.mark.feature("C1", "sim")
@pytest.mark.feature("H8", "sim")
def test_awaited_work_ends_in_an_order_that_the_schedule_chooses() -> None:
    orders = set()

    def main(group) -> None:
        done = []

        async def one(k: int) -> None:
            x, z = pt.asarray(np.full(8, k, np.float32)), pt.empty((8,), pt.f32)
            await add_one(z.partition(8), x)
            assert z.numpy().tolist() == [k + 1.0] * 8
            done.append(k)

        async def all_of_them() -> None:
            await asyncio.gather(*(one(k) for k in range(3)))

        asyncio.run(all_of_them())
        orders.add(tuple(done))

    assert_clean(main, 2, schedules=60)
    assert len(orders) >= 4


def test_a_run_with_a_loop_is_repeated_by_its_seed() -> None:
    seen = []

    def main(group) -> None:
        async def worker(k: int) -> None:
            await asyncio.sleep(0.01 * k)
            z = pt.empty((8,), pt.f32)
            await add_one(z.partition(8), pt.asarray(np.ones(8, np.float32)))
            seen.append((group.rank, k, time.monotonic_ns(), random.random(), float(np.random.rand())))

        async def body() -> None:
            await asyncio.gather(*(worker(k) for k in range(3)))

        asyncio.run(body())

    check(main, 3, schedules=1, seed=11)
    check(main, 3, schedules=1, seed=11)
    assert len(seen) == 18
    assert seen[:9] == seen[9:]


def test_sleeps_and_timeouts_are_those_of_the_machines_clock() -> None:
    def main(group) -> None:
        async def body() -> None:
            loop, start = asyncio.get_running_loop(), time.monotonic()
            await asyncio.sleep(3600)
            assert 3600 <= loop.time() - start < 3601
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 60)
            assert 3660 <= time.monotonic() - start < 3661

        asyncio.run(body())

    start = time.perf_counter()
    assert_clean(main, 2, schedules=3)
    assert time.perf_counter() - start < 30


def test_random_numbers_are_a_ranks_own() -> None:
    def main(group) -> None:
        random.seed(5)
        np.random.seed(6)
        group.barrier("all have seeded")
        got = [(random.random(), float(np.random.rand())) for _ in range(4) if group.barrier("another") is None]
        assert got == expected

    ours, theirs = random.Random(5), np.random.RandomState(6)
    expected = [(ours.random(), float(theirs.rand())) for _ in range(4)]
    state = random.getstate()
    assert_clean(main, 3, schedules=5)
    assert random.getstate() == state


def test_signal_handlers_are_a_ranks_own_and_never_called() -> None:
    def main(group) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if group.rank else main)
        group.barrier("all have set theirs")
        assert signal.getsignal(signal.SIGTERM) is (signal.SIG_IGN if group.rank else main)

    before = signal.getsignal(signal.SIGTERM)
    assert_clean(main, 2, schedules=5)
    assert signal.getsignal(signal.SIGTERM) is before


# ---------------------------------------------------------------- the network


def talk(group, port_of=None, payload: bytes = b"x" * 1000) -> None:
    """Rank 0 serves, everybody asks."""

    async def serve(reader, writer) -> None:
        data = await reader.readexactly(len(payload))
        writer.write(data[::-1])
        await writer.drain()
        assert await reader.read() == b""
        writer.close()

    async def body() -> None:
        handlers = set()

        async def handle(reader, writer) -> None:
            handlers.add(asyncio.current_task())
            await serve(reader, writer)

        server = await asyncio.start_server(handle, "127.0.0.1", 0 if group.rank else 7000)
        assert server.sockets[0].getsockname()[1] == 7000 or group.rank
        group.barrier("the server listens")
        reader, writer = await asyncio.open_connection("127.0.0.1", 7000)
        writer.write(payload)
        writer.write_eof()
        assert await reader.read() == payload[::-1]
        writer.close()
        await writer.wait_closed()
        while group.rank == 0 and len(handlers) < group.size:
            await asyncio.sleep(0.001)
        await asyncio.gather(*handlers)
        server.close()
        await server.wait_closed()

    asyncio.run(body())


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("payload", [b"ab", b"some bytes" * 20_000])
def test_connections_between_ranks_carry_bytes_in_order(ranks: int, payload: bytes) -> None:
    assert_clean(lambda group: talk(group, payload=payload), ranks, schedules=8)


def test_what_is_written_arrives_in_pieces_that_the_schedule_chooses() -> None:
    pieces = set()

    def main(group) -> None:
        async def serve(reader, writer) -> None:
            got = []
            while data := await reader.read(100):
                got.append(len(data))
            pieces.add(tuple(got))
            writer.close()

        async def body() -> None:
            handlers = []

            async def handle(reader, writer) -> None:
                handlers.append(asyncio.current_task())
                await serve(reader, writer)

            server = await asyncio.start_server(handle, "localhost", 0)
            _, writer = await asyncio.open_connection("localhost", server.sockets[0].getsockname()[1])
            writer.write(b"0123456789")
            writer.close()
            await asyncio.sleep(1)
            await asyncio.gather(*handlers)

        asyncio.run(body())

    assert_clean(main, 1, schedules=40)
    assert (10,) in pieces
    assert len(pieces) > 1


def test_a_message_is_an_edge_between_hosts() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            x = heap.zeros((8,), pt.f32)

            async def body() -> None:
                if group.rank == 0:
                    x.copy_from(np.ones(8, np.float32))  # over when it returns
                    _, writer = await asyncio.open_connection("127.0.0.1", 9000)
                    writer.write(b"!")
                    writer.close()
                    return
                come = asyncio.Event()

                async def handle(reader, writer) -> None:
                    await reader.readexactly(1)
                    writer.close()
                    come.set()

                server = await asyncio.start_server(handle, "127.0.0.1", 9000)
                group.barrier("listens")
                await come.wait()
                z = pt.empty((8,), pt.f32)
                await add_one(z.partition(8), x.at(0))
                server.close()

            if group.rank == 0:
                group.barrier("listens")
            asyncio.run(body())

    assert_clean(main, 2, schedules=20)


def test_nobody_listens() -> None:
    def main(group) -> None:
        async def body() -> None:
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", 4)

        asyncio.run(body())

    assert_clean(main, 1, schedules=1)


# ---------------------------------------------------------------- deadlocks of hosts


@pytest.mark.feature("C3", "sim")
def test_a_loop_that_nobody_wakes_is_a_deadlock_that_names_its_tasks() -> None:
    def main(group) -> None:
        async def forgotten() -> None:
            await asyncio.Event().wait()

        asyncio.run(forgotten())

    (verdict,) = check(main, 1, schedules=1).verdicts
    assert verdict.kind is VerdictKind.DEADLOCK
    what = verdict.waiters[0].what
    assert what.startswith("its event loop; 1 task waits: ")
    assert f"forgotten at {line(main, 'Event()')}" in what


def test_an_awaited_kernel_that_never_ends_is_a_deadlock() -> None:
    def main(group) -> None:
        with pt.SymmetricHeap(group, size_bytes=1 << 14) as heap:
            signal = heap.signal(slots=1)

            async def body() -> None:
                if group.rank == 0:
                    await never.grid(1)(signal)

            asyncio.run(body())

    (verdict,) = check(main, 2, schedules=1).verdicts
    assert verdict.kind is VerdictKind.DEADLOCK
    assert "word.arrived[0, 1] on rank 0 at_least 1" in str(verdict)
    assert "its event loop; 1 task waits" in str(verdict)


def test_a_queue_that_nobody_fills_is_a_deadlock() -> None:
    def main(group) -> None:
        queue.Queue().get()

    (verdict,) = check(main, 1, schedules=1).verdicts
    assert verdict.kind is VerdictKind.DEADLOCK
    assert verdict.waiters[0].what == f"a condition that somebody notifies ({line(main, 'get()')})"


@pytest.mark.slow
def test_events_queues_and_timeouts_of_one_thread_work() -> None:
    def main(group) -> None:
        event, box, start = threading.Event(), queue.Queue(), time.monotonic()
        assert not event.wait(5)
        assert 5 <= time.monotonic() - start < 6
        with pytest.raises(queue.Empty):
            box.get(timeout=2)
        box.put(3)
        event.set()
        assert event.wait()
        assert box.get() == 3

    assert_clean(main, 2, schedules=3)


# ---------------------------------------------------------------- what is refused


def refused(main) -> str:
    with pytest.raises(CannotCheck) as caught:
        check(main, 1, schedules=1)
    return str(caught.value)


REAL_WORLD = "cannot be checked, as it would wait for the real world, and a schedule could not be repeated"


@pytest.mark.feature("C1", "sim")
def test_an_executor_is_refused_with_its_line_even_if_its_error_is_caught() -> None:
    def main(group) -> None:
        async def body() -> None:
            try:
                await asyncio.to_thread(print)
            except Exception:
                return

        asyncio.run(body())

    assert refused(main) == f"loop.run_in_executor: {REAL_WORLD} ({line(main, 'to_thread')})"


def test_datagrams_are_refused_with_their_line() -> None:
    def main(group) -> None:
        async def body() -> None:
            await asyncio.get_running_loop().create_datagram_endpoint(asyncio.DatagramProtocol)

        asyncio.run(body())

    assert refused(main) == f"loop.create_datagram_endpoint: {REAL_WORLD} ({line(main, 'create_datagram')})"


def test_a_socket_is_refused_with_its_line() -> None:
    def main(group) -> None:
        urllib.request.urlopen("http://127.0.0.1:1/")

    assert refused(main) == (f"socket.getaddrinfo: {REAL_WORLD} ({line(main, 'urlopen')})")


def test_ctrl_c_ends_the_check_though_the_program_catches_it() -> None:
    send = os.kill  # the real one: of a rank it would be its own

    def main(group) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            send(os.getpid(), signal.SIGINT)
            time.sleep(1.0)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        check(main, 1, schedules=1)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_the_program_raises_is_an_error_of_its_rank() -> None:
    def main(group) -> None:
        raise KeyboardInterrupt

    (verdict,) = check(main, 1, schedules=1).verdicts
    assert verdict.headline == "host: rank 0 raised KeyboardInterrupt"


# ---------------------------------------------------------------- the example


@pytest.mark.slow
@pytest.mark.feature("C1", "sim")
@pytest.mark.parametrize("name", ["serve_digits", "pipelines", "digits_data_parallel"])
def test_the_examples_with_host_pipelines_are_silent(name: str) -> None:
    from pathlib import Path

    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    report = check(path, 3, schedules=5)
    assert report.clean, str(report)


@pytest.mark.slow
def test_a_callback_between_two_tasks_may_wait_for_the_device_while_other_ranks_go_on() -> None:
    def main(group) -> None:
        async def inside() -> None:
            x = pt.zeros((4,), pt.f32)
            asyncio.get_running_loop().call_soon(lambda: pt.op.fill(x, 1).sync())  # no task is the current one there
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert x.numpy()[0] == 1

        asyncio.run(inside())

    assert_clean(main, 3, schedules=20)


def test_an_error_of_a_task_in_a_group_is_told_with_its_own_line() -> None:
    def main(group) -> None:
        async def fails() -> None:
            await asyncio.sleep(0)
            raise ValueError("this one")

        async def inside() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fails())

        asyncio.run(inside())

    (verdict,) = check(main, 1, schedules=1).verdicts
    assert verdict.headline == "host: rank 0 raised ValueError: this one"
    assert f'{line(main, "raise ValueError")} in fails: raise ValueError("this one")' in str(verdict)


def test_a_refused_call_of_a_task_in_a_group_cannot_be_checked() -> None:
    def main(group) -> None:
        async def waits() -> None:
            urllib.request.urlopen("http://localhost")

        async def inside() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(waits())

        asyncio.run(inside())

    with pytest.raises(CannotCheck, match="cannot be checked"):
        check(main, 1, schedules=1)
