"""Generates tokens: reads the prompts once, then continues token by token with a cache or a state."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError, NonFiniteError
from cope_jax.generation.prompts import check_positions, pad_left
from cope_jax.generation.sampling import SamplingParams, draw, row_keys
from cope_jax.models.model import StaticGraphDef
from cope_jax.registry import check_at_least, check_tokens, checked


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    key: Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_token: int | Sequence[int] | None = None,
    padded: int = 0,
    size: int | None = None,
) -> list[np.ndarray]:
    """Continues each prompt by samples of softmax(logits/temperature), given all earlier tokens.

    The batch runs as one compiled program, which ends early if every row has generated a stop
    token. A new value of the key, the temperature, `top_p` or a stop token needs no compilation. A
    new batch size, length of the longest prompt (unless `padded` is greater), `max_new_tokens`,
    `top_k` or number of stop tokens needs a compilation, and so does a change between `top_p=None`
    and a number.

    >>> from cope_jax.encodings import EncodingConfig
    >>> from cope_jax.models.decoder import Decoder, DecoderConfig
    >>> config = DecoderConfig(vocab_size=16, max_length=8, encoding=EncodingConfig.parse("cope"))
    >>> model = Decoder(config, rngs=nnx.Rngs(0))
    >>> [len(row) for row in generate(model, [[1, 2, 3], [4]], 5, key=jax.random.key(0))]
    [5, 5]

    Args:
      model: a module with `prefill` and `decode`, like `cope_jax.models.decoder.Decoder`, or
        `cope_jax.models.rnn_lm.RNNLM`, whose forward direction generates.
      prompts: the tokens of each prompt. Prompts may differ in length.
      max_new_tokens: maximum number of new tokens of each row.
      key: the random key, or one key for each row, `[B]`, as from `sampling.row_keys`.
      temperature: the logits are divided by this number; 0 means that the most probable token is
        taken.
      top_k: sample from the k most probable tokens. If None, there is no such limit.
      top_p: sample from the fewest tokens whose probabilities sum to this value or more, after
        `top_k` is applied. If None, there is no such limit. Holtzman et al. (arXiv 1904.09751).
      stop_token: a row ends with this token, or with any of these tokens. If None, all rows have
        `max_new_tokens` new tokens.
      padded: shorter prompts are padded to this length, so that prompts of several lengths need one
        compilation.
      size: only the first `size` tokens of the model and stop tokens are sampled, as a model may have
        more than its tokenizer. None means all.

    Returns:
      The new tokens of each row, int32, including the stop token if it was generated.

    Raises:
      ConfigError: an argument has a wrong type or is out of range, or a table of the encoding has
        too few positions.
      NonFiniteError: the highest logit of a row is not finite.
    """
    arguments = (key, temperature, top_k, top_p, stop_token, padded, size)
    new_BT, count_B = _generate(_request(model, prompts, max_new_tokens, *arguments))
    return _rows(np.asarray(new_BT), np.zeros(len(new_BT), np.int32), np.asarray(count_B))


def generate_stream(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    chunk: int = 8,
    **arguments: Any,
) -> Iterator[list[np.ndarray]]:
    """Yields the tokens of `generate` while they are generated, as lists of new tokens by row.

    The first list has the first new token of each row. Every other list has up to `chunk` tokens of
    each row. Two programs run, for any `chunk`. The first program reads the prompts, and the second
    program continues them. Both programs are compiled before the first list.

    All other arguments and the errors are those of `generate`.

    >>> from cope_jax.encodings import EncodingConfig
    >>> from cope_jax.models.decoder import Decoder, DecoderConfig
    >>> config = DecoderConfig(vocab_size=16, max_length=8, encoding=EncodingConfig.parse("cope"))
    >>> parts = generate_stream(Decoder(config, rngs=nnx.Rngs(0)), [[1, 2], [4]], 5, key=jax.random.key(0), chunk=3)
    >>> [[len(row) for row in part] for part in parts]
    [[1, 1], [3, 3], [1, 1]]
    """
    check_at_least(1, "generate_stream", chunk=checked(chunk, int, "generate_stream.chunk"))
    return _chunks(_request(model, prompts, max_new_tokens, **arguments), chunk)


class _Loop(NamedTuple):
    """The state that is carried from token to token."""

    step: Array
    running_B: Array
    count_B: Array
    new_BT: Array
    cache: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Request:
    """The arguments of the compiled programs, from the arguments of `generate`."""

    state: nnx.State[Any, Any]
    tokens_BL: Any
    lengths_B: Any
    params: SamplingParams
    structure: StaticGraphDef = dataclasses.field(metadata={"static": True})
    max_new_tokens: int = dataclasses.field(metadata={"static": True})

    @property
    def model(self) -> Any:
        return nnx.merge(self.structure.graph, self.state)


def _request(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    key: Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_token: int | Sequence[int] | None = None,
    padded: int = 0,
    size: int | None = None,
) -> _Request:
    """Checks the arguments of `generate` and collects them. ConfigError: one is wrong."""
    if isinstance(model, type):
        raise ConfigError(
            f"generate.model must be a model, got the class {model.__name__}: create one"
        )
    if not hasattr(model, "prefill"):
        module = isinstance(model, nnx.Module)
        remedy = "a Decoder or an RNNLM" if module else "cj.load(folder).model()"
        raise ConfigError(
            f"generate.model must have prefill and decode, got a {type(model).__name__}: pass {remedy}"
        )
    vocab_size = model.config.vocab_size
    given: Any = stop_token
    if (
        isinstance(given, str)
        or not isinstance(given, Sequence | np.ndarray)
        or getattr(given, "shape", None) == ()
    ):
        given = [given]
    stops = [checked(stop, int, "generate.stop_token") for stop in given if stop is not None]
    max_new_tokens = checked(max_new_tokens, int, "generate.max_new_tokens")
    temperature = checked(temperature, float, "generate.temperature")
    top_k = checked(top_k, int | None, "generate.top_k")
    check_at_least(1, "generate", max_new_tokens=max_new_tokens, top_k=top_k)
    check_at_least(0, "generate", temperature=temperature)
    padded = checked(padded, int, "generate.padded")
    top_p = checked(top_p, float | None, "generate.top_p")
    size = checked(size, int | None, "generate.size")
    check_at_least(0, "generate", padded=padded)
    check_at_least(1, "generate", size=size)
    size = None if size is None or size >= vocab_size else size
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"generate.top_p must lie in (0, 1], got {top_p}")
    tokens_BL, lengths_B = pad_left(prompts, vocab_size, padded)
    check_tokens("stop_token", stops, vocab_size)
    longest = int(lengths_B.max())
    if hasattr(model, "encoding"):
        request = f"a prompt of {longest} tokens with {max_new_tokens} new tokens is too long"
        # The last token is never read, so it needs no position.
        check_positions(model, longest + max_new_tokens - 1, request, "ask for fewer tokens")
    graph, state = nnx.split(model)
    params = SamplingParams(
        keys_B=_keys(key, len(tokens_BL)),
        temperature=np.float32(temperature),
        top_p=None if top_p is None else np.float32(top_p),
        stop_S=np.array(stops or [-1], np.int32),
        top_k=None if top_k is None else min(top_k, vocab_size),
        size=size,
    )
    return _Request(state, tokens_BL, lengths_B, params, StaticGraphDef(graph), max_new_tokens)


def _keys(key: Array, rows: int) -> Array:
    """Returns the key of each row, `[B]`."""
    typed = isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed or key.shape not in ((), (rows,)):
        raise ConfigError(
            f"generate.key must be a key from jax.random.key, or one for each row, {rows} in all"
        )
    return key if key.shape else row_keys(key, range(rows))


def _begin(request: _Request) -> _Loop:
    """Reads the prompts and samples the first token of each row."""
    (batch, length), most = request.tokens_BL.shape, request.max_new_tokens
    # The last token is never read, so it needs no slot.
    logits_BV, cache = request.model.prefill(
        request.tokens_BL, length + most - 1, lengths_B=request.lengths_B
    )
    token_B = draw(request.params, jnp.zeros((), jnp.int32), logits_BV)
    new_BT = jnp.zeros((batch, most), jnp.int32).at[:, 0].set(token_B)
    running_B = (token_B >= 0) & jnp.isin(token_B, request.params.stop_S, invert=True)
    return _Loop(jnp.ones((), jnp.int32), running_B, jnp.ones(batch, jnp.int32), new_BT, cache)


def _advance(request: _Request, loop: _Loop, until: int | Array) -> _Loop:
    """Samples up to `until` tokens, or until every row has generated the stop token."""
    model, params = request.model, request.params

    def unfinished(loop: _Loop) -> Array:
        return (loop.step < until) & loop.running_B.any()

    def next_token(loop: _Loop) -> _Loop:
        step, running_B, count_B, new_BT, cache = loop
        logits_BV, cache = model.decode(
            jax.lax.dynamic_slice_in_dim(new_BT, step - 1, 1, axis=1), cache
        )
        token_B = draw(params, step, logits_BV)
        new_BT = new_BT.at[:, step].set(token_B)
        running = running_B & (token_B >= 0) & jnp.isin(token_B, params.stop_S, invert=True)
        return _Loop(step + 1, running, count_B + running_B.astype(jnp.int32), new_BT, cache)

    return jax.lax.while_loop(unfinished, next_token, loop)


@jax.jit
def _generate(request: _Request) -> tuple[Array, Array]:
    """Returns (new_BT, the number of valid tokens in each row)."""
    loop = _advance(request, _begin(request), request.max_new_tokens)
    return loop.new_BT, loop.count_B


_first = jax.jit(_begin)
_next = jax.jit(_advance, donate_argnames=("loop",))


def _chunks(request: _Request, chunk: int) -> Iterator[list[np.ndarray]]:
    loop = _first(request)
    seen_B, until = np.zeros(len(request.tokens_BL), np.int32), 1
    while True:
        # The first call only compiles, and samples nothing, so that later tokens come at an even
        # speed.
        loop = _next(request, loop, np.int32(until))
        new_BT, count_B = np.array(loop.new_BT), np.array(loop.count_B)
        yield _rows(new_BT, seen_B, count_B)
        if until == request.max_new_tokens or not np.asarray(loop.running_B).any():
            return
        seen_B, until = count_B, min(until + chunk, request.max_new_tokens)


def _rows(new_BT: np.ndarray, seen_B: np.ndarray, count_B: np.ndarray) -> list[np.ndarray]:
    """Returns the tokens of each row that are not seen yet. NonFiniteError: a row has no logits."""
    rows = [row[seen:count] for row, seen, count in zip(new_BT, seen_B, count_B, strict=True)]
    for number, row in enumerate(rows):
        if (row < 0).any():
            at = seen_B[number] + int(np.argmax(row < 0)) + 1
            raise NonFiniteError(
                f"the logits of new token {at} of row {number} of the batch are not finite: look for "
                "parameters that are not finite, or too large for the compute type"
            )
    return rows
