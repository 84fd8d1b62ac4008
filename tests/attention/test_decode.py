"""Attention over a cache says what attention over the whole says, for every encoding and way of reading."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.attention import attend
from cope_jax.attention.decode import attend_cached, create_cache
from cope_jax.encodings import AttentionShape, Encoding
from cope_jax.encodings.base import NoOptions
from cope_jax.encodings.cope import CoPE, CoPEConfig
from cope_jax.errors import ConfigError
from tests.encodings.cases import CASES, LENGTH, SIZES, build, jit, problem

# The first row has two tokens of padding, the second holds two documents.
SEGMENTS = np.array([[-1, -1, 0, 0, 0, 0], [4, 4, 4, 7, 7, 7]], np.int32)
POSITIONS = np.array([[0, 0, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2]], np.int32)
CAPACITY = LENGTH + 2  # some slots stay empty
SHAPE = AttentionShape(SIZES.heads, SIZES.head_dim, SIZES.kv_heads, SIZES.model_dim)


def arguments(encoding, arrays):
    """(q, k, v, features), `[B, L, ...]`, as a layer makes them."""
    embedded = encoding.embed(arrays["x"], POSITIONS)
    k, v = arrays["k"], arrays["v"]
    return arrays["q"], k, v, encoding.key_features(embedded, k, v)


def read(encoding, inputs, cache, start, end, positions=POSITIONS, segments=SEGMENTS, **options):
    """Enters the tokens `start` … `end` − 1 and attends from them: (out, cache)."""
    now = slice(start, end)
    q, k, v, features = jax.tree.map(lambda leaf: leaf[:, now], inputs)
    cache = cache.enter(positions[:, now], segments[:, now])
    cache = cache.append(k, v, encoding=encoding, features=features, **options)
    return attend_cached(q, cache, encoding=encoding, **options), cache


def whole(encoding, inputs, **options):
    q, k, v, features = inputs
    return attend(
        q,
        k,
        v,
        encoding=encoding,
        features=features,
        q_positions=POSITIONS,
        k_positions=POSITIONS,
        q_segment_ids=SEGMENTS,
        k_segment_ids=SEGMENTS,
        implementation="full",
        **options,
    )


@pytest.mark.parametrize("spec", CASES)
def test_chunks_and_single_tokens_equal_the_whole(spec, x64):
    """With left padding, packed documents and grouped heads; read in chunks of 1, 3, 1 and 1."""
    graphdef, state = build(spec)

    @jit
    def run(state, arrays):
        encoding = nnx.merge(graphdef, state)
        inputs = arguments(encoding, arrays)
        cache = create_cache(encoding, batch=2, capacity=CAPACITY, dtype=jnp.float64)
        outs = []
        for start, end in [(0, 1), (1, 4)]:
            out, cache = read(encoding, inputs, cache, start, end)
            outs.append(out)

        def step(cache, token):
            one = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=token, slice_size=1, axis=1)
            q, k, v, features = jax.tree.map(one, inputs)
            cache = cache.enter(one(jnp.asarray(POSITIONS)), one(jnp.asarray(SEGMENTS)))
            cache = cache.append(k, v, encoding=encoding, features=features)
            return cache, attend_cached(q, cache, encoding=encoding)

        cache, last = jax.lax.scan(step, cache, jnp.arange(4, LENGTH, dtype=jnp.int32))
        return jnp.concatenate([*outs, jnp.moveaxis(last[:, :, 0], 0, 1)], axis=1), whole(encoding, inputs), cache

    found, expected, cache = run(state, problem())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
    assert cache.filled == LENGTH and cache.capacity == CAPACITY
    assert {leaf.dtype for leaf in jax.tree.leaves(cache.entries)} == {jnp.dtype("float64")}


@pytest.fixture
def cope():
    graphdef, state = build("cope(npos_max=4,gate=value)+rope", dtype=np.float32)
    return nnx.merge(graphdef, state)


@pytest.fixture
def inputs(cope):
    return arguments(cope, {name: jnp.asarray(a, jnp.float32) for name, a in problem().items()})


def cached(encoding, inputs, capacity, chunks=((0, 4), (4, LENGTH)), segments=SEGMENTS, dtype=jnp.float32):
    """The outputs of all chunks, under jit."""

    @jit
    def run(inputs):
        cache = create_cache(encoding, batch=2, capacity=capacity, dtype=dtype)
        outs = []
        for start, end in chunks:
            out, cache = read(encoding, inputs, cache, start, end, segments=segments)
            outs.append(out)
        return jnp.concatenate(outs, axis=1)

    return np.asarray(run(inputs))


def test_padding_is_not_seen(cope, inputs):
    """What stands there changes nothing, and neither do the slots that are still empty."""
    changed = jax.tree.map(lambda leaf: leaf.at[0, :2].set(9.0), inputs)
    real = np.s_[:, 2:]
    np.testing.assert_array_equal(cached(cope, inputs, LENGTH)[real], cached(cope, changed, LENGTH)[real])
    np.testing.assert_allclose(
        cached(cope, inputs, LENGTH)[real], cached(cope, inputs, 2 * LENGTH)[real], rtol=0, atol=1e-6
    )
    unpadded = cached(cope, inputs, LENGTH, segments=np.zeros_like(SEGMENTS))
    assert np.abs(unpadded[0, 2:] - cached(cope, inputs, LENGTH)[0, 2:]).max() > 1e-3


@pytest.mark.parametrize("window", [1, 2, 50])
def test_a_window(cope, inputs, window):
    @jit
    def run(inputs):
        _, cache = read(cope, inputs, create_cache(cope, batch=2, capacity=LENGTH), 0, 3)
        cache = cache.enter(POSITIONS[:, 3:], SEGMENTS[:, 3:])
        q, k, v, features = jax.tree.map(lambda leaf: leaf[:, 3:], inputs)
        cache = cache.append(k, v, encoding=cope, features=features)
        return attend_cached(q, cache, encoding=cope, window=window), whole(cope, inputs, window=window)[:, 3:]

    np.testing.assert_allclose(*run(inputs), rtol=0, atol=1e-6)


def test_layers_keep_apart(cope, inputs):
    """Each layer of a stacked cache is what a cache of its own would be."""
    other = jax.tree.map(lambda leaf: leaf[::-1] + 1, inputs)

    @jit
    def run(inputs, other):
        cache = create_cache(cope, batch=2, capacity=LENGTH, num_layers=3)
        cache = cache.enter(POSITIONS, SEGMENTS)
        for layer, (_, k, v, features) in [(0, other), (2, inputs), (1, other)]:
            cache = cache.append(k, v, encoding=cope, features=features, layer=layer)
        return [attend_cached(inputs[0], cache, encoding=cope, layer=jnp.int32(layer)) for layer in (0, 2)]

    first, last = run(inputs, other)
    np.testing.assert_allclose(last, cached(cope, inputs, LENGTH), rtol=0, atol=1e-6)
    assert np.abs(first - last).max() > 0.1


class Biased(Encoding):
    """Features of several shapes: a number for each key, a row for each, and what no head has for itself."""

    def key_features(self, x_BMD, k_BMGK, v_BMGK):
        return {
            "number": v_BMGK[:, :, 0, 0],
            "row": v_BMGK[:, :, :, 1],
            "more": v_BMGK[:, :, None] + k_BMGK[:, :, None],
        }

    def score(self, q_BLHK, k_BMGK, features, logits_BHLM, mask_B1LM, q_positions_BL, k_positions_BM, carry):
        bias_BM = features["number"] + features["row"].prod(axis=2) + features["more"][:, :, 0, 1, 2]
        return logits_BHLM + bias_BM[:, None, None], carry


def test_features_have_any_shape(inputs):
    encoding = Biased(NoOptions(), SHAPE, rngs=nnx.Rngs(0))
    q, k, v, _ = inputs
    inputs = (q, k, v, encoding.key_features(None, k, v))
    found = cached(encoding, inputs, LENGTH)
    np.testing.assert_allclose(found, jit(functools.partial(whole, encoding))(inputs), rtol=0, atol=1e-6)


class Spy(CoPE):
    """Notes the types that `score` gets."""

    def score(self, *arguments):
        TYPES.append([{leaf.dtype.name for leaf in jax.tree.leaves(argument)} for argument in arguments])
        return super().score(*arguments)


TYPES: list[list[set[str]]] = []


def test_bfloat16_is_for_what_is_kept_only():
    """Logits, gates and their sums are float32."""
    encoding = Spy(CoPEConfig(gate="value"), SHAPE, rngs=nnx.Rngs(0))
    low = [jax.ShapeDtypeStruct((2, LENGTH, heads, SIZES.head_dim), jnp.bfloat16) for heads in (4, 2, 2, 2)]

    def run(inputs):
        return read(encoding, inputs, create_cache(encoding, batch=2, capacity=9, dtype=jnp.bfloat16), 0, 2)

    out, cache = jax.eval_shape(run, low)
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(cache.entries)} == {jnp.dtype("bfloat16")}
    ((q, k, features, logits, mask, q_positions, k_positions, carry),) = TYPES
    assert q == k == features == {"bfloat16"} and logits == carry == {"float32"}
    assert mask == {"bool"} and q_positions == k_positions == {"int32"}


def test_an_overflow_is_an_error_where_it_can_be_known(cope, inputs):
    cache = create_cache(cope, batch=2, capacity=4)
    with pytest.raises(ConfigError, match="a cache of capacity 4 cannot hold 5 tokens: enlarge it"):
        jax.eval_shape(lambda cache: cache.enter(POSITIONS[:, :5]), cache)
    cache = cache.enter(POSITIONS[:, :3])
    with pytest.raises(ConfigError, match="a cache of capacity 4 cannot hold 5 tokens"):
        cache.enter(POSITIONS[:, :2])
    cache.enter(POSITIONS[:, :1])


@pytest.mark.parametrize("window", [None, 1])
def test_an_overflow_inside_a_program_is_never_silent(cope, inputs, window):
    """Everything is NaN from the first token that has no slot on, padding or not."""

    @jit
    def step(cache, token):
        q, k, v, features = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, token, 1, axis=1), inputs)
        cache = cache.enter(jnp.zeros((1, 1), jnp.int32)).append(k, v, encoding=cope, features=features)
        return attend_cached(q, cache, encoding=cope, window=window), cache

    cache = create_cache(cope, batch=2, capacity=4)
    for token in range(LENGTH):
        out, cache = step(cache, token)
        assert np.isfinite(out).all() if token < 4 else np.isnan(out).all()


@pytest.mark.parametrize("size", ["batch", "capacity", "num_layers"])
def test_sizes_are_at_least_one(cope, size):
    with pytest.raises(ConfigError, match=f"cache.{size} must be at least 1, got 0"):
        create_cache(cope, **{"batch": 1, "capacity": 1} | {size: 0})
