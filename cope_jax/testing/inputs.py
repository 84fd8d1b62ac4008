"""Random inputs of a function under test: q, k and v, vectors, or tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from cope_jax.errors import ConfigError, first_line

Arrays = tuple[np.ndarray[Any, Any], ...]
Draw = Callable[[np.random.Generator, int, int], Arrays]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Draws the arrays that a function takes by position.

    Attributes:
      draw: (generator, batch, length) -> arrays, each `[batch, length, …]`.
      names: the names of the arrays, for messages.
      heads: (H, G) if the arrays begin with q_BLHK, k_BLGK and v_BLGK, else None.
    """

    draw: Draw
    names: tuple[str, ...] = ()
    heads: tuple[int, int] | None = None

    def name(self, index: int) -> str:
        """Returns the name of an array."""
        return self.names[index] if index < len(self.names) else f"input {index}"

    def two(self, seed: int, batch: int, length: int) -> tuple[Arrays, Arrays]:
        """Returns two draws that differ in every entry."""
        rng = np.random.default_rng(seed)
        first, other = self._drawn(rng, batch, length), self._drawn(rng, batch, length)
        for _ in range(99):  # few integers may be equal by chance
            other = tuple(
                np.where(a == b, again, b)
                for a, b, again in zip(first, other, self._drawn(rng, batch, length), strict=True)
            )
        return first, other

    def _drawn(self, rng: np.random.Generator, batch: int, length: int) -> Arrays:
        """Draws arrays, and checks their shapes."""
        try:
            arrays = self.draw(rng, batch, length)
        except Exception as error:
            raise ConfigError(
                f"inputs(generator, {batch}, {length}) raised {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error
        if not isinstance(arrays, tuple | list) or not arrays:
            raise ConfigError(
                "inputs(generator, batch, length) must return a tuple of arrays, got "
                + (type(arrays).__name__ if np.size(arrays) else "none")
            )
        for index, array in enumerate(arrays):
            if np.shape(array)[:2] != (batch, length):
                raise ConfigError(
                    f"inputs(generator, batch, length) returned shape {list(np.shape(array))} for "
                    f"{self.name(index)}: it must be [{batch}, {length}, …]"
                )
        return tuple(np.asarray(array) for array in arrays)


def qkv(
    heads: int = 4, kv_heads: int | None = None, head_dim: int = 8, dtype: Any = np.float32
) -> Inputs:
    """Returns inputs q `[B, L, heads, head_dim]`, and k and v `[B, L, kv_heads, head_dim]`.

    >>> rng = np.random.default_rng(0)
    >>> [array.shape for array in qkv(4, 2).draw(rng, 3, 16)]
    [(3, 16, 4, 8), (3, 16, 2, 8), (3, 16, 2, 8)]
    """
    groups = heads if kv_heads is None else kv_heads

    def draw(rng: np.random.Generator, batch: int, length: int) -> Arrays:
        shapes = [(batch, length, count, head_dim) for count in (heads, groups, groups)]
        return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)

    return Inputs(draw, ("q", "k", "v"), (heads, groups))


def vectors(width: int = 32, dtype: Any = np.float32) -> Inputs:
    """Returns the input x `[B, L, width]` of a layer."""

    def draw(rng: np.random.Generator, batch: int, length: int) -> Arrays:
        return (rng.normal(size=(batch, length, width)).astype(dtype),)

    return Inputs(draw, ("x",))


def tokens(vocab: int, first: int = 0, dtype: Any = np.int32) -> Inputs:
    """Returns the input of a language model, tokens `[B, L]` from `first` to `vocab` − 1."""

    def draw(rng: np.random.Generator, batch: int, length: int) -> Arrays:
        return (rng.integers(first, vocab, (batch, length)).astype(dtype),)

    return Inputs(draw, ("tokens",))
