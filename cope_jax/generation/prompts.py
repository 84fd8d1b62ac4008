"""Checks prompts, and turns them into one batch of tokens."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.registry import abridged, check_tokens


def pad_left(
    prompts: Sequence[Sequence[int] | np.ndarray], vocab_size: int, least: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens_BL with zeros before short prompts, lengths_B). ConfigError: a wrong prompt.

    L is the length of the longest prompt, but at least `least`.

    >>> pad_left([[1, 2, 3], [4]], 5)[0].tolist()
    [[1, 2, 3], [0, 0, 4]]
    """
    if (
        isinstance(prompts, str)
        or not isinstance(prompts, Sequence | np.ndarray | jax.Array)
        or getattr(prompts, "ndim", 1) == 0
    ):
        raise ConfigError(f"prompts must be a list of lists of integers, got {abridged(prompts)}")
    rows = [_row(prompt, vocab_size) for prompt in prompts]
    lengths_B = np.array([len(row_L) for row_L in rows], np.int32)
    if not len(rows) or not lengths_B.min():
        raise ConfigError(
            "a prompt is empty: give at least one prompt, and at least one token in each"
        )
    tokens_BL = np.zeros((len(rows), max(least, lengths_B.max())), np.int32)
    for padded_L, row_L in zip(tokens_BL, rows, strict=True):
        padded_L[len(padded_L) - len(row_L) :] = row_L
    return tokens_BL, lengths_B


def check_positions(model: Any, length: int, request: str, remedy: str) -> None:
    """ConfigError if a table of a model's encoding has fewer than `length` rows (positions).

    The message begins with `request`, which says what is too long, and ends with `remedy`.
    """
    width = model.config.block.model_dim
    positions_1L = np.arange(length, dtype=np.int32)[None]
    x_1LD = jax.ShapeDtypeStruct((*positions_1L.shape, width), jnp.float32)
    try:
        jax.eval_shape(lambda x_1LD: model.encoding.embed(x_1LD, positions_1L), x_1LD)
    except ConfigError as error:
        raise ConfigError(f"{request}, because {str(error).partition(':')[0]}: {remedy}") from error


def _row(prompt: Any, vocab_size: int) -> np.ndarray:
    try:
        row_L = np.asarray(prompt)
    except ValueError:  # lists of different lengths
        row_L = np.empty((0, 0))
    if row_L.ndim != 1 or (row_L.size and row_L.dtype.kind not in "iu"):
        raise ConfigError(
            f"prompts must be a list of lists of integers, got the prompt {abridged(prompt)}"
        )
    return check_tokens("prompt", prompt, vocab_size)
