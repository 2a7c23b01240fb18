"""Words for random numbers: a function of a seed and a counter, with no state. Signatures and formulas; no bodies.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). All of it, the normal
distribution included, is built from operations that round once, so every target gives the same bits.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import Any

from peertile.language.tiles import Tile
from peertile.language.word import word

__all__ = ["rand", "rand_bits", "rand_bits4", "randn"]


@word
def rand_bits(seed: Any, offset: Any) -> Tile:
    """32 random bits (u32) for each counter: the first word of Philox with key `seed` and counter `offset`.

    `seed` is an integer scalar, `offset` an integer tile, both taken as 64 bits. A counter gives the same bits
    whatever tile it is in, so number the elements of the whole tensor.

    Example::

        T.rand_bits(42, T.program_id(0) * 64 + T.iota(64))
    """


@word
def rand_bits4(seed: Any, offset: Any) -> tuple[Tile, Tile, Tile, Tile]:
    """All four words of Philox for each counter, at the price of one.

    Example::

        a, b, c, d = T.rand_bits4(42, T.iota(64))
    """


@word
def rand(seed: Any, offset: Any) -> Tile:
    """A uniform f32 in [0, 1) for each counter: the upper 24 of its random bits, times 2^-24.

    Example::

        T.where(T.rand(42, T.iota(64)) < 0.1, 0.0, t)
    """


@word
def randn(seed: Any, offset: Any) -> Tile:
    """A normal f32 (mean 0, deviation 1) for each counter: √2 · erf⁻¹(u) of a uniform u in (-1, 1) of 24 bits.

    Example::

        T.randn(42, T.iota(64))
    """
