"""The suite that every registered encoding passes."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.errors import ConfigError
from tests.encodings.cases import (
    BATCH,
    CONSECUTIVE,
    FEW,
    FEWEST,
    GAPPED,
    LENGTH,
    ONE_SEGMENT,
    SIZES,
    build,
    compiled,
    every,
    expected,
    forward,
    laws,
    numpy_result,
    parameters,
    parts,
    problem,
    run,
)
from tests.oracle.differences import slopes

every_case, a_few, fewest = every(), every(few=FEW), every(few=FEWEST)
BEYOND = np.array([[11, 12, 13, 24, 25, 36], [10, 11, 12, 14, 23, 40]], np.int32)
POSITIONS = {
    "gapped": GAPPED,
    "beyond training": np.array([[0, 11, 12, 40, 500, 5000], [12, 13, 14, 15, 16, 17]], np.int32),
}


@every_case
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_values_equal_the_oracle(spec, positions, x64):
    _, state = build(spec)
    arrays = problem()
    result = run(spec, state, arrays, positions)
    assert result.out.dtype == np.float64
    for example in range(BATCH):
        embedded, out = expected(spec, parameters(state), arrays, positions, example=example)
        np.testing.assert_allclose(
            result.embedded[example], embedded, rtol=0, atol=1e-12, equal_nan=True
        )
        np.testing.assert_allclose(result.out[example], out, rtol=0, atol=1e-12, equal_nan=True)


@every_case
def test_gradients_equal_finite_differences_of_the_oracle(spec, x64):
    # The seeds leave every contextual position and ReLU further from its kink than the step of the
    # differences.
    _, state = build(spec)
    arrays = problem()
    arrays["dout"][1], arrays["dembedded"][1] = 0, 0  # one example is enough
    inputs = {name: arrays[name][:1] for name in ("x", "q", "k", "v")}

    def loss(values):
        named = {name: value for name, value in values.items() if name not in inputs}
        embedded, out = expected(spec, named, values, GAPPED)
        return float((embedded * arrays["dembedded"][0]).sum() + (out * arrays["dout"][0]).sum())

    exact = run(spec, state, arrays, GAPPED).gradients
    at = inputs | parameters(state)
    assert exact.keys() == at.keys()
    exact |= {name: exact[name][:1] for name in inputs}
    for name, slope, numeric in slopes(loss, at, exact):
        np.testing.assert_allclose(slope, numeric, rtol=1e-7, atol=2e-9, err_msg=name)
    for name in set(parameters(state)) - {"out_bias"}:  # softmax does not see FIRE's last bias
        assert np.abs(exact[name]).max() > 1e-4, f"the test says nothing about {name}"


@every_case
def test_gates_that_are_open_or_closed(spec, x64):
    """With logits and gates of about ±50, values and gradients are finite, and weights sum to at
    most 1.
    """
    _, state = build(spec)
    arrays = problem()
    large = {name: value * (12.0 if name in "xqk" else 1.0) for name, value in arrays.items()}
    result = run(spec, state, large, GAPPED)
    assert np.isfinite(result.out).all() and np.isfinite(result.embedded).all()
    assert all(np.isfinite(gradient).all() for gradient in result.gradients.values())
    assert np.abs(result.out).max() <= np.abs(arrays["v"]).max() * (1 + 1e-12)


@every_case
def test_segments_of_one_token(spec, x64):
    """A token that sees only itself has its own value, or nothing where it does not see itself."""
    _, state = build(spec)
    arrays = problem()
    out = run(spec, state, arrays, CONSECUTIVE, CONSECUTIVE).out
    values = np.repeat(arrays["v"], SIZES.heads // SIZES.kv_heads, axis=2)
    names = dict(parts(spec))
    if "learned_sink" in names:
        shares = out / values
        np.testing.assert_allclose(
            shares, np.broadcast_to(shares[..., :1], out.shape), rtol=0, atol=1e-12
        )
        assert np.all((shares > 0) & (shares < 1))
        return
    if "tra" in names:
        matches = np.any(out != 0, axis=-1, keepdims=True)
        assert 0 < matches.sum() < matches.size
        values = values * matches
    alone = "stick_breaking" in names and "own" not in spec
    np.testing.assert_allclose(out, np.zeros_like(values) if alone else values, rtol=0, atol=1e-12)


@a_few
def test_no_gradient_is_of_a_later_token_or_another_document(spec, x64):
    """Each is exactly 0."""
    laws(spec, ["gradient leaks"], tolerance=0).raise_if_broken()


@pytest.mark.newest
@fewest
def test_jit_equals_eager_and_compiles_once(spec, x64):
    graphdef, state = build(spec, seed=1)
    arrays = problem(seed=1)
    embedded, out = forward(graphdef, state, arrays, GAPPED, ONE_SEGMENT)
    result = run(spec, state, arrays, GAPPED)
    np.testing.assert_allclose(result.embedded, embedded, rtol=0, atol=1e-13)
    np.testing.assert_allclose(result.out, out, rtol=0, atol=1e-13)

    traces = compiled(spec)[1]
    before = len(traces)
    _, other = build(spec, seed=2)
    run(spec, other, problem(seed=2), CONSECUTIVE, np.ones_like(ONE_SEGMENT))
    assert len(traces) == before, "other values, positions or segments compile again"


@a_few
def test_causal_and_packed_documents_are_as_if_alone(spec, x64):
    """In value and gradient: positions and counts restart."""
    names = ["causality", "packed documents", "gradients of documents"]
    laws(spec, names, tolerance=1e-13).raise_if_broken()


@pytest.mark.parametrize("spec", ["path(forget=True)", "wall(bias=1.0,stddev=0.5)"])
def test_blocks_of_their_own_make_no_difference(spec, monkeypatch, x64):
    """The encoding's size of blocks does not matter; here the last block is shorter."""
    _, state = build(spec)
    arrays = problem()
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH))
    segments = np.broadcast_to(np.arange(LENGTH, dtype=np.int32) // 5, (BATCH, LENGTH))
    name = spec.partition("(")[0]
    module = importlib.import_module(f"cope_jax.encodings.{name}")
    whole = run(spec, state, arrays, positions, segments)
    monkeypatch.setattr(module, "BLOCK", 4)
    cut = numpy_result(compiled.__wrapped__(spec)[0](state, arrays, positions, segments))
    np.testing.assert_allclose(cut.out, whole.out, rtol=0, atol=1e-13)
    for key, gradient in whole.gradients.items():
        np.testing.assert_allclose(cut.gradients[key], gradient, rtol=0, atol=1e-12, err_msg=key)


@fewest
def test_bfloat16_is_near_float32(spec):
    """The same numbers in bfloat16 give the float32 result to bfloat16's 8 bits; positions stay
    float32.
    """
    _, state = build(spec, dtype=np.float32)
    short = {
        name: jnp.asarray(value, jnp.bfloat16) for name, value in problem(dtype=np.float32).items()
    }
    # Whole numbers that bfloat16 does not have.
    positions = GAPPED if spec.startswith("learned") else GAPPED + 1001
    exact = run(
        spec,
        state,
        {name: np.asarray(value, np.float32) for name, value in short.items()},
        positions,
    )
    rough = run(spec, state, short, positions)
    assert rough.out.dtype == rough.embedded.dtype == jnp.bfloat16
    assert exact.out.dtype == exact.embedded.dtype == np.float32
    assert all(rough.gradients[name].dtype == jnp.bfloat16 for name in ("x", "q", "k", "v"))
    for name in ("embedded", "out"):
        value, reference = (
            np.asarray(getattr(result, name), np.float32) for result in (rough, exact)
        )
        # Rounded q, k or features shift a logit by up to 2^-8 of |q||k|, and the output is rounded
        # once more.
        assert np.abs(value - reference).max() < 0.05 * np.abs(reference).max()
        assert np.sqrt(np.mean((value - reference) ** 2)) < 0.01 * np.sqrt(np.mean(reference**2))


@a_few
def test_float32_is_near_float64_at_extremes(spec):
    """Beyond the length of training, with gates or logits of about ±50: float32 only rounds, also
    the gradients.
    """
    _, state = build(spec, dtype=np.float32)
    positions = GAPPED if "learned" in dict(parts(spec)) else BEYOND
    # A logit of 50 is rounded by 2e-6, and an angle of 40 by 2e-6; a gradient at these logits
    # multiplies this by ten. RePo's angles grow with x²: at 12 x they are 1,900, rounded by 1e-4.
    input_factor = 12.0**0.5 if "repo" in dict(parts(spec)) else 12.0
    for large, factor, tolerance in (("x", input_factor, 1e-4), ("qk", 5.0, 3e-4)):
        arrays = {
            name: array * (factor if name in large else 1.0)
            for name, array in problem(dtype=np.float32).items()
        }
        rough = run(spec, state, arrays, positions)
        assert rough.out.dtype == np.float32
        with jax.enable_x64(True):
            exact = run(
                spec, *jax.tree.map(lambda x: np.asarray(x, np.float64), (state, arrays)), positions
            )
        assert rough.gradients.keys() == exact.gradients.keys()
        for name, wide in {"embedded": exact.embedded, "out": exact.out, **exact.gradients}.items():
            single = rough.gradients[name] if name in rough.gradients else getattr(rough, name)
            scale = max(0.1, np.abs(wide).max())
            np.testing.assert_allclose(
                single, wide, rtol=0, atol=tolerance * scale, err_msg=f"{name}, large {large}"
            )


@fewest
def test_vmap_over_seeds(spec, x64):
    """Parameters and inputs of several seeds at once give what each gives alone."""
    graphdef, _ = build(spec)
    states, problems = zip(*((build(spec, seed)[1], problem(seed)) for seed in (1, 2)), strict=True)

    def stack(*leaves):
        return np.stack(leaves)

    together = jax.jit(
        jax.vmap(lambda state, arrays: forward(graphdef, state, arrays, GAPPED, ONE_SEGMENT))
    )(jax.tree.map(stack, *states), jax.tree.map(stack, *problems))
    for seed, (state, arrays) in enumerate(zip(states, problems, strict=True)):
        alone = run(spec, state, arrays, GAPPED)
        np.testing.assert_allclose(together[0][seed], alone.embedded, rtol=0, atol=1e-13)
        np.testing.assert_allclose(together[1][seed], alone.out, rtol=0, atol=1e-13)


@every_case
@pytest.mark.parametrize("far", [-1, 14])
def test_out_of_range_is_loud_or_defined(spec, far, x64):
    """A position that a table has no row for is an error, or NaN inside jit; all other encodings
    stay finite.
    """
    graphdef, state = build(spec)
    positions = CONSECUTIVE.copy()
    positions[:, -1] = far
    arrays = problem()
    result = run(spec, state, arrays, positions)
    named = dict(parts(spec))
    if "learned" in named:
        assert np.isnan(result.embedded[:, -1]).all() and np.isfinite(result.embedded[:, :-1]).all()
        with pytest.raises(ConfigError, match=rf"position {far} .*learned table of \d+ rows"):
            forward(graphdef, state, arrays, positions, ONE_SEGMENT)
    elif (
        not named.get("relative", {"signed": True}).get("signed") and far < 0
    ):  # a visible key with a later position than the query's has no row
        assert np.isnan(result.out[:, -1]).all() and np.isfinite(result.out[:, :-1]).all()
    else:
        assert np.isfinite(result.embedded).all() and np.isfinite(result.out).all()
        assert all(np.isfinite(gradient).all() for gradient in result.gradients.values())
