"""The suite that every registered encoding passes."""

import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import attention
from cope_jax.errors import ConfigError
from tests.encodings.cases import (
    BATCH,
    CASES,
    CONSECUTIVE,
    FEW,
    LENGTH,
    ONE_SEGMENT,
    SIZES,
    build,
    compiled,
    every,
    expected,
    forward,
    jit,
    parameters,
    parts,
    problem,
    run,
)
from tests.encodings.jaxprs import intermediates
from tests.oracle.differences import gradients as finite_differences

every_case, a_few = every(), every(few=FEW)
GAPPED = np.array([[0, 1, 4, 5, 9, 11], [2, 3, 5, 6, 7, 10]], np.int32)
POSITIONS = {
    "consecutive": CONSECUTIVE,
    "offset": CONSECUTIVE + np.array([[5], [6]], np.int32),
    "gapped": GAPPED,
    "beyond training": np.array([[0, 11, 12, 40, 500, 5000], [12, 13, 14, 15, 16, 17]], np.int32),
}


@pytest.mark.newest
@every_case
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_values_equal_the_oracle(spec, positions, x64):
    _, state = build(spec)
    arrays = problem()
    result = run(spec, state, arrays, positions)
    assert result.out.dtype == np.float64
    for example in range(BATCH):
        embedded, out = expected(spec, parameters(state), arrays, positions, example=example)
        np.testing.assert_allclose(result.embedded[example], embedded, rtol=0, atol=1e-12, equal_nan=True)
        np.testing.assert_allclose(result.out[example], out, rtol=0, atol=1e-12, equal_nan=True)


@every_case
def test_gradients_equal_finite_differences_of_the_oracle(spec, x64):
    # The seeds leave every contextual position and ReLU further from its kink than the step of the differences.
    _, state = build(spec)
    arrays = problem()
    arrays["dout"][1], arrays["dembedded"][1] = 0, 0  # one example is enough
    inputs = {name: arrays[name][:1] for name in ("x", "q", "k", "v")}

    def loss(values):
        named = {name: value for name, value in values.items() if name not in inputs}
        embedded, out = expected(spec, named, values, GAPPED)
        return float((embedded * arrays["dembedded"][0]).sum() + (out * arrays["dout"][0]).sum())

    numeric = finite_differences(loss, inputs | parameters(state))
    exact = run(spec, state, arrays, GAPPED).gradients
    assert exact.keys() == numeric.keys()
    for name, gradient in numeric.items():
        found = exact[name][:1] if name in inputs else exact[name]
        np.testing.assert_allclose(found, gradient, rtol=1e-7, atol=2e-9, err_msg=name)
    for name in set(parameters(state)) - {"out_bias"}:  # softmax does not see FIRE's last bias
        assert np.abs(exact[name]).max() > 1e-4, f"the test says nothing about {name}"


@every_case
def test_causal_by_gradient(spec, x64):
    _, state = build(spec)
    for query in range(LENGTH):
        arrays = problem()
        arrays["dembedded"][:] = 0
        arrays["dout"][:, np.arange(LENGTH) != query] = 0
        gradients = run(spec, state, arrays).gradients
        for name in ("x", "q", "k", "v"):
            assert np.all(gradients[name][:, query + 1 :] == 0), f"query {query} looks ahead through {name}"
        assert np.all(gradients["q"][:, :query] == 0)
        assert np.all(np.abs(gradients["v"][:, : query + 1]).max(axis=(2, 3)) > 0)


@a_few
def test_block_law(spec, x64):
    """Any split of the keys, from the nearest block to the farthest, gives what one block gives; gradients too."""
    graphdef, state = build(spec)
    if not nnx.merge(graphdef, state).splits_keys:
        assert "cope_two_sided" in dict(parts(spec)), "no other encoding may break the law"
        return
    arrays = problem()
    segments = np.array([[0] * 6, [0, 0, 1, 1, 1, 1]], np.int32)
    whole = run(spec, state, arrays, GAPPED, segments)
    rng = np.random.default_rng(CASES.index(spec))
    cut = sorted(rng.choice(np.arange(1, LENGTH), size=2, replace=False).tolist())
    splits = [(1,) * LENGTH, tuple(np.diff([0, *cut, LENGTH]).tolist())]

    @jit
    def by_blocks(state, arrays):
        inputs = {name: arrays[name] for name in ("x", "q", "k", "v")}
        results = []
        for split in splits:
            out, pull = jax.vjp(
                lambda s, a, split=split: attend_by_blocks(graphdef, s, a, segments, split), state, inputs
            )
            results.append((out, pull((arrays["dembedded"], arrays["dout"]))))
        return results

    for ((_, out), (dstate, dinputs)), split in zip(by_blocks(state, arrays), splits, strict=True):
        np.testing.assert_allclose(out, whole.out, rtol=0, atol=1e-13, err_msg=str(split))
        for name, gradient in (dinputs | parameters(dstate)).items():
            np.testing.assert_allclose(gradient, whole.gradients[name], rtol=0, atol=1e-12, err_msg=f"{name} {split}")


def attend_by_blocks(graphdef, state, arrays, segments, split):
    """Attention that hands the carry from block to block, and does nothing else cleverly."""
    encoding = nnx.merge(graphdef, state)
    embedded = encoding.embed(arrays["x"], GAPPED)
    mask = np.tril(segments[:, :, None] == segments[:, None, :])[:, None]
    whole = pairs_of(encoding, arrays | {"x": embedded}, mask)
    carry, scores, end = encoding.initial_carry(whole.q, whole.q_features), [], LENGTH
    for size in reversed(split):
        score, carry = encoding.score(some_keys(whole, slice(end - size, end)), carry)
        end -= size
        scores.insert(0, score)
    logits = jnp.where(mask, jnp.concatenate(scores, axis=-1), jnp.full((), -1e30))
    repeats = SIZES.heads // SIZES.kv_heads
    return embedded, jnp.einsum("BHLM,BMHK->BLHK", jax.nn.softmax(logits), jnp.repeat(arrays["v"], repeats, axis=2))


def pairs_of(encoding, arrays, mask):
    """All pairs as attention makes them, with another mask."""
    q, k, v = (arrays[name] for name in "qkv")
    features = encoding.features(arrays["x"], q, k, v, None)[0]
    inputs = attention.prepare(
        q, k, v, encoding=encoding, features=features, embedded=True, q_positions=GAPPED, k_positions=GAPPED
    )
    return dataclasses.replace(inputs.pairs(), mask=jnp.asarray(mask))


def some_keys(pairs, block):
    return dataclasses.replace(
        pairs,
        k=pairs.k[:, :, block],
        v=pairs.v[:, :, block],
        k_features=jax.tree.map(lambda feature: feature[:, :, block], pairs.k_features),
        logits=pairs.logits[..., block],
        mask=pairs.mask[..., block],
        k_positions=pairs.k_positions[:, block],
    )


def some_queries(pairs, block):
    return dataclasses.replace(
        pairs,
        q=pairs.q[:, :, block],
        q_features=jax.tree.map(lambda feature: feature[:, :, block], pairs.q_features),
        logits=pairs.logits[:, :, block],
        mask=pairs.mask[:, :, block],
        q_positions=pairs.q_positions[:, block],
    )


class Block(NamedTuple):
    """One block of keys in the middle of a row, and the carry before it."""

    encoding: Any
    pairs: Any
    carry: Any


def block_of(spec):
    """A block before which nothing, a little, just all or more than all of the table has been counted."""
    encoding = nnx.merge(*build(spec))
    arrays = {name: jnp.asarray(value) for name, value in problem().items()}
    arrays["x"] = encoding.embed(arrays["x"], GAPPED)
    rng = np.random.default_rng(0)
    pairs = pairs_of(encoding, arrays, np.tril(rng.random((BATCH, 1, LENGTH, LENGTH)) < 0.8))
    carry = encoding.initial_carry(pairs.q, pairs.q_features)
    counted = jax.tree.map(lambda x: x + rng.choice([0.0, 0.7, 1.6, 2.0, 3.0, 63.0, 99.0], x.shape), carry.sums)
    return Block(encoding, pairs, carry._replace(sums=counted))


@a_few
def test_law_of_rows(spec, x64):
    """Any split of the queries gives the logits and the carry that all together give."""
    encoding, pairs, carry = block_of(spec)
    assert encoding.splits_queries
    logits, after = encoding.score(pairs, carry)
    for block in (slice(0, 1), slice(1, 4), slice(4, LENGTH)):
        own = some_queries(pairs, block)
        some = encoding.score(own, jax.tree.map(lambda leaf, block=block: leaf[:, :, block], carry))
        expected = jax.tree.map(lambda leaf, block=block: leaf[:, :, block], (logits, after))
        first = encoding.initial_carry(own.q, own.q_features)
        chex.assert_trees_all_close(some, expected, rtol=0, atol=1e-13)
        chex.assert_trees_all_close(
            first,
            jax.tree.map(
                lambda leaf, block=block: leaf[:, :, block], encoding.initial_carry(pairs.q, pairs.q_features)
            ),
            rtol=0,
            atol=1e-13,
        )


@every_case
def test_the_carry_is_sums_and_constants(spec, x64):
    """What `score` adds to a sum does not depend on it, rows of sums are read by their own logits; the rest passes."""
    encoding, pairs, carry = block_of(spec)
    after = encoding.score(pairs, carry)[1]
    nothing = encoding.initial_carry(pairs.q, pairs.q_features)
    first = encoding.score(pairs, nothing)[1]
    assert jax.tree.leaves(carry.constants) == jax.tree.leaves(after.constants), "constants are handed on as they are"
    chex.assert_tree_shape_prefix(carry.sums, (BATCH, SIZES.heads, LENGTH))
    for now, later, start, end in zip(*(jax.tree.leaves(c.sums) for c in (carry, after, nothing, first)), strict=True):
        chex.assert_rank(now, 3)
        np.testing.assert_allclose(later - now, end - start, rtol=0, atol=1e-13)


@every_case
def test_forward_mode_equals_reverse_mode(spec, x64):
    """The derivative of the logits in a random direction, by both modes: streaming attention asks for the first."""
    block = block_of(spec)
    graphdef, params = nnx.split(block.encoding)

    def logits(params, arrays, carry):
        pairs = dataclasses.replace(block.pairs, **arrays)
        scored = nnx.merge(graphdef, params).score(pairs, carry)[0]
        return jnp.where(block.pairs.mask, scored, 0.0)

    primals = params, {"q": block.pairs.q, "logits": block.pairs.logits}, block.carry
    rng = np.random.default_rng(1)

    def random(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)

    tangents = jax.tree.map(random, primals)
    value, tangent = jax.jvp(logits, primals, tangents)
    cotangent = random(value)
    pulled = jax.vjp(logits, *primals)[1](cotangent)
    products = [float(jnp.sum(a * b)) for a, b in zip(*map(jax.tree.leaves, (pulled, tangents)), strict=True)]
    np.testing.assert_allclose(float(jnp.sum(tangent * cotangent)), sum(products), rtol=1e-10, atol=1e-10)


@every_case
def test_the_tail_is_the_score_of_saturated_rows(spec, x64):
    """In value and every gradient, for the rows that are saturated."""
    block = block_of(spec)
    saturated = block.encoding.saturated(block.carry)
    if saturated is None and jax.tree.leaves(block.carry):
        return  # it never saturates
    if saturated is None:  # a part of a composition that saturates
        rows = np.ones((BATCH, SIZES.heads, LENGTH), bool)
    else:
        rows = np.asarray(saturated)
        assert rows.shape == (BATCH, SIZES.heads, LENGTH) and rows.any() and not rows.all()
        first = block.encoding.initial_carry(block.pairs.q, block.pairs.q_features)
        assert not block.encoding.saturated(first).any()
    pairs = jnp.asarray(rows)[..., None] & block.pairs.mask
    graphdef, params = nnx.split(block.encoding)

    def run(hook):
        def logits(params, arrays, carry):
            encoding, own = nnx.merge(graphdef, params), dataclasses.replace(block.pairs, **arrays)
            result = encoding.tail(own, carry) if hook == "tail" else encoding.score(own, carry)[0]
            return jnp.where(pairs, result, 0.0)

        arrays = {name: getattr(block.pairs, name) for name in ("q", "k", "v", "logits", "k_features")}
        value, pull = jax.vjp(logits, params, arrays, block.carry)
        return value, pull(jnp.asarray(np.random.default_rng(1).normal(size=value.shape)))

    chex.assert_trees_all_close(run("tail"), run("score"), rtol=0, atol=1e-12)


@every_case
def test_maps_are_what_score_uses(spec, x64):
    """Each map is among the values from which `score` computes."""
    encoding, pairs, _ = block_of(spec)
    seen = intermediates(encoding.score, pairs, encoding.initial_carry(pairs.q, pairs.q_features))
    maps = encoding.maps(pairs)
    for name, values in jax.device_get(maps).items():
        chex.assert_shape(values, (BATCH, SIZES.heads, LENGTH, LENGTH))
        near = [one for one in seen if one.shape == values.shape and np.allclose(one, values, rtol=0, atol=1e-13)]
        assert near, f"score does not use {name}"
    assert bool(maps) == any(name.startswith("cope") for name, _ in parts(spec))


@a_few
def test_attention_of_one_head(spec, x64):
    """By `of_head`, one head and its key head alone give what they give among the others."""
    encoding = nnx.merge(*build(spec))
    arrays = problem()
    x, q, k, v = (jnp.asarray(arrays[name]) for name in "xqkv")
    whole = attention.attend(q, k, v, encoding=encoding, features=encoding.features(x, q, k, v, None)[0], embedded=True)
    for head in range(SIZES.heads):
        one, group = encoding.of_head(head), head * SIZES.kv_heads // SIZES.heads
        own = q[:, :, head : head + 1], k[:, :, group : group + 1], v[:, :, group : group + 1]
        features = one.features(x, *own, None)[0]
        found = attention.attend(*own, encoding=one, features=features, embedded=True)
        np.testing.assert_allclose(found[:, :, 0], whole[:, :, head], rtol=0, atol=1e-13)


@every_case
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
def test_packed_documents_do_not_leak(spec, x64):
    """Two documents in one row give, in value and gradient, what each gives alone: positions and counts restart."""
    _, state = build(spec)
    arrays = problem()
    half = LENGTH // 2
    restart = np.broadcast_to(np.arange(LENGTH, dtype=np.int32) % half, (BATCH, LENGTH))
    segments = np.broadcast_to(np.arange(LENGTH, dtype=np.int32) // half, (BATCH, LENGTH))
    packed = run(spec, state, arrays, restart, segments)
    apart = {name: value.reshape(BATCH * 2, half, *value.shape[2:]) for name, value in arrays.items()}
    alone = run(spec, state, apart, restart.reshape(-1, half), np.zeros((BATCH * 2, half), np.int32))
    np.testing.assert_allclose(packed.out.reshape(alone.out.shape), alone.out, rtol=0, atol=1e-13)
    np.testing.assert_allclose(packed.embedded.reshape(alone.embedded.shape), alone.embedded, rtol=0, atol=1e-13)
    for name, gradient in alone.gradients.items():
        np.testing.assert_allclose(packed.gradients[name].reshape(gradient.shape), gradient, rtol=0, atol=1e-12)

    arrays["dout"][:, :half], arrays["dembedded"][:, :half] = 0, 0
    second = run(spec, state, arrays, restart, segments).gradients
    assert all(np.all(second[name][:, :half] == 0) for name in ("x", "q", "k", "v")), "a leak"


@a_few
def test_bfloat16_is_near_float32(spec):
    """The same numbers in bfloat16 give the float32 result to bfloat16's 8 bits; positions stay float32."""
    _, state = build(spec, dtype=np.float32)
    short = {name: jnp.asarray(value, jnp.bfloat16) for name, value in problem(dtype=np.float32).items()}
    positions = GAPPED if spec.startswith("learned") else GAPPED + 1001  # whole numbers that bfloat16 does not have
    exact = run(spec, state, {name: np.asarray(value, np.float32) for name, value in short.items()}, positions)
    rough = run(spec, state, short, positions)
    assert rough.out.dtype == rough.embedded.dtype == jnp.bfloat16
    assert exact.out.dtype == exact.embedded.dtype == np.float32
    assert all(rough.gradients[name].dtype == jnp.bfloat16 for name in ("x", "q", "k", "v"))
    for name in ("embedded", "out"):
        value, reference = (np.asarray(getattr(result, name), np.float32) for result in (rough, exact))
        # Rounded q, k or features shift a logit by up to 2^-8 of |q||k|, and the output is rounded once more.
        assert np.abs(value - reference).max() < 0.05 * np.abs(reference).max()
        assert np.sqrt(np.mean((value - reference) ** 2)) < 0.01 * np.sqrt(np.mean(reference**2))


@every_case
def test_float32_values_equal_the_oracle(spec):
    _, state = build(spec, dtype=np.float32)
    arrays = problem(dtype=np.float32)
    result = run(spec, state, arrays)
    embedded, out = expected(spec, parameters(state), {n: value.astype(np.float64) for n, value in arrays.items()})
    np.testing.assert_allclose(result.embedded[0], embedded, rtol=0, atol=5e-6)
    np.testing.assert_allclose(result.out[0], out, rtol=0, atol=5e-6)


@every_case
def test_vmap_over_seeds(spec, x64):
    """Parameters and inputs of several seeds at once give what each gives alone."""
    graphdef, _ = build(spec)
    states, problems = zip(*((build(spec, seed)[1], problem(seed)) for seed in (1, 2)), strict=True)

    def stack(*leaves):
        return np.stack(leaves)

    together = jit(jax.vmap(lambda state, arrays: forward(graphdef, state, arrays, GAPPED, ONE_SEGMENT)))(
        jax.tree.map(stack, *states), jax.tree.map(stack, *problems)
    )
    for seed, (state, arrays) in enumerate(zip(states, problems, strict=True)):
        alone = run(spec, state, arrays, GAPPED)
        np.testing.assert_allclose(together[0][seed], alone.embedded, rtol=0, atol=1e-13)
        np.testing.assert_allclose(together[1][seed], alone.out, rtol=0, atol=1e-13)


@every_case
@pytest.mark.parametrize("far", [-1, 14])
def test_out_of_range_is_loud_or_defined(spec, far, x64):
    """A position that a table has no row for is an error, or NaN inside jit; all other encodings stay finite."""
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
