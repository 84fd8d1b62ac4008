"""Arguments of attention that once were tracebacks, or silently meant something else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import encodings
from cope_jax.attention import attend, attend_cached, attention_weights, create_cache
from cope_jax.encodings import Carry, Composed
from cope_jax.errors import ConfigError


def encoding_of(name="rope", num_heads=2):
    return encodings.create(name, num_heads=num_heads, head_dim=4, rngs=nnx.Rngs(0))


def heads(length=6):
    return jax.random.normal(jax.random.key(0), (1, length, 2, 4), jnp.float32)


def refused(message, call, *given, **options):
    with pytest.raises(ConfigError) as error:
        call(*given, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", ["segment_ids", "positions"])
def test_integers_of_64_bits_are_refused_in_arrays_of_jax_too(name, jitted):
    """An array that a compiled program closes over is known while it is traced."""
    with jax.enable_x64():
        numbers, q = jnp.array([[0, 0, 0, 2**32, 2**32, 2**32]], jnp.int64), heads()
        given = {f"q_{name}": numbers, f"k_{name}": numbers}

        def call(q):
            return attend(q, q, q, encoding=encoding_of(), **given)

        call = jax.jit(call) if jitted else call
        refused(f"q_{name} must fit into 32 bits, got 0 to 4294967296", call, q)


def test_unsigned_integers_beyond_int32_are_refused_without_64_bits():
    numbers, q = jnp.full((1, 6), 4294967295, jnp.uint32), heads()
    message = "q_positions must fit into 32 bits, got 4294967295 to 4294967295"
    refused(message, attend, q, q, q, encoding=encoding_of(), q_positions=numbers)


@pytest.mark.parametrize("implementation", ["full", "blockwise"])
@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**62], ids=str)
def test_a_window_beyond_int32_hides_nothing(window, implementation):
    q, options = heads(), {"encoding": encoding_of(), "implementation": implementation}
    expected = attend(q, q, q, **options)
    np.testing.assert_array_equal(attend(q, q, q, window=window, **options), expected)


def test_a_window_beyond_int32_hides_nothing_in_a_cache():
    encoding, q = encoding_of(), heads()
    cache = create_cache(encoding, batch=1, capacity=8).enter(jnp.arange(6)[None])
    cache = cache.append(q, q, q, encoding=encoding)
    expected = attend_cached(q, cache, encoding=encoding)
    computed = attend_cached(q, cache, encoding=encoding, window=2**31)
    np.testing.assert_array_equal(computed, expected)


def test_keys_without_heads_are_refused():
    q = heads()
    message = "attend needs at least one head, but got q [1, 6, 2, 4], k [1, 6, 0, 4], v [1, 6, 0, "
    refused(message, attend, q, q[:, :, :0], q[:, :, :0], encoding=encoding_of())


@pytest.mark.parametrize("name, hint", [("foo", "choose from"), ("windo", "did you mean 'window'")])
def test_weights_do_not_take_an_unknown_argument(name, hint):
    q, message = heads(), f"unknown argument of attend '{name}': {hint}"
    refused(message, attention_weights, q, q, q, encoding=encoding_of(), **{name: 1})
    blocks = {"blocks": (2, 2, 2), "implementation": "full"}
    assert attention_weights(q, q, q, encoding=encoding_of(), **blocks).shape == (1, 2, 6, 6)


TWICE = {
    "sequence and batch": (
        {"sequence_axis": "sequence", "batch_axes": ("sequence",)},
        "the axis 'sequence' of the mesh is named twice, in batch_axes and sequence_axis: name each",
    ),
    "batch": (
        {"batch_axes": ("data", "data")},
        "the axis 'data' of the mesh is named twice, in batch_axes: name each axis once",
    ),
    "heads and batch": (
        {"batch_axes": ("data", "tensor"), "head_axis": "tensor"},
        "the axis 'tensor' of the mesh is named twice, in batch_axes and head_axis",
    ),
    "heads and sequence": (
        {"sequence_axis": "tensor", "head_axis": "tensor"},
        "the axis 'tensor' of the mesh is named twice, in sequence_axis and head_axis",
    ),
}


@pytest.mark.parametrize("given, message", TWICE.values(), ids=TWICE)
def test_an_axis_of_the_mesh_splits_one_axis(given, message):
    q = heads()
    refused(message, attend, q, q, q, encoding=encoding_of(), **given)


@pytest.mark.parametrize("name", ["rope", "cope", "learned_sink"])
def test_queries_without_any_key_have_no_weights(name):
    q = heads()
    weights = attention_weights(q, q[:, :0], q[:, :0], encoding=encoding_of(name))
    assert weights.shape == (1, 2, 6, 0) and weights.dtype == jnp.float32


class Own(encodings.Encoding):
    """An encoding with a carry, one of whose hooks tests replace."""

    def initial_carry(self, q_BHLK, q_features):
        return Carry(sums=jnp.zeros(q_BHLK.shape[:3]))


HOOKS = {
    "features": (lambda self, tokens, state: tokens.k, "must return the features and the state, a"),
    "score": (
        lambda self, pairs, carry: (pairs.logits, Carry()),
        "of Own must return a carry like the one that it gets, Carry(sums=float32[1, 2, 6], constants=(), state=()), "
        "got Carry(sums=(), constants=(), state=())",
    ),
    "rotate": (
        lambda self, x, features, positions: x[:, 1:],
        "must keep the first three axes of [",
    ),
    "rotate_keys": (
        lambda self, x, features, positions: x[..., 0],
        "must keep the first three axes",
    ),
    "rotate_values": (
        lambda self, x, features, positions: x[..., 1:],
        "must keep all axes of [1, 6",
    ),
    "rotate_back": (
        lambda self, x, features, positions: x[..., :1],
        "must keep all axes of [1, 6, ",
    ),
    "sink": (lambda self, carry: jnp.zeros(()), "must return logits [1, 2, 6], got []"),
}


@pytest.mark.parametrize("implementation", ["full", "blockwise"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_returns_something_else_is_one_line(hook, implementation, monkeypatch):
    replacement, message = HOOKS[hook]
    encoding = Own(Own.Config(), encodings.AttentionShape(2, 4), rngs=nnx.Rngs(0))
    monkeypatch.setattr(Own, hook, replacement)
    q = heads()
    refused(message, attend, q, q, q, encoding=encoding, implementation=implementation)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_returns_something_else_is_one_line_with_a_cache_too(hook, monkeypatch):
    replacement, message = HOOKS[hook]
    encoding = Own(Own.Config(), encodings.AttentionShape(2, 4), rngs=nnx.Rngs(0))
    q = heads()
    cache = create_cache(encoding, batch=1, capacity=6).enter(jnp.arange(6)[None])
    monkeypatch.setattr(Own, hook, replacement)

    def decode():
        attend_cached(q, cache.append(q, q, q, encoding=encoding), encoding=encoding)

    refused(message, decode)


def test_traits_are_traits(monkeypatch):
    monkeypatch.setattr(Own, "traits", {"splits_keys": False})
    with pytest.raises(
        ConfigError, match=r"Own\.traits must be Traits, got \{'splits_keys': False"
    ):
        Own(Own.Config(), encodings.AttentionShape(2, 4), rngs=nnx.Rngs(0))


def test_features_that_are_no_pair_are_one_line_in_a_composition_too(monkeypatch):
    """Of two examples, an array would pass for a pair."""
    monkeypatch.setattr(Own, "features", lambda self, tokens, state: tokens.k)
    shape = encodings.AttentionShape(2, 4)
    parts = {"own": Own(Own.Config(), shape, rngs=nnx.Rngs(0)), "rope": encoding_of()}
    q = jnp.concatenate([heads(), heads()])
    refused("features of Own must return the", attend, q, q, q, encoding=Composed(parts, shape))
