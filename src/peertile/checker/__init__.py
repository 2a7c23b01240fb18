"""Whole programs on the simulated machine: hosts and kernels of all ranks, unchanged, on one thread."""
