"""Text, or any tokens, from a model: prompts are read once, then one token follows the other over a cache.

>>> from cope_jax.encodings import EncodingConfig
>>> from cope_jax.models.decoder import Decoder, DecoderConfig
>>> config = DecoderConfig(vocab_size=16, max_length=8, encoding=EncodingConfig.parse("cope"))
>>> model = Decoder(config, rngs=nnx.Rngs(0))
>>> [len(row) for row in generate(model, [[1, 2, 3], [4]], 5, key=jax.random.key(0))]
[5, 5]
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least
from cope_jax.typing import Array


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    key: Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_token: int | None = None,
) -> list[np.ndarray]:
    """Continues each prompt, a token at a time, each drawn from softmax(logits/temperature) of the tokens before it.

    The whole batch runs as one compiled program, which ends when every row has said the stop token. Another key,
    temperature, `top_p` or stop token runs the same program; another size of the batch, length of its longest prompt,
    `max_new_tokens` or `top_k`, and `top_p` where there was none, compile again.

    Args:
      model: a module like `cope_jax.models.decoder.Decoder`.
      prompts: tokens of each prompt; they may differ in length.
      max_new_tokens: how many tokens follow each at most.
      key: the random key; the tokens depend on nothing else.
      temperature: 0 takes the most probable token.
      top_k: only the so many most probable tokens are drawn from.
      top_p: only the fewest tokens that together have this probability are drawn from; after `top_k`. Holtzman et al.
        (arXiv 1904.09751).
      stop_token: a row ends with it; None: never.

    Returns:
      The new tokens of each row, int32, with the stop token where it came.

    Raises:
      ConfigError: an argument of a wrong kind or out of range, or more positions than a table of the encoding has.
    """
    vocab_size = model.config.vocab_size
    tokens_BL, lengths_B = pad_left(prompts, vocab_size)
    for name, value in (("max_new_tokens", max_new_tokens), ("top_k", top_k), ("stop_token", stop_token)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer | None):
            raise ConfigError(f"generate.{name} must be an integer, got {value!r}")
    check_at_least(1, "generate", max_new_tokens=max_new_tokens, top_k=top_k)
    check_at_least(0, "generate", temperature=temperature)
    if temperature > float(np.finfo(np.float32).max):
        raise ConfigError(f"generate.temperature must be finite in float32, got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"generate.top_p must lie in (0, 1], got {top_p}")
    if stop_token is not None:
        _check_tokens("stop_token", np.array([stop_token]), vocab_size)
    # The last token is never read, so it needs no position.
    _check_positions(model, int(lengths_B.max()) + max_new_tokens - 1)
    graph, state = nnx.split(model)
    new_BT, count_B = _generate(
        _Structure(graph),
        state,
        tokens_BL,
        lengths_B,
        key,
        np.float32(temperature),
        None if top_p is None else np.float32(top_p),
        np.int32(-1 if stop_token is None else stop_token),
        max_new_tokens=max_new_tokens,
        top_k=None if top_k is None else min(top_k, vocab_size),
    )
    return [row[:count] for row, count in zip(np.asarray(new_BT), np.asarray(count_B), strict=True)]


def pad_left(prompts: Sequence[Sequence[int]], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens_BL with zeros before the shorter prompts, lengths_B), both int32; ConfigError for what is no token.

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
        _check_tokens("prompt", row_L, vocab_size)
        padded_L[len(padded_L) - len(row_L) :] = row_L
    return tokens_BL, lengths_B


def sample(logits_BV: Array, key: Array, temperature: Array, top_k: int | None, top_p: Array | None) -> Array:
    """One token of each row, int32; for a temperature of 0 the most probable, the lowest of equals."""
    # What is below the smallest normal number counts as 0 to some processors, and so to all here.
    drawn_at_all = temperature >= jnp.finfo(jnp.float32).tiny
    # From the maximum down, no quotient is +∞, however small the temperature.
    below_BV = logits_BV - logits_BV.max(axis=-1, keepdims=True)
    scaled_BV = below_BV / jnp.where(drawn_at_all, temperature, 1)
    if top_k is not None:
        scaled_BV = keep_top_k(scaled_BV, top_k)
    if top_p is not None:
        scaled_BV = keep_top_p(scaled_BV, top_p)
    drawn_B = jax.random.categorical(key, scaled_BV)
    return jnp.where(drawn_at_all, drawn_B, jnp.argmax(logits_BV, axis=-1)).astype(jnp.int32)


def keep_top_k(logits_BV: Array, k: int) -> Array:
    """The k highest logits of each row, and −∞ for the others; of equals the lower token stays.

    >>> keep_top_k(jnp.array([[1.0, 3.0, 2.0]]), 2).tolist()
    [[-inf, 3.0, 2.0]]
    """
    _, places_BK = jax.lax.top_k(logits_BV, k)
    return _keep(logits_BV, places_BK, jnp.ones(places_BK.shape, bool))


def keep_top_p(logits_BV: Array, p: Array | float) -> Array:
    """The fewest of each row's logits whose probabilities reach p together, and −∞ for the others; at least one.

    The nucleus of Holtzman et al. (arXiv 1904.09751). Of equals the lower token stays; p = 1 keeps all.

    >>> keep_top_p(jnp.log(jnp.array([[0.2, 0.5, 0.3]])), 0.75).tolist()
    [[-inf, -0.6..., -1.2...]]
    """
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    sorted_BV = jax.nn.softmax(jnp.take_along_axis(logits_BV, order_BV, axis=-1), axis=-1)
    # Before the first stands −1, so that it stays even where p is rounded to 0.
    before_BV = jnp.pad(jnp.cumsum(sorted_BV, axis=-1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return _keep(logits_BV, order_BV, (before_BV < p) | (p >= 1))


def _keep(logits_BV: Array, places_BK: Array, keep_BK: Array) -> Array:
    rows_B1 = jnp.arange(len(logits_BV), dtype=jnp.int32)[:, None]
    keep_BV = jnp.zeros(logits_BV.shape, bool).at[rows_B1, places_BK].set(keep_BK)
    return jnp.where(keep_BV, logits_BV, -jnp.inf)


def _row(prompt: Any) -> np.ndarray:
    try:
        row_L = np.asarray(prompt)
    except ValueError:  # lists of several lengths
        row_L = np.empty((0, 0))
    if row_L.ndim != 1 or (row_L.size and row_L.dtype.kind not in "iu"):
        raise ConfigError(f"prompts must be a list of lists of integers, got the prompt {_shown(prompt)}")
    return row_L


def _shown(value: Any) -> str:
    return " ".join(repr(value).split())[:60]


def _check_tokens(name: str, tokens: np.ndarray, vocab_size: int) -> None:
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise ConfigError(f"{name}: token {outside[0]} is outside of the vocabulary of {vocab_size}")


def _check_positions(model: Any, length: int) -> None:
    """Raises the encoding's own error where a table of it has no row for one of these positions."""
    width = model.config.block.model_dim
    positions_1L = np.arange(length, dtype=np.int32)[None]
    x_1LD = jax.ShapeDtypeStruct((1, length, width), jnp.float32)
    jax.eval_shape(lambda x_1LD: model.encoding.embed(x_1LD, positions_1L), x_1LD)


@dataclasses.dataclass(frozen=True)
class _Structure:
    """A model without its numbers, by which compiled programs are found again; its config may hold what has no hash."""

    graph: nnx.GraphDef[Any]

    def __hash__(self) -> int:
        return hash(type(self.graph))


@functools.partial(jax.jit, static_argnames=("structure", "max_new_tokens", "top_k"))
def _generate(
    structure: _Structure,
    state: nnx.State[Any, Any],
    tokens_BL: Array,
    lengths_B: Array,
    key: Array,
    temperature: Array,
    top_p: Array | None,
    stop_token: Array,
    *,
    max_new_tokens: int,
    top_k: int | None,
) -> tuple[Array, Array]:
    """(new_BT, how many of them count in each row)."""
    model = nnx.merge(structure.graph, state)
    batch, length = tokens_BL.shape

    def draw(step: Array, logits_BV: Array) -> Array:
        return sample(logits_BV, jax.random.fold_in(key, step), temperature, top_k, top_p)

    def unfinished(loop: tuple[Any, ...]) -> Array:
        step, running_B = loop[:2]
        return (step < max_new_tokens) & running_B.any()

    def next_token(loop: tuple[Any, ...]) -> tuple[Any, ...]:
        step, running_B, count_B, new_BT, cache = loop
        logits_BV, cache = model.decode(jax.lax.dynamic_slice_in_dim(new_BT, step - 1, 1, axis=1), cache)
        token_B = draw(step, logits_BV)
        new_BT = new_BT.at[:, step].set(token_B)
        return step + 1, running_B & (token_B != stop_token), count_B + running_B.astype(jnp.int32), new_BT, cache

    # The last token is never read, so it needs no slot.
    logits_BV, cache = model.prefill(tokens_BL, length + max_new_tokens - 1, lengths_B=lengths_B)
    token_B = draw(jnp.zeros((), jnp.int32), logits_BV)
    new_BT = jnp.zeros((batch, max_new_tokens), jnp.int32).at[:, 0].set(token_B)
    loop = (jnp.ones((), jnp.int32), token_B != stop_token, jnp.ones(batch, jnp.int32), new_BT, cache)
    _, _, count_B, new_BT, _ = jax.lax.while_loop(unfinished, next_token, loop)
    return new_BT, count_B
