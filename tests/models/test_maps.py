"""The maps that `Decoder.maps` gives are what the model does."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models.cases import LENGTH, ROUNDING, build, config, named, tokens
from tests.oracle.decoder import feed_forward, linear, normalise

LAYERS, HEADS, NPOS_MAX = 3, 4, 4
COPE = f"cope(npos_max={NPOS_MAX})"


@functools.cache
def result(encoding, num_layers, norm_position="pre"):
    """(parameters, logits, maps)."""
    choices = config(
        encoding,
        {"num_heads": HEADS, "num_kv_heads": 2, "head_dim": 4, "norm_position": norm_position},
        num_layers=num_layers,
    )
    graphdef, state = build(choices)

    @jax.jit
    def run(state):
        decoder = nnx.merge(graphdef, state)
        return decoder(tokens()), decoder.maps(tokens())

    logits, maps = run(state)
    return (
        named(state),
        np.asarray(logits),
        {name: np.asarray(value) for name, value in maps.items()},
    )


def test_shapes():
    """CoPE has gates and positions to show; an encoding without diagnostics has its attention."""
    maps = result(f"{COPE}+rope", LAYERS)[2]
    assert set(maps) == {"attention", "gates", "positions"}
    assert {value.shape for value in maps.values()} == {(LAYERS, 2, HEADS, LENGTH, LENGTH)}
    graphdef, state = build(config("rope"))
    assert set(jax.eval_shape(lambda: nnx.merge(graphdef, state).maps(tokens()))) == {"attention"}


def test_attention_is_a_distribution_over_the_past():
    attention = result(f"{COPE}+rope", LAYERS)[2]["attention"]
    np.testing.assert_allclose(attention.sum(-1), 1, rtol=1e-6)
    past = np.tri(LENGTH, dtype=bool)
    assert (
        (attention >= 0).all()
        and (attention[..., ~past] == 0).all()
        and (attention[..., past] > 0).all()
    )


def test_gates_and_positions_are_those_of_eq_4():
    maps = result(f"{COPE}+rope", LAYERS)[2]
    gates, past = maps["gates"], np.tri(LENGTH, dtype=bool)
    assert (gates[..., past] > 0).all() and (gates <= 1).all() and (gates[..., ~past] == 0).all()
    counts = np.flip(np.cumsum(np.flip(gates, -1), axis=-1), -1)
    np.testing.assert_allclose(
        maps["positions"], np.minimum(counts, NPOS_MAX - 1), rtol=1e-5, atol=1e-6
    )
    assert (counts > NPOS_MAX - 1).any() and (maps["positions"] <= NPOS_MAX - 1).all()


def test_layers_and_heads_differ():
    for value in result(f"{COPE}+rope", LAYERS)[2].values():
        for axis in (0, 2):
            first, second = np.take(value, [0, 1], axis=axis).swapaxes(0, axis)
            assert np.abs(first - second).max() > 0.01


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_attention_is_what_the_layer_used(norm_position):
    """In a model of one layer, mixing the values by the map gives the model's logits."""
    params, logits, maps = result(COPE, 1, norm_position)
    block = {
        path.removeprefix("blocks/"): value[0]
        for path, value in params.items()
        if path.startswith("blocks/")
    }
    pre = norm_position == "pre"

    def norm(rows, name, values=block):
        return normalise(rows, values, name, "layer")

    for row, attention_HLM, expected in zip(tokens(), maps["attention"][0], logits, strict=True):
        x = [params["embedding/embedding"][token] for token in row]
        normed = norm(x, "attention_norm") if pre else x
        v_MGK = np.stack([linear(at, block, "attention/value").reshape(2, 4) for at in normed])
        for i in range(LENGTH):
            mixed = [
                sum(attention_HLM[h, i, j] * v_MGK[j, h // 2] for j in range(LENGTH))
                for h in range(HEADS)
            ]
            x[i] = x[i] + linear(np.concatenate(mixed), block, "attention/out")
        x = x if pre else norm(x, "attention_norm")
        inner = norm(x, "mlp_norm") if pre else x
        x = [at + feed_forward(n, block, "gelu") for at, n in zip(x, inner, strict=True)]
        x = norm(x, "norm", params) if pre else norm(x, "mlp_norm")
        np.testing.assert_allclose(
            expected, np.stack(x) @ params["out/kernel"], rtol=ROUNDING, atol=ROUNDING
        )


def test_positions_reach_the_maps():
    graphdef, state = build(config("rope", num_layers=1))

    @jax.jit
    def run(state, indices):
        return nnx.merge(graphdef, state).maps(tokens(), positions_BL=indices)["attention"]

    near = np.arange(LENGTH, dtype=np.int32)[None]
    assert np.abs(np.asarray(run(state, near) - run(state, near**2))).max() > 1e-3
