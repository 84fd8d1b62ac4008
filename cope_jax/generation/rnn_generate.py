"""Generates text with a recurrent language model: reads prompts once, and continues word by word.

>>> from cope_jax.models.rnn_lm import RNNLM, RNNLMConfig
>>> model = RNNLM(RNNLMConfig(vocab_size=16, embed_dim=4, hidden_dim=4), rngs=nnx.Rngs(0))
>>> generate(model, [[1, 2, 3], [4]], 5, key=jax.random.key(0)).shape
(2, 5)
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.errors import ConfigError
from cope_jax.generation.prompts import pad_left
from cope_jax.generation.sampling import checked_choices, is_key, sample


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    key: Array,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> np.ndarray:
    """Continues each prompt by samples of softmax(logits/temperature), given all earlier words.

    `model` is a recurrent language model like `RNNLM`, whose forward direction generates. `key` is
    a single key for all rows. The other arguments and the errors are as in
    `cope_jax.generation.decoding.generate`. Returns the new words, int32 `[B, max_new_tokens]`.
    """
    if not hasattr(model, "step"):
        raise ConfigError(
            f"generate.model must be a recurrent language model, got a {type(model).__name__}: "
            "pass an RNNLM, or call generate of cope_jax.generation.decoding"
        )
    max_new_tokens, temperature, top_k = checked_choices(max_new_tokens, temperature, top_k)
    if not is_key(key, ()):
        raise ConfigError("generate.key must be one key from jax.random.key, for all rows")
    vocab_size = model.config.vocab_size
    padded_BL, lengths_B = pad_left(prompts, vocab_size)
    # Padding is moved behind the prompts, so that it does not reach the state.
    tokens_BL = np.stack(
        [np.roll(row, length - len(row)) for row, length in zip(padded_BL, lengths_B, strict=True)]
    )
    graphdef, state = nnx.split(model)
    keys_T = jax.random.split(key, max_new_tokens)
    top_k = None if top_k is None else min(top_k, vocab_size)
    return np.asarray(
        _generate(graphdef, state, tokens_BL, lengths_B, keys_T, np.float32(temperature), top_k)
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "top_k"))
def _generate(
    graphdef: nnx.GraphDef[Any],
    state: nnx.State[Any, Any],
    tokens_BL: Array,
    lengths_B: Array,
    keys_T: Array,
    temperature: Array,
    top_k: int | None,
) -> Array:
    model = nnx.merge(graphdef, state)
    logits_BLV, carry = model(tokens_BL, lengths_B=lengths_B)
    last_BV = jnp.take_along_axis(logits_BLV, (lengths_B - 1)[:, None, None], axis=1)[:, 0]

    def next_word(loop: tuple[Array, PyTree], key: Array) -> tuple[tuple[Array, PyTree], Array]:
        logits_BV, carry = loop
        token_B = sample(logits_BV, key, temperature, top_k, None)
        return model.step(token_B, carry), token_B

    return jnp.swapaxes(jax.lax.scan(next_word, (last_BV, carry), keys_T)[1], 0, 1)
