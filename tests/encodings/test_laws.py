"""The laws of `cope_jax.encodings.base`, for every registered encoding."""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import attention, encodings
from cope_jax.attention.blocks import head_major
from cope_jax.encodings import Encoding
from cope_jax.encodings.common import token_indices
from cope_jax.errors import ConfigError
from tests.encodings.cases import (
    BATCH,
    FEW,
    FEWEST,
    GAPPED,
    LENGTH,
    SIZES,
    build,
    every,
    parameters,
    parts_of,
    problem,
    run,
    splits_heads,
    splits_keys,
    splits_queries,
)
from tests.encodings.jaxprs import intermediates

a_few, fewest = every(few=FEW), every(few=FEWEST)


def test_tokens_beyond_the_integers_of_float32_are_different_tokens():
    indices_BM1, count_B = token_indices(jnp.ones((1, 3, 1, 1)), jnp.array([2**24 - 1], jnp.int32))
    assert len(set(np.ravel(indices_BM1).tolist())) == 3
    assert count_B.tolist() == [2**24 + 2]


@fewest
def test_block_law(spec, x64):
    """Any split of the keys, from the nearest block to the farthest, gives what one block gives;
    gradients too.
    """
    graphdef, state = build(spec)
    assert nnx.merge(graphdef, state).traits.splits_keys == splits_keys(spec)
    if not splits_keys(spec):
        return
    arrays = problem()
    segments = np.array([[0] * 6, [0, 0, 1, 1, 1, 1]], np.int32)
    whole = run(spec, state, arrays, GAPPED, segments)
    rng = np.random.default_rng(list(spec.encode()))
    cut = sorted(rng.choice(np.arange(1, LENGTH), size=2, replace=False).tolist())
    splits = [(1,) * LENGTH, tuple(np.diff([0, *cut, LENGTH]).tolist())]

    @jax.jit
    def by_blocks(state, arrays):
        inputs = {name: arrays[name] for name in ("x", "q", "k", "v")}
        results = []
        for split in splits:
            out, pull = jax.vjp(
                lambda s, a, split=split: attend_by_blocks(graphdef, s, a, segments, split),
                state,
                inputs,
            )
            results.append((out, pull((arrays["dembedded"], arrays["dout"]))))
        return results

    for ((_, out), (dstate, dinputs)), split in zip(by_blocks(state, arrays), splits, strict=True):
        np.testing.assert_allclose(out, whole.out, rtol=0, atol=1e-13, err_msg=str(split))
        for name, gradient in (dinputs | parameters(dstate)).items():
            np.testing.assert_allclose(
                gradient, whole.gradients[name], rtol=0, atol=1e-12, err_msg=f"{name} {split}"
            )


def attend_by_blocks(graphdef, state, arrays, segments, split):
    """Attention that hands the carry from block to block, and does nothing else cleverly."""
    encoding = nnx.merge(graphdef, state)
    embedded = encoding.embed(arrays["x"], GAPPED)
    mask = np.tril(segments[:, :, None] == segments[:, None, :])[:, None]
    whole = pairs_of(encoding, arrays | {"x": embedded}, mask, segments)
    carry, scores, end = encoding.initial_carry(whole.q, whole.q_features), [], LENGTH
    for size in reversed(split):
        score, carry = encoding.score(some_keys(whole, slice(end - size, end)), carry)
        end -= size
        scores.insert(0, score)
    logits = jnp.where(mask, jnp.concatenate(scores, axis=-1), jnp.full((), -1e30))
    v = jnp.repeat(whole.v, SIZES.heads // SIZES.kv_heads, axis=1)
    sink, features = encoding.sink(carry), jax.tree.map(head_major, whole.q_features)
    if sink is None:
        out = jnp.einsum("BHLM,BHMK->BLHK", jax.nn.softmax(logits), v)
        return embedded, encoding.rotate_back(out, features, GAPPED)
    weights = jax.nn.softmax(jnp.concatenate([logits, sink[..., None]], axis=-1))
    out = jnp.einsum("BHLM,BHMK->BLHK", weights[..., :-1], v)
    rest = jnp.swapaxes(weights[..., -1:] * v, 1, 2)
    out = out + rest if encoding.traits.sink_value == "own" else out
    return embedded, encoding.rotate_back(out, features, GAPPED)


def pairs_of(encoding, arrays, mask, segments=None):
    """All pairs as attention makes them, with another mask."""
    q, k, v = (arrays[name] for name in "qkv")
    request = attention.prepare(
        q,
        k,
        v,
        encoding=encoding,
        x=arrays["x"],
        embedded=True,
        q_positions=GAPPED,
        k_positions=GAPPED,
        q_segment_ids=segments,
        k_segment_ids=segments,
    )
    return dataclasses.replace(request.pairs(), mask=jnp.asarray(mask))


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
    """A block before which nothing, a little, just all or more than all of the table has been
    counted.
    """
    rng = np.random.default_rng(0)
    mask = np.tril(rng.random((BATCH, 1, LENGTH, LENGTH)) < 0.8)

    @jax.jit
    def block(arrays):
        encoding = nnx.merge(*build(spec))
        arrays["x"] = encoding.embed(arrays["x"], GAPPED)
        pairs = pairs_of(encoding, arrays, mask)
        carry = encoding.initial_carry(pairs.q, pairs.q_features)
        counted = jax.tree.map(
            lambda x: x + rng.choice([0.0, 0.7, 1.6, 2.0, 3.0, 63.0, 99.0], x.shape), carry.sums
        )
        return pairs, carry._replace(sums=counted)

    return Block(nnx.merge(*build(spec)), *block(problem()))


@fewest
def test_law_of_rows(spec, x64):
    """Any split of the queries gives the logits and the carry that all together give."""
    encoding, pairs, carry = block_of(spec)
    assert encoding.traits.splits_queries == splits_queries(spec)
    if not splits_queries(spec):
        return

    def rows(tree, block):
        return jax.tree.map(lambda leaf: leaf[:, :, block], tree)

    @jax.jit
    def results(pairs, carry):
        first = encoding.initial_carry(pairs.q, pairs.q_features)
        return encoding.score(pairs, carry), first

    @jax.jit
    def by_blocks(pairs, carry):
        return [results(some_queries(pairs, block), rows(carry, block)) for block in blocks]

    blocks = slice(0, 1), slice(1, 4), slice(4, LENGTH)
    whole = jax.device_get(results(pairs, carry))
    for block, some in zip(blocks, by_blocks(pairs, carry), strict=True):
        chex.assert_trees_all_close(some, rows(whole, block), rtol=0, atol=1e-13)


@a_few
def test_the_carry_is_sums_and_constants(spec, x64):
    """`score` adds to sums regardless of them; logits read their row of sums; the rest passes."""
    encoding, pairs, carry = block_of(spec)
    after = encoding.score(pairs, carry)[1]
    nothing = encoding.initial_carry(pairs.q, pairs.q_features)
    first = encoding.score(pairs, nothing)[1]
    assert jax.tree.leaves(carry.constants) == jax.tree.leaves(after.constants), (
        "constants are handed on as they are"
    )
    chex.assert_tree_shape_prefix(carry.sums, (BATCH, SIZES.heads, LENGTH))
    for now, later, start, end in zip(
        *(jax.tree.leaves(c.sums) for c in (carry, after, nothing, first)), strict=True
    ):
        chex.assert_rank(now, 3)
        np.testing.assert_allclose(later - now, end - start, rtol=0, atol=1e-13)


@fewest
def test_forward_mode_equals_reverse_mode(spec, x64):
    """The derivative of the logits in a random direction, by both modes: streaming attention asks
    for the first.
    """
    block = block_of(spec)
    graphdef, params = nnx.split(block.encoding)

    def logits(params, arrays, carry):
        pairs = dataclasses.replace(block.pairs, **arrays)
        scored = nnx.merge(graphdef, params).score(pairs, carry)[0]
        return jnp.where(block.pairs.mask, scored, 0.0)

    primals = params, {"q": block.pairs.q, "logits": block.pairs.logits}, block.carry
    rng = np.random.default_rng(1)

    def random(leaf):
        return np.asarray(rng.normal(size=leaf.shape), leaf.dtype)

    tangents = jax.tree.map(random, primals)
    value, tangent = jax.jit(functools.partial(jax.jvp, logits))(primals, tangents)
    cotangent = random(value)
    pulled = jax.jit(lambda cotangent: jax.vjp(logits, *primals)[1](cotangent))(cotangent)
    pulled, tangents = jax.tree.leaves(jax.device_get(pulled)), jax.tree.leaves(tangents)
    products = [np.sum(a * b) for a, b in zip(pulled, tangents, strict=True)]
    np.testing.assert_allclose(
        np.sum(np.asarray(tangent) * cotangent), sum(products), rtol=1e-10, atol=1e-10
    )


@a_few
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
            encoding, changed = (
                nnx.merge(graphdef, params),
                dataclasses.replace(block.pairs, **arrays),
            )
            result = (
                encoding.tail(changed, carry)
                if hook == "tail"
                else encoding.score(changed, carry)[0]
            )
            return jnp.where(pairs, result, 0.0)

        arrays = {
            name: getattr(block.pairs, name) for name in ("q", "k", "v", "logits", "k_features")
        }
        value, pull = jax.vjp(logits, params, arrays, block.carry)
        return value, pull(jnp.asarray(np.random.default_rng(1).normal(size=value.shape)))

    both = jax.jit(lambda: (run("tail"), run("score")))()
    chex.assert_trees_all_close(*both, rtol=0, atol=1e-12)


@a_few
def test_maps_are_what_score_uses(spec, x64):
    """Each map is among the values from which `score` computes."""
    encoding, pairs, _ = block_of(spec)
    seen = intermediates(encoding.score, pairs, encoding.initial_carry(pairs.q, pairs.q_features))
    maps = encoding.maps(pairs)
    for name, values in jax.device_get(maps).items():
        chex.assert_shape(values, (BATCH, SIZES.heads, LENGTH, LENGTH))
        near = [
            array
            for array in seen
            if array.shape == values.shape and np.allclose(array, values, rtol=0, atol=1e-13)
        ]
        assert near, f"score does not use {name}"
    assert bool(maps) == any(
        type(encoding_of_part).maps is not Encoding.maps for encoding_of_part in parts_of(encoding)
    )


@pytest.mark.parametrize("name", encodings.names())
def test_one_head_has_the_parameters_of_one_head(name):
    """Only shapes are computed, so that a forgotten axis shows at once."""
    encoding = nnx.merge(*build(name, dtype=np.float32))
    if not encoding.traits.splits_heads:
        return
    x, q = jnp.zeros((1, 3, SIZES.model_dim)), jnp.zeros((1, 3, 1, SIZES.head_dim))
    one_head = functools.partial(
        attention.attend, encoding=encoding.of_head(1), x=x, embedded=True, implementation="full"
    )
    named = (
        'name the axis of each parameter that goes over the heads: nnx.Param(..., axes=("heads",))'
    )
    assert jax.eval_shape(one_head, q, q, q).shape == q.shape, named


@a_few
def test_attention_of_one_head(spec, x64):
    """By `of_head`, one head and its key head alone give what they give among the others."""
    encoding = nnx.merge(*build(spec))
    if not splits_heads(spec):
        with pytest.raises(ConfigError, match="head"):
            encoding.of_head(0)
        return
    arrays = problem()
    x, q, k, v = (arrays[name] for name in "xqkv")

    def attend(encoding, q, k, v):
        return attention.attend(q, k, v, encoding=encoding, x=x, embedded=True)

    @jax.jit
    def results():
        encoding, alone = nnx.merge(*build(spec)), []
        for head in range(SIZES.heads):
            group = head * SIZES.kv_heads // SIZES.heads
            few = (a[:, :, i : i + 1] for a, i in ((q, head), (k, group), (v, group)))
            alone.append(attend(encoding.of_head(head), *few))
        return attend(encoding, q, k, v), jnp.concatenate(alone, axis=2)

    whole, alone = results()
    np.testing.assert_allclose(alone, whole, rtol=0, atol=1e-13)
