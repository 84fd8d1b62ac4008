"""A bias, a scale and a soft cap of the content logits, against the oracle; and attention weights."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from cope_jax import encodings
from cope_jax.attention import (
    attend,
    attend_cached,
    attention_weights,
    create_cache,
    full_attention,
    prepare,
)
from cope_jax.attention.request import checked_execution
from cope_jax.errors import ConfigError
from tests.attention.problems import arrays_of, in_blocks, interpreted
from tests.encodings.cases import SIZES, build, parameters, rule_of
from tests.oracle.attention import attention as oracle_attention
from tests.oracle.differences import gradients as differences

LENGTH, KEYS = 5, 7
SEGMENTS = np.array([[0, 0, 1, 1, 1, 1, 1]], np.int32)
SEEN = np.random.default_rng(3).random((1, 1, LENGTH, KEYS)) < 0.8
MASKS = {
    "causal": {},
    "window": {"window": 3},
    "both sides": {"causal": False, "mask": SEEN},
    "documents": {"q_segment_ids": SEGMENTS[:, -LENGTH:], "k_segment_ids": SEGMENTS},
}
LOGITS = {"scale": 0.7, "logits_soft_cap": 1.5}
BIAS = np.random.default_rng(4).normal(size=(1, 1, 70, 70)).astype(np.float32)


def problem(seed=0, bias_shape=(1, SIZES.heads), batch=1):
    arrays = arrays_of(LENGTH, KEYS, seed, batch=batch)
    bias = np.random.default_rng(seed + 7).normal(size=(*bias_shape, LENGTH, KEYS))
    return {name: arrays[name] for name in "qkv"} | {"bias": bias}, arrays["dout"]


def results(attention, spec, arrays, dout, x=None, **options):
    """The output, and the gradients of queries, keys, values and the bias."""
    graphdef, state = build(spec)

    @jax.jit
    def run(arrays):
        def out(arrays):
            encoding = nnx.merge(graphdef, state)
            return attention(
                encoding,
                prepare(**_named(arrays), encoding=encoding, embedded=True, x=x, **options),
            )

        value, pull = jax.vjp(out, arrays)
        return {"out": value} | pull(dout)[0]

    return run(arrays)


def _named(arrays):
    return {
        {"q": "q_BLHK", "k": "k_BMGK", "v": "v_BMGK"}.get(name, name): x
        for name, x in arrays.items()
    }


def close(computed, exact, atol=1e-12):
    assert computed.keys() == exact.keys()
    for name, array in exact.items():
        np.testing.assert_allclose(computed[name], array, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("spec", "mask"),
    [
        pytest.param("none", "both sides", marks=pytest.mark.slow),
        ("alibi", "documents"),
        ("pope", "causal"),  # rotation doubles the width
        # Its gates read the content logits.
        pytest.param("cope(npos_max=3)", "causal", marks=pytest.mark.slow),
        ("cope(npos_max=3,gate=value)+rope", "window"),
    ],
)
def test_full_attention_is_the_oracle_in_value_and_gradients(spec, mask, x64):
    arrays, dout = problem()
    computed = results(full_attention, spec, arrays, dout, **MASKS[mask], **LOGITS)
    rule, options = rule_of(spec, parameters(build(spec)[1])), MASKS[mask]
    of_oracle = {"causal": options.get("causal", True), "window": options.get("window")}
    of_oracle |= {"mask": options["mask"][0, 0]} if "mask" in options else {}
    if mask == "documents":
        of_oracle |= {"q_segments": SEGMENTS[0, -LENGTH:], "k_segments": SEGMENTS[0]}

    def out(arrays):
        example = {name: arrays[name][0] for name in arrays}
        return oracle_attention(
            example["q"],
            example["k"],
            example["v"],
            rule,
            bias=example["bias"],
            scale=0.7,
            soft_cap=1.5,
            **of_oracle,
        )

    np.testing.assert_allclose(computed.pop("out")[0], out(arrays), rtol=0, atol=1e-12)
    exact = differences(lambda arrays: float((out(arrays) * dout[0]).sum()), arrays)
    close(computed, exact, 1e-8)


@pytest.mark.parametrize(
    ("spec", "mask", "shape"),
    [
        pytest.param("none", "both sides", (2, SIZES.heads), marks=pytest.mark.slow),
        pytest.param(
            "none", "window", (1, 1), marks=pytest.mark.slow
        ),  # one for all examples and heads
        ("cope(npos_max=3)+alibi", "causal", (2, SIZES.heads)),
        pytest.param("cope(npos_max=3)+alibi", "documents", (1, 1), marks=pytest.mark.slow),
        pytest.param(
            "cope_two_sided(npos_max=3)", "both sides", (1, SIZES.heads), marks=pytest.mark.slow
        ),
        pytest.param("stick_breaking(remainder=own)", "window", (2, 1), marks=pytest.mark.slow),
    ],
)
def test_blockwise_attention_is_full_attention(spec, mask, shape, x64):
    """Many blocks of queries and keys, and one block of keys; with dropout."""
    arrays, dout = problem(1, shape, batch=2)
    options = {**MASKS[mask], **LOGITS, "dropout_rate": 0.3, "dropout_key": jax.random.key(0)}
    exact = results(full_attention, spec, arrays, dout, **options)
    for blocks in ((2, 3, 4), (2, KEYS, KEYS)):
        close(results(in_blocks(blocks), spec, arrays, dout, **options), exact)


def test_kernels_for_tpus_scale_and_cap(x64):
    spec = "cope(npos_max=3)"
    arrays, dout = problem(2)
    del arrays["bias"]
    exact = results(full_attention, spec, arrays, dout, **LOGITS)
    close(results(interpreted((3, 2, 4)), spec, arrays, dout, **LOGITS), exact)


def test_a_ring_scales_and_caps_but_takes_no_bias(x64):
    graphdef, state = build("cope(npos_max=3)")
    arrays = arrays_of(9, 9, batch=1)
    q, k, v = (jnp.asarray(arrays[name]) for name in "qkv")
    encoding = nnx.merge(graphdef, state)
    exact = jax.jit(functools.partial(attend, encoding=encoding, implementation="full", **LOGITS))(
        q, k, v
    )
    mesh = jax.make_mesh(
        (2,), ("sequence",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    with jax.set_mesh(mesh):
        options = {"encoding": encoding, "sequence_axis": "sequence", **LOGITS}
        computed = jax.jit(functools.partial(attend, **options))(q, k, v)
        np.testing.assert_allclose(computed, exact, rtol=0, atol=1e-12)
        with pytest.raises(
            ConfigError, match="because it takes no bias: choose 'full' or 'blockwise'"
        ):
            attend(q, k, v, bias=jnp.zeros((1, 1, 9, 9)), **options)


@pytest.mark.parametrize("spec", ["cope(npos_max=3)", pytest.param("rope", marks=pytest.mark.slow)])
def test_decoding_is_the_last_rows(spec, x64):
    encoding = nnx.merge(*build(spec))
    arrays = arrays_of(KEYS, KEYS, batch=1)
    q, k, v = (jnp.asarray(arrays[name]) for name in "qkv")
    bias = np.random.default_rng(0).normal(size=(1, SIZES.heads, KEYS, KEYS))

    @jax.jit
    def both(q, k, v):
        exact = attend(q, k, v, encoding=encoding, bias=bias, **LOGITS)
        cache = create_cache(encoding, batch=1, capacity=KEYS + 2, dtype=jnp.float64)
        cache = cache.enter(np.arange(KEYS, dtype=np.int32)[None])
        cache = cache.append(q, k, v, encoding=encoding)
        slots = np.pad(bias[:, :, -2:], [(0, 0), (0, 0), (0, 0), (0, 2)])
        out = attend_cached(q[:, -2:], cache, encoding=encoding, bias=slots, **LOGITS)
        return out, exact[:, -2:]

    np.testing.assert_allclose(*both(q, k, v), rtol=0, atol=1e-12)


# One that reads no content logits, and some that do in ways of their own.
REFUSED = {"dape", "fox", "path", "rope", "selective", "stick_breaking"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in REFUSED else pytest.mark.slow)
        for name in encodings.names()
    ],
)
def test_an_encoding_that_reads_no_content_logits_refuses_what_would_change_them(name, x64):
    encoding = nnx.merge(*build(name))
    arrays = arrays_of(KEYS, KEYS, batch=1)
    q, k, v, x = (jnp.asarray(arrays[of][:1]) for of in "qkvx")
    arguments = {"encoding": encoding, "x": x, "embedded": True, "implementation": "full"}
    bias = np.random.default_rng(0).normal(size=(1, 1, KEYS, KEYS))
    reads = encoding.traits.reads_logits
    plain = jax.jit(functools.partial(attend, q, k, v, **arguments))() if reads else None
    for option in ({"bias": bias}, {"scale": 0.7}, {"logits_soft_cap": 1.5}):
        attend_with = functools.partial(attend, q, k, v, **arguments, **option)
        if not reads:
            with pytest.raises(ConfigError, match=f"so {next(iter(option))} would do nothing"):
                jax.eval_shape(attend_with)
        else:
            changed = np.abs(jax.jit(attend_with)() - plain).max()
            assert changed > 1e-4, f"{name} ignores {option}"


@pytest.mark.parametrize("spec", ["cope(npos_max=3)", "stick_breaking"])
def test_weights_multiply_the_values(spec, x64):
    encoding = nnx.merge(*build(spec))
    arrays, _ = problem()
    q, k, v, bias = (jnp.asarray(x) for x in arrays.values())
    options = {"encoding": encoding, "bias": bias, "window": 4, **LOGITS}
    weights, exact = jax.jit(
        lambda *qkv: (attention_weights(*qkv, **options), attend(*qkv, **options))
    )(q, k, v)
    of_heads = np.repeat(v, SIZES.heads // SIZES.kv_heads, axis=2)
    out = np.einsum("BHLM,BMHK->BLHK", weights, of_heads)
    np.testing.assert_allclose(out, exact, atol=1e-12)
    assert weights.shape == (1, SIZES.heads, LENGTH, KEYS) and float(weights.min()) == 0


MISTAKES = {
    "of some keys": (
        {"bias": np.zeros((1, 1, 6, 5))},
        "bias must have shape [2, 4, 6, 6], where the first two axes",
    ),
    "without heads": ({"bias": np.zeros((2, 6, 6))}, "may have size 1, got [2, 6, 6]"),
    "a mask": (
        {"bias": np.ones((1, 1, 6, 6), bool)},
        "must be floating-point numbers, got bool: to hide keys, give",
    ),
    "nothing": ({"scale": 0.0}, "scale must be a number above 0, got 0.0"),
    "text": (
        {"logits_soft_cap": "50"},
        "logits_soft_cap must be float or None, got '50' of type str",
    ),
    "input of queries": (
        {"x": np.zeros((2, 5, 8))},
        "x must be the input of the layer for all keys, [2, 6, D], got",
    ),
}


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_clear_line(change, message):
    encoding = nnx.merge(*build("none", dtype=np.float32))
    q, k, v = (
        jnp.ones((2, 6, heads, 4)) for heads in (SIZES.heads, SIZES.kv_heads, SIZES.kv_heads)
    )
    with pytest.raises(ConfigError) as error:
        attend(q, k, v, encoding=encoding, **change)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_attend_and_prepare_take_the_same_arguments():
    def defaults(function):
        parameters = inspect.signature(function).parameters.values()
        return {x.name: x.default for x in parameters if x.kind is not x.VAR_KEYWORD}

    taken = defaults(prepare) | defaults(checked_execution)
    assert taken.pop("features") is None  # of flex_attention
    assert defaults(attend) == taken
