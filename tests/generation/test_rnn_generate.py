"""Mistakes in the arguments of generation with a recurrent language model."""

import functools

import jax
import pytest
from flax import nnx

from cope_jax.errors import ConfigError
from cope_jax.generation.rnn_generate import generate
from cope_jax.models.rnn_lm import RNNLM, RNNLMConfig
from tests.models.cases import config, model

KEY = jax.random.key(0)
A_KEY = "generate.key must be one key from jax.random.key, for all rows"
MISTAKES = {
    "no key": (dict(key=0), A_KEY),
    "keys": (dict(key=jax.random.split(KEY, 1)), A_KEY),
    "old key": (dict(key=jax.random.PRNGKey(0)), A_KEY),
    "top_k": (dict(top_k=0), "generate.top_k must be at least 1, got 0"),
    "fractional top_k": (
        dict(top_k=1.5),
        "generate.top_k must be int or None, got 1.5 of type float",
    ),
    "temperature": (dict(temperature=-0.1), "generate.temperature must be at least 0, got -0.1"),
    "no temperature": (
        dict(temperature=float("nan")),
        "generate.temperature must be finite, got nan",
    ),
    "no new word": (dict(max_new_tokens=0), "generate.max_new_tokens must be at least 1, got 0"),
    "fractional length": (
        dict(max_new_tokens=2.5),
        "generate.max_new_tokens must be int, got 2.5 of type float",
    ),
    "a decoder": (
        dict(model=model(config("rope", num_layers=1))),
        "generate.model must be a recurrent language model, got a Decoder: pass an RNNLM, or call",
    ),
    "no model": (dict(model="rnn_lm"), "generate.model must be a recurrent language model"),
    "word": (dict(prompts=[[16]]), "prompt: token 16 is outside of the vocabulary of 16 tokens"),
}


@functools.cache
def recurrent():
    return RNNLM(RNNLMConfig(vocab_size=16, embed_dim=4, hidden_dim=4), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("change, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_clear_line(change, message):
    arguments = dict(model=recurrent(), prompts=[[1, 2], [3]], max_new_tokens=1, key=KEY) | change
    with pytest.raises(ConfigError) as error:
        generate(**arguments)
    assert message in str(error.value) and "\n" not in str(error.value)
