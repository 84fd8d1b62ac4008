"""A logit after the last block, and rows to which farther keys weigh nothing: stick-breaking in
each implementation.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from cope_jax import testing
from cope_jax.attention import (
    attend,
    attend_cached,
    attention_weights,
    blockwise_attention,
    create_cache,
    prepare,
)
from cope_jax.encodings import AttentionShape, Composed, Encoding, Traits, create, stick_breaking
from cope_jax.encodings.base import NoOptions
from cope_jax.errors import ConfigError

HEADS, GROUPS, WIDTH = 4, 2, 3
LENGTH, BATCH = 13, 2
SHAPE = AttentionShape(HEADS, WIDTH, GROUPS)


class StickBreaking(stick_breaking.StickBreaking):
    """The content logits are scaled by a parameter of each head."""

    def __init__(self, shape=SHAPE, *, value="zero", done_below=-np.inf):
        super().__init__(
            stick_breaking.StickBreakingConfig(remainder=value), shape, rngs=nnx.Rngs(0)
        )
        self.scale = nnx.Param(jnp.linspace(0.5, 2.0, shape.num_heads))
        self.done_below = done_below

    def score(self, pairs, carry):
        scale_1H11 = self.scale[...].astype(pairs.logits.dtype)[None, :, None, None]
        return super().score(dataclasses.replace(pairs, logits=pairs.logits * scale_1H11), carry)

    def done(self, carry):
        return carry.sums < self.done_below


def arrays(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = [(BATCH, LENGTH, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    q, k, v, dout = (rng.normal(size=shape) for shape in shapes)
    return scale * q, k, v, dout


PAIRS = np.random.default_rng(1).random((BATCH, 1, LENGTH, LENGTH)) < 0.6
PAIRS[0, :, 5] = False


def value_and_gradients(encoding, how):
    graphdef, params = nnx.split(encoding)

    def run(params, q, k, v, dout):
        out, pull = jax.vjp(
            lambda p, q, k, v: how(q, k, v, encoding=nnx.merge(graphdef, p)), params, q, k, v
        )
        return out, pull(dout)

    return jax.jit(run)(params, *arrays())


FULL = functools.partial(attend, implementation="full")


@pytest.mark.parametrize(
    "value, sizes, mask",
    [
        ("own", (4, 2, 3), None),
        pytest.param("zero", (4, 2, 3), PAIRS, id="zero-mask", marks=pytest.mark.slow),
        pytest.param("zero", (4, 2, 3), None, marks=pytest.mark.slow),
        pytest.param("own", (4, 2, 3), PAIRS, id="own-mask", marks=pytest.mark.slow),
        *(
            pytest.param(value, sizes, None, marks=pytest.mark.slow)
            for value in ("zero", "own")
            for sizes in ((4, LENGTH, 1), (LENGTH, LENGTH, LENGTH))
        ),
    ],
    ids=str,
)
def test_blocks(value, sizes, mask, x64):
    """In value and every gradient; one block of all keys among them."""
    encoding = StickBreaking(value=value)
    how = functools.partial(attend, mask=mask)
    exact = value_and_gradients(encoding, functools.partial(how, implementation="full"))
    computed = value_and_gradients(
        encoding, functools.partial(how, implementation="blockwise", blocks=sizes)
    )
    for a, b in zip(jax.tree.leaves(computed), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(exact))


@pytest.mark.slow
@pytest.mark.parametrize("value", [pytest.param("zero", marks=pytest.mark.slow), "own"])
def test_ring(value, x64):
    encoding = StickBreaking(value=value)
    exact = value_and_gradients(encoding, FULL)
    mesh = jax.make_mesh(
        (2,), ("sequence",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    with jax.set_mesh(mesh):
        computed = value_and_gradients(
            encoding, functools.partial(attend, sequence_axis="sequence", blocks=(2, 3, 2))
        )
    for a, b in zip(jax.tree.leaves(computed), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", [pytest.param("zero", marks=pytest.mark.slow), "own"])
def test_decoding(value, x64):
    encoding = StickBreaking(value=value, done_below=-60.0)

    @jax.jit
    def step(cache, q, k, v):
        cache = cache or create_cache(encoding, batch=BATCH, capacity=LENGTH + 2, dtype=q.dtype)
        places = cache.filled + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
        cache = cache.enter(places).append(q, k, v, encoding=encoding)
        return attend_cached(q, cache, encoding=encoding), cache

    whole = jax.jit(functools.partial(FULL, encoding=encoding))
    given = {"inputs": testing.qkv(HEADS, GROUPS, WIDTH, np.float64), "batch": BATCH}
    given |= {"length": LENGTH, "tolerance": 1e-13}
    testing.check(whole, step=step, laws=["decoding"], **given).raise_if_broken()


def test_blocks_beyond_what_is_done_are_not_read(x64):
    """Each key breaks all but e^−40 off, so after two blocks nothing is left: NaN before them
    changes nothing.
    """
    encoding = StickBreaking(done_below=-60.0)
    q, k, v = (jnp.full((1, LENGTH, heads, WIDTH), 10.0) for heads in (HEADS, GROUPS, GROUPS))
    gone = slice(None, 4)

    def out(k, v):
        return blockwise_attention(
            encoding, prepare(q[:, -2:], k, v, encoding=encoding, blocks=(2, 2, 2))
        )

    @jax.jit
    def run(k, v):
        value, pull = jax.vjp(out, k, v)
        return value, *pull(jnp.ones_like(value))

    spoilt = k.at[:, gone].set(jnp.nan), v.at[:, gone].set(jnp.nan)
    for a, b in zip(run(k, v), run(*spoilt), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_and_sink_sum_to_one(x64):
    encoding = StickBreaking()
    weights = jax.jit(lambda *qkv: attention_weights(*qkv, encoding=encoding))(*arrays()[:3])
    assert np.all(weights[:, :, 0] == 0), "the first query sees no key"
    assert 0.5 < float(weights.sum(axis=-1)[:, :, -1].mean()) < 1


def test_compositions(x64):
    """The sink of one part serves all; that of two is an error, and rows are done only where all
    parts say so.
    """
    sizes = dict(num_heads=HEADS, num_kv_heads=GROUPS, head_dim=4)
    rope, cope = (create(name, **sizes, rngs=nnx.Rngs(0)) for name in ("rope", "cope"))
    stick = StickBreaking(AttentionShape(HEADS, 4, GROUPS), value="own", done_below=1.0)
    # Here it may stand for any encoding with a sink.
    stick.traits = dataclasses.replace(stick.traits, excludes=())
    both = Composed({"stick": stick, "rope": rope}, stick.shape)
    carry = both.initial_carry(jnp.zeros((1, HEADS, 2, 4)), {"stick": (), "rope": ()})
    assert (
        both.traits.sink_value == "own" and both.sink(carry) is not None and both.done(carry).all()
    )
    with_cope = Composed({"stick": stick, "cope": cope}, stick.shape)
    assert (
        with_cope.done(
            with_cope.initial_carry(jnp.zeros((1, HEADS, 2, 4)), {"stick": (), "cope": ()})
        )
        is None
    )
    with pytest.raises(ConfigError, match="one and two each have a sink"):
        Composed({"one": stick, "two": stick}, stick.shape)


class Coupled(Encoding):
    """Rows see each other."""

    traits = Traits(splits_queries=False)

    def score(self, pairs, carry):
        return pairs.logits - pairs.logits.mean(axis=2, keepdims=True), carry


def test_values_of_the_queries_have_a_gradient_where_all_keys_are_one_block():
    encoding = create("stick_breaking(remainder=own)", num_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    encoding.traits = dataclasses.replace(encoding.traits, splits_keys=False)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (jax.random.normal(key, (1, 12, 2, 4)) for key in keys)

    def gradient(implementation):
        def loss(v):
            return (attend(q, k, v, encoding=encoding, implementation=implementation) * dout).sum()

        return jax.grad(loss)(v)

    np.testing.assert_allclose(gradient("blockwise"), gradient("full"), atol=1e-5)


def test_a_part_cannot_take_the_name_of_a_hook():
    with pytest.raises(ConfigError, match="rename the encoding 'sink'"):
        Composed({"sink": StickBreaking()}, SHAPE)


@pytest.mark.parametrize("law", ["splits_keys", "splits_queries", "splits_heads", "takes_masks"])
def test_a_composition_keeps_a_law_that_all_its_parts_keep(law):
    keeps, breaks = (Encoding(NoOptions(), SHAPE, rngs=nnx.Rngs(0)) for _ in range(2))
    breaks.traits = Traits(**{law: False})
    assert getattr(Composed({"one": keeps, "two": keeps}, SHAPE).traits, law)
    assert not getattr(Composed({"one": keeps, "two": breaks}, SHAPE).traits, law)


def test_an_encoding_that_couples_queries_runs_in_full_only():
    encoding = Coupled(NoOptions(), SHAPE, rngs=nnx.Rngs(0))
    q, k, v = (jnp.ones((1, 100, heads, WIDTH)) for heads in (HEADS, GROUPS, GROUPS))
    np.testing.assert_array_equal(
        attend(q, k, v, encoding=encoding), FULL(q, k, v, encoding=encoding)
    )
    with pytest.raises(ConfigError, match="couples them: choose 'full'"):
        attend(q, k, v, encoding=encoding, implementation="blockwise")
    cache = create_cache(encoding, batch=1, capacity=2).enter(jnp.zeros((1, 1), jnp.int32))
    with pytest.raises(ConfigError, match="couples them: call attend with the complete sequence"):
        attend_cached(q[:, :1], cache, encoding=encoding)


def test_a_learned_sink_starts_as_the_softmax_plus_one():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 1, HEADS, WIDTH))
    sink = create("learned_sink", num_heads=HEADS, head_dim=WIDTH, rngs=nnx.Rngs(0))
    weight = np.exp((q * k).sum(-1) / WIDTH**0.5)
    expected = (weight / (1 + weight))[..., None] * v
    np.testing.assert_allclose(attend(q, k, v, encoding=sink), expected, rtol=1e-5)
