"""Positions that are real numbers: every implementation says what the oracle says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import encodings
from cope_jax.attention import attend, attend_cached, create_cache
from cope_jax.errors import ConfigError
from tests.attention.problems import (
    arrays_of,
    assert_equal,
    in_blocks,
    interpreted,
    plain,
    with_full,
)
from tests.encodings.cases import GAPPED, build, every, expected, parameters, problem, run

# All whose hooks read positions.
COMPUTED = [
    *("sinusoidal", "rope", "alibi", "fire", "darope", "cope_two_sided(npos_max=4)"),
    *("rope(bands=0.5,decay=32.0)", "pope", "kerple", "scale_invariant", "grape_additive"),
    *("dape(hidden=4)", "repo(position=given)", "cope(npos_max=4)+rope"),
]
TABLES = ["learned", "relative", "relative(max_distance=3,signed=True)", "t5"]
REAL = GAPPED + np.random.default_rng(5).uniform(0, 0.9, GAPPED.shape)


@every(COMPUTED, few=COMPUTED[:6])
def test_fractions_equal_the_oracle_and_whole_numbers_equal_integers(spec, x64):
    _, state = build(spec)
    arrays = problem()
    fractional = run(spec, state, arrays, REAL)
    for example in range(len(REAL)):
        x, out = expected(spec, parameters(state), arrays, REAL, example=example)
        np.testing.assert_allclose(fractional.embedded[example], x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(fractional.out[example], out, rtol=0, atol=1e-12)
    real, whole = (run(spec, state, arrays, GAPPED.astype(t)) for t in (np.float64, np.int32))
    np.testing.assert_array_equal(real.embedded, whole.embedded)
    np.testing.assert_allclose(real.out, whole.out, rtol=0, atol=1e-14)
    for name, gradient in whole.gradients.items():
        np.testing.assert_allclose(real.gradients[name], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", TABLES)
def test_tables_need_whole_numbers(spec):
    encoding = encodings.create(spec, num_heads=2, head_dim=4, max_length=8, rngs=nnx.Rngs(0))
    q, positions = jnp.ones((1, 3, 2, 4)), jnp.array([[0.0, 1.5, 2.5]])

    def attention(implementation):
        x = encoding.embed(jnp.ones((1, 3, 8)), positions)
        both = {"q_positions": positions, "k_positions": positions}
        return attend(
            q, q, q, encoding=encoding, x=x, embedded=True, implementation=implementation, **both
        )

    for implementation in ("auto", "full", "blockwise"):
        name = spec.partition("(")[0]
        with pytest.raises(ConfigError, match=f"{name} has a table .* positions are float32"):
            attention(implementation)


def real_problem(length):
    data = plain(length, length)._replace(q_indices=None, k_indices=None)
    positions = np.sort(np.random.default_rng(6).uniform(0, 3 * length, (2, length)), axis=1)
    data = data._replace(q_positions=positions, k_positions=positions)
    return arrays_of(length, length), data


@pytest.mark.parametrize("spec", ["alibi", pytest.param("rope+fire", marks=pytest.mark.slow)])
def test_blocks_and_kernels_for_tpus(spec, x64):
    """Kernels for CPUs and GPUs, and rings, have this test among their others."""
    graphdef, state = build(spec)
    arrays, data = real_problem(13)
    for attention in (in_blocks((4, 4, 4)), interpreted((8, 8, 8))):
        both = jax.jit(functools.partial(with_full, attention, graphdef))
        exact, computed = both(state, arrays, data)
        assert_equal(computed, exact)


@pytest.mark.parametrize(
    "spec",
    ["alibi", "darope", *(pytest.param(s, marks=pytest.mark.slow) for s in ("fire", "pope"))],
)
def test_a_cache_keeps_real_positions(spec, x64):
    graphdef, state = build(spec)
    arrays, encoding = problem(), nnx.merge(graphdef, state)
    cache, outs = create_cache(encoding, batch=2, capacity=8, dtype=jnp.float64), []
    for now in (slice(0, 1), slice(1, 4), slice(4, 5), slice(5, 6)):
        q, k, v, x = (arrays[name][:, now] for name in "qkvx")
        cache = cache.enter(REAL[:, now]).append(q, k, v, encoding=encoding, x_BLD=x)
        outs.append(attend_cached(q, cache, encoding=encoding, embedded=True))
    whole = run(spec, state, arrays, REAL).out
    np.testing.assert_allclose(np.concatenate(outs, axis=1), whole, rtol=0, atol=1e-13)


def test_positions_have_no_gradient_and_no_tangent(x64):
    graphdef, state = build("alibi")
    arrays, data = real_problem(9)
    q, k, v = (jnp.asarray(arrays[name]) for name in "qkv")

    def out(implementation, q, positions):
        both = {"q_positions": positions, "k_positions": positions}
        encoding = nnx.merge(graphdef, state)
        return attend(
            q, k, v, encoding=encoding, implementation=implementation, blocks=(4, 4, 4), **both
        )

    real = jnp.asarray(data.k_positions)
    of_full, of_blocks = (
        jax.jvp(functools.partial(out, name), (q, real), (q + 1, real))
        for name in ("full", "blockwise")
    )
    np.testing.assert_allclose(of_blocks[1], of_full[1], rtol=0, atol=1e-12)
    for name in ("full", "blockwise"):
        gradient = jax.grad(lambda p, name=name: out(name, q, p).sum())(real)
        np.testing.assert_array_equal(gradient, np.zeros_like(real))


def test_integers_beside_real_numbers():
    encoding = encodings.create("alibi", num_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    q = jax.random.normal(jax.random.key(0), (1, 3, 2, 4))
    whole = jnp.array([[0, 2, 3]], jnp.int32)
    mixed = attend(q, q, q, encoding=encoding, q_positions=whole, k_positions=jnp.float32(whole))
    exact = attend(q, q, q, encoding=encoding, q_positions=whole, k_positions=whole)
    np.testing.assert_array_equal(mixed, exact)
    with pytest.raises(ConfigError, match=r"q_positions must have shape \[1, 3\], got \[1, 2\]"):
        attend(q, q, q, encoding=encoding, q_positions=np.ones((1, 2)))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (np.array([[0.0, np.nan]]), "positions must be finite numbers, got NaN or infinity"),
        (np.array([[True, False]]), "positions must be integers or real numbers, got bool"),
        (
            np.array([[2**24 + 1, 0]]),
            "positions must be at most 16,777,216 next to real numbers, which float32 holds exactly, "
            "got 16,777,217",
        ),
    ],
)
def test_mistakes_are_one_clear_line(positions, message):
    encoding = encodings.create("alibi", num_heads=1, head_dim=2, rngs=nnx.Rngs(0))
    q, real = jnp.ones((1, 2, 1, 2)), np.array([[0.0, 1.5]])
    with pytest.raises(ConfigError) as error:
        attend(q, q, q, encoding=encoding, q_positions=positions, k_positions=real)
    assert str(error.value) == f"q_{message}"
    cache = create_cache(encoding, batch=1, capacity=4)
    with pytest.raises(ConfigError) as error:
        cache.enter(real).enter(positions)
    assert str(error.value) == f"{message}".replace("positions", "positions_BL", 1)
