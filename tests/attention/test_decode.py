"""Attention over a cache says what attention over the whole says, for every encoding and way of
reading.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.attention import attend, attend_cached, create_cache, decode
from cope_jax.encodings import AttentionShape, Encoding
from cope_jax.encodings.base import NoOptions
from cope_jax.encodings.cope import CoPE, CoPEConfig
from cope_jax.errors import ConfigError
from tests.encodings.cases import CASES, FEW, LENGTH, SIZES, build, problem, splits_queries

# The first row has two tokens of padding, the second holds two documents.
SEGMENTS = np.array([[-1, -1, 0, 0, 0, 0], [4, 4, 4, 7, 7, 7]], np.int32)
POSITIONS = np.array([[0, 0, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2]], np.int32)
CAPACITY = LENGTH + 2  # some slots stay empty
SHAPE = AttentionShape(SIZES.heads, SIZES.head_dim, SIZES.kv_heads, SIZES.model_dim)


def arguments(encoding, arrays):
    """(q, k, v, x), `[B, L, ...]`, as a layer has them."""
    embedded = encoding.embed(arrays["x"], POSITIONS)
    k, v = arrays["k"], arrays["v"]
    return arrays["q"], k, v, embedded


def read(encoding, inputs, cache, start, end):
    """Enters the tokens `start` … `end` − 1 and attends from them: (out, cache)."""
    now = slice(start, end)
    q, k, v, x = jax.tree.map(lambda leaf: leaf[:, now], inputs)
    cache = cache.enter(POSITIONS[:, now], SEGMENTS[:, now])
    cache = cache.append(q, k, v, encoding=encoding, x_BLD=x)
    return attend_cached(q, cache, encoding=encoding, embedded=True), cache


def whole(encoding, inputs, **options):
    q, k, v, x = inputs
    return attend(
        q,
        k,
        v,
        encoding=encoding,
        x=x,
        embedded=True,
        q_positions=POSITIONS,
        k_positions=POSITIONS,
        q_segment_ids=SEGMENTS,
        k_segment_ids=SEGMENTS,
        implementation="full",
        **options,
    )


# Some encodings again with blocks that are smaller than the context: of the tables one is larger
# than it.
SMALL_BLOCKS = [
    ("cope(npos_max=3)", 2),
    pytest.param("cope", 3, marks=pytest.mark.slow),
    ("cope(npos_max=4)+relative(max_distance=5)", 3),
]


WHOLE = [
    pytest.param(spec, decode.BLOCK, marks=() if spec in FEW else pytest.mark.slow, id=spec)
    for spec in CASES
    if splits_queries(spec)
]


@pytest.mark.parametrize("spec, block", WHOLE + SMALL_BLOCKS)
def test_chunks_and_single_tokens_equal_the_whole(spec, block, monkeypatch, x64):
    """With left padding, packed documents and grouped heads; read in chunks of 1, 3, 1 and 1."""
    monkeypatch.setattr(decode, "BLOCK", block)
    graphdef, state = build(spec)

    @jax.jit
    def run(state, arrays):
        encoding = nnx.merge(graphdef, state)
        inputs = arguments(encoding, arrays)
        cache = create_cache(encoding, batch=2, capacity=CAPACITY, dtype=jnp.float64)
        outs = []
        for start, end in [(0, 1), (1, 4)]:
            out, cache = read(encoding, inputs, cache, start, end)
            outs.append(out)

        def step(cache, token):
            newest = functools.partial(
                jax.lax.dynamic_slice_in_dim, start_index=token, slice_size=1, axis=1
            )
            q, k, v, x = jax.tree.map(newest, inputs)
            cache = cache.enter(newest(jnp.asarray(POSITIONS)), newest(jnp.asarray(SEGMENTS)))
            cache = cache.append(q, k, v, encoding=encoding, x_BLD=x)
            return cache, attend_cached(q, cache, encoding=encoding, embedded=True)

        cache, last = jax.lax.scan(step, cache, jnp.arange(4, LENGTH, dtype=jnp.int32))
        return (
            jnp.concatenate([*outs, jnp.moveaxis(last[:, :, 0], 0, 1)], axis=1),
            whole(encoding, inputs),
            cache,
        )

    computed, expected, cache = run(state, problem())
    np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-13)
    assert cache.filled == LENGTH and cache.capacity == CAPACITY
    assert {leaf.dtype for leaf in jax.tree.leaves(cache.entries)} == {jnp.dtype("float64")}


class Counted(CoPE):
    """Notes each block that is scored, by the number of its keys."""

    def score(self, pairs, carry):
        keys = pairs.k.shape[2]
        jax.debug.callback(lambda: SCORED.append(keys))
        return super().score(pairs, carry)


SCORED: list[int] = []
CONTEXT, LAST = 21, 3  # the last three tokens attend to all


@pytest.mark.parametrize(
    "block, npos_max, blocks", [(1, 3, 9), (4, 3, 3), (5, 9, 5), (4, 64, 6), (256, 3, 1)], ids=str
)
def test_blocks_are_scored_until_all_rows_are_saturated_and_no_further(
    block, npos_max, blocks, monkeypatch, x64
):
    """The capacity is no multiple of the blocks, and neither is the context."""
    monkeypatch.setattr(decode, "BLOCK", block)
    encoding = Counted(CoPEConfig(npos_max=npos_max), SHAPE, rngs=nnx.Rngs(0))
    encoding.table[...] = jax.random.normal(jax.random.key(0), encoding.table.shape)
    arrays = problem(length=CONTEXT)
    q, k, v = arrays["q"], arrays["k"], arrays["v"]

    @jax.jit
    def run(q, k, v):
        cache = create_cache(encoding, batch=2, capacity=CONTEXT + 2, dtype=jnp.float64)
        cache = cache.enter(np.arange(CONTEXT, dtype=np.int32)[None]).append(
            jnp.zeros_like(jnp.repeat(k, 2, axis=2)), k, v, encoding=encoding
        )
        return attend_cached(q, cache, encoding=encoding)

    SCORED.clear()
    computed = jax.block_until_ready(run(q[:, -LAST:], k, v))
    jax.effects_barrier()
    assert SCORED == [min(block, CONTEXT + 2)] * blocks
    expected = jax.jit(lambda q, k, v: attend(q, k, v, encoding=encoding, implementation="full"))(
        q, k, v
    )
    np.testing.assert_allclose(computed, expected[:, -LAST:], rtol=0, atol=1e-13)
    assert blocks == blocks_until_saturated(q[:, -LAST:], k, block, npos_max)


def blocks_until_saturated(q, k, block, npos_max):
    """The number of blocks of keys, from the last on, until the gates of every row sum up to the
    last position.
    """
    k = np.repeat(k, SIZES.heads // SIZES.kv_heads, axis=2)
    gates = 1 / (1 + np.exp(-np.einsum("blhk,bmhk->bhlm", q, k) / SIZES.head_dim**0.5))
    gates *= np.tri(LAST, CONTEXT, CONTEXT - LAST)
    sums = np.cumsum(gates[..., ::-1], axis=-1).min(axis=(0, 1, 2))
    ends = [min(end, CONTEXT) for end in range(block, CONTEXT + block, block)]
    saturated = [number for number, end in enumerate(ends, 1) if sums[end - 1] >= npos_max - 1]
    return saturated[0] if saturated else len(ends)


@pytest.fixture
def cope():
    graphdef, state = build("cope(npos_max=4,gate=value)+rope", dtype=np.float32)
    return nnx.merge(graphdef, state)


@pytest.fixture
def inputs(cope):
    return arguments(cope, {name: jnp.asarray(a, jnp.float32) for name, a in problem().items()})


def cached(encoding, inputs):
    """The outputs of two chunks, under jit."""

    @jax.jit
    def run(inputs):
        cache = create_cache(encoding, batch=2, capacity=LENGTH)
        first, cache = read(encoding, inputs, cache, 0, 4)
        return jnp.concatenate([first, read(encoding, inputs, cache, 4, LENGTH)[0]], axis=1)

    return np.asarray(run(inputs))


@pytest.mark.parametrize("window", [1, 2, 50])
def test_a_window(cope, inputs, window):
    @jax.jit
    def run(inputs):
        _, cache = read(cope, inputs, create_cache(cope, batch=2, capacity=LENGTH), 0, 3)
        cache = cache.enter(POSITIONS[:, 3:], SEGMENTS[:, 3:])
        q, k, v, x = jax.tree.map(lambda leaf: leaf[:, 3:], inputs)
        cache = cache.append(q, k, v, encoding=cope, x_BLD=x)
        return attend_cached(q, cache, encoding=cope, window=window), whole(
            cope, inputs, window=window
        )[:, 3:]

    np.testing.assert_allclose(*run(inputs), rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [0, pytest.param(-3, marks=pytest.mark.slow), 2.5, True])
def test_a_window_that_is_no_size_is_refused(cope, inputs, window):
    def attend():
        _, cache = read(cope, inputs, create_cache(cope, batch=2, capacity=LENGTH), 0, 3)
        return attend_cached(inputs[0][:, 2:3], cache, encoding=cope, window=window)

    with pytest.raises(ConfigError, match=r"^window must be "):
        jax.eval_shape(attend)


def test_layers_keep_apart(cope, inputs):
    """Each layer of a stacked cache is what a cache of its own would be."""
    other = jax.tree.map(lambda leaf: leaf[::-1] + 1, inputs)

    @jax.jit
    def run(inputs, other):
        cache = create_cache(cope, batch=2, capacity=LENGTH, num_layers=3)
        cache = cache.enter(POSITIONS, SEGMENTS)
        for layer, (q, k, v, x) in [(0, other), (2, inputs), (1, other)]:
            cache = cache.append(q, k, v, encoding=cope, x_BLD=x, layer=layer)
        return [
            attend_cached(inputs[0], cache, encoding=cope, layer=jnp.int32(layer))
            for layer in (0, 2)
        ]

    first, last = run(inputs, other)
    np.testing.assert_allclose(last, cached(cope, inputs), rtol=0, atol=1e-6)
    assert np.abs(first - last).max() > 0.1


class Biased(Encoding):
    """Features of one head, of the key heads, of the query heads; one is the sum of the values so
    far.
    """

    def features(self, tokens, state):
        start = 0.0 if state is None else state["sum"][:, None, None]
        sums_BM1 = start + jnp.cumsum(tokens.v[:, :, 0, :1], axis=1)
        more = tokens.q[..., None] * tokens.v[:, :, :1, :, None]
        return {"sum": sums_BM1, "row": tokens.k[..., 1], "more": more}, {"sum": sums_BM1[:, -1, 0]}

    def rotate(self, x, features, positions):
        return x * features["sum"][..., None]

    def rotate_keys(self, k, features, positions):
        return k * jnp.cos(features["row"])[..., None]

    def score(self, pairs, carry):
        of_query, of_key = pairs.q_features, pairs.k_features
        bias = (of_query["sum"][..., None] - of_key["sum"][:, :, None]) + of_key["row"].prod(
            axis=1
        )[:, None, None]
        return pairs.logits + bias + of_query["more"][:, :, :, 1, 0, None] * of_key["more"][
            :, :, None, :, 2, 0
        ], carry


def test_features_have_any_shape_and_a_state(inputs):
    encoding = Biased(NoOptions(), SHAPE, rngs=nnx.Rngs(0))
    computed = cached(encoding, inputs)
    np.testing.assert_allclose(
        computed, jax.jit(functools.partial(whole, encoding))(inputs), rtol=0, atol=1e-6
    )


class Spy(CoPE):
    """Notes the types that `score` gets."""

    def score(self, pairs, carry):
        TYPES.append(
            {field.name: getattr(pairs, field.name) for field in dataclasses.fields(pairs)}
            | {"carry": carry}
        )
        return super().score(pairs, carry)


TYPES: list[dict[str, Any]] = []


def test_bfloat16_is_for_what_is_kept_only():
    """Logits, gates and their sums are float32."""
    encoding = Spy(CoPEConfig(gate="separate_key"), SHAPE, rngs=nnx.Rngs(0))
    low = [
        jax.ShapeDtypeStruct((2, LENGTH, heads, SIZES.head_dim), jnp.bfloat16)
        for heads in (4, 2, 2)
    ]
    low.append(jax.ShapeDtypeStruct((2, LENGTH, SIZES.model_dim), jnp.bfloat16))

    def run(inputs):
        return read(
            encoding, inputs, create_cache(encoding, batch=2, capacity=9, dtype=jnp.bfloat16), 0, 2
        )

    out, cache = jax.eval_shape(run, low)
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(cache.entries)} == {jnp.dtype("bfloat16")}
    (given,) = TYPES
    types = {
        name: {leaf.dtype.name for leaf in jax.tree.leaves(leaves)}
        for name, leaves in given.items()
    }
    assert types["q"] == types["k"] == types["v"] == types["k_features"] == {"bfloat16"}
    assert types["logits"] == types["carry"] == {"float32"} and types["mask"] == {"bool"}
    assert types["q_positions"] == types["k_positions"] == {"int32"}


def test_an_overflow_is_an_error_where_it_can_be_known(cope, inputs):
    cache = create_cache(cope, batch=2, capacity=4)
    with pytest.raises(
        ConfigError, match="a cache of capacity 4 cannot hold 5 tokens: create a larger cache"
    ):
        jax.eval_shape(lambda cache: cache.enter(POSITIONS[:, :5]), cache)
    cache = cache.enter(POSITIONS[:, :3])
    with pytest.raises(ConfigError, match="a cache of capacity 4 cannot hold 5 tokens"):
        cache.enter(POSITIONS[:, :2])
    cache.enter(POSITIONS[:, :1])


@pytest.mark.parametrize("window", [None, 1])
def test_an_overflow_inside_a_program_is_never_silent(cope, inputs, window):
    """Everything is NaN from the first token that has no slot on, padding or not."""

    @jax.jit
    def step(cache, token):
        q, k, v, x = jax.tree.map(
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, token, 1, axis=1), inputs
        )
        cache = cache.enter(jnp.zeros((1, 1), jnp.int32)).append(q, k, v, encoding=cope, x_BLD=x)
        return attend_cached(q, cache, encoding=cope, window=window), cache

    cache = create_cache(cope, batch=2, capacity=4)
    for token in range(LENGTH):
        out, cache = step(cache, token)
        assert np.isfinite(out).all() if token < 4 else np.isnan(out).all()


@pytest.mark.parametrize("size", ["batch", "capacity", "num_layers"])
def test_sizes_are_at_least_one(cope, size):
    with pytest.raises(ConfigError, match=f"cache.{size} must be at least 1, got 0"):
        create_cache(cope, **{"batch": 1, "capacity": 1} | {size: 0})


def test_a_fresh_cache_can_be_donated(cope):
    cache = create_cache(cope, batch=2, capacity=4)
    entered = jax.jit(lambda cache: cache.enter(POSITIONS[:, :3]), donate_argnums=0)(cache)
    assert entered.filled == 3 and cache.positions_BC.is_deleted()


QUERIES = (2, 1, SIZES.heads, SIZES.head_dim)
X = np.zeros((2, 1, SIZES.model_dim), np.float32)
ENTERED = (2, 1, SIZES.kv_heads, SIZES.head_dim)
KEYS = "float32[2, 1, 2, 4]"
MISFITS = {
    "heads": (
        dict(k=np.zeros((2, 1, 4, 4), np.float32)),
        f"keys must be {KEYS} to fit the cache, got float32[2, 1, 4",
    ),
    "width": (
        dict(v=np.zeros((2, 1, 2, 3), np.float32)),
        f"values must be {KEYS} to fit the cache, got float32[2, 1",
    ),
    "batch": (
        dict(k=np.zeros((1, 1, 2, 4), np.float32)),
        f"keys must be {KEYS} to fit the cache, got float32[1, 1, 2",
    ),
    "type": (
        dict(k=jnp.zeros(ENTERED, jnp.bfloat16)),
        f"keys must be {KEYS} to fit the cache, got bfloat16",
    ),
    "layer": (dict(layer=0), "layer=0 does not fit a cache of one layer: omit layer"),
    "no layer": (
        dict(num_layers=3),
        "layer=None does not fit a cache of 3 layers: give a layer from 0 to 2",
    ),
    "another layer": (
        dict(num_layers=3, layer=3),
        "layer=3 does not fit a cache of 3 layers: give a layer from 0 to 2",
    ),
    "encoding": (
        dict(encoding=CoPE(CoPEConfig(), SHAPE, rngs=nnx.Rngs(0))),
        "entries of this encoding must be",
    ),
    "not entered": (
        dict(enter=0),
        "the cache has 0 tokens, but 1 are needed: enter the missing tokens first",
    ),
}


@pytest.mark.parametrize("change, message", MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_the_cache_is_one_clear_line(cope, change, message):
    options = (
        dict(k=np.zeros(ENTERED, np.float32), v=np.zeros(ENTERED, np.float32), encoding=cope)
        | change
    )
    cache = create_cache(cope, batch=2, capacity=4, num_layers=options.pop("num_layers", None))
    if options.pop("enter", 1):
        cache = cache.enter(POSITIONS[:, :1])
    with pytest.raises(ConfigError) as error:
        cache.append(
            np.zeros(QUERIES, np.float32), options.pop("k"), options.pop("v"), x_BLD=X, **options
        )
    assert message in str(error.value) and "\n" not in str(error.value)


def test_queries_that_do_not_fit_the_cache_are_an_error(cope):
    cache = create_cache(cope, batch=2, capacity=4, num_layers=3).enter(POSITIONS[:, :1])
    with pytest.raises(
        ConfigError, match=r"queries must be float32\[2, 1, 4, 4\] to fit the cache"
    ):
        attend_cached(jnp.zeros(ENTERED), cache, encoding=cope, layer=0)
    with pytest.raises(ConfigError, match="layer=None does not fit a cache of 3 layers"):
        attend_cached(jnp.zeros((2, 1, 4, 4)), cache, encoding=cope)
    with pytest.raises(ConfigError, match="the cache has 1 tokens, but 2 are needed"):
        attend_cached(jnp.zeros((2, 2, 4, 4)), cache, encoding=cope, layer=0)


def test_tokens_that_were_not_entered_are_never_silent_inside_a_program(cope, inputs):
    @jax.jit
    def run(cache):
        q, k, v, x = jax.tree.map(lambda leaf: leaf[:, :2], inputs)
        cache = cache.append(q, k, v, encoding=cope, x_BLD=x).enter(POSITIONS[:, :2])
        return attend_cached(q, cache, encoding=cope)

    assert np.isnan(run(create_cache(cope, batch=2, capacity=4))).all()
