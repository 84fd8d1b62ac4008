"""A cache refuses in one line all that does not fit it, and never silently gives other numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import encodings
from cope_jax.attention import attend_cached, create_cache
from cope_jax.errors import ConfigError

BATCH, LENGTH = 2, 5
HEADS, GROUPS, WIDTH = 4, 2, 4
PLACES = np.arange(LENGTH, dtype=np.int32)[None]


def encoding_of(name="fox"):
    sizes = {"num_heads": HEADS, "num_kv_heads": GROUPS, "head_dim": WIDTH}
    return encodings.create(name, **sizes, rngs=nnx.Rngs(0))


def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (
        jax.random.normal(key, (BATCH, LENGTH, heads, WIDTH), jnp.float32)
        for key, heads in zip(keys[:3], (HEADS, GROUPS, GROUPS), strict=True)
    )
    x = jax.random.normal(keys[3], (BATCH, LENGTH, HEADS * WIDTH), jnp.float32)
    return {"q": q, "k": k, "v": v, "x": x}


def append(cache, encoding, layer=None, **changed):
    given = arrays() | changed
    q, k, v = given["q"], given["k"], given["v"]
    return cache.append(q, k, v, encoding=encoding, x_BLD=given["x"], layer=layer)


def entered(encoding, **options):
    return create_cache(encoding, batch=BATCH, capacity=8, **options).enter(PLACES)


def refused(message, call, *given, **options):
    with pytest.raises(ConfigError) as error:
        call(*given, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


OF_LAYER = "x_BLD must be the input of the layer for all these tokens, [2, 5, D], got "
QUERIES = "queries must be float32[2, 5, 4, 4] to fit the cache, got float32"
APPENDED = {
    "input of one example": ("x", lambda x: x[:1], f"{OF_LAYER}[1, 5, 16]"),
    "input of one token": ("x", lambda x: x[:, -1:], f"{OF_LAYER}[2, 1, 16]"),
    "input of more tokens": (
        "x",
        lambda x: jnp.concatenate([x, x[:, :2]], axis=1),
        f"{OF_LAYER}[2, 7, 16]",
    ),
    "one query": ("q", lambda q: q[:1, :2, :1], f"{QUERIES}[1, 2, 1, 4]"),
    "queries of other tokens": ("q", lambda q: q[:, 1:], f"{QUERIES}[2, 4, 4, 4]"),
    "list of keys": ("k", lambda k: k.tolist(), "keys must be an array, got [[[["),
    "values of one axis": (
        "v",
        lambda v: v[0, 0, 0],
        "values must have 4 axes, [B, L, heads, width], got [4]",
    ),
    "whole queries": (
        "q",
        lambda q: q.astype(jnp.int32),
        "queries must be floating-point numbers, got int32: convert them",
    ),
}


@pytest.mark.parametrize("name, change, message", APPENDED.values(), ids=APPENDED)
def test_arrays_of_other_tokens_are_not_appended(name, change, message):
    encoding = encoding_of()
    changed = {name: change(arrays()[name])}
    refused(message, append, entered(encoding), encoding, **changed)


def test_what_is_attended_from_is_an_array_of_queries():
    encoding = encoding_of()
    cache, q = append(entered(encoding), encoding), arrays()["q"]
    assert attend_cached(q, cache, encoding=encoding).shape == q.shape
    for given, message in [
        (q.tolist(), "queries must be an array, got [[[["),
        (q[0], "queries must have 4 axes"),
        (q.astype(jnp.int32), "queries must be floating-point numbers, got int32"),
    ]:
        refused(message, attend_cached, given, cache, encoding=encoding)


@pytest.mark.parametrize(
    "layer",
    [
        5,
        -1,
        np.int64(5),
        np.array(3),
        jnp.array(5),
        jnp.array(-1),
        True,
        np.True_,
        jnp.array(True),
        1.0,
        "0",
    ],
    ids=repr,
)
def test_a_layer_that_a_cache_lacks_is_refused_in_any_form(layer):
    encoding = encoding_of("rope")
    cache, q = entered(encoding, num_layers=3), arrays()["q"]
    message = " does not fit a cache of 3 layers: give a layer from 0 to 2"
    refused(message, append, cache, encoding, layer=layer)
    refused(message, attend_cached, q, cache, encoding=encoding, layer=layer)
    refused(message, cache.windows_of, layer)
    refused(message, cache.with_windows, {}, layer)


@pytest.mark.parametrize("layer", [np.int64(1), np.array(1), jnp.array(1), jnp.uint8(1)], ids=repr)
def test_a_layer_may_be_an_integer_of_any_library(layer):
    encoding = encoding_of("rope")
    cache = append(entered(encoding, num_layers=3), encoding, layer=layer)
    assert [bool(rows.any()) for rows in cache.entries.k] == [False, True, False]
    out = attend_cached(arrays()["q"], cache, encoding=encoding, layer=layer)
    alone = append(entered(encoding), encoding)
    expected = attend_cached(arrays()["q"], alone, encoding=encoding)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layer", [3, -1, 2**32 + 1], ids=str)
def test_a_traced_layer_that_a_cache_lacks_is_never_silent(layer):
    """Its index is not known before the program runs, so the numbers are NaN."""
    encoding = encoding_of("rope")
    full = append(entered(encoding, num_layers=3), encoding, layer=2)
    q, wide = arrays()["q"], layer >= 2**31

    @jax.jit
    def run(cache, layer):
        appended = append(cache, encoding, layer=layer)
        return attend_cached(q, cache, encoding=encoding, layer=layer), appended.entries.v

    with jax.enable_x64(wide):
        out, values = run(full, np.int64(layer) if wide else np.int32(layer))
    assert np.isnan(out).all() and np.isnan(values).any()
    assert np.isfinite(attend_cached(q, full, encoding=encoding, layer=2)).all()


@pytest.mark.parametrize("layer", [jnp.float32(1), jnp.zeros(1, jnp.int32), jnp.array(True)])
def test_a_traced_layer_is_one_integer(layer):
    encoding = encoding_of("rope")
    cache = entered(encoding, num_layers=3)
    run = jax.jit(lambda layer: append(cache, encoding, layer=layer))
    refused("does not fit a cache of 3 layers", run, layer)


WIDE = 2**32
ENTERED = {
    "list": ([[0, 1, 2]], None, None),
    "lists": ([[0, 1, 2]], [[1, 1, 2]], None),
    "one axis": (jnp.arange(3), None, "positions_BL must have shape [2, 3] or [1, 3], got [3]"),
    "a number": (3, None, "positions_BL must be an array, got 3 of type int"),
    "a scalar": (jnp.array(3), None, "positions_BL must have shape [2, 1] or [1, 1], got []"),
    "segments of 64 bits": (
        PLACES,
        np.where(PLACES < 3, 0, WIDE),
        "segment_ids_BL must fit into 32 bits, got 0 to 4294967296",
    ),
    "fractions as segments": (
        PLACES,
        PLACES / 2,
        "segment_ids_BL must be integers, got float64",
    ),
    "segments of one axis": (
        PLACES,
        PLACES[0],
        "segment_ids_BL must have shape [2, 5] or [1, 5], got [5]",
    ),
    "a segment for each example": (
        PLACES,
        np.zeros((BATCH, 1), np.int32),
        "segment_ids_BL must have shape [2, 5] or [1, 5], got [2, 1]",
    ),
    "segments of other tokens": (
        PLACES,
        PLACES[:, :3],
        "segment_ids_BL must have shape [2, 5] or [1, 5], got [1, 3]",
    ),
}


@pytest.mark.parametrize("positions, segment_ids, message", ENTERED.values(), ids=ENTERED)
def test_positions_and_segments_that_enter_fit_the_cache(positions, segment_ids, message):
    cache = create_cache(encoding_of("rope"), batch=BATCH, capacity=8)
    if message is None:
        assert cache.enter(positions, segment_ids).filled == 3
    else:
        refused(message, cache.enter, positions, segment_ids)


CREATED = {
    "name of an encoding": (
        {"encoding": "fox"},
        "encoding must be an encoding of cope_jax.encodings.create, got 'fox'",
    ),
    "half a slot": ({"capacity": 3.5}, "cache.capacity must be int, got 3.5 of type float"),
    "batch of text": ({"batch": "2"}, "cache.batch must be int, got '2' of type str"),
    "a switch as layers": ({"num_layers": True}, "cache.num_layers must be int or None, got True"),
    "unknown type": (
        {"dtype": "float33"},
        "cache.dtype must be a floating-point type, such as 'float32', got 'float33'",
    ),
    "whole numbers": (
        {"dtype": jnp.int32},
        "cache.dtype must be a floating-point type, such as 'float32', got int32",
    ),
    "no type": ({"dtype": None}, "cache.dtype must be a floating-point type"),
}


@pytest.mark.parametrize("change, message", CREATED.values(), ids=CREATED)
def test_a_cache_that_cannot_be_is_one_clear_line(change, message):
    given = {"encoding": encoding_of(), "batch": BATCH, "capacity": 8} | change
    refused(message, create_cache, given.pop("encoding"), **given)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype("float16")], ids=str)
def test_the_type_of_a_cache_has_any_form(dtype):
    cache = create_cache(encoding_of(), batch=np.int64(1), capacity=jnp.array(2), dtype=dtype)
    assert cache.entries.k.dtype == jnp.dtype(dtype) and cache.capacity == 2


def test_the_name_of_an_encoding_is_not_an_encoding():
    cache, q = entered(encoding_of()), arrays()["q"]
    message = "encoding must be an encoding of cope_jax.encodings.create, got 'fox'"
    refused(message, append, cache, "fox")
    refused(message, attend_cached, q, cache, encoding="fox")


def test_more_queries_than_slots_are_one_clear_line_in_a_program():
    encoding, q = encoding_of(), jnp.zeros((BATCH, 9, HEADS, WIDTH))
    run = jax.jit(lambda cache: attend_cached(q, cache, encoding=encoding))
    message = "a cache of capacity 8 cannot hold 9 tokens: create a larger cache"
    refused(message, run, entered(encoding))
