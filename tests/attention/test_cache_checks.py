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
        jax.random.normal(key, (BATCH, LENGTH, heads, WIDTH))
        for key, heads in zip(keys[:3], (HEADS, GROUPS, GROUPS), strict=True)
    )
    return {"q": q, "k": k, "v": v, "x": jax.random.normal(keys[3], (BATCH, LENGTH, HEADS * WIDTH))}


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
