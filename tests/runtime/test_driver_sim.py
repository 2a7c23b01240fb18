"""The sim driver keeps the driver protocol, where that makes sense for a device without threads."""

import pytest

from peertile.runtime.drivers.sim import SimDriver
from peertile.testing.driver_suite import DriverSuite, args, options, read_words, words
from peertile.testing.sim_kernels import sim_kernels

WITHOUT_THREADS = {
    # The one thread that there is calls back.
    "test_callbacks_run_in_stream_order",
    # Tens of thousands of programs, each an agent: a smaller grid is below.
    "test_every_program_of_a_grid_runs_once",
}


@pytest.fixture(scope="module")
def kernels():
    return sim_kernels()


class TestSim(DriverSuite):
    REPEATS = 1

    @pytest.fixture
    def device(self):
        return SimDriver().open()

    # Thousands of programs, each an agent.
    @pytest.mark.slow
    def test_a_grid_barrier_passes_with_all_programs_resident(self, device, kernels) -> None:
        super().test_a_grid_barrier_passes_with_all_programs_resident(device, kernels)

    @pytest.mark.slow
    def test_scratch_is_private_and_aligned(self, device, kernels) -> None:
        super().test_scratch_is_private_and_aligned(device, kernels)


for name in WITHOUT_THREADS:
    setattr(TestSim, name, None)


def test_callbacks_see_what_came_before_them() -> None:
    device = SimDriver().open()
    s = device.create_stream()
    a = device.allocate(8)
    seen = []
    device.fill(s, a, 9, 8, 1)
    device.callback(s, lambda: seen.append(device.machine.memory.at(a)[0].data[0]))
    device.fill(s, a, 7, 8, 1)
    last = device.callback(s, lambda: seen.append(device.machine.memory.at(a)[0].data[0]))
    assert seen == []
    device.wait(last)
    assert seen == [9, 7]


def test_every_program_of_a_small_grid_runs_once(kernels) -> None:
    device = SimDriver().open()
    s = device.create_stream()
    add, count = device.load_module(kernels.add), device.load_module(kernels.fail)
    for n in (1, 2, 3, 64, 500):
        x, y = words(device, s, range(n)), words(device, s, range(0, 10 * n, 10))
        z, c = words(device, s, [0] * n), words(device, s, [0])
        for _ in range(3):
            device.launch(s, add, (n, 1, 1), args(x, y, z), options("add"))
            device.launch(s, count, (n, 1, 1), args(c, -1), options("count"))
        assert read_words(device, s, z, n) == [11 * k for k in range(n)]
        assert read_words(device, s, c, 1) == [3 * n]
