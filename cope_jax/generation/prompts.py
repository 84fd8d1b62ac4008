"""Prompts as one batch of tokens."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.errors import ConfigError


def pad_left(prompts: Sequence[Sequence[int]], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens_BL with zeros before the shorter prompts, lengths_B), both int32; ConfigError if one is not a token.

    >>> pad_left([[1, 2, 3], [4]], 5)[0].tolist()
    [[1, 2, 3], [0, 0, 4]]
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence | np.ndarray | jax.Array):
        raise ConfigError(f"prompts must be a list of lists of integers, got {_shown(prompts)}")
    rows = [_row(prompt) for prompt in prompts]
    lengths_B = np.array([len(row_L) for row_L in rows], np.int32)
    if not len(rows) or not lengths_B.min():
        raise ConfigError("a prompt is empty: give each at least one token")
    tokens_BL = np.zeros((len(rows), lengths_B.max()), np.int32)
    for padded_L, row_L in zip(tokens_BL, rows, strict=True):
        check_tokens("prompt", row_L, vocab_size)
        padded_L[len(padded_L) - len(row_L) :] = row_L
    return tokens_BL, lengths_B


def check_positions(model: Any, length: int, what: str, remedy: str) -> None:
    """ConfigError if a table of a decoder's encoding has fewer rows than `length` positions.

    The message begins with `what`, which says what is too long, and ends with the `remedy`.
    """
    width = model.config.block.model_dim
    positions_1L = np.arange(length, dtype=np.int32)[None]
    x_1LD = jax.ShapeDtypeStruct((*positions_1L.shape, width), jnp.float32)
    try:
        jax.eval_shape(lambda x_1LD: model.encoding.embed(x_1LD, positions_1L), x_1LD)
    except ConfigError as error:
        raise ConfigError(f"{what}, because {str(error).partition(':')[0]}: {remedy}") from error


def _row(prompt: Any) -> np.ndarray:
    try:
        row_L = np.asarray(prompt)
    except ValueError:  # lists of different lengths
        row_L = np.empty((0, 0))
    if row_L.ndim != 1 or (row_L.size and row_L.dtype.kind not in "iu"):
        raise ConfigError(f"prompts must be a list of lists of integers, got the prompt {_shown(prompt)}")
    return row_L


def _shown(value: Any) -> str:
    return " ".join(repr(value).split())[:60]


def check_tokens(name: str, tokens: np.ndarray, vocab_size: int) -> None:
    """ConfigError for the first token outside of the vocabulary."""
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise ConfigError(f"{name}: token {outside[0]} is outside of the vocabulary of {vocab_size}")
