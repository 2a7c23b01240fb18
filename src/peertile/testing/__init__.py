"""The test kit that is shipped: the checker for pytest, differential tests, driver conformance, timing.

`peertile.testing.driver_suite` is imported by itself, since it is a suite to subclass.
"""

from peertile.testing.check import assert_clean, assert_reports, check
from peertile.testing.measure import Figure, interleaved, machine
from peertile.testing.native import pack_argument, run_native
from peertile.testing.programs import RandomKernel, differences, random_kernel
from peertile.testing.timing import Timing, time_on_device

__all__ = [
    "Figure",
    "RandomKernel",
    "Timing",
    "assert_clean",
    "assert_reports",
    "check",
    "differences",
    "interleaved",
    "machine",
    "pack_argument",
    "random_kernel",
    "run_native",
    "time_on_device",
]
