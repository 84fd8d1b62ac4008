"""Text, or any tokens, from a model: prompts are read once, then one token follows the other over a cache."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError
from cope_jax.generation.prompts import check_positions, check_tokens, pad_left
from cope_jax.generation.sampling import SamplingParams, draw, row_keys
from cope_jax.models.model import StaticGraphDef
from cope_jax.registry import check_at_least


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

    >>> from cope_jax.encodings import EncodingConfig
    >>> from cope_jax.models.decoder import Decoder, DecoderConfig
    >>> config = DecoderConfig(vocab_size=16, max_length=8, encoding=EncodingConfig.parse("cope"))
    >>> model = Decoder(config, rngs=nnx.Rngs(0))
    >>> [len(row) for row in generate(model, [[1, 2, 3], [4]], 5, key=jax.random.key(0))]
    [5, 5]

    Args:
      model: a module like `cope_jax.models.decoder.Decoder`.
      prompts: tokens of each prompt; they may differ in length.
      max_new_tokens: how many tokens follow each at most.
      key: the random key, or those of the rows, `[B]`, as `sampling.row_keys` makes them of one.
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
    request = _request(model, prompts, max_new_tokens, key, temperature, top_k, top_p, stop_token)
    new_BT, count_B = _generate(**request)
    return [row[:count] for row, count in zip(np.asarray(new_BT), np.asarray(count_B), strict=True)]


def generate_stream(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    key: Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_token: int | None = None,
    chunk: int = 8,
) -> Iterator[list[np.ndarray]]:
    """The tokens of `generate` while they are drawn: those of each row that are new, again and again.

    First the one that follows each prompt, then `chunk` at a time. Two programs run, one that reads the prompts and
    one that goes on, whatever the chunk; both are compiled when the first tokens come.

    `chunk` is how many tokens of each row come between two looks at them. All other arguments, and errors, are those of
    `generate`.

    >>> from cope_jax.encodings import EncodingConfig
    >>> from cope_jax.models.decoder import Decoder, DecoderConfig
    >>> config = DecoderConfig(vocab_size=16, max_length=8, encoding=EncodingConfig.parse("cope"))
    >>> parts = generate_stream(Decoder(config, rngs=nnx.Rngs(0)), [[1, 2], [4]], 5, key=jax.random.key(0), chunk=3)
    >>> [[len(row) for row in part] for part in parts]
    [[1, 1], [3, 3], [1, 1]]
    """
    check_at_least(1, "generate_stream", chunk=chunk)
    return _chunks(chunk, **_request(model, prompts, max_new_tokens, key, temperature, top_k, top_p, stop_token))


class _Loop(NamedTuple):
    """What goes from one token to the next."""

    step: Array
    running_B: Array
    count_B: Array
    new_BT: Array
    cache: Any


def _request(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    key: Array,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop_token: int | None,
) -> dict[str, Any]:
    """The arguments of the programs; ConfigError for those of `generate` that make no sense."""
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
        check_tokens("stop_token", np.array([stop_token]), vocab_size)
    longest = int(lengths_B.max())
    what = f"a prompt of {longest} tokens and {max_new_tokens} new ones are too many"
    # The last token is never read, so it needs no position.
    check_positions(model, longest + max_new_tokens - 1, what, "ask for fewer")
    graph, state = nnx.split(model)
    return {
        "structure": StaticGraphDef(graph),
        "state": state,
        "tokens_BL": tokens_BL,
        "lengths_B": lengths_B,
        "draws": SamplingParams(
            _keys(key, len(lengths_B)),
            np.float32(temperature),
            None if top_p is None else np.float32(top_p),
            np.int32(-1 if stop_token is None else stop_token),
        ),
        "max_new_tokens": max_new_tokens,
        "top_k": None if top_k is None else min(top_k, vocab_size),
    }


def _keys(key: Array, rows: int) -> Array:
    """The key of each row, `[B]`."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape not in ((), (rows,)):
        raise ConfigError(f"generate.key must be a key of jax.random.key, or {rows}, one for each row")
    return key if key.shape else row_keys(key, range(rows))


def _begin(
    structure: StaticGraphDef,
    state: nnx.State[Any, Any],
    tokens_BL: Array,
    lengths_B: Array,
    draws: SamplingParams,
    max_new_tokens: int,
    top_k: int | None,
) -> _Loop:
    """Reads the prompts, and draws the first token of each row."""
    model = nnx.merge(structure.graph, state)
    batch, length = tokens_BL.shape
    # The last token is never read, so it needs no slot.
    logits_BV, cache = model.prefill(tokens_BL, length + max_new_tokens - 1, lengths_B=lengths_B)
    token_B = draw(draws, jnp.zeros((), jnp.int32), logits_BV, top_k)
    new_BT = jnp.zeros((batch, max_new_tokens), jnp.int32).at[:, 0].set(token_B)
    return _Loop(jnp.ones((), jnp.int32), token_B != draws.stop_token, jnp.ones(batch, jnp.int32), new_BT, cache)


def _advance(
    structure: StaticGraphDef,
    state: nnx.State[Any, Any],
    loop: _Loop,
    draws: SamplingParams,
    until: int | Array,
    top_k: int | None,
) -> _Loop:
    """SamplingParams one token after the other, until each row has so many or has said the stop token."""
    model = nnx.merge(structure.graph, state)

    def unfinished(loop: _Loop) -> Array:
        return (loop.step < until) & loop.running_B.any()

    def next_token(loop: _Loop) -> _Loop:
        step, running_B, count_B, new_BT, cache = loop
        logits_BV, cache = model.decode(jax.lax.dynamic_slice_in_dim(new_BT, step - 1, 1, axis=1), cache)
        token_B = draw(draws, step, logits_BV, top_k)
        new_BT = new_BT.at[:, step].set(token_B)
        running = running_B & (token_B != draws.stop_token)
        return _Loop(step + 1, running, count_B + running_B.astype(jnp.int32), new_BT, cache)

    return jax.lax.while_loop(unfinished, next_token, loop)


@functools.partial(jax.jit, static_argnames=("structure", "max_new_tokens", "top_k"))
def _generate(
    structure: StaticGraphDef,
    state: nnx.State[Any, Any],
    tokens_BL: Array,
    lengths_B: Array,
    draws: SamplingParams,
    max_new_tokens: int,
    top_k: int | None,
) -> tuple[Array, Array]:
    """(new_BT, how many of them count in each row)."""
    loop = _begin(structure, state, tokens_BL, lengths_B, draws, max_new_tokens, top_k)
    loop = _advance(structure, state, loop, draws, max_new_tokens, top_k)
    return loop.new_BT, loop.count_B


_first = jax.jit(_begin, static_argnames=("structure", "max_new_tokens", "top_k"))
_next = jax.jit(_advance, static_argnames=("structure", "top_k"), donate_argnames=("loop",))


def _chunks(
    chunk: int,
    *,
    structure: StaticGraphDef,
    state: nnx.State[Any, Any],
    tokens_BL: Array,
    lengths_B: Array,
    draws: SamplingParams,
    max_new_tokens: int,
    top_k: int | None,
) -> Iterator[list[np.ndarray]]:
    loop = _first(structure, state, tokens_BL, lengths_B, draws, max_new_tokens, top_k)
    seen_B, until = np.zeros(len(tokens_BL), np.int32), 1
    while True:
        # The first of these draws nothing: it compiles, so that the tokens behind come at an even speed.
        loop = _next(structure, state, loop, draws, np.int32(until), top_k)
        new_BT, count_B = np.array(loop.new_BT), np.array(loop.count_B)
        yield [row[seen:count] for row, seen, count in zip(new_BT, seen_B, count_B, strict=True)]
        if until == max_new_tokens or not np.asarray(loop.running_B).any():
            return
        seen_B, until = count_B, min(until + chunk, max_new_tokens)
