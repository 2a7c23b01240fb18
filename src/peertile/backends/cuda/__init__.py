"""Tile IR to NVIDIA GPUs: readable Triton source, compiled ahead of time to a cubin.

`compile.compile_kernel` is the entry point; `emit` writes the source, `layout` says how a launch passes arguments,
`triton_compile` alone imports triton. No driver calls here.
"""
