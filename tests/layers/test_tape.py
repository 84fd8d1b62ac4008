"""TAPE starts as RoPE; only distances count; its positions are float32. Oracle: tests/models."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from cope_jax.errors import ConfigError
from cope_jax.models.decoder import Decoder
from tests.models.cases import LENGTH, ROUNDING, abstract, build, config, tokens

PLACES = np.arange(LENGTH, dtype=np.int32)[None]


def _forward(graph, state, places):
    return nnx.merge(graph, state)(tokens(), positions_BL=places)


def test_tape_starts_as_rope():
    model = nnx.jit(lambda: Decoder(config("none", tape=3), rngs=nnx.Rngs(0)))()
    graph, state = nnx.split(model)
    plain, _ = abstract(config("rope"))
    of_tape = {"mix_HH", "up_HS", "token_DS", "down_SH"}
    same = nnx.from_flat_state(
        [(path, leaf) for path, leaf in nnx.to_flat_state(state) if path[-1] not in of_tape]
    )
    tape, exact = (
        jax.jit(functools.partial(_forward, g))(s, PLACES)
        for g, s in ((graph, state), (plain, same))
    )
    np.testing.assert_allclose(tape, exact, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize(("compute_dtype", "rounding"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_tape_sees_how_far_tokens_are_apart_and_nothing_else(compute_dtype, rounding):
    graph, state = build(config("none", {"compute_dtype": compute_dtype}, tape=3))
    run = jax.jit(functools.partial(_forward, graph))
    here = np.asarray(run(state, PLACES))
    np.testing.assert_allclose(run(state, PLACES + 1000), here, rtol=0, atol=rounding)
    assert np.abs(run(state, 2 * PLACES) - here).max() > 2 * rounding
    cache = jax.eval_shape(
        lambda state: nnx.merge(graph, state).prefill(tokens(), LENGTH)[1], state
    )
    # Values and positions.
    assert (cache.entries.k.dtype, cache.entries.v.dtype) == (compute_dtype, "float32")


@pytest.mark.parametrize(
    "block", [{"num_heads": 4, "num_kv_heads": 2}, {"mixer": "gla"}, {"head_dim": 3}]
)
def test_what_tape_needs_is_told(block):
    with pytest.raises(
        ConfigError,
        match="tape needs mixer=attention, as many key heads as query heads, and an even",
    ):
        config("none", block, tape=3)
