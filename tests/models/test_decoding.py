"""Reading a prompt and then token after token gives the logits of the full forward pass."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.errors import ConfigError
from tests.models.cases import LENGTH, ROUNDING, abstract, build, checker, config, model, tokens
from tests.ops.jaxprs import equations

GROUPED = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
CHOICES = {
    "learned+cope+rope": config("learned+cope(npos_max=4,gate=separate_key)+rope", GROUPED),
    "shared, post-norm": config(
        "cope(npos_max=4,gate=value)+relative(max_distance=3)",
        {"norm_position": "post", "norm": "rms", "activation": "swiglu"},
        encoding_sharing="model",
        tie_embeddings=True,
        num_layers=3,
    ),
    "tape": config(
        "cope(npos_max=4,gate=separate_key)",
        {"qk_norm": True, "output_gate": True, "convolution": 2},
        tape=3,
    ),
    "given positions below chosen ones": config(
        "repo", GROUPED, full_layers=(0,), full_encoding="repo(position=given)"
    ),
    "counted keys": config("rope+ssmax", GROUPED),
    "fire, recomputed": config("fire(hidden=4,threshold=3.0)", remat="full"),
}


def programs(choices):
    """(state, forward, prefill, decode), the last three compiled functions of the state."""
    graph, state = build(choices)
    prefill = jax.jit(
        lambda state, tokens, lengths=None, capacity=LENGTH: nnx.merge(graph, state).prefill(
            tokens, capacity, lengths_B=lengths
        ),
        static_argnames="capacity",
    )
    decode = jax.jit(lambda state, tokens, cache: nnx.merge(graph, state).decode(tokens, cache))
    return state, jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens)), prefill, decode


def equal(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.newest
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "learned+cope+rope" else pytest.mark.slow)
        for name in CHOICES
    ],
)
def test_each_row_of_a_padded_batch_is_as_if_alone(name):
    """Prompts of other lengths side by side, and then token after token."""
    laws = ["decoding", "left padding and cache"]
    checker(*build(CHOICES[name]))(laws=laws, tolerance=ROUNDING).raise_if_broken()


def test_a_prompt_without_padding():
    state, forward, prefill, decode = programs(config("learned+cope(npos_max=4)"))
    full = np.asarray(forward(state, tokens()))
    logits, cache = prefill(state, tokens()[:, :4])
    equal(logits, full[:, 3])
    logits, cache = decode(state, tokens()[:, 4:], cache)  # several at once
    equal(logits, full[:, -1])
    # The cache is full: the next token has no slot.
    assert np.isnan(decode(state, tokens()[:, :1], cache)[0]).all()


def test_one_program_serves_every_length():
    graph, state = build(config("cope(npos_max=4)+rope", {"model_dim": 4}))
    traces = []

    @jax.jit
    def decode(state, tokens, cache):
        traces.append(tokens.shape)
        logits, cache = nnx.merge(graph, state).decode(tokens, cache)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, None], cache

    cache = jax.jit(lambda state: nnx.merge(graph, state).prefill(tokens(length=1), 65)[1])(state)
    token = tokens(length=1)
    for _ in range(64):
        token, cache = decode(state, token, cache)
    assert traces == [(2, 1)] and cache.filled == cache.capacity == 65


@pytest.mark.parametrize("first", [True, False])
def test_the_program_does_not_grow_with_depth(first):
    def size(num_layers):
        graph, state = abstract(config("learned+cope(npos_max=4)+rope", num_layers=num_layers))
        cache = jax.eval_shape(lambda state: nnx.merge(graph, state).prefill(tokens(), 9)[1], state)

        def run(state, cache):
            decoder = nnx.merge(graph, state)
            return (
                decoder.prefill(tokens(), 9) if first else decoder.decode(tokens(length=1), cache)
            )

        return len(equations(run, state, cache))

    assert size(3) == size(9)


def test_bfloat16_is_for_products_only():
    """The cache has the compute type; logits are those of the full pass to its eight bits."""
    state, forward, prefill, decode = programs(
        config("cope(npos_max=4,gate=value)", {"compute_dtype": "bfloat16"})
    )
    _, cache = prefill(state, tokens()[:, :-1])
    assert {leaf.dtype for leaf in jax.tree.leaves(cache.entries)} == {jnp.dtype("bfloat16")}
    logits, _ = decode(state, tokens()[:, -1:], cache)
    assert logits.dtype == jnp.float32
    exact = np.asarray(forward(state, tokens()))[:, -1]
    # Both passes round some twenty times, in other places.
    assert np.linalg.norm(logits - exact) / np.linalg.norm(exact) < 20**0.5 * 2**-8


def test_a_prompt_is_read_by_the_chosen_implementation():
    decoder = model(config(block={"attention": "ful"}))
    with pytest.raises(ConfigError, match="unknown attention implementation 'ful'"):
        jax.eval_shape(lambda: decoder.prefill(tokens(), LENGTH))


@pytest.mark.parametrize(
    "encoding, capacity, message",
    [
        ("rope", LENGTH - 1, f"capacity {LENGTH - 1} cannot hold {LENGTH} tokens"),
        ("learned(max_length=6)", 9, "6 rows"),
    ],
)
def test_too_long_a_prompt_is_an_error_while_tracing(encoding, capacity, message):
    decoder = model(config(encoding))
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda: decoder.prefill(tokens(), capacity))


@pytest.mark.parametrize(
    "lengths, message",
    [
        ([0, 3], f"lengths_B must be between 1 and {LENGTH}, the length of the prompts, got 0"),
        (
            np.array([3, LENGTH + 1]),
            f"must be between 1 and {LENGTH}, the length of the prompts, got {LENGTH + 1}",
        ),
        ([3], "lengths_B must be int32[2], one length for each prompt, got int64[1]"),
        ([1.5, 3.0], "lengths_B must be int32[2], one length for each prompt, got float64[2]"),
    ],
    ids=["none", "too long", "too few", "no integers"],
)
def test_wrong_lengths_are_one_clear_line(lengths, message):
    decoder = model(config())
    with pytest.raises(ConfigError, match=re.escape(message)):
        jax.eval_shape(lambda: decoder.prefill(tokens(), LENGTH, lengths_B=lengths))


def test_lengths_from_one_to_all_are_right_as_any_integers():
    decoder = model(config())
    for lengths in ([1, LENGTH], np.array([1, LENGTH]), jnp.array([1, LENGTH])):
        assert jax.eval_shape(
            lambda lengths=lengths: decoder.prefill(tokens(), LENGTH, lengths_B=lengths)
        )
