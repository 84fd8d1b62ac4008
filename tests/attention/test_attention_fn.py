"""`AttentionFn` in Flax's own layers: against Flax's attention, with parameters that are trained."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from cope_jax import encodings
from cope_jax.attention import AttentionFn, attend
from cope_jax.errors import ConfigError

BATCH, LENGTH, HEADS, WIDTH = 2, 9, 4, 16
X = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, WIDTH))
PAIRS = np.random.default_rng(0).random((BATCH, 1, LENGTH, LENGTH)) < 0.5
PAIRS |= np.eye(LENGTH, dtype=bool)  # Flax gives a query without keys the mean of all values
KINDS = {
    "two-sided": {},
    "mask of numbers": {"mask": jnp.asarray(PAIRS, jnp.float32)},
    "one mask for all": {"mask": jnp.asarray(PAIRS[:1])},
}


def encoding_of(spec="none", kv_heads=None):
    sizes = {"num_heads": HEADS, "head_dim": WIDTH // HEADS, "num_kv_heads": kv_heads}
    return encodings.create(spec, **sizes, rngs=nnx.Rngs(0))


def layer_of(attention_fn=None, **options):
    chosen = {} if attention_fn is None else {"attention_fn": attention_fn}
    return nnx.MultiHeadAttention(HEADS, WIDTH, **chosen, **options, decode=False, rngs=nnx.Rngs(1))


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("kind", [*KINDS.values(), {"is_causal": True}], ids=[*KINDS, "causal"])
def test_nnx_without_positions_is_flax_attention(kind, kv_heads):
    """With the option `causal`, too."""

    def result(given, *fn):
        layer = layer_of(*fn, num_kv_heads=kv_heads)
        return jax.jit(lambda x: layer(x, **given))(X)

    exact, encoding = result(kind), encoding_of(kv_heads=kv_heads)
    ways = [(AttentionFn(encoding), kind)]
    if "is_causal" in kind:
        ways.append((AttentionFn(encoding, causal=True), {}))
    for fn, given in ways:
        np.testing.assert_allclose(result(given, fn), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_linen_without_positions_is_flax_attention(kind):
    theirs = linen.MultiHeadDotProductAttention(HEADS)
    ours = linen.MultiHeadDotProductAttention(HEADS, attention_fn=AttentionFn(encoding_of()))
    variables = theirs.init(jax.random.key(0), X)
    assert jax.tree.structure(variables) == jax.tree.structure(ours.init(jax.random.key(0), X))
    np.testing.assert_allclose(
        ours.apply(variables, X, **kind), theirs.apply(variables, X, **kind), rtol=0, atol=1e-5
    )


def test_a_bias_is_flax_attention_with_it():
    q, k, v = jax.random.normal(jax.random.key(1), (3, BATCH, LENGTH, HEADS, WIDTH // HEADS))
    bias = jax.random.normal(jax.random.key(2), (1, HEADS, LENGTH, LENGTH))
    exact = nnx.dot_product_attention(q, k, v, bias=bias)
    np.testing.assert_allclose(
        AttentionFn(encoding_of())(q, k, v, bias=bias), exact, rtol=0, atol=1e-5
    )


def test_a_layer_within_reading_and_one_of_linen_give_the_input_to_the_encoding():
    """Compiled too; and after the context it is gone."""
    fox = encodings.create("fox", num_heads=HEADS, head_dim=WIDTH // HEADS, rngs=nnx.Rngs(0))
    layer = layer_of(AttentionFn(fox, causal=True))

    @nnx.jit
    def run(layer, x):
        with layer.attention_fn.reading(x):
            return layer(x)

    q, k, v = (dense(X) for dense in (layer.query, layer.key, layer.value))
    exact = layer.out(attend(q, k, v, encoding=fox, x=X))
    for x in (2 * X, X):
        computed = run(layer, x)
    np.testing.assert_allclose(computed, exact, rtol=0, atol=1e-5)
    assert np.abs(exact - layer.out(attend(q, k, v, encoding=encoding_of()))).max() > 1e-3
    with pytest.raises(ConfigError, match="fox needs the input of the layer: pass x to attend"):
        layer(X)

    class Own(linen.Module):
        @linen.compact
        def __call__(self, x):
            fn = AttentionFn(fox, x=x, causal=True)
            return linen.MultiHeadDotProductAttention(HEADS, attention_fn=fn)(x)

    variables = Own().init(jax.random.key(0), X)
    assert Own().apply(variables, X).shape == X.shape


def test_an_optimizer_trains_the_encoding_of_a_layer():
    layer = layer_of(
        AttentionFn(encoding_of("cope(npos_max=4)"), implementation="blockwise", blocks=(4, 2, 4))
    )
    optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer):
        optimizer.update(
            layer, nnx.grad(lambda layer: jnp.sum(layer(X, is_causal=True) ** 2))(layer)
        )

    step(layer, optimizer)
    table = nnx.state(layer)["attention_fn"]["encoding"]["table"][...]
    assert table.shape == (4, WIDTH // HEADS) and jnp.abs(table).min() > 0, "the table starts at 0"


def test_options_dropout_and_type_reach_attend():
    q, k, v = jax.random.normal(jax.random.key(1), (3, BATCH, LENGTH, HEADS, WIDTH // HEADS))
    encoding, key = encoding_of("cope(npos_max=4)"), jax.random.key(2)
    given = {"dropout_rate": 0.5, "dropout_rng": key, "broadcast_dropout": False}
    out = AttentionFn(encoding, causal=True, window=3)(q, k, v, **given)
    exact = attend(q, k, v, encoding=encoding, window=3, dropout_rate=0.5, dropout_key=key)
    np.testing.assert_array_equal(out, exact)
    out = AttentionFn(encoding)(q, k, v, **given | {"deterministic": True})
    np.testing.assert_array_equal(out, attend(q, k, v, encoding=encoding, causal=False))
    assert AttentionFn(encoding)(q, k, v, dtype=jnp.bfloat16).dtype == jnp.bfloat16


UNSERVED = {
    "bias of some keys": ({"bias": jnp.zeros((1, 1, LENGTH, 1))}, "bias must have shape"),
    "precision": ({"precision": "highest"}, "does not support precision"),
    "weights": ({"module": object()}, r"does not support module \(sow_weights=True\)"),
    "product of queries and keys": (
        {"qk_attn_weights_einsum": jnp.einsum},
        "does not support qk_attn_weights_einsum",
    ),
    "product with values": (
        {"attn_weights_value_einsum": jnp.einsum},
        "does not support attn_weights_value_einsum",
    ),
    "one dropout for all": (
        {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)},
        "set broadcast_dropout=False",
    ),
    "dropout without a key": (
        {"dropout_rate": 0.1, "broadcast_dropout": False},
        "pass dropout_rng",
    ),
    "mask of heads": (
        {"mask": jnp.ones((BATCH, HEADS, LENGTH, LENGTH))},
        "where any axis may have size 1",
    ),
}


@pytest.mark.parametrize("given, message", UNSERVED.values(), ids=UNSERVED)
def test_what_attend_cannot_serve_is_one_clear_line(given, message):
    q = jnp.ones((BATCH, LENGTH, HEADS, WIDTH // HEADS))
    with pytest.raises(ConfigError, match=message) as error:
        AttentionFn(encoding_of())(q, q, q, **given)
    assert "\n" not in str(error.value)


def test_a_cache_of_flax_is_refused():
    layer = nnx.MultiHeadAttention(
        HEADS, WIDTH, attention_fn=AttentionFn(encoding_of("rope")), decode=True, rngs=nnx.Rngs(0)
    )
    layer.init_cache(X.shape)
    with pytest.raises(
        ConfigError, match=f"got 1 queries and {LENGTH} keys: to decode with a cache, use"
    ):
        layer(X[:, :1])


@pytest.mark.parametrize("name", ["dropout_rate", "dropout_key", "bias", "mask", "q_BLHK", "windo"])
def test_an_option_that_flax_passes_or_attend_lacks_is_refused(name):
    with pytest.raises(ConfigError, match=f"unknown argument of attend '{name}'"):
        AttentionFn(encoding_of("rope"), **{name: 0.1})


def test_nothing_that_flax_passes_is_unknown():
    """Linen drops what the signature does not name.

    Softmax is float32 anyway; layers do not pass the other two.
    """
    flax, accepted = (
        {name for function in functions for name in inspect.signature(function).parameters}
        for functions in (
            (linen.dot_product_attention, nnx.dot_product_attention),
            (AttentionFn.__call__,),
        )
    )
    assert flax - accepted == {"force_fp32_for_softmax", "promote_dtype", "einsum_dot_general"}


def test_the_name_of_an_encoding_is_not_an_encoding():
    message = r"^encoding must be an encoding of cope_jax\.encodings\.create, got 'cope'$"
    with pytest.raises(ConfigError, match=message):
        AttentionFn("cope")
